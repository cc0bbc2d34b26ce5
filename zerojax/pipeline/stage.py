"""Runs one tick of one pipeline stage: its slots, and the buffers in which they store values.

All functions here are traced inside a region that is manual over the mesh axis `stage`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Tree
from zerojax.schedules import ExecutorTable, TickRun
from zerojax.tracing.loops.own_state import Overwritten
from zerojax.tracing.loops.split import (
    SplitPasses,
    interleave,
    split_passes,
    with_gradient,
    without_gradient,
)

Arrays = dict[str, Any]
Several = list[jax.Array]


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """The functions that a stage runs for one microbatch.

    Arguments: `weights` are differentiated parameters and `fixed` are not; `index` is the number of
    a microbatch, int32 []; `extras` are the model's non-parameter arrays, and `changes` are the
    extras that were written.

    Attributes:
      embed: `(outer, extras, index) -> (activations, changes)`, the input of the first virtual
        stage; `outer` are the parameters outside the layers, which are on every stage.
      layers: `(weights, fixed, activations, (extras, index)) -> (activations, rows of changes)`,
        one chunk of layers. `weights` is `{"chunk": ..., "outer": ..., "overwritten": {name: extra
        with the rows of all layers}}`; `fixed` is `{"chunk": ..., "rows": numbers of the chunk's
        layers, int32 [rows of a chunk]}`.
      head: `(outer, extras, index, activations) -> (loss to differentiate, (sums, changes))`;
        `sums` is a tree of float32 [].
      embed_reads, layers_reads, head_reads: names in `outer` that embedding, layers and head read.
      embed_alone, head_alone: whether embedding and head may run on one stage while other stages do
        not run them.
      overwritten: names of the extras that are replaced by their gradient, listed by the part of
        the loss that reads them.
    """

    embed: Callable[..., tuple[Several, Arrays]]
    layers: Callable[..., tuple[Several, Arrays]]
    head: Callable[..., tuple[jax.Array, tuple[Any, Arrays]]]
    embed_reads: frozenset[str]
    layers_reads: frozenset[str]
    head_reads: frozenset[str]
    embed_alone: bool
    head_alone: bool
    overwritten: Overwritten = dataclasses.field(default_factory=Overwritten)


def _take(buffers: Several, slot: jax.Array) -> Several:
    return [lax.dynamic_index_in_dim(x, slot, keepdims=False) for x in buffers]


def _put(buffers: Several, slot: jax.Array, values: Sequence[jax.Array]) -> Several:
    put = lax.dynamic_update_index_in_dim
    return [put(x, v.astype(x.dtype), slot, 0) for x, v in zip(buffers, values, strict=True)]


def _select(chosen: jax.Array, new: Tree, old: Tree) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(chosen, a, b), new, old)


def _only(chosen: jax.Array, alone: bool, function: Callable[[Any], Any], state: Tree) -> Any:
    """Returns `function(state)` if `chosen`, else `state`.

    If `alone`, a `lax.cond` skips the function; otherwise it runs anyway and its result may be
    discarded.
    """
    if alone:
        return lax.cond(chosen, function, lambda state: state, state)
    return _select(chosen, function(state), state)


@dataclasses.dataclass(eq=False)
class Stage:
    """Runs the slots of one tick on this stage.

    The methods take `state`, the carry of the loop over ticks, a dict with these entries. "inputs",
    "gradients", "residuals": buffers of [slots + 1, ...]. "kept": {name: buffer} of extras as a
    forward slot read them. "sent": gradients that the previous tick sends. "chunk grads", "outer
    grads", "sums": accumulators. "overwritten": the maximum so far. "extras": the model's
    non-parameter arrays.

    Attributes:
      overwritten: extras that are replaced by their gradient, with their values at the beginning of
        the step.
    """

    table: ExecutorTable
    work: StageWork
    weights: Arrays
    fixed: Arrays
    outer: Arrays
    rows: jax.Array
    backward: bool
    send: Callable[[jax.Array, str], jax.Array]
    overwritten: Arrays = dataclasses.field(default_factory=dict)
    passes: SplitPasses | None = None
    embed_writes: Sequence[str] = ()
    layers_writes: Sequence[str] = ()
    head_writes: Sequence[str] = ()

    @property
    def stashes_residuals(self) -> bool:
        return self.table.stash == "residuals"

    @property
    def kept_slot(self) -> str:
        """Kind of buffer slot ("residual" or "input") in which extras (non-parameter arrays) are
        stored beside a chunk's values.
        """
        return "residual" if self.stashes_residuals else "input"

    def start(self, extras: Arrays, accumulate_dtype: DTypeLike) -> Arrays:
        """Returns the carry of the loop over ticks before the first tick: empty buffers and zero
        sums.
        """
        self.overwritten = {name: extras[name] for name in self.work.overwritten.names}
        index = jax.ShapeDtypeStruct((), jnp.int32)
        activations, embed_changes = jax.eval_shape(self.work.embed, self.outer, extras, index)
        weights, fixed = jax.eval_shape(self.chunk, jnp.int32(0))
        context = (extras, index)
        given = weights, fixed, activations, context
        _, layer_changes = jax.eval_shape(self.work.layers, *given)
        _, (sums, head_changes) = jax.eval_shape(
            self.work.head, self.outer, extras, index, activations
        )
        self.embed_writes = sorted(embed_changes)
        self.layers_writes, self.head_writes = sorted(layer_changes), sorted(head_changes)
        changing = {*self.embed_writes, *self.layers_writes, *self.head_writes}
        table = self.table
        buffers = lambda like, number: [  # noqa: E731
            jnp.zeros((number + 1, *x.shape), x.dtype) for x in like
        ]
        zeros = lambda tree: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)  # noqa: E731
        state = {
            "inputs": buffers(activations, table.num_inputs),
            "sums": zeros(sums),
            "extras": extras,
        }
        if not self.backward:
            return state
        slots = table.num_residuals if self.stashes_residuals else table.num_inputs
        floating = with_gradient(activations)
        if self.stashes_residuals:
            self.passes = split_passes(self.differentiable(activations), *self.split(given))
            state["residuals"] = buffers(self.passes.stored, slots)
        accumulators = lambda tree: jax.tree.map(  # noqa: E731
            lambda x: jnp.zeros(x.shape, accumulate_dtype), tree
        )
        return state | {
            "gradients": buffers(floating, table.num_gradients),
            "sent": zeros(floating),
            "kept": {
                name: jnp.zeros((slots + 1, *extras[name].shape), extras[name].dtype)
                for name in sorted(changing)
            },
            "chunk grads": accumulators(self.weights),
            "outer grads": accumulators(self.outer),
            "overwritten": {n: jnp.full_like(x, -jnp.inf) for n, x in self.overwritten.items()},
        }

    def tick(self, state: Arrays, row: Arrays, run: TickRun) -> Arrays:
        """Runs one tick on this stage: the slots (forward, backward, weight) of one row of the
        schedule table.

        The order of the slots is described in `zerojax.schedules.lowering`.
        """
        state, received = dict(state), run.receives
        if self.backward:
            self.receive(state, "gradient", "gradients", state["sent"], row, received)
        sent = self.forward(state, row, run) if run.forward else None
        if run.backward:
            self.backward_slot(state, row, run)
        if run.weight:
            self.weight_slot(state, row)
        if sent is not None:
            self.receive(state, "activation", "inputs", sent, row, received)
        return state

    def receive(
        self,
        state: Arrays,
        what: str,
        buffer: str,
        values: Several,
        row: Arrays,
        receives: frozenset[tuple[str, str]],
    ) -> None:
        for direction in ("right", "left", "local"):
            if (what, direction) in receives:
                arrived = [self.send(value, direction) for value in values]
                slot = row[f"receive_{what}_{direction}"]
                state[buffer] = _put(state[buffer], slot, arrived)

    # Chunks: parts of the stage's layers

    def chunk(self, number: jax.Array) -> tuple[Arrays, Arrays]:
        """Returns the parameters of one chunk of layers: (`weights`, `fixed`) for
        `StageWork.layers`.
        """
        outer = {name: self.outer[name] for name in sorted(self.work.layers_reads)}
        cut = lambda tree: jax.tree.map(lambda x: self.cut(x, number), tree)  # noqa: E731
        rows = lax.dynamic_index_in_dim(self.rows, number, keepdims=False)
        fixed = {"chunk": cut(self.fixed), "rows": rows}
        read = self.becoming(self.work.overwritten.layers)
        return {"chunk": cut(self.weights), "outer": outer, "overwritten": read}, fixed

    def cut(self, stack: jax.Array, number: jax.Array) -> jax.Array:
        if self.rows.shape[0] == 1:
            return stack
        size = self.rows.shape[1]
        return lax.dynamic_slice_in_dim(stack, number * size, size)

    def add_chunk(self, state: Arrays, grads: Arrays, number: jax.Array, active: jax.Array) -> None:
        """Adds the gradients of a chunk's weights to the accumulators in `state`, if `active`."""

        def add(total: jax.Array, grad: jax.Array) -> jax.Array:
            mine = self.cut(total, number)
            new = jnp.where(active, mine + grad.astype(total.dtype), mine)
            if self.rows.shape[0] == 1:
                return new
            return lax.dynamic_update_slice_in_dim(total, new, number * self.rows.shape[1], 0)

        state["chunk grads"] = jax.tree.map(add, state["chunk grads"], grads["chunk"])
        self.add_outer(state, grads["outer"], active)

    def add_outer(self, state: Arrays, grads: Arrays, active: jax.Array) -> None:
        add = lambda total, grad: jnp.where(active, total + grad.astype(total.dtype), total)  # noqa: E731
        totals = state["outer grads"]
        state["outer grads"] = {
            name: jax.tree.map(add, total, grads[name]) if name in grads else total
            for name, total in totals.items()
        }

    # Activations: only floating-point arrays have gradients

    def differentiable(self, like: Several) -> Callable[..., Any]:
        """Returns `work.layers` as a function of floating-point activations.

        Its arguments: `(weights, fixed, floating activations, (others, *context))`.
        """

        def layers(weights: Arrays, fixed: Arrays, inputs: Several, context: Tree) -> Any:
            others, extras, index = context
            activations = interleave(inputs, others, like)
            outputs, changes = self.work.layers(weights, fixed, activations, (extras, index))
            return with_gradient(outputs), (without_gradient(outputs), changes)

        return layers

    def split(self, given: tuple[Any, ...]) -> Any:
        """Converts the arguments of `work.layers` to the arguments of the result of
        `differentiable`.
        """
        weights, fixed, activations, (extras, index) = given
        context = without_gradient(activations), extras, index
        return weights, fixed, with_gradient(activations), context

    # Extras

    def write_rows(
        self, state: Arrays, changes: Arrays, rows: jax.Array, chosen: jax.Array
    ) -> None:
        """Writes the rows of extras (non-parameter arrays) that a chunk's layers changed into
        `state`, if `chosen`.
        """
        extras = dict(state["extras"])
        for name, values in changes.items():
            # Indices out of bounds are dropped; a negative one would count from the end.
            number = extras[name].shape[0]
            places = jnp.where((rows >= 0) & chosen, rows, number)
            extras[name] = extras[name].at[places].set(values, mode="drop")
        state["extras"] = extras

    def found(self, state: Arrays, slot: jax.Array) -> Arrays:
        """Returns the extras (non-parameter arrays) that the forward slot read whose results are in
        buffer slot `slot`.
        """
        kept = {
            name: lax.dynamic_index_in_dim(buffer, slot, keepdims=False)
            for name, buffer in state["kept"].items()
        }
        return {**state["extras"], **kept}

    def becoming(self, names: frozenset[str]) -> Arrays:
        """Returns {name: value at the beginning of the step} of overwritten extras (non-parameter
        arrays).
        """
        return {name: self.overwritten[name] for name in sorted(names)}

    def keep_largest(
        self, state: Arrays, new: Arrays, number: jax.Array, active: jax.Array
    ) -> None:
        """Updates the maximum of overwritten extras (non-parameter arrays) with the new rows from a
        chunk's backward pass.
        """
        rows, totals = self.rows[number], dict(state["overwritten"])
        for name, value in new.items():
            places = jnp.where(rows >= 0, rows, value.shape[0])
            mine = jnp.zeros(value.shape[0], bool).at[places].set(active, mode="drop")
            mine = mine.reshape(-1, *[1] * (value.ndim - 1))
            totals[name] = jnp.where(mine, jnp.maximum(totals[name], value), totals[name])
        state["overwritten"] = totals

    # Slots

    def forward(self, state: Arrays, row: Arrays, run: TickRun) -> Several:
        """Runs one chunk of layers and returns its output.

        The embedding runs before the first chunk, the head after the last one.
        """
        index, number = row["forward_microbatch"], row["forward_chunk"]
        active, first = row["forward_active"] > 0, row["forward_first"] > 0
        extras = state["extras"]
        if self.backward:
            slot = row[f"forward_{self.kept_slot}"]
            state["kept"] = {
                name: lax.dynamic_update_index_in_dim(buffer, extras[name], slot, 0)
                for name, buffer in state["kept"].items()
            }
        inputs = _take(state["inputs"], row["forward_input"])
        if run.embed:
            inputs = self.embed(state, inputs, index, first)
            if self.backward and not self.stashes_residuals:
                state["inputs"] = _put(state["inputs"], row["forward_input"], inputs)
        weights, fixed = self.chunk(number)
        given = weights, fixed, inputs, (state["extras"], index)
        if self.passes is None:
            outputs, changes = self.work.layers(*given)
        else:
            floating, (others, changes), stored = self.passes.forward(*self.split(given))
            outputs = interleave(floating, others, inputs)
            state["residuals"] = _put(state["residuals"], row["forward_residual"], stored)
        self.write_rows(state, changes, fixed["rows"], active)
        if run.head:
            self.head(state, row, outputs, index)
        return outputs

    def embed(
        self, state: Arrays, inputs: Several, index: jax.Array | int, first: jax.Array
    ) -> Several:
        """Returns the embedding on the first virtual stage, or the received inputs on the
        others.
        """
        extras = state["extras"]

        def run(_: object) -> Any:
            activations, changes = self.work.embed(self.outer, extras, index)
            return activations, {name: changes[name] for name in self.embed_writes}

        before = inputs, {name: extras[name] for name in self.embed_writes}
        inputs, changed = _only(first, self.work.embed_alone, run, before)
        state["extras"] = {**extras, **changed}
        return inputs

    def head(self, state: Arrays, row: Arrays, outputs: Several, index: jax.Array | int) -> None:
        """Computes the head's loss and its backward pass, on the last virtual stage only.

        The head's backward pass runs in the forward slot, so that all backward (B) slots are alike.
        """
        last, extras, alone = row["forward_last"] > 0, state["extras"], self.work.head_alone
        if not self.backward:

            def evaluate(sums: Tree) -> Any:
                _, (more, _) = self.work.head(self.outer, extras, index, outputs)
                return jax.tree.map(jnp.add, sums, more)

            state["sums"] = _only(last, alone, evaluate, state["sums"])
            return
        floating, others = with_gradient(outputs), without_gradient(outputs)
        read = {name: self.outer[name] for name in sorted(self.work.head_reads)}
        becoming = self.becoming(self.work.overwritten.head)

        def run(before: Tree) -> Any:
            sums, totals, largest, _, _ = before

            def loss_of(read: Arrays, floating: Several, becoming: Arrays) -> Any:
                activations = interleave(floating, others, outputs)
                given = {**self.outer, **read}, {**extras, **becoming}, index, activations
                return self.work.head(*given)

            loss, pull, (more, changes) = jax.vjp(loss_of, read, floating, becoming, has_aux=True)
            grads, gradients, new = pull(jnp.ones_like(loss))
            return (
                jax.tree.map(jnp.add, sums, more),
                jax.tree.map(lambda total, grad: total + grad.astype(total.dtype), totals, grads),
                jax.tree.map(jnp.maximum, largest, new),
                {name: changes[name] for name in self.head_writes},
                gradients,
            )

        before = (
            state["sums"],
            {name: state["outer grads"][name] for name in read},
            {name: state["overwritten"][name] for name in becoming},
            {name: extras[name] for name in self.head_writes},
            [jnp.zeros_like(x) for x in floating],
        )
        sums, totals, largest, changed, gradients = _only(last, alone, run, before)
        state["sums"] = sums
        state["outer grads"] = {**state["outer grads"], **totals}
        state["overwritten"] = {**state["overwritten"], **largest}
        state["extras"] = {**extras, **changed}
        state["gradients"] = _put(state["gradients"], row["forward_gradient"], gradients)

    def backward_slot(self, state: Arrays, row: Arrays, run: TickRun) -> None:
        """Runs a backward (B) slot: gradients of a chunk's inputs.

        It also computes the gradients of the chunk's weights if the schedule has no weight (W)
        slots.
        """
        grads, sent = self.pull(state, row, "backward")
        active, number = row["backward_active"] > 0, row["backward_chunk"]
        self.keep_largest(state, grads["overwritten"], number, active)
        if not self.table.schedule.splits_backward:
            self.add_chunk(state, grads, number, active)
        state["sent"] = sent
        if run.embed_backward:
            self.embed_backward(state, row, sent)

    def weight_slot(self, state: Arrays, row: Arrays) -> None:
        """Runs a weight (W) slot: gradients of a chunk's weights, if B slots do not compute
        them.
        """
        grads, _ = self.pull(state, row, "weight")
        self.add_chunk(state, grads, row["weight_chunk"], row["weight_active"] > 0)

    def pull(self, state: Arrays, row: Arrays, slot: str) -> tuple[Arrays, Several]:
        """Differentiates a chunk: (gradients of its weights, gradients of its floating-point
        inputs).
        """
        weights, fixed = self.chunk(row[f"{slot}_chunk"])
        gradients = _take(state["gradients"], row[f"{slot}_gradient"])
        if self.passes is not None:
            stored = _take(state["residuals"], row[f"{slot}_residual"])
            if slot == "weight":
                # Without the barrier the compiler merges these products with those of the B slot.
                stored, gradients, _ = lax.optimization_barrier((stored, gradients, state["sent"]))
            return self.passes.backward(weights, fixed, stored, gradients)
        place = row[f"{slot}_input"]
        inputs = _take(state["inputs"], place)
        if slot == "weight":
            inputs, gradients, _ = lax.optimization_barrier((inputs, gradients, state["sent"]))
        context = self.found(state, place), row[f"{slot}_microbatch"]
        weights, fixed, floating, context = self.split((weights, fixed, inputs, context))
        layers = self.differentiable(inputs)
        _, pull, _ = jax.vjp(
            lambda weights, floating: layers(weights, fixed, floating, context),
            weights,
            floating,
            has_aux=True,
        )
        return pull(gradients)

    def embed_backward(self, state: Arrays, row: Arrays, sent: Several) -> None:
        """Computes the embedding's gradients after the backward slot of the first virtual stage.

        The forward pass of the embedding is repeated, which costs less than storing its
        intermediate values.
        """
        first, index = row["backward_first"] > 0, row["backward_microbatch"]
        extras = self.found(state, row[f"backward_{self.kept_slot}"])
        read = {name: self.outer[name] for name in sorted(self.work.embed_reads)}
        becoming = self.becoming(self.work.overwritten.embed)

        def run(before: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
            totals, largest = before
            embed = lambda read, becoming: with_gradient(  # noqa: E731
                self.work.embed({**self.outer, **read}, {**extras, **becoming}, index)[0]
            )
            _, pull = jax.vjp(embed, read, becoming)
            grads, new = pull(sent)
            add = lambda total, grad: total + grad.astype(total.dtype)  # noqa: E731
            return jax.tree.map(add, totals, grads), jax.tree.map(jnp.maximum, largest, new)

        before = (
            {name: state["outer grads"][name] for name in read},
            {name: state["overwritten"][name] for name in becoming},
        )
        totals, largest = _only(first, self.work.embed_alone, run, before)
        state["outer grads"] = {**state["outer grads"], **totals}
        state["overwritten"] = {**state["overwritten"], **largest}
