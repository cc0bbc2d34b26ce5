"""Explains out-of-memory errors: the failed request, the bytes of the plan, and the settings that
reduce memory.

The explanation needs no device memory and compiles nothing.
"""

from __future__ import annotations

import contextlib
import math
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Tree
from zerojax.forecasting.remedies import PRICES, SMALL, Remedy, all_remedies
from zerojax.hardware import compile_client
from zerojax.hardware.gpus import gpu_of_device
from zerojax.hardware.local_devices import device_kind, device_memory
from zerojax.plan.counts import ACTIVATIONS, GATHERED, GRADIENTS, role_bytes
from zerojax.plan.make import Plan
from zerojax.runtime.memory import TRAINING_STEP, least_room, purpose_of
from zerojax.tracing.trees import format_bytes

NUM_REMEDIES = 3
COMPILING = f"compiling {TRAINING_STEP}"
_JAX_COMPILER = "jax._src.compiler"
"""JAX module whose frames are in the traceback of a failed compilation, unless JAX removes its own
frames (tests/training/test_monitor_memory.py makes a compilation fail)."""

RunNow = Callable[[], tuple[Plan, Any, int, Any]]
"""Function without arguments that returns (plan, state or None, number of completed steps, jitted
step or None)."""

START = "out of memory"
"""First words of the page, which identify it among an error's notes."""
PROFILE = "memory.prof"
_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"(?P<size>\d+(?:\.\d+)?)\s?(?P<unit>[KMGT]?)(?:i?B|\b)"
_ASKED = (
    # XLA on CPU: "RESOURCE_EXHAUSTED: Out of memory allocating 3200000000 bytes."
    re.compile(r"[Oo]ut of memory (?:while trying to allocate|allocating) (?P<bytes>\d+) bytes"),
    # XLA's allocators on GPUs: https://github.com/patrick-kidger/equinox/issues/737
    re.compile(r"Failed to allocate request for \S+ \((?P<bytes>\d+)B\) on device ordinal \d+"),
    re.compile(r"[Oo]ut of memory (?:while trying to allocate|allocating) " + _SIZE),
    # The compiler for TPUs: https://github.com/LargeWorldModel/LWM/issues/60
    re.compile(r"Ran out of memory in memory space \w+\. Used " + _SIZE),
    # NumPy: "Unable to allocate 7.45 GiB for an array with shape (1000, 1000000) and ..."
    re.compile(r"Unable to allocate " + _SIZE + r" for an array"),
)
_KINDS = (
    "RESOURCE_EXHAUSTED",
    "Resource exhausted",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "Out of memory while trying to allocate",
)


@contextlib.contextmanager
def explaining_memory(now: RunNow, folder: Path | None) -> Iterator[None]:
    """Context manager that adds a note to an out-of-memory error raised in its block: one page with
    remedies.

    The error itself is unchanged. Nothing is compiled for the page; JAX still has the compiler's
    report if the step has been compiled.

    Args:
      now: function that is called after the failure and returns the state of the run.
      folder: folder of the run, to which a memory profile is written. None: no profile is written.
    """
    try:
        yield
    # Only errors are explained: an interrupt by the user is no lack of memory.
    except Exception as error:
        asked = find_memory_request(error)
        if asked is not None:
            error.add_note(draw(explain(error, asked, now, folder)))
        raise


def explain(error: BaseException, asked: MemoryRequest, now: RunNow, folder: Path | None) -> Page:
    """Collects the contents of the page that explains an out-of-memory error."""
    # Everything is asked after the failure, so a run that does not fail pays nothing.
    plan, state, num_steps, step = now()
    activity = find_activity(error, asked)
    sizes, source = sizes_by_role(plan, asked, None if activity == COMPILING else step, activity)
    device = device_now()
    excess = _excess(asked, device.free)
    if activity == TRAINING_STEP:
        # The step that failed may be the last one that was dispatched, or an earlier one.
        activity = f"{TRAINING_STEP} (number {max(num_steps, 1)} at the latest)"
    return Page(
        asked=asked,
        activity=activity,
        device=device,
        sizes=sizes,
        source=source,
        living=tuple(largest_arrays(state)),
        excess=excess,
        remedies=tuple(cheapest_remedies(plan, sizes, excess)),
        profile=save_profile(folder),
    )


