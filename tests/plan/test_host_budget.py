"""Runs whose host memory or files would not fit are refused before they take any; limits are read
as the kernel writes them."""

import errno
import os
import resource
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import zerojax
from zerojax.checkpoint import Checkpointer, folders
from zerojax.checkpoint.errors import DiskFullError
from zerojax.checkpoint.store import StoreError
from zerojax.cli.complaints import explain
from zerojax.cli.jax_environment import allow_pinned_memory
from zerojax.config import CheckpointConfig, MeshConfig, OffloadConfig
from zerojax.plan.make import Plan, make_plan
from zerojax.runtime import memory
from zerojax.runtime.memory import PINNED_LIMIT, SPARE, Room, least_room, pinned_limit_for, rooms
from zerojax.step import host_budget
from zerojax.step.host_budget import (
    check_disk,
    check_host_memory,
    check_pinned_limit,
    disk_bytes,
    has_pinned_room,
    host_bytes,
)
from zerojax.training import step_programs

GIB = 2**30
WIDTH = 256
NUMBER = 2 * WIDTH * WIDTH
"""Elements of both matrices of the model."""
STATE = 12
"""Bytes of an element's master and Adam's moments."""


def init(key):
    first, second = jax.random.split(key)
    return {
        "in": jax.random.normal(first, (WIDTH, WIDTH)),
        "out": jax.random.normal(second, (WIDTH, WIDTH)),
    }


def apply(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["in"]) @ params["out"]) ** 2)


def small_plan(opt_state: str, zero: int = 0, **settings: bool | str) -> Plan:
    """Two matrices on the 8 CPU devices."""
    offload = OffloadConfig(opt_state=opt_state, min_elements=1, slice_elements=8192, **settings)
    return make_plan(
        (init, apply),
        MeshConfig(zero=zero, offload=offload),
        precision="bf16",
        example_batch=jnp.zeros((8, WIDTH)),
        loss=lambda model, batch: model(batch),
    )


def small_run(folder: Path) -> zerojax.Trainer:
    """Six steps of the same model, with checkpoints after 2, 4 and 6."""
    return zerojax.train(
        (init, apply),
        {"zero": 1},
        [jnp.ones((8, WIDTH))] * 6,
        loss=lambda model, batch: model(batch),
        steps=6,
        checkpoint=CheckpointConfig(path=str(folder), every=2, asynchronous=False),
        run_dir=None,
    )


# What is needed


def test_host_bytes_are_those_of_all_devices_of_the_process():
    near, far = (small_plan(tier) for tier in ("device", "host"))
    assert far.offload is not None
    copies = 8 * 2 * NUMBER  # in bfloat16; the devices are the host
    counters = host_bytes(near) - 8 * STATE * NUMBER
    assert 0 < counters < 1000
    assert host_bytes(far) == 8 * STATE * NUMBER + copies + counters
    split = small_plan("host", zero=1)
    assert host_bytes(split) == STATE * NUMBER + copies // 8 + counters


def test_disk_bytes_hold_each_shard_once_and_two_generations_if_durable():
    plan = small_plan("nvme")
    assert disk_bytes(plan) == STATE * NUMBER
    assert disk_bytes(small_plan("nvme", durable=True)) == 2 * STATE * NUMBER
    assert disk_bytes(small_plan("nvme", zero=1)) == STATE * NUMBER
    buffers = 3 * STATE * 8192
    assert host_bytes(plan) - host_bytes(small_plan("host")) == buffers - 8 * STATE * NUMBER


# What is refused


