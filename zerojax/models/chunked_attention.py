"""Attention in blocks of queries and keys, without an array of all scores.

The loop goes over the pairs of blocks in which a query may see a key; the softmax is taken online
(arXiv:1805.02867, arXiv:2112.05682), and the backward pass computes each block of scores again from
the log-sum-exp of its rows (arXiv:2205.14135). Plain XLA: any device, any float dtype. It saves
memory, not products of the pairs it visits; a fused kernel also keeps a block's scores on the chip.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

BLOCK = 512
"""Queries and keys of a block. Of 32 heads a block of float32 scores is then 32 MiB."""


KEPT = "zerojax.attention"
"""Names what the backward pass needs of the forward pass beside query, key and value: a
`jax.checkpoint` that keeps it computes no scores again before the backward pass does."""


@dataclasses.dataclass(frozen=True)
class Visibility:
    """Which keys a query may see, as far as it is known before any array.

    Attributes:
      causal: keys at its own position and before.
      window: positions that are less than so many away; None: any.
    """

    causal: bool
    window: int | None

    def is_visible(self, query: jax.Array, key: jax.Array) -> jax.Array | None:
        """Bool [..., queries, keys] of positions [..., queries] and [..., keys]; None: all are."""
        if not self.causal and self.window is None:
            return None
        distance = query[..., :, None] - key[..., None, :]
        seen = distance >= 0 if self.causal else jnp.ones(distance.shape, bool)
        if self.window is not None:
            seen &= distance < self.window
            if not self.causal:
                seen &= distance > -self.window
        return seen


@dataclasses.dataclass(frozen=True)
class _Cut:
    """How the work is cut.

    Attributes:
      scale: what scores are multiplied with.
      visibility: see there.
      queries, keys: numbers of each; blocks may have more.
      block: queries and keys of a block.
      has_positions: whether positions are data; else they are the indices.
    """

    scale: float
    visibility: Visibility
    queries: int
    keys: int
    block: int
    has_positions: bool

    def pairs(self) -> np.ndarray:
        """int32 [pairs, 2]: the blocks of queries and keys in which something may be seen."""
        first = np.arange(-(-self.queries // self.block)) * self.block
        query, key = first[:, None], np.arange(-(-self.keys // self.block))[None, :] * self.block
        seen = np.ones((query.size, key.size), bool)
        if not self.has_positions:
            causal, window = self.visibility.causal, self.visibility.window
            if causal:
                seen &= key <= query + self.block - 1
            if window is not None:
                seen &= query - (key + self.block - 1) < window
                if not causal:
                    seen &= key - (query + self.block - 1) < window
        return np.argwhere(seen).astype(np.int32)


def chunked_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    visibility: Visibility,
    scale: float,
    segments: tuple[jax.Array, jax.Array] | None = None,
    positions: tuple[jax.Array, jax.Array] | None = None,
    block: int | None = None,
) -> jax.Array:
    """Softmax attention, block by block.

    Products take operands in the dtype of the inputs and are summed in float32, and so are scores,
    softmax and the sum over keys. First derivatives in reverse mode only.

    Args:
      query: [batch, queries, heads, head_dim].
      key, value: [batch, keys, kv_heads, head_dim]; kv_heads divides heads.
      visibility: which keys a query may see.
      scale: what scores are multiplied with.
      segments: integers ([batch, queries], [batch, keys]): a query sees keys of its own segment; a
        key of a negative one is seen by nobody. None: one segment.
      positions: integers ([batch, queries], [batch, keys]), which `visibility` compares; None: the
        indices, and blocks in which nothing can be seen are left out.
      block: queries and keys of a block; None: `BLOCK`.

    Returns:
      [batch, queries, heads, head_dim] in the dtype of `query`; 0 for a query that sees no key.
    """
    cut = _Cut(
        scale=scale,
        visibility=visibility,
        queries=query.shape[1],
        keys=key.shape[1],
        block=min(block or BLOCK, max(query.shape[1], key.shape[1])),
        has_positions=positions is not None,
    )
    groups = query.shape[2] // key.shape[2]
    rows = {}
    if segments is not None:
        rows["segment"] = _both_in_blocks(cut, segments)
    if positions is not None:
        rows["position"] = _both_in_blocks(cut, positions)
    out = _attend(
        cut,
        _in_blocks(cut, query.reshape(*query.shape[:2], -1, groups, query.shape[3])),
        _in_blocks(cut, key),
        _in_blocks(cut, value),
        rows,
    )
    # [blocks, batch, kv_heads, groups, block, head_dim] -> [batch, queries, heads, head_dim]
    out = jnp.moveaxis(out, (1, 0, 4), (0, 1, 2))
    out = out.reshape(out.shape[0], -1, query.shape[2], query.shape[3])
    return out[:, : query.shape[1]]


def _in_blocks(cut: _Cut, array: jax.Array) -> jax.Array:
    """[batch, tokens, heads..., features] -> [blocks, batch, heads..., block, features]."""
    missing = -array.shape[1] % cut.block
    if missing:
        array = jnp.pad(array, [(0, 0), (0, missing)] + [(0, 0)] * (array.ndim - 2))
    array = array.reshape(array.shape[0], -1, cut.block, *array.shape[2:])
    return jnp.moveaxis(array, (1, 2), (0, -2))


def _both_in_blocks(cut: _Cut, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Integers [batch, tokens] of queries and of keys -> [blocks, batch, block] each."""
    cast = (x.astype(jnp.int32)[:, :, None] for x in pair)
    query, key = (_in_blocks(cut, x)[..., 0] for x in cast)
    return query, key


