"""Check that a model's layers can be streamed, and the parameters that belong to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import optax

from zerojax.config import MeshConfig
from zerojax.config.offload import DEVICE, HOST
from zerojax.models.loops import cut_loss
from zerojax.models.losses import as_sums
from zerojax.models.protocol import Loss, Model
from zerojax.optim.precision import Precision
from zerojax.plan.offload_layout import OffloadLayout

Arrays = Mapping[str, Any]


def find_stacked(
    settings: MeshConfig, model: Model, loss: Loss, arrays: tuple[Arrays, Arrays, Any]
) -> frozenset[str]:
    """Names of the parameters that the loop over layers takes layer by layer.

    Args:
      settings: the mesh options; unless `offload.params` is host nothing is looked for.
      model, loss: what is trained.
      arrays: (parameters as they are read, extras, microbatch), as `ShapeDtypeStruct`s.

    Raises:
      ValueError: the layers do not run in one loop, or something in the model does not go with it.
    """
    if settings.offload.params != HOST:
        return frozenset()
    params, extras, batch = arrays
    if settings.stage > 1:
        raise ValueError(
            f"offload.params=host does not go with stage={settings.stage}: a pipeline stage runs "
            "its layers once per microbatch, and would bring them as often; use stage=1, or leave "
            "offload.params on the device and put opt_state on the host"
        )
    if model.overwritten:
        raise ValueError(
            f"offload.params=host does not go with 8-bit products: their scales (such as "
            f"{min(model.overwritten)}) are gradients of the whole loop over layers; use "
            "matmul_dtype=None, or leave offload.params on the device"
        )

    def run(values: Any, extras: Any, key: Any, batch: Any) -> Any:
        result, after = model.run(values, extras, key, lambda bound: loss(bound, batch))
        return as_sums(result), after

    key = jax.eval_shape(lambda: jax.random.key(0))
    try:
        return cut_loss(run, dict(params), dict(extras), key, batch).stacked
    except ValueError as error:
        raise ValueError(
            "offload.params=host brings layers one by one, so it needs what pipeline stages need, "
            f"and this model does not have it: {error}. Or leave offload.params on the device"
        ) from error


def check_update_in_backward(
    layout: OffloadLayout | None,
    num_microbatches: int,
    precision: Precision,
    tx: optax.GradientTransformation,
) -> None:
    """Refuses what an update before the whole gradient is known cannot do.

    Raises:
      ValueError: with the remedy.
    """
    if layout is None or not layout.update_in_backward:
        return
    what = "offload.update_in_backward updates a layer as soon as its gradient exists"
    if num_microbatches != 1:
        raise ValueError(
            f"{what}, so gradients of num_microbatches={num_microbatches} cannot be added up "
            "before; use num_microbatches=1 and a smaller batch, or more data shards"
        )
    clip_norm = getattr(tx, "clip_norm", None)
    if clip_norm is not None:
        raise ValueError(
            f"{what}, when the norm of all gradients is not known, so they cannot be clipped to "
            f"clip_norm={clip_norm:g}; use clip_norm=None"
        )
    if precision.loss_scale is not None:
        raise ValueError(
            f"{what}, before an overflow of float16 elsewhere is noticed, so a step cannot be "
            "taken back; use precision bf16 or fp32"
        )
    for name in sorted(layout.streamed & layout.leaves.keys()):
        counts = layout.leaves[name].counts
        tiers = [tier for tier, count in counts.items() if count]
        if len(tiers) > 1 or tiers[0] not in (DEVICE, HOST):
            raise ValueError(
                f"{what}, and {name} has its optimizer state in {' and '.join(tiers)}; all layers "
                "must have it in one memory: use offload.opt_state: host, or device"
            )
