"""Settings of block-sparse attention, which let each block of queries attend to chosen blocks of
keys.

The five layouts and their parameters are those of DeepSpeed's sparse attention.
`zerojax.operators.sparse_layouts` computes their tables of visible blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from zerojax.config.checks import check_at_least, names_keywords, refuse
from zerojax.config.display import quoted
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.loader import ConfigError, coerce_fields, from_dict, to_dict

Direction = Literal["bidirectional", "unidirectional"]


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """Base class of all block-sparse layouts.

    A layout is a table for each head: its rows are blocks of queries, its columns blocks of keys,
    and an entry says whether the query block attends to the key block. With
    `attention="unidirectional"` a query block does not attend to later key blocks, as far as
    DeepSpeed's layout of that name excludes them. Inside one block a token still sees later tokens
    unless the attention itself is causal.
    """

    mode: ClassVar[str]

    block: int = 16
    """Number of tokens in a block."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        check_at_least(self, 1, *_COUNTS & {field.name for field in dataclasses.fields(self)})
        self._check()

    def _check(self) -> None:
        """Raises ConfigError if the layout's parameters contradict each other."""

    @property
    def is_per_head(self) -> bool:
        """Whether the tables of different heads may differ."""
        return getattr(self, "different_layout_per_head", False)


_COUNTS = {"block", "num_local_blocks", "num_global_blocks", "num_different_global_patterns"}
_COUNTS |= {"num_sliding_window_blocks"}


@names_keywords()
@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedLayout(BlockLayout):
    """Block-sparse layout with windows of neighbouring blocks, and some blocks of each window that
    all blocks attend to (arXiv:1904.10509)."""

    mode: ClassVar[str] = "fixed"

    different_layout_per_head: bool = False
    """Whether heads have separate layouts; required for several global patterns."""
    num_local_blocks: int = 4
    """Number of blocks in a window. A block attends to the blocks of its own window."""
    num_global_blocks: int = 1
    """Number of blocks at the end of each window to which the blocks of all other windows attend,
    too."""
    attention: Direction = "bidirectional"
    """unidirectional: a block attends neither to later global blocks nor to later blocks of its
    window."""
    horizontal_global_attention: bool = False
    """Whether a global block also attends to all blocks. Only with bidirectional attention."""
    num_different_global_patterns: int = 1
    """Number n of positions of the global blocks in a window. Head h has pattern p = h modulo n, in
    which the global blocks end p x num_global_blocks blocks before the end of the window."""

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
                "needs a separate layout for each head; set different_layout_per_head to true, "
                "or use 1",
            )


@names_keywords()
@dataclasses.dataclass(frozen=True, kw_only=True)
class VariableLayout(BlockLayout):
    """Block-sparse layout with windows of chosen sizes, chosen global blocks to which all blocks
    attend, and random blocks."""

    mode: ClassVar[str] = "variable"

    different_layout_per_head: bool = False
    """Whether each head has its own random blocks."""
    num_random_blocks: int = 0
    """Number of random blocks to which each block also attends. They are drawn from all blocks of
    the sequence, including later blocks."""
    local_window_blocks: tuple[int, ...] = (4,)
    """Number of blocks in the first window, in the second window and so on. The last number holds
    for all further windows."""
    global_block_indices: tuple[int, ...] = (0,)
    """Indices of the blocks to which all blocks attend. Indices beyond the sequence are ignored."""
    global_block_end_indices: tuple[int, ...] | None = None
    """Exclusive end for each entry of global_block_indices: all blocks from the index to its end
    are global. null: only the blocks of the indices are global."""
    attention: Direction = "bidirectional"
    """unidirectional: a block attends neither to later global blocks nor to later blocks of its
    window."""
    horizontal_global_attention: bool = False
    """Whether a global block also attends to all blocks. Only with bidirectional attention."""
    seed: int = 0
    """Seed of the random blocks. DeepSpeed draws the same blocks after `random.seed(seed)`."""

    def _check(self) -> None:
        check_at_least(self, 0, "num_random_blocks")
        sizes = self.local_window_blocks
        if not sizes or min(sizes) < 1:
            refuse("local_window_blocks", list(sizes), "must be a list of numbers >= 1, as in [4]")
        _check_horizontal(self)
        _check_indices(self)


@names_keywords()
@dataclasses.dataclass(frozen=True, kw_only=True)
class BigBirdLayout(BlockLayout):
    """Block-sparse layout with a sliding window, global blocks at the start of the sequence, and
    random blocks (arXiv:2007.14062)."""

    mode: ClassVar[str] = "bigbird"

    different_layout_per_head: bool = False
    """Whether each head has its own random blocks."""
    num_random_blocks: int = 1
    """Number of random blocks to which each block also attends. With unidirectional attention they
    are drawn from the blocks up to the block itself; a block with fewer earlier blocks attends to
    all of them."""
    num_sliding_window_blocks: int = 3
    """Number of blocks in the window around each block, with the block itself. An even number has
    the effect of the next odd number."""
    num_global_blocks: int = 1
    """Number of blocks at the start of the sequence that attend to all blocks, and to which all
    blocks attend."""
    attention: Direction = "bidirectional"
    """unidirectional: a block does not attend to later blocks."""
    seed: int = 0
    """Seed of the random blocks. DeepSpeed draws the same blocks after `random.seed(seed)`."""

    def _check(self) -> None:
        check_at_least(self, 0, "num_random_blocks")


