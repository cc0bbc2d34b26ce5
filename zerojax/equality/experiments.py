"""Finds the reason for a difference between runs by controlled experiments.

Each experiment runs the plain loss on one device, and changes its rows, its random key, its mode or
the scale of its cotangent. A "piece" is one of the equal parts of a batch, one per device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Batch, Tree
from zerojax.equality.check_result import Reason
from zerojax.equality.short_runs import PlainRun, cut_rows, quick_options
from zerojax.equality.tracing import (
    Break,
    Comparison,
    Relation,
    compare_pieces,
    compare_scaled,
    lines_of_rules,
)
from zerojax.models.losses import own_means
from zerojax.operators.marks import takes_over_batch

RETURN_A_MEAN = (
    "return a mean over rows (jnp.mean), or (sum, weight) with the number of rows or tokens as "
    "weight, as zerojax.losses does"
)
RETURN_A_PAIR = (
    "return the pair (sum, weight) = (dividend, divisor) of that division: zerojax divides "
    "once, after adding both over "
    "all devices and microbatches"
)
PER_ROW = (
    "compute each row from that row alone: take the statistic from the model's state or from a "
    "column of the batch; or use "
    "zerojax.batch_mean(jnp.mean(x, axis=0)), which is the mean over the whole batch; or, if rows "
    "are ranked or linked, take the rows of all devices, zerojax.gather_batch(x), or make each "
    "group of linked rows one row of the batch, and average the loss of the groups by jax.vmap"
)
PLACES = (
    "number rows in the whole batch: zerojax.row_numbers(x) in place of jnp.arange(len(x)), and "
    "zerojax.batch_sum(len(x)) in place of len(x); take noise from a key of each row, "
    "jax.vmap(lambda i: jax.random.fold_in(key, i))(zerojax.row_numbers(x)); or make numbers or "
    "noise an array of the batch"
)
GROUPS = (
    "gather the rows of all devices: zerojax.gather_batch(x); or make each group of compared rows "
    "one row of the batch: arrays of shape [groups, rows of a group, ...], and average the loss of "
    "the groups by jax.vmap; or give each row its own negatives in the batch; or accept that a row "
    "is compared only with rows of its device and microbatch, as is usual in data-parallel training"
)
_STATISTICS = ("mul", "dot_general", "integer_pow", "square", "pow")
"""Primitives that multiply two means, each of which is correct by itself."""
_ONE_ROW = ("slice", "dynamic_slice", "gather", "squeeze")
_EXTREMES = ("reduce_max", "reduce_min", "argmax", "argmin", "sort", "cumsum", "reduce_prod")


@dataclass(frozen=True)
class Forward:
    """Relation between the forward pass of a whole batch and the forward passes of its pieces.

    Attributes:
      reason: why the loss of the pieces differs from the loss of the batch; None if it does not.
      state: {name of another array of the model: relation between its change for the batch and its
        changes for the pieces}.
      places: {name of the array: line of the user's code that computes it}.
    """

    reason: Reason | None
    state: dict[str, Relation]
    places: dict[str, str | None]


class Experiments:
    """Runs experiments on one model, each of which returns a reason for a difference or None.

    Args:
      plain: training run in plain JAX.
      pieces: number of equal parts to split the batch into, the number of devices.
    """

    def __init__(self, plain: PlainRun, pieces: int):
        self.plain = plain
        self.batch = plain.given.batches[0]
        self.pieces = cut_rows(self.batch, pieces)

    def losses(self, *, train: bool, number: int) -> float:
        """Returns the loss of the first batch with the `number`-th random key."""
        (loss, weight), _ = self._call(
            self.batch, jax.random.fold_in(self.plain.key(0), number), train
        )
        return float(loss if weight is None else loss / weight)

    def _call(self, batch: Batch, key: jax.Array, train: bool) -> Any:
        if not hasattr(self, "_jitted"):
            self._jitted = jax.jit(
                lambda params, frozen, extras, key, batch, train: self.plain.loss(
                    params, extras, key, batch, train=train, frozen=frozen
                ),
                static_argnums=5,
                compiler_options=quick_options(),
            )
        plain = self.plain
        return self._jitted(plain.params, plain.frozen, plain.extras, key, batch, train)

    def _program(self, train: bool) -> Any:
        plain, key = self.plain, self.plain.key(0)
        loss = lambda batch: plain.loss(plain.params, plain.extras, key, batch, train=train)[0]  # noqa: E731
        return jax.make_jaxpr(loss)(self.batch).jaxpr

    def is_random(self, *, train: bool) -> bool:
        """Returns whether the loss depends on the random key."""
        return self.losses(train=train, number=0) != self.losses(train=train, number=1)

    def forward(self, *, train: bool) -> Forward:
        """Compares the forward pass of a batch with the passes of its pieces, equation by
        equation."""
        plain, key = self.plain, self.plain.key(0)
        has_weight = []

        def outputs(batch: Batch) -> list[Any]:
            (loss, weight), after = plain.loss(plain.params, plain.extras, key, batch, train=train)
            has_weight.append(weight is not None)
            changes = [_change(plain.extras[name], after[name]) for name in sorted(after)]
            return [loss, *([] if weight is None else [weight]), *changes]

        found = compare_pieces(outputs, self.batch, self.pieces)
        count = 1 + has_weight[0]
        names = sorted(plain.extras)
        return Forward(
            reason=self._reason(found, weighted=has_weight[0], train=train),
            state=dict(zip(names, found.outputs[count:], strict=True)),
            places=dict(zip(names, found.origins[count:], strict=True)),
        )

    def _reason(self, found: Comparison, *, weighted: bool, train: bool) -> Reason | None:
        if takes_over_batch(self._program(train)):
            count = 1 + weighted  # the number of batch sums, which a single piece cannot compute
            runs = zip(*found.values[:count], strict=True)
            whole, *parts = [_pair((x[0], x[1] if weighted else None)) for x in runs]
        else:
            key = self.plain.key(0)
            whole = _pair(self._call(self.batch, key, train)[0])
            parts = [_pair(self._call(piece, key, train)[0]) for piece in self.pieces]
        expected = whole[0] / whole[1]
        cut = sum(loss for loss, _ in parts) / sum(weight for _, weight in parts)
        if abs(cut - expected) <= 2e-6 * max(1.0, abs(expected)):
            return None
        numbers = (
            f"the loss is {expected:.6g} for the whole batch and {cut:.6g} for {len(parts)} parts "
            "of it"
        )
        loss = found.outputs[0]
        if weighted:
            return _of_pair(found, numbers)
        if loss is Relation.SUM:
            return Reason(
                "sum",
                f"the loss is a sum over rows, so it depends on how many devices and microbatches "
                f"there are: {numbers}",
                RETURN_A_MEAN,
                found.origins[0],
            )
        return _of_break(found.breaks[0], numbers)

    def metrics(self, *, train: bool) -> dict[str, tuple[float, float]]:
        """Computes the loss's extra metrics that differ between the batch and its pieces.

        Returns:
          {name: (value for the whole batch, value combined from the pieces as in a step)}.
        """
        if takes_over_batch(self._program(train)):
            return {}  # a single piece cannot compute a sum over the batch
        key = self.plain.key(0)
        whole = self.plain.sums(key, self.batch, train=train)
        parts = [self.plain.sums(key, piece, train=train) for piece in self.pieces]
        joined = own_means(jax.tree.map(lambda *leaves: sum(leaves), *parts))
        found = {}
        for name, value in own_means(whole).items():
            pair = float(value), float(joined[name])
            if not np.allclose(*pair, rtol=1e-4, atol=1e-6, equal_nan=True):
                found[name] = pair
        return found

    def backward(self, *, train: bool) -> Reason | None:
        """Returns a reason if the backward pass is not linear in its cotangent.

        In a linear backward pass an eighth of the cotangent gives an eighth of the gradients.
        """
        plain, key = self.plain, self.plain.key(0)

        def mean(params: Tree) -> Any:
            (loss, weight), _ = plain.loss(params, plain.extras, key, self.batch, train=train)
            return loss if weight is None else loss / weight

        def gradients(cotangent: Tree) -> list[Any]:
            _, pull = jax.vjp(mean, plain.params)
            return jax.tree.leaves(pull(cotangent))

        found = compare_scaled(gradients)
        bad = [i for i, relation in enumerate(found.outputs) if relation is Relation.OTHER]
        if not bad:
            return None
        breaks = [found.breaks[i] for i in bad]
        where = next((x.where for x in breaks if x is not None), None)
        names = sorted(plain.params)
        # In JAX, equations of a custom backward rule carry the source line of the call.
        rules = lines_of_rules(jax.make_jaxpr(mean)(plain.params).jaxpr)
        at = {rule for call, rule in rules if call == where} or {rule for _, rule in rules}
        rule = f" Its backward rule is {at.pop()}." if len(at) == 1 else ""
        return Reason(
            "nonlinear_backward",
            "the backward pass is not linear: an eighth of the loss does not give an eighth of the "
            f"gradient of {names[bad[0]]}. Each device computes the gradient of its own rows, "
            f"which is larger than the gradient of the mean over all rows.{rule}",
            "make the custom backward pass linear in its incoming gradient, and clip or "
            "rescale in the optimizer (optax.clip, optax.clip_by_global_norm); or compute "
            "the loss's weight from the batch alone, so that custom rules get gradients of the "
            "mean",
            where,
        )

    def weight_gradient(self, *, train: bool) -> Reason | None:
        """Returns a reason if the weight of the loss, the second of a pair, depends on
        parameters."""
        plain, key = self.plain, self.plain.key(0)

        def weight(params: Tree, frozen: Tree, extras: Tree) -> Any:
            (_, weight), _ = plain.loss(params, extras, key, self.batch, train=train, frozen=frozen)
            return jnp.float32(1) if weight is None else weight

        differentiate = jax.jit(jax.grad(weight), compiler_options=quick_options())
        gradient = jax.tree.leaves(differentiate(plain.params, plain.frozen, plain.extras))
        if not any(np.any(np.asarray(leaf)) for leaf in gradient):
            return None
        return Reason(
            "weight_gradient",
            "the weight of the loss, the second element of the pair, depends on trained "
            "parameters, but zerojax treats it as a constant, so its gradient is missing",
            "return a weight that counts rows or tokens; to weight the loss by a computed number, "
            "multiply the sum by it, or put jax.lax.stop_gradient around the weight",
        )


def _pair(parts: tuple[Any, Any]) -> tuple[float, float]:
    loss, weight = parts
    return float(loss), 1.0 if weight is None else float(weight)


def _change(before: Tree, after: Tree) -> Any:
    if jnp.issubdtype(jnp.asarray(after).dtype, jnp.bool_):
        return jnp.asarray(after)
    return after - before


def _of_pair(found: Comparison, numbers: str) -> Reason:
    """Returns the reason why the pair (sum, weight) differs between the batch and its pieces."""
    loss, weight = found.outputs[:2]
    if weight is Relation.OTHER:
        reason = _of_break(found.breaks[1], numbers)
        return dataclasses.replace(reason, sentence=f"of the weight: {reason.sentence}")
    if loss is Relation.SUM:
        return Reason(
            "sum",
            "the first element of the pair is a sum over rows, but the second does not count "
            "rows, so the "
            f"loss depends on how many devices and microbatches there are: {numbers}",
            RETURN_A_MEAN,
            found.origins[0],
        )
    if loss in (Relation.MEAN, Relation.SAME):
        return Reason(
            "sum",
            "the first element of the pair is already a mean and the second counts rows, so the "
            "loss is "
            f"divided twice: {numbers}",
            "return only the mean, or the sum as the first element of the pair",
            found.origins[0],
        )
    return _of_break(found.breaks[0], numbers)


def _of_break(found: Break | None, numbers: str) -> Reason:
    """Returns the reason for a loss that depends on the number of pieces.

    The reason depends on `found`, the first equation that mixes rows.
    """
    if found is None:
        return Reason(
            "coupled_rows",
            f"the loss of a row depends on other rows: {numbers}; the line could not be found",
            PER_ROW,
        )
    given = set(found.inputs) - {Relation.UNKNOWN}
    statistics = [x for x in found.inputs if x in (Relation.MEAN, Relation.SUM)]
    kind, remedy = "coupled_rows", PER_ROW
    if found.primitive in ("add", "sub", "add_any") and given <= {
        Relation.SUM,
        Relation.MEAN,
        Relation.SAME,
    }:
        kind, remedy = (
            "sum",
            (
                "add a term that does not depend on rows to a mean, or multiply the term by the "
                "weight of a "
                "pair (sum, weight)"
            ),
        )
        sentence = "the loss adds a sum over rows and a term that is not a sum over rows"
    elif found.primitive.startswith("psum") and statistics:
        remedy = "take zerojax.batch_mean of a mean, and zerojax.batch_sum of a sum over rows"
        sentence = (
            "zerojax.batch_sum is given a mean over rows, so that it grows with the number of "
            "devices"
        )
    elif found.has_pairs:
        remedy = GROUPS
        sentence = "each row is compared with the other rows of the batch, as by a contrastive loss"
    elif found.has_rows and found.of_place:
        remedy = PLACES
        sentence = (
            "the result for a row depends on its place in the batch or on the number of rows (as "
            "by jnp.arange(len(x)), len(x), or noise of one key); each device counts its own rows"
        )
    elif found.has_rows:
        sentence = "the result for a row depends on other rows of the batch"
    elif found.primitive == "div" and len(statistics) == 2:
        kind, remedy = "uneven_mean", RETURN_A_PAIR
        sentence = (
            "a mean is divided by a number that differs between devices (as with a mask), so the "
            "mean of the devices' means is not the mean over all rows"
        )
    elif found.primitive in _ONE_ROW and Relation.ROWS in given:
        sentence = (
            "a single row of the batch determines all results; each device has a different row"
        )
    elif found.primitive in _EXTREMES or (Relation.ROWS in given and not statistics):
        sentence = (
            f"`{found.primitive}` combines the rows of the batch; each device has different rows"
        )
    elif found.primitive in _STATISTICS and statistics:
        kind = "auxiliary_loss"
        remedy = (
            "take each of the means over the whole batch: zerojax.batch_mean(jnp.mean(x, axis=0)); "
            "or accept that they are taken over each device's rows, and check without the term"
        )
        sentence = (
            "a term of the loss is a product of means over the batch (such as a mixture-of-experts "
            "balancing loss), whose value differs for each device's rows"
        )
    else:
        remedy = (
            f"compute `{found.primitive}` per row, or from the statistic of the whole batch "
            "(zerojax.batch_mean(statistic) if it is a mean); or minimise the mean itself and log "
            "the function of it"
        )
        sentence = f"`{found.primitive}` is computed from a statistic of the whole batch"
    return Reason(kind, f"{sentence}: {numbers}", remedy, found.where)


def reason_of_state(
    name: str, relation: Relation, value: object, place: str | None
) -> Reason | None:
    """Returns the reason for a difference in one of a model's other arrays (its state).

    Args:
      name: name of the array.
      relation: relation between the array's change for the batch and its changes for the pieces.
      value: the array.
      place: line of the user's code that computes the array.
    """
    if relation is Relation.SAME:
        return None  # the array counts forward passes, and each microbatch is one forward pass
    if not jnp.issubdtype(jnp.asarray(value).dtype, jnp.floating):
        return Reason(
            "integers",
            f"the integers {name} in the model's state depend on the data: each device counts its "
            "own rows, so the values differ from those on one device",
            "return such a count as a metric of the loss, or keep it in float32 as a mean",
            place,
        )
    if relation is Relation.SUM:
        return Reason(
            "counter",
            f"{name} in the model's state is a sum over rows; zerojax averages the "
            "devices' changes, so the result is smaller by the number of devices",
            "keep a mean over rows in the state, or return the count as a metric of the loss",
            place,
        )
    return Reason(
        "batch_statistics",
        f"{name} in the model's state is a statistic of rows; each "
        "device computes it from its own rows, and zerojax averages the results",
        "none, if each device may normalise by its own rows, as is usual in data-parallel "
        "training; otherwise take mean and mean square over the whole batch with "
        "zerojax.batch_mean, or use a norm over features (LayerNorm, GroupNorm)",
        place,
    )


def dropout_reason(*, quiet: bool) -> Reason:
    """Returns the reason for a loss with random noise, which each device draws independently.

    Args:
      quiet: whether the loss has no noise in evaluation mode.
    """
    checked = (
        "All else was checked in evaluation mode, and the ZeRO stages were compared with each "
        "other on the same devices"
    )
    if not quiet:
        checked = (
            "The ZeRO stages were compared with each other on the same devices. The loss is random "
            "in evaluation mode, too, so nothing else was checked: draw no random numbers in "
            "evaluation (an nnx "
            "module draws none if its attribute `deterministic` is True, a linen module if an "
            "argument `train` is False or `deterministic` True), or make the noise an array of the "
            "batch"
        )
    return Reason(
        "dropout",
        "the loss is random (dropout or noise): each device and microbatch draws other numbers, so "
        "losses differ by chance from losses on one device",
        f"none: this is expected. {checked}",
    )


def passes_reason(names: Sequence[str]) -> Reason:
    """Returns the reason for state that every forward pass, and so every microbatch, updates.

    Args:
      names: names of the arrays.
    """
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return Reason(
        "passes",
        f"each forward pass reads and changes {shown} in the model's state, "
        "independently of its rows"
        ". Each microbatch is a forward pass, so two microbatches change it twice in a step",
        "none, if this is intended: plain JAX that computes the same microbatches in sequence "
        "agrees. Otherwise use num_microbatches=1",
    )


def optimizer_reason(names: Sequence[str], worst: float, origin: str) -> Reason:
    """Returns the reason for an optimizer whose update changes if parameters are split or
    padded."""
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return Reason(
        "optimizer",
        f"gradients agree, but the optimizer's update of {shown} has a relative difference of "
        f"{worst:.1e} "
        f"if parameters are split over devices and padded to a multiple of them ({origin})",
        "use an optimizer that works element by element or by sums (zerojax.adamw, lion, lamb, "
        "sgd), raise persistence_threshold above the size of these parameters, or use zero=0",
    )
