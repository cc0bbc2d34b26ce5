"""Which kind of model the user brought, and the loss it brings along.

The one door: the rest of zerojax never asks again.
"""

from __future__ import annotations

from typing import Any

from flax import linen, nnx

from zerojax.losses import LossWithUnit
from zerojax.model.functions import FunctionModel
from zerojax.model.linen_module import LinenModel
from zerojax.model.nnx_module import NnxModel
from zerojax.model.protocol import Loss, Model, ModelLike


def as_model(model: ModelLike) -> Model:
    """The internal form of whatever the user calls a model.

    Args:
      model: an `nnx.Module` instance; a callable `rngs -> nnx.Module` (needed when the model is
        larger than one device: it is then never built whole); a `linen.Module`; or `(init, apply)`
        with `init(key)` or `init(key, batch)` returning a tree of arrays and `apply(params, ...)`.

    Raises:
      TypeError: anything else.
    """
    if isinstance(model, (NnxModel, LinenModel, FunctionModel)):
        return model
    if isinstance(model, nnx.Module):
        return NnxModel(model)
    if isinstance(model, linen.Module):
        return LinenModel(model)
    if isinstance(model, tuple) and len(model) == 2 and all(callable(part) for part in model):
        return FunctionModel(*model)
    if isinstance(model, type) and issubclass(model, linen.Module):
        raise TypeError(
            f"{model.__name__} is a class of linen modules; give an instance: {model.__name__}(...)"
        )
    if callable(model):
        return NnxModel(model)
    raise TypeError(
        f"cannot train a {type(model).__name__}: give a flax nnx.Module, a callable "
        "rngs -> nnx.Module, a flax linen.Module, or a pair of functions (init, apply)"
    )


def default_loss(model: Model) -> Loss:
    """The loss that the model itself brings: its method `loss(batch)`.

    Raises:
      ValueError: the model has no such method.
    """
    target = getattr(model, "template", None) or model.source
    if callable(getattr(target, "loss", None)):
        unit = getattr(target, "loss_unit", None)
        return LossWithUnit(lambda bound, batch: bound.loss(batch), unit)
    raise ValueError(
        f"no loss: the {model.kind} {_name_of(model.source)} has no method loss(batch). Pass "
        "loss=lambda model, batch: ..., which returns a scalar or (sum, weight); "
        "zerojax.losses.next_token fits token models"
    )


def bound_attribute(model: Model, name: str) -> Any:
    """A static attribute of the user's model (such as `tensor_parallel_rules`), or None."""
    target = getattr(model, "template", None) or model.source
    return getattr(target, name, None)


def width_of(model: Model) -> int | None:
    """Width of a language model, by the names that Hugging Face and zerojax give it."""
    config = bound_attribute(model, "config")
    return getattr(config, "hidden_size", None) or getattr(config, "embed_dim", None)


def _name_of(thing: Any) -> str:
    return getattr(thing, "__qualname__", None) or type(thing).__name__
