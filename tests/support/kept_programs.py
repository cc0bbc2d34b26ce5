"""Compiled programs, kept between tests, between the processes of pytest and between its runs.

JAX writes an entry of its compilation cache in place: whoever reads it at that moment reads half,
and a process that is killed leaves half behind. So each process of pytest has a folder of its own,
filled with hard links to the entries that all share, and adds what it compiled to the shared ones
when the entry is whole.
"""

import hashlib
import os
import platform
import shutil
import time
import zlib
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

MAX_BYTES = 1 << 30
"""Of the shared folder: those written first go first."""
SECONDS_BETWEEN_EXCHANGES = 5.0
SUFFIX = "-cache"
SETTINGS = {
    # A smaller program costs as much to read as to compile.
    "jax_persistent_cache_min_compile_time_secs": 0.02,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    # XLA's own, for GPUs: its folder's name would be a part of the key.
    "jax_persistent_cache_enable_xla_caches": "none",
    # Tests read in a program's text where an operation comes from. Without this two programs that
    # differ in that alone would be one entry.
    "jax_compilation_cache_include_metadata_in_key": True,
    # The lines of Python that traced an operation: they would make one program two entries, and a
    # changed test a new one.
    "jax_traceback_in_locations_limit": 0,
}


class KeptPrograms:
    """One process's part in the shared folder.

    Args:
      shared: the folder that all processes share; made if it is not there.
      process: the number of this process.
    """

    def __init__(self, shared: Path, process: int | None = None):
        self.shared = shared / _processor()
        self.own = shared / f"process-{os.getpid() if process is None else process}"
        self.shared.mkdir(parents=True, exist_ok=True)
        _remove_what_dead_processes_left(shared)
        _keep_within(self.shared, MAX_BYTES)
        shutil.rmtree(self.own, ignore_errors=True)  # of a dead process that had this number
        self.own.mkdir()
        self.known: set[str] = set()
        self.next_exchange = 0.0
        self.exchange()

    def settings(self) -> dict[str, Any]:
        """What JAX's configuration must say for this process to read and write here."""
        return {"jax_compilation_cache_dir": str(self.own), **SETTINGS}

    def use(self) -> None:
        """Makes JAX read and write here."""
        use_settings(self.settings())

    def exchange_now_and_then(self) -> None:
        """`exchange`, if the last one was some seconds ago."""
        if time.monotonic() >= self.next_exchange:
            self.exchange()

    def exchange(self) -> None:
        """Links the entries that others added, and adds this process's own that are whole."""
        shared, own = _entries(self.shared), _entries(self.own)
        for name in shared - self.known - own:
            _link(self.shared / name, self.own / name)
        for name in own - self.known - shared:
            if _is_whole(self.own / name):
                _link(self.own / name, self.shared / name)
            else:
                own.discard(name)
        self.known |= shared | own
        self.next_exchange = time.monotonic() + SECONDS_BETWEEN_EXCHANGES

    def close(self) -> None:
        """Adds the last entries to the shared ones; the folder of this process goes."""
        self.exchange()
        shutil.rmtree(self.own, ignore_errors=True)


def use_settings(settings: dict[str, Any]) -> None:
    """Updates JAX's configuration; its compilation cache is opened anew."""
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def _processor() -> str:
    """A name for machines whose machine code is the same: a home folder may serve several."""
    words = [platform.machine(), platform.processor()]
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
        kinds = ("model name", "flags", "Features")
        words += sorted({line for line in lines if line.startswith(kinds)})
    return "processor-" + hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]


def _entries(folder: Path) -> set[str]:
    return {entry.name for entry in os.scandir(folder) if entry.name.endswith(SUFFIX)}


def _link(here: Path, there: Path) -> None:
    """A name appears with all its bytes or not at all; another process may have been faster."""
    try:
        os.link(here, there)
    except (FileExistsError, FileNotFoundError):
        pass
    except OSError:  # a file system without hard links
        draft = there.with_name(f"{there.name}.{os.getpid()}")
        shutil.copyfile(here, draft)
        os.replace(draft, there)


def _is_whole(path: Path) -> bool:
    """Whether JAX could read the entry: it is compressed, by zlib unless zstandard is there."""
    content = path.read_bytes()
    if not content.startswith(b"\x78"):
        return time.time() - path.stat().st_mtime > SECONDS_BETWEEN_EXCHANGES
    try:
        zlib.decompress(content)
    except zlib.error:
        return False
    return True


def _remove_what_dead_processes_left(folder: Path) -> None:
    for left in folder.glob("process-*"):
        number = left.name.removeprefix("process-")
        if not _lives(int(number)):
            shutil.rmtree(left, ignore_errors=True)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _keep_within(folder: Path, max_bytes: int) -> None:
    """Removes the oldest entries of a folder that has grown too large, down to half of its size."""
    entries = []
    for entry in os.scandir(folder):
        try:
            status = entry.stat()
        except FileNotFoundError:  # another process does the same
            continue
        entries.append((status.st_mtime, status.st_size, entry.path))
    total = sum(size for _, size, _ in entries)
    if total <= max_bytes:
        return
    for _, size, path in sorted(entries):
        if total <= max_bytes // 2:
            return
        Path(path).unlink(missing_ok=True)
        total -= size
