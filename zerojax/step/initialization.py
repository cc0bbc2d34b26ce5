"""Initializes a training state: computes, copies or reads each array directly into its shards.

Initial values in files are read one layer at a time. A process reads only the parts that its own
devices hold, each part once. On accelerators a layer is written into the shard on the device, so
host memory never holds more than one layer of one parameter. A CPU device uses the memory of the
read without a copy.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from zerojax.config.checks import names_keywords
from zerojax.features.known import active
from zerojax.offload.disk import DiskState, fill_new_disk
from zerojax.offload.disk_step import build_weights
from zerojax.offload.layer_draws import find_draws, initial_arrays_of
from zerojax.offload.pages import row_struct
from zerojax.offload.sliced_state import cut_new_param, cut_new_state
from zerojax.optim import EmaState, coding_of, loss_scale
from zerojax.optim.weight_codes import CodedArray
from zerojax.placement.optional_parts import no_gradients
from zerojax.placement.state import (
    COPIES,
    DELAYED,
    StageRows,
    TrainState,
    fit,
    rows_of_state,
    run_key_data,
    zero_counter,
)
from zerojax.placement.user_shardings import on_mesh_of_plan
from zerojax.plan.make import Plan, require_plan
from zerojax.runtime.memory import allocating_for
from zerojax.tracing.protocol import LazyArray
from zerojax.tracing.rolling.looped_draws import loop_draws
from zerojax.tracing.rolling.single_rows import SingleRow
from zerojax.transport.weight_copies import first_copies

Ranges = tuple[tuple[int, int], ...]
_ALIGNMENT = 64
"""Alignment in bytes at which a CPU device uses host memory without copying it."""

_STEPS = 0x7FFFFFFF
"""Number that is folded into the seed's key to get the key of all steps.

No initialization folds in this number: no model draws so many times.
"""


@names_keywords()
@allocating_for("making the first state")
@jax.transfer_guard("allow")
@on_mesh_of_plan
def init_state(plan: Plan, seed: int = 0) -> TrainState:
    """Creates a new training state directly in its shards: no device holds more than its part.

    The values of an `nnx.Module` instance are copied (the instance stays usable after the first
    donated step); every other kind of model is initialized from `seed`. On another mesh the values
    are equal except for rounding. With `deterministic` they have the same bits; then one device of
    each process computes the unsharded values.

    Args:
      plan: a plan over a real mesh.
      seed: integer from which parameters and dropout are drawn.

    Raises:
      ValueError: the plan is over an `AbstractMesh`, or the seed does not fit into 64 bits.
      TypeError: `plan` is not a plan, or `seed` is not an integer.
    """
    require_plan(plan, "init_state")
    if not isinstance(plan.mesh, jax.sharding.Mesh):
        raise ValueError(
            "this plan is over an abstract mesh, whose devices do not exist; make a plan with "
            "zerojax.make_mesh(...) to train"
        )
    key_data = np.asarray(run_key_data(seed))
    disk = _new_disk(plan, key_data)  # first: the disk may have too little space
    try:
        return _init_around(plan, key_data, disk)
    except BaseException:
        if disk is not None:
            disk.close()
        raise


def _init_around(plan: Plan, key_data: np.ndarray, disk: DiskState | None) -> TrainState:
    """Creates a new state around the already written files of `disk`; None: no offload to files."""
    # If master weights are in files, the weights are made from these slice by slice, not at once.
    made_later = disk.leaves if disk is not None and plan.precision.has_masters else ()
    given = plan.model.initial_arrays()
    if given is None and plan.settings.fixed_pieces is not None:
        given = _drawn_on_one_device(plan, key_data)
    if given is None:
        state = build_initialiser(plan, without=made_later)(key_data)
    elif any(_is_unread(value) for part in given for value in part.values()):
        state = _read_initial(plan, key_data, without=made_later)
    else:
        state = _copy_initial(plan, key_data, given)
    if disk is not None:
        state["disk"] = disk
    if len(state["params"]) < len(plan.abstract_state["params"]):
        assert disk is not None
        made = state["params"] | build_weights(plan, disk.leaves, disk, state["masters"])
        state["params"] = {name: made[name] for name in plan.abstract_state["params"]}
    return state


def _new_disk(plan: Plan, key_data: np.ndarray) -> DiskState | None:
    """Writes the slices of a new state to files, with one parameter in memory at a time.

    For layers that are read from files (`offload.params: nvme`), only one layer of one parameter is
    in memory at a time. Returns None if the plan stores nothing in files.
    """
    if plan.offload is None or not plan.offload.on_disk:
        return None
    given = plan.model.initial_arrays()
    values = {} if given is None else {n: x for n, x in given[0].items() if not _is_missing(x)}
    missing = [name for name in plan.offload.paged_order if name not in values]
    rows: Mapping[str, SingleRow] = {}
    if missing:
        rows = find_draws(plan.model, plan.abstract_batch, plan.loss, missing).rows

    def stored(name: str) -> jax.Array:
        leaf, stage_rows = plan.abstract_stored["params"][name], _rows_of_params(plan)[name]
        if name in values:
            return _place(values[name], leaf, stage_rows)
        one = jax.jit(
            lambda key_data: _new_params(plan, key_data)[0][name], out_shardings=leaf.sharding
        )
        return one(key_data)

    def by_layer(name: str) -> Callable[[int], jax.Array] | None:
        assert plan.offload is not None
        if name not in plan.offload.paged or (name not in values and name not in rows):
            return None
        layer = row_struct(plan, name)
        if name in values:
            return lambda number: _place(_Layer(values[name], number), layer, None)
        draw = build_layer_draw(plan, name, rows[name])
        return lambda number: draw(np.int32(number), key_data)

    return fill_new_disk(plan, stored, by_layer)


def build_layer_draw(plan: Plan, name: str, row: SingleRow) -> Any:
    """Builds a jitted function `(layer number, key data) -> initial parameter of this layer`.

    The value has the dtype, padding and sharding in which the state stores it.

    Args:
      plan: a plan with layers in files.
      name: name of the parameter.
      row: function that draws one layer's values; an entry of `LayerDraws.rows`.
    """
    leaf, layer = plan.abstract_stored["params"][name], row_struct(plan, name)

    def draw(number: jax.Array, key_data: jax.Array) -> jax.Array:
        value = _kept(plan, name, row(number, key_data), leaf)
        return fit(value, (1, *layer.shape), None, to_rows=True)[0]

    return jax.jit(draw, out_shardings=layer.sharding)


class _Layer:
    """One layer of a stack of the user's initial values, as a `LazyArray`."""

    is_stacked = False

    def __init__(self, stack: Any, number: int) -> None:
        self._stack, self._number = stack, number
        self.shape, self.dtype = tuple(stack.shape[1:]), np.dtype(stack.dtype)

    def read(self, index: Sequence[tuple[int, int]]) -> np.ndarray:
        if isinstance(self._stack, LazyArray):
            return self._stack.read([(self._number, self._number + 1), *index])[0]
        return np.asarray(self._stack[self._number])[tuple(slice(*part) for part in index)]


