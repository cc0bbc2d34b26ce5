"""Settings of block-sparse attention: which blocks of keys each block of queries attends to.

The five layouts and their parameters are those of DeepSpeed's sparse attention.
`zerojax.operators.sparse_layouts` builds their tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from zerojax.config.checks import check_at_least, names_keywords, refuse
from zerojax.config.display import quoted
from zerojax.config.loader import ConfigError, coerce_fields, from_dict, to_dict

Direction = Literal["bidirectional", "unidirectional"]


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """Base of all layouts. Rows and columns of a table are blocks of queries and of keys.

    `attention="unidirectional"` excludes blocks after the diagonal one, to the extent that
    DeepSpeed's layout of that name does; inside a block tokens see later ones unless attention is
    `causal`.
    """

    mode: ClassVar[str]

    block: int = 16
    """Tokens of a block."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        check_at_least(self, 1, *_COUNTS & {field.name for field in dataclasses.fields(self)})
        self._check()

    def _check(self) -> None:
        """Raises ConfigError if the layout's fields do not fit together."""

    @property
    def is_per_head(self) -> bool:
        """Whether heads may have different tables."""
        return getattr(self, "different_layout_per_head", False)


_COUNTS = {"block", "num_local_blocks", "num_global_blocks", "num_different_global_patterns"}
_COUNTS |= {"num_sliding_window_blocks"}


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class FixedLayout(BlockLayout):
    """Windows of neighbouring blocks, with some blocks visible to all (arXiv:1904.10509)."""

    mode: ClassVar[str] = "fixed"

    different_layout_per_head: bool = False
    """Whether heads have separate layouts; required for several global patterns."""
    num_local_blocks: int = 4
    """Blocks of a window; a block attends to those of its own window."""
    num_global_blocks: int = 1
    """Blocks at the end of each window that the blocks of other windows attend to."""
    attention: Direction = "bidirectional"
    """unidirectional: no block attends to later global blocks or to later blocks of its window."""
    horizontal_global_attention: bool = False
    """Whether global blocks also attend to all blocks; only with bidirectional."""
    num_different_global_patterns: int = 1
    """Head h uses pattern h modulo this; pattern p has its global blocks p positions earlier."""

    def _check(self) -> None:
        if self.num_local_blocks % self.num_global_blocks:
            refuse(
                "num_global_blocks",
                self.num_global_blocks,
                f"does not divide num_local_blocks ({self.num_local_blocks}); use 1",
            )
        _check_horizontal(self)
        most = self.num_local_blocks // self.num_global_blocks
        patterns = self.num_different_global_patterns
        if patterns > most:
            refuse(
                "num_different_global_patterns",
                patterns,
                f"is more than num_local_blocks / num_global_blocks = {most}; use {most} or fewer",
            )
        if patterns > 1 and not self.different_layout_per_head:
            refuse(
                "num_different_global_patterns",
                patterns,
                "needs heads of different layouts; set different_layout_per_head to true, or use 1",
            )


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class VariableLayout(BlockLayout):
    """Windows of chosen sizes, chosen global blocks, and random blocks."""

    mode: ClassVar[str] = "variable"

    different_layout_per_head: bool = False
    """Whether each head has its own random blocks."""
    num_random_blocks: int = 0
    """Random blocks that each block also attends to, drawn from all blocks, including later
    ones."""
    local_window_blocks: tuple[int, ...] = (4,)
    """Blocks of the first window, the second and so on; the last number applies to all further
    ones."""
    global_block_indices: tuple[int, ...] = (0,)
    """Blocks that all blocks attend to; indices beyond the sequence are ignored."""
    global_block_end_indices: tuple[int, ...] | None = None
    """One end for each index, exclusive: the blocks from the index to its end are global."""
    attention: Direction = "bidirectional"
    """unidirectional: no block attends to later global blocks or to later blocks of its window."""
    horizontal_global_attention: bool = False
    """Whether global blocks also attend to all blocks; only with bidirectional."""
    seed: int = 0
    """Seed of the random blocks, which equal DeepSpeed's after `random.seed(seed)`."""

    def _check(self) -> None:
        check_at_least(self, 0, "num_random_blocks")
        sizes = self.local_window_blocks
        if not sizes or min(sizes) < 1:
            refuse("local_window_blocks", list(sizes), "must be numbers of at least 1, as in [4]")
        _check_horizontal(self)
        _check_indices(self)


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class BigBirdLayout(BlockLayout):
    """A sliding window, global first blocks, and random blocks (arXiv:2007.14062)."""

    mode: ClassVar[str] = "bigbird"

    different_layout_per_head: bool = False
    """Whether each head has its own random blocks."""
    num_random_blocks: int = 1
    """Random blocks that each block also attends to; unidirectional: drawn from the blocks up to
    its own, all of them if there are fewer."""
    num_sliding_window_blocks: int = 3
    """Width of the window around each block, including the block; an even width counts as one
    more."""
    num_global_blocks: int = 1
    """Number of first blocks of the sequence that all blocks attend to, and that attend to all."""
    attention: Direction = "bidirectional"
    """unidirectional: no block after the diagonal one."""
    seed: int = 0
    """Seed of the random blocks, which equal DeepSpeed's after `random.seed(seed)`."""

    def _check(self) -> None:
        check_at_least(self, 0, "num_random_blocks")


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class BSLongformerLayout(BlockLayout):
    """A sliding window and global blocks in both directions (arXiv:2004.05150, in blocks)."""

    mode: ClassVar[str] = "bslongformer"

    different_layout_per_head: bool = False
    """No effect: all heads have one layout. Accepted because DeepSpeed has it."""
    num_sliding_window_blocks: int = 3
    """Width of the window around each block, including the block; an even width counts as one
    more."""
    global_block_indices: tuple[int, ...] = (0,)
    """Blocks that all blocks attend to and that attend to all; indices beyond the sequence are
    ignored."""
    global_block_end_indices: tuple[int, ...] | None = None
    """One end for each index, exclusive: the blocks from the index to its end are global."""
    attention: Direction = "bidirectional"
    """unidirectional: no block after the diagonal one."""

    def _check(self) -> None:
        _check_indices(self)


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class SlidingWindowLayout(BlockLayout):
    """Only a sliding window; DeepSpeed's local sliding window."""

    mode: ClassVar[str] = "sliding_window"

    num_sliding_window_blocks: int = 3
    """Width of the window around each block, including the block; an even width counts as one
    more."""
    attention: Direction = "unidirectional"
    """unidirectional: the half of the window up to the block itself."""


