"""Models of users, as users write them: none knows zerojax.

Small, with shapes that no mesh divides.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from zerojax.config import ModelConfig
from zerojax.models.losses import mean_squared_error, next_token
from zerojax.zoo import build_model

VOCAB = 64


def reference_model(name: str, **changes: Any) -> Any:
    """A factory of a tiny GPT-2 or Llama with grouped heads."""
    options = {"num_layers": 2, "num_heads": 4, "embed_dim": 32, "max_seq_len": 16}
    if name == "llama":
        options["num_kv_heads"] = 2
    return build_model(ModelConfig(name=name, **{**options, **changes}), VOCAB)


class TextBlock(nnx.Module):
    """Stock attention and MLP of flax."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=3, in_features=width, decode=False, rngs=rngs
        )
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(x)))


class UserText(nnx.Module):
    """Embed, Conv, stacked blocks under `nnx.scan`, a tied head, and a parameter of odd shape."""

    def __init__(self, rngs: nnx.Rngs, width: int = 30):
        self.embed = nnx.Embed(VOCAB - 3, width, rngs=rngs)
        self.conv = nnx.Conv(width, width, kernel_size=(3,), padding="CAUSAL", rngs=rngs)
        self.odd = nnx.Param(jnp.ones((3, 7)) * 0.1)
        self.blocks = nnx.vmap(lambda r: TextBlock(width, r), in_axes=0, out_axes=0)(rngs.split(2))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        x = x + self.conv(x) * jnp.mean(self.odd[...])

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def apply(block: TextBlock, x: jax.Array) -> jax.Array:
            return block(x)

        return self.embed.attend(apply(self.blocks, x))

    def loss(self, batch: dict) -> Any:
        return next_token(self(batch["tokens"]), batch["targets"])


class LinenText(linen.Module):
    """Dense layers under `linen.scan`."""

    width: int = 24
    layers: int = 2

    @linen.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = linen.Embed(VOCAB - 3, self.width)(tokens)
        scanned = linen.scan(
            LinenBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers
        )
        x, _ = scanned(self.width)(x, None)
        return linen.Dense(VOCAB - 3)(linen.LayerNorm()(x))


class LinenBlock(linen.Module):
    width: int

    @linen.compact
    def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        hidden = linen.gelu(linen.Dense(3 * self.width)(linen.LayerNorm()(x)))
        return x + linen.Dense(self.width)(hidden), None


def linen_loss(model: Any, batch: dict) -> Any:
    return next_token(model(batch["tokens"]), batch["targets"])


def init_functions(key: jax.Array) -> dict:
    """Parameters of a two-layer network as a nested dict."""
    first, second = jax.random.split(key)
    return {
        "in": {"w": jax.random.normal(first, (12, 40)) * 0.3, "b": jnp.zeros((40,))},
        "out": {"w": jax.random.normal(second, (40, 5)) * 0.2},
    }


def apply_functions(params: dict, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["in"]["w"] + params["in"]["b"][None]) @ params["out"]["w"]


def regression_loss(model: Any, batch: dict) -> Any:
    return mean_squared_error(model(batch["x"]), batch["y"])


class Line(nnx.Module):
    """One output of each row."""

    def __init__(self, rngs: nnx.Rngs):
        self.out = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(x)


class Plain(nnx.Module):
    """Two layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(12, 16, rngs=rngs)
        self.last = nnx.Linear(16, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jnp.tanh(self.first(x)))


class Recurrent(nnx.Module):
    """Starts a scan from zeros: a carry that knows nothing of shards."""

    def __init__(self, rngs: nnx.Rngs):
        self.cell = nnx.Linear(12 + 20, 20, rngs=rngs)
        self.out = nnx.Linear(20, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        weights = self.cell.kernel[...], self.cell.bias[...]

        def advance(h: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.tanh(jnp.concatenate([x, h], -1) @ weights[0] + weights[1][None]), None

        h, _ = jax.lax.scan(advance, jnp.zeros((x.shape[0], 20), x.dtype), None, length=3)
        return self.out(h)


class WithStatistics(nnx.Module):
    """Batch norm and dropout: state besides parameters."""

    def __init__(self, rngs: nnx.Rngs, rate: float = 0.0):
        self.hidden = nnx.Linear(12, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.out = nnx.Linear(32, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


class Layers(nnx.Module):
    """Few and small arrays in stacked layers, of which one dimension may be odd."""

    def __init__(self, rngs: nnx.Rngs, num_layers: int = 8, width: int = 24):
        self.first = nnx.Linear(12, width, rngs=rngs)
        self.blocks = nnx.vmap(lambda r: nnx.Linear(width, width, rngs=r), in_axes=0, out_axes=0)(
            rngs.split(num_layers)
        )
        self.out = nnx.Linear(width, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def apply(layer: nnx.Linear, x: jax.Array) -> jax.Array:
            return x + jnp.tanh(layer(x))

        return self.out(apply(self.blocks, self.first(x)))
