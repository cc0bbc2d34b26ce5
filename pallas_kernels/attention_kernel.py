"""Computes attention by three Mosaic GPU kernels: forward, query gradients, key/value gradients.

The kernels are for Hopper. One warpgroup computes one tile of 64 queries (or keys), and loops over
tiles of 64 of "the other side", which are keys (or queries). It visits the tiles that the order of
tokens or a window leaves visible, or those that a table lists as blocks of 16, gathered four to a
tile. Positions and segments are data, and are compared inside the kernel.

Scores stay on the chip. The softmax is computed online (arXiv:2112.05682), and the backward pass
recomputes scores from the log-sum-exp (arXiv:2205.14135). The kernels use no atomics: each tile is
written once, so two runs give the same bits. They are not pipelined: a tile is loaded, then
computed. They ran on an H200 with correct results; their time has not been measured.

Needs jax >= 0.11.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.attention_tables import BLOCK, PARTS, TILE, Form
from pallas_kernels.elementwise import KernelRef

LOG2E = math.log2(math.e)
MARGIN = TILE - BLOCK
"""Number of padding elements on each side of a vector from which blocks are copied."""
HIDDEN = -1e30
"""Score that counts as minus infinity; its differences from other scores are finite."""


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Integers of a tile's tokens, int32 [64] each, or buffers for them; None if they are not
    compared."""

    position: Any = None
    segment: Any = None


# --- calls ----------------------------------------------------------------------------------------


