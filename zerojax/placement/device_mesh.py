"""Makes device meshes and computes the sizes of their axes.

Only this module and `zerojax.runtime.distributed` ask JAX for devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from zerojax.config import MeshConfig, as_mesh_config
from zerojax.config.checks import names_keywords
from zerojax.config.late_dataclasses import dataclass
from zerojax.hardware.gpus import Gpu, find_gpu
from zerojax.runtime.memory import keep_freed_memory
from zerojax.runtime.plugin_errors import hide_plugin_errors

REPLICA, DATA, EXPERT, CONTEXT = "replica", "data", "expert", "context"
STAGE, MODEL = "stage", "model"


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One mesh axis and its properties; all modules read them from `AXIS_TABLE`.

    Attributes:
      name: name of the axis, and of the field with its size in `MeshConfig`.
      splits: what the axis splits: "batch", "sequence", "layers" or "matrices".
      shards_state: whether ZeRO shards parameters, gradients and optimizer state over it.
      manual: whether the package writes the collectives over it, in a `shard_map`; otherwise the
        compiler places them.
    """

    name: str
    splits: Literal["batch", "sequence", "layers", "matrices"]
    shards_state: bool
    manual: bool


AXIS_TABLE = (
    # Outermost first: neighbours along the last axis are the closest devices, so that tensor
    # parallelism, which sends most, gets the fastest links, and replicas are the groups furthest
    # apart (nodes).
    Axis(name=REPLICA, splits="batch", shards_state=False, manual=True),
    Axis(name=DATA, splits="batch", shards_state=True, manual=True),
    Axis(name=EXPERT, splits="batch", shards_state=True, manual=True),
    Axis(name=CONTEXT, splits="sequence", shards_state=True, manual=True),
    Axis(name=STAGE, splits="layers", shards_state=False, manual=True),
    Axis(name=MODEL, splits="matrices", shards_state=False, manual=False),
)


def names_of(table: Sequence[Axis], **wanted: Any) -> tuple[str, ...]:
    """Returns the names of the axes in `table` whose attributes equal `wanted`, outermost first.

    >>> names_of(AXIS_TABLE, splits="batch")
    ('replica', 'data', 'expert')
    """
    return tuple(
        axis.name
        for axis in table
        if all(getattr(axis, name) == value for name, value in wanted.items())
    )


AXES = names_of(AXIS_TABLE)
DATA_AXES = names_of(AXIS_TABLE, splits="batch")
"""Mesh axes over which the rows of a batch are split."""
STATE_AXES = names_of(AXIS_TABLE, shards_state=True)
"""Mesh axes over which ZeRO shards every parameter, if they have more than one device. Parameters
of experts are not sharded over `expert`, which splits their dimension of experts."""
PASS_AXES = tuple(axis.name for axis in AXIS_TABLE if axis.splits in ("batch", "sequence"))
"""Mesh axes whose devices compute different tokens with the same weights, so that losses and
gradients are summed over them."""
MANUAL_AXES = names_of(AXIS_TABLE, manual=True)
"""Mesh axes that are manual in the `shard_map` of every pass. `stage` is manual even with one
device, because JAX's debug callbacks allow at most one automatic axis."""
COMPILER_AXES = names_of(AXIS_TABLE, manual=False)
"""Mesh axes whose collectives are placed by the compiler only."""


