"""Tiles of attention: pairs of query blocks and key blocks that the loop over blocks computes.

A tile is one block of queries and one or several blocks of keys, which need not be adjacent. Fully
masked tiles are left out before tracing. Uses only NumPy.
"""

from __future__ import annotations

import functools

import numpy as np

from zerojax.config.late_dataclasses import dataclass
from zerojax.operators.sparse_layouts import BlockTable

LOOP_COST = 128 * 128
"""Overhead of one iteration of the loop, expressed in scores of one head; it limits how small tiles
become. An estimate, not measured on a GPU."""


@dataclass(frozen=True)
class Extent:
    """Static properties of a call of attention that determine its tiles.

    Attributes:
      queries, keys: numbers of tokens.
      block: maximum number of queries, and of keys, of a tile, unless a block of the table is
        larger.
      causal, window: options as for `zerojax.attention`.
      has_positions: whether `causal` and `window` compare positions that are data, not the indices.
      table: mask by blocks; None makes all keys visible.
      groups: number of query heads per key/value head.
    """

    queries: int
    keys: int
    block: int
    causal: bool
    window: int | None
    has_positions: bool
    table: BlockTable | None
    groups: int

    def may_see(self, size: int) -> np.ndarray:
        """Computes the block mask that follows from token indices alone, for blocks of `size`
        tokens.

        Returns:
          Bool [query blocks, key blocks]; False if no query of a block sees any key of the other.
        """
        query = np.arange(-(-self.queries // size))[:, None] * size
        key = np.arange(-(-self.keys // size))[None, :] * size
        seen = np.ones((query.size, key.size), bool)
        # Positions are data, so nothing can be left out before tracing.
        if self.has_positions:
            return seen
        if self.causal:
            # The last query of a block sees furthest, so a block of keys is visible if its first
            # key is.
            seen &= key <= query + size - 1
        if self.window is not None:
            # The first query of a block and the last key are the nearest pair in this direction.
            seen &= query - (key + size - 1) < self.window
            if not self.causal:
                seen &= key - (query + size - 1) < self.window
        return seen


@dataclass(frozen=True, eq=False)
class Tiles:
    """All tiles of an attention call, in the order of the loop, one per iteration.

    Attributes:
      query_block: number of queries of a tile.
      key_block: number of keys of a key block.
      places: int32 [tiles, 1 + heads x blocks]: index of the query block, then indices of the key
        blocks for each key/value head, or for all heads together. Tiles of one query block are
        adjacent. Unused entries have distinct numbers beyond the last block.
      heads: number of key/value heads with different key blocks; 1 if all heads use the same.
      seen: bool [tiles, heads or 1, groups or 1, query parts, blocks]: whether the table makes a
        key block visible to a part of the queries; None if all are visible.
    """

    query_block: int
    key_block: int
    places: np.ndarray
    heads: int = 1
    seen: np.ndarray | None = None

    @property
    def num_blocks(self) -> int:
        """Number of key blocks in a tile."""
        return (self.places.shape[1] - 1) // self.heads

    @property
    def shape(self) -> tuple[int, int]:
        """(number of queries, number of keys) of a tile."""
        return self.query_block, self.num_blocks * self.key_block

    @property
    def num_scores(self) -> int:
        """Number of scores per head and sequence that the loop computes in one pass."""
        return len(self.places) * self.shape[0] * self.shape[1]


# `_Cut.tiles` asks again at every use, in the forward and in the backward pass.
@functools.lru_cache(maxsize=64)
def tiles_of(extent: Extent) -> Tiles:
    """Computes the tiles of a call, without those that are fully masked.

    A tile of several query blocks lists every key block that any of them sees, and computes it for
    all of them. The tile sizes minimise the number of scores plus `LOOP_COST` per iteration.
    """
    if extent.table is None:
        pairs = np.argwhere(extent.may_see(extent.block)).astype(np.int32)
        return Tiles(extent.block, extent.block, pairs)
    table = extent.table
    seen = table.seen & extent.may_see(table.block)
    groups = extent.groups if len(seen) > 1 else 1
    seen = seen.reshape(-1, groups, *seen.shape[1:])
    most = max(extent.block // table.block, 1)
    costs = [
        (int(np.sum(-(-counts // blocks))) * (parts * blocks * table.block**2 + LOOP_COST), choice)
        for parts in _sizes(most, seen.shape[2])
        for counts in [_listed(_by_tile(seen, parts)).sum(-1).max(0)]
        for blocks in _sizes(most, int(counts.max(initial=1)))
        for choice in [(parts, blocks)]
    ]
    parts, blocks = min(costs)[1]
    return _gathered(_by_tile(seen, parts), table.block, blocks)


def _sizes(most: int, useful: int) -> list[int]:
    """Returns the powers of two below min(most, useful), then this minimum."""
    last = max(min(most, useful), 1)
    return sorted({last, *(2**n for n in range(last.bit_length()))})


def _by_tile(seen: np.ndarray, parts: int) -> np.ndarray:
    """Splits the query blocks into tiles.

    [heads, groups, query blocks, key blocks] -> [heads, groups, tiles, parts, key blocks].
    """
    seen = np.pad(seen, [(0, 0), (0, 0), (0, -seen.shape[2] % parts), (0, 0)])
    return seen.reshape(*seen.shape[:2], -1, parts, seen.shape[3])


def _listed(seen: np.ndarray) -> np.ndarray:
    """Computes bool [heads, tiles, key blocks]: True for blocks that any query of a tile sees."""
    return np.asarray(np.any(seen, axis=(1, 3)))


def _gathered(seen: np.ndarray, size: int, blocks: int) -> Tiles:
    """Builds tiles with `blocks` key blocks each; `seen` is the result of `_by_tile`."""
    heads, groups, tiles, parts, beyond = seen.shape
    listed = _listed(seen)
    places, shown = [], []
    for tile in range(tiles):
        num_tiles = -(-int(listed[:, tile].sum(-1).max()) // blocks)
        # The numbers beyond the last block are distinct, because `_plus` of `chunked_attention`
        # adds with unique indices.
        columns = np.tile(beyond + np.arange(num_tiles * blocks), (heads, 1))
        for head in range(heads):
            visible = np.flatnonzero(listed[head, tile])
            columns[head, : len(visible)] = visible
        # The padding makes indices beyond the last block read False, so these blocks are masked.
        padded = np.pad(seen[:, :, tile], [(0, 0), (0, 0), (0, 0), (0, num_tiles * blocks)])
        # `np.split` refuses to make 0 parts.
        for key_blocks in np.split(columns, num_tiles, axis=1) if num_tiles else []:
            places.append([tile, *key_blocks.ravel()])
            shown.append(np.take_along_axis(padded, key_blocks[:, None, None, :], axis=-1))
    none = np.zeros((0, heads, groups, parts, blocks), bool)
    bits = np.stack(shown) if shown else none
    return Tiles(
        query_block=parts * size,
        key_block=size,
        places=np.array(places, np.int32).reshape(-1, 1 + heads * blocks),
        heads=heads,
        seen=None if bits.all() else bits,
    )
