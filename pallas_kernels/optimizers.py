"""Formulas of AdamW, Lion, SGD with momentum and LAMB, shared by kernel and reference.

They follow optax's order of operations. A rule multiplies the gradient by `gradient_scale`, which
combines clipping and loss scale. If `skip` is not 0, every array is unchanged, whatever the
gradient contains.

AdamW, LAMB and SGD compute parameters from the moments as stored, after `skip` was applied. The
values equal those computed from the moments before that, but stored moments are outputs, which XLA
does not compute twice: the parameter's fusion reads only the new moments, and each moment is
written in place. If the parameter's fusion read the old moments, XLA on CPUs would first copy every
moment, because the fusions that read a moment and the fusion that writes it have no order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_kernels.elementwise import Blocks, Rule, Scalar, Values


class AdamScalars(NamedTuple):
    """Scalars of one AdamW or LAMB update, all float32 []; built by `adam_scalars`."""

    learning_rate: Scalar
    b1: Scalar
    rest1: Scalar
    b2: Scalar
    rest2: Scalar
    eps: Scalar
    weight_decay: Scalar
    correction1: Scalar
    correction2: Scalar
    gradient_scale: Scalar
    skip: Scalar


class LambScalars(NamedTuple):
    """Scalars of LAMB's second half, all float32 []; built by `lamb_scalars`."""

    learning_rate: Scalar
    eps: Scalar
    weight_decay: Scalar
    correction1: Scalar
    correction2: Scalar
    trust_ratio: Scalar
    skip: Scalar


class LionScalars(NamedTuple):
    """Scalars of one Lion update, all float32 []; built by `lion_scalars`."""

    learning_rate: Scalar
    b1: Scalar
    rest1: Scalar
    b2: Scalar
    rest2: Scalar
    weight_decay: Scalar
    gradient_scale: Scalar
    skip: Scalar


class SgdScalars(NamedTuple):
    """Scalars of one SGD update, all float32 [].

    Attributes:
      learning_rate: learning rate of this update.
      momentum: decay of the trace (running sum of gradients).
      weight_decay: factor of the parameter that is added to the gradient before the trace, as in
        `optax.chain(add_decayed_weights, sgd)`.
      gradient_scale: factor of the gradient.
      skip: 1 to change nothing, else 0.
    """

    learning_rate: Scalar
    momentum: Scalar = 0.9
    weight_decay: Scalar = 0.0
    gradient_scale: Scalar = 1.0
    skip: Scalar = 0.0


def adam_scalars(
    learning_rate: Scalar,
    *,
    count: ArrayLike,
    b1: Scalar = 0.9,
    b2: float = 0.999,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 1e-4,
    gradient_scale: Scalar = 1.0,
    skip: Scalar = False,
) -> AdamScalars:
    """Computes the scalars of one AdamW update (arXiv:1711.05101), or of LAMB's first half.

    Args:
      learning_rate: learning rate of this update; may be traced, like all arguments except b2.
      count: int32, number of this update, from 1.
      b1, b2: decays of the moments, Python floats, because 1 - b must be computed in double
        precision: 1 - float32(0.999) differs from float32(1 - 0.999) in the fifth digit. For a
        traced b1 near 0.9 the difference is in the seventh digit.
      eps: number added to the root of the corrected second moment.
      weight_decay: weight decay per unit of learning rate; 0 for a leaf that does not decay.
      gradient_scale: factor of the gradient.
      skip: a boolean; True changes nothing.
    """
    return AdamScalars(
        *_float32(learning_rate, b1, 1 - b1, b2, 1 - b2, eps, weight_decay),
        correction1=_correction(b1, count),
        correction2=_correction(b2, count),
        gradient_scale=_float32(gradient_scale)[0],
        skip=_float32(skip)[0],
    )


def lamb_scalars(scalars: AdamScalars, *, trust_ratio: Scalar) -> LambScalars:
    """Computes the scalars of LAMB's second half (arXiv:1904.00962).

    Args:
      scalars: scalars of the first half.
      trust_ratio: result of `trust_ratio_of`.
    """
    kept = {name: getattr(scalars, name) for name in LambScalars._fields if name != "trust_ratio"}
    return LambScalars(trust_ratio=trust_ratio, **kept)


