"""Transfers a host batch to global arrays with the plan's shardings."""

from __future__ import annotations

import functools
import itertools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.config.checks import names_keywords
from zerojax.config.tree_types import Batch
from zerojax.models.given_arrays import as_arrays, check_arrays, own_array
from zerojax.placement.device_mesh import DATA_AXES, num_data_shards
from zerojax.runtime.memory import allocating_for
from zerojax.tracing.index_limits import IndexLimit
from zerojax.tracing.trees import flatten_names, unflatten_like

# Names of the arrays of a language-model batch that hold token ids. The vocabulary size does not
# limit other arrays, such as labels.
TOKEN_NAMES = ("tokens", "targets")


class BatchPlan(Protocol):
    """Part of a run's plan that batches need: some attributes of `zerojax.plan.make.Plan`."""

    @property
    def abstract_batch(self) -> Any:
        """Global batch as a tree of `jax.ShapeDtypeStruct` with shardings."""
        ...

    @property
    def traced(self) -> Any:
        """Result of tracing the model; its `index_limits` is {name: bounds of integers that index
        rows of a parameter}, its `exact_leaves` are the names of the floating-point arrays whose
        exact values matter."""
        ...

    @property
    def batch_sharding(self) -> NamedSharding:
        """Sharding that splits dimension 0, the rows, over the data axes."""
        ...


@names_keywords()
@allocating_for("placing a batch on the devices")
def shard_batch(
    plan: BatchPlan, batch: Batch, *, vocab_size: int | None = None, check_values: bool = True
) -> Any:
    """Checks a host batch and places it on the devices as global arrays with the plan's shardings.

    With several processes, each process passes its own rows, `local_rows(plan)`, of the global
    batch. Arrays that already have the plan's shape, dtype and sharding are returned unchanged and
    unchecked. NumPy arrays are copied, so they may be filled again when this function returns.

    A dtype that differs from the plan's is cast in four cases: bool becomes an integer dtype, an
    integer dtype another one that can hold all values of the array, a floating-point dtype a wider
    one, or float64 (NumPy's default, which JAX does not use) float32. Any other difference is an
    error, integers for a floating-point array included.

    Args:
      plan: plan of the run.
      batch: tree of arrays [rows, ...] of NumPy, JAX or torch (on the CPU), with the names of the
        plan's example batch.
      vocab_size: if given, the values of arrays named "tokens" or "targets" must be in [0,
        vocab_size). Integers that the model uses as row indices of a parameter are always checked.
      check_values: whether to raise for floating-point values that are not finite.

    Returns:
      The batch as a tree of global `jax.Array`s.

    Raises:
      ValueError: names, shapes or values differ from those the plan was made for.
      TypeError: a dtype is not cast, or a leaf is not an array.
    """
    return _placed(plan, as_arrays(batch), vocab_size, check_values, copy=True)


@allocating_for("placing a batch on the devices")
def shard_own_batch(plan: BatchPlan, batch: Batch, *, vocab_size: int | None) -> Any:
    """Does the same as `shard_batch` without copying NumPy arrays, and without converting tensors
    of torch: `batch` comes from a `Feed`, which has done both, or nobody else has its arrays."""
    return _placed(plan, batch, vocab_size, True, copy=False)


def _placed(
    plan: BatchPlan, batch: Batch, vocab_size: int | None, check_values: bool, *, copy: bool
) -> Any:
    wanted = flatten_names(plan.abstract_batch)
    given = flatten_names(batch)
    _check_names(given, wanted)
    placed, arrays = {}, {}
    for name, abstract in wanted.items():
        value = given[name]
        if isinstance(value, jax.Array) and _lies_as_wanted(value, abstract):
            placed[name] = value
            continue
        host = _as_numpy(name, value)
        array = _cast(name, host, np.dtype(abstract.dtype))
        _check_shape(name, array.shape, abstract)
        if check_values:
            check_finite(name, array)
        if vocab_size is not None and name.split("/")[-1] in TOKEN_NAMES:
            check_vocabulary(name, array, vocab_size)
        for limit in plan.traced.index_limits.get(name, ()):
            check_rows_exist(name, array, limit)
        if name in plan.traced.exact_leaves and array.dtype != host.dtype:
            _check_same_ids(name, host, array)
        if copy and array is host and not isinstance(value, jax.Array):
            array = own_array(array)
        arrays[name] = array
    if arrays:  # one call for all: of a small batch the call is the cost
        of_arrays = [wanted[name] for name in arrays]
        new = _on_devices([*arrays.values()], of_arrays)
        placed.update(zip(arrays, new, strict=True))
    return unflatten_like(plan.abstract_batch, placed)


