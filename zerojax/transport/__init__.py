"""Sends parameters and gradients between devices: gathers, reductions, sums of equal bits."""
