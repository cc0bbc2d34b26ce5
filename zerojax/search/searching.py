"""In which order candidates are compiled, and which need not be. Deterministic but for the clock.

Knows formulas and forecasts by their numbers; makes and compiles plans through what it is given.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence

from zerojax.compiler import CompileError
from zerojax.forecast.result import COMPILED, Forecast
from zerojax.gpus import Gpu
from zerojax.plan import Plan
from zerojax.search.bounds import Bounds, FindBounds, MakePlan, bounds_on
from zerojax.search.candidates import REMATS, Candidate
from zerojax.search.result import (
    BEATEN,
    CHOSEN,
    FAILED,
    FITS,
    IMPOSSIBLE,
    NOT_TRIED,
    TOO_LARGE,
    SearchResult,
    Trial,
)
from zerojax.trees import format_bytes

TOLERANCE = 0.05
"""What could be faster by less than this share is not compiled: the estimate is no better."""
CAUTION = 0.9
"""Of the activations of one compiled plan, what another is taken to need at least."""

MakeForecast = Callable[[Plan], Forecast]


def search(
    make_plan_for: MakePlan,
    candidates: Sequence[Candidate],
    gpu: Gpu,
    *,
    forecast_of: MakeForecast,
    find_bounds: FindBounds | None = None,
    budget: float = 300.0,
    clock: Callable[[], float] = time.monotonic,
    report: Callable[[str], None] = lambda text: None,
) -> SearchResult:
    """Finds the candidate with the least estimated time per step among those that fit.

    Formulas go first: they refuse what cannot fit, drop a stage that another one beats in both
    memory and wire, and give each candidate a time that it cannot beat. The rest is compiled from
    the least such time on, until no candidate can beat the best one by more than `TOLERANCE`. What
    one compiled program needs rules out those that need more.

    Args:
      make_plan_for: raises ValueError for settings that cannot be.
      candidates: in any order; the result does not depend on it.
      gpu: the card, for messages.
      forecast_of: compiles a plan.
      find_bounds: what formulas say of a candidate; None takes `bounds_on(gpu, make_plan_for)`.
      budget: seconds; a compilation that has begun is finished, and one is always begun.
      clock: seconds.
      report: told what is being done.
    """
    began = clock()
    state = _Search(gpu, make_plan_for, find_bounds or bounds_on(gpu, make_plan_for))
    for candidate in sorted(set(candidates), key=lambda c: c.simplicity):
        report(f"planning {candidate.describe()}")
        state.consider(candidate)
    state.drop_beaten_stages()
    while (following := state.take_next()) is not None:
        if state.compiled and clock() - began >= budget:
            break
        report(f"compiling #{len(state.compiled) + 1}: {following.candidate.describe()}")
        if not state.compile(following, forecast_of):
            break
    return state.finish(clock() - began)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Open:
    """A candidate that may still be the one."""

    candidate: Candidate
    bounds: Bounds

    @property
    def order(self) -> tuple:
        """By time; what differs in the fourth digit only: by wire, then by simplicity."""
        seconds, wire = _rounded(self.bounds.seconds), _rounded(self.bounds.wire_seconds)
        return (seconds, wire, self.candidate.simplicity)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Compiled:
    """A candidate that was compiled; `forecast` is None where the compiler failed."""

    entry: _Open
    trial: Trial
    forecast: Forecast | None


class _Search:
    """The state of one search: what is open, what is compiled, what was ruled out and why."""

    def __init__(self, gpu: Gpu, make_plan_for: MakePlan, find_bounds: FindBounds):
        self.gpu = gpu
        self.make_plan_for = make_plan_for
        self.find_bounds = find_bounds
        self.open: list[_Open] = []
        self.compiled: list[_Compiled] = []
        self.closed: list[Trial] = []
        self.refused: dict[tuple[int, int], Trial] = {}
        self.no_compiler: str | None = None

    def consider(self, candidate: Candidate) -> None:
        """Plans one candidate and asks the formulas.

        They know no activations, so more microbatches or remat cannot save what is too large
        already: such candidates are not even planned.
        """
        refused = self.refused.get((candidate.zero, candidate.model))
        if refused is not None:
            self.closed.append(dataclasses.replace(refused, candidate=candidate, bound=None))
            return
        try:
            bounds = self.find_bounds(candidate)
        except ValueError as error:
            reason = str(error).split("\n")[0]
            self.closed.append(Trial(candidate=candidate, status=IMPOSSIBLE, reason=reason))
            return
        entry = _Open(candidate=candidate, bounds=bounds)
        self.open.append(entry)
        if bounds.peak > bounds.limit:
            sizes = f"{format_bytes(bounds.peak)} of {format_bytes(bounds.limit)}"
            self.close(entry, TOO_LARGE, f"without activations already {sizes}")
            self.refused[candidate.zero, candidate.model] = self.closed[-1]

    def close(self, entry: _Open, status: str, reason: str) -> None:
        self.open.remove(entry)
        self.closed.append(
            Trial(
                candidate=entry.candidate,
                status=status,
                reason=reason,
                bound=entry.bounds.seconds,
                formula_peak=entry.bounds.peak,
            )
        )

    def drop_beaten_stages(self) -> None:
        """Of candidates that differ in the stage alone, those that another one beats in all."""
        for entry in list(self.open):
            winner = next((other for other in self.open if _beats(other, entry)), None)
            if winner is not None:
                stage = winner.candidate.zero
                self.close(entry, BEATEN, f"zero={stage} needs no more memory and sends no more")

    def take_next(self) -> _Open | None:
        """The open candidate with the least time; closes those that cannot be the one."""
        best = self.best()
        for entry in list(self.open):
            if best is not None and entry.bounds.seconds >= (best.seconds or 0.0) * (1 - TOLERANCE):
                reason = f"cannot be more than {TOLERANCE:.0%} faster than #{best.number}"
                self.close(entry, BEATEN, reason)
                continue
            simpler = next((c for c in self.compiled if _only_adds_work(entry, c)), None)
            if simpler is not None:
                reason = f"#{simpler.trial.number} fits with fewer microbatches or less remat"
                self.close(entry, BEATEN, reason)
                continue
            reasons = (self.too_large(entry, other) for other in self.compiled)
            why = next(filter(None, reasons), None)
            if why is not None:
                self.close(entry, TOO_LARGE, why)
        return min(self.open, key=lambda e: e.order, default=None)

    def too_large(self, entry: _Open, other: _Compiled) -> str | None:
        """Why `entry` cannot fit, judged by a compiled plan with no lighter remat; None if it may.

        Activations neither shrink with less remat, nor by more than the rows in flight do.
        """
        mine, theirs = entry.candidate, other.entry.candidate
        if other.forecast is None or mine.model != theirs.model:
            return None
        if REMATS.index(mine.remat) > REMATS.index(theirs.remat):
            return None
        number = other.trial.number
        as_many_rows = mine.num_microbatches <= theirs.num_microbatches
        as_much_state = mine.zero <= theirs.zero and entry.bounds.peak >= other.entry.bounds.peak
        if other.trial.status == TOO_LARGE and as_many_rows and as_much_state:
            return f"needs no less than #{number}, which does not fit"
        share = CAUTION * min(1.0, theirs.num_microbatches / mine.num_microbatches)
        least = entry.bounds.state + share * _activations(other.forecast)
        if mine.zero == theirs.zero:
            beyond = (other.trial.peak or 0) - other.entry.bounds.peak
            least = max(least, entry.bounds.peak + share * beyond)
        limit = entry.bounds.limit
        if least <= limit:
            return None
        sizes = f"{format_bytes(least)} of {format_bytes(limit)}"
        return f"needs at least {sizes}, by the activations of #{number}"

    def compile(self, entry: _Open, forecast_of: MakeForecast) -> bool:
        """Compiles one candidate; False where there is no compiler."""
        trial = Trial(
            candidate=entry.candidate,
            status=FAILED,
            reason="",
            number=len(self.compiled) + 1,
            bound=entry.bounds.seconds,
            formula_peak=entry.bounds.peak,
        )
        forecast = None
        try:
            forecast = forecast_of(self.make_plan_for(entry.candidate))
        except CompileError as error:
            trial = dataclasses.replace(trial, reason=str(error).split("\n")[0])
        else:
            if forecast.source != COMPILED:
                self.no_compiler = forecast.why_formula or "nothing was compiled"
                return False
            verdict = forecast.verdict
            spare = f"{format_bytes(abs(verdict.headroom))} "
            trial = dataclasses.replace(
                trial,
                status=FITS if verdict.fits else TOO_LARGE,
                reason=spare + ("to spare" if verdict.fits else "too much"),
                seconds=forecast.estimate.step_seconds,
                peak=forecast.memory.peak,
            )
        self.open.remove(entry)
        self.compiled.append(_Compiled(entry=entry, trial=trial, forecast=forecast))
        return True

    def best(self) -> Trial | None:
        """Of those that fit the one with the least time; of equal ones the simplest."""
        fitting = [c.trial for c in self.compiled if c.trial.status == FITS]
        return min(
            fitting,
            key=lambda t: (_rounded(t.seconds or math.inf), t.candidate.simplicity),
            default=None,
        )

    def finish(self, elapsed: float) -> SearchResult:
        certain = not self.open
        for entry in list(self.open):
            self.close(entry, NOT_TRIED, self.no_compiler or "the budget was spent")
        best = self.best()
        sentence = " ".join(self.sentences(best, certain))
        trials = [c.trial for c in self.compiled]
        chosen = forecast = None
        if best is not None:
            chosen = dataclasses.replace(best, status=CHOSEN)
            place = trials.index(best)
            trials[place] = chosen
            forecast = self.compiled[place].forecast
        order = [NOT_TRIED, BEATEN, TOO_LARGE, IMPOSSIBLE]
        trials += sorted(
            self.closed,
            key=lambda t: (order.index(t.status), t.bound or 0.0, t.candidate.simplicity),
        )
        return SearchResult(
            trials=tuple(trials),
            chosen=chosen,
            forecast=forecast,
            certain=certain,
            sentence=sentence,
            elapsed=elapsed,
        )

    def sentences(self, best: Trial | None, certain: bool) -> Iterator[str]:
        if self.no_compiler is not None:
            yield f"Nothing was chosen: {self.no_compiler}"
            return
        if best is None:
            found = "fits" if certain else "was found to fit before the budget was spent"
            yield f"None of the candidates {found} on {self.gpu.title}."
            return
        time_of = "" if best.seconds is None else f", {best.seconds:.3g} s per step at best"
        yield f"{best.candidate.describe()}{time_of}: the cheapest that was found to fit."
        too_large = [*(c.trial for c in self.compiled), *self.closed]
        number = sum(
            t.status == TOO_LARGE and (t.bound or 0.0) < (best.seconds or 0.0) * (1 - TOLERANCE)
            for t in too_large
        )
        if number:
            yield f"{number} that might be faster {'do' if number > 1 else 'does'} not fit."
        if certain:
            yield f"No other one can be more than {TOLERANCE:.0%} faster."
        else:
            left = sum(t.status == NOT_TRIED for t in self.closed)
            yield f"The budget was spent with {left} left that might be faster."


def _only_adds_work(entry: _Open, other: _Compiled) -> bool:
    """Whether `entry` is a plan that fits with nothing but more microbatches or remat added."""
    mine, theirs = entry.candidate, other.entry.candidate
    return (
        other.trial.status == FITS
        and (mine.zero, mine.model) == (theirs.zero, theirs.model)
        and mine.num_microbatches >= theirs.num_microbatches
        and REMATS.index(mine.remat) >= REMATS.index(theirs.remat)
    )


def _beats(one: _Open, other: _Open) -> bool:
    """Whether `one` differs from `other` in its stage alone, and is as good or better in all."""
    if (
        one is other
        or dataclasses.replace(one.candidate, zero=other.candidate.zero) != other.candidate
    ):
        return False
    mine, theirs = (
        (_rounded(b.seconds), _rounded(b.wire_seconds), b.peak) for b in (one.bounds, other.bounds)
    )
    if mine == theirs:
        return one.candidate.simplicity < other.candidate.simplicity
    return all(m <= t for m, t in zip(mine, theirs, strict=True))


def _activations(forecast: Forecast) -> int:
    return sum(row.bytes or 0 for row in forecast.memory.roles if row.role == "activations")


def _rounded(value: float) -> float:
    """To three digits: an estimate that differs in the fourth is the same."""
    return float(f"{value:.3g}")
