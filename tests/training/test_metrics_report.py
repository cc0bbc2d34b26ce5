"""The page about a run is complete, self-contained and true to metrics.jsonl."""

from __future__ import annotations

import io
import json
import math
import re
from html.parser import HTMLParser

import pytest

from tests.support.small_models import reference_model
from zerojax.config import LogConfig, RunConfig, to_dict
from zerojax.models.adapt import as_loss, as_model
from zerojax.models.losses import NATS_PER_TOKEN, loss_unit
from zerojax.schedules import make_schedule
from zerojax.schedules.schedule_table import format_cell
from zerojax.training.metrics import RunLog, read_metrics, write_report
from zerojax.training.metrics.charts import Chart, Series, draw, log_ticks, nice_ticks, smooth, thin
from zerojax.training.metrics.comparison import write_comparison
from zerojax.training.metrics.report import make_charts

MEMORY = {"source": "host RSS", "in_use": 2**30, "peak": 2**31, "limit": 2**33}


def make_run(
    folder,
    *,
    steps=200,
    until=None,
    losses=None,
    name="plan of <b>this</b> run",
    plan=None,
    loss_unit=None,
    events=(),
    spent=None,
    spent_at_end=None,
):
    times = [0.0]
    log = RunLog(
        folder,
        LogConfig(console="quiet", tensorboard=False),
        total_steps=steps,
        tokens_per_step=512,
        loss_unit=loss_unit,
        flops_per_step=1e9,
        num_devices=8,
        device_kind="cpu",
        read_memory=lambda: MEMORY,
        stream=io.StringIO(),
        clock=lambda: times[0],
    )
    log.start(name, ["zero=1: the default"], "name & shape", plan or {}, to_dict(RunConfig()))
    for step in range(1, (until or steps) + 1):
        times[0] += 0.5
        loss = losses[step - 1] if losses else 2 + 4 * math.exp(-step / 30)
        values = {"loss": loss, "grad_norm": 1.0, "learning_rate": 1e-3, "skipped": 0}
        log.write(step, values, spent)
        if step % 50 == 0:
            log.write_eval(step, {"loss": loss + 0.1})
    for kind, step, text in events:
        log.event(kind, step, text)
    if spent_at_end is not None:
        log.end(steps, {"save": spent_at_end})
    log.close()
    return folder