def forward(
    form: Form,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    integers: dict[str, jax.Array],
    table: Sequence[jax.Array],
    *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Computes softmax attention, and the log-sum-exp of the scores of each query.

    Args:
      form: static description of the call.
      query: [rows, queries, heads, head_dim], 16-bit floats.
      key, value: [rows, keys, kv_heads, head_dim].
      integers: the arrays that `form` requires of "query_position", "key_position",
        "query_segment", "key_segment": int32 [rows, tokens].
      table: blocks, words and counts of the queries' tiles; empty without a layout.
      interpret: whether to run the kernel on the CPU.

    Returns:
      (out [rows, queries, heads, head_dim] in the dtype of `query`; log-sum-exp of scores in nats,
      float32 [rows, heads, queries], -inf for a query that sees no key).
    """
    rows = query.shape[0]
    tile, vector = _tile(query.dtype, form.head_dim), _vector(form, jnp.int32)
    names = sorted(integers)
    # The barrier waits for all copies of one turn: keys, values and the integers of keys.
    copies = (2 + _num_of_keys(names)) * _copies(form)
    return _run(
        functools.partial(_forward_body, form, names),
        (query, key, value, *_integers(form, integers, other="key"), *table),
        out=[
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct((rows, form.heads, form.queries), jnp.float32),
        ],
        scratch=[
            *(tile, tile, tile, vector, vector),
            _plgpu().SMEM((TILE,), jnp.float32),
            *_barriers(1, copies),
        ],
        grid=(form.heads, form.queries // TILE, rows),
        name="attention_forward",
        flops=_flops(form, rows, products=2, of_keys=False),
        interpret=interpret,
    )


def query_gradients(
    form: Form,
    arrays: Sequence[jax.Array],
    sums: Sequence[jax.Array],
    integers: dict[str, jax.Array],
    table: Sequence[jax.Array],
    *,
    interpret: bool,
) -> jax.Array:
    """Computes the gradient with respect to the query, in its dtype.

    Args:
      form: static description of the call.
      arrays: query, key, value, and the gradient with respect to the result, all of one dtype.
      sums: two arrays float32 [rows, heads, queries]: the log-sum-exp in nats (+inf for a query
        that sees no key), and the sum over features of the result times its gradient.
      integers, table, interpret: the arguments of `forward`.
    """
    query = arrays[0]
    tile, vector = _tile(query.dtype, form.head_dim), _vector(form, jnp.int32)
    names = sorted(integers)
    copies = (2 + _num_of_keys(names)) * _copies(form)
    (out,) = _run(
        functools.partial(_query_body, form, names),
        (*arrays, *sums, *_integers(form, integers, other="key"), *table),
        out=[jax.ShapeDtypeStruct(query.shape, query.dtype)],
        scratch=[tile, tile, tile, tile, vector, vector, *_barriers(2, copies)],
        grid=(form.heads, form.queries // TILE, query.shape[0]),
        name="attention_query_gradients",
        flops=_flops(form, query.shape[0], products=3, of_keys=False),
        interpret=interpret,
    )
    return out


def key_gradients(
    form: Form,
    arrays: Sequence[jax.Array],
    sums: Sequence[jax.Array],
    integers: dict[str, jax.Array],
    table: Sequence[jax.Array],
    *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Computes gradients with respect to key and value, in float32, summed over shared heads.

    Arguments are those of `query_gradients`, but `table` is the table of the keys' tiles.
    """
    query, key = arrays[:2]
    tile, vector = _tile(query.dtype, form.head_dim), _vector(form, jnp.int32)
    wide = _tile(jnp.float32, form.head_dim)
    number = _vector(form, jnp.float32)
    names = sorted(integers)
    copies = (4 + len(names) - _num_of_keys(names)) * _copies(form)
    shape = jax.ShapeDtypeStruct(key.shape, jnp.float32)
    of_tile = [tile, tile, tile, tile, wide, vector, vector, number, number]
    return _run(
        functools.partial(_key_body, form, names),
        (
            *arrays,
            *(_with_margins(form, x) for x in sums),
            *_integers(form, integers, other="query"),
            *table,
        ),
        out=[shape, shape],
        scratch=[*of_tile, *_barriers(2, copies)],
        grid=(form.kv_heads, form.keys // TILE, query.shape[0]),
        name="attention_key_gradients",
        flops=_flops(form, query.shape[0], products=4, of_keys=True),
        interpret=interpret,
    )


def _run(
    body: Callable[..., None],
    given: Sequence[jax.Array],
    *,
    out: Sequence[jax.ShapeDtypeStruct],
    scratch: Sequence[Any],
    grid: tuple[int, ...],
    name: str,
    flops: int,
    interpret: bool,
) -> Any:
    """Runs a kernel; its cost estimate is the minimum that it computes and transfers."""
    from jax.experimental import pallas as pl

    plgpu = _plgpu()
    if interpret:  # the interpreter needs extra memory, see `_times`
        scratch = [*scratch, _tile(given[0].dtype, TILE)]

    # `pl.kernel` itself takes no scratch with transforms.
    def with_scratch(*refs: KernelRef) -> None:
        pl.run_scoped(functools.partial(body, *refs), *scratch)

    kernel = pl.kernel(
        with_scratch,
        out_type=list(out),
        mesh=plgpu.Mesh(grid=grid, grid_names=("head", "tile", "row")),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        cost_estimate=pl.CostEstimate(
            flops=flops,
            transcendentals=0,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*given, *out)),
        ),
        interpret=plgpu.InterpretGPUParams() if interpret else False,
        name=name,
    )
    return kernel(*given)


def _flops(form: Form, rows: int, *, products: int, of_keys: bool) -> int:
    """Computes the FLOPs of a kernel with `products` matrix products per tile of scores."""
    scores = rows * form.visited(of_keys=of_keys) * TILE * TILE
    return 2 * products * scores * form.head_dim


def _integers(form: Form, integers: dict[str, jax.Array], *, other: str) -> list[jax.Array]:
    """Lists the arrays of one integer per token, sorted by name.

    Arrays whose name starts with `other` get margins (`_with_margins`).
    """
    return [
        _with_margins(form, x) if name.startswith(other) else x
        for name, x in sorted(integers.items())
    ]


def _with_margins(form: Form, vectors: jax.Array) -> jax.Array:
    """Pads [..., tokens] on each side by the number of elements that `_gather` reads next to a
    block."""
    if not form.layouts:
        return vectors
    return jnp.pad(vectors, [(0, 0)] * (vectors.ndim - 1) + [(MARGIN, MARGIN)])


def _num_of_keys(names: Sequence[str]) -> int:
    return sum(name.startswith("key_") for name in names)


def _copies(form: Form) -> int:
    """Returns the number of copies that load one array for a tile of the other side."""
    return PARTS if form.layouts else 1


# --- bodies ---------------------------------------------------------------------------------------


