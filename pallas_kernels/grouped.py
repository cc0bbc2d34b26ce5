"""Multiplies rows by the matrix of their group, differentiably; groups are known only at run time.

Rows are in segments (ranges), one or more per group, in the order of groups; rows between segments
belong to no group. Only tiles of rows that overlap a segment are computed: by a kernel; or, on any
device and in any dtype, one after the other in an XLA loop.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import grouped_kernel
from pallas_kernels.choice import KernelUnavailable, missing
from pallas_kernels.grouped_kernel import STEP, Form, Visits

GroupedImpl = Literal["mosaic_gpu", "interpret", "loop"]
DTYPES = (jnp.bfloat16, jnp.float16)
COMPUTE_CAPABILITY = 9.0
"""Required compute capability (Hopper), because the kernels use warpgroup products."""
SMALL_TILE, LARGE_TILE = 64, 128
ROWS_FOR_LARGE = 2048
"""Minimum number of rows per segment for tiles of 128 rows; padding by half a tile is then 3 %."""


class Segments(NamedTuple):
    """Ranges of rows that belong to each group.

    Attributes:
      start: int32 [groups * segments per group], first row of each segment, ascending.
      count: int32 of the same shape, number of rows of each segment; segments do not overlap.
    """

    start: jax.Array
    count: jax.Array


def segments_of(sizes: jax.Array) -> Segments:
    """Builds segments of rows that are sorted by group, without gaps; later rows have no group.

    Args:
      sizes: int32 [groups], number of rows of each group.
    """
    sizes = sizes.astype(jnp.int32)
    return Segments(jnp.cumsum(sizes) - sizes, sizes)


def visits_of(segments: Segments, groups: int, rows: int, tile: int) -> Visits:
    """Lists the visits: for each tile of rows, each group in the tile, and the group's rows in it.

    The arrays have space for the largest possible number of visits.

    Args:
      segments: rows of each group.
      groups: number of groups.
      rows: total number of rows, a multiple of `tile`.
      tile: number of rows of a tile.
    """
    start, count = segments
    each = start.shape[0] // groups
    first_tile = start // tile
    tiles = jnp.where(count > 0, (start + count - 1) // tile - first_tile + 1, 0)
    ends = jnp.cumsum(tiles)
    visit = jnp.arange(most_visits(start.shape[0], rows, tile), dtype=jnp.int32)
    # No bisection, which is a loop of many small kernels on a GPU.
    of = jnp.searchsorted(ends, visit, side="right", method="compare_all").astype(jnp.int32)
    needed = of < start.shape[0]
    # Unused visits read the last segment here; `needed` replaces what they read.
    of = jnp.minimum(of, start.shape[0] - 1)
    # `ends - tiles` is the number of the segment's first visit.
    here = first_tile[of] + visit - (ends - tiles)[of]
    first = jnp.maximum(start[of] - here * tile, 0)
    last = jnp.minimum(start[of] + count[of] - here * tile, tile)
    # The visits of a group end with those of its last segment.
    begin = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[each - 1 :: each]])
    group, here, first, last = (
        jnp.where(needed, x, 0).astype(jnp.int32) for x in (of // each, here, first, last)
    )
    return Visits(group, here, first, last, begin)


def most_visits(segments: int, rows: int, tile: int) -> int:
    """Returns the maximum number of visits: one per tile, and one per segment that begins inside.

    >>> most_visits(8, 1024, 64)
    23
    """
    return rows // tile + segments - 1


def why_not(
    rows: jax.Array,
    matrices: jax.Array,
    *,
    capability: float | None = None,
    interpret: bool = False,
) -> str | None:
    """Returns why the kernels cannot multiply these arrays; None if they can.

    Args:
      rows, matrices: arrays or `jax.ShapeDtypeStruct`s, [M, in] and [groups, in, out].
      capability: compute capability of the GPU; None is not checked.
      interpret: whether the kernels run on the CPU, where they also support float32.
    """
    if (obstacle := missing()) is not None:
        return obstacle
    if capability is not None and capability != COMPUTE_CAPABILITY:
        return (
            f"the kernels need compute capability {COMPUTE_CAPABILITY} (Hopper), not {capability}"
        )
    if rows.dtype != matrices.dtype:
        return f"rows are {rows.dtype} and weights {matrices.dtype}; the kernels take one dtype"
    if rows.dtype not in (DTYPES + (jnp.float32,) * interpret):
        return f"the kernels take bfloat16 and float16, not {rows.dtype}"
    for size in matrices.shape[1:]:
        if size % STEP:
            return f"the kernels take widths that are multiples of {STEP}, not {size}"
    return None


def reference_product(rows: jax.Array, matrices: jax.Array, segments: Segments) -> jax.Array:
    """Computes `grouped_product` by multiplying all rows by all matrices; 0 for rows of no
    group."""
    total = jnp.zeros(
        (rows.shape[0], matrices.shape[2]), jnp.promote_types(rows.dtype, jnp.float32)
    )
    row = jnp.arange(rows.shape[0])
    each = segments.start.shape[0] // matrices.shape[0]
    for number, (start, count) in enumerate(zip(*segments, strict=True)):
        mine = ((row >= start) & (row < start + count))[:, None]
        found = jnp.matmul(
            jnp.where(mine, rows, 0),
            matrices[number // each],
            preferred_element_type=total.dtype,
            precision=lax.Precision.HIGHEST,
        )
        total = total + found
    return total.astype(rows.dtype)


def grouped_product(
    rows: jax.Array,
    matrices: jax.Array,
    segments: Segments,
    *,
    impl: GroupedImpl = "mosaic_gpu",
) -> jax.Array:
    """Multiplies each row by its group's matrix, with sums in float32.

    Has only first derivatives in reverse mode.

    Args:
      rows: [M, in], bfloat16 or float16; M is a multiple of 64.
      matrices: [groups, in, out] of the same dtype; `in` and `out` are multiples of 64.
      segments: rows of each group.
      impl: implementation. "mosaic_gpu": the kernels. "interpret": the kernels on the CPU, for
        tests, also in float32. "loop": one tile after the other by XLA, for any floating dtype and
        widths.

    Returns:
      [M, out] in the dtype of `rows`. Rows of no group are undefined, here and in the gradient of
      `rows`; no other value depends on them. Mask them by `jnp.where`. The loop sets them to NaN,
      so that a test fails if they are read.

    Raises:
      KernelUnavailable: the kernels do not support these arrays.
      ValueError: the number of rows is not a multiple of 64.
    """
    why = None if impl == "loop" else why_not(rows, matrices, interpret=impl == "interpret")
    if why is not None:
        raise KernelUnavailable(f"grouped products by Mosaic GPU: {why}; use impl='loop'")
    if rows.shape[0] % STEP:
        raise ValueError(
            f"grouped products need a multiple of {STEP} rows, not {rows.shape[0]}; add rows of "
            "zeros at the end"
        )
    return _product(impl, rows, matrices, segments)


# --- one call -------------------------------------------------------------------------------------


def row_tile(rows: int, segments: int) -> int:
    """Returns the number of rows in a tile of `row_products`; more for long segments."""
    large = rows >= ROWS_FOR_LARGE * segments and rows % LARGE_TILE == 0
    return LARGE_TILE if large else SMALL_TILE


def _columns(*widths: int) -> int:
    return SMALL_TILE if any(width % LARGE_TILE for width in widths) else LARGE_TILE


def _row_products(
    impl: GroupedImpl, rows: jax.Array, matrices: jax.Array, segments: Segments, transposed: bool
) -> jax.Array:
    width = matrices.shape[1 if transposed else 2]
    tile = row_tile(rows.shape[0], segments.start.shape[0])
    visits = visits_of(segments, matrices.shape[0], rows.shape[0], tile)
    if impl == "loop":
        return _rows_in_a_loop(tile, rows, matrices, visits, transposed)
    form = Form(tile, _columns(width), transposed, flops=2 * rows.size * width)
    interpret = impl == "interpret"
    return grouped_kernel.row_products(form, rows, matrices, visits, interpret=interpret)


def _matrix_products(
    impl: GroupedImpl, rows: jax.Array, slopes: jax.Array, segments: Segments, groups: int
) -> jax.Array:
    visits = visits_of(segments, groups, rows.shape[0], STEP)
    if impl == "loop":
        return _matrices_in_a_loop(rows, slopes, visits)
    columns, flops = _columns(rows.shape[1], slopes.shape[1]), 2 * rows.size * slopes.shape[1]
    form, interpret = Form(STEP, columns, flops=flops), impl == "interpret"
    return grouped_kernel.matrix_products(form, rows, slopes, visits, interpret=interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(
    impl: GroupedImpl, rows: jax.Array, matrices: jax.Array, segments: Segments
) -> jax.Array:
    return _row_products(impl, rows, matrices, segments, transposed=False)


def _forward(impl: GroupedImpl, rows: jax.Array, matrices: jax.Array, segments: Segments) -> Any:
    return _product(impl, rows, matrices, segments), (rows, matrices, segments)


def _backward(impl: GroupedImpl, kept: Any, slope: jax.Array) -> Any:
    rows, matrices, segments = kept
    slope = slope.astype(rows.dtype)
    of_rows = _row_products(impl, slope, matrices, segments, transposed=True)
    of_matrices = _matrix_products(impl, rows, slope, segments, matrices.shape[0])
    return of_rows, of_matrices.astype(matrices.dtype), None


_product.defvjp(_forward, _backward)


# --- one tile after the other ---------------------------------------------------------------------


def _rows_in_a_loop(
    tile: int, rows: jax.Array, matrices: jax.Array, visits: Visits, transposed: bool
) -> jax.Array:
    """Computes `grouped_kernel.row_products` by XLA, in a loop over visits."""

    def one(visit: jax.Array, out: jax.Array) -> jax.Array:
        top = visits.tile[visit] * tile
        matrix = matrices[visits.group[visit]]
        right = matrix.T if transposed else matrix
        found = jnp.matmul(_tile_at(rows, top, tile), right, preferred_element_type=_wide(rows))
        mine = _mine(visits, visit, tile)
        new = jnp.where(mine, found.astype(out.dtype), _tile_at(out, top, tile))
        return lax.dynamic_update_slice_in_dim(out, new, top, axis=0)

    width = matrices.shape[1 if transposed else 2]
    return lax.fori_loop(
        0, visits.begin[-1], one, jnp.full((rows.shape[0], width), jnp.nan, rows.dtype)
    )


def _matrices_in_a_loop(rows: jax.Array, slopes: jax.Array, visits: Visits) -> jax.Array:
    """Computes `grouped_kernel.matrix_products` by XLA, in a loop over visits."""

    def one(visit: jax.Array, total: jax.Array) -> jax.Array:
        top, mine = visits.tile[visit] * STEP, _mine(visits, visit, STEP)
        # Both sides are masked: rows of no group may be NaN, and 0 x NaN is NaN.
        left, right = (jnp.where(mine, _tile_at(x, top, STEP), 0) for x in (rows, slopes))
        found = jnp.matmul(left.T, right, preferred_element_type=total.dtype)
        return total.at[visits.group[visit]].add(found)

    groups = visits.begin.shape[0] - 1
    start = jnp.zeros((groups, rows.shape[1], slopes.shape[1]), _wide(rows))
    return lax.fori_loop(0, visits.begin[-1], one, start).astype(rows.dtype)


def _tile_at(array: jax.Array, top: jax.Array, tile: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(array, top, tile, axis=0)


def _mine(visits: Visits, visit: jax.Array, tile: int) -> jax.Array:
    """Computes bool [tile, 1]: True for the rows of a tile that one visit multiplies."""
    row = jnp.arange(tile)
    return ((row >= visits.first[visit]) & (row < visits.last[visit]))[:, None]


def _wide(array: jax.Array) -> Any:
    return jnp.promote_types(array.dtype, jnp.float32)