def find_activity(error: BaseException, asked: MemoryRequest) -> str:
    """Finds out what a run was doing when memory ran out, such as "making the first state".

    Returns:
      The text of the innermost `allocating_for` block, or `COMPILING`.
    """
    purpose = purpose_of(error)
    # A compilation inside a step looks like the step: only the traceback tells them apart.
    if purpose in (TRAINING_STEP, None) and (asked.by_compiler or _left_the_compiler(error)):
        return COMPILING
    return purpose or "the run"


def _left_the_compiler(error: BaseException) -> bool:
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__") == _JAX_COMPILER for frame in frames)


def sizes_by_role(
    plan: Plan, asked: MemoryRequest, step: Any, activity: str
) -> tuple[dict[str, int], str]:
    """Estimates the bytes of each role on a device at the peak.

    The state is exact; weights and gradients are by formula. There is no formula for activations:
    they are the temporary memory of the compiled step, or the failed request, minus the other
    roles.

    Returns:
      ({role: bytes per device at the peak}, text that says where the numbers come from).
    """
    sizes = {role: size for role, size in role_bytes(plan).items() if size}
    passing = sizes.get(GATHERED, 0) + sizes.get(GRADIENTS, 0)
    # Elsewhere, as when a state is made, there are no activations to estimate.
    if activity not in (TRAINING_STEP, COMPILING):
        return sizes, "by formula, without activations"
    temporary = _compiled_temporary(plan, step)
    if temporary is not None:
        rest, source = (
            temporary - passing,
            "temporary memory from the compiler's report, other roles by formula",
        )
    elif asked.size is not None:
        rest, source = (
            asked.size - passing,
            "temporary memory from the failed request, other roles by formula",
        )
    else:
        return sizes, "by formula, without activations"
    return (sizes | {ACTIVATIONS: rest}, source) if rest > 0 else (sizes, source)


def _compiled_temporary(plan: Plan, step: Any) -> int | None:
    # With pages a step has several programs, and `step` is none of them.
    if step is None or (plan.offload is not None and plan.offload.paged):
        return None
    try:
        compiled = step.lower(plan.abstract_state, plan.abstract_batch).compile()
        return compile_client.memory_of(compiled).temporary
    except Exception:  # there may be too little memory for this, too; the page omits it
        return None


def _excess(asked: MemoryRequest, free: int | None) -> int | None:
    if asked.size is None:
        return None
    # An unknown rest counts as none: the remedies are then sufficient in any case.
    return max(asked.size - (free or 0), 0)


def cheapest_remedies(plan: Plan, sizes: Mapping[str, int], excess: int | None) -> list[Remedy]:
    """Returns the three remedies that cost the least time; remedies that are sufficient alone come
    first."""
    needed = sum(sizes.values())
    found: dict[str, Remedy] = {}
    for remedy in all_remedies(plan, gpu_of_device(device_kind()), dict(sizes)):
        # A remedy without a price needs more devices, which this run does not have.
        if remedy.price is None or (remedy.saving or 0) < SMALL * needed:
            continue
        # Words are settings such as `mesh.zero=2`, and only one value of a setting can be used.
        key = remedy.words.partition("=")[0]
        # Of several values of a setting, take the first that is enough, else the largest saving.
        if key not in found or not _suffices(found[key], excess):
            found[key] = remedy
    order = sorted(found.values(), key=lambda one: (not _suffices(one, excess), one.price))
    return order[:NUM_REMEDIES]


def _suffices(remedy: Remedy, excess: int | None) -> bool:
    return excess is not None and remedy.saving is not None and remedy.saving >= excess


