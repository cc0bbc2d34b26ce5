"""Result of a search: one trial per candidate, the choice and its reason, and the page of them."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from zerojax.forecasting.forecast_numbers import ForecastNumbers
from zerojax.forecasting.forecast_page import WIDTH, Rows, align_columns, forecast_dict
from zerojax.forecasting.search.candidates import Candidate

CHOSEN = "chosen"
FITS = "fits"
TOO_LARGE = "does not fit"
BEATEN = "beaten"
FAILED = "failed"
IMPOSSIBLE = "impossible"
NOT_TRIED = "not tried"

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """What became of one candidate.

    Attributes:
      number: in which order it was compiled, from 1; None where it was not.
      status: one of the words above; reason: why.
      bound: seconds per step that it cannot beat, from formulas; None where there is no plan.
      seconds: per step, the roofline of the compiled program; peak: bytes per device, compiled.
      formula_peak: bytes per device without activations; None where there is no plan.
    """

    candidate: Candidate
    status: str
    reason: str
    number: int | None = None
    bound: float | None = None
    seconds: float | None = None
    peak: int | None = None
    formula_peak: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What was tried and what was found.

    Attributes:
      trials: of all candidates: the compiled ones in their order, then the others by their bound.
      chosen: the cheapest that fits, and its `forecast`; None where none was found.
      certain: whether every candidate was compiled or ruled out.
      sentence: the choice and its reason.
      elapsed: seconds that the search took.
      settings: KEY=VALUE words beside the candidate's own with which it was made.
    """

    trials: tuple[Trial, ...]
    chosen: Trial | None
    forecast: ForecastNumbers | None
    certain: bool
    sentence: str
    elapsed: float
    settings: tuple[str, ...] = ()


def search_page(result: SearchResult) -> str:
    """A table of all that was compiled, why the others were not, and the choice; 100 columns."""
    compiled = [trial for trial in result.trials if trial.number is not None]
    lines = [
        f"SEARCH: {len(result.trials)} candidates, {len(compiled)} compiled, {result.elapsed:.0f} s"
    ]
    if compiled:
        header = ("#", "zero", "model", "stage", "microbatches", "remat", "GiB", "ms/step", "")
        cells: Rows = [header, *(_row(trial) for trial in compiled)]
        lines += ["", *align_columns(cells, left=1, last_left=True)]
    lines += ["", *_others(result), *textwrap.wrap(result.sentence, WIDTH)]
    if result.chosen is not None:
        lines.append(f"  {' '.join(_words(result))}")
    return "\n".join(lines)


def _words(result: SearchResult) -> list[str]:
    """What sets the choice on a command line; [] where there is none."""
    if result.chosen is None:
        return []
    return [*result.settings, *result.chosen.candidate.words()]


def _others(result: SearchResult) -> list[str]:
    """How many were not compiled, by what became of them, with the most promising of each kind."""
    others = [trial for trial in result.trials if trial.number is None]
    lines = [f"not compiled: {len(others)} (--json lists them)"] if others else []
    for status in dict.fromkeys(trial.status for trial in others):
        same = [trial for trial in others if trial.status == status]
        first = f"{same[0].candidate.describe()}: {same[0].reason}"
        lines += textwrap.wrap(
            f"- {len(same)} {status}, such as {first}",
            WIDTH,
            initial_indent="  ",
            subsequent_indent="    ",
        )
    return [*lines, ""] if lines else []


def search_dict(result: SearchResult) -> dict[str, Any]:
    """Every number as it is, as JSON takes it; times in seconds, sizes in bytes."""
    chosen = result.chosen
    return {
        "trials": [dataclasses.asdict(trial) for trial in result.trials],
        "chosen": None if chosen is None else dataclasses.asdict(chosen),
        "words": _words(result),
        "forecast": None if result.forecast is None else forecast_dict(result.forecast),
        "certain": result.certain,
        "sentence": result.sentence,
        "elapsed": result.elapsed,
    }


def _row(trial: Trial) -> tuple[str, ...]:
    candidate = trial.candidate
    status = f"{trial.status}: {trial.reason}"
    room = WIDTH - 65
    return (
        f"{trial.number}{'*' * (trial.status == CHOSEN)}",
        str(candidate.zero),
        str(candidate.model),
        str(candidate.stage),
        str(candidate.num_microbatches),
        candidate.remat,
        "-" if trial.peak is None else f"{trial.peak / GIB:,.2f}",
        "-" if trial.seconds is None else f"{trial.seconds * 1e3:,.1f}",
        status if len(status) <= room else status[: room - 3] + "...",
    )
