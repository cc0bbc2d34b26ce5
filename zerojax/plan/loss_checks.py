"""Checks losses: raises for invalid return values, and for weights or sums that change when a batch
is split.

The loss is called for each part of a batch, which is the rows of one microbatch on one data shard.
The weight of a loss must not depend on trained parameters, and the result must not depend on the
number of parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.config import MeshConfig
from zerojax.config.checks import warn_user
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Batch, Tree
from zerojax.models.batch_weight import BatchWeight, find_batch_weight
from zerojax.models.losses import BUILT_IN_METRICS, BUILT_IN_PREFIXES, split_result
from zerojax.models.step_count import check_step_rules
from zerojax.operators.marks import BatchCall
from zerojax.placement.table import Placement
from zerojax.tracing.batch_rows import follow_rows, number_of_output
from zerojax.tracing.dependence import STOP_GRADIENT, marks_of_outputs, marks_of_own_rules
from zerojax.tracing.protocol import Model
from zerojax.tracing.row_dependence import (
    Count,
    Dependence,
    Fixed,
    Other,
    Rows,
    Total,
    is_affine,
    scales_of,
)
from zerojax.tracing.trace import ModelTrace

OVER_BATCH = "what zerojax.batch_sum, batch_mean, gather_batch or row_numbers gives it"
"""What `part_with_mixed_rows` returns if the loss reads the rows of all devices; there, rows with a
weight of 0 count, too."""
_FORMS = (
    "a scalar, or a pair of scalars (sum, weight); metrics to log follow as a dict, as in "
    'return loss, {"accuracy": accuracy}'
)


def check_loss(result: Tree) -> None:
    """Raises if the value that a loss returned is not a valid loss.

    Args:
      result: returned value, with `ShapeDtypeStruct`s for arrays.

    Raises:
      ValueError: the message states the returned value, or a metric name that is not allowed.
    """
    parts = split_result(result)
    scalars = [parts.loss, *([] if parts.weight is None else [parts.weight])]
    given = result if isinstance(result, tuple) else (result,)
    has_metrics = len(given) > 1 and isinstance(given[-1], Mapping)
    if len(given) != len(scalars) + has_metrics or not all(map(_is_scalar, scalars)):
        raise ValueError(f"the loss returned {_words(result)}; a loss must return {_FORMS}")
    if not jnp.issubdtype(parts.loss.dtype, jnp.floating):
        raise ValueError(
            f"the loss is {parts.loss.dtype.name}, which has no gradient; a loss must be "
            "floating-point: compute the loss without a cast to integers, an argmax or a comparison"
        )
    for name, value in parts.metrics.items():
        _check_metric(name, value)


def _is_scalar(value: jax.ShapeDtypeStruct) -> bool:
    return getattr(value, "shape", None) == ()


def _check_metric(name: object, value: Any) -> None:
    if not isinstance(name, str) or not name or not name.isprintable():
        raise ValueError(
            f"the loss returned a metric named {name!r}; a name must be a string of printable "
            "characters, such as 'accuracy'"
        )
    if name in BUILT_IN_METRICS or name.startswith(BUILT_IN_PREFIXES):
        raise ValueError(
            f"the loss returned a metric named {name!r}, a name that zerojax uses "
            f"itself; use another name, such as 'my_{name}'"
        )
    pair = isinstance(value, tuple) and len(value) == 2
    if not all(map(_is_scalar, value if pair else [value])):
        raise ValueError(
            f"the loss returned {_words(value)} as metric {name!r}; a metric must be a scalar, "
            "the mean "
            "over the rows of this call, such as x.mean(), or a pair of scalars (sum, weight)"
        )


def _words(value: object) -> Any:
    return jax.tree.map(lambda x: f"{x.dtype.name}{list(x.shape)}", value)


def check_weight(trace: ModelTrace, placement: Placement) -> None:
    """Raises if the weight that a loss returns depends on trained parameters.

    The step divides the gradient of the summed loss by the summed weight. That is the gradient of
    the mean only if the weight does not depend on the parameters.

    Args:
      trace: trace of the loss.
      placement: placement table, which says which parameters are trained.

    Raises:
      ValueError: the message states a parameter, and what to return instead.
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
        "the loss returned a pair (sum, weight) whose weight is computed from trained parameters "
        f"({touched[0]}{more}): the sum over the batch is divided "
        "by the weight, and no gradient flows through the weight. To log numbers, as has_aux=True "
        'returns them, give them names: return loss, {"accuracy": accuracy}. For a constant '
        "weight: return loss_sum, jax.lax.stop_gradient(weight)"
    )


