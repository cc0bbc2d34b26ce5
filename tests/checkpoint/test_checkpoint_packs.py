"""Small arrays in packs come back bit for bit on any mesh, and are written once."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.checkpoint import Checkpointer, CheckpointError, DamagedError, packs

ABOUT = {"data_state": {}, "config": {}, "plan": {}}
SPECS = {
    "both": (P("data", "model"), (8, 6), np.float32),
    "columns": (P(None, ("data", "model")), (3, 16), np.float32),
    "copies": (P(), (5, 3), np.float32),
    "few": (P(), (3,), np.int32),
    "half": (P("model"), (6, 5), ml_dtypes.bfloat16),
    "half_copies": (P(), (9,), ml_dtypes.bfloat16),
    "one": (P(), (), np.float32),
    "key": (P(), (2,), np.uint32),
    "small_half": (P(("model", "data")), (8,), np.float16),
    "flag": (P(), (), np.bool_),
    "bytes": (P("data"), (4, 3), np.int8),
}


def mesh_of(data: int, model: int):
    kinds = (jax.sharding.AxisType.Auto,) * 2
    devices = jax.devices()[: data * model]
    return jax.make_mesh((data, model), ("data", "model"), kinds, devices=devices)


def host_state():
    """Every bit pattern may occur, also of NaN."""
    random = np.random.default_rng(0)
    found = {}
    for name, (_, shape, dtype) in SPECS.items():
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        raw = random.integers(0, 2 if dtype is np.bool_ else 256, size, np.uint8)
        found[name] = raw.view(dtype).reshape(shape)
    found["both"].view(np.uint32)[0, :3] = 0x7F800001, 0xFF923456, 0x80000000  # NaNs, -0
    return found


def on(mesh, host):
    return {n: jax.device_put(x, NamedSharding(mesh, SPECS[n][0])) for n, x in host.items()}


def bits(values):
    array = np.ascontiguousarray(values)
    return array.dtype.name, array.shape, array.tobytes()


@pytest.mark.thorough
@pytest.mark.parametrize("saved", [(4, 2), (1, 1), (2, 2)])
def test_every_bit_comes_back_on_any_mesh(tmp_path, saved):
    host = host_state()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, on(mesh_of(*saved), host), **ABOUT)
        checkpointer.wait()
        table = json.loads((tmp_path / "1" / packs.FILE_NAME).read_text())["arrays"]
        assert set(table) == {"both", "columns", "copies", "one", "half", "half_copies"}
        assert len({entry["pack"] for entry in table.values()}) == 2, "one for each dtype"
        for name, entry in table.items():
            assert sum(count for _, _, _, count, _ in entry["runs"]) == host[name].size, name
        for mesh in (mesh_of(4, 2), mesh_of(2, 1), mesh_of(1, 2)):
            like = on(mesh, host)
            wanted = {
                n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
                for n, x in like.items()
            }
            found = checkpointer.restore(wanted).state
            for name, values in host.items():
                assert found[name].sharding == wanted[name].sharding
                assert bits(found[name]) == bits(values), name
            only = checkpointer.restore({"half": wanted["half"]}, subset=True).state
            assert bits(only["half"]) == bits(host["half"])
        assert checkpointer.verify().is_good


def test_large_arrays_go_by_themselves_and_packs_have_a_size(monkeypatch):
    monkeypatch.setattr(packs, "LARGEST", 100)
    monkeypatch.setattr(packs, "PACK_BYTES", 200)
    mesh = mesh_of(2, 1)
    given = {f"x{i}": jnp.full((20,), float(i)) for i in range(7)} | {"big": jnp.ones(25)}
    placed = {n: jax.device_put(x, NamedSharding(mesh, P())) for n, x in given.items()}
    written, table = packs.stack(placed)
    assert set(written) == {"x6", "big", "pack/0", "pack/1", "pack/2"}
    assert all(x.nbytes <= 200 for n, x in written.items() if n.startswith("pack"))
    for name in table.names:
        pack = np.asarray(written[table.pack_of(name)[0]])
        assert np.array_equal(table.part(name, pack, ((5,), (10,))), np.asarray(given[name][5:15]))


@pytest.mark.thorough
@pytest.mark.parametrize("order", ["wide first", "wide later"])
def test_arrays_of_small_shards_that_are_larger_than_a_pack(tmp_path, monkeypatch, order):
    """On many devices what is small on each is large in all."""
    monkeypatch.setattr(packs, "PACK_BYTES", 200)
    mesh = mesh_of(4, 2)
    given = {"wide": jnp.arange(64.0), "nearly": jnp.arange(48.0), "a": jnp.ones(8)}
    given |= {"b": jnp.zeros(8), "c": jnp.ones(2, jnp.int32)}
    if order == "wide later":
        given = dict(reversed(given.items()))
    split = NamedSharding(mesh, P(("data", "model")))
    whole = NamedSharding(mesh, P())
    state = {n: jax.device_put(x, whole if n == "c" else split) for n, x in given.items()}
    written, table = packs.stack(state)
    assert table.names == {"a", "b"}
    assert set(written) == {"wide", "nearly", "c", "pack/0"}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, **ABOUT)
        checkpointer.wait()
        like = {
            n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for n, x in state.items()
        }
        found = checkpointer.restore(like).state
    for name, values in given.items():
        assert bits(found[name]) == bits(values), name


def test_packs_take_a_bounded_part_of_a_device(monkeypatch):
    monkeypatch.setattr(packs, "DEVICE_BYTES", 100)
    mesh = mesh_of(2, 1)
    given = {f"x{i}": jax.device_put(jnp.ones(16), NamedSharding(mesh, P())) for i in range(9)}
    written, table = packs.stack(given)
    assert len(table.names) == 3
    assert len(written) == 1 + 6


def test_nothing_is_sent_between_devices():
    mesh = mesh_of(4, 2)
    arrays = on(mesh, host_state())
    names = [n for n in arrays if SPECS[n][2] is np.float32]
    stacker = packs._stacker(mesh, tuple(arrays[n].sharding.spec for n in names))
    text = stacker.lower([arrays[n] for n in names]).compile().as_text()
    assert "concatenate" in text or "fusion" in text
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert collective not in text


@pytest.mark.thorough
def test_packs_may_be_donated_around(tmp_path):
    """The state goes into a donating computation right after `save`, many times."""
    mesh = mesh_of(4, 2)
    step = jax.jit(lambda state: {n: x + 1 for n, x in state.items()}, donate_argnums=0)
    names = ("both", "columns", "copies")
    start = {n: np.zeros(SPECS[n][1], np.float32) for n in names}
    state = on(mesh, start)
    with Checkpointer(tmp_path, keep=10) as checkpointer:
        for number in range(1, 6):
            state = step(state)
            checkpointer.save(number, state, **ABOUT)
            for _ in range(3):
                state = step(state)
            state = {n: x - 3 for n, x in state.items()}
        checkpointer.wait()
        like = {
            n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for n, x in state.items()
        }
        for number in range(1, 6):
            found = checkpointer.restore(like, number).state
            assert all((np.asarray(x) == number).all() for x in found.values())


def test_a_damaged_table_is_damage(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        state = on(mesh_of(2, 1), {n: host_state()[n] for n in ("copies", "both")})
        checkpointer.save(1, state, **ABOUT)
        checkpointer.wait()
        path = tmp_path / "1" / packs.FILE_NAME
        text = path.read_text()
        path.write_text(text.replace('"copies"', '"copiez"'))
        assert not checkpointer.verify().is_good
        like = {
            n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for n, x in state.items()
        }
        with pytest.raises((CheckpointError, DamagedError)):
            checkpointer.restore(like)


@pytest.mark.parametrize(
    ("runs", "found"),
    [
        ([(0, 6, 0), (6, 6, 6)], 12),
        ([(0, 6, 0), (6, 5, 6)], 11),
        ([(0, 6, 0), (0, 6, 6)], 6),  # as many elements as the array has, but some twice
        ([(at, 1, at) for at in range(12)], 12),
        ([(at, 1, at) for at in range(11)], 11),
    ],
)
def test_a_part_of_which_elements_are_missing_is_refused(runs, found: int):
    whole = np.arange(12, dtype=np.int32)
    entry = {"pack": "pack/0", "elements": 12, "dtype": "int32"}
    entry["runs"] = [((0, 0), (3, 4), *run) for run in runs]
    table = packs.Table({"x": packs._as_place("x", entry)})
    box = ((0, 0), (3, 4))
    if found == 12:
        assert np.array_equal(table.part("x", whole, box), whole.reshape(3, 4))
    else:
        with pytest.raises(ValueError, match=f"x.*: {found} of 12 elements"):
            table.part("x", whole, box)
