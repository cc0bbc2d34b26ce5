"""Runs streamed layers, forward and backward, with a prefetch of the next layer's weights.

Both loops are peeled: an iteration computes one layer with weights that are on the device, and
loads those of the next one. So the last layer is computed after the loop, and no index has to be
clamped. Nothing is differentiated through a loop: a backward iteration recomputes its layer from
the layer's input and differentiates that one layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.plan.device_mesh import COMPILER_AXES
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
      sinks: {name: dtype of its gradient} of the rows that are shards (`offload.tile_bytes`);
        `layer` takes (shard, zeros) of them where they are differentiated.
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
          (its floating-point outputs, its derivative: gradients of these outputs -> gradients of
          its floating activations, of its trained rows, of floating constants, and of floating rows
          of `others`; the last two are empty if they have no gradient).
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
) -> tuple[list, list, list, Any]:
    """Computes the gradients of all layers, the last one's first.

    Args:
      last_layer: from `run_forward`.
      gradients: gradients of the floating activations that the last layer returns.
      totals: initial value for `take`.
      take: `(totals, index, {name: gradient of a trained row}) -> totals`.

    Returns:
      (gradients of the first layer's floating input activations, of the floating constants, of the
      floating stacks among `others`, totals).
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
    """An update of layers in host memory that runs beside the backward pass.

    `totals` hold the arrays. The state of a layer is loaded while the layer is differentiated; the
    layer is updated, and its new state stored, while the layer below is differentiated.
    """

    def start(self, totals: Any, sums: Arrays) -> Any:
        """Prepares the totals for the backward pass; `sums`: of loss and weight."""
        ...

    def load(self, totals: Any, index: Any) -> Arrays:
        """Loads the weights of a layer that has not been updated, gathered: {name: row}."""
        ...

    def receive(self, totals: Any, index: Any, grads: Arrays) -> tuple[Any, Any]:
        """Returns (totals, reduced gradients of a layer that waits for its update)."""
        ...

    def update(self, totals: Any, waiting: Any, loaded: Any, index: Any) -> Any:
        """Returns a layer's new state, on the device."""
        ...

    def load_state(self, totals: Any, index: Any) -> Any:
        """Loads the state of a layer that has not been updated."""
        ...

    def store_state(
        self, totals: Any, new: Any, index: Any, following: Arrays
    ) -> tuple[Any, Arrays]:
        """Stores the new state of a layer.

        Args:
          following: from `load`; read before the new weights are stored.

        Returns:
          (totals, `following`).
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
    """Computes the gradients of all layers, the last one's first, and updates each layer.

    While a layer is run again, its state is loaded; while it is differentiated, the new state of
    the layer above is stored. So copies and products are in progress at the same time. The device
    holds the state and the gradients of two layers.

    For arguments and result see `run_backward`.
    """
    last, kept = work.num_layers - 1, last_layer.inputs

    def body(done: Any, state: Any) -> Any:
        rows, activations, sums, totals, waiting, loaded = state
        index = last - done
        outputs, pull = work.run_again(rows, index, activations)
        grads, skip = waiting
        new = updates.update(totals, (grads, _after(skip, outputs, totals)), loaded, index + 1)
        loaded = updates.load_state(totals, index)
        # The new state goes into the arrays that are read here. In this order the compiler loads
        # beside the products that run the layer again, and stores beside those of its derivative.
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

    Otherwise the compiler would load them at the end of an iteration, beside no product, since
    nothing needs them before the next one. Barriers do not help: it removes them before it
    schedules.
    Nothing is added if tensor parallelism splits the arrays, where one element may need a gather.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if any(mesh.shape[axis] > 1 for axis in COMPILER_AXES if axis not in mesh.manual_axes):
        return value
    firsts = [x.ravel()[:1].astype(jnp.float32) for x in jax.tree.leaves(earlier)]
    if not firsts:  # no array of a layer is large enough to be on the host
        return value
    never = totals["scale"] < -jnp.inf
    return jnp.where(never, jnp.concatenate(firsts).sum().astype(value.dtype), value)


_Sums = tuple[list, list, list]
"""Gradients of activations, of constants, and of other stacks."""


def _no_sums(work: LayerWork, gradients: list) -> _Sums:
    zeros = lambda values: [jnp.zeros_like(x) for x in floating(values)]  # noqa: E731
    return gradients, *((zeros(work.consts), zeros(work.others)) if work.around else ([], []))


def _pull(pull: Callable[[list], Any], index: Any, sums: _Sums) -> tuple[Arrays, _Sums]:
    """Returns ({name: gradient of a trained row of the layer}, sums with the layer's gradients)."""
    gradients, consts, others = sums
    gradients, of_rows, of_consts, of_others = pull(gradients)
    consts = [jnp.add(total, new) for total, new in zip(consts, of_consts, strict=True)]
    others = [put_slice(total, new, index) for total, new in zip(others, of_others, strict=True)]
    return of_rows, (gradients, consts, others)


def _put_rows(stacks: Arrays, rows: Arrays, index: Any) -> Arrays:
    return {name: put_slice(stack, rows[name], index) for name, stack in stacks.items()}


# --- values with a gradient and values without one ------------------------------------------------


def has_gradient(value: Any) -> bool:
    """Returns whether an array can have a gradient: whether its dtype is floating-point."""
    return jnp.issubdtype(value.dtype, jnp.inexact)


def floating(values: Sequence[Any]) -> list[Any]:
    """Returns the floating-point arrays among `values`, which can have gradients."""
    return [value for value in values if has_gradient(value)]


def join(floats: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Inverts `floating`: returns `values` with its floating-point arrays replaced by `floats`."""
    remaining = iter(floats)
    return [next(remaining) if has_gradient(value) else value for value in values]
