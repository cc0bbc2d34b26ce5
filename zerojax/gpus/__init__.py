"""What is published about each kind of GPU, and how the compiler is told of it.

Knows numbers and their sources; never a model, and never JAX's devices.
"""
