"""Result of a search: one trial per candidate, the choice and its reason."""

from __future__ import annotations

import dataclasses

from zerojax.forecasting.result import ForecastNumbers
from zerojax.forecasting.search.candidates import Candidate

CHOSEN = "chosen"
FITS = "fits"
TOO_LARGE = "does not fit"
BEATEN = "beaten"
FAILED = "failed"
IMPOSSIBLE = "impossible"
NOT_TRIED = "not tried"


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
