"""Writes the HTML report of a run: plan, loss, speed, memory, events and time on one page.

The page is self-contained: it needs no network and can be printed. Its template, with style and
script, is `report.html` beside this module.
"""

import itertools
import json
import math
import re
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zerojax.config.display import as_html, cut
from zerojax.config.loader import user_path
from zerojax.models.losses import BUILT_IN_METRICS, BUILT_IN_PREFIXES, NATS_PER_TOKEN
from zerojax.runtime import bounded_json
from zerojax.runtime.redaction import redact
from zerojax.runtime.user_files import replace_text
from zerojax.schedules import Costs, Schedule
from zerojax.schedules.drawing import draw_svg
from zerojax.training.metrics.charts import Chart, Points, Series, draw, smooth_long, thin
from zerojax.training.metrics.console import GIB, format_loss, format_number, format_seconds
from zerojax.training.metrics.heatmaps import layers_panel
from zerojax.training.metrics.images import IMAGE, images_panel
from zerojax.training.metrics.metric_files import SAMPLE, Metrics, read_metrics
from zerojax.training.metrics.stragglers import ACTIVITIES

FILE_NAME = "report.html"
MAX_BOXES = 5000
"""Maximum number of operations of a pipeline schedule that a report draws: about 1.5 MB of HTML."""
MAX_EVENTS = 200
MAX_OWN_CHARTS = 200
_REMEDY = "delete this file, or continue training in this folder, which writes it again"
ACTIVITY_NAMES = {
    "data": ("waiting for data", "no batch was ready, and the loop could not go on"),
    "step": ("training steps", "devices computed, or the step was compiled"),
    "save": ("saving", "a checkpoint was copied from the devices; it is written meanwhile"),
    "eval": ("evaluating", "validation data, with their compilation"),
    "host": ("host", "start-up, callbacks and reports, while no step was awaited"),
}
"""{activity: (name on the page, meaning)}."""
EVENT_NAMES = {
    "loss_spike": "loss spike",
    "not_finite": "not finite",
    "not_reported": "not reported",
    "slow_process": "slow process",
    "fast_again": "no longer slow",
    "failed": "run failed",
    "interrupted": "run interrupted",
}

Records = Sequence[Mapping[str, Any]]
Rows = Iterable[Sequence[str]]


def write_report(run_dir: str | Path) -> Path:
    """Writes `report.html` into a run folder and returns its path.

    Raises:
      FileNotFoundError: the folder has no metrics.
      ValueError: the run has reported nothing yet, or one of its files is invalid.
    """
    run_dir = user_path(run_dir)
    metrics = read_metrics(run_dir)
    if not metrics.train:
        raise ValueError(
            f"'{run_dir}' has no finished report yet; wait until the run prints its first losses, "
            "or name the folder of another run"
        )
    plan = redact(_text(run_dir / "plan.txt"))  # older versions wrote it without redaction
    plan_line, _, plan_rest = plan.partition("\n")
    last = metrics.train[-1]["step"]
    ended, lost, left_out = ending(metrics), metrics.unreadable_lines, metrics.left_out
    plan_rest = _without_repetitions(plan_line, plan_rest)
    text = f"<pre>{as_html(plan_rest)}</pre>" if plan_rest else ""
    return write_page(
        run_dir / FILE_NAME,
        run_dir.resolve().name,
        plan_line,
        make_charts(metrics),
        {
            "Norms by layer": layers_panel(metrics.layers),
            "Images": images_panel(run_dir, metrics.events),
            "Samples": redact(_samples(metrics.events)),
            "Events": redact(
                _events([e for e in metrics.events if e["event"] not in (SAMPLE, IMAGE)])
            ),
            "Time by activity": _times(metrics),
            "Plan": _schedule(run_dir / "plan.json") + text,
            "Configuration": _settings(redact(object_in(run_dir / "config.json"))),
        },
        ends=(metrics.train[0]["step"], max([last, *(e["step"] for e in metrics.evals)])),
        folder=str(run_dir),
        status=_status(metrics),
        ending=f'<p class="ending">{as_html(redact(ended[1]))}</p>' if ended else "",
        tiles="".join(_tiles(metrics)),
        unreadable=(f" {lost} unreadable lines of metrics.jsonl were left out." if lost else "")
        + (
            f" metrics.jsonl is large: {left_out:,} of its records were left out."
            if left_out
            else ""
        ),
    )


