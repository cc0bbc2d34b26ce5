"""Attention in blocks of queries and keys, without an array of all scores.

The loop goes over the tiles in which a query may see a key (`attention_tiles`), be it by the order
of tokens, by a window or by a table of blocks; the softmax is taken online
(arXiv:1805.02867, arXiv:2112.05682), and the backward pass computes each block of scores again from
the log-sum-exp of its rows (arXiv:2205.14135). Plain XLA: any device, any float dtype. It saves
memory, not products of the tiles it visits; a fused kernel also keeps a tile's scores on the chip.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from zerojax.operators.attention_tiles import Extent, Tiles, tiles_of
from zerojax.operators.marks import LINEAR_RULE
from zerojax.operators.sparse_layouts import BlockTable

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
      extent: what the tiles of the loop follow from.
      softcap: see `zerojax.attention`.
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
    """Softmax attention, tile by tile.

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
        indices, and tiles in which nothing can be seen are left out.
      table: which blocks of keys the queries of a block see, by their indices, of as many blocks as
        there are: others are not computed. None: all.
      block: most queries and keys of a tile; None: `BLOCK`.
      softcap: see `zerojax.attention`.

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
    """Attention over a part of the keys, for a caller that merges parts and differentiates itself.

    Args:
      query, key, value, visibility, scale, segments, positions, table, block, softcap: as of
        `chunked_attention`; integers may be [1, tokens] where all rows have the same.

    Returns:
      (out float32 [batch, queries, heads, head_dim], 0 for a query that sees none of these keys;
      log-sum-exp of its scores, float32 [batch, queries, heads], -inf for such a query).
    """
    more = {"table": table, "block": block, "softcap": softcap}
    cut = _cut_of(query, key, visibility, scale, positions, **more)
    out, log_sum = _forward_pass(cut, *_operands(cut, query, key, value, segments, positions))
    log_sum = _of_queries(log_sum[..., None], query)[..., 0]
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
    """What a part of the keys adds to the gradients of attention over all keys.

    Args:
      query, key, value, visibility, scale, segments, positions, table, block, softcap: as of
        `part_forward`.
      log_sum: float32 [batch, queries, heads], over all keys and not over this part alone; -inf for
        a query that sees no key.
      turned: float32 [batch, queries, heads], the sum over features of `slope` times the result.
      slope: [batch, queries, heads, head_dim], gradient with respect to the result.

    Returns:
      float32 gradients of query, key and value.
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
    positions: Any,
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
    cut: _Cut, query: jax.Array, key: jax.Array, value: jax.Array, segments: Any, positions: Any
) -> tuple[jax.Array, jax.Array, jax.Array, dict[str, Any]]:
    """Query, key, value and integers of tokens, in blocks."""
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
    """[blocks, batch, kv_heads, groups, block, n] -> [batch, queries, heads, n]."""
    array = jnp.moveaxis(array, (1, 0, 4), (0, 1, 2))
    array = array.reshape(array.shape[0], -1, query.shape[2], array.shape[-1])
    return array[:, : query.shape[1]]


def _of_keys(array: jax.Array, key: jax.Array) -> jax.Array:
    """[blocks, batch, kv_heads, block, n] -> [batch, keys, kv_heads, n]."""
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
    """What the tiles of a call follow from; see `chunked_attention`."""
    return Extent(
        queries=queries,
        keys=keys,
        block=min(block or BLOCK, max(queries, keys)),
        causal=visibility.causal,
        window=visibility.window,
        has_positions=has_positions,
        table=table,
        groups=groups,
    )


def _in_blocks(array: jax.Array, block: int) -> jax.Array:
    """[batch, tokens, heads..., features] -> [blocks, batch, heads..., block, features]."""
    missing = -array.shape[1] % block
    if missing:
        array = jnp.pad(array, [(0, 0), (0, missing)] + [(0, 0)] * (array.ndim - 2))
    array = array.reshape(array.shape[0], -1, block, *array.shape[2:])
    return jnp.moveaxis(array, (1, 2), (0, -2))


def _both_in_blocks(cut: _Cut, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Integers [batch, tokens] of queries and of keys -> [blocks, batch, 1, block] each."""
    query, key = (x.astype(jnp.int32)[:, :, None, None] for x in pair)
    tiles = cut.tiles
    return _in_blocks(query, tiles.query_block)[..., 0], _in_blocks(key, tiles.key_block)[..., 0]


# --- differentiation ------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(cut: _Cut, query: Any, key: Any, value: Any, rows: dict[str, Any]) -> jax.Array:
    out, _ = _forward_pass(cut, query, key, value, rows)
    out = out.astype(query.dtype)
    return checkpoint_name(out, LINEAR_RULE)


