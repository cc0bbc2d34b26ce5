"""Names of the values whose structure the user decides; a type checker knows nothing of them."""

from __future__ import annotations

from typing import Any

Tree = Any
"""A pytree in the user's structure: parameters, gradients, an optimizer's state, or one value for
each of their arrays. JAX maps over any nesting of containers, also of the user's own classes, so no
type describes it."""
Batch = Any
"""What the user's batches are and the user's loss reads: a pytree of arrays, mostly a dict by name,
whose dimension 0 counts examples."""
