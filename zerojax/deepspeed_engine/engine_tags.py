"""Saves and finds checkpoints by tag in DeepSpeed's layout: a folder per tag and a file `latest`.

runs/a/latest              contains the tag of the last save
runs/a/global_step20/20    a checkpoint of step 20, as `zerojax.Checkpointer` writes it
runs/a/.best.new           a checkpoint that is being written
runs/a/.best.replaced      the previous checkpoint of a tag while it is being replaced
runs/a/writer.lock         lock of the process that saves in runs/a
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zerojax.checkpoint import Checkpointer, CheckpointError, agreement
from zerojax.checkpoint.errors import FolderInUseError
from zerojax.checkpoint.folders import is_of_checkpointer, unwritable
from zerojax.checkpoint.saving import is_first_process
from zerojax.config.checks import warn_user
from zerojax.config.display import quoted
from zerojax.placement.state import TrainState
from zerojax.plan.make import Plan
from zerojax.runtime.folder_lock import FolderTakenError, Hold, hold
from zerojax.runtime.user_files import not_for_everybody, replace_text, to_disk
from zerojax.training.checkpointing import save_state

LATEST = "latest"
_CLIENT_STATE = "client_state"
_OF_DEEPSPEED = "*_states.pt"


def check_tag(tag: str) -> None:
    """Raises if a checkpoint's tag is not a valid folder name.

    Raises:
      ValueError: the message names the tag.
    """
    if not tag or tag.startswith(".") or "/" in tag or os.sep in tag or tag == LATEST:
        raise ValueError(
            f"tag={tag!r} must be a folder name: not empty, without slashes, without a "
            f"leading dot, and not {LATEST!r}; for example 'global_step100'"
        )


@not_for_everybody()
def hold_tags(folder: Path) -> Hold | None:
    """Locks the folder of the tags for all processes of this run.

    Args:
      folder: folder that has a folder for each tag.

    Returns:
      In process 0, the lock, to be released at the end of the run; None in other processes.

    Raises:
      CheckpointError: another process saves in the folder, or the folder cannot be written.
    """
    held: Hold | None = None
    error: CheckpointError | None = None
    if is_first_process():
        try:
            held = hold(folder, twice="share")
        except FolderTakenError as taken:
            error = FolderInUseError(str(taken))
        except OSError as failure:
            error = unwritable(failure)
    agreement.raise_together(error)
    return held


def save_tagged(
    folder: Path,
    tag: str,
    plan: Plan,
    state: TrainState,
    *,
    client_state: Mapping[str, Any],
    description: Mapping[str, Any],
    make_latest: bool,
) -> None:
    """Saves a state under a tag; blocks until the checkpoint is complete on disk.

    A previous checkpoint of the tag remains until the new one is complete.

    Args:
      folder: folder that has a folder for each tag.
      tag: name of the checkpoint, equal on all processes.
      plan: plan of `state`.
      state: state to save; its entry "step" is the number of the checkpoint's step.
      client_state: JSON values; those of process 0 are stored.
      description: description of the plan, made of JSON values.
      make_latest: True: `find_tag` without a tag returns this checkpoint.

    Raises:
      CheckpointError: nothing was saved, because of a disk error or different tags on processes; or
        the checkpoint was saved, but the file `latest` was not written.
      ValueError: the tag is not a valid folder name.
      TypeError: client_state contains other values than JSON values.
    """
    check_tag(tag)
    agreement.same_everywhere(tag, what="the tag of the checkpoint")
    about = {
        "data_state": {},
        "config": {_CLIENT_STATE: dict(client_state)},
        "plan": dict(description),
    }
    new, target = folder / f".{tag}.new", folder / tag
    _in_first_process(f"{target} is not saved", _check_own, (target, new, _replaced(target)))
    _in_first_process(f"{target} is not saved", _remove, new)
    with Checkpointer(new, keep=1, asynchronous=False) as checkpointer:
        save_state(checkpointer, plan, state, step=int(state["step"]), about=about)
    _in_first_process(f"{folder / tag} is not replaced by {new}", _replace, new, folder / tag)
    if make_latest:
        what = f"{folder / tag} is saved, but not named in {folder / LATEST}; load it by its tag"
        write = functools.partial(replace_text, durable=True)
        _in_first_process(what, write, folder / LATEST, tag + "\n")


def _in_first_process(failure: str, action: Callable[..., None], *arguments: Any) -> None:
    """Runs `action`, which changes files, in process 0, while the other processes wait."""
    error: CheckpointError | None = None
    if is_first_process():
        try:
            action(*arguments)
        except OSError as reason:
            error = CheckpointError(f"{failure}: {reason}")
    agreement.raise_together(error)


def _check_own(folders: Sequence[Path]) -> None:
    """Raises FileExistsError if a folder that would be replaced holds more than a checkpoint."""
    for folder in folders:
        if not os.path.lexists(folder):
            continue
        names = os.listdir(folder)
        others = [name for name in names if not is_of_checkpointer(folder / name)]
        if others:
            raise FileExistsError(
                f"{folder} holds {quoted(min(others))}, which is no part of a checkpoint and would "
                "be deleted; choose another tag, or move the file"
            )


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _replace(new: Path, target: Path) -> None:
    """Replaces the folder `target` by `new` with two renames; between them, `find_tag` returns the
    replaced folder."""
    replaced = _replaced(target)
    if target.exists():
        _remove(replaced)
        target.rename(replaced)
    new.rename(target)
    to_disk(target.parent)
    _remove(replaced)


def _replaced(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def find_tag(folder: Path, tag: str | None) -> Path | None:
    """Returns the checkpoint folder of a tag; None, with a warning, if `tag` is None and there is
    no latest checkpoint.

    Raises:
      CheckpointError: the tag does not exist, or DeepSpeed wrote the checkpoint.
    """
    if tag is None:
        try:
            tag = (folder / LATEST).read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            warn_user(
                f"nothing is loaded: there is no file {folder / LATEST}; the run starts from "
                "the beginning "
                "unless load_checkpoint is called with a tag",
                RuntimeWarning,
            )
            return None
    found = folder / tag
    if any(found.glob(_OF_DEEPSPEED)):
        raise CheckpointError(
            f"{found} was written by DeepSpeed; convert it to safetensors with DeepSpeed's own "
            f"`python {folder}/zero_to_fp32.py {folder} OUT --safe_serialization -t {tag}`, and "
            "start from these weights: model=zerojax.from_hugging_face(OUT). Its optimizer's "
            "moments cannot be converted"
        )
    if not found.is_dir() and _replaced(found).is_dir():
        return _replaced(found)
    if not found.is_dir():
        entries = folder.glob("[!.]*/") if folder.is_dir() else ()
        there = sorted(entry.name for entry in entries)
        raise CheckpointError(
            f"{folder} has no checkpoint {tag!r}; its checkpoints are: {', '.join(there) or 'none'}"
        )
    return found


def client_state_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the client state stored in a checkpoint's configuration; {} if the checkpoint was not
    saved by `save_checkpoint`."""
    return dict(config.get(_CLIENT_STATE, {}))
