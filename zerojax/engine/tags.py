"""Checkpoints by name, as DeepSpeed's loops keep them: a folder per tag, and which is latest.

Knows names and files; never when to save, nor what a state holds.

    runs/a/latest              the tag of the last save
    runs/a/global_step20/20    a checkpoint of step 20, as `zerojax.Checkpointer` writes it
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerojax.checkpoint import Checkpointer, CheckpointError, agreement
from zerojax.checkpoint.saving import is_first_process
from zerojax.planned import Planned
from zerojax.private_files import not_for_everybody
from zerojax.saved_state import save_state
from zerojax.state import TrainState

LATEST = "latest"
_CLIENT_STATE = "client_state"
_OF_DEEPSPEED = "*_states.pt"


def check_tag(tag: str) -> None:
    """Refuses a tag that is no name of a folder.

    Raises:
      ValueError: naming the tag.
    """
    if not tag or tag.startswith(".") or "/" in tag or os.sep in tag or tag == LATEST:
        raise ValueError(
            f"tag={tag!r} has to be the name of a folder: not empty, without slashes, without a "
            f"dot in front, and not {LATEST!r}; for example 'global_step100'"
        )


@not_for_everybody()
def save_tagged(
    folder: Path,
    tag: str,
    plan: Planned,
    state: TrainState,
    *,
    client_state: Mapping[str, Any],
    description: Mapping[str, Any],
    make_latest: bool,
) -> None:
    """Saves a state under a tag; on disk and whole when this returns.

    A tag that is there already keeps its checkpoint until the new one, of a later step, is whole.

    Args:
      folder: that holds the tags.
      tag: the same on all processes.
      plan: which `state` follows.
      state: its "step" is that of the checkpoint.
      client_state: JSON values; those of process 0 are stored.
      description: of the plan; JSON values.
      make_latest: whether `find_tag` finds it from now on.

    Raises:
      CheckpointError: nothing was saved: the disk, another tag on another process, or a step that
        is not above the tag's.
      ValueError: see `check_tag`.
      TypeError: client_state is not made of JSON values.
    """
    check_tag(tag)
    agreement.same_everywhere(tag, what="the tag of the checkpoint")
    about = {
        "data_state": {},
        "config": {_CLIENT_STATE: dict(client_state)},
        "plan": dict(description),
    }
    with Checkpointer(folder / tag, keep=1, asynchronous=False) as checkpointer:
        save_state(checkpointer, plan, state, step=int(state["step"]), about=about)
    error: CheckpointError | None = None
    if make_latest and is_first_process():
        try:
            _write_whole(folder / LATEST, tag + "\n")
        except OSError as failure:
            error = CheckpointError(
                f"{folder / tag} is saved, but {folder / LATEST} cannot be written "
                f"({failure.strerror}); load it by its tag"
            )
    agreement.raise_together(error)


def _write_whole(path: Path, text: str) -> None:
    """The file has its old text or all of the new one, whenever the machine stops."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def find_tag(folder: Path, tag: str | None) -> Path | None:
    """The folder of a tag; None, with a warning, where no tag is asked for and none is latest.

    Raises:
      CheckpointError: there is no such tag, or it was written by DeepSpeed.
    """
    if tag is None:
        try:
            tag = (folder / LATEST).read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            warnings.warn(
                f"nothing is loaded: there is no file {folder / LATEST}; the run starts anew "
                "unless load_checkpoint gets a tag",
                RuntimeWarning,
                stacklevel=3,
            )
            return None
    found = folder / tag
    if any(found.glob(_OF_DEEPSPEED)):
        raise CheckpointError(
            f"{found} was written by DeepSpeed; make safetensors of it with DeepSpeed's own "
            f"`python {folder}/zero_to_fp32.py {folder} OUT --safe_serialization -t {tag}`, and "
            "begin with these weights: model=zerojax.from_hugging_face(OUT). Its optimizer's "
            "moments cannot be taken over"
        )
    if not found.is_dir():
        there = sorted(entry.name for entry in folder.glob("*/")) if folder.is_dir() else []
        raise CheckpointError(
            f"there is no checkpoint {tag!r} in {folder}, which has {', '.join(there) or 'none'}"
        )
    return found


def client_state_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What `save_tagged` was given, from a checkpoint's configuration; {} where it was another."""
    return dict(config.get(_CLIENT_STATE, {}))
