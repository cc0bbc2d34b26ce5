"""Runs streamed layers, forward and backward, with a prefetch of the next layer's weights.

Streamed layers have their weights in host memory. An iteration of either loop computes one layer,
whose weights are already on the device, and loads the weights of the next one. The last layer is
computed after the loop, so no index has to be clamped. No loop is differentiated: a backward
iteration recomputes one layer from its stored input and differentiates that layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.config.late_dataclasses import dataclass
from zerojax.plan.device_mesh import COMPILER_AXES
from zerojax.plan.slices import put_slice, take_slice

Arrays = dict[str, Any]
Several = tuple[jax.Array, ...]


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """The computation of the layers of one microbatch.

    Attributes:
      num_layers: number of layers.
      load: `index -> {name: unsharded weights of one layer}`.
      layer: `(weights, consts, others, activations) -> (activations, {name: one layer's value of an
        extra})`.
      consts: arrays that every layer reads in full.
      others: stacks (not parameters) of which each layer reads its own row.
      trained: names of the parameters that have a gradient.
      sinks: {name: dtype of the gradient} of weights that are gathered in tiles
        (`offload.tile_bytes`). `layer` gets their shards instead of unsharded weights; for
        differentiation it gets (shard, zeros).
      around: whether `consts` and `others` have a gradient.
    """

    num_layers: int
    load: Callable[[Any], Arrays]
    layer: Callable[..., tuple[Several, Arrays]]
    consts: Sequence[jax.Array]
    others: Sequence[jax.Array]
    trained: Sequence[str]
    around: bool
    sinks: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def run(self, rows: Arrays, index: Any, activations: Several) -> tuple[Several, Arrays]:
        """Runs one layer."""
        return self.layer(rows, self.consts, self._others(index), activations)

    def _others(self, index: Any) -> list[jax.Array]:
        return [take_slice(stack, index) for stack in self.others]

    def run_again(
        self, rows: Arrays, index: Any, activations: Several
    ) -> tuple[list, Callable[[list], Any]]:
        """Recomputes one layer in the backward pass, and returns its derivative.

        Returns:
          (floating-point outputs of the layer, derivative). The derivative maps gradients of these
          outputs to gradients of (floating activations, trained weights of the layer, floating
          constants, floating rows of `others`); the last two are empty if `around` is False.
        """
        fixed = {name: row for name, row in rows.items() if name not in self.trained}
        others = self._others(index)
        given = {name: rows[name] for name in self.trained}
        given |= {name: jnp.zeros(rows[name].shape, dtype) for name, dtype in self.sinks.items()}

        def run(floats: list, trained: Arrays, consts: list, rows_of_others: list) -> list:
            sharded = {name: (rows[name], trained[name]) for name in self.sinks}
            after, _ = self.layer(
                {**fixed, **trained, **sharded},
                join(consts, self.consts) if self.around else self.consts,
                join(rows_of_others, others) if self.around else others,
                tuple(join(floats, activations)),
            )
            return floating(after)

        return jax.vjp(
            run,
            floating(activations),
            given,
            floating(self.consts) if self.around else [],
            floating(others) if self.around else [],
        )


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Storage for the inputs of layers between forward and backward pass, as three traced
    functions.

    Attributes:
      empty: `(number of layers, activations) -> stacks`; creates the storage.
      load: `(stacks, layer number) -> activations`.
      store: `(stacks, activations, layer number) -> stacks`.
    """

    empty: Callable[[int, Several], Any]
    load: Callable[[Any, Any], Several]
    store: Callable[[Any, Several, Any], Any]


@dataclass(frozen=True, kw_only=True)
class LastLayer:
    """Arrays with which the backward pass starts: weights and input of the last layer, all stored
    inputs.
    """

    rows: Arrays
    activations: Several
    inputs: Any


