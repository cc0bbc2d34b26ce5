"""Fused arithmetic for training: each kernel beside the plain reference it is compared with.

Knows arrays and the accelerator's programming model; never imports zerojax.
"""
