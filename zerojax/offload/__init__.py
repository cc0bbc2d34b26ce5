"""State outside device memory: how it is cut into slices, moved and updated where it lies.

Knows layouts, shards and memory kinds; never decides what lies where, and never trains a step.
"""
