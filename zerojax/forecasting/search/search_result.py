"""Result of a search: one trial per candidate, the choice and its reason, and the page of them."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
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
class BucketTrial:
    """What became of other sizes of buckets.

    Attributes:
      sizes: {option of the mesh: elements}; status: one of the words above; reason: why.
      formula: seconds of the wire that are bare in any schedule; None where there is no plan.
      exposed: seconds of the wire that no product hides, compiled; seconds: per step; peak: bytes
        per device. None where it was not compiled.
    """

    sizes: dict[str, int]
    status: str
    reason: str
    formula: float | None = None
    exposed: float | None = None
    seconds: float | None = None
    peak: int | None = None

    def words(self) -> tuple[str, ...]:
        """The KEY=VALUE words that set it."""
        return tuple(f"mesh.{option}={size}" for option, size in sorted(self.sizes.items()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketSearch:
    """Sizes of buckets that were tried for one plan, and which to take.

    Attributes:
      trials: of all sizes, the most promising by formula first.
      own: {option: elements} of the plan.
      before, after: seconds of the wire that no product hides, with the plan's sizes and with those
        that were chosen; None where nothing was compiled.
      words: KEY=VALUE words that set the chosen sizes; () leaves the plan's own.
      sentence: the choice and its reason.
    """

    trials: tuple[BucketTrial, ...]
    own: dict[str, int]
    before: float | None
    after: float | None
    words: tuple[str, ...]
    sentence: str


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
      buckets: what other sizes of buckets leave of the wire, for the choice; None: not looked at.
    """

    trials: tuple[Trial, ...]
    chosen: Trial | None
    forecast: ForecastNumbers | None
    certain: bool
    sentence: str
    elapsed: float
    settings: tuple[str, ...] = ()
    buckets: BucketSearch | None = None


def search_page(result: SearchResult) -> str:
    """A table of all that was compiled, why the others were not, and the choice; 100 columns."""
    compiled = [trial for trial in result.trials if trial.number is not None]
    lines = [
        f"SEARCH: {len(result.trials)} candidates, {len(compiled)} compiled, {result.elapsed:.0f} s"
    ]
    if compiled:
        experts = any(trial.candidate.expert > 1 for trial in result.trials)
        axes = ("model", "stage", *["expert"] * experts)
        header = ("#", "zero", *axes, "microbatches", "remat", "GiB", "ms/step", "")
        cells: Rows = [header, *(_row(trial, axes) for trial in compiled)]
        lines += ["", *align_columns(cells, left=1, last_left=True)]
    lines += ["", *_others(result), *textwrap.wrap(result.sentence, WIDTH)]
    lines += _bucket_lines(result.buckets)
    if result.chosen is not None:
        words = " ".join(chosen_words(result))
        lines += textwrap.wrap(
            words, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
        )
    return "\n".join(lines)


def chosen_words(result: SearchResult) -> list[str]:
    """What sets the choice on a command line; [] where there is none."""
    if result.chosen is None:
        return []
    candidate = result.chosen.candidate
    is_searched = any(trial.candidate.expert > 1 for trial in result.trials)
    together = ["mesh.expert=1"] * (is_searched and candidate.expert == 1)
    is_unrolled = any(trial.candidate.unroll for trial in result.trials)
    together += ["mesh.unroll=false"] * (is_unrolled and not candidate.unroll)
    buckets = () if result.buckets is None else result.buckets.words
    return [*result.settings, *candidate.words(), *together, *buckets]


def _bucket_lines(found: BucketSearch | None) -> list[str]:
    """A table of the sizes that were compiled, and the choice."""
    if found is None:
        return []
    compiled = [trial for trial in found.trials if trial.exposed is not None]
    sentence = textwrap.wrap(found.sentence, WIDTH)
    if not compiled:
        return sentence
    cells: Rows = [("buckets, elements", "not hidden, ms", "ms/step", "GiB", "")]
    for trial in compiled:
        sizes = ", ".join(f"{option}={size}" for option, size in sorted(trial.sizes.items()))
        cells.append(
            (
                sizes + "*" * (trial.status == CHOSEN),
                f"{(trial.exposed or 0.0) * 1e3:,.3f}",
                "-" if trial.seconds is None else f"{trial.seconds * 1e3:,.2f}",
                "-" if trial.peak is None else f"{trial.peak / GIB:,.2f}",
                trial.status,
            )
        )
    return ["", *align_columns(cells, left=1, last_left=True), "", *sentence]


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
        "words": chosen_words(result),
        "forecast": None if result.forecast is None else forecast_dict(result.forecast),
        "certain": result.certain,
        "sentence": result.sentence,
        "elapsed": result.elapsed,
        "buckets": None if result.buckets is None else dataclasses.asdict(result.buckets),
    }


def _row(trial: Trial, axes: Sequence[str]) -> tuple[str, ...]:
    candidate = trial.candidate
    status = f"{trial.status}: {trial.reason}"
    room = WIDTH - 65 - len(", unroll") * candidate.unroll - sum(2 + len(axis) for axis in axes[2:])
    return (
        f"{trial.number}{'*' * (trial.status == CHOSEN)}",
        str(candidate.zero),
        *(str(getattr(candidate, axis)) for axis in axes),
        str(candidate.num_microbatches),
        candidate.remat + ", unroll" * candidate.unroll,
        "-" if trial.peak is None else f"{trial.peak / GIB:,.2f}",
        "-" if trial.seconds is None else f"{trial.seconds * 1e3:,.1f}",
        status if len(status) <= room else status[: room - 3] + "...",
    )
