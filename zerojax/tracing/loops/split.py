"""Splits a function into forward pass, stored residuals and backward pass.

`jax.vjp` returns a backward pass that contains all its residuals. A pipeline stage runs other
microbatches between the two passes of a microbatch, so it stores residuals in buffers. Only
residuals that depend on the microbatch are stored. Residuals that depend only on the weights (a
copy in another layout, a transpose) are the same for every microbatch and are recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Batch, Tree
from zerojax.tracing.loops.loss_pieces import LossPieces

Arrays = Any
"""Tree of arrays."""


@dataclass(frozen=True)
class SplitPasses:
    """Forward and backward pass of a function, to be traced separately.

    Attributes:
      forward: `(weights, fixed, inputs, context) -> (outputs, rest, stored)`.
      backward: `(weights, fixed, stored, cotangents) -> (gradients of weights, gradients of
        inputs)`.
      stored: shapes of the values stored between the two passes, a tuple of `ShapeDtypeStruct`s.
    """

    forward: Callable[..., tuple[Arrays, Arrays, list[jax.Array]]]
    backward: Callable[..., tuple[Arrays, Arrays]]
    stored: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the stored values."""
        return sum(x.size * x.dtype.itemsize for x in self.stored)


def split_passes(
    function: Callable[..., tuple[Arrays, Arrays]],
    weights: Arrays,
    fixed: Arrays,
    inputs: Arrays,
    context: Arrays,
) -> SplitPasses:
    """Traces a function once and splits its derivative into two passes.

    Args:
      function: `(weights, fixed, inputs, context) -> (outputs, rest)`; `outputs` are differentiated
        with respect to `weights` and `inputs`. Outputs, weights and inputs must be floating-point.
      weights, fixed: arguments that are available in the backward pass, as arrays or
        `ShapeDtypeStruct`s.
      inputs, context: arguments that are not available in the backward pass, as arrays or
        `ShapeDtypeStruct`s.
    """
    vjp_tree: jax.tree_util.PyTreeDef | None = None
    keys: list[Any] = []

    def traced(weights: Arrays, fixed: Arrays, inputs: Arrays, context: Arrays) -> Any:
        nonlocal vjp_tree
        # `vjp` is a pytree: its leaves are the residuals, and its structure is the backward pass.
        outputs, vjp, rest = jax.vjp(
            lambda weights, inputs: function(weights, fixed, inputs, context),
            weights,
            inputs,
            has_aux=True,
        )
        leaves, vjp_tree = jax.tree.flatten(vjp)
        keys[:] = [jax.random.key_impl(x) if _is_key(x) else None for x in leaves]
        # Buffers store numbers, so a key is stored as its data.
        data = [jax.random.key_data(x) if _is_key(x) else x for x in leaves]
        return (outputs, rest), data

    arguments = (weights, fixed, inputs, context)
    program, shape = jax.make_jaxpr(traced, return_shape=True)(*arguments)
    results_tree = jax.tree.structure(shape[0])
    num_results = results_tree.num_leaves
    num_again = len(jax.tree.leaves((weights, fixed)))
    leaves: list[Any] = program.jaxpr.outvars[num_results:]
    fresh = _depending_on(program, program.jaxpr.invars[num_again:])
    is_stored = [not isinstance(leaf, Literal) and leaf in fresh for leaf in leaves]
    again = _restricted(
        program, num_again, [leaf for leaf, s in zip(leaves, is_stored, strict=True) if not s]
    )

    def forward(*operands: Arrays) -> tuple[Arrays, Arrays, list[jax.Array]]:
        values = jaxpr_as_fun(program)(*jax.tree.leaves(operands))
        outputs, rest = results_tree.unflatten(values[:num_results])
        held = values[num_results:]
        return outputs, rest, [x for x, keep in zip(held, is_stored, strict=True) if keep]

    def backward(
        weights: Arrays, fixed: Arrays, stored: Sequence[jax.Array], cotangents: Arrays
    ) -> tuple[Arrays, Arrays]:
        kept, made = iter(stored), iter(again(*jax.tree.leaves((weights, fixed))))
        held = [next(kept) if keep else next(made) for keep in is_stored]
        typed = [
            x if impl is None else jax.random.wrap_key_data(x, impl=impl)
            for x, impl in zip(held, keys, strict=True)
        ]
        return jax.tree.unflatten(vjp_tree, typed)(cotangents)

    stored = tuple(
        jax.ShapeDtypeStruct(leaf.aval.shape, leaf.aval.dtype)
        for leaf, keep in zip(leaves, is_stored, strict=True)
        if keep
    )
    return SplitPasses(forward, backward, stored)


