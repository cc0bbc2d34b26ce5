"""Chooses the weights that are sent as quantized codes, and the copies that devices store for this;
raises for unsupported settings.

int8 is qwZ of ZeRO++ (Wang et al. 2023, arXiv:2306.10209, section 3.1). Master weights stay exact.
The weights that forward and backward read differ from them by at most half a quantization step of
their block, and the gradient is computed as if they were exact.

With delta_int8 and delta_int4 every device stores a copy of the weights, bit-equal on all devices,
and each step sends the code of the difference (master weight rounded to the copy's dtype) - copy.
The error of a code is part of the next difference, so no residual is stored. The copy has the
compute dtype, because that is the dtype in which weights are read; float32 would take 4 bytes per
parameter and one more cast. The master weight is rounded first; otherwise the rounding of a block's
largest weight would be a difference in every step and would enlarge the quantization step of the
block's small weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

from zerojax.config import MeshConfig
from zerojax.optim import one_bit_of
from zerojax.optim.precision import Precision
from zerojax.optim.wire_codes import BLOCKS, WireCodes
from zerojax.placement.device_mesh import EXPERT, STAGE
from zerojax.placement.leaf_placement import LeafPlacement
from zerojax.placement.optional_parts import followed_leaves
from zerojax.placement.table import Placement
from zerojax.plan.refusals import check_no_other_way
from zerojax.tracing import trees
from zerojax.tracing.trees import format_bytes

_ASKED = "wire.weights=int8"
DELTA_BITS = {"delta_int8": 8, "delta_int4": 4}
"""{value of `wire.weights`: number of bits of the code of a difference}."""


def check_weight_wire(
    settings: MeshConfig, mesh: Mesh | AbstractMesh, tx: optax.GradientTransformation
) -> None:
    """Raises if `wire.weights` has no effect or conflicts with other settings.

    Raises:
      ValueError: the message states the setting to change.
    """
    if settings.wire.weights in DELTA_BITS:
        _check_deltas(settings, mesh, tx)
    if settings.wire.weights != "int8":
        return
    if settings.zero == 0:
        raise ValueError(
            f"{_ASKED} needs sharded weights, but zero=0 gathers none; use zero=1, 2 or "
            "3, or wire.weights=compute"
        )
    check_no_other_way(_ASKED, "gathers weights", settings, mesh)


def _check_deltas(
    settings: MeshConfig, mesh: Mesh | AbstractMesh, tx: optax.GradientTransformation
) -> None:
    asked = f"wire.weights={settings.wire.weights}"
    if settings.zero == 0:
        raise ValueError(
            f"{asked} needs sharded weights, but zero=0 gathers none; use zero=1 or 2, "
            "or wire.weights=compute"
        )
    if settings.zero == 3:
        raise ValueError(
            f"{asked} needs a copy of the weights on every device, but zero=3 stores none; "
            "use zero=1 or 2, or wire.weights=int8"
        )
    others = {
        f"deterministic={settings.deterministic}": settings.deterministic is not None,
        "offload": not settings.offload.is_off,
        f"stage={mesh.shape[STAGE]}": mesh.shape[STAGE] > 1,
        f"expert={mesh.shape[EXPERT]}": mesh.shape[EXPERT] > 1,
        "1-bit Adam": one_bit_of(tx) is not None,
    }
    for other, is_there in others.items():
        if is_there:
            raise ValueError(
                f"{asked} with {other} is not supported, because this combination is not tested; "
                "leave one of them out"
            )


def with_weight_wire(placement: Placement, settings: MeshConfig, precision: Precision) -> Placement:
    """Marks the weights in the placement table that are sent as quantized codes.

    They are all weights for which codes are smaller than values in the compute dtype, except names
    that `wire.exact` matches and, for codes of changes, frozen parameters, which do not change.
    """
    deltas = settings.wire.weights in DELTA_BITS
    if settings.wire.weights != "int8" and not deltas:
        return placement
    exact = trees.match_names(placement.leaves, settings.wire.exact, option="wire.exact")
    codes = WireCodes(DELTA_BITS.get(settings.wire.weights, 8))
    itemsize = jnp.dtype(precision.compute_dtype).itemsize

    def wired(leaf: LeafPlacement) -> LeafPlacement:
        size = sent_elements(placement, leaf)
        gathered = leaf.access.is_gathered and leaf.codes is None and leaf.name not in exact
        if not gathered or codes.num_bytes(size) >= size * itemsize:
            return leaf
        if deltas:
            return leaf if leaf.frozen else dataclasses.replace(leaf, delta_codes=codes)
        return dataclasses.replace(leaf, wire_codes=codes)

    leaves = {name: wired(leaf) for name, leaf in placement.leaves.items()}
    return dataclasses.replace(placement, leaves=leaves)


def sent_elements(placement: Placement, leaf: LeafPlacement) -> int:
    """Returns the number of elements that a device sends in one all-gather: its shard of the layers
    that are gathered together."""
    at_once = leaf.access.gathers_on_use and leaf.node_shards is None
    return placement.shard_elements(leaf) // (leaf.num_slices if at_once else 1)


def _describe_deltas(
    settings: MeshConfig, placement: Placement, precision: Precision
) -> Sequence[str]:
    asked, coded = f"wire.weights={settings.wire.weights}", followed_leaves(placement)
    if not coded:
        return [f"{asked} has no effect: no all-gather would send fewer bytes"]
    bits = DELTA_BITS[settings.wire.weights]
    dtype, kept = jnp.dtype(precision.compute_dtype), 0
    for leaf in coded.values():
        split = math.prod(placement.axis_sizes[axis] for axis in leaf.axes if axis is not None)
        kept += math.prod(leaf.shape) // split * dtype.itemsize
    leaves = placement.leaves.values()
    others = sum(math.prod(leaf.shape) for leaf in leaves if leaf.delta_codes is None)
    return [
        f"{asked}: every device stores {len(coded)} of {len(leaves)} parameters in {dtype.name} "
        f"({format_bytes(kept)}), bit-equal on all devices; their difference to the master "
        "weights is sent "
        f"once per step as integers of {bits} bits with one scale per {BLOCKS[bits]} values, "
        "and the rounding error "
        "is part of the next difference; losses are close to those of exact weights, not equal; "
        f"{others:,} elements are sent unquantized"
    ]


def describe_weight_wire(
    settings: MeshConfig, placement: Placement, precision: Precision
) -> Sequence[str]:
    """Describes which weights are sent as quantized codes, and which are not."""
    if settings.wire.weights in DELTA_BITS:
        return _describe_deltas(settings, placement, precision)
    if settings.wire.weights != "int8":
        return []
    leaves = placement.leaves.values()
    coded = [leaf for leaf in leaves if leaf.wire_codes is not None]
    if not coded:
        return [f"{_ASKED} has no effect: no all-gather would send fewer bytes"]
    others = sum(math.prod(leaf.shape) for leaf in leaves if leaf.wire_codes is None)
    between = any(leaf.node_shards is not None for leaf in coded)
    where = "fetched from other nodes" if between else "gathered"
    return [
        f"{_ASKED}: {len(coded)} of {len(leaves)} parameters are {where} as integers of 8 bits "
        f"with one scale per {BLOCKS[8]} values; master weights are exact, losses are close to "
        "those of exact "
        f"weights, not equal; {others:,} elements are sent unquantized"
    ]
