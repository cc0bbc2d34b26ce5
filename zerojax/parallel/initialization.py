"""Initialisation of a training state, computed, copied or read straight into its shards."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.config.keywords import names_keywords
from zerojax.models.protocol import LazyArray
from zerojax.optim import coding_of, loss_scale
from zerojax.parallel.offload.disk import DiskState
from zerojax.parallel.offload.disk_fill import fill_new_disk
from zerojax.parallel.offload.disk_weights import build_weights
from zerojax.parallel.offload.state import cut_new_param, cut_new_state
from zerojax.parallel.place import place
from zerojax.plan.abstract_state import LayerRows, fit, rows_of_state
from zerojax.plan.plan import Plan, require_plan
from zerojax.plan.state import TrainState, run_key_data, zero_counter
from zerojax.runtime.system_memory import allocating_for


@names_keywords()
@allocating_for("making the first state")
def init_state(plan: Plan, seed: int = 0) -> TrainState:
    """A new state, born in its shards: no device ever holds more than its part.

    An `nnx.Module` instance brings its own values, which are copied (the instance stays usable
    after the first donated step); every other kind of model is initialised from `seed`. The values
    do not depend on the mesh.

    Args:
      plan: over a real mesh.
      seed: of parameters and dropout.

    Raises:
      ValueError: the plan is over an `AbstractMesh`, or the seed does not fit into 64 bits.
      TypeError: `plan` is no plan, or `seed` no integer.
    """
    require_plan(plan, "init_state")
    if not isinstance(plan.mesh, jax.sharding.Mesh):
        raise ValueError(
            "this plan is over an abstract mesh, for absent devices; plan with "
            "zerojax.make_mesh(...) to train"
        )
    key_data = np.asarray(run_key_data(seed))
    disk = _new_disk(plan, key_data)  # first: there may be no space for it
    try:
        return _init_around(plan, key_data, disk)
    except BaseException:
        if disk is not None:
            disk.close()
        raise


def _init_around(plan: Plan, key_data: np.ndarray, disk: DiskState | None) -> TrainState:
    """A new state whose slices in files are there already."""
    # Weights of masters in files are made of these, slice by slice, not all at once.
    made_later = disk.leaves if disk is not None and plan.precision.has_masters else ()
    given = plan.model.initial_arrays()
    if given is None:
        state = build_initialiser(plan, without=made_later)(key_data)
    elif any(_is_unread(value) for part in given for value in part.values()):
        state = _read_initial(plan, key_data, without=made_later)
    else:
        state = _copy_initial(plan, key_data)
    if disk is not None:
        state["disk"] = disk
    if len(state["params"]) < len(plan.abstract_state["params"]):
        assert disk is not None
        made = state["params"] | build_weights(plan, disk.leaves, disk, state["masters"])
        state["params"] = {name: made[name] for name in plan.abstract_state["params"]}
    return state


def _new_disk(plan: Plan, key_data: np.ndarray) -> DiskState | None:
    """The slices in files of a new state, one parameter in memory at a time."""
    if plan.offload is None or not plan.offload.on_disk:
        return None
    given = plan.model.initial_arrays()

    def stored(name: str) -> jax.Array:
        leaf, rows = plan.abstract_stored["params"][name], _rows_of_params(plan)[name]
        if given is not None and not isinstance(given[0][name], jax.ShapeDtypeStruct):
            return _place(given[0][name], leaf, rows)
        one = jax.jit(
            lambda key_data: _new_params(plan, key_data)[0][name], out_shardings=leaf.sharding
        )
        return one(key_data)

    return fill_new_disk(plan, stored)


def build_initialiser(plan: Plan, *, without: Collection[str] = ()) -> Any:
    """`key_data -> TrainState`, jitted: every array is computed in its shards.

    Args:
      plan: over a real mesh.
      without: names that `params` is to lack.
    """

    def leave_out(state: Any) -> Any:
        kept = {name: x for name, x in state["params"].items() if name not in without}
        return {**state, "params": kept}

    def initialise(key_data: jax.Array) -> TrainState:
        stored, extras = _new_params(plan, key_data)
        return leave_out(_offloaded(plan, _assemble(plan, stored, extras, key_data)))

    return jax.jit(initialise, out_shardings=leave_out(plan.state_shardings))


def _new_params(plan: Plan, key_data: jax.Array) -> tuple[dict[str, jax.Array], Any]:
    """Traced: all parameters as they are stored, and the model's own state."""
    # Zeros: linen looks at a batch's shapes only, and this costs no transfer.
    batch = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), plan.abstract_batch)
    key = jax.random.wrap_key_data(key_data)
    params, extras = plan.model.init(jax.random.fold_in(key, 0), batch, plan.loss)
    abstract = {**plan.abstract_stored["params"], **plan.abstract_stored["frozen"]}
    rows = _rows_of_params(plan)
    stored = {
        name: fit(params[name].astype(leaf.dtype), leaf.shape, rows[name], to_rows=True)
        for name, leaf in abstract.items()
    }
    return stored, extras


