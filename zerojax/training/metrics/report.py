"""HTML report of a run: plan, loss, speed and memory on one page.

The page holds everything it shows: it opens without a network, years later, and prints.
"""

import json
import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zerojax.config.display import as_html
from zerojax.models.losses import BUILT_IN_METRICS, BUILT_IN_PREFIXES, NATS_PER_TOKEN
from zerojax.plan.schedules import Costs, Schedule
from zerojax.plan.schedules.drawing import draw_svg
from zerojax.runtime import bounded_json
from zerojax.runtime.redaction import redact
from zerojax.training.metrics.charts import Chart, Points, Series, draw, smooth, thin
from zerojax.training.metrics.console import GIB, format_loss, format_number, format_seconds
from zerojax.training.metrics.happenings import breakdown, breakdown_table, ending, events_table
from zerojax.training.metrics.metric_files import Metrics, read_metrics

FILE_NAME = "report.html"
SMOOTHED_FROM = 40
"""Reports; a shorter curve is drawn as it is."""
MAX_BOXES = 5000
"""Operations of the largest pipeline schedule that is drawn: about 1.5 MB of page."""


def write_report(run_dir: str | Path) -> Path:
    """Writes `report.html` into a run folder and returns its path.

    Raises:
      FileNotFoundError: the folder holds no metrics.
      ValueError: the run reported nothing yet.
    """
    run_dir = Path(run_dir)
    metrics = read_metrics(run_dir)
    if not metrics.train:
        raise ValueError(f"'{run_dir}' has no finished report yet; wait for the first one")
    path = run_dir / FILE_NAME
    unfinished = path.with_suffix(".html.part")
    unfinished.write_text(_page(run_dir, metrics), encoding="utf-8")
    unfinished.replace(path)
    return path


def _page(run_dir: Path, metrics: Metrics) -> str:
    plan = redact(_text(run_dir / "plan.txt"))  # also what an older version wrote
    plan_line, _, plan_rest = plan.partition("\n")
    charts = make_charts(metrics)
    last = metrics.train[-1]["step"]
    ends = (metrics.train[0]["step"], max([last, *(e["step"] for e in metrics.evals)]))
    name = as_html(run_dir.resolve().name)
    here = Path(__file__)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name} - zerojax run</title>
<style>
{_text(here.with_name("report.css"))}</style>
</head>
<body>
<main>
<header><div class="title"><h1>{name}</h1>{_status(metrics)}</div>
<p>{as_html(plan_line)}</p>{_ending(metrics)}</header>
<dl class="tiles">
{_tiles(metrics)}</dl>
<section class="charts">
{"".join(draw(chart, ends) for chart in charts)}</section>
{_panel("Events", redact(events_table(metrics.events)))}
{_panel("Time by activity", breakdown_table(metrics))}
{_panel("Plan", _schedule(_json(run_dir / "plan.json")) + _plan_text(plan_rest))}
{_panel("Configuration", _settings(redact(_json(run_dir / "config.json"))))}
<footer>Written by zerojax on {time.strftime("%Y-%m-%d at %H:%M")} from metrics.jsonl, plan.txt,
plan.json and config.json in {as_html(str(run_dir))}.{_unreadable(metrics)}</footer>
</main>
<script type="application/json" id="data">{_embedded(charts, ends)}</script>
<script>
{_text(here.with_name("report.js"))}</script>
</body>
</html>
"""


# Charts


def make_charts(metrics: Metrics) -> list[Chart]:
    """The charts of a page; what a run did not measure has none."""
    train, evals = metrics.train, metrics.evals
    speed = "tokens_per_second_per_device"
    charts = [
        Chart(
            title="Loss",
            unit="",
            series=[*_loss(train), *_series("validation", evals, "loss", style="second")],
            text=_plain,
            wide=True,
            log_above=2.5,
        ),
        Chart(
            title="Gradient norm",
            unit="global, before clipping",
            series=_series("norm", train, "grad_norm"),
            text=_plain,
        ),
        Chart(
            title="Learning rate",
            unit="",
            series=_series("rate", train, "learning_rate"),
            text=lambda value: f"{value:.3g}",
            from_zero=True,
        ),
        Chart(
            title="Throughput",
            unit="tokens/s per device",
            series=_series("tokens/s", train, speed),
            text=_short,
            from_zero=True,
        ),
        Chart(
            title="Memory",
            unit=f"GiB, {_memory_source(train)}",
            series=[
                *_series("in use", train, "memory_in_use", unit=GIB),
                *_series("peak", train, "memory_peak", unit=GIB, style="second"),
            ],
            text=lambda value: f"{value:.3g}",
            from_zero=True,
        ),
        Chart(
            title="Own time of processes",
            unit="ms of a step in which the others wait",
            series=[
                *_series("slowest", metrics.processes, "own_seconds_max", unit=1e-3),
                *_series(
                    "median", metrics.processes, "own_seconds_median", unit=1e-3, style="second"
                ),
            ],
            text=lambda value: f"{value:.3g}",
            from_zero=True,
        ),
    ]
    charts[1:1] = _own_charts(train, evals)
    return [chart for chart in charts if any(_finite(s.points) for s in chart.series)]


def _own_charts(
    train: Sequence[Mapping[str, Any]], evals: Sequence[Mapping[str, Any]]
) -> list[Chart]:
    """One for each metric that the user's loss returns, training and validation together."""
    records = {"training": (train, "first"), "validation": (evals, "second")}
    names = {name for rows, _ in records.values() for row in rows for name in row}
    return [
        Chart(
            title=name,
            unit="",
            series=[
                series
                for label, (rows, style) in records.items()
                for series in _series(label, rows, name, style=style)
            ],
            text=_plain,
        )
        for name in sorted(names)
        if name not in BUILT_IN_METRICS and not name.startswith(BUILT_IN_PREFIXES)
    ]


