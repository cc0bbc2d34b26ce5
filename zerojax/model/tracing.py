"""What a model does with its parameters, found by tracing it once without computing.

Knows abstract arrays; never touches devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from zerojax.model.protocol import Arrays, Loss, Model


@dataclasses.dataclass(frozen=True)
class ModelTrace:
    """What one abstract forward pass tells.

    Attributes:
      read_shapes: name -> the shapes it was read with; a name that is missing is never read. A
        stack of layers that is scanned is read one slice at a time, so its shape is shorter than
        the stored one.
      result: the abstract value of the loss.
      checkpoints: whether the model recomputes activations itself (`jax.checkpoint`, `nnx.remat`).
      jaxpr: the traced forward pass, for counting.
    """

    read_shapes: Mapping[str, frozenset[tuple[int, ...]]]
    result: Any
    checkpoints: bool
    jaxpr: Any


class _Recorder:
    """Notes the shape of every read and passes the value on."""

    def __init__(self, seen: dict[str, set[tuple[int, ...]]], name: str):
        self._seen = seen
        self._name = name

    def __call__(self, value: Any) -> Any:
        self._seen.setdefault(self._name, set()).add(tuple(np.shape(value)))
        return value


def trace_model(model: Model, params: Arrays, extras: Arrays, batch: Any, loss: Loss) -> ModelTrace:
    """Traces the loss once, without computing, and records how each parameter is read.

    Args:
      params, extras, batch: trees of `ShapeDtypeStruct`, as the model will see them.
    """
    seen: dict[str, set[tuple[int, ...]]] = {}
    on_read = {name: _Recorder(seen, name) for name in params}

    def traced(params: Arrays, extras: Arrays, batch: Any) -> Any:
        key = jax.random.key(0)
        return model.run(params, extras, key, lambda bound: loss(bound, batch), on_read=on_read)[0]

    jaxpr, result = jax.make_jaxpr(traced, return_shape=True)(params, extras, batch)
    return ModelTrace(
        read_shapes={name: frozenset(shapes) for name, shapes in seen.items()},
        result=result,
        checkpoints=_has_checkpoint(jaxpr.jaxpr),
        jaxpr=jaxpr,
    )


def _has_checkpoint(jaxpr: Any) -> bool:
    """Whether any equation, at any depth, is a `jax.checkpoint`."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("checkpoint", "remat", "remat2"):
            return True
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns") and _has_checkpoint(inner):
                return True
    return False
