"""Runs a pipeline pass: any schedule table in one compiled program, with ZeRO.

The schedules come from `zerojax.pipeline_schedules`.
"""

from zerojax.parallel.pipeline.passes import build_forward, build_gradients

__all__ = ["build_forward", "build_gradients"]
