"""A training process that saves every step until it is killed, for `benchmarks.checkpoint_faults`.

    python -m benchmarks.checkpoint_faults_run JSON

Trains one small model. Before each save it notes a digest of the bits of the state, computed
independently of the checkpoint's fingerprints; after a resume it notes the digest of the restored
state.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np
from flax import nnx

from zerojax.checkpoint import Checkpointer
from zerojax.data import local_rows, shard_batch
from zerojax.models.losses import mean_squared_error
from zerojax.optim import adamw, decay_mask
from zerojax.placement.device_mesh import make_mesh
from zerojax.plan.make import Plan, make_plan
from zerojax.runtime.distributed import ProcessGroup, join_processes
from zerojax.step.build import build_step
from zerojax.step.initialization import init_state
from zerojax.training.checkpointing import restore_state, save_state

DEVICES = 4
WIDTH, ROWS = 256, 8


class Layers(nnx.Module):
    """A model of matrices that are applied one after the other."""

    def __init__(self, rngs: nnx.Rngs, layers: int):
        shape = layers, WIDTH, WIDTH
        self.kernel = nnx.Param(0.02 * jax.random.normal(rngs.params(), shape))
        self.scale = nnx.Param(np.ones(WIDTH, np.float32))

    def loss(self, batch: dict[str, jax.Array]) -> Any:
        """Returns the squared error."""

        def layer(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
            return x + 0.1 * jax.nn.relu(x @ kernel), None

        x, _ = jax.lax.scan(layer, batch["x"], self.kernel[...])
        return mean_squared_error(x * self.scale[...][None], batch["y"])


def batch_of(step: int) -> dict[str, np.ndarray]:
    """Returns inputs and targets of a step, the same after every restart of a run."""
    random = np.random.default_rng(step)
    return {name: random.normal(size=(ROWS, WIDTH)).astype(np.float32) for name in "xy"}


def plan_of(layers: int, devices: int = DEVICES) -> Plan:
    """Returns the plan of the model under ZeRO-2."""
    return make_plan(
        lambda rngs: Layers(rngs, layers),
        make_mesh({"data": devices}, devices=jax.devices()[:devices]),
        example_batch=batch_of(0),
        optimizer=adamw(1e-3, b2=0.95, weight_decay=0.1, mask=decay_mask, clip_norm=1.0),
        precision="fp32",
        zero=2,
    )


def digest(state: Any) -> str:
    """Returns the SHA-256 of the bits that this process's devices hold."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        for shard in sorted(leaf.addressable_shards, key=lambda shard: shard.device.id):
            found.update(np.ascontiguousarray(shard.data).tobytes())
    return found.hexdigest()


def lives(folder: Path, layers: int, steps: int | None, ledger: TextIO) -> None:
    """Resumes from the newest checkpoint, then trains and saves; without end if `steps` is None.

    Args:
      folder: folder of the checkpoints.
      layers: number of layers of the model.
      steps: number of steps to take before the function returns.
      ledger: file that gets "restored STEP DIGEST", "state STEP DIGEST" before and "saved STEP"
        after a save.
    """
    plan = plan_of(layers)
    step_once = build_step(plan)
    with Checkpointer(folder, keep=3) as checkpointer:
        if checkpointer.usable_step() is None:
            state, first = init_state(plan), 1
        else:
            restored, state = restore_state(checkpointer, plan)
            first = restored.step + 1
            print("restored", restored.step, digest(state), file=ledger, flush=True)
        pending = None
        for step in _numbers(first, steps):
            batch = {name: x[slice(*local_rows(plan))] for name, x in batch_of(step).items()}
            # Donates the arrays whose save is on its way.
            state, _ = step_once(state, shard_batch(plan, batch))
            print("state", step, digest(state), file=ledger, flush=True)
            checkpointer.wait()
            if pending is not None:
                print("saved", pending, file=ledger, flush=True)
            about = {"data_state": {"position": step}, "config": {}, "plan": plan.as_dict()}
            save_state(checkpointer, plan, state, step=step, about=about)
            pending = step


def _numbers(first: int, count: int | None) -> Iterable[int]:
    return itertools.count(first) if count is None else range(first, first + count)


def main(folder: str, index: int, count: int, port: int, layers: int, steps: int | None) -> None:
    """Runs process `index` of the `count` processes of a run."""
    if count > 1:
        address = f"127.0.0.1:{port}"
        join_processes(ProcessGroup(coordinator=address, num_processes=count, process_id=index))
    with Path(folder, f"ledger-{index}").open("a", buffering=1, encoding="utf-8") as ledger:
        lives(Path(folder, "checkpoints"), layers, steps, ledger)


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    words = json.loads(sys.argv[1])
    jax.config.update("jax_num_cpu_devices", DEVICES // words["count"])
    jax.config.update("jax_disable_most_optimizations", True)  # compiles in a second
    main(**words)