# --- differentiation ------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(cut: _Cut, query: Any, key: Any, value: Any, rows: dict[str, Any]) -> jax.Array:
    out, _ = _forward_pass(cut, query, key, value, rows)
    return checkpoint_name(out, "zerojax.linear_rule")  # see `zerojax.models.jaxpr.LINEAR_RULE`


def _forward(cut: _Cut, query: Any, key: Any, value: Any, rows: Any) -> tuple[Any, Any]:
    out, log_sum = checkpoint_name(_as_one_operation(cut, query, key, value, rows), KEPT)
    return out, (query, key, value, rows, out, log_sum)


def _backward(cut: _Cut, kept: tuple[Any, ...], slope: jax.Array) -> tuple[Any, ...]:
    query, key, value, rows, out, log_sum = kept
    gradients = _backward_pass(cut, query, key, value, rows, out, log_sum, slope)
    return *gradients, None


_attend.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _as_one_operation(cut: _Cut, *given: Any) -> tuple[jax.Array, jax.Array]:
    """The loop over pairs as one operation, for a `jax.checkpoint` around it.

    A policy that keeps products would look into the bare loop and keep the scores of every pair.
    """
    return _forward_pass(cut, *given)


def _refuse(*_: Any) -> Any:
    raise NotImplementedError(
        "attention in chunks has no second derivative; use implementation='xla'"
    )


_as_one_operation.defvjp(_refuse, _refuse)


# --- arithmetic -----------------------------------------------------------------------------------


