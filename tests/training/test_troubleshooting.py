"""Rows of docs/troubleshooting.md that no other test has: symptom, then setting."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import linen

import zerojax
from tests.parallel.test_zero_program import lower
from tests.support.small_models import linen_loss, reference_model
from tests.support.trajectories import plan_for, text_batch
from zerojax.config import LogConfig
from zerojax.training.metrics.metric_files import read_metrics
from zerojax.training.metrics.stragglers import ACTIVITIES


def temporaries(**changes) -> int:
    """Bytes that a compiled step takes beside its arguments, of 64 rows on one device."""
    model = {"num_layers": 6, "remat": changes.pop("remat", "none")}

    def batch(index: int) -> dict[str, np.ndarray]:
        return {name: np.tile(rows, (2, 1)) for name, rows in text_batch(index).items()}

    plan = plan_for(reference_model("gpt2", **model), devices=1, batch=batch, **changes)
    return lower(plan).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_microbatches_and_checkpointed_layers_need_less_for_activations():
    plain = temporaries()
    assert temporaries(num_microbatches=8) < 0.4 * plain
    assert temporaries(remat="full") < 0.6 * plain


@pytest.mark.thorough
def test_data_that_are_late_are_seen_as_such(tmp_path):
    """Batches read while the step compiles are there in time; the last ones are late."""

    def late(index: int) -> dict[str, np.ndarray]:
        time.sleep(0.25)
        return text_batch(index)

    log = LogConfig(every=4)
    zerojax.train(reference_model("gpt2"), None, late, steps=12, log=log, run_dir=tmp_path)
    last = read_metrics(tmp_path).train[-1]
    activities = [last[f"spent_{activity}"] for activity in ACTIVITIES]
    assert last["spent_data"] > 0.4 * sum(activities)


class SharedNorm(linen.Module):
    axis_name: str | None

    @linen.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = linen.Embed(64, 16)(tokens)
        x = linen.BatchNorm(use_running_average=False, axis_name=self.axis_name)(x)
        return linen.Dense(64)(x)


def test_an_axis_of_pmap_is_answered_with_what_to_do():
    with pytest.raises(ValueError, match="an axis named 'batch'.*remove the name"):
        plan_for(SharedNorm("batch"), loss=linen_loss)
    plan_for(SharedNorm(None), loss=linen_loss)


PROGRAM = """
import jax
jax.config.update("jax_num_cpu_devices", 2)
import zerojax
from zerojax.config import ModelConfig
model = zerojax.zoo.build_model(ModelConfig(num_layers=1, embed_dim=64, max_seq_len=32), 256)
zerojax.train(model, {"zero": 3}, steps=2, run_dir=None)
"""


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["ZEROJAX_CACHE", "JAX_COMPILATION_CACHE_DIR"])
def test_a_compiled_step_is_found_again_by_the_next_process(tmp_path, variable):
    if variable == "ZEROJAX_CACHE" and jax.__version_info__ < (0, 11):
        pytest.skip("JAX 0.10 may crash on a program for CPUs that was kept")
    unset = ("ZEROJAX_CACHE", "JAX_COMPILATION_CACHE_DIR")
    variables = {name: value for name, value in os.environ.items() if name not in unset}
    variables |= {
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "JAX_PLATFORMS": "cpu",
        "JAX_LOG_COMPILES": "1",
        # A fast machine compiles this in less than the second from which JAX keeps a program.
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        variable: str(tmp_path),
    }

    def found() -> tuple[int, str]:
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=variables,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert result.returncode == 0, result.stderr
        return result.stderr.lower().count("persistent compilation cache hit"), result.stdout

    hits, said = found()
    assert hits == 0
    lines = "".join(said.split())  # the console breaks long ones
    assert (f"{tmp_path}" in lines) == (variable == "ZEROJAX_CACHE"), said
    assert any("step" in file.name for file in tmp_path.rglob("*"))
    assert found()[0] > 0
