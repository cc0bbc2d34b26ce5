"""Saves one step, from arrays to a complete folder; a kill at any moment leaves no broken step.

Orbax's threads wait for a signal that the folder exists before they write. If the folder could not
be created, the signal never comes. Python waits for these threads at exit, so the process would
hang (seen where a folder was removed, and where two runs wrote into one folder).
`end_stuck_threads` ends that wait. With several processes the signal comes through the process
group, and `runtime.shutdown.leave_group_when_over` ends the wait.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import jax

from zerojax.checkpoint import agreement, arrays, files, folders
from zerojax.checkpoint.contributions import (
    Contribution,
    collect,
    raise_failures,
    report_failure,
    report_written,
)
from zerojax.checkpoint.errors import (
    CheckpointError,
    DiskFullError,
    DivergedError,
    FolderInUseError,
    GivenUpError,
    MachineError,
    is_disk_full,
    reason,
)
from zerojax.checkpoint.fingerprint_math import as_text
from zerojax.checkpoint.fingerprints import PendingFingerprints, differing_copies, whole
from zerojax.checkpoint.metadata import Metadata, run_of, write_metadata
from zerojax.checkpoint.packs import FILE_NAME as TABLE
from zerojax.checkpoint.retention import Retention, kept_steps
from zerojax.checkpoint.store.pieces import PieceReader
from zerojax.config.late_dataclasses import dataclass
from zerojax.runtime.shutdown import leave_group_when_over
from zerojax.tracing.trees import format_bytes

ARRAYS, PIECES = "arrays", "pieces"

_LOOK_SECONDS = 0.5
POLL_SECONDS = 0.5
STUCK_SECONDS = 2.0
"""Seconds after a failed save until the waits of Orbax's threads for a folder are ended. Creating a
folder takes less time."""
_FUNCTION, _PACKAGE = "blocking_key_value_get", "orbax"


@dataclass(frozen=True, kw_only=True)
class Save:
    """Everything that one save needs: metadata, arrays, folder and limits."""

    metadata: Metadata
    partial: Path
    """Folder inside the folder of the checkpoints in which this checkpoint is written until it is
    complete."""

    keep: Retention
    leaves: dict[str, jax.Array]
    state_bytes: int
    write_pieces: Callable[[Path], None] | None
    """Function that writes into a folder the arrays that are not in memory, and returns when all
    are written; None if there are none."""

    fingerprints: bool
    """Whether fingerprints are computed and stored."""

    hold_folder: Callable[[], None]
    """Function that raises `FolderInUseError` in the first process if another writer has locked the
    folder."""

    given_up: threading.Event
    """Set when another process has failed, or this one ends without the others."""

    started: concurrent.futures.Future[bool]
    """Done when the caller may donate the arrays; False if the save failed before that."""


def write(save: Save) -> list[str]:
    """Runs one whole save, in the thread of the checkpointer.

    Returns:
      Sentences to show to the user as warnings.

    Raises:
      CheckpointError: no checkpoint became visible; earlier checkpoints are intact.
    """
    try:
        writing, computation = _start(save)
        save.started.set_result(True)
        checksums, fingerprints = _finish(save, writing, computation)
        return _commit(save, checksums, fingerprints) if is_first_process() else []
    # Only the folder of this attempt is ours; all others belong to the other writer.
    except FolderInUseError:
        _end_threads()
        shutil.rmtree(save.partial, ignore_errors=True)
        raise
    except Exception as error:
        if isinstance(error, CheckpointError):
            _end_threads()
            raise
        raise _lost(save, error) from error
    finally:
        # The training thread waits for this future.
        if not save.started.done():
            save.started.set_result(False)


def is_first_process() -> bool:
    """Returns True in process 0, which creates, renames and deletes the folders."""
    return jax.process_index() == 0


def _start(save: Save) -> tuple[arrays.Write, PendingFingerprints]:
    """Creates the partial folder and copies the arrays to the host.

    Raises before copying if the disk has too little space. So if other programs fill the disk, the
    run ends between two steps with its last checkpoint intact.
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
    writing, computation = None, None
    try:
        # Before the copies, so that an accelerator computes the fingerprints during the copies.
        computation = PendingFingerprints(save.leaves if save.fingerprints else {})
        writing = arrays.start_write(save.partial / ARRAYS, save.leaves)
        if save.write_pieces is not None:
            save.write_pieces(save.partial / PIECES)
    except Exception as failure:
        # Otherwise its threads would create the folder again that is removed next. With several
        # processes this wait might not end, because Orbax waits for the failed ones.
        if writing is not None and jax.process_count() == 1:
            with contextlib.suppress(Exception):  # the message is about `failure`
                writing.result()
        error = _lost(save, failure)
    agreement.raise_together(error)
    assert writing is not None
    assert computation is not None
    return writing, computation


