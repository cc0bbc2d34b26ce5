"""Masters and moments in files: the bits of the device tier, and what a step leaves on disk."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.offload_disk_runs import (
    SHARES,
    batch_of,
    close,
    differing,
    fail_after,
    num_leaves,
    offload,
    plan_of,
    portable,
    train,
)
from tests.support.recipe import RECIPE
from tests.support.small_models import reference_model
from tests.support.trajectories import text_batch
from zerojax.checkpoint.store import StoreError
from zerojax.config import MeshConfig, OffloadConfig
from zerojax.optim import adamw
from zerojax.optim.precision import as_precision
from zerojax.placement.device_mesh import make_mesh
from zerojax.plan.make import make_plan
from zerojax.step.build import build_step
from zerojax.step.initialization import init_state
from zerojax.step.reshard import reshard_state

STEPS = 5


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 3])
def on_device(request):
    """(ZeRO stage, losses, portable state) of a run with everything on the device."""
    plan = plan_of(None, request.param, text=True)
    state, losses = train(plan, STEPS)
    return request.param, losses, portable(plan, state)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "share",
    [pytest.param("nvme", marks=pytest.mark.slow, id="nvme"), pytest.param(SHARES, id="shares")],
)
def test_the_bits_of_the_device_tier(tmp_path, on_device, share):
    zero, losses, expected = on_device
    plan = plan_of(offload(tmp_path, share), zero, text=True)
    state, found = train(plan, STEPS)
    try:
        assert found == losses
        assert differing(portable(plan, state), expected) == []
        assert state["disk"].store.generation == STEPS + 1  # the fill, and one sweep for each step
        assert num_leaves(state) == 0
        many = [leaf for leaf in plan.offload.on_disk if leaf.num_slices > 1]
        assert many
        if share == "nvme":
            assert not jax.tree.leaves(state["masters"])
    finally:
        close(state)


@pytest.mark.thorough
def test_a_skipped_step_touches_no_bucket(tmp_path):
    plan = plan_of(offload(tmp_path), data=2)
    state = init_state(plan)
    state["params"] = {n: x.at[...].set(jnp.nan) for n, x in state["params"].items()}
    before = state["disk"].store.generation
    manifest = (tmp_path / "process_0" / "manifest.json").read_bytes()
    state, metrics = build_step(plan)(state, batch_of(plan, 0))
    close(state)
    assert (int(metrics["skipped"]), int(state["step"]), int(state["skipped"])) == (1, 1, 1)
    assert state["disk"].store.generation == before
    assert (tmp_path / "process_0" / "manifest.json").read_bytes() == manifest


@pytest.mark.slow
def test_from_files_to_another_mesh_on_the_device_and_back(tmp_path):
    files, device = plan_of(offload(tmp_path), zero=3, data=4), plan_of(None, data=2)
    state, _ = train(files, 2)
    expected = portable(files, state)
    moved = reshard_state(files, device, state)
    assert differing(portable(device, moved), expected) == []
    back = reshard_state(device, files, moved)
    try:
        assert differing(portable(files, back), expected) == []
    finally:
        close(back)


@pytest.mark.thorough
def test_a_sweep_that_fails_is_told_and_nothing_is_saved_from_it(tmp_path, monkeypatch):
    plan = plan_of(offload(tmp_path), data=2)
    state = init_state(plan)
    disk = state["disk"]
    step = build_step(plan)
    fail_after(monkeypatch, "pwritev", 3)
    with pytest.raises(StoreError, match="stopped half-way .*Input/output error.* start the run"):
        step(state, batch_of(plan, 0))
    monkeypatch.undo()
    with pytest.raises(StoreError, match=r"stopped half-way .* the last checkpoint"):
        disk.read(plan.offload.on_disk[0], "master")
    close(state)


def test_a_store_needs_a_folder():
    config = offload("x")
    plan = plan_of(type(config)(opt_state="nvme", min_elements=100), data=2)
    with pytest.raises(ValueError, match=r"offload.folder is not set.*set offload.folder"):
        init_state(plan)


def test_where_there_is_too_little_space_nothing_begins(tmp_path, monkeypatch):
    """Before any array exists: the sentence has bytes and remedies."""
    real = os.statvfs

    def small(path):
        found = real(path)
        return type(found)((*found[:2], found[2], 0, 0, *found[5:]))

    monkeypatch.setattr("os.statvfs", small)
    plan = plan_of(offload(tmp_path), data=2)
    with pytest.raises(OSError, match=r"MiB of disk.* 0.0 MiB are free; free .*") as error:
        init_state(plan)
    assert error.value.errno == 28
    assert not list((tmp_path / "process_0").glob("buckets*"))


@pytest.mark.slow
def test_moments_in_bfloat16(tmp_path):
    """Another dtype beside the masters, with random rounding: the bits of one slicing."""
    precision = as_precision("fp32", moments_dtype="bf16")
    config = offload(tmp_path)
    plan = plan_of(config, data=2, precision=precision)
    state, losses = train(plan, 2)
    close(state)
    assert np.isfinite(losses).all()
    sizes = {place.dtypes["mu"] for place in state["disk"].leaves.values()}
    assert sizes == {np.dtype(jnp.bfloat16)}


@pytest.mark.slow
@pytest.mark.parametrize("opt_state", ["nvme", SHARES], ids=["nvme", "shares"])
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"data": 2, "model": 2}, {"zero": 2, "precision": "bf16"}),
        ({"data": 2, "replica": 2}, {"zero": 3, "num_microbatches": 4}),
        ({"data": 2, "stage": 2}, {"zero": 1, "num_microbatches": 4}),
        ({"data": 4}, {"zero": 0}),
        ({"data": 2, "context": 2}, {"zero": 3}),
    ],
    ids=["model", "replica", "stage", "zero 0", "context"],
)
def test_files_go_with_every_axis_of_the_mesh(tmp_path, mesh, options, opt_state):
    devices = jax.devices()[:4]
    runs = []
    for config in (None, offload(tmp_path, opt_state)):
        plan = make_plan(
            reference_model("gpt2", num_layers=2, num_heads=2, embed_dim=16),
            make_mesh(MeshConfig(**mesh), devices),
            example_batch=text_batch(0),
            optimizer=adamw(1e-2, **RECIPE),
            offload=config or OffloadConfig(),
            **{"precision": "fp32", "persistence_threshold": 100, **options},
        )
        state, losses = train(plan, 3)
        runs.append((losses, portable(plan, state)))
        if config is not None:
            assert plan.offload.on_disk
            close(state)
    assert runs[0][0] == runs[1][0]
    assert differing(runs[0][1], runs[1][1]) == []
