"""Loss of a language model's head in chunks of tokens, without an array of all logits.

Logits are computed for one chunk of tokens at a time. From the logits of a chunk, the gradients of
the hidden states and of the head are computed at once, for a cotangent of 1. The backward pass only
scales these gradients, so it recomputes nothing, unlike `jax.checkpoint`, and does not read the
head. The method is that of Liger Kernel (arXiv:2410.10989), with two differences: the head's
gradient is always summed in float32, and gradients that are not needed are not computed.

On a GPU the bytes of the logits limit the speed, so they are stored once, in the head's dtype, and
their gradient replaces them. Per chunk they are written by the product, read by one reduction,
replaced by their gradient, and read by the two products of the gradients.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.typing import DTypeLike

from zerojax.config.late_dataclasses import dataclass
from zerojax.operators.marks import LINEAR_RULE

_LARGEST_OF_16_BITS, _LARGEST = 3072, 1024
"""Largest number of tokens of an "auto" chunk, for logits of 16 bits and of 32. Then a chunk needs
no more memory than 1024 tokens with float32 logits and a separate gradient in the head's dtype: 6
bytes per token and entry of the vocabulary, with 16 bits. Larger chunks would move less, but raise
the peak: GPT-2 124M, 16,384 tokens, unrolled, compiled for an H100, moves 59.7 GB with a peak of
8.31 GB; with 4096 tokens 59.0 and 8.44; with chunks of 1024 and float32 logits 73.3 and 8.36."""
_TILE = 128
"""Rows of a tile of matrix products on GPUs."""
_FLOAT16_LIMIT = 2.0**15
"""Largest power of two in float16; gradients of float16 logits are scaled up by at most it."""


def head_next_token(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    weights: jax.Array | None = None,
    *,
    vocab_dim: int,
    chunk: int | Literal["auto"],
    scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes the cross-entropy of targets under `softmax(hidden @ head)`, in chunks of tokens.

    The result equals `models.losses.next_token` of the logits, up to float32 rounding. Products
    take operands in the head's dtype and accumulate in float32. Logits are rounded once, to the
    head's dtype, as by a model that returns logits; scale, cap, exponentials and sums are float32.
    Gradients of the logits are rounded to the head's dtype. Has only first derivatives in reverse
    mode.

    Args:
      hidden: [..., width], any float dtype; cast to the head's dtype.
      head: [vocab, width] (`vocab_dim=0`) or [width, vocab] (`vocab_dim=1`). Read once, outside of
        the loop over chunks.
      targets: integers [...], the token that follows each position. A value outside of the
        vocabulary makes loss and gradients NaN, unless its weight is 0.
      weights: [...], weights of the positions; weight 0 ignores a position. None uses weight 1.
      vocab_dim: dimension of `head` that is the vocabulary.
      chunk: maximum number of tokens whose logits exist at the same time; "auto" for at most 3072
        tokens in a dtype of 16 bits and 1024 in float32.
      scale: factor of the logits.
      softcap: limit of the scaled logits, which become softcap * tanh(logits / softcap); None for
        no limit.

    Returns:
      (sum over positions of weight x negative log-likelihood in nats, sum of weights), float32.

    Raises:
      ValueError: shapes do not match, or `chunk` is below 1.
      NotImplementedError: the caller takes a second derivative.
    """
    _check(hidden, head, targets, weights, vocab_dim=vocab_dim, chunk=chunk)
    count = targets.size
    targets = targets.astype(jnp.int32).reshape(count)
    weights = jnp.ones(count, jnp.float32) if weights is None else weights
    counted = weights.astype(jnp.float32).reshape(count)
    known = (targets >= 0) & (targets < head.shape[vocab_dim])
    total = _loss_sum(
        _Cut(vocab_dim, _size(count, head.dtype, chunk), scale, softcap),
        hidden.reshape(count, -1).astype(head.dtype),
        head,
        targets,
        jnp.where(known | (counted == 0), counted, jnp.nan),
    )
    return total, jnp.sum(counted)


def _check(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    weights: jax.Array | None,
    *,
    vocab_dim: int,
    chunk: int | Literal["auto"],
) -> None:
    if chunk != "auto" and chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1 token; 1024 is usual")
    if not hidden.size:
        raise ValueError(f"hidden has shape {hidden.shape}, which is no token; give at least one")
    if vocab_dim not in (0, 1):
        raise ValueError(f"vocab_dim={vocab_dim} must be 0 ([vocab, width]) or 1 ([width, vocab])")
    if head.ndim != 2 or head.shape[1 - vocab_dim] != hidden.shape[-1]:
        raise ValueError(
            f"head has shape {head.shape}, but with vocab_dim={vocab_dim} its dimension"
            f" {1 - vocab_dim} must be {hidden.shape[-1]}, the width of hidden"
        )
    for name, array in (("targets", targets), ("weights", weights)):
        if array is not None and array.shape != hidden.shape[:-1]:
            raise ValueError(
                f"{name} have shape {array.shape}, but hidden has shape {hidden.shape}; use one"
                f" value for each position, shape {hidden.shape[:-1]}"
            )


