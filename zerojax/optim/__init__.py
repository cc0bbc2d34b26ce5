"""Optimizers, learning-rate schedules, dtypes and the loss scale."""

from zerojax.optim.adam8bit import adam8bit
from zerojax.optim.building import (
    BuiltOptimizer,
    build_optimizer,
    check_optimizer,
    choose_update,
    fit_optimizer,
)
from zerojax.optim.clipping import clip_by_global_norm
from zerojax.optim.coding import StateCoding
from zerojax.optim.deepspeed_schedules import (
    DEEPSPEED_SCHEDULES,
    DeepSpeedSchedule,
    build_deepspeed_schedule,
)
from zerojax.optim.groups import decay_mask, is_matrix
from zerojax.optim.layers import map_layers
from zerojax.optim.methods import adamw, lamb, lion, sgd
from zerojax.optim.muon import describe_muon, muon_dimensions
from zerojax.optim.optimizer import BegunUpdate, Optimizer, UpdateContext, coding_of
from zerojax.optim.padding import trace_update, why_padding_shows
from zerojax.optim.raw_keys import with_raw_keys
from zerojax.optim.schedules import Schedule, build_schedule
from zerojax.optim.state_leaves import map_state
from zerojax.optim.telling import KEYWORDS, told
from zerojax.optim.true_shapes import OnTrueShapes

__all__ = [
    "DEEPSPEED_SCHEDULES",
    "KEYWORDS",
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
    "fit_optimizer",
    "is_matrix",
    "lamb",
    "lion",
    "map_layers",
    "map_state",
    "muon_dimensions",
    "sgd",
    "told",
    "trace_update",
    "why_padding_shows",
    "with_raw_keys",
]
