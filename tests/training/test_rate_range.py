"""`zerojax lr-test`: losses at growing rates, from a run's checkpoint, which stays as it is."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest

from tests.support.refusals import refused
from zerojax.cli import main
from zerojax.config import RunConfig, load
from zerojax.training.rate_range import RateTest, find_rate
from zerojax.training.run_file import run_from_config

TINY = [
    *("cpu_devices=8", "model.num_layers=1", "model.embed_dim=16", "model.num_heads=2"),
    *("data.seq_len=16", "model.max_seq_len=16", "global_batch_size=8", "zero=3", "eval_every=4"),
]


def config_of(folder: Path, *words: str) -> RunConfig:
    return load(
        RunConfig, None, [*TINY, f"run_dir={folder}", "log.every=1", "log.console=quiet", *words]
    )


def contents(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.thorough
def test_it_begins_at_the_checkpoint_and_changes_nothing(tmp_path):
    """Its first loss has the bits of the run's own next loss, since that step's rate comes later.

    The second loss is that of a run that goes on with the test's first rate.
    """
    steps, low, high = 20, 1e-4, 1e-2
    run_from_config(config_of(tmp_path, "steps=4"))
    before = contents(tmp_path)
    found = find_rate(config_of(tmp_path, "steps=4"), low=low, high=high, steps=steps)
    assert contents(tmp_path) == before
    assert found.first_step == 4
    expected = low * (high / low) ** (np.arange(steps) / (steps - 1))
    np.testing.assert_allclose(found.rates, expected, rtol=1e-5)  # float32 exp
    more = dataclasses.replace(config_of(tmp_path).optimizer, learning_rate=low, warmup_steps=0)
    more = dataclasses.replace(more, schedule="constant")
    own = run_from_config(dataclasses.replace(config_of(tmp_path, "steps=6"), optimizer=more))
    losses = [one["loss"] for one in own.history]
    assert [one["step"] for one in own.history] == [5, 6]
    assert found.losses[0] == losses[0]
    # the rate of the run is a constant, that of the test an exponential in float32
    np.testing.assert_allclose(found.losses[1], losses[1], rtol=1e-6)
    own.close()


@pytest.mark.thorough
def test_it_ends_where_the_loss_diverges(tmp_path, capsys):
    out = tmp_path / "rates.html"
    words = [*TINY, f"run_dir={tmp_path / 'run'}", "optimizer.name=sgd", "clip_norm=null"]
    options = ["--low", "1e-3", "--high", "1e6", "--steps", "60", "--out", str(out)]
    assert main(["lr-test", *words, *options]) == 0
    told = capsys.readouterr().out
    assert "optimizer.learning_rate=" in told
    assert "60 steps after" not in told
    assert "<svg" in out.read_text()
    assert not (tmp_path / "run").exists()


def falling(*losses: float | None) -> RateTest:
    rates = tuple(1e-4 * 10**number for number in range(len(losses)))
    return RateTest(first_step=0, rates=rates, losses=losses, smoothed=losses)


@pytest.mark.parametrize(
    ("losses", "steepest", "suggestion"),
    [
        pytest.param((5.0, 4.9, 3.0, 2.5, 9.0), 1, 1e-2, id="a valley"),
        pytest.param((5.0, 4.0, 3.0, None), 0, 1e-3, id="not finite at the end"),
        pytest.param((5.0, 4.0, 2.0, 1.0), 1, None, id="it still falls"),
        pytest.param((5.0, 6.0, 7.0), None, None, id="it only rises"),
        pytest.param((None, None), None, None, id="nothing is finite"),
    ],
)
def test_the_suggestion_is_a_tenth_of_the_rate_with_the_lowest_loss(losses, steepest, suggestion):
    found = falling(*losses)
    assert found.steepest == steepest
    assert found.suggestion == (None if suggestion is None else pytest.approx(suggestion))
    remedy = "learning_rate" if suggestion else "--"
    assert remedy in found.describe()


@pytest.mark.parametrize(
    ("words", "options", "value", "remedy"),
    [
        ([], {"low": 1.0, "high": 0.1}, "low=1", "above"),
        ([], {"steps": 3}, "steps=3", "20"),
        (["mesh.offload.opt_state=nvme"], {}, "files", "opt_state=host"),
        (["optimizer.scaling=linear", "optimizer.base_batch=4"], {}, "linear", "base_batch=8"),
    ],
)
def test_what_cannot_be_tested_is_refused(tmp_path, words, options, value, remedy):
    config = config_of(tmp_path, *words)
    refused(lambda: find_rate(config, **options), value, [remedy], error=ValueError)
