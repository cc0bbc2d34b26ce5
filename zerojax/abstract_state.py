"""The training state before arrays exist: every leaf's shape, dtype and sharding.

Knows the placement table, dtypes and the optimizer's `init`; never a model or a batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import loss_scale, trees
from zerojax.optim import Optimizer, coding_of, depends_on_sizes
from zerojax.placement import LeafPlacement, Placement
from zerojax.precision import Precision
from zerojax.state import TrainState

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
    """The state as `ShapeDtypeStruct`s: padded as stored, or in its canonical form.

    Raises:
      ValueError: the optimizer cannot do with how a pipeline stores parameters.
    """

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
    if not canonical:
        _check_padding(tx, placement, trained)
    state = TrainState(
        step=counter,
        skipped=counter,
        rng=replicate(jax.ShapeDtypeStruct((2,), jnp.uint32)),
        params=trained,
        frozen={name: placed[name] for name in placed if name in frozen},
        opt_state=_opt_state(tx, trained, replicate, sizes, canonical=canonical),
        extras={name: replicate(leaf) for name, leaf in extras.items()},
        loss_scale=jax.tree.map(replicate, _loss_scale(precision)),
    )
    if not canonical:
        rows_of_state(placement, tx, state)  # refuses before there are arrays
    return state


def canonical_opt_state(
    tx: optax.GradientTransformation, trained: Mapping[str, jax.ShapeDtypeStruct]
) -> Tree:
    """The optimizer's state in its canonical form, over parameters of any shape and sharding."""
    mesh = next(iter(trained.values())).sharding.mesh

    def replicate(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, P()))

    return _opt_state(tx, trained, replicate, {}, canonical=True)


def _check_padding(
    tx: optax.GradientTransformation, placement: Placement, trained: Mapping[str, Any]
) -> None:
    """Refuses an optimizer to which rows without a layer are not the same as no rows.

    Those of zerojax take zeros for nothing.
    """
    rows = {name: placement.leaves[name].layer_rows or () for name in trained}
    if isinstance(tx, Optimizer) or not any(-1 in layers for layers in rows.values()):
        return
    without = {
        name: jax.ShapeDtypeStruct((x.shape[0] - rows[name].count(-1), *x.shape[1:]), x.dtype)
        if rows[name]
        else x
        for name, x in trained.items()
    }
    if depends_on_sizes(tx, dict(trained), without):
        raise ValueError(
            "the optimizer asks how large arrays are (for a mean, or to scale the update of a "
            "matrix), and where pipeline stages have unequal layers the arrays are padded with "
            'zeros; divide the layers evenly (partition="uniform"), or use adamw, lion, lamb, sgd '
            "or adam8bit of zerojax, or stage=1"
        )


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

    return _map_params(tx, like, state, trained, others=replicate)


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

    Raises:
      ValueError: the optimizer keeps an array in which layers are not dimension 0.
    """
    arrays = stored["params"] | stored["frozen"]
    params: dict[str, LayerRows | None] = dict.fromkeys(arrays)
    for name, leaf in placement.leaves.items():
        if leaf.layer_rows is not None and leaf.layer_rows != tuple(range(leaf.shape[0])):
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
    """`LayerRows` of an optimizer's state: its leaves that grow with a parameter's dimension 0."""
    shapes = {name: tuple(x.shape) for name, x in trained.items()}
    larger = {n: (s[0] + 1, *s[1:]) if rows[n] else s for n, s in shapes.items()}
    state, grown = (_init_shapes(tx, each, trained) for each in (shapes, larger))
    names = _map_params(
        tx, lambda _, name: name, state, {name: name for name in trained}, others=lambda _: ""
    )

    def of_leaf(leaf: Any, more: Any, name: str) -> LayerRows | None:
        found = rows.get(name)
        if found is None or leaf.shape == more.shape:
            return None
        if leaf.ndim != more.ndim or leaf.shape[1:] != more.shape[1:]:
            raise ValueError(
                f"the optimizer keeps an array {list(leaf.shape)} for {name} {list(shapes[name])} "
                "in which the layers are not dimension 0, so the pipeline cannot store its rows; "
                "use another optimizer, or stage=1"
            )
        if leaf.shape == shapes[name]:
            return found
        return LayerRows(found.rows, NamedSharding(found.sharding.mesh, P()))

    leaves = zip(*map(jax.tree.leaves, (state, grown, names)), strict=True)
    return jax.tree.structure(state).unflatten([of_leaf(*each) for each in leaves])


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


def _map_params(
    tx: optax.GradientTransformation,
    function: Callable[[Any, Any], Any],
    state: Tree,
    of_params: Tree,
    *,
    others: Callable[[Any], Any],
) -> Tree:
    """A function of each leaf that belongs to a parameter and of something of that parameter.

    All other leaves are given to `others`. A parameter that a part of the optimizer leaves to
    another part has no leaf there.
    """
    coding = coding_of(tx)
    return optax.tree_utils.tree_map_params(
        tx.init if coding is None else coding.canonical_init,
        lambda leaf, of_param: leaf if _is_masked(leaf) else function(leaf, of_param),
        state,
        of_params,
        transform_non_params=others,
        is_leaf=_is_masked,
    )


def _is_masked(leaf: Any) -> bool:
    return isinstance(leaf, optax.MaskedNode)
