"""Measures a start: zerojax's phases, and JAX's tracing and compilation in each."""

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
"""{event of `jax.monitoring`: kind of work that its seconds count for}."""


@dataclasses.dataclass
class Phase:
    """Measured phase of the start of a run.

    Attributes:
      name: such as "planning".
      seconds: total, without the phases nested in it.
      by_kind: {"traced", "lowered", "compiled" or "read": its seconds}. A program that is read from
        JAX's cache also counts as compiled.
    """

    name: str
    seconds: float = 0.0
    by_kind: dict[str, float] = dataclasses.field(default_factory=dict)


class StartClock:
    """Clock of a run's start, from the moment at which this process began.

    Attributes:
      phases: in the order in which they began. The first is "imports", the last one "rest".
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
        """Counts the seconds of a block for the phase `name`."""
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
    """Measures the phases of a start: the blocks inside it that `phase` names."""
    global _running  # functions that contain phases do not get the clock
    _running = StartClock()
    try:
        yield _running
    finally:
        _running = None


def phase(name: str) -> contextlib.AbstractContextManager[None]:
    """Names the phase of a start that a block is, for `measure_start`; does nothing outside
    of it."""
    return contextlib.nullcontext() if _running is None else _running.during(name)


def _seconds_since_this_process_began() -> float:
    """Returns the age of this process in seconds, 0 if the system does not provide it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        up = float(Path("/proc/uptime").read_text().split()[0])
        return max(0.0, up - int(ticks) / os.sysconf("SC_CLK_TCK"))
    return 0.0