def choose_batch_weight(
    trace: ModelTrace, params: Set[str], extras: Set[str], settings: MeshConfig, model: Model
) -> tuple[BatchWeight | None, list[str]]:
    """Chooses whether the loss of a model with custom derivatives is divided by its weight before
    the backward pass.

    Custom derivatives (jax.custom_vjp) may depend on the size of gradients, so dividing gradients
    after the backward pass may differ from differentiating the mean.

    Args:
      trace: trace of the loss.
      params, extras: names of its first inputs; the arrays of the batch follow.
      settings: mesh options.
      model: model that is trained.

    Returns:
      (function of the weight by which the loss is divided, sentences for the plan); (None,
      [sentence]) if gradients of the summed loss are divided after the backward pass, with the
      reason; (None, []) if the model has no custom derivatives.
    """
    program, names = trace.jaxpr.jaxpr, [*sorted(params), *sorted(extras)]
    num_batch = len(program.invars) - len(names)
    marks = [*(int(name in model.overwritten) for name in names), *[0] * num_batch]
    rules = marks_of_own_rules(program, marks, as_they_are=True)
    if not rules:
        return None, []
    # Such derivatives have scales in the state, which adapt to the size of gradients. While they
    # are unknown, in the first step, gradients of a mean over many tokens are 0 in 8 bits.
    if all(rules):
        return None, [
            "derivatives of the model's own (jax.custom_vjp) with scales in the model's state get "
            "gradients of the summed loss, to which their scales adapt"
        ]
    found, why = find_batch_weight(trace, len(names)), ""
    if found is None:
        why = "the weight is random, or depends on the model or on the whole batch"
    elif settings.offload.updates_in_pass and settings.offload.late_key is None:
        why = "offload.update_in_backward updates layers during the backward pass"
    elif settings.deterministic is not None and found.needs_batch:
        why = "deterministic='mesh' sums weights in its own order"
    what = "derivatives of the model's own (jax.custom_vjp) get gradients of"
    if why:
        return None, [
            f"{what} the summed loss, not of the mean: {why}. A rule that is not linear, such as "
            "clipping, sees larger values than on one device with a mean; zerojax.check finds such "
            "a rule and names its line"
        ]
    reasons = [f"{what} the mean over the whole batch"]
    if not all(marks_of_own_rules(program, [*[0] * len(names), *[1] * num_batch])):
        reasons.append(
            "a custom derivative of the model (jax.custom_vjp) whose inputs do not depend on the "
            "batch gets the gradient of one device's rows of one microbatch, before the sum over "
            "devices and microbatches: the results of a rule that is not linear, such as clipping, "
            "depend on the number of devices. Change gradients in the optimizer instead: "
            "optimizer=optax.chain(...)"
        )
    return found, reasons


@dataclass(frozen=True, kw_only=True)
class BatchPieces:
    """How a traced loss depends on the rows of one part of the batch.

    Attributes:
      num_rows: number of rows in a part.
      is_sum: whether the loss is certainly a sum over rows that is not divided by their number.
      is_ratio: whether the loss is a sum divided by a value that also depends on the part.
      is_product: whether the loss has a term that is a product of means over rows.
      compares_rows: whether the loss has values for each pair of rows and is not a sum over rows.
      odd_pair: what is odd about a pair (sum, weight) whose two numbers do not grow alike with the
        rows, such as a mean and a metric; "" if nothing is known to be.
      summed_metrics: names of metrics without a weight that certainly are sums over rows.
      rows_over_batch: functions such as `zerojax.batch_sum` that are called with an
        array that has a dimension of rows.
      counted: names of arrays of the model's state to which a pass adds a sum over rows.
      written: names of arrays of the model's state whose new values depend on rows.
      undefined: {name: dtype} of arrays of the state that depend on rows in another way, so that no
        mean over data shards is defined.
    """

    num_rows: int
    is_sum: bool
    is_ratio: bool
    is_product: bool
    compares_rows: bool
    odd_pair: str
    summed_metrics: tuple[str, ...]
    rows_over_batch: frozenset[BatchCall]
    counted: frozenset[str]
    written: frozenset[str]
    undefined: Mapping[str, str]