def room_for(plan: Plan, spare: int) -> Room:
    """Exactly what a plan needs, and `spare` bytes."""
    return Room(GIB, -(-(host_bytes(plan) + spare) * 100 // round(SPARE * 100)), "a test")


def test_what_fits_passes_and_a_byte_less_does_not():
    plan = small_plan("host")
    check_host_memory(plan, room_for(plan, 0))
    check_host_memory(plan, None)
    with pytest.raises(ValueError, match="95% of what a test leaves") as error:
        check_host_memory(plan, room_for(plan, -4096))
    text = str(error.value)
    assert text.startswith("offload needs 14.0 MiB of host memory for 8 devices of this process")
    assert (
        "try offload.opt_state: {host: 0.95, nvme: 0.05}, which stores more of the state in files"
        in text
    )
    assert "zero=1, which splits the state over the 8 devices" in text


def test_a_share_is_proposed_that_fits():
    plan = small_plan("{device: 0.25, host: 0.75}")
    on_host = 8 * STATE * NUMBER * 3 // 4
    with pytest.raises(ValueError, match="host memory") as error:
        check_host_memory(plan, room_for(plan, -on_host // 2))
    # In steps of 5 %: 35 % and the buffers for files are more than half of what 75 % take.
    assert "{device: 0.25, host: 0.3, nvme: 0.45}" in str(error.value)
    check_host_memory(
        small_plan("{device: 0.25, host: 0.3, nvme: 0.45}"), room_for(plan, -on_host // 2)
    )


def test_files_that_do_not_fit(monkeypatch, tmp_path):
    plan = small_plan("nvme", durable=True, folder=str(tmp_path))
    needed = disk_bytes(plan)
    monkeypatch.setattr(host_budget, "free_disk", lambda folder: needed)
    check_disk(plan)
    monkeypatch.setattr(host_budget, "free_disk", lambda folder: needed - 8192)
    with pytest.raises(ValueError, match=r"needs 3.0 MiB of disk in two generations") as error:
        check_disk(plan)
    assert "offload.durable: false, which takes half" in str(error.value)
    assert f"in {tmp_path}/process_0, but only 3.0 MiB are free" in str(error.value)
    assert "(not counting checkpoints, 1.5 MiB each)" in str(error.value)
    store = tmp_path / "process_0"
    store.mkdir()
    (store / "buckets0.bin").write_bytes(bytes(8192))
    os.sync()
    check_disk(plan)  # they are replaced


class Gpu:
    """What is asked of a device."""

    platform = "gpu"


@pytest.mark.parametrize(
    ("told", "gib", "problem"),
    [
        (None, 60, None),
        (None, 64, "is not set, so it is 64.*set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=68 before JAX"),
        ("80", 64, None),
        ("10", 64, "LIMIT_GB=10"),
        ("many", 1, "'many' is not an integer"),
    ],
)
def test_the_pool_of_pinned_memory_is_large_enough(told, gib, problem, monkeypatch):
    plan = small_plan("host")
    monkeypatch.setattr(host_budget, "_local_devices", lambda plan: [Gpu()])
    tiers = {"optimizer state": {"host": gib * GIB}}
    monkeypatch.setattr(host_budget, "role_tiers", lambda plan: tiers)
    environ = {} if told is None else {PINNED_LIMIT: told}
    if problem is None:
        check_pinned_limit(plan, environ)
    else:
        with pytest.raises(ValueError, match=problem):
            check_pinned_limit(plan, environ)


@pytest.mark.parametrize(
    ("told", "more", "has_room"),
    [(None, 30, True), (None, 31, False), ("80", 46, True), ("80", 47, False), ("many", 31, False)],
)
def test_room_in_the_pool_beside_what_a_plan_keeps_there(told, more, has_room, monkeypatch):
    """30 GiB on the two devices, and as much again, with 5 % for gaps."""
    plan = small_plan("host")
    monkeypatch.setattr(host_budget, "_local_devices", lambda plan: [Gpu(), Gpu()])
    monkeypatch.setattr(host_budget, "role_tiers", lambda plan: {"parameters": {"host": 15 * GIB}})
    environ = {} if told is None else {PINNED_LIMIT: told}
    assert has_pinned_room(plan, more * GIB // 2, environ=environ) is has_room


def test_there_is_no_such_pool_on_a_cpu():
    check_pinned_limit(small_plan("host"), {PINNED_LIMIT: "0"})
    assert has_pinned_room(small_plan("host"), 2**60, environ={PINNED_LIMIT: "0"})


# Disks that fill up


@pytest.mark.thorough
def test_a_disk_that_others_fill_ends_the_run_with_its_last_checkpoint_whole(tmp_path, monkeypatch):
    checked = []

    def check_free(folder, num_bytes):
        checked.append(num_bytes)
        if len(checked) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(folders, "check_free", check_free)

    with pytest.raises(DiskFullError) as caught:
        small_run(tmp_path)
    sentence, is_bad_input = explain(caught.value)
    assert sentence is not None
    assert sentence.startswith(
        f"step 4 was not saved in {tmp_path}: no space left on device (needs"
    )
    assert "earlier checkpoints are intact: 2" in sentence
    assert not is_bad_input, "exit code 1"
    assert Checkpointer(tmp_path).steps() == (2,)
    assert small_run(tmp_path).num_steps == 6


def test_a_step_that_used_its_state_up_is_told_as_it_failed(tmp_path, monkeypatch):
    """For lack of memory, say: there is nothing to save then."""

    def fail(state, batch):
        jax.tree.map(lambda leaf: leaf.delete(), state)
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(step_programs, "build_step", lambda plan: fail)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED") as caught:
        small_run(tmp_path)
    sentence = str(explain(caught.value)[0])
    assert sentence.startswith("out of memory in the training step (number 1")
    assert "the disk" not in sentence


# The command's part


def test_the_command_sets_the_limit_where_something_is_offloaded(monkeypatch):
    monkeypatch.setattr(
        "zerojax.cli.jax_environment.least_room", lambda: Room(GIB, 100 * GIB, "a test")
    )
    monkeypatch.setenv(PINNED_LIMIT, "")
    monkeypatch.delenv(PINNED_LIMIT)
    allow_pinned_memory(OffloadConfig())
    assert PINNED_LIMIT not in os.environ
    allow_pinned_memory(OffloadConfig(activations="host"))
    assert os.environ[PINNED_LIMIT] == "95"
    allow_pinned_memory(OffloadConfig(opt_state="host"))
    assert os.environ[PINNED_LIMIT] == "95"
    assert pinned_limit_for(None) is None
    assert pinned_limit_for(Room(GIB, 1, "a test")) == 1


def test_a_store_that_cannot_be_used_is_told_in_one_sentence():
    assert explain(StoreError("the store is of another plan")) == (
        "the store is of another plan",
        True,
    )


# Limits as the kernel writes them


@pytest.fixture
def kernel(tmp_path, monkeypatch) -> Path:
    """Folders in place of /proc and /sys/fs/cgroup."""
    for name in ("PROC", "CGROUPS"):
        monkeypatch.setattr(memory, name, tmp_path / name)
    (tmp_path / "PROC" / "self").mkdir(parents=True)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
    write(tmp_path / "PROC" / "meminfo", "MemTotal: 4096 kB\nMemAvailable: 1024 kB\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_machine(kernel):
    assert rooms() == [Room(4 * 2**20, 2**20, "MemAvailable of this machine")]
    (kernel / "PROC" / "meminfo").unlink()
    assert least_room() is None


def test_groups_of_version_2_the_tightest_above_counts(kernel):
    write(kernel / "PROC" / "self" / "cgroup", "0::/a/b\n")
    inner, outer = kernel / "CGROUPS" / "a" / "b", kernel / "CGROUPS" / "a"
    write(inner / "memory.max", "max\n")
    write(inner / "memory.current", "5\n")
    write(outer / "memory.max", "1000\n")
    write(outer / "memory.current", "900\n")
    write(outer / "memory.stat", "anon 1\ninactive_file 300\n")
    room = least_room()
    assert room is not None
    assert (room.limit, room.free) == (1000, 400), "cached files give way"
    assert room.source.endswith("CGROUPS/a")


def test_groups_of_version_1(kernel):
    write(kernel / "PROC" / "self" / "cgroup", "5:cpu:/x\n4:hugetlb,memory:/job\n0::/\n")
    job = kernel / "CGROUPS" / "memory" / "job"
    write(job / "memory.limit_in_bytes", "2000")
    write(job / "memory.usage_in_bytes", "500")
    write(kernel / "CGROUPS" / "memory" / "memory.limit_in_bytes", str(2**63 - 4096))
    write(kernel / "CGROUPS" / "memory" / "memory.usage_in_bytes", "500")
    assert [(room.limit, room.free) for room in rooms()][:1] == [(2000, 1500)]
    assert len(rooms()) == 2, "a number near 2^63 is not a limit"


def test_limits_of_the_process(kernel, monkeypatch):
    write(kernel / "PROC" / "self" / "status", "VmSize:\t   3 kB\nVmData:\t   1 kB\n")
    limits = {resource.RLIMIT_AS: 8192, resource.RLIMIT_DATA: 2048}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], limits[kind]))
    found = {room.source: room.free for room in rooms()}
    assert found["ulimit -v"] == 8192 - 3 * 1024
    assert found["ulimit -d"] == 1024
