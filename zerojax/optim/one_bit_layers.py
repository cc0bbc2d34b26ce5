"""1-bit LAMB: after a warm-up each layer's frozen trust ratio is scaled by a factor.

Li et al. 2021 (arXiv:2104.06069), algorithm 1. Norms of a momentum that was sent as signs carry no
information. The trust ratio is therefore the layer's average ratio during the warm-up times a
factor: the change of a second moment that is reconstructed from the received momentum. This module
computes the shards of one device, as `one_bit` does.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, get_args

import jax
import jax.numpy as jnp
import optax
from jax import lax

from pallas_kernels import optimizers
from pallas_kernels.choice import Impl, choose
from zerojax.config.checks import names_keywords
from zerojax.optim.fused import Method, Options, begin_update, make_optimizer
from zerojax.optim.groups import Decay, as_groups
from zerojax.optim.methods import (
    GroupsLike,
    adam_scalars,
    check_numbers,
    lamb_passes,
    scale_by_adam,
    trust_ratios,
)
from zerojax.optim.one_bit import (
    OneBit,
    TwoScalars,
    adam_part,
    check_one_bit_numbers,
    scalars_with,
    unless,
)
from zerojax.optim.optimizer import Arrays, Optimizer, UpdateContext
from zerojax.optim.schedules import Schedule

Tree = Any
Layers = Mapping[str, Arrays]

COEFFICIENTS, FACTORS, SCALES, FRESH = "coefficients", "factors", "scales", "fresh"
"""Keys of the state of each parameter whose momentum is sent as signs; values are float32.
coefficients: average of its trust ratios during the warm-up. factors: multipliers of the
coefficients (0: none yet). scales: multipliers of the momentum before its signs are taken. All
three have shape [], or [layers] for a stack. fresh: the reconstructed second moment, a shard like
the frozen one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneBitLamb(OneBit):
    """Settings of 1-bit LAMB, and its updates during and after the warm-up.

    Attributes:
      b2: decay of the second moment and of the reconstructed second moment.
      bounds: minimum and maximum trust ratio during the warm-up.
      coeff_beta: decay of the average of these ratios.
      factor_bounds: minimum and maximum factor of the average.
      factor_threshold: maximum relative change of a factor in one step.
    """

    name: ClassVar[str] = "1-bit LAMB"
    warm_up_name: ClassVar[str] = "LAMB"
    errors_name: ClassVar[str] = "errors_lamb"
    per_layer: ClassVar[bool] = True

    b2: float
    bounds: tuple[float, float]
    coeff_beta: float
    factor_bounds: tuple[float, float]
    factor_threshold: float

    def warm_up(
        self, arrays: tuple[Arrays, Arrays, Tree], context: UpdateContext, coefficients: Arrays
    ) -> tuple[Arrays, Tree, Arrays]:
        """Runs one LAMB update on this device's shards, and averages its trust ratios.

        Args:
          arrays: (parameters, gradients, the optimizer's state).
          context: context of the update.
          coefficients: {name: average of its trust ratios so far}.

        Returns:
          (parameters, the optimizer's state, the averages after this update).
        """
        params, grads, state = arrays
        ratios: Arrays = {}
        method = dataclasses.replace(self.method, run=_bounded_run(self.bounds, seen=ratios))
        begun = begin_update(method, self.options, state, context.whole(params), context)
        new, after = begun.run(params, begun.moments, grads, None)
        averages = {name: self._average(old, ratios[name]) for name, old in coefficients.items()}
        return new, begun.end(after), unless(context.skip, averages, coefficients)

    def _average(self, old: jax.Array, ratio: jax.Array) -> jax.Array:
        """Averages trust ratios: starts at the first ratio, and ignores ratios of 1 (zero
        norms)."""
        mean = self.coeff_beta * old + (1 - self.coeff_beta) * ratio
        return jnp.where(ratio == 1, old, jnp.where(old == 0, ratio, mean))

    def begin(
        self,
        arrays: tuple[Arrays, Tree],
        context: UpdateContext,
        frozen_at: jax.Array,
        layers: Layers,
    ) -> dict[str, Arrays]:
        """Computes the values per layer before the first step that sends signs, or after a restart.

        A layer without an average uses the current trust ratio. A second moment that has to be
        reconstructed again starts at the size given by its layer's factor.

        Args:
          arrays: (parameters, the optimizer's state).
          context: context of the update.
          frozen_at: result of the method `frozen_at`.
          layers: coefficients and factors of the layers.
        """
        params, state = arrays
        names, adam = list(layers[COEFFICIENTS]), adam_part(state)
        mu: Any = adam.mu
        nu: Any = adam.nu
        whole, counts = context.whole(params), (jnp.maximum(adam.count, 1), frozen_at)
        scalars = self.scalars_of(names, state, whole, counts)
        factors = {name: jnp.where(x > 0, x, 1.0) for name, x in layers[FACTORS].items()}
        fresh, squares = {}, ({}, {}, {})
        for name in names:
            (now, frozen), factor = scalars[name], factors[name]
            grown = now.correction2 / frozen.correction2
            fresh[name] = over_layers(jnp.divide, nu[name], factor * factor) * grown
            step, _ = _step(mu[name], nu[name], now, frozen)
            update = step + now.weight_decay * params[name]
            for found, x in zip(squares, (params[name], update, mu[name]), strict=True):
                found[name] = _of_layers(jnp.sum, x * x, factor)
        ratios = _bounded(trust_ratios(squares[:2], context, {}), self.bounds)
        averages = layers[COEFFICIENTS].items()
        return {
            COEFFICIENTS: {name: jnp.where(x > 0, x, ratios[name]) for name, x in averages},
            FACTORS: factors,
            SCALES: _united(squares[2], whole, context),
            FRESH: fresh,
        }

    def move(
        self,
        arrays: tuple[Arrays, Arrays, Arrays, Arrays],
        scalars: Mapping[str, TwoScalars],
        context: UpdateContext,
        layers: Layers | None,
    ) -> tuple[Arrays, dict[str, Arrays]]:
        """Updates parameters like `OneBit.move`, with each layer's coefficient times its new factor
        as trust ratio."""
        assert layers is not None
        params, momentum, mu, nu = arrays
        fresh, updates, squares, largest = {}, {}, ({}, {}), {}
        for name, agreed in momentum.items():
            (now, frozen), like = scalars[name], layers[FACTORS][name]
            grad = (agreed - self.b1 * mu[name]) / (1 - self.b1)
            fresh[name] = self.b2 * layers[FRESH][name] + (1 - self.b2) * grad * grad
            step, root = _step(agreed, nu[name], now, frozen)
            updates[name] = step + now.weight_decay * params[name]
            shrunk = root / (jnp.sqrt(fresh[name] / now.correction2) + now.eps)
            largest[name] = _of_layers(jnp.max, jnp.where(nu[name] > 0, shrunk, 0.0), like)
            for found, x in zip(squares, (step, updates[name]), strict=True):
                found[name] = _of_layers(jnp.sum, x * x, like)
        factors = self._factors(squares, largest, layers[FACTORS], context)
        moved = {}
        for name, update in updates.items():
            rate = scalars[name][0].learning_rate * layers[COEFFICIENTS][name] * factors[name]
            moved[name] = params[name] - over_layers(jnp.multiply, update, rate)
        changed = {FACTORS: factors, FRESH: fresh}
        return moved, {key: unless(context.skip, new, layers[key]) for key, new in changed.items()}

    def _factors(
        self, squares: tuple[Arrays, Arrays], largest: Arrays, last: Arrays, context: UpdateContext
    ) -> Arrays:
        """Computes the factors of the trust ratios in this step: {name: [] or [layers]}.

        Args:
          squares: sums of squares over this shard, of updates without and with weight decay.
          largest: maximum over this shard of (frozen root / reconstructed root).
          last: factors of the previous step.
          context: context of the update.
        """
        factors = {}
        for over, names in _split_alike(last, context).items():
            sums = tuple(_joined(found, names) for found in squares)
            of_step, of_update = context.sum_over(over, sums)
            shrunk = _joined(largest, names)
            shrunk = lax.pmax(shrunk, over) if over else shrunk
            shrunk = jnp.where(shrunk > 0, shrunk, 1.0)  # avoids 0 / 0 for layers without an update
            is_zero = of_update == 0
            part = jnp.sqrt(of_step) / jnp.sqrt(jnp.where(is_zero, 1.0, of_update))
            part = jnp.where(is_zero, 1.0, jnp.minimum(part, 1.0))
            factor = jnp.clip(shrunk * part + (1 - part), *self.factor_bounds)
            before, change = _joined(last, names), self.factor_threshold
            factor = jnp.clip(factor, before * (1 - change), before * (1 + change))
            factors |= _apart(factor, names, last)
        return factors