def build_initialiser(plan: Plan, *, without: Collection[str] = ()) -> Any:
    """Builds the jitted `key_data -> TrainState`, which computes every array in its shards.

    Args:
      plan: a plan over a real mesh.
      without: names of parameters that are left out of `params`.
    """

    def leave_out(state: TrainState) -> Any:
        kept = {name: x for name, x in state["params"].items() if name not in without}
        return {**state, "params": kept}

    def initialise(key_data: jax.Array) -> TrainState:
        stored, extras = _new_params(plan, key_data)
        return leave_out(_offloaded(plan, _assemble(plan, stored, extras, key_data)))

    return jax.jit(loop_draws(initialise), out_shardings=leave_out(plan.state_shardings))


def _new_params(plan: Plan, key_data: jax.Array) -> tuple[dict[str, jax.Array], Any]:
    """Returns all initial parameters in their stored form (dtype, padding and sharding as in the
    state), and the model's extras (non-parameter arrays); traced.

    The values equal those of `Model(rngs=nnx.Rngs(seed))`, `module.init(jax.random.key(seed), ...)`
    or `init(jax.random.key(seed))`.
    """
    params, extras = _initial_arrays(plan, key_data)
    abstract = {**plan.abstract_stored["params"], **plan.abstract_stored["frozen"]}
    rows = _rows_of_params(plan)
    stored = {
        name: fit(_kept(plan, name, params[name], leaf), leaf.shape, rows[name], to_rows=True)
        for name, leaf in abstract.items()
    }
    return stored, extras


def _initial_arrays(plan: Plan, key_data: jax.Array) -> tuple[dict[str, jax.Array], Any]:
    return initial_arrays_of(plan.model, plan.abstract_batch, plan.loss, key_data)


def _kept(plan: Plan, name: str, value: jax.Array, stored: jax.ShapeDtypeStruct) -> jax.Array:
    """Converts a parameter to its stored dtype, or encodes it if it is quantized; traced.

    The result has no padding.
    """
    codes = plan.placement.leaves[name].codes
    return value.astype(stored.dtype) if codes is None else codes.encode(value)


