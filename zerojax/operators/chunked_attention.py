"""Attention in blocks of queries and keys, without an array of all scores.

The loop visits only tiles (`attention_tiles`) that are not fully masked by the order of tokens, a
window or a block table. The softmax is computed online (arXiv:1805.02867, arXiv:2112.05682), and
the backward pass recomputes each block of scores from the log-sum-exp of its rows
(arXiv:2205.14135). Plain XLA operations run on any device with any float dtype. They save memory,
but no FLOPs inside the tiles; a fused kernel would also keep the scores of a tile on the chip.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Tree
from zerojax.operators.attention_tiles import Extent, Tiles, tiles_of
from zerojax.operators.marks import LINEAR_RULE
from zerojax.operators.sparse_layouts import BlockTable

BLOCK = 512
"""Maximum number of queries and keys of a block. Float32 scores for 32 heads are then 32 MiB."""


KEPT = "zerojax.attention"
"""Name of the forward pass's residuals besides query, key and value. A `jax.checkpoint` that saves
this name recomputes scores only inside the backward pass of attention."""


@dataclass(frozen=True)
class Visibility:
    """Static part of an attention mask by positions.

    Attributes:
      causal: whether a query sees only keys at its own position and before.
      window: a query sees only keys less than `window` positions away; None for no limit.
    """

    causal: bool
    window: int | None

    def is_visible(self, query: jax.Array, key: jax.Array) -> jax.Array | None:
        """Computes the mask, bool [..., queries, keys]; returns None if all keys are visible.

        Args:
          query: positions [..., queries].
          key: positions [..., keys].
        """
        if not self.causal and self.window is None:
            return None
        distance = query[..., :, None] - key[..., None, :]
        seen = distance >= 0 if self.causal else jnp.ones(distance.shape, bool)
        if self.window is not None:
            seen &= distance < self.window
            if not self.causal:
                seen &= distance > -self.window
        return seen


@dataclass(frozen=True)
class _Cut:
    """Static options of a call of `chunked_attention`, and its division into tiles.

    Attributes:
      scale: factor of the scores.
      visibility: mask by positions.
      extent: static properties that determine the tiles of the loop.
      softcap: soft limit of the scores, as for `zerojax.attention`.
    """

    scale: float
    visibility: Visibility
    extent: Extent
    softcap: float | None = None

    @property
    def tiles(self) -> Tiles:
        return tiles_of(self.extent)


def chunked_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    visibility: Visibility,
    scale: float,
    segments: tuple[jax.Array, jax.Array] | None = None,
    positions: tuple[jax.Array, jax.Array] | None = None,
    table: BlockTable | None = None,
    block: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Computes softmax attention, tile by tile.

    Products take operands in the dtype of the inputs and accumulate in float32; scores, softmax and
    the sum over keys are float32. Has only first derivatives in reverse mode.

    Args:
      query: [batch, queries, heads, head_dim].
      key, value: [batch, keys, kv_heads, head_dim]; kv_heads divides heads.
      visibility: mask by positions.
      scale: factor of the scores.
      segments: integers ([batch, queries], [batch, keys]): a query sees only keys of its own
        segment; keys of negative segments are masked. None means one segment.
      positions: integers ([batch, queries], [batch, keys]) that `visibility` compares. None uses
        the indices; fully masked tiles are then left out.
      table: mask by blocks of the indices, with as many blocks as the call has; masked blocks are
        not computed. None makes all keys visible.
      block: maximum number of queries and keys of a tile; None uses `BLOCK`.
      softcap: soft limit of the scores, as for `zerojax.attention`.

    Returns:
      [batch, queries, heads, head_dim] in the dtype of `query`; 0 for a query that sees no key.
    """
    more = {"table": table, "block": block, "softcap": softcap}
    cut = _cut_of(query, key, visibility, scale, positions, **more)
    out = _attend(cut, *_operands(cut, query, key, value, segments, positions))
    return _of_queries(out, query)


