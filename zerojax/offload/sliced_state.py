"""Converts a training state between its stored form and slices, and initializes it in slices.

With offload, masters and moments are cut into slices in device memory, host memory or files. The
stored form has whole (sharded) parameters and moments.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from zerojax.config.mesh import HOST, HOST_KIND
from zerojax.optim import EMA, as_average, ema_of
from zerojax.placement.decisions import Decisions
from zerojax.placement.slices import (
    Tiers,
    abstract_tiers,
    cut,
    cut_leaf,
    join_leaf,
    map_moments,
    to_device,
    to_host,
)
from zerojax.placement.state import TrainState, portable_on_host
from zerojax.placement.state_layout import SlicedLeaf


def cut_new_state(plan: Decisions, stored: TrainState) -> TrainState:
    """Cuts a new state from its stored form (dtype, padding and sharding as in the state) on the
    device into slices; traced.

    The moments are zeros; an average of the weights (EMA) begins as a copy of the weights.
    """
    layout, abstract = plan.offload, plan.abstract_state
    assert layout is not None
    cut_params = {name: _cut_param(plan, name, x) for name, x in stored["params"].items()}

    def new_moment(leaf: SlicedLeaf, number: int, moment: jax.Array) -> Tiers:
        if layout.moments[number] == EMA:
            average = cut_params[leaf.name].average
            assert average is not None
            return average
        # The moments of every optimizer that supports offload begin at zero.
        made = abstract_tiers(leaf, moment.dtype, plan.mesh).items()
        new = {tier: jnp.zeros(x.shape, x.dtype) for tier, x in made}
        return {tier: to_host(x) if tier == HOST else x for tier, x in new.items()}

    result = stored.copy()
    result["params"] = {name: cut_params[name].param for name in abstract["params"]}
    masters = {name: cut_params[name].master for name in abstract["masters"]}
    result["masters"] = masters
    result["opt_state"] = map_moments(layout.leaves, new_moment, stored["opt_state"])
    result["disk"] = {}
    return result


class CutParam(NamedTuple):
    """The arrays of one parameter in a state with offload.

    Attributes:
      param: value that forward and backward pass read; None if it is in files.
      master: slices of the master weights; None if the parameter has no master.
      average: average of the weights (EMA), in slices if the parameter is; None if the optimizer
        has none.
    """

    param: Any
    master: Tiers | None
    average: Any


def cut_new_param(plan: Decisions, name: str, stored: jax.Array) -> CutParam:
    """Cuts one new parameter into slices, where the state stores slices.

    Args:
      plan: a plan with offload.
      name: name of the parameter.
      stored: stored form (dtype, padding and sharding as in the state) of the parameter, on the
        device.
    """
    shardings = plan.state_shardings
    averages = ema_of(shardings["opt_state"]) or {}
    wanted = CutParam(
        shardings["params"].get(name), shardings["masters"].get(name), averages.get(name)
    )
    return jax.jit(lambda stored: _cut_param(plan, name, stored), out_shardings=wanted)(stored)


def _cut_param(plan: Decisions, name: str, stored: jax.Array) -> CutParam:
    """Cuts one new parameter into slices, where the state stores slices; traced."""
    layout, abstract = plan.offload, plan.abstract_state
    assert layout is not None
    leaves = layout.leaves

    def in_slices(x: jax.Array, wanted: Tiers) -> Tiers:
        return jax.shard_map(
            lambda shard: cut(leaves[name], shard),
            mesh=plan.mesh,
            in_specs=plan.abstract_stored["params"][name].sharding.spec,
            out_specs={tier: x.sharding.spec for tier, x in wanted.items()},
            check_vma=False,
        )(x)

    param = None
    if name not in layout.paged:
        param = stored.astype(abstract["params"][name].dtype)
        param = to_host(param) if name in layout.streamed else param
    master = abstract["masters"].get(name)
    if master is not None:
        master = in_slices(stored, master)
    average = (ema_of(abstract["opt_state"]) or {}).get(name)
    if average is not None:
        new = as_average(stored)
        average = in_slices(new, average) if name in leaves else new
    return CutParam(param, master, average)


def join_state(plan: Decisions, state: TrainState, *, joined: bool = True) -> TrainState:
    """Returns the state with whole parameters and moments, in the form of `plan.abstract_stored`.

    Joins slices. Arrays outside device memory are joined on the host, one after the other.

    Args:
      plan: a plan with offload.
      state: training state in slices.
      joined: whether to join arrays with optimizer-state slices in host memory or files. False puts
        a `ShapeDtypeStruct` in the place of each.
    """
    layout = plan.offload
    assert layout is not None
    target = portable_on_host(plan.abstract_stored, layout)
    # In `layout.arrays` the moments come after the masters.
    masters = int(plan.precision.has_masters)

    def moment(leaf: SlicedLeaf, number: int, tiers: Tiers, wanted: Any) -> jax.Array:
        if not joined and leaf in layout.off_device:
            return wanted
        return join_leaf(leaf, tiers, wanted, _from_files(plan, state, leaf, masters + number))

    result = state.copy()
    # The stored form has the masters as its parameters.
    del result["masters"], result["disk"]
    result["params"] = join_params(plan, state, joined=joined)
    result["opt_state"] = map_moments(
        layout.leaves, moment, state["opt_state"], target["opt_state"]
    )
    return result


def join_params(plan: Decisions, state: TrainState, *, joined: bool = True) -> dict[str, jax.Array]:
    """Returns the parameters of a state with offload, joined as in `join_state`."""
    layout = plan.offload
    assert layout is not None
    target = portable_on_host(plan.abstract_stored, layout)["params"]

    def param(name: str, wanted: jax.ShapeDtypeStruct) -> Any:
        if name not in state["masters"]:
            x = state["params"][name]
            return x if name not in layout.streamed else jax.device_put(x, wanted.sharding)
        leaf = layout.leaves[name]
        if not joined and leaf in layout.off_device:
            return wanted
        return join_leaf(leaf, state["masters"][name], wanted, _from_files(plan, state, leaf, 0))

    return {name: param(name, wanted) for name, wanted in target.items()}


def join_average(plan: Decisions, state: TrainState) -> dict[str, jax.Array]:
    """Returns the average of the weights, joined as in `join_state`; the optimizer must
    have one.
    """
    layout = plan.offload
    assert layout is not None
    target = ema_of(portable_on_host(plan.abstract_stored, layout)["opt_state"])
    held = ema_of(state["opt_state"])
    assert target is not None
    assert held is not None
    number = layout.arrays.index(EMA)

    def average(name: str, x: Any) -> jax.Array:
        if name not in layout.leaves:
            return x
        leaf = layout.leaves[name]
        return join_leaf(leaf, x, target[name], _from_files(plan, state, leaf, number))

    return {name: average(name, x) for name, x in held.items()}


def averaged_params(plan: Decisions, state: TrainState) -> dict[str, jax.Array]:
    """Returns the average of the weights in the dtype and sharding that the forward pass reads."""
    layout, abstract = plan.offload, plan.abstract_state["params"]
    assert layout is not None

    def as_read(name: str, x: jax.Array) -> jax.Array:
        if name not in layout.leaves:
            return x
        wanted = abstract[name]
        return _cast(wanted.dtype, wanted.sharding, name in layout.streamed)(x)

    return {name: as_read(name, x) for name, x in join_average(plan, state).items()}


def _from_files(plan: Decisions, state: TrainState, leaf: SlicedLeaf, array: int) -> Any:
    """Reads the optimizer-state slices in files of array number `array` of a parameter; None if the
    state has no files.
    """
    assert plan.offload is not None
    return state["disk"].read(leaf, plan.offload.arrays[array]) if state["disk"] else None


def cut_state(plan: Decisions, stored: TrainState) -> TrainState:
    """Cuts a state into slices, the inverse of `join_state`; leaves out optimizer-state slices in
    files.

    Leaves of `stored` that are not arrays stay as they are.
    """
    layout, abstract, mesh = plan.offload, plan.abstract_state, plan.mesh
    assert layout is not None
    assert isinstance(mesh, Mesh)

    def as_read(name: str, x: jax.Array) -> jax.Array:
        wanted = abstract["params"][name]
        if not isinstance(x, jax.Array):
            return x
        # Without a cast the array need not pass through the device.
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
    result["params"] = {n: as_read(n, stored["params"][n]) for n in abstract["params"]}
    result["opt_state"] = map_moments(layout.leaves, moment, stored["opt_state"])
    result["disk"] = {}
    return result


def average_like(param: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns the initial average of a parameter: a float32 copy with the sharding of `wanted`."""
    sharding: Any = wanted.sharding
    return _average(sharding, sharding.memory_kind == HOST_KIND)(param)


@functools.lru_cache(maxsize=64)
def _average(sharding: Any, host: bool) -> Any:
    """Builds a jitted function that copies an array in any memory to float32 with this sharding.

    Args:
      sharding: sharding of the result.
      host: whether the array is in host memory.
    """

    def begin(x: jax.Array) -> jax.Array:
        new = as_average(to_device(x))
        return to_host(new) if host else new

    return jax.jit(begin, out_shardings=sharding)


@functools.lru_cache(maxsize=64)
def _cast(dtype: DTypeLike, sharding: Any, host: bool) -> Any:
    """Builds a jitted function that casts an array in any memory."""

    def cast(x: jax.Array) -> jax.Array:
        new = to_device(x).astype(dtype)
        return to_host(new) if host else new

    return jax.jit(cast, out_shardings=sharding)
