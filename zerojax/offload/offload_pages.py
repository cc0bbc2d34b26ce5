"""Checks whether a run can store the weights of its layers in files (`offload.params: nvme`)."""

from __future__ import annotations

from collections.abc import Iterator

import optax
from jax.sharding import AbstractMesh, Mesh

from zerojax.config import MeshConfig
from zerojax.config.mesh import NVME
from zerojax.optim.precision import Precision
from zerojax.placement.device_mesh import DATA_AXES, EXPERT

_ASKED = "offload.params=nvme"


def check_pages(
    settings: MeshConfig,
    mesh: Mesh | AbstractMesh,
    precision: Precision,
    tx: optax.GradientTransformation,
) -> None:
    """Raises if layers in files cannot be combined with another part of the plan.

    Args:
      settings: mesh options.
      mesh: the device mesh.
      precision: dtypes of the run, which say whether there are float32 master weights.
      tx: the optimizer, which may keep an average of the weights.

    Raises:
      ValueError: the message states the conflicting setting and the remedy.
    """
    if settings.offload.params != NVME:
        return
    averages = getattr(tx, "ema", None) is not None
    for obstacle, remedy in _obstacles(mesh, precision, averages):
        raise ValueError(f"{_ASKED} {obstacle}; {remedy}, or use offload.params: host")


def _obstacles(
    mesh: Mesh | AbstractMesh,
    precision: Precision,
    averages: bool,
) -> Iterator[tuple[str, str]]:
    """Yields (reason why layers cannot be in files, remedy), as parts of a sentence."""
    for axis, size in mesh.shape.items():
        if size > 1 and (axis not in DATA_AXES or axis == EXPERT):
            yield (
                f"reads whole layers from files, but {axis}={size} splits them or their inputs",
                f"use {axis}=1",
            )
    if not precision.has_masters:
        yield (
            f"makes weights from float32 master weights in files, but param_dtype="
            f"{precision.param_dtype.name} has no master weights",
            "use param_dtype=float32",
        )
    if averages:
        yield (
            "cannot evaluate an average of the weights, which would have to be in memory",
            "leave ema_decay out",
        )
