"""Memory, traffic and time of a step on GPUs you do not have; causes of failed and slow steps.

Nothing is run.
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