def run_forward(
    work: LayerWork, activations: Several, inputs: Inputs | None
) -> tuple[Several, Arrays, LastLayer]:
    """Runs all layers.

    Args:
      activations: input of the first layer.
      inputs: storage for the inputs of layers; None stores no input.

    Returns:
      (output of the last layer, {name: [layers, ...]} of the extras (non-parameter arrays) that
      layers write, `last_layer` for `run_backward`).
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
) -> tuple[list, list, list, Any]:
    """Runs the backward pass of all layers, from the last to the first.

    Args:
      last_layer: result of `run_forward`.
      gradients: gradients of the floating-point outputs of the last layer.
      totals: initial value of the carry that `take` updates.
      take: `(totals, layer number, {name: gradient of one layer's weights}) -> totals`.

    Returns:
      (gradients of the first layer's floating inputs, gradients of floating constants, gradients of
      the floating stacks in `others`, totals).
    """
    last, kept = work.num_layers - 1, last_layer.inputs

    def one(index: Any, rows: Arrays, activations: Several, sums: _Sums, totals: Any) -> Any:
        of_rows, sums = _pull(work.run_again(rows, index, activations)[1], index, sums)
        return sums, take(totals, index, of_rows)

    def body(done: Any, state: Any) -> Any:
        rows, activations, sums, totals = state
        index = last - done
        following, entering = work.load(index - 1), inputs.load(kept, index - 1)
        return following, entering, *one(index, rows, activations, sums, totals)

    start = last_layer.rows, last_layer.activations, _no_sums(work, gradients), totals
    sums, totals = one(0, *lax.fori_loop(0, last, body, start))
    return (*sums, totals)


@runtime_checkable
class Updates(Protocol):
    """Functions that update layers in host memory while the backward pass runs.

    `totals` is a carry with all arrays of the update. While a layer is differentiated, its state
    (master weights and moments) is loaded. While the layer below is differentiated, the layer is
    updated and its new state stored.
    """

    def start(self, totals: Any, sums: Arrays) -> Any:
        """Prepares the totals for the backward pass; `sums` are the sums of loss and weight."""
        ...

    def load(self, totals: Any, index: Any) -> Arrays:
        """Loads and all-gathers the weights of a layer before its update: {name: weights of the
        layer}.
        """
        ...

    def receive(self, totals: Any, index: Any, grads: Arrays) -> tuple[Any, Any]:
        """Reduces a layer's gradients over devices; returns (totals, gradients for `update`)."""
        ...

    def update(self, totals: Any, waiting: Any, loaded: Any, index: Any) -> Any:
        """Updates a layer; returns its new state, on the device."""
        ...

    def load_state(self, totals: Any, index: Any) -> Any:
        """Loads the state (master weights, moments) of a layer before its update."""
        ...

    def store_state(
        self, totals: Any, new: Any, index: Any, following: Arrays
    ) -> tuple[Any, Arrays]:
        """Stores the new state of a layer in host memory.

        Args:
          following: result of `load` for the next layer; the load has to end before the store
            begins.

        Returns:
          (totals, `following` unchanged).
        """
        ...


