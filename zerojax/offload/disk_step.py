"""Runs a training step with slices in files: a jitted part, then a loop over the slices.

While slice i is updated on the devices, slice i+1 is read and slice i-1 is written. This takes the
memory of three buckets, whatever the number of slices. A step whose gradients are not finite reads
and writes no slice. The weights for forward and backward pass are cast from the updated master
weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.config.mesh import DEVICE
from zerojax.config.tree_types import Batch, Tree
from zerojax.offload.disk import (
    DiskState,
)
from zerojax.offload.disk_places import DiskLeaf, DiskSlice
from zerojax.offload.sliced_update import begin, context_of, update_slice
from zerojax.optim import Optimizer
from zerojax.passes.update import ThisStep, clipped_scale
from zerojax.placement.decisions import Decisions
from zerojax.placement.slices import (
    MEMORY_TIERS,
    Tiers,
    as_slices,
    put_slice,
    shards_of,
    take_slice,
    tier_sharding,
    to_device,
    to_host,
    without_moments,
)
from zerojax.placement.state import TrainState
from zerojax.placement.state_layout import MASTER

Metrics = dict[str, jax.Array]


class DiskStep:
    """A `step(state, batch) -> (state, metrics)` that returns after all slices are updated.

    Attributes:
      trace, lower: methods `trace` and `lower` of the jitted part.
    """

    def __init__(
        self, plan: Decisions, jitted: Any, write_rest: Callable[[Any, TrainState], None]
    ) -> None:
        """Builds the step around its jitted part.

        Args:
          plan: a plan with optimizer-state slices in files.
          jitted: `(state, batch) -> (state, metrics, pending)`, see `pending_of`.
          write_rest: `(disk, state) -> None`; called before a generation of a durable store (files
            from which a killed run resumes) is committed.
        """
        self._jitted, self._write_rest = jitted, write_rest
        self._update = SliceUpdates(plan)
        self.trace, self.lower = jitted.trace, jitted.lower

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        disk = state["disk"]
        new, metrics, pending = self._jitted({**state, "disk": {}}, batch)
        new["disk"] = disk
        # Waits for the jitted part: its result says whether the gradients are finite.
        if not int(metrics["skipped"]):
            rest = functools.partial(self._write_rest, disk, new)
            with disk.together():
                for piece in disk.slices(before_commit=rest if disk.store.is_durable else None):
                    name = piece.place.leaf.name
                    new["params"][name] = self._update(piece, new["params"][name], pending)
                    piece.write()
        return new, metrics


def pending_of(
    plan: Decisions, grads: Mapping[str, jax.Array], opt_state: Tree, now: ThisStep
) -> dict[str, Any]:
    """Returns the values that the jitted part passes to the update of slices in files; traced.

    Args:
      plan: a plan with slices in files.
      grads: gradients of all parameters, in stored form (dtype, padding and sharding as in the
        state), unscaled.
      opt_state: optimizer state before the step.
      now: values of this step that the update needs.

    Returns:
      {"grads": gradients of parameters with slices in files and weights in memory, "opt_state":
      optimizer state without arrays of parameters, "numbers": scalar arguments of
      `zerojax.offload.sliced_update.context_of`}.
    """
    assert plan.offload is not None
    assert isinstance(plan.tx, Optimizer)
    return {
        "grads": {name: grads[name] for name in _in_memory(plan)},
        "opt_state": without_moments(opt_state),
        "numbers": (clipped_scale(plan.tx, now), now.skip, jax.random.key_data(now.key)),
    }


def pending_shardings(plan: Decisions) -> dict[str, Any]:
    """Returns the shardings of the result of `pending_of`, for `out_shardings` of `jax.jit`."""
    assert plan.offload is not None
    params, replicated = plan.abstract_state["params"], NamedSharding(plan.mesh, P())
    grads = {name: params[name].sharding for name in _in_memory(plan)}
    return {"grads": grads, "opt_state": replicated, "numbers": replicated}


def _in_memory(plan: Decisions) -> list[str]:
    """Returns the names of parameters with optimizer-state slices in files whose weights are in
    memory.
    """
    assert plan.offload is not None
    return [x.name for x in plan.offload.on_disk if x.name not in plan.offload.paged]


class SliceUpdates:
    """Updates optimizer-state slices in files, with one jitted function for each parameter."""

    def __init__(self, plan: Decisions) -> None:
        self._plan = plan
        self._functions: dict[str, Any] = {}

    def __call__(
        self, piece: DiskSlice, weights: jax.Array, pending: Mapping[str, Any]
    ) -> jax.Array:
        """Updates one slice: writes the new master and moments into `piece`; returns the new
        weights.

        `weights`, the parameter that forward and backward pass read, is donated.
        """
        place = piece.place
        name = place.leaf.name
        if name not in self._functions:
            self._functions[name] = self._build(place)
        old = {key: place_rows(place, rows, self._plan) for key, rows in piece.arrays.items()}
        weights, new = self._functions[name](
            weights,
            old,
            pending["grads"][name],
            np.int32(piece.number),
            pending["opt_state"],
            pending["numbers"],
        )
        # A CPU device may use the store's memory without a copy, and devices with copies of one
        # shard share it: it may be written only when all of them have finished.
        jax.block_until_ready((weights, new))
        for key, target in piece.arrays.items():
            take_rows(place, new[key], target)
        return weights

    def _build(self, place: DiskLeaf) -> Any:
        plan, leaf = self._plan, place.leaf
        assert plan.offload is not None
        on_host = leaf.name in plan.offload.streamed
        bring = to_device if on_host else lambda x: x
        leave = to_host if on_host else lambda x: x

        def weights_of(weights: jax.Array, grad: jax.Array) -> SliceWeights:
            grads = as_slices(leaf, grad)
            return SliceWeights(
                start=as_slices(leaf, weights),
                gradient=lambda number: bring(take_slice(grads, number)),
                own=lambda rows, number: bring(take_slice(rows, number)),
                put=lambda rows, own, number: put_slice(
                    rows, leave(own.astype(rows.dtype)), number
                ),
                end=lambda rows: rows.reshape(leaf.shard_shape),
            )

        weights = plan.abstract_state["params"][leaf.name].sharding
        return build_slice_update(plan, place, weights_of, given=(weights, weights), result=weights)


class SliceWeights(NamedTuple):
    """The weights and gradients of one parameter on one device while a slice of it is updated.

    Attributes:
      start: weights in the form that `put`, `own` and `end` take.
      gradient: `slice number -> gradient on the device`.
      put: `(weights, new values, slice number) -> weights with this slice replaced`.
      end: `weights -> weights in the form of the caller`.
      own: `(weights, slice number) -> values` of a parameter without a master, whose weights are
        updated directly; None if it has a master.
    """

    start: Any
    gradient: Callable[[jax.Array], jax.Array]
    put: Callable[[Any, jax.Array, jax.Array], Any]
    end: Callable[[Any], jax.Array]
    own: Callable[[Any, jax.Array], jax.Array] | None = None


def build_slice_update(
    plan: Decisions,
    place: DiskLeaf,
    weights_of: Callable[[Any, jax.Array], SliceWeights],
    *,
    given: tuple[NamedSharding | None, NamedSharding],
    result: NamedSharding,
) -> Any:
    """Builds the jitted update of one slice of one parameter.

    Args:
      plan: a plan with optimizer-state slices in files.
      place: position of the parameter's buckets.
      weights_of: traced function `(weights, gradients) -> SliceWeights` of one device.
      given: (sharding of the weights, which are donated; sharding of the gradients). The first is
        None if the update takes no weights.
      result: sharding of the new weights.

    Returns:
      `(weights, {array: slice}, gradients, slice number, opt_state, numbers) -> (weights, {array:
      slice})`; "opt_state" and "numbers" come from `pending_of`.
    """
    leaf = place.leaf
    moments = [key for key in place.dtypes if key != MASTER]

    def local(
        weights: jax.Array | None,
        old: dict[str, jax.Array],
        grad: jax.Array,
        number: jax.Array,
        opt_state: Tree,
        numbers: tuple[jax.Array, ...],
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        begun = begin(plan, opt_state, context_of(plan, *numbers))
        # The update runs in a loop of one iteration, like the update of slices on the host.
        # Outside of a loop XLA (JAX 0.10, CPU) fuses it differently and rounds other products.
        held = weights_of(weights, grad)

        def body(number: jax.Array, carry: Tree) -> Any:
            rows, old = carry
            if held.own is None or MASTER in old:
                own = old[MASTER][0]
            else:
                own = held.own(rows, number)
            state = tuple(old[key][0] for key in moments)
            own, after = update_slice(begun, leaf.name, number, own, state, held.gradient(number))
            new = dict(zip(moments, (x[None] for x in after), strict=True))
            return held.put(rows, own, number), new | ({MASTER: own[None]} if MASTER in old else {})

        rows, new = jax.lax.fori_loop(number, number + 1, body, (held.start, old))
        return held.end(rows), new

    slices, (before, of_grads) = tier_sharding(leaf, DEVICE, plan.mesh), given
    of_slices = dict.fromkeys(place.dtypes, slices.spec)
    mapped = jax.shard_map(
        local,
        mesh=plan.mesh,
        in_specs=(P() if before is None else before.spec, of_slices, of_grads.spec, *[P()] * 3),
        out_specs=(result.spec, of_slices),
        check_vma=False,
    )
    return jax.jit(
        mapped,
        donate_argnums=0,
        out_shardings=(result, dict.fromkeys(place.dtypes, slices)),
    )


def place_rows(place: DiskLeaf, rows: np.ndarray, plan: Decisions) -> jax.Array:
    """Moves [rows of this process, elements] to the devices as [shards, elements].

    On a CPU device the array may share the memory of `rows`.
    """
    sharding = tier_sharding(place.leaf, DEVICE, plan.mesh)
    shards = [
        jax.device_put(rows[place.row_of[device]][None], device)
        for device in sharding.addressable_devices
    ]
    shape = (place.leaf.num_shards, place.leaf.slice_elements)
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def take_rows(place: DiskLeaf, slices: jax.Array, target: np.ndarray) -> None:
    """Copies slices from the devices into `target`, the inverse of `place_rows`; waits for the
    array.
    """
    shards = {place.row_of[shard.device]: shard.data for shard in slices.addressable_shards}
    for row, shard in shards.items():
        target[row] = np.asarray(shard)[0]


def build_weights(
    plan: Decisions,
    places: Mapping[str, DiskLeaf],
    disk: DiskState | None,
    masters: Mapping[str, Tiers],
) -> dict[str, jax.Array]:
    """Computes the weights from sliced master weights, with one slice on the device at a time.

    Weights of layers that are read from files (`offload.params: nvme`) are left out.

    Args:
      plan: a plan with float32 masters.
      places: {parameter: position of its buckets}.
      disk: store with the optimizer-state slices in files; None if no slice is in a file.
      masters: {parameter: {storage tier: slices}} of the slices in memory.
    """
    abstract = plan.abstract_state["params"]
    places = {name: place for name, place in places.items() if name in abstract}
    weights: dict[str, jax.Array] = {}
    for name in places:
        make = lambda x=abstract[name]: jnp.zeros(x.shape, x.dtype)  # noqa: E731
        # Made in shards, so that no device holds a whole parameter.
        weights[name] = jax.jit(make, out_shardings=abstract[name].sharding)()
    put = {name: _build_put(plan, place) for name, place in places.items()}
    for place, number, rows in _slices(places, disk, masters):
        name, slices = place.leaf.name, place_rows(place, rows, plan)
        weights[name] = put[name](weights[name], slices, np.int32(number))
        jax.block_until_ready(weights[name])  # a CPU device may use the rows without a copy
    return weights


def _slices(
    places: Mapping[str, DiskLeaf], disk: DiskState | None, masters: Mapping[str, Tiers]
) -> Iterator[tuple[DiskLeaf, int, np.ndarray]]:
    """Yields (parameter, slice number, values [rows, elements]) of all slices of master weights."""
    for place in places.values():
        tiers = masters.get(place.leaf.name, {})
        for tier in [tier for tier in MEMORY_TIERS if tier in tiers]:
            shards = shards_of(tiers[tier])
            rows = {place.row_of[device]: shard for device, shard in shards.items()}
            for index in range(place.leaf.counts[tier]):
                taken = np.stack([rows[row][index] for row in range(len(rows))])
                yield place, place.leaf.first(tier) + index, taken
    order = [
        bucket
        for place in places.values()
        for bucket in range(place.first_bucket, place.first_bucket + place.num_buckets)
    ]
    for piece in () if disk is None or not order else disk.slices(order=order):
        yield piece.place, piece.number, piece.arrays[MASTER]


def _build_put(plan: Decisions, place: DiskLeaf) -> Any:
    """Builds the jitted `(weights, master slice of every shard, number) -> weights`, in place."""
    leaf = place.leaf
    sharding = plan.abstract_state["params"][leaf.name].sharding
    on_host = plan.offload is not None and leaf.name in plan.offload.streamed

    def local(weights: jax.Array, master: jax.Array, number: jax.Array) -> jax.Array:
        rows = as_slices(leaf, weights)
        new = master[0].astype(rows.dtype)
        rows = put_slice(rows, to_host(new) if on_host else new, number)
        return rows.reshape(leaf.shard_shape)

    mapped = jax.shard_map(
        local,
        mesh=plan.mesh,
        in_specs=(sharding.spec, tier_sharding(leaf, DEVICE, plan.mesh).spec, P()),
        out_specs=sharding.spec,
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=0, out_shardings=sharding)
