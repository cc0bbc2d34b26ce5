"""Runs a pipeline pass: any schedule table in one compiled program, with ZeRO.

<<<<<<< HEAD
Source of the schedules: `zerojax.pipeline_schedules`.
=======
The schedules come from `zerojax.schedules`.
>>>>>>> w3
"""

from zerojax.parallel.pipeline.passes import build_forward, build_gradients

__all__ = ["build_forward", "build_gradients"]
