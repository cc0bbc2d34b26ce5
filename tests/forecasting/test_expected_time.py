"""Expected times: schedules that are replayed by hand, and the programs that cards have run."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

import zerojax
from benchmarks import foresight
from benchmarks.foresight import FOLDER, MEMORY_WITHIN, WITHIN, memory_rows, programs
from benchmarks.gpu.prediction import predict_step
from benchmarks.recording import RESULTS
from tests.support.forecast_samples import sample_forecast, sample_plan
from zerojax.forecasting.expected_time import expected_time
from zerojax.forecasting.forecast_numbers import ALLOCATOR_BYTES, Expected
from zerojax.forecasting.forecast_page import forecast_page
from zerojax.forecasting.hlo import find_collectives, find_overlap, read_program
from zerojax.forecasting.hlo.timeline import read_timeline
from zerojax.forecasting.replay import replay
from zerojax.hardware.gpus import find_gpu, gpu_names
from zerojax.hardware.gpus.achieved import HOST_SHARE, achieved_rates
from zerojax.hardware.machine_rates import MeasuredDevice, MeasuredLink, MeasuredNode, keep_rates

RECORDED = {
    row["program"]: row["predicted / measured"]
    for row in json.loads((RESULTS / "foresight.json").read_text())["rows"]
    if "predicted_ms" in row
}
"""{program: its expected time divided by the measured one}, as recorded."""
NO_WORSE = 0.005
WIRE, IN, OUT = ("wire", 4.0), ("in", 3.0), ("out", 3.0)
TRANSFERS = {("collective", 0): WIRE, ("host copy", 0): IN, ("host copy", 1): OUT}


def work(seconds):
    return ["kernel", "fusion", 1, 0, 0.0, seconds, 0, 0]


def start(done, kind="collective", index=0):
    return ["start", done, kind, index]


def wait(done):
    return ["wait", done]


@pytest.mark.parametrize(
    ("timeline", "seconds", "waited"),
    [
        ([work(2), work(3)], 5, 0),  # kernels add
        ([start("a"), wait("a"), work(2)], 6, 4),  # nothing between start and wait
        ([start("a"), work(3), wait("a")], 4, 1),  # three of four seconds are hidden
        ([start("a"), work(5), wait("a")], 5, 0),
        # One link carries one transfer at a time: five seconds of work do not hide eight of wire.
        ([start("a"), start("b"), work(5), wait("a"), wait("b")], 8, 3),
        # Links of both directions do not wait for each other.
        ([start("i", "host copy", 0), start("o", "host copy", 1), wait("i"), wait("o")], 3, 3),
        ([["loop", 10, [work(1), start("a"), wait("a")]]], 50, 40),
        # Pipelined: each iteration waits for what the one before it started.
        ([start("a"), ["loop", 10, [wait("a"), start("a"), work(5)]], wait("a")], 54, 4),
        ([start("a"), ["loop", 10, [wait("a"), start("a"), work(3)]], wait("a")], 44, 14),
        ([["loop", 4, [["loop", 5, [work(1)]], work(2)]]], 28, 0),
        ([["loop", 1, [work(3)]], ["loop", 0, [work(9)]]], 3, 0),
        ([["branches", [None, None], [[work(2)], [work(5)]]]], 5, 0),  # the longest
        ([["branches", [0.75, 0.25], [[work(2)], [work(6)]]]], 3, 0),  # the mean over layers
        ([start("never"), work(1)], 4, 3),  # a transfer that nothing waits for ends with the step
    ],
)
def test_a_schedule_is_replayed(timeline, seconds, waited):
    found = replay(
        timeline,
        kernel=lambda entry: entry[2] * entry[5],
        transfer=lambda kind, index: TRANSFERS[kind, index],
    )
    assert found.seconds == pytest.approx(seconds)
    assert sum(found.waited.values()) == pytest.approx(waited)
    assert found.busy + sum(found.waited.values()) == pytest.approx(found.seconds)


PROGRAM = """HloModule m, is_scheduled=true, num_partitions=2

%copied (p: f32[4,8], i: s32[]) -> f32[1,8] {
  %p = f32[4,8] parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = f32[1,8] dynamic-slice(%p, %i, %zero), dynamic_slice_sizes={1,8}, \
backend_config={"dynamic_slice_config":{"loop_index":"0"}}
}

%added (a: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8] parameter(0)
  ROOT %sum = f32[8,8] add(%a, %a)
}

