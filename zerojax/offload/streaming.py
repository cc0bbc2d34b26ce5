"""Runs forward and backward pass with streamed layers, whose weights are in host memory.

As without offload, the pass is one `shard_map`, manual over the data axes. The traced loss is
divided into the embedding (the part before the layers), the layers, and the head (the part after
them); each part is differentiated separately. Parameters that are not stacked, and small stacks,
are read as in `zero`. A stack in host memory is treated as at ZeRO stage 3, whatever the stage is:
a layer's shard is copied to the device and all-gathered there; its gradient is reduced in every
microbatch and copied back to the host.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from zerojax.config.mesh import DEVICE
from zerojax.config.tree_types import Tree
from zerojax.models.losses import no_sums
from zerojax.offload.streaming_layers import (
    Inputs,
    LayerWork,
    Updates,
    UpdatesInForward,
    floating,
    join,
    run_backward,
    run_delayed_backward,
    run_forward,
    run_updating_backward,
    run_updating_forward,
)
from zerojax.offload.streaming_rows import (
    GradientSink,
    GradientTotals,
    LayerRows,
    device_inputs,
    host_inputs,
    split_by_name,
)
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
from zerojax.placement.device_mesh import MODEL
from zerojax.tracing.loops import cut_loss
from zerojax.tracing.protocol import Loss
from zerojax.tracing.tiled_products import WeightProduct
from zerojax.tracing.tiled_programs import error_of_other_read
from zerojax.transport.sums import sum_replicated

Arrays = dict[str, Any]


def build_gradients(config: PassConfig) -> Callable[..., tuple[Arrays, Arrays, Arrays]]:
    """Builds the gradient function of a batch with streamed weights.

    Arguments, results and sums are those of `zerojax.passes.build_gradients`, with two
    differences. Gradients of streamed parameters are in pinned host memory, in the reduce dtype, or
    in the accumulate dtype if there are several microbatches. `sums["squares"]` is {streamed
    parameter: float32 [], sum of squares of its gradient over all shards}; like the gradients, the
    sum is divided neither by the weight nor by the loss factor.
    """

    def local(
        params: Arrays,
        frozen: Arrays,
        extras: Arrays,
        key_data: jax.Array,
        batch: Arrays,
        loss_factor: jax.Array | None,
    ):
        microbatches = split_batch(batch, config.num_microbatches)
        weights = StreamedPass(
            config, params, frozen, extras, key_data, one_of(microbatches), train=True
        )
        given = extras, shard_key(key_data), microbatches, loss_factor
        sums, outer, totals, after = _all_microbatches(weights, *given)
        resident = reduce_gradients(config, {**outer, **totals["device"]})
        grads = {**resident, **totals["host"]}
        sums = sum_replicated(sums)
        sums["squares"] = weights.rows.sum_squares(totals["squares"])
        agreed = model_state.agree(extras, after, config.model.overwritten, config.counted)
        return sums, {name: grads[name] for name in params}, agreed

    return map_gradients(config, local)


def _all_microbatches(
    weights: StreamedPass,
    extras: Arrays,
    key: jax.Array,
    microbatches: Arrays,
    loss_factor: jax.Array | None,
) -> tuple[Arrays, Arrays, Arrays, Arrays]:
    """Runs forward and backward pass of all microbatches of this data shard, one after the other.

    Returns:
      (sums of loss and metrics, gradients outside the layers, `GradientTotals` of the layers,
      extras (non-parameter arrays)).
    """
    number = weights.config.num_microbatches
    sink = GradientTotals(rows=weights.rows, num_layers=weights.pieces.num_layers)
    totals = sink.empty(adds=number > 1)
    if number == 1:
        batch = jax.tree.map(lambda x: x[0], microbatches)
        return weights.differentiate(extras, key, batch, loss_factor, sink, totals)

    def one(carry: Tree, item: Tree) -> tuple[Any, None]:
        sums, outer, totals, extras = carry
        index, batch = item
        own = jax.random.fold_in(key, index)
        adding = dataclasses.replace(sink, first=index == 0)
        more, new, totals, extras = weights.differentiate(
            extras, own, batch, loss_factor, adding, totals
        )
        sums = jax.tree.map(jnp.add, sums, more)
        outer = jax.tree.map(lambda total, grad: total + grad.astype(total.dtype), outer, new)
        return (sums, outer, totals, extras), None

    dtype = weights.config.precision.accumulate_dtype
    zeros = {name: jnp.zeros(x.shape, dtype) for name, x in weights.outer.items()}
    start = no_sums(weights.config.metrics), zeros, totals, extras
    return lax.scan(one, start, (jnp.arange(number), microbatches))[0]


def build_forward(config: PassConfig, function: Loss) -> Callable[..., Arrays]:
    """Builds the forward function with streamed weights; interface of `zero.build_forward`."""
    config = dataclasses.replace(config, loss=function)

    def local(params: Arrays, frozen: Arrays, extras: Arrays, key_data: jax.Array, batch: Arrays):
        evaluation = for_evaluation(config, {**params, **frozen}, extras, batch)
        one = one_of(split_batch(batch, 1))
        weights = StreamedPass(evaluation, params, frozen, extras, key_data, one, train=False)
        return sum_replicated(weights.evaluate(extras, shard_key(key_data), batch))

    return map_forward(config, local)


def one_of(microbatches: Arrays) -> Arrays:
    """Returns the shapes and dtypes of one microbatch as `ShapeDtypeStruct`s."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), microbatches)


