"""Explanation of out-of-memory errors: the request, the plan, and the settings that help.

It takes no device memory and compiles nothing.
"""

from zerojax.forecasting.out_of_memory.explaining import explaining_memory
from zerojax.forecasting.out_of_memory.message import Asked, what_was_asked

__all__ = ["Asked", "explaining_memory", "what_was_asked"]
