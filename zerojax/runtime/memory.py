"""Reads the memory limits of this process (kernel, cgroup, ulimit), and sets malloc's options.

It also attaches purposes to errors. This module imports no JAX.
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
"""Variable that sets the most pinned host memory that XLA uses for all GPUs of a process, in GiB.
XLA's pool grows by doubling, so with a limit above the free memory it requests more than
there is."""
SPARE = 0.95
"""Share of the free memory that a plan may use: Python, JAX and the data need some."""
GIB = 2**30
PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = 2**60  # cgroup v1 writes "no limit" as a number near 2^63
TRAINING_STEP = "the training step"
"""Purpose, for `allocating_for`, of the memory that the training step allocates."""
_PURPOSE = "_zerojax_allocating_for"
"""Attribute of an exception that holds the purpose of the memory that was to be allocated."""
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
_NEVER = -1


@contextlib.contextmanager
def allocating_for(purpose: str) -> Iterator[None]:
    """Attaches a purpose of memory to errors raised in a block or in a decorated function.

    The innermost block counts. `purpose_of` reads the purpose, so that a report of insufficient
    memory says what the memory was for, wherever that code is.

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
    """Returns the purpose of memory that `allocating_for` attached to an error, or None."""
    return getattr(error, _PURPOSE, None)


@dataclasses.dataclass(frozen=True)
class Room:
    """Memory that one limit (of the kernel, a cgroup or ulimit) leaves free, in bytes.

    Attributes:
      limit: shared by all processes under it.
      free: unused part of it.
      source: what sets the limit.
    """

    limit: int
    free: int
    source: str


def rooms() -> list[Room]:
    """Returns all known memory limits of this process, the tightest first; [] if none is known."""
    found = [*_machine(), *_cgroups(), *_process()]
    return sorted(found, key=lambda room: room.free)


def least_room() -> Room | None:
    """Returns the limit of memory that this process reaches first; None if none is known."""
    return next(iter(rooms()), None)


def pinned_limit_for(room: Room | None) -> int | None:
    """Returns a value for `PINNED_LIMIT`, in GiB: the host memory that a plan may use; None if
    unknown."""
    return None if room is None else max(int(room.free * SPARE) // GIB, 1)


def _machine() -> Iterator[Room]:
    """Yields the memory that the kernel estimates as free without swapping (proc_meminfo(5))."""
    values = _table(PROC / "meminfo", ":")
    total, free = values.get("MemTotal"), values.get("MemAvailable")
    if total is not None and free is not None:
        yield Room(1024 * total, 1024 * free, "MemAvailable of this machine")


def _cgroups() -> Iterator[Room]:
    """Yields the memory limits of this process's cgroups and their parents, in version 2 and
    version 1."""
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
    """Yields the memory limits of a cgroup and its parents, as far as they are visible in a
    container.
    """
    parts = [part for part in path.split("/") if part not in ("", "..")]
    limit_file, used_file, cache_name = files
    for length in range(len(parts), -1, -1):
        folder = root.joinpath(*parts[:length])
        limit, used = _number(folder / limit_file), _number(folder / used_file)
        if limit is None or used is None or limit >= _NO_LIMIT:
            continue
        # Cached files count as used, but the kernel can drop them.
        cache = _table(folder / "memory.stat", " ").get(cache_name, 0)
        free = max(limit - max(used - cache, 0), 0)
        yield Room(limit, free, f"the memory limit of the control group {folder}")


def _process() -> Iterator[Room]:
    """Yields this process's limits of `ulimit -v` and `ulimit -d` (getrlimit(2))."""
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
    """Returns {name: first number of its line} of a file with a name and a number in each line."""
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
    """Returns the number in a file; None if the file is missing, or contains "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def free_disk(folder: str | os.PathLike[str]) -> int:
    """Returns the free bytes on the disk of a folder, or of its nearest existing parent."""
    return shutil.disk_usage(nearest_folder(folder)).free


def nearest_folder(folder: str | os.PathLike[str]) -> Path:
    """Returns a folder, or its nearest existing parent; both are on the same disk."""
    place = user_path(folder).absolute()
    while not place.exists():
        place = place.parent
    return place


def keep_freed_memory() -> bool:
    """Makes glibc keep freed memory, for programs that compute on the CPU.

    XLA on the CPU allocates the temporary memory of a program each time it runs. glibc returns
    pieces of that size to the kernel, which clears every page again at the next step: 60,000 page
    faults and a quarter of the processor time per step of a GPT of 3.5 million parameters, whole
    batch of 8 x 256 (`benchmarks/README.md`). The price is that the process stays at its largest
    size. Call it before threads start: an arena that a thread already has is not removed.

    A process on 8 CPU devices grows during its first steps, with or without this: 3 million
    parameters under `jax.jit` alone took 608 MiB after the first step and 848 after the sixth,
    under `zerojax.train` 708 after the sixth and 745 after the twenty-first. The live arrays took
    27 MiB throughout (`jax.live_arrays`), so the rest is working memory of XLA's threads.

    Returns:
      Whether it was done; False if the C library is not glibc.
    """
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018 - the attribute tells glibc from others
        mallopt = libc.mallopt
    except (OSError, AttributeError, TypeError):
        return False
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER))
    return all(mallopt(name, value) == 1 for name, value in settings)
