"""Builds the compiled programs of a pass whose layers are read one by one from files.

The loop over layers runs in Python, so the number of programs does not depend on the number of
layers. There is one program each for: the parameters outside the layers, the embedding (the part of
the loss before the layers), a layer, the head (the part after the layers), and the two backward
passes. Each is one `shard_map`, manual over the data axes, made of the same functions that
`StreamedPass` combines in a single program. A value that differs between data shards is passed from
program to program as an array [data shards, ...].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.config.tree_types import Batch, Tree
from zerojax.offload.streaming import StreamedPass, one_of
from zerojax.offload.streaming_layers import floating
from zerojax.offload.streaming_rows import LayerRows, put_rows, split_by_name
from zerojax.operators.attention_choice import attention_measured
from zerojax.passes import (
    PassConfig,
    for_evaluation,
    model_state,
    over_batch,
    prepare_parameters,
    reduce_gradients,
    shard_key,
    specs_of,
    split_batch,
)
from zerojax.placement.decisions import Decisions
from zerojax.placement.device_mesh import DATA_AXES, MANUAL_AXES, PASS_AXES
from zerojax.placement.slices import put_slice
from zerojax.tracing.protocol import Loss
from zerojax.transport.sums import sum_replicated

Arrays = dict[str, Any]

OWN = P(PASS_AXES)
"""Spec of values that differ between data shards: arrays of shape [data shards, ...]."""


class Context(NamedTuple):
    """Inputs that all programs of one microbatch have in common.

    Attributes:
      prepared: result of `zero.prepare_parameters` for the parameters that are not in pages (files
        of layers).
      extras: the model's non-parameter arrays before the microbatch, [data shards, ...].
      key_data: data of the step's random key.
      batch: the global batch.
      index: number of the microbatch, int32 [].
    """

    prepared: Tree
    extras: Tree
    key_data: Tree
    batch: Batch
    index: Any


class Backward(NamedTuple):
    """Values that the backward pass hands from layer to layer; each data shard has its own.

    Attributes:
      gradients: gradients of the floating-point activations.
      consts, others: sums of the gradients of `LayerWork.consts` and `LayerWork.others`.
      device: sums of the gradients of small stacked parameters, which stay on the device.
      squares: {name: sum of squares of the reduced gradients of all layers so far}.
    """

    gradients: Tree
    consts: Tree
    others: Tree
    device: Tree
    squares: Tree


class PassTotals(NamedTuple):
    """Results of a pass over all microbatches; each data shard has its own.

    Attributes:
      sums: sums of losses and weights.
      outer: gradients of the parameters outside the layers, not yet reduced over devices.
      device: sums of the gradients of small stacked parameters, which stay on the device.
      squares: {name: sum of squares of the reduced gradients of all layers}.
      extras: the model's non-parameter arrays after the pass.
    """

    sums: Arrays
    outer: Arrays
    device: Arrays
    squares: Arrays
    extras: Arrays


class LayerPrograms:
    """The programs of one plan, in training or in evaluation, each compiled when first called.

    Attributes:
      config: configuration of the pass.
      begin: `(params, frozen, extras, key_data, batch) -> (prepared, extras, outer, device)`;
        gathers parameters once per step. If there are several microbatches, `outer` and `device`
        are gradient sums that start at zero.
      embed: `(context) -> (activations, (consts, others), layers' rows of extras)`; the part before
        the layers.
      forward: `(context, rows, layer, activations, (consts, others), rows of extras) ->
        (activations, rows of extras)`; one layer.
      head: `(context, activations, (consts, others), device, factor) -> (sums, changes of extras,
        gradients of the head's parameters, Backward)`; the part after the layers, forward and
        backward.
      backward: `(context, rows, layer, activations, (consts, others), Backward, before) -> ({name:
        gradient row}, Backward)`; one layer. `before` has the gradient rows of earlier
        microbatches; it is None if there is only one microbatch.
      embed_backward: `(context, gradients of the head's parameters, Backward, (changes of extras by
        the head, rows of extras), outer) -> (outer, extras)`.
      evaluate: `(context, activations) -> sums` over the whole batch.
    """

    def __init__(self, plan: Decisions, config: PassConfig, *, train: bool) -> None:
        self._plan, self.config, self._train = plan, config, train
        stored = plan.abstract_stored
        self._params, self._frozen = stored["params"], stored["frozen"]
        self._prepared = _prepared_specs(config, self._params, self._frozen)
        assert config.offload is not None
        self._rows = {
            name: P(*config.placement.leaves[name].manual_spec[1:]) for name in config.offload.paged
        }
        context = Context(self._prepared, OWN, P(), P(DATA_AXES), P())
        layer = context, self._rows, P(), OWN, OWN
        after = Backward(OWN, OWN, OWN, OWN, OWN)
        outer = [n for n in (*self._params, *self._frozen) if n not in config.offload.paged]
        given = [
            specs_of(config, {n: x for n, x in params.items() if n in outer})
            for params in (self._params, self._frozen)
        ]
        self.begin = self._program(
            self._begin, (*given, P(), P(), P(DATA_AXES)), (self._prepared, OWN, OWN, OWN)
        )
        self.embed = self._program(self._embed, (context,), (OWN, OWN, OWN))
        self.forward = self._program(self._forward, (*layer, OWN), (OWN, OWN))
        self.head = self._program(
            self._head, (context, OWN, OWN, OWN, P()), (OWN, OWN, OWN, after), donates=(3,)
        )
        gradients = {n: spec for n, spec in self._rows.items() if n in self._params}
        self.backward = self._program(
            self._backward,
            (*layer, after, gradients if config.num_microbatches > 1 else P()),
            (gradients, after),
            donates=(5,),
        )
        self.embed_backward = self._program(
            self._embed_backward, (context, OWN, after, OWN, OWN), (OWN, OWN), donates=(4,)
        )
        self.evaluate = self._program(self._evaluate, (context, OWN), P())

    @property
    def all(self) -> dict[str, Any]:
        """{name: jitted program} of all programs, for example to count compilations."""
        names = ("begin", "embed", "forward", "head", "backward", "embed_backward", "evaluate")
        return {name: getattr(self, name) for name in names}

    def _program(
        self,
        local: Callable[..., Any],
        given: Tree,
        result: Any,
        *,
        donates: tuple[int, ...] = (),
    ) -> Any:
        """Wraps a per-device function in `shard_map` and `jax.jit`.

        Args:
          local: function that each device runs.
          given: partition specs of the arguments.
          result: partition specs of the results.
          donates: numbers of the arguments whose memory the results may reuse.
        """
        plan, config = self._plan, self.config
        mapped = jax.shard_map(
            over_batch(config, local),
            mesh=config.mesh,
            in_specs=given,
            out_specs=result,
            axis_names=set(MANUAL_AXES),
            check_vma=False,
        )
        measured = {kind: choice.implementation for kind, choice in plan.program.kernels.items()}

        def run(*args: Tree) -> Any:
            with attention_measured(measured):
                return mapped(*args)

        run.__name__ = local.__name__.strip("_")
        # Explicit `NamedSharding`s, so that each program always gets arguments in the same form.
        shardings = jax.tree.map(
            lambda spec: NamedSharding(config.mesh, spec),
            result,
            is_leaf=lambda x: isinstance(x, P),
        )
        return jax.jit(
            run,
            donate_argnums=donates,
            out_shardings=shardings,
            compiler_options=dict(plan.program.options) or None,
        )

    # --- the functions that each device runs, one for each program --------------------------------

    def _pass(self, context: Context) -> tuple[StreamedPass, tuple[Any, Any, Any]]:
        """Returns (the `StreamedPass`, (extras (non-parameter arrays), random key, batch) of the
        microbatch) on this data shard.
        """
        number = self.config.num_microbatches if self._train else 1
        microbatches = split_batch(context.batch, number)
        key = shard_key(context.key_data)
        if number > 1:
            key = jax.random.fold_in(key, context.index)
        batch = jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, context.index, 0, keepdims=False),
            microbatches,
        )
        extras = _here(context.extras)
        weights = StreamedPass(
            self.config,
            self._params,
            self._frozen,
            extras,
            context.key_data,
            one_of(microbatches),
            train=self._train,
            prepared=context.prepared,
        )
        return weights, (extras, key, batch)

    def _begin(
        self, params: Arrays, frozen: Arrays, extras: Arrays, key_data: jax.Array, batch: Batch
    ) -> Any:
        prepared = prepare_parameters(self.config, params, frozen)
        outer, device = {}, {}
        if self._train:
            context = Context(prepared, _own(extras), key_data, batch, jnp.int32(0))
            weights, _ = self._pass(context)
            several = self.config.num_microbatches > 1
            dtype = self.config.precision.accumulate_dtype
            if several:
                outer = {name: jnp.zeros(x.shape, dtype) for name, x in weights.outer.items()}
            device = {
                name: jnp.zeros(x.shape, dtype if several else x.dtype)
                for name, x in weights.rows.inputs.items()
            }
        return prepared, _own(extras), _own(outer), _own(device)

    def _embed(self, context: Context) -> Any:
        weights, given = self._pass(context)
        bound = weights.bind(weights.outer)
        activations, _ = weights.embed(bound, *given)
        around = weights.surround(bound, *given)
        work = weights.work(*around, around=False)
        rows = {
            name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
            for name, x in weights.whole.items()
            if name in weights.rows.leaves
        }
        rows = weights.rows.like_complete(rows)
        # Only the shapes of what a layer writes are needed, so nothing is computed.
        _, written = jax.eval_shape(work.run, rows, jnp.int32(0), activations)
        stack = lambda x: jnp.zeros((work.num_layers, *x.shape), x.dtype)  # noqa: E731
        return _own(activations), _own(around), _own(jax.tree.map(stack, written))

    def _forward(
        self,
        context: Context,
        rows: Arrays,
        layer: Tree,
        entering: Tree,
        around: Tree,
        changes: Tree,
    ) -> Any:
        weights, _ = self._pass(context)
        work = weights.work(*_here(around), around=False)
        whole = weights.rows.complete(rows, layer)
        activations, written = work.run(whole, layer, _here(entering))
        changes = {
            name: put_slice(stack, written[name], layer) for name, stack in _here(changes).items()
        }
        return _own(activations), _own(changes)

    def _head(
        self,
        context: Context,
        outputs: Tree,
        around: Tree,
        device: Arrays,
        factor: jax.Array | None,
    ) -> Any:
        weights, given = self._pass(context)
        outputs, (consts, others) = _here(outputs), _here(around)
        reads = weights.outer_reads()
        head = weights.ending(given, outputs, factor)
        scaled, pull, (sums, changes) = jax.vjp(
            head, reads["head"], floating(outputs), has_aux=True
        )
        of_head, gradients = pull(jnp.ones_like(scaled))
        zeros = lambda values: [jnp.zeros_like(x) for x in floating(values)]  # noqa: E731
        sums_around = (zeros(consts), zeros(others)) if reads["around"] else ([], [])
        squares = {name: weights.rows.squares_like(name) for name in weights.rows.streamed}
        after = Backward(gradients, *sums_around, _here(device), squares)
        return _own(sums), _own(changes), _own(of_head), _own(after)

    def _backward(
        self,
        context: Context,
        rows: Arrays,
        layer: Tree,
        entering: Tree,
        around: Tree,
        state: Backward,
        before: Arrays | None,
    ) -> Any:
        weights, _ = self._pass(context)
        state = _here(state)
        work = weights.work(*_here(around), around=bool(weights.outer_reads()["around"]))
        whole = weights.rows.complete(rows, layer)
        gradients, of_rows, of_consts, of_others = work.run_again(whole, layer, _here(entering))(
            state.gradients
        )
        waiting, small = split_by_name(weights.rows.reduce(of_rows), weights.rows.streamed)
        if before is not None:
            # In the first microbatch the contents of `before` are undefined.
            first = context.index == 0
            waiting = {
                name: jnp.where(first, 0, before[name]) + grad.astype(before[name].dtype)
                for name, grad in waiting.items()
            }
        squares = {
            name: state.squares[name] + weights.rows.squares(name, grad)
            for name, grad in waiting.items()
        }
        after = Backward(
            gradients,
            [jnp.add(total, new) for total, new in zip(state.consts, of_consts, strict=True)],
            [put_slice(total, n, layer) for total, n in zip(state.others, of_others, strict=True)],
            put_rows(state.device, small, layer, adds=before is not None),
            squares,
        )
        if before is None:
            dtype = self.config.precision.reduce_dtype
            waiting = {name: grad.astype(dtype) for name, grad in waiting.items()}
        return waiting, _own(after)

    def _embed_backward(
        self, context: Context, of_head: Arrays, state: Backward, changes: Tree, outer: Arrays
    ) -> Any:
        weights, given = self._pass(context)
        state, reads = _here(state), weights.outer_reads()
        _, pull_embed, (_, of_embed) = jax.vjp(
            weights.embedding(given), reads["embed"], has_aux=True
        )
        found = [_here(of_head)]
        if reads["around"]:
            _, pull_around, _ = jax.vjp(weights.surrounding(given), reads["around"], has_aux=True)
            found += pull_around((state.consts, state.others))
        found += pull_embed(state.gradients)
        grads = weights.outer_gradients(found)
        if self.config.num_microbatches > 1:
            totals = _here(outer)
            grads = {n: totals[n] + grad.astype(totals[n].dtype) for n, grad in grads.items()}
        extras = given[0]
        of_head_extras, of_layers = _here(changes)
        written = of_embed | of_layers | of_head_extras | weights.pieces.count(extras)
        return _own(grads), _own({**extras, **written})

    def _evaluate(self, context: Context, outputs: Tree) -> Arrays:
        weights, given = self._pass(context)
        sums, _ = weights.head(weights.bind(weights.outer), *given, _here(outputs))
        return sum_replicated(sums)


def build_paged_gradients(config: PassConfig) -> Callable[..., tuple[Arrays, Arrays, Arrays]]:
    """Builds the function that ends a pass, traced: `(params, extras, PassTotals) -> (sums, grads,
    extras)`.

    It reduces gradients over devices. The results are those of
    `zerojax.offload.streaming.build_gradients`, except that `grads` leaves out parameters
    whose gradients are in files.
    """
    assert config.offload is not None
    paged = config.offload.paged

    def local(params: Arrays, extras: Arrays, totals: PassTotals):
        totals = _here(totals)
        grads = reduce_gradients(config, {**totals.outer, **totals.device})
        sums = sum_replicated(totals.sums)
        rows = LayerRows(config, dict.fromkeys(paged), {}, {}, frozenset())
        sums["squares"] = rows.sum_squares(totals.squares)
        agreed = model_state.agree(extras, totals.extras, config.model.overwritten, config.counted)
        return sums, {name: grads[name] for name in params}, agreed

    def gradients(params: Arrays, extras: Arrays, totals: PassTotals):
        specs = specs_of(config, params)
        mapped = jax.shard_map(
            over_batch(config, local),
            mesh=config.mesh,
            in_specs=(specs, P(), OWN),
            out_specs=(P(), specs, P()),
            axis_names=set(MANUAL_AXES),
            check_vma=False,
        )
        return mapped(params, extras, totals)

    return gradients


def build_scale(config: PassConfig) -> Callable[[Arrays, jax.Array | None], jax.Array]:
    """Builds the traced `(sums of loss and weight, factor of the loss) -> factor of the gradients`
    of a step whose gradients are not clipped: float32 [].
    """

    def local(weight: jax.Array) -> jax.Array:
        return sum_replicated(_here(weight))

    def scale(sums: Arrays, factor: jax.Array | None) -> jax.Array:
        mapped = jax.shard_map(
            over_batch(config, local),
            mesh=config.mesh,
            in_specs=OWN,
            out_specs=P(),
            axis_names=set(MANUAL_AXES),
            check_vma=False,
        )
        weight = mapped(sums["weight"])
        return 1 / (weight if factor is None else weight * factor)

    return scale


def evaluation_config(
    plan: Decisions, config: PassConfig, function: Loss, batch: Batch
) -> PassConfig:
    """Returns the configuration of an evaluation pass (see `zero.for_evaluation`).

    Args:
      plan: plan of the run.
      config: configuration of the training passes of the run.
      function: the loss to evaluate.
      batch: the global batch, as arrays or `ShapeDtypeStruct`s.
    """
    config = dataclasses.replace(config, loss=function)
    found: list[PassConfig] = []
    stored = {**plan.abstract_stored["params"], **plan.abstract_stored["frozen"]}

    def local(stored: Arrays, extras: Arrays, batch: Batch) -> None:
        found.append(for_evaluation(config, stored, extras, batch))

    mapped = jax.shard_map(
        over_batch(config, local),
        mesh=config.mesh,
        in_specs=(specs_of(config, stored), P(), P(DATA_AXES)),
        out_specs=P(),
        axis_names=set(MANUAL_AXES),
        check_vma=False,
    )
    # Only traced: `for_evaluation` needs the shapes that one device has.
    jax.eval_shape(mapped, stored, plan.abstract_state["extras"], batch)
    return found[0]


def _prepared_specs(config: PassConfig, params: Tree, frozen: Any) -> tuple[Arrays, Arrays]:
    """Returns the specs of the results of `zero.prepare_parameters`, for parameters that are not in
    files.
    """
    assert config.offload is not None
    inputs, constants = {}, {}
    for name in (*params, *frozen):
        if name in config.offload.paged:
            continue
        leaf = config.placement.leaves[name]
        assert leaf.node_shards is None, name
        is_gathered = leaf.access.scatters_late
        spec = P() if is_gathered else leaf.manual_spec
        early = leaf.access.gathers_once and leaf.access.scatters_early
        if name in frozen:
            constants[name] = P() if early else spec
        else:
            inputs[name] = spec
            if early:
                constants[name] = P()
    return inputs, constants


def _own(tree: Tree) -> Any:
    """Adds a first dimension of size 1 to arrays of a tree that differ between data shards."""
    return jax.tree.map(lambda x: jnp.asarray(x)[None], tree)


def _here(tree: Tree) -> Any:
    """Returns `tree` without the first dimension that `_own` adds."""
    return jax.tree.map(lambda x: x[0], tree)
