"""Secondary shards (hpZ): which parameters a node gathers by itself, from what it has for a step.

ZeRO++ (Wang et al. 2023, arXiv:2306.10209, section 3.2) keeps a second copy of the weights in each
node. Here it is a value of the step, which nothing saves, restores or forgets to renew: weights do
not change inside of a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax.sharding import AbstractMesh, Mesh

from zerojax.config import MeshConfig
from zerojax.models import trees
from zerojax.plan.device_mesh import state_axes
from zerojax.plan.gradient_wire import shards_in_node
from zerojax.plan.leaf_placement import Access, LeafPlacement
from zerojax.plan.placement import Placement
from zerojax.plan.refusals import check_no_other_way

_ASKED = "wire.secondary=true"


def check_secondary(settings: MeshConfig, mesh: Mesh | AbstractMesh) -> None:
    """Refuses secondary shards where nodes gather nothing, or in ways of their own.

    Raises:
      ValueError: with what to change.
    """
    if not settings.wire.secondary:
        return
    if settings.zero != 3:
        raise ValueError(
            f"{_ASKED} is for weights that are gathered where they are read, and with "
            f"zero={settings.zero} none is; use zero=3, or wire.secondary=false"
        )
    check_no_other_way(_ASKED, "gathers weights", settings, mesh)
    over = state_axes(mesh.shape)
    shards = 1
    for axis in over:
        shards *= mesh.shape[axis]
    members = shards_in_node(mesh, over, settings.node)
    if members == shards:
        raise ValueError(
            f"{_ASKED} is for shards in several nodes, and all {shards} are in one node; use "
            "wire.secondary=false, or say with mesh.node how many devices a node has"
        )
    if members == 1:
        raise ValueError(
            f"{_ASKED} needs the same number of shards in each node, at least 2, and the {shards} "
            f"over {' x '.join(over)} do not lie so; use wire.secondary=false, or say with "
            "mesh.node how many devices a node has"
        )


def with_secondary(
    placement: Placement, settings: MeshConfig, mesh: Mesh | AbstractMesh
) -> Placement:
    """The placement with what each node gathers by itself."""
    if not settings.wire.secondary:
        return placement

    def placed(leaf: LeafPlacement) -> LeafPlacement:
        if leaf.access is not Access.GATHER_ON_USE:
            return leaf
        members = shards_in_node(mesh, leaf.zero_axes, settings.node)
        return dataclasses.replace(leaf, node_shards=members)

    leaves = {name: placed(leaf) for name, leaf in placement.leaves.items()}
    return dataclasses.replace(placement, leaves=leaves)


def describe_secondary(settings: MeshConfig, placement: Placement) -> Sequence[str]:
    """What nodes gather by themselves, and what not."""
    if not settings.wire.secondary:
        return []
    leaves = placement.leaves.values()
    found = [leaf for leaf in leaves if leaf.node_shards is not None]
    if not found:
        return [f"{_ASKED} changes nothing: no parameter is gathered where it is read"]
    members, shards = found[0].node_shards, placement.num_shards(found[0])
    assert members is not None
    elements = sum(trees.num_elements(leaf.shape) for leaf in found)
    return [
        f"{_ASKED}: {len(found)} of {len(leaves)} parameters ({elements:,} elements) are fetched "
        f"from the other {shards // members - 1} nodes once per step and gathered by the {members} "
        f"shards of a node at each use; during a step a device holds 1/{members} of them and of "
        f"their gradients, not 1/{shards}; results are equal"
    ]
