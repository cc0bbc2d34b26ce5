"""Updates many leaves in one kernel: each leaf has its own Refs, and a branch selects the leaf."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic, totals
from pallas_kernels.choice import Choice, Impl, choose
from pallas_kernels.elementwise import Rule, Updated, check_arrays, reference_update
from pallas_kernels.table import (
    Entry,
    ScalarsAt,
    Table,
    find_leaf,
    kernel_of,
    pack_scalars,
    row_of_scalars,
    tables_of,
)


def update_many(
    rule: Rule,
    updated: Sequence[Any],
    read: Sequence[Any],
    *,
    scalars: Any,
    out_dtypes: Sequence[Any] = (),
    seeds: jax.Array | None = None,
    impl: Impl | Choice = "auto",
    block: int = mosaic.BLOCK,
    by_row: Sequence[bool] = (),
) -> Updated:
    """Updates all leaves of trees by a rule, with as few kernels as possible.

    A leaf whose size is not a multiple of 128 is updated separately, by `update`; for an update by
    rows, the size of a row counts. Inside a `jax.jit` that donates the arrays, they change in
    place.

    Args:
      rule: update formula, such as `optimizers.ADAMW`.
      updated, read: trees of one structure; leaves may have different shapes and dtypes.
      scalars: an instance of `rule.scalars` for all leaves; or a list with one instance per leaf,
        in the order of `jax.tree.leaves`. The kernel reads scalars as data, so that they may differ
        between leaves.
      out_dtypes, impl, block: the arguments of `update.update`.
      seeds: random seeds, uint32 [number of leaves, 2]; None rounds to nearest.
      by_row: for each leaf, whether it is updated by rows, as in `update.update`; () for none.

    Returns:
      Trees, in the order that donation needs (see `update.update_trees`). Each of `sums` is float32
      with one number per leaf, or per row of a leaf updated by rows, leaf after leaf.

    Raises:
      TypeError, ValueError: leaves do not match the rule, the scalars or the seeds.
      KernelUnavailable: the kernel was requested and cannot run on these devices.
    """
    leaves, structure = jax.tree.flatten(updated[0] if updated else read[0])
    columns = [tuple(structure.flatten_up_to(tree)) for tree in (*updated, *read)]
    rows = [tuple(row) for row in zip(*columns, strict=True)]
    each = [scalars] * len(leaves) if isinstance(scalars, rule.scalars) else list(scalars)
    has_rows = tuple(by_row) or (False,) * len(leaves)
    _check_numbers(rule, len(leaves), each, has_rows, seeds)
    for row, one, with_rows in zip(rows, each, has_rows, strict=True):
        old, others = row[: len(updated)], row[len(updated) :]
        check_arrays(rule, old, others, seeds, out_dtypes, scalars=one, by_row=with_rows)
    choice = choose(impl, kernel=rule.name) if isinstance(impl, str) else impl
    packed, where = pack_scalars(
        each, [len(row[0]) if one else 1 for row, one in zip(rows, has_rows, strict=True)]
    )
    static = (rule, choice.implementation, tuple(out_dtypes), block, where, has_rows)
    found, sums = _update_many(static, tuple(rows), packed, seeds)

    def trees(start: int, stop: int) -> tuple[Any, ...]:
        return tuple(structure.unflatten([row[k] for row in found]) for k in range(start, stop))

    count = len(updated)
    return Updated(trees(0, count), trees(count, count + len(out_dtypes)), sums)


def _check_numbers(
    rule: Rule, count: int, scalars: Sequence[Any], by_row: Sequence[bool], seeds: Any
) -> None:
    if len(scalars) != count:
        raise ValueError(
            f"{rule.name}: {len(scalars)} sets of scalars for {count} leaves; give one for each "
            f"leaf, or one {rule.scalars.__name__} for all"
        )
    if len(by_row) != count:
        raise ValueError(
            f"{rule.name}: by_row has {len(by_row)} entries, but there are {count} leaves; give "
            "one boolean for each, or () for none"
        )
    if seeds is not None and seeds.shape != (count, 2):
        raise ValueError(
            f"{rule.name}: seeds have shape {seeds.shape}, but for {count} leaves "
            f"they must have shape {(count, 2)}"
        )


# Jitted for the reason given in `update`: equal lists of leaves are traced and lowered once.
@functools.partial(jax.jit, static_argnums=0)
def _update_many(
    static: tuple[Any, ...], rows: tuple[Any, ...], packed: jax.Array, seeds: Any
) -> tuple[list[Any], tuple[jax.Array, ...]]:
    """Runs all kernels; returns ([(*updated, *outputs) of each leaf], the sums of all leaves)."""
    rule, implementation, out_dtypes, block, where, by_row = static
    interpret = implementation == "interpret"
    found: list[Any] = [None] * len(rows)
    in_kernels: list[Entry] = []
    if implementation != "xla":
        in_kernels = _entries(rule, rows, where, by_row, block)
    apart: dict[int, Any] = {}
    for leaf in sorted(set(range(len(rows))) - {entry.leaf for entry in in_kernels}):
        row, scalars = rows[leaf], _scalars_at(rule, packed, where[leaf], rows[leaf][0])
        run = reference_update
        if implementation != "xla":
            run = functools.partial(mosaic.fused_update, interpret=interpret)
        result = run(
            rule,
            row[: rule.num_updated],
            row[rule.num_updated :],
            scalars,
            out_dtypes=out_dtypes,
            seed=None if seeds is None else seeds[leaf],
            by_row=by_row[leaf],
        )
        found[leaf], apart[leaf] = (*result.updated, *result.outputs), result.sums
    arrays = rule.num_updated + rule.num_read + len(out_dtypes)
    tables, partial = tables_of(in_kernels, arrays=arrays), []
    for table in tables:
        results, left = _run(rule, table, rows, packed, seeds, out_dtypes, interpret=interpret)
        partial += left
        for entry, result in zip(table, results, strict=True):
            found[entry.leaf] = result
    if not rule.num_sums:
        return found, ()
    return found, _sums_of(rule, tables, partial, apart, interpret=interpret)


def _entries(
    rule: Rule,
    rows: Sequence[Any],
    where: Sequence[ScalarsAt],
    by_row: Sequence[bool],
    block: int,
) -> list[Entry]:
    """Lists the leaves that one kernel can update together: those without a tail."""
    entries = []
    for leaf, row in enumerate(rows):
        cut = {"block": block, "loops": rule.num_sums > 0}
        shape, size = row[0].shape, row[0].size
        has_rows = by_row[leaf]
        tiles = mosaic.tiles_of_rows(shape, **cut) if has_rows else mosaic.tiles_of(size, **cut)
        if tiles.rows and not tiles.tail:
            entries.append(Entry(leaf, tiles, where[leaf]))
    return entries


def _scalars_at(rule: Rule, packed: jax.Array, where: ScalarsAt, leaf: Any) -> Any:
    """Returns the scalars of one leaf."""
    rows = slice(where.first, where.first + len(leaf)) if where.by_row else where.first
    return rule.scalars(*(packed[rows, k] for k in range(len(rule.scalars._fields))))


def _run(
    rule: Rule,
    table: Table,
    rows: Sequence[Any],
    packed: jax.Array,
    seeds: Any,
    out_dtypes: Sequence[Any],
    *,
    interpret: bool,
) -> tuple[list[Any], list[jax.Array]]:
    """Runs one kernel; returns (*updated, *outputs) for each entry, and the partial sums."""
    views = [(entry.tiles.rows, entry.tiles.block) for entry in table]
    leaves = [[x.reshape(v) for x in rows[e.leaf]] for e, v in zip(table, views, strict=True)]
    refs = [[jax.new_ref(x) for x in leaf[: rule.num_updated]] for leaf in leaves]
    others = [leaf[rule.num_updated :] for leaf in leaves]
    programs = sum(entry.programs for entry in table)
    arrays = [[jax.ShapeDtypeStruct(view, dtype) for dtype in out_dtypes] for view in views]
    width = totals.width_of(programs)
    partial = [jax.ShapeDtypeStruct((rule.num_sums * width,), jnp.float32)] * (rule.num_sums > 0)
    kernel = kernel_of(
        _body(rule, table, width, num_outputs=len(out_dtypes), has_seeds=seeds is not None),
        programs,
        name=f"{rule.name}_many",
        out_type=(*itertools.chain(*arrays), *partial),
        has_barriers=rule.num_sums > 0,
        interpret=interpret,
    )
    more = [packed.reshape(-1)] + ([] if seeds is None else [seeds.reshape(-1)])
    results = kernel(*itertools.chain(*refs), *itertools.chain(*others), *more)
    found = []
    for number, (entry, leaf) in enumerate(zip(table, refs, strict=True)):
        new = results[number * len(out_dtypes) : (number + 1) * len(out_dtypes)]
        shape = rows[entry.leaf][0].shape
        found.append(tuple(x.reshape(shape) for x in (*map(jax.freeze, leaf), *new)))
    return found, list(results[len(table) * len(out_dtypes) :])


def _sums_of(
    rule: Rule,
    tables: Sequence[Table],
    partial: Sequence[jax.Array],
    apart: dict[int, Any],
    *,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """Computes, for each of the rule's sums, float32 [leaves and rows], leaf after leaf."""
    parts = {
        entry.leaf: [totals.Part(kernel, *part) for part in entry.parts]
        for kernel, table in enumerate(tables)
        for entry in table
    }
    in_order = [part for leaf in sorted(parts) for part in parts[leaf]]
    sums: tuple[jax.Array, ...] = ()
    if in_order:
        sums = totals.total(partial, in_order, rule.num_sums, interpret=interpret)
    if not apart:
        return sums

    def joined(number: int) -> jax.Array:
        pieces, start = [], 0
        for leaf in range(len(parts) + len(apart)):
            if leaf in apart:
                pieces.append(apart[leaf][number].reshape(-1))
                continue
            pieces.append(sums[number][start : start + len(parts[leaf])])
            start += len(parts[leaf])
        return jnp.concatenate(pieces)

    return tuple(map(joined, range(rule.num_sums)))


