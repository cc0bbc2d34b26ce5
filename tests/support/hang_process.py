"""One of several processes of a run in which one of them, the last but one, stands still.

    python -m tests.support.hang_process KIND PROCESS FOLDER

KIND says what process PROCESS does after step 3: "stops" (SIGSTOP), "data" (its next batch never
comes), "callback" (a callback does not return) or "branch" (it alone evaluates). The others wait
for it in a collective, until their watchdogs end them. With "nothing" the run ends after step 6.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax

from tests.support.process_groups import join

AFTER = 3
"""Last step of all processes."""
LIMIT = 12.0
"""Seconds without progress until a watchdog ends its process."""


def main(kind: str, missing: int, folder: str) -> None:
    join(1, optimised=True)
    import zerojax
    from tests.support.pipeline_runs import small
    from tests.support.trajectories import text_batch
    from zerojax.config import LogConfig, WatchConfig

    is_missing = jax.process_index() == missing

    def rows(index: int) -> Any:
        own = 32 // jax.process_count()
        part = slice(own * jax.process_index(), own * (jax.process_index() + 1))
        return {name: x[part] for name, x in text_batch(index).items()}

    def batches() -> Iterator[Any]:
        for index in range(1000):
            if is_missing and index >= AFTER and kind == "data":
                time.sleep(1000)
            yield rows(index)

    acts = {
        "stops": lambda trainer: os.kill(os.getpid(), signal.SIGSTOP),
        "callback": lambda trainer: time.sleep(1000),
        "branch": lambda trainer: trainer.evaluate([rows(0)]),
    }

    def act(trainer: Any, metrics: Any) -> None:
        if is_missing and metrics["step"] == AFTER and kind in acts:
            acts[kind](trainer)

    zerojax.train(
        small(layers=3, width=16, rate=0.0),
        {"zero": 3, "persistence_threshold": 50},
        batches(),
        precision="fp32",
        steps=6 if kind == "nothing" else 1000,
        run_dir=folder,
        log=LogConfig(every=1, tensorboard=False),
        watch=WatchConfig(step_timeout=LIMIT, long_timeout=60),
        callbacks=[act],
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