def write_page(
    path: Path,
    name: str,
    line: str,
    charts: Sequence[Chart],
    panels: Mapping[str, str],
    *,
    ends: tuple[float, float],
    folder: str,
    status: str = "",
    ending: str = "",
    tiles: str = "",
    unreadable: str = "",
) -> Path:
    """Writes a page of charts and panels: a run's report, a comparison, a sweep or a rate test.

    Args:
      path: path of the page, which is returned.
      name: title of the page.
      line: text below the title.
      charts: charts on a common horizontal axis.
      panels: {title: HTML}; a panel without content is left out.
      ends: ends of the horizontal axis.
      folder: text that names the folder in the footer.
      status, ending, tiles: HTML beside the title, below it and above the charts.
      unreadable: sentences for the footer.
    """
    shown = (
        f"<h2>{title}</h2>\n<div class='panel'>{content}</div>"
        for title, content in panels.items()
        if content
    )
    parts = {
        "name": as_html(name),
        "status": status,
        "plan_line": as_html(line),
        "ending": ending,
        "tiles": tiles,
        "charts": "".join(draw(chart, ends) for chart in charts),
        "panels": "\n".join(shown),
        "time": time.strftime("%Y-%m-%d at %H:%M"),
        "folder": as_html(folder),
        "unreadable": unreadable,
        "data": _embedded(charts, ends),
    }
    template = _text(Path(__file__).with_name("report.html"))
    # All parts are inserted in one pass, because inserted text may contain braces.
    replace_text(path, re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template))
    return path


# --- charts ---------------------------------------------------------------------------------------


def make_charts(metrics: Metrics) -> list[Chart]:
    """Returns the charts of a run's report, without metrics that the run did not measure."""
    train, evals, processes = metrics.train, metrics.evals, metrics.processes
    loss = [*_loss(train), *_series("validation", evals, "loss", "second")]
    # Metrics that the user's loss returns; training and validation share a chart.
    own = [
        name
        for name in sorted({name for row in [*train, *evals] for name in row})
        if name not in BUILT_IN_METRICS and not name.startswith(BUILT_IN_PREFIXES)
    ]
    size: dict[str, Any] = {"text": short, "from_zero": True}
    charts = [
        Chart(title="Loss", unit=loss_unit(metrics), series=loss, wide=True, log_above=2.5),
        *(
            _chart(name, "", ("training", train, name), ("validation", evals, name))
            for name in own[:MAX_OWN_CHARTS]
        ),
        _chart("Gradient norm", "global, before clipping", ("norm", train, "grad_norm")),
        _chart("Learning rate", "", ("rate", train, "learning_rate"), **size),
        _chart(
            "Throughput",
            "tokens/s per device",
            ("tokens/s", train, "tokens_per_second_per_device"),
            **size,
        ),
        _chart(
            "Memory",
            f"GiB, {_memory_source(train)}",
            ("in use", train, "memory_in_use"),
            ("peak", train, "memory_peak"),
            scale=GIB,
            **size,
        ),
        _chart(
            "Own time of processes",
            "ms of a step in which the others wait",
            ("slowest", processes, "own_seconds_max"),
            ("median", processes, "own_seconds_median"),
            scale=1e-3,
            **size,
        ),
    ]
    return [chart for chart in charts if any(finite(s.points) for s in chart.series)]


def loss_unit(metrics: Metrics) -> str:
    """Returns the unit of a run's loss, or "" if it is not known."""
    return str(_start(metrics).get("loss_unit") or "")