def _given(plan: Plan, name: str, value: object) -> Any:
    """Returns the user's initial value of a parameter, encoded if the state stores codes.

    A value in a file is encoded when it is read, not here.
    """
    codes = plan.placement.leaves[name].codes
    if codes is None:
        return value
    if isinstance(value, LazyArray):
        return CodedArray(value, codes)
    return codes.encode(np.asarray(value))


def _drawn_on_one_device(plan: Plan, key_data: np.ndarray) -> tuple[dict, dict]:
    """Returns unsharded initial parameters and extras (non-parameter arrays), computed by one
    device of each process.

    Reason: for a part of an array the compiler may emit other code than for the whole array (for
    example vectors and the remaining elements). The last bits of random numbers would then depend
    on the mesh.
    """
    abstract = {**plan.abstract_stored["params"], **plan.abstract_stored["frozen"]}

    def draw(key_data: jax.Array) -> tuple[dict, dict]:
        params, extras = _initial_arrays(plan, key_data)
        return {name: params[name] for name in abstract}, extras

    device = plan.mesh.local_devices[0]
    on_device = jax.sharding.SingleDeviceSharding(device)
    return jax.jit(draw, in_shardings=on_device, out_shardings=on_device)(key_data)


def _copy_initial(plan: Plan, key_data: np.ndarray, arrays: tuple[Any, Any]) -> TrainState:
    """Builds the state from existing arrays: (parameters, extras (non-parameter arrays)) of the
    user's module.
    """
    params, extras = arrays
    stored = {**plan.abstract_stored["params"], **plan.abstract_stored["frozen"]}
    rows = _rows_of_params(plan)
    placed = {
        name: _place(_given(plan, name, params[name]), leaf, rows[name])
        for name, leaf in stored.items()
    }
    host_extras = {name: np.asarray(value) for name, value in extras.items()}

    # This jitted function donates nothing: on CPU a placed array may share memory with the user's
    # array, and the first donated step would overwrite it
    # (tests/models/test_arrays.py::test_users_own_arrays_survive).
    def build(placed: dict, extras: dict, key_data: jax.Array) -> TrainState:
        return _offloaded(plan, _assemble(plan, placed, extras, key_data))

    jitted = jax.jit(build, out_shardings=plan.state_shardings)
    return jitted(placed, host_extras, key_data)


def _is_unread(value: object) -> bool:
    return isinstance(value, LazyArray) or _is_missing(value)


def _is_missing(value: object) -> bool:
    """Returns whether the user's model has no value for a parameter, only its shape and dtype."""
    return isinstance(value, jax.ShapeDtypeStruct)


def _read_initial(plan: Plan, key_data: np.ndarray, *, without: Collection[str]) -> TrainState:
    """Builds the state one parameter at a time; reads some from files and initializes the rest.

    Args:
      plan: a plan over a real mesh.
      without: names of parameters that are left out of `params`.
    """
    arrays = plan.model.initial_arrays()
    assert arrays is not None
    stored = {**plan.abstract_stored["params"], **plan.abstract_stored["frozen"]}
    rows = _rows_of_params(plan)
    in_files = frozenset() if plan.offload is None else plan.offload.paged  # already written
    params = {name: x for name, x in arrays[0].items() if name not in in_files}
    new, extras = _make_missing(plan, params, arrays[1], key_data)
    placed = {
        name: new[name]
        if name in new
        else _place(_given(plan, name, arrays[0][name]), stored[name], rows[name])
        for name in stored
        if plan.offload is None or name in plan.abstract_stored["frozen"]
    }

    def others(placed: dict, extras: dict, key_data: jax.Array) -> Any:
        # Moments of offloaded parameters begin at zero, so they need no parameters; an average of
        # the weights is inserted below.
        zeros = {n: jnp.zeros(x.shape, x.dtype) for n, x in stored.items() if n not in placed}
        state = _offloaded(plan, _assemble(plan, {**zeros, **placed}, extras, key_data))
        return leave_out(state)

    def leave_out(state: TrainState) -> Any:
        rest = {n: part for n, part in state.items() if n not in ("params", "masters", "frozen")}
        if plan.offload is not None and isinstance(state["opt_state"], EmaState):
            rest["opt_state"] = dataclasses.replace(state["opt_state"], ema={})
        return rest

    shardings = leave_out(plan.state_shardings)
    state = jax.jit(others, out_shardings=shardings)(placed, extras, key_data)
    state["frozen"] = {name: placed[name] for name in plan.abstract_stored["frozen"]}
    if plan.offload is None:
        state["params"] = {name: placed[name] for name in plan.abstract_stored["params"]}
        return _begun(plan, state)
    state["params"], state["masters"], averages = {}, {}, {}
    for name, leaf in plan.abstract_stored["params"].items():
        if name in in_files:
            state["masters"][name], averages[name] = {}, None
            continue
        one = new.pop(name) if name in new else _place(params[name], leaf, rows[name])
        found = cut_new_param(plan, name, one)
        if name not in without and name in plan.abstract_state["params"]:
            state["params"][name] = found.param
        if found.master is not None:
            state["masters"][name] = found.master
        averages[name] = found.average
    if isinstance(state["opt_state"], EmaState):
        state["opt_state"] = dataclasses.replace(state["opt_state"], ema=averages)
    return _begun(plan, state)


