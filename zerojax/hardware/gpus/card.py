"""Builds the specification of a GPU from the values of its YAML file, and validates them."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from zerojax.config.late_dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Target:
    """Properties of a GPU that the compiler needs besides its compute capability.

    Attributes:
      description: name of the GPU in OpenXLA's target description.
      capability: compute capability; "9.0a" has the accelerated features of 9.0.
      cores: number of streaming multiprocessors.
      clock_ghz: boost clock as the driver reports it.
      l2_bytes: size of the device's whole L2 cache.
      bytes_per_second: memory bandwidth as the driver computes it from clock and bus width, by
        which the compiler's cost model divides. A datasheet may round it.
      memory_bytes: memory size in OpenXLA's description if it differs from the driver's; else None.
      nvlinks: number of active NVLink links; 0: none, or not published.
      runtime_version, dnn_version: versions of the CUDA runtime and cuDNN that the compiler assumes
        to be installed; None if OpenXLA's description has none.
    """

    description: str
    capability: str
    cores: int
    clock_ghz: float
    l2_bytes: int
    bytes_per_second: int
    memory_bytes: int | None = None
    nvlinks: int = 0
    runtime_version: str | None = None
    dnn_version: str | None = None


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Rates that programs reached on a card; None: not measured.

    Attributes:
      product_flops: FLOP per second of a large product of 16-bit floats.
      copy_bandwidth: bytes per second, read and written, of a large copy in device memory.
      host_bandwidth: bytes per second of a large copy between the device and host memory in one
        direction.
      host_both: the same of both directions at once, summed.
      node_bandwidth: bytes per second and direction between the GPUs of a node.
    """

    product_flops: float | None = None
    copy_bandwidth: float | None = None
    host_bandwidth: float | None = None
    host_both: float | None = None
    node_bandwidth: float | None = None


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """The published specification of one kind of GPU, also called its card.

    Attributes:
      name: name on the command line, such as "h200".
      title: full name, such as "NVIDIA H200 SXM 141 GB".
      memory_bytes: number of bytes of memory that the driver gives a process.
      memory_gb: memory size as sold, in units of 10^9 bytes.
      bf16_flops, fp16_flops, fp8_flops, fp32_flops: FLOP per second of dense matrix products that
        are summed in float32. fp32 is the rate of TF32 units if the GPU has them, because JAX uses
        them by default. None: the GPU has no such units, or nothing is published.
      memory_bandwidth: bandwidth of device memory in bytes per second.
      node_devices: number of GPUs connected by one fast fabric; 1 with PCIe only.
      node_bandwidth: bandwidth of one GPU inside the node (NVLink, or PCIe), in bytes per second
        and direction.
      network_bandwidth: bandwidth of one GPU between nodes, in bytes per second and direction.
      host_bandwidth: bandwidth between one GPU and host memory, in bytes per second and direction.
      disk_bandwidth: bandwidth of all disks in a machine of `node_devices` such GPUs, in bytes per
        second, as the sum of reading and writing at the same time; None: unknown.
      device_kinds: regular expressions for the upper-case device name that the driver reports.
      aliases: other names on the command line.
      measured: rates that programs reached on this card; None if it was not measured.
      stated: keys whose values the user stated, which measurements on this machine do not replace.
      target: description of the GPU for the compiler; None if too little is published.
      sources: texts "KEYS: where the values of these keys are published".
      assumptions: texts "KEYS: what was assumed about these keys".
    """

    name: str
    title: str
    memory_bytes: int
    memory_gb: float
    bf16_flops: float | None
    fp16_flops: float | None
    fp8_flops: float | None
    fp32_flops: float | None
    memory_bandwidth: float
    node_devices: int
    node_bandwidth: float
    network_bandwidth: float
    host_bandwidth: float
    disk_bandwidth: float | None
    device_kinds: tuple[str, ...]
    aliases: tuple[str, ...]
    target: Target | None
    sources: tuple[str, ...]
    assumptions: tuple[str, ...]
    measured: Measured | None = None
    stated: tuple[str, ...] = ()

    def peak_flops(self, dtype: str, eight_bits: float = 0.0) -> float | None:
        """Returns the FLOP per second of one GPU's matrix units; None if it has no units for
        `dtype`.

        Args:
          dtype: "bfloat16", "float16", or "float32", which JAX runs on TF32 units if there are any.
          eight_bits: share of the FLOPs, from 0 to 1, that are products of 8-bit floats. The result
            is then the mean rate of computing both kinds one after the other. A GPU without 8-bit
            units computes them in `dtype`.
        """
        peaks = {
            "bfloat16": self.bf16_flops,
            "float16": self.fp16_flops,
            "float32": self.fp32_flops,
        }
        peak = peaks.get(dtype)
        if not peak or not self.fp8_flops or not eight_bits:
            return peak
        # Times add up, and rates do not.
        return 1 / ((1 - eight_bits) / peak + eight_bits / self.fp8_flops)


