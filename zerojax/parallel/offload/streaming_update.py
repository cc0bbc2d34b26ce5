"""Updates each layer in the backward pass, so that no gradient is stored.

While the backward loop computes a layer, the next layer's weights and this layer's masters and
moments are loaded; these are updated and written back before the loop continues. The price:
gradients cannot be clipped by their norm, accumulated over microbatches, or undone. A loss that is
not finite is known before the backward pass, and the step changes nothing. A layer whose gradient
is not finite is not changed, but the layers after it have already been updated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from zerojax.config.mesh import HOST
from zerojax.parallel import model_state
from zerojax.parallel.offload.sliced_update import begin, context_of, update_slice
from zerojax.parallel.offload.streaming import StreamedPass, one_of
from zerojax.parallel.offload.streaming_rows import LayerRows, put_rows, split_by_name
from zerojax.parallel.sums import over_auto_axes, sum_replicated
from zerojax.parallel.zero import (
    PassConfig,
    over_batch,
    reduce_gradients,
    shard_key,
    specs_of,
    split_batch,
)
from zerojax.plan.device_mesh import DATA_AXES, MANUAL_AXES, MODEL, PASS_AXES
from zerojax.plan.make import Plan
from zerojax.plan.slices import (
    map_moments,
    put_slice,
    take_slice,
    to_device,
    to_host,
    without_moments,
)
from zerojax.plan.state import TrainState
from zerojax.plan.state_layout import SlicedLeaf

Arrays = dict[str, Any]


def build_updating_gradients(
    plan: Plan, config: PassConfig
) -> Callable[..., tuple[Arrays, Arrays, Arrays, TrainState]]:
    """Builds a function of `(state, key_data, batch)`, to be traced inside a jitted step.

    Its arguments: the training state; uint32 key data of the step; the global batch.

    Returns:
      A function that returns `(sums, grads, extras, state)`. Sums and extras are those of
      `zerojax.parallel.offload.streaming.build_gradients`; grads are those of the parameters that
      are not streamed; in the state, weights, masters and moments of the streamed parameters have
      been updated, and nothing else, not even the optimizer's count.
    """
    layout = plan.offload
    assert layout is not None
    assert config.num_microbatches == 1

    def local(
        params: Arrays,
        frozen: Arrays,
        extras: Arrays,
        slices: Arrays,
        bare: Any,
        key_data: Any,
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
        sums["squares"] = totals["squares"]
        agreed = model_state.agree(extras, after, config.model.overwritten, config.counted)
        grads = {name: grads[name] for name in params if name in grads}
        return sums, grads, agreed, totals["weights"], totals["slices"]

    def gradients(state: TrainState, key_data: Any, batch: Arrays):
        params, frozen = state["params"], state["frozen"]
        leaves = {name: layout.leaves[name] for name in layout.streamed}
        slices = _slices_of(state, leaves)
        specs = specs_of(config, params), specs_of(config, frozen), P()
        slice_specs = {
            name: [
                {tier: _slice_spec(layout.leaves[name], PASS_AXES) for tier in x} for x in arrays
            ]
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
        return sums, grads, extras, _with_slices(state, leaves, weights, slices)

    return gradients


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerUpdates:
    """A sink (see `zerojax.parallel.offload.streaming_rows.GradientSink`) that updates layers.

    Its totals: "weights" {name: stack on the host}, "slices" {name: [master if there is one,
    moments], each {tier: slices}}, "device" {name: gradients of a small stack}, "squares", and for
    all layers "scale" and "skip".

    Attributes:
      rows: the stacks.
      bare: the optimizer's state without moments.
      key_data: key data of the step.
    """

    plan: Plan
    rows: LayerRows
    bare: Any
    key_data: jax.Array

    def totals(self, slices: Arrays) -> Arrays:
        """Returns the totals before the pass."""
        return {
            "weights": {name: self.rows.waiting[name] for name in self.rows.streamed},
            "slices": slices,
            "device": {n: jnp.zeros(x.shape, x.dtype) for n, x in self.rows.inputs.items()},
            "squares": dict.fromkeys(self.rows.streamed, jnp.float32(0)),
        }

    def start(self, totals: Arrays, sums: Arrays) -> Arrays:
        """Computes the scale from the whole batch's weight; skips if its loss is not finite."""
        summed = sum_replicated(sums)
        loss = summed["loss"] / summed["weight"]
        return {**totals, "scale": 1 / summed["weight"], "skip": ~jnp.isfinite(loss)}

    def load(self, totals: Arrays, index: Any) -> Arrays:
        """Loads the weights of a layer that has not been updated yet."""
        fixed = {name: x for name, x in self.rows.waiting.items() if name in self.rows.frozen}
        return self.rows.load(index, {**fixed, **totals["weights"]})

    def take(self, totals: Arrays, index: Any, grads: Arrays) -> Arrays:
        """Reduces the gradients of a layer and updates it."""
        waiting, here = split_by_name(self.rows.reduce(grads), self.rows.streamed)
        squares = self.rows.sum_squares({n: self.rows.squares(n, g) for n, g in waiting.items()})
        finite = jnp.isfinite(sum(squares.values()))
        skip = totals["skip"] | ~finite
        weights, slices = self._update(totals, waiting, index, skip)
        return {
            **totals,
            "weights": weights,
            "slices": slices,
            "device": put_rows(totals["device"], here, index, adds=False),
            "squares": {name: totals["squares"][name] + squares[name] for name in squares},
        }

    def _update(
        self, totals: Arrays, grads: Arrays, index: Any, skip: jax.Array
    ) -> tuple[Arrays, Arrays]:
        """Returns (weights, slices) with one layer updated."""
        leaves = self._leaves()
        axes = {name: self.rows.leaves[name].axes for name in grads}
        stacks = {name: P(*axes[name]) for name in grads}
        rows = {name: P(*axes[name][1:]) for name in grads}
        slices = {
            name: [{tier: _slice_spec(leaves[name], (MODEL,)) for tier in x} for x in arrays]
            for name, arrays in totals["slices"].items()
        }

        def local(
            weights: Arrays, slices: Arrays, grads: Arrays, bare: Any, index: Any, *numbers: Any
        ) -> Any:
            begun = begin(self.plan, bare, context_of(self.plan, *numbers))
            new_weights, new_slices = {}, {}
            for name, grad in grads.items():
                if new_weights:
                    # In sequence: together they would hold the slices of all on the device.
                    done = list(new_weights)[-1]
                    grad, new_weights[done] = lax.optimization_barrier((grad, new_weights[done]))
                update = _LayerOfLeaf(begun, leaves[name], self._has_masters)
                new_weights[name], new_slices[name] = update(
                    weights[name], slices[name], grad, index
                )
            return new_weights, new_slices

        given = stacks, slices, rows, P(), P(), P(), P(), P()
        return over_auto_axes(local, given, (stacks, slices))(
            totals["weights"],
            totals["slices"],
            grads,
            self.bare,
            jnp.asarray(index, jnp.int32),
            totals["scale"],
            skip,
            self.key_data,
        )

    @property
    def _has_masters(self) -> bool:
        return self.plan.precision.has_masters

    def _leaves(self) -> dict[str, SlicedLeaf]:
        assert self.plan.offload is not None
        return dict(self.plan.offload.leaves)


