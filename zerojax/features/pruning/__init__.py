"""Pruning of weights by their magnitude."""
