"""Measures which kernels are fastest on the GPUs of a run, before the state of the run exists."""

from zerojax.training.tuning.kept_choices import Kept, KeptChoices
from zerojax.training.tuning.measured_choices import Answer, Question, Way, decide
from zerojax.training.tuning.slice_choices import SLICES
from zerojax.training.tuning.tuned_plan import tune, why_not_measured
from zerojax.training.tuning.whole_steps import TimedStep, time_steps, variants_of

__all__ = [
    "SLICES",
    "Answer",
    "Kept",
    "KeptChoices",
    "Question",
    "TimedStep",
    "Way",
    "decide",
    "time_steps",
    "tune",
    "variants_of",
    "why_not_measured",
]
