"""Layers of a decoder: projection, embedding, norms, rotary positions, attention, MLPs.

Parameters are created in float32. Every layer reads each of its parameters once per call, through
`param[...]`, and computes in the dtype that the reading returns: cast the parameters to bfloat16
and the activations are bfloat16. Norms, rotary angles and the softmax are always in float32.

Models name the dimensions of activations ("batch", "sequence", "embed") and never know a mesh.
Without `activation_rules` in force `constrain` is the identity, so that a model runs alone as well
as inside a training step.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from zerojax.config.attention_layouts import BlockLayout
from zerojax.models.attending import Implementation, attend_to_cache, attention
from zerojax.models.context import whole_length
from zerojax.models.sparse_layouts import BlockTable, layout_table
from zerojax.models.zoo.fp8 import fp8_dot, init_history
from zerojax.models.zoo.rope import RopeScaling, rotary_frequencies

_RULES: contextvars.ContextVar[Mapping[str, str] | None] = contextvars.ContextVar(
    "activation_rules", default=None
)


def expand_rank(array: jax.Array, ndim: int) -> jax.Array:
    """`array` with leading dimensions of size 1, so that it broadcasts without rank promotion."""
    return lax.expand_dims(array, range(ndim - array.ndim))


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], stddev: float) -> nnx.Param[jax.Array]:
    """A float32 parameter drawn from N(0, stddev^2)."""
    return nnx.Param(stddev * jax.random.normal(rngs.params(), shape, jnp.float32))


class Weights(NamedTuple):
    """What a `Projection` reads: kernel, and bias if it has one."""

    kernel: jax.Array
    bias: jax.Array | None


class Projection(nnx.Module):
    """A linear map from the last dimensions of its input (`in_shape`) to new ones (`out_shape`).

    Head dimensions stay separate, `kernel: [embed, heads, head_dim]`, so that splitting the heads
    over devices is one entry of a PartitionSpec. With `matmul_dtype="fp8"` the product is of 8-bit
    floats and `amax_history` is its state (see `fp8`). `lora` is added to the result where somebody
    has put one there (see `lora`).
    """

    def __init__(
        self,
        in_shape: tuple[int, ...],
        out_shape: tuple[int, ...],
        *,
        stddev: float,
        use_bias: bool,
        rngs: nnx.Rngs,
        matmul_dtype: str | None = None,
    ) -> None:
        self.num_inputs, self.num_outputs = len(in_shape), len(out_shape)
        self.use_bias = use_bias
        self.matmul_dtype = matmul_dtype
        self.lora: Callable[[jax.Array], jax.Array] | None = None
        self.kernel = normal(rngs, (*in_shape, *out_shape), stddev)
        if matmul_dtype is not None:
            self.amax_history = init_history(self.kernel[...])
        if use_bias:
            self.bias = nnx.Param(jnp.zeros(out_shape, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., *in_shape] -> [..., *out_shape], in the kernel's dtype."""
        return self.apply(self.read(), x)

    def read(self) -> Weights:
        """The parameters as they are read, for one or several calls of `apply`."""
        return Weights(self.kernel[...], self.bias[...] if self.use_bias else None)

    def apply(self, weights: Weights, x: jax.Array) -> jax.Array:
        """`__call__` with parameters that have been read."""
        kernel = weights.kernel
        x = x.astype(kernel.dtype)
        if self.matmul_dtype is None:
            dims = tuple(range(x.ndim - self.num_inputs, x.ndim)), tuple(range(self.num_inputs))
            y = lax.dot_general(x, kernel, (dims, ((), ())))
        else:
            y = fp8_dot(x, kernel, self.amax_history[...], self.num_inputs)
        if weights.bias is not None:
            y = y + expand_rank(weights.bias.astype(y.dtype), y.ndim)
        return y if self.lora is None else y + self.lora(x).astype(y.dtype)


