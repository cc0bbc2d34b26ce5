"""Initial values of slices in files: from new parameters, or from a whole state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from zerojax.config.offload import NVME
from zerojax.parallel.offload.disk import DiskLeaf, DiskState, Rows, Source, create_disk
from zerojax.plan.offload_layout import MASTER, SlicedLeaf
from zerojax.plan.plan import Plan
from zerojax.plan.slices import cut_leaf, map_moments
from zerojax.plan.state import TrainState


def fill_new_disk(plan: Plan, stored: Callable[[str], jax.Array]) -> DiskState:
    """A new store with the masters of new parameters and moments of zeros.

    Args:
      plan: with slices in files.
      stored: name -> the parameter as it is stored; called once for each, in turn.
    """

    def source_of(place: DiskLeaf) -> Source:
        arrays = {MASTER: stored(place.leaf.name)} if MASTER in place.dtypes else {}
        return array_source(plan, place, arrays)

    return filled_disk(plan, source_of)


def fill_disk(
    plan: Plan, stored: TrainState, before_commit: Callable[[DiskState], None]
) -> DiskState:
    """A new store with the slices of a state in one piece, as `plan.abstract_stored` has it.

    Args:
      plan: with slices in files.
      stored: the state.
      before_commit: called when all buckets were written, before they count.
    """
    assert plan.offload is not None
    arrays = arrays_of(plan, stored, plan.offload.on_disk)
    return filled_disk(
        plan, lambda place: array_source(plan, place, arrays[place.leaf.name]), before_commit
    )


def filled_disk(
    plan: Plan,
    source_of: Callable[[DiskLeaf], Source],
    before_commit: Callable[[DiskState], None] = lambda disk: None,
) -> DiskState:
    """A new store with the slices that `source_of` gives, see `DiskState.fill`."""
    disk = create_disk(plan)
    try:
        disk.fill(source_of, before_commit=lambda: before_commit(disk))
    except BaseException:
        disk.close()
        raise
    return disk


def array_source(plan: Plan, place: DiskLeaf, arrays: Mapping[str, jax.Array]) -> Source:
    """The slices in files of a parameter's arrays; zeros of those that are missing."""
    assert isinstance(plan.mesh, Mesh)
    mesh = plan.mesh
    rows = {name: cut_leaf(place.leaf, array, mesh)[1] for name, array in arrays.items()}
    first = place.leaf.first(NVME)

    def source(name: str, number: int) -> Rows | None:
        if name not in rows:
            return None
        return {device: slices[number - first] for device, slices in rows[name].items()}

    return source


def arrays_of(plan: Plan, state: Any, leaves: Sequence[SlicedLeaf]) -> dict[str, dict[str, Any]]:
    """{name of each of `leaves`: {array: its leaf}} of any tree with a state's structure."""
    layout = plan.offload
    assert layout is not None
    result: dict[str, dict[str, Any]] = {leaf.name: {} for leaf in leaves}
    masters = [name for name in layout.arrays if name == MASTER]

    def note(leaf: Any, number: int, moment: Any) -> None:
        if leaf.name in result:
            result[leaf.name][layout.arrays[len(masters) + number]] = moment

    if masters:
        for name, arrays in result.items():
            arrays[MASTER] = state["params"][name]
    map_moments(layout.leaves, note, state["opt_state"])
    return result