def part_forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    visibility: Visibility,
    scale: float,
    segments: tuple[jax.Array, jax.Array] | None = None,
    positions: tuple[jax.Array, jax.Array] | None = None,
    table: BlockTable | None = None,
    block: int | None = None,
    softcap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes attention over a part of the keys, for callers that merge parts and differentiate.

    Args:
      query, key, value, visibility, scale, segments, positions, table, block, softcap: arguments
        as for `chunked_attention`; integers that are the same in all rows may be [1, tokens].

    Returns:
      (out, log-sum-exp of the scores). out is float32 [batch, queries, heads, head_dim], 0 for a
      query that sees none of these keys; the log-sum-exp is float32 [batch, queries, heads], -inf
      for such a query.
    """
    more = {"table": table, "block": block, "softcap": softcap}
    cut = _cut_of(query, key, visibility, scale, positions, **more)
    out, log_sum = _forward_pass(cut, *_operands(cut, query, key, value, segments, positions))
    log_sum = _of_queries(log_sum[..., None], query)[..., 0]
    # Inside the passes inf marks a query that sees no key (see `_forward_pass`); to callers, which
    # merge parts, the empty sum is -inf.
    return _of_queries(out, query), jnp.where(log_sum == jnp.inf, -jnp.inf, log_sum)


def part_backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    log_sum: jax.Array,
    turned: jax.Array,
    slope: jax.Array,
    visibility: Visibility,
    scale: float,
    segments: tuple[jax.Array, jax.Array] | None = None,
    positions: tuple[jax.Array, jax.Array] | None = None,
    table: BlockTable | None = None,
    block: int | None = None,
    softcap: float | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the contribution of a part of the keys to the gradients of attention over all keys.

    Args:
      query, key, value, visibility, scale, segments, positions, table, block, softcap: arguments
        as for `part_forward`.
      log_sum: float32 [batch, queries, heads], log-sum-exp over all keys, not only over this part;
        -inf for a query that sees no key.
      turned: float32 [batch, queries, heads], sum over features of `slope` times the result.
      slope: [batch, queries, heads, head_dim], gradient with respect to the result.

    Returns:
      Gradients of query, key and value, in float32.
    """
    more = {"table": table, "block": block, "softcap": softcap}
    cut = _cut_of(query, key, visibility, scale, positions, **more)
    groups = query.shape[2] // key.shape[2]

    def in_blocks(x: jax.Array) -> jax.Array:
        x = x.reshape(*x.shape[:2], -1, groups, x.shape[3])
        return _in_blocks(x, cut.tiles.query_block)

    log_sum = jnp.where(log_sum == -jnp.inf, jnp.inf, log_sum)
    of_query, of_key, of_value = _backward_pass(
        cut,
        *_operands(cut, query, key, value, segments, positions),
        turned=in_blocks(turned[..., None])[..., 0],
        log_sum=in_blocks(log_sum[..., None])[..., 0],
        slope=in_blocks(slope),
    )
    return _of_queries(of_query, query), _of_keys(of_key, key), _of_keys(of_value, key)


def _cut_of(
    query: jax.Array,
    key: jax.Array,
    visibility: Visibility,
    scale: float,
    positions: tuple[jax.Array, jax.Array] | None,
    *,
    table: BlockTable | None = None,
    block: int | None = None,
    softcap: float | None = None,
) -> _Cut:
    extent = extent_of(
        query.shape[1],
        key.shape[1],
        visibility=visibility,
        table=table,
        has_positions=positions is not None,
        groups=query.shape[2] // key.shape[2],
        block=block,
    )
    return _Cut(scale, visibility, extent, softcap)


def _operands(
    cut: _Cut,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: tuple[jax.Array, jax.Array] | None,
    positions: tuple[jax.Array, jax.Array] | None,
) -> tuple[jax.Array, jax.Array, jax.Array, dict[str, Any]]:
    """Splits query, key, value, segments and positions into blocks."""
    groups, tiles = query.shape[2] // key.shape[2], cut.tiles
    rows = {}
    if segments is not None:
        rows["segment"] = _both_in_blocks(cut, segments)
    if positions is not None:
        rows["position"] = _both_in_blocks(cut, positions)
    return (
        _in_blocks(query.reshape(*query.shape[:2], -1, groups, query.shape[3]), tiles.query_block),
        _in_blocks(key, tiles.key_block),
        _in_blocks(value, tiles.key_block),
        rows,
    )


def _of_queries(array: jax.Array, query: jax.Array) -> jax.Array:
    """Joins blocks, [blocks, batch, kv_heads, groups, block, n] -> [batch, queries, heads, n]."""
    array = jnp.moveaxis(array, (1, 0, 4), (0, 1, 2))
    array = array.reshape(array.shape[0], -1, query.shape[2], array.shape[-1])
    return array[:, : query.shape[1]]


