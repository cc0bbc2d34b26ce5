"""Dataclasses for the result of a search for settings (trials, choice and reason), and the text
page of a result."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from zerojax.config.late_dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Result of the search for one candidate.

    Attributes:
      candidate: the settings that were tried.
      status: one of the status constants of this module, such as `CHOSEN`.
      reason: reason of the status.
      number: position in the order of compilation, from 1; None if the candidate was not compiled.
      bound: lower bound of the expected seconds per step, by formula; None if it was not planned.
      guess: guessed seconds per step that ruled the candidate out; None if something else did.
      seconds: expected seconds per step of the compiled program; None if not compiled.
      peak: bytes per device of the compiled program; None if not compiled.
      formula_peak: bytes per device by formula, without activations; None if it was not planned.
    """

    candidate: Candidate
    status: str
    reason: str
    number: int | None = None
    bound: float | None = None
    guess: float | None = None
    seconds: float | None = None
    peak: int | None = None
    formula_peak: int | None = None


@dataclass(frozen=True, kw_only=True)
class BucketTrial:
    """Result of the search for one choice of bucket sizes.

    Attributes:
      sizes: {mesh option: number of elements}.
      status: one of the status constants of this module, such as `CHOSEN`.
      reason: reason of the status.
      formula: seconds of communication that no schedule can overlap with products; None if there is
        no plan.
      exposed: seconds of communication that do not overlap with products in the compiled program;
        None if not compiled.
      seconds: seconds per step; None if not compiled.
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
        """Returns the KEY=VALUE texts that set these bucket sizes."""
        return tuple(f"mesh.{option}={size}" for option, size in sorted(self.sizes.items()))


@dataclass(frozen=True, kw_only=True)
class BucketSearch:
    """Bucket sizes that were tried for one plan, and the choice.

    Attributes:
      trials: results for all sizes, the most promising by formula first.
      own: {mesh option: number of elements} of the plan itself.
      before, after: seconds of communication that do not overlap with products, with the plan's own
        sizes and with the chosen sizes; None if nothing was compiled.
      words: KEY=VALUE texts that set the chosen sizes; () if the plan's own sizes are kept.
      sentence: sentence that states the choice and its reason.
    """

    trials: tuple[BucketTrial, ...]
    own: dict[str, int]
    before: float | None
    after: float | None
    words: tuple[str, ...]
    sentence: str


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Candidates that a search tried, and its choice.

    Attributes:
      trials: results for all candidates: first the compiled candidates in the order of compilation,
        then the others by their bound.
      chosen: trial of the fitting candidate with the shortest step; None if none fits.
      forecast: forecast of the chosen candidate; None if none fits.
      certain: whether every candidate was compiled or ruled out.
      sentence: sentence that states the choice and its reason.
      elapsed: seconds that the search took.
      settings: KEY=VALUE texts that the search sets in addition to the candidate's.
      options: fields of `MeshConfig` that the search sets in addition to the candidate's, for
        offload and bucket sizes; None without a choice.
      buckets: result of the search for bucket sizes; None if there was none.
      interrupted: whether the user ended the search.
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
    interrupted: bool = False


def search_page(result: SearchResult) -> str:
    """Formats the result of a search as text of at most 100 columns: the compiled candidates,
    reasons for the others, and the choice."""
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
    """Returns the KEY=VALUE texts that set the chosen candidate on a command line; [] without a
    choice."""
    if result.chosen is None:
        return []
    buckets = () if result.buckets is None else result.buckets.words
    return [*words_of(result, result.chosen), *buckets]


def words_of(result: SearchResult, trial: Trial) -> list[str]:
    """Returns the KEY=VALUE texts that set a trial's candidate on a command line, without bucket
    sizes."""
    candidate = trial.candidate
    is_searched = any(trial.candidate.expert > 1 for trial in result.trials)
    # Where the search varies `expert`, 1 is a choice; `Candidate.words` leaves it out.
    together = ["mesh.expert=1"] * (is_searched and candidate.expert == 1)
    is_unrolled = any(trial.candidate.unroll for trial in result.trials)
    words, looped = candidate.words(), "mesh.unroll=false"
    # Plans may unroll by themselves, so a looped candidate must say that it does not.
    together += [looped] * (is_unrolled and not candidate.unroll and looped not in words)
    return [*result.settings, *words, *together]


def _bucket_lines(found: BucketSearch | None) -> list[str]:
    """Formats a table of the compiled bucket sizes, and the choice."""
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
    """Formats lines with the numbers of candidates that were not compiled, by status, and the best
    candidate of each status."""
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
    """Returns every number of a search result, unrounded, for JSON; times are in seconds, sizes in
    bytes."""
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
    remat = candidate.short_remat + ", unroll" * candidate.unroll
    # 65 columns are taken by the numbers of the row.
    room = (
        WIDTH - 65 - max(len(remat) - len("attention"), 0) - sum(2 + len(axis) for axis in axes[2:])
    )
    return (
        f"{trial.number}{'*' * (trial.status == CHOSEN)}",
        str(candidate.zero),
        *(str(getattr(candidate, axis)) for axis in axes),
        str(candidate.num_microbatches),
        remat,
        "-" if trial.peak is None else f"{trial.peak / GIB:,.2f}",
        "-" if trial.seconds is None else f"{trial.seconds * 1e3:,.1f}",
        status if len(status) <= room else status[: room - 3] + "...",
    )
