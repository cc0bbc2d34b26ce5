"""Stores the measured rates of this machine's devices, links and disks in the user's cache folder.

This module imports no JAX. If the file cannot be read or written, nothing fails; the measurement is
only repeated.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from zerojax.config.checks import warn_user
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.regular_files import UnreadableError
from zerojax.runtime.bounded_json import load
from zerojax.runtime.memory import nearest_folder
from zerojax.runtime.user_files import check_private, make_private, replace_text, user_cache

FILE = "rates.json"
MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True, kw_only=True)
class MeasuredLink:
    """Measured bandwidths between a device and host memory in bytes per second; `both` is the sum
    of both directions at the same time."""

    device_kind: str
    to_device: float
    to_host: float
    both: float
    date: str = ""


@dataclass(frozen=True, kw_only=True)
class MeasuredDisk:
    """Measured bandwidths of a disk in bytes per second, from passes over files of offloaded state;
    `both` is the sum of reading and writing at the same time."""

    disk: str
    write: float
    read: float
    both: float
    date: str = ""


@dataclass(frozen=True, kw_only=True)
class MeasuredDevice:
    """Measured rates of one kind of device: FLOP per second of a large product of 16-bit floats,
    and bytes per second, read and written, of a large copy in device memory."""

    device_kind: str
    product_flops: float
    copy_bandwidth: float
    date: str = ""


@dataclass(frozen=True, kw_only=True)
class MeasuredNode:
    """Measured bandwidth between the devices of this machine in bytes per second and direction of
    one device."""

    device_kind: str
    bandwidth: float
    date: str = ""


Measurement = MeasuredLink | MeasuredDisk | MeasuredDevice | MeasuredNode
Rates = TypeVar("Rates", bound=Measurement)
_PARTS = {
    MeasuredLink: ("links", "device_kind"),
    MeasuredDisk: ("disks", "disk"),
    MeasuredDevice: ("devices", "device_kind"),
    MeasuredNode: ("nodes", "device_kind"),
}
"""{kind of measurement: (section of the file, field that tells entries apart)}."""


def keep_rates(rates: Measurement) -> Path | None:
    """Stores a measurement with today's date in the user's cache, in place of an earlier
    measurement of the same kind of device, or of the same disk.

    Returns:
      The path of the file; None if the cache is switched off or cannot be written.
    """
    path = _path()
    if path is None:
        return None
    part, field = _PARTS[type(rates)]
    name = getattr(rates, field)
    today = datetime.datetime.now().strftime("%Y-%m-%d")
    known = _read(path)
    # Several machines may share the user's cache.
    machine = known.get(platform.node())
    machine = known[platform.node()] = machine if isinstance(machine, dict) else {}
    entries = machine.get(part)
    entries = machine[part] = entries if isinstance(entries, dict) else {}
    entry = entries[name] = dataclasses.asdict(dataclasses.replace(rates, date=today))
    entry["digest"] = _digest(part, name, entry)
    try:
        make_private(path.parent)
        replace_text(path, json.dumps(known, indent=1), mode=0o600)
    except (OSError, UnreadableError):
        return None
    return path


def kept_rates(*kinds: type[Rates]) -> list[Rates]:
    """Returns all stored measurements of some kinds, such as `MeasuredLink`, of this machine."""
    path = _path()
    machine = {} if path is None else _read(path).get(platform.node(), {})
    found = []
    for kind in kinds:
        part = _PARTS[kind][0]
        entries = machine.get(part, {}) if isinstance(machine, Mapping) else {}
        found += [kind(**fields) for fields in _whole_entries(part, entries, kind)]
    return found


def measured_disk(folder: str | os.PathLike[str]) -> MeasuredDisk | None:
    """Returns the stored bandwidths of the disk that holds a folder; None if the disk was not
    measured.

    The folder need not exist yet.
    """
    name = disk_name(folder)
    return next((disk for disk in kept_rates(MeasuredDisk) if disk.disk == name), None)


def disk_name(folder: str | os.PathLike[str]) -> str:
    """Returns a name for the disk that holds a folder, such as "/dev/nvme0n1p1 on /data".

    If the folder does not exist, its nearest existing parent is used. If the mount is not found,
    the name is "MAJOR:MINOR" of the device.
    """
    number = os.stat(nearest_folder(folder)).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    try:
        lines = MOUNTS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return device
    for line in lines:  # proc_pid_mountinfo(5)
        words = line.split()
        if len(words) > 6 and words[2] == device and "-" in words:
            return f"{words[words.index('-') + 2]} on {words[4]}"
    return device


def _whole_entries(part: str, entries: object, kind: type) -> Iterator[dict[str, Any]]:
    """Yields the undamaged entries in section `part` that have the fields of `kind`."""
    for name, entry in entries.items() if isinstance(entries, Mapping) else ():
        if isinstance(entry, Mapping) and entry.get("digest") == _digest(part, name, entry):
            fields = {key: value for key, value in entry.items() if key != "digest"}
            if _has_form(fields, kind):
                yield fields


def _digest(part: str, name: str, entry: Mapping[str, Any]) -> str:
    """Returns the digest of an entry's place and content, by which damaged and moved entries are
    noticed."""
    content = [platform.node(), part, name, sorted(x for x in entry.items() if x[0] != "digest")]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _has_form(entry: object, kind: type) -> bool:
    """Returns whether an entry has all fields of the dataclass `kind`, as texts and positive
    numbers."""
    fields = dataclasses.fields(kind)
    if not isinstance(entry, Mapping) or set(entry) != {field.name for field in fields}:
        return False
    return all(
        isinstance(entry[field.name], str)
        if field.type == "str"
        else isinstance(entry[field.name], float) and entry[field.name] > 0
        for field in fields
    )


def _path() -> Path | None:
    folder = user_cache()
    return None if folder is None else folder / FILE


def _read(path: Path) -> dict[str, Any]:
    try:
        check_private(path)
        found = load(path, follow=False)
    except PermissionError as error:
        warn_user(f"measured rates are not used: {error}")
        return {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
