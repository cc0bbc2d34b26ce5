"""Stacks equal layers to one module, and applies it by a scan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from zerojax.config.tree_types import Tree
from zerojax.operators.chunked_attention import KEPT

Layer = TypeVar("Layer", bound=nnx.Module)

# Policies for the values of a layer that are saved for the backward pass; the rest is recomputed.
# All policies except "none" discard gathered weights, which are not outputs of a dot product.
_ATTENTION = jax.checkpoint_policies.save_only_these_names(KEPT)
REMAT_POLICIES: Mapping[str, Callable[..., bool] | None] = {
    "full": None,
    "attention": _ATTENTION,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _ATTENTION
    ),
}
REMAT_NAMES = ("none", *REMAT_POLICIES)


def check_remat(remat: str) -> None:
    """Raises ValueError if `remat` is not a policy of `scan_blocks`."""
    if remat not in REMAT_NAMES:
        raise ValueError(f"remat={remat!r} is unknown; use one of {', '.join(REMAT_NAMES)}")


def stack_blocks(build: Callable[[nnx.Rngs], Layer], num_layers: int, *, rngs: nnx.Rngs) -> Layer:
    """Builds `num_layers` layers as one module whose arrays have a leading dimension of that size.

    Each layer gets separate random keys for its initial values and its dropout.
    """
    return nnx.vmap(build, in_axes=0, out_axes=0)(rngs.split(num_layers))


def stack_modules(layers: Sequence[Layer]) -> Layer:
    """Stacks existing layers to one module whose arrays have a leading dimension [layers, ...].

    Raises:
      ValueError: there are no layers, or they differ in more than the contents of their arrays.
    """
    if not layers:
        raise ValueError("no layers to stack: the list is empty; use at least one layer")
    parts = [nnx.split(layer) for layer in layers]
    graphdef, first = parts[0]
    for index, (other, state) in enumerate(parts):
        if other != graphdef or _shapes(state) != _shapes(first):
            raise ValueError(
                f"layers 0 and {index} differ: {_difference(first, state)}. Stacked layers must "
                "have the same structure, shapes and settings; build a block that contains one "
                "layer of each kind, and stack such blocks"
            )
    stacked = jax.tree.map(lambda *values: jnp.stack(values), *(state for _, state in parts))
    return nnx.merge(graphdef, stacked)


def _shapes(state: nnx.State) -> dict[str, str]:
    return {
        "/".join(map(str, path)): f"{value.dtype}{value.shape}"
        for path, value in _raw_values(state).items()
    }


def _difference(first: nnx.State, second: nnx.State) -> str:
    """Describes the first array in which two layers differ."""
    ours, theirs = _shapes(first), _shapes(second)
    for name in sorted({*ours, *theirs}):
        if ours.get(name) != theirs.get(name):
            return f"{name} is {ours.get(name, 'missing')} and {theirs.get(name, 'missing')}"
    return "they have the same arrays, but their modules differ in class or settings"


def scan_blocks(
    blocks: nnx.Module,
    x: Tree,
    *,
    remat: str,
    kind_of_layer: Sequence[int] | None = None,
    shared: tuple[Any, ...] = (),
) -> Any:
    """Applies stacked layers in sequence; the size of the program does not grow with depth.

    A layer is built from its slice (`nnx.merge`) inside the loop and inside the checkpoint. So a
    parameter is read (and gathered) inside the loop, for each layer, and again in the backward
    pass.

    Args:
      blocks: layers stacked by `stack_blocks`; their random counts advance in place.
      x: input of the first layer: an array, such as [batch, seq, embed], or a pytree of arrays.
      remat: "none" saves every residual; "full" saves only `x` of each layer; "attention" also
        saves the output of attention in chunks or by cuDNN, which is then not recomputed; "dots"
        saves the same, and the outputs of matrix products of activations with weights.
      kind_of_layer: one integer per layer, passed to the layer as its second argument; None: layers
        are called without this argument. The loop slices it like parameters.
      shared: further arguments of every layer, such as an encoded source; stored once, not for
        each layer.

    Raises:
      ValueError: a layer changes the shape or dtype of `x`.
    """
    graphdef, params, rest = nnx.split(blocks, nnx.Param, ...)
    kinds = () if kind_of_layer is None else (np.asarray(kind_of_layer, np.int32),)

    def layer(x: Tree, slices: tuple[Any, ...]) -> tuple[Any, nnx.State]:
        params, rest, *kind = slices
        before = _raw_values(rest)
        block = nnx.merge(graphdef, params, rest)
        y = block(x, *kind, *shared)  # type: ignore[operator]
        _check_unchanged(x, y, type(block).__name__)
        _, _, after = nnx.split(block, nnx.Param, ...)
        return y, _changed(before, after)

    if remat != "none":
        # prevent_cse stops XLA from merging the recomputation; the body of a scan does not need it.
        layer = jax.checkpoint(layer, policy=REMAT_POLICIES[remat], prevent_cse=False)
    x, changed = lax.scan(layer, x, (params, rest, *kinds))
    if jax.tree.leaves(changed):
        nnx.update(blocks, changed)
    return x


def _check_unchanged(before: Tree, after: Tree, layer: str) -> None:
    form = lambda leaf: f"{jnp.result_type(leaf)}{jnp.shape(leaf)}"  # noqa: E731
    forms = [jax.tree.map(form, x) for x in (before, after)]
    if forms[0] != forms[1]:
        raise ValueError(
            f"{layer} changes {forms[0]} to {forms[1]}, but its output is the input of the next "
            "layer; keep shape and dtype of the input (for the dtype, end the layer with "
            ".astype(x.dtype))"
        )


def _raw_values(state: nnx.State) -> dict[tuple[Any, ...], Any]:
    return {path: _raw_value(leaf) for path, leaf in nnx.to_flat_state(state)}


def _raw_value(leaf: Tree) -> Any:
    """Returns the stored value of a variable, or the leaf itself if it is a plain array."""
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def _changed(before: Mapping[tuple[Any, ...], Any], after: nnx.State) -> nnx.State:
    """Returns the variables to which a layer has written; none in evaluation."""
    # Values cannot be compared in a trace, but what was not written is still the same object.
    written = [
        (path, leaf)
        for path, leaf in nnx.to_flat_state(after)
        if _raw_value(leaf) is not before[path]
    ]
    return nnx.from_flat_state(written)
