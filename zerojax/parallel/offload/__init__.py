"""Keeps training state in host memory or files; it is moved and updated in place, slice by
slice.
"""
