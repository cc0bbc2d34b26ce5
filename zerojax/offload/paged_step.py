"""Runs steps and evaluations whose layers are read from files, one after the other.

A step is a Python loop over pages (a page holds one layer's weights or gradients). The forward pass
reads the weights of layer 0, 1, ...; the backward pass reads the weights in reverse order and
writes the gradients. Then a jitted function reduces the other gradients, decides about clipping and
skipping, and updates the parameters in memory. Last, a loop over the optimizer state in files reads
gradients and writes weights. With `offload.update_in_backward` layers are updated during the
backward pass instead (`paged_update`), and the loop runs only if gradients are clipped. Threads
read one page ahead. Until the forward and backward pass have ended, the given state is unchanged,
so an error before that loses nothing. Each process has its own files; an error of one disk is
raised by all processes, at the end of the pass or of the sweep.
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

from zerojax.config.tree_types import Batch, Tree
from zerojax.models.losses import no_sums
from zerojax.offload.disk import (
    DiskState,
)
from zerojax.offload.disk_errors import DiskErrors
from zerojax.offload.disk_step import SliceUpdates
from zerojax.offload.layer_inputs import inputs_of
from zerojax.offload.page_files import PageSweep
from zerojax.offload.paged_layers import (
    Context,
    LayerPrograms,
    PassTotals,
    build_scale,
    evaluation_config,
)
from zerojax.offload.paged_update import PageUpdates, UpdateInBackward
from zerojax.offload.pages import Pages
from zerojax.passes import PassConfig
from zerojax.placement.decisions import Decisions
from zerojax.placement.state import TrainState, step_key
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
        plan: Decisions,
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

        def key_and_factor(state: TrainState, batch: Batch) -> tuple[Any, Any]:
            key = step_key(state["rng"], state["step"])
            return jax.random.key_data(key), factor_of(state, batch)

        self._key_and_factor = jax.jit(key_and_factor, out_shardings=NamedSharding(plan.mesh, P()))
        # Adds the sums of one microbatch at a time, like a loop that starts from zeros.
        self._add = jax.jit(lambda sums, more: jax.tree.map(jnp.add, sums, more))
        self._zeros = jax.tree.map(np.asarray, no_sums(plan.traced.metric_names))
        scale = build_scale(programs.config)
        self._scale = jax.jit(scale, out_shardings=NamedSharding(plan.mesh, P()))
        self._in_backward = plan.offload.update_in_backward

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        disk, errors = state["disk"], DiskErrors()
        given: Tree = {**state, "disk": {}}
        with contextlib.ExitStack() as stack:
            update = None
            if self._in_backward:
                update = UpdateInBackward(disk, self.page_updates, given, errors)
                stack.enter_context(update)
            totals = self._pass(disk.pages, given, batch, update, errors)
            new, metrics, pending = self._jitted(given, {"batch": batch, "totals": totals})
            new["disk"] = disk
            # Waits for the jitted part: its result says whether the gradients are finite.
            if int(metrics["skipped"]):
                return new, metrics
            if update is not None and update.is_right(pending):
                self._commit(disk, new, pending, update)
                return new, metrics
        # Leaving the block has dropped an update in the backward pass, whose sweep must end before
        # another one begins.
        self._sweep(disk, new, pending)
        return new, metrics

    # --- forward and backward ---------------------------------------------------------------------

    def _pass(
        self,
        pages: Pages,
        state: TrainState,
        batch: Batch,
        update: UpdateInBackward | None,
        errors: DiskErrors,
    ) -> PassTotals:
        key_data, factor = self._key_and_factor(state, batch)
        outer_params = state["params"], state["frozen"]
        given = *outer_params, state["extras"], key_data, batch
        prepared, extras, outer, device = self.programs.begin(*given)
        sums: Tree = None
        squares: Tree = {}
        for number in range(self._number):
            context = Context(prepared, extras, key_data, batch, np.int32(number))
            given = sums, outer, device, factor
            # The gradients of a layer are complete only in the last microbatch.
            now = update if number == self._number - 1 else None
            sums, outer, after, extras = self._microbatch(pages, context, given, now, errors)
            device, squares = after.device, after.squares
        totals = PassTotals(sums, outer, device, squares, extras)
        errors.raise_together(totals)
        return totals

    def _microbatch(
        self,
        pages: Pages,
        context: Context,
        given: tuple[Any, Any, Any, Any],
        update: UpdateInBackward | None,
        errors: DiskErrors,
    ) -> tuple[Any, Any, Any, Any]:
        """Runs forward and backward pass of one microbatch.

        Args:
          pages: all pages.
          context: inputs of the microbatch.
          given: sums of loss and weight so far (None in the first microbatch), of gradients outside
            the layers, and of small stacks; factor of the loss.
          update: update of layers in the backward pass of the last microbatch.
          errors: keeps errors of the disk.

        Returns:
          (sums of loss and weight, sums of gradients outside the layers, `Backward` after layer 0,
          extras (non-parameter arrays)).
        """
        programs, last = self.programs, pages.num_layers - 1
        before, outer, device, factor = given
        # The last layer is not read again: its weights are still there when its backward pass
        # starts.
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
            if self._number > 1:
                sums = self._add(self._zeros if before is None else before, sums)
            if update is not None:
                update.begin(self._scale(sums, factor), context.key_data)
            inputs.turn()
            forward = rows, entering, inputs, around
            state = self._backward(pages, weights, context, forward, state, update, errors)
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
        state: TrainState,
        update: UpdateInBackward | None,
        errors: DiskErrors,
    ) -> Any:
        """Runs the backward pass of all layers, the last one first, and writes their gradients to
        files.

        With an update in the backward pass, the gradients and the new state of a layer leave the
        devices after the backward pass of the layer below has been started.

        Args:
          pages: all pages.
          weights: pass over the pages of weights; its current page is the last layer.
          context: inputs of the microbatch.
          forward: (weights of the last layer, its input, storage of the inputs of all other layers,
            (consts, others) of the layers).
          state: `Backward` as the head returns it.
          update: update of each layer; None: layers are not updated.
          errors: keeps errors of the disk.
        """
        rows, entering, inputs, around = forward
        order, adds = [*reversed(range(pages.num_layers))], self._number > 1
        has_earlier = adds and int(context.index) > 0
        if pages.gradients.store.is_broken:  # an earlier pass failed
            with errors.kept():
                pages.gradients.renew()
        # With an update a page is written only after the next one was taken, so that two are held.
        with PageSweep(pages.gradients, order, read=has_earlier, held=2, errors=errors) as sweep:

            def leave(page: Any, grads: Tree) -> None:
                # Waiting for the gradients also waits for everything that reads the old page.
                pages.gradients.take(page.array, jax.block_until_ready(grads))
                sweep.write(page)
                if update is not None:
                    update.finish()

            above: Any = None
            for layer in order:
                if layer < order[0]:
                    page = weights.next()
                    rows = pages.weights.on_devices(page.array)
                target = sweep.next()
                # Also in the first microbatch, which ignores them, so that all microbatches run
                # one program.
                before = pages.gradients.on_devices(target.array) if adds else None
                grads, state = self.programs.backward(
                    context, rows, np.int32(layer), entering, around, state, before
                )
                inputs.use(grads)
                if layer:
                    entering = inputs.take()
                if layer < order[0]:
                    weights.use((rows, grads))
                if update is None:
                    leave(target, grads)
                    continue
                if above is not None:
                    leave(*above)
                above = target, grads
                update.start(grads)
            if update is not None:
                leave(*above)
                update.end()
            sweep.end()
        return state

    # --- the update -------------------------------------------------------------------------------

    def _commit(
        self, disk: DiskState, new: TrainState, pending: Any, update: UpdateInBackward
    ) -> None:
        """Makes an update in the backward pass valid, after the update of all other slices in
        files; changes `new` in place.
        """
        with disk.together(), disk.updating():
            for piece in update.rest(functools.partial(self._write_rest, disk, new)):
                name = piece.place.leaf.name
                new["params"][name] = self._whole_updates(piece, new["params"][name], pending)
                piece.write()
        assert disk.pages is not None
        disk.pages.take_new_weights()

    def _sweep(self, disk: DiskState, new: TrainState, pending: Any) -> None:
        """Updates all optimizer-state slices in files, writes the new weights of layers, and
        changes `new` in place.
        """
        pages = disk.pages
        assert pages is not None
        rest = functools.partial(self._write_rest, disk, new)
        layers = range(pages.num_layers)
        # In the order of the pages, so that each page is read once for all of its slices.
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


class PagedEvaluation:
    """An `evaluate(state, batch) -> sums` that reads the layers from files."""

    def __init__(self, plan: Decisions, config: PassConfig, loss: Loss) -> None:
        self._plan, self._config, self._loss = plan, config, loss
        self._programs: LayerPrograms | None = None

    def __call__(self, state: TrainState, batch: Batch) -> Metrics:
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
