"""Weights for forward and backward, cast from master weights in slices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from zerojax.config.offload import DEVICE
from zerojax.parallel.offload.disk import DiskLeaf, DiskState
from zerojax.parallel.offload.disk_step import place_rows
from zerojax.plan.offload_layout import MASTER
from zerojax.plan.plan import Plan
from zerojax.plan.slices import (
    MEMORY_TIERS,
    Tiers,
    as_slices,
    put_slice,
    shards_of,
    tier_sharding,
    to_host,
)


def build_weights(
    plan: Plan,
    places: Mapping[str, DiskLeaf],
    disk: DiskState | None,
    masters: Mapping[str, Tiers],
) -> dict[str, jax.Array]:
    """The weights of parameters whose masters are in slices, one slice on the device at a time.

    Args:
      plan: with float32 masters.
      places: of the parameters.
      disk: their slices in files, if there are any.
      masters: {name: {tier: slices}} of those in memory.
    """
    abstract = plan.abstract_state["params"]
    weights: dict[str, jax.Array] = {}
    for name in places:
        make = lambda x=abstract[name]: jnp.zeros(x.shape, x.dtype)  # noqa: E731
        weights[name] = jax.jit(make, out_shardings=abstract[name].sharding)()
    put = {name: _build_put(plan, place) for name, place in places.items()}
    for place, number, rows in _slices(places, disk, masters):
        name, slices = place.leaf.name, place_rows(place, rows, plan)
        weights[name] = put[name](weights[name], slices, np.int32(number))
        jax.block_until_ready(weights[name])  # a CPU device may have taken the rows as they are
    return weights


def _slices(
    places: Mapping[str, DiskLeaf], disk: DiskState | None, masters: Mapping[str, Tiers]
) -> Iterator[tuple[DiskLeaf, int, np.ndarray]]:
    """(parameter, number, [rows, elements]) of all slices of masters."""
    for place in places.values():
        tiers = masters.get(place.leaf.name, {})
        for tier in [tier for tier in MEMORY_TIERS if tier in tiers]:
            shards = shards_of(tiers[tier])
            rows = {place.row_of[device]: shard for device, shard in shards.items()}
            for index in range(place.leaf.counts[tier]):
                taken = np.stack([rows[row][index] for row in range(len(rows))])
                yield place, place.leaf.first(tier) + index, taken
    for piece in () if disk is None else disk.slices():
        yield piece.place, piece.number, piece.arrays[MASTER]


def _build_put(plan: Plan, place: DiskLeaf) -> Any:
    """A jitted `(weights, master slice of every shard, number) -> weights`, in place."""
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
