"""The numbers with which benchmarks build an optimizer of zerojax: those of a run's default.

Knows numbers; never a model, a learning rate or a clock.
"""

from __future__ import annotations

from typing import Any

from zerojax.optim import decay_mask

CLIPPED: dict[str, Any] = {"mask": decay_mask, "clip_norm": 1.0}
DECAYED = {"weight_decay": 0.1, **CLIPPED}
ADAMW = {"b2": 0.95, **DECAYED}
