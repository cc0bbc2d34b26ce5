"""One of several processes that choose between two implementations together.

Words: seconds of the other implementation here, the folder of the cache, and "dies" or "hangs"
where this process is killed or gets no further while it tries it, or "again". Prints the choice and
its reason.
"""

import functools
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from zerojax.config import WatchConfig
from zerojax.runtime.distributed import join_processes
from zerojax.runtime.watchdog import Watchdog
from zerojax.training.tuning import KeptChoices, Question, Way, decide

LIMIT = 3.0
"""Seconds until a process that tries something is taken to hang."""


class Clock:
    """Time that passes where a way runs."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def main(seconds: str, folder: str, mode: str = "") -> None:
    join_processes()
    import jax

    clock, result = Clock(), np.arange(4.0)

    def reference() -> np.ndarray:
        clock.now += 1.0
        return result

    def other() -> np.ndarray:
        if mode == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == "hangs":
            time.sleep(3600)
        clock.now += float(seconds)
        return result

    question = Question(
        title="a sum",
        key={"what": "sum"},
        reference=Way(name="xla", run=reference),
        other=Way(name="mosaic_gpu", run=other),
        difference=lambda ours, theirs: None if np.array_equal(ours, theirs) else "they differ",
    )
    kept = KeptChoices(Path(folder), jax.process_index())
    watchdog = Watchdog(WatchConfig(), process=jax.process_index(), processes=2)
    during = functools.partial(watchdog.during, limit=LIMIT)
    with watchdog:
        answer = decide(lambda: question, kept, again=mode == "again", clock=clock, during=during)
    print(f"{answer.choice}: {answer.reason}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