def _on_devices(arrays: list[np.ndarray], wanted: list[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """Places this process's parts of arrays with the shardings of `wanted`."""
    shardings = [abstract.sharding for abstract in wanted]
    shapes = [abstract.shape for abstract in wanted]
    if jax.process_count() > 1:
        return jax.make_array_from_process_local_data(shardings, arrays, shapes)
    one = shardings[0] if all(sharding is shardings[0] for sharding in shardings) else None
    return jax.device_put(arrays, one or shardings)


def missing_rows(plan: BatchPlan, batch: Batch) -> int:
    """Returns how many rows this process's part of the batch lacks; 0 if none.

    All arrays must lack the same number of rows; those that already are global arrays of the plan
    are not counted. Reads only names and shapes.

    Raises:
      ValueError: names or shapes differ from the plan's in another way.
    """
    wanted, given = flatten_names(plan.abstract_batch), flatten_names(as_arrays(batch))
    _check_names(given, wanted)
    low, high = local_rows(plan)
    shapes = {
        name: np.shape(value)
        for name, value in given.items()
        if not (isinstance(value, jax.Array) and _lies_as_wanted(value, wanted[name]))
    }
    rows = {shape[0] if shape else 0 for shape in shapes.values()}
    is_short = len(rows) == 1 and 0 < min(rows) < high - low
    if is_short and all(shape[1:] == wanted[name].shape[1:] for name, shape in shapes.items()):
        return high - low - min(rows)
    for name, shape in shapes.items():
        _check_shape(name, shape, wanted[name])
    return 0


def local_rows(plan: BatchPlan) -> tuple[int, int]:
    """Returns `(lo, hi)`: this process must provide rows `lo` to `hi` (exclusive) of every global
    batch.

    Raises:
      ValueError: this process has no devices in the mesh, or its rows are not contiguous.
    """
    size = jax.tree.leaves(plan.abstract_batch)[0].shape[0]
    return _local_rows(plan.batch_sharding, size)


def local_rows_of_mesh(mesh: Mesh | AbstractMesh, size: int) -> tuple[int, int]:
    """Returns `(lo, hi)`: of a batch of `size` rows over `mesh`, this process provides rows `lo` to
    `hi` (exclusive). Works before there is a plan."""
    return _local_rows(NamedSharding(mesh, P(DATA_AXES)), size)


def abstract_global(batch: Batch, mesh: Mesh | AbstractMesh) -> Any:
    """Returns shapes and dtypes of the global batch, given the rows of this process.

    Works before there is a plan.

    Args:
      batch: tree of arrays [rows, ...]; a scalar is the same on all processes.
      mesh: mesh of the run. If it has no devices, `batch` is already the global batch.

    Returns:
      The tree of `jax.ShapeDtypeStruct`s that `make_plan` accepts as an example batch.
    """
    batch = as_arrays(batch)
    check_arrays(batch)
    shards = num_data_shards(mesh)
    low, high = (0, shards) if isinstance(mesh, AbstractMesh) else local_rows_of_mesh(mesh, shards)

    def widen(leaf: np.ndarray) -> jax.ShapeDtypeStruct:
        struct = jax.eval_shape(lambda: jnp.asarray(leaf)) if not hasattr(leaf, "shape") else leaf
        dtype = jax.dtypes.canonicalize_dtype(struct.dtype)
        if not struct.shape:
            return jax.ShapeDtypeStruct((), dtype)
        rows = struct.shape[0] * shards // (high - low)
        return jax.ShapeDtypeStruct((rows, *struct.shape[1:]), dtype)

    return jax.tree.map(widen, batch)


@functools.lru_cache(maxsize=64)
def _local_rows(sharding: NamedSharding, size: int) -> tuple[int, int]:
    if isinstance(sharding.mesh, AbstractMesh):
        raise ValueError(
            f"the plan was made for a mesh {dict(sharding.mesh.shape)} without devices, so no "
            "batch can be placed; make the plan with make_mesh(...) on the machine that trains"
        )
    places = sharding.addressable_devices_indices_map((size,)).values()
    rows = sorted({place[0].indices(size)[:2] for place in places if place is not None})
    if not rows:
        raise ValueError(
            f"process {jax.process_index()} has no device in the mesh "
            f"{dict(sharding.mesh.shape)}; make the mesh from the devices of all processes"
        )
    for (_, before), (after, _) in itertools.pairwise(rows):
        if after > before:
            raise ValueError(
                f"process {jax.process_index()} holds the rows {rows} of {size}, which are not "
                "contiguous; "
                "order the devices of the mesh by process, as make_mesh does"
            )
    return rows[0][0], rows[-1][1]


def check_finite(name: str, array: np.ndarray) -> None:
    """Raises if a floating-point array has NaN or infinite values; in most cases its sum decides.

    A sum that is not finite may have overflowed, so then the minimum and the maximum decide.

    Raises:
      ValueError: a value is not finite; names the first index and the number of such values.
    """
    if not _is_floating(array.dtype) or not array.size:
        return
    # Minimum and maximum are both NaN if any value is, so valid arrays need no temporary array.
    with np.errstate(invalid="ignore", over="ignore"):  # bfloat16 warns about a NaN too
        if array.dtype.itemsize >= 4 and np.isfinite(array.sum()):  # shorter ones overflow often
            return
        if np.isfinite(array.min()) and np.isfinite(array.max()):
            return
    bad = np.argwhere(~np.isfinite(array))
    first = tuple(int(i) for i in bad[0])
    count = "1 of {} values is" if len(bad) == 1 else f"{len(bad)} of {{}} values are"
    raise ValueError(
        f"batch[{name!r}]: {count.format(array.size)} not finite; the first "
        f"is {array[first]} at index {first}; clean the data, or, in a loop of your own, "
        "pass check_values=False to shard_batch: the step then skips such batches"
    )


@functools.cache
def _is_floating(dtype: np.dtype) -> bool:
    return jax.numpy.issubdtype(dtype, np.floating)


def check_vocabulary(name: str, array: np.ndarray, vocab_size: int) -> None:
    """Raises if a token id is outside [0, vocab_size).

    Raises:
      ValueError: an id is outside; names the first index and its id.
    """
    if not array.size or (array.min() >= 0 and array.max() < vocab_size):
        return
    first = tuple(int(i) for i in np.argwhere((array < 0) | (array >= vocab_size))[0])
    raise ValueError(
        f"batch[{name!r}] holds token id {array[first]} at index {first}, outside the model's "
        f"vocabulary [0, {vocab_size}); use the model's tokenizer, raise vocab_size, or set id 0 "
        "and weight 0 at such positions"
    )


def check_rows_exist(name: str, array: np.ndarray, limit: IndexLimit) -> None:
    """Raises for integers in `array[limit.window]` outside [limit.low, limit.high): the model uses
    them as row indices of a parameter, or as numbers of classes.

    Raises:
      ValueError: an index is outside; names its position, its value and the parameter.
    """
    looked_up = array[limit.window]
    if not looked_up.size or (looked_up.min() >= limit.low and looked_up.max() < limit.high):
        return
    outside = (looked_up < limit.low) | (looked_up >= limit.high)
    if limit.ignored is not None and not (outside := outside & (looked_up != limit.ignored)).any():
        return
    wrong = np.argwhere(outside)[0]
    first = tuple(
        int(i) * (part.step or 1) + (part.start or 0)
        for i, part in zip(wrong, limit.window, strict=True)
    )
    if not limit.parameter:
        raise ValueError(
            f"batch[{name!r}] holds {array[first]} at index {first}, but the task has "
            f"{limit.high} classes; use numbers in [0, {limit.high}), or {limit.ignored} for what "
            "does not count, or give the task more labels"
        )
    raise ValueError(
        f"batch[{name!r}] holds {array[first]} at index {first}, but the model uses it as an index "
        f"of {limit.parameter}, which has {limit.high} rows; use values in [0, {limit.high}), or "
        "give the model more rows"
    )


def _check_same_ids(name: str, given: np.ndarray, cast: np.ndarray) -> None:
    """Raises if a cast changes whole numbers of an array whose exact values matter, such as ids.

    Raises:
      ValueError: names the first number that the cast changes.
    """
    is_lost = (given != cast) & (given == np.floor(given))
    if not is_lost.any():
        return
    first = tuple(int(i) for i in np.argwhere(is_lost)[0])
    raise ValueError(
        f"batch[{name!r}] holds {given[first]:.0f} at index {first}, which {cast.dtype} can only "
        f"hold as {cast[first]:.0f}, and its exact values matter: the loss compares them or makes "
        "integers of them; pass integers in every batch: .astype('int64')"
    )


def _check_names(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    missing = [name for name in wanted if name not in given]
    unknown = [name for name in given if name not in wanted]
    if missing or unknown:
        raise ValueError(
            f"the batch has arrays {sorted(given)}, but the plan was made for {sorted(wanted)}"
            + (f"; missing {missing}" if missing else "")
            + (f"; unknown {unknown}" if unknown else "")
            + ": use the names of example_batch in every batch"
        )


def _check_shape(name: str, shape: tuple[int, ...], abstract: jax.ShapeDtypeStruct) -> None:
    lo, hi = _local_rows(abstract.sharding, abstract.shape[0])
    local = (hi - lo, *abstract.shape[1:])
    if shape == local:
        return
    if shape == abstract.shape:
        remedy = f"this process holds rows [{lo}, {hi}) only: pass value[{lo}:{hi}] (local_rows)"
    elif shape[1:] == local[1:] and shape[0] > local[0]:
        remedy = (
            f"every batch must have {local[0]} rows in this process: split it into batches of "
            "this size"
        )
    elif shape[1:] == local[1:]:
        remedy = (
            f"every batch must have {local[0]} rows in this process: drop a smaller last batch, "
            "or pad it "
            "with rows of weight 0"
        )
    else:
        remedy = (
            "use the shape of example_batch in every batch, or make the plan with a batch of "
            "this shape"
        )
    raise ValueError(
        f"batch[{name!r}] has shape {shape}, but the plan was made for {local}"
        + (f" in this process ({abstract.shape} in all)" if local != abstract.shape else "")
        + f"; {remedy}"
    )


def _lies_as_wanted(value: jax.Array, abstract: jax.ShapeDtypeStruct) -> bool:
    return (
        value.shape == abstract.shape
        and value.dtype == abstract.dtype
        and abstract.sharding is not None
        and value.sharding.is_equivalent_to(abstract.sharding, value.ndim)
    )


def _as_numpy(name: str, value: object) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.kind in "OSUMmc" or array.ndim == 0:
        what = f"dtype {array.dtype}" if array.ndim else f"the single value {value!r}"
        raise TypeError(
            f"batch[{name!r}] is a {type(value).__name__} with {what}; pass an array [rows, ...] "
            "of numbers"
        )
    return array


def _cast(name: str, array: np.ndarray, wanted: np.dtype) -> np.ndarray:
    """Casts `array` to the dtype `wanted` if `shard_batch` allows this cast; raises otherwise."""
    dtype = array.dtype
    if dtype == wanted:
        return array
    both_integers = dtype.kind in "iu" and wanted.kind in "iu"
    if both_integers and not np.can_cast(dtype, wanted):
        limits = np.iinfo(wanted)
        if array.size and (array.min() < limits.min or array.max() > limits.max):
            raise ValueError(
                f"batch[{name!r}] of dtype {dtype} holds values from {array.min()} to "
                f"{array.max()}, but {wanted} can hold only {limits.min} to {limits.max}; check "
                "the data"
            )
        return array.astype(wanted)
    same_kind = both_integers or jax.numpy.issubdtype(dtype, np.floating) == jax.numpy.issubdtype(
        wanted, np.floating
    )
    is_default_float = dtype == np.float64 and wanted == np.float32
    if same_kind and (np.can_cast(dtype, wanted) or is_default_float):
        return array.astype(wanted)
    raise TypeError(
        f"batch[{name!r}] has dtype {dtype}, but the plan was made for {wanted}; convert the "
        "data with "
        f".astype({str(wanted)!r}), or make the plan with an example_batch of {dtype}"
    )
