"""Forecasts of memory, communication and time on absent GPUs; causes of failed and slow steps.

Absent GPUs are GPUs that this machine does not have. Forecasts run nothing on a GPU: they compile
the step, or use formulas.
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