def over_layers(
    operation: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, of_layers: jax.Array
) -> jax.Array:
    """Applies an operation to `x` and `of_layers`, which holds one value, or one per layer."""
    return operation(x, of_layers.reshape(*of_layers.shape, *(1,) * (x.ndim - of_layers.ndim)))


def _of_layers(reduce: Callable[..., jax.Array], x: jax.Array, like: jax.Array) -> jax.Array:
    """Reduces `x` to the shape of `like`: to [], or to [layers], for each layer separately."""
    return reduce(x, axis=tuple(range(like.ndim, x.ndim)))


def _step(
    momentum: jax.Array,
    nu: jax.Array,
    now: optimizers.AdamScalars,
    frozen: optimizers.AdamScalars,
) -> tuple[jax.Array, jax.Array]:
    """Computes (the update without weight decay, the divisor of the momentum)."""
    root = jnp.sqrt(nu / frozen.correction2) + now.eps
    return jnp.where(nu > 0, (momentum / now.correction1) / root, 0.0), root


def _united(
    squares: Arrays, whole: Mapping[str, jax.ShapeDtypeStruct], context: UpdateContext
) -> Arrays:
    """Computes {name: factor that makes each layer's momentum RMS equal to the mean RMS of all
    layers}.

    Args:
      squares: sums of squares over this shard.
      whole: shapes of whole parameters.
      context: context of the update.
    """
    sizes: Arrays = {}
    for over, names in _split_alike(squares, context).items():
        # Two arrays, because `UpdateContext.sum_over` needs at least two.
        found = _joined(squares, names)
        summed, _ = context.sum_over(over, (found, jnp.zeros_like(found)))
        totals = _apart(summed, names, squares)
        for name, total in totals.items():
            elements = math.prod(whole[name].shape[total.ndim :])
            sizes[name] = jnp.sqrt(total / max(1, elements))
    if not sizes:
        return {}
    mean = jnp.mean(_joined(sizes, list(squares)))
    safe = {name: jnp.where(x > 0, x, 1.0) for name, x in sizes.items()}
    return {name: jnp.where(x > 0, mean / safe[name], 1.0) for name, x in sizes.items()}


