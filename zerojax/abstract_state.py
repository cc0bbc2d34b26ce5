"""The training state before arrays exist: every leaf's shape, dtype and sharding.

Knows the placement table, dtypes and the optimizer's `init`; never a model or a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import loss_scale, trees
from zerojax.optim import coding_of
from zerojax.placement import LeafPlacement, Placement
from zerojax.precision import Precision
from zerojax.state import TrainState

Tree = Any


def abstract_state(
    params: Mapping[str, Any],
    extras: Mapping[str, Any],
    placement: Placement,
    tx: optax.GradientTransformation,
    precision: Precision,
    mesh: Mesh | AbstractMesh,
    *,
    canonical: bool,
) -> TrainState:
    """The state as `ShapeDtypeStruct`s: padded as stored, or in its canonical form."""

    def place(leaf: LeafPlacement) -> jax.ShapeDtypeStruct:
        shape = leaf.shape if canonical else leaf.stored_shape
        spec = leaf.canonical_spec(placement.axis_sizes) if canonical else leaf.stored_spec
        floating = jnp.issubdtype(params[leaf.name].dtype, jnp.floating)
        dtype = precision.param_dtype if floating else params[leaf.name].dtype
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def replicate(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, P()))

    placed = {name: place(leaf) for name, leaf in placement.leaves.items()}
    frozen = {name for name, leaf in placement.leaves.items() if leaf.frozen}
    trained = {name: leaf for name, leaf in placed.items() if name not in frozen}
    sizes = {name: trees.num_elements(placement.leaves[name].shape) for name in trained}
    counter = replicate(jax.ShapeDtypeStruct((), jnp.int32))
    return TrainState(
        step=counter,
        skipped=counter,
        rng=replicate(jax.ShapeDtypeStruct((2,), jnp.uint32)),
        params=trained,
        frozen={name: placed[name] for name in placed if name in frozen},
        opt_state=_opt_state(tx, trained, replicate, sizes, canonical=canonical),
        extras={name: replicate(leaf) for name, leaf in extras.items()},
        loss_scale=jax.tree.map(replicate, _loss_scale(precision)),
    )


def canonical_opt_state(
    tx: optax.GradientTransformation, trained: Mapping[str, jax.ShapeDtypeStruct]
) -> Tree:
    """The optimizer's state in its canonical form, over parameters of any shape and sharding."""
    mesh = next(iter(trained.values())).sharding.mesh

    def replicate(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, P()))

    return _opt_state(tx, trained, replicate, {}, canonical=True)


def _loss_scale(precision: Precision) -> dict[str, Any]:
    if precision.loss_scale is None:
        return {}
    return jax.eval_shape(lambda: loss_scale.init(precision.loss_scale))


def _opt_state(
    tx: optax.GradientTransformation,
    trained: Mapping[str, Any],
    replicate: Any,
    sizes: Mapping[str, int],
    *,
    canonical: bool,
) -> Tree:
    """The optimizer's state: what has a parameter's shape lies where the parameter does."""
    coding = coding_of(tx)
    if coding is not None and not canonical:
        return coding.abstract_state(trained, sizes)
    init = tx.init if coding is None else coding.canonical_init
    bare = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in trained.items()}
    state = jax.eval_shape(init, bare)

    def is_masked(leaf: Any) -> bool:
        return isinstance(leaf, optax.MaskedNode)

    def like(leaf: Any, param: Any) -> Any:
        if is_masked(leaf):  # a parameter that this part of the optimizer leaves to another
            return leaf
        if tuple(leaf.shape) != tuple(param.shape):
            return replicate(leaf)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=param.sharding)

    return optax.tree_utils.tree_map_params(
        init, like, state, trained, transform_non_params=replicate, is_leaf=is_masked
    )
