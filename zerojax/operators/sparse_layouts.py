"""Tables of block layouts: which blocks of keys each block of queries sees.

The tables equal those that DeepSpeed's code makes from the same parameters (`tests/golden` has some
of them). They are NumPy arrays, independent of devices.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import random
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.config.attention_layouts import (
    BigBirdLayout,
    BlockLayout,
    BSLongformerLayout,
    FixedLayout,
    SlidingWindowLayout,
    VariableLayout,
)
from zerojax.config.late_dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class BlockTable:
    """Block-sparse attention mask.

    Two tables are equal if their block sizes, entries and names are equal.

    Attributes:
      block: number of tokens of a block of queries or keys.
      seen: bool [heads or 1, query blocks, key blocks], True for visible blocks; read-only.
      name: name of the layout, for messages.

    Raises:
      ValueError: entries are not bool, `seen` does not have three dimensions, or `block` is below
        1.
    """

    block: int
    seen: np.ndarray
    name: str = "table"

    def __post_init__(self) -> None:
        seen = np.asarray(self.seen)
        if seen.dtype != bool or seen.ndim != 3:
            raise ValueError(
                f"seen is {seen.dtype} of shape {seen.shape}, but must be bool "
                "[heads or 1, query blocks, key blocks]"
            )
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 1:
            raise ValueError(f"block={self.block!r} must be an integer of at least 1")
        seen = np.array(seen)  # a copy is made read-only, so that the caller's array stays writable
        seen.setflags(write=False)
        object.__setattr__(self, "seen", seen)

    # Computed once: tables are static arguments of custom derivatives and keys of caches.
    @functools.cached_property
    def _key(self) -> tuple[object, ...]:
        bits = hashlib.sha256(np.packbits(self.seen).tobytes()).digest()
        return self.block, self.seen.shape, bits, self.name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockTable) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def share(self) -> float:
        """Fraction of visible blocks, over all heads."""
        return float(self.seen.mean()) if self.seen.size else 0.0

    def cut(self, queries: int, keys: int) -> BlockTable:
        """Cuts the table to the first `queries` and `keys` tokens.

        Args:
          queries, keys: numbers of tokens; the last block may be partial.

        Raises:
          ValueError: the table has fewer blocks than these tokens need.
        """
        blocks = -(-queries // self.block), -(-keys // self.block)
        if blocks == self.seen.shape[1:]:
            return self
        if any(needed > size for needed, size in zip(blocks, self.seen.shape[1:], strict=True)):
            rows, columns = (n * self.block for n in self.seen.shape[1:])
            raise ValueError(
                f"the block table is for at most {rows} queries and {columns} keys, but the call "
                f"has {queries} and {keys}; make it for {max(queries, keys)} tokens"
            )
        return dataclasses.replace(self, seen=self.seen[:, : blocks[0], : blocks[1]])

    def of_tokens(self, queries: int, keys: int) -> jax.Array:
        """Expands the table to a mask by tokens, bool [heads or 1, queries, keys]."""
        size, (heads, rows, columns) = self.block, self.seen.shape
        # Repeated by JAX: an array repeated by NumPy would be a large constant of the program.
        shape = heads, rows, size, columns, size
        seen = jnp.broadcast_to(jnp.asarray(self.seen)[:, :, None, :, None], shape)
        return seen.reshape(heads, rows * size, columns * size)[:, :queries, :keys]

    def of_positions(self, queries: jax.Array, keys: int) -> jax.Array:
        """Expands the table to a mask, bool [heads or 1, ..., queries, keys], for queries at
        positions.

        Args:
          queries: integers [..., queries], positions.
          keys: number of keys, at positions 0, 1, ..., keys - 1.

        Raises:
          ValueError: the table is for fewer keys.
        """
        table = self.cut(self.seen.shape[1] * self.block, keys)
        rows = jnp.take(jnp.asarray(table.seen), queries // self.block, axis=1, mode="clip")
        return jnp.take(rows, np.arange(keys) // self.block, axis=-1, mode="clip")


@functools.lru_cache(maxsize=64)
def layout_table(layout: BlockLayout, *, num_heads: int, num_tokens: int) -> BlockTable:
    """Builds the block table of a layout for `num_tokens` tokens.

    A random layout equals DeepSpeed's after `random.seed(layout.seed)`. DeepSpeed builds the table
    of the longest sequence and cuts it for shorter ones, as `BlockTable.cut` does.

    Args:
      layout: parameters of the layout.
      num_heads: number of query heads; the table has as many heads if heads differ, else 1.
      num_tokens: number of tokens of a sequence; the last block may be partial.

    Raises:
      ValueError: the layout needs more blocks than these tokens have.

    Example:
      >>> from zerojax.config import FixedLayout
      >>> table = layout_table(FixedLayout(num_local_blocks=2), num_heads=8, num_tokens=64)
      >>> table.seen[0].astype(int)
      array([[1, 1, 0, 1],
             [1, 1, 0, 1],
             [0, 1, 1, 1],
             [0, 1, 1, 1]])
    """
    blocks = -(-num_tokens // layout.block)
    for name in ("num_random_blocks", "num_sliding_window_blocks"):
        _check_fits(layout, name, blocks)
    if isinstance(layout, BigBirdLayout):
        _check_fits(layout, "num_global_blocks", blocks)
    heads = num_heads if layout.is_per_head else 1
    # One generator for all heads, as in DeepSpeed, whose tables these must equal.
    draw = random.Random(getattr(layout, "seed", None))
    mark = _MARKERS[type(layout)]
    seen = np.zeros((heads, blocks, blocks), bool)
    for head in range(heads):
        mark(layout, seen[head], head, draw)
    if (seen == seen[:1]).all():
        seen = seen[:1]
    return BlockTable(layout.block, seen, layout.mode)


def _check_fits(layout: BlockLayout, name: str, blocks: int) -> None:
    value = getattr(layout, name, 0)
    if value > blocks:
        raise ValueError(
            f"{name}={value} of the layout {layout.mode} is more than the {blocks} blocks of "
            f"{layout.block} tokens; use at most {blocks}, or a smaller block"
        )


# --- layouts --------------------------------------------------------------------------------------


def _fixed(layout: FixedLayout, seen: np.ndarray, head: int, _: random.Random) -> None:
    blocks, size, number = len(seen), layout.num_local_blocks, layout.num_global_blocks
    is_causal = layout.attention == "unidirectional"
    _windows(seen, range(0, blocks, size), size, is_causal)
    first = size - (1 + head % layout.num_different_global_patterns) * number
    starts = list(range(first, blocks - blocks % size, size))
    if blocks % size:  # the global blocks of a short last window must end inside the sequence
        starts.append(min(blocks - blocks % size + first, blocks - number))
    for start in starts:
        seen[start if is_causal else 0 :, start : start + number] = True
        if layout.horizontal_global_attention:
            seen[start : start + number] = True


def _variable(layout: VariableLayout, seen: np.ndarray, _: int, draw: random.Random) -> None:
    blocks = len(seen)
    is_causal = layout.attention == "unidirectional"
    for row in range(blocks):
        seen[row, draw.sample(range(blocks), layout.num_random_blocks)] = True
    start = 0
    for size in layout.local_window_blocks:
        _windows(seen, [start], size, is_causal)
        start += size
    _windows(seen, range(start, blocks, size), size, is_causal)
    for first, end in _global_ranges(layout, blocks):
        seen[first if is_causal else 0 :, first:end] = True
        if layout.horizontal_global_attention:
            seen[first:end] = True


def _bigbird(layout: BigBirdLayout, seen: np.ndarray, _: int, draw: random.Random) -> None:
    is_causal, number = layout.attention == "unidirectional", layout.num_global_blocks
    for row in range(len(seen)):
        choices = range(row + 1 if is_causal else len(seen))
        seen[row, draw.sample(choices, min(layout.num_random_blocks, len(choices)))] = True
    _slide(seen, layout.num_sliding_window_blocks)
    seen[:number] = True
    seen[:, :number] = True
    if is_causal:
        seen &= np.tri(len(seen), dtype=bool)


def _bslongformer(layout: BSLongformerLayout, seen: np.ndarray, _: int, __: random.Random) -> None:
    _slide(seen, layout.num_sliding_window_blocks)
    for first, end in _global_ranges(layout, len(seen)):
        seen[first:end] = True
        seen[:, first:end] = True
    if layout.attention == "unidirectional":
        seen &= np.tri(len(seen), dtype=bool)


def _sliding(layout: SlidingWindowLayout, seen: np.ndarray, _: int, __: random.Random) -> None:
    _slide(seen, layout.num_sliding_window_blocks)
    if layout.attention == "unidirectional":
        seen &= np.tri(len(seen), dtype=bool)


_MARKERS: dict[type[BlockLayout], Callable[..., None]] = {
    FixedLayout: _fixed,
    VariableLayout: _variable,
    BigBirdLayout: _bigbird,
    BSLongformerLayout: _bslongformer,
    SlidingWindowLayout: _sliding,
}


def _windows(seen: np.ndarray, starts: range | list[int], size: int, is_causal: bool) -> None:
    """Marks square windows of blocks as visible; causal windows only up to the diagonal."""
    for start in starts:
        window = seen[start : start + size, start : start + size]
        window |= np.tri(len(window), dtype=bool) if is_causal else True


def _slide(seen: np.ndarray, width: int) -> None:
    """Marks blocks as visible that are at most width // 2 blocks away from the diagonal."""
    at = np.arange(len(seen))
    seen |= np.abs(at[:, None] - at[None, :]) <= width // 2


def _global_ranges(
    layout: VariableLayout | BSLongformerLayout, blocks: int
) -> list[tuple[int, int]]:
    """Returns the ranges [first, end) of the global blocks, cut to the sequence."""
    starts = layout.global_block_indices
    ends = layout.global_block_end_indices or [start + 1 for start in starts]
    return [(a, min(b, blocks)) for a, b in zip(starts, ends, strict=True) if a < blocks]
