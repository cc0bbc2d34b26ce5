"""Elementwise parts of Muon (before and after its matrix products), and Muon's Adam.

They follow `optax.contrib.muon`, whose Adam also uses Nesterov momentum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_kernels.elementwise import Blocks, Rule, Scalar, Values
from pallas_kernels.optimizers import new_moments, unless_skipped


class MomentumScalars(NamedTuple):
    """Scalars of an update of Muon's momentum, float32 []; built by `momentum_scalars`."""

    beta: Scalar
    rest: Scalar
    of_momentum: Scalar
    of_gradient: Scalar
    gradient_scale: Scalar
    skip: Scalar


class DescentScalars(NamedTuple):
    """Scalars of an update of parameters by their orthogonalized momentum, all float32 [].

    Attributes:
      learning_rate: learning rate of this update.
      matrix_scale: factor of an orthogonal matrix.
      weight_decay: weight decay per unit of learning rate.
      skip: 1 to change nothing, else 0.
    """

    learning_rate: Scalar
    matrix_scale: Scalar
    weight_decay: Scalar = 0.0
    skip: Scalar = 0.0


class NesterovAdamScalars(NamedTuple):
    """Scalars of an Adam update with Nesterov momentum; built by `nesterov_adam_scalars`."""

    learning_rate: Scalar
    b1: Scalar
    rest1: Scalar
    b2: Scalar
    rest2: Scalar
    eps: Scalar
    weight_decay: Scalar
    of_momentum: Scalar
    of_gradient: Scalar
    correction2: Scalar
    gradient_scale: Scalar
    skip: Scalar


def momentum_scalars(
    beta: float,
    *,
    count: ArrayLike,
    nesterov: bool,
    gradient_scale: Scalar = 1.0,
    skip: Scalar = False,
) -> MomentumScalars:
    """Computes the scalars of one update of Muon's momentum.

    Args:
      beta: decay of the momentum, a Python float.
      count: int32, number of this update, from 1.
      nesterov: whether to use Nesterov momentum.
      gradient_scale: factor of the gradient.
      skip: a boolean; True changes nothing.
    """
    of_momentum, of_gradient = _ahead(beta, count, nesterov)
    return MomentumScalars(
        *_float32(beta, 1 - beta),
        of_momentum=of_momentum,
        of_gradient=of_gradient,
        gradient_scale=_float32(gradient_scale)[0],
        skip=_float32(skip)[0],
    )


def nesterov_adam_scalars(
    learning_rate: Scalar,
    *,
    count: ArrayLike,
    nesterov: bool,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: Scalar = 0.0,
    gradient_scale: Scalar = 1.0,
    skip: Scalar = False,
) -> NesterovAdamScalars:
    """Computes the scalars of Muon's Adam; see `momentum_scalars` and `optimizers.adam_scalars`."""
    of_momentum, of_gradient = _ahead(b1, count, nesterov)
    return NesterovAdamScalars(
        *_float32(learning_rate, b1, 1 - b1, b2, 1 - b2, eps, weight_decay),
        of_momentum=of_momentum,
        of_gradient=of_gradient,
        correction2=_correction(b2, count),
        gradient_scale=_float32(gradient_scale)[0],
        skip=_float32(skip)[0],
    )


def _ahead(beta: float, count: ArrayLike, nesterov: bool) -> tuple[jax.Array, jax.Array]:
    """Computes the factors of the new moment and of the gradient; their sum is the direction."""
    if not nesterov:
        return _float32(1 / _correction(beta, count), 0.0)
    now, later = _correction(beta, count), _correction(beta, count + 1)
    # As in optax, the moment is corrected as of the next update, and the gradient as of this one.
    return _float32(beta / later, (1 - beta) / now)


def _correction(decay: float, count: ArrayLike) -> Any:
    return 1 - jnp.float32(decay) ** jnp.asarray(count, jnp.int32)


def _float32(*values: ArrayLike) -> tuple[Any, ...]:
    return tuple(jnp.asarray(value, jnp.float32) for value in values)


def momentum(updated: Blocks, read: Blocks, s: MomentumScalars) -> Values:
    """Updates (mu,) from (grad,); the output is the direction before orthogonalization."""
    (mu,), grad = updated, read[0] * s.gradient_scale
    new = s.rest * grad + s.beta * mu
    direction = s.of_momentum * new + s.of_gradient * grad
    return Values(updated=unless_skipped(s.skip, updated, (new,)), outputs=(direction,))


def descent(updated: Blocks, read: Blocks, s: DescentScalars) -> Values:
    """Updates (param,) from (orthogonalized direction,); the output is the new parameter."""
    (param,), (orthogonal,) = updated, read
    step = s.matrix_scale * orthogonal + s.weight_decay * param
    (new,) = unless_skipped(s.skip, updated, (param - s.learning_rate * step,))
    return Values(updated=(new,), outputs=(new,))


def nesterov_adam(updated: Blocks, read: Blocks, s: NesterovAdamScalars) -> Values:
    """Updates (param, mu, nu) from (grad,): AdamW with a Nesterov first moment."""
    param, mu, nu = updated
    grad = read[0] * s.gradient_scale
    new_mu, new_nu = new_moments(mu, nu, grad, s)
    ahead = s.of_momentum * new_mu + s.of_gradient * grad
    step = ahead / (jnp.sqrt(new_nu / s.correction2) + s.eps) + s.weight_decay * param
    new = param - s.learning_rate * step
    new, new_mu, new_nu = unless_skipped(s.skip, updated, (new, new_mu, new_nu))
    return Values(updated=(new, new_mu, new_nu), outputs=(new,))


MUON_MOMENTUM = Rule(
    name="muon_momentum",
    math=momentum,
    scalars=MomentumScalars,
    num_updated=1,
    num_read=1,
    num_outputs=1,
)
MUON_DESCENT = Rule(
    name="muon_descent",
    math=descent,
    scalars=DescentScalars,
    num_updated=1,
    num_read=1,
    num_outputs=1,
)
NESTEROV_ADAM = Rule(
    name="nesterov_adam",
    math=nesterov_adam,
    scalars=NesterovAdamScalars,
    num_updated=3,
    num_read=1,
    num_outputs=1,
)
