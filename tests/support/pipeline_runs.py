"""Short trainings over pipeline stages, and what their compiled programs hold.

As `tests.support.trajectories`, but the step is compiled ahead, so that its text can be read, too.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.support.small_models import VOCAB, LinenText, linen_loss, regression_loss
from tests.support.trajectories import (
    STEPS,
    TOLERANCE,
    Trajectory,
    plan_for,
    regression_batch,
    text_batch,
)
from zerojax.forecasting.hlo import find_in_branches, read_program
from zerojax.models.losses import next_token
from zerojax.plan.make import Plan
from zerojax.step.build import build_step
from zerojax.step.initialization import init_state
from zerojax.zoo.layers import Dropout

THRESHOLD = 50
"""Elements; far below the default, so that ZeRO splits what these tiny models have."""

UNEVEN = {2: (5, 3), 4: (3, 2, 1, 2)}
"""Eight layers on so many virtual stages."""


@dataclasses.dataclass
class Compiled:
    """A plan, and its step compiled."""

    plan: Plan
    step: Any

    def run(
        self, *, steps: int = STEPS, batch: Callable[[int], Any] = text_batch, state: Any = None
    ) -> Trajectory:
        """Losses and norms of `steps` steps."""
        state = init_state(self.plan, 0) if state is None else state
        losses, norms = [], []
        for index in range(steps):
            given = jax.device_put(batch(index), self.plan.batch_sharding)
            state, metrics = self.step(state, given)
            losses.append(float(metrics["loss"]))
            norms.append(float(metrics["grad_norm"]))
        return Trajectory(self.plan, np.array(losses), np.array(norms), state)


def compile_step(model: Any, **options: Any) -> Compiled:
    """The step of `plan_for(model, **options)`; no collective may be in a conditional of it."""
    plan = plan_for(model, **{"persistence_threshold": THRESHOLD, **options})
    step = build_step(plan).lower(plan.abstract_state, plan.abstract_batch).compile()
    found = find_in_branches(read_program(step.as_text()), plan.mesh.size)
    assert not found, f"collectives that only some devices get to: {found}"
    return Compiled(plan, step)


def train(
    model: Any, *, steps: int = STEPS, batch: Callable[[int], Any] = text_batch, **options: Any
) -> Trajectory:
    """Losses of `steps` steps; `options` are those of `compile_step`."""
    return compile_step(model, batch=batch, **options).run(steps=steps, batch=batch)


def assert_equal_runs(
    run: Trajectory, expected: Trajectory, *, tolerance: float = TOLERANCE
) -> None:
    """The losses of both, up to the order of sums, while something is learnt.

    `expected` may have taken more steps.
    """
    assert run.plan.pipeline is not None
    losses = expected.losses[: len(run.losses)]
    np.testing.assert_allclose(run.losses, losses, rtol=0, atol=tolerance)
    fell = losses[0] - losses[-1]
    assert fell > 0.01, f"the loss fell by {fell}: equality is cheap when nothing is learnt"


class SmallBlock(nnx.Module):
    """A dense layer, dropout, and `probe`, whose gradient is what `hint` says.

    `probe` starts at 0, so a hint changes nothing but that gradient.
    """

    def __init__(self, width: int, rate: float, rngs: nnx.Rngs):
        self.linear = nnx.Linear(width, width, rngs=rngs)
        self.dropout = Dropout(rate, rngs=rngs)
        self.probe = nnx.Param(jnp.zeros(()))

    def __call__(self, x: jax.Array, hint: jax.Array) -> jax.Array:
        y = self.dropout(jnp.tanh(self.linear(x)))
        return x + y + (self.probe[...] * hint.astype(x.dtype))[:, None, None]


class SmallText(nnx.Module):
    """An embedding, a few dense layers under `nnx.scan`, and a head: quick to compile.

    rate, rate_behind: of dropout before and in the layers, and behind them.
    """

    def __init__(
        self,
        rngs: nnx.Rngs,
        *,
        layers: int = 4,
        width: int = 12,
        tied: bool = False,
        rate: float = 0.0,
        rate_behind: float = 0.0,
    ):
        self.embed = nnx.Embed(VOCAB - 3, width, rngs=rngs)
        self.before = Dropout(rate, rngs=rngs)
        self.behind = Dropout(rate_behind, rngs=rngs)
        make = lambda rngs: SmallBlock(width, rate, rngs)  # noqa: E731
        self.blocks = nnx.vmap(make, in_axes=0, out_axes=0)(rngs.split(layers))
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = None if tied else nnx.Linear(width, VOCAB - 3, rngs=rngs)
        self.layers = layers

    def __call__(self, tokens: jax.Array, hints: jax.Array | None = None) -> jax.Array:
        """hints: [rows, layers], what each layer is told of each row."""
        if hints is None:
            hints = jnp.zeros((len(tokens), self.layers), jnp.float32)

        @nnx.scan(in_axes=(0, nnx.Carry, 0), out_axes=nnx.Carry)
        def apply(block: SmallBlock, x: jax.Array, hint: jax.Array) -> jax.Array:
            return block(x, hint)

        x = apply(self.blocks, self.before(self.embed(tokens)), hints.T)
        x = self.norm(self.behind(x))
        return self.embed.attend(x) if self.head is None else self.head(x)

    def loss(self, batch: dict) -> Any:
        logits = self(batch["tokens"], batch.get("hints"))
        return next_token(logits, batch["targets"], batch.get("weights"))


def small(**options: Any) -> Callable[[nnx.Rngs], SmallText]:
    """A factory of `SmallText`."""
    return lambda rngs: SmallText(rngs, **options)


def linen_model() -> tuple[LinenText, dict[str, Any]]:
    """A model under `linen.scan`, and the options of its plan."""
    return LinenText(layers=4), {"loss": linen_loss}


def function_model() -> tuple[Any, dict[str, Any]]:
    """A pair (init, apply) of functions, and the options of its plan."""

    def init(key: jax.Array) -> dict:
        keys = jax.random.split(key, 3)
        return {
            "in": jax.random.normal(keys[0], (12, 10)) * 0.3,
            "layers": {"w": jax.random.normal(keys[1], (4, 10, 10)) * 0.3, "b": jnp.zeros((4, 10))},
            "out": jax.random.normal(keys[2], (10, 5)) * 0.2,
        }

    def apply(params: dict, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, weights: dict) -> tuple[jax.Array, None]:
            return x + jnp.tanh(x @ weights["w"] + weights["b"][None]), None

        x, _ = jax.lax.scan(layer, x @ params["in"], params["layers"])
        return x @ params["out"]

    return (init, apply), {"loss": regression_loss, "batch": regression_batch}
