"""Tensor parallelism by rules that assign mesh axes to the dimensions of parameters.

The models of zerojax have their own rules; for another model, write a few regular expressions on
the names of its parameters, or let `zerojax.propose_rules` find them in the traced loss. Rules
combine with every ZeRO stage.
"""

import jax
import numpy as np
from flax import nnx

import zerojax

jax.config.update("jax_num_cpu_devices", 8)


class Mlp(nnx.Module):
    """An MLP that does not depend on the mesh."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(32, 256, rngs=rngs)
        self.down = nnx.Linear(256, 32, rngs=rngs)

    def loss(self, batch):
        predictions = self.down(nnx.gelu(self.up(batch["x"])))
        return zerojax.losses.mean_squared_error(predictions, batch["x"])


RULES = (
    ("up/kernel", (None, "model")),  # each device computes some of the hidden units ...
    ("up/bias", ("model",)),
    ("down/kernel", ("model", None)),  # ... and their contribution to the output
)
batch = {"x": np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)}


def losses(mesh_config: dict) -> list[float]:
    plan = zerojax.make_plan(
        Mlp,
        mesh_config,
        example_batch=batch,
        optimizer=zerojax.adamw(1e-2),
        precision="fp32",
        persistence_threshold=0,
    )
    print(plan.table())
    state, step = zerojax.init_state(plan), zerojax.build_step(plan)
    found = []
    for _ in range(5):
        state, metrics = step(state, zerojax.shard_batch(plan, batch))
        found.append(float(metrics["loss"]))
    return found


proposal = zerojax.propose_rules(Mlp, {"data": 2, "model": 4}, example_batch=batch)
print(proposal)  # the same rules, and what each saves and sends
assert {pattern.strip("^$"): axes for pattern, axes in proposal.rules} == dict(RULES)

split = losses({"data": 2, "model": 4, "zero": 3, "rules": RULES})
plain = losses({"data": 8, "zero": 0})
print(split, plain)
np.testing.assert_allclose(split, plain, atol=4e-6)
