"""Computes memory limits, inputs and cache keys for trials on one device of a plan."""

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
from zerojax import (
    features,
    models,
    offload,
    operators,
    optim,
    passes,
    pipeline,
    step,
    tracing,
    transport,
    zoo,
)
from zerojax.hardware.local_devices import driver_version
from zerojax.optim import UpdateContext
from zerojax.passes.update import true_shapes
from zerojax.plan.make import Plan
from zerojax.runtime.memory import least_room

SHARE = 0.02
"""Fraction of the free memory, of a device or of the host, that a measurement may use."""
PACKAGES = (
    *("jax", "jaxlib", "jax-cuda12-pjrt", "jax-cuda13-pjrt"),
    *("nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
)
"""Packages whose versions affect the compiled programs and cuDNN's kernels."""
SOURCES = (
    *(pallas_kernels, operators, tracing, models, zoo, optim),
    *(transport, passes, features, pipeline, offload, step),
)
"""Packages whose source code is part of the cache key."""


class Repeated:
    """Calls a function repeatedly on its own results, as training steps do. The first call creates
    the inputs.
    """

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
    """Returns the bytes of device memory that a measurement may use, a part of the free memory."""
    assert isinstance(plan.mesh, Mesh)
    stats = plan.mesh.local_devices[0].memory_stats()
    if not stats:  # on CPU, device memory is host memory
        free = least_room()
        return share_of(free.free if free else 0)
    return share_of(stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0))


def share_of(free: int) -> int:
    """Returns how many of `free` bytes a measurement may use: the fraction `SHARE`, at least 1 MiB,
    rounded down to a power of two."""
    # Rounded, so that processes with slightly different free memory build the same question.
    return 2 ** int(math.log2(max(free * SHARE, 2**20)))


def on_device(plan: Plan, make: Callable[[], Any]) -> Callable[[], Any]:
    """Returns `make`, jitted with results on this process's first device of the plan."""
    assert isinstance(plan.mesh, Mesh)
    place = SingleDeviceSharding(plan.mesh.local_devices[0])
    return jax.jit(make, out_shardings=place)


def lone_context(plan: Plan, choice: Choice) -> UpdateContext:
    """Returns the `UpdateContext` for an optimizer update on one device; call it while tracing."""
    return UpdateContext(
        gradient_scale=jnp.float32(0.5),
        skip=jnp.bool_(False),
        key=jax.random.key(0),
        axes=dict.fromkeys(plan.abstract_state["params"], ()),
        choice=choice,
        all_params=whole_params(plan),
    )


def whole_params(plan: Plan) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns {name: shape and dtype of the unsharded parameter} for all parameters.

    Parameters whose layers are in files are included, although the state on the device lacks them.
    """
    stored = plan.abstract_stored["params"]
    shapes = true_shapes(plan)
    return {name: jax.ShapeDtypeStruct(shape, stored[name].dtype) for name, shape in shapes.items()}


def base_key(plan: Plan, what: str) -> dict[str, Any]:
    """Returns the common part of cache keys: device, software versions, measured computation."""
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
    """Returns a hash of the source code of kernels and references; it is part of cache keys."""
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
    except importlib.metadata.PackageNotFoundError:  # is for other hardware, or not installed
        return None
