"""Translates the ds_config section `sparse_attention` into an attention layout.

In DeepSpeed, the model's code reads this section. zerojax applies the layout to the calls of
`zerojax.attention` inside the loss. If the model itself has an attention layout, it must be the
same, because text generation and `load_run` use the model without the ds_config.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from zerojax import models, tracing
from zerojax.config import ConfigError
from zerojax.config.attention_layouts import LAYOUTS, BlockLayout, layout_of_mode
from zerojax.config.tree_types import Batch
from zerojax.deepspeed_config.ds_config import File
from zerojax.deepspeed_config.keys_table import TABLE
from zerojax.models.losses import LossWithUnit, loss_unit
from zerojax.operators.attending import layout_in_force
from zerojax.operators.sparse_layouts import BlockTable
from zerojax.tracing.protocol import ModelLike

_SECTION = "sparse_attention"
_ALWAYS_BIDIRECTIONAL = ("bigbird", "bslongformer")
"""Values of `mode` for which DeepSpeed does not read the key `attention`."""


def layout_of(file: File) -> BlockLayout | None:
    """Returns the attention layout that a ds_config sets; None if it sets none or sets dense
    attention."""
    if not isinstance(file.nested.get(_SECTION), Mapping):
        return None
    mode = file[f"{_SECTION}.mode"]
    if mode not in LAYOUTS:
        return None  # dense, or a refused value
    known = {field.name for field in dataclasses.fields(LAYOUTS[mode])} - {"seed"}
    if mode in _ALWAYS_BIDIRECTIONAL:
        known -= {"attention"}
    values: dict[str, Any] = {"mode": mode}
    for name in TABLE[_SECTION]:  # type: ignore[union-attr]
        key = f"{_SECTION}.{name}"
        if name in known:
            values[name] = file[key]
        elif name != "mode" and file.has(key):
            _ignore(file, key, mode)
    try:
        return layout_of_mode(values)
    except ConfigError as error:
        name = error.key[-1] if error.key else "mode"
        file.notes.refuse(f"{_SECTION}.{name}", values.get(name), error.message)
        return None


def _ignore(file: File, key: str, mode: str) -> None:
    why = f"neither DeepSpeed nor zerojax uses this key in mode {mode}"
    file.notes.change(key, "ignored", why)
    file.notes.warnings.append(f"{key}={file[key]} has no effect: {why}")


@dataclasses.dataclass(frozen=True)
class SparseLoss(LossWithUnit):
    """Loss function whose calls of `zerojax.attention` use a block-sparse layout.

    Attributes:
      layout: layout used in the calls of `zerojax.attention`.
      places: block tables of the calls so far. They are stored because a jitted submodule is traced
        only once.
    """

    layout: BlockLayout
    places: list[BlockTable] = dataclasses.field(default_factory=list, compare=False, repr=False)

    def __call__(self, model: ModelLike, batch: Batch) -> Any:
        """Returns the result of the wrapped loss, computed with the layout.

        Raises:
          ConfigError: the loss did not call `zerojax.attention`.
        """
        with layout_in_force(self.layout) as taken:
            loss = self.function(model, batch)
        self.places.extend(taken)
        if not self.places:
            raise ConfigError(
                f"mode {self.layout.mode} is for zerojax.attention, and the model does not call "
                "it; call it in the model, or remove the section",
                (_SECTION,),
            )
        return loss


def with_layout(
    model: tracing.Model, loss: tracing.Loss | None, layout: BlockLayout | None
) -> tracing.Loss | None:
    """Makes a loss use the attention layout of a ds_config; returns the loss unchanged if the model
    itself has the same layout.

    Args:
      model: the model of the run.
      loss: loss function; None: the model's own loss.
      layout: layout that the ds_config sets; None if it sets none.

    Raises:
      ConfigError: the model's attention_layout is not set, or differs from `layout`.
    """
    config = models.bound_attribute(model, "config")
    if layout is None or getattr(config, "attention_layout", None) == layout:
        return loss
    if hasattr(config, "attention_layout"):
        own = config.attention_layout
        raise ConfigError(
            f"mode {layout.mode}, but the model has attention_layout={own}; build the model with "
            f"attention_layout=zerojax.config.{layout!r}, or remove the section",
            (_SECTION,),
        )
    function = models.default_loss(model) if loss is None else loss
    return SparseLoss(function, loss_unit(function), layout)