def _forward_pass(
    cut: _Cut, query: jax.Array, key: jax.Array, value: jax.Array, rows: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
    """(out, log-sum-exp of each row of scores; inf where a query sees no key).

    `query` is [blocks, batch, kv_heads, groups, block, features], `key` and `value` are
    [blocks, batch, kv_heads, block, features].
    """

    def step(carry: tuple[jax.Array, ...], pair: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        sums, greatest, total = carry
        i, j = pair[0], pair[1]
        scores = _scores(cut, query, key, rows, i, j)
        before = greatest[i]
        after = jnp.maximum(before, jnp.max(scores, axis=-1))
        shift = jnp.where(after == -jnp.inf, 0, after)  # of a row that has seen nothing yet
        weights = jnp.exp(scores - shift[..., None])
        shrink = jnp.exp(before - shift)
        mixed = _product("bkgqs,bksh->bkgqh", weights.astype(value.dtype), value[j])
        # Not as a scatter: the analysis of a loss (`batch_rows`) follows rows through updates.
        write = functools.partial(lax.dynamic_update_index_in_dim, index=i, axis=0)
        sums = write(sums, sums[i] * shrink[..., None] + mixed)
        total = write(total, total[i] * shrink + jnp.sum(weights, axis=-1))
        return (sums, write(greatest, after), total), None

    start = jnp.zeros(query.shape[:-1] + value.shape[-1:], jnp.float32)
    row = jnp.zeros(query.shape[:-1], jnp.float32)
    (sums, greatest, total), _ = lax.scan(
        step, (start, row - jnp.inf, row), jnp.asarray(cut.pairs())
    )
    seen = total > 0
    out = sums / jnp.where(seen, total, 1)[..., None]
    return out.astype(query.dtype), jnp.where(seen, greatest + jnp.log(total), jnp.inf)


def _backward_pass(
    cut: _Cut,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    rows: dict[str, Any],
    out: jax.Array,
    log_sum: jax.Array,
    slope: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of query, key and value in their dtypes."""
    wide = slope.astype(jnp.float32)
    turned = jnp.sum(wide * out.astype(jnp.float32), axis=-1)

    def step(carry: tuple[jax.Array, ...], pair: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        of_query, of_key, of_value = carry
        i, j = pair[0], pair[1]
        weights = jnp.exp(_scores(cut, query, key, rows, i, j) - log_sum[i][..., None])
        given = slope[i].astype(value.dtype)
        add = _product("bkgqs,bkgqh->bksh", weights.astype(value.dtype), given)
        of_value = of_value.at[j].add(add)
        inner = _product("bkgqh,bksh->bkgqs", given, value[j])
        scores = (weights * (inner - turned[i][..., None]) * cut.scale).astype(query.dtype)
        of_query = of_query.at[i].add(_product("bkgqs,bksh->bkgqh", scores, key[j]))
        of_key = of_key.at[j].add(_product("bkgqs,bkgqh->bksh", scores, query[i]))
        return (of_query, of_key, of_value), None

    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (query, key, value))
    sums, _ = lax.scan(step, start, jnp.asarray(cut.pairs()))
    of_query, of_key, of_value = sums
    return (
        of_query.astype(query.dtype),
        of_key.astype(key.dtype),
        of_value.astype(value.dtype),
    )


def _scores(
    cut: _Cut,
    query: jax.Array,
    key: jax.Array,
    rows: dict[str, Any],
    i: jax.Array,
    j: jax.Array,
) -> jax.Array:
    """float32 [batch, kv_heads, groups, block, block], -inf where a key is not seen."""
    scores = _product("bkgqh,bksh->bkgqs", query[i], key[j]) * cut.scale
    seen = _seen(cut, rows, i, j)
    return scores if seen is None else jnp.where(seen[:, None, None], scores, -jnp.inf)


def _seen(cut: _Cut, rows: dict[str, Any], i: jax.Array, j: jax.Array) -> jax.Array | None:
    """Bool [batch or 1, block, block] of one pair of blocks; None: all keys are seen."""
    offsets = jnp.arange(cut.block)
    query = (i * cut.block + offsets)[None]
    index = (j * cut.block + offsets)[None]
    found = []
    if cut.has_positions:
        of_query, of_key = rows["position"]
        found.append(cut.visibility.is_visible(of_query[i], of_key[j]))
    else:
        found.append(cut.visibility.is_visible(query, index))
    if cut.keys % cut.block:
        found.append((index < cut.keys)[:, None, :])
    if "segment" in rows:
        of_query, of_key = rows["segment"]
        own = of_query[i][:, :, None] == of_key[j][:, None, :]
        found.append(own & (of_key[j] >= 0)[:, None, :])
    seen = [x for x in found if x is not None]
    return functools.reduce(jnp.logical_and, jnp.broadcast_arrays(*seen)) if seen else None


def _product(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """An einsum in float32."""
    return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)
