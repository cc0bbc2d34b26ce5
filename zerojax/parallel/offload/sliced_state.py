"""Whole training state in slices: initialised, cut from its stored form, and joined again."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zerojax.config.mesh import HOST
from zerojax.plan.make import Plan
from zerojax.plan.slices import (
    Tiers,
    abstract_tiers,
    cut,
    cut_leaf,
    join_leaf,
    map_moments,
    to_device,
    to_host,
)
from zerojax.plan.state import TrainState, canonical_on_host
from zerojax.plan.state_layout import SlicedLeaf


def cut_new_state(plan: Plan, stored: TrainState) -> TrainState:
    """Traced: a new state in slices, from one on the device, whose moments are zeros."""
    layout, abstract = plan.offload, plan.abstract_state
    assert layout is not None

    def zeros(leaf: SlicedLeaf, _: int, moment: jax.Array) -> Tiers:
        # The moments of every optimizer that can be offloaded begin at zero.
        made = abstract_tiers(leaf, moment.dtype, plan.mesh).items()
        new = {tier: jnp.zeros(x.shape, x.dtype) for tier, x in made}
        return {tier: to_host(x) if tier == HOST else x for tier, x in new.items()}

    result = stored.copy()
    both = {name: _cut_param(plan, name, x) for name, x in stored["params"].items()}
    result["params"] = {name: param for name, (param, _) in both.items()}
    result["masters"] = {name: both[name][1] for name in abstract["masters"]}
    result["opt_state"] = map_moments(layout.leaves, zeros, stored["opt_state"])
    result["disk"] = {}
    return result


def cut_new_param(plan: Plan, name: str, stored: jax.Array) -> tuple[jax.Array, Tiers | None]:
    """(what forward and backward read of one new parameter, its masters in slices, if it has some).

    Args:
      plan: with offload.
      name: of the parameter.
      stored: on the device.
    """
    shardings = (
        plan.state_shardings["params"][name],
        plan.state_shardings["masters"].get(name),
    )
    return jax.jit(lambda stored: _cut_param(plan, name, stored), out_shardings=shardings)(stored)


def _cut_param(plan: Plan, name: str, stored: jax.Array) -> tuple[jax.Array, Tiers | None]:
    """Traced; see `cut_new_param`."""
    layout, abstract = plan.offload, plan.abstract_state
    assert layout is not None
    param = stored.astype(abstract["params"][name].dtype)
    param = to_host(param) if name in layout.streamed else param
    if name not in abstract["masters"]:
        return param, None
    leaf = layout.leaves[name]
    masters = jax.shard_map(
        lambda shard: cut(leaf, shard),
        mesh=plan.mesh,
        in_specs=plan.abstract_stored["params"][name].sharding.spec,
        out_specs={tier: x.sharding.spec for tier, x in abstract["masters"][name].items()},
        check_vma=False,
    )(stored)
    return param, masters


def join_state(plan: Plan, state: TrainState, *, joined: bool = True) -> TrainState:
    """The state with every parameter and moment in one piece, as `plan.abstract_stored` has it.

    What has left the device is joined on the host, leaf by leaf.

    Args:
      plan: with offload.
      state: in slices.
      joined: False: what has slices on the host or in files is left out, a `ShapeDtypeStruct` in
        its place.
    """
    layout = plan.offload
    assert layout is not None
    target = canonical_on_host(plan.abstract_stored, layout)
    masters = int(plan.precision.has_masters)

    def moment(leaf: SlicedLeaf, number: int, tiers: Tiers, wanted: Any) -> jax.Array:
        if not joined and leaf in layout.off_device:
            return wanted
        return join_leaf(leaf, tiers, wanted, _from_files(plan, state, leaf, masters + number))

    result = state.copy()
    del result["masters"], result["disk"]
    result["params"] = join_params(plan, state, joined=joined)
    result["opt_state"] = map_moments(
        layout.leaves, moment, state["opt_state"], target["opt_state"]
    )
    return result


def join_params(plan: Plan, state: TrainState, *, joined: bool = True) -> dict[str, jax.Array]:
    """The parameters alone, as `join_state` has them."""
    layout = plan.offload
    assert layout is not None
    target = canonical_on_host(plan.abstract_stored, layout)["params"]

    def param(name: str, x: jax.Array) -> jax.Array:
        wanted = target[name]
        if name not in state["masters"]:
            return x if name not in layout.streamed else jax.device_put(x, wanted.sharding)
        leaf = layout.leaves[name]
        if not joined and leaf in layout.off_device:
            return wanted
        return join_leaf(leaf, state["masters"][name], wanted, _from_files(plan, state, leaf, 0))

    return {name: param(name, x) for name, x in state["params"].items()}


def _from_files(plan: Plan, state: TrainState, leaf: SlicedLeaf, array: int) -> Any:
    """The slices in files of one of a leaf's arrays, if anything lies in files."""
    assert plan.offload is not None
    return state["disk"].read(leaf, plan.offload.arrays[array]) if state["disk"] else None


def cut_state(plan: Plan, stored: TrainState) -> TrainState:
    """The inverse of `join_state` for slices in memory; those of files are left out.

    What is not an array in `stored` stays what it is.
    """
    layout, abstract, mesh = plan.offload, plan.abstract_state, plan.mesh
    assert layout is not None
    assert isinstance(mesh, Mesh)

    def as_read(name: str, x: jax.Array) -> jax.Array:
        wanted = abstract["params"][name]
        if not isinstance(x, jax.Array):
            return x
        if x.dtype == wanted.dtype:
            return jax.device_put(x, wanted.sharding)
        host = name in layout.streamed
        return _cast(wanted.dtype, wanted.sharding, host)(x)

    def moment(leaf: SlicedLeaf, _: int, x: jax.Array) -> Tiers:
        return cut_leaf(leaf, x, mesh)[0] if isinstance(x, jax.Array) else x

    result = stored.copy()
    result["masters"] = {
        name: moment(layout.leaves[name], 0, stored["params"][name]) for name in abstract["masters"]
    }
    result["params"] = {name: as_read(name, x) for name, x in stored["params"].items()}
    result["opt_state"] = map_moments(layout.leaves, moment, stored["opt_state"])
    result["disk"] = {}
    return result


@functools.lru_cache(maxsize=64)
def _cast(dtype: Any, sharding: Any, host: bool) -> Any:
    """A jitted function of an array, wherever it lies: the same in another dtype, where asked."""

    def cast(x: jax.Array) -> jax.Array:
        new = to_device(x).astype(dtype)
        return to_host(new) if host else new

    return jax.jit(cast, out_shardings=sharding)