class Tags(HTMLParser):
    """Checks that every tag is closed, and collects what the page would load."""

    def __init__(self, page):
        super().__init__()
        self.open, self.loads, self.text = [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.loads += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag != "path":
            assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.loads += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_holds_everything_and_loads_nothing(tmp_path):
    path = write_report(make_run(tmp_path / "my-run"))
    assert path == tmp_path / "my-run" / "report.html"
    page = path.read_text()
    tags = Tags(page)
    assert tags.loads == []
    assert not re.findall(r"https?:|@import|url\(", page)
    text = " ".join(" ".join(tags.text).split())
    for words in [
        "my-run", "finished: 200 steps", "plan of <b>this</b> run", "- zero=1: the default",
        "name & shape", "Loss", "Gradient norm", "Learning rate", "Throughput", "Memory",
        "GiB, host RSS", "persistence_threshold 100,000", "Best validation loss 2.1051",
        "Tokens/s per device 128", "Peak memory 2.00 GiB",
    ]:  # fmt: skip
        assert words in text
    assert not list(path.parent.glob("*.part"))


def test_the_data_of_the_script_is_that_of_the_file(tmp_path):
    page = write_report(make_run(tmp_path)).read_text()
    embedded = re.search(r'<script type="application/json" id="data">(.*)</script>', page)
    data = json.loads(embedded[1])
    assert data["steps"] == [1, 200]
    training = next(s for s in data["charts"][0] if s["label"] == "training")
    expected = [[m["step"], f"{m['loss']:.4g}"] for m in read_metrics(tmp_path).train]
    assert training["points"] == expected


def test_a_name_cannot_break_out_of_the_script(tmp_path):
    folder = make_run(tmp_path / "a<b>&", name="</script><script>alert(1)</script>")
    page = write_report(folder).read_text()
    assert "<script>alert" not in page
    Tags(page)


def test_braces_of_a_name_are_no_place_of_the_template(tmp_path):
    page = write_report(make_run(tmp_path, name="plan of {{data}}")).read_text()
    assert "<p>plan of {{data}}</p>" in page
    assert page.count("{{") == 1


def test_an_unfinished_run_and_one_report(tmp_path):
    page = write_report(make_run(tmp_path, until=1)).read_text()
    assert "at step 1 of 200" in page
    assert "Throughput" not in page
    Tags(page)


def plan_with(schedule):
    rows = [[format_cell(cell) for cell in row] for row in schedule.table]
    return {
        "pipeline": {
            "schedule": schedule.name,
            "table": rows,
            "placement": schedule.placement,
            "costs": {"forward": 1.0, "backward": 1.0, "weight": 1.0},
        }
    }


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_the_schedule_of_a_pipeline_is_drawn_in_the_plan(tmp_path, name):
    schedule = make_schedule(name, stages=2, microbatches=4)
    page = write_report(make_run(tmp_path, plan=plan_with(schedule))).read_text()
    tags = Tags(page)
    assert tags.loads == []
    assert not re.findall(r"https?:", page)
    plan_section = page.partition("<h2>Plan</h2>")[2].partition("<h2>")[0]
    operations = sum(1 for _ in schedule.events())
    assert plan_section.count('<g class="operation">') == operations
    assert plan_section.index("</svg>") < plan_section.index("<pre>")


def test_a_plan_without_a_pipeline_or_with_one_too_large_has_no_picture(tmp_path, monkeypatch):
    for plan in [{"pipeline": None}, {"pipeline": {"table": None}}]:
        page = write_report(make_run(tmp_path, plan=plan)).read_text()
        assert "<pre>" in page
        assert 'class="operation"' not in page
    schedule = make_schedule("1f1b", stages=2, microbatches=4)
    monkeypatch.setattr("zerojax.training.metrics.report.MAX_BOXES", 15)  # it has 16
    page = write_report(make_run(tmp_path, plan=plan_with(schedule))).read_text()
    assert 'class="operation"' not in page


def test_only_a_loss_in_nats_per_token_has_a_perplexity(tmp_path):
    page = write_report(make_run(tmp_path / "text", loss_unit=NATS_PER_TOKEN)).read_text()
    assert "perplexity 8.21" in page  # exp(2.1051)
    page = write_report(make_run(tmp_path / "other")).read_text()
    assert "perplexity" not in page


def test_a_small_loss_keeps_its_digits(tmp_path):
    page = write_report(make_run(tmp_path, steps=60, losses=[3e-5] * 60)).read_text()
    assert re.search("<dt>Training loss</dt><dd>3.000e-05<small>[^<]*3.000e-05", page)


def test_a_single_validation_value_is_a_dot(tmp_path):
    page = write_report(make_run(tmp_path, steps=60, until=50)).read_text()
    dots = re.search(r'<path class="dots second" d="([^"]*)"', page)
    assert re.fullmatch(r"M[\d.]+ [\d.]+h0", dots[1])
    assert 'class="dots first" d=""' in page  # 50 values have a line


def test_the_time_is_the_sum_of_its_parts(tmp_path):
    times = {"step": 20.0, "data": 3.0, "save": 0.0, "eval": 1.0, "host": 2.0}
    page = write_report(make_run(tmp_path, steps=1, spent=times, spent_at_end=8.0)).read_text()
    assert "<dt>Time</dt><dd>0:34<" in page


@pytest.mark.parametrize("kind", ["failed", "interrupted"])
def test_a_run_that_ended_early_says_how(tmp_path, kind):
    events = [("not_finite", 3, "step 3: loss nan"), (kind, 4, "no <space> left")]
    page = write_report(make_run(tmp_path, until=4, events=events)).read_text()
    assert f'<span class="status {kind}">{kind} at step 4 of 200</span>' in page
    assert '<p class="ending">no &lt;space&gt; left</p>' in page
    assert f"run {kind}" in page


def test_steps_in_a_row_that_were_not_finite_are_one_row(tmp_path):
    events = [("not_finite", step, f"step {step}: loss nan") for step in (3, 4, 5, 9)]
    events.insert(3, ("loss_spike", 7, "step 7: jumped"))
    page = write_report(make_run(tmp_path, events=events)).read_text()
    rows = re.findall(r"<tr><td>([^<]*)</td><td>([^<]*)", page.partition("<h2>Events")[2])
    assert rows[:3] == [
        ("9", "not finite"),
        ("7", "loss spike"),
        ("3 to 5 (3 steps)", "not finite"),
    ]


def test_losses_that_are_not_finite_leave_a_gap_and_a_mark(tmp_path):
    losses = [3.0, 2.5, math.nan, math.inf, 2.0, 1.5]
    page = write_report(make_run(tmp_path, steps=6, losses=losses)).read_text()
    assert "red: not finite" in page
    assert page.count("v40") == 2
    assert "NaN" not in page


def test_nothing_finite_at_all_still_makes_a_page(tmp_path):
    page = write_report(make_run(tmp_path, steps=3, losses=[math.nan] * 3)).read_text()
    assert "Gradient norm" in page
    assert "<b>Loss</b>" not in page


def test_a_resumed_run_says_how_many_parts(tmp_path):
    make_run(tmp_path, until=100)
    make_run(tmp_path)
    page = write_report(tmp_path).read_text()
    assert "in 2 starts" in page
    assert [m["step"] for m in read_metrics(tmp_path).train] == list(range(1, 201))


def test_a_folder_without_reports_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="pass the folder of a run"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"kind": "start", "step": 0}\n')
    with pytest.raises(ValueError, match="has no finished report yet"):
        write_report(tmp_path)