def _split_alike(names: Mapping[str, Any], context: UpdateContext) -> dict[tuple[str, ...], list]:
    """Groups names that are split over the same mesh axes, so that a group uses one collective."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        found.setdefault(tuple(context.axes[name]), []).append(name)
    return found


def _joined(arrays: Arrays, names: list[str]) -> jax.Array:
    return jnp.concatenate([arrays[name].reshape(-1) for name in names])


def _apart(joined: jax.Array, names: list[str], like: Arrays) -> Arrays:
    """Splits an array made by `_joined` into {name: array with the shape of `like[name]`}."""
    found, start = {}, 0
    for name in names:
        end = start + like[name].size
        found[name], start = joined[start:end].reshape(like[name].shape), end
    return found


def _bounded(ratios: Arrays, bounds: tuple[float, float]) -> Arrays:
    """Clips trust ratios to the bounds, except a ratio that is 1 because an array or its update is
    zero.
    """
    return {name: jnp.where(x == 1, x, jnp.clip(x, *bounds)) for name, x in ratios.items()}


def _bounded_run(bounds: tuple[float, float], seen: Arrays | None = None) -> Any:
    """Builds LAMB's `Run` with clipped trust ratios, which it writes to `seen`."""

    def taken(ratios: Arrays) -> Arrays:
        found = _bounded(ratios, bounds)
        if seen is not None:
            seen.update(found)
        return found

    return functools.partial(lamb_passes, taken=taken)


