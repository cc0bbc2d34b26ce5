"""Room, arrays and keys of trials on one device of a plan."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

import pallas_kernels
from pallas_kernels.choice import Choice
from zerojax import models, optim, parallel
from zerojax.hardware.local_devices import driver_version
from zerojax.optim import UpdateContext
from zerojax.parallel.update import true_shapes
from zerojax.plan.make import Plan
from zerojax.runtime.memory import least_room

SHARE = 0.02
"""Of the free memory, of a device or of the host, that measuring may take."""
PACKAGES = (
    *("jax", "jaxlib", "jax-cuda12-pjrt", "jax-cuda13-pjrt"),
    *("nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
)
"""Whose versions decide what is compiled, and which of cuDNN's kernels run."""
SOURCES = (pallas_kernels, models, optim, parallel)
"""Packages whose source is measured."""


class Repeated:
    """Calls a function on what its last call left, as steps do; inputs are made at the first."""

    def __init__(self, begin: Callable[[], Any], again: Callable[[Any, Any], Any]) -> None:
        self._begin, self._again = begin, again
        self._held: Any = None

    def __call__(self) -> Any:
        if self._held is None:
            self._held = jax.block_until_ready(self._begin())
        held, fixed = self._held
        found, held = self._again(held, fixed)
        self._held = held, fixed
        return found


def room(plan: Plan) -> int:
    """Bytes of a device that may be taken; the same on all devices of one kind."""
    assert isinstance(plan.mesh, Mesh)
    stats = plan.mesh.local_devices[0].memory_stats()
    if not stats:  # a CPU's memory is the host's
        free = least_room()
        return share_of(free.free if free else 0)
    return share_of(stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0))


def share_of(free: int) -> int:
    """The bytes that may be taken of free ones."""
    # A power of two, so that processes with a little more or less free ask the same question.
    return 2 ** int(math.log2(max(free * SHARE, 2**20)))


def on_device(plan: Plan, make: Callable[[], Any]) -> Callable[[], Any]:
    """The function, jitted, with its results on this process's first device of the plan."""
    assert isinstance(plan.mesh, Mesh)
    place = SingleDeviceSharding(plan.mesh.local_devices[0])
    return jax.jit(make, out_shardings=place)


def lone_context(plan: Plan, choice: Choice) -> UpdateContext:
    """What an update is told beside arrays, for one device by itself; to be traced."""
    return UpdateContext(
        gradient_scale=jnp.float32(0.5),
        skip=jnp.bool_(False),
        key=jax.random.key(0),
        axes=dict.fromkeys(plan.abstract_state["params"], ()),
        choice=choice,
        all_params=whole_params(plan),
    )


def whole_params(plan: Plan) -> dict[str, jax.ShapeDtypeStruct]:
    """{name: shape and dtype of a whole parameter}, of all."""
    stored = plan.abstract_state["params"]
    shapes = true_shapes(plan)
    return {name: jax.ShapeDtypeStruct(shape, stored[name].dtype) for name, shape in shapes.items()}


def base_key(plan: Plan, what: str) -> dict[str, Any]:
    """What any kept answer has to agree with: the card, its software and what is measured."""
    assert isinstance(plan.mesh, Mesh)
    device = plan.mesh.local_devices[0]
    return {
        "what": what,
        "device": device.device_kind,
        "devices": plan.mesh.size,
        "driver": driver_version(),
        "platform": getattr(device.client, "platform_version", ""),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "flags": os.environ.get("XLA_FLAGS", ""),
        "source": source_hash(),
    }


@functools.cache
def source_hash() -> str:
    """Of the source of kernels and of what they are measured against: another is measured anew."""
    digest = hashlib.sha256()
    for package in SOURCES:
        folder = Path(package.__file__).parent
        for path in sorted(folder.rglob("*.py")):
            digest.update(str(path.relative_to(folder)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # another card's, or run from its source
        return None