def _forward(cut: _Cut, query: Any, key: Any, value: Any, rows: Any) -> tuple[Any, Any]:
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
def _as_one_operation(cut: _Cut, *given: Any) -> tuple[jax.Array, jax.Array]:
    """The loop over pairs as one operation, for a `jax.checkpoint` around it.

    A policy that keeps products would look into the bare loop and keep the scores of every pair.
    """
    out, log_sum = _forward_pass(cut, *given)
    return out.astype(given[0].dtype), log_sum


def _refuse(*_: Any) -> Any:
    raise NotImplementedError(
        "attention in chunks has no second derivative; use implementation='xla'"
    )


_as_one_operation.defvjp(_refuse, _refuse)


# --- arithmetic -----------------------------------------------------------------------------------


def _forward_pass(
    cut: _Cut, query: jax.Array, key: jax.Array, value: jax.Array, rows: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
    """(out in float32, log-sum-exp of each row of scores; inf where a query sees no key).

    `query` is [blocks, batch, kv_heads, groups, block, features], `key` and `value` are
    [blocks, batch, kv_heads, block, features].
    """

    def step(carry: tuple[jax.Array, ...], turn: _Turn) -> tuple[tuple[jax.Array, ...], None]:
        sums, greatest, total = carry
        i, taken = turn.place, _taken(cut, turn)
        scores = _scores(cut, query[i], taken(key), rows, turn)
        before = greatest[i]
        after = jnp.maximum(before, jnp.max(scores, axis=-1))
        shift = jnp.where(after == -jnp.inf, 0, after)  # of a row that has seen nothing yet
        weights = jnp.exp(scores - shift[..., None])
        shrink = jnp.exp(before - shift)
        mixed = _product("bkgqs,bksh->bkgqh", weights.astype(value.dtype), taken(value))
        # Not as a scatter: the analysis of a loss (`batch_rows`) follows rows through updates.
        write = functools.partial(lax.dynamic_update_index_in_dim, index=i, axis=0)
        sums = write(sums, sums[i] * shrink[..., None] + mixed)
        total = write(total, total[i] * shrink + jnp.sum(weights, axis=-1))
        return (sums, write(greatest, after), total), None

    start = jnp.zeros(query.shape[:-1] + value.shape[-1:], jnp.float32)
    row = jnp.zeros(query.shape[:-1], jnp.float32)
    (sums, greatest, total), _ = lax.scan(step, (start, row - jnp.inf, row), _turns(cut))
    seen = total > 0
    out = sums / jnp.where(seen, total, 1)[..., None]
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
    """Gradients of query, key and value in float32."""

    def step(carry: tuple[jax.Array, ...], turn: _Turn) -> tuple[tuple[jax.Array, ...], None]:
        of_query, of_key, of_value = carry
        i, taken, added = turn.place, _taken(cut, turn), _added(cut, turn)
        keys, values = taken(key), taken(value)
        scores = _scores(cut, query[i], keys, rows, turn)
        weights = jnp.exp(scores - log_sum[i][..., None])
        given = slope[i].astype(value.dtype)
        add = _product("bkgqs,bkgqh->bksh", weights.astype(value.dtype), given)
        of_value = added(of_value, add)
        inner = _product("bkgqh,bksh->bkgqs", given, values)
        slopes = weights * (inner - turned[i][..., None]) * cut.scale
        if cut.softcap is not None:
            slopes = slopes * _bend(cut.softcap, scores)
        scores = slopes.astype(query.dtype)
        of_query = of_query.at[i].add(_product("bkgqs,bksh->bkgqh", scores, keys))
        of_key = added(of_key, _product("bkgqs,bkgqh->bksh", scores, query[i]))
        return (of_query, of_key, of_value), None

    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (query, key, value))
    sums, _ = lax.scan(step, start, _turns(cut))
    of_query, of_key, of_value = sums
    return of_query, of_key, of_value


def _scores(
    cut: _Cut, query: jax.Array, key: jax.Array, rows: dict[str, Any], turn: _Turn
) -> jax.Array:
    """float32 [batch, kv_heads, groups, queries, keys] of a tile, -inf where a key is not seen."""
    scores = _product("bkgqh,bksh->bkgqs", query, key) * cut.scale
    if cut.softcap is not None:
        scores = cut.softcap * jnp.tanh(scores / cut.softcap)
    seen = _seen(cut, rows, turn)
    return scores if seen is None else jnp.where(seen, scores, -jnp.inf)


def _bend(softcap: float, capped: jax.Array) -> jax.Array:
    """The derivative of capped scores by those before; 0 where a key is not seen."""
    flat = jnp.where(capped == -jnp.inf, softcap, capped) / softcap
    return 1 - flat * flat


