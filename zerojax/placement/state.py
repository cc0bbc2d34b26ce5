"""The training state, and its abstract form: shape, dtype and sharding of every array.

"step" counts the batches that the training loop has consumed, so the position in the data follows
from it. The number of applied updates is `step - skipped`; optax's own counts are equal to it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any, NotRequired, SupportsIndex, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from zerojax import tracing
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.mesh import DEVICE
from zerojax.config.tree_types import Tree
from zerojax.models.from_nnx import NnxModel
from zerojax.models.given_arrays import as_arrays, check_arrays
from zerojax.optim import coding_of, loss_scale, map_state
from zerojax.optim.precision import Precision
from zerojax.placement.leaf_placement import LeafPlacement
from zerojax.placement.slices import abstract_tiers, map_moments, on_host
from zerojax.placement.state_layout import OffloadLayout, SlicedLeaf
from zerojax.placement.table import Placement
from zerojax.tracing import trees
from zerojax.tracing.trees import path_name

ONE_BIT = "one_bit"
"""Key of the data of 1-bit optimizers in a state and in the names of a checkpoint."""
COPIES = "copies"
"""Key of the weight copies of `wire.weights=delta_int8` and `delta_int4` in a state and in the
names of a checkpoint."""
DELAYED = "delayed"
"""Key of the gradients that wait for their update (`offload.delayed_update` and
`update_in_forward`) in a state, and with `delayed_update` in the names of a checkpoint."""
MESH_PARTS = (ONE_BIT, COPIES)
"""Parts that depend on the mesh, so that they begin anew on another one."""
OPTIONAL_PARTS = (*MESH_PARTS, DELAYED)
"""Parts that only some states have, and that are no parameters, moments or user's arrays."""


class TrainState(TypedDict):
    """The whole training state of a run, which is donated to each step.

    Optional features of a run add parts of their own (`feature_parts`).

    Fields:
      step: int32 [], number of consumed batches.
      skipped: int32 [], number of steps with non-finite gradients, which changed nothing else.
      rng: uint32, [2] under JAX's default `jax_default_prng_impl`; key data of the run's PRNG key,
        from which the keys of steps are folded.
      params: {name: array}, the trained weights (float32 master weights unless the precision says
        otherwise), padded as in the placement table. For a parameter whose optimizer state is
        offloaded, the copy in the compute dtype that forward and backward read.
      frozen: {name: array}, parameters without gradient, in the precision's `frozen_dtype`; uint8
        for quantized parameters.
      opt_state: the optimizer's state for `params`; each moment of an offloaded parameter is
        {memory: array}, like its master weight.
      extras: {name: array}, the model's other state (batch statistics, random counts), replicated.
      loss_scale: counters of `zerojax.optim.loss_scale`; {} if the loss is not scaled.
      masters: only with offload: {name: {memory: float32 [slices of all shards, elements]}} of the
        offloaded parameters.
      disk: only with offload: handle of the slices in files, a tree node without arrays; {} without
        files.
      one_bit: only with a 1-bit optimizer: its errors and counters
        (`zerojax.features.one_bit.sign_plan`).
      copies: only if weights are sent as codes of their difference: {key: {name: weight in the
        compute dtype}}, unsharded on every device, which are the weights that the last step read. A
        skipped step updates them, too, although it changes no master weight.
      delayed: only with `offload.delayed_update` or `update_in_forward`: "grads" {name: gradient of
        the last step}, placed like the parameter, and of the same step "scale" (float32 [], their
        factor, clipping included), "skip" (bool [], whether they are not used) and "key" (its key
        data).
    """

    step: Any
    skipped: Any
    rng: Any
    params: dict[str, Any]
    frozen: dict[str, Any]
    opt_state: Tree
    extras: dict[str, Any]
    loss_scale: dict[str, Any]
    masters: NotRequired[dict[str, Any]]
    disk: NotRequired[Any]
    one_bit: NotRequired[dict[str, Any]]
    copies: NotRequired[dict[str, Any]]
    delayed: NotRequired[dict[str, Any]]


