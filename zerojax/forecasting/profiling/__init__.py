"""Profiles a training step: time and FLOPs by operation and by parameter, from a profiler trace and
the step's program."""

from zerojax.forecasting.profiling.parameter_flops import ParameterFlops, flops_by_parameter
from zerojax.forecasting.profiling.step_profile import (
    OpTime,
    StepProfile,
    draw,
    newest_trace,
    profile_dict,
    read_trace,
    with_programs,
)

__all__ = [
    "OpTime",
    "ParameterFlops",
    "StepProfile",
    "draw",
    "flops_by_parameter",
    "newest_trace",
    "profile_dict",
    "read_trace",
    "with_programs",
]