def trust_ratio_of(param_norm: ArrayLike, update_norm: ArrayLike) -> jax.Array:
    """Computes LAMB's trust ratio, param_norm / update_norm in float32; 1 if a norm is 0.

    Args:
      param_norm, update_norm: Euclidean norms over the whole leaf, on all devices that hold shards
        of it: roots of the sums of `LAMB_MOMENTS`. Numbers, or arrays for many leaves.
    """
    param_norm, update_norm = _float32(param_norm, update_norm)
    is_zero = (param_norm == 0) | (update_norm == 0)
    return jnp.where(is_zero, 1.0, param_norm / jnp.where(is_zero, 1.0, update_norm))


def lion_scalars(
    learning_rate: Scalar,
    *,
    b1: Scalar = 0.9,
    b2: float = 0.99,
    weight_decay: Scalar = 1e-3,
    gradient_scale: Scalar = 1.0,
    skip: Scalar = False,
) -> LionScalars:
    """Computes the scalars of one Lion update (arXiv:2302.06675); see `adam_scalars`."""
    return LionScalars(
        *_float32(learning_rate, b1, 1 - b1, b2, 1 - b2, weight_decay, gradient_scale, skip)
    )


def _float32(*values: ArrayLike) -> list[jax.Array]:
    return [jnp.asarray(value, jnp.float32) for value in values]


def _correction(decay: ArrayLike, count: ArrayLike) -> jax.Array:
    return 1 - jnp.asarray(decay, jnp.float32) ** jnp.asarray(count, jnp.int32)


def new_moments(
    mu: jax.Array, nu: jax.Array, grad: jax.Array, s: Any
) -> tuple[jax.Array, jax.Array]:
    """Computes Adam's new (mu, nu) from the old ones and an already scaled gradient."""
    return s.rest1 * grad + s.b1 * mu, s.rest2 * (grad * grad) + s.b2 * nu


def adam_direction(
    param: jax.Array, mu: jax.Array, nu: jax.Array, s: AdamScalars | LambScalars
) -> Any:
    """Computes AdamW's step, which is multiplied by the learning rate and subtracted from
    `param`."""
    # Products with reciprocals, because XLA turns (a / b) / c, with a scalar b, into a / (b * c) in
    # one program and into a * (1 / b) / c in another. Slices would then differ from whole updates.
    root = jnp.sqrt(nu * (1 / s.correction2))
    return (mu * (1 / s.correction1)) / (root + s.eps) + s.weight_decay * param


def unless_skipped(skip: Scalar, old: Blocks, new: Blocks) -> Blocks:
    """Selects the new blocks, or the old ones if `skip` is not 0."""
    return tuple(
        jnp.where(skip == jnp.zeros_like(before), after, before)
        for before, after in zip(old, new, strict=True)
    )


def adamw(updated: Blocks, read: Blocks, s: AdamScalars) -> Values:
    """Updates (param, mu, nu) from (grad,) by AdamW; the output is the new parameter."""
    param, mu, nu = updated
    grad = read[0] * s.gradient_scale
    kept_mu, kept_nu = unless_skipped(s.skip, (mu, nu), new_moments(mu, nu, grad, s))
    direction = adam_direction(param, kept_mu, kept_nu, s)
    (new,) = unless_skipped(s.skip, (param,), (param - s.learning_rate * direction,))
    return Values(updated=(new, kept_mu, kept_nu), outputs=(new,))


def lamb_moments(updated: Blocks, read: Blocks, s: AdamScalars) -> Values:
    """Updates (mu, nu) from (param, grad): LAMB's first half.

    It also sums the squares of parameter and update.
    """
    mu, nu = updated
    param, grad = read
    new_mu, new_nu = new_moments(mu, nu, grad * s.gradient_scale, s)
    direction = adam_direction(param, new_mu, new_nu, s)
    kept = unless_skipped(s.skip, updated, (new_mu, new_nu))
    # In a skipped step the sums may be NaN: `lamb_apply` then ignores the ratio.
    return Values(updated=kept, sums=(param * param, direction * direction))


