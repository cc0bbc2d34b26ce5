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
from zerojax.config.tree_types import Tree
from zerojax.placement.device_mesh import COMPILER_AXES
from zerojax.placement.slices import put_slice, take_slice
from zerojax.tracing.activation_offload import without_checkpoints
from zerojax.tracing.flops import count_flops
from zerojax.tracing.pauses import run_with_pauses

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

    def run(
        self, rows: Arrays, index: jax.Array | int, activations: Several
    ) -> tuple[Several, Arrays]:
        """Runs layer `index` with the weights `rows`; returns the result of `layer`."""
        return self.layer(rows, self.consts, self._others(index), activations)

    def _others(self, index: jax.Array | int) -> list[jax.Array]:
        return [take_slice(stack, index) for stack in self.others]

    def run_again(
        self, rows: Arrays, index: jax.Array | int, activations: Several, *, at_once: bool = False
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
    # Only the shapes of what a layer writes are needed.
    _, written = jax.eval_shape(work.run, rows, jnp.int32(0), activations)
    stack = lambda x: jnp.zeros((work.num_layers, *x.shape), x.dtype)  # noqa: E731
    changes = jax.tree.map(stack, written)
    # The loop is traced even for one layer, and its storage needs a row.
    kept = None if inputs is None else inputs.empty(max(last, 1), activations)

    def one(index: jax.Array | int, carry: Tree) -> Any:
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
    totals: Tree,
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

    def one(
        index: jax.Array | int, rows: Arrays, activations: Several, sums: _Sums, totals: Tree
    ) -> Any:
        of_rows, sums = _pull(work.run_again(rows, index, activations), index, sums)
        return sums, take(totals, index, of_rows)

    def body(done: jax.Array, state: Tree) -> Any:
        rows, activations, sums, totals = state
        index = last - done
        following, entering = work.load(index - 1), inputs.load(kept, index - 1)
        return following, entering, *one(index, rows, activations, sums, totals)

    start = last_layer.rows, last_layer.activations, _no_sums(work, gradients), totals
    sums, totals = one(0, *lax.fori_loop(0, last, body, start))
    return (*sums, totals)


NUM_GROUPS = 2
"""Turns in which the state of a layer is stored and loaded, each beside as many FLOPs."""
FLOPS_BESIDE_A_BYTE = 9000.0
"""FLOPs of a layer, for each byte of its state, from which it takes longer than half of the copies
to the device and back: 600 TFLOP/s beside 43 GB/s each way (H100) are 7,000; the H200's link is
faster."""


def divide(sizes: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
    """Divides parameters into `NUM_GROUPS` groups of about the same size.

    >>> divide({"a": 5, "b": 3, "c": 2, "d": 2})
    (('a', 'd'), ('b', 'c'))
    """
    groups: list[list[str]] = [[] for _ in range(NUM_GROUPS)]
    # The largest come first, each into the group that is smaller so far.
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        min(groups, key=lambda group: sum(sizes[one] for one in group)).append(name)
    return tuple(map(tuple, groups))


@runtime_checkable
class Updates(Protocol):
    """Functions that update layers in host memory while the backward pass runs.

    `totals` is a carry with all arrays of the update. The state of a layer are its master weights
    and moments. `names` are parameters of a layer.
    """

    @property
    def is_delayed(self) -> bool:
        """Whether layers are updated with the gradients of the step before."""
        ...

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Names of the parameters of a layer in `NUM_GROUPS` groups with about as many bytes."""
        ...

    def start(self, totals: Tree, sums: Arrays) -> Any:
        """Prepares the totals for the backward pass; `sums` are the sums of loss and weight."""
        ...

    def load(self, totals: Tree, index: jax.Array | int, names: Sequence[str]) -> Arrays:
        """Loads this device's shards of weights of a layer before its update."""
        ...

    def complete(self, shards: Arrays, index: jax.Array | int) -> Arrays:
        """All-gathers the shards of both halves, with what is not in host memory; returns {name:
        weights of the layer}.
        """
        ...

    def waiting(self, totals: Tree, index: jax.Array | int) -> tuple[Any, Any]:
        """Takes the gradients for `update` that the step before left, if `is_delayed`; returns
        (totals, gradients)."""
        ...

    def receive(self, totals: Tree, index: jax.Array | int, grads: Arrays) -> tuple[Any, Any]:
        """Reduces a layer's gradients over devices; returns (totals, gradients for `update`)."""
        ...

    def update(
        self,
        totals: Tree,
        waiting: Tree,
        loaded: Arrays,
        index: jax.Array | int,
        names: Sequence[str],
    ) -> Arrays:
        """Updates a part of a layer; returns its new state, on the device."""
        ...

    def load_state(self, totals: Tree, index: jax.Array | int, names: Sequence[str]) -> Arrays:
        """Loads the state of a part of a layer before its update."""
        ...

    def store_state(self, totals: Tree, new: Arrays, index: jax.Array | int) -> Any:
        """Stores the new state of a part of a layer in host memory; returns the totals."""
        ...


@runtime_checkable
class UpdatesInForward(Updates, Protocol):
    """Functions that update layers in host memory while the forward pass runs, with the gradients
    of the step before, and that receive gradients in the backward pass."""

    def divide(self, totals: Any) -> tuple[Arrays, Any]:
        """Divides the totals after the forward pass into (what the update changed, totals of the
        backward pass)."""
        ...

    def load_new(self, updated: Arrays, index: jax.Array | int) -> Arrays:
        """Loads the new weights of a layer; `updated` is from `divide`."""
        ...

    def take(self, totals: Any, index: jax.Array | int, grads: Arrays) -> Any:
        """Returns the totals of the backward pass with the gradients of one layer."""
        ...


def run_updating_backward(
    work: LayerWork,
    last_layer: LastLayer,
    inputs: Inputs,
    gradients: list,
    totals: Tree,
    updates: Updates,
) -> tuple[list, list, list, Any]:
    """Runs the backward pass of all layers, from the last to the first, and updates each layer.

    An iteration computes a layer, loads its state and the weights of the layer below, and stores
    the new state of the layer above, in turns (`_Turns`). The device holds the state and the
    gradients of two layers.

    Arguments and result are those of `run_backward`, with `updates` instead of `take`.
    """
    last, kept, every = work.num_layers - 1, last_layer.inputs, sum(updates.groups, ())

    def load(totals: Tree, index: jax.Array | int, names: Sequence[str]) -> tuple[Arrays, Arrays]:
        """Returns (optimizer state of layer `index`, weights of layer `index - 1`), loaded."""
        return updates.load_state(totals, index, names), updates.load(totals, index - 1, names)

    def body(done: jax.Array, carry: Tree) -> Any:
        rows, activations, sums, totals, waiting, loaded = carry
        index = last - done
        turns = _Turns(updates, totals, waiting, loaded, index + 1, load, index)
        of_rows, sums = turns.differentiate(work, rows, index, activations, sums)
        totals, (loaded, shards) = turns.end()
        entering = inputs.load(kept, index - 1)
        sums = (_first_after(sums[0], (loaded, shards, entering, of_rows)), *sums[1:])
        totals, waiting = updates.receive(totals, index, of_rows)
        return updates.complete(shards, index - 1), entering, sums, totals, waiting, loaded

    rows, activations, sums = last_layer.rows, last_layer.activations, _no_sums(work, gradients)
    pull = work.run_again(rows, last, activations, at_once=True)
    if last:
        loaded, shards = load(totals, last, every)
        following, entering = updates.complete(shards, last - 1), inputs.load(kept, last - 1)
        of_rows, sums = _pull(pull, last, sums)
        totals, waiting = updates.receive(totals, last, of_rows)
        carry = following, entering, sums, totals, waiting, loaded
        rows, activations, sums, totals, waiting, loaded = lax.fori_loop(1, last, body, carry)
        # No layer is below the first one, so there are no weights to load.
        load_state = lambda *given: (updates.load_state(*given),)  # noqa: E731
        turns = _Turns(updates, totals, waiting, loaded, 1, load_state, 0)
        of_rows, sums = turns.differentiate(work, rows, 0, activations, sums)
        totals, (loaded,) = turns.end()
    else:
        loaded = updates.load_state(totals, 0, every)
        of_rows, sums = _pull(pull, 0, sums)
    totals, waiting = updates.receive(totals, 0, of_rows)
    new = updates.update(totals, waiting, loaded, 0, every)
    return (*sums, updates.store_state(totals, new, 0))


def run_delayed_backward(
    work: LayerWork,
    last_layer: LastLayer,
    inputs: Inputs,
    gradients: list,
    totals: Tree,
    updates: Updates,
) -> tuple[list, list, list, Any]:
    """Runs the backward pass of all layers, and updates each with the gradients of the step before.

    An iteration computes a layer, updates it and stores its state, and loads the state of the layer
    below, in turns (`_Turns`). The last layer's state is loaded before the pass.

    Arguments and result are those of `run_updating_backward`.
    """
    last, kept, every = work.num_layers - 1, last_layer.inputs, sum(updates.groups, ())

    def load(totals: Tree, index: jax.Array | int, names: Sequence[str]) -> tuple[Arrays]:
        return (updates.load_state(totals, index, names),)

    def body(done: jax.Array, carry: Tree) -> Any:
        rows, activations, sums, totals, loaded = carry
        index = last - done
        totals, waiting = updates.waiting(totals, index)
        turns = _Turns(updates, totals, waiting, loaded, index, load, index - 1)
        of_rows, sums = turns.differentiate(work, rows, index, activations, sums)
        totals, (loaded,) = turns.end()
        entering = inputs.load(kept, index - 1)
        sums = (_first_after(sums[0], (loaded, entering, of_rows)), *sums[1:])
        totals, _ = updates.receive(totals, index, of_rows)
        following = updates.complete(updates.load(totals, index - 1, every), index - 1)
        return following, entering, sums, totals, loaded

    rows, activations, sums = last_layer.rows, last_layer.activations, _no_sums(work, gradients)
    loaded = updates.load_state(totals, last, every)
    carry = rows, activations, sums, totals, loaded
    rows, activations, sums, totals, loaded = lax.fori_loop(0, last, body, carry)
    totals, waiting = updates.waiting(totals, 0)
    new = updates.update(totals, waiting, loaded, 0, every)
    totals = updates.store_state(totals, new, 0)
    activations = tuple(join(_first_after(floating(activations), new), activations))
    of_rows, sums = _pull(work.run_again(rows, 0, activations, at_once=True), 0, sums)
    return (*sums, updates.receive(totals, 0, of_rows)[0])


def run_updating_forward(
    work: LayerWork, activations: Several, inputs: Inputs, totals: Any, updates: Updates
) -> tuple[tuple[Several, Arrays, LastLayer], Any]:
    """Runs all layers, and updates each before it runs, with the gradients of the step before.

    An iteration computes a layer, updates the next one and stores its state, and loads the state of
    the one after it, in turns (`_Turns`). The first layer is updated before the loop.

    Args:
      work, activations, inputs: see `run_forward`; `work.load` is not called.
      totals, updates: see `Updates`.

    Returns:
      (result of `run_forward`, totals with the new weights).
    """
    last, every = work.num_layers - 1, sum(updates.groups, ())

    def load(totals: Any, index: jax.Array | int, names: Sequence[str]) -> tuple[Arrays]:
        return (updates.load_state(totals, index, names),)

    def new_rows(totals: Any, index: jax.Array | int) -> Arrays:
        return updates.complete(updates.load(totals, index, every), index)

    def one(index: jax.Array | int, carry: Any, *, loads: bool = True) -> Any:
        activations, rows, kept, changes, totals, loaded = carry
        kept = inputs.store(kept, activations, index)
        totals, waiting = updates.waiting(totals, index + 1)
        load_next = load if loads else lambda *_: ({},)
        turns = _Turns(updates, totals, waiting, loaded, index + 1, load_next, index + 2)
        activations, written = turns.compute(work, rows, index, activations)
        totals, (loaded,) = turns.end()
        floats = _first_after(floating(activations), loaded)
        rows = new_rows(totals, index + 1)
        changes = _put_rows(changes, written, index)
        return tuple(join(floats, activations)), rows, kept, changes, totals, loaded

    loaded = updates.load_state(totals, 0, every)
    totals, waiting = updates.waiting(totals, 0)
    first = updates.update(totals, waiting, loaded, 0, every)
    if last:
        loaded = updates.load_state(totals, 1, every)
        first, loaded = lax.optimization_barrier((first, loaded))  # reads are before writes
    totals = updates.store_state(totals, first, 0)
    rows = new_rows(totals, 0)
    _, written = jax.eval_shape(work.run, rows, jnp.int32(0), activations)
    stack = lambda x: jnp.zeros((work.num_layers, *x.shape), x.dtype)  # noqa: E731
    changes = jax.tree.map(stack, written)
    carry = activations, rows, inputs.empty(max(last, 1), activations), changes, totals, loaded
    if last:
        # No slice has the number counter + 1: that is the loop's own sum, which waits for all
        # copies that read the counter.
        carry = lax.fori_loop(3, last + 2, lambda count, carry: one(count - 3, carry), carry)
        carry = one(last - 1, carry, loads=False)
    activations, rows, kept, changes, totals, _ = carry
    outputs, written = work.run(rows, last, activations)
    end = LastLayer(rows=rows, activations=activations, inputs=kept)
    return (outputs, _put_rows(changes, written, last), end), totals


class _Turns:
    """Updates and stores a layer, and loads what the next iteration needs, beside a layer's
    computation.

    An array is not written to while it is read. So in each turn one group of the parameters is
    stored while the next group is loaded, and the link carries both directions all the time. The
    computation is cut into parts of as many FLOPs; a turn begins before its part and ends before
    the next part's first product that depends on it. Without this order the compiler moves copies
    to one end of the iteration, where they have too little beside them (compiled for an H100, Llama
    1.2B: 122 ms of waiting for 22).

    Args:
      updates, totals: see `Updates`.
      waiting: (gradients of the layer that is updated, whether to skip its update).
      loaded: its state.
      index: its number.
      load: `(totals, index, names) -> dicts`.
      following: number of the layer for which it is called.
    """

    def __init__(
        self,
        updates: Updates,
        totals: Tree,
        waiting: tuple[Arrays, Any],
        loaded: Arrays,
        index: jax.Array | int,
        load: Callable[[Any, Any, Sequence[str]], tuple[Arrays, ...]],
        following: jax.Array | int,
    ) -> None:
        self._updates, self._totals, self._loaded, self._index = updates, totals, loaded, index
        (self._grads, self._skip), self._load, self._following = waiting, load, following
        self._coming: dict[int, tuple[Arrays, ...]] = {}

    def differentiate(
        self,
        work: LayerWork,
        rows: Arrays,
        index: jax.Array | int,
        activations: Several,
        sums: _Sums,
    ) -> tuple[Arrays, _Sums]:
        """Recomputes and differentiates a layer, with all turns; the result is that of `_pull`."""

        def run(entering: Several, sums: _Sums) -> tuple[Arrays, _Sums]:
            return _pull(work.run_again(rows, index, entering, at_once=True), index, sums)

        return self._beside(run, activations, sums)

    def compute(
        self, work: LayerWork, rows: Arrays, index: jax.Array | int, activations: Several
    ) -> tuple[Several, Arrays]:
        """Computes a layer, with all turns; the result is that of `work.run`.

        A layer that takes no longer than the first turn is not cut: work beside the second turn
        would only delay its copies (compiled for an H100: 15.0 ms for 13.6).
        """

        def run(entering: Several) -> tuple[Several, Arrays]:
            return without_checkpoints(work.run)(rows, index, entering)

        state = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self._loaded))
        if count_flops(run, activations) > FLOPS_BESIDE_A_BYTE * state:
            return self._beside(run, activations)
        result = run(tuple(join(_first_after(floating(activations), self._run(0)), activations)))
        for turn in range(1, NUM_GROUPS):
            self._run(turn, result[0])
        return result

    def _beside(self, run: Callable[..., Any], activations: Several, *more: Any) -> Any:
        """Returns `run(activations, *more)`, with all turns."""
        turns = iter(range(1, NUM_GROUPS))

        def pause(value: Any, done: Sequence[Any]) -> Any:
            return _after(value, self._run(next(turns), [value, *done]))

        def joined(floats: list, *more: Any) -> Any:
            return run(tuple(join(floats, activations)), *more)

        floats = _first_after(floating(activations), self._run(0))
        result = run_with_pauses(joined, (floats, *more), NUM_GROUPS - 1, pause)
        for turn in turns:
            self._run(turn)
        return result

    def _run(self, turn: int, moment: Any = None) -> Arrays:
        """Runs a turn when `moment` was computed; returns the new state."""
        groups, updates = self._updates.groups, self._updates
        if moment is not None:
            self._skip = _after(self._skip, moment)
        waiting = self._grads, self._skip
        new = updates.update(self._totals, waiting, self._loaded, self._index, groups[turn])
        if turn in self._coming:  # reads are before writes
            new, self._coming[turn] = lax.optimization_barrier((new, self._coming[turn]))
        self._totals = updates.store_state(self._totals, new, self._index)
        following = (turn + 1) % len(groups)
        self._coming[following] = self._load(self._totals, self._following, groups[following])
        return new

    def end(self) -> tuple[Any, tuple[Arrays, ...]]:
        """Returns (totals, the dicts of `load` with all parameters)."""
        found = zip(*(self._coming[turn] for turn in sorted(self._coming)), strict=True)
        return self._totals, tuple({n: x for part in p for n, x in part.items()} for p in found)


def _first_after(values: list, earlier: Tree) -> list:
    """Returns the values, of which the first one is ready only after the arrays in `earlier`."""
    return [_after(values[0], earlier), *values[1:]] if values else values


def _after(value: jax.Array, earlier: Tree) -> jax.Array:
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


def _pull(pull: Callable[[list], Any], index: jax.Array | int, sums: _Sums) -> tuple[Arrays, _Sums]:
    """Differentiates one layer.

    Returns:
      ({name: gradient of the layer's trained weights}, `sums` updated with the layer's gradients).
    """
    gradients, consts, others = sums
    gradients, of_rows, of_consts, of_others = pull(gradients)
    consts = [jnp.add(total, new) for total, new in zip(consts, of_consts, strict=True)]
    others = [put_slice(total, new, index) for total, new in zip(others, of_others, strict=True)]
    return of_rows, (gradients, consts, others)


def _put_rows(stacks: Arrays, rows: Arrays, index: jax.Array | int) -> Arrays:
    return {name: put_slice(stack, rows[name], index) for name, stack in stacks.items()}


# --- values with a gradient and values without one ------------------------------------------------


def has_gradient(value: jax.Array | jax.ShapeDtypeStruct) -> bool:
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
