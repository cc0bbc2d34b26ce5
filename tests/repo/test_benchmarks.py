"""Every benchmark runs at tiny sizes and leaves what it promises; nothing here looks at a time."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import pytest

from benchmarks import hand_made, one_bit, sequences
from benchmarks.gpu import collect, largest, offload, summary
from benchmarks.gpu.subjects import make_factory, make_source
from benchmarks.gpu.workloads import choose_workload
from benchmarks.measuring import Sample, interleave, ratio_of
from benchmarks.plans import run_file
from benchmarks.recording import RESULTS, Goal, Record, format_table, save_so_far
from tests.support.marks import needs_compiler
from zerojax import make_mesh, make_plan
from zerojax.config import RunConfig, load
from zerojax.config.loader import ConfigError
from zerojax.hardware import compile_client
from zerojax.plan.counts import model_flops

ROOT = Path(__file__).resolve().parents[2]
GPU_PARTS = {
    "attention",
    "environment",
    "experts",
    "gpt2",
    "llama",
    "stages",
    "twin",
    "command",
    "decoding",
    "target",
    "memory",
    "optimizer",
    "tune",
    "offload",
    "offload_bits",
    "donation",
    "torch",
}


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**environment, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2500,  # the budget of a smoke run of all parts is 2400
    )


def run_benchmark(name: str, folder: Path, *options: str, module: str | None = None) -> dict:
    """The record that the benchmark writes, after checking what all records have."""
    module = module or name
    command = [sys.executable, "-m", f"benchmarks.{module}", "--smoke", "--out", str(folder)]
    result = run(*command, *options)
    assert result.returncode == 0, result.stdout
    record = json.loads((folder / f"{name}.json").read_text())
    assert record["name"] == name
    assert record["smoke"] is True
    assert record["machine"]["cpu"]
    assert record["machine"]["cores"] >= 1
    assert {"jax", "flax", "optax"} <= set(record["machine"]["versions"])
    assert set(record["load_average"]) == {"before", "after"}
    for goal in record["goals"]:
        assert goal["name"] in result.stdout
        # Differences of times or of losses have any sign.
        assert goal["value"] > 0 or name in ("start_up", "one_bit", "wire", "batch_size")
    return record


def column(record: dict, name: str) -> list:
    return [row[name] for row in record["rows"]]


@pytest.mark.slow
def test_overhead(tmp_path):
    record = run_benchmark("overhead", tmp_path)
    ways = column(record, "way")
    assert ways[0] == "bare jit"
    assert {"zerojax.build_step", "zerojax.train", "nnx.jit + nnx.Optimizer"} < set(ways)
    assert column(record, "cpu/bare")[0] == 1
    assert max(column(record, "loss")) - min(column(record, "loss")) < 1e-4
    assert len(record["goals"]) == 2


@pytest.mark.thorough
def test_host_time(tmp_path):
    record = run_benchmark("host_time", tmp_path)
    assert column(record, "way")[0] == "flat list, same step"
    assert all(value > 0 for value in column(record, "cpu_us"))
    assert record["goals"][0]["limit"] == 1.3


@pytest.mark.thorough
def test_batch_copies(tmp_path):
    record = run_benchmark("batch_copies", tmp_path)
    assert column(record, "copied") == [1, 1, 1, 1]
    assert all(goal["met"] for goal in record["goals"])


@pytest.mark.slow
@pytest.mark.multihost
def test_two_processes(tmp_path):
    record = run_benchmark("two_processes", tmp_path, "--stages", "1", "3")
    assert column(record, "zero") == [1, 3]
    assert all(value > 0 for value in column(record, "T2_cpu_ms"))
    assert [goal["limit"] for goal in record["goals"]] == [1.05, 1.05, 1.10, 1.10]


@pytest.mark.thorough
@needs_compiler
def test_foresight(tmp_path):
    record = run_benchmark("foresight", tmp_path)
    assert column(record, "program") == ["h100_gpt2"]
    assert column(record, "predicted_ms")[0] > column(record, "at_best_ms")[0] > 0


@pytest.mark.slow
def test_second_start(tmp_path):
    record = run_benchmark("second_start", tmp_path)
    assert set(column(record, "zero")) == {1}
    assert all(value > 0 for value in column(record, "second_cpu_s"))


@pytest.mark.slow
@needs_compiler
def test_overlap(tmp_path):
    record = run_benchmark("overlap", tmp_path)
    copies = dict(zip(column(record, "way"), column(record, "in_GB"), strict=False))
    assert copies["none"] == 0 < copies["activations host"]


@pytest.mark.slow
def test_state_bytes(tmp_path):
    record = run_benchmark("state_bytes", tmp_path)
    assert column(record, "zero") == [0, 1, 2, 3]
    assert all(goal["met"] for goal in record["goals"])  # bytes, not times: true at any size


@pytest.mark.slow
def test_deterministic(tmp_path):
    record = run_benchmark("deterministic", tmp_path)
    assert column(record, "way") == ["plain", "deterministic"] * 2
    assert all(row["wire_MB"] > 0 for row in record["rows"])


@pytest.mark.slow
def test_checkpoint_cost(tmp_path):
    record = run_benchmark("checkpoint_cost", tmp_path)
    cases = zip(column(record, "arrays"), column(record, "devices"), strict=True)
    assert set(cases) == {(52, 1), (232, 1), (52, 8), (232, 8)}
    for name in ("raw_s", "blocked_s", "total_s", "restore_s", "cpu_s"):
        assert all(value > 0 for value in column(record, name)), name
    assert len([goal for goal in record["goals"] if goal["limit"] == 2.0]) == 4


@pytest.mark.slow
def test_start_up(tmp_path):
    record = run_benchmark("start_up", tmp_path)
    cpu = dict(zip(column(record, "program"), column(record, "cpu_s"), strict=True))
    assert cpu["python"] < cpu["jax, flax.nnx, optax"]
    assert "first step, zerojax.train" in cpu
    assert any("importtime" in note for note in record["notes"])


@pytest.mark.slow
def test_compile_time(tmp_path):
    record = run_benchmark("compile_time", tmp_path)
    assert column(record, "step")[0] == "bare jit"
    assert all(value > 0 for value in column(record, "2_layers_cpu_s"))


@pytest.mark.slow
def test_first_step(tmp_path):
    record = run_benchmark("first_step", tmp_path)
    assert len(record["rows"]) == 6 * 3 * 3
    assert len(record["goals"]) == 6 * 3 * 2
    assert all(row["plan_cpu_s"] > 0 for row in record["rows"] if row["side"] != "expert")
    assert all(value > 0 for value in column(record, "peak_MB"))


@pytest.mark.slow
def test_default_run(tmp_path):
    row = run_benchmark("default_run", tmp_path)["rows"][0]
    assert row["steps"] == 4
    assert row["peak_MB"] > 0
    assert row["validation_loss"] > 0


@pytest.mark.slow
@pytest.mark.skipif(compile_client.missing() is not None, reason="compiles for GPUs")
def test_search(tmp_path):
    row = run_benchmark("search", tmp_path)["rows"][0]
    assert 0 < row["compiled"] < row["candidates"]
    assert row["chosen_step_s"] > 0


@pytest.mark.slow
@pytest.mark.skipif(compile_client.missing() is not None, reason="compiles for GPUs")
def test_questions(tmp_path):
    row = run_benchmark("questions", tmp_path)["rows"][0]
    assert row["chosen_step_s"] > row["at_best_s"] > 0


@pytest.mark.slow
@pytest.mark.skipif(compile_client.missing() is not None, reason="compiles for GPUs")
def test_hand_made(tmp_path):
    record = run_benchmark("hand_made", tmp_path)
    found = {row["setting"]: row["status"] for row in record["rows"]}
    assert found["remat=none num_microbatches=2"] == "fits"
    assert found["remat=none num_microbatches=7"] == "impossible"
    for row in record["rows"]:
        assert (row["status"] == "impossible") == (row["bound_s"] is None)
        assert row["step_s"] is None or row["step_s"] >= row["bound_s"]
    assert record["goals"][0]["limit"] == hand_made.STEP_RATIO


def test_hand_made_settings_are_many_different_ones_of_run_files_with_keys_that_exist():
    for case in hand_made.read_cases(smoke=False):
        assert len(set(case.settings)) == len(case.settings) >= 50
        path, errors = run_file(case.config), []
        for words in case.settings:
            try:
                load(RunConfig, path, list(words))
            except ConfigError as error:
                errors.append(str(error))
        assert all("is not divisible by num_microbatches" in error for error in errors)


def test_the_page_of_plans_has_the_comparison_with_hand_made_settings():
    record = json.loads((RESULTS / "hand_made.json").read_text())
    page = (ROOT / "docs/plan.md").read_text().splitlines()
    goals = {goal["name"].split(":")[0]: goal["value"] for goal in record["goals"]}
    for name, found in record["searches"].items():
        rows = [row for row in record["rows"] if row["config"] == name]
        assert len(rows) >= 50
        count = Counter(row["status"] for row in rows)
        statuses = ("impossible", "does not fit", "ruled out", "fits", "not compiled")
        steps = [row["step_s"] for row in rows if row["status"] == "fits"]
        cells = [
            *(str(count[status]) for status in statuses),
            f"{found['chosen_step_s']:.2f} s",
            f"{min(steps):.2f} s" if steps else "none compiled",
            f"{goals[name]:.3f}",
        ]
        assert f"| `{name}` | {' | '.join(cells)} |" in page


def test_the_page_of_plans_has_the_answers_to_the_questions():
    record = json.loads((RESULTS / "questions.json").read_text())
    page = (ROOT / "docs/plan.md").read_text().splitlines()
    for row in record["rows"]:
        words = [
            w for w in row["chosen"] if not re.fullmatch(r"mesh\.(data=-1|(model|stage)=1)", w)
        ]
        seconds = f"{row['chosen_step_s']:.3g} s | {row['at_best_s']:.3g} s | {row['wall_s']:.0f} s"
        assert f"| {row['question']} | `{' '.join(words)}` | {seconds} |" in page
    fitting = [row["step_s"] for row in record["by_hand"] if row["status"] == "fits"]
    assert (len(record["by_hand"]), len(fitting)) == (20, 7)
    assert record["rows"][0]["chosen_step_s"] == min(fitting)


@pytest.mark.slow
def test_one_bit(tmp_path):
    record = run_benchmark("one_bit", tmp_path)
    sent = dict(zip(column(record, "way"), column(record, "bytes_per_parameter"), strict=True))
    assert 0 < sent["1-bit Adam"] < 0.1 * sent["Adam"]
    assert all(value > 0 for value in column(record, "mean"))


@pytest.mark.slow
def test_wire(tmp_path):
    record = run_benchmark("wire", tmp_path)
    sent = dict(zip(column(record, "way"), column(record, "bytes_per_parameter"), strict=True))
    exact, finest = sent.pop("exact"), sent["gradients int8, weights delta_int4"]
    assert all(size < 0.7 * exact for size in sent.values())
    assert finest == min(sent.values())
    assert all(value > 0 for value in column(record, "loss at 4"))


@pytest.mark.slow
def test_learning(tmp_path):
    record = run_benchmark("learning", tmp_path)
    assert column(record, "step") == [5, 10]
    assert column(record, "plain_work") == [0.5, 1.0]
    assert all(work < 1 for work in column(record, "curriculum_work"))
    assert all(value > 0 for value in column(record, "curriculum_loss"))
    assert all(work < 1 for work in column(record, "layer_drop_work"))
    assert all(value > 0 for value in column(record, "layer_drop_loss"))
    assert record["goals"][1]["value"] <= 1  # one compiled step per length


@pytest.mark.slow
def test_batch_size(tmp_path):
    record = run_benchmark("batch_size", tmp_path)
    assert column(record, "rows") == [4, 8, 8, 8, 8]
    assert column(record, "rule") == ["none", "none", "sqrt", "linear", "ramp"]
    assert column(record, "updates") == [8, 4, 4, 4, 6]
    first, *others = column(record, "loss")
    assert len({first, *others}) == 5
    assert column(record, "minus_small_batch") == [loss - first for loss in [first, *others]]


@pytest.mark.slow
def test_rounding(tmp_path):
    record = run_benchmark("rounding", tmp_path)
    assert column(record, "format") == ["int8", "int4"]
    assert all(value > 0 for value in column(record, "trained_rounded_loss"))


@pytest.mark.slow
def test_mixture(tmp_path):
    record = run_benchmark("mixture", tmp_path)
    assert column(record, "step") == [2, 4, 2, 4]
    assert column(record, "seed") == [0, 0, 1, 1]
    assert all(value > 0 for value in column(record, "mixture_validation_loss"))
    assert all(value > 0 for value in column(record, "dense_validation_loss"))


@pytest.mark.slow
@pytest.mark.parametrize(("part", "planned"), [("memory", "buffers"), ("wire", "messages")])
def test_what_a_pipeline_holds_and_sends(part, planned, tmp_path):
    record = run_benchmark(f"pipeline_{part}", tmp_path, part, module="pipeline")
    assert record["rows"][0][f"planned_{planned}_MB"] > 0


@pytest.mark.slow
def test_how_long_a_pipeline_takes(tmp_path):
    record = run_benchmark("pipeline_bubble", tmp_path, "bubble", module="pipeline")
    assert column(record, "schedule") == ["1f1b", "zb_h1", "1f1b"]
    assert column(record, "work") == ["waiting", "waiting", "computing"]
    assert all(0 < row["bubble"] < 1 for row in record["rows"][:2])
    assert record["rows"][0]["in_step"] == pytest.approx(3 / 7)  # (p-1)/(m+p-1)


@pytest.mark.slow
def test_paged_faults(tmp_path):
    """At least one kill in a pass, one in a sweep and one in an update in the backward pass."""
    words = ["--smoke", "--kills", "3", "--out", str(tmp_path)]
    result = run(sys.executable, "-m", "benchmarks.paged_faults", *words)
    assert result.returncode == 0, result.stdout
    record = json.loads((tmp_path / "paged_faults.json").read_text())
    assert min(row["trials"] for row in record["rows"]) >= 1
    assert column(record, "lost") == [0, 0, 0, 0]
    assert all(goal["met"] for goal in record["goals"])


@pytest.mark.slow
def test_scaling(tmp_path):
    record = run_benchmark("scaling", tmp_path)
    assert column(record, "gpus") == [64]
    assert column(record, "state_GiB") == [pytest.approx(12 * 70.55e9 / 64 / 2**30, rel=0.01)]


def test_the_scaling_page_has_the_numbers_of_the_record():
    record = json.loads((RESULTS / "scaling.json").read_text())
    lines = (ROOT / "docs/scaling.md").read_text().splitlines()
    for row in record["rows"]:
        begin = f"| {row['model']} | {row['gpus']} | {row['sequences_at_a_time'] or 'none fits'} |"
        [line] = [line for line in lines if line.startswith(begin)]
        assert f" {row['state_GiB']:.1f} " in line
        if row["sequences_at_a_time"] is None:
            continue
        hidden = row["expected_wire_s"] / row["expected_s"]
        rate, relative = row["tokens_per_s_per_gpu"], row["relative"]
        for cell in (f"{row['peak_GiB']:.1f}", f"{rate:,.0f}", f"{relative:.2f}", f"{hidden:.0%}"):
            assert f" {cell} |" in line
        assert line.endswith(f" {row['bound_by']} |")
    assert all(goal["met"] for goal in record["goals"])


@pytest.mark.slow
@pytest.mark.multihost
def test_checkpoint_faults(tmp_path):
    """Two kills of one process, one of two, and a flip in a file of values and one in any file."""
    words = ["--smoke", "--kills", "3", "--flips", "2", "--out", str(tmp_path)]
    result = run(sys.executable, "-m", "benchmarks.checkpoint_faults", *words)
    assert result.returncode == 0, result.stdout
    record = json.loads((tmp_path / "checkpoint_faults.json").read_text())
    kills = [row for row in record["rows"] if row["what"].startswith("kills")]
    assert [(row["trials"], row["restored bit for bit"], row["lost"]) for row in kills] == [
        (2, 2, 0),
        (1, 1, 0),
    ]
    flips = [row for row in record["rows"] if row["what"].startswith("flips")]
    assert sum(row["trials"] for row in flips) == 2
    assert all(row["noticed"] == row["file named"] == row["trials"] for row in flips)
    assert all(goal["met"] for goal in record["goals"])


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["1", "0"])
def test_donation_right_after_a_save_is_safe(tmp_path, dispatch):
    """Without waiting for each program, and with; on 1 and on 8 devices."""
    result = run(
        *(sys.executable, "-m", "benchmarks.gpu.donation", "--smoke", "--out", str(tmp_path)),
        JAX_PLATFORMS="cpu",
        JAX_NUM_CPU_DEVICES="8",
        JAX_CPU_ENABLE_ASYNC_DISPATCH=dispatch,
    )
    assert result.returncode == 0, result.stdout
    record = json.loads((tmp_path / "donation.json").read_text())
    assert column(record, "devices") == [1, 8]
    assert column(record, "unequal_arrays") == [0, 0]


def test_an_unknown_benchmark_is_refused_with_the_known_ones():
    result = run(sys.executable, "-m", "benchmarks", "speed")
    assert result.returncode == 2
    assert "no benchmark 'speed'; there are overhead" in result.stdout


def test_the_page_of_optimizers_has_the_losses_by_batch_size():
    record = json.loads((RESULTS / "batch_size.json").read_text())
    page = (ROOT / "docs/optimizers.md").read_text()
    assert len(record["rows"]) == 8
    for row in record["rows"]:
        assert f" {row['loss']:.3f} " in page, row
    assert all(goal["met"] for goal in record["goals"])


def test_pages_have_the_losses_of_a_curriculum_and_of_layer_drop():
    record = json.loads((RESULTS / "learning.json").read_text())
    for way in ("curriculum", "layer_drop"):
        page = (ROOT / f"docs/{way}.md").read_text()
        for row in record["rows"]:
            columns = [
                f"{row[f'{one}_loss']:.3f} | {row[f'{one}_work']:.2f}" for one in ("plain", way)
            ]
            assert f"| {row['step']} | {' | '.join(columns)} |" in page
    assert all(goal["met"] for goal in record["goals"])


def test_the_page_of_communication_has_the_losses_of_signs_and_controls():
    record = json.loads((RESULTS / "one_bit.json").read_text())
    page = (ROOT / "docs/communication.md").read_text()
    rows = [row for row in record["rows"] if row["way"] in one_bit.WAYS]
    assert len(rows) == len(one_bit.WAYS) == 6
    for row in rows:
        assert f" {row['mean']:.3f}" in page, row


def test_the_committed_results_are_measurements():
    paths = list(RESULTS.glob("*.json"))
    assert paths
    for path in paths:
        record = json.loads(path.read_text())
        assert path.stem.startswith(record["name"])  # of a GPU, its card follows
        assert record["smoke"] is False


def test_lengths_of_sequences_are_held_to_their_goals():
    record = json.loads((RESULTS / "sequences.json").read_text())
    found = {goal.name: (goal.value, goal.is_met) for goal in sequences.goals_of(record["rows"])}
    assert found == {goal["name"]: (goal["value"], goal["met"]) for goal in record["goals"]}
    assert len(found) == 3
    short = [{"devices": 8, "tokens": 4096}, {"devices": 8, "tokens": 8192}]
    assert [goal.is_met for goal in sequences.goals_of(short)] == [False, False]


def test_sides_take_turns_and_none_is_always_first():
    order = []

    def side(name):
        def take(steps: int) -> Sample:
            order.append((name, steps))
            return Sample(wall=1.0, cpu=2.0 if name == "a" else 1.0)

        return take

    samples = interleave({"a": side("a"), "b": side("b")}, warm_up=3, steps=5, rounds=2)
    assert order == [("a", 3), ("b", 3), ("a", 5), ("b", 5), ("b", 5), ("a", 5)]
    assert ratio_of(samples["a"], samples["b"], "cpu") == 2
    assert ratio_of(samples["a"], samples["b"], "wall") == 1


def test_a_ratio_is_taken_between_neighbours_in_time():
    disturbed = [Sample(1, 10), Sample(1, 30), Sample(1, 10)]
    other = [Sample(1, 10), Sample(1, 30), Sample(1, 10)]
    assert ratio_of(disturbed, other, "cpu") == 1


def test_goals_have_two_directions():
    assert Goal(name="", value=1.0, limit=1.1).is_met
    assert not Goal(name="", value=1.2, limit=1.1).is_met
    assert not Goal(name="", value=0.9, limit=0.999, at_least=True).is_met
    assert not Goal(name="", value=float("nan"), limit=1.1).is_met


def test_a_table_shows_rows_with_different_columns():
    table = format_table([{"way": "a", "ms": 1.23456}, {"way": "bb", "note": "left out"}])
    assert table.splitlines() == [
        "  way     ms      note",
        "  a    1.235",
        "  bb          left out",
    ]
    assert format_table([]) == "  nothing was measured"


# --- the machine with a GPU -----------------------------------------------------------------------


@pytest.mark.slow
def test_the_gpu_command_runs_every_part_on_a_cpu(tmp_path):
    result = run(
        "bash", "benchmarks/gpu/run.sh", "--smoke", OUT=str(tmp_path), PYTHON=sys.executable
    )
    assert result.returncode == 0, result.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"gpu.json", "gpu.log"}
    parts = collect.read_runs([tmp_path / "gpu.json"])
    assert set(parts) == GPU_PARTS
    assert all(goal["met"] for goal in parts["stages"]["goals"])
    assert all(goal["met"] for goal in parts["attention"]["goals"])
    assert all(goal["met"] for goal in parts["experts"]["goals"])
    assert {row["way"] for row in parts["gpt2"]["rows"]} >= {"bare jit", "zerojax.train"}
    memory = parts["memory"]["rows"]
    assert len({(row["zero"], row["microbatches"], row["remat"]) for row in memory}) == 8
    assert column(parts["memory"], "predicted_MB") == sorted(
        column(parts["memory"], "predicted_MB")
    )
    assert all(row["state_MB"] < row["predicted_MB"] for row in memory)
    assert not [
        row for row in parts["offload"]["rows"] if "note" in row and "torch" not in row["way"]
    ]
    steps = [row["way"] for row in parts["offload"]["rows"] if row["what"] == "step"]
    assert steps == list(offload.TIERS)
    assert all(goal["met"] for goal in parts["offload_bits"]["goals"])
    assert column(parts["command"], "command") == ["train", "eval", "generate"]
    assert all(goal["met"] for goal in parts["tune"]["goals"])
    reasons = [row.get("reason", "") for row in parts["tune"]["rows"]]
    assert not [reason for reason in reasons if "nothing was measured" in reason]
    asked = ["statistics", "update by adamw", "attention by chunked", "attention by mosaic_gpu"]
    assert column(parts["tune"], "what")[:6] == [*asked, "slices of 256", "whole step"]
    rows = collect.rows_of_cache(parts["tune"]["kept"])
    assert {row["choice"] for row in rows} <= {x for row in rows for x in row["ways"].split(" or ")}
    assert result.stdout.rstrip().endswith(summary.summarise(parts).splitlines()[-1].strip())


@pytest.mark.thorough
def test_experts_are_compared_and_timed_and_say_why_there_is_no_kernel(tmp_path):
    record = run_benchmark("experts", tmp_path, module="gpu.experts")
    assert column(record, "way") == ["batched", "loop"] * 3
    assert all(goal["met"] for goal in record["goals"])
    assert "left out: they need an NVIDIA GPU" in record["notes"][0]


@pytest.mark.slow
def test_the_search_for_the_largest_model_tries_every_way(tmp_path):
    record = run_benchmark("largest", tmp_path, module="gpu.largest")
    assert column(record, "way") == list(largest.WAYS)
    assert set(column(record, "outcome")) == {"ok"}
    assert "'nvme': 0.33" in record["rows"][0]["shares"]


@pytest.mark.parametrize("tiers", [("device", "host"), ("device", "host", "nvme"), ("host",)])
@pytest.mark.parametrize("parameters", [1e9, 12e9, 40e9])
def test_shares_fill_the_nearest_tier_first_and_add_up_to_one(tiers, parameters):
    shares = largest.shares_for(tiers, parameters, host=100e9, disk=50e9)
    assert sum(shares.values()) == pytest.approx(1)
    held = {tier: share * largest.STATE_BYTES * parameters for tier, share in shares.items()}
    if "nvme" in held and "host" in tiers:
        assert held["host"] == pytest.approx(100e9)
    if parameters == 1e9:
        assert shares == {tiers[0]: 1}


# Stands in for Python: writes what a part would; then "stages" fails and "memory" never ends.
STUB = """#!/bin/sh
case "$*" in
  *summary* | *collect*) exec {python} "$@" ;;
