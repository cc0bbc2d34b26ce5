"""Chooses the implementation of a kernel, XLA or Pallas, and gives the reason."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import jax

Impl = Literal["auto", "xla", "mosaic_gpu", "interpret"]
Implementation = Literal["xla", "mosaic_gpu", "interpret"]

MIN_JAX = (0, 11)
"""Minimum version of jax; older ones cannot lower a kernel that updates a Ref by `pl.kernel`."""
MIN_COMPUTE_CAPABILITY = 8.0
"""Minimum compute capability (Ampere). The kernels were compiled for 8.0, 9.0, 10.0 and 12.0."""

KERNELS_THAT_WIN: Mapping[str, str] = {
    "adam8bit": "the kernel moves 16 bytes per parameter once, XLA 22 to 38 in several passes "
    "(counted in programs for an H200, where it took 0.98 of XLA's time for one large array)",
}
"""{kernel: reason why "auto" uses it on GPUs}. On an H200 LAMB's kernel took 0.69 of XLA's time for
an update; the kernels of AdamW and SGD took 0.92 alone and 1.01 in a whole step
(benchmarks/results/gpu_h200.json). At that time one launch updated all arrays; now there is one per
array. When a run starts, it measures these kernels on its own GPU."""
UNDECIDED: Mapping[str, str] = {
    "lamb": "the kernels of lamb move 5 to 8 % less than XLA's fusions",
    "muon": "the kernels of muon and their products move what XLA's fusions and products move, "
    "within 3 %",
}
"""{kernel: count of bytes that does not decide (in programs for an H200)}. Kernels in neither table
move the same bytes as XLA's fusion."""

SAME_BYTES = "XLA's fusion moves as many bytes"
"""Beginning of the reason if only a measurement can tell which is faster."""


class KernelUnavailable(ValueError):
    """Raised if a requested kernel cannot run; the message has the reason and a remedy."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """Chosen implementation of one kernel, with the reason.

    Attributes:
      implementation: "xla", "mosaic_gpu" or "interpret" (the kernel, run slowly on the CPU).
      reason: explanation in one line for users.
    """

    implementation: Implementation
    reason: str


def choose(
    impl: Impl, *, kernel: str, devices: Sequence[Any] | None = None, option: str = "impl"
) -> Choice:
    """Chooses the implementation of one kernel, before anything is traced.

    Args:
      impl: requested implementation. "auto": the kernel if a count or a measurement favors it and
        it can run. "xla": the reference. "mosaic_gpu": the kernel, or an error. "interpret": the
        kernel on the CPU, some 20 ms per block, for tests.
      kernel: name of the kernel, such as "adamw" or "adam8bit".
      devices: devices of the arrays; None uses `jax.devices()`.
      option: name of the option that set `impl`, for errors.

    Raises:
      KernelUnavailable: "mosaic_gpu" or "interpret" is requested, and the installed JAX or these
        devices cannot run it.
      ValueError: `impl` is unknown.
    """
    if impl not in get_args(Impl):
        near = difflib.get_close_matches(str(impl), get_args(Impl), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{option}={impl!r} is not one of {', '.join(get_args(Impl))}{hint}")
    if impl == "xla":
        return Choice("xla", "asked for")
    if impl == "interpret":
        _refuse(f"{option}={impl!r}", kernel, missing())
        return Choice("interpret", "asked for: the kernel in interpret mode, for tests")
    obstacle = missing() or _why_not_these(jax.devices() if devices is None else devices)
    if impl == "mosaic_gpu":
        _refuse(f"{option}={impl!r}", kernel, obstacle)
        return Choice("mosaic_gpu", "asked for")
    if kernel not in KERNELS_THAT_WIN:
        counted = UNDECIDED.get(kernel, f"{SAME_BYTES} as the kernel of {kernel}, in place")
        return Choice("xla", f"{counted}, and no measurement on a GPU puts the kernel ahead")
    if obstacle:
        return Choice("xla", f"the kernel of {kernel} cannot run here: {obstacle}")
    return Choice("mosaic_gpu", KERNELS_THAT_WIN[kernel])


def missing() -> str | None:
    """Returns why the installed JAX cannot build the kernels; None if it can."""
    found = tuple(int(part) for part in re.findall(r"\d+", jax.__version__)[:2])
    if found >= MIN_JAX:
        return None
    needed = ".".join(map(str, MIN_JAX))
    return f"the kernels need jax >= {needed} (so Python >= 3.12) and this is jax {jax.__version__}"


def choose_for_others(
    impl: Impl, *, kernel: str, device: Any | None, option: str = "impl"
) -> Choice:
    """Chooses like `choose`, but for devices of another machine: a requested kernel needs only the
    installed JAX.

    Args:
      impl, kernel, option: arguments of `choose`.
      device: one of the devices, with `platform`, `device_kind` and `compute_capability` (None:
        not known); None: its kind is not known. For what is not known "auto" is the reference.

    Raises:
      KernelUnavailable: "mosaic_gpu" or "interpret" is requested, and the installed JAX cannot
        build kernels.
    """
    if impl != "mosaic_gpu":
        return choose(impl, kernel=kernel, devices=[device], option=option)
    _refuse(f"{option}={impl!r}", kernel, missing())
    return Choice("mosaic_gpu", "asked for, on devices that this machine does not have")


def _refuse(asked: str, kernel: str, obstacle: str | None) -> None:
    if obstacle:
        option = asked.partition("=")[0]
        raise KernelUnavailable(
            f"{asked} for {kernel}: {obstacle}; use {option}='xla', which computes the same"
        )


def _why_not_these(devices: Sequence[Any]) -> str | None:
    if not devices:
        return "there is no device: devices is empty"
    device = devices[0]
    if device is None:
        return "the kind of the devices is not known"
    if device.platform not in ("cuda", "gpu"):
        return f"the kernels need an NVIDIA GPU and the devices are of platform {device.platform!r}"
    capability = getattr(device, "compute_capability", "")
    if capability is None:
        return f"the compute capability of {device.device_kind} is not known"
    capability = str(capability)
    if not re.fullmatch(r"\d+(\.\d+)?", capability):
        return f"the kernels need an NVIDIA GPU and this is a {device.device_kind}"
    if float(capability) < MIN_COMPUTE_CAPABILITY:
        return (
            f"the kernels need compute capability {MIN_COMPUTE_CAPABILITY} or newer and "
            f"{device.device_kind} has {capability}"
        )
    return None
