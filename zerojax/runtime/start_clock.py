"""Measures how long the start of a run takes: its phases, and JAX's tracing and compilation in each
phase."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

KINDS = {
    "/jax/core/compile/jaxpr_trace_duration": "traced",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowered",
    "/jax/core/compile/backend_compile_duration": "compiled",
    "/jax/compilation_cache/cache_retrieval_time_sec": "read",
}
"""{event of `jax.monitoring`: kind of work to which its seconds are added}."""


@dataclasses.dataclass
class Phase:
    """A phase of the start of a run, with its measured seconds.

    Attributes:
      name: name of the phase, such as "planning".
      seconds: seconds of the phase, without the phases nested in it.
      by_kind: {"traced", "lowered", "compiled" or "read": seconds of this kind of work}. A program
        that is read from JAX's cache also counts as compiled.
    """

    name: str
    seconds: float = 0.0
    by_kind: dict[str, float] = dataclasses.field(default_factory=dict)


class StartClock:
    """Clock of a run's start; it counts from the moment when this process began.

    Attributes:
      phases: phases in the order in which they began, first "imports". `stop` adds "rest", the time
        outside of them.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.phases: list[Phase] = [Phase("imports", _seconds_since_this_process_began())]
        self._rest = Phase("rest")
        self._stack = [self._rest]
        self._since = clock()
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event: str, duration_secs: float, **_: object) -> None:
        kind = KINDS.get(event)
        if kind is not None:
            by_kind = self._stack[-1].by_kind
            by_kind[kind] = by_kind.get(kind, 0.0) + duration_secs

    def _count(self) -> None:
        now = self._clock()
        self._stack[-1].seconds += now - self._since
        self._since = now

    @contextlib.contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Adds the duration of a `with` block to the phase `name`."""
        self._count()
        phase = next((one for one in self.phases if one.name == name), None)
        if phase is None:
            self.phases.append(phase := Phase(name))
        self._stack.append(phase)
        try:
            yield
        finally:
            self._count()
            self._stack.pop()

    def stop(self) -> list[Phase]:
        """Stops the clock; returns all phases of the start, the phase "rest" last."""
        self._count()
        return [*self.phases, self._rest]


_running: StartClock | None = None


@contextlib.contextmanager
def measure_start() -> Iterator[StartClock]:
    """Measures the phases of a start: the `with phase(...)` blocks inside this `with` block."""
    global _running  # functions that contain phases do not get the clock as an argument
    _running = StartClock()
    try:
        yield _running
    finally:
        _running = None


def phase(name: str) -> contextlib.AbstractContextManager[None]:
    """Marks a `with` block as a phase of the start inside `measure_start`; has no effect outside
    of it."""
    return contextlib.nullcontext() if _running is None else _running.during(name)


def _seconds_since_this_process_began() -> float:
    """Returns the age of this process in seconds, 0 if the system does not provide it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        up = float(Path("/proc/uptime").read_text().split()[0])
        return max(0.0, up - int(ticks) / os.sysconf("SC_CLK_TCK"))
    return 0.0
