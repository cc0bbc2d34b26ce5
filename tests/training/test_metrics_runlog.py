"""The run folder, and the numbers that follow from the clock."""

from __future__ import annotations

import errno
import io
import json
import sys
import time
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.config import ConfigError, LogConfig, RunConfig, to_dict
from zerojax.training.metrics import RunLog, read_metrics
from zerojax.training.metrics.metric_files import MetricsFile

MEMORY = {"source": "device", "in_use": 2**30, "peak": 2**31, "limit": 2**33}


class Run:
    """A RunLog on a clock that is set by hand."""

    def __init__(self, folder, *, start_step=0, is_new=False, config=None, **options):
        self.now, self.screen = 100.0, io.StringIO()
        settings = {
            "total_steps": 100,
            "tokens_per_step": 1000,
            "flops_per_step": 8e13,
            "num_devices": 4,
            "device_kind": "NVIDIA A100-SXM4-80GB",
            "read_memory": lambda: MEMORY,
        }
        self.log = RunLog(
            folder,
            config or LogConfig(),
            **{**settings, **options},
            stream=self.screen,
            clock=lambda: self.now,
        )
        self.log.start(
            "gpt2 on 4 devices",
            ["zero=1: the default"],
            "name  shape",
            {"zero": 1},
            to_dict(RunConfig()),
            start_step=start_step,
            is_new=is_new,
        )

    def write(self, step, seconds, **values):
        self.now += seconds
        self.log.write(step, {"loss": 2.0, **values})

    def lines(self):
        return self.screen.getvalue().splitlines()


def test_the_folder_holds_what_was_planned_and_measured(tmp_path):
    folder = tmp_path / "runs" / "a"
    run = Run(folder)
    run.write(1, 5)
    run.log.close()
    names = sorted(path.name.split(".tfevents")[0] for path in folder.iterdir())
    assert names == ["config.json", "events.out", "metrics.jsonl", "plan.json", "plan.txt"]
    plan = (folder / "plan.txt").read_text()
    assert plan == "gpt2 on 4 devices\n\n- zero=1: the default\n\nname  shape\n"
    assert json.loads((folder / "plan.json").read_text()) == {"zero": 1}
    assert json.loads((folder / "config.json").read_text())["mesh"]["zero"] == 1
    assert run.lines()[:3] == [
        "gpt2 on 4 devices",
        "  - zero=1: the default",
        f"run folder {folder}",
    ]


def test_throughput_leaves_out_the_interval_that_compiled(tmp_path):
    run = Run(tmp_path)
    run.write(1, 30.5)
    run.write(11, 5)
    run.write(21, 10)
    run.log.close()
    first, second, third = read_metrics(tmp_path).train
    assert "tokens_per_second_per_device" not in first
    assert first["first_interval_seconds"] == 30.5
    assert second["step_seconds"] == 0.5
    assert second["compile_seconds"] == 30.0
    assert second["tokens_per_second_per_device"] == 1000 * 2 / 4
    assert second["tflops_per_device"] == 80 * 2 / 4
    assert second["mfu"] == pytest.approx(40 / 312)
    assert third["tokens_per_second_per_device"] == 1000 * 1 / 4
    assert "compile_seconds" not in third
    assert "MFU 12.8%" in run.screen.getvalue()


def test_a_compilation_is_announced_and_timed(tmp_path):
    run = Run(tmp_path)
    with run.log.compiling("the training step"):
        run.now += 12.5
    run.log.close()
    assert run.lines()[-2:] == [
        "compiling the training step ...",
        "compiled the training step in 12.5 s",
    ]


def test_a_long_compilation_says_that_it_still_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("zerojax.training.metrics.runlog.STILL_COMPILING_SECONDS", 0.01)
    run = Run(tmp_path)
    with run.log.compiling("the training step"):
        run.now += 90
        deadline = time.monotonic() + 120
        said = "still compiling the training step, 1:30 so far"
        while said not in run.lines() and time.monotonic() < deadline:
            time.sleep(0.01)
    run.log.close()
    assert said in run.lines()


def test_a_resumed_run_knows_the_loss_it_began_with(tmp_path):
    first = Run(tmp_path)
    first.log.write(1, {"loss": 5.0})
    first.log.close()
    resumed = Run(tmp_path, start_step=1)
    noise = np.random.default_rng(0).lognormal(0, 0.2, 200)
    quiet = [resumed.log.see_loss(step, 1e-4 * x) for step, x in enumerate(noise)]
    assert quiet == [None] * 200
    assert resumed.log.see_loss(200, 1e-3) is None, "ten times the median, 0.02 % of the decrease"
    assert "jumped" in resumed.log.see_loss(201, 0.2)
    resumed.log.close()


