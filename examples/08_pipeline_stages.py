"""Pipeline stages with any schedule, combined with ZeRO.

`zerojax.Stages` builds a model from your embedding, block and head. Its layers run in one loop,
whose iterations are divided among the stages; a model with its own scan works unchanged.
"""

import jax
import numpy as np
from flax import nnx

import zerojax

jax.config.update("jax_num_cpu_devices", 8)


class Block(nnx.Module):
    """Your own layer; its output has the shape of its input."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.linear = nnx.Linear(32, 32, rngs=rngs)

    def __call__(self, x):
        return x + nnx.gelu(self.linear(self.norm(x)))


def make_model(rngs: nnx.Rngs) -> zerojax.Stages:
    embed, head = nnx.Linear(4, 32, rngs=rngs), nnx.Linear(32, 1, rngs=rngs)
    return zerojax.Stages(embed, Block, head, num_layers=8, rngs=rngs)


def loss(model, batch):
    return zerojax.losses.mean_squared_error(model(batch["x"]), batch["y"])


def make_batch(step: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(step).normal(size=(64, 4)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(axis=1, keepdims=True))}


def losses(mesh_config: dict) -> list[float]:
    plan = zerojax.make_plan(
        make_model,
        mesh_config,
        example_batch=make_batch(0),
        loss=loss,
        optimizer=zerojax.adamw(1e-2),
        num_microbatches=8,
        precision="fp32",
        persistence_threshold=0,
    )
    print(plan.table())  # includes the schedule: the microbatch of each stage in each tick
    state, step = zerojax.init_state(plan), zerojax.build_step(plan)
    found = []
    for number in range(5):
        state, metrics = step(state, zerojax.shard_batch(plan, make_batch(number)))
        found.append(float(metrics["loss"]))
    return found


piped = losses({"data": 2, "stage": 4, "zero": 2})
interleaved = losses({"data": 2, "stage": 4, "zero": 1, "pipeline_schedule": "interleaved(2)"})
plain = losses({"data": 8})
print(piped, interleaved, plain)
np.testing.assert_allclose([piped, interleaved], [plain, plain], atol=4e-6)
