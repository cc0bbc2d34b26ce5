"""Forecasts for GPUs that the machine does not have: memory, communication and a bound on time.

Nothing is run.
"""

from zerojax.forecasting.compiled_step import Forecast, forecast
from zerojax.forecasting.result import (
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
    "forecast",
]