class Embedding(nnx.Module):
    """A table of vectors, `embedding: [num_embeddings, features]`; the output map too when tied."""

    def __init__(
        self, num_embeddings: int, features: int, *, stddev: float, rngs: nnx.Rngs
    ) -> None:
        self.embedding = normal(rngs, (num_embeddings, features), stddev)

    def __call__(self, indices: jax.Array) -> jax.Array:
        """Integers [...] -> [..., features]; an index outside the table gives NaN, never a clip."""
        return jnp.take(self.embedding[...], indices, axis=0, mode="fill")

    def attend(self, x: jax.Array) -> jax.Array:
        """[batch, seq, features] -> dot products with every row [batch, seq, num_embeddings]."""
        table = self.embedding[...]
        return lax.dot_general(x.astype(table.dtype), table, (((x.ndim - 1,), (1,)), ((), ())))


class LayerNorm(nnx.Module):
    """Layer normalisation over the last dimension (arXiv:1607.06450), computed in float32."""

    def __init__(self, features: int, *, eps: float) -> None:
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((features,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((features,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., features] -> the same shape and dtype."""
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        scale = expand_rank(self.scale[...].astype(jnp.float32), x.ndim)
        bias = expand_rank(self.bias[...].astype(jnp.float32), x.ndim)
        return (wide * scale + bias).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation (arXiv:1910.07467), computed in float32."""

    def __init__(self, features: int, *, eps: float) -> None:
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((features,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., features] -> the same shape and dtype."""
        wide = x.astype(jnp.float32)
        wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * expand_rank(self.scale[...].astype(jnp.float32), x.ndim)).astype(x.dtype)


def rotate_positions(
    x: jax.Array,
    positions: jax.Array,
    *,
    theta: float,
    scaling: RopeScaling | None = None,
    seq_len: int = 0,
) -> jax.Array:
    """Rotary position embedding (arXiv:2104.09864), pairing feature i with i + head_dim / 2.

    Args:
      x: [batch, seq, heads, head_dim], head_dim even.
      positions: [seq] or [batch, seq] integers, the position of each token in its text.
      theta: base of the wavelengths; pair i turns by position * theta^(-2 i / head_dim) radians.
      scaling, seq_len: see `rope.rotary_frequencies`.

    Returns:
      The same shape and dtype; the angles and the rotation are computed in float32.
    """
    half = x.shape[-1] // 2
    frequencies = rotary_frequencies(half, theta, scaling, seq_len=seq_len)
    angles = positions.astype(jnp.float32)[..., None] * expand_rank(frequencies, positions.ndim + 1)
    cosine, sine = (expand_rank(f(angles), 3)[:, :, None, :] for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cosine - second * sine, second * cosine + first * sine]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """Self-attention with grouped key/value heads (arXiv:2305.13245), causal unless told otherwise.

    Query, key and value are separate, so that each splits over its own heads. `matmul_dtype` is
    that of the four projections; scores and mixing stay in the dtype of the activations. `layout`
    is of rows of `max_seq_len` tokens; of `window` see `zerojax.attention`.
    """

    def __init__(
        self,
        embed_dim: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        use_bias: bool,
        stddev: float,
        output_stddev: float,
        rope_theta: float | None,
        rngs: nnx.Rngs,
        rope_scaling: RopeScaling | None = None,
        head_dim: int | None = None,
        matmul_dtype: str | None = None,
        is_causal: bool = True,
        implementation: Implementation = "auto",
        layout: BlockLayout | None = None,
        window: int | None = None,
        max_seq_len: int = 0,
    ) -> None:
        head_dim = head_dim or embed_dim // num_heads
        heads, kv_heads = (num_heads, head_dim), (num_kv_heads, head_dim)
        self.rope_theta, self.rope_scaling = rope_theta, rope_scaling
        self.is_causal = is_causal
        self.implementation: Implementation = implementation
        self.layout, self.max_seq_len, self.num_heads = layout, max_seq_len, num_heads
        self.window = window

        def projection(in_shape: tuple[int, ...], out_shape: tuple[int, ...], scale: float):
            return Projection(
                in_shape,
                out_shape,
                stddev=scale,
                use_bias=use_bias,
                rngs=rngs,
                matmul_dtype=matmul_dtype,
            )

        self.query = projection((embed_dim,), heads, stddev)
        self.key = projection((embed_dim,), kv_heads, stddev)
        self.value = projection((embed_dim,), kv_heads, stddev)
        self.output = projection(heads, (embed_dim,), output_stddev)

    def __call__(
        self,
        x: jax.Array,
        visible: jax.Array | None = None,
        *,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Attention of every token to the tokens before it and itself, or to all.

        Args:
          x: [batch, seq, embed].
          visible: bool [batch, seq], False where nobody looks (padding); None: all are seen.
          segments: integers [batch, seq], the text of each token, see `zerojax.attention`; where
            they are given, `visible` is not.
          positions: integers [batch, seq] of each token in its text, for rotary positions; None:
            the indices.

        Returns:
          [batch, seq, embed].
        """
        positions = jnp.arange(x.shape[1]) if positions is None else positions
        query, key, value = self._project(x, positions, whole_length(x.shape[1]))
        seen: Any = segments
        if visible is not None:  # all queries are of segment 0, and so are the keys that are seen
            seen = jnp.zeros(visible.shape, jnp.int32), jnp.where(visible, 0, -1)
        mixed = attention(
            query,
            key,
            value,
            causal=self.is_causal,
            segments=seen,
            window=self.window,
            layout=self._table(),
            implementation=self.implementation,
        )
        return self.output(mixed)

    def extend(
        self, x: jax.Array, cache: tuple[jax.Array, jax.Array], position: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Attention of new tokens to themselves and to all earlier ones, held in a cache.

        Args:
          x: [batch, new, embed], the tokens at position .. position + new - 1.
          cache: keys and values, each [batch, length, kv_heads, head_dim]; what lies at and after
            `position` is overwritten or not looked at.
          position: i32[], number of tokens before `x`; position + new <= length.

        Returns:
          ([batch, new, embed], the cache with the new keys and values written).
        """
        positions = position + jnp.arange(x.shape[1])
        query, key, value = self._project(x, positions, cache[0].shape[1])
        keys = lax.dynamic_update_slice_in_dim(cache[0], key.astype(cache[0].dtype), position, 1)
        values = lax.dynamic_update_slice_in_dim(
            cache[1], value.astype(cache[1].dtype), position, 1
        )
        mixed = attend_to_cache(
            query,
            keys.astype(query.dtype),
            values.astype(query.dtype),
            positions=positions,
            window=self.window,
            table=self._table(),
        )
        return self.output(mixed), (keys, values)

    def _table(self) -> BlockTable | None:
        """The blocks of the longest row; those of a shorter one, or of a cache, are a part."""
        if self.layout is None:
            return None
        return layout_table(self.layout, num_heads=self.num_heads, num_tokens=self.max_seq_len)

    def _project(
        self, x: jax.Array, positions: jax.Array, seq_len: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`seq_len`: tokens of the whole text; with a cache, those that it has room for."""
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.rope_theta is not None:
            rotate = functools.partial(
                rotate_positions,
                positions=positions,
                theta=self.rope_theta,
                scaling=self.rope_scaling,
                seq_len=seq_len,
            )
            query, key = rotate(query), rotate(key)
        return query, key, value


class GeluMlp(nnx.Module):
    """down(gelu(up(x))) with biases; the tanh form of GELU as in GPT-2, or the exact one (BERT)."""

    def __init__(
        self,
        embed_dim: int,
        mlp_dim: int,
        *,
        stddev: float,
        output_stddev: float,
        rngs: nnx.Rngs,
        matmul_dtype: str | None = None,
        exact_gelu: bool = False,
    ) -> None:
        self.exact_gelu = exact_gelu
        build = functools.partial(Projection, use_bias=True, rngs=rngs, matmul_dtype=matmul_dtype)
        self.up = build((embed_dim,), (mlp_dim,), stddev=stddev)
        self.down = build((mlp_dim,), (embed_dim,), stddev=output_stddev)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., embed] -> [..., embed]."""
        return self.apply(self.read(), x)

    def read(self) -> tuple[Weights, ...]:
        """The parameters as they are read, for one or several calls of `apply`."""
        return self.up.read(), self.down.read()

    def apply(self, weights: tuple[Weights, ...], x: jax.Array) -> jax.Array:
        """`__call__` with parameters that have been read."""
        up, down = weights
        hidden = jax.nn.gelu(self.up.apply(up, x), approximate=not self.exact_gelu)
        return self.down.apply(down, hidden)


class SwiGluMlp(nnx.Module):
    """down(silu(gate(x)) * up(x)) without biases (arXiv:2002.05202), as in Llama."""

    def __init__(
        self,
        embed_dim: int,
        mlp_dim: int,
        *,
        stddev: float,
        output_stddev: float,
        rngs: nnx.Rngs,
        matmul_dtype: str | None = None,
    ) -> None:
        build = functools.partial(Projection, use_bias=False, rngs=rngs, matmul_dtype=matmul_dtype)
        self.gate = build((embed_dim,), (mlp_dim,), stddev=stddev)
        self.up = build((embed_dim,), (mlp_dim,), stddev=stddev)
        self.down = build((mlp_dim,), (embed_dim,), stddev=output_stddev)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., embed] -> [..., embed]."""
        return self.apply(self.read(), x)

    def read(self) -> tuple[Weights, ...]:
        """The parameters as they are read, for one or several calls of `apply`."""
        return self.gate.read(), self.up.read(), self.down.read()

    def apply(self, weights: tuple[Weights, ...], x: jax.Array) -> jax.Array:
        """`__call__` with parameters that have been read."""
        gate, up, down = weights
        hidden = jax.nn.silu(self.gate.apply(gate, x)) * self.up.apply(up, x)
        return self.down.apply(down, hidden)


def in_chunks(mlp: GeluMlp | SwiGluMlp, x: jax.Array, chunk: int) -> jax.Array:
    """`mlp(x)` with hidden activations of so many tokens of a row at a time.

    The parameters are read once, outside of the loop over chunks. Their gradients are summed over
    chunks in float32, and the backward pass computes the hidden activations again. A chunk holds
    every n-th token, so that rows that lie in parts over devices are not moved. The idea is that of
    TiledMLP in Arctic Long Sequence Training (arXiv:2506.13996).

    Args:
      mlp: whose projections have neither adapters nor 8-bit products.
      x: [batch, seq, embed].
      chunk: tokens, at least 1.

    Raises:
      ValueError: an adapter, whose random state a loop cannot advance.
    """
    rows, tokens, width = x.shape
    number = -(-tokens // chunk)
    if number == 1:
        return mlp(x)
    if any(child.lora is not None for child in vars(mlp).values() if isinstance(child, Projection)):
        raise ValueError(
            f"mlp_chunk={chunk} computes the MLP in a loop, and the MLP has adapters; use "
            "mlp_chunk=None, or adapters on the attention alone: targets=('attention/',)"
        )
    weights = mlp.read()
    wide = jax.tree.map(lambda array: array.astype(jnp.float32), weights)

    def one(part: jax.Array) -> jax.Array:
        read = jax.tree.map(lambda array, like: array.astype(like.dtype), wide, weights)
        return mlp.apply(read, part)

    size = -(-tokens // number)
    padded = jnp.pad(x, [(0, 0), (0, number * size - tokens), (0, 0)])
    parts = jnp.moveaxis(padded.reshape(rows, size, number, width), 2, 0)
    out = lax.map(jax.checkpoint(one, prevent_cse=False), parts)
    return jnp.moveaxis(out, 0, 2).reshape(rows, number * size, -1)[:, :tokens]


class Dropout(nnx.Dropout):
    """Stock dropout that owns random state only when it has something to drop.

    So a model without dropout has no random state to carry, checkpoint or advance.
    """

    def __init__(self, rate: float, *, rngs: nnx.Rngs) -> None:
        super().__init__(rate, rngs=rngs if rate > 0 else None)


@contextlib.contextmanager
def activation_rules(rules: Mapping[str, str] | None) -> Iterator[None]:
    """Puts `rules` in force while a function is traced.

    Args:
      rules: dimension name -> mesh axis of the mesh in context; a name that is missing stays
        unconstrained. None: no constraint at all.
    """
    token = _RULES.set(rules)
    try:
        yield
    finally:
        _RULES.reset(token)


def constrain(x: jax.Array, dims: tuple[str, ...]) -> jax.Array:
    """Asks the compiler to split `x` as the rules in force say; the identity without rules.

    Args:
      x: an activation.
      dims: one name per dimension of `x`, such as ("batch", "sequence", "embed").
    """
    rules = _RULES.get()
    if not rules or not any(dim in rules for dim in dims):
        return x
    spec = P(*(rules.get(dim, P.UNCONSTRAINED) for dim in dims))
    return jax.lax.with_sharding_constraint(x, spec)