def _size(count: int, dtype: np.dtype, chunk: int | Literal["auto"]) -> int:
    """Returns the number of tokens of each chunk but one, which may have fewer. Chunks are about
    even; those of "auto" are whole tiles."""
    tile = _TILE if chunk == "auto" else 1
    usual = _LARGEST_OF_16_BITS if dtype.itemsize == 2 else _LARGEST
    most = usual if chunk == "auto" else chunk
    even = -(-count // -(-count // most))
    return min(-(-even // tile) * tile, most)


@dataclass(frozen=True)
class _Cut:
    """Static options of a call of `head_next_token`, and the size of its chunks.

    Attributes:
      vocab_dim: dimension of the head that is the vocabulary.
      size: number of tokens of each chunk, except of the first, which may be smaller.
      scale, softcap: options of the logits, as for `head_next_token`.
    """

    vocab_dim: int
    size: int
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class _Needed:
    """Choice of gradients that are computed together with the loss."""

    hidden: bool = False
    head: bool = False
    weights: bool = False


# --- differentiation ------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss_sum(
    cut: _Cut, hidden: jax.Array, head: jax.Array, targets: jax.Array, counted: jax.Array
) -> jax.Array:
    """Computes the weighted sum over [tokens]; computes no gradient unless differentiated."""
    loss = _sums_of_chunks(cut, _Needed(), hidden, head, targets, counted)["loss"]
    return checkpoint_name(loss, LINEAR_RULE)


def _forward(
    cut: _Cut,
    hidden: CustomVJPPrimal,
    head: CustomVJPPrimal,
    targets: CustomVJPPrimal,
    counted: CustomVJPPrimal,
) -> tuple[Any, Any]:
    needed = _Needed(hidden.perturbed, head.perturbed, counted.perturbed)
    made = _as_one_operation(cut, needed, hidden.value, head.value, targets.value, counted.value)
    # An empty array carries the dtype of the gradients to the backward pass.
    like = jnp.zeros(0, head.value.dtype)
    return made.pop("loss"), (made, like)


def _backward(
    cut: _Cut, kept: tuple[dict[str, Any], jax.Array], scale: jax.Array | SymbolicZero
) -> tuple[Any, ...]:
    made, like = kept
    # Nothing that is differentiated reads the loss.
    if isinstance(scale, SymbolicZero):
        return None, None, None, None

    def scaled(name: str, dtype: DTypeLike) -> jax.Array | None:
        return (made[name].astype(jnp.float32) * scale).astype(dtype) if name in made else None

    gradients = scaled("hidden", like.dtype), scaled("head", like.dtype)
    return *gradients, None, scaled("weights", jnp.float32)


_loss_sum.defvjp(_forward, _backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _as_one_operation(cut: _Cut, needed: _Needed, *arrays: jax.Array) -> dict[str, jax.Array]:
    """Wraps the loop over chunks as one operation for an outer `jax.checkpoint`.

    Otherwise a policy that saves products would save the products of every chunk of the loop,
    including a float32 copy of the head's gradient for each chunk.

    The head's gradient stays in memory throughout the backward pass, so it is cast to its final
    dtype. Only a float16 gradient stays in float32, because its loss scale is applied later.
    """
    made = _sums_of_chunks(cut, needed, *arrays)
    dtype = arrays[0].dtype
    if dtype != jnp.float16:
        made |= {name: made[name].astype(dtype) for name in ("hidden", "head") if name in made}
    # The barrier forces the casts here. Otherwise the compiler delays them and keeps float32
    # gradients through the backward pass of all layers.
    return lax.optimization_barrier(made)


def _refuse(*_: object) -> Any:
    raise NotImplementedError(
        "the chunked loss has no second derivative; use the plain loss (loss_chunk=None)"
    )


_as_one_operation.defvjp(_refuse, _refuse)


# --- arithmetic -----------------------------------------------------------------------------------


def _sums_of_chunks(
    cut: _Cut,
    needed: _Needed,
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    counted: jax.Array,
) -> dict[str, jax.Array]:
    """Computes the loss and the needed gradients in a loop over chunks.

    Returns:
      "loss": float32 []. If needed: "hidden": [tokens, width] in the head's dtype, float32 in place
      of float16; "head": float32 in the shape of `head`; "weights": float32 [tokens].
    """
    run = functools.partial(_one_chunk, cut, needed, head, _upscale(counted, head.dtype))
    tokens = hidden, targets, counted
    count, size = targets.size, cut.size
    # Tokens that do not fill a chunk come before the loop: no product is spent on rows that fill
    # it up, and the sum of the head's gradient starts from a product in place of zeros.
    start = count % size if count > size else count
    if start:
        head_gradient, rows = run(*(x[:start] for x in tokens))
    else:
        like = jax.eval_shape(run, *(x[:size] for x in tokens))
        head_gradient, rows = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)

    def body(index: jax.Array, made: tuple[Any, dict[str, jax.Array]]) -> tuple[Any, Any]:
        (total, rows), begin = made, start + index * size
        more, new = run(*(lax.dynamic_slice_in_dim(x, begin, size) for x in tokens))
        put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=begin, axis=0)
        return jax.tree.map(jnp.add, total, more), jax.tree.map(put, rows, new)

    if start < count:
        rows = {name: _of_length(x, count) for name, x in rows.items()}
        head_gradient, rows = lax.fori_loop(0, count // size, body, (head_gradient, rows))
    losses = rows.pop("losses")
    made = rows | {"loss": jnp.sum(losses * counted)}
    if head_gradient is not None:
        made["head"] = head_gradient
    # The sum is linear in the weights, so their gradient is the losses.
    return made | {"weights": losses} if needed.weights else made


def _of_length(rows: jax.Array, count: int) -> jax.Array:
    """Appends rows of zeros, up to `count` rows."""
    return jnp.pad(rows, [(0, count - rows.shape[0])] + [(0, 0)] * (rows.ndim - 1))


def _one_chunk(
    cut: _Cut,
    needed: _Needed,
    head: jax.Array,
    upscale: jax.Array | None,
    hidden: jax.Array,
    targets: jax.Array,
    counted: jax.Array,
) -> tuple[jax.Array | None, dict[str, jax.Array]]:
    """Computes the head's gradient (None if not needed) and {name: values for the rows of the
    chunk}."""
    logits = _product(hidden, head, 1, 1 - cut.vocab_dim, head.dtype).astype(jnp.float32)
    if cut.scale != 1.0:
        logits = logits * cut.scale
    if cut.softcap is not None:
        logits = cut.softcap * jnp.tanh(logits / cut.softcap)
    # A comparison replaces a gather, so that a vocabulary split over devices stays split.
    hit = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == targets[:, None]
    top, total, aimed = _over_vocabulary(logits, hit)
    # The two logits are subtracted first: added to a large `top`, a small log(total) would lose
    # digits.
    rows, head_gradient = {"losses": jnp.log(total) + (top - aimed)}, None
    if needed.hidden or needed.head:
        counted = counted if upscale is None else counted * upscale
        exponents = jnp.exp(logits - top[:, None])
        slope = (exponents / total[:, None] - hit) * counted[:, None]
        if cut.softcap is not None:
            # `logits` are capped already, so logits / softcap is the tanh, and 1 - tanh^2 its
            # derivative.
            slope = slope * (1 - (logits / cut.softcap) ** 2)
        if cut.scale != 1.0:
            slope = slope * cut.scale
        slope = slope.astype(head.dtype)
        back = (lambda x: x) if upscale is None else (lambda x: x / upscale)
        if needed.hidden:
            dtype = head.dtype if upscale is None else jnp.float32
            rows["hidden"] = back(_product(slope, head, 1, cut.vocab_dim, dtype))
        if needed.head:
            first, second = (slope, hidden) if cut.vocab_dim == 0 else (hidden, slope)
            head_gradient = back(_product(first, second, 0, 0, jnp.float32))
    return head_gradient, rows


def _over_vocabulary(logits: jax.Array, hit: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Reads logits [tokens, vocab] once, for their softmax and the logit of the target.

    A sum of exponentials is kept relative to the maximum so far (arXiv:1805.02867).

    Returns:
      (maximum, sum of exp(logits - maximum), logit where `hit`), each float32 [tokens].
    """

    def join(left: tuple[Any, ...], right: tuple[Any, ...]) -> tuple[Any, ...]:
        (top, total, aimed), (other_top, other_total, other_aimed) = left, right
        # The greater side has the factor 1, so one exponential serves both cases.
        less = jnp.exp(-jnp.abs(top - other_top))
        is_left = top > other_top
        total = jnp.where(is_left, total + less * other_total, less * total + other_total)
        return jnp.maximum(top, other_top), total, aimed + other_aimed

    lowest = jnp.float32(jnp.finfo(jnp.float32).min)  # a difference of two -inf would be NaN
    parts = jnp.maximum(logits, lowest), jnp.ones_like(logits), jnp.where(hit, logits, 0)
    return lax.reduce(parts, (lowest, jnp.float32(0), jnp.float32(0)), join, (1,))


def _product(
    left: jax.Array, right: jax.Array, left_dim: int, right_dim: int, dtype: DTypeLike
) -> jax.Array:
    """Contracts one dimension of each operand, with float32 accumulation, rounded to `dtype`."""
    dims = (((left_dim,), (right_dim,)), ((), ()))
    return lax.dot_general(left, right, dims, preferred_element_type=dtype)


def _upscale(counted: jax.Array, dtype: DTypeLike) -> jax.Array | None:
    """Computes a factor for gradients of logits before they become an operand of a product.

    The smallest positive float16 is 6e-8, and most of 128 thousand probabilities are smaller. A
    loss scale cannot help, because it is known only in the backward pass. The factor is a power of
    two, so that scaling is exact.
    """
    if dtype != jnp.float16:
        return None
    _, exponent = jnp.frexp(jnp.max(jnp.abs(counted)))
    return jnp.ldexp(jnp.float32(_FLOAT16_LIMIT), -exponent)