def trace_pieces(
    trace: ModelTrace,
    params: Mapping[str, Any],
    extras: Mapping[str, Any],
    batch: Batch,
    model: Model,
) -> BatchPieces:
    """Determines from a traced loss how its results depend on the rows of one part of the batch.

    Args:
      trace: trace of the loss.
      params, extras, batch: arguments with which the loss was traced.
      model: model of the loss.
    """
    num_rows = jax.tree.leaves(batch)[0].shape[0]
    over_batch: list[tuple[BatchCall, Dependence]] = []
    compared: list[str] = []
    found = _follow_piece(trace, params, extras, batch, over_batch, compared)
    state = found[len(trace.jaxpr.jaxpr.outvars) :]
    counted, undefined = {*model.step_rules}, {}
    for place, (name, one) in enumerate(zip(sorted(extras), state, strict=True)):
        if name in counted or name in model.overwritten or isinstance(one, Fixed):
            continue
        is_own = isinstance(one, Count) and one.input == len(params) + place
        floating = jnp.issubdtype(extras[name].dtype, jnp.inexact)
        if isinstance(one, Count) and is_own and (not floating or one.total.is_sum(num_rows)):
            counted.add(name)
        elif not floating:
            undefined[name] = extras[name].dtype.name
    loss, is_pair = found[0], split_result(trace.result).weight is not None
    weight = number_of_output(trace.jaxpr, 1) if is_pair else None
    is_known = not is_pair or weight is not None
    metrics = split_result(
        jax.tree.unflatten(jax.tree.structure(trace.result), found[: _size(trace)])
    ).metrics
    return BatchPieces(
        num_rows=num_rows,
        is_sum=isinstance(loss, Total) and is_known and loss.is_sum(num_rows, weight),
        is_ratio=isinstance(loss, Other) and loss.is_ratio and not is_pair,
        is_product=isinstance(loss, Other) and loss.is_product,
        compares_rows=bool(compared) and not is_affine(loss),
        odd_pair=_odd_pair(loss, found[1], num_rows) if is_pair else "",
        summed_metrics=tuple(
            name for name, x in metrics.items() if isinstance(x, Total) and x.is_sum(num_rows)
        ),
        rows_over_batch=frozenset(kind for kind, given in over_batch if isinstance(given, Rows)),
        counted=frozenset(counted),
        written=frozenset(
            name
            for name, one in zip(sorted(extras), state, strict=True)
            if not isinstance(one, Fixed)
        ),
        undefined=undefined,
    )


def _odd_pair(loss: Dependence, weight: Dependence, num_rows: int) -> str:
    """Returns what is odd about a pair of these two numbers; "" if nothing is known to be.

    A mean over rows as the weight is nearly always a metric. A masked mean may have one, too, with
    a first number that is a mean as well; two sums say the same.
    """

    def is_mean(value: Dependence) -> bool:
        if not isinstance(value, Total) or not value.scale:
            return False
        divisor, count = 1 / abs(value.scale), value.num_added or num_rows
        return count > 1 and math.isclose(divisor, count, rel_tol=1e-2)

    if is_mean(weight) or (isinstance(weight, Other) and weight.is_ratio):
        return "the weight is a mean over rows, which does not grow with their number"
    if is_mean(loss) and isinstance(weight, Total) and weight.scale == 1:
        return "the first number is a mean over rows, and the weight a sum over them"
    return ""


