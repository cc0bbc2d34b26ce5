"""How a state is born in its shards, and how it moves from one plan to another.

Knows plans and arrays; never knows what a step computes or what a checkpoint looks like.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from zerojax import loss_scale
from zerojax.abstract_state import LayerRows, canonical_opt_state, rows_of_state
from zerojax.offload.abstract import canonical_on_host
from zerojax.offload.disk import DiskState
from zerojax.offload.disk_fill import fill_disk, fill_new_disk
from zerojax.offload.disk_saving import restore_pieces
from zerojax.offload.disk_weights import build_weights
from zerojax.offload.slices import to_device
from zerojax.offload.state import cut_new_state, cut_state, join_state
from zerojax.optim import StateCoding, coding_of
from zerojax.planned import Planned
from zerojax.state import TrainState, run_key_data, zero_counter

Flat = tuple[tuple[jax.ShapeDtypeStruct, ...], Any]
"""A tree's leaves and its structure: hashable, as keys of a cache are."""


def init_state(plan: Planned, seed: int = 0) -> TrainState:
    """A new state, born in its shards: no device ever holds more than its part.

    An `nnx.Module` instance brings its own values, which are copied (the instance stays usable
    after the first donated step); every other kind of model is initialised from `seed`. The values
    do not depend on the mesh.

    Args:
      plan: over a real mesh.
      seed: of parameters and dropout.

    Raises:
      ValueError: the plan is over an `AbstractMesh`.
    """
    if not isinstance(plan.mesh, jax.sharding.Mesh):
        raise ValueError(
            "this plan is over an abstract mesh, for devices that are not here; plan with "
            "zerojax.make_mesh(...) to train"
        )
    key_data = np.asarray(run_key_data(seed))
    disk = _new_disk(plan, key_data)  # first: there may be no space for it
    if plan.model.initial_arrays() is not None:
        state = _copy_initial(plan, key_data)
    else:
        # Weights of masters in files are made of these, slice by slice, not all at once.
        made_later = disk.leaves if disk is not None and plan.precision.has_masters else ()
        state = build_initialiser(plan, without=made_later)(key_data)
    if disk is not None:
        state["disk"] = disk
    if len(state["params"]) < len(plan.abstract_state["params"]):
        assert disk is not None
        made = state["params"] | build_weights(plan, disk.leaves, disk, state["masters"])
        state["params"] = {name: made[name] for name in plan.abstract_state["params"]}
    return state


def _new_disk(plan: Planned, key_data: np.ndarray) -> DiskState | None:
    """The slices in files of a new state, one parameter in memory at a time."""
    if plan.offload is None or not plan.offload.on_disk:
        return None
    given = plan.model.initial_arrays()

    def stored(name: str) -> jax.Array:
        leaf, rows = plan.abstract_stored["params"][name], _rows_of_params(plan)[name]
        if given is not None:
            return _place(np.asarray(given[0][name]), leaf, rows)
        one = jax.jit(
            lambda key_data: _new_params(plan, key_data)[0][name], out_shardings=leaf.sharding
        )
        return one(key_data)

    return fill_new_disk(plan, stored)


def build_initialiser(plan: Planned, *, without: Collection[str] = ()) -> Any:
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


def _new_params(plan: Planned, key_data: jax.Array) -> tuple[dict[str, jax.Array], Any]:
    """Traced: all parameters as they are stored, and the model's own state."""
    # Zeros: linen looks at a batch's shapes only, and this costs no transfer.
    batch = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), plan.abstract_batch)
    key = jax.random.wrap_key_data(key_data)
    params, extras = plan.model.init(jax.random.fold_in(key, 0), batch, plan.loss)
    abstract = {**plan.abstract_stored["params"], **plan.abstract_stored["frozen"]}
    rows = _rows_of_params(plan)
    stored = {
        name: _fit(params[name].astype(leaf.dtype), leaf.shape, rows[name], to_rows=True)
        for name, leaf in abstract.items()
    }
    return stored, extras


def _copy_initial(plan: Planned, key_data: np.ndarray) -> TrainState:
    """The state from the arrays that the user's module holds."""
    arrays = plan.model.initial_arrays()
    assert arrays is not None
    params, extras = arrays
    stored = {**plan.abstract_stored["params"], **plan.abstract_stored["frozen"]}
    rows = _rows_of_params(plan)
    placed = {
        name: _place(np.asarray(params[name]), leaf, rows[name]) for name, leaf in stored.items()
    }
    host_extras = {name: np.asarray(value) for name, value in extras.items()}

    # A jitted function that donates nothing: on CPU a placed array may share memory with the
    # user's, and the first donated step would write into it
    # (tests/test_arrays.py::test_users_own_arrays_survive).
    def build(placed: dict, extras: dict, key_data: jax.Array) -> TrainState:
        return _offloaded(plan, _assemble(plan, placed, extras, key_data))

    jitted = jax.jit(build, out_shardings=plan.state_shardings)
    return jitted(placed, host_extras, key_data)


