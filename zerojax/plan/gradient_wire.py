"""Chooses the format in which gradients are sent (quantized or float32), and the number of levels
in which they are summed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from zerojax.config import MeshConfig
from zerojax.optim.wire_codes import BLOCKS, WireCodes
from zerojax.placement.device_mesh import REPLICA, has_nvidia_gpus
from zerojax.placement.leaf_placement import LeafPlacement
from zerojax.placement.table import Placement
from zerojax.plan.context_split import GPUS_OF_A_NODE
from zerojax.plan.refusals import check_no_other_way
from zerojax.tracing import trees

BITS = {"int8": 8, "int4": 4}


def check_gradient_wire(settings: MeshConfig, mesh: Mesh | AbstractMesh) -> None:
    """Raises if `wire.gradients` or `wire.exact` has no effect or conflicts with other settings.

    Raises:
      ValueError: the message states the setting to change.
    """
    _check_node(settings, mesh)
    is_coded = settings.wire.gradients in BITS
    if not (is_coded or settings.wire.exact):
        return
    asked = f"wire.gradients={settings.wire.gradients}" if is_coded else "wire.exact"
    if is_coded and settings.zero == 0:
        raise ValueError(
            f"{asked} needs sharded gradients, but with zero=0 every device has full "
            "gradients; use zero=1, 2 or 3, or wire.gradients=reduce"
        )
    check_no_other_way(asked, "sums gradients", settings, mesh)


def _check_node(settings: MeshConfig, mesh: Mesh | AbstractMesh) -> None:
    if settings.node is not None and mesh.size % settings.node:
        raise ValueError(
            f"node={settings.node} does not divide the {mesh.size} devices; set node to the "
            "number of devices in one node, or leave it out"
        )


def with_gradient_wire(
    placement: Placement, settings: MeshConfig, mesh: Mesh | AbstractMesh
) -> Placement:
    """Returns the placement table with the format in which gradients are sent: integer codes
    (`wire.gradients`), or float32 for the parameters that `wire.exact` matches.

    Raises:
      ValueError: a pattern of `wire.exact` matches no parameter name.
    """
    exact = trees.match_names(placement.leaves, settings.wire.exact, option="wire.exact")
    bits = BITS.get(settings.wire.gradients)
    if not exact and bits is None:
        return placement

    def wired(name: str, leaf: LeafPlacement) -> LeafPlacement:
        if leaf.access.looks_up:
            return leaf  # only its rows are sent
        if name in exact:
            return dataclasses.replace(leaf, gradient_in_full=True)
        if bits is None or leaf.zero_dim is None or leaf.frozen:
            return leaf
        # Gradients of node-gathered parameters are summed uncoded in a node, coded between nodes.
        in_node = 1 if leaf.node_shards else shards_in_node(mesh, leaf.zero_axes, settings.node)
        return dataclasses.replace(leaf, gradient_codes=WireCodes(bits, in_node))

    leaves = {name: wired(name, leaf) for name, leaf in placement.leaves.items()}
    return dataclasses.replace(placement, leaves=leaves)


def shards_in_node(
    mesh: Mesh | AbstractMesh, over: tuple[str, ...], node: int | None = None
) -> int:
    """Returns how many consecutive shards along the axes `over` are in one node; 1 if the number
    differs between nodes.

    Args:
      mesh: the device mesh.
      over: mesh axes that shard the parameter.
      node: number of devices in a node, in the order of the mesh; None: the devices of one process,
        or `GPUS_OF_A_NODE` for GPUs that each have their own process and for absent devices.
    """
    nodes = _node_of_each(mesh, node).reshape(tuple(mesh.shape.values()))
    axes = [list(mesh.shape).index(axis) for axis in over]
    shards = math.prod(nodes.shape[axis] for axis in axes)
    groups = np.moveaxis(nodes, axes, range(-len(axes), 0)).reshape(-1, shards)
    members = int((groups[0] == groups[0, 0]).sum())
    cut = groups.reshape(-1, shards // members, members) if shards % members == 0 else None
    if cut is None or (cut != cut[:, :, :1]).any():
        return 1
    differ = all(len(set(group)) == shards // members for group in cut[:, :, 0].tolist())
    return members if differ else 1


def _node_of_each(mesh: Mesh | AbstractMesh, node: int | None) -> np.ndarray:
    if node is None and isinstance(mesh, Mesh):
        processes = np.array([device.process_index for device in mesh.devices.flat])
        if len(set(processes.tolist())) < mesh.size or mesh.size == 1:
            return processes
    if node is None:
        node = GPUS_OF_A_NODE if has_nvidia_gpus(mesh) else mesh.size
    return np.arange(mesh.size) // node


def describe_gradient_wire(
    settings: MeshConfig, placement: Placement, mesh: Mesh | AbstractMesh
) -> list[str]:
    """Describes which gradients are sent as quantized codes, in which levels they are summed, and
    which are not quantized."""
    leaves = [leaf for leaf in placement.leaves.values() if not leaf.frozen]
    coded = [leaf for leaf in leaves if leaf.gradient_codes is not None]
    full = [leaf for leaf in leaves if leaf.gradient_in_full]
    lines = []
    if full:
        lines.append(
            f"wire.exact: gradients of {len(full)} parameters (such as {full[0].name}) are sent in "
            "float32"
        )
    if settings.wire.gradients not in BITS:
        return lines
    asked = f"wire.gradients={settings.wire.gradients}"
    if not coded:
        return [
            *lines,
            f"{asked} has no effect: no gradient is reduce-scattered over several devices",
        ]
    codes = coded[0].gradient_codes
    assert codes is not None
    others = sum(trees.num_elements(leaf.shape) for leaf in leaves if leaf not in coded)
    lines.append(
        f"{asked}: gradients of {len(coded)} of {len(leaves)} parameters are sent as integers of "
        f"{codes.bits} bits with a scale for {BLOCKS[codes.bits]} and are added up in float32, "
        f"{_levels(coded, placement)}; losses are close to those of exact sums, not equal; "
        f"{others:,} elements are sent unquantized"
    )
    if mesh.shape[REPLICA] > 1:
        lines.append(f"sums over replica={mesh.shape[REPLICA]} are not quantized")
    return lines


def _levels(coded: Sequence[LeafPlacement], placement: Placement) -> str:
    found = []
    for by_node in (True, False):
        chosen = [leaf for leaf in coded if (leaf.node_shards is not None) == by_node]
        if chosen and by_node:
            found.append("between nodes alone, once per step")
        elif chosen:
            codes, shards = chosen[0].gradient_codes, placement.num_shards(chosen[0])
            assert codes is not None
            found.append(_levels_of(codes, shards))
    return ", others ".join(found)


def _levels_of(codes: WireCodes, shards: int) -> str:
    if codes.in_node in (1, shards):
        return f"by all {shards} devices at once"
    return (
        f"first by the {codes.in_node} devices of a node, then between the "
        f"{shards // codes.in_node} nodes"
    )