def run_updating_backward(
    work: LayerWork,
    last_layer: LastLayer,
    inputs: Inputs,
    gradients: list,
    totals: Any,
    updates: Updates,
) -> tuple[list, list, list, Any]:
    """Runs the backward pass of all layers, from the last to the first, and updates each layer.

    While a layer is recomputed, its state is loaded; while it is differentiated, the new state of
    the layer above is stored. So copies and matrix products are in progress at the same time. The
    device holds the state and the gradients of two layers.

    Arguments and result are those of `run_backward`, with `updates` instead of `take`.
    """
    last, kept = work.num_layers - 1, last_layer.inputs

    def body(done: Any, state: Any) -> Any:
        rows, activations, sums, totals, waiting, loaded = state
        index = last - done
        outputs, pull = work.run_again(rows, index, activations)
        grads, skip = waiting
        new = updates.update(totals, (grads, _after(skip, outputs, totals)), loaded, index + 1)
        loaded = updates.load_state(totals, index)
        # The new state is written into the arrays that are read here. With this barrier the
        # compiler overlaps the loads with the recomputation of the layer, and the stores with its
        # derivative.
        loaded, totals = lax.optimization_barrier((loaded, totals))
        gradients, *others = sums
        gradients = [_after(gradients[0], loaded, totals), *gradients[1:]]
        sums = gradients, *others
        following, entering = updates.load(totals, index - 1), inputs.load(kept, index - 1)
        totals, following = updates.store_state(totals, new, index + 1, following)
        of_rows, sums = _pull(pull, index, sums)
        totals, waiting = updates.receive(totals, index, of_rows)
        return following, entering, sums, totals, waiting, loaded

    rows, activations, sums = last_layer.rows, last_layer.activations, _no_sums(work, gradients)
    loaded = updates.load_state(totals, last)
    if last:
        following, entering = updates.load(totals, last - 1), inputs.load(kept, last - 1)
        of_rows, sums = _pull(work.run_again(rows, last, activations)[1], last, sums)
        totals, waiting = updates.receive(totals, last, of_rows)
        state = following, entering, sums, totals, waiting, loaded
        rows, activations, sums, totals, waiting, loaded = lax.fori_loop(1, last, body, state)
        new, loaded = updates.update(totals, waiting, loaded, 1), updates.load_state(totals, 0)
        loaded, totals = lax.optimization_barrier((loaded, totals))
        totals, rows = updates.store_state(totals, new, 1, rows)
    of_rows, sums = _pull(work.run_again(rows, 0, activations)[1], 0, sums)
    totals, waiting = updates.receive(totals, 0, of_rows)
    new = updates.update(totals, waiting, loaded, 0)
    return (*sums, updates.store_state(totals, new, 0, {})[0])


def _after(value: jax.Array, earlier: Any, totals: Any) -> jax.Array:
    """Returns `value` unchanged, but makes the compiler compute the arrays in `earlier` before it.

    Otherwise the compiler would load these arrays at the end of an iteration, where no matrix
    product overlaps the load, because only the next iteration needs them. An optimization barrier
    does not help: the compiler removes it before it schedules. If tensor parallelism splits the
    arrays, nothing is added, because reading one element could need an all-gather.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if any(mesh.shape[axis] > 1 for axis in COMPILER_AXES if axis not in mesh.manual_axes):
        return value
    firsts = [x.ravel()[:1].astype(jnp.float32) for x in jax.tree.leaves(earlier)]
    if not firsts:  # no array of the layers is in host memory
        return value
    never = totals["scale"] < -jnp.inf
    return jnp.where(never, jnp.concatenate(firsts).sum().astype(value.dtype), value)


_Sums = tuple[list, list, list]
"""(gradients of activations, sums of gradients of `consts`, gradients of `others`)."""


def _no_sums(work: LayerWork, gradients: list) -> _Sums:
    zeros = lambda values: [jnp.zeros_like(x) for x in floating(values)]  # noqa: E731
    return gradients, *((zeros(work.consts), zeros(work.others)) if work.around else ([], []))


def _pull(pull: Callable[[list], Any], index: Any, sums: _Sums) -> tuple[Arrays, _Sums]:
    """Differentiates one layer.

    Returns:
      ({name: gradient of the layer's trained weights}, `sums` updated with the layer's gradients).
    """
    gradients, consts, others = sums
    gradients, of_rows, of_consts, of_others = pull(gradients)
    consts = [jnp.add(total, new) for total, new in zip(consts, of_consts, strict=True)]
    others = [put_slice(total, new, index) for total, new in zip(others, of_others, strict=True)]
    return of_rows, (gradients, consts, others)


def _put_rows(stacks: Arrays, rows: Arrays, index: Any) -> Arrays:
    return {name: put_slice(stack, rows[name], index) for name, stack in stacks.items()}


# --- values with a gradient and values without one ------------------------------------------------


def has_gradient(value: Any) -> bool:
    """Returns whether an array can have a gradient, that is, whether its dtype is
    floating-point.
    """
    return jnp.issubdtype(value.dtype, jnp.inexact)


def floating(values: Sequence[Any]) -> list[Any]:
    """Returns the floating-point arrays among `values`, which can have gradients."""
    return [value for value in values if has_gradient(value)]


def join(floats: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Inverts `floating`: returns `values` with its floating-point arrays replaced by `floats`."""
    remaining = iter(floats)
    return [next(remaining) if has_gradient(value) else value for value in values]
