"""Decides whether an optimizer updates padded arrays or arrays of unpadded shapes; raises if it can
do neither."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.typing import DTypeLike

from zerojax.config.tree_types import Tree
from zerojax.optim import (
    EXTRA_ARGUMENTS,
    OnTrueShapes,
    Optimizer,
    trace_update,
    why_padding_shows,
    with_raw_keys,
)
from zerojax.optim.precision import Precision
from zerojax.placement.leaf_placement import LeafPlacement
from zerojax.placement.state import StageRows, fit
from zerojax.placement.table import Placement

Structs = dict[str, jax.ShapeDtypeStruct]


def fit_padding(
    tx: optax.GradientTransformation,
    params: Mapping[str, Any],
    placement: Placement,
    precision: Precision,
    mesh: Mesh | AbstractMesh,
    *,
    stacks: Collection[str],
) -> tuple[optax.GradientTransformation, list[str]]:
    """Adapts an optimizer so that padding does not change its results.

    Padding with zeros has no effect on zerojax's own optimizers. Any other optimizer either is
    proven to be unaffected by padding, or updates arrays of unpadded shapes.

    Args:
      tx: the optimizer.
      params: all parameters, as structs.
      placement: placement table.
      precision: dtypes of the run.
      mesh: the device mesh.
      stacks: names of parameters whose dimension 0 is layers.

    Returns:
      (the optimizer, lines for the plan).

    Raises:
      ValueError: the update needs inputs that a step does not provide, or does not return what
        optax specifies.
    """
    if isinstance(tx, Optimizer):
        return tx, []
    leaves = {name: leaf for name, leaf in sorted(placement.leaves.items()) if not leaf.frozen}
    dtypes = {name: _dtype(params[name].dtype, precision) for name in leaves}
    true = {name: jax.ShapeDtypeStruct(leaf.shape, dtypes[name]) for name, leaf in leaves.items()}
    layers = frozenset(name for name in stacks if name in leaves)
    fitted, traced = _fit_keywords(tx, true, layers)
    tx = with_raw_keys(fitted, true)
    dims = {name: _padded_dims(leaf) for name, leaf in leaves.items()}
    if not any(dims.values()):
        return tx, []
    stored = {
        name: jax.ShapeDtypeStruct(leaf.stored_shape, dtypes[name]) for name, leaf in leaves.items()
    }
    has_empty_rows = any(-1 in (leaf.layer_rows or ()) for leaf in leaves.values())
    why = why_padding_shows(
        tx,
        true,
        stored,
        dims,
        layers,
        stays_zero=has_empty_rows,
        traced=traced if tx is fitted else None,
    )
    if why is None:
        return tx, []
    changed = {name: leaf for name, leaf in leaves.items() if dims[name]}
    both = _Forms(changed, placement.axis_sizes, mesh)
    shapes = {name: x.shape for name, x in stored.items()}
    return (
        OnTrueShapes(tx, true, shapes, cut=both.cut, pad=both.pad),
        [_describe(changed, why)],
    )


def _dtype(dtype: DTypeLike, precision: Precision) -> Any:
    return precision.param_dtype if jnp.issubdtype(dtype, jnp.floating) else dtype


def _padded_dims(leaf: LeafPlacement) -> frozenset[int]:
    """Returns the dimensions whose stored size differs from the unpadded size."""
    sizes = enumerate(zip(leaf.shape, leaf.stored_shape, strict=True))
    return frozenset(at for at, (one, other) in sizes if one != other) | (
        {0} if leaf.has_rows else frozenset()
    )


def _describe(changed: Mapping[str, LeafPlacement], why: str) -> str:
    name, leaf = next(iter(changed.items()))
    moved = [name for name, leaf in changed.items() if leaf.has_rows]
    line = (
        f"the optimizer's update is not proven to be elementwise ({why}), so it runs on arrays of "
        f"their unpadded shapes: {len(changed)} arrays are stored padded or reordered, such as "
        f"{name} "
        f"{list(leaf.shape)} as {list(leaf.stored_shape)}"
    )
    if moved:
        line += (
            f"; the layers of {len(moved)} are exchanged between pipeline stages in every step, "
            "with gradients and optimizer state (zerojax.adamw, lion, lamb and sgd avoid this)"
        )
    return line


class _Forms:
    """Converts parameters, gradients and moments between unpadded and stored shapes; traced."""

    def __init__(
        self,
        leaves: Mapping[str, LeafPlacement],
        axis_sizes: Mapping[str, int],
        mesh: Mesh | AbstractMesh,
    ) -> None:
        self._leaves = leaves
        # Also for the true shape: the compiler splits uneven dimensions as if they were padded, so
        # that each device has the same part of both.
        self._lies = {name: NamedSharding(mesh, leaf.stored_spec) for name, leaf in leaves.items()}
        self._rows = {
            name: StageRows(leaf.layer_rows, NamedSharding(mesh, leaf.reorder_spec(axis_sizes)))
            for name, leaf in leaves.items()
            if leaf.has_rows and leaf.layer_rows is not None
        }

    def cut(self, name: str, x: jax.Array) -> jax.Array:
        return self._fit(name, x, to_rows=False)

    def pad(self, name: str, x: jax.Array) -> jax.Array:
        return self._fit(name, x, to_rows=True)

    def _fit(self, name: str, x: jax.Array, *, to_rows: bool) -> jax.Array:
        if name not in self._leaves:
            return x
        leaf = self._leaves[name]
        shape = leaf.stored_shape if to_rows else leaf.shape
        x = lax.with_sharding_constraint(x, self._lies[name])
        x = fit(x, shape, self._rows.get(name), to_rows=to_rows)
        return lax.with_sharding_constraint(x, self._lies[name])


def _fit_keywords(
    tx: optax.GradientTransformation, true: Structs, layers: frozenset[str]
) -> tuple[optax.GradientTransformation, ClosedJaxpr]:
    """Removes the keywords that steps do not provide from an optimizer's update, and traces the
    update.

    Returns:
      (the transformation, its traced update).

    Raises:
      ValueError: the update needs a keyword that a step does not provide, fails on these
        parameters, or returns other shapes than those of its arguments.
    """
    refused: frozenset[str] = frozenset()
    while True:
        fitted = _without_keywords(tx, refused) if refused else tx
        try:
            state = jax.eval_shape(fitted.init, true)
            found = trace_update(fitted, true, layers)
            break
        except Exception as error:
            name = re.search(r"got an unexpected keyword argument '(\w+)'", str(error))
            if name is None or name[1] in refused or name[1] not in EXTRA_ARGUMENTS:
                raise ValueError(_why_not(error)) from error
            refused |= {name[1]}
    wanted = [x.shape for x in (*jax.tree.leaves(true), *jax.tree.leaves(state))]
    results: Sequence[Any] = found.out_avals
    shapes = [x.shape for x in results]
    if wanted != shapes:
        at = next((i for i, (a, b) in enumerate(zip(wanted, shapes)) if a != b), None)  # noqa: B905
        what = (
            f"{len(wanted)} arrays become {len(shapes)}"
            if at is None
            else f"an array {list(wanted[at])} becomes {list(shapes[at])}"
        )
        raise ValueError(
            f"the optimizer's update changes shapes ({what}): it must return updates of the "
            "parameters' shapes, and a state of the shapes that init returned. Transformations "
            "of per-example gradients are not supported"
        )
    return fitted, found


def _without_keywords(
    tx: optax.GradientTransformation, refused: frozenset[str]
) -> optax.GradientTransformationExtraArgs:
    inner = optax.with_extra_args_support(tx)

    def update(updates: Tree, state: Tree, params: Tree = None, **extra: Any) -> tuple[Any, Any]:
        taken = {name: x for name, x in extra.items() if name not in refused}
        return inner.update(updates, state, params, **taken)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _why_not(error: Exception) -> str:
    words = " ".join(str(error).split())
    missing = re.search(
        r"missing \d+ required (?:keyword-only|positional) arguments?: (.*)$", words
    )
    if missing:
        return (
            f"the optimizer needs {missing[1]} at every update, but a step provides only "
            "`value` (the mean "
            "loss), `grad` and `grad_norm` of one forward and one backward pass, and does not "
            "compute the loss again at other parameters (linesearches, Hessians): use an optimizer "
            "without these arguments, such as zerojax.adamw"
        )
    if isinstance(error, AttributeError) and error.name in ("fast", "slow"):
        return (
            "optax.lookahead updates two copies of the parameters in a tree of its own "
            "(optax.LookaheadParams), which a model does not have; pass only its inner optimizer, "
            "or keep an average of the weights: zerojax.with_ema(INNER, 0.999)"
        )
    remedy = "use another optimizer, such as zerojax.adamw"
    if re.search(r"pytree|tree structure|[Dd]ict key mismatch|node type", words):
        remedy = (
            "a mask, or labels, must be a function of the trained parameters, mask=lambda params: "
            "jax.tree.map(lambda x: x.ndim > 1, params), or a tree like theirs, which for an nnx "
            "model is nnx.to_pure_dict(nnx.state(model, nnx.Param))"
        )
    elif "no corresponding transformation" in words:
        remedy = "give each label a transformation"
    return (
        f"the optimizer cannot update these parameters: {type(error).__name__}: {words[:400]}; "
        f"{remedy}"
    )
