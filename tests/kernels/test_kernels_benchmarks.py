"""The optimizer benchmarks run at tiny sizes and leave what they promise; no time is looked at."""

import gzip
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import optimizer, update_phase
from benchmarks.gpu import optimizer as gpu_optimizer
from benchmarks.gpu.traced import busy_ms, device_events
from benchmarks.recording import RESULTS
from pallas_kernels import choice
from zerojax.hardware import compile_client

MISSING = choice.missing() or compile_client.missing()

REFERENCE = optimizer.Ours(choice.Choice("xla", "to compare with"))


@pytest.mark.slow
def test_the_references_are_timed_against_optax(tmp_path):
    optimizer.main(["--smoke", "--out", str(tmp_path)])
    record = json.loads((tmp_path / "optimizer.json").read_text())
    assert {row["kind"] for row in record["rows"]} == set(optimizer.BYTES)
    assert {row["way"] for row in record["rows"]} == {"reference", "optax"}
    assert len(record["goals"]) == 3


@pytest.mark.gpu_programs
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_the_kernels_of_the_update_phase_move_what_fusions_move(tmp_path):
    update_phase.main(["--smoke", "--out", str(tmp_path)])
    record = json.loads((tmp_path / "update_phase.json").read_text())
    xla, ours, *casts = record["rows"]
    assert (xla["way"], ours["way"]) == ("xla", "mosaic_gpu")
    assert xla["kernels"] == 0
    assert ours["kernels"] == 2 * ours["arrays"]  # statistics and the update
    # Gradients are read twice, parameters and moments read and written: 32 bytes.
    assert ours["bytes_per_parameter"] == pytest.approx(32, rel=1e-3)
    assert ours["bytes_per_parameter"] <= xla["bytes_per_parameter"] * 1.001
    assert all(row["temporary_MB"] < 0.1 for row in (xla, ours))
    check_casts(casts)


def check_casts(rows):
    """What a copy of the weights, left by the update, is worth."""
    moved = {(row["cast"], row["way"]): row["bytes_per_parameter"] for row in rows}
    by_step, into, kept = (moved[name, "xla"] for name in update_phase.CASTS)
    for way in ("xla", "mosaic_gpu"):
        plain, leaves = (moved[name, way] for name in update_phase.UPDATES)
        assert leaves - plain == pytest.approx(2, abs=0.02)
        # One device and stage 3 read 4 bytes less; stages 1 and 2 fill the buckets of their gathers
        # anyway, from masters or from copies.
        assert by_step - (leaves - plain) == pytest.approx(4, abs=0.02)
        assert kept + (leaves - plain) == pytest.approx(into, abs=0.03)


def test_the_committed_update_phase_says_where_kernels_are_less():
    record = json.loads((RESULTS / "update_phase.json").read_text())
    rows = [row for row in record["rows"] if "optimizer" in row]
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    assert all((a["way"], b["way"]) == ("xla", "mosaic_gpu") for a, b in pairs)
    whole = [(a, b) for a, b in pairs if a["arrays"] == 148]
    assert {a["optimizer"] for a, _ in whole} == {name for name, _ in update_phase.CASES}
    for xla, ours in whole:
        # What `auto` says of bytes is what was counted.
        ratio, name = ours["bytes_per_parameter"] / xla["bytes_per_parameter"], ours["optimizer"]
        is_equal = ratio == pytest.approx(1, abs=1e-3)
        assert (name in choice.KERNELS_THAT_WIN) == (ratio < 0.8)
        assert (name in choice.UNDECIDED) == (ratio > 0.8 and not is_equal)
    check_casts([row for row in record["rows"] if "cast" in row])


@pytest.mark.slow
def test_the_part_for_a_gpu_runs_on_a_cpu(tmp_path):
    gpu_optimizer.main(["--smoke", "--out", str(tmp_path)])
    record = json.loads((tmp_path / "optimizer.json").read_text())
    kernels = [row for row in record["rows"] if row["way"] == "kernel"]
    assert len(kernels) == 8  # four kinds, two layouts
    if choice.missing():
        assert all("jax >= 0.11" in row["note"] for row in kernels)
    else:
        for row in kernels:
            # Statistics are sums, which kernel and reference take in different order.
            assert row["max_ulp"] <= (8 if row["kind"] == "stats" else 2), row
        assert all(row["launches"] > 0 for row in kernels)
    plain = [row for row in record["rows"] if row["way"] == "XLA, no command buffers"]
    assert {row["kind"] for row in plain} == {"adamw"}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", sorted(optimizer.BYTES))
def test_several_updates_in_one_program_are_those_of_several_programs(kind):
    shapes = ((3, 5), (7,))
    for way in optimizer.ways_of(kind, shapes, {"ours": REFERENCE}).values():
        grads, state = optimizer.make_gradients(shapes), jax.jit(way.init)()
        one = optimizer.compile_way(way, shapes)
        for count in (1, 2, 3):
            state, new = one(state, grads, jnp.int32(count))
        others = jax.tree.map(jnp.zeros_like, new)
        three = optimizer.compile_way(way, shapes, 3)
        found = three(jax.jit(way.init)(), others, grads, jnp.int32(1))
        pair = [jax.tree.leaves(tree) for tree in ((state, new), found)]
        chex.assert_trees_all_close(*pair, rtol=1e-5)


def test_time_that_is_over_begins_nothing():
    rows, goals = gpu_optimizer.measure_kind("adamw", ((3, 5),), 1e9, smoke=True, ends=0.0)
    assert goals == []
    assert {row["note"] for row in rows if row["way"] in ("XLA", "optax")} == {
        "left out: time is over"
    }


def test_events_of_a_gpu_are_told_from_those_of_the_host(tmp_path):
    def name(kind, pid, tid, what):
        return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": what}}

    def event(pid, tid, start, duration, what="k"):
        return {"ph": "X", "name": what, "pid": pid, "tid": tid, "ts": start, "dur": duration}

    events = [
        name("process_name", 1, 0, "/device:GPU:0"),
        name("process_name", 2, 0, "/host:CPU"),
        name("thread_name", 1, 7, "Stream #7(Compute)"),
        name("thread_name", 1, 8, "XLA Modules"),
        name("thread_name", 2, 7, "Stream #7(Compute)"),
        *(event(1, 7, 5, 2), event(1, 7, 9, 3), event(1, 8, 5, 7), event(2, 7, 1, 1)),
        *(event(1, 7, 6, 4, "MemcpyH2D"), event(1, 7, 8, 10, "MemcpyD2H")),
    ]
    with gzip.open(tmp_path / "x.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    found = device_events(str(tmp_path))
    assert [(one.start, one.duration, one.kind) for one in found] == [
        *((5, 2, "compute"), (9, 3, "compute"), (6, 4, "in"), (8, 10, "out"))
    ]
    microseconds = {name: round(1e3 * time) for name, time in busy_ms(found).items()}
    assert microseconds == {
        "span_ms": 13,
        "in_ms": 4,
        "out_ms": 10,
        "compute_ms": 5,
        "in_and_out_ms": 2,
        "copies_alone_ms": 8,
        "idle_ms": 0,
    }
    with pytest.raises(FileNotFoundError, match="no trace"):
        device_events(str(tmp_path / "empty"))


def test_the_leaves_are_those_of_gpt2():
    leaves = gpu_optimizer.LAYOUTS["148 leaves"]
    assert len(leaves) == 148
    assert sum(int(np.prod(shape)) for shape in leaves) == 124_439_808
    assert optimizer.num_parameters(gpu_optimizer.LAYOUTS["1 leaf"]) == 1 << 30
