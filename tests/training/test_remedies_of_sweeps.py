"""Refusals of sweeps, callbacks, validation data and reports of runs. Nothing is trained."""

from __future__ import annotations

import json
import shlex
import types
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zerojax
from tests.support.refusals import Refusal, refused, table
from tests.training.test_rate_range import config_of
from zerojax.config import ConfigError, SweepConfig
from zerojax.hardware.gpus import find_gpu
from zerojax.plan.inputs import PlanInputs
from zerojax.training.metrics.comparison import MAX_RUNS, write_comparison
from zerojax.training.metrics.metric_files import read_metrics
from zerojax.training.metrics.report import write_report
from zerojax.training.search_runs import PlannedCall, searched_run
from zerojax.training.sweep_record import RungResult, SweepRecord
from zerojax.training.sweep_trials import MAX_TRIALS, make_rungs, make_trials
from zerojax.training.trial_runs import check_no_files
from zerojax.training.validation import check_before_run, check_validation

RATES = "optimizer.learning_rate: [1e-3, 3e-3]"
MANY = f"optimizer.learning_rate: {[1e-4 * n for n in range(1, MAX_TRIALS + 2)]}"
SWEEPS = table(
    f"""
steps=40 | axes | "axes: {{optimizer.learning_rate: [1e-3, 3e-3]}}" | 'sweep.axes={{{RATES}}}'
'sweep.axes={{steps: [10, 20]}}' | steps | leave one | steps=10 'sweep.axes={{{RATES}}}'
'sweep.axes={{optimizer: [1]}}' | optimizer | optimizer.learning_rate
  | 'sweep.axes={{$: [1e-3, 3e-3]}}'
'sweep.axes={{beta1: [0.8], optimizer.beta1: [0.9]}}' | two | one
  | 'sweep.axes={{beta1: [0.8]}}' ; 'sweep.axes={{optimizer.beta1: [0.9]}}'
'sweep.axes={{optimizer.name: {{low: 1, high: 2}}}}' sweep.trials=2 | optimizer.name | list
  | 'sweep.axes={{optimizer.name: [adamw, lion]}}'
'sweep.axes={{optimizer.beta1: {{low: 0.8, high: 0.9}}}}' | optimizer.beta1 | 27
  | sweep.trials=$ 'sweep.axes={{optimizer.beta1: {{low: 0.8, high: 0.9}}}}'
'sweep.axes={{{MANY}}}' | "{MAX_TRIALS + 1:,}" | 27 | sweep.trials=$ 'sweep.axes={{{MANY}}}'
checkpoint.path=all 'sweep.axes={{{RATES}}}' | 'all' | leave | 'sweep.axes={{{RATES}}}'
checkpoint.save_on_exit=false 'sweep.axes={{{RATES}}}' | save_on_exit | true
  | checkpoint.save_on_exit=$ 'sweep.axes={{{RATES}}}'
""",
    ConfigError,
)


@pytest.mark.parametrize("row", SWEEPS, ids=range(len(SWEEPS)))
def test_sweeps(row, tmp_path):
    SWEEPS[row].check(
        lambda words: make_trials(config_of(tmp_path, *shlex.split(words)), str(tmp_path))
    )


def test_lengths_of_sweeps():
    rungs = lambda given: make_rungs(2, given[0], SweepConfig(min_steps=given[1]))  # noqa: E731
    Refusal((4, 9), "9 4", "lower longer", [(4, 4), (9, 9)], ConfigError).check(rungs)


def test_records_of_sweeps(tmp_path):
    record = lambda given: SweepRecord(*given)  # noqa: E731
    (tmp_path / "other").mkdir()
    SweepRecord(tmp_path, {"eta": 3}).add(0, 1, RungResult(loss=1.0))
    good = [(tmp_path / "other", {"eta": 2}), (tmp_path, {"eta": 3})]
    Refusal((tmp_path, {"eta": 2}), [tmp_path, "eta"], "--out delete", good).check(record)
    file = SweepRecord(tmp_path, {"eta": 3}).path
    file.write_text("{")
    refused(lambda: record((tmp_path, {"eta": 2})), [file], "--out delete")
    file.unlink()
    record((tmp_path, {"eta": 2}))


