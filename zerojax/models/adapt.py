"""Recognition of a user's model, and of the loss that it brings.

The one door: the rest of zerojax never asks again.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from flax import linen, nnx

from zerojax.config.display import quoted
from zerojax.models import losses
from zerojax.models.from_functions import FunctionModel
from zerojax.models.from_linen import LinenModel
from zerojax.models.from_nnx import NnxModel
from zerojax.models.given_arrays import is_of_torch
from zerojax.tracing.protocol import Loss, Model, ModelLike


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
    _check_not_torch(model)
    if isinstance(model, tuple) and len(model) == 2 and all(callable(part) for part in model):
        return FunctionModel(*model)
    if isinstance(model, type) and issubclass(model, linen.Module):
        raise TypeError(
            f"{model.__name__} is a class of linen modules; give an instance: {model.__name__}(...)"
        )
    if callable(model):
        _check_factory(model)
        return NnxModel(model)
    if isinstance(model, tuple) and len(model) == 2 and callable(model[1]):
        raise TypeError(
            f"cannot train a pair of a {type(model[0]).__name__} and a function: the first of "
            "(init, apply) is a function, too; for parameters that are there already, give "
            "(lambda key: params, apply)"
        )
    raise TypeError(
        f"cannot train a {type(model).__name__}: give a flax nnx.Module, a callable "
        "rngs -> nnx.Module, a flax linen.Module, or a pair of functions (init, apply)"
    )


def _check_not_torch(model: Any) -> None:
    """Refuses a module of PyTorch, which is a callable as well, or a pair with one."""
    parts = model if isinstance(model, tuple) else (model,)
    found = next((each for each in parts if is_of_torch(each)), None)
    if found is not None:
        raise TypeError(
            f"{_name_of(found)} is a module of PyTorch, which JAX cannot differentiate; write it "
            "in Flax, or save it with save_pretrained(FOLDER) and give "
            "zerojax.from_hugging_face(FOLDER), which knows GPT-2, Llama, BERT and the families of "
            "docs/hugging_face.md"
        )


def _check_factory(model: Any) -> None:
    """Refuses a callable that cannot be called as a factory is, with one argument.

    Raises:
      TypeError: with how a factory is written.
    """
    name, remedy = _name_of(model), "lambda rngs: MyModel(..., rngs=rngs)"
    function, given = model, [None]
    if isinstance(model, type):  # calling a class of nnx goes through its metaclass
        function, given = model.__init__, [None, None]
        remedy = f"lambda rngs: {name}(..., rngs=rngs), or an instance: {name}(...)"
    try:
        signature = inspect.signature(function)
    except ValueError:  # one written in C tells none
        return
    try:
        bound = signature.bind(*given)
        problem = ""
    except TypeError as error:
        bound, problem = None, str(error)
    if bound is not None and "rngs" in signature.parameters and "rngs" not in bound.arguments:
        problem = f"its first argument is {list(bound.arguments)[-1]!r}"
    if problem:
        raise TypeError(
            "a model that is called makes an nnx.Module from random streams, rngs -> nnx.Module, "
            f"and {name} cannot be called with one argument ({problem}); give {remedy}"
        )


def as_loss(loss: Any, model: Model, batch: Any = None) -> Loss:
    """The loss that the user gave; None takes the model's own.

    Args:
      batch: an example, for the names in the remedy.

    Raises:
      ValueError: None, and the model has no method `loss(batch)`.
      TypeError: no function, or one of predictions and targets out of zerojax.losses or optax.
    """
    if loss is None:
        return default_loss(model, batch)
    if not callable(loss):
        raise TypeError(
            f"loss={quoted(loss)} is not valid; use a function, such as {_example(batch)}"
        )
    name, module = getattr(loss, "__name__", ""), getattr(loss, "__module__", None) or ""
    if is_of_torch(loss) or module.partition(".")[0] == "torch":
        raise TypeError(
            f"loss={name or type(loss).__name__} is of PyTorch, which JAX cannot differentiate; "
            f"use a function of zerojax.losses or optax, such as {_example(batch)}"
        )
    of_optax = module.startswith("optax.") and name
    of_ours = module == losses.__name__ and getattr(losses, name, None) is loss
    if of_optax or (of_ours and loss is not losses.next_token_of_call):
        raise TypeError(
            f"loss={name} is a function of predictions and targets, and a loss is one of the model "
            f"and the batch; use "
            + _example(batch, f"optax.{name}" if of_optax else f"zerojax.losses.{name}")
        )
    return loss


def default_loss(model: Model, batch: Any = None) -> Loss:
    """The loss that the model itself brings: its method `loss(batch)`.

    Args:
      batch: an example, for the names in the remedy.

    Raises:
      ValueError: the model has no such method.
    """
    target = getattr(model, "template", None) or model.source
    if callable(getattr(target, "loss", None)):
        return lambda bound, batch: bound.loss(batch)
    raise ValueError(
        f"no loss: the {model.kind} {_name_of(model.source)} has no method loss(batch). Pass one, "
        f"which returns a scalar or (sum, weight), such as {_example(batch)}"
    )


def _example(batch: Any, function: str | None = None) -> str:
    """A loss for batches like this one, as it is typed.

    Args:
      function: of predictions and targets, by its full name; None: one that suits the batch.
    """
    names = list(batch) if isinstance(batch, Mapping) else []
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        names = list(range(len(batch)))
    suitable = "zerojax.losses.mean_squared_error"
    if hasattr(batch, "shape"):
        inputs = targets = "batch"
    elif {"tokens", "targets"} <= set(names) or not names or names == ["tokens"]:
        suitable = "zerojax.losses.next_token"
        inputs, targets = "batch['tokens']", "batch['targets']"
    else:  # what has no targets is its own
        inputs, targets = f"batch[{names[0]!r}]", f"batch[{names[:2][-1]!r}]"
    call = f"{function or suitable}(model({inputs}), {targets})"
    # Those of optax have a value for each row.
    mean = ".mean()" if function and function.startswith("optax.") else ""
    return f"loss=lambda model, batch: {call}{mean}"


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
