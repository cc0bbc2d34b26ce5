"""One of several processes of a run with 1-bit Adam, or the run of a single one.

    python -m tests.features.one_bit.one_bit_process OUT DEVICES ZERO

trains on DEVICES virtual devices of each process and writes OUT/process_0.json ... with its losses
and parameters.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import jax
import numpy as np

STEPS, FREEZE = 12, 4


def main(out: str, devices: str, zero: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(devices))
    # What starts XLA must come after the process has joined the others.
    from zerojax.runtime import distributed

    if os.environ.get("ZEROJAX_NUM_PROCESSES"):
        distributed.join_processes()
    import zerojax
    from tests.support.small_models import apply_functions, init_functions, regression_loss
    from tests.support.trajectories import regression_batch
    from zerojax.training.trainer import Trainer

    plan = zerojax.make_plan(
        (lambda key, batch: init_functions(key), apply_functions),
        {"zero": int(zero)},
        example_batch=regression_batch(0),
        loss=regression_loss,
        optimizer=zerojax.optim.one_bit_adam(5e-3, freeze_step=FREEZE, b2=0.99, eps=1e-6),
        precision="fp32",
    )
    trainer = Trainer(plan)
    rows = 32 // jax.process_count()
    own = slice(rows * jax.process_index(), rows * (jax.process_index() + 1))
    losses = []
    for index in range(STEPS):
        batch = {name: x[own] for name, x in regression_batch(index).items()}
        losses.append(float(trainer.step(zerojax.shard_batch(plan, batch))["loss"]))
    found = {
        "losses": losses,
        "params": {
            name: np.asarray(x).ravel().tolist()
            for name, x in zerojax.tracing.trees.flatten_names(trainer.to_model()).items()
        },
    }
    path = Path(out) / f"process_{jax.process_index()}.json"
    path.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
