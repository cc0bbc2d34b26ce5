"""Transformers that users write themselves, with names that say nothing about their use."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen, nnx

from zerojax.models.losses import mean_squared_error, next_token

VOCAB, WIDTH, LENGTH, HEADS = 64, 32, 16, 4


def linear(inputs: int, outputs: int, rngs: nnx.Rngs, *, bias: bool = True) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, use_bias=bias, rngs=rngs)


class Attention(nnx.Module):
    """Grouped heads, which a reshape makes from the features of plain matrices."""

    def __init__(self, width: int, heads: int, kv_heads: int, rngs: nnx.Rngs):
        self.heads, self.kv_heads = heads, kv_heads
        narrow = width // heads * kv_heads
        self.a, self.b = linear(width, width, rngs), linear(width, narrow, rngs)
        self.c, self.d = linear(width, narrow, rngs), linear(width, width, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        rows, tokens, width = x.shape
        features = width // self.heads
        query = self.a(x).reshape(rows, tokens, self.heads, features)
        key = self.b(x).reshape(rows, tokens, self.kv_heads, features)
        value = self.c(x).reshape(rows, tokens, self.kv_heads, features)
        groups = self.heads // self.kv_heads
        key, value = (jnp.repeat(array, groups, axis=2) for array in (key, value))
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return self.d(mixed.reshape(rows, tokens, width))


class FusedAttention(nnx.Module):
    """Queries, keys and values from one matrix."""

    def __init__(self, width: int, heads: int, kv_heads: int, rngs: nnx.Rngs):
        self.heads = heads
        self.a, self.d = linear(width, 3 * width, rngs), linear(width, width, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (*x.shape[:2], self.heads, x.shape[2] // self.heads)
        query, key, value = (part.reshape(shape) for part in jnp.split(self.a(x), 3, axis=-1))
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return self.d(mixed.reshape(x.shape))


class Block(nnx.Module):
    attention: ClassVar[Any] = Attention

    def __init__(self, width: int, heads: int, kv_heads: int, rngs: nnx.Rngs):
        self.e, self.f = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
        self.g = self.attention(width, heads, kv_heads, rngs)
        self.h, self.i = (linear(width, 3 * width, rngs, bias=False) for _ in range(2))
        self.j = linear(3 * width, width, rngs, bias=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.g(self.e(x))
        normed = self.f(x)
        return x + self.j(jax.nn.silu(self.h(normed)) * self.i(normed))


class FusedBlock(Block):
    attention: ClassVar[Any] = FusedAttention


class OwnDecoder(nnx.Module):
    """Layers in a Python list, learned positions, an output layer with a bias."""

    block: ClassVar[Any] = Block

    def __init__(self, rngs: nnx.Rngs, heads: int = HEADS, kv_heads: int = 2, layers: int = 3):
        self.k = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.l = nnx.Param(0.02 * jax.random.normal(rngs.params(), (LENGTH, WIDTH)))
        self.m = nnx.List([self.block(WIDTH, heads, kv_heads, rngs) for _ in range(layers)])
        self.n = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.o = linear(WIDTH, VOCAB, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.k(tokens) + self.l[: tokens.shape[1]][None]
        for block in self.m:
            x = block(x)
        return self.o(self.n(x))

    def loss(self, batch: dict) -> Any:
        return next_token(self(batch["tokens"]), batch["targets"])


class FusedDecoder(OwnDecoder):
    block: ClassVar[Any] = FusedBlock


class LinenBlock(linen.Module):
    """Stock attention of Linen, and an MLP."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        normed = linen.LayerNorm()(x)
        x = x + linen.MultiHeadDotProductAttention(num_heads=HEADS)(normed)
        hidden = linen.gelu(linen.Dense(4 * WIDTH)(linen.LayerNorm()(x)))
        return x + linen.Dense(WIDTH)(hidden)


class LinenDecoder(linen.Module):
    """Layers in a Python loop, and an output tied to the embedding."""

    @linen.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = linen.Embed(VOCAB, WIDTH)
        x = embed(tokens)
        for _ in range(2):
            x = LinenBlock()(x)
        return embed.attend(linen.LayerNorm()(x))


class Mlp(nnx.Module):
    """Two layers; `down` is the first."""

    def __init__(self, rngs: nnx.Rngs):
        self.down, self.up = linear(32, 256, rngs), linear(256, 32, rngs)

    def loss(self, batch: dict) -> Any:
        return mean_squared_error(self.up(nnx.gelu(self.down(batch["x"]))), batch["x"])
