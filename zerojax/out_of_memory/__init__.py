"""What a run says when memory did not suffice: what was asked, what the plan said, what to set.

Knows errors, plans and what lives on the devices; takes no device memory and compiles nothing new.
"""

from zerojax.out_of_memory.explaining import explaining_memory
from zerojax.out_of_memory.message import Asked, what_was_asked

__all__ = ["Asked", "explaining_memory", "what_was_asked"]