def _loss(train: Sequence[Mapping[str, Any]]) -> list[Series]:
    points = _points(train, "loss")
    if len(points) < SMOOTHED_FROM:
        return [Series(label="training", points=thin(points), style="first")]
    smoothed = smooth(points, half_width=max(2, len(points) // 60))
    return [
        Series(label="training, smoothed", points=thin(smoothed), style="first"),
        Series(label="training", points=thin(points), style="faint"),
    ]


def _series(
    label: str,
    records: Sequence[Mapping[str, Any]],
    key: str,
    *,
    unit: float = 1,
    style: str = "first",
) -> list[Series]:
    points = _points(records, key, unit)
    return [Series(label=label, points=thin(points), style=style)] if points else []


def _points(records: Sequence[Mapping[str, Any]], key: str, unit: float = 1) -> Points:
    return [(r["step"], None if r[key] is None else r[key] / unit) for r in records if key in r]


def _finite(points: Points) -> list[float]:
    return [value for _, value in points if value is not None]


def _embedded(charts: Iterable[Chart], ends: tuple[float, float]) -> str:
    """What the script reads: the same points, with their values already worded."""
    curves = [
        [
            {
                "label": series.label,
                "points": [
                    [step, "not finite" if value is None else chart.text(value)]
                    for step, value in series.points
                ],
            }
            for series in chart.series
            if _finite(series.points)
        ]
        for chart in charts
    ]
    text = json.dumps({"steps": ends, "charts": curves}, separators=(",", ":"))
    return text.replace("</", "<\\/")


# Tiles


def _status(metrics: Metrics) -> str:
    total = metrics.starts[-1].get("total_steps") if metrics.starts else None
    step = metrics.train[-1]["step"]
    if (ended := ending(metrics)) is not None:
        kind, _ = ended
        of = f" of {total:,}" if total else ""
        return f'<span class="status {kind}">{kind} at step {step:,}{of}</span>'
    if not total:
        return f'<span class="status">step {step:,}</span>'
    if step >= total:
        return f'<span class="status finished">finished: {total:,} steps</span>'
    return f'<span class="status">at step {step:,} of {total:,}</span>'


def _ending(metrics: Metrics) -> str:
    """The message with which a run failed or was interrupted."""
    ended = ending(metrics)
    return "" if ended is None else f'<p class="ending">{as_html(redact(ended[1]))}</p>'


def _tiles(metrics: Metrics) -> str:
    tiles = [*_learning_tiles(metrics), *_machine_tiles(metrics)]
    return "".join(
        f"<div class='tile'><dt>{as_html(label)}</dt><dd>{as_html(value)}"
        f"<small>{as_html(note) or '&nbsp;'}</small></dd></div>\n"
        for label, value, note in tiles
    )


def _learning_tiles(metrics: Metrics) -> list[tuple[str, str, str]]:
    tiles = []
    losses = _finite(_points(metrics.train, "loss"))
    if losses:
        recent = losses[-max(1, min(10, len(losses) // 10)) :]
        note = f"from {format_loss(losses[0])}"
        tiles.append(("Training loss", format_loss(statistics.mean(recent)), note))
    evals = [e for e in metrics.evals if e.get("loss") is not None]
    if evals:
        best = min(evals, key=lambda e: e["loss"])
        unit = metrics.starts[-1].get("loss_unit") if metrics.starts else None
        known = unit == NATS_PER_TOKEN and best["loss"] < 15
        perplexity = f", perplexity {math.exp(best['loss']):,.2f}" if known else ""
        note = f"at step {best['step']:,}{perplexity}"
        tiles.append(("Best validation loss", format_loss(best["loss"]), note))
    last = metrics.train[-1]
    skipped = last.get("skipped")
    spent = breakdown(metrics)
    # A run that measured no breakdown has the times of its reports only.
    seconds = sum(spent.values()) or sum(_seconds_of_each_start(metrics))
    starts = len(metrics.starts)
    note = f"in {starts} starts" if starts > 1 else ""
    if skipped:
        tiles.append(("Steps skipped", f"{skipped:,}", "loss or gradient not finite"))
    tiles.append(("Time", format_seconds(seconds), note))
    if total := sum(spent.values()):
        tiles.append(("In training steps", f"{spent['step'] / total:.0%}", "of the loop's time"))
    spikes = sum(event["event"] == "loss_spike" for event in metrics.events)
    if spikes:
        tiles.append(("Loss spikes", f"{spikes:,}", "listed under Events"))
    tokens = (metrics.starts[-1].get("tokens_per_step") if metrics.starts else None) or 0
    if tokens:
        tiles.append(("Tokens seen", _short(tokens * last["step"]), f"{_short(tokens)} per step"))
    return tiles


def _seconds_of_each_start(metrics: Metrics) -> Iterable[float]:
    """The clock starts anew at each resume, so the last report before one has that part's time."""
    before = 0.0
    for record in metrics.train:
        if record["seconds"] < before:
            yield before
        before = record["seconds"]
    yield before


def _machine_tiles(metrics: Metrics) -> list[tuple[str, str, str]]:
    start = metrics.starts[-1] if metrics.starts else {}
    devices = start.get("num_devices") or 1
    tiles = []
    for label, key, text in [
        ("Tokens/s per device", "tokens_per_second_per_device", _short),
        ("TFLOP/s per device", "tflops_per_device", format_number),
        ("MFU", "mfu", lambda value: f"{value:.1%}"),
    ]:
        values = _finite(_points(metrics.train, key))
        if values:
            tiles.append((label, text(statistics.median(values)), "median"))
    peaks = _finite(_points(metrics.train, "memory_peak"))
    if peaks:
        limit = metrics.train[-1].get("memory_limit")
        note = _memory_source(metrics.train) + (f", of {limit / GIB:.1f}" if limit else "")
        tiles.append(("Peak memory", f"{max(peaks) / GIB:.2f} GiB", note))
    kind = start.get("device_kind") or "device"
    tiles.append(("Devices", str(devices), kind))
    return tiles


def _memory_source(train: Sequence[Mapping[str, Any]]) -> str:
    source = train[-1].get("memory_source", "device")
    return "fullest device" if source == "device" else source


# Text


def _settings(config: Mapping[str, Any]) -> str:
    loose = {key: value for key, value in config.items() if not isinstance(value, dict)}
    sections = {"run": loose} if loose else {}
    sections.update((key, value) for key, value in config.items() if isinstance(value, dict))
    blocks = []
    for title, values in sections.items():
        rows = "".join(
            f"<tr><td>{as_html(key)}</td><td>{as_html(_setting(value))}</td></tr>"
            for key, value in values.items()
        )
        blocks.append(f"<div><h3>{as_html(title)}</h3><table>{rows}</table></div>")
    return f'<div class="settings">{"".join(blocks)}</div>' if blocks else ""


def _setting(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value if value != [] else "none")


def _plan_text(text: str) -> str:
    return f"<pre>{as_html(text.strip())}</pre>" if text.strip() else ""


def _schedule(plan: Mapping[str, Any]) -> str:
    """The picture of the pipeline's schedule; nothing where there is none, or one too large."""
    pipeline = plan.get("pipeline")
    if not pipeline or not pipeline["table"]:
        return ""
    schedule = Schedule.from_cells(
        pipeline["schedule"], pipeline["table"], placement=pipeline["placement"]
    )
    if sum(1 for _ in schedule.events()) > MAX_BOXES:
        return ""
    # Inside of a page SVG needs no name space, and this one shall name no address.
    return draw_svg(schedule, Costs(**pipeline["costs"])).replace(
        ' xmlns="http://www.w3.org/2000/svg"', "", 1
    )


def _panel(title: str, content: str) -> str:
    return f"<h2>{title}</h2>\n<div class='panel'>{content}</div>" if content else ""


def _unreadable(metrics: Metrics) -> str:
    count = metrics.unreadable_lines
    return f" {count} half-written lines of metrics.jsonl were left out." if count else ""


def _plain(value: float) -> str:
    return f"{value:.4g}"


def _short(value: float) -> str:
    """12.3k, 4.5M: for numbers whose size matters more than their digits."""
    for limit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}"


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _json(path: Path) -> dict[str, Any]:
    return bounded_json.loads(_text(path) or "{}", finite=False)