def test_runs_with_state_in_files(tmp_path):
    def check(words: str) -> None:
        check_no_files(config_of(tmp_path, *words.split()).mesh, "this test")

    bad = "mesh.offload.opt_state=nvme mesh.offload.folder=files"
    host = "mesh.offload.opt_state=host mesh.offload.params=host"
    Refusal(bad, "mesh.offload", host, [host]).check(check)


# --- callbacks ------------------------------------------------------------------------------------


def trainer(**options: Any) -> Any:
    traced = types.SimpleNamespace(metric_names=("accuracy",))
    given = {
        "has_validation": True,
        "loop_settings": types.SimpleNamespace(eval_every=1),
        "has_ema": False,
        "evaluation_names": ("loss", "accuracy"),
    }
    return types.SimpleNamespace(plan=types.SimpleNamespace(traced=traced), **given | options)


def started(metric: str, **options: Any) -> None:
    zerojax.EarlyStopping(metric).on_start(trainer(**options))


def reported(metric: str) -> None:
    zerojax.EarlyStopping(metric)(trainer(), {"step": 1, "loss": 1.0})


CALLBACKS = table(
    """
zerojax.EarlyStopping(mode="least") | mode='least' | 'min' 'max' | zerojax.EarlyStopping(mode=$)
zerojax.EarlyStopping(min_delta=-1) | min_delta=-1 | 0 | zerojax.EarlyStopping(min_delta=$)
zerojax.EarlyStopping(patience=0) | patience=0 | 1 | zerojax.EarlyStopping(patience=$)
started("validation/ema_loss") | 'validation/ema_loss' | optimizer.ema_decay zerojax.with_ema
  | started("validation/ema_loss", has_ema=True, evaluation_names=("loss", "ema_loss"))
started("validation/los") | 'validation/los' | validation/loss validation/accuracy | started("$")
reported("los") | 'los' | loss | reported("$")
"""
)


@pytest.mark.parametrize("row", CALLBACKS)
def test_callbacks(row):
    CALLBACKS[row].check(lambda call: eval(call, globals()))


# --- validation -----------------------------------------------------------------------------------

BATCH = {"x": np.ones((8, 4), np.float32)}


def batches() -> Any:
    yield BATCH


def source(path: Any = None) -> Any:
    return zerojax.data.as_source(path, seq_len=8, global_batch_size=2)[0]


VALIDATION = table(
    """
batches() | generator | list function TokenSource
  | list(batches()) ; lambda number: BATCH ; source()
"book.txt" | 'book.txt' | "zerojax.data.as_source(PATH, ...)[0]" batches | source() ; [BATCH]
3 | int | list function dataset TokenSource one | [BATCH] ; BATCH ; lambda number: BATCH ; source()
[] | empty | one None | [BATCH] ; None
""",
    (TypeError, ValueError),
)


@pytest.mark.parametrize("row", VALIDATION)
def test_validation(row):
    VALIDATION[row].check(lambda given: check_validation(eval(given, globals())))


# --- reports --------------------------------------------------------------------------------------


def run_folder(folder: Path, *records: Any, **files: Any) -> Path:
    """A folder with the reports of a run."""
    folder.mkdir(exist_ok=True)
    lines = records or ({"kind": "train", "step": 1, "loss": 1.0},)
    text = "".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines)
    (folder / "metrics.jsonl").write_text(text)
    for name, content in files.items():
        content = content if isinstance(content, str) else json.dumps(content)
        (folder / f"{name}.json").write_text(content)
    return folder