class StreamedPass:
    """Parameters of one device during a pass, and the parts of the loss that read them.

    Attributes:
      rows: the stacked parameters of the layers.
      outer: {name: differentiated value} of all parameters outside the layers.
      whole: {name: `ShapeDtypeStruct`} of all parameters as the model reads them.
    """

    def __init__(
        self,
        config: PassConfig,
        params: Arrays,
        frozen: Arrays,
        extras: Arrays,
        key_data: jax.Array,
        batch: Arrays,
        *,
        train: bool,
        prepared: tuple[Arrays, Arrays] | None = None,
    ) -> None:
        """Traces the loss, divides it at the layers, and prepares the parameters.

        Args:
          config: configuration of the pass.
          params, frozen: stored trained and frozen parameters; `ShapeDtypeStruct`s if `prepared` is
            given.
          extras, key_data: non-parameter arrays and random key data of the step.
          batch: one microbatch, as `ShapeDtypeStruct`s.
          train: whether the model runs in training mode.
          prepared: result of `zero.prepare_parameters` for the parameters that are not streamed;
            None computes it.
        """
        assert config.offload is not None
        self.config, self.frozen = config, frozen
        waiting, here = split_by_name({**params, **frozen}, config.offload.by_layer)
        of = lambda names: {name: here[name] for name in names if name in here}  # noqa: E731
        inputs, constants = prepared or prepare_parameters(config, of(params), of(frozen))
        abstract = _abstract(extras), jax.eval_shape(shard_key, key_data), batch
        whole = {name: self._whole(name, x) for name, x in {**params, **frozen}.items()}
        self.whole = whole
        stacked = self._stacked(whole, *abstract, train=train)
        resident, self.outer = split_by_name(inputs, stacked)
        fixed, self.constants = split_by_name(constants, stacked)
        self.rows = LayerRows(config, waiting, resident, fixed, frozenset(frozen))
        self.on_read = split_by_name(build_reads(config, frozen), stacked)[1]
        self.rewriting = build_rewriting(config, frozen)
        values = {name: _abstract(x) for name, x in self.bind(self.outer).items()}
        values |= {name: whole[name] for name in self.rows.names}
        self.pieces = cut_loss(self._run(self.on_read, train), values, *abstract)
        pieces = self.pieces
        self._products = self._find_products()
        self.embed = self._rewritten(pieces.embed, pieces.embed_reads)
        self.surround = self._rewritten(pieces.surroundings, pieces.layers_reads_outer)
        self.head = self._rewritten(pieces.head, pieces.head_reads)
        self.activation_specs = [
            P(None, MODEL, None) if config.sequence_sharding and x.ndim == 3 else P()
            for x in self.pieces.activations
        ]

    def _whole(self, name: str, stored: Any) -> jax.ShapeDtypeStruct:
        """Returns shape and compute dtype of a parameter as the model reads it on this device."""
        dtype = stored.dtype
        if jnp.issubdtype(dtype, jnp.floating):
            dtype = self.config.precision.compute_dtype
        placement = self.config.placement
        shape = placement.leaves[name].device_shape(placement.axis_sizes)
        return jax.ShapeDtypeStruct(shape, dtype)

    def _run(self, on_read: Arrays, train: bool) -> Callable[..., Any]:
        def run(values: Arrays, extras: Arrays, key: jax.Array, batch: Arrays) -> Any:
            return run_microbatch(self.config, values, extras, key, batch, on_read, train=train)

        return run

    def _rewritten(self, piece: Callable[..., Any], reads: frozenset[str]) -> Callable[..., Any]:
        return self.rewriting(piece) if reads & self.on_read.keys() else piece

    def _stacked(
        self, whole: Arrays, extras: Arrays, key: jax.Array, batch: Arrays, *, train: bool
    ) -> frozenset[str]:
        """Returns the names of the parameters that the loop over layers slices."""
        assert self.config.offload is not None
        streamed = self.config.offload.by_layer
        try:
            # What is done on reads depends on which parameters are stacked, so the loss is cut
            # without it.
            stacked = cut_loss(self._run({}, train), whole, extras, key, batch).stacked
        except ValueError as error:
            raise ValueError(_not_sliced(streamed)) from error
        if streamed - stacked:
            raise ValueError(_not_sliced(streamed - stacked))
        return stacked

    def bind(self, outer: Arrays) -> Arrays:
        """Returns the values that the model reads for parameters outside the layers."""
        frozen = {name: None for name in self.constants if name in self.frozen}
        return values_to_read(self.config, outer, self.constants, frozen)

    # --- layers -----------------------------------------------------------------------------------

    def work(self, consts: Tree, others: Tree, *, around: bool) -> LayerWork:
        return LayerWork(
            num_layers=self.pieces.num_layers,
            load=self.rows.load,
            layer=self._layer,
            consts=consts,
            others=others,
            trained=self.rows.trained,
            around=around,
            sinks=self.rows.sinks,
        )

    def _find_products(self) -> dict[str, WeightProduct]:
        """Finds, for each stack that is gathered in tiles, the matrix product that reads it."""
        if not self.rows.tiles:
            return {}
        found = self.pieces.find_products()
        products = {n: p for n in self.rows.tiles if isinstance(p := found[n], WeightProduct)}
        for name in self.rows.tiles.keys() - products.keys():
            raise error_of_other_read(name, str(found[name]))
        return products

    def _layer(self, rows: Arrays, consts: Tree, others: Tree, activations: Tree) -> Any:
        sharded = {n: self.rows.sharded(n, rows[n], p) for n, p in self._products.items()}
        return self.pieces.layer({**rows, **sharded}, consts, others, activations)

    def inputs(self) -> Inputs:
        """Returns the storage for the inputs of layers between forward and backward pass."""
        assert self.config.offload is not None
        if self.config.offload.activations == DEVICE:
            return device_inputs()
        return host_inputs(self.activation_specs)

    # --- parts that are differentiated one by one -------------------------------------------------

    def outer_reads(self) -> dict[str, Arrays]:
        """Returns the trained parameters outside the layers that each part of the loss reads.

        The result is {part: {name: differentiated value}}. Parts are "embed", "around" (the
        computation of the layers' other inputs) and "head".
        """
        pieces, trained = self.pieces, self.outer.keys()
        reads = {
            "embed": trained & pieces.embed_reads,
            "around": trained & pieces.layers_reads_outer,
            "head": trained & pieces.head_reads,
        }
        return {part: {n: self.outer[n] for n in sorted(names)} for part, names in reads.items()}

    def _bind_chosen(self, chosen: Arrays) -> Arrays:
        return self.bind({**self.outer, **chosen})

    def embedding(self, context: tuple[Arrays, Any, Arrays]) -> Callable[[Arrays], Any]:
        """Builds the embedding: `(values) -> (floating activations, (activations, changes of
        extras))`.
        """

        def embed(chosen: Arrays) -> Any:
            activations, changes = self.embed(self._bind_chosen(chosen), *context)
            return floating(activations), (activations, changes)

        return embed

    def surrounding(self, context: tuple[Arrays, Any, Arrays]) -> Callable[[Arrays], Any]:
        """Builds the function that computes the layers' other inputs, such as masks.

        It maps `(values)` to `((floating constants, floating rows), (constants, rows))`: constants
        are the same for every layer, rows are stacked with one row per layer.
        """

        def surround(chosen: Arrays) -> Any:
            consts, others = self.surround(self._bind_chosen(chosen), *context)
            return (floating(consts), floating(others)), (consts, others)

        return surround

    def ending(
        self, context: tuple[Arrays, Any, Arrays], outputs: Tree, loss_factor: jax.Array | None
    ) -> Callable[[Arrays, list], Any]:
        """Builds the head: `(values, floating outputs) -> (scaled loss, (sums, changes of
        extras))`.

        Args:
          context: (extras (non-parameter arrays), random key, batch) of the microbatch.
          outputs: outputs of the last layer.
          loss_factor: factor of the loss; None: 1.
        """

        def head(chosen: Arrays, floats: list) -> Any:
            joined = tuple(join(floats, outputs))
            sums, changes = self.head(self._bind_chosen(chosen), *context, joined)
            scaled = sums["loss"] if loss_factor is None else sums["loss"] * loss_factor
            return scaled, (sums, changes)

        return head

    def outer_gradients(self, found: list[Arrays]) -> Arrays:
        """Adds up the gradients of each parameter outside the layers over the parts of the loss."""
        return {
            name: _sum([f[name] for f in found if name in f], x) for name, x in self.outer.items()
        }

    # --- a microbatch -----------------------------------------------------------------------------

    def evaluate(self, extras: Arrays, key: jax.Array, batch: Arrays) -> Arrays:
        """Runs the forward pass; returns the sums of loss and metrics (see
        `zerojax.losses.as_sums`).
        """
        context, bound = (extras, key, batch), self.bind(self.outer)
        activations, _ = self.embed(bound, *context)
        around = self.surround(bound, *context)
        work = self.work(*around, around=False)
        outputs, _, _ = run_forward(work, activations, None)
        return self.head(bound, *context, outputs)[0]

    def differentiate(
        self,
        extras: Arrays,
        key: jax.Array,
        batch: Arrays,
        loss_factor: jax.Array | None,
        sink: GradientSink | Updates,
        totals: Tree,
    ) -> tuple[Arrays, Arrays, Any, Arrays]:
        """Runs forward and backward pass of one microbatch; the layers' gradients go to `sink`.

        Returns:
          (sums of loss and metrics, gradients outside the layers, new totals of `sink`, extras
          (non-parameter arrays) after the microbatch).
        """
        context = extras, key, batch
        pieces, given = self.pieces, self.outer_reads()
        embed, surround = self.embedding(context), self.surrounding(context)
        _, pull_embed, (activations, embed_changes) = jax.vjp(embed, given["embed"], has_aux=True)
        if given["around"]:
            _, pull_around, around = jax.vjp(surround, given["around"], has_aux=True)
        else:
            pull_around, around = None, surround({})[1]
        work, inputs = self.work(*around, around=pull_around is not None), self.inputs()
        updated: Arrays = {}
        if isinstance(sink, UpdatesInForward):
            ran, after = run_updating_forward(work, activations, inputs, totals, sink)
            updated, totals = sink.divide(after)
            work = dataclasses.replace(work, load=functools.partial(sink.load_new, updated))
        else:
            ran = run_forward(work, activations, inputs)
        outputs, layer_changes, last = ran
        head = self.ending(context, outputs, loss_factor)
        scaled, pull_head, (sums, head_changes) = jax.vjp(
            head, given["head"], floating(outputs), has_aux=True
        )
        of_head, gradients = pull_head(jnp.ones_like(scaled))
        if self.rows.tiles:
            # The layers wait until the head's gradients are reduce-scattered. Otherwise XLA first
            # adds both gradients of a tied table, and keeps the head's unsharded gradient in
            # memory during the backward pass of the layers.
            of_head, gradients = lax.optimization_barrier((of_head, gradients))
        totals = sink.start(totals, sums)
        pulled = work, last, inputs, gradients, totals
        if isinstance(sink, UpdatesInForward) or not isinstance(sink, Updates):
            gradients, consts, others, totals = run_backward(*pulled, take=sink.take)
        else:
            run = run_delayed_backward if sink.is_delayed else run_updating_backward
            gradients, consts, others, totals = run(*pulled, updates=sink)
        totals = {**totals, **updated}
        found = [of_head]
        if pull_around is not None:
            found += pull_around((consts, others))
        found += pull_embed(gradients)
        grads = self.outer_gradients(found)
        written = embed_changes | layer_changes | head_changes | pieces.count(extras)
        return sums, grads, totals, {**extras, **written}


def _not_sliced(names: frozenset[str]) -> str:
    return (
        f"{min(names)} is in host memory (offload.params) and must be read by the loop over "
        "layers, but this loss reads it elsewhere or has no such loop; use a function that runs "
        "the same layers, or set offload.params: device"
    )


def _abstract(tree: Tree) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _sum(parts: list[jax.Array], like: jax.Array) -> jax.Array:
    """Returns the sum of a parameter's gradients `parts`; zeros like `like` if it is empty."""
    if not parts:
        return jnp.zeros_like(like)
    return functools.reduce(jnp.add, parts)
