"""Which generation of a store is whole, where each of its buckets lies, and its checksums.

Knows one small file; never reads or writes a bucket.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import zlib
from pathlib import Path

from zerojax.store.errors import StoreError
from zerojax.store.files import pad_to_block, replace_file

NAME = "manifest.json"
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a store says about itself.

    Attributes:
      num_buckets: how many there are.
      bucket_bytes: bytes of one, as the caller asked, before padding.
      piece_bytes: bytes moved at once; checksums are taken over pieces.
      durable: whether each bucket has two slots.
      generation: sweeps that wrote and ended; the generation that `slots` and `checksums` tell of.
      begun: the generation that a sweep began to write over this one; equal to `generation` where
        none did. A durable store never writes over what it has, so there they are always equal.
      slots: of each bucket, the file (0 or 1) that holds it.
      checksums: of each bucket, `pool.Transfer.wait`; None where it was never written: zeros.
    """

    num_buckets: int
    bucket_bytes: int
    piece_bytes: int
    durable: bool
    generation: int
    begun: int
    slots: tuple[int, ...]
    checksums: tuple[int | None, ...]

    @property
    def padded_bytes(self) -> int:
        """Bytes of a bucket on disk and in memory."""
        return pad_to_block(self.bucket_bytes)

    @property
    def file_bytes(self) -> int:
        """Bytes of one file of buckets."""
        return self.num_buckets * self.padded_bytes

    @property
    def num_slots(self) -> int:
        """Files of buckets."""
        return 2 if self.durable else 1


def save_manifest(folder: Path, manifest: Manifest) -> None:
    """Replaces the manifest of `folder`, atomically and lastingly.

    Raises:
      OSError: what the disk says, such as ENOSPC; the former manifest is still there, unless the
        folder could not be synced after the rename.
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
      StoreError: there is none, or it is not one that this version wrote.
    """
    path = folder / NAME
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise StoreError(
            f"{folder}: no store is here ({NAME} is missing, as when its creation was stopped); "
            "create it"
        ) from error
    text, _, rest = content.partition(b"\n")
    if rest != f"crc32 {zlib.crc32(text):08x}\n".encode():
        raise StoreError(
            f"{path}: its checksum does not agree with its text, so it was changed or the disk is "
            "at fault; delete the folder and fill the store again, from a checkpoint"
        )
    fields = json.loads(text)
    if (found := fields.pop("format")) != _FORMAT:
        raise StoreError(
            f"{path}: written as format {found}, this version reads {_FORMAT}; delete the folder "
            "and fill the store again, from a checkpoint"
        )
    slots, checksums = tuple(fields.pop("slots")), tuple(fields.pop("checksums"))
    return Manifest(**fields, slots=slots, checksums=checksums)