def check_divisor(
    trace: ModelTrace,
    params: Mapping[str, Any],
    extras: Mapping[str, Any],
    microbatch: Batch,
    batch: Batch,
    trace_of: Callable[[Any], ModelTrace],
) -> None:
    """Raises if a loss divides a sum over rows by a number that does not grow with the number of
    rows.

    An example is a batch size from a configuration, as in `losses.sum() / 32`. Each part of the
    batch is then divided by the number, so the mean over parts is too small by their number. One
    trace cannot distinguish such a loss from a mean of a mean, so a loss that is not a plain mean
    is also traced with the whole batch. `check_pieces` handles a sum without any divisor.

    Args:
      trace: trace of the loss.
      params, extras, microbatch: arguments with which the loss was traced.
      batch: the global batch.
      trace_of: function that traces the loss with other rows.

    Raises:
      ValueError: the message states the factor between the mean over the parts and the loss of the
        whole batch.
    """
    rows, all_rows = (jax.tree.leaves(part)[0].shape[0] for part in (microbatch, batch))
    number, loss, weight = all_rows // rows, *_loss_and_weight(trace, params, extras, microbatch)
    piece = _scales(loss, weight)
    if number == 1 or piece is None or weight is None:
        return
    if isinstance(loss, Total):
        is_pair = split_result(trace.result).weight is not None
        # A piece may have as many elements as the batch has rows: 4 rows of 8 where there are 32.
        may_be_size = math.isclose(abs(weight), all_rows * abs(loss.scale or 0.0), rel_tol=1e-2)
        is_mean = loss.is_plain_mean(rows, weight) and not may_be_size
        if is_mean or loss.is_sum(rows, weight if is_pair else None):
            return
    try:
        whole = _scales(*_loss_and_weight(trace_of(batch), params, extras, batch))
    except Exception:  # the loss supports only this number of rows, so nothing is known
        return
    if whole is None or len(whole) != len(piece):
        return
    for of_piece, of_whole in zip(piece, whole, strict=True):
        factor = of_piece / (number * of_whole)
        if not math.isclose(factor, 1, rel_tol=0.1):
            what = "the loss" if len(whole) == 1 else "a term of the loss"
            raise ValueError(
                "the loss sums over its rows and divides by a number that does not grow with "
                "the number of rows. "
                f"It is called for each of {number} parts of {rows} rows (data shards x "
                f"num_microbatches), and their mean is {factor:.4g} times {what} of the whole "
                "batch on one device. Divide by the number of rows, as losses.mean() does, or "
                "return the sum and its divisor: return jnp.sum(losses), losses.size. "
                "zerojax.check prints the line"
            )


def _loss_and_weight(
    trace: ModelTrace, params: Mapping[str, Any], extras: Mapping[str, Any], batch: Batch
) -> tuple[Dependence, float | None]:
    """Returns (how the loss depends on rows, its weight). The weight is 1 if the loss returns none,
    and None if it is unknown."""
    loss = _follow_piece(trace, params, extras, batch, [])[0]
    is_pair = split_result(trace.result).weight is not None
    return loss, number_of_output(trace.jaxpr, 1) if is_pair else 1.0


def _scales(loss: Dependence, weight: float | None) -> list[float] | None:
    """Returns the factors that multiply the sums over rows in a loss, divided by its weight; None
    if they are unknown."""
    scales = scales_of(loss)
    return [scale / weight for scale in scales] if scales and weight else None


def _follow_piece(
    trace: ModelTrace,
    params: Mapping[str, Any],
    extras: Mapping[str, Any],
    batch: Batch,
    over_batch: list[tuple[BatchCall, Dependence]],
    compared: list[str] | None = None,
) -> list[Dependence]:
    """Returns how the results and the new state for one part of the batch depend on its rows."""
    leaves = jax.tree.leaves(batch)
    inputs: list[Dependence] = [Fixed(place) for place in range(len(params) + len(extras))]
    inputs += [Rows(0)] * len(leaves)
    rows = leaves[0].shape[0]
    return follow_rows(trace.program, inputs, rows, over_batch=over_batch, compared=compared)


