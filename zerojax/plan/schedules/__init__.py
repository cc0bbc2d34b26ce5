"""Pipeline schedules as tables: built, checked, simulated, drawn and lowered.

The package imports no JAX.
"""

from zerojax.plan.schedules.catalog import SCHEDULES, forward_schedule, make_schedule
from zerojax.plan.schedules.checks import check_schedule, count_in_flight
from zerojax.plan.schedules.files import read_csv, write_csv
from zerojax.plan.schedules.lowering import ExecutorTable, Run, lower
from zerojax.plan.schedules.simulation import Costs, Simulation, simulate
from zerojax.plan.schedules.table import Operation, Schedule, ScheduleError

__all__ = [
    "SCHEDULES",
    "Costs",
    "ExecutorTable",
    "Operation",
    "Run",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "check_schedule",
    "count_in_flight",
    "forward_schedule",
    "lower",
    "make_schedule",
    "read_csv",
    "simulate",
    "write_csv",
]