def _place(value: np.ndarray, stored: jax.ShapeDtypeStruct, rows: LayerRows | None) -> jax.Array:
    """A host array in its stored shards; each device receives its own part only."""
    if rows is not None:
        layers = np.asarray(rows.rows)
        in_order, value = value, np.zeros((len(layers), *value.shape[1:]), value.dtype)
        value[layers >= 0] = in_order[layers[layers >= 0]]
    widths = [(0, new - old) for new, old in zip(stored.shape, value.shape, strict=True)]
    padded = np.pad(value, widths) if value.shape != stored.shape else value
    cast = padded.astype(stored.dtype, copy=False)
    return jax.make_array_from_callback(stored.shape, stored.sharding, lambda index: cast[index])


def _offloaded(plan: Planned, stored: TrainState) -> TrainState:
    """Traced: a new state as it lies in memory."""
    return stored if plan.offload is None else cut_new_state(plan, stored)


def _assemble(plan: Planned, params: dict, extras: dict, key_data: jax.Array) -> TrainState:
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


def _new_opt_state(plan: Planned, trained: dict[str, jax.Array]) -> Any:
    coding = coding_of(plan.tx)
    if coding is None:
        return plan.tx.init(trained)
    return coding.new_state(plan.abstract_stored["opt_state"])


def to_canonical(plan: Planned, state: TrainState, *, joined: bool = True) -> TrainState:
    """The state without padding, layers in order, in `plan.abstract_canonical`'s shardings.

    Leaves whose two forms are the same are passed on as they are, not copied. Moments that are
    coded are decoded to float32 first.

    Args:
      plan: which `state` follows.
      state: stays valid.
      joined: False: a parameter or moment with slices on the host or in files is not read, and
        what is in its place is no array (see `offload.disk_saving`).
    """
    if plan.offload is None:
        stored = state
    else:
        stored = join_state(plan, state, joined=joined)
    decoded = _recoded(plan, stored, decode=True)
    return _convert(decoded, plan.abstract_canonical, _rows_of_state(plan), to_rows=False)


def from_canonical(plan: Planned, canonical: TrainState) -> TrainState:
    """The inverse of `to_canonical`, for canonical arrays that lie as `plan` says.

    One with slices on the host or in files may be an `offload.disk_saving.Saved` instead.
    """
    stored = plan.abstract_stored.copy()
    stored["opt_state"] = decoded_opt_state(plan)
    if plan.offload is not None:
        stored = canonical_on_host(stored, plan.offload)
    arrays = _convert(canonical, stored, _rows_of_state(plan), to_rows=True)
    recoded = _recoded(plan, arrays, decode=False)
    if plan.offload is None:
        return recoded
    state = cut_state(plan, recoded)
    if not all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(canonical)):
        return restore_pieces(plan, canonical, state)
    if plan.offload.on_disk:
        state["disk"] = fill_disk(plan, recoded)
    return state


def _rows_of_state(plan: Planned) -> TrainState | None:
    return rows_of_state(plan.placement, plan.tx, plan.abstract_stored)


def _rows_of_params(plan: Planned) -> dict[str, LayerRows | None]:
    rows = _rows_of_state(plan)
    if rows is None:
        return dict.fromkeys(plan.placement.leaves)
    return {**rows["params"], **rows["frozen"]}


def decoded_opt_state(plan: Planned) -> Any:
    """The abstract canonical state of the optimizer over parameters as they are stored."""
    return canonical_opt_state(plan.tx, plan.abstract_stored["params"])


def _recoded(plan: Planned, state: TrainState, *, decode: bool) -> TrainState:
    """The state with its moments decoded or coded, each device's shards on their own."""
    coding = coding_of(plan.tx)
    if coding is None:
        return state
    trees = plan.abstract_stored["opt_state"], decoded_opt_state(plan)
    flat = [jax.tree.flatten(tree) for tree in trees]
    function = _recoder(coding, decode, *((tuple(leaves), form) for leaves, form in flat))
    changed = state.copy()
    changed["opt_state"] = function(state["opt_state"])
    return changed


@functools.lru_cache(maxsize=16)
def _recoder(coding: StateCoding, decode: bool, coded: Flat, decoded: Flat) -> Any:
    """A jitted function of an optimizer's state; both forms as flat `ShapeDtypeStruct`s."""
    coded_tree, decoded_tree = (form.unflatten(leaves) for leaves, form in (coded, decoded))

    def encode(state: Any) -> Any:
        return coding.from_canonical(state, coded_tree)

    trees = (coded_tree, decoded_tree) if decode else (decoded_tree, coded_tree)
    given, wanted = (jax.tree.map(lambda leaf: leaf.sharding.spec, tree) for tree in trees)
    return jax.jit(
        jax.shard_map(
            coding.to_canonical if decode else encode,
            mesh=coded[0][0].sharding.mesh,
            in_specs=(given,),
            out_specs=wanted,
            check_vma=False,
        )
    )


