"""A bad batch in a real run, and what the page of a run says of spikes, processes and time."""

from __future__ import annotations

import itertools
import json
import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax.config import LogConfig
from zerojax.training.metrics import read_metrics, write_report
from zerojax.training.metrics.report import breakdown

BAD_STEP = 45


def batches(bad):
    """A line with noise; at one step the targets are `bad` times as large."""
    random = np.random.default_rng(0)
    for step in range(1, 61):
        x = random.standard_normal((32, 4)).astype(np.float32)
        y = x.sum(1) + 0.1 * random.standard_normal(32).astype(np.float32)
        yield {"x": x, "y": (bad if step == BAD_STEP else 1) * y.astype(np.float32)}


@pytest.fixture(scope="module")
def run_with_bad_batch(tmp_path_factory):
    """(folder, what was printed) of a run whose 45th batch is spoilt."""

    def train(bad, capsys, *, folder=None, data=None):
        folder = folder or tmp_path_factory.mktemp("run")
        model = (
            lambda key, batch: {"small": np.zeros((4,), np.float32), "wide": np.ones((4, 2))},
            lambda params, batch: (
                ((batch["x"] @ params["small"] - batch["y"]) ** 2).mean()
                + 1e-3 * (params["wide"] ** 2).mean()
            ),
        )
        zerojax.train(
            model,
            {"zero": 1},
            data or batches(bad),
            loss=lambda apply, batch: apply(batch),
            optimizer=optax.sgd(0.05),
            precision="fp32",
            run_dir=folder,
            log=LogConfig(every=10, console="lines", tensorboard=False),
        )
        return folder, capsys.readouterr().out

    return train


def test_a_bad_batch_is_found_between_two_reports_and_named(run_with_bad_batch, capsys):
    folder, printed = run_with_bad_batch(30.0, capsys)
    (line,) = [line for line in printed.splitlines() if " jumped from " in line]
    assert re.match(rf"step {BAD_STEP}: loss [\d.e+]+ jumped from 0\.\d+ at the median", line)
    assert "of its square in 'small'" in line
    (event,) = read_metrics(folder).events
    assert (event["event"], event["step"], event["leaf"]) == ("loss_spike", BAD_STEP, "small")
    assert event["share"] > 0.9
    page = write_report(folder).read_text()
    assert "loss spike" in page
    assert "<h2>Events" in page


def test_a_batch_that_overflows_is_named_where_it_is(run_with_bad_batch, capsys):
    folder, printed = run_with_bad_batch(1e30, capsys)
    (line,) = [line for line in printed.splitlines() if "the update was skipped" in line]
    assert line.startswith(f"step {BAD_STEP}: loss inf, gradient norm inf, first in the gradient")
    (event,) = read_metrics(folder).events
    assert (event["event"], event["step"], event["leaf"]) == ("not_finite", BAD_STEP, "small")


def test_a_batch_that_overflows_right_before_an_error_of_the_data_is_named(
    run_with_bad_batch, capsys, tmp_path
):
    def failing():
        yield from itertools.islice(batches(1e30), BAD_STEP)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        run_with_bad_batch(1e30, capsys, folder=tmp_path, data=failing())
    events = [(event["event"], event["step"]) for event in read_metrics(tmp_path).events]
    assert events == [("not_finite", BAD_STEP), ("failed", BAD_STEP)]


def test_a_run_of_steps_that_are_not_finite_is_said_once_and_ends_as_failed(tmp_path, capsys):
    model = lambda key: {"w": jnp.ones(())}, lambda params, x: params["w"] * x

    def batches(step):
        return {"x": np.full((8, 1), 1.0 if step < 3 else 3e38, np.float32)}

    with pytest.raises(FloatingPointError, match="not finite at 5 reports in a row"):
        zerojax.train(
            model,
            {"zero": 0},
            batches,
            loss=lambda apply, batch: jnp.mean(apply(batch["x"])),
            optimizer=optax.sgd(0.05),
            precision="fp32",
            steps=80,
            run_dir=tmp_path,
            log=LogConfig(every=10, console="lines", tensorboard=False),
        )
    said = [line for line in capsys.readouterr().out.splitlines() if "was skipped" in line]
    unreported = [line for line in said if "since the last report" not in line]
    assert [line.split(":")[0] for line in unreported] == ["step 4"]
    assert len(said) - len(unreported) == 1, "reports themselves count the others"
    events = read_metrics(tmp_path).events
    assert (events[-1]["event"], events[-1]["error"]) == ("failed", "FloatingPointError")
    assert "failed at step 50 of 80" in write_report(tmp_path).read_text()


def test_ordinary_batches_are_not_spoken_of(run_with_bad_batch, capsys):
    folder, printed = run_with_bad_batch(1.0, capsys)
    assert "jumped" not in printed
    metrics = read_metrics(folder)
    assert metrics.events == []
    spent = breakdown(metrics)
    assert spent["step"] > 0
    whole = metrics.ends[0]["seconds"]
    assert sum(spent.values()) == pytest.approx(whole, rel=0.5, abs=1.0)
    page = write_report(folder).read_text()
    assert "<h2>Time by activity" in page
    assert "What happened" not in page


def test_the_page_shows_processes_and_escapes_what_they_are_called(tmp_path):
    rows = [{"kind": "train", "step": s, "loss": 2.0, "seconds": s} for s in (10, 20, 30)]
    rows[0] |= {"spent_data": 1.0, "spent_step": 3.0}
    rows += [
        {"kind": "processes", "step": s, "own_seconds_max": 0.3, "own_seconds_median": 0.01}
        for s in (10, 20)
    ]
    rows.append(
        {"kind": "event", "step": 20, "event": "slow_process", "text": "a <b> c", "host": "<n2>"}
    )
    rows.append({"kind": "end", "step": 30, "spent_save": 4.0})
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert breakdown(read_metrics(tmp_path))["save"] == 4.0
    page = write_report(tmp_path).read_text()
    assert "Own time of processes" in page
    assert "&lt;n2&gt;" in page
    assert "<n2>" not in page
    assert re.search("<td>saving[^<]*</td><td>0:04</td><td>50.0%</td>", page)
