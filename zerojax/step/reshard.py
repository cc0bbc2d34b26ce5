"""Converts a training state to and from its portable form, and reshards it to another plan.

The portable form has the user's names and true shapes, so it is the same for every mesh and ZeRO
stage.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.config.checks import names_keywords
from zerojax.config.tree_types import Tree
from zerojax.offload.disk import fill_disk
from zerojax.offload.disk_durable import rest_writer
from zerojax.offload.disk_saving import restore_pieces
from zerojax.offload.sliced_state import (
    averaged_params,
    cut_state,
    join_average,
    join_params,
    join_state,
)
from zerojax.offload.waiting import check_nothing_waits, warn_of_dropped
from zerojax.optim import StateCoding, Weights, coding_of, ema_of, is_average
from zerojax.placement.layer_stacks import StackRows, group_rows, ungroup_rows
from zerojax.placement.optional_parts import no_gradients
from zerojax.placement.slices import on_host
from zerojax.placement.state import (
    COPIES,
    DELAYED,
    MESH_PARTS,
    StageRows,
    TrainState,
    fit,
    portable_on_host,
    portable_opt_state,
    rows_of_state,
)
from zerojax.plan.counts import shard_bytes
from zerojax.plan.make import Plan
from zerojax.runtime.memory import allocating_for
from zerojax.step.host_budget import has_pinned_room
from zerojax.transport.weight_copies import new_copies

Flat = tuple[tuple[jax.ShapeDtypeStruct, ...], Any]
"""(leaves, structure) of a pytree; hashable, so that it can be a cache key."""


@names_keywords()
def to_portable_state(
    plan: Plan, state: TrainState, *, joined: bool = True, rows_on_host: bool = False
) -> TrainState:
    """Converts a state to its portable form, which is the same for every mesh and ZeRO stage.

    The portable form has no padding, layers in order, and the shardings of
    `plan.abstract_portable`. Layers that are stored stacked become separate arrays, under the
    user's names.

    Leaves whose stored and portable forms are equal are not copied. Quantized moments are decoded
    to float32.

    Args:
      plan: the plan that `state` follows.
      state: training state; it stays valid.
      joined: whether to read parameters and moments with optimizer-state slices in host memory or
        files. False puts an object that is no array in the place of each (see
        `offload.disk_saving`).
      rows_on_host: whether to put the separated layers of stacks into host memory, as in
        `portable_to_read`. Then the device never holds more than one stack twice.

    Raises:
      ValueError: an update waits in the state (`zerojax.build_finish`).
    """
    _check_key(plan, state)
    check_nothing_waits(plan, state, "to_portable_state")
    if plan.offload is None:
        stored, kept = _apart(state)
    else:
        stored, kept = join_state(plan, state, joined=joined), None
        if DELAYED not in plan.abstract_portable:
            stored.pop(DELAYED, None)
    decoded = _recoded(plan, stored, decode=True)
    abstract = portable_to_read(plan) if rows_on_host else plan.abstract_portable
    wanted = _grouped(plan, _apart(abstract)[0])
    found = _ungrouped(plan, convert(decoded, wanted, _rows_of_state(plan), to_rows=False))
    return _joined(found, kept)


def _check_key(plan: Plan, state: TrainState) -> None:
    """Raises ValueError if the state's random key has another size than the plan's keys.

    Without this check a part of the key would be cut off.
    """
    own, planned = state["rng"].shape, plan.abstract_portable["rng"].shape
    if own != planned:
        raise ValueError(
            f"state['rng'] has {own[0]} numbers, but keys of the plan have {planned[0]}: "
            "jax_default_prng_impl was changed after the plan was made; set it before"
        )


def _apart(state: TrainState) -> tuple[TrainState, dict[str, Any] | None]:
    """Splits a state into (parts whose stored and portable forms differ, `MESH_PARTS` parts).

    The second is None if the state has none of them.
    """
    kept: dict[str, Any] = {name: part for name, part in state.items() if name in MESH_PARTS}
    rest: Any = {name: part for name, part in state.items() if name not in MESH_PARTS}
    return rest, kept or None


def _joined(state: TrainState, kept: dict[str, Any] | None) -> TrainState:
    """Joins the two parts of a state that `_apart` returned."""
    joined: Any = state if kept is None else {**state, **kept}
    return joined


def portable_to_read(plan: Plan) -> TrainState:
    """Returns `plan.abstract_portable` with the layers of stacks in host memory, for reading a
    checkpoint.

    The device holds the stacks, and has no room for all separate layers in addition. If pinned
    memory is too small as well (`XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB`), the layers stay on the
    device.
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


def _grouped(plan: Plan, tree: Tree) -> Any:
    return group_rows(tree, plan.stacks) if plan.stacks else tree


def _ungrouped(plan: Plan, tree: Tree) -> Any:
    return ungroup_rows(tree, plan.stacks) if plan.stacks else tree


