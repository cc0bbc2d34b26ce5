"""DeepSpeed's `initialize` and engine, implemented as an adapter over zerojax's training step."""

from zerojax.deepspeed_engine.engine import Engine, initialize

__all__ = ["Engine", "initialize"]
