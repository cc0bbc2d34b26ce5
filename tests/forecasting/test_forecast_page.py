"""The page of a forecast: what it says, that its numbers add up, and the dictionary beside it."""

import dataclasses
import functools
import json
import re

import pytest

from tests.forecasting.test_search import mixture_plan
from tests.support.forecast_samples import (
    GIB,
    sample_card,
    sample_forecast,
    sample_memory,
    sample_plan,
    sample_row,
)
from tests.support.pipelines import layout_of, plan_of
from zerojax.forecasting.forecast_numbers import FORMULA, Expected, ExpectedItem
from zerojax.forecasting.forecast_page import WIDTH, forecast_dict, forecast_page, round_to_sum

WHY = "the compile-only CUDA client is not installed: pip install 'zerojax[plan]'"


def formula_forecast(**changes):
    memory = sample_memory(compiled=False)
    return sample_forecast(memory=memory, source=FORMULA, why_formula=WHY, **changes)


def pipeline_forecast(**changes):
    """Of a plan with a pipeline, which sends along `stage`."""
    messages = sample_row(kind="collective-permute", axis="stage", wire_bytes=GIB, count=22)
    found = sample_forecast(plan_of(layout_of(layers=(2, 2, 2, 2))), rows=(sample_row(), messages))
    traffic = dataclasses.replace(
        found.traffic, message_wire_bytes=GIB, message_formula_bytes=2 * GIB, **changes
    )
    return dataclasses.replace(found, traffic=traffic)


def context_forecast(**changes):
    """Of a plan whose sequences are split over several devices."""
    heads = sample_row(kind="all-to-all", axis="context", of_attention=True, wire_bytes=GIB)
    found = sample_forecast(rows=(sample_row(), heads))
    traffic = dataclasses.replace(
        found.traffic, attention_wire_bytes=GIB, attention_traced_bytes=2 * GIB, **changes
    )
    return dataclasses.replace(found, traffic=traffic)


def experts_forecast(**changes):
    """Of a plan whose experts are split over several devices."""
    rows = sample_row(kind="all-to-all", axis="expert", wire_bytes=GIB)
    found = sample_forecast(mixture_plan(8), rows=(sample_row(), rows))
    traffic = dataclasses.replace(
        found.traffic, exchange_wire_bytes=GIB, exchange_formula_bytes=2 * GIB, **changes
    )
    return dataclasses.replace(found, traffic=traffic)


NAMES = (
    "fits",
    "too large",
    "formula",
    "one device",
    "small",
    "pipeline",
    "pipeline by formula",
    "context",
    "context by formula",
    "experts",
    "experts by formula",
    "options",
    "roles short of the peak",
)