def test_pages_that_compare_runs(tmp_path):
    a, b = (run_folder(tmp_path / name, config={}) for name in "ab")
    empty = run_folder(tmp_path / "empty", {"kind": "event", "event": "start"}, config={})
    compare = lambda folders: write_comparison(folders)  # noqa: E731
    Refusal([a], "1", f"2 {MAX_RUNS}", [[a, b]]).check(compare)
    Refusal([a, a], [a], "once", [[a, b]]).check(compare)
    Refusal([a, empty], [empty], "wait leave", [[a, b]]).check(compare)
    compare([a, run_folder(empty, config={})])


def test_lines_of_metrics(tmp_path):
    good = {"kind": "train", "step": 1, "loss": 1.0}
    for bad, value, remedy in (
        ({**good, "loss": "low"}, "loss='low'", "remove rename"),
        ({**good, "step": -1}, "step=-1", "remove rename"),
        ({"kind": "event", "step": 1}, "event", "remove"),
    ):
        folder = run_folder(tmp_path / "run", good, bad)
        refused(lambda: read_metrics(tmp_path / "run"), ["metrics.jsonl:2", *value.split()], remedy)
        run_folder(folder, good)
        read_metrics(folder)
    (folder / "metrics.jsonl").rename(folder / "other.jsonl")
    run_folder(folder, good)
    read_metrics(folder)


@pytest.mark.parametrize("bad", ["{", "[1]", b"\xff", '{"pipeline": {"table": 3}}'])
def test_files_of_reports(bad, tmp_path):
    folder = run_folder(tmp_path / "run", config={}, plan={})
    file = folder / "plan.json"
    file.write_bytes(bad if isinstance(bad, bytes) else bad.encode())
    message = refused(lambda: write_report(folder), [file])
    assert "remove" in message or "delete" in message, message
    file.unlink()
    assert write_report(folder).exists()


def of_rows(rows: int, *, is_root: bool = True) -> zerojax.Plan:
    def loss(model: Any, batch: Any) -> Any:
        value = model(batch["x"]) ** 2
        return jnp.sqrt(jnp.mean(value)) if is_root else (jnp.sum(value), value.size)

    batch = {"x": np.ones((rows, 4), np.float32)}
    return zerojax.make_plan(line, {}, example_batch=batch, loss=loss)


def line(rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Linear(4, 2, rngs=rngs)


def test_last_rows_of_validation():
    def check(given: tuple[int, int | None, bool]) -> None:
        rows, eval_batches, is_root = given
        dataset = [{"x": np.ones(4, np.float32)}] * rows
        source = zerojax.data.DatasetSource(dataset=dataset, global_batch_size=8)
        check_before_run(of_rows(8, is_root=is_root), source, eval_batches)

    good = [(20, 2, True), (20, None, False)]
    Refusal((20, None, True), "20 4 8", "eval_batches=2 (sum, weight)", good).check(check)
    good = [(8, None, True), (4, None, False)]
    Refusal((4, None, True), "4 8", "at least (sum, weight)", good).check(check)


# --- searches -------------------------------------------------------------------------------------


def test_rows_and_devices_of_searches():
    def search(given: tuple[int, int, int, int | None]) -> None:
        rows, devices, replica, microbatches = given
        batch = {"x": np.ones((rows, 4), np.float32)}
        loss = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)  # noqa: E731
        inputs = PlanInputs(model=line, example_batch=batch, loss=loss)
        call = PlannedCall(inputs=inputs, settings=zerojax.MeshConfig(replica=replica))
        searched_run(call, find_gpu("h100"), devices, microbatches)

    good = [(24, 4, 1, 3), (12, 4, 1, 3)]
    Refusal((10, 4, 1, 3), "devices=4 num_microbatches=3 10", "12 rows", good).check(search)
    good = [(8, 4, 2, None), (4, 4, 2, None)]
    Refusal((8, 3, 2, None), "devices=3 replica=2 8", '"4 devices" "4 rows"', good).check(search)
