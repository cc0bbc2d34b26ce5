"""Multiplies rows by the matrix of their group, by two Mosaic GPU kernels for Hopper.

A table of visits states, as data, which tile of rows is multiplied by which matrix. A tile that
several groups share is visited once by each; a visit stores, or sums, only its own rows. The
kernels use no atomics: each number is written once, so two runs give the same bits. Tiles are
loaded by asynchronous copies into a ring of buffers, so that the next tiles are loaded while one is
multiplied. The kernels have not been timed on a GPU.

Needs jax >= 0.11.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.elementwise import KernelRef

STEP = 64
"""Number of elements summed over in one step: columns of `rows` for a product, or rows for the
gradient of a matrix."""
BUFFERS = 3
"""Number of steps whose tiles are in shared memory: one is multiplied, two are being loaded."""


class Visits(NamedTuple):
    """Visits of a kernel: pairs (tile, group in it); visits of a group are consecutive.

    Attributes:
      group, tile: int32 [visits], indices; 0 for unused visits.
      first, last: int32 [visits], range [first, last) of rows in the tile; equal for unused visits.
      begin: int32 [groups + 1], index of each group's first visit, then the number of all visits.
    """

    group: jax.Array
    tile: jax.Array
    first: jax.Array
    last: jax.Array
    begin: jax.Array


@dataclasses.dataclass(frozen=True)
class Form:
    """Static description of a call of a grouped product: sizes of its tiles.

    Attributes:
      rows: number of rows of a tile, a multiple of 64.
      columns: number of columns of a tile of the result, a multiple of 64.
      transposed: whether rows are multiplied by the transposed matrices.
      flops: FLOPs of the call if every row belongs to a group, for cost estimates.
    """

    rows: int
    columns: int
    transposed: bool = False
    flops: int = 0


def row_products(
    form: Form, rows: jax.Array, matrices: jax.Array, visits: Visits, *, interpret: bool
) -> jax.Array:
    """Multiplies each row by its group's matrix: [M, out] in the dtype of `rows`, float32 sums.

    Rows of no group are not written and remain undefined.

    Args:
      form: sizes of the tiles.
      rows: [M, in]; M is a multiple of `form.rows`.
      matrices: [groups, in, out], or [groups, out, in] with `form.transposed`; `in` is a multiple
        of 64, `out` of `form.columns`.
      visits: visits of tiles of `form.rows` rows.
      interpret: whether to run the kernel on the CPU.
    """
    depth = rows.shape[1]
    width = matrices.shape[1 if form.transposed else 2]
    of_matrix = (form.columns, STEP) if form.transposed else (STEP, form.columns)
    dtype = rows.dtype
    (out,) = _run(
        functools.partial(_row_body, form, depth // STEP),
        (visits.group, visits.tile, visits.first, visits.last, rows, matrices),
        out=jax.ShapeDtypeStruct((rows.shape[0], width), dtype),
        scratch=[*_ring(dtype, (form.rows, STEP), of_matrix), _plain(dtype, form.rows)],
        grid=(visits.group.shape[0], width // form.columns),
        names=("visit", "column"),
        name="grouped_product",
        flops=form.flops,
        interpret=interpret,
    )
    return out


def matrix_products(
    form: Form, rows: jax.Array, slopes: jax.Array, visits: Visits, *, interpret: bool
) -> jax.Array:
    """Sums the outer products row x slope over each group's rows: [groups, in, out].

    Sums are float32; the result has the dtype of `rows`.

    Args:
      form: sizes of the tiles.
      rows: [M, in]; M is a multiple of 64, `in` of `form.columns`.
      slopes: [M, out] of the same dtype, gradients with respect to the products; `out` is a
        multiple of `form.columns`.
      visits: visits of tiles of 64 rows.
      interpret: whether to run the kernel on the CPU.
    """
    dtype, groups = rows.dtype, visits.begin.shape[0] - 1
    width, result = rows.shape[1], slopes.shape[1]
    tile = (STEP, form.columns)
    (out,) = _run(
        functools.partial(_matrix_body, form),
        (visits.begin, visits.tile, visits.first, visits.last, rows, slopes),
        out=jax.ShapeDtypeStruct((groups, width, result), dtype),
        scratch=[*_ring(dtype, tile, tile), _plain(dtype, form.columns)],
        grid=(groups, width // form.columns, result // form.columns),
        names=("group", "row", "column"),
        name="grouped_outer_product",
        flops=form.flops,
        interpret=interpret,
    )
    return out


def _run(
    body: Callable[..., None],
    given: Sequence[jax.Array],
    *,
    out: jax.ShapeDtypeStruct,
    scratch: Sequence[Any],
    grid: tuple[int, ...],
    names: tuple[str, ...],
    name: str,
    flops: int,
    interpret: bool,
) -> Any:
    from jax.experimental import pallas as pl

    plgpu = _plgpu()

    # `pl.kernel` itself takes no scratch with transforms.
    def with_scratch(*refs: KernelRef) -> None:
        pl.run_scoped(functools.partial(body, *refs), *scratch)

    kernel = pl.kernel(
        with_scratch,
        out_type=[out],
        mesh=plgpu.Mesh(grid=grid, grid_names=names),
        cost_estimate=pl.CostEstimate(
            flops=flops,
            transcendentals=0,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*given, out)),
        ),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else False,
        name=name,
    )
    return kernel(*given)


# --- bodies ---------------------------------------------------------------------------------------


def _row_body(form: Form, steps: int, *refs: KernelRef) -> None:
    """Body of a kernel: computes one visit's rows in one tile of the result's columns."""
    from jax.experimental import pallas as pl

    group, tile, first, last, rows, matrices, out, lefts, rights, barrier, result = refs
    visit, column = lax.axis_index("visit"), lax.axis_index("column")
    begin, end, matrix = first[visit], last[visit], group[visit]
    top = tile[visit] * form.rows

    def bring(step: jax.Array | int, slot: jax.Array | int) -> None:
        depth, across = _at(step, STEP), _at(column, form.columns)
        there = matrices.at[matrix, across, depth] if form.transposed else None
        there = matrices.at[matrix, depth, across] if there is None else there
        _copy([(rows.at[pl.ds(top, form.rows), depth], lefts), (there, rights)], slot, barrier)

    def multiply(sums: KernelRef, slot: jax.Array | int, step: jax.Array | int) -> None:
        del step
        right = rights.at[slot]
        _plgpu().wgmma(sums, lefts.at[slot], right.T if form.transposed else right)

    @pl.when(begin < end)
    def _() -> None:
        total = _summed((form.rows, form.columns), steps, barrier, bring, multiply)
        for part in _parts(total, result):
            target = out.at[:, pl.ds(column * form.columns + part, STEP)]
            _store_rows(result, target, top, begin, end)


def _matrix_body(form: Form, *refs: KernelRef) -> None:
    """Body of a kernel: computes one tile of a group's matrix, the sum over the group's visits."""
    from jax.experimental import pallas as pl

    begin, tile, first, last, rows, slopes, out, lefts, rights, barrier, result = refs
    group = lax.axis_index("group")
    row, column = lax.axis_index("row"), lax.axis_index("column")
    start = begin[group]

    def bring(step: jax.Array | int, slot: jax.Array | int) -> None:
        here = pl.ds(tile[start + step] * STEP, STEP)
        left = rows.at[here, _at(row, form.columns)]
        right = slopes.at[here, _at(column, form.columns)]
        _copy([(left, lefts), (right, rights)], slot, barrier)

    def multiply(sums: KernelRef, slot: jax.Array | int, step: jax.Array | int) -> None:
        low, high = first[start + step], last[start + step]

        # Rows of other groups, or of none, have undefined values.
        @pl.when((low > 0) | (high < STEP))
        def _() -> None:
            for tiles in (lefts, rights):
                _keep_rows(tiles.at[slot], low, high)
            _plgpu().commit_smem()

        _plgpu().wgmma(sums, lefts.at[slot].T, rights.at[slot])

    count = begin[group + 1] - start
    total = _summed((form.columns, form.columns), count, barrier, bring, multiply)
    for part in _parts(total, result):
        here = _at(row, form.columns), pl.ds(column * form.columns + part, STEP)
        _plgpu().copy_smem_to_gmem(result, out.at[group, *here])
        _plgpu().wait_smem_to_gmem(0)


def _summed(
    shape: tuple[int, int],
    steps: jax.Array | int,
    barrier: KernelRef,
    bring: Callable[[Any, Any], None],
    multiply: Callable[[Any, Any, Any], None],
) -> Any:
    """Computes the sum of `steps` products, float32 of shape `shape`.

    Args:
      shape: shape of the result.
      steps: number of products.
      barrier: barriers that signal loaded tiles.
      bring: function (step, slot of the ring) that starts copying the tiles of a step.
      multiply: function (sums, slot, step) that adds the step's product.
    """
    from jax.experimental import pallas as pl

    plgpu = _plgpu()
    for step in range(BUFFERS):

        @pl.when(step < steps)
        def _(step: int = step) -> None:
            bring(step, step)

    def all_steps(sums: KernelRef) -> Any:
        def one(step: jax.Array | int, carry: None) -> None:
            slot = lax.rem(step, jnp.int32(BUFFERS))
            plgpu.barrier_wait(barrier.at[slot])
            multiply(sums, slot, step)
            plgpu.wgmma_wait(1)  # the previous step's product has read its tiles
            # This refills the slot of the previous step; the first steps were brought before the
            # loop.
            ahead = step - 1 + BUFFERS

            @pl.when((step > 0) & (ahead < steps))
            def _() -> None:
                bring(ahead, lax.rem(ahead, jnp.int32(BUFFERS)))

            return carry

        lax.fori_loop(0, steps, one, None)
        return sums[...]

    return pl.run_scoped(all_steps, plgpu.ACC(shape, jnp.float32))


# --- tiles ----------------------------------------------------------------------------------------


def _at(tile: jax.Array | int, size: int) -> Any:
    from jax.experimental import pallas as pl

    return pl.ds(tile * size, size)


def _copy(
    pairs: Sequence[tuple[KernelRef, KernelRef]], slot: jax.Array | int, barrier: KernelRef
) -> None:
    for source, ring in pairs:
        _plgpu().copy_gmem_to_smem(source, ring.at[slot], barrier.at[slot])


def _keep_rows(tile: KernelRef, first: jax.Array, last: jax.Array) -> None:
    """Sets rows before `first`, and from `last` on, to zero."""
    plgpu = _plgpu()
    layout = plgpu.Layout.WGMMA
    row = plgpu.broadcasted_iota(jnp.int32, tile.shape, 0, layout=layout)
    values = plgpu.load(tile, layout=layout)
    tile[...] = jnp.where((row >= first) & (row < last), values, jnp.zeros_like(values))


def _parts(total: jax.Array, result: KernelRef) -> Iterator[int]:
    """Writes a sum into shared memory, 64 columns at a time; yields each time the first column."""
    for part in range(0, total.shape[1], STEP):
        result[...] = total[:, part : part + STEP].astype(result.dtype)
        _plgpu().commit_smem()
        yield part


def _store_rows(
    source: KernelRef, target: KernelRef, top: jax.Array, first: jax.Array, last: jax.Array
) -> None:
    """Copies rows [first, last) of a tile to the target, in which the tile begins at row `top`.

    Copies parts whose sizes are powers of two, because copies have fixed sizes.
    """
    from jax.experimental import pallas as pl

    plgpu = _plgpu()
    size, row = 1 << (source.shape[0].bit_length() - 1), first  # largest power of two of the rows
    while size:

        @pl.when(lax.rem(lax.div(last - first, jnp.int32(size)), jnp.int32(2)) == 1)
        def _(size: int = size, row: jax.Array = row) -> None:
            there = target.at[pl.ds(top + row, size)]
            plgpu.copy_smem_to_gmem(source.at[pl.ds(row, size)], there)

        row = row + ((last - first) // size % 2) * size
        size //= 2
    plgpu.wait_smem_to_gmem(0)


def _ring(dtype: DTypeLike, left: tuple[int, int], right: tuple[int, int]) -> list[Any]:
    """Allocates buffers of two kinds of tiles, and the barriers that signal a loaded slot."""
    plgpu = _plgpu()
    columns = 128 // jnp.dtype(dtype).itemsize  # a row of 128 bytes, the width of a swizzle
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))
    tiles = [plgpu.SMEM((BUFFERS, *shape), dtype, transforms=transforms) for shape in (left, right)]
    return [*tiles, plgpu.Barrier(num_arrivals=2, num_barriers=BUFFERS)]


def _plain(dtype: DTypeLike, rows: int) -> Any:
    """Allocates 64 columns of a result in row order, so that any number of rows can be copied
    out."""
    return _plgpu().SMEM((rows, STEP), dtype)


def _plgpu() -> Any:
    # Pallas takes 0.4 s to import and is needed only to build a kernel.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu
