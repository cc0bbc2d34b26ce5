"""The pass over pipeline stages: schedules run as tables, in one compiled program with ZeRO.

Knows tables, the pieces of a traced loss, and how `zero` reads parameters; never sees the
optimizer. Source of the schedules: `zerojax.schedules`.
"""

from zerojax.pipeline.passes import build_forward, build_gradients, split_layers

__all__ = ["build_forward", "build_gradients", "split_layers"]
