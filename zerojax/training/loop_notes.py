"""Sentences of the training loop: what a run does not do, and why."""

from __future__ import annotations

from collections.abc import Mapping

from zerojax.checkpoint import Checkpointer
from zerojax.training.metrics import RunLog


def say_if_done(log: RunLog | None, step: int, steps: int | None) -> None:
    """Says that there is nothing to train where a run has all of its steps."""
    if log is not None and steps is not None and step >= steps:
        log.message(
            f"nothing to train: the run is at step {step} of {steps}; raise steps= to go on, or "
            "choose another folder to start anew"
        )


def say_if_short(log: RunLog | None, step: int, steps: int | None) -> None:
    """Says that the batches have ended before the run has all of its steps."""
    if log is not None and steps is not None and step < steps:
        log.message(
            f"the batches ended after {step} of {steps} steps; give a list, or what can be "
            "iterated anew, to have them repeated"
        )


def say_epochs(
    log: RunLog | None, step: int, known: dict[str, int], epochs: Mapping[str, int]
) -> None:
    """Says which parts of the data begin another epoch, and at first where all of them are.

    Args:
      known: {part: its epoch, from 1}, as said before; updated.
      epochs: the same now.
    """
    changed = {part: number for part, number in epochs.items() if known.get(part) != number}
    known.update(changed)
    if changed and log is not None:
        where = ", ".join(f"{part}: epoch {number}" for part, number in changed.items())
        log.event("epoch", step, f"data: {where}", epochs=changed)


def say_unsaved(log: RunLog) -> None:
    """Says that a run has no checkpoints, and how to keep its weights."""
    log.message(
        "no weights will be saved: pass checkpoint='runs/NAME' to train, or take them from "
        "trainer.to_model() at the end"
    )


def describe_loss_of_stop(doing: str, checkpointer: Checkpointer | None, resume_hint: str) -> str:
    """Returns what is lost where a process is ended before its step has ended.

    Args:
      doing: what the process does, such as "in a step".
      checkpointer: of the run.
      resume_hint: how the run goes on.
    """
    if checkpointer is None:
        return f"it was {doing}, and the run has no checkpoints"
    saved = checkpointer.steps()
    if not saved:
        return f"it was {doing}, and no checkpoint was written before"
    where = checkpointer.path
    return f"it was {doing}; the last checkpoint is step {saved[-1]} in {where}: {resume_hint}"


def note_if_donated(error: Exception) -> None:
    """Adds to an error about a deleted array that a step takes the memory of its state."""
    if isinstance(error, RuntimeError) and "has been deleted" in str(error):
        error.add_note(
            "A step takes the memory of its state: arrays of trainer.state are gone after the next "
            "step. Keep a copy, jax.device_get(trainer.state['params'])"
        )