@dataclass(frozen=True, kw_only=True)
class Page:
    """Contents of the page that explains an out-of-memory error.

    Attributes:
      asked: the failed request.
      activity: what the run was doing.
      device: memory of the device.
      sizes: {role: bytes per device} of the plan.
      source: text that says where the bytes of activations come from.
      living: the largest arrays that exist now.
      excess: number of bytes above the limit; None if unknown.
      remedies: settings that reduce memory, the cheapest first.
      profile: path of the memory profile for `pprof`; None if none could be written.
    """

    asked: MemoryRequest
    activity: str
    device: DeviceMemory
    sizes: Mapping[str, int]
    source: str
    living: tuple[LiveArray, ...]
    excess: int | None
    remedies: tuple[Remedy, ...]
    profile: Path | None


def draw(page: Page) -> str:
    """Formats the page that explains an out-of-memory error: at most one screen, 100 columns."""
    lines = [f"{START} in {page.activity}: {_asked(page.asked)}", ""]
    lines += _row("device", _device(page.device))
    total = sum(page.sizes.values())
    lines += _row("plan", f"{format_bytes(total)} on each device at the peak ({page.source}):")
    ordered = sorted(page.sizes.items(), key=lambda item: item[1], reverse=True)
    lines += [f"            {format_bytes(size):>10}  {role}" for role, size in ordered]
    if page.living:
        lines += _row("in use now", "the largest arrays, on each device:")
    for one in page.living:
        several = f" ({one.count} of them)" if one.count > 1 else ""
        lines.append(f"            {format_bytes(one.size):>10}  {one.name}{several}")
    lines += ["", *_remedies(page)]
    if page.profile is not None:
        lines += ["", f"What created each array: pprof -top {page.profile}"]
    return "\n".join(lines)


def _row(label: str, text: str) -> list[str]:
    return [f"{label:<11} {text}"]


def _asked(asked: MemoryRequest) -> str:
    if asked.size is None:
        return asked.text
    if asked.by_compiler:
        return f"the compiled step needs {format_bytes(asked.size)}"
    return f"{format_bytes(asked.size)} ({asked.size:,} bytes) were requested at once"


def _device(device: DeviceMemory) -> str:
    words = [f"{device.name}: {format_bytes(device.in_use)} in use"]
    if device.limit is not None:
        by = f" by {device.source}" if device.source else ""
        words.append(f"limit {format_bytes(device.limit)}{by}")
    if device.free is not None:
        words.append(f"{format_bytes(device.free)} left")
    return ", ".join(words)


def _remedies(page: Page) -> list[str]:
    if not page.remedies:
        return [
            "No setting of this plan saves much memory: use more devices, or devices with more "
            "memory"
        ]
    lines = ["The cheapest settings that save memory (by formula, for each device):"]
    for remedy in page.remedies:
        assert remedy.saving is not None
        assert remedy.price is not None
        enough = page.excess is not None and remedy.saving >= page.excess
        lines.append(f"  {remedy.words}")
        saves = f"saves about {format_bytes(remedy.saving)}{', enough' if enough else ''}"
        lines.append(f"      {saves}: {remedy.why}")
        lines.append(f"      costs {PRICES[remedy.price]}")
    return lines


