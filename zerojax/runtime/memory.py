"""Reads the memory limits of this process (kernel, cgroup, ulimit), and sets options of malloc.

It also records in errors what the requested memory was for. This module imports no JAX.
"""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.loader import user_path

F = TypeVar("F", bound=Callable[..., Any])
PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""Environment variable with the maximum pinned host memory in GiB that XLA uses for all GPUs of a
process. XLA's pool grows by doubling, so with a limit above the free memory it requests more memory
than is free."""
SPARE = 0.95
"""Share of the free memory that a plan may use; the rest is for Python, JAX and the data."""
GIB = 2**30
PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = 2**60  # cgroup v1 writes "no limit" as a number near 2^63
TRAINING_STEP = "the training step"
"""Purpose passed to `allocating_for` for the memory that the training step allocates."""
_PURPOSE = "_zerojax_allocating_for"
"""Name of an exception's attribute that says what the requested memory was for."""
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
_NEVER = -1


class allocating_for:
    """Records what memory is for in errors raised inside a `with` block or a decorated function.

    The innermost block has priority. `purpose_of` reads the purpose, so that a report of
    insufficient memory can name it without knowing where the allocation was.

    Args:
      purpose: noun phrase for the purpose, such as "an evaluation".
    """

    def __init__(self, purpose: str) -> None:
        self._purpose = purpose

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception) and purpose_of(error) is None:
            setattr(error, _PURPOSE, self._purpose)

    def __call__(self, function: F) -> F:
        @functools.wraps(function)
        def call(*args: object, **options: object) -> Any:
            try:
                return function(*args, **options)
            except Exception as error:
                self.__exit__(type(error), error, None)
                raise

        return cast(F, call)


def purpose_of(error: BaseException) -> str | None:
    """Returns the purpose that `allocating_for` recorded in an error, or None."""
    return getattr(error, _PURPOSE, None)


@dataclass(frozen=True)
class Room:
    """A memory limit (of the kernel, a cgroup or ulimit) and the bytes that are free under it.

    Attributes:
      limit: bytes that all processes under the limit share.
      free: unused bytes of the limit.
      source: noun phrase that says what sets the limit.
    """

    limit: int
    free: int
    source: str


def rooms() -> list[Room]:
    """Returns all known memory limits of this process, the one with the least free bytes first."""
    found = [*_machine(), *_cgroups(), *_process()]
    return sorted(found, key=lambda room: room.free)


def least_room() -> Room | None:
    """Returns the memory limit that this process would reach first; None if none is known."""
    return next(iter(rooms()), None)


def pinned_limit_for(room: Room | None) -> int | None:
    """Returns the value in GiB for `PINNED_LIMIT`: the host memory that a plan may use; None if
    `room` is None."""
    return None if room is None else max(int(room.free * SPARE) // GIB, 1)


def _machine() -> Iterator[Room]:
    """Yields this machine's memory, with the free part that the kernel estimates without swapping
    (proc_meminfo(5))."""
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
    """Reads a file that has a name and a number in each line; returns {name: number}."""
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
    """Returns a folder if it exists, otherwise its nearest existing parent."""
    place = user_path(folder).absolute()
    while not place.exists():
        place = place.parent
    return place


@functools.cache
def keep_freed_memory() -> bool:
    """Makes glibc keep freed memory, which speeds up programs that compute on the CPU.

    Commands and `make_mesh` call it before JAX starts if they know that it starts on the CPU, and
    `build_step` and `build_evaluation` if the mesh is of CPU devices. A malloc arena that a thread
    has by then is not removed: a step on one CPU device then still has most of its page faults, and
    one on 8 devices nearly none.

    XLA on the CPU allocates the temporary memory of a program at each run. glibc returns blocks of
    that size to the kernel, which clears every page again at the next step: 60,000 page faults and
    a quarter of the processor time per step, for a GPT of 3.5 million parameters and a batch of
    8 x 256 (`benchmarks/README.md`). The cost is that the process keeps its largest size. Settings
    of malloc in the environment, such as `MALLOC_TRIM_THRESHOLD_=131072`, are left as they are.

    A process on 8 CPU devices grows during its first steps in any case. With 3 million parameters
    it used 608 MiB after the first step and 848 MiB after the sixth under `jax.jit` alone, and
    708 MiB after the sixth and 745 MiB after the twenty-first under `zerojax.train`. The live
    arrays were always 27 MiB (`jax.live_arrays`); the rest is working memory of XLA's threads.

    Returns:
      True if the option was set; False if the C library is not glibc, or the environment sets
      malloc.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018 - only glibc has this attribute
        mallopt = libc.mallopt
    except (OSError, AttributeError, TypeError):
        return False
    # One arena first: with more, the other two settings have no effect (README.md, 2026-11-21).
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER))
    return all(mallopt(name, value) == 1 for name, value in settings)
