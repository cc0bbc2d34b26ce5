"""Models that are called, in Linen and as pairs of functions, whose layers a Python loop calls.

None knows zerojax. Those in Flax NNX are in `listed_decoders`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from tests.support.listed_decoders import DROPPED
from zerojax.models.losses import next_token


class LinenBlock(linen.Module):
    """A norm and an MLP with dropout."""

    width: int

    @linen.compact
    def __call__(self, x: jax.Array, is_training: bool) -> jax.Array:
        hidden = linen.gelu(linen.Dense(2 * self.width)(linen.LayerNorm()(x)))
        dropout = linen.Dropout(DROPPED, deterministic=not is_training)
        return x + dropout(linen.Dense(self.width)(hidden))


class NamedLinen(linen.Module):
    """Layers that are named by their number, as with `name=f"block_{index}"`."""

    naming: str
    layers: int
    width: int
    vocab: int
    has_remat: bool = False

    @linen.compact
    def __call__(self, tokens: jax.Array, is_training: bool) -> jax.Array:
        x = linen.Embed(self.vocab, self.width, name="embed")(tokens)
        kind = linen.remat(LinenBlock, static_argnums=(2,)) if self.has_remat else LinenBlock
        for index in range(self.layers):
            x = kind(self.width, name=self.naming.format(index))(x, is_training)
        return linen.Dense(self.vocab, name="head")(x)


class ListedLinen(linen.Module):
    """Layers in a list that `setup` makes."""

    layers: int
    width: int
    vocab: int

    def setup(self) -> None:
        self.embed = linen.Embed(self.vocab, self.width)
        self.blocks = [LinenBlock(self.width) for _ in range(self.layers)]
        self.head = linen.Dense(self.vocab)

    def __call__(self, tokens: jax.Array, is_training: bool) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, is_training)
        return self.head(x)


_LINEN = {
    "linen_block": functools.partial(NamedLinen, "block_{}"),
    "linen_h": functools.partial(NamedLinen, "h_{}"),
    "linen_remat": functools.partial(NamedLinen, "block_{}", has_remat=True),
    "linen_setup": ListedLinen,
}


def _init_layers(layers: int, width: int, vocab: int, key: jax.Array) -> list[dict]:
    keys = jax.random.split(key, 2 * layers)
    shapes = ((width, 2 * width), (2 * width, width))
    return [
        {
            name: jax.random.normal(keys[2 * index + side], shape) / width**0.5
            for side, (name, shape) in enumerate(zip(("up", "down"), shapes, strict=True))
        }
        for index in range(layers)
    ]


def _functions(
    layers: int, width: int, vocab: int, *, naming: str | None = None, dtype: Any = None
) -> tuple[Callable, Callable]:
    """`(init, apply)` over plain dicts: a list `layers`, or one entry for each layer.

    Args:
      naming: of the entries, such as "h.{}".
      dtype: that all parameters are rounded to, before the first layer.
    """

    def init(key: jax.Array) -> dict:
        made = _init_layers(layers, width, vocab, key)
        named = (
            {naming.format(i): one for i, one in enumerate(made)} if naming else {"layers": made}
        )
        return {"embed": jax.random.normal(key, (vocab, width)) / width**0.5, **named}

    def apply(params: dict, tokens: jax.Array, is_training: bool) -> jax.Array:
        if dtype is not None:
            params = jax.tree.map(lambda array: array.astype(dtype).astype(jnp.float32), params)
        x = params["embed"][tokens]
        for index in range(layers):
            layer = params[naming.format(index)] if naming else params["layers"][index]
            x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
        return x @ params["embed"].T

    return init, apply


_FUNCTIONS = {
    "functions": _functions,
    "functions_dotted": functools.partial(_functions, naming="h.{}"),
    "functions_cast_first": functools.partial(_functions, dtype=jnp.bfloat16),
}
CALLED_STYLES: tuple[str, ...] = (*_LINEN, *_FUNCTIONS)
"""Models in Linen, and pairs of functions: they bring no loss, see `loss_of_call`."""


def build_called(style: str, *, layers: int = 6, width: int = 16, vocab: int = 32) -> Any:
    """A `linen.Module` or a pair of functions; called with tokens and whether it trains."""
    if style in _LINEN:
        return _LINEN[style](layers=layers, width=width, vocab=vocab)
    return _FUNCTIONS[style](layers, width, vocab)


def loss_of_call(model: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The loss of what `build_called` gives, bound by zerojax."""
    return next_token(model(batch["tokens"], model.training), batch["targets"])