def _of_keys(array: jax.Array, key: jax.Array) -> jax.Array:
    """Joins blocks, [blocks, batch, kv_heads, block, n] -> [batch, keys, kv_heads, n]."""
    array = jnp.moveaxis(array, (1, 0, 3), (0, 1, 2))
    return array.reshape(array.shape[0], -1, *array.shape[3:])[:, : key.shape[1]]


def extent_of(
    queries: int,
    keys: int,
    *,
    visibility: Visibility,
    table: BlockTable | None,
    has_positions: bool,
    groups: int,
    block: int | None = None,
) -> Extent:
    """Collects the static properties of a `chunked_attention` call that determine its tiles."""
    return Extent(
        queries=queries,
        keys=keys,
        # A block larger than the call would only add padding.
        block=min(block or BLOCK, max(queries, keys)),
        causal=visibility.causal,
        window=visibility.window,
        has_positions=has_positions,
        table=table,
        groups=groups,
    )


def _in_blocks(array: jax.Array, block: int) -> jax.Array:
    """Splits [batch, tokens, heads..., features] -> [blocks, batch, heads..., block, features]."""
    missing = -array.shape[1] % block
    if missing:
        array = jnp.pad(array, [(0, 0), (0, missing)] + [(0, 0)] * (array.ndim - 2))
    array = array.reshape(array.shape[0], -1, block, *array.shape[2:])
    return jnp.moveaxis(array, (1, 2), (0, -2))


def _both_in_blocks(cut: _Cut, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Splits integers of queries and of keys: [batch, tokens] -> [blocks, batch, 1, block] each."""
    query, key = (x.astype(jnp.int32)[:, :, None, None] for x in pair)
    tiles = cut.tiles
    return _in_blocks(query, tiles.query_block)[..., 0], _in_blocks(key, tiles.key_block)[..., 0]


# --- differentiation ------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    cut: _Cut, query: jax.Array, key: jax.Array, value: jax.Array, rows: dict[str, Any]
) -> jax.Array:
    out, _ = _forward_pass(cut, query, key, value, rows)
    out = out.astype(query.dtype)
    return checkpoint_name(out, LINEAR_RULE)


def _forward(
    cut: _Cut, query: jax.Array, key: jax.Array, value: jax.Array, rows: dict[str, Any]
) -> tuple[Any, Any]:
    out, log_sum = checkpoint_name(_as_one_operation(cut, query, key, value, rows), KEPT)
    return out, (query, key, value, rows, out, log_sum)


def _backward(cut: _Cut, kept: tuple[Any, ...], slope: jax.Array) -> tuple[Any, ...]:
    query, key, value, rows, out, log_sum = kept
    turned = jnp.sum(slope.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    gradients = _backward_pass(
        cut, query, key, value, rows, turned=turned, log_sum=log_sum, slope=slope
    )
    cast = (x.astype(y.dtype) for x, y in zip(gradients, (query, key, value), strict=True))
    return *cast, None


_attend.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _as_one_operation(cut: _Cut, *operands: Tree) -> tuple[jax.Array, jax.Array]:
    """Wraps the loop over tiles as one operation for an outer `jax.checkpoint`.

    A policy that saves products would otherwise save the scores of every tile of the loop.
    """
    out, log_sum = _forward_pass(cut, *operands)
    return out.astype(operands[0].dtype), log_sum


def _refuse(*_: object) -> Any:
    raise NotImplementedError(
        "attention='chunked' has no second derivative; use implementation='xla'"
    )


# The first derivative is that of `_attend`, so only a second derivative gets here.
_as_one_operation.defvjp(_refuse, _refuse)


# --- arithmetic -----------------------------------------------------------------------------------


def _forward_pass(
    cut: _Cut, query: jax.Array, key: jax.Array, value: jax.Array, rows: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
    """Computes (float32 out, log-sum-exp of each row of scores; inf if a query sees no key).

    Args:
      query: [blocks, batch, kv_heads, groups, block, features].
      key, value: [blocks, batch, kv_heads, block, features].
    """

    def step(carry: tuple[jax.Array, ...], tile: _Tile) -> tuple[tuple[jax.Array, ...], None]:
        sums, greatest, total = carry
        i, taken = tile.place, _taken(cut, tile)
        scores = _scores(cut, query[i], taken(key), rows, tile)
        before = greatest[i]
        after = jnp.maximum(before, jnp.max(scores, axis=-1))
        shift = jnp.where(after == -jnp.inf, 0, after)  # -inf if all keys so far are masked
        weights = jnp.exp(scores - shift[..., None])
        shrink = jnp.exp(before - shift)
        mixed = _product("bkgqs,bksh->bkgqh", weights.astype(value.dtype), taken(value))
        # No scatter, because the analysis of a loss (`batch_rows`) follows rows through updates.
        write = functools.partial(lax.dynamic_update_index_in_dim, index=i, axis=0)
        sums = write(sums, sums[i] * shrink[..., None] + mixed)
        total = write(total, total[i] * shrink + jnp.sum(weights, axis=-1))
        return (sums, write(greatest, after), total), None

    start = jnp.zeros(query.shape[:-1] + value.shape[-1:], jnp.float32)
    row = jnp.zeros(query.shape[:-1], jnp.float32)
    (sums, greatest, total), _ = lax.scan(step, (start, row - jnp.inf, row), _tile_arrays(cut))
    seen = total > 0
    out = sums / jnp.where(seen, total, 1)[..., None]
    # inf, so that the backward pass gives such a query the weights exp(score - inf) = 0, not NaN.
    return out, jnp.where(seen, greatest + jnp.log(total), jnp.inf)


def _backward_pass(
    cut: _Cut,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    rows: dict[str, Any],
    *,
    turned: jax.Array,
    log_sum: jax.Array,
    slope: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the float32 gradients of query, key and value."""

    def step(carry: tuple[jax.Array, ...], tile: _Tile) -> tuple[tuple[jax.Array, ...], None]:
        of_query, of_key, of_value = carry
        i, taken, added = tile.place, _taken(cut, tile), _added(cut, tile)
        keys, values = taken(key), taken(value)
        scores = _scores(cut, query[i], keys, rows, tile)
        weights = jnp.exp(scores - log_sum[i][..., None])
        cast = slope[i].astype(value.dtype)
        add = _product("bkgqs,bkgqh->bksh", weights.astype(value.dtype), cast)
        of_value = added(of_value, add)
        inner = _product("bkgqh,bksh->bkgqs", cast, values)
        slopes = weights * (inner - turned[i][..., None]) * cut.scale
        if cut.softcap is not None:
            slopes = slopes * _bend(cut.softcap, scores)
        scores = slopes.astype(query.dtype)
        of_query = of_query.at[i].add(_product("bkgqs,bksh->bkgqh", scores, keys))
        of_key = added(of_key, _product("bkgqs,bkgqh->bksh", scores, query[i]))
        return (of_query, of_key, of_value), None

    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (query, key, value))
    sums, _ = lax.scan(step, start, _tile_arrays(cut))
    of_query, of_key, of_value = sums
    return of_query, of_key, of_value


