"""Fingerprints do not depend on how an array is cut, and every changed bit changes them."""

from __future__ import annotations

import itertools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from zerojax.checkpoint import fingerprint_math
from zerojax.checkpoint.fingerprints import PendingFingerprints, _program, differing_copies, whole

DTYPES = (
    *("float32", "bfloat16", "float16", "float64", "bool", "complex64"),
    *("int8", "int16", "int32", "int64", "uint8", "uint32"),
    *("float8_e4m3fn", "float8_e5m2", "int4", "uint4", "float4_e2m1fn"),
)
NARROW = {"bool": 1, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}


def make_mesh(*sizes: int) -> Mesh:
    names = ("data", "model", "stage")[: len(sizes)]
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(sizes))


def random_bits(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Any bits, also those of NaNs and of subnormal numbers."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    random = np.random.default_rng(len(shape))
    raw = random.integers(0, 256, (int(np.prod(shape)) * kind.itemsize,), np.uint8)
    if dtype in NARROW:
        raw &= np.uint8((1 << NARROW[dtype]) - 1)
    if dtype == "int4":  # as ml_dtypes keeps it, with the sign in all upper bits
        raw = np.where(raw & 8, raw | 0xF0, raw).astype(np.uint8)
    return raw.view(kind).reshape(shape)


def of_device(x: jax.Array) -> fingerprint_math.Sums:
    return whole(x, PendingFingerprints({"x": x}).result()["x"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_host_and_device_find_the_same_for_every_dtype(dtype: str) -> None:
    wide = np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize == 8
    with jax.enable_x64(wide):
        for shape in ((), (0, 3), (7,), (3, 1, 5)):
            host = random_bits(dtype, shape)
            device = jnp.asarray(host)
            assert device.dtype == host.dtype
            assert of_device(device) == fingerprint_math.of_array(host)


def test_the_program_for_gpus_finds_the_same() -> None:
    host = random_bits("float32", (6, 50))
    traced = jax.jit(lambda x: fingerprint_math.traced(x, (0, 0), x.shape, on_cpu=False))
    assert tuple(map(int, traced(host))) == fingerprint_math.of_array(host)


@pytest.mark.thorough
def test_no_way_of_cutting_changes_it() -> None:
    hosts = {
        "even": random_bits("float32", (16, 8, 4)),
        "odd": random_bits("bfloat16", (7, 13)),
        "key": random_bits("uint32", (2,)),
        "scalar": random_bits("int32", ()),
    }
    expected = {name: fingerprint_math.of_array(host) for name, host in hosts.items()}
    meshes = make_mesh(8), make_mesh(4, 2), make_mesh(2), make_mesh(1), make_mesh(2, 2, 2)
    for mesh in meshes:
        axes = mesh.axis_names
        specs = [P(), P(axes[0]), P(None, axes[-1]), P(axes), P(None, None, axes[0])]
        if len(axes) > 1:
            specs += [P(axes[0], axes[1]), P((axes[1], axes[0])), P(axes[1], None, axes[0])]
        for name, host in hosts.items():
            for spec in specs:
                sharding = NamedSharding(mesh, spec)
                if len(spec) > host.ndim:
                    continue
                try:
                    x = jax.device_put(host, sharding)
                except ValueError:  # does not divide it
                    continue
                assert of_device(x) == expected[name], (name, mesh.shape, spec)
    single = jax.device_put(hosts["odd"], SingleDeviceSharding(jax.devices()[3]))
    assert of_device(single) == expected["odd"]


def test_parts_in_any_boxes_add_up_on_the_host() -> None:
    host = random_bits("float32", (5, 9, 6))
    cuts = itertools.product(((0, 2), (2, 5)), ((0, 9),), ((0, 1), (1, 4), (4, 6)))
    parts = [
        fingerprint_math.of_part(host[a:b, c:d, e:f], (a, c, e), host.shape)
        for (a, b), (c, d), (e, f) in cuts
    ]
    assert fingerprint_math.add(*parts) == fingerprint_math.of_array(host)


@pytest.mark.parametrize("shape", [(3, 40_000), (40_000, 3), (200, 7, 70), (100_000,)])
def test_large_arrays_go_through_the_host_in_pieces(shape: tuple[int, ...]) -> None:
    host = random_bits("float32", shape)
    assert fingerprint_math.of_array(host) == of_device(jnp.asarray(host))


def test_every_single_bit_counts_in_both_sums() -> None:
    for dtype, shape in (
        ("float32", (4, 3)),
        ("bfloat16", (5,)),
        ("float64", (3,)),
        ("int8", (9,)),
    ):
        host = random_bits(dtype, shape)
        good = fingerprint_math.of_array(host)
        raw = host.reshape(-1).view(np.uint8)
        for byte, bit in itertools.product(range(raw.size), range(8)):
            raw[byte] ^= np.uint8(1 << bit)
            first, second = fingerprint_math.of_array(host)
            assert first != good[0]
            assert second != good[1]
            raw[byte] ^= np.uint8(1 << bit)
        assert fingerprint_math.of_array(host) == good


def test_damage_that_plain_sums_miss_is_found() -> None:
    host = random_bits("float32", (8, 8))
    good = fingerprint_math.of_array(host)
    seen = {good}
    for change in range(4):
        bad = host.copy()
        words = bad.reshape(-1).view(np.uint32)
        if change == 0:  # two sign bits: any odd weights cancel them modulo 2^32
            words[[3, 17]] ^= np.uint32(1 << 31)
        elif change == 1:
            words[[0, 1]] = words[[1, 0]]
        elif change == 2:
            bad = np.roll(bad, 1, axis=0)
        else:  # rows written in the place of columns
            bad = np.ascontiguousarray(bad.T)
        seen.add(fingerprint_math.of_array(bad))
    assert len(seen) == 5
    zeros = {fingerprint_math.of_array(np.zeros(n, np.float32)) for n in range(1, 9)}
    assert len(zeros) == 8, "zeros count: a longer array of them is another one"


def test_places_beyond_32_bits_are_told_apart() -> None:
    """An array of 2^33 elements, of which only two are looked at."""
    shape = (2, 2**16, 2**16)
    one = np.ones((1, 1, 1), np.float32)
    low, high = (fingerprint_math.of_part(one, (i, 0, 5), shape) for i in (0, 1))
    assert low[0] == high[0], "keys repeat after 2^32 elements"
    assert low[1] != high[1], "weights do not"


def test_random_damage_of_many_words_is_found() -> None:
    random = np.random.default_rng(0)
    host = random_bits("float32", (64, 64))
    good = fingerprint_math.of_array(host)
    for _ in range(300):
        bad = host.copy()
        words = bad.reshape(-1).view(np.uint32)
        where = random.integers(0, words.size, random.integers(2, 40))
        words[where] ^= random.integers(1, 2**32, where.size, dtype=np.uint32)
        assert (bad.view(np.uint32) == host.view(np.uint32)).all() == (
            fingerprint_math.of_array(bad) == good
        )


def test_the_program_neither_communicates_nor_copies() -> None:
    mesh = make_mesh(4, 2)
    for spec, shape in ((P("data", "model"), (512, 256)), (P("model"), (2048, 96)), (P(), (999,))):
        sharding = NamedSharding(mesh, spec)
        abstract = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        compiled = _program(sharding, shape).lower(abstract).compile()
        text = compiled.as_text()
        for collective in ("all-reduce", "all-gather", "all-to-all", "collective-permute"):
            assert collective not in text
        memory = compiled.memory_analysis()
        shard = 4 * int(np.prod(sharding.shard_shape(shape)))
        assert memory.argument_size_in_bytes == pytest.approx(shard, abs=64)
        # Without optimizations, as tests compile, the fusion that reads them once is still made.
        assert memory.temp_size_in_bytes < shard / 4, re.findall(r"%\S+ = \S+", text)


def test_copies_that_differ_are_told() -> None:
    mesh = make_mesh(2)
    sharding = NamedSharding(mesh, P())
    shards = [jax.device_put(np.float32([1, 2 + i]), d) for i, d in enumerate(mesh.devices.flat)]
    x = jax.make_array_from_single_device_arrays((2,), sharding, shards)
    parts = PendingFingerprints({"x": x}).result()["x"]
    assert differing_copies(x, parts) == tuple(d.id for d in mesh.devices.flat)
    same = jax.device_put(np.float32([1, 2]), sharding)
    assert differing_copies(same, PendingFingerprints({"x": same}).result()["x"]) is None


def test_a_donated_array_counts_as_it_was() -> None:
    host = random_bits("float32", (1024, 64))
    x = jax.device_put(host, NamedSharding(make_mesh(8), P("data")))
    computation = PendingFingerprints({"x": x})
    change = jax.jit(lambda x: x * 0 + 1, donate_argnums=0)
    for _ in range(3):
        x = change(x)
    assert whole(x, computation.result()["x"]) == fingerprint_math.of_array(host)


def test_arrays_in_host_memory_count_the_same() -> None:
    host = random_bits("bfloat16", (8, 6))
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    for kind in kinds:
        x = jax.device_put(host, NamedSharding(make_mesh(4), P("data"), memory_kind=kind))
        assert of_device(x) == fingerprint_math.of_array(host)
