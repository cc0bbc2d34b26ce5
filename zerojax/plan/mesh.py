"""Device meshes: axes and their sizes.

The only room besides `distributed` that asks JAX for devices. Knows nothing of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from zerojax.config import MeshConfig, as_mesh_config
from zerojax.config.keywords import names_keywords

REPLICA, DATA, STAGE, MODEL = "replica", "data", "stage", "model"
# Outermost first: neighbours along the last axis are the closest devices, so that tensor
# parallelism, which talks most, gets the fastest links, and replicas are the groups furthest apart
# (nodes).
AXES = (REPLICA, DATA, STAGE, MODEL)
DATA_AXES = (REPLICA, DATA)
"""Axes over which the batch is split. Parameters are sharded over `data` alone."""
AUTO_AXES = (STAGE, MODEL)
"""Axes that stay with the compiler while `replica` and `data` are manual; under a pipeline `stage`
is manual, too."""


def resolve_axis_sizes(config: MeshConfig, num_devices: int) -> dict[str, int]:
    """The size of every axis, with -1 replaced by what the device count leaves.

    Raises:
      ValueError: the sizes do not multiply to `num_devices`.
    """
    fixed = config.replica * config.stage * config.model
    data = config.data
    if data == -1:
        if num_devices % fixed:
            raise ValueError(
                f"mesh replica={config.replica} x stage={config.stage} x model={config.model} = "
                f"{fixed} does not divide the {num_devices} devices; choose sizes whose product "
                f"divides {num_devices}"
            )
        data = num_devices // fixed
    sizes = {REPLICA: config.replica, DATA: data, STAGE: config.stage, MODEL: config.model}
    if data * fixed != num_devices:
        raise ValueError(
            f"mesh {' x '.join(f'{axis}={size}' for axis, size in sizes.items())} needs "
            f"{data * fixed} devices, found {num_devices}; use data=-1 to take what is there"
            + (_on_fewer(config, sizes) if data * fixed < num_devices else "")
        )
    return sizes


def _on_fewer(config: MeshConfig, sizes: Mapping[str, int]) -> str:
    """How a mesh on some of the devices is made."""
    axes = ", ".join(f'"{axis}": {size}' for axis, size in sizes.items() if size > 1)
    mesh = f"zerojax.make_mesh({{{axes}}}, devices=jax.devices()[:{math.prod(sizes.values())}])"
    with_stage = (
        f" (a mesh has no ZeRO stage: make_plan takes zero={config.zero} beside it)"
        if config.zero != MeshConfig.zero
        else ""
    )
    return f", or give the mesh of some of them: {mesh}{with_stage}"


@names_keywords()
def make_mesh(
    config: MeshConfig | Mapping[str, Any] | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh with the axes `replica`, `data`, `stage`, `model`, all of type Auto.

    Args:
      config: sizes; a mapping is read as a `MeshConfig`; None takes every device on `data`.
      devices: which devices, in order; None takes `jax.devices()`.

    Raises:
      ValueError: the sizes do not fit the number of devices.
    """
    config = as_mesh_config(config)
    devices = jax.devices() if devices is None else list(devices)
    sizes = resolve_axis_sizes(config, len(devices))
    return jax.make_mesh(
        tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices
    )


@names_keywords()
def make_abstract_mesh(
    config: MeshConfig | Mapping[str, Any] | None, num_devices: int
) -> AbstractMesh:
    """The same mesh without devices: enough to plan for `num_devices` that are not here."""
    sizes = resolve_axis_sizes(as_mesh_config(config), num_devices)
    return AbstractMesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def normalise_mesh(mesh: Mesh) -> Mesh:
    """A user's own `jax.sharding.Mesh` with zerojax's four axes in zerojax's order.

    Args:
      mesh: axes named `data` and optionally `replica`, `stage`, `model`, in any order and of any
        type.

    Raises:
      ValueError: an axis has another name.
    """
    unknown = [name for name in mesh.axis_names if name not in AXES]
    if unknown:
        raise ValueError(
            f"mesh axis {unknown[0]!r} is not one of {', '.join(AXES)}; rename the axes of the mesh"
        )
    present = [name for name in AXES if name in mesh.axis_names]
    devices = np.transpose(mesh.devices, [mesh.axis_names.index(name) for name in present])
    shape = [mesh.shape.get(name, 1) for name in AXES]
    return Mesh(devices.reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def num_data_shards(mesh: Mesh | AbstractMesh) -> int:
    """How many pieces the batch is cut into."""
    return math.prod(mesh.shape[axis] for axis in DATA_AXES)


def describe_mesh(mesh: Mesh | AbstractMesh) -> str:
    """Axes larger than one, for people: "data 4 x model 2"."""
    parts = [f"{name} {size}" for name, size in mesh.shape.items() if size > 1]
    return " x ".join(parts) or "1 device"


def are_here(mesh: Mesh | AbstractMesh) -> bool:
    """Whether a mesh is of devices that can run, and not of some that are only compiled for."""
    return isinstance(mesh, Mesh) and mesh.devices.flat[0] in jax.devices()


def communicates_through_gloo(mesh: Mesh | AbstractMesh) -> bool:
    """Whether collectives over this mesh are gloo's: CPU devices of processes that have joined.

    Also between the devices of one process, once it has joined.
    """
    if isinstance(mesh, AbstractMesh):
        return False
    return mesh.devices.flat[0].platform == "cpu" and jax.distributed.is_initialized()