esac
name=$(echo "$2" | sed 's/.*[.]//')
for last; do :; done
echo '{{"name": "'$name'", "smoke": true, "rows": [], "goals": []}}' > "$last/$name.json"
case "$*" in
  *stages*) echo no such device; exit 7 ;;
  *memory*) echo one row; sleep 60 ;;
esac
"""


def run_stubbed(folder: Path, *parts: str, **variables: str) -> subprocess.CompletedProcess[str]:
    stub = folder / "python"
    stub.write_text(STUB.format(python=sys.executable))
    stub.chmod(0o755)
    script = ("bash", "benchmarks/gpu/run.sh", "--smoke", *parts)
    return run(*script, OUT=str(folder / "out"), PYTHON=str(stub), **variables)


def test_a_failing_part_loses_neither_the_others_nor_what_it_had(tmp_path):
    result = run_stubbed(tmp_path, "stages", "twin", "command")
    assert result.returncode == 1
    assert "no such device" in result.stdout
    assert "failed (7)" in result.stdout
    assert result.stdout.endswith("bash benchmarks/gpu/run.sh --smoke stages\n")
    # Two files, however many parts: of a borrowed machine few may come back.
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"gpu.json", "gpu.log"}
    assert "no such device" in (tmp_path / "out" / "gpu.log").read_text()
    found = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert set(found["parts"]) == {"stages", "twin", "command"}
    assert found["status"]["stages"].startswith("failed (7)")
    assert found["smoke"] is True


@pytest.mark.slow
def test_a_part_that_runs_out_of_time_leaves_what_it_had(tmp_path):
    result = run_stubbed(tmp_path, "memory", BUDGET_SECONDS="16")
    assert result.returncode == 1
    assert "memory: out of time" in result.stdout
    found = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert set(found["parts"]) == {"memory"}
    assert "one row" in (tmp_path / "out" / "gpu.log").read_text()


def test_of_several_runs_the_last_that_ended_well_counts(tmp_path):
    def write(name, status, rows):
        parts = {part: {"smoke": False, "rows": found} for part, found in rows.items()}
        run = {"name": "gpu", "smoke": False, "status": status, "parts": parts}
        (tmp_path / name).write_text(json.dumps(run))
        return tmp_path / name

    first = write(
        "1", {"gpt2": "ok: 9 s", "torch": "out of time: 9 s"}, {"gpt2": [1], "torch": [1]}
    )
    second = write(
        "2", {"gpt2": "failed (1): 1 s", "torch": "ok: 9 s"}, {"gpt2": [2], "torch": [2]}
    )
    found = collect.read_runs([first, second])
    assert {name: record["rows"] for name, record in found.items()} == {"gpt2": [1], "torch": [2]}


def test_what_was_measured_is_written_while_a_benchmark_goes_on(tmp_path, capsys):
    arguments = argparse.Namespace(out=tmp_path, smoke=True)
    rows = [{"way": "a", "ms": 1.5}]
    save_so_far(Record(name="x", rows=rows), arguments, 0.0)
    assert capsys.readouterr().out == "  x: way=a, ms=1.5\n"
    rows.append({"way": "b"})
    save_so_far(Record(name="x", rows=rows), arguments, 0.0)
    assert column(json.loads((tmp_path / "x.json").read_text()), "way") == ["a", "b"]
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.thorough
def test_full_sizes_are_refused_where_there_is_no_gpu(tmp_path):
    script = ("bash", "benchmarks/gpu/run.sh", "environment")
    result = run(*script, OUT=str(tmp_path), PYTHON=sys.executable, JAX_PLATFORMS="cpu")
    assert result.returncode == 1
    assert "found [CpuDevice(id=0)" in result.stdout
    assert result.stdout.endswith(
        "JAX sees no GPU; --smoke shows without one that everything runs\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.log"]


def test_an_unknown_part_is_refused_with_the_known_ones(tmp_path):
    result = run("bash", "benchmarks/gpu/run.sh", "stage", OUT=str(tmp_path))
    assert result.returncode == 2
    assert "no part stage; parts: environment optimizer" in result.stdout


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_arithmetic_of_a_workload_is_what_the_traced_model_asks_for(name):
    workload = choose_workload(name, smoke=True)
    plan = make_plan(
        make_factory(workload),
        make_mesh({"data": 2}, devices=jax.devices()[:2]),
        example_batch=make_source(workload).batch(0),
    )
    assert model_flops(plan) == workload.flops_per_token * workload.tokens_per_step