def model_parts(plan: Plan, state: TrainState, *, weights: Weights = "trained") -> dict[str, Any]:
    """Returns "params", "frozen" and "extras" (non-parameter arrays) of a state, without optimizer
    state, in portable form (the same for every mesh).

    So the moments need not be joined or decoded; with offload they are most of a state's bytes.

    Args:
      plan: the plan that `state` follows.
      state: training state; it stays valid.
      weights: "trained" returns the parameters; "ema" returns the average of the weights (float32)
        as "params".

    Raises:
      ValueError: `weights` is "ema", but the state has no average; or an update waits in the state
        (`zerojax.build_finish`).
    """
    check_nothing_waits(plan, state, "reading the weights of a state")
    abstract: dict[str, Any] = {**plan.abstract_portable}
    if is_average(weights, state.get("opt_state")):
        params = ema_of(state["opt_state"]) if plan.offload is None else join_average(plan, state)
        abstract["params"] = ema_of(abstract["opt_state"])
    else:
        params = state["params"] if plan.offload is None else join_params(plan, state)
    parts = {"params": params, "frozen": state["frozen"], "extras": state["extras"]}
    return _portable_parts(plan, parts, abstract)


def frozen_part(plan: Plan, state: TrainState) -> dict[str, jax.Array]:
    """Returns the frozen parameters of a state in portable form (the same for every mesh): {name:
    array}.

    Args:
      plan: the plan that `state` follows.
      state: training state; it stays valid.
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
    """Returns a state for evaluating these weights; do not train on it.

    The average of the weights is not copied, except for parameters whose optimizer state is sliced;
    these are copied to the compute dtype.

    Args:
      plan: the plan that `state` follows.
      state: training state; it stays valid.
      weights: "trained" for the parameters, "ema" for the average of the weights.

    Raises:
      ValueError: `weights` is "ema", but the state has no average; or an update waits in the state
        (`zerojax.build_finish`).
    """
    check_nothing_waits(plan, state, "an evaluation")
    if not is_average(weights, state.get("opt_state")):
        return state
    changed = state.copy()
    average: Any = ema_of(state["opt_state"])
    changed["params"] = average if plan.offload is None else averaged_params(plan, state)
    if COPIES in state:
        changed["copies"] = new_copies(plan, average)
    return changed


def from_model_parts(plan: Plan, parts: dict[str, Any]) -> dict[str, Any]:
    """Converts the result of `model_parts` back to the parts of a state that an evaluation reads.

    Args:
      plan: plan of the result, without offload.
      parts: "params", "frozen" and "extras" (non-parameter arrays) in portable form (the same for
        every mesh), and "rng".
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
    """Converts a portable state (the same for every mesh) to the stored form of a plan, the inverse
    of `to_portable_state`.

    Args:
      plan: the plan that the result follows.
      portable: portable state, with the shardings of `plan.abstract_portable`. A leaf whose slices
        are in host memory or files may be a `offload.disk_saving.Saved` instead of an
        array.
      data_state: position of the data. It is written into a durable store, so that a run that is
        killed before its next step can continue.
    """
    stored, kept = _apart(plan.abstract_stored)
    waiting = portable.get(DELAYED, 0) if DELAYED in plan.abstract_portable else 0
    begins = DELAYED in stored and not _are_arrays(waiting)
    if begins:  # no gradients wait
        del stored[DELAYED]
    if DELAYED not in stored:
        portable = portable.copy()
        portable.pop(DELAYED, None)
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
    if begins:
        state[DELAYED] = _no_gradients(plan)
    if not all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(portable)):
        return restore_pieces(plan, given, state, data_state=data_state)
    if plan.offload.on_disk:
        state["disk"] = fill_disk(plan, recoded, rest_writer(plan, state, data_state))
    return state


def _no_gradients(plan: Plan) -> dict[str, Any]:
    """Returns the `DELAYED` part of a state in which no gradients wait for their update."""
    abstract = plan.abstract_stored[DELAYED]
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    return jax.jit(lambda: no_gradients(abstract), out_shardings=shardings)()


def _begun(
    plan: Plan, state: TrainState, wanted: dict[str, Any], given: dict[str, Any]
) -> dict[str, Any]:
    """Adapts 1-bit errors and weight copies of a checkpoint to a plan, or initializes them.

    Missing errors become 0; missing copies become the master weights, cast to the compute dtype.

    Args:
      plan: plan of the state.
      state: state without these parts.
      wanted: {part: abstract arrays of the plan}.
      given: {part: arrays of the checkpoint}.
    """
    parts: dict[str, Any] = {}
    for name, part in wanted.items():
        is_there = all(_are_arrays(given.get(name, {}).get(key, 0)) for key in part)
        if name == COPIES and not is_there:
            parts[name] = new_copies(plan, state["params"])
        else:
            parts[name] = _fitting(part, given.get(name, {}))
    return parts


def _are_arrays(tree: Tree) -> bool:
    return all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree))


