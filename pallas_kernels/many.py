"""One kernel for many leaves: each leaf has its own Refs, selected by a branch."""

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
from pallas_kernels.choice import Choice, Impl, choose
from pallas_kernels.elementwise import Rule, Updated, check_arrays, reference_update

MAX_PARAMETERS = 480
"""Arrays of one kernel: their addresses are its parameters, and 4096 bytes are what any driver
takes. GPT-2's 148 leaves of 5 arrays are then two kernels."""
BRANCHES = 16
"""Ways that one branch has. Wider ones cost comparisons, deeper ones time: JAX (0.12) lowers the
first way of each branch twice."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One leaf of a kernel's table.

    Attributes:
      leaf: its number in the call.
      tiles: how it is cut; never with a tail.
      scalars: number of the set of scalars that it is given.
      start: number of its first program.
    """

    leaf: int
    tiles: mosaic.Tiles
    scalars: int
    start: int

    @property
    def programs(self) -> int:
        return self.tiles.rows // self.tiles.loop

    @property
    def kind(self) -> tuple[int, int]:
        """What leaves have in common that share their scalars as blocks."""
        return self.tiles.block, self.scalars


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
) -> Updated:
    """Updates all leaves of trees with as few kernels as can be.

    A leaf of a size that 128 does not divide is updated on its own, as by `update`. As there,
    arrays change in place inside a `jax.jit` that donates them.

    Args:
      rule: such as `optimizers.ADAMW`.
      updated, read: trees of one structure; each leaf of its own shape and dtypes.
      scalars: an instance of `rule.scalars` for all leaves; or a list of them, one per leaf in the
        order of `jax.tree.leaves`. Leaves given the same object (decayed ones, and others) share
        code: make as few as there are kinds of leaves.
      out_dtypes, impl, block: as in `update.update`.
      seeds: uint32[number of leaves, 2], or None to round to nearest.

    Returns:
      Trees, in the order of donation (see `update.update_trees`). Each of `sums` is
      float32[number of leaves].

    Raises:
      TypeError, ValueError: leaves that do not fit the rule, the scalars or the seeds.
      KernelUnavailable: the kernel was asked for and cannot run here.
    """
    leaves, structure = jax.tree.flatten(updated[0] if updated else read[0])
    columns = [tuple(structure.flatten_up_to(tree)) for tree in (*updated, *read)]
    rows = [tuple(row) for row in zip(*columns, strict=True)]
    sets, which = _sets_of(rule, scalars, len(leaves))
    if seeds is not None and seeds.shape != (len(leaves), 2):
        raise ValueError(
            f"{rule.name}: seeds of shape {seeds.shape} for {len(leaves)} leaves; "
            f"they are of shape {(len(leaves), 2)}"
        )
    for row, number in zip(rows, which, strict=True):
        old, others = row[: len(updated)], row[len(updated) :]
        check_arrays(rule, old, others, seeds, out_dtypes, scalars=sets[number])
    choice = choose(impl, kernel=rule.name) if isinstance(impl, str) else impl
    static = (rule, choice.implementation, tuple(out_dtypes), block, which)
    found, sums = _update_many(static, tuple(rows), tuple(map(tuple, sets)), seeds)

    def trees(start: int, stop: int) -> tuple[Any, ...]:
        return tuple(structure.unflatten([row[k] for row in found]) for k in range(start, stop))

    count = len(updated)
    return Updated(trees(0, count), trees(count, count + len(out_dtypes)), sums)


def _sets_of(rule: Rule, scalars: Any, count: int) -> tuple[list[Any], tuple[int, ...]]:
    """(the different sets of scalars, for each leaf the number of its own)."""
    if isinstance(scalars, rule.scalars):
        return [scalars], (0,) * count
    if len(scalars) != count:
        raise ValueError(f"{rule.name}: {len(scalars)} sets of scalars for {count} leaves")
    numbers: dict[int, int] = {}
    which = tuple(numbers.setdefault(id(one), len(numbers)) for one in scalars)
    return [scalars[which.index(number)] for number in range(len(numbers))], which


