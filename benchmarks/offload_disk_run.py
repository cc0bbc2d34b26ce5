"""One training process under a limit of memory, for `benchmarks.offload_disk` and its test.

    python -m benchmarks.offload_disk_run TIER|sweep LAYERS LIMIT_MIB FOLDER STEPS

Trains a model of matrices under one limit of memory; prints its time and memory as one line of
JSON.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from zerojax.checkpoint.store import BucketStore
from zerojax.config import OffloadConfig
from zerojax.data import shard_batch
from zerojax.models.losses import mean_squared_error
from zerojax.optim import adamw, decay_mask
from zerojax.placement.device_mesh import make_mesh
from zerojax.plan.make import Plan, make_plan
from zerojax.step.build import build_step
from zerojax.step.initialization import init_state
from zerojax.training.checkpointing import end_state

WIDTH, INNER = 512, 2048
PARAMS_OF_LAYER = 2 * WIDTH * INNER
STATE_BYTES = 12  # of each parameter: float32 master and two moments of Adam
MIB = 2**20


class Matrices(nnx.Module):
    """Layers of two matrices each, in one scan: many parameters, few activations."""

    def __init__(self, rngs: nnx.Rngs, layers: int):
        up, down = (layers, WIDTH, INNER), (layers, INNER, WIDTH)
        self.up = nnx.Param(0.02 * jax.random.normal(rngs.params(), up))
        self.down = nnx.Param(0.02 * jax.random.normal(rngs.params(), down))

    def loss(self, batch: dict[str, jax.Array]) -> Any:
        """Returns the squared error of the output of all layers."""

        def layer(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            up, down = weights
            return x + 0.1 * jax.nn.relu(x @ up) @ down, None

        x, _ = jax.lax.scan(layer, batch["x"], (self.up[...], self.down[...]))
        return mean_squared_error(x, batch["y"])


def example_batch() -> dict[str, np.ndarray]:
    """Returns random inputs and targets."""
    random = np.random.default_rng(0)
    return {name: random.normal(size=(8, WIDTH)).astype(np.float32) for name in "xy"}


def plan_of(tier: str, layers: int, folder: Path) -> Plan:
    """Returns the plan of the model with its optimizer state in a tier, on one device."""
    return make_plan(
        lambda rngs: Matrices(rngs, layers),
        make_mesh({"data": 1}),
        example_batch=example_batch(),
        optimizer=adamw(1e-3, b2=0.95, weight_decay=0.1, mask=decay_mask, clip_norm=1.0),
        precision="fp32",
        offload=OffloadConfig(
            opt_state=tier,
            # Gradients leave layer by layer, so that little but weights and gradients is in memory.
            params="device" if tier == "device" else "host",
            folder=str(folder),
            slice_elements=2**20,
        ),
    )


def main(tier: str, size: int, limit_mib: int, folder: Path, steps: int) -> None:
    """Trains `size` layers, or sweeps over `size` buckets, in `limit_mib` MiB of private memory."""
    if limit_mib:
        resource.setrlimit(resource.RLIMIT_DATA, (limit_mib * MIB, limit_mib * MIB))
    found = sweep(size, folder, steps) if tier == "sweep" else train(tier, size, folder, steps)
    found["peak_rss_bytes"] = _peak_bytes()
    print(json.dumps(found), flush=True)


def train(tier: str, layers: int, folder: Path, steps: int) -> dict[str, Any]:
    """Trains `layers` layers with the optimizer state in `tier`."""
    plan = plan_of(tier, layers, folder)
    state = init_state(plan)
    step, losses, seconds = build_step(plan), [], []
    for _ in range(steps):
        began = time.perf_counter()
        state, metrics = step(state, shard_batch(plan, example_batch()))
        losses.append(float(metrics["loss"]))
        seconds.append(time.perf_counter() - began)
    end_state(state)
    state_bytes = layers * PARAMS_OF_LAYER * STATE_BYTES
    return {"state_bytes": state_bytes, "losses": losses, "seconds": seconds}


def sweep(buckets: int, folder: Path, sweeps: int) -> dict[str, Any]:
    """Reads, changes and writes `buckets` buckets, `sweeps` times."""
    size = STATE_BYTES * 2**22
    with BucketStore.create(folder, num_buckets=buckets, bucket_bytes=size) as store:
        for _ in range(sweeps):
            for bucket in store.sweep(dtype=np.float32):
                bucket.array += 1
                bucket.write()
    return {"state_bytes": buckets * size}


def _peak_bytes() -> int:
    """Returns the peak memory of this program; `getrusage` would include its parent."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_num_cpu_devices", 1)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]))
