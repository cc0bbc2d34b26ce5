"""Files of a checkpoint: sizes, checksums, and folders that become visible once they are durable.

A file whose name contains `process_3` is written by process 3; process 0 writes all others. A
process writes its files, computes their checksums and syncs them to the disk.

The path of a step's folder may contain links. Inside the folder there must be only folders and
regular files. Any other entry, such as a link, counts as damage and is neither followed nor opened.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
import re
import shutil
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from zerojax.checkpoint.errors import Damage, is_damage, reason
from zerojax.checkpoint.store.direct_io import check_space
from zerojax.config.regular_files import UnreadableError, kind_of, open_regular
from zerojax.runtime.user_files import to_disk

SMALL = 1 << 20
"""Files of up to this many bytes are read and checked at every restore; they hold tables and no
arrays."""

_BLOCK = 1 << 20
_THREADS = 4
T = TypeVar("T")
_PROCESS = re.compile(r"process_(\d+)")


def names_below(folder: Path) -> list[str]:
    """Returns the paths of all files below a folder, relative to the folder and sorted."""
    files = (Path(at, name) for at, _, names in os.walk(folder) for name in names)
    return sorted(str(file.relative_to(folder)) for file in files)


def sizes_of(folder: Path) -> dict[str, int]:
    """Returns {path relative to the folder: bytes} of every file below a folder, sorted by path.

    Skips files that were deleted after listing, as in the folder of a running save.
    """
    found = {name: _if_there(os.lstat, folder / name) for name in names_below(folder)}
    return {name: status.st_size for name, status in found.items() if status is not None}


def last_change(folder: Path) -> float | None:
    """Returns the latest modification time of a folder and its entries; None if it does not exist.

    Returns:
      Seconds since the epoch.
    """
    below = (Path(at, name) for at, *names in os.walk(folder) for name in itertools.chain(*names))
    found = (_if_there(os.lstat, path) for path in itertools.chain([folder], below))
    return max((status.st_mtime for status in found if status is not None), default=None)


def names_of_process(names: Iterable[str], process: int, num_processes: int) -> list[str]:
    """Returns the names in `names` of files that `process` wrote: their name contains its number.
    Process 0 also wrote the files without a number, or with one that no process has."""

    def owner(name: str) -> int:
        found = _PROCESS.search(name)
        number = 0 if found is None else int(found[1])
        return number if number < num_processes else 0

    return [name for name in names if owner(name) == process]


def checksum(path: Path) -> str:
    """Returns the CRC-32 of a file as 8 hexadecimal digits; reads the file in blocks.

    Raises:
      UnreadableError: the path is not a regular file.
      OSError: the operating system reports an error.
    """
    total, block = 0, bytearray(_BLOCK)
    view = memoryview(block)
    with open(open_regular(path, follow=False), "rb", buffering=0) as file:
        while count := file.readinto(block):
            total = zlib.crc32(view[:count], total)
    return f"{total:08x}"


def settle(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Syncs files to the disk, and meanwhile computes their checksums from the page cache.

    Returns:
      {name: checksum}, without files that were deleted since they were listed.

    Raises:
      OSError: the operating system reports an error.
    """
    names = list(names)
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        syncing = [pool.submit(_if_there, to_disk, folder / name) for name in names]
        summing = {name: pool.submit(_if_there, checksum, folder / name) for name in names}
        for task in syncing:
            task.result()
        found = {name: task.result() for name, task in summing.items()}
    return {name: value for name, value in found.items() if value is not None}


def wrong_sizes(folder: Path, sizes: Mapping[str, int]) -> Iterator[Damage]:
    """Yields the problems of a folder: irregular entries, then missing files and wrong sizes.

    Args:
      folder: folder of the step.
      sizes: {path of a file relative to the folder: expected bytes}.

    Raises:
      OSError: the operating system reports an error that does not mean damage.
    """
    there: dict[str, int] = {}
    for name, status in _entries(folder, ""):
        if stat.S_ISREG(status.st_mode):
            there[name] = status.st_size
        else:
            yield Damage(file=name, what=f"is {kind_of(status)}, not a regular file")
    for name, size in sorted(sizes.items()):
        found = there.get(name)
        if found is None:
            yield Damage(file=name, what="is missing")
        elif found != size:
            yield Damage(file=name, what=f"has {found} bytes instead of {size}")


def _entries(folder: Path, before: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yields (path, status) of all entries below a folder except folders, sorted; follows no
    link."""
    try:
        with os.scandir(folder) as scanned:
            entries = sorted(scanned, key=lambda entry: entry.name)
    except FileNotFoundError:
        return  # a running job may be deleting it
    for entry in entries:
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        if stat.S_ISDIR(status.st_mode):
            yield from _entries(folder / entry.name, f"{before}{entry.name}/")
        else:
            yield f"{before}{entry.name}", status


def wrong_checksums(folder: Path, checksums: Mapping[str, str]) -> Iterator[Damage]:
    """Yields the files, in name order, whose bytes do not match their checksums.

    Raises:
      OSError: a file cannot be read now, for a reason other than damage.
    """
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        names = sorted(checksums)
        for name, found in zip(
            names, pool.map(lambda n: _checked(folder / n, checksums[n]), names), strict=True
        ):
            if found is not None:
                yield Damage(file=name, what=found)


def _checked(path: Path, expected: str) -> str | None:
    try:
        return None if checksum(path) == expected else "does not match its checksum"
    except FileNotFoundError:
        return "is missing"
    except UnreadableError as error:
        return error.what
    except OSError as error:
        if not is_damage(error):
            raise
        return f"cannot be read ({reason(error)})"


def _if_there(function: Callable[[Path], T], path: Path) -> T | None:
    try:
        return function(path)
    except FileNotFoundError:
        return None


_DRAFT_MARK = ".zerojax-draft"
"""Name of the empty file in folders that `new_folder` fills, which it may therefore remove."""


@contextlib.contextmanager
def new_folder(out: Path, num_bytes: int, *, remedy: str | None) -> Iterator[Path]:
    """Yields a temporary folder that is renamed to `out` at the end, or removed after an error.

    Args:
      out: final folder; it must either not exist or be empty.
      num_bytes: number of bytes that will be written.
      remedy: additional remedy in the message about too little space, a clause that begins with
        "or"; None: no additional remedy.

    Raises:
      FileExistsError: `out` exists and is not empty, it is the root of a disk, or the name of the
        temporary folder is taken.
      OSError: the disk reports an error.
    """
    if os.path.ismount(out):
        raise FileExistsError(f"{out} is the root of a disk; name a new folder in it")
    if out.exists() and (not out.is_dir() or os.listdir(out)):
        raise FileExistsError(f"{out} already exists; name a folder that does not exist yet")
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_name(f"{out.name}.partial")
    mark = draft / _DRAFT_MARK
    if draft.is_dir() and (mark.exists() or not os.listdir(draft)):
        shutil.rmtree(draft)  # an interrupted call left it
    if os.path.lexists(draft):
        raise FileExistsError(
            f"{draft} already exists, and the files are written there before they are moved to "
            f"{out}; remove or rename it, or name another folder"
        )
    draft.mkdir()  # first, since a file system that cannot be written has no space either
    try:
        mark.touch()
        check_space(out.parent, num_bytes, remedy=remedy)
        yield draft
        # Before the rename: a finished folder is the user's, and a marked one may be removed.
        mark.unlink()
        for path in draft.rglob("*"):
            to_disk(path)
        to_disk(draft)
        if out.exists():
            out.rmdir()
        os.rename(draft, out)
        to_disk(out.parent)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