def _begun(plan: Plan, state: TrainState) -> TrainState:
    for feature, decision in active(plan):
        state = feature.begun(plan, decision, state)
    return state


def _make_missing(
    plan: Plan, params: dict[str, Any], extras: dict[str, Any], key_data: np.ndarray
) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Initializes the parameters and non-parameter arrays that the weight files do not contain.

    Returns:
      ({name: stored form of a parameter that is in no file}, all extras of the model).
    """
    names = [name for name, x in params.items() if isinstance(x, jax.ShapeDtypeStruct)]
    missing = [name for name, x in extras.items() if isinstance(x, jax.ShapeDtypeStruct)]
    if not names and not missing:
        return {}, extras

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


def _place(value: object, stored: jax.ShapeDtypeStruct, rows: StageRows | None) -> jax.Array:
    return place(value if isinstance(value, LazyArray) else np.asarray(value), stored, rows)


def _offloaded(plan: Plan, stored: TrainState) -> TrainState:
    """Converts a new stored state to the form with offload: optimizer-state slices in memory;
    traced.
    """
    return stored if plan.offload is None else cut_new_state(plan, stored)


def _assemble(plan: Plan, params: dict, extras: dict, key_data: jax.Array) -> TrainState:
    """Builds a training state from parameters of stored shape; traced.

    Args:
      key_data: key data of the seed, from which parameters were drawn; steps get another key.
    """
    key = jax.random.fold_in(jax.random.wrap_key_data(key_data), _STEPS)
    abstract, scaling = plan.abstract_stored, plan.precision.loss_scale
    trained = {name: params[name] for name in abstract["params"]}
    parts = {}
    for feature, decision in active(plan):
        part, trained = feature.begin(plan, decision, trained)
        parts |= {} if feature.kind.part is None else {feature.kind.part: part}
    state = TrainState(
        step=zero_counter(),
        skipped=zero_counter(),
        rng=jax.random.key_data(key),
        params=trained,
        frozen={name: params[name] for name in abstract["frozen"]},
        opt_state=_new_opt_state(plan, trained),
        extras={name: jnp.asarray(extras[name]) for name in abstract["extras"]},
        loss_scale={} if scaling is None else loss_scale.init(scaling),
    )
    if "one_bit" in abstract:
        state["one_bit"] = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract["one_bit"])
    if COPIES in abstract:
        state["copies"] = first_copies(plan, trained)
    if DELAYED in abstract:
        state["delayed"] = no_gradients(abstract[DELAYED])
    return {**state, **parts}  # type: ignore[return-value]


def _new_opt_state(plan: Plan, trained: dict[str, jax.Array]) -> Any:
    coding = coding_of(plan.tx)
    if coding is None:
        return plan.tx.init(trained)
    return coding.new_state(plan.abstract_stored["opt_state"], trained)


def _rows_of_params(plan: Plan) -> dict[str, StageRows | None]:
    rows = rows_of_state(plan.placement, plan.tx, plan.abstract_stored)
    if rows is None:
        return dict.fromkeys(plan.placement.leaves)
    return {**rows["params"], **rows["frozen"]}


def place(
    value: np.ndarray | LazyArray, stored: jax.ShapeDtypeStruct, rows: StageRows | None
) -> jax.Array:
    """Casts and pads an array to its stored form, and puts each shard on its device.

    Args:
      value: array of the true (unpadded) shape.
      stored: stored shape, dtype and sharding.
      rows: permutation of a stack's rows in a pipeline (`placement.state.StageRows`); None: none.
    """
    if isinstance(value, LazyArray):
        return _place_lazy(value, stored, rows)
    if rows is not None:
        layers = np.asarray(rows.rows)
        in_order, value = value, np.zeros((len(layers), *value.shape[1:]), value.dtype)
        value[layers >= 0] = in_order[layers[layers >= 0]]
    widths = [(0, new - old) for new, old in zip(stored.shape, value.shape, strict=True)]
    padded = np.pad(value, widths) if value.shape != stored.shape else value
    cast = padded.astype(stored.dtype, copy=False)
    return jax.make_array_from_callback(stored.shape, stored.sharding, lambda index: cast[index])


def _place_lazy(
    value: LazyArray, stored: jax.ShapeDtypeStruct, rows: StageRows | None
) -> jax.Array:
    placed: list[jax.Array] = []
    for shard, devices in _devices_of_shards(stored).items():
        blocks = _blocks(value, shard, rows)
        if devices[0].platform == "cpu":
            placed += _on_cpu(blocks, shard, stored.dtype, devices)
        else:
            placed += fill_on_devices(blocks, shard, stored.dtype, devices)
    return jax.make_array_from_single_device_arrays(stored.shape, stored.sharding, placed)


def _devices_of_shards(stored: jax.ShapeDtypeStruct) -> Mapping[Ranges, list[Any]]:
    """Returns {index range of a shard: this process's devices that hold it}."""
    found: dict[Ranges, list[Any]] = {}
    places = stored.sharding.addressable_devices_indices_map(stored.shape)
    for device, index in places.items():
        assert index is not None
        sizes = zip(index, stored.shape, strict=True)
        shard = tuple(part.indices(size)[:2] for part, size in sizes)
        found.setdefault(shard, []).append(device)
    return found


def _blocks(
    value: LazyArray, shard: Ranges, rows: StageRows | None
) -> Iterator[tuple[int, np.ndarray]]:
    """Reads one shard of an array in blocks: yields (first row in the shard, values), without
    padding.
    """
    inside = [
        (start, min(stop, size)) for (start, stop), size in zip(shard, value.shape, strict=True)
    ]
    if rows is not None:
        inside[0] = shard[0]
    if any(stop <= start for start, stop in inside):
        return
    if not value.is_stacked:
        assert rows is None, "a pipeline's parameters are stacks"
        yield 0, value.read(inside)
        return
    for row in range(*inside[0]):
        layer = row if rows is None else rows.rows[row]
        if layer >= 0:
            yield row - shard[0][0], value.read([(layer, layer + 1), *inside[1:]])


def _shape_of(shard: Ranges) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in shard)


