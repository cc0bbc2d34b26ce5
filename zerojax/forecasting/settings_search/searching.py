"""Decides which candidates a search compiles, and in which order.

A candidate is skipped if its bounds, or candidates that were already compiled, show that it cannot
be the best, or that it should be slower. The result is deterministic except for the time limit.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence

from zerojax.forecasting.forecast_numbers import COMPILED, ForecastNumbers
from zerojax.forecasting.settings_search.candidates import (
    LIST_REMATS,
    Candidate,
    FindBounds,
    MakePlan,
    bounds_on,
)
from zerojax.forecasting.settings_search.evidence import (
    TOLERANCE,
    CompiledCandidate,
    OpenCandidate,
    expected_peak,
    guessed_peak,
    guessed_seconds,
    is_no_larger,
    least_busy_seconds,
    least_seconds,
    only_adds_work,
    why_too_large,
)
from zerojax.forecasting.settings_search.search_result import (
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
from zerojax.hardware.compile_client import CompileError
from zerojax.hardware.gpus import Gpu
from zerojax.plan.make import Plan
from zerojax.tracing.trees import format_bytes

SAME = 0.01
"""Relative difference below which two times count as equal; then the simpler candidate is
preferred."""

ACCURACY = 0.05
"""Accuracy of a guessed peak, as a share of it."""
ROOMY = 0.75
"""Guessed peak, as a multiple of the limit, up to which a candidate is compiled before the smallest
one."""
HOPELESS = 2.0
"""Guessed peak, as a multiple of the limit, above which the run's own settings are not compiled
before others."""

MakeForecast = Callable[[Plan], ForecastNumbers]

INTERRUPTED = "the search was interrupted"
"""Why a search ended."""


def search(
    make_plan_for: MakePlan,
    candidates: Sequence[Candidate],
    gpu: Gpu,
    *,
    forecast_of: MakeForecast,
    own: Candidate | None = None,
    find_bounds: FindBounds | None = None,
    budget: float = 300.0,
    clock: Callable[[], float] = time.monotonic,
    report: Callable[[str], None] = lambda text: None,
    improved: Callable[[Trial], None] = lambda trial: None,
) -> SearchResult:
    """Finds the candidate with the shortest expected step among the candidates that fit into
    memory.

    1. Formulas reject candidates that cannot fit, drop a ZeRO stage that another stage beats in
      both memory and communication time, and give each other candidate a lower bound of its time.
    2. The candidate that should need the least memory is compiled first, with as few microbatches
      as leave room by a guess, which shows at once a plan that fits, or that none with the same
      axes does. The run's own settings are compiled second unless they need far more memory than
      there is, so that the choice is never slower than these.
    3. The others are compiled in the order of their guessed times, or else of their bounds, until
      none is left that could be faster than the best by more than `TOLERANCE`, and should not be
      slower by more. Among candidates with the same time, the candidate with the most microbatches
      comes first, because it is the most likely to fit. Its memory then shows the fewest
      microbatches that should fit, and rules out candidates that need more memory or time.

    Args:
      make_plan_for: function from a candidate to its plan; raises ValueError if the settings are
        impossible.
      candidates: candidates in any order; the result does not depend on the order.
      gpu: specification of the GPU, which messages name.
      forecast_of: function from a plan to its `ForecastNumbers`; it compiles the plan.
      own: candidate with the run's own settings; None if there is no such candidate.
      find_bounds: function that computes the bounds of a candidate by formula; None:
        `bounds_on(gpu, make_plan_for)`.
      budget: time limit in seconds. The compilations of step 2, three at most, are made in any
        case; no other one begins that would end later if it took as long as the longest so far.
      clock: function that returns a monotonic time in seconds.
      report: function that is called with a short text at each stage of the search.
      improved: function that is called with the best trial so far, whenever there is a better one.

    An interrupt (Ctrl-C) ends the search, and the result is the best so far.
    """
    began = clock()
    state = _Search(gpu, make_plan_for, find_bounds or bounds_on(gpu, make_plan_for))
    state.clock, state.improved = clock, improved
    # A set has no order; sorting makes the result independent of the order of the candidates.
    listed = sorted(set(candidates), key=lambda c: c.simplicity)
    left = set(listed)
    try:
        state.compile_roomy(left, forecast_of, report)
        if own is not None and (own in left or state.entry_of(own)) and not state.no_compiler:
            left.discard(own)
            state.compile_first(own, forecast_of, report, most=HOPELESS)
        # `left` changes below, so the loop goes over a list of its own.
        for candidate in [one for one in listed if one in left]:
            left.remove(candidate)
            # Without any compiled plan there would be no result, so the budget is not asked
            # before.
            if state.no_compiler is not None or (state.compiled and clock() - began >= budget):
                state.leave(candidate)
                continue
            report(f"planning {candidate.describe()}")
            state.consider(candidate)
        state.drop_beaten_stages()
        while state.no_compiler is None and (following := state.take_next()) is not None:
            if state.compiled and clock() - began + state.longest > budget:
                break
            report(f"compiling #{len(state.compiled) + 1}: {following.candidate.describe()}")
            if not state.compile(following, forecast_of):
                break
    except KeyboardInterrupt:
        state.why_ended = INTERRUPTED
        state.is_complete = False  # the candidate in work is neither left nor judged
        # Candidates that were not considered must be in the result too.
        for candidate in left:
            state.leave(candidate)
    return state.finish(clock() - began)


class _Search:
    """State of one search: open, compiled and ruled-out candidates, with reasons."""

    def __init__(self, gpu: Gpu, make_plan_for: MakePlan, find_bounds: FindBounds):
        self.gpu = gpu
        self.make_plan_for = make_plan_for
        self.find_bounds = find_bounds
        self.open: list[OpenCandidate] = []
        self.compiled: list[CompiledCandidate] = []
        self.closed: list[Trial] = []
        self.refused: dict[tuple[int, ...], Trial] = {}
        self.products: dict[tuple[str, int], float] = {}
        self.no_compiler: str | None = None
        self.is_complete = True
        self.why_ended = "the time budget was used up"
        self.longest = 0.0  # seconds of the longest compilation
        self.clock: Callable[[], float] = time.monotonic
        self.improved: Callable[[Trial], None] = lambda trial: None

    def compile_roomy(
        self,
        left: set[Candidate],
        forecast_of: MakeForecast,
        report: Callable[[str], None],
    ) -> None:
        """Compiles the candidate that should need the least memory among those that can be planned;
        before it, the same with the fewest microbatches that leave room.

        This shows at once a plan that fits, or that none with the same axes does.

        Args:
          left: candidates that were not considered yet; those that are considered leave it.
          forecast_of, report: as in `search`.
        """
        # The smallest may be impossible, as with tensors that do not divide; then the next one is
        # taken.
        for smallest in sorted(left, key=_size):
            left.remove(smallest)
            entry = self.plan(smallest, report)
            if entry is None:
                continue
            # Fewer microbatches are faster, so the fewest that leave room are tried before the
            # smallest.
            for candidate in sorted(left, key=lambda c: c.simplicity):
                if _has_fewer_microbatches(candidate, smallest) and entry.bounds.layer_inputs:
                    left.remove(candidate)
                    if self.compile_first(candidate, forecast_of, report, most=ROOMY):
                        break
            if self.no_compiler is None and self.best() is None:
                report(f"compiling #{len(self.compiled) + 1}: {smallest.describe()}")
                self.compile(entry, forecast_of)
            # One plan is enough: the other candidates have their turn in the order of their times.
            break

    def plan(self, candidate: Candidate, report: Callable[[str], None]) -> OpenCandidate | None:
        """Plans a candidate, unless it is open already; returns None if formulas rule it out."""
        if self.entry_of(candidate) is None:
            report(f"planning {candidate.describe()}")
            self.consider(candidate)
        return self.entry_of(candidate)

    def entry_of(self, candidate: Candidate) -> OpenCandidate | None:
        """Returns the entry of an open candidate; None if it is not open."""
        return next((entry for entry in self.open if entry.candidate == candidate), None)

    def compile_first(
        self,
        candidate: Candidate,
        forecast_of: MakeForecast,
        report: Callable[[str], None],
        *,
        most: float = math.inf,
    ) -> bool:
        """Plans a candidate, and compiles it unless formulas rule it out or its guessed peak is
        above `most` times the limit; returns whether it was compiled."""
        entry = self.plan(candidate, report)
        if entry is None:
            return False
        if (guessed_peak(entry, self.compiled) or 0.0) > most * entry.bounds.limit:
            return False  # it stays open, and has its turn
        report(f"compiling #{len(self.compiled) + 1}: {candidate.describe()}")
        self.compile(entry, forecast_of)
        return True

    def leave(self, candidate: Candidate) -> None:
        """Closes a candidate without planning it, because the time budget is used up or there is no
        compiler."""
        why = self.no_compiler or self.why_ended
        self.closed.append(Trial(candidate=candidate, status=NOT_TRIED, reason=why))
        self.is_complete = False

    def consider(self, candidate: Candidate) -> None:
        """Plans one candidate and computes its bounds by formula.

        Formulas leave out activations. So if a candidate is already too large by formula, the same
        candidate with more microbatches or more remat is too large as well, and is not even
        planned. In a pipeline, whose buffers formulas include and more microbatches reduce, this
        does not hold. A candidate that the best beats by the time of its kernels, which planned and
        compiled candidates show, is not planned either.
        """
        mesh = candidate.zero, candidate.model, candidate.stage, candidate.expert
        # More microbatches shrink a pipeline's buffers, so a refusal says nothing about them
        # there.
        refused = self.refused.get(mesh) if candidate.stage == 1 else None
        larger = next((c for c in self.compiled if is_no_larger(c, candidate)), None)
        if larger is not None:
            reason = f"needs no less than #{larger.trial.number}, which does not fit"
            self.closed.append(Trial(candidate=candidate, status=TOO_LARGE, reason=reason))
            return
        if refused is not None:
            self.closed.append(dataclasses.replace(refused, candidate=candidate, bound=None))
            return
        beaten = self.why_kernels_too_slow(candidate)
        if beaten is not None:
            self.closed.append(beaten)
            return
        try:
            bounds = self.find_bounds(candidate)
        except ValueError as error:
            reason = str(error).split("\n")[0]
            self.closed.append(Trial(candidate=candidate, status=IMPOSSIBLE, reason=reason))
            return
        if candidate.stage == 1:
            # Without a pipeline these depend on nothing else, so later candidates are ruled out
            # unplanned.
            self.products[candidate.remat, candidate.expert] = bounds.products_seconds
        entry = OpenCandidate(candidate=candidate, bounds=bounds)
        self.open.append(entry)
        # It is closed only after it was opened, so that its bounds are in the result.
        if bounds.peak > bounds.limit:
            sizes = f"{format_bytes(bounds.peak)} of {format_bytes(bounds.limit)}"
            self.close(entry, TOO_LARGE, f"{sizes} needed even without activations")
            self.refused[mesh] = self.closed[-1]

    def close(
        self, entry: OpenCandidate, status: str, reason: str, guess: float | None = None
    ) -> None:
        self.open.remove(entry)
        self.closed.append(
            Trial(
                candidate=entry.candidate,
                status=status,
                reason=reason,
                bound=entry.bounds.seconds,
                guess=guess,
                formula_peak=entry.bounds.peak,
            )
        )

    def drop_beaten_stages(self) -> None:
        """Closes candidates for which another ZeRO stage needs no more memory and no more
        communication time."""
        # The list changes while it is read, so the loop goes over a copy.
        for entry in list(self.open):
            winner = next((other for other in self.open if _beats(other, entry)), None)
            if winner is not None:
                stage = winner.candidate.zero
                self.close(entry, BEATEN, f"zero={stage} needs no more memory and sends no more")

    def take_next(self) -> OpenCandidate | None:
        """Returns the most promising open candidate, and closes candidates that cannot be the
        best."""
        # What compiled plans say changes with every compilation, so all open candidates are asked
        # again.
        for entry in list(self.open):
            reasons = (why_too_large(entry, other) for other in self.compiled)
            too_large = next(filter(None, reasons), None)
            beaten, guess = self.why_beaten(entry), guessed_seconds(entry, self.compiled)
            if too_large is not None:
                self.close(entry, TOO_LARGE, too_large)
            elif beaten is not None:
                self.close(entry, BEATEN, beaten)
            elif guess is not None and self.is_guessed_slower(entry, guess):
                self.close(entry, BEATEN, f"should take {guess:.3g} s, which is a guess", guess)
        return min(self.open, key=self.promise, default=None)

    def promise(self, entry: OpenCandidate) -> tuple:
        """Returns the sort key of an open candidate: the candidate with the smallest key is
        compiled next.

        Candidates that should fit come first, then faster candidates, then simpler candidates.
        """
        candidate, peak = entry.candidate, guessed_peak(entry, self.compiled)
        number = candidate.num_microbatches
        seconds = guessed_seconds(entry, self.compiled) or least_seconds(entry, self.compiled)
        return (
            not self.should_fit(entry),
            _rounded(seconds),
            candidate.stage,
            candidate.model,
            candidate.expert,
            LIST_REMATS.index(candidate.remat),
            candidate.zero,
            # Unknown memory: the most microbatches are the most likely to fit. Known: the fewest
            # are faster.
            -number if peak is None else number,
        )

    def why_beaten(self, entry: OpenCandidate) -> str | None:
        """Returns the reason why `entry` need not be compiled, from the best result so far; None if
        it must be compiled."""
        best = self.best()
        if best is None:
            return None
        slowest = (best.seconds or 0.0) * (1 + TOLERANCE)
        as_fast = [c for c in self.compiled if (c.trial.seconds or 0.0) <= slowest]
        simpler = next((c for c in as_fast if only_adds_work(entry, c)), None)
        if simpler is not None:
            return f"#{simpler.trial.number} fits with fewer microbatches or less remat"
        # The same with fewer microbatches is preferred at equal times, so it must be compiled.
        if self.is_simpler_twin(entry, best):
            return None
        return _why_slow(least_seconds(entry, self.compiled), best)

    def is_guessed_slower(self, entry: OpenCandidate, guess: float) -> bool:
        """Returns whether a candidate of `guess` seconds per step should be slower than the best by
        more than `TOLERANCE`; or, if it should not even fit, not be faster by more."""
        best = self.best()
        if best is None or self.is_simpler_twin(entry, best):
            return False
        # A candidate that should not fit is compiled only if it would clearly be faster.
        margin = TOLERANCE if self.should_fit(entry) else -TOLERANCE
        return guess > (best.seconds or 0.0) * (1 + margin)

    def should_fit(self, entry: OpenCandidate) -> bool:
        peak = guessed_peak(entry, self.compiled)
        # Without a guess a candidate is given its chance.
        return peak is None or peak <= entry.bounds.limit * (1 + ACCURACY)

    def why_kernels_too_slow(self, candidate: Candidate) -> Trial | None:
        """Returns the trial of a candidate whose kernels alone take too long to beat the best, by
        what is known without its plan; None if the candidate must be planned."""
        best = self.best()
        if best is None or _has_fewer_microbatches(candidate, best.candidate):
            return None
        products = self.products.get((candidate.remat, candidate.expert), 0.0)
        least = max(products, least_busy_seconds(candidate, products, self.compiled))
        reason = _why_slow(least, best)
        if reason is None:
            return None
        return Trial(candidate=candidate, status=BEATEN, reason=reason, bound=least)

    def is_simpler_twin(self, entry: OpenCandidate, best: Trial) -> bool:
        """Returns whether `entry` is the best candidate with fewer microbatches, and may still
        fit."""
        peak = expected_peak(entry, self.compiled)
        return (
            _has_fewer_microbatches(entry.candidate, best.candidate)
            and peak is not None
            and peak <= entry.bounds.limit
        )

    def compile(self, entry: OpenCandidate, forecast_of: MakeForecast) -> bool:
        """Compiles one candidate; returns False if there is no compiler."""
        trial = Trial(
            candidate=entry.candidate,
            status=FAILED,
            reason="",
            number=len(self.compiled) + 1,
            bound=entry.bounds.seconds,
            formula_peak=entry.bounds.peak,
        )
        forecast, began, before = None, self.clock(), self.best()
        try:
            forecast = forecast_of(self.make_plan_for(entry.candidate))
        except CompileError as error:
            trial = dataclasses.replace(trial, reason=str(error).split("\n")[0])
        else:
            # Without a compiler every further candidate would end here too.
            if forecast.source != COMPILED:
                self.no_compiler = forecast.why_formula or "nothing was compiled"
                return False
            verdict = forecast.verdict
            spare = f"{format_bytes(abs(verdict.headroom))} "
            trial = dataclasses.replace(
                trial,
                status=FITS if verdict.fits else TOO_LARGE,
                reason=spare + ("to spare" if verdict.fits else "too much"),
                seconds=forecast.estimate.expected_seconds,
                peak=forecast.memory.peak,
            )
        # The candidate stays open until its result is there, so an interrupt leaves it in the
        # list.
        self.open.remove(entry)
        self.compiled.append(CompiledCandidate(entry=entry, trial=trial, forecast=forecast))
        self.longest = max(self.longest, self.clock() - began)
        best = self.best()
        if best is not None and best is not before:
            self.improved(best)
        return True

    def best(self) -> Trial | None:
        """Returns the fitting candidate with the shortest step; among nearly equal times, the
        simplest candidate."""
        fitting = [c.trial for c in self.compiled if c.trial.status == FITS]
        least = min((t.seconds or math.inf for t in fitting), default=math.inf)
        # Times within this share are equal, and the simpler settings are easier to live with.
        equal = [t for t in fitting if (t.seconds or math.inf) <= least * (1 + SAME)]
        return min(equal, key=lambda t: t.candidate.simplicity, default=None)

    def finish(self, elapsed: float) -> SearchResult:
        certain = not self.open and self.is_complete
        for entry in list(self.open):
            self.close(entry, NOT_TRIED, self.no_compiler or self.why_ended)
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
            interrupted=self.why_ended == INTERRUPTED,
        )

    def sentences(self, best: Trial | None, certain: bool) -> Iterator[str]:
        if self.no_compiler is not None:
            yield f"Nothing was chosen: {self.no_compiler}"
            return
        if best is None:
            found = "fits" if certain else f"was found to fit before {self.why_ended}"
            yield f"None of the candidates {found} on {self.gpu.title}."
            return
        time_of = "" if best.seconds is None else f", {best.seconds:.3g} s per step expected"
        yield f"{best.candidate.describe()}{time_of}: the fastest candidate found to fit."
        if best.candidate.expert > 1 and _spans_nodes(best.candidate, self.gpu):
            yield (
                "Its experts are on several nodes, so rows are sent over the network; "
                "the time includes that."
            )
        too_large = [*(c.trial for c in self.compiled), *self.closed]
        # Only candidates that could have been faster are worth a remark.
        number = sum(
            t.status == TOO_LARGE and (t.bound or 0.0) < (best.seconds or 0.0) * (1 - TOLERANCE)
            for t in too_large
        )
        if number:
            yield f"{number} that might be faster {'do' if number > 1 else 'does'} not fit."
        if certain:
            guessed = sum(t.guess is not None for t in self.closed)
            by_guess = f" ({guessed} were ruled out by guesses)" if guessed else ""
            yield f"No other candidate should be more than {TOLERANCE:.0%} faster{by_guess}."
        else:
            left = sum(t.status == NOT_TRIED for t in self.closed)
            ended = self.why_ended[0].upper() + self.why_ended[1:]
            yield f"{ended}; {left} of the other candidates might be faster."


def _size(candidate: Candidate) -> tuple[int, ...]:
    """Returns the sort key of a candidate by memory: the smallest key is expected to need the
    least."""
    return (
        candidate.stage,
        candidate.model,
        candidate.expert,
        -candidate.zero,
        -LIST_REMATS.index(candidate.remat),
        -candidate.num_microbatches,
    )


def _why_slow(least: float, best: Trial) -> str | None:
    """Returns why a step of at least `least` seconds is too slow to beat the best; None if it is
    not."""
    if least < (best.seconds or 0.0) * (1 - TOLERANCE):
        return None
    return f"should not be more than {TOLERANCE:.0%} faster than #{best.number}"


def _has_fewer_microbatches(candidate: Candidate, other: Candidate) -> bool:
    """Returns whether `candidate` differs from `other` only by fewer microbatches."""
    same = dataclasses.replace(candidate, num_microbatches=other.num_microbatches) == other
    return same and candidate.num_microbatches < other.num_microbatches


def _spans_nodes(candidate: Candidate, gpu: Gpu) -> bool:
    """Returns whether the devices of one expert group are on several nodes."""
    # Groups of experts take neighbouring devices, with stages and tensors inside.
    return candidate.expert * candidate.stage * candidate.model > gpu.node_devices


def _beats(one: OpenCandidate, other: OpenCandidate) -> bool:
    """Returns whether `one` differs from `other` only in its ZeRO stage and is not worse in memory
    and communication time."""
    if (
        one is other
        or dataclasses.replace(one.candidate, zero=other.candidate.zero) != other.candidate
    ):
        return False
    mine, theirs = (
        (_rounded(b.seconds), _rounded(b.wire_seconds), b.peak) for b in (one.bounds, other.bounds)
    )
    # Equal stages would beat each other, and both would be dropped.
    if mine == theirs:
        return one.candidate.simplicity < other.candidate.simplicity
    return all(m <= t for m, t in zip(mine, theirs, strict=True))


def _rounded(value: float) -> float:
    """Rounds to three digits, because estimates that differ only in the fourth digit count as
    equal."""
    return float(f"{value:.3g}")
