"""When a state is saved, when its failure is told, which steps stay, and what a run resumes from.

Knows steps, threads and processes; never touches meshes, plans, padding or how arrays are encoded.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import operator
import os
import types
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Self

import jax

from zerojax.checkpoint import agreement, arrays, folders
from zerojax.checkpoint.errors import CheckpointError, reason
from zerojax.checkpoint.metadata import (
    Metadata,
    check_same_arrays,
    make_metadata,
    read_metadata,
)
from zerojax.checkpoint.pieces import Pieces
from zerojax.checkpoint.retention import Retention, as_retention
from zerojax.checkpoint.saving import ARRAYS, PIECES, Save, is_first_process, write
from zerojax.trees import flatten_names, num_bytes, unflatten_like

PyTree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """One checkpoint, read back."""

    step: int
    state: PyTree
    """Same tree, shapes, dtypes and shardings as the abstract state that was asked for."""

    data_state: dict[str, Any]
    config: dict[str, Any]
    plan: dict[str, Any]


class Checkpointer:
    """Saves and restores states in one folder.

    With several processes, all must call every method except `steps`, `latest_step` and `metadata`,
    in the same order and with the same arguments, on a shared file system.

    Use it as a context manager: `close` waits for the write in flight, which is lost when the
    interpreter exits first (the earlier checkpoints are not).
    """

    def __init__(
        self, path: str | os.PathLike[str], *, keep: int | Retention = 3, asynchronous: bool = True
    ) -> None:
        """Creates and deletes nothing before the first save, so a running folder may be read.

        Args:
          path: folder of a mounted file system; created by the first save.
          keep: number of newest checkpoints to keep, or a `Retention`.
          asynchronous: False: `save` returns only when the checkpoint is visible.

        Raises:
          ValueError: the path is a URL, or `keep` is below 1.
        """
        if "://" in os.fspath(path):
            raise ValueError(
                f"checkpoint path {os.fspath(path)!r} is a URL; only folders of a mounted file"
                " system work; mount the bucket, or copy finished checkpoints to it"
            )
        self.path = Path(path).expanduser().absolute()
        self.keep = as_retention(keep)
        self.asynchronous = asynchronous
        self._writer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: concurrent.futures.Future[list[str]] | None = None
        self._attempts = 0
        self._closed = False

    def steps(self) -> tuple[int, ...]:
        """The saved steps, oldest first. A write in progress is not among them."""
        try:
            return folders.list_steps(self.path)
        except OSError as error:
            raise CheckpointError(f"checkpoint folder cannot be listed: {reason(error)}") from error

    def latest_step(self) -> int | None:
        """The newest saved step, or None when there is none."""
        return max(self.steps(), default=None)

    def metadata(self, step: int | None = None) -> Metadata:
        """What is stored beside the arrays of a step (None: the newest). Reads no arrays.

        Raises:
          CheckpointError: no such step, damaged, or of a newer format.
        """
        return read_metadata(folders.step_folder(self.path, self._existing_step(step)))

    def check_writable(self, state_bytes: int = 0) -> None:
        """Finds out, before a run starts, whether its checkpoints can be written.

        Args:
          state_bytes: size of one unsharded state; 0 leaves the free space unchecked.

        Raises:
          CheckpointError: the folder cannot be created or written, or has too little space.
        """
        error = None
        if is_first_process():
            error = folders.writable_error(self.path, state_bytes)
        agreement.raise_together(error)

    def save(
        self,
        step: int,
        state: PyTree,
        *,
        data_state: dict[str, Any],
        config: dict[str, Any],
        plan: dict[str, Any],
        write_pieces: Callable[[Path], None] | None = None,
    ) -> None:
        """Saves a state; returns when `state` may be donated, the rest happens in the background.

        Waits first for the previous save; its failure is raised here, and nothing is saved then.

        Args:
          step: batches consumed; above every saved step.
          state: canonical (unpadded) tree of `jax.Array`.
          data_state: position of the data source; JSON values; the same on all processes.
          config: the resolved configuration; JSON values.
          plan: the plan; JSON values.
          write_pieces: writes what `state` has as `ShapeDtypeStruct`s into the folder that it is
            given, with a `store.pieces.PieceWriter`; done before this method returns.

        Raises:
          CheckpointError: this or the previous save failed. Earlier checkpoints are intact.
          TypeError: a leaf is no array, or an argument is not made of JSON values.
        """
        if self._closed:
            raise CheckpointError(f"the checkpointer of {self.path} is closed; make a new one")
        self.wait()
        step = self._new_step(step)
        named = flatten_names(state)
        in_pieces = {n: x for n, x in named.items() if isinstance(x, jax.ShapeDtypeStruct)}
        if write_pieces is None:
            in_pieces = {}
        leaves = arrays.named_arrays({n: x for n, x in named.items() if n not in in_pieces})
        described = leaves | in_pieces
        metadata = make_metadata(step, described, data_state=data_state, config=config, plan=plan)
        self._attempts += 1
        agreement.same_everywhere(
            json.dumps([step, self._attempts, metadata.arrays, data_state]),
            what="the step, the shapes of the state, or data_state",
        )
        save = Save(
            metadata=metadata,
            partial=folders.partial_folder(self.path, step, self._attempts),
            keep=self.keep,
            leaves=leaves,
            state_bytes=num_bytes(described),
            write_pieces=write_pieces if in_pieces else None,
            started=concurrent.futures.Future(),
        )
        # All of it runs in the writer's thread, so that a Ctrl-C here interrupts only the waiting:
        # the save goes on, and `close` waits for it.
        self._pending = self._writer.submit(write, save)
        if not save.started.result() or not self.asynchronous:
            self.wait()

    def wait(self) -> None:
        """Waits until the last save is visible.

        Raises:
          CheckpointError: it failed. Told once; the next save starts afresh.
        """
        if self._pending is None:
            return
        concurrent.futures.wait([self._pending])
        pending, self._pending = self._pending, None
        agreement.raise_together(pending.exception())
        for text in pending.result():
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def close(self) -> None:
        """Waits for the last save and ends the writer's thread. May be called twice.

        A first Ctrl-C during the wait is raised after the save has finished, a second one at once.

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
            if self._attempts and self._pending is None and is_first_process():
                # Threads of a failed save may have gone on writing after it was removed.
                with contextlib.suppress(OSError):
                    folders.remove_leftovers(self.path)

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
        abstract: PyTree,
        step: int | None = None,
        *,
        subset: bool = False,
        unread: Collection[str] = (),
    ) -> Restored:
        """Reads a state into the shardings of `abstract`, whatever mesh it was saved on.

        Args:
          abstract: tree of `ShapeDtypeStruct` with shardings, canonical (unpadded) shapes.
          step: a saved step; None: the newest.
          subset: True: `abstract` may lack leaves of the checkpoint, which are then not read
            (for example only `{"params": ...}`, to generate text).
          unread: names of leaves that are not read now: an `checkpoint.pieces.Unread` in the place
            of each reads any part of it later.

        Raises:
          CheckpointError: no such step; damaged; saved by another model (names the first differing
            leaf); or of a newer format.
          TypeError: a leaf of `abstract` has no sharding.
        """
        self.wait()
        wanted = flatten_names(abstract)
        for name, leaf in wanted.items():
            if getattr(leaf, "sharding", None) is None:
                raise TypeError(
                    f"abstract state: {name!r} has no sharding; pass plan.abstract_canonical, or"
                    " ShapeDtypeStructs with sharding="
                )
        metadata = self._matching_metadata(wanted, step, subset)
        folder = folders.step_folder(self.path, metadata.step)
        try:
            pieces = Pieces(folder / ARRAYS, folder / PIECES)
            flat = pieces.read(wanted, unread=unread, subset=subset)
        except Exception as error:
            raise self._damaged(metadata.step, reason(error)) from error
        return Restored(
            step=metadata.step,
            state=unflatten_like(abstract, flat),
            data_state=metadata.data_state,
            config=metadata.config,
            plan=metadata.plan,
        )

    def _existing_step(self, step: int | None) -> int:
        steps = self.steps()
        if step is None and not steps:
            raise CheckpointError(f"{self.path} has no checkpoints; check the path, or train first")
        if step is not None and step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(f"{self.path} has no step {step}; the saved steps are: {there}")
        return steps[-1] if step is None else step

    def _new_step(self, step: int) -> int:
        step = operator.index(step)
        latest = self.latest_step()
        if step < 0:
            raise CheckpointError(f"step {step} cannot be saved; steps are 0 or more")
        if latest is not None and step <= latest:
            raise CheckpointError(
                f"step {step} cannot be saved: {self.path} already has step {latest}; remove the"
                f" folders of steps {step} and above there, or use another checkpoint folder"
            )
        return step

    def _matching_metadata(
        self, wanted: Mapping[str, Any], step: int | None, subset: bool
    ) -> Metadata:
        """The metadata of the step that process 0 chooses; refuses, on all processes together."""
        error, metadata, chosen = None, None, -1
        try:
            chosen = self._existing_step(step)
        except CheckpointError as failure:
            error = failure
        chosen = agreement.from_process_0(chosen)
        try:
            if error is None:
                metadata = self._checked_metadata(wanted, chosen, subset)
        except CheckpointError as failure:
            error = failure
        agreement.raise_together(error)
        assert metadata is not None
        return metadata

    def _checked_metadata(self, wanted: Mapping[str, Any], step: int, subset: bool) -> Metadata:
        folder = folders.step_folder(self.path, step)
        metadata = read_metadata(folder)
        check_same_arrays(metadata.arrays, wanted, where=str(folder), subset=subset)
        try:
            damage = folders.first_damage(folder, metadata.files)
        except OSError as error:
            damage = reason(error)
        if damage is not None:
            raise self._damaged(step, damage)
        return metadata

    def _damaged(self, step: int, damage: str) -> CheckpointError:
        earlier = [other for other in self.steps() if other < step]
        remedy = f"restore step {earlier[-1]}" if earlier else "no earlier step is saved"
        folder = folders.step_folder(self.path, step)
        return CheckpointError(f"checkpoint {folder} is damaged: {damage}; {remedy}")