def _body(rule: Rule, table: Table, width: int, *, num_outputs: int, has_seeds: bool) -> Any:
    """Builds the function of one program of Refs: updated, read, scalars, seeds, outputs, sums."""
    fields = len(rule.scalars._fields)

    def body(*refs: Any) -> None:
        rest = iter(refs)

        def take(number: int) -> list[Any]:
            return list(itertools.islice(rest, number))

        updated = [take(rule.num_updated) for _ in table]
        read = [take(rule.num_read) for _ in table]
        (scalar_ref,), seed_refs = take(1), take(int(has_seeds))
        outputs = [take(num_outputs) for _ in table]
        partial = take(int(rule.num_sums > 0))
        program = lax.axis_index("program")
        first = row_of_scalars(table, program) * fields
        numbers = [scalar_ref[first + k] for k in range(fields)]

        def share(block: int) -> Any:
            return rule.scalars(*(mosaic.spread(x, block) for x in numbers))

        def leaf(number: int, scalars: Any) -> tuple[Any, ...]:
            entry = table[number]
            words = [seed_refs[0][2 * entry.leaf + k] for k in range(2)] if has_seeds else None
            return mosaic.update_tiles(
                rule,
                entry.tiles,
                program - entry.start,
                (updated[number], read[number], outputs[number]),
                scalars=scalars,
                seed=words,
            )

        sums = find_leaf(table, program, leaf, share)
        for number, total in enumerate(sums):
            partial[0][number * width + program] = total

    return body
