"""Manifest of a bucket store: its complete generation, bucket sizes and checksums; its files."""

from __future__ import annotations

import dataclasses
import errno
import functools
import itertools
import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

from zerojax.checkpoint.store.direct_io import (
    StoreError,
    allocate,
    check_space,
    pad_to_block,
    replace_file,
    sync_folder,
)
from zerojax.config.display import quoted
from zerojax.config.late_dataclasses import dataclass
from zerojax.runtime.bounded_json import JsonError, loads, read_bytes

NAME = "manifest.json"
_FORMAT = 3


@dataclass(frozen=True)
class Manifest:
    """Description of a store's contents.

    Attributes:
      sizes: number of bytes of each bucket as the caller passed them, before padding.
      piece_bytes: number of bytes moved at once; a checksum is computed for each piece.
      durable: True if each bucket has two slots, so that a sweep never overwrites valid data.
      generation: number of finished sweeps that wrote something; `slots` and `checksums` describe
        this generation.
      begun: number of the generation that an unfinished sweep was writing; equal to `generation` if
        no sweep is unfinished, and always in a durable store.
      slots: for each bucket, the number (0 or 1) of the file that holds it.
      checksums: for each bucket, its checksum (`BucketTransfer.wait`); None if the bucket was never
        written and contains zeros.
      slots_before, checksums_before: `slots` and `checksums` of the previous generation, which a
        durable store still holds until the next sweep writes; () if it does not hold it.
    """

    sizes: tuple[int, ...]
    piece_bytes: int
    durable: bool
    generation: int
    begun: int
    slots: tuple[int, ...]
    checksums: tuple[int | None, ...]
    slots_before: tuple[int, ...] = ()
    checksums_before: tuple[int | None, ...] = ()

    @property
    def num_buckets(self) -> int:
        """Number of buckets in the store."""
        return len(self.sizes)

    @property
    def bucket_bytes(self) -> int:
        """Number of bytes of the largest bucket, without padding."""
        return max(self.sizes)

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of each bucket in a bucket file, and the end of the last bucket."""
        return tuple(itertools.accumulate(map(pad_to_block, self.sizes), initial=0))

    @property
    def file_bytes(self) -> int:
        """Number of bytes of one bucket file."""
        return self.offsets[-1]

    @property
    def num_slots(self) -> int:
        """Number of bucket files, each with room for all buckets: 2 if durable, else 1."""
        return 2 if self.durable else 1

    @property
    def has_previous(self) -> bool:
        """Whether the store still holds the previous generation (`previous`)."""
        return bool(self.slots_before)

    def previous(self) -> Manifest:
        """Returns the manifest of the previous generation of a durable store."""
        assert self.has_previous
        return dataclasses.replace(
            self,
            generation=self.generation - 1,
            begun=self.generation - 1,
            slots=self.slots_before,
            checksums=self.checksums_before,
            slots_before=(),
            checksums_before=(),
        )


def first_manifest(
    num_buckets: int, bucket_bytes: int | Sequence[int], piece_bytes: int, *, durable: bool
) -> Manifest:
    """Returns the manifest of a new store of zeros.

    Args:
      num_buckets: number of buckets.
      bucket_bytes: bytes of every bucket, or a sequence with the bytes of each bucket.
      piece_bytes: number of bytes moved at once.
      durable: True: each bucket has two slots.

    Raises:
      ValueError: a number is too small, or `bucket_bytes` does not have `num_buckets` sizes.
    """
    check_at_least("num_buckets", num_buckets, 1)
    sizes = (bucket_bytes,) * num_buckets if isinstance(bucket_bytes, int) else tuple(bucket_bytes)
    if len(sizes) != num_buckets:
        raise ValueError(
            f"bucket_bytes has {len(sizes)} sizes, but num_buckets={num_buckets}; give one size "
            "for each bucket, or one for all"
        )
    check_at_least("bucket_bytes", min(sizes), 1)
    return Manifest(
        sizes=sizes,
        piece_bytes=piece_bytes,
        durable=durable,
        generation=0,
        begun=0,
        slots=(0,) * num_buckets,
        checksums=(None,) * num_buckets,
    )


def check_at_least(name: str, value: int, least: int) -> None:
    """Raises if the number `value` is below `least`.

    Raises:
      ValueError: the message names the value and the limit.
    """
    if value < least:
        raise ValueError(f"{name}={value} is below the minimum; use at least {least}")


def save_manifest(folder: Path, manifest: Manifest) -> None:
    """Replaces the manifest of `folder`, atomically and durably.

    Raises:
      OSError: the disk reports an error, such as ENOSPC. The previous manifest still exists, unless
        syncing the folder failed after the rename.
    """
    text = json.dumps({"format": _FORMAT, **dataclasses.asdict(manifest)})
    checksum = zlib.crc32(text.encode())
    try:
        replace_file(folder / NAME, f"{text}\ncrc32 {checksum:08x}\n".encode())
    except OSError as error:
        remedy = "; free some space on it" if error.errno == errno.ENOSPC else ""
        raise OSError(
            error.errno, f"{folder}: {NAME} could not be replaced: {error.strerror}{remedy}"
        ) from error


def load_manifest(folder: Path) -> Manifest:
    """Reads the manifest of `folder`.

    Raises:
      StoreError: the manifest is missing, or was not written by this version.
    """
    path = folder / NAME
    try:
        content = read_bytes(path, follow=False)
    except JsonError as error:
        raise StoreError(f"{error}; delete the folder and fill the store again") from None
    except FileNotFoundError as error:
        raise StoreError(
            f"{folder}: this folder has no {NAME}, for example because the creation of the store "
            "was interrupted; create the store again"
        ) from error
    text, _, rest = content.partition(b"\n")
    if rest != f"crc32 {zlib.crc32(text):08x}\n".encode():
        raise StoreError(
            f"{path}: its checksum does not match its text, so the file was changed or the disk "
            "is faulty; delete the folder and fill the store again, from a checkpoint"
        )
    try:
        fields = loads(text)
        found = fields.pop("format")
        if found != _FORMAT:
            raise StoreError(
                f"{path}: written as format {quoted(found)}, this version reads {_FORMAT}; delete "
                "the folder and fill the store again, from a checkpoint"
            )
        before = "slots_before", "checksums_before"
        for name in ("sizes", "slots", "checksums", *before):
            fields[name] = tuple(fields[name])
        manifest = Manifest(**fields)
        if _is_possible(manifest):
            return manifest
    except (JsonError, TypeError, KeyError, AttributeError):
        pass
    raise StoreError(
        f"{path}: its values are not valid for a store, so the file was edited; delete the folder "
        "and fill the store again, from a checkpoint"
    )


def _is_possible(manifest: Manifest) -> bool:
    """Returns True if every field has a valid type and range."""

    def number(value: object, least: int, most: int = 2**62) -> bool:
        return type(value) is int and least <= value <= most

    count, generation = len(manifest.sizes), manifest.generation
    return (
        count > 0
        and len(manifest.slots) == len(manifest.checksums) == count
        and all(number(size, 1) for size in manifest.sizes)
        and number(manifest.piece_bytes, 1)
        and type(manifest.durable) is bool
        and number(generation, 0)
        and number(manifest.begun, generation, generation + 1)
        and len(manifest.slots_before) == len(manifest.checksums_before)
        and (not manifest.has_previous or (len(manifest.slots_before) == count and generation > 0))
        and all(
            number(slot, 0, manifest.num_slots - 1)
            for slot in manifest.slots + manifest.slots_before
        )
        and all(
            x is None or number(x, 0, 2**32 - 1)
            for x in manifest.checksums + manifest.checksums_before
        )
    )


def go_back(folder: Path, manifest: Manifest, generation: int) -> Manifest:
    """Makes the previous generation of a durable store the current one; returns its manifest.

    Raises:
      StoreError: the store does not have this generation.
      OSError: as in `save_manifest`.
    """
    if not manifest.has_previous or generation != manifest.generation - 1:
        raise StoreError(
            f"{folder}: this store does not have generation {generation} any more (it has "
            f"{manifest.generation}); delete the folder and fill the store again, from a checkpoint"
        )
    previous = manifest.previous()
    # First, since a sweep overwrites the buckets of the generation that is given up.
    save_manifest(folder, previous)
    return previous


def slot_path(folder: Path, slot: int) -> Path:
    """Returns the path of the bucket file with number `slot` (0 or 1)."""
    return folder / f"buckets{slot}.bin"


def tell_mixed(folder: Path, manifest: Manifest) -> str:
    """Returns the error message for a non-durable store whose last sweep did not finish."""
    return (
        f"{folder}: a pass over the buckets that writes generation {manifest.begun} was "
        "interrupted: some buckets "
        f"belong to that generation and some to generation {manifest.generation}; create the "
        "store again "
        "(replace=True) and fill it from the last checkpoint; durable=True keeps a "
        "complete generation in such a case, for twice the disk space"
    )


def check_files(folder: Path, manifest: Manifest) -> None:
    """Raises if the buckets are of two generations, or if a file has the wrong length.

    Raises:
      StoreError: the message names the generations, or the file and both lengths.
    """
    if manifest.begun != manifest.generation:
        raise StoreError(tell_mixed(folder, manifest))
    for slot in range(manifest.num_slots):
        path = slot_path(folder, slot)
        size = path.stat().st_size if path.exists() else 0
        if size != manifest.file_bytes:
            raise StoreError(
                f"{path}: {size} bytes instead of {manifest.file_bytes} (from the manifest); the "
                "file was truncated or removed: delete the folder and fill the store again, from "
                "a checkpoint"
            )


def make_files(folder: Path, manifest: Manifest) -> None:
    """Creates the bucket files, with all disk blocks reserved.

    Raises:
      StoreError: another program's file has the name of the manifest.
      OSError: the disk has too little space; then no bucket file remains.
    """
    paths = [slot_path(folder, slot) for slot in range(manifest.num_slots)]
    _check_own(folder)
    # Before the space is checked, since the store that is replaced takes some.
    give_up(folder)
    disk_bytes = manifest.num_slots * manifest.file_bytes
    two_manifests = 2**16 + 96 * manifest.num_buckets  # two exist while one replaces the other
    remedy = (
        "or store one generation only (durable=False)" if manifest.durable else "or keep less on it"
    )
    check_space(folder, disk_bytes + two_manifests, remedy=remedy)
    try:
        for path in paths:
            allocate(path, manifest.file_bytes)
    except OSError as error:
        give_up(folder)
        raise OSError(
            error.errno,
            f"{folder}: {disk_bytes} bytes could not be reserved: {error.strerror}; free some "
            f"space, choose a folder on another disk, {remedy}",
        ) from error
    sync_folder(folder)


def _check_own(folder: Path) -> None:
    """Raises StoreError if the manifest's name is taken by a file of another program."""
    if not os.path.lexists(folder / NAME) or slot_path(folder, 0).exists():
        return  # a damaged manifest beside buckets may be replaced
    try:
        load_manifest(folder)
    except StoreError:
        raise StoreError(
            f"{folder / NAME}: zerojax did not write this file, which a store would replace; "
            "choose another folder, or move the file"
        ) from None


def give_up(folder: Path) -> None:
    """Deletes the files of a store: the manifest, then the bucket files, including remains of an
    interrupted creation."""
    # The manifest first: a folder without it counts as an interrupted creation, and not as a store.
    for path in (folder / NAME, slot_path(folder, 0), slot_path(folder, 1)):
        path.unlink(missing_ok=True)
