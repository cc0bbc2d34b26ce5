"""What each process of `zerojax env --cluster` reports about itself, and where processes differ.

The facts need no device: only `nvidia-smi` is started, and the driver's version is read. They hold
no secrets, since other hosts see them.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import re
import resource
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import zerojax
from zerojax.config.display import cut, printable, quoted
from zerojax.config.loader import user_path
from zerojax.runtime.bounded_json import JsonError, read_bytes
from zerojax.runtime.redaction import redact

_PREFIXES = ("NCCL_", "XLA_", "JAX_", "CUDA_", "FI_", "OFI_NCCL_", "UCX_", "GLOO_")
_NAMES = (
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "OMP_NUM_THREADS",
    "ZEROJAX_CACHE",
    "ZEROJAX_HEARTBEAT_SECONDS",
    "ZEROJAX_JOIN_SECONDS",
)
_OF_NO_EFFECT = ("JAX_TRACEBACK_FILTERING",)
"""Variables that `zerojax` sets itself, and that change nothing here."""
OF_ONE_PROCESS = (
    "CUDA_VISIBLE_DEVICES",
    "JAX_COORDINATOR_BIND_ADDRESS",
    "JAX_LOCAL_DEVICE_IDS",
    "JAX_PROCESS_ID",
    "NCCL_HOSTID",
)
"""Variables that are shown, but may differ between processes."""
NCCL_FILES = ("/etc/nccl.conf", "~/.nccl.conf")
"""Files of NCCL variables for all users and for one; NCCL_CONF_FILE replaces the second."""
SHARED_MEMORY = "/dev/shm"
SMALL_SHARED_MEMORY = 64 << 20
"""Size in bytes of /dev/shm that containers have by default, too small for NCCL."""
_NCCL_FILE_BYTES = 1 << 16
_TOPOLOGY_SECONDS = 30
_TOKEN_BYTES = 64
_VISIBLE_SECONDS = 5.0
"""A shared folder may show the file of another host only after some seconds."""
_MAX_SHOWN = 8
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def collect_facts(process: int, *, is_first_of_host: bool) -> dict[str, Any]:
    """Returns the facts of this process as JSON-compatible values.

    Args:
      process: index of this process.
      is_first_of_host: whether this process reports the links of its host's cards.
    """
    from zerojax.hardware.local_devices import driver_version

    driver = driver_version()
    topology, why_not = describe_topology() if is_first_of_host else (None, None)
    facts = {
        "process": process,
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "zerojax": zerojax.__version__,
        "sources": sources_digest(),
        "packages": installed_packages(),
        "driver": driver,
        "has_nvidia": Path("/dev/nvidiactl").exists(),
        "variables": set_variables(os.environ),
        "shared_memory_bytes": _size_of(SHARED_MEMORY),
        "locked_memory_bytes": locked_memory(),
        "topology": topology,
        "no_topology": why_not,
    }
    return redact(facts)


def _size_of(folder: str) -> int | None:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).total
    return None


def locked_memory() -> int | None:
    """Returns how many bytes this process may lock, as InfiniBand requires; None: no limit."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def sources_digest() -> str:
    """Returns a short digest of all Python files of the installed zerojax."""
    root = Path(zerojax.__file__).parent
    digest = hashlib.sha256()
    folders = [root, root.parent / "pallas_kernels"]
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root.parent)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


def installed_packages() -> dict[str, str]:
    """Returns {name: version} of all packages that this Python finds; the first found counts."""
    found: dict[str, str] = {}
    for package in importlib.metadata.distributions():
        name = package.metadata["Name"]
        if name and package.version:
            # As package indexes compare names (PEP 503): one package may be spelt in several ways.
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), package.version)
    return dict(sorted(found.items()))


