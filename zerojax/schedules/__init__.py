"""Pipeline schedules as tables: known ones, your own from a file, checks, simulation, drawings.

The package imports no JAX.
"""

from zerojax.schedules.known_schedules import (
    SCHEDULES,
    forward_schedule,
    make_schedule,
    read_csv,
    write_csv,
)
from zerojax.schedules.lowering import ExecutorTable, TickRun, lower
from zerojax.schedules.schedule_table import (
    Operation,
    Schedule,
    ScheduleError,
    check_schedule,
    count_in_flight,
)
from zerojax.schedules.simulation import Costs, Simulation, simulate

__all__ = [
    "SCHEDULES",
    "Costs",
    "ExecutorTable",
    "Operation",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "TickRun",
    "check_schedule",
    "count_in_flight",
    "forward_schedule",
    "lower",
    "make_schedule",
    "read_csv",
    "simulate",
    "write_csv",
]