def feature_parts(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the parts of a state that optional features added, {part: {name: array like that of
    the parameter}}."""
    return {part: x for part, x in state.items() if part not in TrainState.__annotations__}


def step_key(rng: jax.Array, step: jax.Array) -> jax.Array:
    """Returns the PRNG key of one step, folded from stored key data; the same on every device."""
    return jax.random.fold_in(jax.random.wrap_key_data(rng), step)


def as_seed(seed: SupportsIndex) -> int:
    """Converts a seed to an integer.

    Raises:
      TypeError: the seed is not an integer.
      ValueError: the seed does not fit into 64 bits.
    """
    try:
        number = operator.index(seed)
    except TypeError:
        raise TypeError(f"seed={seed!r} is not an integer; use an integer, as in seed=0") from None
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"seed={number} does not fit into 64 bits; use 0 to {2**63 - 1}")
    return number


def run_key_data(seed: int) -> jax.Array:
    """Returns the stored key data of a run's seed: uint32, of shape [2] by default and [4] for
    "rbg" keys.

    Raises:
      TypeError: the seed is not an integer.
      ValueError: the seed does not fit into 64 bits.
    """
    return jax.random.key_data(jax.random.key(as_seed(seed)))


def zero_counter() -> jax.Array:
    """Returns a counter at 0, as an int32 scalar array."""
    return jnp.zeros((), jnp.int32)


@dataclass(frozen=True)
class StageRows:
    """Order of dimension 0 of an array that a pipeline splits, as stored and in checkpoints.

    Attributes:
      rows: layer in each stored row, -1 for a row of padding.
      sharding: sharding of the array in its stored shape, used while rows are reordered.
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
    portable: bool,
) -> TrainState:
    """Returns the training state as `ShapeDtypeStruct`s: padded as the run stores it, or in the
    portable form of checkpoints."""

    def place(leaf: LeafPlacement) -> jax.ShapeDtypeStruct:
        shape = leaf.kept_shape if portable else leaf.stored_shape
        spec = leaf.canonical_spec(placement.axis_sizes) if portable else leaf.stored_spec
        floating = jnp.issubdtype(params[leaf.name].dtype, jnp.floating)
        kept = precision.frozen_dtype if leaf.frozen else precision.param_dtype
        dtype = kept if floating else params[leaf.name].dtype
        dtype = jnp.uint8 if leaf.codes is not None else dtype
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def replicate(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, P()))

    placed = {name: place(leaf) for name, leaf in placement.leaves.items()}
    frozen = {name for name, leaf in placement.leaves.items() if leaf.frozen}
    trained = {name: leaf for name, leaf in placed.items() if name not in frozen}
    sizes = {name: trees.num_elements(placement.leaves[name].shape) for name in trained}
    counter = replicate(jax.ShapeDtypeStruct((), jnp.int32))
    return TrainState(
        step=counter,
        skipped=counter,
        rng=replicate(jax.eval_shape(lambda: run_key_data(0))),
        params=trained,
        frozen={name: placed[name] for name in placed if name in frozen},
        opt_state=_opt_state(tx, trained, replicate, sizes, portable=portable),
        extras={name: replicate(leaf) for name, leaf in extras.items()},
        loss_scale=jax.tree.map(replicate, _loss_scale(precision)),
    )


def portable_opt_state(
    tx: optax.GradientTransformation, trained: Mapping[str, jax.ShapeDtypeStruct]
) -> Tree:
    """Returns the optimizer's state in the form of checkpoints, for parameters of any shape and
    sharding."""
    mesh = next(iter(trained.values())).sharding.mesh

    def replicate(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, P()))

    return _opt_state(tx, trained, replicate, {}, portable=True)


def _loss_scale(precision: Precision) -> dict[str, Any]:
    if precision.loss_scale is None:
        return {}
    return jax.eval_shape(lambda: loss_scale.init(precision.loss_scale))


def _opt_state(
    tx: optax.GradientTransformation,
    trained: Mapping[str, Any],
    replicate: Callable[[jax.ShapeDtypeStruct], jax.ShapeDtypeStruct],
    sizes: Mapping[str, int],
    *,
    portable: bool,
) -> Tree:
    """Returns the abstract optimizer state, in which arrays with a parameter's shape have its
    sharding."""
    coding = coding_of(tx)
    if coding is not None and not portable:
        return coding.abstract_state(trained, sizes)
    state = _init_shapes(tx, {name: x.shape for name, x in trained.items()}, trained)

    def like(leaf: jax.ShapeDtypeStruct, param: jax.ShapeDtypeStruct) -> Any:
        if tuple(leaf.shape) != tuple(param.shape):
            return replicate(leaf)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=param.sharding)

    return map_state(tx, like, state, trained, others=replicate)