def _copy_initial(plan: Plan, key_data: np.ndarray) -> TrainState:
    """The state from the arrays that the user's module holds."""
    arrays = plan.model.initial_arrays()
    assert arrays is not None
    params, extras = arrays
    stored = {**plan.abstract_stored["params"], **plan.abstract_stored["frozen"]}
    rows = _rows_of_params(plan)
    placed = {name: _place(params[name], leaf, rows[name]) for name, leaf in stored.items()}
    host_extras = {name: np.asarray(value) for name, value in extras.items()}

    # A jitted function that donates nothing: on CPU a placed array may share memory with the
    # user's, and the first donated step would write into it
    # (tests/test_arrays.py::test_users_own_arrays_survive).
    def build(placed: dict, extras: dict, key_data: jax.Array) -> TrainState:
        return _offloaded(plan, _assemble(plan, placed, extras, key_data))

    jitted = jax.jit(build, out_shardings=plan.state_shardings)
    return jitted(placed, host_extras, key_data)


def _is_unread(value: Any) -> bool:
    return isinstance(value, (LazyArray, jax.ShapeDtypeStruct))


def _read_initial(plan: Plan, key_data: np.ndarray, *, without: Collection[str]) -> TrainState:
    """The state from arrays that lie in files, or are still to be made, one parameter at a time.

    Args:
      plan: over a real mesh.
      without: names that `params` is to lack.
    """
    arrays = plan.model.initial_arrays()
    assert arrays is not None
    stored = {**plan.abstract_stored["params"], **plan.abstract_stored["frozen"]}
    rows = _rows_of_params(plan)
    new, extras = _make_missing(plan, *arrays, key_data)
    placed = {
        name: new[name] if name in new else _place(arrays[0][name], stored[name], rows[name])
        for name in stored
        if plan.offload is None or name in plan.abstract_stored["frozen"]
    }

    def others(placed: dict, extras: dict, key_data: jax.Array) -> Any:
        # Moments of what can be offloaded begin at zero, so they need no parameters.
        zeros = {n: jnp.zeros(x.shape, x.dtype) for n, x in stored.items() if n not in placed}
        state = _offloaded(plan, _assemble(plan, {**zeros, **placed}, extras, key_data))
        return leave_out(state)

    def leave_out(state: Any) -> Any:
        return {part: x for part, x in state.items() if part not in ("params", "masters", "frozen")}

    shardings = leave_out(plan.state_shardings)
    state = jax.jit(others, out_shardings=shardings)(placed, extras, key_data)
    state["frozen"] = {name: placed[name] for name in plan.abstract_stored["frozen"]}
    if plan.offload is None:
        state["params"] = {name: placed[name] for name in plan.abstract_stored["params"]}
        return state
    state["params"], state["masters"] = {}, {}
    for name, leaf in plan.abstract_stored["params"].items():
        one = new.pop(name) if name in new else _place(arrays[0][name], leaf, rows[name])
        param, masters = cut_new_param(plan, name, one)
        if name not in without:
            state["params"][name] = param
        if masters is not None:
            state["masters"][name] = masters
    return state


def _make_missing(
    plan: Plan, params: dict[str, Any], extras: dict[str, Any], key_data: np.ndarray
) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """({name: parameter as it is stored} of those in no file, all of the model's own state)."""
    names = [name for name, x in params.items() if isinstance(x, jax.ShapeDtypeStruct)]
    missing = [name for name, x in extras.items() if isinstance(x, jax.ShapeDtypeStruct)]

    def make(key_data: jax.Array) -> tuple[dict, dict]:
        stored, own = _new_params(plan, key_data)
        return {name: stored[name] for name in names}, {name: own[name] for name in missing}

    abstract = plan.abstract_stored
    shardings = (
        {name: {**abstract["params"], **abstract["frozen"]}[name].sharding for name in names},
        {name: abstract["extras"][name].sharding for name in missing},
    )
    new, made = jax.jit(make, out_shardings=shardings)(key_data)
    return new, {**extras, **made}


def _place(value: Any, stored: jax.ShapeDtypeStruct, rows: LayerRows | None) -> jax.Array:
    return place(value if isinstance(value, LazyArray) else np.asarray(value), stored, rows)


def _offloaded(plan: Plan, stored: TrainState) -> TrainState:
    """Traced: a new state as it lies in memory."""
    return stored if plan.offload is None else cut_new_state(plan, stored)


def _assemble(plan: Plan, params: dict, extras: dict, key_data: jax.Array) -> TrainState:
    """Traced: the whole state from parameters of stored shape."""
    abstract, scaling = plan.abstract_stored, plan.precision.loss_scale
    trained = {name: params[name] for name in abstract["params"]}
    return TrainState(
        step=zero_counter(),
        skipped=zero_counter(),
        rng=key_data,
        params=trained,
        frozen={name: params[name] for name in abstract["frozen"]},
        opt_state=_new_opt_state(plan, trained),
        extras={name: jnp.asarray(extras[name]) for name in abstract["extras"]},
        loss_scale={} if scaling is None else loss_scale.init(scaling),
    )


def _new_opt_state(plan: Plan, trained: dict[str, jax.Array]) -> Any:
    coding = coding_of(plan.tx)
    if coding is None:
        return plan.tx.init(trained)
    return coding.new_state(plan.abstract_stored["opt_state"])


def _rows_of_params(plan: Plan) -> dict[str, LayerRows | None]:
    rows = rows_of_state(plan.placement, plan.tx, plan.abstract_stored)
    if rows is None:
        return dict.fromkeys(plan.placement.leaves)
    return {**rows["params"], **rows["frozen"]}
