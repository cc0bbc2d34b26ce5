"""`deterministic="mesh"` through a checkpoint: a run that moves goes on with the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.support.mesh_free_runs import STEPS, arrays_of, differences, plan_on
from tests.support.process_groups import run_group
from tests.support.trajectories import regression_batch
from zerojax.checkpoint import Checkpointer
from zerojax.config import LossScale
from zerojax.optim.precision import as_precision
from zerojax.plan.make import Plan
from zerojax.step.build import build_step
from zerojax.step.initialization import init_state
from zerojax.step.reshard import to_portable_state
from zerojax.training.checkpointing import restore_state, save_state

SCALE = LossScale(initial=2.0**11, window=4, hysteresis=1)
ABOUT: dict[str, Any] = {"data_state": {}, "config": {}, "plan": {}}


def plan_of(devices: int) -> Plan:
    precision = as_precision("fp16", loss_scale=SCALE)
    return plan_on(devices, zero=3, precision=precision)


def advance(plan: Plan, state: Any, start: int, stop: int) -> tuple[Any, list[bytes]]:
    """The state after these steps, and the bits of all metrics of each."""
    step, seen = build_step(plan), []
    for index in range(start, stop):
        batch = jax.device_put(regression_batch(index), plan.batch_sharding)
        state, metrics = step(state, batch)
        seen += [jax.device_get(value).tobytes() for value in metrics.values()]
    return state, seen


@pytest.mark.thorough
@pytest.mark.parametrize("devices", [pytest.param(4, marks=pytest.mark.slow), 1])
def test_eight_devices_then_fewer_are_eight_throughout(devices, tmp_path):
    """float16 with a loss scale that overflows and rises, dropout, a schedule, batch statistics."""
    half = STEPS // 2
    plan = plan_of(8)
    state, _ = advance(plan, init_state(plan, 0), 0, half)
    with Checkpointer(str(tmp_path)) as checkpointer:
        save_state(checkpointer, plan, state, step=half, about=ABOUT)
        state, whole = advance(plan, state, half, STEPS)
        expected = arrays_of(to_portable_state(plan, state))
        moved = plan_of(devices)
        restored, state = restore_state(checkpointer, moved)
    assert restored.step == half
    state, rest = advance(moved, state, half, STEPS)
    assert rest == whole
    assert differences(arrays_of(to_portable_state(moved, state)), expected) == []


CONFIG = """
model: {num_layers: 2, num_heads: 2, embed_dim: 24, max_seq_len: 16, dropout: 0.1}
data: {seq_len: 16}
mesh: {deterministic: mesh, zero: 3, persistence_threshold: 100}
optimizer: {schedule: constant, warmup_steps: 5, clip_norm: 0.5}
precision: bf16
global_batch_size: 16
eval_every: null
eval_batches: 1
checkpoint: {every: 100}
log: {every: 1, console: quiet, tensorboard: false}
"""
COLUMNS = ("loss", "grad_norm", "learning_rate")


def train(folder: Path, run: str, *words: str, processes: int = 1) -> list[tuple[float, ...]]:
    """What `metrics.jsonl` has of every step, whichever process took it; also of evaluations."""
    (folder / "run.yaml").write_text(CONFIG, encoding="utf-8")
    command = ["-m", "zerojax", "train", "run.yaml", f"run_dir={run}", *words]
    run_group([command] * processes, folder=folder, join=processes > 1, seconds=500)
    lines = (folder / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [
        tuple(row[column] for column in COLUMNS if column in row)
        for row in rows
        if row["kind"] in ("train", "eval")
    ]


@pytest.mark.slow
def test_a_command_goes_on_with_fewer_devices_bit_for_bit(tmp_path):
    whole = train(tmp_path, "whole", "steps=12", "cpu_devices=8")
    assert len({row[0] for row in whole}) > 10
    train(tmp_path, "moved", "steps=5", "cpu_devices=8")
    train(tmp_path, "moved", "steps=9", "cpu_devices=2")
    moved = train(tmp_path, "moved", "steps=12", "cpu_devices=1")
    trained = lambda rows: [row for row in rows if len(row) == len(COLUMNS)]  # noqa: E731
    assert trained(moved) == trained(whole)
    assert moved[-1] == whole[-1], "the evaluation at the end"


@pytest.mark.slow
@pytest.mark.multihost
def test_two_processes_are_one_with_all_devices(tmp_path):
    """Collectives through gloo move the same pieces, and nothing of gloo's adds up."""
    one = train(tmp_path, "one", "steps=6", "cpu_devices=4")
    two = train(tmp_path, "two", "steps=6", "cpu_devices=2", processes=2)
    assert two == one
    assert len({row[0] for row in one}) > 5
