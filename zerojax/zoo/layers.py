"""Layers of a transformer: projection, embedding, norms, MLPs, dropout.

Parameters are created in float32. Every layer reads each of its parameters once per call, through
`param[...]`, and computes in the dtype that the reading returns: cast the parameters to bfloat16
and the activations are bfloat16. Norms are always in float32.

Models name the dimensions of activations ("batch", "sequence", "embed") and never know a mesh.
Without `activation_rules` in force `constrain` is the identity, so that a model runs alone as well
as inside a training step.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from zerojax.config.checks import check_finite
from zerojax.tracing.reads import in_eight_bits
from zerojax.zoo.fp8 import fp8_dots, init_history

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
    largest: jax.Array | None = None
    """float32 []: of a kernel that is rounded to 8 bits, see `fp8.fp8_dots`; None: as it is."""


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
        bias = self.bias[...] if self.use_bias else None
        if self.matmul_dtype is None:
            return Weights(self.kernel[...], bias)
        with in_eight_bits(self.amax_history[...]) as asked:
            kernel = self.kernel[...]
        return Weights(kernel, bias, asked.largest)

    def apply(self, weights: Weights, x: jax.Array) -> jax.Array:
        """`__call__` with parameters that have been read."""
        return apply_together([self], [weights], x)[0]

    def finish(self, weights: Weights, x: jax.Array, y: jax.Array) -> jax.Array:
        """The result from the product `y`: the bias and what `lora` makes of `x` are added."""
        if weights.bias is not None:
            y = y + expand_rank(weights.bias.astype(y.dtype), y.ndim)
        return y if self.lora is None else y + self.lora(x).astype(y.dtype)


def apply_together(
    projections: Sequence[Projection], weights: Sequence[Weights], x: jax.Array
) -> list[jax.Array]:
    """What several projections make of one input, of which 8-bit products keep one copy.

    Args:
      projections: all with the same `in_shape` and `matmul_dtype`.
      weights: of each, as they have been read, in one dtype.
      x: [..., *in_shape].
    """
    first = projections[0]
    kernels = [each.kernel for each in weights]
    x = x.astype(kernels[0].dtype)
    if first.matmul_dtype is None:
        dims = tuple(range(x.ndim - first.num_inputs, x.ndim)), tuple(range(first.num_inputs))
        products = [lax.dot_general(x, kernel, (dims, ((), ()))) for kernel in kernels]
    else:
        histories = tuple(each.amax_history[...] for each in projections)
        largest = tuple(each.largest for each in weights)
        products = list(fp8_dots(x, tuple(kernels), histories, largest, first.num_inputs))
    given = zip(projections, weights, products, strict=True)
    return [projection.finish(read, x, y) for projection, read, y in given]


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormConfig:
    """What a norm is.

    Attributes:
      kind: "rms" (arXiv:1910.07467), or "layer", which takes the mean off (arXiv:1607.06450).
      eps: added to the mean square.
      has_scale, has_bias: whether features are multiplied with a learned scale, and get a bias.
      scale_offset: added to the stored scale, 1 in Gemma, whose scales start at 0.
      rounds_first: whether the normalised features get their dtype back before they are scaled, as
        in transformers' Llama; else after.
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
    """Normalisation over the last dimensions, of `shape` together, computed in float32."""

    def __init__(self, shape: tuple[int, ...], config: NormConfig) -> None:
        self.config, self.num_dims = config, len(shape)
        if config.has_scale:
            self.scale = nnx.Param(jnp.full(shape, 1.0 - config.scale_offset, jnp.float32))
        if config.has_bias:
            self.bias = nnx.Param(jnp.zeros(shape, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., *shape] -> the same shape and dtype."""
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
    """Layer normalisation of features, with scale and bias."""

    def __init__(self, features: int, *, eps: float) -> None:
        super().__init__((features,), NormConfig(kind="layer", eps=eps, has_bias=True))


ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
}
"""Of an MLP, by name."""


class Mlp(nnx.Module):
    """down(f(up(x))), or, gated, down(f(gate(x)) * up(x)) (arXiv:2002.05202).

    `dropout` is the probability of hidden activations.
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
        dropout: float = 0.0,
    ) -> None:
        self.activation = activation
        build = functools.partial(
            Projection, use_bias=use_bias, rngs=rngs, matmul_dtype=matmul_dtype
        )
        self.gate = build((embed_dim,), (mlp_dim,), stddev=stddev) if gated else None
        self.up = build((embed_dim,), (mlp_dim,), stddev=stddev)
        self.down = build((mlp_dim,), (embed_dim,), stddev=output_stddev)
        self.dropout = Dropout(dropout, rngs=rngs) if dropout else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., embed] -> [..., embed]."""
        return self.apply(self.read(), x)

    def read(self) -> tuple[Weights, ...]:
        """The parameters as they are read, for one or several calls of `apply`."""
        gate = () if self.gate is None else (self.gate.read(),)
        return *gate, self.up.read(), self.down.read()

    def apply(self, weights: tuple[Weights, ...], x: jax.Array) -> jax.Array:
        """`__call__` with parameters that have been read."""
        *gate, up, down = weights
        act = ACTIVATIONS[self.activation]
        if self.gate is None:
            hidden = act(self.up.apply(up, x))
        else:
            opened, wide = apply_together([self.gate, self.up], [*gate, up], x)
            hidden = act(opened) * wide
        return self.down.apply(down, hidden if self.dropout is None else self.dropout(hidden))


def in_chunks(mlp: Mlp, x: jax.Array, chunk: int) -> jax.Array:
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