def _finish(
    save: Save, writing: arrays.Write, computation: PendingFingerprints
) -> tuple[dict[str, str], dict[str, str]]:
    """Waits until this process's part is on disk; the first process waits for all parts.

    Returns:
      In the first process ({file: checksum}, {array: fingerprint}) of all processes; in the others
      two empty dicts.
    """
    process, count = jax.process_index(), jax.process_count()
    try:
        _await(save, writing)
        names = files.names_of_process(files.names_below(save.partial), process, count)
        part = Contribution(checksums=files.settle(save.partial, names), sums=computation.result())
        if process:
            report_written(save.partial, process, part)
            return {}, {}
        # `wait` returns True as soon as the save is given up.
        parts = [part, *collect(save.partial, range(1, count), sleep=save.given_up.wait)]
        fingerprints = _fingerprints(save, parts) if save.fingerprints else {}
    except Exception as error:
        if process:
            report_failure(save.partial, process, error)
        if count > 1:
            leave_group_when_over()  # threads of Orbax may wait for a process that has failed
        raise _lost(save, error) from error
    return {n: value for part in parts for n, value in part.checksums.items()}, fingerprints


def _await(save: Save, writing: arrays.Write) -> None:
    """Waits until this process's part of the save is written; stops if another process has failed.

    Orbax waits for a message from every process. A process that failed, for example because its
    disk is full or its file server is gone, never sends this message. So all processes watch the
    folder while they wait. A process that fails writes a report into the folder for the first
    process, which then cancels the save and removes the folder. The other processes notice that the
    table of packs is missing. They test for the table and not for the folder, because threads of a
    failed save may create the folder again, but the table is written only once, before all else.

    Raises:
      GivenUpError: another process has failed.
      MachineError, OSError: another process has failed and reported its reason, or this process has
        failed.
    """
    if jax.process_count() == 1:
        writing.result()
        return
    done: concurrent.futures.Future[None] = concurrent.futures.Future()

    def wait() -> None:
        try:
            done.set_result(writing.result())
        # Of any kind, or the loop below would wait for a future that is never done.
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=wait, name="zerojax-write", daemon=True).start()
    while not concurrent.futures.wait([done], _LOOK_SECONDS).done:
        # The reports are read first, because a process reports before the others see its failure.
        is_given_up = save.given_up.is_set()
        if is_first_process():
            raise_failures(save.partial)
        elif not (save.partial / TABLE).exists():
            raise GivenUpError("process 0 has cancelled the save")
        if is_given_up:
            raise GivenUpError("not all processes have written their parts")
    done.result()


def _cause(name: str) -> str:
    """Returns a clause with the reason why copies of an array differ, and the remedy."""
    if name.startswith("extras/"):
        return (
            "the model writes a different value on each device (for example from "
            "jax.pure_callback or "
            "the time), or one device has computed a wrong value; make the value equal "
            "on all devices, or continue from an earlier step. `zerojax check` runs the model on "
            "virtual devices and reports whether its state differs between them"
        )
    return (
        "one device has computed a wrong value; continue from an earlier step, without that "
        "device if it happens again"
    )


def _fingerprints(save: Save, parts: list[Contribution]) -> dict[str, str]:
    """Returns {name: fingerprint} of the saved arrays, computed from the reports of all processes.

    Raises:
      DivergedError: copies of an array on several devices differ, so the written value is
        undefined.
    """
    found = {}
    for name, leaf in save.leaves.items():
        sums = {device: one for part in parts for device, one in part.sums[name].items()}
        differing = differing_copies(leaf, sums)
        if differing is not None:
            raise DivergedError(
                f"devices {differing[0]} and {differing[1]} hold different copies of {name!r}, so"
                f" {_cause(name)}"
            )
        found[name] = as_text(whole(leaf, sums))
    if save.write_pieces is not None:
        reader = PieceReader(save.partial / PIECES)
        of_pieces = {name: reader.fingerprint(name) for name in reader.names}
        found |= {name: as_text(sums) for name, sums in of_pieces.items() if sums is not None}
    return dict(sorted(found.items()))


