"""Hands over a state's model in the form in which the user wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.optim import Weights
from zerojax.placement.frozen_codes import decoded
from zerojax.placement.state import TrainState
from zerojax.plan.make import Plan
from zerojax.runtime.memory import allocating_for
from zerojax.step.reshard import model_parts


@allocating_for("handing over the model")
@jax.transfer_guard("allow")
def model_of(plan: Plan, state: TrainState, weights: Weights = "trained") -> Any:
    """Returns the model in the user's form: `nnx.Module`, linen variables or a tree of arrays.

    Every process gets unsharded arrays, so the model must fit on one device.

    Args:
      plan: plan of `state`.
      state: train state; it stays valid.
      weights: "trained", or "ema" for the averaged weights.
    """
    named = model_parts(plan, state, weights=weights)
    replicated = NamedSharding(plan.mesh, P())
    # A process can only read arrays of which it has all parts.
    whole = jax.jit(lambda tree: tree, out_shardings=replicated)(named)
    host = jax.tree.map(np.asarray, whole)
    values = {**host["params"], **in_param_dtype(plan, host["frozen"])}
    params = {name: jnp.asarray(values[name]) for name in plan.users_placement.leaves}
    extras = {name: jnp.asarray(value) for name, value in host["extras"].items()}
    return plan.users_model.to_source(params, extras)


def in_param_dtype(plan: Plan, frozen: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Decodes frozen parameters, and converts narrower floats to the dtype of trained parameters.

    The sum of a frozen and a trained array, such as a weight and its adapter, is then not rounded.

    Args:
      plan: plan of the run.
      frozen: {name: parameter in its stored form}.
    """
    dtype, leaves = np.dtype(plan.precision.param_dtype), plan.users_placement.leaves

    def one(name: str, value: np.ndarray) -> np.ndarray:
        if leaves[name].codes is not None:
            return value.astype(dtype)
        is_float = jnp.issubdtype(value.dtype, jnp.floating)
        is_narrow = value.dtype.itemsize < dtype.itemsize
        return value.astype(dtype) if is_narrow and is_float else value

    return {name: one(name, value) for name, value in decoded(leaves, frozen).items()}
