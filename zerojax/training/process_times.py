"""Measures each process's step times, and gathers them without blocking the training loop."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import weakref
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.training.metrics.stragglers import (
    DATA,
    EVAL,
    HOST,
    SAVE,
    STEP,
    ProcessTimes,
    Stopwatch,
    difference,
)

_AXIS = "device"


class LoopClock:
    """The clock of one process's training loop.

    Host work costs no time while the devices are busy, for example if a step is dispatched before
    the previous step has finished. Host work since the last dispatch counts as late only from the
    moment when the devices became idle. With several processes, a thread waits for that moment.

    Attributes:
      watch: stopwatch that sums the seconds by activity.
    """

    def __init__(self, watch: Stopwatch | None = None) -> None:
        self.watch = watch or Stopwatch()
        self._devices: _Devices | None = None
        self._at_dispatch = self._at_report = self.watch.read()
        self._late = {DATA: 0.0, HOST: 0.0}
        self._steps = 0
        self._sent: tuple[int, _Rows] | None = None

    def during(self, activity: str) -> contextlib.AbstractContextManager[None]:
        """Counts the time of a `with` block as `activity`, one of `stragglers.ACTIVITIES`."""
        return self.watch.during(activity)

    def stepping(self) -> contextlib.AbstractContextManager[None]:
        """Measures the dispatch of a step in a `with` block."""
        if self._devices is not None and (idle_at := self._devices.idle_at()) is not None:
            now = self.watch.read()
            for activity in self._late:
                begin = max(idle_at[activity], self._at_dispatch[activity])
                self._late[activity] += now[activity] - begin
        self._steps += 1
        return self.watch.during(STEP)

    def dispatched(self, result: jax.Array) -> None:
        """Registers an output array of a step; the step has finished when the array is ready.

        Must be called for every step.
        """
        if jax.process_count() == 1:
            return
        self._at_dispatch = self.watch.read()
        if self._devices is None:
            self._devices = _Devices(self.watch)
        self._devices.follow(result)

    def take(self) -> tuple[dict[str, float], ProcessTimes]:
        """Returns ({activity: seconds} since the last call, times to send to other processes)."""
        now = self.watch.read()
        spent, self._at_report = difference(now, self._at_report), now
        times = ProcessTimes(
            steps=self._steps,
            seconds=sum(spent.values()) - spent[SAVE] - spent[EVAL],
            data=spent[DATA],
            host=spent[HOST],
            late_data=self._late[DATA],
            late_host=self._late[HOST],
            name=socket.gethostname(),
        )
        self._late, self._steps = {DATA: 0.0, HOST: 0.0}, 0
        return spent, times

    def gather(
        self, mesh: Mesh | AbstractMesh, step: int, times: ProcessTimes
    ) -> tuple[int, list[ProcessTimes]] | None:
        """Starts sending this process's times. Every process must call it after the same step.

        Returns:
          (step of the previous call, times that all processes sent then); None at the first call.
        """
        assert isinstance(mesh, Mesh), "a run has devices"
        before = self.last_gathered()
        self._sent = step, _Rows(mesh, times.as_bytes())
        return before

    def last_gathered(self) -> tuple[int, list[ProcessTimes]] | None:
        """Returns (step, times of all processes) of the last `gather` once; None if nothing is
        pending."""
        if self._sent is None:
            return None
        (step, rows), self._sent = self._sent, None
        with self.watch.during(STEP):  # waits only while the devices are busy
            return step, [ProcessTimes.from_bytes(row) for row in rows.read()]


class _Devices:
    """Waits in a thread for each dispatched step, and records when the last step had finished."""

    def __init__(self, watch: Stopwatch) -> None:
        self._given = 0
        self._idle: list[tuple[int, dict[str, float]]] = []
        self._results: queue.SimpleQueue = queue.SimpleQueue()
        # The thread has no reference to `self`, so that None ends it once `self` is deleted.
        wait = _wait_for_each, (watch, self._results, self._idle)
        threading.Thread(
            target=wait[0], args=wait[1], name="zerojax-device-idle", daemon=True
        ).start()
        weakref.finalize(self, self._results.put, None)

    def follow(self, result: jax.Array) -> None:
        """Adds the output array of the next step, and holds it until the step has finished."""
        self._given += 1
        self._results.put((self._given, result))

    def idle_at(self) -> dict[str, float] | None:
        """Returns the stopwatch reading when the last dispatched step finished; None while a step
        is running.
        """
        given, reading = self._idle[0] if self._idle else (0, None)
        return reading if given == self._given else None


def _wait_for_each(
    watch: Stopwatch, results: queue.SimpleQueue, idle: list[tuple[int, dict[str, float]]]
) -> None:
    while (following := results.get()) is not None:
        number, result = following
        with contextlib.suppress(Exception):  # the error is raised where the result is read
            result.block_until_ready()
        # One assignment of a pair, since another thread reads number and reading together.
        idle[:] = [(number, watch.read())]


class _Rows:
    """Rows of bytes, one from each process, that the devices gather after the dispatched steps."""

    def __init__(self, mesh: Mesh, row: bytes) -> None:
        devices = mesh.devices.reshape(-1)
        # All devices of one process hold the same row, so the row of the first device is enough.
        first = {d.process_index: at for at, d in reversed(list(enumerate(devices)))}
        self._first = [first[process] for process in sorted(first)]
        flat = Mesh(devices, (_AXIS,))
        mine = np.frombuffer(row, np.uint8)[None]
        sent = jax.make_array_from_callback(
            (len(devices), len(row)), NamedSharding(flat, P(_AXIS)), lambda _: mine
        )
        self._gathered = jax.device_put(sent, NamedSharding(flat, P()))

    def read(self) -> Sequence[bytes]:
        """Waits for the rows of all processes; returns them in process order."""
        values = np.asarray(self._gathered)
        return [values[index].tobytes() for index in self._first]
