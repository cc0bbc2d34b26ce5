"""Converts a user's model and loss to the internal types `Model` and `Loss`.

Only this module tests the type of a user's model; all other modules use the protocol `Model`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flax import linen, nnx

from zerojax.config.display import quoted
from zerojax.config.tree_types import Batch
from zerojax.models import losses
from zerojax.models.from_functions import FunctionModel
from zerojax.models.from_linen import LinenModel
from zerojax.models.from_nnx import NnxModel
from zerojax.models.given_arrays import is_of_torch
from zerojax.tracing.protocol import Loss, Model, ModelLike


def as_model(model: ModelLike) -> Model:
    """Returns the internal form of a user's model.

    Args:
      model: one of: an `nnx.Module` instance; a callable `rngs -> nnx.Module` (required for a model
        that does not fit on one device, because each device then builds only its shards); a
        `linen.Module`; or a pair `(init, apply)`, where `init(key)` or `init(key, batch)` returns a
        tree of arrays and `apply(params, ...)` computes the output.

    Raises:
      TypeError: `model` has another type, or is a callable that cannot be called as `model(rngs)`
        or returns no `nnx.Module`.
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
            f"{model.__name__} is a linen class, not an instance; pass {model.__name__}(...)"
        )
    if callable(model):
        _check_factory(model)
        return NnxModel(model)
    if isinstance(model, tuple) and len(model) == 2 and callable(model[1]):
        raise TypeError(
            f"cannot train a pair of a {type(model[0]).__name__} and a function: both elements of "
            "(init, apply) must be functions; for existing parameters, pass "
            "(lambda key: params, apply)"
        )
    raise TypeError(
        f"cannot train a {type(model).__name__}; pass a flax nnx.Module, a callable "
        "rngs -> nnx.Module, a flax linen.Module, or a pair of functions (init, apply)"
    )


def evaluation_mode(model: Model) -> Model:
    """Returns a copy of the model that always runs in evaluation mode."""
    changed: Any = copy.copy(model)
    changed.run = lambda *args, train=True, **options: model.run(*args, train=False, **options)
    return changed


def _check_not_torch(model: object) -> None:
    """Raises a TypeError for a PyTorch module (which is callable, too) or a pair that contains
    one."""
    parts = model if isinstance(model, tuple) else (model,)
    torch_part = next((part for part in parts if is_of_torch(part)), None)
    if torch_part is not None:
        raise TypeError(
            f"{_name_of(torch_part)} is a PyTorch module, which JAX cannot differentiate; write it "
            "in Flax, or save it with save_pretrained(FOLDER) and pass "
            "zerojax.from_hugging_face(FOLDER), which supports GPT-2, Llama, BERT and the families "
            "listed in docs/hugging_face.md"
        )


def _check_factory(model: Callable[..., Any]) -> None:
    """Checks that a callable accepts one positional argument, as a model factory must, and that a
    parameter `rngs`, if it has one, receives it.

    Raises:
      TypeError: it does not; the message shows how to write a factory.
    """
    name, remedy = _name_of(model), "lambda rngs: MyModel(..., rngs=rngs)"
    function, arguments = model, [None]
    if isinstance(model, type):  # an nnx class: its metaclass handles the call
        function, arguments = model.__init__, [None, None]
        remedy = f"lambda rngs: {name}(..., rngs=rngs), or an instance: {name}(...)"
    try:
        signature = inspect.signature(function)
    except ValueError:  # functions written in C may have no signature
        return
    try:
        bound = signature.bind(*arguments)
        problem = ""
    except TypeError as error:
        bound, problem = None, str(error)
    if bound is not None and "rngs" in signature.parameters and "rngs" not in bound.arguments:
        problem = f"its first argument is {list(bound.arguments)[-1]!r}"
    if problem:
        raise TypeError(
            "a model factory maps random streams to a module, rngs -> nnx.Module, "
            f"but {name} cannot be called with one argument ({problem}); pass {remedy}"
        )


def as_loss(loss: object, model: Model, batch: Batch = None) -> Loss:
    """Checks and returns the user's loss; None returns the model's own loss.

    Args:
      loss: function (model, batch), or None.
      model: model in its internal form.
      batch: an example batch, whose keys appear in error messages.

    Raises:
      ValueError: `loss` is None and the model has no method `loss(batch)`.
      TypeError: `loss` is not callable, is from PyTorch, or is a function of (predictions, targets)
        from zerojax.losses or optax instead of a function of (model, batch).
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
            f"loss={name or type(loss).__name__} is from PyTorch, which JAX cannot differentiate; "
            f"use a function from zerojax.losses or optax, such as {_example(batch)}"
        )
    of_optax = module.startswith("optax.") and name
    of_ours = module == losses.__name__ and getattr(losses, name, None) is loss
    if of_optax or (of_ours and loss is not losses.next_token_of_call):
        raise TypeError(
            f"loss={name} is a function of (predictions, targets), but a loss takes "
            f"(model, batch); use "
            + _example(batch, f"optax.{name}" if of_optax else f"zerojax.losses.{name}")
        )
    return loss


def default_loss(model: Model, batch: Batch = None) -> Loss:
    """Returns a loss function that calls the model's own method `loss(batch)`.

    Its unit is the model's attribute `loss_unit`, if it has one.

    Args:
      model: model in its internal form.
      batch: an example batch, whose keys appear in the error message.

    Raises:
      ValueError: the model has no method `loss(batch)`.
    """
    target = getattr(model, "template", None) or model.source
    if callable(getattr(target, "loss", None)):
        unit = bound_attribute(model, "loss_unit")
        return losses.LossWithUnit(lambda bound, batch: bound.loss(batch), unit)
    raise ValueError(
        f"the {model.kind} {_name_of(model.source)} has no method loss(batch), and no loss "
        f"is given; pass a loss that returns a scalar or (sum, weight), such as {_example(batch)}"
    )


def _example(batch: Batch, function: str | None = None) -> str:
    """Returns source text of an example `loss=` for batches with the keys of `batch`.

    Args:
      batch: an example batch.
      function: full name of a function of (predictions, targets); None chooses one by the keys.
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
    else:  # a batch with a single key is both input and target
        inputs, targets = f"batch[{names[0]!r}]", f"batch[{names[:2][-1]!r}]"
    call = f"{function or suitable}(model({inputs}), {targets})"
    # Losses of optax return one value per row.
    mean = ".mean()" if function and function.startswith("optax.") else ""
    return f"loss=lambda model, batch: {call}{mean}"


def bound_attribute(model: Model, name: str) -> Any:
    """Returns a static attribute of the user's model, such as `tensor_parallel_rules`, or None."""
    target = getattr(model, "template", None) or model.source
    return getattr(target, name, None)


def width_of(model: Model) -> int | None:
    """Returns a language model's width: `config.hidden_size` or `config.embed_dim`, else None."""
    config = bound_attribute(model, "config")
    return getattr(config, "hidden_size", None) or getattr(config, "embed_dim", None)


def _name_of(thing: object) -> str:
    return getattr(thing, "__qualname__", None) or type(thing).__name__