def rows_of_state(
    placement: Placement,
    tx: optax.GradientTransformation,
    stored: TrainState,
) -> TrainState | None:
    """Finds the arrays of a state whose rows have another order in checkpoints than in the run.

    Args:
      placement: placement table.
      tx: the optimizer.
      stored: abstract state as the run stores it.

    Returns:
      The state's tree with `StageRows` for such arrays and None for others; None if there are no
      such arrays.
    """
    arrays = stored["params"] | stored["frozen"]
    params: dict[str, StageRows | None] = dict.fromkeys(arrays)
    for name, leaf in placement.leaves.items():
        if leaf.has_rows:
            assert leaf.layer_rows is not None
            spec = leaf.reorder_spec(placement.axis_sizes)
            sharding = NamedSharding(arrays[name].sharding.mesh, spec)
            params[name] = StageRows(leaf.layer_rows, sharding)
    if not any(params.values()):
        return None
    result: Tree = jax.tree.map(lambda _: None, stored)
    result["params"], result["frozen"] = (
        {name: params[name] for name in stored[part]} for part in ("params", "frozen")
    )
    for part, arrays in feature_parts(stored).items():
        result[part] = {name: params[name] for name in arrays}
    if DELAYED in stored:
        result[DELAYED] |= {"grads": {name: params[name] for name in stored[DELAYED]["grads"]}}
    result["opt_state"] = _opt_state_rows(tx, stored["params"], params)
    return result


def _opt_state_rows(
    tx: optax.GradientTransformation,
    trained: Mapping[str, Any],
    rows: Mapping[str, StageRows | None],
) -> Tree:
    """Returns `StageRows` for the arrays of the optimizer's state that are stored like a parameter.

    Other arrays are the same in the run and in checkpoints (see `zerojax.plan.optimizer_shapes`).
    """
    shapes = {name: tuple(x.shape) for name, x in trained.items()}

    def of_leaf(leaf: jax.ShapeDtypeStruct, name: str) -> StageRows | None:
        return rows[name] if tuple(leaf.shape) == shapes[name] else None

    state = _init_shapes(tx, shapes, trained)
    return map_state(tx, of_leaf, state, {n: n for n in trained}, others=lambda _: None)


def _init_shapes(
    tx: optax.GradientTransformation,
    shapes: Mapping[str, tuple[int, ...]],
    params: Mapping[str, Any],
) -> Tree:
    """Returns the abstract optimizer state in checkpoint form, for parameters of these shapes."""
    coding = coding_of(tx)
    init = tx.init if coding is None else coding.portable_init
    bare = {n: jax.ShapeDtypeStruct(shapes[n], x.dtype) for n, x in params.items()}
    return jax.eval_shape(init, bare)


def fit(
    x: jax.Array, shape: tuple[int, ...], rows: StageRows | None, *, to_rows: bool
) -> jax.Array:
    """Truncates an array, or pads it with zeros, to a shape, and reorders its rows; in a traced
    function."""
    if rows is not None and not to_rows:
        x = _layers_in_order(x, rows)
    sizes = shape if rows is None else (x.shape[0], *shape[1:])
    widths = [(0, new - old, 0) for new, old in zip(sizes, x.shape, strict=True)]
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), widths)
    return _layers_in_rows(x, rows) if rows is not None and to_rows else x


def _layers_in_rows(x: jax.Array, rows: StageRows) -> jax.Array:
    """Converts [layers, ...] to [rows, ...], with zeros in rows without a layer."""
    layers = np.asarray(rows.rows)
    taken = _take(x, np.maximum(layers, 0), rows.sharding)
    if layers.min() >= 0:
        return taken
    held = (layers >= 0).reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.where(held, taken, jnp.zeros((), x.dtype))


def _layers_in_order(x: jax.Array, rows: StageRows) -> jax.Array:
    """Converts [rows, ...] to [layers, ...]; the inverse of `_layers_in_rows`."""
    layers = np.asarray(rows.rows)
    return _take(x, np.argsort(layers)[np.sum(layers < 0) :], rows.sharding)


