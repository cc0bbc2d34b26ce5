"""How a search is shown: a table of what was tried, the choice, and the words that set it.

Knows a `SearchResult`; decides nothing.
"""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from zerojax.forecast.page import WIDTH, Rows, align_columns, forecast_dict
from zerojax.search.result import CHOSEN, IMPOSSIBLE, SearchResult, Trial

MAX_OTHERS = 12
"""Rows of candidates that were not compiled; the others are counted by reason."""
GIB = 2**30


def search_page(result: SearchResult) -> str:
    """A table of all that was compiled, what was ruled out, and the choice; at most 100 columns."""
    compiled = [trial for trial in result.trials if trial.number is not None]
    others = [trial for trial in result.trials if trial.number is None]
    number = len(result.trials)
    lines = [
        f"SEARCH: {number} candidates, {len(compiled)} compiled, {result.elapsed:.0f} s",
        "",
    ]
    header = ("#", "zero", "model", "micro", "remat", "GiB", "ms/step", "")
    shown = others[:MAX_OTHERS]
    if compiled or shown:
        cells: Rows = [header, *(_row(trial) for trial in (*compiled, *shown))]
        lines += align_columns(cells, left=1, last_left=True)
    hidden = others[len(shown) :]
    if hidden:
        counts = ", ".join(
            f"{sum(t.status == status for t in hidden)} {status}"
            for status in dict.fromkeys(trial.status for trial in hidden)
        )
        lines.append(f"  and {len(hidden)} more: {counts} (--json lists all)")
    if shown and shown[0].status != IMPOSSIBLE:
        lines.append(
            "  without a #: not compiled; > without activations, and no faster than the roofline"
        )
    lines += ["", *textwrap.wrap(result.sentence, WIDTH)]
    if result.chosen is not None:
        lines.append(f"  {' '.join(result.chosen.candidate.words())}")
    return "\n".join(line.rstrip() for line in lines)


def search_dict(result: SearchResult) -> dict[str, Any]:
    """Every number as it is, as JSON takes it; times in seconds, sizes in bytes."""
    chosen = result.chosen
    return {
        "trials": [dataclasses.asdict(trial) for trial in result.trials],
        "chosen": None if chosen is None else dataclasses.asdict(chosen),
        "words": [] if chosen is None else list(chosen.candidate.words()),
        "forecast": None if result.forecast is None else forecast_dict(result.forecast),
        "certain": result.certain,
        "sentence": result.sentence,
        "elapsed": result.elapsed,
    }


def _row(trial: Trial) -> tuple[str, ...]:
    candidate, compiled = trial.candidate, trial.number is not None
    size = trial.peak if compiled else trial.formula_peak
    seconds = trial.seconds if compiled else trial.bound
    least = "" if compiled else ">"
    number = f"{trial.number}{'*' * (trial.status == CHOSEN)}" if compiled else ""
    room = WIDTH - 58
    status = f"{trial.status}: {trial.reason}"
    return (
        number,
        str(candidate.zero),
        str(candidate.model),
        str(candidate.num_microbatches),
        candidate.remat,
        "-" if size is None else f"{least}{size / GIB:,.2f}",
        "-" if seconds is None else f"{least}{seconds * 1e3:,.1f}",
        status if len(status) <= room else status[: room - 3] + "...",
    )
