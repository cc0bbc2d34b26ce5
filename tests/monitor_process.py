"""One process of a run whose data or callbacks are slow on one rank; started by test_monitor_runs.

Usage: monitor_process.py FOLDER data|callback|none RANK SECONDS
"""

from __future__ import annotations

import sys
import time

import jax
import numpy as np

import zerojax
from zerojax.config import LogConfig, ModelConfig
from zerojax.models import build_model
from zerojax.runtime import distributed
from zerojax.runtime.shutdown import OK, leave

STEPS, ROWS = 12, 8


def batches(seconds: float):
    """Rows of this process, each batch `seconds` late."""
    rows = ROWS // jax.process_count()
    tokens = np.arange(rows * 16, dtype=np.int32).reshape(rows, 16) % 64
    while True:
        time.sleep(seconds)
        yield {"tokens": tokens, "targets": tokens}


def main(folder: str, what: str, rank: int, seconds: float) -> None:
    distributed.join_processes()
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    is_slow = jax.process_index() == rank
    callbacks = [lambda *_: time.sleep(seconds)] if what == "callback" and is_slow else []
    zerojax.train(
        build_model(ModelConfig(num_layers=1, num_heads=2, embed_dim=32, max_seq_len=16), 64),
        zerojax.MeshConfig(zero=2),
        batches(seconds if what == "data" and is_slow else 0.0),
        steps=STEPS,
        run_dir=folder,
        log=LogConfig(every=1, console="lines", tensorboard=False),
        callbacks=callbacks,
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
    leave(OK)  # together: the others are aborted when process 0 goes before them
