"""Defects of slices in files that a review found, each with what shows that it is gone."""

import collections
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.offload.test_offload_disk_checkpoints import restore, save
from tests.support.offload_disk_runs import (
    SHARES,
    Regression,
    close,
    differing,
    offload,
    plan_of,
    portable,
    train,
)
from tests.support.small_models import reference_model
from tests.support.trajectories import regression_batch, text_batch
from zerojax.checkpoint import Checkpointer, packs, stored_arrays
from zerojax.checkpoint.arrays import array_of_parts
from zerojax.checkpoint.store import BucketStore, StoreError
from zerojax.checkpoint.store.direct_io import aligned_buffer
from zerojax.checkpoint.store.manifest import load_manifest
from zerojax.checkpoint.store.pieces import PieceReader
from zerojax.config import MeshConfig
from zerojax.models.losses import mean_squared_error
from zerojax.offload import disk_step
from zerojax.offload.disk_durable import resume, resume_step
from zerojax.offload.disk_places import owners_of
from zerojax.optim import adamw
from zerojax.placement.device_mesh import make_mesh
from zerojax.plan.make import make_plan
from zerojax.step import initialization
from zerojax.step.initialization import init_state
from zerojax.step.reshard import model_parts, reshard_state
from zerojax.training.checkpointing import first_state, restore_state
from zerojax.training.entry import train as train_run


def pipelined(folder, schedule):
    config = MeshConfig(stage=2, data=2, pipeline_schedule=schedule)
    model = reference_model("gpt2", num_layers=4, num_heads=2, embed_dim=16)
    return make_plan(
        model,
        make_mesh(config, jax.devices()[:4]),
        example_batch=text_batch(0),
        optimizer=adamw(1e-2),
        precision="fp32",
        num_microbatches=4,
        pipeline_schedule=schedule,
        offload=offload(folder, durable=True),
    )


@pytest.mark.slow
def test_layers_in_another_order_are_another_store(tmp_path):
    """One mesh, one slicing: the schedules differ in which layers lie in which rows."""
    written, other = pipelined(tmp_path, "1f1b"), pipelined(tmp_path, "interleaved")
    state, _ = train_text(written)
    expected = portable(written, state)
    close(state)
    assert {leaf.shard_shape for leaf in written.offload.on_disk} == {
        leaf.shard_shape for leaf in other.offload.on_disk
    }
    with pytest.raises(StoreError, match="order of layers"):
        resume(other)
    state, _ = resume(written)
    assert differing(portable(written, state), expected) == []
    close(state)


def train_text(plan):
    return train(plan, 1)


def mixed_scratch_store(folder):
    plan = plan_of(offload(folder), data=2)
    state = init_state(plan)
    for piece in state["disk"].slices():
        piece.write()
        break  # the sweep is left, as by a kill
    close(state)
    with pytest.raises(StoreError, match="interrupted"):
        BucketStore.open(folder / "process_0")


@pytest.mark.slow
def test_a_mixed_scratch_store_does_not_stop_a_durable_run(tmp_path):
    mixed_scratch_store(tmp_path)
    plan = plan_of(offload(tmp_path, durable=True), data=2)
    assert resume_step(plan) is None
    state, _ = first_state(plan, 0, None)
    assert int(state["step"]) == 0
    close(state)


def killed_before_its_next_step(state):
    """What is left of a run whose state is dropped here."""
    close(state)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["plain", "pieces"])
def test_a_durable_run_that_was_restored_needs_no_step_to_be_gone_on_from(tmp_path, source):
    given = None if source == "plain" else offload(tmp_path / "other")
    written = plan_of(given, zero=2, data=2, freeze=("down/bias",))
    state, _ = train(written, 3)
    expected = portable(written, state)
    save(tmp_path / "checkpoints", written, state, step=3)
    close(state)

    plan = plan_of(offload(tmp_path / "store", durable=True), data=2, freeze=("down/bias",))
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        _, state = restore_state(checkpointer, plan)
    killed_before_its_next_step(state)
    assert resume_step(plan) == 3
    state, _ = resume(plan)
    assert differing(portable(plan, state), expected) == []
    close(state)


