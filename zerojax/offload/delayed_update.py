"""Updates layers with the gradients of the step before, beside the backward pass of this step.

Weights, and the gradients that wait for their update, are on the device; master weights and moments
are in host memory. As in `streaming_update`, a backward iteration loads the state of one layer and
stores that of another one, but what it updates with is known before the step: so the norm of all
gradients clips them, and an overflow skips them. Parameters outside of the layers have their
slices updated beside the layers, too, as many in each iteration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from zerojax.config.mesh import HOST
from zerojax.config.tree_types import Tree
from zerojax.offload.sliced_update import update_slice
from zerojax.offload.streaming import StreamedPass, one_of
from zerojax.offload.streaming_layers import divide
from zerojax.offload.streaming_rows import RowStacks, put_rows, split_by_name
from zerojax.offload.streaming_update import (
    LayerOfLeaf,
    LayerUpdates,
    slice_spec,
    slices_of,
    with_slices,
)
from zerojax.offload.waiting import as_waiting, waiting_update
from zerojax.optim.optimizer import BegunUpdate
from zerojax.passes import (
    PassConfig,
    model_state,
    over_batch,
    reduce_gradients,
    shard_key,
    specs_of,
    split_batch,
)
from zerojax.passes.update import ThisStep
from zerojax.placement.decisions import Decisions
from zerojax.placement.device_mesh import DATA_AXES, MANUAL_AXES, MODEL, PASS_AXES
from zerojax.placement.slices import (
    as_slices,
    put_slices,
    take_slices,
    to_device,
    to_host,
)
from zerojax.placement.state import DELAYED, TrainState
from zerojax.placement.state_layout import SlicedLeaf
from zerojax.transport.sums import sum_replicated

Arrays = dict[str, Any]


def build_delayed_gradients(
    plan: Decisions, config: PassConfig, updates: type[DelayedUpdates]
) -> Callable[..., tuple[Arrays, Arrays, Arrays, TrainState]]:
    """Builds the gradient function that also updates layers with the gradients of the step before;
    it is traced in a jitted step.

    Args:
      updates: class that updates the layers.

    Returns:
      A function `(state, key_data, batch, loss_factor, bare) -> (sums, grads, extras, state)`.
      `bare` is the optimizer state without moments, as it is before the update. `sums`,
      `grads` and `extras` are those of `zerojax.offload.streaming.build_gradients`, with
      all gradients on the device. In the returned state weights, master weights and moments of
      the layers are new, and those slices of other parameters that are updated beside them. What
      else is updated with the gradients of the step before is updated after the pass.
    """
    layout = plan.offload
    assert layout is not None
    assert config.num_microbatches == 1
    beside = {name for name in layout.leaves if layout.beside_a_layer(name)}
    leaves = {n: x for n, x in layout.leaves.items() if n in layout.delayed | beside}

    def local(
        params: Arrays,
        frozen: Arrays,
        extras: Arrays,
        slices: Arrays,
        bare: Tree,
        delayed: Arrays,
        key_data: jax.Array,
        batch: Arrays,
        loss_factor: jax.Array | None,
    ):
        example = one_of(split_batch(batch, 1))
        weights = StreamedPass(config, params, frozen, extras, key_data, example, train=True)
        sink = updates(
            plan=plan,
            rows=weights.rows,
            bare=bare,
            key_data=delayed["key"],
            delayed=delayed,
            outer={name: params[name] for name in sorted(beside)},
        )
        given = extras, shard_key(key_data), batch, loss_factor, sink, sink.totals(slices)
        sums, outer, totals, after = weights.differentiate(*given)
        resident = reduce_gradients(config, {**outer, **totals["device"]})
        grads = {**resident, **totals["grads"]}
        sums = sum_replicated(sums)
        sums["squares"] = weights.rows.sum_squares(totals["squares"])
        agreed = model_state.agree(extras, after, config.model.overwritten, config.counted)
        # They replace the gradients that wait in the state, whose dtypes must not change.
        grads = {name: grads[name].astype(delayed["grads"][name].dtype) for name in params}
        return sums, grads, agreed, totals["weights"], totals["slices"]

    def gradients(
        state: TrainState, key_data: jax.Array, batch: Arrays, loss_factor: Any, bare: Any
    ):
        params, frozen = state["params"], state["frozen"]
        slices = slices_of(state, leaves)
        trained = specs_of(config, params)
        slice_specs = {
            name: [{tier: slice_spec(leaves[name], PASS_AXES) for tier in x} for x in arrays]
            for name, arrays in slices.items()
        }
        # Besides the gradients there is one scale, one flag and one key for all devices.
        waiting = {**dict.fromkeys(state[DELAYED], P()), "grads": trained}
        given = trained, specs_of(config, frozen), P(), slice_specs, P(), waiting
        updated = {name: trained[name] for name in leaves}
        mapped = jax.shard_map(
            over_batch(config, local),
            mesh=config.mesh,
            in_specs=(*given, P(), P(DATA_AXES), P()),
            out_specs=(P(), trained, P(), updated, slice_specs),
            axis_names=set(MANUAL_AXES),
            check_vma=False,
        )
        sums, grads, extras, weights, slices = mapped(
            params,
            frozen,
            state["extras"],
            slices,
            bare,
            state[DELAYED],
            key_data,
            batch,
            loss_factor,
        )
        return sums, grads, extras, with_slices(state, leaves, weights, slices)

    return gradients


def with_delay(
    plan: Decisions, update: Callable[..., dict[str, Any]]
) -> Callable[[Arrays, TrainState, ThisStep], dict[str, Any]]:
    """Returns an update that uses the gradients that wait in the state, and puts those that it is
    given in their place.

    Args:
      update: result of `zerojax.offload.sliced_update.build_offload_update`.
    """

    def updated(grads: Arrays, state: TrainState, now: ThisStep) -> dict[str, Any]:
        return {**waiting_update(update, state), DELAYED: as_waiting(plan, grads, now)}

    return updated


@dataclasses.dataclass(frozen=True, kw_only=True)
class DelayedUpdates(LayerUpdates):
    """Updates layers, and slices of other parameters beside them, with gradients that wait.

    Its totals are those of `LayerUpdates`, and "grads" {name: gradients of a stack}, of which each
    row is replaced when it is used. "weights" and "slices" also have the parameters of `outer`.

    Attributes:
      delayed: the `DELAYED` part of the state.
      outer: {name: stored weights} of the parameters that are updated beside the layers.
    """

    delayed: Arrays
    outer: Arrays

    def totals(self, slices: Arrays) -> Arrays:
        """Returns the totals before the pass: see the class."""
        found = LayerUpdates.totals(self, slices)
        return {
            **found,
            "weights": {**found["weights"], **self.outer},
            "grads": {name: self.delayed["grads"][name] for name in self.rows.streamed},
            "squares": {name: self.rows.squares_like(name) for name in self.rows.streamed},
        }

    def start(self, totals: Arrays, sums: Arrays) -> Arrays:
        """Returns `totals` with "scale" and "skip" of the waiting gradients; ignores `sums`."""
        del sums
        return {**totals, "scale": self.delayed["scale"], "skip": self.delayed["skip"]}

    is_delayed = True

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Names of all parameters in groups with about as many bytes of state."""
        leaves = self._layout.leaves
        size = {name: self.rows.waiting[name].size for name in self.rows.streamed}
        layers = next(iter(self.rows.waiting.values())).shape[0]
        for name in self.outer:
            size[name] = self._layout.beside_a_layer(name) * leaves[name].slice_elements * layers
        return divide(size)

    def load(self, totals: Arrays, index: jax.Array | int, names: Sequence[str]) -> Arrays:
        """Reads this device's shards of weights of one layer, before the layer's update."""
        return LayerUpdates.load(self, totals, index, [n for n in names if n not in self.outer])

    def waiting(self, totals: Arrays, index: jax.Array | int) -> tuple[Arrays, tuple[Arrays, Any]]:
        """Takes a layer's gradients of the step before.

        Returns:
          (totals, (the gradients, whether to skip their update)).
        """
        old = self._stacks.load(totals["grads"], index)
        # Without the barrier the compiler would copy the stacks to keep their old values.
        old, held = lax.optimization_barrier((old, totals["grads"]))
        return {**totals, "grads": held}, (old, totals["skip"])

    def receive(self, totals: Arrays, index: jax.Array | int, grads: Arrays) -> tuple[Arrays, Any]:
        """Sums a layer's gradients over devices, and puts them where the used ones were.

        Returns:
          (totals, None).
        """
        new, here = split_by_name(self.rows.reduce(grads), self.rows.streamed)
        after = {
            **totals,
            "device": put_rows(totals["device"], here, index, adds=False),
            "grads": self._stacks.store(totals["grads"], new, index),
            "squares": {n: totals["squares"][n] + self.rows.squares(n, g) for n, g in new.items()},
        }
        return after, None

    @property
    def _stacks(self) -> RowStacks:
        return RowStacks(self.rows.stacks.specs, on_host=False)

    @property
    def _layout(self) -> Any:
        assert self.plan.offload is not None
        return self.plan.offload

    def _gradients(self, waiting: Arrays, names: Sequence[str]) -> Arrays:
        of_outer = self.delayed["grads"]
        return {n: of_outer[n] if n in self.outer else waiting[n] for n in names}

    def _gradient_spec(self, name: str) -> P:
        return self._whole_spec(name) if name in self.outer else self._row_spec(name)

    def _row_spec(self, name: str) -> P:
        return self._leaf(name).spec if name in self.outer else LayerUpdates._row_spec(self, name)

    def _leaf(self, name: str) -> LayerOfLeaf:
        leaf, reads = self._layout.leaves[name], self._reads_row
        if name not in self.outer:
            dtype = self.rows.waiting[name].dtype
            return LayerOfLeaf(leaf, dtype, reads_row=reads, on_host=False)
        count = self._layout.beside_a_layer(name)
        return _BesideLayers(leaf, self.outer[name].dtype, count, reads_row=reads)


