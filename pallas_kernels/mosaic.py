"""Runs an elementwise rule as one Mosaic GPU kernel over a leaf of any size.

Needs jax >= 0.11.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels import rounding
from pallas_kernels.elementwise import (
    Blocks,
    KernelRef,
    Rule,
    Scalar,
    Updated,
    moved_average,
    reference_update,
    stored_blocks,
)

BLOCK = 512
"""Number of elements per program: 4 for each of 128 threads. AdamW then takes 48 registers (72 for
1024 elements) and loads 16 bytes of float32 at a time."""
THREADS = 128
MAX_FLAT = 2**31 - 1
"""Maximum int32 offset, which limits leaves that are not a whole number of blocks."""
MAX_LOOP = 32
"""Maximum number of blocks per program of a rule with sums, so that there are few partial sums."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Division of one leaf's elements into tiles and a tail.

    Attributes:
      block: number of elements of one tile, a multiple of 128.
      rows: number of tiles.
      loop: number of tiles that one program processes.
      tail: number of elements after the last tile, updated by the reference on the same memory.
      row_programs: number of programs per row in an update by rows; 0 for a single leaf.
    """

    block: int
    rows: int
    loop: int
    tail: int
    row_programs: int = 0

    @property
    def size(self) -> int:
        return self.rows * self.block + self.tail


def tiles_of(size: int, *, block: int = BLOCK, loops: bool = False) -> Tiles:
    """Divides a leaf into tiles: without a tail if 128 divides its size, else of `block` elements
    with a tail.

    Raises:
      ValueError: `block` is not a multiple of 128; or the leaf is larger than 2^31 - 1 and not a
        multiple of 128.
    """
    if block <= 0 or block % THREADS:
        raise ValueError(f"block={block} is not a positive multiple of {THREADS}")
    for candidate in range(block, 0, -THREADS):
        if size and size % candidate == 0 and block % candidate == 0:
            rows = size // candidate
            return Tiles(candidate, rows, _loop(rows) if loops else 1, 0)
    if size > MAX_FLAT:
        raise ValueError(
            f"a leaf of {size} elements is not a multiple of {THREADS} and larger than {MAX_FLAT}, "
            "the limit of 32-bit offsets; pad it to a multiple of 128, or use impl='xla'"
        )
    rows = size // block
    return Tiles(block, rows, _loop(rows) if loops else 1, size - rows * block)


def tiles_of_rows(shape: tuple[int, ...], *, block: int = BLOCK, loops: bool = False) -> Tiles:
    """Divides rows into tiles that do not cross rows; returns no tile if 128 does not divide a
    row."""
    one = tiles_of(math.prod(shape[1:]), block=block, loops=loops)
    if one.tail or not one.rows:
        return Tiles(block, 0, 1, math.prod(shape))
    return dataclasses.replace(one, rows=shape[0] * one.rows, row_programs=one.rows // one.loop)


def _loop(rows: int) -> int:
    return next(n for n in range(min(MAX_LOOP, max(rows, 1)), 0, -1) if rows % n == 0)


def layout_of(block: int) -> Any:
    """Returns a layout with up to 4 neighbours per thread: 16 bytes of float32 in one load."""
    neighbours = next(n for n in (4, 2, 1) if block // THREADS % n == 0)
    return _plgpu().Layout.WG_STRIDED((block,), vec_size=neighbours)


def at_tile(ref: KernelRef, row: jax.Array, tiles: Tiles) -> Any:
    """Selects tile number `row` of a leaf's Ref, in the view that `tiles` requires."""
    from jax.experimental import pallas as pl  # imported here for the reason in `run_on_tiles`

    if not tiles.tail:
        return ref.at[row]
    return ref.at[pl.ds(pl.multiple_of(row * tiles.block, tiles.block), tiles.block)]


def load_tile(ref: KernelRef, row: jax.Array, tiles: Tiles) -> Any:
    """Loads tile number `row` of a leaf's Ref as a float32 block."""
    return load_block(at_tile(ref, row, tiles), tiles.block).astype(jnp.float32)


