"""Writes an HTML page that compares several runs: curves on common axes, results and settings."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zerojax.config.loader import user_path
from zerojax.runtime.redaction import redact
from zerojax.training.metrics.charts import Chart, Series, smooth_long, thin
from zerojax.training.metrics.console import GIB, format_loss, format_seconds
from zerojax.training.metrics.metric_files import Metrics, read_metrics
from zerojax.training.metrics.report import (
    breakdown,
    finite,
    loss_unit,
    object_in,
    points_of,
    short,
    table,
    write_page,
)

FILE_NAME = "comparison.html"
MAX_RUNS = 6
"""Maximum number of runs on one page, because each run has a colour of its own."""
Run = tuple[str, Metrics, Mapping[str, Any]]
"""(name of the run, its metrics, its settings)."""


def write_comparison(run_dirs: Sequence[str | Path], path: str | Path | None = None) -> Path:
    """Writes an HTML page that compares runs, and returns its path.

    Args:
      run_dirs: folders of 2 to `MAX_RUNS` runs.
      path: path of the page; None: `comparison.html` beside the first folder.

    Raises:
      FileNotFoundError: a folder has no metrics.
      ValueError: there are too many runs, a folder occurs twice, or a run has not reported yet.
    """
    folders = [user_path(each) for each in run_dirs]
    if not 2 <= len(folders) <= MAX_RUNS:
        raise ValueError(f"{len(folders)} runs cannot be compared; name 2 to {MAX_RUNS} folders")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ValueError(
            f"{', '.join(map(str, folders))}: a folder is named twice; name each folder once"
        )
    runs: list[Run] = []
    for folder, name in zip(folders, _names(folders), strict=True):
        metrics = read_metrics(folder)
        if not metrics.train:
            raise ValueError(
                f"'{folder}' has no finished report yet; wait until the run prints its first "
                "losses, or leave it out"
            )
        runs.append((name, metrics, redact(object_in(folder / "config.json"))))
    steps = [row["step"] for _, metrics, _ in runs for row in (*metrics.train, *metrics.evals)]
    return write_page(
        folders[0].resolve().parent / FILE_NAME if path is None else user_path(path),
        f"{len(runs)} runs",
        ", ".join(name for name, _, _ in runs),
        comparing_charts(runs),
        {"Results": _results(runs), "Settings that differ": _differences(runs)},
        ends=(min(steps), max(steps)),
        folder=", ".join(map(str, folders)),
    )


def _names(folders: Sequence[Path]) -> list[str]:
    """Returns a short name for each run: the trailing parts of its path that tell runs apart."""
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-depth:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def comparing_charts(runs: Sequence[Run]) -> list[Chart]:
    """Returns charts with one curve per run, without charts for metrics that no run measured."""
    units = {loss_unit(metrics) for _, metrics, _ in runs}
    unit = units.pop() if len(units) == 1 else "in units that differ"
    size: dict[str, Any] = {"text": short, "from_zero": True}
    charts = [
        Chart(title="Training loss", unit=unit, series=_curves(runs, "train", "loss", True),
              wide=True, log_above=2.5),
        Chart(title="Validation loss", unit=unit, series=_curves(runs, "evals", "loss")),
        Chart(title="Gradient norm", unit="global, before clipping",
              series=_curves(runs, "train", "grad_norm")),
        Chart(title="Learning rate", unit="", series=_curves(runs, "train", "learning_rate"),
              **size),
        Chart(title="Throughput", unit="tokens/s per device",
              series=_curves(runs, "train", "tokens_per_second_per_device"), **size),
        Chart(title="Memory", unit="GiB at the peak",
              series=_curves(runs, "train", "memory_peak", scale=GIB), **size),
    ]  # fmt: skip
    return [chart for chart in charts if chart.series]


def _curves(
    runs: Sequence[Run], records: str, key: str, is_smooth: bool = False, scale: float = 1
) -> list[Series]:
    curves = []
    for number, (name, metrics, _) in enumerate(runs):
        points = points_of(getattr(metrics, records), key, scale)
        if finite(points):
            points = thin(smooth_long(points) if is_smooth else points)
            curves.append(Series(label=name, points=points, style=f"c{number}"))
    return curves


def _results(runs: Sequence[Run]) -> str:
    """Returns an HTML table of results with one column per run."""
    rows: list[tuple[str, Callable[[Metrics], str]]] = [
        ("steps", lambda metrics: f"{metrics.train[-1]['step']:,}"),
        ("last training loss", lambda metrics: _loss(metrics.train[-1:])),
        ("best validation loss", lambda metrics: _loss(metrics.evals)),
        (
            "tokens/s per device, median",
            _one_of("tokens_per_second_per_device", statistics.median_high, short),
        ),
        ("MFU, median", _one_of("mfu", statistics.median_high, "{:.1%}".format)),
        ("peak memory", _one_of("memory_peak", max, lambda peak: f"{peak / GIB:.2f} GiB")),
        ("time", lambda metrics: format_seconds(sum(breakdown(metrics).values()))),
        ("devices", _devices),
    ]
    return _table(
        runs, [(label, [text(metrics) for _, metrics, _ in runs]) for label, text in rows]
    )


def _loss(records: Sequence[Mapping[str, Any]]) -> str:
    values = [row["loss"] for row in records if row.get("loss") is not None]
    return format_loss(min(values)) if values else ""


def _one_of(
    key: str, choose: Callable[[Sequence[float]], float], text: Callable[[float], str]
) -> Callable[[Metrics], str]:
    """Returns a function from a run's metrics to the text of `choose(values of key)`; "" if the run
    did not measure it."""

    def of(metrics: Metrics) -> str:
        values = finite(points_of(metrics.train, key))
        return text(choose(values)) if values else ""

    return of


def _devices(metrics: Metrics) -> str:
    start = metrics.starts[-1] if metrics.starts else {}
    return f"{start.get('num_devices') or 1} x {start.get('device_kind') or 'device'}"


def _differences(runs: Sequence[Run]) -> str:
    """Returns an HTML table of the settings that differ between the runs."""
    flat = [dict(_flat(settings)) for _, _, settings in runs]
    keys = sorted({key for settings in flat for key in settings})
    rows = [(key, [_text(settings.get(key)) for settings in flat]) for key in keys]
    return _table(runs, [(key, values) for key, values in rows if len(set(values)) > 1])


def _flat(settings: Mapping[str, Any], before: str = "") -> Sequence[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in settings.items():
        if isinstance(value, Mapping):
            pairs += _flat(value, f"{before}{key}.")
        else:
            pairs.append((f"{before}{key}", value))
    return pairs


def _text(value: object) -> str:
    return "not set" if value is None else str(value)


def _table(runs: Sequence[Run], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    shown = [(label, *values) for label, values in rows if any(values)]
    return table(("", *(name for name, _, _ in runs)), shown) if shown else ""