def resolve_axis_sizes(config: MeshConfig, num_devices: int) -> dict[str, int]:
    """Computes the size of every mesh axis; -1 is replaced by the number of devices that the other
    axes leave.

    Raises:
      ValueError: the product of the sizes is not `num_devices`.
    """
    sizes = {name: getattr(config, name) for name in AXES}
    others = {name: size for name, size in sizes.items() if name != DATA}
    fixed = math.prod(others.values())
    if fixed > num_devices:
        named = " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        needed, or_more = fixed * abs(sizes[DATA]), " or a multiple" * (sizes[DATA] == -1)
        raise ValueError(
            f"mesh {named} needs {needed} devices{or_more}, but found {num_devices} "
            f"device{'s' * (num_devices > 1)}; use {needed} devices{or_more}, or sizes whose "
            f"product divides {num_devices}"
        )
    if sizes[DATA] == -1:
        if num_devices % fixed:
            named = " x ".join(f"{name}={size}" for name, size in others.items())
            raise ValueError(
                f"mesh {named} = {fixed} does not divide the {num_devices} devices; choose sizes "
                f"whose product divides {num_devices}"
            )
        sizes[DATA] = num_devices // fixed
    product = math.prod(sizes.values())
    if product != num_devices:
        remedy = "use data=-1 to use all of them"
        if num_devices % fixed:
            remedy = f"use sizes whose product divides {num_devices}, with data=-1"
        raise ValueError(
            f"mesh {' x '.join(f'{axis}={size}' for axis, size in sizes.items())} needs {product} "
            f"devices, but found {num_devices}; {remedy}"
            + (_on_fewer(config, sizes) if product < num_devices else "")
        )
    return sizes


def _on_fewer(config: MeshConfig, sizes: Mapping[str, int]) -> str:
    """Returns the remedy for a mesh that needs fewer devices than there are: code that makes a mesh
    of some of them."""
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
    """Makes a device mesh with the Auto axes `replica`, `data`, `expert`, `context`, `stage`,
    `model`.

    Args:
      config: sizes of the axes, as a mapping or a `MeshConfig`, of which the axes alone are read.
        None: every device is on `data`.
      devices: devices in the order of the mesh; None: `jax.devices()`.

    Raises:
      ValueError: the sizes do not fit the number of devices, or a mapping has another key.
    """
    config = _as_sizes(config)
    hide_plugin_errors()
    if jax.config.jax_platforms == "cpu":
        keep_freed_memory()  # works best before JAX starts
    devices = jax.devices() if devices is None else list(devices)
    sizes = resolve_axis_sizes(config, len(devices))
    return jax.make_mesh(
        tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices
    )


@names_keywords()
def make_abstract_mesh(
    config: MeshConfig | Mapping[str, Any] | None,
    num_devices: int | None = None,
    *,
    gpu: Gpu | str | None = None,
) -> AbstractMesh:
    """Makes a mesh without devices, to plan for `num_devices` devices.

    Args:
      config: sizes of the axes, as a mapping or a `MeshConfig`, of which the axes alone are read.
      num_devices: number of devices; None: the product of the sizes, which must then include
        `data`.
      gpu: GPU or its name ("h100"), for choices that depend on it (`zerojax.attention`); None:
        unknown.

    Raises:
      ValueError: the sizes do not fit the number of devices, or do not determine it; or a mapping
        has another key.
    """
    config = _as_sizes(config)
    if num_devices is None:
        if config.data == -1:
            raise ValueError(
                "data=-1 means all devices, but for a mesh without devices their number is "
                "unknown: "
                'set data, as in {"data": 8}, or pass the number: make_abstract_mesh(config, 8)'
            )
        num_devices = math.prod(getattr(config, axis) for axis in AXES)
    sizes = resolve_axis_sizes(config, num_devices)
    mesh = AbstractMesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    if gpu is None:
        return mesh
    if isinstance(gpu, str):
        gpu = find_gpu(gpu)
    cores = None if gpu.target is None else gpu.target.cores
    device = AbstractDevice(device_kind=gpu.name, num_cores=cores, platform="gpu")
    return mesh.update(abstract_device=device)


