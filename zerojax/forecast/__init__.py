"""What a step will need on GPUs that are not here: memory, traffic, and time at best.

Knows plans and compiled programs; never arrays. Nothing is run.
"""

from zerojax.forecast.forecast import Forecast, make_forecast
from zerojax.forecast.result import (
    COMPILED,
    FORMULA,
    Estimate,
    Memory,
    RoleBytes,
    Traffic,
    TrafficRow,
    Verdict,
)

__all__ = [
    "COMPILED",
    "FORMULA",
    "Estimate",
    "Forecast",
    "Memory",
    "RoleBytes",
    "Traffic",
    "TrafficRow",
    "Verdict",
    "make_forecast",
]
