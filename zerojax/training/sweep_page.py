"""Writes the HTML page of a sweep: a table of its trials by rung, and their loss curves.

The page is self-contained, as the report of a run. It is written again after every result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from zerojax.runtime.redaction import redact
from zerojax.training.metrics.charts import Chart, Points, Series, smooth_long, thin
from zerojax.training.metrics.comparison import MAX_RUNS
from zerojax.training.metrics.metric_files import read_metrics
from zerojax.training.metrics.report import finite, points_of, table, write_page
from zerojax.training.sweep_record import SweepRecord
from zerojax.training.sweep_trials import SweepRung, SweepTrial, steps_to_train, value_text

PAGE_NAME = "trials.html"


def write_sweep_page(
    folder: Path,
    trials: Sequence[SweepTrial],
    rungs: Sequence[SweepRung],
    record: SweepRecord,
    measure: str,
) -> Path:
    """Writes the page of a sweep into its folder, and returns its path.

    Args:
      folder: folder of the sweep.
      trials: all trials.
      rungs: all rungs.
      record: results so far.
      measure: name of the loss that ranks the trials.
    """
    ranking, last = record.ranking(), rungs[-1].steps
    curves = {number: _training(trials[number]) for number in ranking}
    results = {
        number: [(float(steps), one.loss) for steps, one in sorted(record.results[number].items())]
        for number in ranking
    }
    charts = [
        Chart(title="Loss at the end of each rung", unit=measure, series=_series(results),
              wide=True, log_above=2.5),
        Chart(title="Training loss", unit="", series=_series(curves), wide=True, log_above=2.5),
    ]  # fmt: skip
    charts = [chart for chart in charts if chart.series]
    whole = steps_to_train(rungs) / last
    return write_page(
        folder / PAGE_NAME,
        folder.resolve().name,
        f"{len(trials)} trials in {len(rungs)} rungs, {whole:.3g} times the steps of one run; "
        f"ranked by {measure}",
        charts,
        {"Trials": redact(trial_table(trials, rungs, record))},
        ends=(0, last),
        folder=str(folder),
        status=_status(rungs, record),
    )


def _status(rungs: Sequence[SweepRung], record: SweepRecord) -> str:
    done = sum(len(results) for results in record.results.values())
    going_on = [record.survivors(rungs, rung) for rung in range(len(rungs))]
    last = going_on[-1]
    is_done = last is not None and all(record.result(x, rungs[-1].steps) for x in last)
    if is_done:
        return '<span class="status finished">finished</span>'
    return f'<span class="status">{done} of {sum(rung.trials for rung in rungs)} results</span>'


def trial_table(
    trials: Sequence[SweepTrial], rungs: Sequence[SweepRung], record: SweepRecord
) -> str:
    """Returns an HTML table of the trials, best first: settings, and the loss of each rung."""
    keys = list(trials[0].values)
    head = ["", "trial", *keys, *(f"{rung.steps:,} steps" for rung in rungs), ""]
    rows = []
    for place, number in enumerate(record.ranking(), start=1):
        results = [record.result(number, rung.steps) for rung in rungs]
        losses = ["" if one is None else _loss(one.loss) for one in results]
        note = next((one.reason for one in results if one is not None and one.reason), "")
        values = [value_text(trials[number].values[key]) for key in keys]
        rows.append([str(place), trials[number].name, *values, *losses, note])
    return table(head, rows, kind="trials")


def _loss(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.5g}"


def _training(trial: SweepTrial) -> Points:
    """Returns the smoothed training losses of a trial, from its run folder."""
    try:
        metrics = read_metrics(trial.config.run_dir)
    except FileNotFoundError:
        return []
    return smooth_long(points_of(metrics.train, "loss"))


def _series(curves: Mapping[int, Points]) -> list[Series]:
    """Returns the curves with any finite value; only the best trials have colours."""
    return [
        Series(
            label=f"trial {number:03d}",
            points=thin(points),
            style=f"c{place}" if place < MAX_RUNS else "dim",
        )
        for place, (number, points) in enumerate(curves.items())
        if finite(points)
    ]
