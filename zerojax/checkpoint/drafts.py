"""Folders that receive their name once their contents are complete and durable."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from zerojax.checkpoint import files
from zerojax.checkpoint.store.files import check_space


@contextlib.contextmanager
def new_folder(out: Path, num_bytes: int, *, remedy: str) -> Iterator[Path]:
    """A folder to write into, which becomes `out` at the end, or is removed after an error.

    Args:
      out: must not be there, or be an empty folder.
      num_bytes: that will be written.
      remedy: what to do where there is no space for them, a clause that begins with "or".

    Raises:
      FileExistsError: something is at `out`.
      OSError: what the disk says.
    """
    if out.exists() and (not out.is_dir() or os.listdir(out)):
        raise FileExistsError(f"{out} is there already; name a folder that is not")
    out.parent.mkdir(parents=True, exist_ok=True)
    check_space(out.parent, num_bytes, remedy=remedy)
    draft = out.with_name(f"{out.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        yield draft
        for name in os.listdir(draft):
            files.to_disk(draft / name)
        files.to_disk(draft)
        if out.exists():
            out.rmdir()
        os.rename(draft, out)
        files.to_disk(out.parent)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