# Jitted as in `update`: equal lists of leaves are traced and lowered once.
@functools.partial(jax.jit, static_argnums=0)
def _update_many(
    static: tuple[Any, ...], rows: tuple[Any, ...], sets: tuple[Any, ...], seeds: Any
) -> tuple[list[Any], tuple[jax.Array, ...]]:
    """([(*updated, *outputs) of each leaf], the sums of all)."""
    rule, implementation, out_dtypes, block, which = static
    packed = jnp.stack([jnp.asarray(x, jnp.float32) for one in sets for x in one])
    found: list[Any] = [None] * len(rows)
    sums: list[Any] = [None] * len(rows)
    in_kernels, apart = [], range(len(rows))
    if implementation != "xla":
        in_kernels, apart = _split(rule, rows, which, block)
    for leaf in apart:
        one = _one_leaf(rule, implementation, rows[leaf], sets[which[leaf]])
        seed = None if seeds is None else seeds[leaf]
        result = one(out_dtypes=out_dtypes, seed=seed)
        found[leaf], sums[leaf] = (*result.updated, *result.outputs), result.sums
    per_leaf = max(1, MAX_PARAMETERS // (rule.num_updated + rule.num_read + len(out_dtypes)))
    for first in range(0, len(in_kernels), per_leaf):
        table = _table(in_kernels[first : first + per_leaf])
        results, partial = _run(
            rule, table, rows, packed, seeds, out_dtypes, interpret=implementation == "interpret"
        )
        for entry, result, total in zip(table, results, partial, strict=True):
            found[entry.leaf], sums[entry.leaf] = result, total
    return found, tuple(jnp.stack(column) for column in zip(*sums, strict=True))


def _one_leaf(rule: Rule, implementation: str, row: Any, scalars: Any) -> Callable[..., Updated]:
    old, others = row[: rule.num_updated], row[rule.num_updated :]
    if implementation == "xla":
        return functools.partial(reference_update, rule, old, others, scalars)
    interpret = implementation == "interpret"
    return functools.partial(mosaic.fused_update, rule, old, others, scalars, interpret=interpret)


def _split(
    rule: Rule, rows: Sequence[Any], which: Sequence[int], block: int
) -> tuple[list[Entry], list[int]]:
    """(leaves for tables, those that share scalars beside each other; leaves apart)."""
    entries, apart = [], []
    for leaf, row in enumerate(rows):
        tiles = mosaic.tiles_of(row[0].size, block=block, loops=rule.num_sums > 0)
        if tiles.tail or not tiles.rows:
            apart.append(leaf)
        else:
            entries.append(Entry(leaf, tiles, which[leaf], 0))
    return sorted(entries, key=lambda entry: entry.kind), apart


def _table(entries: Sequence[Entry]) -> list[Entry]:
    starts = itertools.accumulate((entry.programs for entry in entries), initial=0)
    return [dataclasses.replace(e, start=s) for e, s in zip(entries, starts, strict=False)]


def _run(
    rule: Rule,
    table: Sequence[Entry],
    rows: Sequence[Any],
    packed: jax.Array,
    seeds: Any,
    out_dtypes: Sequence[Any],
    *,
    interpret: bool,
) -> tuple[list[Any], list[Any]]:
    """One kernel: for each entry (*updated, *outputs), and its sums."""
    from jax.experimental import pallas as pl  # as in `mosaic.run_on_tiles`
    from jax.experimental.pallas import mosaic_gpu as plgpu

    views = [(entry.tiles.rows, entry.tiles.block) for entry in table]
    leaves = [[x.reshape(v) for x in rows[e.leaf]] for e, v in zip(table, views, strict=True)]
    refs = [[jax.new_ref(x) for x in leaf[: rule.num_updated]] for leaf in leaves]
    others = [leaf[rule.num_updated :] for leaf in leaves]
    programs = sum(entry.programs for entry in table)
    arrays = [[jax.ShapeDtypeStruct(view, dtype) for dtype in out_dtypes] for view in views]
    partial = [jax.ShapeDtypeStruct((programs,), jnp.float32) for _ in range(rule.num_sums)]
    kernel: Any = pl.kernel(
        _body(rule, table, num_outputs=len(out_dtypes), has_seeds=seeds is not None),
        out_type=(*itertools.chain(*arrays), *partial),
        mesh=mosaic.mesh_of(programs),
        # Layouts are all written down. Inferring them for many leaves takes minutes (jax 0.12).
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=rule.num_sums == 0,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=mosaic.interpret_params() if interpret else False,
        name=f"{rule.name}_many",
    )
    more = [] if seeds is None else [seeds.reshape(-1)]
    results = kernel(*itertools.chain(*refs), *itertools.chain(*others), packed, *more)
    width = len(out_dtypes)
    found = []
    for number, (entry, leaf) in enumerate(zip(table, refs, strict=True)):
        new = results[number * width : (number + 1) * width]
        shape = rows[entry.leaf][0].shape
        found.append(tuple(x.reshape(shape) for x in (*map(jax.freeze, leaf), *new)))
    return found, _sums_of(table, results[len(table) * width :])


def _sums_of(table: Sequence[Entry], partial: Sequence[jax.Array]) -> list[Any]:
    """Each leaf's sums of its programs' numbers: one reduction for all leaves, not one for each."""
    if not partial:
        return [()] * len(table)
    starts = jnp.array([entry.start for entry in table], jnp.int32)[:, None]
    counts = jnp.array([entry.programs for entry in table], jnp.int32)[:, None]
    program = lax.iota(jnp.int32, partial[0].size)[None, :]
    is_own = (program >= starts) & (program < starts + counts)
    totals = [jnp.sum(jnp.where(is_own, x[None, :], 0.0), axis=1) for x in partial]
    return [tuple(total[k] for total in totals) for k in range(len(table))]


def _body(rule: Rule, table: Sequence[Entry], *, num_outputs: int, has_seeds: bool) -> Any:
    """The function of one program: refs of updated, read, scalars, seeds, outputs, sums."""
    count = len(table)

    def body(*refs: Any) -> None:
        rest = iter(refs)

        def take(number: int) -> list[Any]:
            return list(itertools.islice(rest, number))

        updated = [take(rule.num_updated) for _ in range(count)]
        read = [take(rule.num_read) for _ in range(count)]
        (scalar_ref,), seed_refs = take(1), take(int(has_seeds))
        outputs = [take(num_outputs) for _ in range(count)]
        sums = take(rule.num_sums)
        program = lax.axis_index("program")

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

        def kind(first: int, last: int) -> tuple[Any, ...]:
            block, scalars_number = table[first].kind
            offset = scalars_number * len(rule.scalars._fields)
            scalars = mosaic.spread_scalars(rule, scalar_ref, block, first=offset)
            cuts = list(range(first, last + 1))
            return _branch(table, program, cuts, lambda number, _: leaf(number, scalars))

        kinds = [k for k in range(count) if k == 0 or table[k].kind != table[k - 1].kind]
        for ref, total in zip(sums, _branch(table, program, [*kinds, count], kind), strict=True):
            ref[program] = total

    return body


def _branch(
    table: Sequence[Entry], program: Any, cuts: Sequence[int], run: Callable[[int, int], Any]
) -> Any:
    """Calls `run(first, last)` for those of the ranges between `cuts` to which the program belongs,
    through branches of at most `BRANCHES` ways."""
    ranges = len(cuts) - 1
    if ranges == 1:
        return run(cuts[0], cuts[1])
    ways = min(BRANCHES, ranges)
    ends = [ranges * way // ways for way in range(ways + 1)]
    later = [program >= table[cuts[end]].start for end in ends[1:-1]]
    number = functools.reduce(lambda a, b: a + b, [x.astype(jnp.int32) for x in later])

    def way(first: int, last: int) -> Callable[[], Any]:
        return lambda: _branch(table, program, cuts[first : last + 1], run)

    return lax.switch(number, [way(a, b) for a, b in itertools.pairwise(ends)])
