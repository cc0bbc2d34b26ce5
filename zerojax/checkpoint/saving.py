"""One save, from arrays to a visible folder, in an order that a kill at any moment cannot harm.

Knows one save and its folder; remembers nothing between saves.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import jax

from zerojax.checkpoint import agreement, arrays, folders
from zerojax.checkpoint.errors import CheckpointError, DiskFullError, is_disk_full, reason
from zerojax.checkpoint.metadata import Metadata, write_metadata
from zerojax.checkpoint.retention import Retention
from zerojax.trees import format_bytes

ARRAYS, PIECES = "arrays", "pieces"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Save:
    """One save on its way to disk."""

    metadata: Metadata
    partial: Path
    """Where it is written before it is complete; lies in the folder of the checkpoints."""

    keep: Retention
    leaves: dict[str, jax.Array]
    state_bytes: int
    write_pieces: Callable[[Path], None] | None
    """Writes the arrays that are nowhere in memory into a folder; returns when all are there."""

    started: concurrent.futures.Future[bool]
    """Done when the caller may donate the arrays; False when the save has failed before that."""


def write(save: Save) -> list[str]:
    """Does the whole of one save; runs in the checkpointer's thread.

    Returns:
      Warnings for the user.

    Raises:
      CheckpointError: nothing became visible; earlier checkpoints are intact.
    """
    try:
        writing = _start(save)
        save.started.set_result(True)
        writing.result()
        return _commit(save)
    except Exception as error:
        if isinstance(error, CheckpointError):
            raise
        raise _lost(save, error) from error
    finally:
        if not save.started.done():
            save.started.set_result(False)


def is_first_process() -> bool:
    """Whether this is the process that creates, names and deletes folders."""
    return jax.process_index() == 0


def _start(save: Save) -> arrays.Write:
    """Creates the partial folder and copies the arrays to the host.

    Before it copies it refuses what the disk has no space for: a run whose disk others fill up then
    ends between two steps, with its last checkpoint whole.
    """
    error = None
    if is_first_process():
        try:
            folders.make_partial(save.partial)
            if save.write_pieces is not None:
                (save.partial / PIECES).mkdir()
            folders.check_free(save.partial, save.state_bytes)
        except OSError as failure:
            error = _lost(save, failure)
            error.__cause__ = failure
    agreement.raise_together(error)
    writing = None
    try:
        writing = arrays.start_write(save.partial / ARRAYS, save.leaves)
        if save.write_pieces is not None:
            save.write_pieces(save.partial / PIECES)
    except Exception as failure:
        if writing is not None and jax.process_count() == 1:
            with contextlib.suppress(Exception):  # `failure` is what is told
                writing.result()
        error = _lost(save, failure)
    agreement.raise_together(error)
    assert writing is not None
    return writing


def _commit(save: Save) -> list[str]:
    """Makes the checkpoint visible, then deletes expired ones."""
    if not is_first_process():
        return []
    path, step = save.partial.parent, save.metadata.step
    files = folders.file_sizes(save.partial)
    write_metadata(save.partial, dataclasses.replace(save.metadata, files=files))
    folders.commit(save.partial, step)
    texts = []
    for old in save.keep.expired(folders.list_steps(path)):
        try:
            folders.remove(path, old)
        except OSError as error:
            texts.append(
                f"step {step} is saved, but the expired step {old} in {path} cannot be deleted:"
                f" {reason(error)}; delete it by hand"
            )
    return texts


def _lost(save: Save, error: BaseException) -> CheckpointError:
    """Frees the space of a failed save and says what happened."""
    path = save.partial.parent
    if is_first_process():
        shutil.rmtree(save.partial, ignore_errors=True)
    text = f"step {save.metadata.step} was not saved in {path}: {reason(error)}"
    if is_disk_full(error):
        text += f" (needs {format_bytes(save.state_bytes)}, {folders.free_text(path)})"
    steps = ", ".join(map(str, folders.list_steps(path))) or "none"
    kind = DiskFullError if is_disk_full(error) else CheckpointError
    return kind(
        f"{text}; earlier checkpoints are intact: {steps};"
        " free some space, mend the folder, or use another one"
    )
