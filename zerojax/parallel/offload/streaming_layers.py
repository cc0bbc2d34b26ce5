"""Runs streamed layers, forward and backward, with a prefetch of the next layer's weights.

Both loops are peeled: an iteration computes one layer with weights that are on the device, and
loads those of the next one. So the last layer is computed after the loop, and no index has to be
clamped. Nothing is differentiated through a loop: a backward iteration recomputes its layer from
the layer's input and differentiates that one layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.plan.slices import put_slice, take_slice

Arrays = dict[str, Any]
Several = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerWork:
    """The computation of the layers of one microbatch.

    Attributes:
      num_layers: number of layers.
      load: `index -> {name: whole row}`, the weights of one layer.
      layer: `(rows, consts, others, activations) -> (activations, {name: row of an extra})`.
      consts: arrays that every layer reads whole.
      others: stacks of which a layer reads its row.
      trained: names of the rows that have a gradient.
      around: whether `consts` and `others` have a gradient.
    """

    num_layers: int
    load: Callable[[Any], Arrays]
    layer: Callable[..., tuple[Several, Arrays]]
    consts: Sequence[jax.Array]
    others: Sequence[jax.Array]
    trained: Sequence[str]
    around: bool

    def run(self, rows: Arrays, index: Any, activations: Several) -> tuple[Several, Arrays]:
        """Runs one layer."""
        return self.layer(rows, self.consts, self._others(index), activations)

    def _others(self, index: Any) -> list[jax.Array]:
        return [take_slice(stack, index) for stack in self.others]

    def pull(self, rows: Arrays, index: Any, activations: Several, gradients: list) -> Any:
        """Returns gradients of one layer, from the gradients of its floating-point outputs.

        Returns:
          (of its floating activations, of its trained rows, of floating constants, of floating rows
          of `others`); the last two are empty if they have no gradient.
        """
        fixed = {name: row for name, row in rows.items() if name not in self.trained}
        others = self._others(index)

        def run(floats: list, trained: Arrays, consts: list, rows_of_others: list) -> list:
            after, _ = self.layer(
                {**fixed, **trained},
                join(consts, self.consts) if self.around else self.consts,
                join(rows_of_others, others) if self.around else others,
                tuple(join(floats, activations)),
            )
            return floating(after)

        _, pull = jax.vjp(
            run,
            floating(activations),
            {name: rows[name] for name in self.trained},
            floating(self.consts) if self.around else [],
            floating(others) if self.around else [],
        )
        return pull(gradients)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """The storage of layers' inputs between forward and backward pass.

    Attributes:
      empty: `(number of rows, activations) -> stacks`.
      load: `(stacks, index) -> activations`.
      store: `(stacks, activations, index) -> stacks`.
    """

    empty: Callable[[int, Several], Any]
    load: Callable[[Any, Any], Several]
    store: Callable[[Any, Several, Any], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LastLayer:
    """The start of the backward pass: weights and input of the last layer, inputs of all layers."""

    rows: Arrays
    activations: Several
    inputs: Any


def run_forward(
    work: LayerWork, activations: Several, inputs: Inputs | None
) -> tuple[Several, Arrays, LastLayer]:
    """Runs all layers.

    Args:
      activations: input of the first layer.
      inputs: storage of layers' inputs; None stores none.

    Returns:
      (output of the last layer, {name: [layers, ...]} of the extras that layers write, start of
      `run_backward`).
    """
    last = work.num_layers - 1
    rows = work.load(0)
    _, written = jax.eval_shape(work.run, rows, jnp.int32(0), activations)
    stack = lambda x: jnp.zeros((work.num_layers, *x.shape), x.dtype)  # noqa: E731
    changes = jax.tree.map(stack, written)
    kept = None if inputs is None else inputs.empty(max(last, 1), activations)

    def one(index: Any, carry: Any) -> Any:
        activations, rows, kept, changes = carry
        following = work.load(index + 1)
        if inputs is not None:
            kept = inputs.store(kept, activations, index)
        activations, written = work.run(rows, index, activations)
        return activations, following, kept, _put_rows(changes, written, index)

    start = activations, rows, kept, changes
    activations, rows, kept, changes = lax.fori_loop(0, last, one, start)
    outputs, written = work.run(rows, last, activations)
    end = LastLayer(rows=rows, activations=activations, inputs=kept)
    return outputs, _put_rows(changes, written, last), end


def run_backward(
    work: LayerWork,
    last_layer: LastLayer,
    inputs: Inputs,
    gradients: list,
    totals: Any,
    take: Callable[[Any, Any, Arrays], Any],
    load: Callable[[Any, Any], Arrays] | None = None,
) -> tuple[list, list, list, Any]:
    """Computes the gradients of all layers, the last one's first.

    Args:
      last_layer: from `run_forward`.
      gradients: gradients of the floating activations that the last layer returns.
      totals: initial value for `take`.
      take: `(totals, index, {name: gradient of a trained row}) -> totals`.
      load: `(totals, index) -> rows`, in place of `work.load` where `take` changes weights.

    Returns:
      (gradients of the first layer's floating input activations, of the floating constants, of the
      floating stacks among `others`, totals).
    """
    last = work.num_layers - 1
    consts = [jnp.zeros_like(x) for x in floating(work.consts)] if work.around else []
    others = [jnp.zeros_like(x) for x in floating(work.others)] if work.around else []

    def bring(totals: Any, index: Any) -> Arrays:
        return work.load(index) if load is None else load(totals, index)

    def one(index: Any, rows: Arrays, activations: Several, carry: Any, following: Any) -> Any:
        gradients, consts, others, totals = carry
        gradients, of_rows, of_consts, of_others = work.pull(rows, index, activations, gradients)
        if load is not None:
            # `take` writes to the stacks from which the next weights are read: read them first.
            of_rows, following = lax.optimization_barrier((of_rows, following))
        consts = [jnp.add(total, new) for total, new in zip(consts, of_consts, strict=True)]
        others = [
            put_slice(total, new, index) for total, new in zip(others, of_others, strict=True)
        ]
        return following, (gradients, consts, others, take(totals, index, of_rows))

    def body(done: Any, state: Any) -> Any:
        rows, activations, carry = state
        index = last - done
        following, entering = bring(carry[-1], index - 1), inputs.load(last_layer.inputs, index - 1)
        following, carry = one(index, rows, activations, carry, following)
        return following, entering, carry

    start = last_layer.rows, last_layer.activations, (gradients, consts, others, totals)
    rows, activations, carry = lax.fori_loop(0, last, body, start)
    return one(0, rows, activations, carry, {})[1]


def _put_rows(stacks: Arrays, rows: Arrays, index: Any) -> Arrays:
    return {name: put_slice(stack, rows[name], index) for name, stack in stacks.items()}


# --- values with a gradient and values without one ------------------------------------------------


def has_gradient(value: Any) -> bool:
    """Returns whether an array has a floating-point dtype."""
    return jnp.issubdtype(value.dtype, jnp.inexact)


def floating(values: Sequence[Any]) -> list[Any]:
    """Returns the values that have a gradient."""
    return [value for value in values if has_gradient(value)]


def join(floats: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Returns `values`, with those that have a gradient replaced by `floats`."""
    remaining = iter(floats)
    return [next(remaining) if has_gradient(value) else value for value in values]