class _LayerOfLeaf:
    """The update of one layer's slices of one parameter, on one device."""

    def __init__(self, begun: Any, leaf: SlicedLeaf, has_masters: bool) -> None:
        self._begun, self._leaf, self._has_masters = begun, leaf, has_masters
        (self._tier,) = [tier for tier, count in leaf.counts.items() if count]
        self._per_layer = leaf.num_slices // leaf.shard_shape[0]

    def __call__(
        self, weights: jax.Array, slices: list[Arrays], grad: jax.Array, index: Any
    ) -> tuple[jax.Array, list[Arrays]]:
        """Returns (weights, [{tier: slices}]) after the update."""
        tier, on_host = self._tier, self._tier == HOST
        bring, leave = (to_device, to_host) if on_host else (_same, _same)
        arrays = [one[tier] for one in slices]
        pieces = grad.reshape(self._per_layer, self._leaf.slice_elements)
        row = None
        if not self._has_masters:
            row = to_device(take_slice(weights, index)).reshape(pieces.shape)
        new_row = []
        for part in range(self._per_layer):
            # Linear in the loop's counter, so that the copy engine moves it.
            number = index * self._per_layer + part
            old = [bring(take_slice(array, number)) for array in arrays]
            master, moments = (old[0], old[1:]) if row is None else (row[part], old)
            new, after = update_slice(
                self._begun, self._leaf.name, number, master, tuple(moments), pieces[part]
            )
            new_row.append(new.astype(weights.dtype))
            stored = [new, *after] if row is None else list(after)
            arrays = [
                put_slice(array, leave(x), number) for array, x in zip(arrays, stored, strict=True)
            ]
        whole = jnp.stack(new_row).reshape(weights.shape[1:])
        return put_slice(weights, to_host(whole), index), [{tier: array} for array in arrays]


def _same(x: jax.Array) -> jax.Array:
    return x


def _slice_spec(leaf: SlicedLeaf, axes: tuple[str, ...]) -> P:
    """Returns the spec of slices over some of their mesh axes.

    The chosen axes have to be all inside or all outside of the axes that are left out.
    """
    over = tuple(axis for axis in leaf.axes if axis in axes)
    return P(over) if over else P()


# --- the parts of a state -------------------------------------------------------------------------


def _slices_of(state: TrainState, leaves: Mapping[str, SlicedLeaf]) -> Arrays:
    """Returns {name: [master if there is one, moments], each {tier: slices}}."""
    masters = state["masters"]
    slices = {name: [masters[name]] if name in masters else [] for name in sorted(leaves)}

    def note(leaf: SlicedLeaf, _: int, tiers: Any) -> Any:
        slices[leaf.name].append(tiers)
        return tiers

    map_moments(leaves, note, state["opt_state"])
    return slices


def _with_slices(
    state: TrainState, leaves: Mapping[str, SlicedLeaf], weights: Arrays, slices: Arrays
) -> TrainState:
    """Inverts `_slices_of`: returns the state with these weights and slices."""
    old = state["masters"]

    def put(leaf: SlicedLeaf, number: int, _: Any) -> Any:
        return slices[leaf.name][number + (leaf.name in old)]

    result = state.copy()
    result["params"] = {**state["params"], **weights}
    result["masters"] = {**old, **{name: x[0] for name, x in slices.items() if name in old}}
    result["opt_state"] = map_moments(leaves, put, state["opt_state"])
    return result