def _seen(cut: _Cut, rows: dict[str, Any], turn: _Turn) -> jax.Array | None:
    """Bool that broadcasts to the scores of a tile; None: all keys are seen."""
    tiles, extent, taken = cut.tiles, cut.extent, _taken(cut, turn)
    query = (turn.place * tiles.query_block + jnp.arange(tiles.query_block))[None, None]
    blocks = turn.blocks[:, :, None] * tiles.key_block + jnp.arange(tiles.key_block)[None, None]
    index = blocks.reshape(1, tiles.heads, -1)
    found = []
    if extent.has_positions:
        of_query, of_key = rows["position"]
        found.append(cut.visibility.is_visible(of_query[turn.place], taken(of_key)))
    else:
        found.append(cut.visibility.is_visible(query, index))
    if extent.keys % tiles.key_block:
        found.append((index < extent.keys)[:, :, None, :])
    if "segment" in rows:
        of_query, of_key = rows["segment"]
        of_query, of_key = of_query[turn.place], taken(of_key)
        found.append(of_query[..., :, None] == of_key[..., None, :])
        found.append((of_key >= 0)[..., None, :])
    seen = [x[:, :, None] for x in found if x is not None]
    if turn.seen is not None:
        seen.append(_by_token(tiles, turn.seen))
    return functools.reduce(jnp.logical_and, seen) if seen else None


# --- tiles ----------------------------------------------------------------------------------------


class _Turn(NamedTuple):
    """One tile of the loop; see `Tiles`.

    Attributes:
      place: int32 [], its block of queries.
      blocks: int32 [heads or 1, blocks], its blocks of keys.
      seen: bool [heads or 1, groups or 1, query parts, blocks]; None: all.
    """

    place: jax.Array
    blocks: jax.Array
    seen: jax.Array | None


def _turns(cut: _Cut) -> _Turn:
    tiles = cut.tiles
    return _Turn(
        jnp.asarray(tiles.places[:, 0]),
        jnp.asarray(tiles.places[:, 1:].reshape(-1, tiles.heads, tiles.num_blocks)),
        None if tiles.seen is None else jnp.asarray(tiles.seen),
    )


def _by_token(tiles: Tiles, seen: jax.Array) -> jax.Array:
    """Bool by blocks -> [1, heads or 1, groups or 1, queries, keys] of a tile."""
    heads, groups, parts, blocks = seen.shape
    shape = heads, groups, parts, tiles.query_block // parts, blocks, tiles.key_block
    seen = jnp.broadcast_to(seen[:, :, :, None, :, None], shape)
    return seen.reshape(1, heads, groups, *tiles.shape)


def _taken(cut: _Cut, turn: _Turn) -> Callable[[jax.Array], jax.Array]:
    """What takes a tile's blocks of keys out of an array, side by side.

    It makes [batch, kv_heads, keys, ...] of [blocks, batch, kv_heads or 1, block, ...]. A place
    beyond the blocks is some block, which is not seen.
    """
    tiles = cut.tiles

    def take(array: jax.Array) -> jax.Array:
        if turn.blocks.size == 1:
            return array[turn.blocks[0, 0]]
        if tiles.heads == 1:
            found = jnp.moveaxis(_at(array, turn.blocks[0]), 0, 2)
        else:
            shape = *array.shape[:2], tiles.heads, *array.shape[3:]
            array = jnp.moveaxis(jnp.broadcast_to(array, shape), 2, 0)
            found = jnp.moveaxis(jax.vmap(_at)(array, turn.blocks), (0, 1), (1, 2))
        return found.reshape(*found.shape[:2], -1, *found.shape[4:])

    return take


def _at(array: jax.Array, places: jax.Array) -> jax.Array:
    return array.at[places].get(mode="clip")


def _added(cut: _Cut, turn: _Turn) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The reverse of `_taken`: adds [batch, kv_heads, keys, ...] to the blocks of a tile."""
    tiles = cut.tiles

    def add(sums: jax.Array, more: jax.Array) -> jax.Array:
        if turn.blocks.size == 1:
            return sums.at[turn.blocks[0, 0]].add(more)
        shape = *more.shape[:2], tiles.num_blocks, tiles.key_block, *more.shape[3:]
        more = jnp.moveaxis(more.reshape(shape), 2, 0)
        if tiles.heads == 1:
            return _plus(sums, turn.blocks[0], more)
        return jax.vmap(_plus, in_axes=(2, 0, 2), out_axes=2)(sums, turn.blocks, more)

    return add


def _plus(sums: jax.Array, places: jax.Array, more: jax.Array) -> jax.Array:
    """Blocks of a tile are all different, and what is beyond the last one is dropped."""
    return sums.at[places].add(more, mode="drop", unique_indices=True)


def _product(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """An einsum in float32."""
    return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)
