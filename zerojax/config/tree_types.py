"""Names of values whose structure the user decides, so that no type describes them."""

from __future__ import annotations

from typing import Any

Tree = Any
"""A pytree: the user's parameters, gradients, an optimizer's state, or one value for each of their
arrays. JAX maps over any nesting of containers, and over classes that the user registers."""
Batch = Any
"""A batch as the user's loss reads it: a pytree of arrays whose dimension 0 counts examples, mostly
a dict by name."""
