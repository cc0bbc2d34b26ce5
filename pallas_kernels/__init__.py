"""Fused arithmetic for training, usable without zerojax; holds no kernel yet.

Knows arrays and the accelerator's programming model; never imports zerojax.
"""