def part_with_mixed_rows(
    trace: ModelTrace, params: Mapping[str, Any], extras: Mapping[str, Any], batch: Batch
) -> str | None:
    """Finds the first output of a loss that may not be a sum or mean over rows; returns None if all
    are.

    A weight may also be equal in every part of the batch. A metric without its own weight has the
    weight of the loss, which must then be equal in every part.

    Args:
      trace: trace of the loss in evaluation mode.
      params, extras, batch: arguments with which the loss was traced.
    """
    over_batch: list[tuple[BatchCall, Dependence]] = []
    found = _follow_piece(trace, params, extras, batch, over_batch)
    if over_batch:
        return OVER_BATCH
    parts = split_result(
        jax.tree.unflatten(jax.tree.structure(trace.result), found[: _size(trace)])
    )
    if not isinstance(parts.weight, Total | Fixed | None):
        return "the weight of the loss"
    # With equal weights, a term without rows has the same value in each part and in the mean.
    if not (isinstance(parts.loss, Total) or (_is_equal(parts.weight) and is_affine(parts.loss))):
        return "the loss"
    for name, value in parts.metrics.items():
        total, weight = value if isinstance(value, tuple) else (value, None)
        if _is_equal(parts.weight if weight is None else weight):
            is_known = is_affine(total)
        elif weight is None:
            is_known = isinstance(total, Fixed)
        else:
            is_known = isinstance(total, Total | Fixed) and isinstance(weight, Total)
        if not is_known:
            return f"the metric {name!r}"
    return None


def _is_equal(weight: Dependence | None) -> bool:
    """Returns True if the loss has no weight, or the same weight for every part of the batch."""
    return weight is None or isinstance(weight, Fixed)


def _size(trace: ModelTrace) -> int:
    return len(jax.tree.leaves(trace.result))


def check_step_counts(
    trace: ModelTrace,
    params: Mapping[str, Any],
    extras: Mapping[str, Any],
    batch: Batch,
    model: Model,
) -> None:
    """Raises if a loss changes a `StepCount` in another way than by adding to it, or writes its
    target.

    The target is the variable that the rule of a `StepCount` computes once per step.

    Args:
      trace: trace of the user's loss.
      params, extras, batch: arguments with which the loss was traced.
      model: model of the loss.

    Raises:
      ValueError: the message states the variable.
    """
    rules = model.step_rules
    if not rules:
        return
    check_step_rules(rules, dict(extras))
    names = sorted(extras)
    found = _follow_piece(trace, params, extras, batch, [])[len(trace.jaxpr.jaxpr.outvars) :]
    state = dict(zip(names, found, strict=True))
    for name, rule in rules.items():
        place = len(params) + names.index(name)
        if getattr(state[name], "input", None) != place:
            raise ValueError(
                f"{name} is a StepCount, and the loss sets it to a value other than its old value "
                "plus a count of its own rows, so the counts of microbatches and devices cannot be "
                "summed. Add to it: self.count[...] += jnp.sum(is_counted, axis=0, dtype=jnp.int32)"
            )
        if not isinstance(state[rule.target], Fixed):
            raise ValueError(
                f"the loss writes {rule.target}, which is computed from {name} once per step, "
                "after all passes; put that computation into the rule of that StepCount"
            )


