"""Converts a training state to and from its portable form, and reshards it to another plan."""

from __future__ import annotations

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.config.checks import names_keywords
from zerojax.optim import StateCoding, Weights, coding_of, ema_of, is_average
from zerojax.parallel.offload.disk import fill_disk
from zerojax.parallel.offload.disk_durable import rest_writer
from zerojax.parallel.offload.disk_saving import restore_pieces
from zerojax.parallel.offload.sliced_state import (
    averaged_params,
    cut_state,
    join_average,
    join_params,
    join_state,
)
from zerojax.parallel.weight_copies import new_copies
from zerojax.plan.counts import shard_bytes
from zerojax.plan.host_budget import has_pinned_room
from zerojax.plan.layer_stacks import StackRows, group_rows, ungroup_rows
from zerojax.plan.make import Plan
from zerojax.plan.slices import on_host
from zerojax.plan.state import (
    COPIES,
    ONE_BIT,
    StageRows,
    TrainState,
    fit,
    portable_on_host,
    portable_opt_state,
    rows_of_state,
)
from zerojax.runtime.memory import allocating_for

Flat = tuple[tuple[jax.ShapeDtypeStruct, ...], Any]
"""A tree's leaves and its structure; hashable, as cache keys have to be."""
_KEPT = (ONE_BIT, COPIES)
"""Parts of a state that are the same in the stored and the portable form."""


@names_keywords()
def to_portable_state(
    plan: Plan, state: TrainState, *, joined: bool = True, rows_on_host: bool = False
) -> TrainState:
    """Returns a state in its portable form, which is the same for every mesh and ZeRO stage.

    It has no padding, and layers are in order, in the shardings of `plan.abstract_portable`. Layers
    that are stored stacked become separate arrays, under the user's names.

    Leaves whose two forms are equal are returned as they are, not copied. Quantized moments are
    decoded to float32.

    Args:
      plan: the plan that `state` follows.
      state: stays valid.
      joined: False: a parameter or moment with slices on the host or in files is not read, and its
        place holds something other than an array (see `parallel.offload.disk_saving`).
      rows_on_host: True: the rows of stacks are put into host memory, as in `portable_to_read`, so
        that the device never holds more than one stack twice.
    """
    _check_key(plan, state)
    if plan.offload is None:
        stored, kept = _apart(state)
    else:
        stored, kept = join_state(plan, state, joined=joined), None
    decoded = _recoded(plan, stored, decode=True)
    abstract = portable_to_read(plan) if rows_on_host else plan.abstract_portable
    wanted = _grouped(plan, _apart(abstract)[0])
    found = _ungrouped(plan, convert(decoded, wanted, _rows_of_state(plan), to_rows=False))
    return _joined(found, kept)


def _check_key(plan: Plan, state: TrainState) -> None:
    """Raises ValueError if the random key has another size than the plan's keys.

    Otherwise a part of it would be cut off.
    """
    own, planned = state["rng"].shape, plan.abstract_portable["rng"].shape
    if own != planned:
        raise ValueError(
            f"state['rng'] has {own[0]} numbers, but keys of the plan have {planned[0]}: "
            "jax_default_prng_impl was changed; set it before you make the plan"
        )


def _apart(state: TrainState) -> tuple[TrainState, dict[str, Any] | None]:
    """Splits a state into (parts whose stored and portable forms differ, all other parts).

    The second element holds the errors of momentum sent as signs and the copies of weights; None if
    there are none.
    """
    kept: dict[str, Any] = {name: part for name, part in state.items() if name in _KEPT}
    rest: Any = {name: part for name, part in state.items() if name not in _KEPT}
    return rest, kept or None


def _joined(state: TrainState, kept: dict[str, Any] | None) -> TrainState:
    """Inverts `_apart`."""
    joined: Any = state if kept is None else {**state, **kept}
    return joined


def portable_to_read(plan: Plan) -> TrainState:
    """Returns `plan.abstract_portable` with the rows of stacks in host memory.

    The device holds the stacks and has no room for all rows in addition. If pinned memory has no
    room either (`XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB`), the rows stay on the device.
    """
    if not plan.stacks:
        return plan.abstract_portable
    portable, kept = _apart(plan.abstract_portable)
    grouped = group_rows(portable, plan.stacks)
    rows = [row for leaf in jax.tree.leaves(grouped) for row in _rows(leaf)]
    if not has_pinned_room(plan, shard_bytes(rows), environ=os.environ):
        return plan.abstract_portable

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, StackRows):
            return leaf
        return StackRows(tuple(x.update(sharding=on_host(x.sharding)) for x in leaf.values))

    return _joined(ungroup_rows(jax.tree.map(place, grouped), plan.stacks), kept)


