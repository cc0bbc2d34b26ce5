"""Runs steps and evaluations whose layers are read from files, one after the other.

A step is a Python loop over pages (a page holds one layer's weights or gradients). The forward pass
reads the weights of layer 0, 1, ...; the backward pass reads the weights in reverse order and
writes the gradients. Then a jitted function reduces the other gradients, decides about clipping and
skipping, and updates the parameters in memory. Last, a loop over the optimizer state in files reads
gradients and writes weights. Threads read one page ahead. Until the forward and backward pass have
ended, the given state is unchanged, so an error before that loses nothing. Each
process has its own files; an error of one disk is raised by all processes, at the end of the pass
or of the sweep.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.config.mesh import DEVICE
from zerojax.models.losses import no_sums
from zerojax.parallel.offload.disk import (
    DiskState,
)
from zerojax.parallel.offload.disk_errors import DiskErrors
from zerojax.parallel.offload.disk_places import DiskLeaf, DiskSlice
from zerojax.parallel.offload.disk_step import (
    SliceUpdates,
    SliceWeights,
    build_slice_update,
    place_rows,
    take_rows,
)
from zerojax.parallel.offload.layer_inputs import inputs_of
from zerojax.parallel.offload.page_files import PageSweep
from zerojax.parallel.offload.paged_layers import (
    Context,
    LayerPrograms,
    PassTotals,
    evaluation_config,
)
from zerojax.parallel.offload.pages import Pages
from zerojax.parallel.zero import PassConfig
from zerojax.plan.make import Plan
from zerojax.plan.slices import tier_sharding
from zerojax.plan.state import TrainState, step_key
from zerojax.tracing.protocol import Loss

Metrics = dict[str, jax.Array]


class PagedStep:
    """A `step(state, batch) -> (state, metrics)` that returns after all optimizer-state slices in
    files are updated.

    Attributes:
      programs: compiled programs of forward and backward pass.
      page_updates: compiled updates of the parameters of layers.
    """

    def __init__(
        self,
        plan: Plan,
        jitted: Any,
        write_rest: Callable[[Any, TrainState], None],
        *,
        programs: LayerPrograms,
        factor_of: Callable[[TrainState, Any], jax.Array | None],
    ) -> None:
        """Builds the step from its programs and its jitted end.

        Args:
          plan: a plan with layer weights in files.
          jitted: jitted function that runs after the backward pass: `(state, {"batch": ...,
            "totals": PassTotals}) -> (state, metrics, pending)`.
          write_rest: `(disk, state) -> None`; called before a generation of a durable store (files
            from which a killed run resumes) is committed.
          programs: programs of forward and backward pass, for training.
          factor_of: traced function `(state, batch) -> factor of the loss`.
        """
        assert plan.offload is not None
        self._plan, self._jitted, self._write_rest = plan, jitted, write_rest
        self.programs = programs
        self._number = plan.num_microbatches
        self._whole_updates, self.page_updates = SliceUpdates(plan), PageUpdates(plan)

        def key_and_factor(state: TrainState, batch: Any) -> tuple[Any, Any]:
            key = step_key(state["rng"], state["step"])
            return jax.random.key_data(key), factor_of(state, batch)

        self._key_and_factor = jax.jit(key_and_factor, out_shardings=NamedSharding(plan.mesh, P()))
        # Adds the sums of one microbatch at a time, like a loop that starts from zeros.
        self._add = jax.jit(lambda sums, more: jax.tree.map(jnp.add, sums, more))
        self._zeros = jax.tree.map(np.asarray, no_sums(plan.traced.metric_names))

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        disk = state["disk"]
        given: Any = {**state, "disk": {}}
        totals = self._pass(disk.pages, given, batch)
        new, metrics, pending = self._jitted(given, {"batch": batch, "totals": totals})
        new["disk"] = disk
        # Waits for the jitted part: its result says whether the gradients are finite.
        if not int(metrics["skipped"]):
            self._sweep(disk, new, pending)
        return new, metrics

    # --- forward and backward ---------------------------------------------------------------------

    def _pass(self, pages: Pages, state: TrainState, batch: Any) -> PassTotals:
        key_data, factor = self._key_and_factor(state, batch)
        outer_params = state["params"], state["frozen"]
        given = *outer_params, state["extras"], key_data, batch
        prepared, extras, outer, device = self.programs.begin(*given)
        sums: Any = None
        squares: Any = {}
        errors = DiskErrors()
        for number in range(self._number):
            context = Context(prepared, extras, key_data, batch, np.int32(number))
            given = outer, device, factor
            more, outer, after, extras = self._microbatch(pages, context, given, errors)
            device, squares = after.device, after.squares
            if self._number > 1:
                more = self._add(self._zeros if sums is None else sums, more)
            sums = more
        totals = PassTotals(sums, outer, device, squares, extras)
        errors.raise_together(totals)
        return totals

    def _microbatch(
        self, pages: Pages, context: Context, given: tuple[Any, Any, Any], errors: DiskErrors
    ) -> tuple[Any, Any, Any, Any]:
        """Runs forward and backward pass of one microbatch.

        Args:
          pages: all pages.
          context: inputs of the microbatch.
          given: sums of gradients outside the layers and of small stacks so far; factor of the
            loss.
          errors: keeps errors of the disk.

        Returns:
          (sums of loss and weight, sums of gradients outside the layers, `Backward` after layer 0,
          extras (non-parameter arrays)).
        """
        programs, last = self.programs, pages.num_layers - 1
        outer, device, factor = given
        there_and_back = [*range(last + 1), *reversed(range(last))]
        tier = self._plan.settings.offload.activations
        with (
            PageSweep(pages.weights, there_and_back, errors=errors) as weights,
            inputs_of(tier, pages.inputs, errors) as inputs,
        ):
            activations, around, changes = programs.embed(context)
            entering, rows = activations, {}
            for layer in range(last + 1):
                page = weights.next()
                rows, entering = pages.weights.on_devices(page.array), activations
                activations, changes = programs.forward(
                    context, rows, np.int32(layer), entering, around, changes
                )
                weights.use((rows, activations))
                if layer < last:  # the backward pass starts with the last layer's input
                    inputs.put(entering)
            sums, written, of_head, state = programs.head(
                context, activations, around, device, factor
            )
            inputs.turn()
            forward = rows, entering, inputs, around
            state = self._backward(pages, weights, context, forward, state, errors)
            inputs.end()
            weights.end()
        outer, extras = programs.embed_backward(context, of_head, state, (written, changes), outer)
        return sums, outer, state, extras

    def _backward(
        self,
        pages: Pages,
        weights: PageSweep,
        context: Context,
        forward: Any,
        state: Any,
        errors: DiskErrors,
    ) -> Any:
        """Runs the backward pass of all layers, the last one first, and writes their gradients to
        files.

        Args:
          pages: all pages.
          weights: pass over the pages of weights; its current page is the last layer.
          context: inputs of the microbatch.
          forward: (weights of the last layer, its input, storage of the inputs of all other layers,
            (consts, others) of the layers).
          state: `Backward` as the head returns it.
          errors: keeps errors of the disk.
        """
        rows, entering, inputs, around = forward
        order, adds = [*reversed(range(pages.num_layers))], self._number > 1
        has_earlier = adds and int(context.index) > 0
        if pages.gradients.store.is_broken:  # an earlier pass failed
            with errors.kept():
                pages.gradients.renew()
        with PageSweep(pages.gradients, order, read=has_earlier, errors=errors) as sweep:
            for layer in order:
                if layer < order[0]:
                    page = weights.next()
                    rows = pages.weights.on_devices(page.array)
                target = sweep.next()
                before = pages.gradients.on_devices(target.array) if adds else None
                grads, state = self.programs.backward(
                    context, rows, np.int32(layer), entering, around, state, before
                )
                inputs.use(grads)
                if layer:
                    entering = inputs.take()
                if layer < order[0]:
                    weights.use((rows, grads))
                # Waiting for the gradients also waits for everything that reads the old page.
                pages.gradients.take(target.array, jax.block_until_ready(grads))
                sweep.write(target)
            sweep.end()
        return state

    # --- the update -------------------------------------------------------------------------------

    def _sweep(self, disk: DiskState, new: TrainState, pending: Any) -> None:
        """Updates all optimizer-state slices in files, writes the new weights of layers, and
        changes `new` in place.
        """
        pages = disk.pages
        assert pages is not None
        rest = functools.partial(self._write_rest, disk, new)
        layers = range(pages.num_layers)
        pieces = disk.slices(
            order=pages.order, before_commit=rest if disk.store.is_durable else None
        )
        left, page, target = 0, None, None
        with (
            disk.together(),
            disk.updating(),
            contextlib.closing(pieces),
            PageSweep(pages.gradients, layers) as gradients,
            PageSweep(pages.weights, layers, read=False) as weights,
        ):
            for piece in pieces:
                name = piece.place.leaf.name
                if name not in pages.leaves:
                    new["params"][name] = self._whole_updates(piece, new["params"][name], pending)
                    piece.write()
                    continue
                if not left:
                    page, target, left = gradients.next(), weights.next(), pages.slices_of_layer
                assert page is not None
                assert target is not None
                leaf = pages.leaves[name]
                grads, rows = pages.gradients.views(page.array), pages.weights.views(target.array)
                part = functools.partial(leaf.part, number=piece.number)
                self.page_updates(piece, part(grads[name]), part(rows[name]), pending)
                piece.write()
                left -= 1
                if not left:
                    weights.write(target)
            gradients.end()
            weights.end()


class PageUpdates:
    """Updates the slices of layers, with one jitted function for each parameter."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.functions: dict[str, Any] = {}

    def __call__(
        self, piece: DiskSlice, grads: np.ndarray, weights: np.ndarray, pending: Any
    ) -> None:
        """Updates one slice: writes new master and moments into `piece`, and new weights into
        `weights`.

        Args:
          piece: one slice of the optimizer's state.
          grads, weights: gradients and weights of the same slice, [rows of this process, elements].
          pending: result of `zerojax.parallel.offload.disk_step.pending_of`.
        """
        place = piece.place
        name = place.leaf.name
        if name not in self.functions:
            self.functions[name] = self._build(place, weights.dtype)
        old = {key: place_rows(place, rows, self._plan) for key, rows in piece.arrays.items()}
        new_weights, new = self.functions[name](
            None,
            old,
            place_rows(place, grads, self._plan),
            np.int32(piece.number),
            pending["opt_state"],
            pending["numbers"],
        )
        jax.block_until_ready((new_weights, new))  # a CPU device may use the files' buffers
        take_rows(place, new_weights, weights)
        for key, target in piece.arrays.items():
            take_rows(place, new[key], target)

    def _build(self, place: DiskLeaf, dtype: np.dtype) -> Any:
        def weights_of(_: None, grad: jax.Array) -> SliceWeights:
            return SliceWeights(
                start=jnp.zeros(grad.shape, dtype),
                gradient=lambda number: grad[0],
                put=lambda rows, own, number: own.astype(dtype)[None],
                end=lambda rows: rows,
            )

        slices = tier_sharding(place.leaf, DEVICE, self._plan.mesh)
        return build_slice_update(
            self._plan, place, weights_of, given=(None, slices), result=slices
        )


