"""Forecasts the memory, communication and time of a training step on GPUs you do not have, and
explains out-of-memory errors and slow steps.

Forecasts run nothing on a GPU: they compile the step or use formulas.
"""

from zerojax.forecasting.compiled_step import Forecast, forecast
from zerojax.forecasting.forecast_numbers import (
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
