"""What an optimized program does, read from its text: traffic, overlap, memory.

Knows the text that XLA prints; never JAX, models or plans.
"""