@functools.cache
def pages():
    crossing = (
        sample_row(crosses_nodes=True, network_bytes=GIB // 2 - 5),
        sample_row(kind="all-to-all", crosses_nodes=True, network_bytes=GIB // 7),
        sample_row(kind="all-reduce", wire_bytes=7),
    )
    wide = sample_plan(devices=64, zero=1, rows=256)
    return {
        "fits": sample_forecast(),
        "too large": sample_forecast(wide, sample_card("h100"), sample_memory(scale=2.2), crossing),
        "formula": formula_forecast(),
        "one device": sample_forecast(sample_plan(devices=1, zero=0)),
        "small": sample_forecast(memory=sample_memory(scale=1e-5)),
        "pipeline": pipeline_forecast(),
        "pipeline by formula": pipeline_forecast(rows=(), wire_bytes=None, data_wire_bytes=None),
        "context": context_forecast(),
        "context by formula": context_forecast(rows=(), wire_bytes=None, data_wire_bytes=None),
        "experts": experts_forecast(),
        "experts by formula": experts_forecast(rows=(), wire_bytes=None, data_wire_bytes=None),
        "options": sample_forecast(options_dropped={"xla_gpu_x": "No such compile option " * 9}),
        "roles short of the peak": sample_forecast(
            memory=dataclasses.replace(sample_memory(), peak=36 * GIB)
        ),
    }


@pytest.fixture(params=NAMES)
def page(request) -> str:
    return forecast_page(pages()[request.param])


def test_every_page_is_looked_at():
    assert tuple(pages()) == NAMES


def test_rows_of_experts_stand_beside_their_formula():
    page = forecast_page(pages()["experts"])
    assert "  all-to-alls along expert send 50.0% of the formula" in page
    assert "experts by formula" in page
    assert len(section(page, "EXPERTS, by formula")) > 3


def section(page: str, title: str) -> list[str]:
    return next(part for part in page.split("\n\n") if part.startswith(title)).splitlines()


def column(lines: list[str], place: int) -> list[float]:
    """The numbers in one column, counted from the label of each row."""
    rows = [re.split(r" {2,}", line.strip()) for line in lines]
    return [float(row[place].replace(",", "")) if row[place] != "-" else 0.0 for row in rows]


@pytest.mark.sampled(4)
def test_the_page_is_plain_and_narrow(page):
    assert page.isascii()
    assert max(map(len, page.splitlines())) <= WIDTH
    assert [line for line in page.splitlines() if line != line.rstrip()] == []


@pytest.mark.sampled(4)
def test_the_memory_table_adds_up(page):
    lines = section(page, "MEMORY")
    rule = next(i for i, line in enumerate(lines) if set(line.strip()) == {"-"})
    for place in range(1, len(re.split(r" {2,}", lines[rule + 1].strip()))):
        shown = column(lines[2:rule], place)
        assert sum(shown) == pytest.approx(column(lines[rule + 1 : rule + 2], place)[0], abs=1e-9)


def test_the_peak_is_what_the_compiler_counts():
    lines = section(forecast_page(sample_forecast()), "MEMORY")
    count = next(line for line in lines if line.startswith("  peak = "))
    arguments, outputs, aliased, temporary = map(float, re.findall(r"\d+\.\d+", count))
    peak = next(line for line in lines if line.startswith("  peak  "))
    total = arguments + outputs - aliased + temporary
    assert total == pytest.approx(float(peak.split()[1]), abs=1e-9)


@pytest.mark.sampled(4)
def test_the_traffic_table_adds_up(page):
    if "one device" in section(page, "TRAFFIC")[0] or "  sum " not in page:
        return
    lines = section(page, "TRAFFIC")[1:]
    header = re.split(r" {2,}", lines[0].strip())
    end = next(i for i, line in enumerate(lines) if line.startswith("  sum "))
    total = re.split(r" {2,}", lines[end].strip())
    places = [(header[5], 1), ("units", 2), ("between nodes", 3)]
    assert ("between nodes" in header) == ("64 x" in page)
    for name, place in places[: 2 + ("between nodes" in header)]:
        shown = column(lines[1:end], header.index(name))
        assert sum(shown) == pytest.approx(float(total[place].replace(",", "")), abs=1e-9)


@pytest.mark.sampled(4)
def test_the_time_table_adds_up(page):
    lines = section(page, "AT BEST")
    times = {line.strip().split("  ")[0]: column([line], 1)[0] for line in lines[2:]}
    longest = max(times["matrix products"], times.get("device memory", 0.0))
    assert times["step"] == pytest.approx(longest + times["wire not hidden"], abs=0.0101)
    assert "not measured" in section(page, "TIME")[0]


def test_the_expected_time_adds_up_and_names_its_longest_parts():
    parts = {"product": 0.0301, "attention": 0.0052, "memory": 0.0177, "wire": 0.0}
    expected = Expected(
        seconds=0.0646,
        **{f"{name}_seconds": seconds for name, seconds in parts.items()},
        host_seconds=0.0116,
        disk_seconds=0.0,
        items=(ExpectedItem(what="model.py:3: " + "x @ w + " * 20, seconds=0.0249),),
        source="measured",
        mfu=0.31,
        tokens_per_second=2e5,
    )
    forecast = sample_forecast()
    estimate = dataclasses.replace(forecast.estimate, expected=expected)
    page = forecast_page(dataclasses.replace(forecast, estimate=estimate))
    assert max(map(len, page.splitlines())) <= WIDTH
    lines = section(page, "EXPECTED")
    end = next(i for i, line in enumerate(lines) if line.startswith("  expected"))
    assert sum(column(lines[1:end], 1)) == pytest.approx(column(lines[end : end + 1], 1)[0])
    assert "  wire" not in [line[:6] for line in lines]  # nothing waits
    assert lines[-1].startswith("  24.90  model.py:3: x @ w")
    assert section(page, "TIME")[2].split()[:2] == ["expected", "64.60"]


def test_the_verdict_comes_first_with_its_bar():
    shown = pages()
    assert "\nFITS: 35.0 GiB of 105.8 GiB available" in forecast_page(shown["fits"])
    refused = forecast_page(shown["too large"])
    assert "\nDOES NOT FIT: " in refused
    bars = [line for line in refused.splitlines() if line.startswith("  [#")]
    assert "|xx" in bars[0]
    assert "  - try mesh.zero=3" in refused
    assert refused.index("DOES NOT FIT") < refused.index("MEMORY")


@pytest.mark.parametrize(
    ("made", "word"),
    [
        (formula_forecast(), "nothing was compiled"),
        (sample_forecast(), "no work"),
        (sample_forecast(gpu=dataclasses.replace(sample_card(), bf16_flops=None)), "dtype"),
    ],
)
def test_a_time_that_cannot_be_expected_is_one_line_with_the_reason(made, word):
    page = forecast_page(made).splitlines()
    [line] = [line for line in page if line.startswith("  expected ")]
    assert line.split()[1] == "-"
    assert word in line
    assert not [line for line in page if line.startswith("EXPECTED")]


def test_a_formula_says_so_and_how_to_compile():
    page = forecast_page(formula_forecast())
    assert f"formulas only: {WHY}" in page
    assert "NOT DECIDED: 15.0 GiB + activations of" in page
    assert "assumption: transfers are hidden" in page
    assert "compiled" not in section(page, "MEMORY")[1]


def test_bytes_without_a_role_are_shown():
    page = forecast_page(pages()["roles short of the peak"])
    assert re.search(r"  not accounted for +0\.96 +-\n", page)


def test_links_and_left_out_options_are_noted():
    page = forecast_page(pages()["too large"])
    assert "50 GB/s per GPU between nodes" in page
    notes = " ".join(line.strip() for line in section(page, "NOTES"))
    assert "as in NCCL" in notes
    assert "send directly to each GPU of another node" in notes
    assert "(8 nodes of 8), mesh data 64" in page
    assert "option xla_gpu_x not used: No such" in forecast_page(pages()["options"])


@pytest.mark.parametrize(
    ("model_flops", "words"),
    [
        (0.79, "30.57 PFLOP on a device, 21% of it recomputed"),
        (0.996, "30.57 PFLOP on a device"),
        (1.0, "30.57 PFLOP on a device"),
    ],
)
def test_what_is_computed_again_is_a_share_of_all_products(model_flops, words):
    """Of 100 products 79 are the model's: 21 are computed again, not the 27 % that 21/79 is."""
    forecast = sample_forecast()
    flops = 30.57e15
    changed = dataclasses.replace(forecast.estimate, flops=flops, model_flops=model_flops * flops)
    page = forecast_page(dataclasses.replace(forecast, estimate=changed))
    assert f" {words}\n" in page


def test_a_pipeline_says_what_it_idles_and_sends():
    page = forecast_page(pages()["pipeline"])
    head = page.split("FITS")[0]
    assert (
        "pipeline 1f1b, bubble 27.3% (15.8% with 16 microbatches), each tick takes 1.00 times"
        in head
    )
    traffic = section(page, "TRAFFIC")
    assert any(re.match(r"  collective-permute +stage +bf16 +22 +2 +1\.00 ", x) for x in traffic)
    assert any(re.match(r"  messages by formula +2\.00 ", line) for line in traffic)
    assert "messages between neighbours: 50.0% of the formula" in page
    assert "25% of it recomputation and idle slots" in page
    by_formula = section(forecast_page(pages()["pipeline by formula"]), "TRAFFIC")
    assert "  messages by formula: 2.0 GiB, 0.98 units" in by_formula


def test_json_keeps_every_number():
    forecast = sample_forecast()
    values = json.loads(json.dumps(forecast_dict(forecast)))
    assert values["memory"]["peak"] == forecast.memory.peak
    assert values["memory"]["roles"][0]["bytes"] == 3 * GIB + 7
    assert values["estimate"]["step_seconds"] == forecast.estimate.step_seconds
    assert values["traffic"]["rows"][0]["wire_bytes"] == forecast.traffic.rows[0].wire_bytes
    assert values["gpu"]["name"] == "h200"
    assert values["verdict"]["fits"] is True
    assert values["plan"]["zero"] == 3


@pytest.mark.parametrize(
    "parts", [[], [0.0], [1.005, 2.005, 3.005], [1 / 3] * 3, [5.0, -2.345, 1.111], [0.004] * 100]
)
def test_rounded_parts_add_up_and_are_off_by_less_than_one_digit(parts):
    shown = round_to_sum(parts, 2)
    assert sum(shown) == pytest.approx(sum(parts), abs=0.0051)
    assert all(abs(a - b) < 0.01 for a, b in zip(shown, parts, strict=True))