def _scores(
    cut: _Cut, query: jax.Array, key: jax.Array, rows: dict[str, Any], tile: _Tile
) -> jax.Array:
    """Computes float32 scores of a tile, -inf for masked keys.

    The shape is [batch, kv_heads, groups, queries, keys].
    """
    scores = _product("bkgqh,bksh->bkgqs", query, key) * cut.scale
    if cut.softcap is not None:
        scores = cut.softcap * jnp.tanh(scores / cut.softcap)
    seen = _seen(cut, rows, tile)
    return scores if seen is None else jnp.where(seen, scores, -jnp.inf)


def _bend(softcap: float, capped: jax.Array) -> jax.Array:
    """Computes the derivative of soft-capped scores with respect to the raw scores; 0 for masked
    keys.
    """
    # Without this, -inf squared is inf, and the weight 0 of a masked key times inf is NaN.
    flat = jnp.where(capped == -jnp.inf, softcap, capped) / softcap
    return 1 - flat * flat


def _seen(cut: _Cut, rows: dict[str, Any], tile: _Tile) -> jax.Array | None:
    """Computes a bool mask that broadcasts to a tile's scores; None if all keys are visible."""
    tiles, extent, taken = cut.tiles, cut.extent, _taken(cut, tile)
    query = (tile.place * tiles.query_block + jnp.arange(tiles.query_block))[None, None]
    blocks = tile.blocks[:, :, None] * tiles.key_block + jnp.arange(tiles.key_block)[None, None]
    index = blocks.reshape(1, tiles.heads, -1)
    masks = []
    if extent.has_positions:
        of_query, of_key = rows["position"]
        masks.append(cut.visibility.is_visible(of_query[tile.place], taken(of_key)))
    else:
        masks.append(cut.visibility.is_visible(query, index))
    # Queries that pad the last block need no mask: their slopes are 0, and `_of_queries` drops
    # their results.
    if extent.keys % tiles.key_block:
        masks.append((index < extent.keys)[:, :, None, :])
    if "segment" in rows:
        of_query, of_key = rows["segment"]
        of_query, of_key = of_query[tile.place], taken(of_key)
        masks.append(of_query[..., :, None] == of_key[..., None, :])
        masks.append((of_key >= 0)[..., None, :])
    seen = [mask[:, :, None] for mask in masks if mask is not None]
    if tile.seen is not None:
        seen.append(_by_token(tiles, tile.seen))
    return functools.reduce(jnp.logical_and, seen) if seen else None