class CardError(ValueError):
    """A mistake in the file of a GPU card.

    Args:
      message: the sentence that describes the mistake.
      key: path of the key in the file, outermost section first.
    """

    def __init__(self, message: str, *key: str):
        super().__init__(message, key)
        self.message, self.key = message, key

    def __str__(self) -> str:
        return ".".join(self.key) + ": " * bool(self.key) + self.message


def build_card(values: Mapping[str, Any], stated: Iterable[str] = ()) -> Gpu:
    """Builds a GPU card from the keys and values of its file.

    Args:
      values: keys and values.
      stated: keys that the user stated.

    Raises:
      CardError: an unknown key, a missing key, or an invalid value.
    """
    checked = _checked(values, CARD_KEYS, CARD_OPTIONAL)
    target = None
    if "compiler" in checked:
        try:
            target = Target(**_checked(checked["compiler"], COMPILER_KEYS, COMPILER_OPTIONAL))
        except CardError as error:
            raise CardError(error.message, "compiler", *error.key) from None

    measured = None
    if "measured" in checked:
        try:
            keys = dict.fromkeys(MEASURED, _rate)
            rates = _checked(checked["measured"], keys, frozenset(keys))
        except CardError as error:
            raise CardError(error.message, "measured", *error.key) from None
        known = [(MEASURED[key], value) for key, value in rates.items()]
        measured = Measured(**{one.field: value * one.unit for one, value in known})

    def scaled(key: str, unit: float) -> Any:
        return checked[key] * unit if key in checked else None

    card = Gpu(
        name=checked["name"],
        title=checked.get("title", checked["name"]),
        memory_bytes=checked["memory_bytes"],
        memory_gb=checked.get("memory_gb", checked["memory_bytes"] / 1e9),
        bf16_flops=scaled("bf16_tflops", 1e12),
        fp16_flops=scaled("fp16_tflops", 1e12),
        fp8_flops=scaled("fp8_tflops", 1e12),
        fp32_flops=scaled("fp32_tflops", 1e12),
        memory_bandwidth=scaled("memory_gb_per_s", 1e9),
        node_devices=checked["node_devices"],
        node_bandwidth=scaled("node_gb_per_s", 1e9),
        network_bandwidth=scaled("network_gb_per_s", 1e9),
        host_bandwidth=scaled("host_gb_per_s", 1e9),
        disk_bandwidth=scaled("disk_gb_per_s", 1e9),
        device_kinds=checked.get("device_kinds", ()),
        aliases=checked.get("aliases", ()),
        target=target,
        sources=grouped(checked.get("sources", {})),
        assumptions=grouped(checked.get("assumptions", {})),
        measured=measured,
        stated=tuple(sorted(stated)),
    )
    for key, rate in checked.get("measured", {}).items():
        check_measured(card, key, rate)
    return card


def published_rate(gpu: Gpu, key: str) -> tuple[str, float] | None:
    """Returns the key of a card that a measured rate is compared with, and its published rate in
    the same unit; None if nothing is published.

    Args:
      gpu: the card.
      key: key of the section `measured`.
    """
    for name in MEASURED[key].published:
        rate = getattr(gpu, name.replace("tflops", "flops").replace("gb_per_s", "bandwidth"))
        if rate:
            return name, rate / MEASURED[key].unit
    return None