def _chart(
    title: str, unit: str, *curves: tuple[str, Records, str], scale: float = 1, **options: Any
) -> Chart:
    """Returns a chart with one curve for each (label, records, key); divides values by `scale`."""
    series = [
        one
        for curve, style in zip(curves, ("first", "second"), strict=False)
        for one in _series(*curve, style, scale)
    ]
    return Chart(title=title, unit=unit, series=series, **options)


def _series(label: str, records: Records, key: str, style: str, scale: float = 1) -> list[Series]:
    points = points_of(records, key, scale)
    return [Series(label=label, points=thin(points), style=style)] if points else []


def _loss(train: Records) -> list[Series]:
    points = points_of(train, "loss")
    smoothed = smooth_long(points)
    if smoothed is points:
        return [Series(label="training", points=thin(points), style="first")]
    return [
        Series(label="training, smoothed", points=thin(smoothed), style="first"),
        Series(label="training", points=thin(points), style="faint"),
    ]


def points_of(records: Records, key: str, scale: float = 1) -> Points:
    """Returns (step, value / scale) of each record that has a value for `key`."""
    return [(r["step"], None if r[key] is None else r[key] / scale) for r in records if key in r]


def finite(points: Points) -> list[float]:
    """Returns the finite values of a curve."""
    return [value for _, value in points if value is not None]


def _embedded(charts: Iterable[Chart], ends: tuple[float, float]) -> str:
    """Returns the data for the page's script as JSON: ends of the horizontal axis, and for each
    chart the label and points of its curves, with values as text."""
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
            if finite(series.points)
        ]
        for chart in charts
    ]
    text = json.dumps({"steps": ends, "charts": curves}, separators=(",", ":"))
    # Inside of <script>, "</script>" in a name would end it; JSON reads <\/ as </.
    return text.replace("</", "<\\/")


# --- tiles ----------------------------------------------------------------------------------------


def _status(metrics: Metrics) -> str:
    total = _start(metrics).get("total_steps")
    step = metrics.train[-1]["step"]
    of, kind = f" of {total:,}" if total else "", ""
    if (ended := ending(metrics)) is not None:
        kind = ended[0]
        text = f"{kind} at step {step:,}{of}"
    elif total and step >= total:
        kind, text = "finished", f"finished: {total:,} steps"
    else:
        text = f"at step {step:,}{of}" if total else f"step {step:,}"
    return f'<span class="{f"status {kind}".strip()}">{text}</span>'


def _tiles(metrics: Metrics) -> Iterable[str]:
    for label, value, note in [*_learning(metrics), *_machine(metrics)]:
        yield (
            f"<div class='tile'><dt>{as_html(label)}</dt><dd>{as_html(value)}"
            f"<small>{as_html(note) or '&nbsp;'}</small></dd></div>\n"
        )