def check_pieces(pieces: BatchPieces, num_shards: int, num_microbatches: int) -> None:
    """Raises if the result of a loss certainly depends on the number of parts of a batch; warns if
    it may.

    Warnings are for results that depend on that number only if the parts differ, as with masks.

    Args:
      pieces: how the loss depends on the rows of one part.
      num_shards: number of data shards.
      num_microbatches: number of microbatches.

    Raises:
      ValueError: the loss is a sum over rows, `zerojax.batch_sum` or `batch_mean` is called with an
        array that has a dimension of rows, or the model has state whose values on different data
        shards cannot be combined.
    """
    number = num_shards * num_microbatches
    for kind in sorted(pieces.rows_over_batch - {"gather_batch"}):
        over_rows = "jnp.sum" if kind == "batch_sum" else "jnp.mean"
        raise ValueError(
            f"zerojax.{kind} got an array that still has a dimension of the {pieces.num_rows} "
            "rows of one device, "
            "so it would add the first rows of all devices, the second rows, and so on; reduce "
            "over "
            f"these rows first: zerojax.{kind}({over_rows}(x, axis=0))"
        )
    cut = f"{number} parts of {pieces.num_rows} rows (data shards x num_microbatches)"
    if pieces.is_sum and number > 1:
        raise ValueError(
            f"the loss is a sum over its rows, not their mean, and it is called for each of {cut}: "
            f"their mean is 1/{number} of the sum over the batch, so loss and gradients would "
            "depend on the number of devices. Return the mean over the rows, or the sum and its "
            "divisor: return jnp.sum(losses), losses.size. zerojax.check prints the line"
        )
    if pieces.odd_pair:
        warn_user(_words_of_pair(pieces), RuntimeWarning)
    if pieces.is_ratio and number > 1:
        warn_user(
            "the loss divides by a number that depends on its rows, and is called for each of "
            f"{cut}: the mean of the parts' quotients differs from the quotient over the batch "
            "if the "
            "divisors differ, as with masks. Return both numbers instead of dividing: return "
            "loss_sum, "
            "weight. zerojax.check shows by how much it differs",
            RuntimeWarning,
        )
    if pieces.is_product and num_shards > 1:
        warn_user(
            "the loss has a term that is a product of means over its rows, such as the "
            f"load-balancing loss of a mixture of experts, and is called for each of {cut}: the "
            "mean of such products is not the product of the means over the batch. Take the means "
            "over the whole batch: zerojax.batch_mean(jnp.mean(x, axis=0)). zerojax.check shows by "
            "how much it differs",
            RuntimeWarning,
        )
    if pieces.compares_rows and number > 1:
        warn_user(
            "the loss compares the rows of the batch with each other, as a contrastive loss does, "
            f"and is called for each of {cut}: a row is compared only with rows of its own part, "
            "in training and in evaluation. To compare with all rows of the batch, gather them "
            "from all devices: zerojax.gather_batch(x). To compare with the same number of rows "
            "on any devices, make arrays of shape [groups, rows of a group, ...] and take the "
            "mean of the loss of each group: jax.vmap(loss_of_group)(batch).mean(). zerojax.check "
            "shows by how much it differs",
            RuntimeWarning,
        )
    if pieces.undefined and num_shards > 1:
        name, dtype = min(pieces.undefined.items())
        raise ValueError(
            f"the model's state {name} ({dtype}) depends on the rows of the batch, but is not a "
            f"count (its old value plus a sum over rows): each of {num_shards} shards of the batch "
            "would have another value. Add to it, as in state + jnp.sum(...), or keep it in "
            "floating point, which is averaged over the shards, or return the number from the loss "
            f"as a metric: return loss, {{{name.split('/')[-1]!r}: value}}. zerojax.check prints "
            "the line"
        )


def _words_of_pair(pieces: BatchPieces) -> str:
    return (
        "the loss returned a pair (sum, weight), whose sum over the batch is divided by its "
        f"weight, but {pieces.odd_pair}. If the second number is a metric to log, give it a name: "
        'return loss, {"share": share}. For a mean with weights return two sums: return '
        "jnp.sum(losses * weights), jnp.sum(weights)"
    )


def describe_pieces(pieces: BatchPieces) -> list[str]:
    """Describes loss terms, metrics and state that depend on the number of parts of a batch.

    With one part the descriptions include terms that would be an error with more parts.
    """
    lines = [
        f"the metric {name!r} is a sum over the rows of one microbatch on one data shard, and the "
        "reported value is the mean of these sums; return a pair to divide once, over the "
        f"whole batch: {{{name!r}: (x.sum(), x.size)}}"
        for name in pieces.summed_metrics
    ]
    if pieces.odd_pair:
        lines.append(_words_of_pair(pieces))
    if pieces.is_sum:
        lines.append(
            "the loss is a sum over the rows of the batch: it is an error on more devices or with "
            "more microbatches, because its mean over parts of the batch would differ"
        )
    if pieces.is_product:
        lines.append(
            "the loss has a term that is a product of means over the rows of one microbatch on one "
            "data shard; with zerojax.batch_mean(jnp.mean(x, axis=0)) they are means over all of "
            "its rows on all devices"
        )
    if pieces.undefined:
        lines.append(
            f"the model's state {min(pieces.undefined)} depends on the rows of the batch, but is "
            "not a count: with more data shards it is an error"
        )
    return lines