class _BesideLayers(LayerOfLeaf):
    """Loads, updates and stores slices of a parameter outside of the layers, `count` beside each
    layer.

    Its rows are [count, elements of a slice], and its gradient is that of the whole parameter.
    """

    def __init__(self, leaf: SlicedLeaf, dtype: DTypeLike, count: int, *, reads_row: bool) -> None:
        self._leaf, self._dtype, self._reads_row = leaf, dtype, reads_row
        self._count, self._first = count, leaf.first(HOST)
        self.spec = slice_spec(leaf, (MODEL,))

    def update(
        self, begun: BegunUpdate, loaded: list[jax.Array], grad: jax.Array, index: jax.Array | int
    ) -> list[jax.Array]:
        number = self._first + index * self._count
        pieces = take_slices(as_slices(self._leaf, grad), number, self._count)
        name, moments = self._leaf.name, tuple(loaded[1:])
        new, after = update_slice(begun, name, number, loaded[0], moments, pieces)
        row = new.astype(self._dtype)
        return [row, *after] if self._reads_row else [row, new, *after]

    def load(
        self, weights: jax.Array, slices: list[Arrays], index: jax.Array | int
    ) -> list[jax.Array]:
        first, count = index * self._count, self._count
        found = [to_device(take_slices(one[HOST], first, count)) for one in slices]
        if self._reads_row:
            stored = as_slices(self._leaf, weights)
            found.insert(0, take_slices(stored, self._first + first, count))
        return found

    def store(
        self, weights: jax.Array, slices: list[Arrays], new: list[jax.Array], index: jax.Array | int
    ) -> tuple[jax.Array, list[Arrays]]:
        first = index * self._count
        after = [
            {**one, HOST: put_slices(one[HOST], to_host(block), first)}
            for one, block in zip(slices, new[1:], strict=True)
        ]
        stored = put_slices(as_slices(self._leaf, weights), new[0], self._first + first)
        return stored.reshape(weights.shape), after
