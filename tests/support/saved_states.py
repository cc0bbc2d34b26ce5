"""States of plans in checkpoints, saved and restored without a run."""

from pathlib import Path
from typing import Any

from zerojax.checkpoint import Checkpointer
from zerojax.training.checkpointing import restore_state, save_state, what_differs

ABOUT: dict[str, Any] = {"data_state": {}, "config": {}, "plan": {}}


def save(folder: Path, plan: Any, state: Any, step: int = 3) -> None:
    with Checkpointer(folder) as checkpointer:
        save_state(checkpointer, plan, state, step=step, about=ABOUT)


def restore(folder: Path, plan: Any) -> tuple[Any, list[str]]:
    """(the state of the last step, what a run says of it)."""
    with Checkpointer(folder) as checkpointer:
        restored, state = restore_state(checkpointer, plan)
    return state, what_differs(plan, restored)
