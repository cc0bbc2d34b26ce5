"""Caches compiled programs on disk, so that the next start of the same run does not compile again.

Uses JAX's persistent compilation cache, in the user's cache folder unless another folder is set.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import zlib
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from zerojax.runtime.user_files import CACHE_VARIABLE, replace_text, user_cache

MAX_BYTES = 8 << 30
"""Maximum total bytes of all cached programs; the oldest are removed when a run starts."""
_WHOLE = "whole"
"""Name of the file that lists the cache entries known to be complete."""
_ZLIB = b"\x78"
_PIECE = 1 << 22
MIN_SECONDS = 0.1
"""Minimum compile time in seconds of a program that is cached."""
_SAFE_ON_CPU = (0, 11)
"""Oldest version of JAX that reads CPU programs from the cache reliably; older versions may
crash."""


def keep_programs() -> str | None:
    """Turns on JAX's persistent cache for the programs that this process compiles.

    Changes nothing if JAX's own settings name a folder or switch its cache off, or if ZEROJAX_CACHE
    is "off". On CPUs with several processes it turns JAX's cache off.

    Returns:
      A sentence for the log; None if nothing was changed.
    """
    root, config = user_cache(), jax.config
    on_cpu = jax.default_backend() == "cpu"
    if on_cpu and jax.process_count() > 1:
        return _keep_none()
    if root is None or config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        return None
    if on_cpu and jax.__version_info__ < _SAFE_ON_CPU:
        return None
    # XLA compiles for the processor it runs on, and several machines may share a folder.
    folder = root / "programs" / (_processor() if on_cpu else jax.default_backend())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _keep_within(folder.parent, MAX_BYTES)
        _remove_torn(folder)
    except OSError as error:
        return f"compiled programs are not cached: {folder}: {error.strerror}"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_SECONDS)
    compilation_cache.reset_cache()  # JAX has remembered that no folder was set
    return (
        f"compiled programs are cached in {folder} for the next start ({CACHE_VARIABLE}=off "
        "disables it)"
    )


def _keep_none() -> str | None:
    """Turns off JAX's cache for several processes on CPUs; returns a sentence for the log.

    JAX's keys differ between processes on CPUs, and only process 0 writes. At the next start
    process 0 would read the step from the cache, and the others compile it; both programs then may
    wait for each other in different collectives, forever (seen with JAX 0.12.0).
    """
    if not jax.config.jax_enable_compilation_cache:
        return None
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    return (
        "compiled programs are not cached: with several processes on CPUs, a cached step may hang"
    )


def _processor() -> str:
    """Returns a name that is equal for processors of the same model and instruction set."""
    words = [platform.machine()]
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        words += sorted({x for x in lines if x.startswith(("model name", "flags", "Features"))})
    return "cpu-" + hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]


def _remove_torn(folder: Path) -> None:
    """Removes cache entries that were written only in part, for example by a killed process.

    JAX writes entries in place, warns of a damaged entry at every start, and never replaces it.
    Entries found complete once are not read again. Only zlib's format is checked. With the package
    zstandard installed JAX uses another format; such entries stay.
    """
    path = folder / _WHOLE
    whole = set(path.read_text().split()) if path.exists() else set()
    entries = {entry for entry in os.listdir(folder) if entry.endswith("-cache")}
    for name in sorted(entries - whole):
        with contextlib.suppress(OSError):  # another process removed it
            if _is_whole(folder / name):
                whole.add(name)
            else:
                (folder / name).unlink()
    replace_text(path, "".join(f"{name}\n" for name in sorted(whole & entries)))


def _is_whole(path: Path) -> bool:
    """Returns True if a file in zlib's format is complete, or if the file has another format."""
    stream = zlib.decompressobj()
    with open(path, "rb") as file:
        data = file.read(_PIECE)
        if data[:1] != _ZLIB:
            return bool(data)
        while data:
            try:
                stream.decompress(data)
            except zlib.error:
                return False
            data = file.read(_PIECE)
    return stream.eof


def _keep_within(folder: Path, limit: int) -> None:
    """Removes the oldest files of a folder until the other files have at most `limit` bytes."""
    found: list[tuple[float, int, str]] = []
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # another process removed it
                path = os.path.join(place, name)
                stat = os.lstat(path)
                found.append((stat.st_mtime, stat.st_size, path))
    excess = sum(size for _, size, _ in found) - limit
    for _, size, path in sorted(found):
        if excess <= 0:
            return
        with contextlib.suppress(OSError):
            os.remove(path)
            excess -= size