@pytest.mark.slow
def test_a_reshard_into_a_durable_store_keeps_step_and_data(tmp_path):
    old, new = plan_of(None, data=4), plan_of(offload(tmp_path, durable=True), data=2)
    state, _ = train(old, 2)
    expected = portable(old, state)
    killed_before_its_next_step(reshard_state(old, new, state, data_state={"at": 7}))
    assert resume_step(new) == 2
    state, data_state = resume(new)
    assert data_state == {"at": 7}
    assert differing(portable(new, state), expected) == []
    close(state)


@pytest.mark.slow
def test_a_live_reshard_of_a_durable_run_is_gone_on_from(tmp_path):
    """Through the trainer: its position of the data goes into the new store."""
    settings = MeshConfig(data=-1, offload=offload(tmp_path / "store", durable=True))
    run = {"optimizer": adamw(1e-2), "run_dir": None}
    batches = [regression_batch(index) for index in range(4)]
    trainer = train_run(Regression, settings, batches, steps=2, **run)
    trainer.reshard(MeshConfig(data=-1, zero=3, offload=settings.offload))
    plan, expected = trainer.plan, portable(trainer.plan, trainer.state)
    trainer.close()
    assert resume_step(plan) == 2
    state, data_state = resume(plan)
    assert data_state is not None
    assert differing(portable(plan, state), expected) == []
    close(state)


@pytest.mark.slow
def test_a_new_store_has_nothing_of_the_one_before(tmp_path):
    plan = plan_of(offload(tmp_path, durable=True), data=2)
    state, _ = train(plan, 1)
    close(state)
    folder = tmp_path / "process_0"
    stale = folder / "state-1.npz"
    stale.write_bytes((folder / "state-2.npz").read_bytes())
    state = init_state(plan)
    close(state)
    assert load_manifest(folder).generation == 1
    assert resume_step(plan) is None


@pytest.mark.thorough
def test_a_step_leaves_nothing_that_keeps_its_state_alive(tmp_path):
    plan = plan_of(offload(tmp_path, durable=True), data=2)
    state, _ = train(plan, 1)
    disk, weights = state["disk"], weakref.ref(state["params"]["middle/kernel"])
    gc.disable()
    try:
        del state
        assert weights() is None
    finally:
        gc.enable()
        disk.close()


