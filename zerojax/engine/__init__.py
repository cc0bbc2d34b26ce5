"""`zerojax.initialize`: DeepSpeed's engine interface for existing training loops."""

from zerojax.engine.engine import Engine, initialize

__all__ = ["Engine", "initialize"]