def test_long_curves_are_smoothed_and_falling_losses_get_a_log_axis(tmp_path):
    loss = make_charts(read_metrics(make_run(tmp_path)))[0]
    assert [s.label for s in loss.series] == ["training, smoothed", "training", "validation"]
    assert "log scale" in draw(loss, (1, 200))


# Charts


def points(*values):
    return [(float(i), value) for i, value in enumerate(values)]


def test_curves_go_where_they_should():
    series = Series(label="a", points=points(0, 5, None, 10, None, 2), style="first")
    chart = Chart(title="t", unit="", series=[series], text=str, from_zero=True)
    path = re.search(r'class="curve first" d="([^"]*)"', draw(chart, (0, 5)))[1]
    # The axis ends 6 % above 10; y grows downwards.
    assert path == "M0.0 1000.0L200.0 528.3M600.0 56.6M1000.0 811.3"


def test_values_that_no_line_reaches_are_dots():
    values = [*range(1, 20), None, 10, None, 2, 3]
    series = Series(label="a", points=points(*values), style="first")
    chart = Chart(title="t", unit="", series=[series], text=str, from_zero=True)
    dots = re.search(r'class="dots first" d="([^"]*)"', draw(chart, (0, 23)))[1]
    assert len(re.findall("h0", dots)) == 1  # the 10 alone
    few = Series(label="a", points=points(1, 2, 3), style="first")
    chart = Chart(title="t", unit="", series=[few], text=str)
    dots = re.search(r'class="dots first" d="([^"]*)"', draw(chart, (0, 2)))[1]
    assert len(re.findall("h0", dots)) == 3


def test_ticks():
    assert nice_ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert nice_ticks(-0.1, 0.27) == [-0.1, 0, 0.1, 0.2]
    assert nice_ticks(1, 3000, 6) == [500, 1000, 1500, 2000, 2500, 3000]
    assert nice_ticks(2, 2) == [2]
    assert log_ticks(1.9, 11) == [2, 3, 5, 10]
    assert log_ticks(2.9, 8.5) == [3, 4, 5, 6, 8]
    assert log_ticks(1e-9, 1e9) == [1e-9, 1e-6, 1e-3, 1, 1e3, 1e6, 1e9]