def _forward_body(form: Form, names: Sequence[str], *refs: KernelRef) -> None:
    query, key, value, *rest = refs
    integers, rest = _named(names, rest)
    table, rest = _table(form, rest)
    out, log_sum, mine, keys, values, position, segment, number, loaded, barrier, *spare = rest
    place = _place(form)
    own = place.of(query)
    _plgpu().copy_gmem_to_smem(own, mine, loaded)
    _plgpu().barrier_wait(loaded)
    rows = _of_rows(integers, "query", place)

    def step(turn: jax.Array, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        total, greatest, weight = carry
        pairs = [(place.shared(key), keys), (place.shared(value), values)]
        columns = _of_columns(integers, "key", place, (position, segment), pairs)
        word = _gather(form, table, place, turn, form.key_tiles, pairs, barrier)
        scores = _times(mine, keys.T, (TILE, TILE)) * (form.scale * LOG2E)
        seen = _seen(form, rows, _loaded(columns), word, transposed=False)
        scores = scores if seen is None else jnp.where(seen, scores, HIDDEN)
        after = jnp.maximum(greatest, scores.max(axis=1))
        weights = jnp.exp2(scores - _by_row(after))
        # HIDDEN is finite: as long as a query has seen no key, exp2(HIDDEN - HIDDEN) is 1.
        weights = weights if seen is None else jnp.where(seen, weights, 0.0)
        shrink = jnp.exp2(greatest - after)
        mixed = _times(weights.astype(value.dtype), values, mine.shape, spare)
        total = total * _by_row(shrink, form.head_dim) + mixed
        return total, after, weight * shrink + weights.sum(axis=1)

    start = _full(mine.shape, 0.0), _full((TILE,), HIDDEN), _full((TILE,), 0.0)
    count = _turns(form, table, place, form.key_tiles)
    total, greatest, weight = lax.fori_loop(0, count, step, start)
    # Of a query that has seen no key, total is 0: divided by 1 it stays 0, and is not NaN.
    some = weight > 0.0
    weight = jnp.where(some, weight, 1.0)
    # The queries are no longer needed, so their memory takes the result.
    mine[...] = (total / _by_row(weight, form.head_dim)).astype(query.dtype)
    number[...] = jnp.where(some, (greatest + jnp.log2(weight)) / LOG2E, -jnp.inf)
    _store([(mine, place.of(out)), (number, place.of_sums(log_sum))])


def _query_body(form: Form, names: Sequence[str], *refs: KernelRef) -> None:
    query, key, value, slope, log_sum, turned, *rest = refs
    integers, rest = _named(names, rest)
    table, rest = _table(form, rest)
    out, mine, slopes, keys, values, position, segment, loaded, barrier, *spare = rest
    place = _place(form)
    _plgpu().copy_gmem_to_smem(place.of(query), mine, loaded)
    _plgpu().copy_gmem_to_smem(place.of(slope), slopes, loaded)
    _plgpu().barrier_wait(loaded)
    rows = _of_rows(integers, "query", place)
    log_sums = _row(place.of_sums(log_sum)) * LOG2E
    inner = _row(place.of_sums(turned))

    def step(turn: jax.Array, total: jax.Array) -> Any:
        pairs = [(place.shared(key), keys), (place.shared(value), values)]
        columns = _of_columns(integers, "key", place, (position, segment), pairs)
        word = _gather(form, table, place, turn, form.key_tiles, pairs, barrier)
        scores = _times(mine, keys.T, (TILE, TILE)) * (form.scale * LOG2E)
        seen = _seen(form, rows, _loaded(columns), word, transposed=False)
        weights = jnp.exp2(scores - _by_row(log_sums))
        weights = weights if seen is None else jnp.where(seen, weights, 0.0)
        given = _times(slopes, values.T, (TILE, TILE))
        scores = weights * (given - _by_row(inner))
        return total + _times(scores.astype(key.dtype), keys, mine.shape, spare)

    count = _turns(form, table, place, form.key_tiles)
    total = lax.fori_loop(0, count, step, _full(mine.shape, 0.0))
    mine[...] = (total * form.scale).astype(query.dtype)
    _store([(mine, place.of(out))])


def _key_body(form: Form, names: Sequence[str], *refs: KernelRef) -> None:
    """Computes a tile of keys; here the rows of a tile of scores are keys, the columns queries."""
    query, key, value, slope, log_sum, turned, *rest = refs
    integers, rest = _named(names, rest)
    table, rest = _table(form, rest)
    of_key, of_value, *rest = rest
    mine, values, queries, slopes, wide, position, segment, *rest = rest
    log_sums, inner, loaded, barrier, *spare = rest
    place = _place(form)
    _plgpu().copy_gmem_to_smem(place.of(key), mine, loaded)
    _plgpu().copy_gmem_to_smem(place.of(value), values, loaded)
    _plgpu().barrier_wait(loaded)
    rows = _of_rows(integers, "key", place)

    # One program adds the query heads that share its key head, so that no two programs add to one
    # gradient.
    def of_head(member: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[Any, Any]:
        here = place.for_head(place.head * form.group + member)

        def step(turn: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[Any, Any]:
            by_key, by_value = carry
            pairs = [
                (here.whole(query), queries),
                (here.whole(slope), slopes),
                (here.whole_sums(log_sum), log_sums),
                (here.whole_sums(turned), inner),
            ]
            columns = _of_columns(integers, "query", here, (position, segment), pairs)
            word = _gather(form, table, here, turn, form.query_tiles, pairs, barrier)
            scores = _times(mine, queries.T, (TILE, TILE)) * (form.scale * LOG2E)
            seen = _seen(form, rows, _loaded(columns), word, transposed=True)
            weights = jnp.exp2(scores - _by_column(_column(log_sums) * LOG2E))
            weights = weights if seen is None else jnp.where(seen, weights, 0.0)
            added = _times(weights.astype(value.dtype), slopes, mine.shape, spare)
            given = _times(values, slopes.T, (TILE, TILE))
            scores = weights * (given - _by_column(_column(inner)))
            more = _times(scores.astype(query.dtype), queries, mine.shape, spare)
            return by_key + more, by_value + added

        return lax.fori_loop(0, _turns(form, table, here, form.query_tiles), step, carry)

    start = _full(mine.shape, 0.0), _full(mine.shape, 0.0)
    by_key, by_value = lax.fori_loop(0, form.group, of_head, start)
    wide[...] = by_key * form.scale
    _store([(wide, place.of(of_key))])
    # `_store` has waited for its copy, so that `wide` is free again.
    wide[...] = by_value
    _store([(wide, place.of(of_value))])


# --- places ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Place:
    """Work of one program: one tile of one head of one batch row."""

    form: Form
    head: jax.Array
    tile: jax.Array
    row: jax.Array

    def for_head(self, head: jax.Array) -> _Place:
        return dataclasses.replace(self, head=head)

    def of(self, ref: KernelRef) -> Any:
        """Selects the program's own tile of [rows, tokens, heads, head_dim]."""
        return ref.at[self.row, _at(self.tile), self.head]

    def of_sums(self, ref: KernelRef) -> Any:
        """Selects the program's own numbers of [rows, heads, tokens]."""
        return ref.at[self.row, self.head, _at(self.tile)]

    def whole(self, ref: KernelRef) -> Any:
        """Selects all tokens of the program's head."""
        return ref.at[self.row, :, self.head]

    def shared(self, ref: KernelRef) -> Any:
        """Selects all tokens of the key/value head of the program's query head."""
        return ref.at[self.row, :, lax.div(self.head, jnp.int32(self.form.group))]

    def whole_sums(self, ref: KernelRef) -> Any:
        """Selects all numbers of the program's head."""
        return ref.at[self.row, self.head]


def _place(form: Form) -> _Place:
    return _Place(form, lax.axis_index("head"), lax.axis_index("tile"), lax.axis_index("row"))


def _at(tile: jax.Array) -> Any:
    from jax.experimental import pallas as pl

    return pl.ds(tile * TILE, TILE)


def _named(
    names: Sequence[str], refs: Sequence[KernelRef]
) -> tuple[dict[str, KernelRef], Sequence[KernelRef]]:
    return dict(zip(names, refs[: len(names)], strict=True)), refs[len(names) :]


def _table(
    form: Form, refs: Sequence[KernelRef]
) -> tuple[Sequence[KernelRef], Sequence[KernelRef]]:
    return (refs[:3], refs[3:]) if form.layouts else ((), refs)


def _layout_head(form: Form, place: _Place) -> Any:
    return place.head if form.layouts > 1 else 0


def _turns(
    form: Form, table: Sequence[KernelRef], place: _Place, visited: Callable[..., Any]
) -> Any:
    if not table:
        return visited(place.tile)[1]
    return table[2][_layout_head(form, place), place.tile]


def _gather(
    form: Form,
    table: Sequence[KernelRef],
    place: _Place,
    turn: jax.Array,
    visited: Callable[..., Any],
    pairs: Sequence[tuple[KernelRef, KernelRef]],
    barrier: KernelRef,
) -> Any:
    """Copies one iteration's blocks for each (source, tile) pair; returns the iteration's mask
    word."""
    from jax.experimental import pallas as pl

    plgpu = _plgpu()
    if not table:
        first = visited(place.tile)[0]
        for source, target in pairs:
            plgpu.copy_gmem_to_smem(source.at[_at(first + turn)], target, barrier)
        plgpu.barrier_wait(barrier)
        return None
    blocks, words, _ = table
    head = _layout_head(form, place)
    for part in range(PARTS):
        block = blocks[head, place.tile, turn, part]
        for source, target in pairs:
            if len(target.shape) == 1:
                # The hardware copies only multiples of 128 bytes, and 16 numbers have 64 bytes.
                # Each part therefore gets its own vector; quarter `part` of the vector is the block
                # (see `_column`).
                there = source.at[pl.ds(block * BLOCK + MARGIN - part * BLOCK, TILE)]
                plgpu.copy_gmem_to_smem(there, target.at[pl.ds(part * TILE, TILE)], barrier)
                continue
            there = source.at[pl.ds(block * BLOCK, BLOCK)]
            plgpu.copy_gmem_to_smem(there, target.at[pl.ds(part * BLOCK, BLOCK)], barrier)
    plgpu.barrier_wait(barrier)
    return words[head, place.tile, turn]


# --- visibility -----------------------------------------------------------------------------------


def _of_rows(integers: dict[str, KernelRef], side: str, place: _Place) -> Tokens:
    """Loads positions and segments of the program's own tokens into registers."""
    found = {
        name: _row(integers[f"{side}_{name}"].at[place.row, _at(place.tile)])
        for name in ("position", "segment")
        if f"{side}_{name}" in integers
    }
    return Tokens(**found)


def _of_columns(
    integers: dict[str, KernelRef],
    side: str,
    place: _Place,
    scratch: tuple[KernelRef, KernelRef],
    pairs: list[tuple[KernelRef, KernelRef]],
) -> Tokens:
    """Returns buffers for the integers of the other side, and adds their copies to `pairs`."""
    found = {}
    for name, target in zip(("position", "segment"), scratch, strict=True):
        if f"{side}_{name}" in integers:
            pairs.append((integers[f"{side}_{name}"].at[place.row], target))
            found[name] = target
    return Tokens(**found)


def _loaded(columns: Tokens) -> Tokens:
    position, segment = columns.position, columns.segment
    return Tokens(
        None if position is None else _column(position),
        None if segment is None else _column(segment),
    )


def _seen(
    form: Form, rows: Tokens, columns: Tokens, word: jax.Array | None, *, transposed: bool
) -> Any:
    """Computes bool [64, 64], visible pairs; None if all are visible. Rows are keys if
    `transposed`."""

    def spread(name: str) -> tuple[jax.Array, jax.Array]:
        row, column = _by_row(getattr(rows, name)), _by_column(getattr(columns, name))
        return (column, row) if transposed else (row, column)

    found = []
    if form.compares_positions:
        query, key = spread("position")
        if form.causal:
            found.append(query >= key)
        if form.window is not None:
            found.append(query - key < form.window)
            if not form.causal:
                found.append(key - query < form.window)
    if form.has_segments:
        query, key = spread("segment")
        found += [query == key, key >= 0]
    if word is not None:
        found.append(_bits(word, transposed=transposed))
    return functools.reduce(lax.bitwise_and, found) if found else None


def _bits(word: jax.Array, *, transposed: bool) -> Any:
    """Expands a mask word to bool [64, 64]: one bit per pair of query part and key part."""
    parts = [lax.shift_right_logical(_iota(dim), jnp.int32(4)) for dim in (0, 1)]
    query, key = reversed(parts) if transposed else parts
    words = _plgpu().layout_cast(jnp.full((TILE, TILE), word, jnp.int32), _layout())
    return lax.rem(lax.shift_right_logical(words, query * PARTS + key), jnp.int32(2)) == 1


# --- tiles ----------------------------------------------------------------------------------------


def _times(
    left: Any,
    right: KernelRef,
    shape: tuple[int, ...],
    spare: Sequence[KernelRef] = (),
) -> Any:
    """Computes left @ right of one tile, summed in float32.

    A left operand in registers is first copied to `spare`, if given: the interpreter of jax 0.12
    supports only products of arrays in memory.
    """
    from jax.experimental import pallas as pl

    plgpu = _plgpu()
    if spare:
        (memory,) = spare
        memory[...] = left.astype(memory.dtype)
        plgpu.commit_smem()
        left = memory

    def product(sums: KernelRef) -> Any:
        plgpu.wgmma(sums, left, right)
        return sums[...]

    return pl.run_scoped(product, plgpu.ACC(tuple(shape), jnp.float32))


def _store(pairs: Sequence[tuple[KernelRef, KernelRef]]) -> None:
    plgpu = _plgpu()
    plgpu.commit_smem()
    for source, target in pairs:
        plgpu.copy_smem_to_gmem(source, target)
    plgpu.wait_smem_to_gmem(0)


def _tile(dtype: DTypeLike, width: int) -> Any:
    plgpu = _plgpu()
    columns = 128 // jnp.dtype(dtype).itemsize  # a row of 128 bytes, the width of a swizzle
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM((TILE, width), dtype, transforms=transforms)


def _vector(form: Form, dtype: DTypeLike) -> Any:
    """Allocates one number per token of a tile; with tables, one vector per part of 16 tokens."""
    return _plgpu().SMEM((TILE * _copies(form),), dtype)


def _barriers(first: int, copies: int) -> list[Any]:
    plgpu = _plgpu()
    return [plgpu.Barrier(num_arrivals=first), plgpu.Barrier(num_arrivals=copies)]


def _layout() -> Any:
    return _plgpu().Layout.WGMMA


def _iota(dim: int) -> Any:
    return _plgpu().broadcasted_iota(jnp.int32, (TILE, TILE), dim, layout=_layout())


def _full(shape: tuple[int, ...], value: float) -> Any:
    layout = _layout() if len(shape) == 2 else _layout().reduce(1)
    return _plgpu().layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _row(ref: KernelRef) -> Any:
    """Loads a vector from global memory, one number for each row of a tile."""
    return _plgpu().load(ref, layout=_layout().reduce(1), optimized=False)


def _column(ref: KernelRef) -> Any:
    """Loads a vector from shared memory, one number for each column of a tile.

    Of each part's vector that `_gather` copied, it uses the quarter with the part's numbers.
    """
    from jax.experimental import pallas as pl

    plgpu, layout = _plgpu(), _layout().reduce(0)
    if ref.shape == (TILE,):
        return plgpu.load(ref, layout=layout)
    part = lax.div(plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=layout), jnp.int32(BLOCK))
    found = plgpu.load(ref.at[pl.ds(0, TILE)], layout=layout)
    for number in range(1, PARTS):
        here = plgpu.load(ref.at[pl.ds(number * TILE, TILE)], layout=layout)
        found = jnp.where(part == number, here, found)
    return found


def _by_row(vector: jax.Array, columns: int = TILE) -> Any:
    return lax.broadcast_in_dim(vector, (TILE, columns), [0])


def _by_column(vector: jax.Array) -> Any:
    return lax.broadcast_in_dim(vector, (TILE, TILE), [1])


def _plgpu() -> Any:
    # Pallas takes 0.4 s to import and is needed only to build a kernel.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu
