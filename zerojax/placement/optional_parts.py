"""Parts that only some training states have: each device's copies of weights (`wire.weights`), in
the same form in a run and in checkpoints, and the gradients that wait for a delayed update."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from zerojax.optim.precision import Precision
from zerojax.placement.leaf_placement import LeafPlacement
from zerojax.placement.state import COPIES, DELAYED, TrainState
from zerojax.placement.table import Placement


def followed_leaves(placement: Placement) -> dict[str, LeafPlacement]:
    """Returns {name: placement} of the parameters of which every device keeps a copy."""
    return {n: leaf for n, leaf in placement.leaves.items() if leaf.delta_codes is not None}


def copies_key(placement: Placement, precision: Precision) -> str:
    """Returns the key of the weight copies in a training state and in checkpoints.

    The key contains a hash of the names, shapes and dtype of the copies, so that other copies have
    another key.
    """
    dtype = jnp.dtype(precision.compute_dtype).name
    rows = [[name, list(leaf.shape)] for name, leaf in sorted(followed_leaves(placement).items())]
    digest = hashlib.sha256(json.dumps([dtype, rows]).encode()).hexdigest()[:8]
    return f"weights_{digest}"


def abstract_copies(
    placement: Placement, precision: Precision, mesh: Mesh | AbstractMesh
) -> dict[str, Any] | None:
    """Returns the weight copies of a state as `ShapeDtypeStruct`s with shardings; None if there are
    none.

    The copies are not padded, and only tensor parallelism splits them.
    """
    leaves = followed_leaves(placement)
    if not leaves:
        return None

    def whole(leaf: LeafPlacement) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, P(*leaf.axes))
        return jax.ShapeDtypeStruct(leaf.shape, precision.compute_dtype, sharding=sharding)

    copies = {name: whole(leaf) for name, leaf in leaves.items()}
    return {copies_key(placement, precision): copies}


def copies_begin_anew(plan_state: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Returns whether a run needs weight copies that a checkpoint does not have, so that they must
    be made from the weights.

    Args:
      plan_state: abstract state of the run.
      saved: names of the arrays in the checkpoint.
    """
    own = tuple(f"{COPIES}/{key}/" for key in plan_state.get(COPIES, ()))
    return bool(own) and not any(name.startswith(own) for name in saved)


def with_copies(
    state: TrainState, placement: Placement, precision: Precision, mesh: Mesh | AbstractMesh
) -> TrainState:
    """Adds the copies of weights to an abstract state, if the run has them.

    Args:
      state: abstract state without them.
      placement: placement table of the plan.
      precision: dtypes of the plan.
      mesh: mesh of the plan.
    """
    copies = abstract_copies(placement, precision, mesh)
    return state if copies is None else {**state, COPIES: copies}


def with_delayed(
    state: TrainState,
    sliced: Collection[str],
    placement: Placement,
    precision: Precision,
    mesh: Mesh | AbstractMesh,
) -> TrainState:
    """Adds the gradients that wait for a delayed update, as `ShapeDtypeStruct`s, to an abstract
    state.

    Args:
      state: abstract state without them, uncut.
      sliced: names of the parameters whose optimizer state is in slices, and whose gradients keep
        the dtype in which they were summed.
      placement: placement table with the names of the state.
      precision: dtypes of the plan.
      mesh: mesh of the plan.
    """

    def gradient(name: str, param: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        in_full = name not in sliced or placement.leaves[name].gradient_in_full
        dtype = jnp.float32 if in_full else precision.reduce_dtype
        return jax.ShapeDtypeStruct(param.shape, dtype, sharding=param.sharding)

    def scalar(shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    result = state.copy()
    result[DELAYED] = {
        "grads": {name: gradient(name, x) for name, x in state["params"].items()},
        "scale": scalar((), jnp.float32),
        "skip": scalar((), jnp.bool),
        "key": scalar(state["rng"].shape, state["rng"].dtype),
    }
    return result


def no_gradients(abstract: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `DELAYED` part of a state before its first step, in which nothing waits; traced.

    Args:
      abstract: the part as `ShapeDtypeStruct`s.
    """
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), dict(abstract))
    return {**zeros, "skip": jnp.array(True)}
