"""Extra arguments of optax transformations, such as the loss of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

KEYWORDS = ("value", "grad", "grad_norm", "layers")
"""What `told` gives."""


def told(
    grads: Mapping[str, Any], grad_norm: jax.Array, loss: jax.Array, layers: frozenset[str]
) -> dict[str, Any]:
    """The keywords of `update`, for a `GradientTransformationExtraArgs` that takes them.

    Args:
      grads: those of the mean loss, of the shapes of the parameters.
      grad_norm: float32 []; their l2 norm before clipping.
      loss: float32 []; the mean loss of the global batch.
      layers: names of parameters whose dimension 0 counts layers.

    Returns:
      "value" and "grad" as optax names them (`optax.polyak_sgd`, `optax.contrib.momo`), and
      "grad_norm" and "layers", which zerojax's own take.
    """
    return {"value": loss, "grad": grads, "grad_norm": grad_norm, "layers": layers}