def _commit(save: Save, checksums: dict[str, str], fingerprints: dict[str, str]) -> list[str]:
    """Makes the checkpoint visible, then deletes expired checkpoints; returns warnings."""
    path, step = save.partial.parent, save.metadata.step
    sizes = files.sizes_of(save.partial)
    checksums |= files.settle(save.partial, [name for name in sizes if name not in checksums])
    metadata = dataclasses.replace(
        save.metadata,
        files=sizes,
        checksums={name: checksums[name] for name in sizes},
        fingerprints=save.metadata.fingerprints | fingerprints,
        run=_number_of_run(path),
    )
    write_metadata(save.partial, metadata)
    save.hold_folder()  # another process may have locked the folder and saved in it
    folders.commit(save.partial, step)
    texts = []
    try:
        expired = save.keep.expired(folders.list_steps(path))
        kept = {about["step"] for about in kept_steps(path).values()} if expired else set()
    except (CheckpointError, OSError) as error:
        return [f"step {step} is saved, but no expired step is deleted: {error}"]
    for old in [old for old in expired if old not in kept]:
        try:
            folders.remove(path, old)
        except OSError as error:
            texts.append(
                f"step {step} is saved, but the expired step {old} in {path} cannot be deleted:"
                f" {reason(error)}; delete its folder yourself"
            )
    return texts


def _number_of_run(path: Path) -> str:
    """Returns the number of the run that saves in a folder: that of most of its steps, since a step
    may have been copied there; at the first save a new one, drawn at random."""
    steps = (folders.step_folder(path, step) for step in reversed(folders.list_steps(path)))
    known = collections.Counter(filter(None, map(run_of, steps)))
    return known.most_common(1)[0][0] if known else secrets.token_hex(8)


def _lost(save: Save, error: BaseException) -> CheckpointError:
    """Removes the files of a failed save and returns its error."""
    _end_threads()
    if is_first_process():
        shutil.rmtree(save.partial, ignore_errors=True)
    return not_saved(save.partial.parent, save.metadata.step, error, save.state_bytes)


def _end_threads() -> None:
    if jax.process_count() == 1:
        end_stuck_threads()


def not_saved(path: Path, step: int, error: BaseException, state_bytes: int) -> CheckpointError:
    """Returns the error for a save that failed.

    Args:
      path: folder of the checkpoints.
      step: number of the step that was not saved.
      error: reason of the failure.
      state_bytes: size in bytes of one unsharded state.
    """
    text = f"step {step} was not saved in {path}: {reason(error)}"
    if is_disk_full(error):
        text += f" (needs {format_bytes(state_bytes)}, {folders.free_text(path)})"
    try:
        steps = ", ".join(map(str, folders.list_steps(path))) or "none"
        text += f"; earlier checkpoints are intact: {steps}"
    except OSError as unlisted:
        text += f"; earlier checkpoints cannot be listed now ({reason(unlisted)})"
    if isinstance(error, DivergedError):
        return DivergedError(text)
    kind = DiskFullError if is_disk_full(error) else MachineError
    kind = GivenUpError if isinstance(error, GivenUpError) else kind
    return kind(f"{text}; free some space, fix the folder, or use another one")


class SaveFailed(Exception):
    """Raised in a thread of a failed save to end its wait."""


@functools.cache
def end_stuck_threads() -> None:
    """Starts a thread that ends waits of Orbax's threads for folders that are never created."""
    threading.Thread(target=_watch_threads, name="zerojax-stuck-threads", daemon=True).start()


def _watch_threads() -> None:
    since: dict[tuple[int, str], float] = {}
    while True:
        now = time.monotonic()
        # A thread that waits for another key than before has made progress, and its time begins
        # anew.
        waits = {(thread, key): frame for thread, frame, key in _stuck_waits()}
        since = {wait: since.get(wait, now) for wait in waits}
        for wait, began in since.items():
            if now - began >= STUCK_SECONDS:
                _end_wait(wait[0], waits[wait])
        del waits  # frames keep arrays alive
        time.sleep(POLL_SECONDS)


def _stuck_waits() -> list[tuple[int, FrameType, str]]:
    """Returns (thread id, waiting frame, key that the thread waits for) of each waiting thread of
    Orbax."""
    found = []
    others = threading.main_thread().ident, threading.get_ident()
    for thread, top in sys._current_frames().items():
        frame: object = top if thread not in others else None
        # A running thread may leave a frame while it is inspected: with Python 3.11.7 a dict was
        # seen in its place. A waiting thread, as searched for here, leaves no frame.
        while isinstance(frame, FrameType):
            code = frame.f_code
            if code.co_name == _FUNCTION and _PACKAGE in code.co_filename:
                found.append((thread, frame, str(frame.f_locals.get("key"))))
                break
            frame = frame.f_back
    return found


def _end_wait(thread: int, frame: FrameType) -> None:
    """Raises `SaveFailed` in a thread, and wakes the thread.

    The exception is raised when the thread next runs Python code, so its wait has to be notified.
    Setting any key does that. Setting the key that the thread waits for would let it write the
    state once more.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SaveFailed))
    client = frame.f_locals.get("self")
    if hasattr(client, "key_value_set"):
        client.key_value_set("zerojax/a save has failed", "", allow_overwrite=True)