LAYOUTS: dict[str, type[BlockLayout]] = {
    layout.mode: layout
    for layout in (
        FixedLayout,
        VariableLayout,
        BigBirdLayout,
        BSLongformerLayout,
        SlidingWindowLayout,
    )
}


def layout_of_mode(values: Mapping[str, Any]) -> BlockLayout | None:
    """Builds the layout of {"mode": ..., its parameters}, or returns None for "dense".

    Raises:
      ConfigError: an unknown mode or parameter, or values that are not valid for the layout.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"expected a mode and its parameters, such as {{mode: fixed, block: 16}}, got "
            f"{quoted(values)}"
        )
    mode = values.get("mode", "fixed")
    if mode == "dense":
        return None
    if not isinstance(mode, str) or mode not in LAYOUTS:
        refuse("mode", mode, f"is not one of dense, {', '.join(LAYOUTS)}")
    given = {name: value for name, value in values.items() if name != "mode"}
    known = [field.name for field in dataclasses.fields(LAYOUTS[mode])]
    for name in given:
        if name not in known:
            raise ConfigError(
                f"the layout {mode} has no such key; it has {', '.join(known)}", (name,)
            )
    return from_dict(LAYOUTS[mode], given)


def values_of_layout(layout: BlockLayout | None) -> dict[str, Any] | None:
    """Returns a layout as JSON values, which `layout_of_mode` reads; None for no layout."""
    return None if layout is None else {"mode": layout.mode, **to_dict(layout)}


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class LayoutConfig:
    """Block-sparse layout of attention selected by its mode, as in DeepSpeed's sparse_attention.

    A null key has the default of its mode's layout; a key that the mode does not have is an error.
    """

    mode: Literal["dense", "fixed", "variable", "bigbird", "bslongformer", "sliding_window"] = (
        "dense"
    )
    """dense: every token may attend to all. The others are the layouts of `zerojax.config`, such as
    BigBirdLayout."""
    block: int | None = None
    """Tokens of a block."""
    different_layout_per_head: bool | None = None
    """Whether heads have separate layouts."""
    attention: Direction | None = None
    """unidirectional: no blocks after the diagonal one, to the extent defined by the layout."""
    num_local_blocks: int | None = None
    """Blocks of a window (fixed)."""
    num_global_blocks: int | None = None
    """Global blocks: of each window (fixed), or the first of the sequence (bigbird)."""
    horizontal_global_attention: bool | None = None
    """Whether global blocks also attend to all blocks (fixed, variable)."""
    num_different_global_patterns: int | None = None
    """Number of different positions of the global blocks in a window, by head (fixed)."""
    num_random_blocks: int | None = None
    """Random blocks that each block attends to (variable, bigbird)."""
    local_window_blocks: tuple[int, ...] | None = None
    """Blocks of each window in order (variable)."""
    global_block_indices: tuple[int, ...] | None = None
    """Global blocks, or first blocks of global ranges (variable, bslongformer)."""
    global_block_end_indices: tuple[int, ...] | None = None
    """Ends of these ranges, exclusive (variable, bslongformer)."""
    num_sliding_window_blocks: int | None = None
    """Width of the window around each block (bigbird, bslongformer, sliding_window)."""
    seed: int | None = None
    """Seed of random blocks (variable, bigbird)."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        given = self._given()
        if self.mode == "dense" and len(given) > 1:
            name = next(name for name in given if name != "mode")
            refuse(name, given[name], "belongs to a layout; set mode, such as mode: fixed")
        layout_of_mode(given)

    def _given(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def layout(self) -> BlockLayout | None:
        """The layout; None if every token may attend to all."""
        return layout_of_mode(self._given())


def _check_horizontal(layout: Any) -> None:
    if layout.horizontal_global_attention and layout.attention != "bidirectional":
        refuse(
            "horizontal_global_attention",
            True,
            "lets global blocks attend to later ones; use attention bidirectional, or set it "
            "to false",
        )


def _check_indices(layout: Any) -> None:
    starts, ends = layout.global_block_indices, layout.global_block_end_indices
    if any(start < 0 for start in starts):
        refuse("global_block_indices", list(starts), "must all be at least 0")
    if ends is None:
        return
    if len(starts) != len(ends):
        refuse(
            "global_block_end_indices",
            list(ends),
            f"has {len(ends)} entries, but global_block_indices has {len(starts)}; give one "
            "end for each index",
        )
    for start, end in zip(starts, ends, strict=True):
        if start >= end:
            refuse(
                "global_block_end_indices",
                list(ends),
                f"ends a range at {end} that begins at {start}; ends are exclusive: use at least "
                f"{start + 1}",
            )
