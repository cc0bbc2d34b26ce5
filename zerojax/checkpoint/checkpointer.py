"""Saves checkpoints in the background, deletes old ones, and chooses the step to resume from."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import operator
import os
import threading
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax

from zerojax.checkpoint import agreement, arrays, folders
from zerojax.checkpoint.base_weights import BaseReader, BaseWeights, at_another_place
from zerojax.checkpoint.errors import (
    CheckpointError,
    DamagedError,
    FolderInUseError,
    MachineError,
    reason,
)
from zerojax.checkpoint.metadata import Metadata, make_metadata, read_metadata
from zerojax.checkpoint.restoring import Candidates, fingerprints_of, read_step
from zerojax.checkpoint.retention import Retention, as_retention, keep_step, kept_steps
from zerojax.checkpoint.saving import Save, is_first_process, not_saved, write
from zerojax.checkpoint.verification import Verification, verify_step
from zerojax.config.checks import names_keywords, warn_user
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.loader import user_path
from zerojax.config.tree_types import Tree
from zerojax.runtime.folder_lock import FolderTakenError, Hold, hold
from zerojax.tracing.trees import flatten_names, num_bytes, unflatten_like


@dataclass(frozen=True, kw_only=True)
class Restored:
    """Result of `Checkpointer.restore`: the state and the metadata of the checkpoint it read."""

    step: int
    state: Tree
    """The restored tree, with the shapes, dtypes and shardings of the requested abstract state."""

    data_state: dict[str, Any]
    config: dict[str, Any]
    plan: dict[str, Any]

    arrays: dict[str, str]
    """{name: dtype and shape, such as "float32[64,64]"} of every array in the checkpoint, including
    arrays that were not requested."""

    base: dict[str, str]
    """{name: fingerprint} of each frozen array that was read from a folder of pretrained weights
    because the checkpoint does not store it."""


@names_keywords()
class Checkpointer:
    """Saves training states as checkpoints in one folder, and restores them.

    With several processes, all processes must call every method except `steps`, `latest_step`,
    `metadata`, `kept_steps`, `take_notes` and `finish_alone`, in the same order and with the same
    arguments, on a shared file system.

    Only the first process of a run writes into the folder. It locks the folder from
    `check_writable` or the first save until `close` or the end of the process. Another writer gets
    an error meanwhile; `zerojax.runtime.folder_lock` documents the exceptions. Readers need no
    lock.

    Use it as a context manager: `close` waits for the save in progress. If the interpreter exits
    before `close`, that save is lost; earlier checkpoints remain.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep: int | Retention = 3,
        asynchronous: bool = True,
        fingerprints: bool = True,
    ) -> None:
        """Initializes a checkpointer for a folder.

        Nothing in the folder is created or deleted before the first save, so the folder of a
        running job can be read.

        Args:
          path: folder of a mounted file system; created by the first save.
          keep: number of newest checkpoints to keep, or a `Retention`.
          asynchronous: False: `save` returns only when the checkpoint is complete in the folder.
          fingerprints: whether devices compute fingerprints of saved arrays, so that a restore can
            compare the arrays with what was saved.

        Raises:
          ValueError: the path is a URL, or `keep` is below 1.
          TypeError: `keep` is neither an integer nor a `Retention`.
        """
        if "://" in os.fspath(path):
            raise ValueError(
                f"checkpoint path {os.fspath(path)!r} is a URL; only folders of a mounted file"
                " system work; mount the bucket, or copy finished checkpoints to it"
            )
        self.path = user_path(path).absolute()
        self.keep = as_retention(keep)
        self.asynchronous = asynchronous
        self.fingerprints = fingerprints
        self._candidates = Candidates(self.path, self.steps)
        self._writer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: concurrent.futures.Future[list[str]] | None = None
        self._hold: Hold | None = None  # in the first process
        self._attempts = 0
        self._given_up = threading.Event()
        self._closed = False

    def take_notes(self) -> list[str]:
        """Returns the problems with checkpoints found since the last call, one sentence each; only
        process 0 has any. Each was also issued as a warning, except that an earlier holder of the
        folder's lock ended without releasing it."""
        notes, self._candidates.notes = self._candidates.notes, []
        return notes

    def steps(self) -> tuple[int, ...]:
        """Returns the numbers of the completely saved steps, oldest first."""
        try:
            return folders.list_steps(self.path)
        except OSError as error:
            raise MachineError(
                f"checkpoint folder cannot be listed: {reason(error)}; fix the cause and try again"
            ) from error

    def latest_step(self) -> int | None:
        """Returns the newest saved step, or None if there is none."""
        return max(self.steps(), default=None)

    def metadata(self, step: int | None = None) -> Metadata:
        """Reads the metadata of a saved step (None: the newest), without its arrays.

        Raises:
          CheckpointError: the step does not exist, is damaged, or has a newer format.
        """
        step = self._candidates.existing(step)
        return read_metadata(folders.step_folder(self.path, step))

    def check_writable(self, state_bytes: int = 0) -> None:
        """Checks before a run starts that its checkpoints can be written.

        Args:
          state_bytes: size in bytes of the whole unsharded state; 0 skips the check of free space.

        Raises:
          FolderInUseError: another process writes into the folder.
          CheckpointError: the folder cannot be created or written, or has too little space.
        """
        error: CheckpointError | None = None
        if is_first_process():
            try:
                self._hold_folder()
                error = folders.writable_error(self.path, state_bytes)
            except CheckpointError as failure:
                error = failure
            except OSError as failure:
                error = folders.unwritable(failure)
        agreement.raise_together(error)

    def _hold_folder(self) -> None:
        """Locks the checkpoint folder for this process, or checks that its lock is still valid.
        Called only in the first process.

        Raises:
          FolderInUseError: another process holds the lock.
          OSError: the operating system reports an error.
        """
        try:
            if self._hold is None:
                self._hold = hold(self.path)
                if self._hold.note is not None:
                    self._candidates.notes.append(self._hold.note)
            self._hold.keep()
        except FolderTakenError as error:
            raise FolderInUseError(str(error)) from error

    def save(
        self,
        step: int,
        state: Tree,
        *,
        data_state: dict[str, Any],
        config: dict[str, Any],
        plan: dict[str, Any],
        write_pieces: Callable[[Path], None] | None = None,
        base: BaseWeights | None = None,
    ) -> None:
        """Saves a state in the background; returns when the arrays of `state` may be donated.

        Waits first for the previous save. If that save failed, its error is raised here and nothing
        new is saved.

        Args:
          step: number of batches consumed; must be above every saved step.
          state: portable (unpadded) tree of `jax.Array`.
          data_state: position of the data source, made of JSON values; equal on all processes.
          config: resolved configuration of the run, made of JSON values.
          plan: plan of the run, made of JSON values.
          write_pieces: function that gets a folder and writes into it, with a
            `checkpoint.store.pieces.PieceWriter`, the arrays that `state` has only as
            `ShapeDtypeStruct`s. It is done before this method returns.
          base: arrays of `state` that were read from a folder of pretrained weights. They are not
            written, because a restore reads them from that folder. If the files or the arrays have
            changed, all arrays are written, with a warning.

        Raises:
          CheckpointError: this or the previous save failed. Earlier checkpoints are intact.
          TypeError: a leaf is not an array, or an argument is not made of JSON values.
        """
        if self._closed:
            raise CheckpointError(
                f"the checkpointer of {self.path} is closed; create a new Checkpointer"
            )
        self.wait()
        named = flatten_names(state)
        in_pieces = {n: x for n, x in named.items() if isinstance(x, jax.ShapeDtypeStruct)}
        if write_pieces is None:
            in_pieces = {}
        leaves = arrays.named_arrays({n: x for n, x in named.items() if n not in in_pieces})
        # Before the frozen arrays are taken out: the metadata describe these too.
        described = leaves | in_pieces
        if base is not None and not self._is_unchanged(base, leaves):
            base = None
        for name in base.arrays if base is not None else ():
            del leaves[name]
        step, writer = self._make_room(step, num_bytes(leaves | in_pieces))
        metadata = make_metadata(
            step,
            described,
            data_state=data_state,
            config=config,
            plan=plan,
            base=None if base is None else base.to_dict(),
            fingerprints=None if base is None else dict(base.fingerprints),
        )
        self._attempts += 1
        # A new event, because that of a failed save stays set.
        self._given_up = threading.Event()
        agreement.same_everywhere(
            json.dumps([step, self._attempts, metadata.arrays, data_state]),
            what="the step, the shapes of the state, or data_state",
        )
        save = Save(
            metadata=metadata,
            partial=folders.partial_folder(self.path, step, writer, self._attempts),
            keep=self.keep,
            leaves=leaves,
            state_bytes=num_bytes(leaves | in_pieces),
            write_pieces=write_pieces if in_pieces else None,
            fingerprints=self.fingerprints,
            given_up=self._given_up,
            hold_folder=self._hold_folder,
            started=concurrent.futures.Future(),
        )
        # The whole save runs in the writer's thread. A Ctrl-C here interrupts only the waiting: the
        # save continues, and `close` waits for it.
        self._pending = self._writer.submit(write, save)
        if not save.started.result() or not self.asynchronous:
            self.wait()

    def _is_unchanged(self, base: BaseWeights, leaves: Mapping[str, jax.Array]) -> bool:
        """Returns True on all processes if the frozen weights, and the files of the folder they
        were read from, are unchanged."""
        change = base.change() if is_first_process() else None
        sums = fingerprints_of({name: leaves[name] for name in base.arrays})
        differing = [name for name in base.arrays if sums[name] != base.fingerprints[name]]
        if change is None and differing:
            change = f"{differing[0]!r} differs from what was read from there"
        if change is not None:
            self._candidates.note(
                f"{base.folder}: {change}, so the checkpoint stores all weights itself"
            )
        # Process 0 decides, since only it has compared the files.
        return agreement.from_process_0(int(change is None)) == 1

    def wait(self) -> None:
        """Waits until the last save is complete and its step is visible in the folder.

        Raises:
          CheckpointError: the save failed. Raised only once; the next save starts anew.
        """
        if self._pending is None:
            return
        error = agreement.wait_together(self._pending, self._given_up.set)
        pending, self._pending = self._pending, None
        agreement.raise_together(error)
        for text in pending.result():
            warn_user(text, RuntimeWarning)

    def close(self) -> None:
        """Waits for the last save and ends the writer's thread. May be called twice.

        A first Ctrl-C during the wait is raised after the save has finished. A second Ctrl-C is
        raised immediately.

        Raises:
          CheckpointError: the last save failed.
        """
        self._closed = True
        try:
            self.wait()
        except KeyboardInterrupt:
            self.wait()
            raise
        finally:
            self._writer.shutdown(wait=False)
            # After a second Ctrl-C the save continues and still needs the lock.
            if self._pending is None:
                self._release()

    def _release(self) -> None:
        """Releases this process's lock on the checkpoint folder."""
        if self._hold is None:
            return
        if self._attempts:
            # Threads of a failed save may have continued to write after it was removed.
            with contextlib.suppress(OSError, FolderTakenError):
                self._hold.keep()  # otherwise another process owns the folder
                folders.remove_leftovers(self.path)
        self._hold.release()

    def finish_alone(self, seconds: float) -> str | None:
        """Closes the checkpointer without communication, in a process that fails while other
        processes continue.

        Waits for a save in progress, because it may need only the part of this process.

        Args:
          seconds: maximum number of seconds to wait.

        Returns:
          Description of the problem with the save in progress, or None.
        """
        self._closed = True
        self._writer.shutdown(wait=False)
        pending, self._pending = self._pending, None
        if pending is not None and not concurrent.futures.wait([pending], seconds).done:
            self._given_up.set()  # the interpreter waits for the writer's thread
            return f"the save in progress is cancelled: it did not finish within {seconds:g} s"
        self._release()
        failure = None if pending is None else pending.exception()
        return None if failure is None else str(failure)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            error.add_note(f"Also: {failure}")

    def restore(
        self,
        abstract: Tree,
        step: int | None = None,
        *,
        subset: bool = False,
        unread: Collection[str] = (),
        optional: Collection[str] = (),
        optional_groups: Sequence[Collection[str]] = (),
        passed_over: Collection[str] = (),
        pretrained: str | os.PathLike[str] | None = None,
    ) -> Restored:
        """Restores a state with the shardings of `abstract`, from a checkpoint of any mesh.

        The arrays are compared with the saved fingerprints. With `step=None` a damaged step is
        skipped, with a warning, and the step before it is restored. The next save renames the
        folder of the damaged step N to `N.damaged`, so that step N can be saved again and the
        damaged files can be inspected.

        Args:
          abstract: tree of `ShapeDtypeStruct` with shardings and portable (unpadded) shapes.
          step: number of a saved step; None: the newest undamaged step.
          subset: True: `abstract` may lack leaves of the checkpoint, which are then not read (for
            example only `{"params": ...}`, to generate text).
          unread: names of leaves that are not read now. A `checkpoint.stored_arrays.Unread`
            replaces each of them and reads any part of it later.
          optional: names of leaves that the checkpoint either has all or lacks all. A missing leaf
            keeps its entry of `abstract`.
          optional_groups: more groups of names like `optional`. Each group may be missing
            independently of the others.
          passed_over: names of leaves that the checkpoint may have although `abstract` does not. A
            name that ends with a slash is a prefix.
          pretrained: folder with the frozen weights that a checkpoint does not store; None: the
            folder recorded in the checkpoint.

        Raises:
          BaseWeightsError: the frozen weights are missing or changed. No other step is tried.
          CheckpointError: the step does not exist, is damaged, was saved by another model (the
            message names the first differing leaf), or has a newer format.
          TypeError: a leaf of `abstract` has no sharding.
        """
        self.wait()
        wanted = flatten_names(abstract)
        for name, leaf in wanted.items():
            if getattr(leaf, "sharding", None) is None:
                raise TypeError(
                    f"abstract state: {name!r} has no sharding; pass plan.abstract_portable, or"
                    " ShapeDtypeStructs with sharding="
                )
        lost: dict[int, str] = {}
        chosen = self._candidates.first(step)
        while True:
            folder = folders.step_folder(self.path, chosen)
            try:
                metadata, flat = read_step(
                    folder,
                    wanted,
                    subset=subset,
                    unread=unread,
                    optional=optional,
                    optional_groups=optional_groups,
                    passed_over=passed_over,
                    pretrained=pretrained,
                )
                break
            except DamagedError as error:
                if step is not None:
                    remedy = self._candidates.remedy(chosen)
                    raise DamagedError(f"{error}; {remedy}") from error
                lost[chosen] = str(error)
            chosen = self._candidates.below(lost)
        self._candidates.pass_over(lost, f"step {chosen} is used in its place")
        if metadata.format == 1:
            self._candidates.note(
                f"checkpoint {folder} has no fingerprints, so its values are not checked"
            )
        return Restored(
            step=metadata.step,
            state=unflatten_like(abstract, flat),
            data_state=metadata.data_state,
            config=metadata.config,
            plan=metadata.plan,
            arrays=metadata.arrays,
            base={name: metadata.fingerprints[name] for name in metadata.base.get("arrays", ())},
        )

    def usable_step(self) -> int | None:
        """Returns the newest step with intact metadata and small files; None if nothing is saved.

        Later steps that are damaged are skipped from now on, with a warning.

        Raises:
          CheckpointError: all saved steps are damaged, or the newest step has a newer format.
        """
        self.wait()
        return self._candidates.usable()

    def kept_steps(self) -> dict[str, dict[str, Any]]:
        """Returns {name: {"step": number, ...}} of the steps that are protected under a name.

        Raises:
          MachineError: the file with the names cannot be read.
        """
        return kept_steps(self.path)

    def keep_step(self, name: str, step: int, about: Mapping[str, Any] | None = None) -> None:
        """Protects a saved step from deletion under a name, and releases the previous step of that
        name.

        Every process must call it.

        Args:
          name: name under which the step is protected, such as "best".
          step: number of a saved step, or of the save in progress (this method waits for it).
          about: additional JSON values for the step's entry in `kept_steps`.

        Raises:
          CheckpointError: the step does not exist, or the name cannot be stored.
        """
        self.wait()
        error = None
        if is_first_process():
            try:
                if step not in self.steps():
                    raise CheckpointError(
                        f"{self.path} has no step {step} to keep as {name!r}; save it first"
                    )
                keep_step(self.path, name, step, about or {})
            except CheckpointError as failure:
                error = failure
        agreement.raise_together(error)

    def check_step(
        self, step: int | None = None, *, pretrained: str | os.PathLike[str] | None = None
    ) -> None:
        """Checks that `restore` can read a saved step: its metadata, its small files, and the
        folder of its frozen weights.

        Args:
          step: number of a saved step; None: the newest usable step.
          pretrained: folder of the frozen weights; None: the folder recorded in the checkpoint.

        Raises:
          CheckpointError: the step is missing, damaged or of a newer format, or its frozen weights
            are missing.
        """
        self.wait()
        self._candidates.check(step)
        folder = folders.step_folder(self.path, self._candidates.first(step))
        error: CheckpointError | None = None
        if is_first_process():
            try:
                BaseReader(folder, at_another_place(read_metadata(folder), pretrained)).check()
            except CheckpointError as failure:
                error = failure
        agreement.raise_together(error)

    def verify(
        self, step: int | None = None, *, pretrained: str | os.PathLike[str] | None = None
    ) -> Verification:
        """Reads a whole step and compares it with its checksums and fingerprints.

        A single process is enough, and no model is needed.

        Args:
          step: number of a saved step; None: the newest.
          pretrained: folder of the frozen weights; None: the folder recorded in the checkpoint.

        Returns:
          The result, which lists all damage.

        Raises:
          CheckpointError: the step does not exist, has a newer format, or cannot be read for a
            reason other than damage.
        """
        self.wait()
        step = self._candidates.existing(step)
        folder = folders.step_folder(self.path, step)
        return verify_step(folder, step, pretrained=pretrained)

    def _make_room(self, step: int, state_bytes: int) -> tuple[int, int]:
        """Checks that `step` is above every saved step, and renames the folders of damaged steps
        that were skipped.

        Returns:
          The step, and a number of this writer that no other writer of the folder has.
        """
        step = operator.index(step)
        error: CheckpointError | None = None
        if is_first_process():
            try:
                self._hold_folder()
            except FolderInUseError as failure:
                error = failure
            except OSError as failure:
                error = not_saved(self.path, step, failure, state_bytes)
                error.__cause__ = failure
        agreement.raise_together(error)
        if is_first_process():
            try:
                self._candidates.set_aside()
                self._check_new(step)
            except CheckpointError as failure:
                error = failure
            except OSError as failure:
                error = MachineError(
                    f"step {step} was not saved in {self.path}: a damaged step in this folder "
                    f"cannot be renamed: {reason(failure)}; rename or remove its folder"
                )
        agreement.raise_together(error)
        return step, agreement.from_process_0(self._hold.number if self._hold is not None else -1)

    def _check_new(self, step: int) -> None:
        latest = self.latest_step()
        if step < 0:
            raise CheckpointError(f"step {step} cannot be saved; steps are 0 or more")
        if latest is not None and step <= latest:
            raise CheckpointError(
                f"step {step} cannot be saved: {self.path} already has step {latest}; remove its "
                f"folders of steps {step} and above, or use another checkpoint folder"
            )
