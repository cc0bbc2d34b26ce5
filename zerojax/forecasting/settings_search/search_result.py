"""Holds the result of a search: one trial per candidate, the choice, its reason, and the page."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from zerojax.forecasting.forecast_numbers import ForecastNumbers
from zerojax.forecasting.forecast_page import WIDTH, Rows, align_columns, forecast_dict
from zerojax.forecasting.settings_search.candidates import Candidate

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
    """The result for one candidate.

    Attributes:
      number: order of compilation, from 1; None if it was not compiled.
      status: one of the words above.
      reason: reason of the status.
      bound: lower bound of seconds per step, by formula; None without a plan.
      seconds: per step, the roofline of the compiled program.
      peak: bytes per device, compiled.
      formula_peak: bytes per device without activations; None without a plan.
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
    """The result for other bucket sizes.

    Attributes:
      sizes: {option of the mesh: elements}.
      status: one of the words above.
      reason: reason of the status.
      formula: seconds of wire time exposed in any schedule; None without a plan.
      exposed: seconds of wire time that no product hides, compiled; None if not compiled.
      seconds: per step; None if not compiled.
      peak: bytes per device; None if not compiled.
    """

    sizes: dict[str, int]
    status: str
    reason: str
    formula: float | None = None
    exposed: float | None = None
    seconds: float | None = None
    peak: int | None = None

    def words(self) -> tuple[str, ...]:
        """Returns the KEY=VALUE words that set these bucket sizes."""
        return tuple(f"mesh.{option}={size}" for option, size in sorted(self.sizes.items()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketSearch:
    """The bucket sizes that were tried for one plan, and the choice.

    Attributes:
      trials: of all sizes, the most promising by formula first.
      own: {option: elements} of the plan.
      before, after: seconds of wire time that no product hides, with the plan's sizes and with the
        chosen ones; None if nothing was compiled.
      words: KEY=VALUE words that set the chosen sizes; () keeps the plan's own.
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
    """The candidates that were tried and the choice.

    Attributes:
      trials: of all candidates: the compiled ones in their order, then the others by their bound.
      chosen: the cheapest that fits; None if none was found.
      forecast: forecast of the chosen one; None if none was found.
      certain: whether every candidate was compiled or ruled out.
      sentence: the choice and its reason.
      elapsed: seconds that the search took.
      settings: KEY=VALUE words of the search besides the candidate's own.
      options: fields of `MeshConfig` that the choice sets besides the candidate's own: offload and
        bucket sizes; None without a choice.
      buckets: bucket sizes tried for the choice; None: not tried.
    """

    trials: tuple[Trial, ...]
    chosen: Trial | None
    forecast: ForecastNumbers | None
    certain: bool
    sentence: str
    elapsed: float
    settings: tuple[str, ...] = ()
    options: Mapping[str, Any] | None = None
    buckets: BucketSearch | None = None


def search_page(result: SearchResult) -> str:
    """Formats the compiled candidates, reasons for the others, and the choice; 100 columns."""
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
    """Returns the words that set the choice on a command line; [] without a choice."""
    if result.chosen is None:
        return []
    buckets = () if result.buckets is None else result.buckets.words
    return [*words_of(result, result.chosen), *buckets]


def words_of(result: SearchResult, trial: Trial) -> list[str]:
    """Returns the words that set a trial on a command line, without bucket sizes."""
    candidate = trial.candidate
    is_searched = any(trial.candidate.expert > 1 for trial in result.trials)
    together = ["mesh.expert=1"] * (is_searched and candidate.expert == 1)
    is_unrolled = any(trial.candidate.unroll for trial in result.trials)
    together += ["mesh.unroll=false"] * (is_unrolled and not candidate.unroll)
    return [*result.settings, *candidate.words(), *together]


def _bucket_lines(found: BucketSearch | None) -> list[str]:
    """Returns a table of the compiled sizes, and the choice."""
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
    """Returns counts of candidates that were not compiled, by status, with the best of each."""
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
    """Returns every number unrounded, for JSON; times in seconds, sizes in bytes."""
    chosen = result.chosen
    return {
        "trials": [
            {**dataclasses.asdict(trial), "words": words_of(result, trial)}
            for trial in result.trials
        ],
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
