"""The optimizer benchmarks run at tiny sizes and leave what they promise; no time is looked at."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import optimizer
from benchmarks.gpu import optimizer as gpu_optimizer
from pallas_kernels import choice


@pytest.mark.slow
def test_the_references_are_timed_against_optax(tmp_path):
    optimizer.main(["--smoke", "--out", str(tmp_path)])
    record = json.loads((tmp_path / "optimizer.json").read_text())
    assert {row["kind"] for row in record["rows"]} == set(optimizer.BYTES)
    assert {row["way"] for row in record["rows"]} == {"reference", "optax"}
    assert len(record["goals"]) == 3


@pytest.mark.slow
def test_the_part_for_a_gpu_runs_on_a_cpu(tmp_path):
    gpu_optimizer.main(["--smoke", "--out", str(tmp_path)])
    record = json.loads((tmp_path / "optimizer.json").read_text())
    kernels = [row for row in record["rows"] if row["way"] == "kernel"]
    assert len(kernels) == 8  # four kinds, two layouts
    if choice.missing():
        assert all("jax >= 0.11" in row["note"] for row in kernels)
    else:
        assert all(row["max_ulp"] <= 2 for row in kernels)
        assert all(row["launches"] > 0 for row in kernels)
        tables = [row for row in record["rows"] if row["way"] == "kernel, a table of leaves"]
        assert {row["kind"] for row in tables} == set(gpu_optimizer.TABLES)
        assert all(row["max_ulp"] <= 2 for row in tables)
    plain = [row for row in record["rows"] if row["way"] == "XLA, no command buffers"]
    assert {row["kind"] for row in plain} == set(optimizer.BYTES)


def test_the_leaves_are_those_of_gpt2():
    leaves = gpu_optimizer.LAYOUTS["148 leaves"]
    assert len(leaves) == 148
    assert sum(int(np.prod(shape)) for shape in leaves) == 124_439_808
    assert optimizer.num_parameters(gpu_optimizer.LAYOUTS["1 leaf"]) == 1 << 30
