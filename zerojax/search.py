"""Which plan is the cheapest that fits. Compiles plans; never runs one."""