def test_time_left_counts_from_the_second_report(tmp_path):
    run = Run(tmp_path)
    run.write(1, 60)
    run.write(11, 5)
    assert "ETA" not in run.lines()[3]
    assert run.lines()[-1].endswith("ETA 0:45")  # 89 steps of half a second
    run.write(100, 1)
    run.log.close()
    assert run.lines()[-1].endswith("ETA 0:00")


def test_evaluation_and_saving_do_not_slow_the_reported_step(tmp_path):
    run = Run(tmp_path)
    run.write(1, 10)
    with run.log.untimed():
        run.now += 7
        run.log.write_eval(1, {"loss": 3.0})
    run.write(11, 5)
    run.log.close()
    metrics = read_metrics(tmp_path)
    assert metrics.train[-1]["step_seconds"] == 0.5
    assert [(e["step"], e["loss"]) for e in metrics.evals] == [(1, 3.0)]
    assert "step   1/100  loss  3.0000  (validation)" in run.lines()
    assert run.lines()[-1].endswith("ETA 1:47")  # but they do take time


def test_precision_chooses_the_peak(tmp_path):
    run = Run(tmp_path, precision="fp32")
    run.write(1, 1)
    run.write(2, 1)
    run.log.close()
    assert read_metrics(tmp_path).train[-1]["mfu"] == pytest.approx(20 / 156)


def test_memory_is_measured_at_most_ten_times_a_second(tmp_path):
    measured = iter(range(100))
    run = Run(tmp_path, read_memory=lambda: {"in_use": next(measured)})
    for step, seconds in enumerate((1.0, 0.01, 0.01, 1.0, 0.2), start=1):
        run.write(step, seconds)
    run.log.close()
    found = [record["memory_in_use"] for record in read_metrics(tmp_path).train]
    assert found == [0, 0, 0, 1, 2]


def test_what_is_not_known_is_not_reported(tmp_path):
    run = Run(
        tmp_path, device_kind="cpu", tokens_per_step=None, flops_per_step=None, read_memory=None
    )
    run.write(1, 1)
    run.write(2, 1)
    run.log.close()
    last = read_metrics(tmp_path).train[-1]
    assert set(last) == {
        "kind", "step", "time", "seconds", "loss", "step_seconds", "compile_seconds"
    }  # fmt: skip
    assert run.lines()[-1] == "step   2/100  loss  2.0000  s/step 1  ETA 1:38"


def test_a_resumed_run_appends_and_says_so(tmp_path):
    first = Run(tmp_path)
    for step in (10, 20, 30):
        first.write(step, 5, grad_norm=1.0)
    first.log.close()
    second = Run(tmp_path, start_step=20)
    second.write(30, 5, grad_norm=2.0)
    second.write(40, 5, grad_norm=2.0)
    second.log.close()
    metrics = read_metrics(tmp_path)
    assert [(m["step"], m["grad_norm"]) for m in metrics.train] == [
        (10, 1.0),
        (20, 1.0),
        (30, 2.0),
        (40, 2.0),
    ]
    assert [start["step"] for start in metrics.starts] == [0, 20]
    assert metrics.train[-1]["compile_seconds"] == 0.0
    assert "resuming after step 20 of 100" in second.lines()


@pytest.mark.parametrize(
    ("reported", "resumed", "every", "missing"),
    [
        ((), 1, 1, (1, 1)),
        ((1, 2, 3), 5, 1, (4, 5)),
        ((1, 2, 3), 3, 1, None),
        ((1, 2, 3, 4, 5), 3, 1, None),  # steps after the checkpoint are repeated
        ((1, 10), 25, 10, (20, 20)),
        ((1, 10), 18, 10, None),
    ],
)
def test_a_resumed_run_says_which_saved_steps_were_not_reported(
    tmp_path, reported, resumed, every, missing
):
    killed = Run(tmp_path, config=LogConfig(every=every))
    for step in reported:
        killed.write(step, 1)
    killed.log.close()
    run = Run(tmp_path, start_step=resumed, config=LogConfig(every=1))
    run.log.close()
    events = [x for x in read_metrics(tmp_path).events if x["event"] == "not_reported"]
    said = [line for line in run.lines() if "metrics were not written" in line]
    assert [(x["first_missing"], x["last_missing"]) for x in events] == [missing] * bool(missing)
    assert len(said) == bool(missing)
    assert all(str(step) in said[0] for step in missing or ())
    again = Run(tmp_path, start_step=resumed)
    again.log.close()
    assert not [line for line in again.lines() if "metrics were not written" in line]


def test_a_new_run_leaves_the_metrics_of_another_aside(tmp_path):
    for steps in ((10, 20, 30), (), (10,)):  # the second failed before it reported
        run = Run(tmp_path, is_new=True)
        for step in steps:
            run.write(step, 5, grad_norm=float(len(steps)))
        run.log.close()
    first, last = (tmp_path / name for name in ("metrics.1.jsonl", "metrics.jsonl"))
    assert sorted(tmp_path.glob("metrics*")) == [first, last]
    assert "the metrics of an earlier run in this folder are now metrics.1.jsonl" not in run.lines()
    metrics = read_metrics(tmp_path)
    assert [start["step"] for start in metrics.starts] == [0]
    assert [(m["step"], m["grad_norm"]) for m in metrics.train] == [(10, 1.0)]
    run = Run(tmp_path, is_new=True)
    assert "the metrics of an earlier run in this folder are now metrics.2.jsonl" in run.lines()
    run.log.close()
    assert first.read_text().count('"train"') == 3


