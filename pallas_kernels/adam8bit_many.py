"""Runs AdamW with one-byte moments for many leaves in one kernel; `many` does so for plain
rules."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.adam8bit import Moments8bit, block_of, check_leaf
from pallas_kernels.adam8bit_kernel import (
    Adam8bitLeaf,
    check_options,
    frozen_leaf,
    scalars_of,
    update_adam8bit,
    update_block,
)
from pallas_kernels.choice import Choice, Impl, choose
from pallas_kernels.elementwise import check_seed
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


def update_adam8bit_many(
    params: Sequence[jax.Array],
    moments: Sequence[Moments8bit],
    grads: Sequence[jax.Array],
    *,
    scalars: Sequence[Any],
    seeds: jax.Array,
    compute_dtype: Any = None,
    averages: Sequence[jax.Array] | None = None,
    impl: Impl | Choice = "auto",
) -> list[Adam8bitLeaf]:
    """Updates leaves with as few kernels as possible, each as `update_adam8bit` does.

    A leaf that ends in a short block is updated separately.

    Args:
      params, moments, grads: arrays of each leaf.
      scalars: scalars of each leaf; the kernel reads them as data.
      seeds: random seeds, uint32 [leaves, 2].
      averages: moving average of each leaf's parameter, or None.
      compute_dtype: dtype of copies of the new parameters; None makes no copies.
      impl: requested implementation, see `choice.choose`.

    Raises:
      TypeError, ValueError: arrays do not belong to one leaf.
      KernelUnavailable: the kernel was requested and cannot run on these devices.
    """
    own = [None] * len(params) if averages is None else averages
    rows = list(zip(params, moments, grads, own, strict=True))
    check_seed("adam8bit", seeds, (len(rows), 2))
    for row, one in zip(rows, scalars, strict=True):
        check_leaf(*row)
        check_options(one, compute_dtype, averages=averages is not None)
    choice = choose(impl, kernel="adam8bit") if isinstance(impl, str) else impl
    if choice.implementation == "xla":
        pairs = zip(rows, scalars, seeds, strict=True)
        more = {"compute_dtype": compute_dtype, "impl": choice}
        return [
            update_adam8bit(*row[:3], average=row[3], scalars=one, seed=seed, **more)
            for row, one, seed in pairs
        ]
    packed, where = pack_scalars(scalars, [1] * len(rows))
    static = (choice, compute_dtype, where, scalars_of(averages is not None))
    return _update_many(static, tuple(rows), packed, seeds)


@functools.partial(jax.jit, static_argnums=0)  # for the reason given in `update`
def _update_many(
    static: tuple[Any, ...], rows: tuple[Any, ...], packed: jax.Array, seeds: jax.Array
) -> list[Adam8bitLeaf]:
    choice, compute_dtype, where, kind = static
    found: list[Any] = [None] * len(rows)
    entries = _entries(rows, where)
    for leaf in sorted(set(range(len(rows))) - {entry.leaf for entry in entries}):
        *row, average = rows[leaf]
        scalars = kind(*(packed[where[leaf].first, k] for k in range(len(kind._fields))))
        more = {"scalars": scalars, "seed": seeds[leaf], "compute_dtype": compute_dtype}
        found[leaf] = update_adam8bit(*row, **more, average=average, impl=choice)
    averages = bool(rows) and rows[0][3] is not None
    arrays = 6 + averages + (compute_dtype is not None)
    for table in tables_of(entries, arrays=arrays):
        interpret = choice.implementation == "interpret"
        results = _run(table, rows, packed, seeds, (kind, compute_dtype), interpret=interpret)
        for entry, result in zip(table, results, strict=True):
            found[entry.leaf] = result
    return found


def _entries(rows: Sequence[Any], where: Sequence[ScalarsAt]) -> list[Entry]:
    """Lists the leaves without a short last block, which one kernel can update together."""
    entries = []
    for leaf, (param, *_) in enumerate(rows):
        block = block_of(param.size)
        if param.size and param.size % block == 0:
            entries.append(Entry(leaf, mosaic.Tiles(block, param.size // block, 1, 0), where[leaf]))
    return entries


def _run(
    table: Table,
    rows: Sequence[Any],
    packed: jax.Array,
    seeds: jax.Array,
    kinds: tuple[Any, Any],
    *,
    interpret: bool,
) -> list[Adam8bitLeaf]:
    """Runs one kernel for all entries; `kinds`: (class of the scalars, dtype of copies or None)."""
    kind, compute_dtype = kinds
    refs, grads, outputs = [], [], []
    for entry in table:
        param, moments, grad, average = rows[entry.leaf]
        view = (entry.tiles.rows, entry.tiles.block)
        whole = [x.reshape(view) for x in (param, moments.mu, moments.nu)]
        state = [*whole, moments.mu_scale, moments.nu_scale]
        state += [] if average is None else [average.reshape(view)]
        refs.append([jax.new_ref(x) for x in state])
        grads.append(grad.reshape(view))
        if compute_dtype is not None:
            outputs.append(jax.ShapeDtypeStruct(view, compute_dtype))
    kernel = kernel_of(
        _body(table, len(refs[0]), kind, has_output=compute_dtype is not None),
        sum(entry.programs for entry in table),
        name="adam8bit_many",
        out_type=tuple(outputs),
        has_barriers=True,
        interpret=interpret,
    )
    copies = kernel(*itertools.chain(*refs), *grads, packed.reshape(-1), seeds.reshape(-1))
    found = []
    for number, (entry, of_leaf) in enumerate(zip(table, refs, strict=True)):
        shape = rows[entry.leaf][0].shape
        compute = copies[number].reshape(shape) if outputs else None
        found.append(frozen_leaf(of_leaf, shape, compute))
    return found


def _body(table: Table, each: int, kind: Any, *, has_output: bool) -> Any:
    """Builds the kernel's function of Refs: state, gradients, scalars, seeds, outputs.

    Args:
      table: leaves of the kernel.
      each: number of Refs of one leaf's state.
      kind: class of the scalars.
    """
    fields = len(kind._fields)

    def body(*refs: Any) -> None:
        count = len(table)
        state = [refs[each * k : each * (k + 1)] for k in range(count)]
        grads, rest = refs[each * count : (each + 1) * count], refs[(each + 1) * count :]
        scalar_ref, seed_ref, *outputs = rest
        program = lax.axis_index("program")
        first = row_of_scalars(table, program) * fields
        scalars = kind(*(scalar_ref[first + k] for k in range(fields)))

        def leaf(number: int, _: Any) -> tuple[()]:
            entry = table[number]
            update_block(
                entry.tiles,
                program - entry.start,
                ((*state[number], grads[number]), outputs[number] if has_output else None),
                scalars=scalars,
                seed=(seed_ref[2 * entry.leaf], seed_ref[2 * entry.leaf + 1]),
            )
            return ()

        find_leaf(table, program, leaf, lambda block: None)

    return body
