"""Layers of a transformer: projection, embedding, norms, MLPs, dropout.

Parameters are created in float32. Every layer reads each of its parameters once per call, by
`param[...]`, and computes in the dtype of the parameters: with parameters cast to bfloat16, the
activations are bfloat16. Norms are always computed in float32.

Models name the dimensions of activations ("batch", "sequence", "embed") and do not depend on the
mesh. Outside an `activation_rules` context, `constrain` is the identity, so that models also run
outside a training step.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from zerojax.config.checks import check_finite
from zerojax.config.compression import BitScheduleConfig
from zerojax.config.late_dataclasses import dataclass
from zerojax.operators.rounded_weights import FORMATS, check_inputs, coded_dot, rounded_dot
from zerojax.tracing.reads import in_eight_bits
from zerojax.zoo.bit_widths import is_always_full, levels_after, new_update_count
from zerojax.zoo.fp8 import fp8_dots, init_history, rounded_format

_RULES: contextvars.ContextVar[Mapping[str, str] | None] = contextvars.ContextVar(
    "activation_rules", default=None
)


def expand_rank(array: jax.Array, ndim: int) -> jax.Array:
    """Adds leading dimensions of size 1, so that `array` broadcasts without rank promotion."""
    return lax.expand_dims(array, range(ndim - array.ndim))


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], stddev: float) -> nnx.Param[jax.Array]:
    """Creates a float32 parameter drawn from N(0, stddev^2)."""
    return nnx.Param(stddev * jax.random.normal(rngs.params(), shape, jnp.float32))


class Weights(NamedTuple):
    """Values of a `Projection`'s parameters: kernel, and bias if it has one."""

    kernel: jax.Array
    bias: jax.Array | None
    largest: jax.Array | None = None
    """float32 []: largest magnitude, for a kernel in 8 bits (see `fp8.fp8_dots`); else None."""
    scale: jax.Array | None = None
    """Scale of each output, for a kernel of int8 or float8 codes (see `weight_only`); else None."""
    levels: jax.Array | None = None
    """float32 [2]: entry of `LEVELS` for a kernel rounded by a schedule; else None."""


