"""Optimizers that send signs of the momentum (1-bit Adam)."""
