"""Keeps state outside device memory, in slices that are moved and updated in place."""
