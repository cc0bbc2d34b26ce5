"""A run resumes with another ZeRO stage on another mesh, and changes again without a restart.

A checkpoint does not depend on the sharding, so that any mesh can restore it.
"""

import tempfile

import jax
import numpy as np
from flax import nnx

import zerojax
from zerojax.config import ModelConfig

jax.config.update("jax_num_cpu_devices", 8)

model = zerojax.zoo.build_model(ModelConfig(num_layers=2, embed_dim=64, max_seq_len=32), 256)


def run(mesh_config: dict, folder: str, steps: int) -> zerojax.Trainer:
    """Trains up to `steps` in total, resuming from the checkpoint in `folder` if it exists."""
    return zerojax.train(
        model, mesh_config, steps=steps, checkpoint=folder, optimizer=zerojax.adamw(1e-3), seed=1
    )


with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
    straight = run({"data": 8, "zero": 1}, one, steps=20)

    stopped = run({"data": 8, "zero": 1}, two, steps=10)
    resumed = run({"data": 4, "model": 2, "zero": 3}, two, steps=20)
    print(f"{stopped.plan.describe()}\n{resumed.plan.describe()}")

    difference = abs(straight.metrics["loss"] - resumed.metrics["loss"])
    print(f"loss after 20 steps: {straight.metrics['loss']:.6f}, difference {difference:.1e}")
    assert difference < 4e-6  # float32 rounding

    # Without a restart: the same values, sharded differently.
    before = nnx.state(resumed.to_model())
    resumed.reshard({"data": 8, "zero": 0})
    after = nnx.state(resumed.to_model())
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert resumed.plan.zero == 0
