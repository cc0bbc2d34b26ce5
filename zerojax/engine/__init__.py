"""`zerojax.initialize`: DeepSpeed's engine, for loops that are ported to zerojax.

Knows what a ds_config.json was translated to; never how a key is read, nor what a step computes.
"""

from zerojax.engine.engine import Engine, initialize

__all__ = ["Engine", "initialize"]
