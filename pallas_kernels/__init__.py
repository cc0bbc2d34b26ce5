"""Pallas kernels for training, each with the plain reference that it is tested against.

The package does not import zerojax.
"""
