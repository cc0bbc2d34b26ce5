"""Runs forward and backward pass of a batch over pipeline stages, at each ZeRO stage.

The pass is one `shard_map`, manual over the data axes and `stage`; the compiler partitions tensor
parallelism. Parameters that are gathered once per step are gathered before the loop over ticks (a
tick is a row of the schedule table; each stage runs one slot of each kind in it). Gradients that
ZeRO scatters inside the backward pass are scattered in every backward slot, and parameters that
ZeRO gathers where they are read are gathered in every slot.

The loop over ticks is not differentiated. A backward slot runs the backward pass of one chunk of
layers for one microbatch, from values that its forward slot stored in a buffer; so the schedule
table decides which values are in memory when. Tracing divides the loop into runs of ticks that use
the same slots. Idle stages compute on old values, and the results are discarded. This costs
nothing, because all stages wait for the slowest one; a `cond` would let only some devices reach a
collective. The embedding and the head run under a `cond` if they contain no collective. With layer
drop, layers run under a `cond` that is the same on all devices of a stage, so that it may contain
collectives over the other axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Tree
from zerojax.passes import (
    PassConfig,
    build_reads,
    build_rewriting,
    for_evaluation,
    map_forward,
    map_gradients,
    model_state,
    prepare_parameters,
    reduce_gradients,
    run_microbatch,
    shard_key,
    split_batch,
    values_to_read,
)
from zerojax.pipeline.stage import Stage, StageWork
from zerojax.placement.device_mesh import MANUAL_AXES, MODEL, STAGE
from zerojax.placement.state_layout import PipelineLayout
from zerojax.schedules import ExecutorTable, TickRun, forward_schedule, lower
from zerojax.tracing.jaxpr import holds_collectives
from zerojax.tracing.loops import LossPieces, cut_loss
from zerojax.tracing.protocol import Loss
from zerojax.transport.sums import over_auto_axes, sum_replicated

Arrays = dict[str, Any]

Several = list[jax.Array]


def build_gradients(config: PassConfig) -> Callable[..., tuple[Arrays, Arrays, Arrays]]:
    """Builds the gradient function of a pipeline, with the interface of
    `passes.build_gradients`.

    Stacked parameters have their layers in the order of `LeafPlacement.layer_rows`.
    """
    layout = _layout(config)

    def local(
        params: Arrays,
        frozen: Arrays,
        extras: Arrays,
        key_data: jax.Array,
        batch: Arrays,
        loss_factor: jax.Array | None,
        scales: jax.Array | None = None,
    ):
        weights = _Weights(config, layout, params, frozen)
        microbatches = split_batch(batch, config.num_microbatches)
        pieces = weights.cut(extras, key_data, microbatches, train=True)
        counts, counted = _count(pieces, extras, config.num_microbatches)
        work = weights.work(pieces, counts, key_data, microbatches, loss_factor, scales)
        found = weights.execute(layout.table, work, extras)
        assert found.chunks is not None
        assert found.outer is not None
        grads = {**found.chunks, **found.outer}
        grads = reduce_gradients(config, {name: grads[name] for name in params})
        after = {**_agree_on_extras(layout, extras, found), **counted}
        overwritten = config.model.overwritten
        unread = model_state.pick(extras, overwritten - found.overwritten.keys())
        after |= {**jax.tree.map(jnp.zeros_like, unread), **found.overwritten}
        after = model_state.agree(
            extras, after, overwritten, config.counted, overwritten_over=MANUAL_AXES
        )
        return sum_replicated(found.sums, over=MANUAL_AXES), grads, after

    return map_gradients(config, local)


def build_forward(config: PassConfig, function: Loss) -> Callable[..., Arrays]:
    """Builds the forward function of a pipeline, with the interface of
    `passes.build_forward`.

    The rows of a data shard are divided into the largest number of microbatches, at most that of
    training, that divides them.
    """
    layout = _layout(config)
    config = dataclasses.replace(config, loss=function)

    def local(params: Arrays, frozen: Arrays, extras: Arrays, key_data: jax.Array, batch: Arrays):
        rows = jax.tree.leaves(batch)[0].shape[0]
        count = max(n for n in range(1, config.num_microbatches + 1) if rows % n == 0)
        table = lower(forward_schedule(layout.schedule, count))
        microbatches = split_batch(batch, count)
        evaluation = _for_evaluation(config, params, frozen, extras, microbatches)
        weights = _Weights(evaluation, layout, params, frozen)
        pieces = weights.cut(extras, key_data, microbatches, train=False)
        counts, _ = _count(pieces, extras, count)
        work = weights.work(pieces, counts, key_data, microbatches, None, None)
        found = weights.execute(table, work, extras, backward=False)
        return sum_replicated(found.sums, over=MANUAL_AXES)

    return map_forward(config, local)


def _layout(config: PassConfig) -> PipelineLayout:
    assert config.pipeline is not None
    return config.pipeline


def _rows(layout: PipelineLayout) -> np.ndarray:
    """Returns the number of the layer in each row: int32 [stages, chunks, rows of a chunk]."""
    schedule = layout.schedule
    shape = schedule.num_stages, schedule.num_chunks, layout.chunk_rows
    return np.asarray(layout.rows, np.int32).reshape(shape)


def _activation_spec(config: PassConfig) -> P:
    return P(None, MODEL, None) if config.sequence_sharding else P()


def _for_evaluation(
    config: PassConfig, params: Arrays, frozen: Arrays, extras: Arrays, microbatches: Arrays
) -> PassConfig:
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), microbatches)
    return for_evaluation(config, {**params, **frozen}, extras, one)


class _Weights:
    """Parameters of one device during a pass; those that are gathered once per step are gathered.

    Attributes:
      config: configuration of the pass.
      layout: distribution of the layers over stages.
      frozen: frozen parameters, as stored.
      inputs: {name: differentiated value}.
      constants: {name: value that is not differentiated}. A name is in both dicts if its gathered
        value is read and its shard is differentiated.
    """

    def __init__(
        self, config: PassConfig, layout: PipelineLayout, params: Arrays, frozen: Arrays
    ) -> None:
        self.config, self.layout, self.frozen = config, layout, frozen
        self.inputs, self.constants = prepare_parameters(config, params, frozen)
        self.on_read = build_reads(config, frozen)
        rewriting = build_rewriting(config, frozen)
        self.rewritten = rewriting if self.on_read else lambda function: function

    def of_stages(self, arrays: Arrays) -> Arrays:
        return {name: x for name, x in arrays.items() if name in self.layout.stacked}

    def of_all(self, arrays: Arrays) -> Arrays:
        return {name: x for name, x in arrays.items() if name not in self.layout.stacked}

    def bind(self, inputs: Arrays, constants: Arrays) -> Arrays:
        """Returns the values that the model reads: for each parameter a value, a shard, or (whole,
        shard).
        """
        frozen = {name: None for name in constants if name in self.frozen}
        return values_to_read(self.config, inputs, constants, frozen)

    def cut(self, extras: Arrays, key_data: jax.Array, microbatches: Arrays, *, train: bool):
        """Splits the loss of one microbatch into embedding, layers and head.

        The loss is traced with the layers of all stages.
        """
        layers = self.layout.num_layers
        scaled = train and self.config.scale_layers is not None

        def run(values: Arrays, extras: Arrays, key: jax.Array, batch: Arrays):
            return run_microbatch(
                self.config, values, extras, key, batch, self.on_read, train=train
            )

        def whole(name: str, value: jax.Array) -> Any:
            stacked = name in self.layout.stacked
            shape = lambda x: (layers, *x.shape[1:]) if stacked else x.shape  # noqa: E731
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(shape(x), x.dtype), value)

        values = self.bind(self.inputs, self.constants)
        return cut_loss(
            run,
            {name: whole(name, value) for name, value in values.items()},
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), extras),
            jax.eval_shape(shard_key, key_data),
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), microbatches),
            padding=-1 in self.layout.rows,
            skips=self.layout.skips_padding and not scaled,
            masks=not scaled,
            overwritten=self.config.model.overwritten,
        )

    def work(
        self,
        pieces: LossPieces,
        counts: Arrays,
        key_data: jax.Array,
        microbatches: Arrays,
        loss_factor: jax.Array | None,
        scales: jax.Array | None,
    ) -> StageWork:
        """Returns the functions that a stage runs for one microbatch.

        Args:
          pieces: loss, split by `cut`.
          counts: {name: [microbatches, ...]}, extras (non-parameter arrays) computed by `_count`.
          key_data: data of the step's random key.
          microbatches: batch of this data shard, [microbatches, rows, ...].
          loss_factor: factor of the loss before differentiation; None: 1.
          scales: the scale of each layer, float32 [microbatches, layers]; None: they have none.
        """
        key = shard_key(key_data)
        fixed = self.of_all(self.constants)
        run_embed, run_head = self.rewritten(pieces.embed), self.rewritten(pieces.head)
        run_layers = self.rewritten(pieces.layers)
        if scales is not None:
            assert self.config.scale_layers is not None
            run_layers = self.config.scale_layers(run_layers, ())

        def context(extras: Arrays, index: jax.Array) -> tuple[Arrays, jax.Array, Arrays]:
            take = lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False)  # noqa: E731
            mine, batch = jax.tree.map(take, (counts, microbatches))
            # The same keys as without a pipeline: a single microbatch has the key of the step.
            own = key if self.config.num_microbatches == 1 else jax.random.fold_in(key, index)
            return {**extras, **mine}, own, batch

        def embed(outer: Arrays, extras: Arrays, index: jax.Array):
            activations, changes = run_embed(self.bind(outer, fixed), *context(extras, index))
            return list(activations), changes

        def layers(weights: Arrays, given: Arrays, activations: list, state: Tree):
            outer = {**self.of_all(self.inputs), **weights["outer"]}
            chunk = self.bind(weights["chunk"], given["chunk"])
            extras, index = state
            read = context({**extras, **weights["overwritten"]}, index)
            rest = *read, given["rows"], tuple(activations)
            drawn = () if scales is None else (_scales_of(given["rows"], scales[index]),)
            outputs, changes = run_layers(chunk, self.bind(outer, fixed), *rest, *drawn)
            return list(outputs), changes

        def head(outer: Arrays, extras: Arrays, index: jax.Array, activations: list):
            values = self.bind(outer, fixed)
            given = *context(extras, index), tuple(activations)
            sums, changes = run_head(values, *given)
            scaled = sums["loss"] if loss_factor is None else sums["loss"] * loss_factor
            return scaled, (sums, changes)

        assert not (self.layout.skips_padding and self.layout.stacked & self.on_read.keys())
        trained = self.of_all(self.inputs).keys()

        def may_run_alone(reads: frozenset[str], program: Jaxpr) -> bool:
            """Returns whether embedding or head may run on one stage only: it contains no
            collective.
            """
            collective = holds_collectives(program) or reads & self.on_read.keys()
            return self.config.mesh.shape[MODEL] == 1 and not collective

        return StageWork(
            embed=embed,
            layers=layers,
            head=head,
            embed_reads=frozenset(trained & pieces.embed_reads),
            layers_reads=frozenset(trained & pieces.layers_reads_outer),
            head_reads=frozenset(trained & pieces.head_reads),
            embed_alone=may_run_alone(pieces.embed_reads, pieces.loop.embed),
            head_alone=may_run_alone(pieces.head_reads, pieces.loop.head),
            overwritten=pieces.overwritten,
        )

    def execute(
        self, table: ExecutorTable, work: StageWork, extras: Arrays, *, backward: bool = True
    ) -> Results:
        """Runs all microbatches of a schedule table with these parameters."""
        return execute(
            table,
            work,
            weights=self.of_stages(self.inputs),
            fixed=self.of_stages(self.constants),
            outer=self.of_all(self.inputs),
            rows=_rows(self.layout),
            extras=extras,
            accumulate_dtype=self.config.precision.accumulate_dtype,
            activation_spec=_activation_spec(self.config),
            backward=backward,
        )


def _scales_of(rows: jax.Array, scales: jax.Array) -> jax.Array:
    """Returns the scale of each row of a chunk, 0 for padding.

    Args:
      rows: number of the layer in each row, -1 for padding.
      scales: scale of each layer for one microbatch. All devices of a stage have the same rows and
        scales, so a layer in a branch may contain collectives over the other axes.
    """
    return jnp.where(rows < 0, 0, scales[jnp.maximum(rows, 0)])


def _count(pieces: LossPieces, extras: Arrays, number: int) -> tuple[Arrays, Arrays]:
    """Computes in advance the extras (non-parameter arrays) that only count forward passes, such as
    counts of random draws.

    Returns:
      ({name: [microbatches, ...], value before each}, {name: value afterwards}).
    """

    def one(extras: Arrays, _: None) -> tuple[Arrays, Arrays]:
        after = pieces.count(extras)
        return {**extras, **after}, {name: extras[name] for name in after}

    after, found = lax.scan(one, extras, length=number)
    return found, {name: after[name] for name in found}


def _agree_on_extras(layout: PipelineLayout, before: Arrays, found: Results) -> Arrays:
    """Copies each extra (non-parameter array), after the pass, from the stage that writes it to all
    stages.
    """
    stage, schedule = lax.axis_index(STAGE), layout.schedule
    first, _ = schedule.locate(0)
    last, _ = schedule.locate(schedule.num_virtual_stages - 1)
    rows = jnp.asarray(_rows(layout)).reshape(schedule.num_stages, -1)[stage]
    mine = jnp.zeros(layout.num_layers, bool).at[jnp.where(rows < 0, layout.num_layers, rows)]
    mine = mine.set(True, mode="drop")
    wrote: Mapping[str, jax.Array] = {
        **dict.fromkeys(found.embed_writes, stage == first),
        **dict.fromkeys(found.head_writes, stage == last),
        **dict.fromkeys(found.layers_writes, mine),
    }

    def own(name: str, value: jax.Array) -> jax.Array:
        chosen = wrote[name].reshape(-1, *[1] * (value.ndim - 1)) if value.ndim else wrote[name]
        return jnp.where(chosen, value, jnp.zeros_like(value))

    changed = {name: own(name, found.extras[name]) for name in sorted(wrote)}
    summed = sum_replicated(changed, over=(STAGE,)) if changed else {}
    return {**before, **summed}


@dataclass(frozen=True, kw_only=True)
class Results:
    """The results of a pass over all microbatches on one stage, not summed over stages.

    Attributes:
      sums: sums of loss and metrics of the microbatches whose head ran on this stage.
      chunks, outer: gradients of this stage's layers and of all other parameters, summed over
        microbatches; None without a backward pass.
      extras: extras (non-parameter arrays) on this stage after the pass.
      overwritten: {name: elementwise maximum of the new values from this stage's backward passes}
        for extras that are replaced by their gradient; minus infinity if no backward pass ran.
      embed_writes, layers_writes, head_writes: names of the extras that embedding, layers and head
        write. A stage writes only its own layers' rows.
    """

    sums: Tree
    chunks: Arrays | None
    outer: Arrays | None
    extras: Arrays
    overwritten: Arrays
    embed_writes: Sequence[str]
    layers_writes: Sequence[str]
    head_writes: Sequence[str]


def execute(
    table: ExecutorTable,
    work: StageWork,
    *,
    weights: Arrays,
    fixed: Arrays,
    outer: Arrays,
    rows: np.ndarray,
    extras: Arrays,
    accumulate_dtype: DTypeLike,
    activation_spec: P,
    backward: bool = True,
) -> Results:
    """Runs this stage's part of all microbatches, forward and backward, inside a `shard_map`.

    Args:
      table: schedule, lowered to a table with one row per tick.
      work: functions that a stage runs for one microbatch.
      weights, fixed: differentiated and other values of this stage's layers: trees of stacks
        with the rows in order of the chunks.
      outer: differentiated parameters outside the layers, the same on every stage.
      rows: number of the layer in each row, -1 for padding: int32 [stages, chunks, rows of a
        chunk].
      extras: {name: array of the model that is no parameter}, the same on every stage.
      accumulate_dtype: dtype in which gradients are summed.
      activation_spec: partition spec of an activation over the axes that the compiler partitions.
      backward: False runs only the forward slots.
    """
    stage = lax.axis_index(STAGE)
    machine = Stage(
        table=table,
        work=work,
        weights=weights,
        fixed=fixed,
        outer=outer,
        rows=jnp.asarray(rows)[stage],
        backward=backward,
        send=_build_send(table, activation_spec),
    )
    names, columns = list(table.columns), np.stack(list(table.columns.values()), axis=-1)
    state = machine.start(extras, accumulate_dtype)
    for run in table.runs:
        run = run if backward else _forward_only(run)
        if not (run.forward or run.backward or run.weight):
            continue

        def tick(state: Arrays, cells: jax.Array, run: TickRun = run) -> tuple[Arrays, None]:
            mine = lax.dynamic_index_in_dim(cells, stage, keepdims=False)
            row = {name: mine[at] for at, name in enumerate(names)}
            return machine.tick(state, row, run), None

        state, _ = lax.scan(tick, state, jnp.asarray(columns[run.start : run.stop]))
    return Results(
        sums=state["sums"],
        chunks=state["chunk grads"] if backward else None,
        outer=state["outer grads"] if backward else None,
        extras=state["extras"],
        overwritten=state["overwritten"] if backward else {},
        embed_writes=machine.embed_writes,
        layers_writes=machine.layers_writes,
        head_writes=machine.head_writes,
    )


def _forward_only(run: TickRun) -> TickRun:
    receives = frozenset(item for item in run.receives if item[0] == "activation")
    return run._replace(backward=False, weight=False, receives=receives)


def _build_send(table: ExecutorTable, spec: Any) -> Callable[[jax.Array, str], jax.Array]:
    """Builds the exchange between stages: `(value, direction) -> value received from the
    neighbour`.
    """
    number = table.schedule.num_stages
    right = [(stage, (stage + 1) % number) for stage in range(number)]
    pairs = {"right": right, "left": [(target, source) for source, target in right]}
    if not table.wraps:
        pairs = {name: [p for p in two if abs(p[0] - p[1]) == 1] for name, two in pairs.items()}
        if number == 2:  # both neighbours are the same stage, but only one direction is adjacent
            pairs = {"right": [(0, 1)], "left": [(1, 0)]}

    def send(value: jax.Array, direction: str) -> jax.Array:
        if direction == "local":
            return value
        permute = lambda x: lax.ppermute(x, STAGE, pairs[direction])  # noqa: E731
        here = spec if value.ndim == len(spec) else jax.sharding.PartitionSpec()
        return over_auto_axes(permute, here, here)(value)

    return send