@names_keywords()
def one_bit_lamb(
    learning_rate: float | Schedule,
    *,
    freeze_step: int,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    mask: Any = None,
    clip_norm: float | None = None,
    groups: GroupsLike = None,
    impl: Impl = "auto",
    bias_correction: bool = True,
    min_coeff: float = 0.01,
    max_coeff: float = 10.0,
    coeff_beta: float = 0.9,
    factor_min: float = 0.5,
    factor_max: float = 4.0,
    factor_threshold: float = 0.1,
) -> Optimizer:
    """Builds 1-bit LAMB (arXiv:2104.06069): large batches over slow networks, at stages 0 and 1.

    The first `freeze_step` steps run LAMB. After them the second moment is frozen, and momentum is
    sent as signs, as in `one_bit_adam`. A layer's trust ratio is then the average of its ratios
    during the warm-up times a factor. The factor is the largest quotient of the root of the frozen
    second moment and the root of one that is reconstructed from the received momentum. Before signs
    are taken, momentum is scaled so that all layers have the same root mean square.

    There is one ratio per array, and one for each layer of an array in which layers are stacked, as
    in `zerojax.lamb`. LAMB always updates the parameters that `wire.exact` names. The state has the
    form of `lamb`; a run that continues from a `lamb` state after `freeze_step` uses the current
    ratios instead of averages. The state also stores compression errors and the reconstructed
    second moment.

    Args:
      learning_rate, freeze_step, b1, b2, eps, weight_decay, mask, clip_norm, groups, impl: the same
        arguments as for `one_bit_adam`.
      bias_correction: whether to correct the bias of both moments; False as in DeepSpeed.
      min_coeff, max_coeff: bounds of a trust ratio during the warm-up.
      coeff_beta: decay of the average of these ratios; 1 / (1 - coeff_beta) updates should not
        exceed `freeze_step`. The average starts at the first ratio.
      factor_min, factor_max: bounds of the factor.
      factor_threshold: maximum relative change of a factor from one step to the next.

    Raises:
      ValueError, TypeError: a number is out of range.
    """
    check_numbers(learning_rate=learning_rate, b1=b1, b2=b2, eps=eps)
    check_numbers(weight_decay=weight_decay, clip_norm=clip_norm)
    check_one_bit_numbers("one_bit_lamb", freeze_step=freeze_step, b1=b1)
    if not 0 <= coeff_beta < 1:
        raise ValueError(f"coeff_beta={coeff_beta!r} must be in [0, 1); 0.9 is usual")
    if not 0 < factor_threshold < 1:
        raise ValueError(f"factor_threshold={factor_threshold!r} must be in (0, 1); 0.1 is usual")
    _check_bounds(min_coeff=min_coeff, max_coeff=max_coeff)
    _check_bounds(factor_min=factor_min, factor_max=factor_max)
    if impl not in get_args(Impl):
        choose(impl, kernel="lamb")  # raises an error that lists the valid values
    numbers = {
        "freeze_step": freeze_step,
        "b1": b1,
        "b2": b2,
        "bounds": (min_coeff, max_coeff),
        "coeff_beta": coeff_beta,
        "factor_bounds": (factor_min, factor_max),
        "factor_threshold": factor_threshold,
    }

    def chain(decay: Any, rate: Any) -> optax.GradientTransformation:
        # The step computes the updates itself; the chain only defines the state, which has the form
        # of `lamb`.
        ratio = optax.scale_by_trust_ratio()
        return optax.chain(scale_by_adam(b1, b2, eps), decay, ratio, rate)

    method = Method(
        kernel="lamb",
        chain=chain,
        moments=("mu", "nu"),
        scalars=scalars_with(adam_scalars(b1, b2, eps), bias_correction),
        run=_bounded_run((min_coeff, max_coeff)),
        elementwise=False,
        per_layer=True,
        one_bit=lambda method, options: OneBitLamb(method=method, options=options, **numbers),
    )
    options = Options(
        learning_rate=learning_rate,
        decay=Decay(weight_decay=weight_decay, mask=mask, groups=as_groups(groups)),
        clip_norm=clip_norm,
        impl=impl,
    )
    return make_optimizer(method, options)


def _check_bounds(**bounds: float) -> None:
    """Raises a ValueError unless the bounds, a pair (smallest, largest), are positive and in
    order."""
    (low_name, low), (high_name, high) = bounds.items()
    if not 0 < low <= high:
        raise ValueError(
            f"{low_name}={low!r} and {high_name}={high!r} must be above 0, and {low_name} at most "
            f"{high_name}"
        )
