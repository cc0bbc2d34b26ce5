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
from zerojax.tracing.activation_offload import without_checkpoints

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
        self, rows: Arrays, index: Any, activations: Several, *, at_once: bool = False
    ) -> Callable[[list], Any]:
        """Recomputes one layer in the backward pass, and returns its derivative.

        Args:
          at_once: whether the layer is computed here, without the model's own checkpoints, which
            would leave its computation to the derivative. `jax.tree.leaves` of the result then has
            the values that the derivative reads.

        Returns:
          The derivative. It maps gradients of the layer's floating-point outputs to gradients of
          (floating activations, trained weights of the layer, floating constants, floating rows of
          `others`); the last two are empty if `around` is False.
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
            without_checkpoints(run) if at_once else run,
            floating(activations),
            given,
            floating(self.consts) if self.around else [],
            floating(others) if self.around else [],
        )[1]


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
        of_rows, sums = _pull(work.run_again(rows, index, activations), index, sums)
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

    `totals` is a carry with all arrays of the update. The state of a layer are its master weights
    and moments. `names` are parameters of a layer.
    """

    @property
    def halves(self) -> tuple[Sequence[str], Sequence[str]]:
        """Names of the parameters of a layer in two groups with about as many bytes."""
        ...

    def start(self, totals: Any, sums: Arrays) -> Any:
        """Prepares the totals for the backward pass; `sums` are the sums of loss and weight."""
        ...

    def load(self, totals: Any, index: Any, names: Sequence[str]) -> Arrays:
        """Loads this device's shards of weights of a layer before its update."""
        ...

    def complete(self, shards: Arrays, index: Any) -> Arrays:
        """All-gathers the shards of both halves, with what is not in host memory; returns {name:
        weights of the layer}.
        """
        ...

    def receive(self, totals: Any, index: Any, grads: Arrays) -> tuple[Any, Any]:
        """Reduces a layer's gradients over devices; returns (totals, gradients for `update`)."""
        ...

    def update(
        self, totals: Any, waiting: Any, loaded: Arrays, index: Any, names: Sequence[str]
    ) -> Arrays:
        """Updates a part of a layer; returns its new state, on the device."""
        ...

    def load_state(self, totals: Any, index: Any, names: Sequence[str]) -> Arrays:
        """Loads the state of a part of a layer before its update."""
        ...

    def store_state(self, totals: Any, new: Arrays, index: Any) -> Any:
        """Stores the new state of a part of a layer in host memory; returns the totals."""
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

    An iteration computes a layer, loads its state and the weights of the layer below, and stores
    the new state of the layer above. An array is not written to while it is read, so one half of
    the parameters is stored while the layer is recomputed and loaded while it is differentiated,
    and the other half the other way round: the link carries both directions all the time. The
    device holds the state and the gradients of two layers.

    Arguments and result are those of `run_backward`, with `updates` instead of `take`.
    """
    last, kept = work.num_layers - 1, last_layer.inputs
    first_out, first_in = updates.halves
    both = (*first_out, *first_in)

    def load(totals: Any, index: Any, names: Sequence[str]) -> tuple[Arrays, Arrays]:
        """Loads state of a layer, and weights of the layer below."""
        return updates.load_state(totals, index, names), updates.load(totals, index - 1, names)

    def pull_and_receive(totals: Any, pull: Any, index: Any, sums: _Sums) -> Any:
        of_rows, sums = _pull(pull, index, sums)
        return *updates.receive(totals, index, of_rows), sums

    def body(done: Any, carry: Any) -> Any:
        rows, activations, sums, totals, (grads, skip), loaded = carry
        index = last - done
        pull = work.run_again(rows, index, activations, at_once=True)
        of_rows, sums = _pull(pull, index, sums)
        # While the layer is recomputed:
        new = updates.update(totals, (grads, skip), loaded, index + 1, first_out)
        totals = updates.store_state(totals, new, index + 1)
        coming = load(totals, index, first_in)
        # While it is differentiated, from the first gradient to the last one:
        skip = _after(skip, of_rows[_read_last(pull, of_rows)])
        new = updates.update(totals, (grads, skip), loaded, index + 1, first_in)
        new, coming = lax.optimization_barrier((new, coming))  # reads are before writes
        totals = updates.store_state(totals, new, index + 1)
        later = load(totals, index, first_out)
        entering = inputs.load(kept, index - 1)
        (gradient, *others), *rest = sums
        sums = [_after(gradient, (later, entering)), *others], *rest
        totals, waiting = updates.receive(totals, index, of_rows)
        loaded, shards = ({**one, **other} for one, other in zip(coming, later, strict=True))
        return updates.complete(shards, index - 1), entering, sums, totals, waiting, loaded

    rows, activations, sums = last_layer.rows, last_layer.activations, _no_sums(work, gradients)
    pull = work.run_again(rows, last, activations, at_once=True)
    if last:
        loaded, shards = load(totals, last, both)
        following, entering = updates.complete(shards, last - 1), inputs.load(kept, last - 1)
        totals, waiting, sums = pull_and_receive(totals, pull, last, sums)
        carry = following, entering, sums, totals, waiting, loaded
        rows, activations, sums, totals, waiting, loaded = lax.fori_loop(1, last, body, carry)
        pull = work.run_again(rows, 0, activations, at_once=True)
        totals = updates.store_state(totals, updates.update(totals, waiting, loaded, 1, both), 1)
    loaded = updates.load_state(totals, 0, both)
    totals, waiting, sums = pull_and_receive(totals, pull, 0, sums)
    new = updates.update(totals, waiting, loaded, 0, both)
    return (*sums, updates.store_state(totals, new, 0))


def _read_last(pull: Any, weights: Arrays) -> str:
    """Returns the name of the weight that a layer reads last, and whose gradient comes first.

    Values that the derivative reads are in the order of the layer, and a weight is known by its
    shape. Of two weights with one shape it may be the other: that only changes when copies begin.
    """
    shapes = [x.shape for x in jax.tree.leaves(pull)]
    place = {x: at for at, x in enumerate(shapes)}
    return max(weights, key=lambda name: place.get(weights[name].shape, -1))


def _after(value: jax.Array, earlier: Any) -> jax.Array:
    """Returns `value` unchanged, but makes the compiler compute the arrays in `earlier` before it.

    It computes a value as late as what needs it allows, and what only the next iteration needs at
    the end of this one, beside nothing. An optimization barrier does not help: the compiler removes
    it before it schedules. If tensor parallelism splits the arrays, nothing is added, because
    reading one element could need an all-gather.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if any(mesh.shape[axis] > 1 for axis in COMPILER_AXES if axis not in mesh.manual_axes):
        return value
    firsts = [x.ravel()[:1].astype(jnp.float32) for x in jax.tree.leaves(earlier)]
    if not firsts:  # no array of the layers is in host memory
        return value
    total = jnp.concatenate(firsts).sum()
    # No number is below minus infinity, nor is NaN; but the compiler does not know the total.
    return jnp.where(total < -jnp.inf, total.astype(value.dtype), value)


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
