"""Abstract training state: shape, dtype and sharding of every array, without arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.models import trees
from zerojax.optim import coding_of, loss_scale, map_state
from zerojax.optim.precision import Precision
from zerojax.plan.leaf import LeafPlacement
from zerojax.plan.placement_table import Placement
from zerojax.plan.state import TrainState

Tree = Any


@dataclasses.dataclass(frozen=True)
class LayerRows:
    """How a stored leaf on a pipeline differs from its canonical form in dimension 0.

    Attributes:
      rows: see `LeafPlacement.layer_rows`.
      sharding: how the leaf lies, in its stored shape, while rows change places.
    """

    rows: tuple[int, ...]
    sharding: NamedSharding


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
    state = _init_shapes(tx, {name: x.shape for name, x in trained.items()}, trained)

    def like(leaf: Any, param: Any) -> Any:
        if tuple(leaf.shape) != tuple(param.shape):
            return replicate(leaf)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=param.sharding)

    return map_state(tx, like, state, trained, others=replicate)


def rows_of_state(
    placement: Placement,
    tx: optax.GradientTransformation,
    stored: TrainState,
) -> TrainState | None:
    """For each leaf of a state its `LayerRows`, or None where both forms have the same rows.

    Args:
      placement: the table.
      tx: the optimizer, whose state is taken in its canonical form over stored parameters.
      stored: the abstract state as it is stored.

    Returns:
      The state's tree with `LayerRows` and None for leaves; None where no leaf has any.
    """
    arrays = stored["params"] | stored["frozen"]
    params: dict[str, LayerRows | None] = dict.fromkeys(arrays)
    for name, leaf in placement.leaves.items():
        if leaf.has_rows:
            assert leaf.layer_rows is not None
            spec = leaf.exchange_spec(placement.axis_sizes)
            sharding = NamedSharding(arrays[name].sharding.mesh, spec)
            params[name] = LayerRows(leaf.layer_rows, sharding)
    if not any(params.values()):
        return None
    result: Tree = jax.tree.map(lambda _: None, stored)
    result["params"], result["frozen"] = (
        {name: params[name] for name in stored[part]} for part in ("params", "frozen")
    )
    result["opt_state"] = _opt_state_rows(tx, stored["params"], params)
    return result


def _opt_state_rows(
    tx: optax.GradientTransformation,
    trained: Mapping[str, Any],
    rows: Mapping[str, LayerRows | None],
) -> Tree:
    """`LayerRows` of an optimizer's state: its leaves that are stored as a parameter is.

    Others are the same in both forms: see `zerojax.plan.optimizer_shapes`.
    """
    shapes = {name: tuple(x.shape) for name, x in trained.items()}

    def of_leaf(leaf: Any, name: str) -> LayerRows | None:
        return rows[name] if tuple(leaf.shape) == shapes[name] else None

    state = _init_shapes(tx, shapes, trained)
    return map_state(tx, of_leaf, state, {n: n for n in trained}, others=lambda _: None)


def _init_shapes(
    tx: optax.GradientTransformation,
    shapes: Mapping[str, tuple[int, ...]],
    params: Mapping[str, Any],
) -> Tree:
    """The optimizer's state in its canonical form, over parameters of these shapes."""
    coding = coding_of(tx)
    init = tx.init if coding is None else coding.canonical_init
    bare = {n: jax.ShapeDtypeStruct(shapes[n], x.dtype) for n, x in params.items()}
    return jax.eval_shape(init, bare)


def fit(
    x: jax.Array, shape: tuple[int, ...], rows: LayerRows | None, *, to_rows: bool
) -> jax.Array:
    """Traced: an array cut, or padded with zeros, to a shape, its rows in their places."""
    if rows is not None and not to_rows:
        x = _layers_in_order(x, rows)
    sizes = shape if rows is None else (x.shape[0], *shape[1:])
    widths = [(0, new - old, 0) for new, old in zip(sizes, x.shape, strict=True)]
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), widths)
    return _layers_in_rows(x, rows) if rows is not None and to_rows else x


def _layers_in_rows(x: jax.Array, rows: LayerRows) -> jax.Array:
    """[layers, ...] -> [rows, ...]; rows without a layer are zeros."""
    layers = np.asarray(rows.rows)
    taken = _take(x, np.maximum(layers, 0), rows.sharding)
    if layers.min() >= 0:
        return taken
    held = (layers >= 0).reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.where(held, taken, jnp.zeros((), x.dtype))


def _layers_in_order(x: jax.Array, rows: LayerRows) -> jax.Array:
    """[rows, ...] -> [layers, ...]; the inverse of `_layers_in_rows`."""
    layers = np.asarray(rows.rows)
    return _take(x, np.argsort(layers)[np.sum(layers < 0) :], rows.sharding)


def _take(x: jax.Array, indices: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """x[indices], which every device does for its part of all rows.

    Left to itself the compiler gathers each stack whole on every device (XLA of JAX 0.10 and 0.12,
    on CPU).
    """
    x = jax.lax.with_sharding_constraint(x, sharding)
    taken = x.at[indices].get(mode="promise_in_bounds")
    return jax.lax.with_sharding_constraint(taken, sharding)
