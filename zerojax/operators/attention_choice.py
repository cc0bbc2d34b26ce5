"""Chooses the implementation of attention from the devices of a step and the arguments of a call.

Inside a step, the devices are those of the mesh under which the model is traced. A plan traces the
model for other devices, and sets them by `attention_planned_for`.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Literal

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Tree
from zerojax.hardware.gpus import Gpu, gpu_of_device, named_gpu
from zerojax.operators import cudnn_attention as cudnn
from zerojax.operators import kernel_attention as kernels
from zerojax.operators.chunked_attention import Visibility
from zerojax.operators.sparse_layouts import BlockTable

Implementation = Literal["auto", "xla", "chunked", "cudnn", "mosaic_gpu"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("auto", "xla", "chunked", "cudnn", "mosaic_gpu")
SET_BY_CALL = "set by the call"
"""Reason for an implementation that the call names, in contrast to a choice by "auto"."""

LONGEST_STORED = 4096
"""Maximum number of keys for which "auto" stores all scores if cuDNN does not support the call. The
scores of one sequence of 8192 tokens and 32 heads are 8 GiB in float32."""


@dataclass(frozen=True)
class Device:
    """Device for which an implementation is chosen.

    Attributes:
      kind: device kind that the driver reports; None if unknown.
      platform: "gpu", "cpu" and so on; None if unknown.
      split: number of devices over which the compiler splits the heads.
      where: "step" inside a mesh; "plan" if the trace is only analysed and never run; else "alone".
    """

    kind: str | None
    platform: str | None
    split: int
    where: Literal["step", "plan", "alone"]

    @property
    def is_gpu(self) -> bool:
        return self.platform in ("gpu", "cuda")

    def why_no_gpu(self) -> str | None:
        """Returns the reason why GPU code cannot run on the device; None if it can or may."""
        if self.platform is None or self.is_gpu:
            return None
        return (
            f"this implementation needs an NVIDIA GPU, but the devices are {self.platform.upper()}s"
        )

    @property
    def capability(self) -> float:
        """Compute capability; 0 for an attached device that reports none, such as a CPU; for an
        unknown device, the minimum that cuDNN needs."""
        here = [d for d in jax.devices() if d.device_kind == self.kind]
        if here:
            known = str(getattr(here[0], "compute_capability", ""))
            return float(known) if re.fullmatch(r"\d+(\.\d+)?", known) else 0.0
        card = _card(self.kind)
        known = None if card is None or card.target is None else card.target.capability
        # A target may end with a letter, as "9.0a".
        return float(known.rstrip("af")) if known else cudnn.MIN_CAPABILITY

    def describe(self) -> str:
        card = _card(self.kind)
        return str(self.kind) if card is None else card.title


_PLANNED: contextvars.ContextVar[Device | None] = contextvars.ContextVar("planned", default=None)


@contextlib.contextmanager
def attention_planned_for(
    mesh: Mesh | AbstractMesh, compiler_axes: Sequence[str] = ()
) -> Iterator[None]:
    """Sets the mesh for which models are traced inside this context, to analyse them for a plan.

    Calls of attention choose implementations for the devices of this mesh. The traces are never
    run, so a library call is replaced by an implementation that can be traced for any device.

    Args:
      mesh: mesh of the step.
      compiler_axes: mesh axes over which the compiler partitions arrays in the step.
    """
    abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    split = math.prod(abstract.shape[name] for name in compiler_axes)
    token = _PLANNED.set(_device_of(abstract, split, "plan"))
    try:
        yield
    finally:
        _PLANNED.reset(token)


_MEASURED: contextvars.ContextVar[Mapping[str, str] | None]
_MEASURED = contextvars.ContextVar("measured", default=None)


@contextlib.contextmanager
def attention_measured(choices: Mapping[str, str]) -> Iterator[None]:
    """Sets, inside this context, measured implementations that "auto" uses for calls of certain
    sizes.

    Args:
      choices: {kind of a call (`kind_of`): implementation}; other keys have no effect.
    """
    token = _MEASURED.set(choices)
    try:
        yield
    finally:
        _MEASURED.reset(token)


def measured_choice(kind: str | None) -> Implementation | None:
    """Returns the measured implementation for calls of a kind; None if there is none."""
    choices = _MEASURED.get()
    if kind is None or choices is None:
        return None
    return choices.get(kind)  # type: ignore[return-value]


def kind_of(
    query: jax.Array, key: jax.Array, visibility: Visibility, given: Collection[str]
) -> str | None:
    """Describes the sizes of a call in a text, which is the key of measured times.

    Returns None if the call sets any of the options `given`, for which no times are measured.

    Args:
      query, key, visibility, given: arguments as for `choose`.
    """
    if given:
        return None
    rows, tokens, heads, features = query.shape
    words = [f"attention of {rows} x {tokens} tokens to {key.shape[1]}"]
    words.append(f"{heads} heads of {features}, {key.shape[2]} of keys")
    words.append(str(query.dtype))
    words += ["causal"] * visibility.causal
    words += [] if visibility.window is None else [f"window {visibility.window}"]
    return ", ".join(words)


def _card(kind: str | None) -> Gpu | None:
    """Returns the GPU with this device kind, or with this name (which a plan's mesh contains)."""
    return None if kind is None else gpu_of_device(kind) or named_gpu(kind)


def device_here() -> Device:
    """Returns the planned device, else a device of the current mesh, else JAX's default device."""
    planned = _PLANNED.get()
    if planned is not None:
        return planned
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.axis_names:
        return _device_of(mesh, math.prod(_left_to_compiler(mesh).values()), "step")
    device = jax.devices()[0]
    return Device(device.device_kind, device.platform, split=1, where="alone")


def _device_of(mesh: AbstractMesh, split: int, where: Literal["step", "plan"]) -> Device:
    device = mesh.abstract_device
    if device is None:  # a mesh without devices, on which nothing can run
        return Device(None, None, split=split, where="plan")
    return Device(device.device_kind, device.platform, split=split, where=where)


def _left_to_compiler(mesh: AbstractMesh) -> dict[str, int]:
    """Returns {axis: size} of the mesh axes with several devices over which the compiler partitions
    arrays."""
    named = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return {name: size for name, size, kind in named if kind != AxisType.Manual and size > 1}


def choose(
    implementation: Implementation,
    device: Device,
    query: jax.Array,
    key: jax.Array,
    visibility: Visibility,
    given: Collection[str],
    table: BlockTable | None = None,
) -> tuple[Implementation, str]:
    """Chooses the implementation of a call of `attention`; returns (implementation, reason).

    Args:
      implementation: argument of the call.
      device: device that will compute the call.
      query, key: arrays of the call.
      visibility: mask by positions.
      given: names of the options among "segments", "positions", "layout", "softcap" and "sinks"
        that the call sets.
      table: block table of the layout, if any.

    Raises:
      ValueError: the call requests "cudnn" or "mosaic_gpu", which does not support its arguments or
        the device.
    """
    if implementation in ("xla", "chunked"):
        return implementation, SET_BY_CALL
    if implementation == "mosaic_gpu":
        capability = None if device.platform is None else device.capability
        unsupported = sorted({"softcap", "sinks"} & set(given))
        names = " or ".join(unsupported)
        why_not = f"they do not support {names}" if unsupported else device.why_no_gpu()
        why_not = why_not or kernels.obstacle(
            query, key, table, capability=capability, split=device.split
        )
        if why_not:
            raise ValueError(
                f"attention by Mosaic GPU: {why_not}; use implementation='auto', or 'chunked', "
                "which gives the same results (model.attention in a run file)"
            )
        return "mosaic_gpu", SET_BY_CALL
    why_not = device.why_no_gpu() or cudnn.obstacle(
        query, key, visibility, given=given, capability=device.capability, split=device.split
    )
    if implementation == "cudnn":
        if why_not:
            raise ValueError(
                f"attention by cuDNN: {why_not}; use implementation='auto', or 'chunked', which "
                "stores no scores either (model.attention in a run file)"
            )
        return "cudnn", SET_BY_CALL
    # Devices of unknown platform may be no GPUs; only a call that names cuDNN gets it there.
    if why_not is None and device.platform is not None:
        return "cudnn", f"auto: {query.dtype} heads of {query.shape[-1]} on {device.describe()}"
    because = f"cuDNN: {why_not}; " if device.is_gpu else ""
    if "layout" in given:
        return "chunked", f"auto: {because}the call has a layout"
    is_long = key.shape[1] > LONGEST_STORED
    limit = "more" if is_long else "no more"
    return ("chunked" if is_long else "xla"), f"auto: {because}{limit} than {LONGEST_STORED} keys"


def on_each_device(run: Callable[..., jax.Array], *more: Tree) -> Callable[..., jax.Array]:
    """Wraps an attention function so that each device computes its own heads.

    The compiler cannot partition a library call, and would gather the operands for an axis over
    which it partitions arrays. Every such axis therefore becomes manual inside the wrapper.

    Args:
      run: function of query, key, value and `more`.
      more: further arguments, the same on all devices.
    """
    left = _left_to_compiler(jax.sharding.get_abstract_mesh())
    if not left:
        return lambda *operands: run(*operands, *more)
    # `choose` has refused key/value heads that are not divisible by these axes.
    heads, whole = PartitionSpec(None, None, tuple(left)), PartitionSpec()
    specs = (heads,) * 3 + (whole,) * len(more)
    mapped = jax.shard_map(
        run, in_specs=specs, out_specs=heads, axis_names=set(left), check_vma=False
    )
    return lambda *operands: mapped(*operands, *more)
