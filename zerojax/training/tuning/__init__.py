"""Measured choice of kernels on the GPUs of a run, before its state exists."""

from zerojax.training.tuning.kept_choices import Kept, KeptChoices
from zerojax.training.tuning.measured_choices import Answer, Question, Way, decide
from zerojax.training.tuning.tuned_plan import tune, why_not_measured

__all__ = [
    "Answer",
    "Kept",
    "KeptChoices",
    "Question",
    "Way",
    "decide",
    "tune",
    "why_not_measured",
]