def set_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that change how devices communicate, also from NCCL's files.

    A variable of the environment has priority over one of a file, as in NCCL.
    """
    found = {
        name: value
        for name, value in environment.items()
        if name.startswith(_PREFIXES) or name in _NAMES
        if name not in _OF_NO_EFFECT
    }
    own = environment.get("NCCL_CONF_FILE") or NCCL_FILES[1]
    for file in (own, NCCL_FILES[0]):
        with contextlib.suppress(OSError, JsonError):
            text = read_bytes(user_path(file), max_bytes=_NCCL_FILE_BYTES).decode(errors="replace")
            for line in text.splitlines():
                name, equals, value = line.partition("=")
                if equals and name.strip().startswith("NCCL_"):
                    found.setdefault(name.strip(), f"{value.strip()} (in {file})")
    return {name: cut(value, 1000) for name, value in sorted(found.items())}


def describe_topology() -> tuple[str | None, str | None]:
    """Returns (the table of `nvidia-smi topo -m`, None), or (None, why there is none)."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None, "nvidia-smi is not installed"
    try:
        result = subprocess.run(
            [program, "topo", "-m"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TOPOLOGY_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"nvidia-smi topo -m failed: {cut(str(error), 200)}"
    if result.returncode:
        words = (result.stderr or result.stdout).strip().splitlines()
        return None, f"nvidia-smi topo -m failed: {cut(words[0] if words else 'no reason', 200)}"
    table = _ESCAPES.sub("", result.stdout).partition("Legend:")[0]
    names = re.findall(r"^ *(NIC\d+: \S+)", result.stdout, re.MULTILINE)
    lines = [line.rstrip() for line in table.splitlines() if line.strip()]
    return "\n".join([*lines, *([", ".join(names)] if names else [])]), None


# --- differences ----------------------------------------------------------------------------------


class Names:
    """Names of processes for sentences.

    Args:
      hosts: host name of each process.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = [printable(host) for host in hosts]

    def of(self, processes: Sequence[int]) -> str:
        """Returns "process 1 (b)", or "processes 0-7, 9 (a, c)" with at most some hosts."""
        runs: list[list[int]] = []
        for process in sorted(processes):
            if runs and process == runs[-1][1] + 1:
                runs[-1][1] = process
            else:
                runs.append([process, process])
        numbers = ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in runs)
        hosts = list(dict.fromkeys(self.hosts[process] for process in sorted(processes)))
        more = f" and {len(hosts) - _MAX_SHOWN} more" if len(hosts) > _MAX_SHOWN else ""
        where = f"({', '.join(hosts[:_MAX_SHOWN])}{more})"
        return f"process{'es' if len(processes) > 1 else ''} {numbers} {where}"


def groups_of(values: Sequence[Hashable]) -> dict[Any, list[int]]:
    """Returns {value: indices of the processes that have it}, the most frequent first."""
    found: dict[Any, list[int]] = {}
    for process, value in enumerate(values):
        found.setdefault(value, []).append(process)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def differences(facts: Sequence[Mapping[str, Any]], names: Names) -> list[str]:
    """Returns one sentence for each fact in which the processes differ.

    Args:
      facts: those of `collect_facts`, of each process.
      names: names of the processes.
    """
    found = _compared("Python", [one["python"] for one in facts], names)
    found += _compared("zerojax", [one["zerojax"] for one in facts], names)
    found += _compared(
        "the source files of zerojax (digest)", [one["sources"] for one in facts], names
    )
    packages = _keys_that_differ(one["packages"] for one in facts)
    for name in packages[:_MAX_SHOWN]:
        values = [one["packages"].get(name) for one in facts]
        found += _compared(f"package {name}", values, names)
    if len(packages) > _MAX_SHOWN:
        rest = packages[_MAX_SHOWN:]
        found.append(f"{len(rest)} more packages: {cut(', '.join(rest), 300)}")
    found += _compared("NVIDIA's driver", [one["driver"] for one in facts], names)
    locked = [_or_unlimited(one["locked_memory_bytes"]) for one in facts]
    found += _compared("limit of locked memory (ulimit -l)", locked, names)
    for name in _keys_that_differ(one["variables"] for one in facts):
        if name not in OF_ONE_PROCESS:
            values = [one["variables"].get(name) for one in facts]
            found += _compared(f"variable {name}", values, names)
    return found + _topologies_that_differ(facts, names)


def device_differences(facts: Sequence[Mapping[str, Any]], names: Names) -> list[str]:
    """Returns one sentence for each difference of the devices that JAX has started.

    Args:
      facts: those of `collect_facts`, with `devices`, a text, and `is_cpu`, of each process.
      names: names of the processes.
    """
    found = _compared("devices of a process", [one["devices"] or None for one in facts], names)
    unused = [one["process"] for one in facts if one["has_nvidia"] and one["is_cpu"]]
    if unused:
        found.append(
            f"JAX runs on the CPU on {names.of(unused)}, although there is an NVIDIA GPU: "
            "pip install 'zerojax[cuda]', and unset JAX_PLATFORMS"
        )
    small = [
        one["process"]
        for one in facts
        if not one["is_cpu"] and (one["shared_memory_bytes"] or 0) <= SMALL_SHARED_MEMORY
    ]
    if small:
        found.append(
            f"{SHARED_MEMORY} has at most {SMALL_SHARED_MEMORY >> 20} MiB on {names.of(small)}, "
            "with which NCCL may not start; make it larger, for example with docker's "
            "--shm-size=1g"
        )
    return found


def _or_unlimited(number: int | None) -> str:
    return "unlimited" if number is None else f"{number >> 10} KiB"


def _compared(what: str, values: Sequence[str | None], names: Names) -> list[str]:
    """Returns a sentence with each value and its processes if there is more than one value."""
    groups = groups_of(values)
    if len(groups) < 2:
        return []
    parts = [
        f"{'none' if value is None else quoted(value, 200)} on {names.of(processes)}"
        for value, processes in groups.items()
    ]
    more = f"; and {len(parts) - _MAX_SHOWN} more" if len(parts) > _MAX_SHOWN else ""
    return [f"{what}: {'; '.join(parts[:_MAX_SHOWN])}{more}"]


def _keys_that_differ(tables: Iterable[Mapping[str, str]]) -> list[str]:
    tables = list(tables)
    return [
        key
        for key in sorted({key for table in tables for key in table})
        if len({table.get(key) for table in tables}) > 1
    ]


def _topologies_that_differ(facts: Sequence[Mapping[str, Any]], names: Names) -> list[str]:
    told = [one for one in facts if one["topology"] is not None or one["no_topology"] is not None]
    groups: dict[Any, list[int]] = {}
    for one in told:
        groups.setdefault(one["topology"], []).append(one["process"])
    if len(groups) < 2:
        return []
    parts = [
        names.of(processes) + (" has none" if text is None else f" has table {number}")
        for number, (text, processes) in enumerate(groups.items(), 1)
    ]
    return [f"links of the cards by nvidia-smi topo -m: {'; '.join(parts)}"]


# --- folders --------------------------------------------------------------------------------------


class FolderProbe:
    """Finds out whether folders are the same on all processes, by small files that are removed.

    Args:
      folders: paths as given to this process.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = [user_path(folder).absolute() for folder in folders]
        self._made: list[Path] = []

    def make_tokens(self) -> list[dict[str, Any]]:
        """Writes a file into each folder; returns for each folder the path, its free bytes, and the
        name and content of the file, or why it could not be written."""
        found = []
        for folder in self._folders:
            name, content = f".zerojax-env-{secrets.token_hex(8)}", secrets.token_hex(16)
            error, free = self._make(folder, name, content), None
            with contextlib.suppress(OSError):
                free = shutil.disk_usage(folder).free
            token = {"name": name if error is None else None, "content": content}
            found.append({"path": str(folder), "free": free, "error": error, **token})
        return found

    def _make(self, folder: Path, name: str, content: str) -> str | None:
        if not folder.is_dir():
            return "is not a folder" if folder.exists() else "does not exist"
        try:
            with open(folder / name, "x", encoding="utf-8") as file:
                self._made.append(folder / name)
                file.write(content)
        except OSError as error:
            return f"cannot be written: {error.strerror or error}"
        return None

    def see(self, tokens: Sequence[Mapping[str, Any]]) -> list[bool | None]:
        """Returns for each folder whether it holds a file that another process wrote; None if that
        process wrote none.

        Args:
          tokens: what `make_tokens` returned on the other process.
        """
        until = time.monotonic() + _VISIBLE_SECONDS
        found: list[bool | None] = []
        for folder, token in zip(self._folders, tokens, strict=True):
            name, content = str(token["name"]), str(token["content"])
            if token["name"] is None or not folder.is_dir():
                found.append(None)
                continue
            while not (is_there := self._holds(folder, name, content)):
                if time.monotonic() > until:
                    break
                time.sleep(0.1)
            found.append(is_there)
        return found

    def _holds(self, folder: Path, name: str, content: str) -> bool:
        # The name comes from another process, and must not lead out of the folder.
        if "/" in name:
            return False
        try:
            text = read_bytes(folder / name, max_bytes=_TOKEN_BYTES, follow=False)
        except (OSError, JsonError):
            return False
        return text.decode(errors="replace") == content

    def remove(self) -> None:
        """Removes the files that this process wrote."""
        for path in self._made:
            with contextlib.suppress(OSError):
                path.unlink()
        self._made.clear()


def folder_problems(rows: Sequence[Sequence[Mapping[str, Any]]], names: Names) -> list[str]:
    """Returns one sentence for each folder and reason why a run cannot use it as a shared folder.

    Args:
      rows: of each process, for each folder what `FolderProbe.make_tokens` returned, with the key
        `sees_0`: whether the process sees the file of process 0.
      names: names of the processes.
    """
    found = []
    for number, first in enumerate(rows[0]):
        column = [row[number] for row in rows]
        shown = quoted(first["path"], 200)
        for error, processes in groups_of([one["error"] for one in column]).items():
            if error is not None:
                found.append(f"folder {shown} {error} on {names.of(processes)}")
        apart = [process for process, one in enumerate(column) if one["sees_0"] is False]
        if apart:
            paths = {column[process]["path"] for process in apart} - {first["path"]}
            other = f" (there {quoted(min(paths), 200)})" if paths else ""
            found.append(
                f"folder {shown} is another one on {names.of(apart)}{other}: the file that "
                f"{names.of([0])} wrote is not in it; mount the same file system"
            )
    return found