def _on_cpu(
    blocks: Iterator[tuple[int, np.ndarray]], shard: Ranges, dtype: DTypeLike, devices: list[Any]
) -> list[jax.Array]:
    """Copies one shard to each of several CPU devices; returns the copies in the order of
    `devices`.

    Each copy has memory of its own, which the next step may overwrite.
    """
    shape = _shape_of(shard)
    buffers = [_aligned_zeros(shape, np.dtype(dtype)) for _ in devices]
    for row, block in blocks:
        for buffer in buffers:
            index = (slice(row, row + block.shape[0]), *map(slice, block.shape[1:]))
            buffer[index if shape else ...] = block
    return [jax.device_put(buffer, device) for buffer, device in zip(buffers, devices, strict=True)]


def _aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.zeros(count + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + count].view(dtype).reshape(shape)


def fill_on_devices(
    blocks: Iterator[tuple[int, np.ndarray]], shard: Ranges, dtype: DTypeLike, devices: list[Any]
) -> list[jax.Array]:
    """Copies one shard to each of several devices, block by block.

    Args:
      blocks: (first row in the shard, values) of each block; rows without a block stay zero.
      shard: index range of the shard in each dimension of the array.
      dtype: dtype of the result.
      devices: devices that hold this shard.

    Returns:
      The whole shard on each device, in the order of `devices`.
    """
    shape = _shape_of(shard)
    filled = [_zeros(shape, np.dtype(dtype), device) for device in devices]
    for row, block in blocks:
        for number, device in enumerate(devices):
            there = jax.device_put(block, device)
            filled[number] = _fill(filled[number], there, np.int32(row))
        jax.block_until_ready(filled)  # frees the host memory of this block
    return filled


def _zeros(shape: tuple[int, ...], dtype: np.dtype, device: jax.Device) -> jax.Array:
    sharding = jax.sharding.SingleDeviceSharding(device)
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)()


@functools.partial(jax.jit, donate_argnums=0)
def _fill(shard: jax.Array, block: jax.Array, row: jax.Array) -> jax.Array:
    """Returns `shard` (donated) with `block` written at `row` of its first dimension; casts it."""
    start = [row, *[jnp.int32(0)] * (shard.ndim - 1)] if shard.ndim else []
    return lax.dynamic_update_slice(shard, block.astype(shard.dtype), start)