def _rows(leaf: Any) -> tuple[Any, ...]:
    return leaf.values if isinstance(leaf, StackRows) else ()


def _grouped(plan: Plan, tree: Any) -> Any:
    return group_rows(tree, plan.stacks) if plan.stacks else tree


def _ungrouped(plan: Plan, tree: Any) -> Any:
    return ungroup_rows(tree, plan.stacks) if plan.stacks else tree


def model_parts(plan: Plan, state: TrainState, *, weights: Weights = "trained") -> dict[str, Any]:
    """Returns the parts of a model: "params", "frozen" and "extras" of the portable form.

    Moments are neither joined nor decoded; with offload they are most of a state's bytes.

    Args:
      plan: the plan that `state` follows.
      state: stays valid.
      weights: "ema": the average of the weights, in float32, in place of the parameters.

    Raises:
      ValueError: the state has no average.
    """
    abstract: dict[str, Any] = {**plan.abstract_portable}
    if is_average(weights, state.get("opt_state")):
        params = ema_of(state["opt_state"]) if plan.offload is None else join_average(plan, state)
        abstract["params"] = ema_of(abstract["opt_state"])
    else:
        params = state["params"] if plan.offload is None else join_params(plan, state)
    parts = {"params": params, "frozen": state["frozen"], "extras": state["extras"]}
    return _portable_parts(plan, parts, abstract)


def frozen_part(plan: Plan, state: TrainState) -> dict[str, jax.Array]:
    """Returns the frozen parameters of a state in portable form: {name: array}.

    Args:
      plan: the plan that `state` follows.
      state: stays valid.
    """
    parts = {"frozen": state["frozen"]}
    return _portable_parts(plan, parts, {**plan.abstract_portable})["frozen"]


def _portable_parts(plan: Plan, parts: dict[str, Any], abstract: dict[str, Any]) -> dict[str, Any]:
    rows: dict[str, Any] | None = None
    if (all_rows := _rows_of_state(plan)) is not None:
        rows = {name: x for name, x in all_rows.items() if name in parts}
    wanted = _grouped(plan, {name: abstract[name] for name in parts})
    return _ungrouped(plan, convert(parts, wanted, rows))


def with_weights(plan: Plan, state: TrainState, weights: Weights) -> TrainState:
    """Returns the state that an evaluation of these weights reads; do not train on it.

    The average of the weights is used in place; for parameters whose optimizer state is sliced, a
    copy in the compute dtype is made.

    Args:
      plan: the plan that `state` follows.
      state: stays valid.
      weights: "ema": the average in place of the parameters.

    Raises:
      ValueError: the state has no average.
    """
    if not is_average(weights, state.get("opt_state")):
        return state
    changed = state.copy()
    average: Any = ema_of(state["opt_state"])
    changed["params"] = average if plan.offload is None else averaged_params(plan, state)
    if COPIES in state:
        changed["copies"] = new_copies(plan, average)
    return changed


def from_model_parts(plan: Plan, parts: dict[str, Any]) -> dict[str, Any]:
    """Inverts `model_parts`: returns the parts of a state that an evaluation reads.

    Args:
      plan: a plan without offload that the result follows.
      parts: "params", "frozen" and "extras" in portable form, and "rng".
    """
    assert plan.offload is None
    stored: dict[str, Any] = {**plan.abstract_stored}
    rows: dict[str, Any] | None = None
    if (all_rows := _rows_of_state(plan)) is not None:
        rows = {name: x for name, x in all_rows.items() if name in parts}
    given = _grouped(plan, parts)
    state = convert(given, {name: stored[name] for name in parts}, rows, to_rows=True)
    if COPIES in stored:
        state[COPIES] = new_copies(plan, state["params"])
    return state


@names_keywords()
def from_portable_state(
    plan: Plan, portable: TrainState, *, data_state: dict[str, Any] | None = None
) -> TrainState:
    """Inverts `to_portable_state`, for portable arrays with the plan's shardings.

    Args:
      plan: the plan that the result follows.
      portable: a leaf with slices on the host or in files may be a
        `parallel.offload.disk_saving.Saved` instead of an array.
      data_state: position of the data, for a durable store: a run that is killed before its next
        step continues from what is written here.
    """
    stored, kept = _apart(plan.abstract_stored)
    stored["opt_state"] = decoded_opt_state(plan)
    if plan.offload is not None:
        stored = portable_on_host(stored, plan.offload)
    portable, given_kept = _apart(portable)
    given = _grouped(plan, portable)
    arrays = convert(given, stored, _rows_of_state(plan), to_rows=True)
    recoded = _recoded(plan, arrays, decode=False)
    if plan.offload is None:
        if kept is not None:
            recoded = _joined(recoded, _begun(plan, recoded, kept, given_kept or {}))
        return recoded
    state = cut_state(plan, recoded)
    if not all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(portable)):
        return restore_pieces(plan, given, state, data_state=data_state)
    if plan.offload.on_disk:
        state["disk"] = fill_disk(plan, recoded, rest_writer(plan, state, data_state))
    return state