def _learning(metrics: Metrics) -> Rows:
    if losses := finite(points_of(metrics.train, "loss")):
        count = max(1, min(10, len(losses) // 10))
        over = f"mean of the last {count} reports" if count > 1 else "of the last report"
        note = f"{over}; {format_loss(losses[0])} at first"
        yield "Training loss", format_loss(statistics.mean(losses[-count:])), note
    if evals := [e for e in metrics.evals if e.get("loss") is not None]:
        best = min(evals, key=lambda e: e["loss"])
        known = _start(metrics).get("loss_unit") == NATS_PER_TOKEN and best["loss"] < 15
        perplexity = f", perplexity {math.exp(best['loss']):,.2f}" if known else ""
        note = f"at step {best['step']:,}{perplexity}"
        yield "Best validation loss", format_loss(best["loss"]), note
    last = metrics.train[-1]
    if skipped := last.get("skipped"):
        yield "Steps skipped", f"{skipped:,}", "loss or gradient not finite"
    spent, starts = breakdown(metrics), len(metrics.starts)
    # A run without seconds by activity has only the times of its reports.
    total = sum(spent.values())
    seconds = total or sum(_seconds_of_each_start(metrics))
    yield "Time", format_seconds(seconds), f"in {starts} starts" if starts > 1 else ""
    if total:
        yield "In training steps", f"{spent['step'] / total:.0%}", "of the loop's time"
    if spikes := sum(event["event"] == "loss_spike" for event in metrics.events):
        yield "Loss spikes", f"{spikes:,}", "listed under Events"
    if tokens := _start(metrics).get("tokens_per_step"):
        yield "Tokens seen", short(tokens * last["step"]), f"{short(tokens)} per step"
    elif seen := last.get("tokens_seen"):
        yield "Tokens seen", short(seen), "with weight; rows have different lengths"


def _machine(metrics: Metrics) -> Rows:
    for label, key, text in [
        ("Tokens/s per device", "tokens_per_second_per_device", short),
        ("TFLOP/s per device", "tflops_per_device", format_number),
        ("MFU", "mfu", "{:.1%}".format),
    ]:
        if values := finite(points_of(metrics.train, key)):
            yield label, text(statistics.median(values)), "median"
    if peaks := finite(points_of(metrics.train, "memory_peak")):
        limit = metrics.train[-1].get("memory_limit")
        note = _memory_source(metrics.train) + (f", of {limit / GIB:.1f}" if limit else "")
        yield "Peak memory", f"{max(peaks) / GIB:.2f} GiB", note
    start = _start(metrics)
    yield "Devices", str(start.get("num_devices") or 1), start.get("device_kind") or "device"


def _start(metrics: Metrics) -> Mapping[str, Any]:
    return metrics.starts[-1] if metrics.starts else {}


def _seconds_of_each_start(metrics: Metrics) -> Iterable[float]:
    """Yields the seconds of each start of the run, from its last report, because the clock restarts
    at a resume."""
    before = 0.0
    for record in metrics.train:
        seconds = record.get("seconds") or 0.0
        if seconds < before:
            yield before
        before = seconds
    yield before


def _memory_source(train: Records) -> str:
    source = train[-1].get("memory_source", "device")
    return "fullest device" if source == "device" else source


# --- panels ---------------------------------------------------------------------------------------


def ending(metrics: Metrics) -> tuple[str, str] | None:
    """Returns ("failed" or "interrupted", message) if the last start of the run ended in this way;
    else None.
    """
    since = _start(metrics).get("time") or 0.0
    for event in reversed(metrics.events):
        if event["event"] in ("failed", "interrupted") and (event.get("time") or 0.0) >= since:
            return event["event"], str(event.get("text", ""))
    return None


def breakdown(metrics: Metrics) -> dict[str, float]:
    """Returns {activity: seconds} of the whole run, including the time after the last reports."""
    records = [*metrics.train, *metrics.ends]
    return {a: sum(record.get(f"spent_{a}") or 0.0 for record in records) for a in ACTIVITIES}


def _times(metrics: Metrics) -> str:
    """Returns an HTML table of the time per activity; "" if the run did not measure it."""
    spent = breakdown(metrics)
    total = sum(spent.values())
    rows = [
        (
            f"{ACTIVITY_NAMES[activity][0]}: {ACTIVITY_NAMES[activity][1]}",
            format_seconds(seconds),
            f"{seconds / total:.1%}",
        )
        for activity, seconds in sorted(spent.items(), key=lambda item: -item[1])
        if seconds
    ]
    shown = table(("", "time", "share"), rows, kind="")
    return f'<div class="settings"><div>{shown}</div></div>' if rows else ""


def _events(events: Records) -> str:
    """Returns an HTML table of events, newest first: spikes, non-finite steps, slow processes."""
    numbered = itertools.groupby(
        enumerate(events),  # consecutive non-finite events of one parameter share a row
        lambda item: _where(item[1]) if item[1]["event"] == "not_finite" else item[0],
    )
    groups = [[event for _, event in group] for _, group in numbered]
    rows = [
        (
            f"{group[0]['step']:,}"
            + (f" to {group[-1]['step']:,} ({len(group):,} steps)" if len(group) > 1 else ""),
            EVENT_NAMES.get(group[0]["event"], str(group[0]["event"])),
            _where(group[0]),
            str(group[0].get("text", "")),
        )
        for group in groups[: -MAX_EVENTS - 1 : -1]
    ]
    return _newest(("step", "event", "where", "message"), rows, len(groups))


def _samples(events: Records) -> str:
    """Returns an HTML table of texts of the run's weights, newest first."""
    texts = [event for event in events if event["event"] == SAMPLE]
    rows = [
        (f"{one['step']:,}", str(one.get("sample", ""))) for one in texts[: -MAX_EVENTS - 1 : -1]
    ]
    return _newest(("step", "prompt and continuation"), rows, len(texts))


def _newest(head: Sequence[str], rows: Sequence[Sequence[str]], count: int) -> str:
    """Returns an HTML table of the newest of `count` records, and how many are left out; "" without
    rows."""
    if not rows:
        return ""
    more = count - len(rows)
    note = f"<p>and {more:,} earlier ones in metrics.jsonl</p>" if more else ""
    return f"{table(head, rows)}{note}"


def _where(event: Mapping[str, Any]) -> str:
    return str(event.get("leaf") or event.get("host") or "")


def _without_repetitions(line: str, rest: str) -> str:
    """Returns the text of plan.txt after its first line, without repetitions.

    The file has the first line again above the table, and lists most reasons below it, too.
    """
    lines = rest.splitlines()
    below = {one.strip() for one in lines if one.startswith("  ")}
    kept = [one for one in lines if one != line and one.removeprefix("- ") not in below]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()


def _settings(config: Mapping[str, Any]) -> str:
    loose = {key: value for key, value in config.items() if not isinstance(value, dict)}
    sections = {"run": loose} if loose else {}
    sections.update((key, value) for key, value in config.items() if isinstance(value, dict))
    blocks = "".join(
        f"<div><h3>{as_html(title)}</h3>"
        f"{table((), ((key, _setting(value)) for key, value in values.items()), kind='')}</div>"
        for title, values in sections.items()
    )
    return f'<div class="settings">{blocks}</div>' if blocks else ""


def _setting(value: object) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value if value != [] else "none")


def table(head: Sequence[str], rows: Rows, *, kind: str = "events") -> str:
    """Returns an HTML table of texts; without `head` it has no row of titles.

    Args:
      head: titles of the columns.
      rows: texts of each row.
      kind: CSS class; "" for none.
    """
    start = f'<table class="{kind}">' if kind else "<table>"
    titles = _cells(head, "th") if head else ""
    return f"{start}{titles}{''.join(_cells(row, 'td') for row in rows)}</table>"


def _cells(texts: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{as_html(text)}</{tag}>' for text in texts)}</tr>"


def _schedule(path: Path) -> str:
    """Returns an SVG of the pipeline schedule; "" if there is no schedule or it is too large.

    Args:
      path: path of plan.json.
    """
    pipeline = object_in(path).get("pipeline")
    try:
        if not pipeline or not pipeline["table"]:
            return ""
        schedule = Schedule.from_cells(
            pipeline["schedule"], pipeline["table"], placement=pipeline["placement"]
        )
        if sum(1 for _ in schedule.events()) > MAX_BOXES:
            return ""
        picture = draw_svg(schedule, Costs(**pipeline["costs"]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: the entry 'pipeline' is no valid schedule ({cut(str(error), 200)}); {_REMEDY}"
        ) from error
    # SVG inside HTML needs no namespace, and the page should contain no URL.
    return picture.replace(' xmlns="http://www.w3.org/2000/svg"', "", 1)


def short(value: float) -> str:
    """Formats a number with a unit letter, such as 12.3k or 4.5M."""
    for limit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}"


def _text(path: Path) -> str:
    """Returns the text of a file, or "" if the file does not exist."""
    try:
        return bounded_json.read_bytes(path).decode("utf-8")
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 at byte {error.start}; {_REMEDY}") from error


def object_in(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file, or {} if the file does not exist. Raises ValueError for
    any other content."""
    try:
        value = bounded_json.loads(_text(path) or "{}", finite=False)
    except bounded_json.JsonError as error:
        raise ValueError(f"{path} {error.what}; {_REMEDY}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not an object; {_REMEDY}")
    return value