# --- tiles ----------------------------------------------------------------------------------------


class _Tile(NamedTuple):
    """Tile of one iteration of the loop; see `Tiles`.

    Attributes:
      place: int32 [], index of the tile's query block.
      blocks: int32 [heads or 1, blocks], indices of the tile's key blocks.
      seen: bool [heads or 1, groups or 1, query parts, blocks]; None if all are visible.
    """

    place: jax.Array
    blocks: jax.Array
    seen: jax.Array | None


def _tile_arrays(cut: _Cut) -> _Tile:
    tiles = cut.tiles
    return _Tile(
        jnp.asarray(tiles.places[:, 0]),
        jnp.asarray(tiles.places[:, 1:].reshape(-1, tiles.heads, tiles.num_blocks)),
        None if tiles.seen is None else jnp.asarray(tiles.seen),
    )


def _by_token(tiles: Tiles, seen: jax.Array) -> jax.Array:
    """Expands a mask by blocks -> bool [1, heads or 1, groups or 1, queries, keys] of a tile."""
    heads, groups, parts, blocks = seen.shape
    shape = heads, groups, parts, tiles.query_block // parts, blocks, tiles.key_block
    seen = jnp.broadcast_to(seen[:, :, :, None, :, None], shape)
    return seen.reshape(1, heads, groups, *tiles.shape)


def _taken(cut: _Cut, tile: _Tile) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that gathers a tile's key blocks from an array.

    It maps [blocks, batch, kv_heads or 1, block, ...] to [batch, kv_heads, keys, ...]. An index
    beyond the last block gives an arbitrary block, which is masked.
    """
    tiles = cut.tiles

    def take(array: jax.Array) -> jax.Array:
        if tile.blocks.size == 1:
            return array[tile.blocks[0, 0]]
        if tiles.heads == 1:
            gathered = jnp.moveaxis(_at(array, tile.blocks[0]), 0, 2)
        else:
            shape = *array.shape[:2], tiles.heads, *array.shape[3:]
            array = jnp.moveaxis(jnp.broadcast_to(array, shape), 2, 0)
            gathered = jnp.moveaxis(jax.vmap(_at)(array, tile.blocks), (0, 1), (1, 2))
        return gathered.reshape(*gathered.shape[:2], -1, *gathered.shape[4:])

    return take


def _at(array: jax.Array, places: jax.Array) -> jax.Array:
    # JAX's default mode fills with NaN, and NaN times the weight 0 of a masked key is NaN.
    return array.at[places].get(mode="clip")


def _added(cut: _Cut, tile: _Tile) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns a function that adds values to a tile's key blocks: the transpose of `_taken`.

    The values have shape [batch, kv_heads, keys, ...].
    """
    tiles = cut.tiles

    def add(sums: jax.Array, more: jax.Array) -> jax.Array:
        if tile.blocks.size == 1:
            return sums.at[tile.blocks[0, 0]].add(more)
        shape = *more.shape[:2], tiles.num_blocks, tiles.key_block, *more.shape[3:]
        more = jnp.moveaxis(more.reshape(shape), 2, 0)
        if tiles.heads == 1:
            return _plus(sums, tile.blocks[0], more)
        return jax.vmap(_plus, in_axes=(2, 0, 2), out_axes=2)(sums, tile.blocks, more)

    return add


def _plus(sums: jax.Array, places: jax.Array, more: jax.Array) -> jax.Array:
    """Adds to the blocks at the distinct indices `places`; ignores indices beyond the last
    block.
    """
    return sums.at[places].add(more, mode="drop", unique_indices=True)


def _product(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """Computes an einsum with float32 accumulation."""
    return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)
