"""The numbers of a run's default optimizer, where a test needs its clipping, decay and mask."""

from typing import Any

from zerojax.optim import decay_mask

CLIPPED: dict[str, Any] = {"mask": decay_mask, "clip_norm": 1.0}
DECAYED = {"weight_decay": 0.1, **CLIPPED}
RECIPE = {"b2": 0.95, **DECAYED}