def reshard_state(old: Planned, new: Planned, state: TrainState) -> TrainState:
    """The same state under another plan: another ZeRO stage, another mesh, or both.

    Args:
      old: the plan that `state` follows.
      new: a plan of the same model and optimizer.
      state: stays valid; drop it to free its memory. One with slices in files ends here, since the
        new one may need their place.

    Raises:
      ValueError: the two plans describe different states.
    """
    if old.fingerprint != new.fingerprint:
        raise ValueError(
            f"the plans describe different states (fingerprints {old.fingerprint} and "
            f"{new.fingerprint}): model, optimizer and freeze= have to be the same"
        )
    canonical = to_canonical(old, state)
    if disk := state.get("disk"):
        disk.close()
    return from_canonical(new, _convert(canonical, new.abstract_canonical))


def _convert(tree: Any, abstract: Any, rows: Any = None, *, to_rows: bool = False) -> Any:
    """`tree` with `abstract`'s shapes (cut, or padded with zeros) and shardings.

    Everything that has to change on one set of devices changes in one program: on CPU several
    programs with collectives that do not wait for each other can block each other for good.

    Args:
      rows: `LayerRows` of the leaves whose rows change places, None for the others; or just None.
      to_rows: from layers in order to rows, or back.
    """
    leaves, structure = jax.tree.flatten(tree)
    targets = structure.flatten_up_to(abstract)
    moves = [None] * len(leaves) if rows is None else structure.flatten_up_to(rows)
    changing, result = [], list(leaves)
    for index, (leaf, target, move) in enumerate(zip(leaves, targets, moves, strict=True)):
        if not isinstance(leaf, jax.Array):  # see `offload.disk_saving`
            result[index] = target if isinstance(leaf, jax.ShapeDtypeStruct) else leaf
            continue
        lies: Any = leaf.sharding
        same = leaf.shape == target.shape and lies == target.sharding
        if same and move is None:
            continue
        moved = _devices(lies) != _devices(target.sharding)
        if moved or (move is None and _same_shards(leaf, target)):
            # Between sets of devices, or between the memories of one: one after the other, since
            # JAX 0.10 does not do both at once.
            kind = target.sharding.memory_kind
            if leaf.sharding.memory_kind != kind:
                leaf = jax.device_put(leaf, leaf.sharding.with_memory_kind(kind))
            result[index] = jax.device_put(leaf, target.sharding)
        else:
            changing.append(index)
    if changing:
        wanted = tuple((targets[i].shape, targets[i].sharding, moves[i]) for i in changing)
        change = _resizer(wanted, to_rows)
        for index, leaf in zip(changing, change([leaves[i] for i in changing]), strict=True):
            result[index] = leaf
    return structure.unflatten(result)


def _same_shards(leaf: Any, target: Any) -> bool:
    """Whether two arrays on the same devices differ in no more than the memory that they lie in."""
    return leaf.shape == target.shape and leaf.sharding.spec == target.sharding.spec


def _devices(sharding: NamedSharding) -> list[jax.Device]:
    """The devices of a sharding in the order of its mesh."""
    return list(sharding.mesh.devices.flat)


@functools.lru_cache(maxsize=16)
def _resizer(
    wanted: tuple[tuple[tuple[int, ...], NamedSharding, LayerRows | None], ...], to_rows: bool
) -> Any:
    """A jitted function of arrays that gives them new shapes and shardings."""

    def resize(arrays: list[jax.Array]) -> list[jax.Array]:
        return [
            _fit(to_device(x), shape, rows, to_rows=to_rows)
            for x, (shape, _, rows) in zip(arrays, wanted, strict=True)
        ]

    return jax.jit(resize, out_shardings=[sharding for _, sharding, _ in wanted])


def _fit(
    x: jax.Array, shape: tuple[int, ...], rows: LayerRows | None, *, to_rows: bool
) -> jax.Array:
    """Traced: an array cut, or padded with zeros, to a shape, its rows in their places."""
    if rows is not None and not to_rows:
        x = _layers_in_order(x, rows)
    sizes = shape if rows is None else (x.shape[0], *shape[1:])
    widths = [(0, new - old, 0) for new, old in zip(sizes, x.shape, strict=True)]
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), widths)
    return _layers_in_rows(x, rows) if rows is not None and to_rows else x


def _layers_in_rows(x: jax.Array, rows: LayerRows) -> jax.Array:
    """[layers, ...] -> [rows, ...]; rows without a layer are zeros."""
    layers = np.asarray(rows.rows)
    taken = _take(x, np.maximum(layers, 0), rows.sharding)
    if layers.min() >= 0:
        return taken
    held = (layers >= 0).reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.where(held, taken, jnp.zeros((), x.dtype))


def _layers_in_order(x: jax.Array, rows: LayerRows) -> jax.Array:
    """[rows, ...] -> [layers, ...]; the inverse of `_layers_in_rows`."""
    layers = np.asarray(rows.rows)
    return _take(x, np.argsort(layers)[np.sum(layers < 0) :], rows.sharding)


def _take(x: jax.Array, indices: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """x[indices], which every device does for its part of all rows.

    Left to itself the compiler gathers each stack whole on every device (XLA of JAX 0.10 and 0.12,
    on CPU).
    """
    x = jax.lax.with_sharding_constraint(x, sharding)
    taken = x.at[indices].get(mode="promise_in_bounds")
    return jax.lax.with_sharding_constraint(taken, sharding)