ENTRY %main (x: f32[8,16], w: f32[16,8], s: f32[4,8], n: s32[]) -> f32[16,16] {
  %x = f32[8,16] parameter(0)
  %w = f32[16,8] parameter(1)
  %s = f32[4,8] parameter(2)
  %n = s32[] parameter(3)
  %g = (f32[8,16], f32[16,16]) all-gather-start(%x), replica_groups={{0,1}}, \
use_global_device_ids=true, channel_id=1, dimensions={0}
  %product = f32[8,8] dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %again = f32[8,8] fusion(%product), kind=kLoop, calls=%added
  %once = f32[8,8] fusion(%again), kind=kLoop, calls=%added
  %row = f32[1,8] fusion(%s, %n), kind=kLoop, calls=%copied
  ROOT %d = f32[16,16] all-gather-done(%g)
}
"""


def test_a_program_becomes_kernels_and_transfers_in_the_order_of_its_schedule():
    program = read_program(PROGRAM)
    found = find_collectives(program, 2)
    overlap = find_overlap(program, found)
    timeline = read_timeline(program, found, [], overlap, name_of=lambda _: 0)
    assert timeline == [
        ["start", "d", "collective", 0],
        ["kernel", "product", 1, 2 * 8 * 16 * 8, 0.0, 512 + 512 + 256, 0, 0],
        ["kernel", "fusion", 2, 0, 0.0, 256 + 256, 0, 0],
        ["kernel", "copy", 1, 0, 0.0, 32 + 32 + 4, 0, 0],
        ["wait", "d"],
    ]


def expected(
    facts: dict, card: str, in_pass: float = 0.0, after: float = 0.0, link: float = 0.0
) -> Expected | None:
    return expected_time(
        facts,
        find_gpu(card),
        {"data": 1},
        "bfloat16",
        folder=None,
        disk_in_pass=in_pass,
        disk_after=after,
        link_after=link,
        model_flops=1.0,
        model_peak=1.0,
        tokens=None,
    )


def test_a_program_without_costs_has_no_expected_time():
    facts = {"timeline": [], "places": [], "collectives": [], "host_copies": []}
    assert expected(facts, "h200") is None


def test_files_are_hidden_by_the_program_but_not_those_of_an_update_after_it():
    facts = json.loads((FOLDER / f"{programs()[0].name}.json").read_text())
    alone = expected(facts, "h200")
    half, twice = 0.5 * alone.seconds, 2 * alone.seconds
    assert expected(facts, "h200", in_pass=half).seconds == alone.seconds
    assert expected(facts, "h200", in_pass=twice).seconds == twice
    found = expected(facts, "h200", in_pass=half, after=half)
    assert found.seconds == alone.seconds + half
    assert found.disk_seconds == pytest.approx(half)
    # Half of the program is the link of the update, beside which the files of the passes wait.
    found = expected(facts, "h200", in_pass=twice, after=2 * alone.seconds, link=half)
    assert found.seconds == pytest.approx(twice + 2 * alone.seconds)
    assert expected(facts, "h200", in_pass=half, after=half, link=half).seconds == alone.seconds


@pytest.mark.parametrize("program", programs(), ids=lambda one: one.name)
def test_a_program_that_a_card_ran_takes_the_expected_time(program):
    """Facts of the compiled programs are kept, so a change of rates or of the replay shows here."""
    facts = json.loads((FOLDER / f"{program.name}.json").read_text())
    found = expected(facts, program.card)
    assert found is not None
    ratio = 1e3 * found.seconds / program.row["step_ms"]
    assert abs(ratio - 1) <= abs(RECORDED[program.name] - 1) + NO_WORSE


def test_a_prediction_is_of_the_program_that_runs():
    """On CPUs: what a GPU compiles is read in the same way."""
    plan = zerojax.make_plan(
        (lambda key: {"w": jnp.ones((64, 64))}, lambda params, x: x @ params["w"]),
        zerojax.make_mesh({"data": 1}, devices=jax.devices()[:1]),
        example_batch={"x": jnp.ones((32, 64)), "y": jnp.ones((32, 64))},
        loss=lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2),
        precision="bf16",
    )
    step = zerojax.build_step(plan)
    assert predict_step(plan, step) is None, "no card describes a CPU"
    found = predict_step(plan, step, find_gpu("h200"))
    assert found["expected_ms"] > found["at_best_ms"] > 0
    assert (found["card"], found["jax"]) == ("h200", jax.__version__)
    assert found["memory_MB"] > ALLOCATOR_BYTES / 1e6
    json.dumps(found)


def test_a_prediction_that_fails_loses_no_measurement():
    class Step:
        def trace(self, *_):
            raise NotImplementedError("no such program")

    assert "no such program" in predict_step(sample_plan(), Step(), find_gpu("h200"))["note"]


def test_what_a_run_foresaw_is_shown_beside_the_prediction_of_today(tmp_path, monkeypatch):
    foreseen = {"expected_ms": 45.0, "commit": None, "jax": "0.11.2", "source": "rates of mine"}
    part = {
        "rows": [{"way": "one", "step_ms": 50.0}, {"way": "other", "step_ms": 40.0}],
        "predictions": {"one": foreseen, "other": {"note": "it failed"}},
    }
    (tmp_path / "gpu_h200.json").write_text(json.dumps({"parts": {"gpt2": part}}))
    monkeypatch.setattr(foresight, "RESULTS", tmp_path)
    one, other = (
        foresight.row_of(foresight.Measured("h200", "gpt2", way, "gpt2"), 0.04, 0.02)
        for way in ("one", "other")
    )
    assert (one["predicted / measured"], one["foreseen / measured"]) == (0.8, 0.9)
    assert "0.11.2" in one["foreseen by"]
    assert set(one) - set(other) == {"foreseen_ms", "foreseen / measured", "foreseen by"}


def test_the_recorded_times_are_near_the_measured_ones():
    """One is not: on the H100 copies in both directions at once took longer than its link needs."""
    far = [name for name, ratio in RECORDED.items() if abs(ratio - 1) > WITHIN]
    assert far == ["h100_offload_update_in_the_backward_pass"]


@pytest.mark.parametrize("row", memory_rows(), ids=lambda row: row["program"])
def test_a_program_that_a_card_ran_takes_the_expected_memory(row):
    assert row["predicted / measured"] == pytest.approx(1, abs=MEMORY_WITHIN)


def keep_rates_of_an_h200() -> None:
    kind = "NVIDIA H200"
    keep_rates(MeasuredDevice(device_kind=kind, product_flops=600e12, copy_bandwidth=4e12))
    keep_rates(MeasuredNode(device_kind=kind, bandwidth=300e9))
    keep_rates(MeasuredLink(device_kind=kind, to_device=50e9, to_host=40e9, both=110e9))


@pytest.mark.parametrize(
    ("card", "changes", "rates"),
    [
        # Products, device memory, between GPUs, host memory both ways; of the H200 as measured
        # here, of other cards not.
        ("h200", {}, (600e12, 4e12, 300e9, 110e9)),
        ("h100", {}, (769.9e12, 3001e9, 0.8 * 450e9, 85.5e9)),
        ("l40s", {}, None),
        # What the user states counts before what was measured here.
        ("h200", {"node_gb_per_s": 100}, (600e12, 4e12, 80e9, 110e9)),
        ("h200", {"host_gb_per_s": 20}, (600e12, 4e12, 300e9, 2 * HOST_SHARE * 20e9)),
        (
            "h200",
            {"measured": {"product_tflops": 500, "copy_gb_per_s": 3000}},
            (500e12, 3e12, 0.8 * 450e9, 2 * HOST_SHARE * 64e9),
        ),
    ],
)
def test_rates_of_this_machine_come_first(card, changes, rates, tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path))
    before = achieved_rates(find_gpu(card, changes))
    keep_rates_of_an_h200()
    found = achieved_rates(find_gpu(card, changes))
    if rates is None:
        assert found == before
        return
    reached = found.card
    assert (
        reached.bf16_flops,
        reached.memory_bandwidth,
        reached.node_bandwidth,
        found.host_both,
    ) == pytest.approx(rates)
    assert ("this machine" in found.source) == (rates[0] == 600e12)


def test_the_page_says_whose_rates_they_are(tmp_path, monkeypatch):
    facts = json.loads((FOLDER / "h200_gpt2.json").read_text())
    before = expected(facts, "h200")
    monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path))
    keep_rates_of_an_h200()
    found = expected(facts, "h200")
    assert before is not None
    assert found is not None
    assert found.product_seconds > 1.1 * before.product_seconds
    made = sample_forecast()
    estimate = dataclasses.replace(made.estimate, expected=found)
    page = forecast_page(dataclasses.replace(made, estimate=estimate)).splitlines()
    [title] = [line for line in page if line.startswith("EXPECTED")]
    assert "this machine" in title
    assert max(map(len, page)) <= 100


@pytest.mark.parametrize("name", gpu_names())
def test_no_card_reaches_more_than_was_published(name):
    gpu = find_gpu(name)
    reached = achieved_rates(gpu)
    peaks = [gpu.peak_flops("bfloat16"), gpu.peak_flops("float32")]
    mine = [reached.card.peak_flops("bfloat16"), reached.card.peak_flops("float32")]
    for peak, of_card in zip(peaks, mine, strict=True):
        assert (peak is None) == (of_card is None)
        assert peak is None or of_card < peak
    assert reached.fusion_bandwidth < reached.card.memory_bandwidth < gpu.memory_bandwidth
    assert reached.host_both <= 2 * reached.card.host_bandwidth < 2 * gpu.host_bandwidth


def test_attention_gets_faster_with_the_number_of_keys():
    reached = achieved_rates(find_gpu("h100"))
    shares = [reached.attention_share(keys) for keys in (16, 1024, 2048, 4096, 32768, 10**6)]
    assert shares == sorted(shares)
    assert shares[0] == shares[1]
    assert shares[-1] == shares[-2] < 1
