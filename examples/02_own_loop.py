"""Your own training loop, with the five functions that `zerojax.train` calls.

A plan needs no arrays, so it can be printed before anything is allocated. The step is one jitted
function that maps a state and a batch to the next state and metrics.
"""

import jax
import numpy as np
from flax import nnx

import zerojax

jax.config.update("jax_num_cpu_devices", 8)


class Regressor(nnx.Module):
    """Your own model, any nnx.Module. Its loss is a sum and a weight."""

    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(4, 128, rngs=rngs)
        self.out = nnx.Linear(128, 1, rngs=rngs)

    def loss(self, batch):
        predictions = self.out(nnx.tanh(self.hidden(batch["x"])))
        return zerojax.losses.mean_squared_error(predictions, batch["y"])


def make_batch(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    x = rng.normal(size=(64, 4)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(axis=1, keepdims=True))}


mesh = zerojax.make_mesh({"data": 8})
plan = zerojax.make_plan(
    Regressor,
    mesh,
    example_batch=make_batch(0),
    optimizer=zerojax.adamw(1e-2, weight_decay=0.0),
    zero=3,
    precision="fp32",
    persistence_threshold=0,
)
print(plan.table())

state = zerojax.init_state(plan, seed=0)  # created in eight shards
step = zerojax.build_step(plan)

losses = []
for number in range(151):
    state, metrics = step(state, zerojax.shard_batch(plan, make_batch(number)))
    if number % 25 == 0:  # metrics stay on the devices; reading one waits for its step
        losses.append(float(metrics["loss"]))
        print(f"step {number:3}: loss {losses[-1]:.4f}")

assert losses[-1] < 0.2 * losses[0]
assert int(state["step"]) == 151
