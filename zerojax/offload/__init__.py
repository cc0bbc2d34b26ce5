"""State and activations in host memory or files: which slices, and their way to the device.

State is moved and updated in place, slice by slice.
"""
