"""Frequencies of logging, evaluation and checkpoints in a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Habits:
    """What a run does besides stepping, and how often.

    Attributes:
      log_every: steps between reports.
      eval_every: steps between evaluations; None evaluates at the end only.
      eval_batches: batches per evaluation.
      save_every: steps between checkpoints.
      save_on_exit: also save at the end and when interrupted.
      max_skipped: consecutive reports in which every step was skipped as non-finite before the run
        stops.
      callbacks: called with `(trainer, metrics)` at every report; one that returns True ends the
        run.
      resume_hint: what to tell a user whose run was interrupted.
    """

    log_every: int = 10
    eval_every: int | None = None
    eval_batches: int = 8
    save_every: int = 500
    save_on_exit: bool = True
    max_skipped: int = 5
    callbacks: Sequence[Callable[[Any, dict[str, float]], Any]] = ()
    resume_hint: str = "call train again with the same checkpoint to resume"
