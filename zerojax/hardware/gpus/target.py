"""Writes the description of a GPU that the compile-only client reads: OpenXLA's
GpuTargetConfigProto as text."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
from collections.abc import Iterator, Mapping

from zerojax.config.late_dataclasses import dataclass
from zerojax.hardware.gpus.card import Gpu

PROTO = "OpenXLA xla/stream_executor/device_description.proto"

# Numbers of xla_data.proto PrimitiveType, the keys of the rates in a description.
S8, S32, U8, U32, F16, F32, F64, BF16, F4 = 2, 4, 6, 8, 10, 11, 12, 16, 32
EIGHT_BITS = (S8, U8, 19, 20, 23, 24, 25, 28, 29, 33, 35, 36)
"""s8, u8, all formats of f8 and, in the tensor cores of Hopper and Blackwell, f6."""

# Packages that contain the compiler; the first installed one reads the text.
COMPILERS = ("jax-cuda13-pjrt", "jax-cuda12-pjrt", "jaxlib")
FIRST_WITH_OCCUPANCY = (0, 11, 0)
"""0.10.2 rejects a text with any field of `_occupancy`, 0.11.0 accepts them all (tried)."""


@dataclass(frozen=True)
class Rate:
    """Execution units of one core for some number formats.

    Attributes:
      types: numbers of the formats in XLA's PrimitiveType.
      units: number of units per core.
      ops: multiply-adds per clock of one unit.
      clock: clock of the units as a fraction of the GPU's clock.
    """

    types: tuple[int, ...]
    units: int
    ops: int
    clock: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ComputeCapability:
    """Properties that all GPUs of one compute capability share, per core unless stated otherwise;
    memory in bytes.

    Sources: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; the
    rates of the units are those in xla/backends/gpu/target_config/specs, which has none for the
    capabilities whose `matrix` is empty.
    """

    threads: int
    blocks: int
    shared_memory: int
    shared_memory_of_block: int
    fpus: int
    reserved_shared_memory: int = 1024
    scalar: tuple[Rate, ...] = ()
    matrix: tuple[Rate, ...] = ()


_HOPPER = ComputeCapability(
    threads=2048,
    blocks=32,
    shared_memory=233472,
    shared_memory_of_block=232448,
    fpus=128,
    scalar=(Rate((S32, U32, F64), 64, 1), Rate((F16, BF16), 128, 2), Rate((F32,), 128, 1)),
    matrix=(
        Rate(EIGHT_BITS, 4, 1024, 0.924),
        Rate((F16, BF16), 4, 512, 0.924),
        Rate((F32,), 4, 256, 0.924),
        Rate((F64,), 4, 32),
    ),
)
_BLACKWELL = dataclasses.replace(
    _HOPPER,
    scalar=(Rate((S32, U32, F64), 64, 1), Rate((F16, F32, BF16), 128, 1)),
    matrix=(
        Rate((F4,), 4, 4096, 0.934),
        Rate(EIGHT_BITS, 4, 2048, 0.934),
        Rate((F16, BF16), 4, 1024, 0.934),
        Rate((F32,), 4, 512, 0.934),
        Rate((F64,), 4, 16),
    ),
)
ARCHITECTURES: Mapping[str, ComputeCapability] = {
    "8.0": ComputeCapability(
        threads=2048,
        blocks=32,
        shared_memory=167936,
        shared_memory_of_block=166912,
        fpus=64,
        scalar=(
            Rate((S32, U32, F32), 64, 1),
            Rate((F16, BF16), 64, 2),
            Rate((F64,), 32, 1),
        ),
        matrix=(
            Rate((S8, U8), 4, 512),
            Rate((F16, BF16), 4, 256),
            Rate((F32,), 4, 128),
            Rate((F64,), 4, 16),
        ),
    ),
    "8.6": ComputeCapability(
        threads=1536, blocks=16, shared_memory=102400, shared_memory_of_block=101376, fpus=128
    ),
    "8.9": ComputeCapability(
        threads=1536, blocks=24, shared_memory=102400, shared_memory_of_block=101376, fpus=128
    ),
    "9.0a": _HOPPER,
    "10.0a": _BLACKWELL,
    "12.0": ComputeCapability(
        threads=1536, blocks=24, shared_memory=131072, shared_memory_of_block=101376, fpus=128
    ),
}


def target_text(gpu: Gpu) -> str:
    """Writes the text proto that the compile-only client takes as `target_config`, with only the
    fields that the installed compiler knows.

    Raises:
      ValueError: the card has no `compiler` section, or its compute capability is unknown.
    """
    target = gpu.target
    if target is None:
        raise ValueError(
            f"gpu={gpu.name!r} has no compiler description, because too little is published about "
            "it. Use a card with a description, or a YAML file with `base: " + gpu.name + "` and a "
            "section `compiler` as in zerojax/hardware/gpus/cards/h100.yaml."
        )
    if target.capability not in ARCHITECTURES:
        raise ValueError(
            f"gpu={gpu.name!r}: compiler.capability={target.capability} is not one of "
            f"{', '.join(ARCHITECTURES)}"
        )
    lines = ["gpu_device_info {", *(f"  {line}" for line in _device_info(gpu)), "}"]
    lines += ['platform_name: "CUDA"', f'device_description_str: "{target.description}"']
    return "\n".join(lines) + "\n"


def _device_info(gpu: Gpu) -> Iterator[str]:
    target = gpu.target
    assert target is not None
    architecture = ARCHITECTURES[target.capability]
    numbers = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_block_optin": architecture.shared_memory_of_block,
        "shared_memory_per_core": architecture.shared_memory,
        "threads_per_core_limit": architecture.threads,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "block_dim_limit_x": 2147483647,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "core_count": target.cores,
        "fpus_per_core": architecture.fpus,
        "clock_rate_ghz": target.clock_ghz,
        "l2_cache_size": target.l2_bytes,
        "memory_bandwidth": target.bytes_per_second,
        "device_memory_size": target.memory_bytes or gpu.memory_bytes,
        "device_address_bits": 64,
        **_occupancy(architecture),
    }
    yield from (f"{name}: {value}" for name, value in numbers.items())
    major, minor = target.capability.removesuffix("a").split(".")
    feature = "ACCELERATED_FEATURES" if target.capability.endswith("a") else "NONE"
    capability = f"major: {major} minor: {minor} feature_extension: {feature}"
    yield f"cuda_compute_capability {{ {capability} }}"
    for unit, rates in (("scalar", architecture.scalar), ("matrix", architecture.matrix)):
        if rates:
            yield from _unit_description(unit, rates, target.clock_ghz)
    if target.nvlinks:
        yield f"device_interconnect_info {{ active_links: {target.nvlinks} }}"
    yield f'name: "{target.description}"'
    yield 'device_vendor: "NVIDIA Corporation"'
    if target.runtime_version:
        yield f'runtime_version: "{target.runtime_version}"'
        yield f'compile_time_toolkit_version: "{target.runtime_version}"'
    if target.dnn_version:
        yield f'dnn_version: "{target.dnn_version}"'


def _occupancy(architecture: ComputeCapability) -> dict[str, int]:
    if _compiler_version() < FIRST_WITH_OCCUPANCY:
        return {}
    return {
        "max_blocks_per_multiprocessor": architecture.blocks,
        "reserved_shared_memory_per_block": architecture.reserved_shared_memory,
        "collective_memory_granularity": 2 * 1024 * 1024,
    }


def _compiler_version() -> tuple[int, ...]:
    for package in COMPILERS:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    raise ValueError(f"none of {', '.join(COMPILERS)} is installed; pip install 'zerojax[plan]'")


def _unit_description(unit: str, rates: tuple[Rate, ...], clock_ghz: float) -> Iterator[str]:
    yield f"{unit}_unit_description {{"
    by_type = sorted(
        ((kind, rate) for rate in rates for kind in rate.types), key=lambda pair: pair[0]
    )
    for kind, rate in by_type:
        clock = f"clock_rate_ghz: {clock_ghz * rate.clock:.7g}"
        value = f"{clock} units_per_core: {rate.units} ops_per_clock: {rate.ops}"
        yield f"  rate_infos {{ key: {kind} value {{ {value} }} }}"
    yield "}"