class PagedEvaluation:
    """An `evaluate(state, batch) -> sums` that reads the layers from files."""

    def __init__(self, plan: Plan, config: PassConfig, loss: Loss) -> None:
        self._plan, self._config, self._loss = plan, config, loss
        self._programs: LayerPrograms | None = None

    def __call__(self, state: TrainState, batch: Any) -> Metrics:
        if self._programs is None:
            config = evaluation_config(self._plan, self._config, self._loss, batch)
            self._programs = LayerPrograms(self._plan, config, train=False)
        programs, pages = self._programs, state["disk"].pages
        if pages.weights.store.is_closed:
            raise RuntimeError(
                "evaluation after close(): the files with the layers are closed; evaluate earlier, "
                "or load the run again (zerojax eval RUN)"
            )
        extras, key_data = state["extras"], state["rng"]
        begun = programs.begin(state["params"], state["frozen"], extras, key_data, batch)
        context = Context(begun[0], begun[1], key_data, batch, np.int32(0))
        activations, around, changes = programs.embed(context)
        errors, layers = DiskErrors(), range(pages.num_layers)
        with PageSweep(pages.weights, layers, errors=errors) as weights:
            for layer in layers:
                rows = pages.weights.on_devices(weights.next().array)
                activations, changes = programs.forward(
                    context, rows, np.int32(layer), activations, around, changes
                )
                weights.use((rows, activations))
            weights.end()
        sums = programs.evaluate(context, activations)
        errors.raise_together(sums)
        return sums