def _begun(
    plan: Plan, state: TrainState, wanted: dict[str, Any], given: dict[str, Any]
) -> dict[str, Any]:
    """Adapts 1-bit errors and weight copies of a checkpoint to a plan, or initializes them.

    Missing errors become 0, missing copies the masters in the compute dtype.

    Args:
      plan: plan of the state.
      state: state without the wanted parts.
      wanted, given: parts of a state that are the same in both forms, as `_fitting` takes them.
    """
    parts: dict[str, Any] = {}
    for name, part in wanted.items():
        is_there = all(_are_arrays(given.get(name, {}).get(key, 0)) for key in part)
        if name == COPIES and not is_there:
            parts[name] = new_copies(plan, state["params"])
        else:
            parts[name] = _fitting(part, given.get(name, {}))
    return parts


def _are_arrays(tree: Any) -> bool:
    return all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree))


def _fitting(wanted: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Converts the given parts of a state to the wanted form; missing parts become zeros.

    Args:
      wanted: {name: `ShapeDtypeStruct`s}.
      given: {name: arrays, or anything else}.
    """

    def zeros(struct: jax.ShapeDtypeStruct) -> jax.Array:
        made = functools.partial(jnp.zeros, struct.shape, struct.dtype)
        return jax.jit(made, out_shardings=struct.sharding)()

    def is_there(name: str) -> bool:
        return _are_arrays(given.get(name, 0))

    return {
        name: convert(given[name], part) if is_there(name) else jax.tree.map(zeros, part)
        for name, part in wanted.items()
    }


def _rows_of_state(plan: Plan) -> TrainState | None:
    return rows_of_state(plan.placement, plan.tx, _apart(plan.abstract_stored)[0])


def decoded_opt_state(plan: Plan) -> Any:
    """Returns the abstract optimizer state with decoded moments and parameters as stored."""
    return portable_opt_state(plan.tx, plan.abstract_stored["params"])


def _recoded(plan: Plan, state: TrainState, *, decode: bool) -> TrainState:
    """Returns the state with moments decoded or encoded; each device converts its own shards."""
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
    """Builds a jitted function of an optimizer's state; both forms are flat `ShapeDtypeStruct`s."""
    coded_tree, decoded_tree = (form.unflatten(leaves) for leaves, form in (coded, decoded))

    def encode(state: Any) -> Any:
        return coding.from_portable_state(state, coded_tree)

    trees = (coded_tree, decoded_tree) if decode else (decoded_tree, coded_tree)
    given, wanted = (jax.tree.map(lambda leaf: leaf.sharding.spec, tree) for tree in trees)
    return jax.jit(
        jax.shard_map(
            coding.to_portable_state if decode else encode,
            mesh=coded[0][0].sharding.mesh,
            in_specs=(given,),
            out_specs=wanted,
            check_vma=False,
        )
    )


@names_keywords()
@allocating_for("moving the state to another plan")
def reshard_state(
    old: Plan, new: Plan, state: TrainState, *, data_state: dict[str, Any] | None = None
) -> TrainState:
    """Returns the same state under another plan: another ZeRO stage, another mesh, or both.

    Args:
      old: the plan that `state` follows.
      new: a plan of the same model and optimizer.
      state: stays valid; drop it to free its memory. A state with slices in files is closed,
        because the new state may need their disk space.
      data_state: as in `from_portable_state`.

    Raises:
      ValueError: the two plans describe different states.
    """
    if old.fingerprint != new.fingerprint:
        raise ValueError(
            f"the two plans describe different states (fingerprints {old.fingerprint} and "
            f"{new.fingerprint}): use the same model, optimizer, stored dtypes and freeze= in both"
        )
    portable, kept = _apart(to_portable_state(old, state))
    if disk := state.get("disk"):
        disk.close()
    moved = convert(portable, _apart(new.abstract_portable)[0])
    return from_portable_state(new, _joined(moved, kept), data_state=data_state)


def convert(tree: Any, abstract: Any, rows: Any = None, *, to_rows: bool = False) -> Any:
    """Returns `tree` with the shapes (truncated or zero-padded) and shardings of `abstract`.

    All arrays on one set of devices are converted by one program: on CPU several programs whose
    collectives do not wait for each other can deadlock. Stacks are joined or separated one after
    the other, so that only one of them is in memory twice.

    Args:
      tree: has `StackRows` where layers are joined to a stack of `abstract`.
      abstract: has `StackRows` where a stack is separated into layers.
      rows: `StageRows` of the leaves whose rows change places, None for the others; or just None.
      to_rows: True: from layers in order to rows; False: back.
    """
    leaves, structure = jax.tree.flatten(tree)
    targets = structure.flatten_up_to(abstract)
    moves = [None] * len(leaves) if rows is None else structure.flatten_up_to(rows)
    changing, result = [], list(leaves)
    for index, (leaf, target, move) in enumerate(zip(leaves, targets, moves, strict=True)):
        if not _is_read(leaf):  # see `parallel.offload.disk_saving`
            result[index] = target if isinstance(leaf, jax.ShapeDtypeStruct) else leaf
            continue
        if isinstance(leaf, StackRows) or isinstance(target, StackRows):
            result[index] = _convert_stack(leaf, target, move, to_rows=to_rows)
            continue
        lies: Any = leaf.sharding
        same = leaf.shape == target.shape and lies == target.sharding
        if same and move is None:
            continue
        moved = _devices(lies) != _devices(target.sharding)
        if moved or (move is None and _same_shards(leaf, target)):
            # One after the other for different sets of devices or different memories, because JAX
            # 0.10 cannot do both at once.
            kind = target.sharding.memory_kind
            if leaf.sharding.memory_kind != kind:
                leaf = jax.device_put(leaf, leaf.sharding.with_memory_kind(kind))
            result[index] = jax.device_put(leaf, target.sharding)
        else:
            changing.append(index)
    if changing:
        forms = [(targets[i].shape, targets[i].sharding, moves[i]) for i in changing]
        change = _resizer(tuple(forms), to_rows)
        for index, found in zip(changing, change([leaves[i] for i in changing]), strict=True):
            result[index] = found
    return structure.unflatten(result)


def _is_read(leaf: Any) -> bool:
    """Returns whether a leaf of a state is an array, or holds the rows of one."""
    return all(isinstance(x, jax.Array) for x in (_rows(leaf) or (leaf,)))


def _convert_stack(leaf: Any, target: Any, move: StageRows | None, *, to_rows: bool) -> Any:
    """Joins rows to a stack, or separates a stack into rows, and moves the result to its memory."""
    apart = isinstance(target, StackRows)
    first = target.values[0] if apart else target
    shape = (len(target.values), *first.shape) if apart else first.shape
    on_device = NamedSharding(first.sharding.mesh, first.sharding.spec)
    shardings: Any = (on_device,) * len(target.values) if apart else on_device
    change = _resizer(((shape, shardings, move),), to_rows)
    # Finish earlier work first: no other program with collectives may run beside this one.
    given = jax.block_until_ready(leaf.values if isinstance(leaf, StackRows) else leaf)
    (found,) = jax.block_until_ready(change([given]))
    if not apart:
        return jax.block_until_ready(jax.device_put(found, target.sharding))
    moved = [jax.device_put(x, row.sharding) for x, row in zip(found, target.values, strict=True)]
    return StackRows(tuple(jax.block_until_ready(moved)))


def _same_shards(leaf: Any, target: Any) -> bool:
    """Returns whether two arrays on the same devices differ at most in their memory kind."""
    return leaf.shape == target.shape and leaf.sharding.spec == target.sharding.spec


def _devices(sharding: NamedSharding) -> list[jax.Device]:
    """Returns the devices of a sharding in the order of its mesh."""
    return list(sharding.mesh.devices.flat)


Wanted = tuple[tuple[int, ...], NamedSharding | tuple[NamedSharding, ...], StageRows | None]
"""Target of an array or of the rows of a stack: whole shape, sharding (of each row, if a stack is
separated) and how rows change places."""


@functools.lru_cache(maxsize=256)
def _resizer(wanted: tuple[Wanted, ...], to_rows: bool) -> Any:
    """Builds a jitted function that gives arrays, or tuples of rows, new shapes and shardings."""

    def resize(arrays: list[Any]) -> list[Any]:
        return [_resize(x, each, to_rows) for x, each in zip(arrays, wanted, strict=True)]

    return jax.jit(resize, out_shardings=[sharding for _, sharding, _ in wanted])


def _resize(x: Any, wanted: Wanted, to_rows: bool) -> Any:
    """Converts one array; joins it from rows or separates it into rows if required; traced."""
    shape, shardings, move = wanted
    x = jax.tree.map(lambda part: jax.device_put(part, jax.memory.Space.Device), x)
    x = jnp.stack(x) if isinstance(x, tuple) else x
    x = fit(x, shape, move, to_rows=to_rows)
    if not isinstance(shardings, tuple):
        return x
    # Gather along the layer dimension before separating, so that no device has a whole stack.
    spec = P(None, *shardings[0].spec)
    x = jax.lax.with_sharding_constraint(x, NamedSharding(shardings[0].mesh, spec))
    return tuple(x[row] for row in range(len(shardings)))
