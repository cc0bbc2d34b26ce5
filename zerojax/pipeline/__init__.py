"""Pipelines: how layers become stages, their costs, and their passes in one program.

The schedules come from `zerojax.schedules`.
"""
