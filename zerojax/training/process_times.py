"""Step times of each process, gathered without waiting."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import weakref
from collections.abc import Iterator, Sequence

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
    """The clock of one process's loop.

    A step that is dispatched while the one before is still under way costs its process nothing:
    its devices have work. What the process did since its last dispatch is late only from the moment
    when they had run dry, which a thread waits for where other processes want to know.

    Attributes:
      watch: where the seconds are counted.
    """

    def __init__(self, watch: Stopwatch | None = None) -> None:
        self.watch = watch or Stopwatch()
        self._devices: _Devices | None = None
        self._at_dispatch = self._at_report = self.watch.read()
        self._late = {DATA: 0.0, HOST: 0.0}
        self._steps = 0
        self._sent: tuple[int, _Rows] | None = None

    def during(self, activity: str) -> contextlib.AbstractContextManager[None]:
        """Time in the block is spent on `activity`, one of `stopwatch.ACTIVITIES`."""
        return self.watch.during(activity)

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Around the dispatch of a step."""
        now = self.watch.read()
        if self._devices is not None and (idle_at := self._devices.idle_at()) is not None:
            for activity in self._late:
                begin = max(idle_at[activity], self._at_dispatch[activity])
                self._late[activity] += now[activity] - begin
        with self.watch.during(STEP):
            yield
        self._steps += 1
        self._at_dispatch = self.watch.read()

    def dispatched(self, result: jax.Array) -> None:
        """To be told of one result of each step, on the devices: it tells when the step is over."""
        if jax.process_count() == 1:
            return
        if self._devices is None:
            self._devices = _Devices(self.watch)
        self._devices.follow(result)

    def take(self) -> tuple[dict[str, float], ProcessTimes]:
        """Since the last call: seconds by activity, and what the other processes should know."""
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
        """Sends this process's times; every process has to call it after the same step.

        Returns:
          The step of the call before, and what all processes sent then; None at the first call.
        """
        assert isinstance(mesh, Mesh), "a run has devices"
        before = self.last_gathered()
        self._sent = step, _Rows(mesh, times.as_bytes())
        return before

    def last_gathered(self) -> tuple[int, list[ProcessTimes]] | None:
        """What was sent at the last `gather`, once; None when nothing is on its way."""
        if self._sent is None:
            return None
        (step, rows), self._sent = self._sent, None
        with self.watch.during(STEP):  # they arrived long ago, or the devices are still at work
            return step, [ProcessTimes.from_bytes(row) for row in rows.read()]


class _Devices:
    """When the devices of this process had finished the last step that they were given."""

    def __init__(self, watch: Stopwatch) -> None:
        self._given = 0
        self._idle: list[tuple[int, dict[str, float]]] = []
        self._results: queue.SimpleQueue = queue.SimpleQueue()
        wait = _wait_for_each, (watch, self._results, self._idle)
        threading.Thread(
            target=wait[0], args=wait[1], name="zerojax-device-idle", daemon=True
        ).start()
        weakref.finalize(self, self._results.put, None)

    def follow(self, result: jax.Array) -> None:
        """The next step's result; it is kept until the step is over."""
        self._given += 1
        self._results.put((self._given, result))

    def idle_at(self) -> dict[str, float] | None:
        """What the stopwatch showed when they had finished all; None while they are at work."""
        given, reading = self._idle[0] if self._idle else (0, None)
        return reading if given == self._given else None


def _wait_for_each(
    watch: Stopwatch, results: queue.SimpleQueue, idle: list[tuple[int, dict[str, float]]]
) -> None:
    while (following := results.get()) is not None:
        number, result = following
        with contextlib.suppress(Exception):  # whoever reads the result is told
            result.block_until_ready()
        idle[:] = [(number, watch.read())]


class _Rows:
    """One row of bytes of every process, gathered by the devices behind the steps under way."""

    def __init__(self, mesh: Mesh, row: bytes) -> None:
        devices = mesh.devices.reshape(-1)
        # Rows of the devices of one process are equal, so one of them is enough.
        first = {d.process_index: at for at, d in reversed(list(enumerate(devices)))}
        self._first = [first[process] for process in sorted(first)]
        flat = Mesh(devices, (_AXIS,))
        mine = np.frombuffer(row, np.uint8)[None]
        sent = jax.make_array_from_callback(
            (len(devices), len(row)), NamedSharding(flat, P(_AXIS)), lambda _: mine
        )
        self._gathered = jax.device_put(sent, NamedSharding(flat, P()))

    def read(self) -> Sequence[bytes]:
        """The rows in the order of processes."""
        values = np.asarray(self._gathered)
        return [values[index].tobytes() for index in self._first]
