"""A model with two lists of layers, an encoder and a decoder."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import zerojax
from tests.support.recipe import RECIPE
from zerojax import tracing

WIDTH, TOKENS, LAYERS = 16, 8, 4
ENCODER, DECODER = "encoder/0..3", "decoder/0..3"


class Block(nnx.Module):
    """Attention to a memory, and an MLP."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm, self.second = (nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.query, self.memory = (nnx.Linear(WIDTH, n * WIDTH, rngs=rngs) for n in (1, 2))
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, memory: jax.Array) -> jax.Array:
        key, value = jnp.split(self.memory(self.norm(memory)), 2, axis=-1)
        heads = [y[:, :, None] for y in (self.query(self.norm(x)), key, value)]
        x = x + zerojax.attention(*heads)[:, :, 0]
        return x + self.down(jax.nn.gelu(self.up(self.second(x))))


class TwoLists(nnx.Module):
    """An encoder, and a decoder that reads its result."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.encoder = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.decoder = nnx.List([Block(rngs) for _ in range(LAYERS)])

    def loss(self, batch: dict[str, jax.Array]) -> jax.Array:
        memory, x = batch["x"], batch["y"]
        for layer in self.encoder:
            memory = layer(memory, memory)
        for layer in self.decoder:
            x = layer(x, memory)
        return jnp.mean(jnp.square(x - batch["x"]))


def batch() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {name: draw.normal(size=(8, TOKENS, WIDTH)).astype(np.float32) for name in ("x", "y")}


def plan_of(zero: int, roll_remat: Any, devices: int = 4, **options: Any) -> zerojax.Plan:
    made = zerojax.make_mesh(zerojax.MeshConfig(data=devices), jax.devices()[:devices])
    return zerojax.make_plan(
        TwoLists(nnx.Rngs(0)), made, example_batch=batch(), precision="fp32", zero=zero,
        roll_remat=roll_remat, persistence_threshold=0,
        **{"optimizer": zerojax.adamw(1e-3, **RECIPE), **options},
    )  # fmt: skip


def remats(plan: zerojax.Plan) -> dict[str, str]:
    """{title of a loop: its recomputation}."""
    assert isinstance(plan.model, tracing.rolling.RolledModel)
    return {loop.title: loop.remat for loop in plan.model.loops}
