"""Chooses the parameters that each node gathers within itself from secondary shards (hpZ of
ZeRO++).

ZeRO++ (Wang et al. 2023, arXiv:2306.10209, section 3.2) stores a second copy of the weights in each
node. Here the copy is a value inside the step, so it is never saved, restored or outdated, because
weights do not change within a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax.sharding import AbstractMesh, Mesh

from zerojax.config import MeshConfig
from zerojax.placement.device_mesh import state_axes
from zerojax.placement.leaf_placement import LeafPlacement
from zerojax.placement.table import Placement
from zerojax.plan.gradient_wire import shards_in_node
from zerojax.plan.refusals import check_no_other_way
from zerojax.tracing import trees

_ASKED = "wire.secondary=true"


def check_secondary(settings: MeshConfig, mesh: Mesh | AbstractMesh) -> None:
    """Raises if `wire.secondary` has no effect or conflicts with other settings.

    Raises:
      ValueError: the message states the setting to change.
    """
    if not settings.wire.secondary:
        return
    if settings.zero != 3:
        raise ValueError(
            f"{_ASKED} needs weights that are gathered on use (in each layer), but "
            f"zero={settings.zero} gathers "
            "none on use; use zero=3, or wire.secondary=false"
        )
    check_no_other_way(_ASKED, "gathers weights", settings, mesh)
    over = state_axes(mesh.shape)
    shards = 1
    for axis in over:
        shards *= mesh.shape[axis]
    members = shards_in_node(mesh, over, settings.node)
    if members == shards:
        raise ValueError(
            f"{_ASKED} needs shards in several nodes, but all {shards} are in one node; use "
            "wire.secondary=false, or set mesh.node to the number of devices in a node"
        )
    if members == 1:
        raise ValueError(
            f"{_ASKED} needs the same number of shards in each node, at least 2, but the {shards} "
            f"over {' x '.join(over)} are distributed differently; use wire.secondary=false, or "
            "set mesh.node to the number of devices in a node"
        )


def with_secondary(
    placement: Placement, settings: MeshConfig, mesh: Mesh | AbstractMesh
) -> Placement:
    """Sets `node_shards` in the placement table for the parameters that each node gathers within
    itself."""
    if not settings.wire.secondary:
        return placement

    def placed(leaf: LeafPlacement) -> LeafPlacement:
        if not leaf.access.gathers_on_use:
            return leaf
        members = shards_in_node(mesh, leaf.zero_axes, settings.node)
        return dataclasses.replace(leaf, node_shards=members)

    leaves = {name: placed(leaf) for name, leaf in placement.leaves.items()}
    return dataclasses.replace(placement, leaves=leaves)


def describe_secondary(settings: MeshConfig, placement: Placement) -> Sequence[str]:
    """Describes which parameters each node gathers within itself, and which it does not."""
    if not settings.wire.secondary:
        return []
    leaves = placement.leaves.values()
    found = [leaf for leaf in leaves if leaf.node_shards is not None]
    if not found:
        return [f"{_ASKED} has no effect: no parameter is gathered on use"]
    members, shards = found[0].node_shards, placement.num_shards(found[0])
    assert members is not None
    elements = sum(trees.num_elements(leaf.shape) for leaf in found)
    return [
        f"{_ASKED}: {len(found)} of {len(leaves)} parameters ({elements:,} elements) are fetched "
        f"from the other {shards // members - 1} nodes once per step and gathered by the {members} "
        f"shards of a node at each use; during a step a device stores 1/{members} of them and of "
        f"their gradients, not 1/{shards}; results are identical"
    ]
