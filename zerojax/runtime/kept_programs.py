"""Caches compiled programs on disk, so that the next start of the same run does not compile again.

Uses JAX's persistent compilation cache, in the user's cache folder unless another folder is set.
JAX executes whatever lies under the name of a program. So each entry has a seal, a file beside it
with a digest of name and content; entries without a correct seal are put away before JAX reads any.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import re
import secrets
import zlib
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from zerojax.config.display import quoted
from zerojax.config.regular_files import UnreadableError, open_regular
from zerojax.runtime.bounded_json import load
from zerojax.runtime.user_files import (
    CACHE_VARIABLE,
    check_private,
    make_private,
    replace_text,
    user_cache,
)

MAX_BYTES = 8 << 30
"""Maximum total bytes of all cached programs; the oldest are removed when a run starts."""
_SEAL = ".seal"
_SEAL_BYTES = 1024
_MARK = "CACHEDIR.TAG"
_MARK_TEXT = """Signature: 8a477f597d28d172789f06886806bc55
# Compiled programs of zerojax, which removes the oldest. See https://bford.info/cachedir/
"""
_TUNING = "xla_gpu_per_fusion_autotune_cache_dir"
"""Folder beside the programs in which JAX lets XLA store which of its kernels are fastest."""
_PROGRAM = re.compile(r".*-[0-9a-f]{64}-cache", re.DOTALL)
_RESULT = re.compile(r".*\.textproto", re.DOTALL)
_HEADERS = (b"\x78\x9c", b"\x28\xb5\x2f\xfd")
"""First bytes of the two formats in which JAX compresses programs: zlib, and Zstandard."""
_COMPILED = "/jax/core/compile/backend_compile_duration"
"""Event of `jax.monitoring` after a program was compiled and written."""
_PIECE = 1 << 22
MIN_SECONDS = 0.1
"""Minimum compile time in seconds of a program that is cached."""
_SAFE_ON_CPU = (0, 11)
"""Oldest version of JAX that reads CPU programs from the cache reliably; older versions may
crash."""


def keep_programs() -> str | None:
    """Turns on JAX's persistent cache for the programs that this process compiles.

    Changes nothing if JAX's own settings name a folder or switch its cache off, if ZEROJAX_CACHE is
    "off", or on CPUs with JAX before 0.11. On CPUs with several processes it turns JAX's cache off.

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
        make_private(folder)
        _mark(folder)
        unused = _check_entries(folder)
        _keep_within(folder.parent, MAX_BYTES)
    except (OSError, UnreadableError) as error:
        reason = getattr(error, "strerror", None) or error
        return f"compiled programs are not cached in {folder}: {reason}"
    # After the check of the entries, since JAX executes what it finds there.
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_SECONDS)
    compilation_cache.reset_cache()  # JAX has remembered that no folder was set
    _seal_from_now_on()
    return (
        f"compiled programs are cached in {folder} for the next start ({CACHE_VARIABLE}=off "
        f"disables it){unused}"
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


def _mark(folder: Path) -> None:
    """Marks a folder as one whose entries are ours to remove; an older version made it 0755."""
    if not (folder / _MARK).is_file():
        folder.chmod(0o700)
        replace_text(folder / _MARK, _MARK_TEXT, mode=0o600)


def _check_entries(folder: Path) -> str:
    """Makes sure that every entry under a name that JAX or XLA reads is what they wrote there.

    An entry without a correct seal is removed: another program under this name, a part of one that
    a killed process left, a damaged one. JAX would execute the first, and warn of the others at
    every start without replacing them. Anything else under such a name is not ours, so it is
    renamed.

    Returns:
      "", or the end of a sentence that names an entry, the reason and their number.
    """
    unused = []
    for name in sorted(_entries(folder)):
        path = folder / name
        try:
            why = _doubt(folder, name)
        except FileNotFoundError:
            continue  # another process removed it
        except (OSError, UnreadableError) as error:
            why = getattr(error, "strerror", None) or str(error)
        if why is not None:
            unused.append(f"{quoted(name)} {why}{_put_away(path)}")
    for entry in _entries(folder, _SEAL):
        if not os.path.lexists(folder / entry):
            _remove(_seal_path(folder / entry))
    more = f", and {len(unused) - 1} more" if len(unused) > 1 else ""
    return f"; not used, and compiled again: {unused[0]}{more}" if unused else ""


def _entries(folder: Path, suffix: str = "") -> list[str]:
    """Returns the names below a folder that JAX or XLA read, or those for which there is a file
    with a suffix. The files may be of any kind."""
    found = []
    for place, names in (("", _PROGRAM), (f"{_TUNING}/", _RESULT)):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            entries = [
                name.removesuffix(suffix)
                for name in os.listdir(folder / place)
                if name.endswith(suffix)
            ]
            found += [place + entry for entry in entries if names.fullmatch(entry)]
    return found


def _doubt(folder: Path, name: str) -> str | None:
    """Returns why an entry must not be used; None if it is what was sealed under `name`.

    Files that have not changed since they were last read are not read again.

    Raises:
      OSError: the entry is missing, is not a file that only this user can write, or is unreadable.
    """
    path = folder / name
    check_private(path)
    seal = _seal_of(path)
    if seal is None:
        return "has no seal"
    if seal.get("seen") == _identity(os.lstat(path)):
        return None
    if seal.get("digest") != _digest(folder, name):
        return "is not what was written under this name"
    _write_seal(path, seal["digest"])
    return None


def _seal_path(path: Path) -> Path:
    return path.with_name(path.name + _SEAL)


def _seal_of(path: Path) -> dict[str, Any] | None:
    try:
        seal = load(_seal_path(path), max_bytes=_SEAL_BYTES, follow=False)
    except (OSError, UnreadableError):
        return None
    return seal if isinstance(seal, dict) else None


def _write_seal(path: Path, digest: str) -> None:
    """Writes the seal of an entry: its digest, and how its file looks as long as nobody changes
    it."""
    text = json.dumps({"digest": digest, "seen": _identity(os.lstat(path))})
    replace_text(_seal_path(path), text, mode=0o600)


def _identity(found: os.stat_result) -> list[int]:
    """Returns [size, mtime, ctime, inode] of a file. Writing, replacing or renaming it changes
    them, since no program can set a ctime."""
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _put_away(path: Path) -> str:
    """Removes an entry that is ours, and renames anything else; returns how, for a message."""
    if _is_ours(path):
        _remove_entry(path)
        return ""
    aside = path.with_name(f"{path.name}.aside-{secrets.token_hex(4)}")
    with contextlib.suppress(FileNotFoundError):  # another process did it
        os.rename(path, aside)
    return f" (now {quoted(aside.name)})"


def _is_ours(path: Path) -> bool:
    """Returns True for a regular file that has a seal, begins as JAX's files do, or is empty."""
    try:
        with open(open_regular(path, follow=False), "rb") as file:
            start = file.read(4)
    except (OSError, UnreadableError):
        return False
    return not start or start.startswith(_HEADERS) or _seal_of(path) is not None


def _remove_entry(path: Path) -> None:
    """Removes an entry; raises OSError if it stays, so that JAX does not read it."""
    path.unlink(missing_ok=True)
    _remove(_seal_path(path))


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # another process removed it
        path.unlink()


@functools.cache
def _seal_from_now_on() -> None:
    """Seals each entry as soon as JAX has written it. JAX calls listeners for its whole life."""
    jax.monitoring.register_event_duration_secs_listener(_after_compiling)


def _after_compiling(event: str, duration_secs: float, **_: object) -> None:
    if event != _COMPILED or duration_secs < MIN_SECONDS:
        return
    folder = Path(jax.config.jax_compilation_cache_dir or os.devnull)
    if (folder / _MARK).is_file():
        with contextlib.suppress(OSError):
            _seal_new(folder)


def _seal_new(folder: Path) -> None:
    """Seals the entries without a seal that this process has written.

    Two processes may write the same entry, and one of them seals what the other has not finished;
    the next start then compiles this program again.
    """
    for name in _entries(folder):
        path = folder / name
        # JAX writes programs only in process 0; each process writes XLA's measurements.
        is_of_this_process = jax.process_index() == 0 or name.startswith(_TUNING)
        if not is_of_this_process or os.path.lexists(_seal_path(path)):
            continue
        with contextlib.suppress(OSError, UnreadableError):
            with open(open_regular(path, follow=False), "rb") as file:
                # JAX leaves the permissions to the umask, and `check_private` refuses what others
                # may write.
                os.fchmod(file.fileno(), 0o600)
            check_private(path)
            if _is_whole(path):
                _write_seal(path, _digest(folder, name))


def _digest(folder: Path, name: str) -> str:
    """Returns the SHA-256 in hex digits of an entry's folder, name and content."""
    place = os.fsencode(f"{folder.name}/{name}")
    # The length separates name and content: no other pair of them is the same text.
    digest = hashlib.sha256(b"%d %s" % (len(place), place))
    with open(open_regular(folder / name, follow=False), "rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _is_whole(path: Path) -> bool:
    """Returns True if a file in zlib's format is complete, or if the file has another format.

    With the package zstandard installed, JAX uses another format.
    """
    stream = zlib.decompressobj()
    with open(open_regular(path, follow=False), "rb") as file:
        data = file.read(_PIECE)
        if not data.startswith(_HEADERS[0]):
            return bool(data)
        while data and not stream.eof:
            try:
                # In pieces, because a short file may expand to a long one.
                stream.decompress(data, _PIECE)
            except zlib.error:
                return False
            data = stream.unconsumed_tail or file.read(_PIECE)
    return stream.eof


def _keep_within(programs: Path, limit: int) -> None:
    """Removes the oldest entries of marked folders until the others have at most `limit` bytes."""
    found: list[tuple[float, int, Path]] = []
    for folder in programs.iterdir():
        if not (folder / _MARK).is_file():
            continue
        for name in _entries(folder):
            with contextlib.suppress(OSError):  # another process removed it
                stat = os.lstat(folder / name)
                found.append((stat.st_mtime, stat.st_size, folder / name))
    excess = sum(size for _, size, _ in found) - limit
    for _, size, path in sorted(found):
        if excess <= 0:
            return
        if _is_ours(path):
            _remove_entry(path)
            excess -= size