@dataclass(frozen=True, kw_only=True)
class LiveArray:
    """One array in device memory, or several arrays with the same name.

    Attributes:
      name: name of the array in the training state; dtype and shape for other arrays.
      size: bytes on the first local device that holds a part of it.
      count: number of arrays.
    """

    name: str
    size: int
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Memory of the local device with the most bytes in use, or of the process if devices have no
    memory of their own.

    Attributes:
      name: name of the device.
      in_use: number of bytes in use.
      limit, free: numbers of bytes; None if they are not known.
      source: who sets the limit.
    """

    name: str
    in_use: int
    limit: int | None
    free: int | None
    source: str


def device_now() -> DeviceMemory:
    """Measures the memory of the local device with the most bytes in use."""
    memory = device_memory()
    if memory["source"] == "device":
        # A backend without a limit reports 0.
        limit = memory["limit"] or None
        free = None if limit is None else max(limit - memory["in_use"], 0)
        name = device_kind()
        return DeviceMemory(
            name=name, in_use=memory["in_use"], limit=limit, free=free, source="JAX"
        )
    room = least_room()
    return DeviceMemory(
        name=f"{device_kind()}, in the memory of this process",
        in_use=memory["in_use"],
        limit=None if room is None else room.limit,
        free=None if room is None else room.free,
        source="" if room is None else room.source,
    )


def largest_arrays(state: Tree, count: int = 5) -> list[LiveArray]:
    """Returns the existing arrays that take the most memory of a device now, largest first.

    Args:
      state: training state as a tree, which gives arrays their names; None: arrays have no names.
      count: largest number of arrays to return.
    """
    names: dict[Any, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        names[id(leaf)] = name = jax.tree_util.keystr(path, simple=True, separator="/")
        # A failed step leaves arrays without names: its arguments.
        names.setdefault((leaf.dtype, leaf.shape), f"{leaf.dtype}{list(leaf.shape)}, like {name}")
    found: dict[str, LiveArray] = {}
    for array in jax.live_arrays():
        # The run may have donated arrays whose memory is another array's now.
        if array.is_deleted():
            continue
        like = names.get((array.dtype, array.shape), f"{array.dtype}{list(array.shape)}")
        name = names.get(id(array), like)
        before = found.get(name, LiveArray(name=name, size=0, count=0))
        size = before.size + _shard_size(array)
        found[name] = LiveArray(name=name, size=size, count=before.count + 1)
    return sorted(found.values(), key=lambda one: one.size, reverse=True)[:count]


def _shard_size(array: jax.Array) -> int:
    # On a device there is a shard of the array, and a page speaks of one device.
    shape: tuple[int, ...] = array.sharding.shard_shape(array.shape)
    return math.prod(shape) * array.dtype.itemsize


def save_profile(folder: Path | None) -> Path | None:
    """Writes a memory profile with the origin of every array, for `pprof`; returns its path, or
    None if it cannot be written now."""
    if folder is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        jax.profiler.save_device_memory_profile(str(folder / PROFILE))
    except Exception:  # it is optional, and a failure here must not hide the first error
        return None
    return folder / PROFILE


@dataclass(frozen=True, kw_only=True)
class MemoryRequest:
    """A failed request for memory.

    Attributes:
      size: number of requested bytes; None if the message does not state it.
      by_compiler: whether the compiler found, before anything ran, that the whole program does not
        fit.
      on_host: whether host memory was requested, not the memory of a device.
      text: first line of the error message.
    """

    size: int | None
    by_compiler: bool
    on_host: bool
    text: str


def find_memory_request(error: BaseException) -> MemoryRequest | None:
    """Parses the failed memory request from an error; returns None for any other error."""
    text = str(error)
    # JAX raises one class for all errors of XLA, so only the text shows what happened.
    if not isinstance(error, MemoryError) and not any(kind in text for kind in _KINDS):
        return None
    # A quota, a limit of gRPC or of threads is "resource exhausted" as well.
    if not isinstance(error, MemoryError) and "memory" not in text.lower() and "alloc" not in text:
        return None
    by_compiler = "Ran out of memory in memory space" in text
    return MemoryRequest(
        size=_size(text),
        by_compiler=by_compiler,
        on_host=isinstance(error, MemoryError),
        text=next(iter(text.splitlines()), ""),
    )


def _size(text: str) -> int | None:
    for pattern in _ASKED:
        match = pattern.search(text)
        if match is not None:
            found = match.groupdict()
            if "bytes" in found:
                return int(found["bytes"])
            return round(float(found["size"]) * _UNITS[found["unit"]])
    return None
