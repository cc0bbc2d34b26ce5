"""Pipeline schedules as tables: building, checking, simulating and drawing them, and converting
them to the executor's arrays.

The package imports no JAX.
"""

from zerojax.plan.schedules.known_schedules import (
    SCHEDULES,
    forward_schedule,
    make_schedule,
    read_csv,
    write_csv,
)
from zerojax.plan.schedules.lowering import ExecutorTable, TickRun, lower
from zerojax.plan.schedules.schedule_table import (
    Operation,
    Schedule,
    ScheduleError,
    check_schedule,
    count_in_flight,
)
from zerojax.plan.schedules.simulation import Costs, Simulation, simulate

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
