"""Updates each streamed layer inside the backward pass, so that no gradient of a layer is stored.

While the backward loop computes a layer, the weights of the layer below and this layer's masters
and moments are loaded from host memory, and the layer above is updated and stored. The price:
gradients cannot be clipped by their norm or accumulated over microbatches, and an update cannot be
undone. Whether the loss is finite is known before the backward pass; if not, the step changes
nothing. A layer whose gradient is not finite is not changed, but the layers above it have already
been updated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.mesh import HOST
from zerojax.config.tree_types import Tree
from zerojax.offload.sliced_update import begin, context_of, update_slice
from zerojax.offload.streaming import StreamedPass, one_of
from zerojax.offload.streaming_layers import divide
from zerojax.offload.streaming_rows import LayerRows, put_rows, split_by_name
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
from zerojax.placement.decisions import Decisions
from zerojax.placement.device_mesh import DATA_AXES, MANUAL_AXES, MODEL, PASS_AXES
from zerojax.placement.slices import (
    map_moments,
    put_slice,
    put_slices,
    take_slice,
    take_slices,
    to_device,
    to_host,
    without_moments,
)
from zerojax.placement.state import TrainState
from zerojax.placement.state_layout import SlicedLeaf
from zerojax.transport.sums import over_auto_axes, sum_replicated

Arrays = dict[str, Any]


def build_updating_gradients(
    plan: Decisions, config: PassConfig
) -> Callable[..., tuple[Arrays, Arrays, Arrays, TrainState]]:
    """Builds the gradient function that also updates streamed layers; it is traced in a jitted
    step.

    Returns:
      A function `(state, key_data, batch) -> (sums, grads, extras, state)`. `key_data` is the
      uint32 key data of the step, and `batch` is the global batch. `sums` and `extras` are those of
      `zerojax.offload.streaming.build_gradients`. `grads` has the gradients of all
      parameters that are not streamed. In the returned state only weights, master weights and
      moments of the streamed parameters are new; even the optimizer's step count is unchanged.
    """
    layout = plan.offload
    assert layout is not None
    assert config.num_microbatches == 1

    def local(
        params: Arrays,
        frozen: Arrays,
        extras: Arrays,
        slices: Arrays,
        bare: Tree,
        key_data: jax.Array,
        batch: Arrays,
    ):
        weights = StreamedPass(
            config, params, frozen, extras, key_data, one_of(split_batch(batch, 1)), train=True
        )
        sink = LayerUpdates(plan=plan, rows=weights.rows, bare=bare, key_data=key_data)
        given = extras, shard_key(key_data), batch, None, sink, sink.totals(slices)
        sums, outer, totals, after = weights.differentiate(*given)
        grads = reduce_gradients(config, {**outer, **totals["device"]})
        sums = sum_replicated(sums)
        # Summed over devices in every layer already (`receive`).
        sums["squares"] = totals["squares"]
        agreed = model_state.agree(extras, after, config.model.overwritten, config.counted)
        grads = {name: grads[name] for name in params if name in grads}
        return sums, grads, agreed, totals["weights"], totals["slices"]

    def gradients(state: TrainState, key_data: jax.Array, batch: Arrays):
        params, frozen = state["params"], state["frozen"]
        leaves = {name: layout.leaves[name] for name in layout.streamed}
        slices = slices_of(state, leaves)
        specs = specs_of(config, params), specs_of(config, frozen), P()
        slice_specs = {
            name: [{tier: slice_spec(layout.leaves[name], PASS_AXES) for tier in x} for x in arrays]
            for name, arrays in slices.items()
        }
        streamed, others = split_by_name(specs[0], layout.streamed)
        mapped = jax.shard_map(
            over_batch(config, local),
            mesh=config.mesh,
            in_specs=(*specs, slice_specs, P(), P(), P(DATA_AXES)),
            out_specs=(P(), others, P(), streamed, slice_specs),
            axis_names=set(MANUAL_AXES),
            check_vma=False,
        )
        sums, grads, extras, weights, slices = mapped(
            params,
            frozen,
            state["extras"],
            slices,
            without_moments(state["opt_state"]),
            key_data,
            batch,
        )
        return sums, grads, extras, with_slices(state, leaves, weights, slices)

    return gradients


@dataclass(frozen=True, kw_only=True)
class LayerUpdates:
    """Updates layers in the backward pass: implements
    `zerojax.offload.streaming_layers.Updates`.

    Its totals are a dict: "weights" {name: stack in host memory}, "slices" {name: [master if there
    is one, moments], each {storage tier: slices}}, "device" {name: gradients of a small stack},
    "squares" {name: sums of squares}, and for all layers "scale" and "skip". The state of a layer
    is {name: [the layer's weights if there are no masters, slices of each array]}.

    Attributes:
      plan: plan of the run.
      rows: loader of the layers' parameters.
      bare: optimizer state without moments.
      key_data: data of the step's random key.
    """

    plan: Decisions
    rows: LayerRows
    bare: Tree
    key_data: jax.Array

    def totals(self, slices: Arrays) -> Arrays:
        """Returns the totals before the pass: see the class."""
        return {
            "weights": {name: self.rows.waiting[name] for name in self.rows.streamed},
            "slices": slices,
            "device": {n: jnp.zeros(x.shape, x.dtype) for n, x in self.rows.inputs.items()},
            "squares": dict.fromkeys(self.rows.streamed, jnp.float32(0)),
        }

    def start(self, totals: Arrays, sums: Arrays) -> Arrays:
        """Computes scale = 1 / weight of the global batch, and skip = whether its loss is not
        finite.
        """
        summed = sum_replicated(sums)
        loss = summed["loss"] / summed["weight"]
        return {**totals, "scale": 1 / summed["weight"], "skip": ~jnp.isfinite(loss)}

    is_delayed = False

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Names of the streamed parameters in groups with about as many bytes."""
        return divide({name: self.rows.waiting[name].size for name in self.rows.streamed})

    def load(self, totals: Arrays, index: jax.Array | int, names: Sequence[str]) -> Arrays:
        """Loads this device's shards of weights of one layer, before the layer's update."""
        return self.rows.stacks.load({name: totals["weights"][name] for name in names}, index)

    def complete(self, shards: Arrays, index: jax.Array | int) -> Arrays:
        """Adds the frozen weights of layer `index` to `shards`; returns all of them gathered."""
        frozen = {name: x for name, x in self.rows.waiting.items() if name in self.rows.frozen}
        return self.rows.complete({**self.rows.stacks.load(frozen, index), **shards}, index)

    def waiting(self, totals: Arrays, index: jax.Array | int) -> Any:
        """Is not called: the gradients are those of this step."""
        raise NotImplementedError

    def receive(self, totals: Arrays, index: jax.Array | int, grads: Arrays) -> tuple[Arrays, Any]:
        """Sums a layer's gradients over devices; returns (totals, (gradients, whether to skip the
        update)).
        """
        waiting, here = split_by_name(self.rows.reduce(grads), self.rows.streamed)
        squares = self.rows.sum_squares({n: self.rows.squares(n, g) for n, g in waiting.items()})
        # One number for all gradients of the layer, which is finite only if each of them is.
        finite = jnp.isfinite(sum(squares.values()))
        after = {
            **totals,
            "device": put_rows(totals["device"], here, index, adds=False),
            "squares": {name: totals["squares"][name] + squares[name] for name in squares},
        }
        return after, (waiting, totals["skip"] | ~finite)

    def update(
        self,
        totals: Arrays,
        waiting: Tree,
        loaded: Arrays,
        index: jax.Array | int,
        names: Sequence[str],
    ) -> Arrays:
        """Updates parameters of a layer; returns {name: [new weights of the layer, new slices of
        each array]}.
        """
        grads, skip = self._gradients(waiting[0], names), waiting[1]
        loaded = {name: loaded[name] for name in names}

        def local(
            loaded: Arrays, grads: Arrays, bare: Tree, index: jax.Array | int, *numbers: jax.Array
        ) -> Any:
            begun = begin(self.plan, bare, context_of(self.plan, *numbers))
            return {
                name: self._leaf(name).update(begun, loaded[name], grad, index)
                for name, grad in grads.items()
            }

        rows = {name: self._gradient_spec(name) for name in grads}
        given = self._state_specs(totals, names, self._reads_row), rows, P(), P(), P(), P(), P()
        return over_auto_axes(local, given, self._state_specs(totals, names, has_row=True))(
            loaded,
            grads,
            self.bare,
            jnp.asarray(index, jnp.int32),
            totals["scale"],
            skip,
            self.key_data,
        )

    def load_state(self, totals: Arrays, index: jax.Array | int, names: Sequence[str]) -> Arrays:
        """Loads the state of parameters of a layer to the device, for their update.

        The state is {name: [the layer's weights if there are no masters, slices of each array]}.
        """

        def local(weights: Arrays, slices: Arrays, index: jax.Array | int) -> Any:
            return {
                name: self._leaf(name).load(weights[name], slices[name], index) for name in weights
            }

        loaded = self._state_specs(totals, names, self._reads_row)
        return over_auto_axes(local, (*self._specs(totals, names), P()), loaded)(
            *self._arrays(totals, names), jnp.asarray(index, jnp.int32)
        )

    def store_state(self, totals: Arrays, new: Arrays, index: jax.Array | int) -> Arrays:
        """Stores the new state of parameters of a layer."""
        names = list(new)

        def local(weights: Arrays, slices: Arrays, new: Arrays, index: jax.Array | int) -> Any:
            found = {
                name: self._leaf(name).store(weights[name], slices[name], new[name], index)
                for name in weights
            }
            return {n: x[0] for n, x in found.items()}, {n: x[1] for n, x in found.items()}

        arrays = self._specs(totals, names)
        given = *arrays, self._state_specs(totals, names, has_row=True), P()
        weights, slices = over_auto_axes(local, given, arrays)(
            *self._arrays(totals, names), new, jnp.asarray(index, jnp.int32)
        )
        return {
            **totals,
            "weights": {**totals["weights"], **weights},
            "slices": {**totals["slices"], **slices},
        }

    def _arrays(self, totals: Arrays, names: Sequence[str]) -> tuple[Arrays, Arrays]:
        """Returns (stacks of weights, slices of the optimizer state) of parameters."""
        weights, slices = totals["weights"], totals["slices"]
        return {name: weights[name] for name in names}, {name: slices[name] for name in names}

    def _specs(self, totals: Arrays, names: Sequence[str]) -> tuple[Arrays, Arrays]:
        """Returns the partition specs of the result of `_arrays`."""
        stacks = {name: self._whole_spec(name) for name in names}
        slices = {
            name: [{tier: self._leaf(name).spec for tier in x} for x in totals["slices"][name]]
            for name in names
        }
        return stacks, slices

    @property
    def _reads_row(self) -> bool:
        """Whether the update starts from the weights in host memory, because there are no master
        weights.
        """
        return not self.plan.precision.has_masters

    def _gradients(self, waiting: Arrays, names: Sequence[str]) -> Arrays:
        """Returns the gradients of these parameters for `update`."""
        return {name: waiting[name] for name in names}

    def _gradient_spec(self, name: str) -> P:
        """Returns the partition spec of a gradient in the result of `_gradients`."""
        return self._row_spec(name)

    def _leaf(self, name: str) -> LayerOfLeaf:
        assert self.plan.offload is not None
        leaf = self.plan.offload.leaves[name]
        return LayerOfLeaf(leaf, self.rows.waiting[name].dtype, reads_row=self._reads_row)

    def _whole_spec(self, name: str) -> P:
        return P(*self.plan.placement.leaves[name].axes)

    def _row_spec(self, name: str) -> P:
        return P(*self.plan.placement.leaves[name].axes[1:])

    def _state_specs(
        self, totals: Arrays, names: Sequence[str], has_row: bool
    ) -> dict[str, list[P]]:
        """Returns the partition specs of a layer's state, with the layer's weights if `has_row`."""
        return {
            name: [self._row_spec(name)] * has_row
            + [self._leaf(name).spec] * len(totals["slices"][name])
            for name in names
        }


class LayerOfLeaf:
    """Loads, updates and stores the slices of one parameter in one layer, on one device.

    Args:
      leaf: the parameter's slices.
      dtype: dtype of its weights.
      reads_row: whether the update starts from the weights, because there are no masters.
      on_host: whether the weights are in host memory.

    Attributes:
      spec: partition spec of slices over the axes that the compiler partitions.
    """

    def __init__(
        self, leaf: SlicedLeaf, dtype: DTypeLike, *, reads_row: bool, on_host: bool = True
    ) -> None:
        self._leaf, self._dtype, self._reads_row = leaf, dtype, reads_row
        self._on_host = on_host
        # All slices are in one memory, or `check_update_in_backward` has refused the plan.
        (self._tier,) = [tier for tier, count in leaf.counts.items() if count]
        self._per_layer = leaf.num_slices // leaf.shard_shape[0]
        self.spec = slice_spec(leaf, (MODEL,))

    def update(
        self, begun: BegunUpdate, loaded: list[jax.Array], grad: jax.Array, index: jax.Array | int
    ) -> list[jax.Array]:
        """Updates one layer; returns [new weights of the layer, new slices of each array], on the
        device.
        """
        pieces = grad.reshape(self._per_layer, self._leaf.slice_elements)
        rows, stored = [], []
        for part in range(self._per_layer):
            old = [array.reshape(-1, self._leaf.slice_elements)[part] for array in loaded]
            number = index * self._per_layer + part
            master, moments = old[0], tuple(old[1:])
            new, after = update_slice(begun, self._leaf.name, number, master, moments, pieces[part])
            rows.append(new.astype(self._dtype))
            stored.append(after if self._reads_row else (new, *after))
        row = jnp.stack(rows).reshape(grad.shape)
        return [row, *(jnp.stack(parts) for parts in zip(*stored, strict=True))]

    def load(
        self, weights: jax.Array, slices: list[Arrays], index: jax.Array | int
    ) -> list[jax.Array]:
        """Loads a layer's arrays for `update`: [weights if there is no master, slices of each
        array].
        """
        bring = to_device if self._tier == HOST else _same
        bring_row = to_device if self._on_host else _same
        row = [bring_row(take_slice(weights, index))] if self._reads_row else []
        # Slice numbers are linear in the loop's counter, so that the copy engine moves the slices.
        # All slices of the layer are one copy: several to one array would wait for each other.
        first = index * self._per_layer
        count = self._per_layer
        return row + [bring(take_slices(one[self._tier], first, count)) for one in slices]

    def store(
        self, weights: jax.Array, slices: list[Arrays], new: list[jax.Array], index: jax.Array | int
    ) -> tuple[jax.Array, list[Arrays]]:
        """Writes the result of `update` into the arrays; returns (stack of the weights, slices)."""
        leave = to_host if self._tier == HOST else _same
        leave_row = to_host if self._on_host else _same
        first = index * self._per_layer
        after = [
            {self._tier: put_slices(one[self._tier], leave(block), first)}
            for one, block in zip(slices, new[1:], strict=True)
        ]
        return put_slice(weights, leave_row(new[0]), index), after


def _same(x: jax.Array) -> jax.Array:
    return x


def slice_spec(leaf: SlicedLeaf, axes: tuple[str, ...]) -> P:
    """Returns the partition spec of slices over those of their mesh axes that are in `axes`.

    Among the slices' mesh axes, those in `axes` have to be all before or all after the others.
    """
    over = tuple(axis for axis in leaf.axes if axis in axes)
    return P(over) if over else P()


# --- the parts of a state -------------------------------------------------------------------------


def slices_of(state: TrainState, leaves: Mapping[str, SlicedLeaf]) -> Arrays:
    """Returns {name: [master if there is one, moments], each {storage tier: slices}} of a state."""
    masters = state["masters"]
    slices = {name: [masters[name]] if name in masters else [] for name in sorted(leaves)}

    def note(leaf: SlicedLeaf, _: int, tiers: Any) -> Any:
        slices[leaf.name].append(tiers)
        return tiers

    map_moments(leaves, note, state["opt_state"])
    return slices


def with_slices(
    state: TrainState, leaves: Mapping[str, SlicedLeaf], weights: Arrays, slices: Arrays
) -> TrainState:
    """Returns the state with these weights and slices (which `slices_of` returned)."""
    old = state["masters"]

    def put(leaf: SlicedLeaf, number: int, _: Any) -> Any:
        # The master, if there is one, comes before the moments.
        return slices[leaf.name][number + (leaf.name in old)]

    result = state.copy()
    result["params"] = {**state["params"], **weights}
    result["masters"] = {**old, **{name: x[0] for name, x in slices.items() if name in old}}
    result["opt_state"] = map_moments(leaves, put, state["opt_state"])
    return result