def check_measured(gpu: Gpu, key: str, rate: float) -> None:
    """Checks that a measured rate is at most `MEASURED[key].most` times the published one.

    Args:
      gpu: the card.
      key: key of the section `measured`.
      rate: measured rate, in the unit of the key.

    Raises:
      CardError: the rate is above this limit, or nothing is published.
    """
    published, of = published_rate(gpu, key), MEASURED[key]
    if published is None:
        needed = " or ".join(of.published)
        raise CardError(f"{gpu.name} has no published rate of it; add {needed}", "measured", key)
    name, peak = published
    limit = of.most * peak
    if rate > limit * (1 + 1e-6):  # the unit of the published rate was changed twice
        times = f"{of.most:g} x " * (of.most != 1)
        raise CardError(
            f"{rate:g} is above {limit:g}, which is {times}{name}; give at most {limit:g}, or "
            f"correct {name}",
            "measured",
            key,
        )


def grouped(notes: Mapping[str, str]) -> tuple[str, ...]:
    """Joins keys that have the same text: {"a": "x", "b": "x"} -> ("a, b: x",)."""
    keys: dict[str, list[str]] = {}
    for key, text in notes.items():
        keys.setdefault(text, []).append(key)
    return tuple(f"{', '.join(names)}: {text}" for text, names in keys.items())


def split_notes(notes: object) -> dict[str, str]:
    """Splits joined keys: {"a, b": "x"} -> {"a": "x", "b": "x"}. Raises CardError for a name that
    is not a key of a card."""
    if not isinstance(notes, Mapping):
        raise CardError(f"expected entries KEY, KEY: TEXT; got {notes!r:.60}")
    result = {}
    for names, text in notes.items():
        for name in str(names).split(","):
            if name.strip() not in CARD_KEYS:
                raise CardError(
                    f"not a key of a GPU card{_nearest(name.strip(), CARD_KEYS)}", str(names)
                )
            result[name.strip()] = _text(text)
    return result


def _checked(
    values: object, kinds: Mapping[str, Callable[[Any], Any]], optional: frozenset[str]
) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise CardError(f"expected a section with the keys {', '.join(kinds)}; got {values!r:.60}")
    for key in values:
        if key not in kinds:
            raise CardError(f"unknown key{_nearest(str(key), kinds)}", str(key))
    missing = [key for key in kinds if key not in values and key not in optional]
    if missing:
        remedy = "add it, or start from a known card with `base: h100`"
        raise CardError(f"a GPU card needs {', '.join(missing)}; {remedy}", missing[0])
    checked = {}
    for key, value in values.items():
        try:
            checked[key] = kinds[key](value)
        except CardError as error:
            raise CardError(error.message, key, *error.key) from None
    return checked


def _nearest(name: str, known: Iterable[str]) -> str:
    known = [*known]
    match = difflib.get_close_matches(name, known, 1)
    return f"; did you mean '{match[0]}'?" if match else f"; known keys here: {', '.join(known)}"


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise CardError(f"expected text, got {value!r} ({type(value).__name__}); put it in quotes")
    return value.strip()


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise CardError(f"expected a list, got {value!r:.60}; write [{value!r:.60}]")
    return tuple(_text(item) for item in value)


def _patterns(value: object) -> tuple[str, ...]:
    for pattern in _texts(value):
        try:
            re.compile(pattern)
        except re.error as error:
            raise CardError(f"{pattern!r} is not a regular expression: {error}") from None
    return _texts(value)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        remedy = f"write {value} without quotes" if _is_quoted_number(value) else GIVE_ONE
        raise CardError(f"expected a number, got {value!r:.60} ({type(value).__name__}); {remedy}")
    if not 0 < value < math.inf:
        raise CardError(f"{value!r} is not a number above 0; {GIVE_ONE}")
    if value > LARGEST:
        raise CardError(f"{value!r:.30} is above {LARGEST:,}; give a smaller number")
    return float(value)


