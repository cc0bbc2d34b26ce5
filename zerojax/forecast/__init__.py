"""Forecasts for GPUs that the machine does not have: memory, communication and a bound on time.

Nothing is run.
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
