"""Files of a store, allocated in full or found complete."""

from __future__ import annotations

from pathlib import Path

from zerojax.checkpoint.store.errors import StoreError
from zerojax.checkpoint.store.files import allocate, check_space, sync_folder
from zerojax.checkpoint.store.manifest import NAME, Manifest


def slot_path(folder: Path, slot: int) -> Path:
    """The file of slot 0 or 1 of all buckets."""
    return folder / f"buckets{slot}.bin"


def tell_mixed(folder: Path, manifest: Manifest) -> str:
    """What is wrong with a scratch store whose last sweep did not end, and what to do."""
    return (
        f"{folder}: the sweep that began generation {manifest.begun} did not end, so some buckets "
        f"are of it and some of generation {manifest.generation}; make the store anew "
        "(replace=True) and fill it from the last checkpoint; durable=True would have kept a whole "
        "generation, for twice the disk"
    )


def check_files(folder: Path, manifest: Manifest) -> None:
    """Refuses a store of two generations, or with a file that has the wrong length.

    Raises:
      StoreError: naming the generations, or the file and both lengths.
    """
    if manifest.begun != manifest.generation:
        raise StoreError(tell_mixed(folder, manifest))
    for slot in range(manifest.num_slots):
        path = slot_path(folder, slot)
        size = path.stat().st_size if path.exists() else 0
        if size != manifest.file_bytes:
            raise StoreError(
                f"{path}: {size} bytes, the manifest says {manifest.file_bytes}; it was cut off or "
                "taken away: delete the folder and fill the store again, from a checkpoint"
            )


def make_files(folder: Path, manifest: Manifest) -> None:
    """Makes the files of the slots, every block of them reserved.

    Raises:
      OSError: the disk has too little space; then no file of a slot is there.
    """
    paths = [slot_path(folder, slot) for slot in range(manifest.num_slots)]
    give_up(folder)
    disk_bytes = manifest.num_slots * manifest.file_bytes
    two_manifests = 2**16 + 96 * manifest.num_buckets  # while one replaces the other
    remedy = "or keep one generation (durable=False)" if manifest.durable else "or keep less on it"
    check_space(folder, disk_bytes + two_manifests, remedy=remedy)
    try:
        for path in paths:
            allocate(path, manifest.file_bytes)
    except OSError as error:
        give_up(folder)
        raise OSError(
            error.errno,
            f"{folder}: {disk_bytes} bytes could not be set aside: {error.strerror}; free some "
            f"space, choose a folder on another disk, {remedy}",
        ) from error
    sync_folder(folder)


def give_up(folder: Path) -> None:
    """Removes the manifest, then the buckets, also what a stopped creation left of them."""
    for path in (folder / NAME, slot_path(folder, 0), slot_path(folder, 1)):
        path.unlink(missing_ok=True)
