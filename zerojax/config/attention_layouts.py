"""Block layouts of attention: which blocks of keys each block of queries sees, as settings.

The five layouts and their parameters are those of DeepSpeed's sparse attention. Their tables are
made by `zerojax.models.sparse_layouts`.
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
    """What all layouts have. Rows and columns of a table are blocks of queries and of keys.

    `attention="unidirectional"` leaves out blocks after the diagonal one, as far as DeepSpeed's
    layout of that name does; inside a block tokens see later ones unless attention is `causal`.
    """

    mode: ClassVar[str]

    block: int = 16
    """Tokens of a block."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        check_at_least(self, 1, *_COUNTS & {field.name for field in dataclasses.fields(self)})
        self._check()

    def _check(self) -> None:
        """Raises ConfigError where fields do not fit together."""

    @property
    def is_per_head(self) -> bool:
        """Whether heads may have different tables."""
        return getattr(self, "different_layout_per_head", False)


_COUNTS = {"block", "num_local_blocks", "num_global_blocks", "num_different_global_patterns"}
_COUNTS |= {"num_sliding_window_blocks"}


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class FixedLayout(BlockLayout):
    """Windows of neighbouring blocks, some blocks of which everybody sees (arXiv:1904.10509)."""

    mode: ClassVar[str] = "fixed"

    different_layout_per_head: bool = False
    """Whether heads have layouts of their own; needed for several global patterns."""
    num_local_blocks: int = 4
    """Blocks of a window; a block sees those of its own window."""
    num_global_blocks: int = 1
    """Blocks at the end of each window that the blocks of other windows see."""
    attention: Direction = "bidirectional"
    """unidirectional: global blocks are seen from their own block on, and windows up to it."""
    horizontal_global_attention: bool = False
    """Whether global blocks also see all blocks; bidirectional alone."""
    num_different_global_patterns: int = 1
    """Head h takes pattern h modulo this; pattern p has its global blocks p places earlier."""

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
    """Windows of chosen sizes, chosen global blocks, and random ones."""

    mode: ClassVar[str] = "variable"

    different_layout_per_head: bool = False
    """Whether each head draws random blocks of its own."""
    num_random_blocks: int = 0
    """Blocks that each block sees besides, drawn from all blocks, later ones included."""
    local_window_blocks: tuple[int, ...] = (4,)
    """Blocks of the first window, the second and so on; the last number is that of all further."""
    global_block_indices: tuple[int, ...] = (0,)
    """Blocks that all blocks see; beyond the sequence they are left out."""
    global_block_end_indices: tuple[int, ...] | None = None
    """One end for each index, exclusive: global blocks are those from the index to it."""
    attention: Direction = "bidirectional"
    """unidirectional: global blocks are seen from their own block on, and windows up to it."""
    horizontal_global_attention: bool = False
    """Whether global blocks also see all blocks; bidirectional alone."""
    seed: int = 0
    """Of the random blocks: they are DeepSpeed's after `random.seed(seed)`."""

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
    """A sliding window, the first blocks for all, and random blocks (arXiv:2007.14062)."""

    mode: ClassVar[str] = "bigbird"

    different_layout_per_head: bool = False
    """Whether each head draws random blocks of its own."""
    num_random_blocks: int = 1
    """Blocks that each block sees besides; unidirectional: drawn from those up to its own, all of
    them where there are fewer."""
    num_sliding_window_blocks: int = 3
    """Width of the window around each block, its own included; an even width counts as one more."""
    num_global_blocks: int = 1
    """First blocks of the sequence: all see them, and they see all."""
    attention: Direction = "bidirectional"
    """unidirectional: no block after the diagonal one."""
    seed: int = 0
    """Of the random blocks: they are DeepSpeed's after `random.seed(seed)`."""

    def _check(self) -> None:
        check_at_least(self, 0, "num_random_blocks")


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class BSLongformerLayout(BlockLayout):
    """A sliding window and global blocks, both ways (arXiv:2004.05150, in blocks)."""

    mode: ClassVar[str] = "bslongformer"

    different_layout_per_head: bool = False
    """Without effect: all heads have one layout. Read because DeepSpeed has it."""
    num_sliding_window_blocks: int = 3
    """Width of the window around each block, its own included; an even width counts as one more."""
    global_block_indices: tuple[int, ...] = (0,)
    """Blocks that all blocks see and that see all; beyond the sequence they are left out."""
    global_block_end_indices: tuple[int, ...] | None = None
    """One end for each index, exclusive: global blocks are those from the index to it."""
    attention: Direction = "bidirectional"
    """unidirectional: no block after the diagonal one."""

    def _check(self) -> None:
        _check_indices(self)


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class SlidingWindowLayout(BlockLayout):
    """A sliding window alone; DeepSpeed calls it local sliding window."""

    mode: ClassVar[str] = "sliding_window"

    num_sliding_window_blocks: int = 3
    """Width of the window around each block, its own included; an even width counts as one more."""
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
    """The layout of {"mode": ..., its parameters}; None for "dense".

    Raises:
      ConfigError: an unknown mode or parameter, or values that the layout does not take.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"expected a mode and its parameters, got {quoted(values)}")
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
    """A layout as JSON, which `layout_of_mode` reads; None for none."""
    return None if layout is None else {"mode": layout.mode, **to_dict(layout)}


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class LayoutConfig:
    """A block-sparse layout of attention by its mode, as DeepSpeed's sparse_attention is written.

    A key that is null has the default of its mode's layout; one that the mode does not have is
    refused.
    """

    mode: Literal["dense", "fixed", "variable", "bigbird", "bslongformer", "sliding_window"] = (
        "dense"
    )
    """dense: every token may see all. The others are the layouts of `zerojax.config`, such as
    BigBirdLayout."""
    block: int | None = None
    """Tokens of a block."""
    different_layout_per_head: bool | None = None
    """Whether heads have layouts of their own."""
    attention: Direction | None = None
    """unidirectional: no blocks after the diagonal one, as far as the layout says so."""
    num_local_blocks: int | None = None
    """Blocks of a window (fixed)."""
    num_global_blocks: int | None = None
    """Blocks that all see: of each window (fixed), the first of the sequence (bigbird)."""
    horizontal_global_attention: bool | None = None
    """Whether global blocks see all, too (fixed, variable)."""
    num_different_global_patterns: int | None = None
    """Places of the global blocks in a window, by head (fixed)."""
    num_random_blocks: int | None = None
    """Random blocks that each block sees (variable, bigbird)."""
    local_window_blocks: tuple[int, ...] | None = None
    """Blocks of the windows one after the other (variable)."""
    global_block_indices: tuple[int, ...] | None = None
    """Blocks that all see, or where ranges of them begin (variable, bslongformer)."""
    global_block_end_indices: tuple[int, ...] | None = None
    """Where these ranges end, exclusive (variable, bslongformer)."""
    num_sliding_window_blocks: int | None = None
    """Width of the window around each block (bigbird, bslongformer, sliding_window)."""
    seed: int | None = None
    """Of random blocks (variable, bigbird)."""

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
        """The layout; None where every token may see all."""
        return layout_of_mode(self._given())


def _check_horizontal(layout: Any) -> None:
    if layout.horizontal_global_attention and layout.attention != "bidirectional":
        refuse(
            "horizontal_global_attention",
            True,
            "shows global blocks later ones; use attention bidirectional, or set it to false",
        )


def _check_indices(layout: Any) -> None:
    starts, ends = layout.global_block_indices, layout.global_block_end_indices
    if any(start < 0 for start in starts):
        refuse("global_block_indices", list(starts), "must be at least 0 each")
    if ends is None:
        return
    if len(starts) != len(ends):
        refuse(
            "global_block_end_indices",
            list(ends),
            f"has {len(ends)} entries, and global_block_indices {len(starts)}; give one end each",
        )
    for start, end in zip(starts, ends, strict=True):
        if start >= end:
            refuse(
                "global_block_end_indices",
                list(ends),
                f"ends a range at {end} that begins at {start}; ends are exclusive: use at least "
                f"{start + 1}",
            )
