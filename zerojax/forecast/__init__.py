"""What a step will need on GPUs that are not here: memory, traffic, and time at best.

Knows plans and compiled programs; never arrays. Nothing is run.
"""
