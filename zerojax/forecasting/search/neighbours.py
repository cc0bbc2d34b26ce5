"""Bounds and estimates of candidates from compiled neighbours."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from zerojax.forecasting.result import ForecastNumbers
from zerojax.forecasting.search.bounds import Bounds
from zerojax.forecasting.search.candidates import REMATS, Candidate
from zerojax.forecasting.search.result import FITS, TOO_LARGE, Trial
from zerojax.models.trees import format_bytes

TOLERANCE = 0.05
"""Of a time: the estimate is no better than this."""
CAUTION = 0.9
"""Of the activations of one compiled plan, what another one with fewer rows is taken to need."""
GROWTH = 0.5
"""Of a growth in proportion to the rows, what activations are taken to grow by at least."""
FEWER_PIECES = 0.7
"""Of the time of one compiled plan, what another one with fewer microbatches or less tensor
parallelism is taken to need: weights are read less often, and activations are repeated less."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Open:
    """A candidate that may still be the one."""

    candidate: Candidate
    bounds: Bounds


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Compiled:
    """A candidate that was compiled; `forecast` is None where the compiler failed."""

    entry: Open
    trial: Trial
    forecast: ForecastNumbers | None


def expected_peak(entry: Open, compiled: Sequence[Compiled]) -> float | None:
    """Bytes, with activations in proportion to those of a compiled plan; None if there is none.

    At the same number of microbatches they do not depend on `model`: what it splits comes back
    as rows. What a pipeline holds says nothing of one with another number of stages.
    """
    mine = entry.candidate
    alike = [
        other
        for other in compiled
        if other.forecast is not None
        and (other.entry.candidate.remat, other.entry.candidate.stage) == (mine.remat, mine.stage)
    ]
    if not alike:
        return None

    def distance(other: Compiled) -> tuple[int, int, float]:
        theirs = other.entry.candidate
        far = abs(math.log2(theirs.num_microbatches / mine.num_microbatches))
        return (theirs.model != mine.model, theirs.zero != mine.zero, far)

    nearest = min(alike, key=distance)
    beyond = max((nearest.trial.peak or 0) - nearest.entry.bounds.peak, 0)
    theirs = nearest.entry.candidate
    return entry.bounds.peak + beyond * theirs.num_microbatches / mine.num_microbatches


def least_seconds(entry: Open, compiled: Sequence[Compiled]) -> float:
    """A time that it is not taken to beat: by formula, or by compiled plans of the same remat and
    the same number of pipeline stages.

    Only of those that fit: in what does not, the compiler itself computes things again.
    """
    least = entry.bounds.seconds
    for other in compiled:
        theirs = other.entry.candidate
        if (
            other.trial.status != FITS
            or other.forecast is None
            or (theirs.remat, theirs.stage) != (entry.candidate.remat, entry.candidate.stage)
        ):
            continue
        time = other.forecast.estimate
        busy = max(time.compute_seconds or 0.0, time.memory_seconds or 0.0)
        fewer = (
            entry.candidate.num_microbatches < theirs.num_microbatches
            or entry.candidate.model < theirs.model
        )
        least = max(least, busy * (FEWER_PIECES if fewer else 1 - TOLERANCE))
    return least


def why_too_large(entry: Open, other: Compiled) -> str | None:
    """Why `entry` cannot fit, judged by a compiled plan with no lighter remat; None if it may.

    Activations do not shrink with less remat, nor by more than the rows in flight do, nor by
    more than tensor parallelism splits them; as that also gives each device more rows, a
    larger `model` saves nothing at the same number of microbatches. All of this is said of plans
    with the same number of pipeline stages.
    """
    mine, theirs = entry.candidate, other.entry.candidate
    if other.forecast is None or REMATS.index(mine.remat) > REMATS.index(theirs.remat):
        return None
    if mine.stage != theirs.stage:
        return None
    number, same_mesh = other.trial.number, mine.model == theirs.model
    as_many_rows = mine.num_microbatches <= theirs.num_microbatches
    as_much_state = mine.zero <= theirs.zero and entry.bounds.peak >= other.entry.bounds.peak
    if other.trial.status == TOO_LARGE and as_many_rows and as_much_state and same_mesh:
        return f"needs no less than #{number}, which does not fit"
    rows = theirs.num_microbatches / mine.num_microbatches
    share = CAUTION * rows if rows <= 1 else 1 + GROWTH * (rows - 1)
    share *= min(1.0, mine.model / theirs.model)
    least = entry.bounds.state + share * _activations(other.forecast)
    if mine.zero == theirs.zero and same_mesh:
        beyond = (other.trial.peak or 0) - other.entry.bounds.peak
        least = max(least, entry.bounds.peak + share * beyond)
    limit = entry.bounds.limit
    if least <= limit:
        return None
    sizes = f"{format_bytes(least)} of {format_bytes(limit)}"
    return f"needs at least {sizes}, by the activations of #{number}"


def only_adds_work(entry: Open, other: Compiled) -> bool:
    """Whether `entry` is a plan that fits with nothing but more microbatches or remat added."""
    mine, theirs = entry.candidate, other.entry.candidate
    return (
        other.trial.status == FITS
        and (mine.zero, mine.model, mine.stage) == (theirs.zero, theirs.model, theirs.stage)
        and mine.num_microbatches >= theirs.num_microbatches
        and REMATS.index(mine.remat) >= REMATS.index(theirs.remat)
    )


def _activations(forecast: ForecastNumbers) -> int:
    return sum(row.bytes or 0 for row in forecast.memory.roles if row.role == "activations")