def test_tensorboard_gets_the_same_numbers(tmp_path):
    pytest.importorskip("tensorboard", reason="needs the tensorboard package to read the files")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = Run(tmp_path)
    run.write(1, 5, learning_rate=0.25)
    run.write(2, 2)
    run.log.write_eval(2, {"loss": 3.0})
    run.log.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == [
        "eval/loss",
        "memory/in_use_bytes",
        "memory/peak_bytes",
        "speed/mfu",
        "speed/step_seconds",
        "speed/tflops_per_device",
        "speed/tokens_per_second_per_device",
        "train/learning_rate",
        "train/loss",
    ]
    assert events.Scalars("speed/tokens_per_second_per_device")[0].value == 125.0


def test_numbers_of_numpy_and_jax_are_taken(tmp_path):
    run = Run(tmp_path)
    run.write(1, 1, skipped=jnp.int32(2), grad_norm=np.float32(0.5), learning_rate=jnp.float32(2))
    run.log.close()
    (report,) = read_metrics(tmp_path).train
    assert (report["skipped"], report["grad_norm"], report["learning_rate"]) == (2, 0.5, 2.0)
    assert type(report["skipped"]) is int


def test_tensorboard_can_be_left_out(tmp_path):
    run = Run(tmp_path, config=LogConfig(tensorboard=False))
    run.write(1, 1)
    run.log.close()
    assert not list(tmp_path.glob("events*"))


def test_other_processes_write_and_say_nothing(tmp_path):
    run = Run(tmp_path / "run", process_index=1)
    run.write(1, 1)
    run.log.write_eval(1, {"loss": 1.0})
    run.log.message("hello")
    run.log.close()
    assert run.screen.getvalue() == ""
    assert not (tmp_path / "run").exists()


def test_quiet_still_writes_files(tmp_path):
    run = Run(tmp_path, config=LogConfig(console="quiet"))
    run.write(1, 1)
    run.log.close()
    assert run.screen.getvalue() == ""
    assert len(read_metrics(tmp_path).train) == 1


def test_a_folder_that_cannot_be_written_is_refused_with_a_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write to the run folder .*; choose another"):
        Run(tmp_path / "file" / "run")


def test_a_full_disk_ends_the_file_and_not_the_run(tmp_path, monkeypatch):
    run = Run(tmp_path)
    run.write(1, 1)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(MetricsFile, "write", full)
    run.write(2, 1)
    run.write(3, 1)
    run.log.close()
    warnings = [line for line in run.lines() if line.startswith("warning")]
    assert warnings == [
        "warning: cannot write metrics.jsonl (No space left on device); "
        "training continues without it"
    ]
    assert run.lines()[-1].startswith("step   3/100")


def test_many_reasons_are_cut_short_on_the_screen_only(tmp_path):
    log = RunLog(tmp_path, LogConfig(), total_steps=1, stream=(screen := io.StringIO()))
    log.start("plan", [f"reason {i} " + "word " * 30 for i in range(25)], "", {}, {})
    log.close()
    assert f"  - and 5 more: {tmp_path / 'plan.txt'}" in screen.getvalue()
    assert max(map(len, screen.getvalue().splitlines()[:-2])) <= 100
    assert "reason 24" in (tmp_path / "plan.txt").read_text()


def test_wandb_is_asked_for_by_name(tmp_path, monkeypatch):
    sent = []
    fake = SimpleNamespace(
        init=lambda **options: (
            sent.append(options)
            or SimpleNamespace(
                log=lambda values, step: sent.append((step, values)),
                finish=lambda: sent.append("finished"),
            )
        )
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run = Run(tmp_path / "my_run", config=LogConfig(wandb="zj"))
    run.write(1, 1)
    run.log.close()
    options, report, end = sent
    assert (options["project"], options["name"]) == ("zj", "my_run")
    assert report == (
        1,
        {"train/loss": 2.0, "memory/in_use_bytes": 2**30, "memory/peak_bytes": 2**31},
    )
    assert end == "finished"


def test_wandb_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"log\.wandb: 'zj' needs the package wandb; pip install"):
        Run(tmp_path, config=LogConfig(wandb="zj"))


def test_close_is_final_and_can_be_repeated(tmp_path):
    with RunLog(tmp_path, LogConfig(), total_steps=1, stream=io.StringIO()) as log:
        log.start("plan", [], "", {}, {})
    log.close()
