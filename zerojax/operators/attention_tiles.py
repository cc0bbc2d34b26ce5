"""Tiles of attention: the pairs of queries and keys that a loop over blocks has to compute.

A tile is one block of queries and one or several blocks of keys, which need not be neighbours.
What no query of a tile may see is left out before anything is traced. Numpy alone.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from zerojax.operators.sparse_layouts import BlockTable

LOOP_COST = 128 * 128
"""What a turn of the loop costs beside its scores, in scores of one head: it keeps tiles from being
cut until a turn does next to nothing. A guess; no GPU has measured it."""


@dataclasses.dataclass(frozen=True)
class Extent:
    """What is known of a call before any array.

    Attributes:
      queries, keys: numbers of tokens.
      block: most queries, and most keys, of a tile, if a block of the table is not larger.
      causal, window: as in `zerojax.attention`.
      has_positions: whether they compare positions that are data; else they compare the indices.
      table: which blocks see which; None: all see all.
      groups: query heads of a key/value head.
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
        """Bool [query blocks, key blocks] of so many tokens: what indices alone do not hide."""
        query = np.arange(-(-self.queries // size))[:, None] * size
        key = np.arange(-(-self.keys // size))[None, :] * size
        seen = np.ones((query.size, key.size), bool)
        if self.has_positions:
            return seen
        if self.causal:
            seen &= key <= query + size - 1
        if self.window is not None:
            seen &= query - (key + size - 1) < self.window
            if not self.causal:
                seen &= key - (query + size - 1) < self.window
        return seen


@dataclasses.dataclass(frozen=True, eq=False)
class Tiles:
    """The turns of the loop.

    Attributes:
      query_block: queries of a tile.
      key_block: keys of a block of keys.
      places: int32 [tiles, 1 + heads x blocks]: the block of queries, then the blocks of keys for
        each key/value head, or for all heads alike. Tiles of one block of queries follow one
        another. A place that is left over has a number beyond the blocks, each another one.
      heads: key/value heads that have blocks of their own; 1: all have the same.
      seen: bool [tiles, heads or 1, groups or 1, query parts, blocks]: which blocks of keys each
        part of the queries sees by the table; None: all.
    """

    query_block: int
    key_block: int
    places: np.ndarray
    heads: int = 1
    seen: np.ndarray | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks of keys of a tile."""
        return (self.places.shape[1] - 1) // self.heads

    @property
    def shape(self) -> tuple[int, int]:
        """Queries and keys of a tile."""
        return self.query_block, self.num_blocks * self.key_block

    @property
    def num_scores(self) -> int:
        """Scores of each head of a sequence that the loop computes in one pass."""
        return len(self.places) * self.shape[0] * self.shape[1]


@functools.lru_cache(maxsize=64)
def tiles_of(extent: Extent) -> Tiles:
    """The tiles in which something may be seen.

    A tile of several blocks of queries lists each block of keys that any of them sees, and computes
    it for all: the sizes are those with the fewest scores, counting `LOOP_COST` for each turn.
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
    """Powers of two up to a limit, and the number that is just enough."""
    last = max(min(most, useful), 1)
    return sorted({last, *(2**n for n in range(last.bit_length()))})


def _by_tile(seen: np.ndarray, parts: int) -> np.ndarray:
    """[heads, groups, query blocks, key blocks] -> [heads, groups, tiles, parts, key blocks]."""
    seen = np.pad(seen, [(0, 0), (0, 0), (0, -seen.shape[2] % parts), (0, 0)])
    return seen.reshape(*seen.shape[:2], -1, parts, seen.shape[3])


def _listed(seen: np.ndarray) -> np.ndarray:
    """Bool [heads, tiles, key blocks]: what any query of a tile sees."""
    return np.asarray(np.any(seen, axis=(1, 3)))


def _gathered(seen: np.ndarray, size: int, blocks: int) -> Tiles:
    """Tiles with so many blocks of keys each; `seen` is by tile."""
    heads, groups, tiles, parts, beyond = seen.shape
    listed = _listed(seen)
    places, shown = [], []
    for tile in range(tiles):
        turns = -(-int(listed[:, tile].sum(-1).max()) // blocks)
        columns = np.tile(beyond + np.arange(turns * blocks), (heads, 1))
        for head in range(heads):
            found = np.flatnonzero(listed[head, tile])
            columns[head, : len(found)] = found
        padded = np.pad(seen[:, :, tile], [(0, 0), (0, 0), (0, 0), (0, turns * blocks)])
        for turn in np.split(columns, turns, axis=1) if turns else []:
            places.append([tile, *turn.ravel()])
            shown.append(np.take_along_axis(padded, turn[:, None, None, :], axis=-1))
    none = np.zeros((0, heads, groups, parts, blocks), bool)
    bits = np.stack(shown) if shown else none
    return Tiles(
        query_block=parts * size,
        key_block=size,
        places=np.array(places, np.int32).reshape(-1, 1 + heads * blocks),
        heads=heads,
        seen=None if bits.all() else bits,
    )
