"""Memory of this process: limits (kernel, cgroup, ulimit), purposes, and malloc's settings.

This module imports no JAX.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from zerojax.config.loader import user_path

PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""The most pinned host memory that XLA takes for all GPUs of a process, in GiB. Its pool grows by
doubling, so a limit above what there is lets it ask for more than there is."""
SPARE = 0.95
"""Share of the free memory that a plan may take: Python, JAX and the data need some."""
GIB = 2**30
PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = 2**60  # cgroup v1 says "no limit" with a number near 2^63
TRAINING_STEP = "the training step"
"""The purpose of memory that the step takes; see `allocating_for`."""
_PURPOSE = "_zerojax_allocating_for"
"""Attribute of an exception."""
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
_NEVER = -1


@contextlib.contextmanager
def allocating_for(purpose: str) -> Iterator[None]:
    """An error that leaves this block, or a function decorated with it, carries a purpose.

    The innermost block counts. `purpose_of` reads it, so that a report about a lack of memory names
    what the memory was for, wherever the code of that lies.

    Args:
      purpose: a noun phrase, such as "an evaluation".
    """
    try:
        yield
    except Exception as error:
        if purpose_of(error) is None:
            setattr(error, _PURPOSE, purpose)
        raise


def purpose_of(error: BaseException) -> str | None:
    """The purpose that `allocating_for` gave an error; None where it left no such block."""
    return getattr(error, _PURPOSE, None)


@dataclasses.dataclass(frozen=True)
class Room:
    """Memory under one limit, bytes.

    Attributes:
      limit: of everybody who shares it; free: what of it is left; source: who sets it.
    """

    limit: int
    free: int
    source: str


def rooms() -> list[Room]:
    """Every limit that is known here, the tightest first; [] where nothing is known."""
    found = [*_machine(), *_cgroups(), *_process()]
    return sorted(found, key=lambda room: room.free)


def least_room() -> Room | None:
    """The limit that is met first; None where nothing is known."""
    return next(iter(rooms()), None)


def pinned_limit_for(room: Room | None) -> int | None:
    """A value for `PINNED_LIMIT`, GiB: as much as a plan may take; None where nothing is known."""
    return None if room is None else max(int(room.free * SPARE) // GIB, 1)


def _machine() -> Iterator[Room]:
    """What the kernel takes to be available without swapping (proc_meminfo(5))."""
    values = _table(PROC / "meminfo", ":")
    total, free = values.get("MemTotal"), values.get("MemAvailable")
    if total is not None and free is not None:
        yield Room(1024 * total, 1024 * free, "MemAvailable of this machine")


def _cgroups() -> Iterator[Room]:
    """The groups of this process and those above them, in version 2 and in version 1."""
    try:
        lines = (PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:  # cgroups(7): number:controllers:path
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _above(CGROUPS, path, ("memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _above(CGROUPS / "memory", path, files)


def _above(root: Path, path: str, files: tuple[str, str, str]) -> Iterator[Room]:
    """A group and those above it, as far as they are to be seen: a container sees its own alone."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    limit_file, used_file, cache_name = files
    for length in range(len(parts), -1, -1):
        folder = root.joinpath(*parts[:length])
        limit, used = _number(folder / limit_file), _number(folder / used_file)
        if limit is None or used is None or limit >= _NO_LIMIT:
            continue
        # Cached files count as used, but give way.
        cache = _table(folder / "memory.stat", " ").get(cache_name, 0)
        free = max(limit - max(used - cache, 0), 0)
        yield Room(limit, free, f"the memory limit of the control group {folder}")


def _process() -> Iterator[Room]:
    """`ulimit -v` and `ulimit -d` (getrlimit(2))."""
    used = _table(PROC / "self" / "status", ":")
    kinds = (
        (resource.RLIMIT_AS, "VmSize", "ulimit -v"),
        (resource.RLIMIT_DATA, "VmData", "ulimit -d"),
    )
    for kind, name, words in kinds:
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            yield Room(limit, max(limit - 1024 * used.get(name, 0), 0), words)


def _table(path: Path, separator: str) -> dict[str, int]:
    """{name: first number} of a file with a name and a number in each line."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        name, _, rest = line.partition(separator)
        words = rest.split()
        if words and words[0].isdigit():
            found[name] = int(words[0])
    return found


def _number(path: Path) -> int | None:
    """The number in a file; None where it is not there, or says "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def free_disk(folder: str | os.PathLike[str]) -> int:
    """Bytes that may still be written to the disk of a folder, or of the nearest one above it."""
    return shutil.disk_usage(nearest_folder(folder)).free


def nearest_folder(folder: str | os.PathLike[str]) -> Path:
    """A folder, or where it is not there yet the nearest one above it; on the same disk."""
    place = user_path(folder).absolute()
    while not place.exists():
        place = place.parent
    return place


def keep_freed_memory() -> bool:
    """Lets glibc keep what is freed, for programs that compute on the CPU.

    XLA on the CPU allocates the temporary memory of a program each time it runs. glibc returns
    pieces of that size to the kernel, which clears every page again at the next step: 60,000 page
    faults and a quarter of the processor time per step of a GPT of 3.5 million parameters, whole
    batch of 8 x 256 (`benchmarks/README.md`). The price is that the process stays at its largest
    size. Call it before threads start: an arena that a thread has already is not given up.

    A process on 8 CPU devices grows during its first steps, with or without this: 3 million
    parameters under `jax.jit` alone took 608 MiB after the first step and 848 after the sixth,
    under `zerojax.train` 708 after the sixth and 745 after the twenty-first. Arrays that were alive
    had 27 MiB throughout (`jax.live_arrays`), so the rest is what XLA's threads work in.

    Returns:
      Whether it was done; False where the C library is not glibc.
    """
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018 - the attribute tells glibc from others
        mallopt = libc.mallopt
    except (OSError, AttributeError, TypeError):
        return False
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER))
    return all(mallopt(name, value) == 1 for name, value in settings)
