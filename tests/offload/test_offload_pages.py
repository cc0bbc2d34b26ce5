"""Layers whose weights and gradients are in files train as they do on the device.

Both compute the same products, but here each layer is a program of its own, kernels are fused
otherwise, and gradients of one microbatch are reduced before they are added up: runs are equal up
to rounding, `TOLERANCE`. The optimizer's sweep alone gives the same bits as any other tier.
"""

import errno
import functools
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import zerojax
from tests.offload.test_offload_params import make_optimizer
from tests.support.offload_disk_runs import (
    close,
    counted_bytes,
    differing,
    fail_after,
    portable,
    steps_as_undisturbed,
)
from tests.support.pipeline_runs import small
from tests.support.trajectories import TOLERANCE, plan_for, text_batch, train_for
from zerojax.checkpoint.store import StoreError
from zerojax.config import CheckpointConfig, LogConfig, OffloadConfig
from zerojax.config.loader import ConfigError
from zerojax.offload import paged_step
from zerojax.offload.disk_durable import resume
from zerojax.offload.disk_errors import DiskErrors
from zerojax.optim.precision import as_precision
from zerojax.placement.state_layout import store_folder
from zerojax.plan.offload_costs import moved_bytes
from zerojax.step.build import build_evaluation, build_step
from zerojax.step.host_budget import disk_bytes
from zerojax.step.initialization import init_state
from zerojax.step.reshard import reshard_state

MODEL = {"layers": 3, "width": 16}
DROPOUT = {**MODEL, "rate": 0.2, "rate_behind": 0.2}


def paged(folder: Any, **options: Any) -> dict[str, Any]:
    """Layers in files, in slices of less than a layer."""
    small_slices = {"min_elements": 30, "slice_elements": 60}
    return {"params": "nvme", "folder": str(folder), **small_slices, **options}


def options_of(zero: int = 1, microbatches: int = 1, devices: int = 4, **more: Any) -> dict:
    return {
        "zero": zero,
        "num_microbatches": microbatches,
        "devices": devices,
        "mesh": {"data": devices},
        "optimizer": make_optimizer(0.05),  # below the norms, so that all steps are clipped
        "persistence_threshold": 50,
        **more,
    }


def batch_on(plan: Any, index: int = 0) -> Any:
    return jax.device_put(text_batch(index), plan.batch_sharding)


