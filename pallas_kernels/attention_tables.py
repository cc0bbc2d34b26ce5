"""Lists the tiles that an attention kernel visits: blocks of 16 tokens, four per tile of 64.

For each tile of 64 tokens, a table lists the visible blocks of 16 tokens of the other side (keys
for queries, queries for keys), four at a time. Layouts of small blocks therefore stay sparse on
tiles of 64 x 64. Without a table the tiles follow from the order of tokens and a window.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BLOCK = 16
"""Number of tokens in a block of a table."""
PARTS = 4
"""Number of blocks in a tile, of either queries or keys."""
TILE = BLOCK * PARTS


@dataclasses.dataclass(frozen=True, eq=False)
class TileTable:
    """Blocks of the other side (keys or queries) that each tile of one side sees.

    Attributes:
      blocks: int32 [heads, tiles, turns, 4], indices of the blocks of the other side that an
        iteration ("turn") of the loop reads. Unused entries repeat a block, with all bits of the
        word 0.
      words: int32 [heads, tiles, turns], masks: bit 4 q + k tells whether part q of the queries
        sees part k of the keys.
      counts: int32 [heads, tiles], number of iterations of each tile.
    """

    blocks: np.ndarray
    words: np.ndarray
    counts: np.ndarray

    @property
    def num_heads(self) -> int:
        return len(self.counts)


@dataclasses.dataclass(frozen=True, eq=False)
class BlockTables:
    """Tables of one layout in both directions: keys that queries see, and queries that see keys."""

    of_queries: TileTable
    of_keys: TileTable


def tables_of(seen: np.ndarray) -> BlockTables:
    """Builds the tables of a layout.

    Args:
      seen: bool [heads or 1, query blocks, key blocks]; both numbers of blocks are multiples of 4.

    Raises:
      ValueError: `seen` has another shape or dtype.

    >>> found = tables_of(np.tril(np.ones((1, 8, 8), bool))).of_queries
    >>> found.counts.tolist(), found.blocks[0, 0, 0].tolist(), bin(found.words[0, 0, 0])
    ([[1, 2]], [0, 1, 2, 3], '0b1111011100110001')
    """
    if seen.dtype != bool or seen.ndim != 3 or seen.shape[1] % PARTS or seen.shape[2] % PARTS:
        raise ValueError(
            f"seen is {seen.dtype}{list(seen.shape)}; give bool [heads or 1, query blocks, key "
            f"blocks] of blocks of {BLOCK} tokens, padded to multiples of {PARTS} blocks"
        )
    return BlockTables(
        _one_side(seen, is_of_keys=False), _one_side(seen.transpose(0, 2, 1), is_of_keys=True)
    )


def _one_side(seen: np.ndarray, *, is_of_keys: bool) -> TileTable:
    """Builds one side's table from `seen`, [heads, own blocks, blocks of the other side]."""
    heads, own, _ = seen.shape
    tiles = seen.reshape(heads, own // PARTS, PARTS, -1)
    listed = np.asarray(tiles.any(2))
    turns = -(-listed.sum(-1) // PARTS)
    most = max(int(turns.max(initial=0)), 1)
    blocks = np.zeros((heads, own // PARTS, most, PARTS), np.int32)
    words = np.zeros((heads, own // PARTS, most), np.int32)
    for head, tile in np.ndindex(heads, own // PARTS):
        columns = np.flatnonzero(listed[head, tile, :])
        if not columns.size:
            continue
        missing = -columns.size % PARTS
        shown = np.pad(tiles[head, tile][:, columns], [(0, 0), (0, missing)])
        columns = np.pad(columns, (0, missing), mode="edge").reshape(-1, PARTS)
        shown = shown.reshape(PARTS, -1, PARTS)
        # [own part, turn, other part] -> [turn, query part, key part]
        shown = shown.transpose(1, 2, 0) if is_of_keys else shown.transpose(1, 0, 2)
        bits = shown.reshape(len(columns), -1) << np.arange(PARTS * PARTS)
        blocks[head, tile, : len(columns)] = columns
        words[head, tile, : len(columns)] = bits.sum(-1)
    return TileTable(blocks, words, turns.astype(np.int32))


def share_visited(table: TileTable) -> float:
    """Returns the fraction of all scores that a kernel with this table computes, for as many
    queries as keys."""
    most = table.counts.shape[1] * TILE
    return float(table.counts.mean() * TILE / most) if most else 0.0


# --- a call ---------------------------------------------------------------------------------------

Operations = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]
"""Functions minimum, maximum, and quotient of numbers that are not negative."""
_NUMBERS: Operations = (min, max, operator.floordiv)


def _traced() -> Operations:
    return jnp.minimum, jnp.maximum, lambda number, by: lax.div(number, jnp.int32(by))


@dataclasses.dataclass(frozen=True)
class Form:
    """Static description of a call of the attention kernels: sizes and mask.

    Attributes:
      scale: factor of the scores.
      heads, kv_heads: numbers of query heads and of key/value heads.
      head_dim: number of features of a head.
      queries, keys: numbers of tokens, multiples of 64.
      causal: whether a query sees only keys at its own position and before.
      window: a query sees only positions less than `window` away; None for no limit.
      has_positions: whether positions are data, so that every tile may contain visible pairs.
      has_segments: whether tokens see only their own segment.
      layouts: number of heads with their own tables; 1 if all share one; 0 without tables.
      listed: (iterations in all heads' tables of query tiles, the same for key tiles); None without
        tables.
    """

    scale: float
    heads: int
    kv_heads: int
    head_dim: int
    queries: int
    keys: int
    causal: bool
    window: int | None
    has_positions: bool
    has_segments: bool
    layouts: int = 0
    listed: tuple[int, int] | None = None

    @property
    def group(self) -> int:
        """Number of query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def compares_positions(self) -> bool:
        return self.causal or self.window is not None

    def key_tiles(self, tile: jax.Array | int, ops: Operations | None = None) -> tuple[Any, Any]:
        """Returns (first, number) of the key tiles that a query tile visits if there is no
        table."""
        least, most, divide = ops or _traced()
        first, last = 0, self.keys // TILE
        if not self.has_positions:
            if self.causal:
                last = least(last, tile + 1)
            if self.window is not None:
                first = divide(most(tile * TILE - (self.window - 1), 0), TILE)
                if not self.causal:
                    last = least(last, self._end_of_window(tile, divide))
        # With fewer keys than queries, a window can begin after the last key.
        return first, most(last - first, 0)

    def query_tiles(self, tile: jax.Array | int, ops: Operations | None = None) -> tuple[Any, Any]:
        """Returns (first, number) of the query tiles that visit a key tile if there is no table."""
        least, most, divide = ops or _traced()
        first, last = 0, self.queries // TILE
        if not self.has_positions:
            if self.causal:
                first = tile
            elif self.window is not None:
                first = divide(most(tile * TILE - (self.window - 1), 0), TILE)
            if self.window is not None:
                last = least(last, self._end_of_window(tile, divide))
        return first, most(last - first, 0)

    def _end_of_window(self, tile: jax.Array | int, divide: Callable[[Any, int], Any]) -> Any:
        """Returns the tile after the last one that a window around a tile reaches."""
        assert self.window is not None
        return divide(tile * TILE + TILE - 1 + self.window - 1, TILE) + 1

    def visited(self, *, of_keys: bool) -> int:
        """Counts the pairs of tiles that the programs of all heads of one batch row visit."""
        if self.listed is not None:
            return self.listed[of_keys]
        tiles, of = (self.keys, self.query_tiles) if of_keys else (self.queries, self.key_tiles)
        return self.heads * sum(of(tile, _NUMBERS)[1] for tile in range(tiles // TILE))