def _fitting(wanted: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Converts arrays to the shapes and shardings of `wanted`; missing arrays become zeros.

    Args:
      wanted: {name: `ShapeDtypeStruct`s}.
      given: {name: arrays}; an entry with anything else counts as missing.
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
    """Returns the abstract optimizer state with decoded (float32) moments, for parameters as
    stored.
    """
    return portable_opt_state(plan.tx, plan.abstract_stored["params"])


def _recoded(plan: Plan, state: TrainState, *, decode: bool) -> TrainState:
    """Decodes or encodes the quantized moments of a state; each device converts its own shards."""
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
    """Builds the jitted function that decodes or encodes an optimizer state; both forms are
    `Flat`.
    """
    coded_tree, decoded_tree = (form.unflatten(leaves) for leaves, form in (coded, decoded))

    def encode(state: TrainState) -> Any:
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
    """Converts a state to another plan: another ZeRO stage, another mesh, or both.

    Args:
      old: the plan that `state` follows.
      new: a plan of the same model and optimizer.
      state: training state of `old`. It stays valid; drop it to free its memory. A state with
        optimizer-state slices in files is closed, because the new state may need their disk space.
      data_state: position of the data, written into a durable store (see `from_portable_state`).

    Raises:
      ValueError: the two plans describe different states.

    Warns:
      UserWarning: gradients wait in `state` (`offload.delayed_update`), and `new` has no delay.
        Their update is left out.
    """
    if old.fingerprint != new.fingerprint:
        raise ValueError(
            f"the two plans describe different states (fingerprints {old.fingerprint} and "
            f"{new.fingerprint}): use the same model, optimizer, stored dtypes and freeze= in both"
        )
    portable, kept = _apart(to_portable_state(old, state))
    if disk := state.get("disk"):
        disk.close()
    wanted = _apart(new.abstract_portable)[0]
    if DELAYED in portable and DELAYED not in wanted:
        waits: Any = portable.pop(DELAYED)
        if not bool(waits["skip"]):
            warn_of_dropped()
    elif DELAYED not in portable:
        wanted.pop(DELAYED, None)
    moved = convert(portable, wanted)
    return from_portable_state(new, _joined(moved, kept), data_state=data_state)


def convert(tree: Tree, abstract: Any, rows: Any = None, *, to_rows: bool = False) -> Any:
    """Converts arrays to the shapes (truncated or zero-padded) and shardings of `abstract`.

    All arrays on one set of devices are converted by one program: on CPU several programs whose
    collectives do not wait for each other can deadlock. Stacks are joined or separated one after
    the other, so that only one of them is in memory twice.

    Args:
      tree: pytree of arrays. A `StackRows` holds separate layers that are joined to one stack of
        `abstract`.
      abstract: pytree of targets. A `StackRows` is the target of a stack that is separated into
        layers.
      rows: pytree of the permutation of each leaf's rows (`StageRows`, or None for no permutation);
        None: no leaf is permuted.
      to_rows: True permutes from layers in order to rows; False permutes back.
    """
    leaves, structure = jax.tree.flatten(tree)
    targets = structure.flatten_up_to(abstract)
    moves = [None] * len(leaves) if rows is None else structure.flatten_up_to(rows)
    changing, result = [], list(leaves)
    for index, (leaf, target, move) in enumerate(zip(leaves, targets, moves, strict=True)):
        if not _is_read(leaf):  # see `offload.disk_saving`
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
            # Memory first, then devices: JAX 0.10 cannot change both in one `device_put`.
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
    """Joins layers to a stack, or separates a stack into layers; moves the result to its memory."""
    apart = isinstance(target, StackRows)
    first = target.values[0] if apart else target
    shape = (len(target.values), *first.shape) if apart else first.shape
    on_device = NamedSharding(first.sharding.mesh, first.sharding.spec)
    shardings: Any = (on_device,) * len(target.values) if apart else on_device
    change = _resizer(((shape, shardings, move),), to_rows)
    # Wait for earlier work: no other program with collectives may run at the same time.
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
"""Target of an array or stack: (shape, sharding or one sharding per separated layer, row
permutation).
"""


@functools.lru_cache(maxsize=256)
def _resizer(wanted: tuple[Wanted, ...], to_rows: bool) -> Any:
    """Builds a jitted function that converts arrays (or tuples of rows) to new shapes and
    shardings.
    """

    def resize(arrays: list[Any]) -> list[Any]:
        return [_resize(x, each, to_rows) for x, each in zip(arrays, wanted, strict=True)]

    return jax.jit(resize, out_shardings=[sharding for _, sharding, _ in wanted])


def _resize(x: jax.Array, wanted: Wanted, to_rows: bool) -> Any:
    """Converts one array to the shape and row order of `wanted`, in device memory; traced.

    A tuple `x` is stacked first. If `wanted` has a sharding for each layer, the result is a tuple
    of layers.
    """
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
