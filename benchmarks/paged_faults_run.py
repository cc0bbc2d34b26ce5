"""A training process with layers in durable files, for `benchmarks.paged_faults`.

    python -m benchmarks.paged_faults_run FOLDER STEPS [in_backward]

Notes the start of each sweep over the optimizer state, and each complete step with its loss. With
"in_backward" the optimizer updates layers during the backward pass.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

import zerojax
from zerojax.config import LogConfig, MeshConfig, OffloadConfig
from zerojax.models.losses import mean_squared_error
from zerojax.offload.disk import DiskState

LAYERS, WIDTH, ROWS = 12, 256, 8


class Layers(nnx.Module):
    """A model of matrices that are applied one after the other."""

    def __init__(self, rngs: nnx.Rngs):
        self.kernel = nnx.Param(0.02 * jax.random.normal(rngs.params(), (LAYERS, WIDTH, WIDTH)))
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


def main(folder: Path, steps: int, in_backward: bool) -> None:
    """Trains until step `steps`; writes "sweep" and "step NUMBER LOSS" to FOLDER/ledger."""
    offload = OffloadConfig(
        params="nvme",
        activations="nvme",
        folder=str(folder / "store"),
        durable=True,
        update_in_backward=in_backward,
    )
    with (folder / "ledger").open("a", buffering=1, encoding="utf-8") as ledger:
        updating = DiskState.updating

        @contextlib.contextmanager
        def noted(disk: DiskState) -> Iterator[None]:
            ledger.write("sweep\n")
            with updating(disk):
                yield

        def note(trainer: Any, metrics: Any) -> None:
            ledger.write(f"step {metrics['step']} {metrics['loss'].hex()}\n")

        DiskState.updating = noted
        trainer = zerojax.train(
            Layers,
            MeshConfig(data=2, zero=3, offload=offload),
            batch_of,
            optimizer=zerojax.adamw(1e-3, clip_norm=1.0),
            precision="fp32",
            steps=steps,
            run_dir=None,
            log=LogConfig(every=1),
            callbacks=[note],
        )
        trainer.close()


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_disable_most_optimizations", True)  # compiles in a second
    main(Path(sys.argv[1]), int(sys.argv[2]), "in_backward" in sys.argv[3:])