def _rate(value: Any) -> float:
    if _number(value) > LARGEST_RATE:
        raise CardError(
            f"{value!r:.30} is above {LARGEST_RATE}: a rate is in TFLOP/s or GB/s, 10^12 FLOP or "
            f"10^9 bytes per second; give at most {LARGEST_RATE}"
        )
    return float(value)


def _is_quoted_number(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\d+(\.\d*)?([eE][+-]?\d+)?", value) is not None


def _count(value: Any) -> int:
    if _number(value) != int(value):
        near = f"use {max(int(value), 1)} or {int(value) + 1}"
        raise CardError(f"expected a whole number, got {value!r}; {near}")
    return int(value)


def _capability(value: object) -> str:
    text = str(value)
    if not re.fullmatch(r"\d+\.\d+a?", text):
        raise CardError(f'{text!r} is not a compute capability; write one like "8.9" or "9.0a"')
    return text


def _version(value: object) -> str:
    if not re.fullmatch(r"\d+\.\d+\.\d+", str(value)):
        raise CardError(f'{value!r} is not a version; write three numbers, as in "12.8.0"')
    return str(value)


GIVE_ONE = (
    "give one, or leave the key out if the value is unknown (a key that a card needs is then read "
    "from `base: CARD`)"
)
LARGEST, LARGEST_RATE = 10**18, 10**6
CARD_KEYS: dict[str, Callable[[Any], Any]] = {
    "name": _text,
    "title": _text,
    "aliases": _texts,
    "device_kinds": _patterns,
    "memory_gb": _number,
    "memory_bytes": _count,
    "bf16_tflops": _rate,
    "fp16_tflops": _rate,
    "fp8_tflops": _rate,
    "fp32_tflops": _rate,
    "memory_gb_per_s": _rate,
    "node_devices": _count,
    "node_gb_per_s": _rate,
    "network_gb_per_s": _rate,
    "host_gb_per_s": _rate,
    "disk_gb_per_s": _rate,
    "measured": lambda section: section,
    "compiler": lambda section: section,
    "sources": split_notes,
    "assumptions": split_notes,
}
CARD_OPTIONAL = frozenset(
    {"title", "aliases", "device_kinds", "memory_gb", "measured", "compiler"}
    | {"sources", "assumptions"}
    | {"bf16_tflops", "fp16_tflops", "fp8_tflops", "fp32_tflops", "disk_gb_per_s"}
)
COMPILER_KEYS: dict[str, Callable[[Any], Any]] = {
    "description": _text,
    "capability": _capability,
    "cores": _count,
    "clock_ghz": _number,
    "l2_bytes": _count,
    "bytes_per_second": _count,
    "memory_bytes": _count,
    "nvlinks": _count,
    "runtime_version": _version,
    "dnn_version": _version,
}


class MeasuredKey(NamedTuple):
    """Meaning of a key of a card's section `measured`.

    Attributes:
      field: field of `Measured`.
      unit: value of one unit.
      published: keys of the card with the published rate; the first that the card has counts.
      most: largest measured rate, as a multiple of the published one.
    """

    field: str
    unit: float
    published: tuple[str, ...]
    most: float


MEASURED = {
    "product_tflops": MeasuredKey("product_flops", 1e12, ("bf16_tflops", "fp16_tflops"), 1.0),
    "copy_gb_per_s": MeasuredKey("copy_bandwidth", 1e9, ("memory_gb_per_s",), 1.05),
    "host_gb_per_s": MeasuredKey("host_bandwidth", 1e9, ("host_gb_per_s",), 1.05),
    "host_both_gb_per_s": MeasuredKey("host_both", 1e9, ("host_gb_per_s",), 2.1),
    "node_gb_per_s": MeasuredKey("node_bandwidth", 1e9, ("node_gb_per_s",), 1.05),
}
COMPILER_OPTIONAL = frozenset({"memory_bytes", "nvlinks", "runtime_version", "dnn_version"})