def test_thinning_keeps_peaks_gaps_and_the_end():
    curve = [(float(i), math.sin(i / 50)) for i in range(5000)]
    curve[1234] = (1234.0, 9.0)
    curve[4321] = (4321.0, None)
    kept = thin(curve, 200)
    assert len(kept) <= 202
    assert kept == sorted(kept, key=lambda point: point[0])
    assert {(1234.0, 9.0), (4321.0, None), curve[-1]} <= set(kept)
    assert thin(curve[:100], 200) == curve[:100]


def test_smoothing_does_not_lag():
    line = points(*[10.0 - i for i in range(10)])
    assert [value for _, value in smooth(line, half_width=3)] == [value for _, value in line]
    assert smooth(points(1, None, 3), half_width=1)[1] == (1.0, 2.0)
    assert smooth(points(None, None), half_width=1) == points(None, None)


def test_several_runs_are_compared_on_one_page(tmp_path):
    for name, rate, losses in (("a", 0.1, None), ("b", 0.2, [3.0] * 100)):
        make_run(tmp_path / name, steps=100, losses=losses, loss_unit=NATS_PER_TOKEN)
        settings = to_dict(RunConfig()) | {"seed": 3}
        settings["optimizer"]["learning_rate"] = rate
        (tmp_path / name / "config.json").write_text(json.dumps(settings))
    path = write_comparison([tmp_path / "a", tmp_path / "b"])
    assert path == tmp_path / "comparison.html"
    page = path.read_text()
    assert Tags(page).loads == []
    assert NATS_PER_TOKEN in page
    rows = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", page)
    found = {label: values for label, *values in rows}
    assert found["optimizer.learning_rate"] == ["0.1", "0.2"]
    assert found["last training loss"][1] == "3.0000"
    assert found["steps"] == ["100", "100"]
    assert "seed" not in found, "settings that are the same are left out"
    assert page.count('class="curve c1') == page.count('class="curve c0"') >= 4


@pytest.mark.parametrize(
    ("names", "words"),
    [("a", "2 to 6"), ("aa", "twice"), ("abcdefg", "2 to 6"), ("ax", "no such|metrics")],
)
def test_runs_that_cannot_be_compared_are_refused(names, words, tmp_path):
    make_run(tmp_path / "a", steps=2)
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        write_comparison([tmp_path / name for name in names])


def test_the_loss_of_a_reference_model_has_its_unit():
    assert loss_unit(as_loss(None, as_model(reference_model("gpt2")))) == NATS_PER_TOKEN


def test_a_reason_is_on_the_page_once(tmp_path):
    make_run(tmp_path)
    first, reason, more = "8 parameters, zero=1", "zero=1: the default", "seeds: 0 and 1"
    text = f"{first}\n\n- {more}\n- {reason}\n\n{first}\n\nsum  3 KiB\n\nwhy\n  {reason}\n"
    (tmp_path / "plan.txt").write_text(text)
    page = write_report(tmp_path).read_text()
    assert [page.count(each) for each in (first, reason, more, "sum  3 KiB")] == [1, 1, 1, 1]


def test_a_curve_that_hides_another_is_dashed_and_said():
    def page(second):
        series = [
            Series(label=label, points=[*enumerate(values, 1)], style=style)
            for label, values, style in (("a", [1, 2, 3], "first"), ("b", second, "second"))
        ]
        return draw(Chart(title="t", unit="", series=series), (1, 3))

    hidden = page([1, 2.001, 3])
    assert 'class="curve second over"' in hidden
    assert "(on the line of a)" in hidden
    for others in ([1, 2.1, 3], [None, None, 3]):
        assert "over" not in page(others).replace("overflow", "")
        assert "on the line" not in page(others)
