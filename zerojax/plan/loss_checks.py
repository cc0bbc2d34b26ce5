"""Refusals of losses: invalid values, and weights that depend on trained parameters."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.config import MeshConfig
from zerojax.models.batch_weight import BatchWeight, find_batch_weight
from zerojax.models.dependence import STOP_GRADIENT, marks_of_outputs, marks_of_own_rules
from zerojax.models.losses import BUILT_IN_METRICS, BUILT_IN_PREFIXES, split_result
from zerojax.models.protocol import Model
from zerojax.models.trace import ModelTrace
from zerojax.plan.placement_table import Placement

_FORMS = (
    "a scalar, or a pair of scalars (sum, weight); numbers to be logged follow as a mapping, as in "
    'return loss, {"accuracy": accuracy}'
)


def check_loss(result: Any) -> None:
    """Refuses what is no loss.

    Args:
      result: what it returned, with `ShapeDtypeStruct`s for arrays.

    Raises:
      ValueError: with what it returned instead, or the name that a metric cannot have.
    """
    parts = split_result(result)
    scalars = [parts.loss, *([] if parts.weight is None else [parts.weight])]
    given = result if isinstance(result, tuple) else (result,)
    has_metrics = len(given) > 1 and isinstance(given[-1], Mapping)
    if len(given) != len(scalars) + has_metrics or not all(map(_is_scalar, scalars)):
        raise ValueError(f"the loss returned {_words(result)}; it has to return {_FORMS}")
    if not jnp.issubdtype(parts.loss.dtype, jnp.floating):
        raise ValueError(
            f"the loss is {parts.loss.dtype.name}, which has no gradient; it has to be "
            "floating-point"
        )
    for name, value in parts.metrics.items():
        _check_metric(name, value)


def _is_scalar(value: Any) -> bool:
    return getattr(value, "shape", None) == ()


def _check_metric(name: Any, value: Any) -> None:
    if not isinstance(name, str) or not name or not name.isprintable():
        raise ValueError(
            f"the loss returned a metric named {name!r}; a name is a string of printable "
            "characters, such as 'accuracy'"
        )
    if name in BUILT_IN_METRICS or name.startswith(BUILT_IN_PREFIXES):
        raise ValueError(
            f"the loss returned a metric named {name!r}, which is a number that every run has of "
            f"its own; give it another name, such as 'my_{name}'"
        )
    pair = isinstance(value, tuple) and len(value) == 2
    if not all(map(_is_scalar, value if pair else [value])):
        raise ValueError(
            f"the loss returned {_words(value)} as metric {name!r}; a metric is a scalar, which is "
            "a mean over the rows that the loss saw, such as x.mean(), or a pair of scalars (sum, "
            "weight)"
        )


def _words(value: Any) -> Any:
    return jax.tree.map(lambda x: f"{x.dtype.name}{list(x.shape)}", value)


def check_weight(trace: ModelTrace, placement: Placement) -> None:
    """Refuses a weight that is computed from trained parameters.

    The step divides the gradient of the summed loss by the summed weight. That is the gradient of
    the mean only where the weight does not change with the parameters.

    Args:
      trace: of the loss; placement: which parameters are trained.

    Raises:
      ValueError: naming a parameter, with what to return instead.
    """
    if split_result(trace.result).weight is None:
        return
    program, names = trace.jaxpr.jaxpr, sorted(placement.leaves)
    marks = [0 if placement.leaves[name].frozen else 1 << i for i, name in enumerate(names)]
    marks += [0] * (len(program.invars) - len(names))
    found = marks_of_outputs(program, marks, ends_at=STOP_GRADIENT)[1]
    if not found:
        return
    touched = [name for i, name in enumerate(names) if found >> i & 1]
    more = f" and {len(touched) - 1} more" if len(touched) > 1 else ""
    raise ValueError(
        f"the second value that the loss returns is computed from trained parameters "
        f"({touched[0]}{more}), and a pair is (sum, weight): the sum over the batch is divided by "
        "the weight, through which no gradient goes. For numbers to be logged, as has_aux=True "
        'returns them, give them names: return loss, {"accuracy": accuracy}. For a weight that '
        "counts as a constant: return loss_sum, jax.lax.stop_gradient(weight)"
    )


def choose_batch_weight(
    trace: ModelTrace, params: Set[str], extras: Set[str], settings: MeshConfig, model: Model
) -> tuple[BatchWeight | None, list[str]]:
    """(how the weight of a batch is known before its backward pass, what to say of it).

    Args:
      trace: of the loss.
      params, extras: the names of its first inputs; leaves of the batch follow.
      settings: the mesh options; model: what is trained.

    Returns:
      (None, []) where the model has no derivatives of its own.
    """
    program, names = trace.jaxpr.jaxpr, [*sorted(params), *sorted(extras)]
    num_batch = len(program.invars) - len(names)
    marks = [*(int(name in model.overwritten) for name in names), *[0] * num_batch]
    rules = marks_of_own_rules(program, marks, as_they_are=True)
    if not rules:
        return None, []
    # Such rules keep scales in the state, which follow whatever size gradients have. While they
    # are unknown, in the first step, gradients of a mean over many tokens are 0 in 8 bits.
    if all(rules):
        return None, [
            "derivatives of the model's own (jax.custom_vjp) that keep their scales in the "
            "model's state are given gradients of the summed loss, which their scales follow"
        ]
    found, why = find_batch_weight(trace, len(names)), ""
    if found is None:
        why = "the weight is drawn at random or needs the model"
    elif settings.offload.update_in_backward:
        why = "offload.update_in_backward updates layers meanwhile"
    elif settings.deterministic is not None and found.needs_batch:
        why = "deterministic='mesh' adds weights up in an order of its own"
    what = "derivatives of the model's own (jax.custom_vjp) are given gradients of"
    if why:
        return None, [
            f"{what} the summed loss, not of the mean: {why}. A rule that is not linear, as one "
            "that clips, sees larger values than on one device with a mean; zerojax.check tells "
            "whether one is not, with its line"
        ]
    reasons = [f"{what} the mean over the whole batch"]
    if not all(marks_of_own_rules(program, [*[0] * len(names), *[1] * num_batch])):
        reasons.append(
            "a derivative of the model's own (jax.custom_vjp) of parameters alone is given the "
            "gradient of one device's rows of one microbatch, before it is summed: a rule that is "
            "not linear, as one that clips, does something else on other numbers of devices. "
            "Change gradients in the optimizer instead: optimizer=optax.chain(...)"
        )
    return found, reasons
