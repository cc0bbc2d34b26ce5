"""Ramp of the batch size: early steps have fewer rows."""
