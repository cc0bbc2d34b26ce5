"""Settings with which benchmarks build zerojax's optimizers: those of a run's default optimizer.

Contains numbers only; no model, learning rate or clock.
"""

from __future__ import annotations

from typing import Any

from zerojax.optim import decay_mask

CLIPPED: dict[str, Any] = {"mask": decay_mask, "clip_norm": 1.0}
DECAYED = {"weight_decay": 0.1, **CLIPPED}
ADAMW = {"b2": 0.95, **DECAYED}