def _as_sizes(config: MeshConfig | Mapping[str, Any] | None) -> MeshConfig:
    """Converts `config` to a MeshConfig; refuses a mapping with keys that are no axes.

    A mesh has sizes alone, so that such a value would be dropped.
    """
    settings = as_mesh_config(config)
    if isinstance(config, Mapping) and (others := [name for name in config if name not in AXES]):
        named = ", ".join(f"{name}={config[name]!r}" for name in others)
        raise ValueError(
            f"{named}: a mesh has axes ({', '.join(AXES)}) and no other settings; give the mapping "
            "itself to train or make_plan, which make the mesh, or give make_plan "
            f"{'these settings' if len(others) > 1 else f'{others[0]}=...'} beside the mesh"
        )
    return settings


def has_nvidia_gpus(mesh: Mesh | AbstractMesh) -> bool:
    """Returns whether the mesh's devices are NVIDIA GPUs, or are planned to be."""
    device = mesh.abstract_device if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0]
    if device is None or device.platform not in ("gpu", "cuda"):
        return False
    return "AMD" not in str(device.device_kind).upper()  # JAX calls their platform "gpu", too


def normalise_mesh(mesh: Mesh) -> Mesh:
    """Converts a user's own `jax.sharding.Mesh` to a mesh with all of zerojax's axes, in zerojax's
    order.

    Args:
      mesh: mesh with an axis `data` and optionally `replica`, `expert`, `context`, `stage`,
        `model`, in any order and of any axis type.

    Raises:
      ValueError: an axis has another name.
    """
    shape = _sizes_of_axes(mesh)
    present = [name for name in AXES if name in mesh.axis_names]
    devices = np.transpose(mesh.devices, [mesh.axis_names.index(name) for name in present])
    return Mesh(devices.reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def normalise_abstract_mesh(mesh: AbstractMesh) -> AbstractMesh:
    """Converts an abstract mesh to an abstract mesh with all of zerojax's axes, in zerojax's order;
    its device kind stays."""
    made = AbstractMesh(_sizes_of_axes(mesh), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    return made.update(abstract_device=mesh.abstract_device)


def _sizes_of_axes(mesh: Mesh | AbstractMesh) -> tuple[int, ...]:
    """Returns the size of each axis in `AXES`; 1 for an axis that the mesh does not have.

    Raises:
      ValueError: the mesh has an axis that is not in `AXES`.
    """
    unknown = [name for name in mesh.axis_names if name not in AXES]
    if unknown:
        raise ValueError(
            f"mesh axis {unknown[0]!r} is not one of {', '.join(AXES)}; rename the axes of the mesh"
        )
    return tuple(mesh.shape.get(name, 1) for name in AXES)


def state_axes(axis_sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the axes over which ZeRO shards parameters: `data`, and other axes with more than one
    device.

    >>> state_axes({"data": 1, "context": 1}), state_axes({"data": 2, "context": 4})
    (('data',), ('data', 'context'))
    """
    return tuple(name for name in STATE_AXES if name == DATA or axis_sizes.get(name, 1) > 1)


def num_data_shards(mesh: Mesh | AbstractMesh) -> int:
    """Returns the number of data shards, which are the parts into which devices divide the rows of
    a batch."""
    return math.prod(mesh.shape[axis] for axis in DATA_AXES)


def describe_mesh(mesh: Mesh | AbstractMesh) -> str:
    """Describes a mesh by its axes with more than one device: "data 4 x model 2"."""
    parts = [f"{name} {size}" for name, size in mesh.shape.items() if size > 1]
    return " x ".join(parts) or "1 device"


def are_here(mesh: Mesh | AbstractMesh) -> bool:
    """Returns whether the mesh's devices belong to this process's JAX and can run programs; False
    for devices that exist only for compiling."""
    return isinstance(mesh, Mesh) and mesh.devices.flat[0] in jax.devices()


def communicates_through_gloo(mesh: Mesh | AbstractMesh) -> bool:
    """Returns whether collectives on a mesh use the gloo library: CPU devices after
    `jax.distributed` was initialized.

    Collectives between the devices of one process then use it, too.
    """
    if isinstance(mesh, AbstractMesh):
        return False
    return mesh.devices.flat[0].platform == "cpu" and jax.distributed.is_initialized()