@names_keywords()
@dataclasses.dataclass(frozen=True, kw_only=True)
class BSLongformerLayout(BlockLayout):
    """Block-sparse layout with a sliding window, and global blocks that attend to all blocks and to
    which all blocks attend (arXiv:2004.05150, applied to blocks of tokens)."""

    mode: ClassVar[str] = "bslongformer"

    different_layout_per_head: bool = False
    """No effect: all heads have one layout. Accepted because DeepSpeed has it."""
    num_sliding_window_blocks: int = 3
    """Number of blocks in the window around each block, with the block itself. An even number has
    the effect of the next odd number."""
    global_block_indices: tuple[int, ...] = (0,)
    """Indices of the blocks that attend to all blocks, and to which all blocks attend. Indices
    beyond the sequence are ignored."""
    global_block_end_indices: tuple[int, ...] | None = None
    """Exclusive end for each entry of global_block_indices: all blocks from the index to its end
    are global. null: only the blocks of the indices are global."""
    attention: Direction = "bidirectional"
    """unidirectional: a block does not attend to later blocks."""

    def _check(self) -> None:
        _check_indices(self)


@names_keywords()
@dataclasses.dataclass(frozen=True, kw_only=True)
class SlidingWindowLayout(BlockLayout):
    """Block-sparse layout with a sliding window and no global blocks, as in DeepSpeed's local
    sliding window attention."""

    mode: ClassVar[str] = "sliding_window"

    num_sliding_window_blocks: int = 3
    """Number of blocks in the window around each block, with the block itself. An even number has
    the effect of the next odd number."""
    attention: Direction = "unidirectional"
    """unidirectional: only the half of the window up to the block itself."""


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
    """Builds a layout from its mode and parameters, such as {"mode": "fixed", "block": 16}; returns
    None for mode "dense".

    Raises:
      ConfigError: an unknown mode, an unknown parameter, or a value that the layout refuses.
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
    """Converts a layout to a dict of JSON values that `layout_of_mode` reads back; None stays
    None."""
    return None if layout is None else {"mode": layout.mode, **to_dict(layout)}


@names_keywords()
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutConfig:
    """Section of a run file for block-sparse attention; its `mode` selects the layout, as in
    DeepSpeed's sparse_attention section.

    A key that is null has the default of the selected layout. A key that the selected layout does
    not have is an error.
    """

    mode: Literal["dense", "fixed", "variable", "bigbird", "bslongformer", "sliding_window"] = (
        "dense"
    )
    """dense: every token may attend to all tokens. Every other mode selects a layout class of
    `zerojax.config`; bigbird selects BigBirdLayout, for example."""
    block: int | None = None
    """Number of tokens in a block."""
    different_layout_per_head: bool | None = None
    """Whether heads have separate layouts."""
    attention: Direction | None = None
    """unidirectional: a block does not attend to later blocks, as far as the layout excludes
    them."""
    num_local_blocks: int | None = None
    """Number of blocks in a window (fixed)."""
    num_global_blocks: int | None = None
    """Number of global blocks in each window (fixed), or at the start of the sequence (bigbird)."""
    horizontal_global_attention: bool | None = None
    """Whether a global block also attends to all blocks (fixed, variable)."""
    num_different_global_patterns: int | None = None
    """Number of different positions of the global blocks in a window; the head selects one
    (fixed)."""
    num_random_blocks: int | None = None
    """Number of random blocks to which each block attends (variable, bigbird)."""
    local_window_blocks: tuple[int, ...] | None = None
    """Number of blocks in each window, in order (variable)."""
    global_block_indices: tuple[int, ...] | None = None
    """Indices of global blocks, or first indices of ranges of global blocks (variable,
    bslongformer)."""
    global_block_end_indices: tuple[int, ...] | None = None
    """Exclusive ends of the ranges of global blocks (variable, bslongformer)."""
    num_sliding_window_blocks: int | None = None
    """Number of blocks in the window around each block (bigbird, bslongformer, sliding_window)."""
    seed: int | None = None
    """Seed of the random blocks (variable, bigbird)."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        given = self._given()
        if self.mode == "dense" and len(given) > 1:
            name = next(name for name in given if name != "mode")
            refuse(name, given[name], "has no effect without a layout; set mode, such as fixed")
        layout_of_mode(given)

    def _given(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def layout(self) -> BlockLayout | None:
        """Layout that these settings describe; None for mode dense, in which every token may attend
        to all."""
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
