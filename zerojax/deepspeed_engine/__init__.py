"""DeepSpeed's `initialize` and engine, as an adapter over zerojax's steps."""

from zerojax.deepspeed_engine.engine import Engine, initialize

__all__ = ["Engine", "initialize"]