def test_a_state_that_is_not_born_leaves_no_open_store(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise MemoryError("the rest of the state")

    plan = plan_of(offload(tmp_path), data=2)
    monkeypatch.setattr(initialization, "build_initialiser", fail)
    with pytest.raises(MemoryError, match="the rest of the state") as error:
        init_state(plan)
    BucketStore.open(tmp_path / "process_0").close()  # while the error holds its frames
    assert error.value.__traceback__ is not None


@pytest.mark.thorough
def test_each_array_of_an_ordinary_checkpoint_is_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr(packs, "LARGEST", 0)  # each by itself
    plain = plan_of(None, data=2)
    state, _ = train(plain, 1)
    save(tmp_path / "checkpoints", plain, state)
    read: list[str] = []
    real = stored_arrays.arrays.read_on_host

    def note(folder, name, leaf):
        read.append(name)
        return real(folder, name, leaf)

    monkeypatch.setattr(stored_arrays.arrays, "read_on_host", note)
    plan = plan_of(offload(tmp_path / "store", SHARES), data=2)
    restored = restore(tmp_path / "checkpoints", plan)
    close(restored)
    assert len(read) == 3 * len(plan.offload.off_device)
    assert sorted(read) == sorted(set(read))


def test_the_first_process_with_a_shard_owns_it():
    Device = collections.namedtuple("Device", ("id", "process_index"))
    devices = [Device(number, process) for number, process in enumerate((1, 0, 2, 2))]
    assert owners_of(dict(zip(devices, (0, 0, 1, 1), strict=True))) == {0: 0, 1: 2}


class Scaled(nnx.Module):
    """Has a parameter without dimensions."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(12, 5, rngs=rngs)
        self.scale = nnx.Param(jnp.asarray(1.5))

    def loss(self, batch):
        return mean_squared_error(self.up(batch["x"]) * self.scale[...], batch["y"])


def scaled_plan(folder):
    config = type(offload("x"))(
        opt_state="nvme", folder=str(folder), slice_elements=4, min_elements=1
    )
    return make_plan(
        Scaled,
        make_mesh(MeshConfig(data=2), jax.devices()[:2]),
        example_batch=regression_batch(0),
        optimizer=adamw(1e-2),
        precision="fp32",
        offload=config,
    )


@pytest.mark.thorough
def test_a_parameter_without_dimensions_comes_back(tmp_path):
    plan = scaled_plan(tmp_path / "store")
    assert "scale" in {leaf.name for leaf in plan.offload.on_disk}
    state, _ = train(plan, 2)
    expected = portable(plan, state)
    save(tmp_path / "checkpoints", plan, state, step=2)
    close(state)
    again = restore(tmp_path / "checkpoints", plan)
    try:
        assert differing(portable(plan, again), expected) == []
    finally:
        close(again)


def pointers(array):
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def aligned(values):
    """The same in memory that a CPU device takes as it is."""
    bytes_ = aligned_buffer(-(-values.nbytes // 4096) * 4096)[: values.nbytes]
    result = bytes_.view(values.dtype).reshape(values.shape)
    result[...] = values
    return result


@pytest.mark.thorough
def test_every_device_has_memory_of_its_own(tmp_path, monkeypatch):
    plan = plan_of(offload(tmp_path / "store"), zero=3, data=2)
    state, _ = train(plan, 1)
    save(tmp_path / "checkpoints", plan, state)
    close(state)
    real = PieceReader.read
    monkeypatch.setattr(PieceReader, "read", lambda *given: aligned(real(*given)))
    everywhere = plan_of(None, zero=0, data=8)
    restored = restore(tmp_path / "checkpoints", everywhere)
    for name, array in restored["params"].items():
        assert len(set(pointers(array))) == 8, name


def test_one_memory_for_all_is_what_jax_would_give():
    """The reason for `checkpoint.arrays.array_of_parts`; should this fail, it has none any more."""
    values = aligned(np.arange(4096, dtype=np.float32))
    sharding = jax.sharding.NamedSharding(
        make_mesh(MeshConfig(data=8), jax.devices()), jax.sharding.PartitionSpec()
    )
    assert len(set(pointers(jax.device_put(values, sharding)))) < 8
    own = array_of_parts((4096,), sharding, lambda index: aligned(values[index]))
    assert len(set(pointers(own))) == 8
    assert np.array_equal(np.asarray(own), values)


@pytest.mark.slow
def test_a_model_is_handed_over_without_its_moments(tmp_path, monkeypatch):
    plan = plan_of(offload(tmp_path), data=2, freeze=("down/bias",))
    state, _ = train(plan, 2)
    expected = portable(plan, state)
    read, real = [], type(state["disk"]).read

    def note(disk, leaf, array):
        read.append(array)
        return real(disk, leaf, array)

    monkeypatch.setattr(type(state["disk"]), "read", note)
    parts = model_parts(plan, state)
    close(state)
    assert set(read) == {"master"}
    assert parts.keys() == {"params", "frozen", "extras"}
    found = {f"{kind}/{n}": np.asarray(x) for kind in parts for n, x in parts[kind].items()}
    assert found.keys() == {n for n in expected if n.split("/")[0] in parts}
    assert all(np.array_equal(x, expected[name]) for name, x in found.items())


@pytest.mark.slow
def test_what_left_a_sweep_is_told(tmp_path, monkeypatch):
    plan = plan_of(offload(tmp_path), data=2)
    state = init_state(plan)
    disk, real = state["disk"], disk_step.take_rows
    calls: list[int] = []

    def fail(*given):
        calls.append(1)
        if len(calls) > 4:
            raise MemoryError("no memory for a slice")
        return real(*given)

    monkeypatch.setattr(disk_step, "take_rows", fail)
    with pytest.raises(MemoryError, match="no memory"):
        train(plan, 1, state)
    gc.collect()
    assert "one of the slices" in disk.failure
    assert "GeneratorExit" not in disk.failure
    close(state)


def test_a_read_that_the_disk_refuses_is_a_store_error(tmp_path, monkeypatch):
    plan = plan_of(offload(tmp_path), data=2)
    state = init_state(plan)

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.preadv", fail)
    with pytest.raises(StoreError, match="could not be read: Input/output error"):
        state["disk"].read(plan.offload.on_disk[0], "master")
    monkeypatch.undo()
    close(state)
