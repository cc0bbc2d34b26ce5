"""Real sweeps: equal to training straight through, one compiled step, killed and continued."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zerojax.checkpoint.inspection import saved_steps
from zerojax.training.metrics import read_metrics

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
RUN = """\
model: {num_layers: 1, embed_dim: 16, num_heads: 2, max_seq_len: 16, dropout: 0.1}
data: {seq_len: 16}
global_batch_size: 8
cpu_devices: 2
steps: 8
eval_every: null
eval_batches: 2
checkpoint: {every: 3}
log: {every: 1}
sweep:
  eta: 2
  trials: 4
  axes:
    optimizer.learning_rate: [3.0e-3, 3.0e-2]
    optimizer.beta2: [0.9, 0.99]
    seed: [0, 1]
"""


def start(folder: Path, *words: str, file: str = RUN) -> subprocess.Popen[str]:
    """A command in a folder, with a cache of compiled programs in it."""
    (folder / "run.yaml").write_text(file)
    cache = {"ZEROJAX_CACHE": str(folder / "cache"), "JAX_PLATFORMS": "cpu"}
    # conftest.py disables most optimizations; here they run, since they must not change a bit.
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "zerojax", *words],
        cwd=folder,
        env={**kept, "PYTHONPATH": str(ROOT), **cache},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ran(folder: Path, *words: str, file: str = RUN) -> str:
    process = start(folder, *words, file=file)
    told, errors = process.communicate(timeout=900)
    assert process.returncode == 0, errors
    return told


def compiled_steps(folder: Path) -> int:
    """The training steps that were compiled, as JAX's cache has them; an evaluation is another."""
    return len(list((folder / "cache").rglob("jit_step-*-cache")))


def fingerprints(run: Path) -> dict[str, str]:
    """Fingerprints of every array of a run's last checkpoint."""
    saved = max(saved_steps(run / "checkpoints"), key=lambda one: one.step)
    assert saved.metadata is not None
    return dict(saved.metadata.fingerprints)


def results(folder: Path) -> dict[str, dict]:
    path = folder / "runs/run-sweep/trials.json"
    return json.loads(path.read_text())["results"] if path.exists() else {}


def steps_taken(run: Path) -> list[int]:
    """The steps of a run as its metrics have them, also those that were repeated."""
    rows = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # a killed process may leave half a line
            rows.append(json.loads(line))
    return [row["step"] for row in rows if row["kind"] == "train"]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("swept")
    return folder, ran(folder, "sweep", "run.yaml")


def test_all_trials_share_one_compiled_step(swept):
    folder, told = swept
    assert compiled_steps(folder) == 1
    runs = folder / "runs/run-sweep"
    found = results(folder)
    assert sorted(map(len, found.values())) == [1, 1, 2, 3]
    for number, rungs in found.items():
        assert steps_taken(runs / f"{int(number):03d}") == [*range(1, max(map(int, rungs)) + 1)]
    assert "The best run is in runs/run-sweep/" in told
    assert "finished" in (runs / "trials.html").read_text()


def test_a_survivor_has_the_state_of_a_run_without_interruption(swept):
    """`zerojax train`, whose step has its numbers as constants, and takes all steps at once."""
    folder, _ = swept
    found = results(folder)
    best = next(number for number, rungs in found.items() if "8" in rungs)
    trial = folder / f"runs/run-sweep/{int(best):03d}"
    settings = json.loads((trial / "config.json").read_text())
    words = [
        f"optimizer.{name}={settings['optimizer'][name]}" for name in ("learning_rate", "beta2")
    ]
    ran(folder, "train", "run.yaml", *words, f"seed={settings['seed']}", "run_dir=straight")
    assert fingerprints(folder / "straight") == fingerprints(trial)
    losses = [
        [(row["step"], row["loss"]) for row in read_metrics(run).train]
        for run in (folder / "straight", trial)
    ]
    assert losses[0] == losses[1]
    evaluated = read_metrics(folder / "straight").evals[-1]["loss"]
    assert evaluated == found[best]["8"]["loss"]


def test_a_sweep_killed_ten_times_has_the_same_ranking_and_repeats_no_finished_rung(
    swept, tmp_path
):
    expected = results(swept[0])
    (tmp_path / "cache").symlink_to(swept[0] / "cache")
    runs = tmp_path / "runs/run-sweep"
    kills = (0, 0, 1, 1, 2, 3, 4, 5, 5, 6)  # each after so many results; twice: early in a start
    for number, wanted in enumerate(kills):
        process = start(tmp_path, "sweep", "run.yaml")
        deadline = time.monotonic() + 900
        while sum(map(len, results(tmp_path).values())) < wanted:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep((0.4, 2.5, 0.1)[number % 3])  # in the middle of a trial, or before it
        process.kill()
        process.communicate()
        before = results(tmp_path)
        done = {n: max(map(int, rungs)) for n, rungs in before.items()}
        written = {n: len(steps_taken(runs / f"{int(n):03d}")) for n in done}
    ran(tmp_path, "sweep", "run.yaml")
    assert results(tmp_path) == expected
    for number, first in written.items():
        later = steps_taken(runs / f"{int(number):03d}")[first:]
        assert all(step > done[number] for step in later)
    repeated = 0
    for number, rungs in expected.items():
        trial = f"runs/run-sweep/{int(number):03d}"
        steps = steps_taken(tmp_path / trial)
        assert max(steps) == max(map(int, rungs))
        repeated += len(steps) - len(set(steps))
        assert fingerprints(tmp_path / trial) == fingerprints(swept[0] / trial)
    assert repeated <= len(kills) * 3  # steps between two checkpoints


def test_without_validation_data_trials_are_ranked_on_the_same_training_rows(tmp_path):
    """Losses that are not finite rank last; here the rate is far too high for one trial."""
    file = RUN.replace("data: {", "data: {validation_fraction: 0, ")
    axes = "sweep.axes={optimizer.name: [sgd], optimizer.learning_rate: [1e-3, 1e30]}"
    words = [axes, "optimizer.clip_norm=null", "optimizer.warmup_steps=0", "steps=4"]
    told = ran(tmp_path, "sweep", "run.yaml", *words, file=file)
    assert "training loss without dropout" in told
    found = results(tmp_path)
    assert found["1"]["2"]["loss"] is None
    assert found["1"]["2"]["reason"]
    assert "4" in found["0"]
    assert "4" not in found["1"]
