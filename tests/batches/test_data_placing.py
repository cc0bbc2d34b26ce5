"""Host rows become the global batch, or are refused before they take device memory."""

from __future__ import annotations

import dataclasses
import os
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support.process_groups import ROOT, free_port, run_group
from zerojax.data import TokenSource, as_feed, local_rows, prefetch, shard_batch, tokens_of_array

ROWS, SEQ_LEN = 8, 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyPlan:
    """What `zerojax.plan.make.Plan` tells the data room."""

    abstract_batch: Any
    batch_sharding: NamedSharding
    traced: Any = dataclasses.field(
        default_factory=lambda: types.SimpleNamespace(index_limits={}, exact_leaves={})
    )


def plan_of(mesh=None, **dtypes) -> TinyPlan:
    if mesh is None:
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, P("data"))
    dtypes = dtypes or {"tokens": "int32", "targets": "int32"}
    batch = {
        name: jax.ShapeDtypeStruct((ROWS, SEQ_LEN), dtype, sharding=sharding)
        for name, dtype in dtypes.items()
    }
    return TinyPlan(abstract_batch=batch, batch_sharding=sharding)


def batch_of(**changes) -> dict[str, Any]:
    tokens = np.arange(ROWS * SEQ_LEN, dtype=np.int32).reshape(ROWS, SEQ_LEN)
    return {"tokens": tokens, "targets": tokens + 1, **changes}


def test_the_global_batch_lies_as_the_plan_says():
    plan, batch = plan_of(), batch_of()
    placed = shard_batch(plan, batch)
    assert set(placed) == {"tokens", "targets"}
    for name, array in placed.items():
        assert array.sharding == plan.abstract_batch[name].sharding
        assert array.dtype == jnp.int32
        assert np.array_equal(array, batch[name])
        assert array.addressable_shards[0].data.shape == (ROWS // 4, SEQ_LEN)
    assert local_rows(plan) == (0, ROWS)
    again = shard_batch(plan, placed)
    assert all(again[name] is placed[name] for name in placed)


def test_a_placed_batch_does_not_recompile_the_step():
    plan, step = plan_of(), jax.jit(lambda batch: batch["tokens"].sum())
    source = TokenSource(
        tokens=tokens_of_array(np.arange(200)), seq_len=SEQ_LEN, global_batch_size=ROWS
    )
    with prefetch(as_feed(source), put=lambda batch: shard_batch(plan, batch)) as batches:
        for number in range(3):
            placed, state = next(batches)
            assert int(step(placed)) == source.batch(number)["tokens"].sum()
            assert state["position"] == number + 1
    assert step._cache_size() == 1


def test_placing_on_one_device_is_no_implicit_transfer_and_shares_no_memory():
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])
    sharding, batch = NamedSharding(mesh, P("data")), batch_of(x=np.ones((ROWS, SEQ_LEN), "uint8"))
    batch["more"] = np.ones((ROWS, 1), np.float32)
    abstract = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
                for n, x in batch.items()}  # fmt: skip
    plan = TinyPlan(abstract_batch=abstract, batch_sharding=sharding)
    with jax.transfer_guard("disallow"):
        placed = shard_batch(plan, batch)
    before = {name: array.copy() for name, array in batch.items()}
    for array in batch.values():
        array[...] = 7
    for name, array in placed.items():
        assert array.committed, name
        assert (array.sharding, array.dtype) == (sharding, before[name].dtype)
        assert np.array_equal(array, before[name])


def test_trees_other_than_dicts_are_placed_too():
    sharding = plan_of().batch_sharding
    struct = jax.ShapeDtypeStruct((ROWS,), jnp.float32, sharding=sharding)
    plan = TinyPlan(abstract_batch=(struct, {"y": struct}), batch_sharding=sharding)
    x, y = np.ones(ROWS, np.float32), np.zeros(ROWS, np.float32)
    placed = shard_batch(plan, (x, {"y": y}))
    assert isinstance(placed, tuple)
    assert np.array_equal(placed[1]["y"], y)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("int64", "int32"),
        ("uint8", "int32"),
        ("uint16", "int32"),
        ("float64", "float32"),
        ("float16", "float32"),
        ("bool", "int32"),
        ("uint32", "int32"),
    ],
)
def test_dtypes_that_lose_nothing_are_cast(given: str, wanted: str):
    value = np.ones((ROWS, SEQ_LEN), given)
    placed = shard_batch(plan_of(x=wanted), {"x": value})["x"]
    assert placed.dtype == wanted
    assert np.array_equal(placed, value)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("float32", "int32"),
        ("int32", "float32"),
        ("float32", "bfloat16"),
        ("float32", "float16"),
        ("float64", "bfloat16"),
        ("int32", "bool"),
    ],
)
def test_other_dtypes_are_refused(given: str, wanted: str):
    value = np.ones((ROWS, SEQ_LEN), given)
    with pytest.raises(TypeError, match=f"'x'. has dtype {given}.* made for {wanted}"):
        shard_batch(plan_of(x=wanted), {"x": value})


