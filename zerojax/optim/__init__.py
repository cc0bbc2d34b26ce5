"""Optimizers, learning-rate schedules, precision (dtypes) and the loss scale."""

from zerojax.optim.adam8bit import adam8bit
from zerojax.optim.building import (
    BuiltOptimizer,
    build_optimizer,
    check_optimizer,
    choose_update,
    fit_optimizer,
    with_ema,
)
from zerojax.optim.ema import (
    COUNT,
    EMA,
    Ema,
    EmaState,
    Weights,
    as_average,
    check_weights,
    ema_of,
    is_average,
)
from zerojax.optim.groups import decay_mask, is_matrix
from zerojax.optim.methods import adamw, lamb, lion, sgd
from zerojax.optim.muon import muon
from zerojax.optim.muon_parameters import (
    describe_muon,
    matrices_by_shape,
    muon_dimensions,
    muon_names,
)
from zerojax.optim.one_bit import one_bit_adam, one_bit_of
from zerojax.optim.optimizer import (
    BegunUpdate,
    Optimizer,
    StateCoding,
    StepNumbers,
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
    "COUNT",
    "DEEPSPEED_SCHEDULES",
    "EMA",
    "EXTRA_ARGUMENTS",
    "BegunUpdate",
    "BuiltOptimizer",
    "DeepSpeedSchedule",
    "Ema",
    "EmaState",
    "OnTrueShapes",
    "Optimizer",
    "Schedule",
    "StateCoding",
    "StepNumbers",
    "UpdateContext",
    "Weights",
    "adam8bit",
    "adamw",
    "as_average",
    "build_deepspeed_schedule",
    "build_optimizer",
    "build_schedule",
    "check_optimizer",
    "check_weights",
    "choose_update",
    "clip_by_global_norm",
    "coding_of",
    "decay_mask",
    "describe_muon",
    "ema_of",
    "extra_arguments",
    "fit_optimizer",
    "is_average",
    "is_matrix",
    "lamb",
    "lion",
    "map_layers",
    "map_state",
    "matrices_by_shape",
    "muon",
    "muon_dimensions",
    "muon_names",
    "one_bit_adam",
    "one_bit_of",
    "sgd",
    "trace_update",
    "why_padding_shows",
    "with_ema",
    "with_raw_keys",
]
