"""Decides which parameters of layers that are stored in files are initialized one layer at a time
in a new run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Batch
from zerojax.placement.state import run_key_data
from zerojax.placement.state_layout import OffloadLayout
from zerojax.tracing.protocol import Loss, Model
from zerojax.tracing.rolling.single_rows import SingleRow, find_rows
from zerojax.tracing.trees import format_bytes


@dataclass(frozen=True, eq=False)
class LayerDraws:
    """How the parameters of layers in files are initialized.

    Attributes:
      rows: {name: function `(layer, key data of the seed) -> [1, ...]`} of the parameters that are
        initialized layer by layer.
      whole: {name: reason} of the parameters that are initialized for all layers at once.
    """

    rows: Mapping[str, SingleRow]
    whole: Mapping[str, str]


def initial_arrays_of(
    model: Model, batch: Batch, loss: Loss, key_data: jax.Array
) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Returns the parameters and the other state that a model's initialization makes; for use under
    `jax.jit` or tracing.

    Args:
      model: model without arrays.
      batch: shapes and dtypes of a batch.
      loss: loss of the model.
      key_data: key data of the seed.
    """
    # Zeros: Linen reads only a batch's shapes, and zeros need no transfer.
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), batch)
    return model.init(jax.random.wrap_key_data(key_data), zeros, loss)


def find_draws(model: Model, batch: Batch, loss: Loss, names: Sequence[str]) -> LayerDraws:
    """Finds the parameters whose layers can be initialized one by one, with the same values as all
    layers at once.

    `zerojax.tracing.rolling.single_rows` explains how.

    Args:
      model: model without arrays.
      batch: shapes and dtypes of a batch.
      loss: loss of the model.
      names: names of stacked layer parameters.
    """

    def init(key_data: jax.Array) -> list[jax.Array]:
        params, _ = initial_arrays_of(model, batch, loss, key_data)
        return [params[name] for name in names]

    program = jax.make_jaxpr(init)(jax.eval_shape(lambda: run_key_data(0)))
    return LayerDraws(*find_rows(program, names))


def describe_draws(
    model: Model, batch: Batch, loss: Loss, layout: OffloadLayout | None
) -> list[str]:
    """Describes how much device memory the initialization of layers in files takes.

    Args:
      model: model without arrays.
      batch: shapes and dtypes of a batch.
      loss: loss of the model.
      layout: memory of each part of the state.
    """
    if layout is None or not layout.paged:
        return []
    given = model.initial_arrays()
    missing = [
        name
        for name in layout.paged_order
        if given is None or isinstance(given[0][name], jax.ShapeDtypeStruct)
    ]
    draws = find_draws(model, batch, loss, missing) if missing else LayerDraws({}, {})
    sizes = {name: _layer_bytes(layout, name) for name in layout.paged_order}
    lines = []
    by_row = [name for name in layout.paged_order if name not in draws.whole]
    if by_row:
        name = max(by_row, key=sizes.__getitem__)
        lines.append(
            "a new run initializes its parameters one layer at a time: "
            f"{name} takes {format_bytes(sizes[name])} of device memory"
        )
    if draws.whole:
        layers = next(iter(layout.leaves[name].shard_shape[0] for name in layout.paged_order))
        name = max(draws.whole, key=sizes.__getitem__)
        others = f" ({len(draws.whole) - 1} more in the same way)" if len(draws.whole) > 1 else ""
        lines.append(
            f"a new run initializes all {layers} layers of {name} at once{others}, because "
            f"{draws.whole[name]}: {format_bytes(layers * sizes[name])} of device memory; to "
            f"initialize layer "
            "by layer, build the layers by jax.vmap or nnx.vmap over keys"
        )
    return lines


def _layer_bytes(layout: OffloadLayout, name: str) -> int:
    """Returns the bytes of one layer of a parameter on a device, in float32."""
    return math.prod(layout.leaves[name].shard_shape[1:]) * jnp.dtype(jnp.float32).itemsize