def _is_key(value: jax.Array | jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def _depending_on(program: ClosedJaxpr, variables: Sequence[Any]) -> set[Any]:
    """Returns all variables that depend on any of `variables`, including `variables` themselves."""
    dependent = set(variables)
    for equation in program.jaxpr.eqns:
        if any(not isinstance(atom, Literal) and atom in dependent for atom in equation.invars):
            dependent.update(equation.outvars)
    return dependent


def _restricted(
    program: ClosedJaxpr, num_inputs: int, outputs: Sequence[Any]
) -> Callable[..., list[jax.Array]]:
    """Returns the part of a program that computes `outputs`, as a function of its first inputs."""
    needed = {atom for atom in outputs if not isinstance(atom, Literal)}
    equations = []
    for equation in reversed(program.jaxpr.eqns):
        if needed.intersection(equation.outvars):
            equations.append(equation)
            needed.update(atom for atom in equation.invars if not isinstance(atom, Literal))
    smaller = program.jaxpr.replace(
        invars=program.jaxpr.invars[:num_inputs], outvars=list(outputs), eqns=equations[::-1]
    )
    return jaxpr_as_fun(ClosedJaxpr(smaller, program.consts))


def split_layers(
    pieces: LossPieces,
    params: Mapping[str, Any],
    extras: Arrays,
    key: jax.Array,
    batch: Batch,
    rows: int,
) -> SplitPasses:
    """Returns the passes of a chunk of `rows` layers for one microbatch, from abstract arrays.

    As in `split_passes`, `weights` is {"chunk": stacked parameters [rows, ...], "outer": parameters
    that every layer reads, "overwritten": extras that their gradients replace}; `fixed` has the
    numbers of the layers, int32 [rows]; `inputs` are the floating-point activations; `context` is
    (other activations, extras, key, batch).
    """
    stacked = {name: x for name, x in params.items() if name in pieces.stacked}
    chunk = {n: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for n, x in stacked.items()}
    outer = {name: x for name, x in params.items() if name not in pieces.stacked}
    activations = pieces.activations

    def run(weights: Tree, fixed: Tree, inputs: list, context: Tree) -> Any:
        others, extras, key, batch = context
        extras = {**extras, **weights["overwritten"]}
        entering = tuple(interleave(inputs, others, activations))
        state = extras, key, batch, fixed, entering
        outputs, changes = pieces.layers(weights["chunk"], weights["outer"], *state)
        return with_gradient(outputs), changes

    return split_passes(
        run,
        {
            "chunk": chunk,
            "outer": {n: x for n, x in outer.items() if n in pieces.layers_reads_outer},
            "overwritten": {n: x for n, x in extras.items() if n in pieces.overwritten.layers},
        },
        jax.ShapeDtypeStruct((rows,), jnp.int32),
        with_gradient(activations),
        (without_gradient(activations), extras, key, batch),
    )


def has_gradient(x: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Returns whether an array, or a `ShapeDtypeStruct`, has a gradient."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def with_gradient(activations: Sequence[Any]) -> list[Any]:
    """Returns the floating-point activations, which have a gradient."""
    return [x for x in activations if has_gradient(x)]


def without_gradient(activations: Sequence[Any]) -> list[Any]:
    """Returns the activations without a gradient, such as a counter in the carry."""
    return [x for x in activations if not has_gradient(x)]


def interleave(
    differentiable: Sequence[Any], others: Sequence[Any], like: Sequence[Any]
) -> list[Any]:
    """Merges the results of `with_gradient` and `without_gradient` in the order of `like`."""
    first, second = iter(differentiable), iter(others)
    return [next(first) if has_gradient(x) else next(second) for x in like]
