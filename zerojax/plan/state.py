"""`TrainState`: the training state as a plain dict of arrays.

"step" is the number of batches the optimizer loop has consumed, so that the data position follows
from it. Updates applied are `step - skipped`; optax's own counts follow those.
"""

from __future__ import annotations

import operator
from typing import Any, NotRequired, TypedDict

import jax
import jax.numpy as jnp


class TrainState(TypedDict):
    """The whole state of a run, donated to each step.

    Fields:
      step: int32 []; batches consumed.
      skipped: int32 []; steps whose gradients were not finite and that changed nothing else.
      rng: uint32 [2]; key data of the run's PRNG key; step keys are folded from it.
      params: {name: array}, the trained weights (float32 masters unless the precision says
        otherwise), padded as the placement says. Of a parameter whose optimizer state is sliced
        (`zerojax.plan.offload_layout`) the copy in the compute dtype that forward and backward
        read.
      frozen: {name: array}, parameters without gradient.
      opt_state: what the optax transformation keeps for `params`; each moment of a sliced parameter
        as {tier: array}, like its master.
      extras: {name: array}, the model's own state (batch statistics, random counts), replicated.
      loss_scale: the counters of `zerojax.optim.loss_scale`; {} where the loss is not scaled.
      masters: only where something is offloaded: {name: {tier: float32 [slices of all shards,
        elements]}} of sliced parameters.
      disk: only there: what holds the slices that lie in files, a node without leaves; {} where
        none do.
    """

    step: Any
    skipped: Any
    rng: Any
    params: dict[str, Any]
    frozen: dict[str, Any]
    opt_state: Any
    extras: dict[str, Any]
    loss_scale: dict[str, Any]
    masters: NotRequired[dict[str, Any]]
    disk: NotRequired[Any]


def step_key(rng: jax.Array, step: jax.Array) -> jax.Array:
    """The typed PRNG key of one step, from stored key data; the same on every device."""
    return jax.random.fold_in(jax.random.wrap_key_data(rng), step)


def as_seed(seed: Any) -> int:
    """A seed as an integer.

    Raises:
      TypeError: it is none.
      ValueError: it does not fit into 64 bits.
    """
    try:
        number = operator.index(seed)
    except TypeError:
        raise TypeError(f"seed={seed!r} is not an integer; use one, as in seed=0") from None
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"seed={number} does not fit into 64 bits; use 0 to {2**63 - 1}")
    return number


def run_key_data(seed: int) -> jax.Array:
    """uint32 [2]: the stored key data of a run's seed.

    Raises:
      TypeError, ValueError: as of `as_seed`.
    """
    return jax.random.key_data(jax.random.key(as_seed(seed)))


def zero_counter() -> jax.Array:
    """int32 []."""
    return jnp.zeros((), jnp.int32)