CASES = [(3, 4), *((zero, m) for zero in range(4) for m in (1, 4) if (zero, m) != (3, 4))]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("zero", "microbatches"),
    [
        pytest.param(*c, marks=[pytest.mark.slow] * (c != CASES[0]), id=f"zero{c[0]}-m{c[1]}")
        for c in CASES
    ],
)
def test_layers_from_files_train_as_on_the_device(tmp_path, zero, microbatches):
    given = options_of(zero, microbatches, steps=5)
    found = train_for(small(**DROPOUT), offload=paged(tmp_path), **given)
    expected = train_for(small(**DROPOUT), **given)
    assert found.plan.offload.paged
    assert not found.plan.offload.paged & found.state["params"].keys()
    np.testing.assert_allclose(found.losses, expected.losses, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(found.norms, expected.norms, rtol=4 * TOLERANCE)
    mine, other = (portable(one.plan, one.state) for one in (found, expected))
    assert mine.keys() == other.keys()
    for name, value in mine.items():
        np.testing.assert_allclose(value, other[name], rtol=0, atol=100 * TOLERANCE, err_msg=name)
    assert expected.losses[0] - expected.losses[-1] > 0.01
    close(found.state)


def one_device(
    folder: Any, layers: int = 3, *, inputs: str = "device", durable: bool = False, **more: Any
) -> Any:
    """A plan of one device, whose pages are whole blocks of the disk."""
    sizes = {"slice_elements": 1024, "min_elements": 2048}
    offload = paged(folder, activations=inputs, durable=durable, **sizes)
    return plan_for(
        small(layers=layers, width=32), offload=offload, **options_of(devices=1, **more)
    )


@pytest.mark.thorough
def test_the_number_of_programs_does_not_depend_on_the_depth(tmp_path):
    """Neither do a second step and a second microbatch compile anything."""
    counts = []
    for layers in (2, 5):
        plan = one_device(tmp_path / str(layers), layers, microbatches=2)
        state, step = init_state(plan), build_step(plan)
        for _ in range(2):
            state, _ = step(state, batch_on(plan))
        inner = step.compiled
        programs = inner.programs.all | inner.page_updates.functions
        counts.append({name: program._cache_size() for name, program in programs.items()})
        close(state)
    assert counts[0] == counts[1]
    assert {n for n, count in counts[0].items() if count == 0} == {"evaluate"}
    assert max(counts[0].values()) == 1


@pytest.mark.thorough
@pytest.mark.parametrize(("microbatches", "inputs"), [(1, "device"), (2, "nvme")])
def test_bytes_read_and_written_are_those_of_the_plan(tmp_path, monkeypatch, microbatches, inputs):
    plan = one_device(tmp_path, microbatches=microbatches, inputs=inputs)
    state, step = init_state(plan), build_step(plan)
    with counted_bytes(monkeypatch) as done:
        state, _ = step(state, batch_on(plan))
    close(state)
    moved = moved_bytes(plan)
    assert len(moved) == (4 if inputs == "nvme" else 3)
    assert done["preadv"] == sum(part.read for part in moved)
    assert done["pwritev"] == sum(part.written for part in moved)
    files = sum(path.stat().st_size for path in tmp_path.rglob("buckets*.bin"))
    assert files == disk_bytes(plan)


@pytest.mark.thorough
@pytest.mark.parametrize("ends_at_once", [True, False])
def test_a_failed_read_in_the_pass_loses_nothing(tmp_path, monkeypatch, ends_at_once):
    """The same state steps again, to the bits of a run without the failure.

    One of several processes ends the pass first, since the others wait for it in collectives.
    """
    kept = functools.partial(DiskErrors, several=not ends_at_once)
    monkeypatch.setattr(paged_step, "DiskErrors", kept)
    plan = one_device(tmp_path / "failing")
    state, step = init_state(plan), build_step(plan)
    # layers 0, 1 and 2, and 1 on the way back
    fail_after(monkeypatch, "preadv", 4)
    with pytest.raises(StoreError, match="weights: bucket 0 could not be read.*error") as error:
        step(state, batch_on(plan))
    monkeypatch.undo()
    assert "\n" not in str(error.value)
    steps_as_undisturbed(plan, state, step, one_device(tmp_path / "whole"), batch_on(plan))


@pytest.mark.slow
@pytest.mark.parametrize("slow", [["preadv"], ["pwritev"], ["preadv", "pwritev"]], ids="+".join)
@pytest.mark.parametrize(
    "more",
    [{"activations": "nvme"}, {"durable": True, "update_in_backward": True}],
    ids=["sweep", "in backward"],
)
def test_a_disk_that_is_slow_in_any_phase_changes_no_bit(tmp_path, monkeypatch, slow, more):
    """Some calls take long, others not, so that every buffer is once the one that is waited for."""

    def trained(folder: Path) -> tuple[list[float], dict[str, Any]]:
        given = options_of(devices=1, microbatches=2)
        offload = paged(folder, slice_elements=1024, min_elements=2048, **more)
        plan = plan_for(small(layers=4, width=32), offload=offload, **given)
        state, step, losses = init_state(plan), build_step(plan), []
        for index in range(3):
            state, metrics = step(state, batch_on(plan, index))
            losses.append(float(metrics["loss"]))
        found = portable(plan, state)
        close(state)
        return losses, found

    losses, expected = trained(tmp_path / "quick")
    chance = random.Random(5)

    def slowed(real: Any) -> Any:
        def call(*given: Any) -> int:
            time.sleep(chance.choice([0.0, 0.0, 0.03]))
            return real(*given)

        return call

    for name in slow:
        monkeypatch.setattr(os, name, slowed(getattr(os, name)))
    slow_losses, found = trained(tmp_path / "slow")
    assert slow_losses == losses
    assert differing(found, expected) == []


@pytest.mark.thorough
@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_failure_in_the_sweep_ends_the_state(tmp_path, monkeypatch, call):
    plan = one_device(tmp_path)
    state, step = init_state(plan), build_step(plan)
    disk, in_pass = state["disk"], {"preadv": 5, "pwritev": 3}[call]
    fail_after(monkeypatch, call, in_pass + 2)
    with pytest.raises(StoreError, match="half-way .*Input/output error.*start the run again"):
        step(state, batch_on(plan))
    monkeypatch.undo()
    with pytest.raises(StoreError, match="half-way"):
        disk.read(plan.offload.on_disk[0], "master")
    close(state)


@pytest.mark.thorough
def test_a_skipped_step_changes_no_file(tmp_path):
    plan = one_device(tmp_path)
    state, step = init_state(plan), build_step(plan)
    state["params"] = {n: x.at[...].set(np.nan) for n, x in state["params"].items()}
    before = state["disk"].store.generation, state["disk"].pages.weights.store.generation
    state, metrics = step(state, batch_on(plan))
    assert (int(metrics["skipped"]), int(state["step"])) == (1, 1)
    now = state["disk"].store.generation, state["disk"].pages.weights.store.generation
    assert now == before
    close(state)


@pytest.mark.thorough
def test_to_another_tier_and_mesh_and_back(tmp_path):
    """And the weights in files are those of the masters, so that an evaluation is the same."""
    files = plan_for(small(**MODEL), offload=paged(tmp_path), **options_of(3))
    device = plan_for(small(**MODEL), **options_of(1, devices=2))
    state, _ = build_step(files)(init_state(files), batch_on(files))
    expected = portable(files, state)
    sums = build_evaluation(files)(state, batch_on(files))
    moved = reshard_state(files, device, state)
    assert differing(portable(device, moved), expected) == []
    other = build_evaluation(device)(moved, batch_on(device))
    np.testing.assert_allclose(float(sums["loss"]), float(other["loss"]), rtol=1e-6)
    back = reshard_state(device, files, moved)
    assert differing(portable(files, back), expected) == []
    assert float(build_evaluation(files)(back, batch_on(files))["loss"]) == float(sums["loss"])
    close(back)


REFUSED = {
    "model=2 .*use model=1": {"mesh": {"data": 2, "model": 2}},
    "stage=2 .*use stage=1": {"mesh": {"data": 2, "stage": 2}, "num_microbatches": 2},
    "param_dtype=bfloat16 .*use param_dtype=float32": {
        "precision": as_precision("bf16", param_dtype="bf16")
    },
}


@pytest.mark.parametrize("match", REFUSED)
def test_what_does_not_work_with_layers_in_files_is_refused(tmp_path, match):
    with pytest.raises(ValueError, match=f"offload.params=nvme.*{match}"):
        plan_for(small(**MODEL), offload=paged(tmp_path), **{**options_of(), **REFUSED[match]})


def test_params_in_files_imply_the_optimizers_state_there():
    assert OffloadConfig(params="nvme").opt_state == "nvme"
    assert OffloadConfig(params="nvme", durable=True).durable
    with pytest.raises(ConfigError, match="opt_state.*host.*params: nvme"):
        OffloadConfig(params="nvme", opt_state="host")


@pytest.mark.thorough
def test_a_durable_state_survives_a_failure_in_the_sweep(tmp_path, monkeypatch):
    """It goes on from its last whole step, to the bits of a run without the failure."""
    plan = one_device(tmp_path, durable=True)
    step = build_step(plan)
    state, _ = step(init_state(plan), batch_on(plan))
    # three pages of gradients come first
    fail_after(monkeypatch, "pwritev", 5, error=errno.ENOSPC)
    with pytest.raises(StoreError, match="No space left.*the last whole step"):
        step(state, batch_on(plan, 1))
    monkeypatch.undo()
    close(state)
    again, _ = resume(plan)
    again, metrics = step(again, batch_on(plan, 1))
    found = portable(plan, again)
    close(again)
    other = one_device(tmp_path / "whole")
    expected, _ = build_step(other)(init_state(other), batch_on(other))
    expected, expected_metrics = build_step(other)(expected, batch_on(other, 1))
    assert float(metrics["loss"]) == float(expected_metrics["loss"])
    assert differing(found, portable(other, expected)) == []
    close(expected)


@pytest.mark.thorough
def test_files_that_were_deleted_end_a_durable_run(tmp_path):
    plan = one_device(tmp_path, 2, durable=True)
    step = build_step(plan)
    state, _ = step(init_state(plan), batch_on(plan))
    shutil.rmtree(store_folder(plan.settings.offload))
    with pytest.raises(StoreError, match="deleted"):
        step(state, batch_on(plan, 1))
    close(state)


@pytest.mark.thorough
def test_an_evaluation_after_the_end_says_what_to_do(tmp_path):
    plan = one_device(tmp_path)
    state = init_state(plan)
    close(state)
    with pytest.raises(RuntimeError, match="zerojax eval"):
        build_evaluation(plan)(state, batch_on(plan))


@pytest.mark.thorough
def test_a_run_goes_on_from_its_checkpoint_in_files_and_on_the_device(tmp_path):
    """Through `zerojax.train`, with a validation between the steps."""

    def run(folder: str, steps: int, place: dict[str, Any] | None) -> list[float]:
        losses: list[float] = []

        def note(trainer: Any, metrics: Any) -> None:
            losses.append(metrics["loss"])

        trainer = zerojax.train(
            small(**MODEL),
            {"data": 8, "zero": 2, **({} if place is None else {"offload": place})},
            [text_batch(index) for index in range(4)],
            optimizer=make_optimizer(),
            precision="fp32",
            steps=steps,
            checkpoint=CheckpointConfig(path=str(tmp_path / folder), every=2, save_on_exit=False),
            run_dir=None,
            log=LogConfig(every=1),
            callbacks=[note],
        )
        assert np.isfinite(trainer.evaluate([text_batch(5)])["loss"])
        trainer.close()
        return losses

    files = paged(tmp_path / "files")
    found = [*run("moved", 2, files), *run("moved", 4, files), *run("moved", 6, None)]
    np.testing.assert_allclose(found, run("plain", 6, None), rtol=0, atol=TOLERANCE)


def child(folder: Path, layers: int, what: str) -> str:
    """Runs `tests.support.paged_process`; returns what it prints."""
    command = [sys.executable, "-m", "tests.support.paged_process", str(folder), str(layers), what]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_memory_does_not_grow_with_the_depth(tmp_path):
    """8 and 32 layers of 4 MiB with inputs of 2 MiB in files; 5 % is the noise of allocators.

    Neither that of a new run, which draws its first values, nor that of a resumed one.
    """
    for what in ("make", "run"):
        few, many = (json.loads(child(tmp_path / str(n), n, what)) for n in (8, 32))
        for one, layers in ((few, 8), (many, 32)):
            assert one["file_bytes"] == layers * 2**25 + (layers - 1) * 2**21
        assert np.isfinite(many["losses"]).all()
        assert many["peak_rss_bytes"] < 1.05 * few["peak_rss_bytes"], what


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"mesh": {"data": 2, "replica": 2}, "zero": 3},
        {"precision": "bf16", "zero": 2, "num_microbatches": 2},
        {"precision": "fp16", "zero": 1},
        {"inputs": "host"},
        {"freeze": ("probe",)},
    ],
    ids=["replica", "bf16", "fp16", "inputs", "frozen"],
)
def test_other_settings_train_as_with_weights_on_the_host(tmp_path, more):
    """The plain way of these is `params: host`, which has tests of its own."""
    given = options_of(steps=3) | more
    moved = {"activations": given.pop("inputs", "device")}
    tolerance = TOLERANCE if "precision" not in more else 2e-2  # of 16-bit numbers
    runs = []
    for place in (paged(tmp_path / "a", **moved), paged(tmp_path / "b", **moved)):
        place |= {} if not runs else {"params": "host", "opt_state": "nvme"}
        runs.append(train_for(small(**MODEL), offload=place, **given))
        close(runs[-1].state)
    np.testing.assert_allclose(runs[0].losses, runs[1].losses, rtol=0, atol=tolerance)
    np.testing.assert_allclose(runs[0].norms, runs[1].norms, rtol=4 * tolerance)
    assert runs[0].plan.offload.paged == runs[1].plan.offload.streamed