class Projection(nnx.Module):
    """Linear map from the last dimensions of its input (`in_shape`) to new ones (`out_shape`).

    Head dimensions stay separate, `kernel: [embed, heads, head_dim]`, so that one entry of a
    PartitionSpec shards the heads. With `matmul_dtype="fp8"` the product is computed in 8-bit
    floats, with `amax_history` as state (see `fp8`). With "fake_int8" or "fake_int4" the kernel is
    rounded in the product (see `operators.rounded_weights`), with `bit_schedule` to a width that
    depends on `num_updates`, the number of applied updates. With `kernel_scale` the kernel holds
    int8 or float8 codes (see `weight_only`). If `lora` (an adapter) is set, its result is added.
    """

    kernel_scale: nnx.Param[jax.Array] | None = None

    def __init__(
        self,
        in_shape: tuple[int, ...],
        out_shape: tuple[int, ...],
        *,
        stddev: float,
        use_bias: bool,
        rngs: nnx.Rngs,
        matmul_dtype: str | None = None,
        bit_schedule: BitScheduleConfig | None = None,
    ) -> None:
        self.num_inputs, self.num_outputs = len(in_shape), len(out_shape)
        self.use_bias = use_bias
        self.matmul_dtype = matmul_dtype
        self.lora: Callable[[jax.Array], jax.Array] | None = None
        self.kernel = normal(rngs, (*in_shape, *out_shape), stddev)
        if matmul_dtype == "fp8":
            self.amax_history = init_history(self.kernel[...])
        elif matmul_dtype is not None:
            check_inputs(rounded_format(matmul_dtype), math.prod(in_shape))
        self.bit_schedule = None if is_always_full(bit_schedule) else bit_schedule
        if self.bit_schedule is not None:
            self.num_updates, self.step_count = new_update_count()
        if use_bias:
            self.bias = nnx.Param(jnp.zeros(out_shape, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [..., *in_shape] to [..., *out_shape], in the dtype of the kernel or of
        `kernel_scale`."""
        return self.apply(self.read(), x)

    def read(self) -> Weights:
        """Reads the parameters, for one or several calls of `apply`."""
        bias = self.bias[...] if self.use_bias else None
        if self.kernel_scale is not None:
            return Weights(self.kernel[...], bias, scale=self.kernel_scale[...])
        if self.matmul_dtype != "fp8":
            return Weights(self.kernel[...], bias, levels=self._levels())
        with in_eight_bits(self.amax_history[...]) as eight_bits:
            kernel = self.kernel[...]
        return Weights(kernel, bias, eight_bits.largest)

    def _levels(self) -> jax.Array | None:
        if self.bit_schedule is None or self.matmul_dtype is None:
            return None
        bits = FORMATS[rounded_format(self.matmul_dtype)].bits
        return levels_after(self.num_updates[...], self.bit_schedule, bits)

    def apply(self, weights: Weights, x: jax.Array) -> jax.Array:
        """Computes `__call__` with parameters returned by `read`."""
        return apply_together([self], [weights], x)[0]

    def finish(self, weights: Weights, x: jax.Array, y: jax.Array) -> jax.Array:
        """Adds the bias and `lora(x)` to the product `y`."""
        if weights.bias is not None:
            y = y + expand_rank(weights.bias.astype(y.dtype), y.ndim)
        return y if self.lora is None else y + self.lora(x).astype(y.dtype)


def apply_together(
    projections: Sequence[Projection], weights: Sequence[Weights], x: jax.Array
) -> list[jax.Array]:
    """Applies several projections to one input; 8-bit products store one copy of the input.

    Args:
      projections: projections with the same `in_shape` and `matmul_dtype`.
      weights: result of each projection's `read`, all in one dtype.
      x: [..., *in_shape].

    Returns:
      The result of each projection, as if it had been called.
    """
    first = projections[0]
    kernels = [w.kernel for w in weights]
    scales = [w.scale for w in weights if w.scale is not None]
    x = x if scales else x.astype(kernels[0].dtype)
    if scales:
        pairs = zip(kernels, scales, strict=True)
        products = [coded_dot(x, codes, scale, first.num_inputs) for codes, scale in pairs]
    elif first.matmul_dtype is None:
        dims = tuple(range(x.ndim - first.num_inputs, x.ndim)), tuple(range(first.num_inputs))
        products = [lax.dot_general(x, kernel, (dims, ((), ()))) for kernel in kernels]
    elif first.matmul_dtype != "fp8":
        name = rounded_format(first.matmul_dtype)
        products = [
            rounded_dot(x, each.kernel, name, first.num_inputs, each.levels) for each in weights
        ]
    else:
        histories = tuple(projection.amax_history[...] for projection in projections)
        largest = tuple(w.largest for w in weights)
        products = list(fp8_dots(x, tuple(kernels), histories, largest, first.num_inputs))
    triples = zip(projections, weights, products, strict=True)
    return [projection.finish(w, x, y) for projection, w, y in triples]


class Embedding(nnx.Module):
    """Table of vectors, `embedding: [num_embeddings, features]`; `attend` is for tied outputs."""

    def __init__(
        self, num_embeddings: int, features: int, *, stddev: float, rngs: nnx.Rngs
    ) -> None:
        self.embedding = normal(rngs, (num_embeddings, features), stddev)

    def __call__(self, indices: jax.Array) -> jax.Array:
        """Maps integers [...] to [..., features]; an index outside the table gives NaN."""
        return jnp.take(self.embedding[...], indices, axis=0, mode="fill")

    def attend(self, x: jax.Array) -> jax.Array:
        """Computes dot products of [batch, seq, features] with all rows of the table.

        Returns:
          Dot products [batch, seq, num_embeddings], in the dtype of the table.
        """
        table = self.embedding[...]
        return lax.dot_general(x.astype(table.dtype), table, (((x.ndim - 1,), (1,)), ((), ())))


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """Settings of a norm.

    Attributes:
      kind: "rms" (arXiv:1910.07467), or "layer", which subtracts the mean (arXiv:1607.06450).
      eps: number added to the mean square.
      has_scale, has_bias: whether features are multiplied by a learned scale, and whether a learned
        bias is added.
      scale_offset: number added to the stored scale; 1 in Gemma, whose scales start at 0.
      rounds_first: whether the normalized features are cast to the input's dtype before they are
        scaled, as in transformers' Llama; False casts afterwards.
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-5
    has_scale: bool = True
    has_bias: bool = False
    scale_offset: float = 0.0
    rounds_first: bool = False

    def __post_init__(self) -> None:
        check_finite(self)
        if self.kind not in ("rms", "layer"):
            raise ValueError(f"norm kind={self.kind!r} is unknown; use rms or layer")
        if not self.eps > 0:
            raise ValueError(f"norm eps={self.eps} must be above 0; 1e-5 is usual")


class Norm(nnx.Module):
    """Normalization over the last len(shape) dimensions jointly, computed in float32."""

    def __init__(self, shape: tuple[int, ...], config: NormConfig) -> None:
        self.config, self.num_dims = config, len(shape)
        if config.has_scale:
            self.scale = nnx.Param(jnp.full(shape, 1.0 - config.scale_offset, jnp.float32))
        if config.has_bias:
            self.bias = nnx.Param(jnp.zeros(shape, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes [..., *shape]; shape and dtype are unchanged."""
        config, dims = self.config, tuple(range(x.ndim - self.num_dims, x.ndim))
        wide = x.astype(jnp.float32)
        if config.kind == "layer":
            wide = wide - jnp.mean(wide, axis=dims, keepdims=True)
        wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=dims, keepdims=True) + config.eps)
        if config.rounds_first:
            wide = wide.astype(x.dtype).astype(jnp.float32)
        scale, bias = (
            expand_rank(getattr(self, name)[...].astype(jnp.float32), x.ndim) if has else None
            for name, has in (("scale", config.has_scale), ("bias", config.has_bias))
        )
        if scale is not None:
            wide = wide * (scale + config.scale_offset if config.scale_offset else scale)
        return (wide if bias is None else wide + bias).astype(x.dtype)


class LayerNorm(Norm):
    """Layer normalization over the last dimension, with scale and bias."""

    def __init__(self, features: int, *, eps: float) -> None:
        super().__init__((features,), NormConfig(kind="layer", eps=eps, has_bias=True))


ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
}
"""{name: activation function of an MLP}."""


class Mlp(nnx.Module):
    """MLP: down(f(up(x))), or, if gated, down(f(gate(x)) * up(x)) (arXiv:2002.05202).

    `dropout` is the dropout probability of hidden activations.
    """

    def __init__(
        self,
        embed_dim: int,
        mlp_dim: int,
        *,
        activation: str,
        gated: bool,
        use_bias: bool,
        stddev: float,
        output_stddev: float,
        rngs: nnx.Rngs,
        matmul_dtype: str | None = None,
        bit_schedule: BitScheduleConfig | None = None,
        dropout: float = 0.0,
    ) -> None:
        self.activation = activation
        build = functools.partial(
            Projection,
            use_bias=use_bias,
            rngs=rngs,
            matmul_dtype=matmul_dtype,
            bit_schedule=bit_schedule,
        )
        self.gate = build((embed_dim,), (mlp_dim,), stddev=stddev) if gated else None
        self.up = build((embed_dim,), (mlp_dim,), stddev=stddev)
        self.down = build((mlp_dim,), (embed_dim,), stddev=output_stddev)
        self.dropout = Dropout(dropout, rngs=rngs) if dropout else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [..., embed] to [..., embed]."""
        return self.apply(self.read(), x)

    def read(self) -> tuple[Weights, ...]:
        """Reads the parameters, for one or several calls of `apply`."""
        gate = () if self.gate is None else (self.gate.read(),)
        return *gate, self.up.read(), self.down.read()

    def apply(self, weights: tuple[Weights, ...], x: jax.Array) -> jax.Array:
        """Computes `__call__` with parameters returned by `read`."""
        *gate, up, down = weights
        act = ACTIVATIONS[self.activation]
        if self.gate is None:
            hidden = act(self.up.apply(up, x))
        else:
            gates, wide = apply_together([self.gate, self.up], [*gate, up], x)
            hidden = act(gates) * wide
        return self.down.apply(down, hidden if self.dropout is None else self.dropout(hidden))


def in_chunks(mlp: Mlp, x: jax.Array, chunk: int) -> jax.Array:
    """Computes `mlp(x)` in a loop over chunks of the tokens of a row, to save memory.

    The parameters are read once, outside the loop. Their gradients are summed over chunks in
    float32; the backward pass recomputes the hidden activations. A chunk takes every n-th token, so
    that rows sharded over devices need no communication. The method follows TiledMLP of Arctic Long
    Sequence Training (arXiv:2506.13996).

    Args:
      mlp: MLP without adapters and 8-bit products.
      x: [batch, seq, embed].
      chunk: maximum number of tokens of a row per chunk, at least 1.

    Raises:
      ValueError: the MLP has an adapter, whose random state the loop cannot advance.
    """
    rows, tokens, width = x.shape
    number = -(-tokens // chunk)
    if number == 1:
        return mlp(x)
    if any(child.lora is not None for child in vars(mlp).values() if isinstance(child, Projection)):
        raise ValueError(
            f"mlp_chunk={chunk} is not supported for an MLP with adapters; use "
            "mlp_chunk=None, or adapters in the attention only: targets=('attention/',)"
        )
    weights = mlp.read()
    # The chunks use these copies, so that the loop adds their gradients in float32.
    wide = jax.tree.map(lambda array: array.astype(jnp.float32), weights)

    def apply_chunk(part: jax.Array) -> jax.Array:
        narrow = jax.tree.map(lambda array, like: array.astype(like.dtype), wide, weights)
        return mlp.apply(narrow, part)

    size = -(-tokens // number)
    padded = jnp.pad(x, [(0, 0), (0, number * size - tokens), (0, 0)])
    parts = jnp.moveaxis(padded.reshape(rows, size, number, width), 2, 0)
    # In a loop XLA cannot merge the recomputation with the forward pass; barriers are not needed.
    out = lax.map(jax.checkpoint(apply_chunk, prevent_cse=False), parts)
    return jnp.moveaxis(out, 0, 2).reshape(rows, number * size, -1)[:, :tokens]


class Dropout(nnx.Dropout):
    """Flax's Dropout, but without random state if the rate is 0.

    A model without dropout therefore has no random state to carry, checkpoint or advance.
    """

    def __init__(self, rate: float, *, rngs: nnx.Rngs) -> None:
        super().__init__(rate, rngs=rngs if rate > 0 else None)


@contextlib.contextmanager
def activation_rules(rules: Mapping[str, str] | None) -> Iterator[None]:
    """Activates `rules` for `constrain` while a function is traced.

    Args:
      rules: {dimension name: axis of the current mesh}; dimensions without a rule are
        unconstrained. None makes `constrain` the identity.
    """
    token = _RULES.set(rules)
    try:
        yield
    finally:
        _RULES.reset(token)


def constrain(x: jax.Array, dims: tuple[str, ...]) -> jax.Array:
    """Constrains the sharding of `x` by the active rules; returns `x` unchanged without rules.

    Args:
      x: an activation.
      dims: one name per dimension of `x`, such as ("batch", "sequence", "embed").
    """
    rules = _RULES.get()
    if not rules or not any(dim in rules for dim in dims):
        return x
    spec = P(*(rules.get(dim, P.UNCONSTRAINED) for dim in dims))
    return jax.lax.with_sharding_constraint(x, spec)