def load_block(ref: KernelRef, block: int) -> Any:
    """Loads a part of a Ref as a block."""
    return _plgpu().load(ref, layout=layout_of(block), optimized=False)


def laid_out(x: jax.Array) -> Any:
    """Gives a value that was not loaded from a Ref the layout of blocks of its size."""
    return _plgpu().layout_cast(x, layout_of(x.size))


def block_index(program: jax.Array, block: int) -> Any:
    """Computes uint32 [block]: positions in the leaf of the elements of tile number `program`."""
    inside = laid_out(lax.broadcasted_iota(jnp.uint32, (block,), 0))
    first = program.astype(jnp.uint32) * jnp.uint32(block)
    return inside + lax.broadcast(first, (block,))


def fused_update(
    rule: Rule,
    updated: Sequence[jax.Array],
    read: Sequence[jax.Array],
    scalars: tuple[Scalar, ...],
    *,
    out_dtypes: Sequence[DTypeLike] = (),
    seed: jax.Array | None = None,
    block: int = BLOCK,
    by_row: bool = False,
    interpret: bool = False,
) -> Updated:
    """Computes `elementwise.reference_update` in one kernel that writes into the updated arrays.

    Arrays without a whole tile are updated without a kernel.

    Args:
      rule: update formula.
      updated, read: arrays of one shape.
      scalars: an instance of `rule.scalars`.
      out_dtypes: dtypes of the requested outputs.
      seed: random seed; None rounds to nearest.
      block: number of elements of one tile, a multiple of 128.
      by_row: whether dimension 0 counts rows with their own scalars and sums, see `update.update`.
      interpret: whether to run the kernel on the CPU.
    """
    first = (*updated, *read)[0]
    shape, cut = first.shape, {"block": block, "loops": rule.num_sums > 0}
    tiles = tiles_of_rows(shape, **cut) if by_row else tiles_of(first.size, **cut)
    if tiles.rows == 0:
        return reference_update(
            rule, updated, read, scalars, out_dtypes=out_dtypes, seed=seed, by_row=by_row
        )
    view = (tiles.size,) if tiles.tail else (tiles.rows, tiles.block)
    refs = [jax.new_ref(x.reshape(view)) for x in updated]
    flat = [x.reshape(view) for x in read]
    numbers = [jnp.asarray(x, jnp.float32) for x in scalars]
    if by_row:  # order: all numbers of one row, then those of the next
        numbers = [jnp.broadcast_to(x, shape[:1]) for x in numbers]
    packed = jnp.stack(numbers, axis=-1).reshape(-1)
    seeds = [] if seed is None else [seed]
    prepared, rest = [], None
    if tiles.tail:
        rest = _update_tail(rule, tiles, refs, flat, scalars, out_dtypes=out_dtypes, seed=seed)
        prepared = [before_tail(x, tiles) for x in rest.outputs]
    outputs = [] if tiles.tail else [jax.ShapeDtypeStruct(view, dtype) for dtype in out_dtypes]
    partial = jax.ShapeDtypeStruct((tiles.rows // tiles.loop,), jnp.float32)
    kernel = run_on_tiles(
        _body(rule, tiles, num_outputs=len(out_dtypes), has_seed=seed is not None),
        tiles,
        name=rule.name,
        out_type=(*outputs, *[partial] * rule.num_sums),
        has_barriers=rule.num_sums > 0,
        interpret=interpret,
    )
    results = kernel(*refs, *flat, packed, *seeds, *prepared)
    # With a tail, the kernel writes its outputs into the prepared arrays, and returns only sums.
    found = [jax.freeze(ref) for ref in prepared] or results[: len(outputs)]
    sums = [
        jnp.sum(x.reshape(shape[0], -1), axis=1) if by_row else jnp.sum(x)
        for x in results[len(outputs) :]
    ]
    if rest is not None:
        sums = [a + b for a, b in zip(sums, rest.sums, strict=True)]
    return Updated(
        tuple(jax.freeze(ref).reshape(shape) for ref in refs),
        tuple(x.reshape(shape) for x in found),
        tuple(sums),
    )


def _update_tail(
    rule: Rule,
    tiles: Tiles,
    refs: Sequence[jax.Ref],
    read: Sequence[jax.Array],
    scalars: tuple[Scalar, ...],
    *,
    out_dtypes: Sequence[DTypeLike],
    seed: jax.Array | None,
) -> Updated:
    """Updates the elements after the last tile by the reference, in the same memory.

    It runs before the kernel, so that it does not depend on the kernel. Otherwise XLA (0.12) fuses
    a kernel with writes into its results, and then rejects this fusion as a cycle, or for its
    target.
    """
    start = tiles.size - tiles.tail
    old, others = tails_of((refs, read), start)
    rest = reference_update(
        rule,
        old,
        others,
        scalars,
        out_dtypes=out_dtypes,
        seed=seed,
        first_index=start,
    )
    for ref, new in zip(refs, rest.updated, strict=True):
        ref[start:] = new
    return rest


def tails_of(tree: Any, start: int) -> Any:
    """Reads the tails (elements from `start` on) of Refs and arrays, before the kernel writes them.

    Otherwise XLA copies a whole leaf to preserve its tail.
    """
    return lax.optimization_barrier(jax.tree.map(lambda x: x[start:], tree))


def before_tail(tail: jax.Array, tiles: Tiles) -> Any:
    """Returns a new Ref for an output of the kernel, with `tail` as its last elements.

    The other elements are filled unnecessarily, which costs a leaf with a tail one more write of
    this output.
    """
    return jax.new_ref(jnp.pad(tail, (tiles.size - tiles.tail, 0)))


def run_on_tiles(
    body: Callable[..., None],
    tiles: Tiles,
    *,
    name: str,
    out_type: tuple[Any, ...],
    has_barriers: bool,
    clamps: bool = True,
    interpret: bool,
) -> Any:
    """Builds the kernel: one program per `tiles.loop` tiles, each of 128 threads.

    Args:
      body: function of one program.
      tiles: division of the leaf.
      name: name of the kernel.
      out_type: types of the outputs.
      has_barriers: whether threads of a program exchange data. If not, each element is read and
        written by the same thread, and the barriers around every store are omitted.
      clamps: whether conversions from float to integer first clamp to the integer's range; if not,
        results for values outside it are not defined.
      interpret: whether to run the kernel on the CPU.
    """
    # Pallas takes 0.4 s to import and is needed only to build a kernel.
    from jax.experimental import pallas as pl

    plgpu = _plgpu()
    semantics = plgpu.LoweringSemantics
    return pl.kernel(
        body,
        out_type=out_type,
        mesh=mesh_of(tiles.rows // tiles.loop),
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=not has_barriers,
            # Mosaic (0.12) clamps, by two instructions, only where it lowers by warpgroup.
            lowering_semantics=semantics.Warpgroup if clamps else semantics.Lane,
        ),
        interpret=interpret_params() if interpret else False,
        name=name,
    )


def mesh_of(programs: int) -> Any:
    """Returns a grid of this many programs; `lax.axis_index("program")` is a program's index."""
    return _plgpu().Mesh(grid=(programs,), grid_names=("program",))


def interpret_params() -> Any:
    """Returns parameters for running on the CPU; two tiles that write one element raise an
    error."""
    return _plgpu().InterpretGPUParams(detect_races=True)


def update_tile(
    rule: Rule,
    tiles: Tiles,
    row: jax.Array,
    refs: tuple[Sequence[KernelRef], Sequence[KernelRef], Sequence[KernelRef]],
    *,
    scalars: tuple[Scalar, ...],
    seed: tuple[jax.Array, jax.Array] | None,
) -> Blocks:
    """Updates tile number `row` of one leaf; called inside a kernel.

    Args:
      rule: update formula.
      tiles: division of the leaf.
      row: index of the tile.
      refs: (updated, read, outputs) Refs of the leaf, in the view that `tiles` requires.
      scalars: an instance of `rule.scalars` whose fields are blocks.
      seed: two words of the leaf's random seed, or None to round to nearest.

    Returns:
      For each of the rule's sums, a block that is not summed yet.
    """
    updated, read, outputs = refs
    old = tuple(load_tile(ref, row, tiles) for ref in updated)
    own = old[:-1] if rule.averages else old
    values = rule.math(own, tuple(load_tile(ref, row, tiles) for ref in read), scalars)
    bits = None
    if seed is not None:
        words = (spread(seed[0], tiles.block), spread(seed[1], tiles.block))
        bits = rounding.bits_at(block_index(row, tiles.block), words)
    stored = stored_blocks([ref.dtype for ref in updated], values.updated, bits)
    if rule.averages:
        average = moved_average(old[-1], stored[0].astype(jnp.float32), scalars)
        stored.append(average.astype(updated[-1].dtype))
    for ref, new in zip(updated, stored, strict=True):
        at_tile(ref, row, tiles)[...] = new
    for ref, new in zip(outputs, values.outputs, strict=False):
        at_tile(ref, row, tiles)[...] = new.astype(ref.dtype)
    return values.sums


def update_tiles(
    rule: Rule,
    tiles: Tiles,
    program: jax.Array,
    refs: tuple[Sequence[KernelRef], Sequence[KernelRef], Sequence[KernelRef]],
    *,
    scalars: tuple[Scalar, ...],
    seed: tuple[jax.Array, jax.Array] | None,
) -> Blocks:
    """Updates the tiles of one leaf that belong to program number `program`, inside a kernel.

    Arguments are those of `update_tile`. Returns one number for each of the rule's sums.
    """
    more = {"scalars": scalars, "seed": seed}
    if tiles.loop == 1:
        totals = update_tile(rule, tiles, program, refs, **more)
    else:

        def one_more(step: jax.Array | int, totals: Blocks) -> Blocks:
            row = program * tiles.loop + step
            values = update_tile(rule, tiles, row, refs, **more)
            return tuple(a + b for a, b in zip(totals, values, strict=True))

        zero = jnp.zeros((tiles.block,), jnp.float32)
        totals = tuple(laid_out(zero) for _ in range(rule.num_sums))
        totals = lax.fori_loop(0, tiles.loop, one_more, totals)
    return tuple(jnp.sum(total) for total in totals)


def spread(x: jax.Array, block: int) -> Any:
    """Broadcasts a number to a block, because Mosaic does not broadcast implicitly."""
    return lax.broadcast(x, (block,))


def spread_scalars(rule: Rule, ref: KernelRef, block: int, *, first: jax.Array | int = 0) -> Any:
    """Reads the rule's scalars as blocks, from the Ref that stores them from index `first` on."""
    return rule.scalars(*(spread(ref[first + k], block) for k in range(len(rule.scalars._fields))))


def _body(rule: Rule, tiles: Tiles, *, num_outputs: int, has_seed: bool) -> Any:
    """Builds the function of one program of Refs: updated, read, scalars, seed, outputs, sums."""

    def body(*refs: KernelRef) -> None:
        rest = iter(refs)

        def take(count: int) -> list[Any]:
            return list(itertools.islice(rest, count))

        updated, read = take(rule.num_updated), take(rule.num_read)
        (scalar_ref,), seed_refs = take(1), take(int(has_seed))
        outputs, sums = take(num_outputs), take(rule.num_sums)
        program, first = lax.axis_index("program"), 0
        if tiles.row_programs:
            row = lax.div(program, jnp.int32(tiles.row_programs))
            first = row * len(rule.scalars._fields)
        totals = update_tiles(
            rule,
            tiles,
            program,
            (updated, read, outputs),
            scalars=spread_scalars(rule, scalar_ref, tiles.block, first=first),
            seed=(seed_refs[0][0], seed_refs[0][1]) if has_seed else None,
        )
        for ref, total in zip(sums, totals, strict=True):
            ref[program] = total

    return body


def _plgpu() -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu  # here for the reason in `run_on_tiles`

    return plgpu
