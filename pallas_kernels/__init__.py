"""Pallas kernels for training, each with a plain JAX reference that it is tested against.

A "leaf" is one array of a parameter tree. The package does not import zerojax.
"""