def lamb_apply(updated: Blocks, read: Blocks, s: LambScalars) -> Values:
    """Updates (param,) from the new (mu, nu): LAMB's second half; the output is the new parameter.

    The update is recomputed from the stored moments, which saves an array of its size.
    """
    (param,) = updated
    mu, nu = read
    direction = s.trust_ratio * adam_direction(param, mu, nu, s)
    (new,) = unless_skipped(s.skip, updated, (param - s.learning_rate * direction,))
    return Values(updated=(new,), outputs=(new,))


def lion(updated: Blocks, read: Blocks, s: LionScalars) -> Values:
    """Updates (param, mu) from (grad,) by Lion; the output is the new parameter."""
    param, mu = updated
    grad = read[0] * s.gradient_scale
    direction = jnp.sign(s.rest1 * grad + s.b1 * mu) + s.weight_decay * param
    new = param - s.learning_rate * direction
    new, new_mu = unless_skipped(s.skip, updated, (new, s.rest2 * grad + s.b2 * mu))
    return Values(updated=(new, new_mu), outputs=(new,))


def sgd(updated: Blocks, read: Blocks, s: SgdScalars) -> Values:
    """Updates (param, trace) from (grad,) by SGD with momentum; the output is the new parameter."""
    param, trace = updated
    (kept,) = unless_skipped(s.skip, (trace,), (_decayed(param, read[0], s) + s.momentum * trace,))
    return _descend(param, kept, kept, s)


def sgd_nesterov(updated: Blocks, read: Blocks, s: SgdScalars) -> Values:
    """Updates (param, trace) from (grad,) by SGD with Nesterov momentum.

    The output is the new parameter.
    """
    param, trace = updated
    grad = _decayed(param, read[0], s)
    (kept,) = unless_skipped(s.skip, (trace,), (grad + s.momentum * trace,))
    return _descend(param, kept, grad + s.momentum * kept, s)


def sgd_plain(updated: Blocks, read: Blocks, s: SgdScalars) -> Values:
    """Updates (param,) from (grad,) by SGD without momentum; the output is the new parameter."""
    (param,) = updated
    new = param - s.learning_rate * _decayed(param, read[0], s)
    (new,) = unless_skipped(s.skip, updated, (new,))
    return Values(updated=(new,), outputs=(new,))


def _decayed(param: jax.Array, grad: jax.Array, s: SgdScalars) -> Any:
    return grad * s.gradient_scale + s.weight_decay * param


def _descend(param: jax.Array, trace: jax.Array, direction: jax.Array, s: SgdScalars) -> Values:
    (new,) = unless_skipped(s.skip, (param,), (param - s.learning_rate * direction,))
    return Values(updated=(new, trace), outputs=(new,))


ADAMW = Rule(
    name="adamw", math=adamw, scalars=AdamScalars, num_updated=3, num_read=1, num_outputs=1
)
LION = Rule(name="lion", math=lion, scalars=LionScalars, num_updated=2, num_read=1, num_outputs=1)
SGD = Rule(name="sgd", math=sgd, scalars=SgdScalars, num_updated=2, num_read=1, num_outputs=1)
SGD_NESTEROV = Rule(
    name="sgd_nesterov",
    math=sgd_nesterov,
    scalars=SgdScalars,
    num_updated=2,
    num_read=1,
    num_outputs=1,
)
SGD_PLAIN = Rule(
    name="sgd_plain", math=sgd_plain, scalars=SgdScalars, num_updated=1, num_read=1, num_outputs=1
)
LAMB_MOMENTS = Rule(
    name="lamb_moments",
    math=lamb_moments,
    scalars=AdamScalars,
    num_updated=2,
    num_read=2,
    num_sums=2,
)
LAMB_APPLY = Rule(
    name="lamb_apply",
    math=lamb_apply,
    scalars=LambScalars,
    num_updated=1,
    num_read=2,
    num_outputs=1,
)
