"""Lists the leaves that one kernel updates, and finds a program's leaf by a branch.

It assigns programs to leaves, independently of what they compute.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic

MAX_PARAMETERS = 480
"""Maximum number of arrays of one kernel. Their addresses are its parameters, and any driver
accepts 4096 bytes of parameters. GPT-2's 148 leaves of 5 arrays are then two kernels."""
BRANCHES = 16
"""Maximum number of ways of one branch. More ways cost comparisons, deeper branches compile time:
JAX (0.12) lowers the first way of each branch twice."""


@dataclasses.dataclass(frozen=True)
class ScalarsAt:
    """Position of a leaf's scalars in a kernel's array [rows of scalars, fields].

    Attributes:
      first: index of the leaf's row, or of its first row.
      by_row: whether each row of the leaf has its own row of scalars, in order.
    """

    first: int
    by_row: bool = False


@dataclasses.dataclass(frozen=True)
class Entry:
    """Leaf that a kernel updates together with others, as listed in its table.

    Attributes:
      leaf: index of the leaf in the call.
      tiles: division of the leaf, without a tail.
      scalars: position of the leaf's scalars.
      start: index of the leaf's first program.
    """

    leaf: int
    tiles: mosaic.Tiles
    scalars: ScalarsAt
    start: int = 0

    @property
    def programs(self) -> int:
        return self.tiles.rows // self.tiles.loop

    @property
    def parts(self) -> list[tuple[int, int]]:
        """(first program, number of programs) of each part with its own sums: the leaf, or its
        rows."""
        each = self.tiles.row_programs or self.programs
        return [(self.start + k, each) for k in range(0, self.programs, each)]


Table = tuple[Entry, ...]


def tables_of(entries: Sequence[Entry], *, arrays: int) -> list[Table]:
    """Divides entries into few tables, one per kernel, ordered by block size and set of scalars.

    Args:
      entries: leaves in any order.
      arrays: number of arrays that belong to one leaf.
    """
    ordered = sorted(entries, key=lambda e: (e.tiles.block, e.scalars.first))
    per_kernel = max(1, MAX_PARAMETERS // arrays)
    cuts = [ordered[k : k + per_kernel] for k in range(0, len(ordered), per_kernel)]
    return [_numbered(cut) for cut in cuts]


def _numbered(entries: Sequence[Entry]) -> Table:
    starts = itertools.accumulate((entry.programs for entry in entries), initial=0)
    pairs = zip(entries, starts, strict=False)
    return tuple(dataclasses.replace(entry, start=start) for entry, start in pairs)


def pack_scalars(
    of_leaves: Sequence[Any], rows: Sequence[int]
) -> tuple[jax.Array, tuple[ScalarsAt, ...]]:
    """Packs scalars of leaves: (float32 [rows of scalars, fields], each leaf's position in it).

    Args:
      of_leaves: for each leaf a NamedTuple of its scalars. A field is a number, or [rows] with a
        number for each row of the leaf. Leaves with the same object share a row of scalars.
      rows: number of rows of each leaf.
    """
    found: dict[int, ScalarsAt] = {}
    sets, sizes = [], []
    for one, count in zip(of_leaves, rows, strict=True):
        if id(one) not in found:
            by_row = any(jnp.ndim(x) for x in one)
            found[id(one)] = ScalarsAt(sum(sizes), by_row)
            sets.append(one)
            sizes.append(count if by_row else 1)
    columns = [_column(values, sizes) for values in zip(*sets, strict=True)]
    return jnp.stack(columns, axis=1), tuple(found[id(one)] for one in of_leaves)


def _column(values: Sequence[Any], sizes: Sequence[int]) -> jax.Array:
    """Builds one field's column for all scalars; a single broadcast if all values are the same."""
    if jnp.ndim(values[0]) == 0 and all(x is values[0] for x in values):
        return jnp.full((sum(sizes),), values[0], jnp.float32)
    arrays = [jnp.asarray(x, jnp.float32) for x in values]
    return jnp.concatenate(
        [jnp.broadcast_to(x, (size,)) for x, size in zip(arrays, sizes, strict=True)]
    )


def row_of_scalars(table: Table, program: Any) -> Any:
    """Returns the row of scalars of a program's leaf, an int32 index; called inside a kernel.

    It uses a separate branch before the computing branch, so that the same code reads the scalars
    of all leaves.
    """
    cuts = [
        number
        for number, entry in enumerate(table)
        if number == 0 or entry.scalars.by_row or entry.scalars != table[number - 1].scalars
    ]

    def row(first: int, _: int) -> Any:
        entry = table[first]
        if not entry.scalars.by_row:
            return jnp.int32(entry.scalars.first)
        inside = lax.div(program - entry.start, jnp.int32(entry.tiles.row_programs))
        return jnp.int32(entry.scalars.first) + inside

    return branch(table, program, [*cuts, len(table)], row)


def find_leaf(table: Table, program: Any, run: Callable[[int, Any], Any], share: Any) -> Any:
    """Calls `run` for the leaf that a program updates; called inside a kernel.

    Args:
      table: leaves of the kernel.
      program: index of the program.
      run: function (index of the leaf in the table, shared values) that returns the result.
      share: function (block size) that returns values shared by leaves of this block size; called
        once for each size.
    """
    count = len(table)
    kinds = [k for k in range(count) if table[k].tiles.block != table[k - 1].tiles.block or k == 0]

    def kind(first: int, last: int) -> Any:
        shared = share(table[first].tiles.block)
        cuts = list(range(first, last + 1))
        return branch(table, program, cuts, lambda number, _: run(number, shared))

    return branch(table, program, [*kinds, count], kind)


def branch(table: Table, program: Any, cuts: Sequence[int], run: Callable[[int, int], Any]) -> Any:
    """Calls `run(first, last)` for the range between `cuts` that contains the program's index.

    It uses nested branches of at most `BRANCHES` ways.
    """
    ranges = len(cuts) - 1
    if ranges == 1:
        return run(cuts[0], cuts[1])
    ways = min(BRANCHES, ranges)
    ends = [ranges * way // ways for way in range(ways + 1)]
    later = [program >= table[cuts[end]].start for end in ends[1:-1]]
    number = functools.reduce(lambda a, b: a + b, [x.astype(jnp.int32) for x in later])

    def way(first: int, last: int) -> Callable[[], Any]:
        return lambda: branch(table, program, cuts[first : last + 1], run)

    return lax.switch(number, [way(a, b) for a, b in itertools.pairwise(ends)])


def kernel_of(
    body: Any, programs: int, *, name: str, out_type: Any, has_barriers: bool, interpret: bool
) -> Any:
    """Builds the kernel of this many programs; arguments as in `mosaic.run_on_tiles`."""
    from jax.experimental import pallas as pl  # here for the reason in `mosaic.run_on_tiles`
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return pl.kernel(
        body,
        out_type=out_type,
        mesh=mosaic.mesh_of(programs),
        # All layouts are explicit, because inferring them for many leaves takes minutes (jax 0.12).
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=not has_barriers,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=mosaic.interpret_params() if interpret else False,
        name=name,
    )
