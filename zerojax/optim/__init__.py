"""Which optimizer and which learning rate, and how the step applies it to shards.

Knows parameter names, steps and fused updates; never a mesh's shape or where anything lies.
"""

from zerojax.optim.building import (
    BuiltOptimizer,
    Schedule,
    adamw,
    build_optimizer,
    build_schedule,
    clip_by_global_norm,
    decay_mask,
    is_matrix,
)

__all__ = [
    "BuiltOptimizer",
    "Schedule",
    "adamw",
    "build_optimizer",
    "build_schedule",
    "clip_by_global_norm",
    "decay_mask",
    "is_matrix",
]
