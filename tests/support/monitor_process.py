"""One process of a run whose data or callbacks are slow on one rank; started by test_monitor_runs.

Usage: monitor_process.py FOLDER data|callback|none RANK SECONDS

The clock by which the processes of the run are compared stands still but for what is slow here, so
that how busy the machine is does not count. "none": the data of all are slow alike.
"""

import sys
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np

import zerojax
from zerojax.config import LogConfig, ModelConfig
from zerojax.runtime import distributed
from zerojax.runtime.shutdown import OK, leave
from zerojax.training import step_runner
from zerojax.training.metrics.stragglers import DATA, Stopwatch
from zerojax.training.process_times import LoopClock
from zerojax.zoo import build_model

STEPS, ROWS = 12, 8
READ_AHEAD = 2
"""The first batches, which may be read before there is a step to wait for."""


class Slowness:
    """What takes its time: a clock, and how it goes on."""

    def __init__(self, seconds: float) -> None:
        self._now, self._seconds = 0.0, seconds
        self.loop_clock = LoopClock(Stopwatch(lambda: self._now))

    def pass_in(self, activity: str | None = None, step: int | None = None) -> None:
        """The seconds pass as soon as the devices have nothing to do.

        Args:
          activity: that the loop has to be at; None: this is the loop.
          step: so many have to be done; None: all that were begun.
        """
        while not self._is_idle(activity, step):
            time.sleep(0.001)
        self._now += self._seconds

    def _is_idle(self, activity: str | None, step: int | None) -> bool:
        devices = self.loop_clock._devices
        if devices is None or devices.idle_at() is None:
            return False
        is_there = step is None or devices._given == step
        return is_there and activity in (None, self.loop_clock.watch._state[0])


def batches(wait: Callable[[int], object]) -> Iterator[dict[str, np.ndarray]]:
    """Rows of this process, each batch once `wait` of its number has returned."""
    rows = ROWS // jax.process_count()
    first = jax.process_index() * rows
    tokens = np.arange(first, first + rows * 16, dtype=np.int32).reshape(rows, 16) % 64
    number = 0
    while True:
        if READ_AHEAD <= number < STEPS:
            wait(number)
        yield {"tokens": tokens, "targets": tokens}
        number += 1


def main(folder: str, what: str, rank: int, seconds: float) -> None:
    distributed.join_processes()
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    slowness, is_slow = Slowness(seconds), jax.process_index() == rank
    step_runner.LoopClock = lambda: slowness.loop_clock
    is_data_slow = what == "none" or (what == "data" and is_slow)
    callbacks = [lambda *_: slowness.pass_in()] if what == "callback" and is_slow else []
    zerojax.train(
        build_model(ModelConfig(num_layers=1, num_heads=2, embed_dim=32, max_seq_len=16), 64),
        zerojax.MeshConfig(zero=2),
        batches((lambda number: slowness.pass_in(DATA, number)) if is_data_slow else int),
        steps=STEPS,
        run_dir=folder,
        log=LogConfig(every=1, console="lines", tensorboard=False),
        callbacks=callbacks,
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
    leave(OK)  # together: the others are aborted when process 0 goes before them
