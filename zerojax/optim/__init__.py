"""Optimizers, learning-rate schedules, dtypes and the loss scale."""

from zerojax.optim.adam8bit import adam8bit
from zerojax.optim.building import (
    BuiltOptimizer,
    build_optimizer,
    check_optimizer,
    choose_update,
    fit_optimizer,
)
from zerojax.optim.groups import decay_mask, describe_muon, is_matrix, muon_dimensions
from zerojax.optim.methods import adamw, lamb, lion, sgd
from zerojax.optim.optimizer import (
    BegunUpdate,
    Optimizer,
    StateCoding,
    UpdateContext,
    coding_of,
    map_state,
)
from zerojax.optim.padding import OnTrueShapes, trace_update, why_padding_shows
from zerojax.optim.schedules import (
    DEEPSPEED_SCHEDULES,
    DeepSpeedSchedule,
    Schedule,
    build_deepspeed_schedule,
    build_schedule,
)
from zerojax.optim.transforms import (
    EXTRA_ARGUMENTS,
    clip_by_global_norm,
    extra_arguments,
    map_layers,
    with_raw_keys,
)

__all__ = [
    "DEEPSPEED_SCHEDULES",
    "EXTRA_ARGUMENTS",
    "BegunUpdate",
    "BuiltOptimizer",
    "DeepSpeedSchedule",
    "OnTrueShapes",
    "Optimizer",
    "Schedule",
    "StateCoding",
    "UpdateContext",
    "adam8bit",
    "adamw",
    "build_deepspeed_schedule",
    "build_optimizer",
    "build_schedule",
    "check_optimizer",
    "choose_update",
    "clip_by_global_norm",
    "coding_of",
    "decay_mask",
    "describe_muon",
    "extra_arguments",
    "fit_optimizer",
    "is_matrix",
    "lamb",
    "lion",
    "map_layers",
    "map_state",
    "muon_dimensions",
    "sgd",
    "trace_update",
    "why_padding_shows",
    "with_raw_keys",
]
