"""Loss of a language model's head in chunks of tokens, without holding all logits.

Logits are made for one chunk of tokens at a time. While a chunk's logits are there, so is all that
its gradients need: those of the hidden states and of the head are made at once, for a loss whose
own derivative is 1, and the backward pass only scales them. So nothing is computed twice, unlike
under `jax.checkpoint`, and the head is not needed again in the backward pass. The idea is that of
Liger Kernel (arXiv:2410.10989); unlike there, the head's gradient is always summed in float32, and
what is not differentiated is not computed.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from zerojax.operators.marks import LINEAR_RULE

_FLOAT16_LIMIT = 2.0**15
"""A power of two that float16 still holds; gradients of float16 logits are scaled up to it."""


def head_next_token(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    weights: jax.Array | None = None,
    *,
    vocab_dim: int,
    chunk: int,
    scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy of the target tokens under `softmax(hidden @ head)`, logits never held whole.

    What `models.losses.next_token` gives for the logits, to float32 rounding. Products take
    operands in the head's dtype and are summed in float32, and so are the logits, which a model
    that returns them would round to its dtype. First derivatives in reverse mode only.

    Args:
      hidden: [..., width], any float dtype; cast to the head's.
      head: [vocab, width] (`vocab_dim=0`) or [width, vocab] (`vocab_dim=1`). Read once, outside of
        the loop over chunks.
      targets: [...] integers: the token that follows each position. One outside of the vocabulary
        gives NaN, in the gradients too, unless its weight is 0.
      weights: [...]; a position of weight 0 does not count. None: every position counts 1.
      vocab_dim: which dimension of `head` is the vocabulary.
      chunk: tokens; at most so many have logits at once.
      scale: what logits are multiplied with.
      softcap: logits, after their scale, become cap * tanh(logits / cap); None: they stay.

    Returns:
      (sum over positions of weight x negative log-likelihood in nats, sum of weights), float32.

    Raises:
      ValueError: shapes that do not belong together, or a chunk below 1.
      NotImplementedError: a second derivative is asked for.
    """
    _check(hidden, head, targets, weights, vocab_dim=vocab_dim, chunk=chunk)
    count = targets.size
    targets = targets.astype(jnp.int32).reshape(count)
    weights = jnp.ones(count, jnp.float32) if weights is None else weights
    counted = weights.astype(jnp.float32).reshape(count)
    known = (targets >= 0) & (targets < head.shape[vocab_dim])
    total = _loss_sum(
        _Cut(vocab_dim, -(-count // chunk), scale, softcap),
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
    chunk: int,
) -> None:
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1 token; 1024 is usual")
    if vocab_dim not in (0, 1):
        raise ValueError(f"vocab_dim={vocab_dim} must be 0 ([vocab, width]) or 1 ([width, vocab])")
    if head.ndim != 2 or head.shape[1 - vocab_dim] != hidden.shape[-1]:
        raise ValueError(
            f"head has shape {head.shape}, but with vocab_dim={vocab_dim} its dimension"
            f" {1 - vocab_dim} must be the width of hidden, {hidden.shape[-1]}"
        )
    for name, array in (("targets", targets), ("weights", weights)):
        if array is not None and array.shape != hidden.shape[:-1]:
            raise ValueError(
                f"{name} have shape {array.shape}, but hidden has {hidden.shape}: one value for"
                f" each of its positions, {hidden.shape[:-1]}"
            )


@dataclasses.dataclass(frozen=True)
class _Cut:
    """How the work is cut, and what is done to logits.

    Attributes:
      vocab_dim: which dimension of the head is the vocabulary.
      num_chunks: of tokens.
      scale, softcap: see `head_next_token`.
    """

    vocab_dim: int
    num_chunks: int
    scale: float = 1.0
    softcap: float | None = None


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """Which gradients are made beside the loss."""

    hidden: bool = False
    head: bool = False
    weights: bool = False


# --- differentiation ------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss_sum(
    cut: _Cut, hidden: jax.Array, head: jax.Array, targets: jax.Array, counted: jax.Array
) -> jax.Array:
    """The weighted sum over [tokens]; without differentiation (evaluation) no gradient is made."""
    loss = _sums_of_chunks(cut, _Wanted(), hidden, head, targets, counted)["loss"]
    return checkpoint_name(loss, LINEAR_RULE)


def _forward(cut: _Cut, hidden: Any, head: Any, targets: Any, counted: Any) -> tuple[Any, Any]:
    wanted = _Wanted(hidden.perturbed, head.perturbed, counted.perturbed)
    made = _as_one_operation(cut, wanted, hidden.value, head.value, targets.value, counted.value)
    # An empty array tells the backward pass the dtype of a gradient that it has to give.
    like = jnp.zeros(0, head.value.dtype)
    return made.pop("loss"), (made, like)


def _backward(cut: _Cut, kept: tuple[dict[str, Any], jax.Array], scale: Any) -> tuple[Any, ...]:
    made, like = kept
    if isinstance(scale, SymbolicZero):
        return None, None, None, None

    def scaled(name: str, dtype: Any) -> jax.Array | None:
        return (made[name].astype(jnp.float32) * scale).astype(dtype) if name in made else None

    gradients = scaled("hidden", like.dtype), scaled("head", like.dtype)
    return *gradients, None, scaled("weights", jnp.float32)


_loss_sum.defvjp(_forward, _backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _as_one_operation(cut: _Cut, wanted: _Wanted, *arrays: jax.Array) -> dict[str, jax.Array]:
    """The loop over chunks as one operation, whose results a `jax.checkpoint` keeps or does not.

    A checkpoint whose policy keeps products would look into the bare loop and keep the products of
    every chunk: as many float32 copies of the head as there are chunks.

    The head's gradient waits until the backward pass is over, so it is held in the dtype that it
    will have. Only float16 waits in float32: its loss scale, and its range, come later.
    """
    made = _sums_of_chunks(cut, wanted, *arrays)
    dtype = arrays[0].dtype
    if dtype != jnp.float16:
        made |= {name: made[name].astype(dtype) for name in ("hidden", "head") if name in made}
    # All or nothing: else the compiler puts the cast off, and holds float32 through all layers.
    return lax.optimization_barrier(made)


def _refuse(*_: Any) -> Any:
    raise NotImplementedError(
        "the chunked loss has no second derivative; use the plain loss (loss_chunk=None)"
    )


_as_one_operation.defvjp(_refuse, _refuse)


# --- arithmetic -----------------------------------------------------------------------------------


def _sums_of_chunks(
    cut: _Cut,
    wanted: _Wanted,
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    counted: jax.Array,
) -> dict[str, jax.Array]:
    """The loss, and the wanted gradients of it.

    Returns:
      "loss" f32[]; if wanted "hidden" f32[tokens, width], "head" f32 in the shape of `head`,
      "weights" f32[tokens].
    """
    count = targets.size
    upscale = _upscale(counted, head.dtype)
    run = functools.partial(_one_chunk, cut, wanted, head, upscale)
    if cut.num_chunks == 1:
        sums, rows = run((hidden, targets, counted))
        return sums | rows

    def body(sums: dict[str, jax.Array], chunk: Any) -> tuple[dict[str, jax.Array], Any]:
        new, rows = run(chunk)
        return jax.tree.map(jnp.add, sums, new), rows

    chunks = tuple(_cut_rows(cut, rows) for rows in (hidden, targets, counted))
    start = {"loss": jnp.float32(0)}
    if wanted.head:
        start["head"] = jnp.zeros(head.shape, jnp.float32)
    sums, rows = lax.scan(body, start, chunks)
    joined = {name: x.reshape(-1, *x.shape[2:])[:count] for name, x in rows.items()}
    return sums | joined


def _cut_rows(cut: _Cut, rows: jax.Array) -> jax.Array:
    """[tokens, ...] -> [chunks, size, ...], as even as possible, the last one filled with zeros."""
    size = -(-rows.shape[0] // cut.num_chunks)
    missing = size * cut.num_chunks - rows.shape[0]
    rows = jnp.pad(rows, [(0, missing)] + [(0, 0)] * (rows.ndim - 1)) if missing else rows
    return rows.reshape(cut.num_chunks, size, *rows.shape[1:])


def _one_chunk(
    cut: _Cut,
    wanted: _Wanted,
    head: jax.Array,
    upscale: jax.Array | None,
    chunk: tuple[jax.Array, jax.Array, jax.Array],
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """({what is summed over chunks}, {what belongs to the rows of this chunk})."""
    hidden, targets, counted = chunk
    logits = _product(hidden, head, 1, 1 - cut.vocab_dim)
    if cut.scale != 1.0:
        logits = logits * cut.scale
    if cut.softcap is not None:
        logits = cut.softcap * jnp.tanh(logits / cut.softcap)
    # A comparison in place of an index: a vocabulary that is split over devices stays where it is.
    hit = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == targets[:, None]
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    exponents = jnp.exp(shifted)
    total = jnp.sum(exponents, axis=-1)
    losses = jnp.log(total) - jnp.sum(jnp.where(hit, shifted, 0), axis=-1)
    sums, rows = {"loss": jnp.sum(losses * counted)}, {}
    if wanted.weights:
        rows["weights"] = losses
    if wanted.hidden or wanted.head:
        counted = counted if upscale is None else counted * upscale
        slope = (exponents / total[:, None] - hit) * counted[:, None]
        if cut.softcap is not None:
            slope = slope * (1 - (logits / cut.softcap) ** 2)
        if cut.scale != 1.0:
            slope = slope * cut.scale
        slope = slope.astype(head.dtype)
        back = (lambda x: x) if upscale is None else (lambda x: x / upscale)
        if wanted.hidden:
            rows["hidden"] = back(_product(slope, head, 1, cut.vocab_dim))
        if wanted.head:
            first, second = (slope, hidden) if cut.vocab_dim == 0 else (hidden, slope)
            sums["head"] = back(_product(first, second, 0, 0))
    return sums, rows


def _product(left: jax.Array, right: jax.Array, left_dim: int, right_dim: int) -> jax.Array:
    """The sum over one dimension of each, in float32."""
    dims = (((left_dim,), (right_dim,)), ((), ()))
    return lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)


def _upscale(counted: jax.Array, dtype: Any) -> jax.Array | None:
    """What gradients of logits are multiplied with before they become an operand of a product.

    float16 ends at 6e-8, and most of 128 thousand probabilities are smaller. A loss scale cannot
    help, since it is only known in the backward pass. A power of two costs no rounding.
    """
    if dtype != jnp.float16:
        return None
    _, exponent = jnp.frexp(jnp.max(jnp.abs(counted)))
    return jnp.ldexp(jnp.float32(_FLOAT16_LIMIT), -exponent)
