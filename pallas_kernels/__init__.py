"""Pallas kernels for training, each beside the plain reference it is tested against.

The package does not import zerojax.
"""