BIG = np.full((ROWS, SEQ_LEN), 2**31)


@pytest.mark.parametrize(
    ("batch", "error", "words"),
    [
        ({"tokens": batch_of()["tokens"]}, ValueError, r"missing \['targets'\]"),
        (batch_of(weights=np.ones(8)), ValueError, r"\['weights'\].*example_batch"),
        (batch_of(tokens=np.ones((6, 4), int)), ValueError,
         r"shape \(6, 4\).*\(8, 4\).* 8 rows"),
        (batch_of(tokens=np.ones((8, 5), int)), ValueError, r"\(8, 5\).*the shape of example"),
        (batch_of(tokens=BIG), ValueError, "from 2147483648 to 2147483648, but int32"),
        (batch_of(tokens=np.array([["a"] * 4] * 8)), TypeError, "ndarray with dtype <U1"),
        (batch_of(tokens=3), TypeError, "is a int with the single value 3"),
    ],
)  # fmt: skip
def test_bad_batches_are_refused(batch, error, words):
    with pytest.raises(error, match=words):
        shard_batch(plan_of(), batch)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_that_are_not_finite_are_refused(bad: float, dtype: str):
    value = np.ones((ROWS, SEQ_LEN), np.float32)
    value[5, 2] = bad
    value = value.astype(jnp.dtype(dtype))
    words = (
        rf"'x'.: 1 of 32 values is not finite; the first is {bad} at index \(5, 2\); "
        "clean .* to shard_batch:"
    )
    with pytest.raises(ValueError, match=words):
        shard_batch(plan_of(x=dtype), {"x": value})
    placed = shard_batch(plan_of(x=dtype), {"x": value}, check_values=False)
    assert not np.isfinite(np.asarray(placed["x"][5, 2], np.float32))


def test_ids_out_of_vocabulary_are_refused():
    plan, batch = plan_of(), batch_of()
    shard_batch(plan, batch, vocab_size=33)
    with pytest.raises(ValueError, match=r"'targets'. holds token id 32 at index \(7, 3\), .* 32"):
        shard_batch(plan, batch, vocab_size=32)
    with pytest.raises(ValueError, match="token id -1"):
        shard_batch(plan, batch_of(tokens=batch["tokens"] - 1), vocab_size=100)
    # Other integers are no token ids.
    shard_batch(plan_of(labels="int32"), {"labels": batch["tokens"]}, vocab_size=2)


PROCESS = """
import sys
import jax, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
from tests.batches.test_data_placing import plan_of, batch_of
from zerojax.data import TokenSource, as_feed, local_rows, prefetch, shard_batch, tokens_of_array

def mesh_of(devices, shape):
    devices, auto = np.array(devices).reshape(shape), (AxisType.Auto,) * 2
    return Mesh(devices, ("data", "model"), axis_types=auto)

mine, devices = int(sys.argv[2]), jax.devices()
plan = plan_of(mesh_of(devices, (4, 1)))
lo, hi = local_rows(plan)
assert (lo, hi) == (4 * mine, 4 * mine + 4), (lo, hi)
source = TokenSource(tokens=tokens_of_array(np.arange(200)), seq_len=4, global_batch_size=8)
total = jax.jit(lambda b: (b["tokens"] * np.arange(1, 9)[:, None]).sum())
with prefetch(as_feed(source, rows=(lo, hi)), put=lambda b: shard_batch(plan, b)) as batches:
    for step in range(3):
        placed, _ = next(batches)
        assert placed["tokens"].shape == (8, 4)
        whole = source.batch(step)["tokens"] * np.arange(1, 9)[:, None]
        assert int(total(placed)) == whole.sum()
try:
    shard_batch(plan, source.batch(0))
    raise SystemExit("the global batch was taken for this process's rows")
except ValueError as error:
    assert f"holds rows [{lo}, {hi}) only" in str(error), error
# The model axis crosses the processes: both hold every row.
across = plan_of(mesh_of([devices[0], devices[2], devices[1], devices[3]], (2, 2)))
assert local_rows(across) == (0, 8)
assert shard_batch(across, batch_of())["tokens"].shape == (8, 4)
# Rows that are not one run are refused.
try:
    local_rows(plan_of(mesh_of([devices[0], devices[2], devices[1], devices[3]], (4, 1))))
    raise SystemExit("rows with a hole were accepted")
except ValueError as error:
    assert "contiguous" in str(error), error
print("fine")
"""


@pytest.mark.thorough
@pytest.mark.multihost
def test_two_processes_each_give_their_rows():
    address, tests = f"127.0.0.1:{free_port()}", ROOT / "tests"
    for output in run_group(
        [["-c", PROCESS, address, str(number)] for number in range(2)],
        variables={"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(ROOT), str(tests)])},
    ):
        assert output.endswith("fine\n"), output