def _take(x: jax.Array, indices: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Returns x[indices] with a sharding in which every device computes it for its part of all
    rows.

    Without this sharding the compiler gathers each whole stack on every device (XLA of JAX 0.10 and
    0.12, on CPU).
    """
    x = jax.lax.with_sharding_constraint(x, sharding)
    taken = x.at[indices].get(mode="promise_in_bounds")
    return jax.lax.with_sharding_constraint(taken, sharding)


def abstract(tree: Tree) -> Tree:
    """Converts arrays, numbers or structs to `ShapeDtypeStruct`s with JAX's dtypes.

    Raises:
      TypeError: the tree contains something else than arrays of numbers.
    """
    tree = as_arrays(tree)
    check_arrays(tree)

    def one(leaf: Any) -> jax.ShapeDtypeStruct:
        if not hasattr(leaf, "shape"):
            leaf = np.asarray(leaf)
        return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))

    return jax.tree.map(one, tree)


def slice_batch(batch: Tree, parts: int, precision: Precision, exact: Collection[str] = ()) -> Tree:
    """Returns the structs of one part of a batch as a step passes it to the loss.

    A part has 1/`parts` of the rows; see `dtype_in_loss` for its dtypes.

    Args:
      exact: names of the leaves whose exact values matter (`TracedLoss.exact_leaves`).
    """

    def part(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        dtype = dtype_in_loss(leaf.dtype, precision, is_exact=path_name(path) in exact)
        return jax.ShapeDtypeStruct((leaf.shape[0] // parts, *leaf.shape[1:]), dtype)

    return jax.tree_util.tree_map_with_path(part, batch)


def dtype_in_loss(dtype: DTypeLike, precision: Precision, *, is_exact: bool) -> Any:
    """Returns the dtype in which the loss gets a leaf of the batch.

    Floating-point arrays are cast to the compute dtype, except those whose exact values matter and
    which this cast would round.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        return dtype
    is_rounded = jnp.promote_types(dtype, precision.compute_dtype) != precision.compute_dtype
    return dtype if is_exact and is_rounded else precision.compute_dtype


def abstract_model(model: tracing.Model, batch: Tree, loss: tracing.Loss) -> tuple[dict, dict]:
    """Returns the parameters and the other state of a model as `ShapeDtypeStruct`s: ({name:
    parameter}, {name: other array}).

    Raises:
      ValueError: the model has no parameters, or complex parameters.
    """
    arrays = model.initial_arrays()
    if arrays is not None:
        params, extras = (dict(abstract(part)) for part in arrays)
    elif isinstance(model, NnxModel):
        params, extras = model.abstract_arrays()
    else:
        params, extras = jax.eval_shape(
            lambda batch: model.init(jax.random.key(0), batch, loss), batch
        )
    if not params:
        raise ValueError(
            f"the {model.kind} has no parameters; pass a model with at least one parameter "
            "(nnx.Param)"
        )
    for name, leaf in params.items():
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise ValueError(f"parameter {name} is {leaf.dtype.name}; use real numbers")
    return params, extras


def as_read(params: Mapping[str, Any], precision: Precision) -> dict[str, Any]:
    """Returns {name: `ShapeDtypeStruct` with the dtype in which the model reads the parameter}."""
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, _dtype_read(leaf, precision))
        for name, leaf in params.items()
    }


def _dtype_read(leaf: jax.ShapeDtypeStruct, precision: Precision) -> Any:
    return precision.compute_dtype if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype


def abstract_offloaded(
    stored: TrainState, layout: OffloadLayout, precision: Precision
) -> TrainState:
    """Returns the state of a run with offload as `ShapeDtypeStruct`s, cut into slices in device and
    host memory.

    Args:
      stored: abstract state with every array uncut on the device.
      layout: slices of each array and their memory.
      precision: dtypes of the run, with the dtype in which weights are read.

    Returns:
      The abstract state; slices and weights in files are not part of it.
    """
    mesh = next(iter(stored["params"].values())).sharding.mesh
    result = stored.copy()
    result["params"] = {
        name: _working(x, name, layout, precision)
        for name, x in stored["params"].items()
        if name not in layout.paged
    }
    masters = layout.leaves if precision.has_masters else {}
    result["masters"] = {
        name: abstract_tiers(leaf, stored["params"][name].dtype, mesh)
        for name, leaf in masters.items()
    }

    result["opt_state"] = map_moments(
        layout.leaves,
        lambda leaf, _, moment: abstract_tiers(leaf, moment.dtype, mesh),
        stored["opt_state"],
    )
    result["disk"] = {}
    return result


def _working(
    x: jax.ShapeDtypeStruct, name: str, layout: OffloadLayout, precision: Precision
) -> jax.ShapeDtypeStruct:
    """Returns shape, dtype and sharding of the array of a parameter that the passes read."""
    if name not in layout.leaves:
        return x
    dtype = jnp.dtype(precision.compute_dtype) if precision.has_masters else x.dtype
    sharding = on_host(x.sharding) if name in layout.streamed else x.sharding
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding)


def portable_on_host(portable: TrainState, layout: OffloadLayout) -> TrainState:
    """Moves the offloaded arrays of a state in checkpoint form to host memory.

    They are the parameters and moments of which `layout` has slices outside device memory.

    Args:
      portable: abstract state in the form of checkpoints.
      layout: offload layout under the user's names.
    """

    def place(leaf: SlicedLeaf, _: int, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(x.sharding.mesh, x.sharding.spec)
        if leaf.counts[DEVICE] < leaf.num_slices:
            sharding = on_host(sharding)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    result = portable.copy()
    result["params"] = map_moments(layout.leaves, place, portable["params"])
    result["opt_state"] = map_moments(layout.leaves, place, portable["opt_state"])
    return result
