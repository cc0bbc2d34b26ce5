"""Abstract state of a plan with offload, and the memory kind of its canonical form."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from zerojax.config.offload import DEVICE
from zerojax.optim.precision import Precision
from zerojax.plan.offload_layout import OffloadLayout, SlicedLeaf
from zerojax.plan.slices import abstract_tiers, map_moments, on_host
from zerojax.plan.state import TrainState


def abstract_offloaded(
    stored: TrainState, layout: OffloadLayout, precision: Precision
) -> TrainState:
    """The state as it is with offload.

    Args:
      stored: what it would be with everything on the device, in one piece.
      layout: what lies where.
      precision: the dtype in which weights are read.

    Returns:
      `ShapeDtypeStruct`s; slices in files are nowhere in it.
    """
    mesh = next(iter(stored["params"].values())).sharding.mesh
    result = stored.copy()
    result["params"] = {
        name: _working(x, name, layout, precision) for name, x in stored["params"].items()
    }
    masters = layout.leaves if precision.has_masters else {}
    result["masters"] = {
        name: abstract_tiers(leaf, stored["params"][name].dtype, mesh)
        for name, leaf in masters.items()
    }

    result["opt_state"] = map_moments(
        layout.leaves,
        lambda leaf, _, moment: abstract_tiers(leaf, moment.dtype, mesh),
        stored["opt_state"],
    )
    result["disk"] = {}
    return result


def _working(
    x: jax.ShapeDtypeStruct, name: str, layout: OffloadLayout, precision: Precision
) -> jax.ShapeDtypeStruct:
    """What forward and backward read of a parameter."""
    if name not in layout.leaves:
        return x
    dtype = jnp.dtype(precision.compute_dtype) if precision.has_masters else x.dtype
    sharding = on_host(x.sharding) if name in layout.streamed else x.sharding
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding)


def canonical_on_host(canonical: TrainState, layout: OffloadLayout) -> TrainState:
    """The canonical form with everything on the host that does not all fit on the device."""

    def place(leaf: SlicedLeaf, _: int, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if leaf.counts[DEVICE] == leaf.num_slices:
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_host(x.sharding))

    result = canonical.copy()
    result["params"] = map_moments(layout.leaves, place, canonical["params"])
    result["opt_state"] = map_moments(layout.leaves, place, canonical["opt_state"])
    return result
