"""Writes notes of the training loop to the log, such as that and why nothing is saved."""

from __future__ import annotations

from collections.abc import Mapping

from zerojax.checkpoint import Checkpointer
from zerojax.training.metrics import RunLog


def say_if_done(log: RunLog | None, step: int, steps: int | None) -> None:
    """Logs that there is nothing to train if the run already took all of its steps before."""
    if log is not None and steps is not None and step >= steps:
        log.message(
            f"nothing to train: the run is at step {step} of {steps}; raise steps= to continue, or "
            "choose another folder to start a new run"
        )


def say_if_short(log: RunLog | None, step: int, steps: int | None) -> None:
    """Logs that the batches ended before the run's last step, if they did."""
    if log is not None and steps is not None and step < steps:
        log.message(
            f"the batches ended after {step} of {steps} steps; pass a list, or another object "
            "that can be iterated again, to repeat them"
        )


def say_epochs(
    log: RunLog | None, step: int, known: dict[str, int], epochs: Mapping[str, int]
) -> None:
    """Logs which parts of the data begin another epoch; the first call logs all parts.

    Args:
      log: log of the run, if it has one.
      step: number of the step.
      known: {part: epoch from 1 that was logged last}; updated in place.
      epochs: {part: current epoch}.
    """
    changed = {part: number for part, number in epochs.items() if known.get(part) != number}
    known.update(changed)
    if changed and log is not None:
        where = ", ".join(f"{part}: epoch {number}" for part, number in changed.items())
        log.event("epoch", step, f"data: {where}", epochs=changed)


def say_unsaved(log: RunLog) -> None:
    """Logs that the run has no checkpoints, and how to keep its weights."""
    log.message(
        "no weights will be saved: pass checkpoint='runs/NAME' to train, or take them from "
        "trainer.to_model() at the end"
    )


def describe_loss_of_stop(doing: str, checkpointer: Checkpointer | None, resume_hint: str) -> str:
    """Returns a sentence that says what is lost if the process ends in the middle of a step.

    Args:
      doing: current activity, such as "in a step".
      checkpointer: checkpointer of the run; None if the run has no checkpoints.
      resume_hint: sentence part that says how to resume the run.
    """
    if checkpointer is None:
        return f"it was {doing}, and the run has no checkpoints"
    saved = checkpointer.steps()
    if not saved:
        return f"it was {doing}, and no checkpoint was written before"
    where = checkpointer.path
    return f"it was {doing}; the last checkpoint is step {saved[-1]} in {where}: {resume_hint}"


def note_if_donated(error: Exception) -> None:
    """Adds a note about buffer donation to an error that says that an array was deleted."""
    if isinstance(error, RuntimeError) and "has been deleted" in str(error):
        error.add_note(
            "The state is donated to each step: arrays of trainer.state are deleted by the next "
            "step. Keep a copy: jax.device_get(trainer.state['params'])"
        )
