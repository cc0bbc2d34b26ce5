"""Searches for the settings of a run in rounds: without offload, then with increasing offload, then
for bucket sizes.

Offload is slower than every plan that fits without it, so the next round begins only if nothing
fits in the round before. A run whose own settings offload state has one round.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.mesh import DEVICE, HOST, OffloadConfig
from zerojax.forecasting.forecast_numbers import ForecastNumbers
from zerojax.forecasting.settings_search.buckets import search_buckets
from zerojax.forecasting.settings_search.candidates import LIST_OPTION, LIST_REMATS, Candidate
from zerojax.forecasting.settings_search.mixed_remat import search_mixes
from zerojax.forecasting.settings_search.search_result import CHOSEN, SearchResult, Trial
from zerojax.forecasting.settings_search.searching import MakeForecast, search
from zerojax.hardware.compile_client import CompileError
from zerojax.hardware.gpus import Gpu
from zerojax.plan.counts import role_tiers
from zerojax.plan.make import Plan

OFFLOADS: tuple[Mapping[str, Any], ...] = (
    {"opt_state": HOST},
    {"opt_state": HOST, "activations": HOST},
    {"opt_state": HOST, "params": HOST},
    {"opt_state": HOST, "params": HOST, "activations": HOST},
)
"""Settings of offload in each round of the search, the fewest transfers per step first."""
SPARED = 0.9
"""Share of the free device memory that a part of the optimizer state may use."""
LEAST_SHARE = 0.05
"""Smallest share of the optimizer state on the device for which a plan is compiled."""

PlanFor = Callable[[Candidate, Mapping[str, Any]], Plan]
"""Function from (candidate, other fields of `MeshConfig`) to the plan; raises ValueError for
impossible settings."""


@dataclass(frozen=True, kw_only=True)
class SearchedRun:
    """The run whose settings are searched.

    Attributes:
      plan_for: function that plans a candidate.
      candidates: candidates of the search.
      offload: offload in the run's own settings.
      own: candidate with the run's own settings; None if there is no such candidate.
    """

    plan_for: PlanFor
    candidates: Sequence[Candidate]
    offload: OffloadConfig
    own: Candidate | None = None


def find_settings(
    run: SearchedRun,
    gpu: Gpu,
    *,
    forecast_of: MakeForecast,
    budget: float = 300.0,
    clock: Callable[[], float] = time.monotonic,
    report: Callable[[str], None] = lambda text: None,
    improved: Callable[[Trial], None] = lambda trial: None,
) -> SearchResult:
    """Finds the candidate that fits into memory with the shortest step; uses offload only if
    nothing fits without it.

    Args:
      run: the run whose settings are searched.
      gpu: specification of the GPU.
      forecast_of: function from a plan to its `ForecastNumbers`; it compiles the plan.
      budget: time limit in seconds, as in `search`.
      clock: function that returns a monotonic time in seconds.
      report: function that is called with a short text at each stage of the search.
      improved: function that is called with the best trial so far, whenever there is a better one.
    """
    return _Rounds(run, gpu, forecast_of, budget, clock, report, improved).run_all()


class _Rounds:
    """State of one search over several rounds: without offload, then with increasing offload."""

    def __init__(
        self,
        run: SearchedRun,
        gpu: Gpu,
        forecast_of: MakeForecast,
        budget: float,
        clock: Callable[[], float],
        report: Callable[[str], None],
        improved: Callable[[Trial], None],
    ) -> None:
        self.run, self.gpu, self.report, self.improved = run, gpu, report, improved
        self.budget, self.clock, self.began = budget, clock, clock()
        self.longest = 0.0  # seconds of the longest compilation

        def timed(plan: Plan) -> ForecastNumbers:
            began = clock()
            try:
                return forecast_of(plan)
            # A compilation that fails takes time as well.
            finally:
                self.longest = max(self.longest, clock() - began)

        self.forecast_of = timed

    def left(self) -> float:
        """Returns the remaining seconds of the search's time budget; 0 if one more compilation
        could exceed it."""
        left = self.budget - (self.clock() - self.began)
        # The longest so far is the best guess of the next one.
        return left if left > self.longest else 0.0

    def run_all(self) -> SearchResult:
        options: dict[str, Any] = {}
        result = self.round(self.run.candidates, options, "")
        try:
            # Only if nothing fits for certain is offload worth its transfers.
            nothing_fits = result.chosen is None and result.certain and not result.interrupted
            if nothing_fits and self.run.offload.is_off:
                result, options = self.with_offload(result)
            for refine in (self.with_mixes, self.with_buckets):
                if not result.interrupted:
                    result = refine(result, options)
        except KeyboardInterrupt:  # the result so far counts
            result = dataclasses.replace(result, interrupted=True)
        if result.chosen is not None:
            chosen = _chosen_sizes(result)
            result = dataclasses.replace(result, options={**options, **chosen})
        return dataclasses.replace(result, elapsed=self.clock() - self.began)

    def round(
        self, candidates: Sequence[Candidate], options: Mapping[str, Any], where: str
    ) -> SearchResult:
        count = len(candidates)
        self.report(f"searching {count} candidates{where}, for {self.left():.0f} s at most")
        return search(
            lambda candidate: self.run.plan_for(candidate, options),
            candidates,
            self.gpu,
            forecast_of=self.forecast_of,
            # The own settings may be none of this round's candidates, as with unrolled loops under
            # offload.
            own=self.run.own if self.run.own in candidates else None,
            budget=self.left(),
            clock=self.clock,
            report=self.report,
            improved=self.improved,
        )

    def with_offload(self, without: SearchResult) -> tuple[SearchResult, dict[str, Any]]:
        """Runs rounds with increasing offload until a candidate fits; returns the result and the
        offload settings of the last round."""
        sentences, result = [f"Without offload: {without.sentence}"], without
        for fields in OFFLOADS:
            if result is not without and (result.interrupted or not self.left()):
                break
            options = {"offload": self.run.offload.chosen(**fields)}
            candidates = self.run.candidates
            if fields.keys() - {"opt_state"}:  # layers move one by one, in a loop
                candidates = [dataclasses.replace(one, unroll=False) for one in candidates]
            found = self.round(candidates, options, f" with {', '.join(offload_words(fields))}")
            sentences.append(f"With {', '.join(offload_words(fields))}: {found.sentence}")
            if found.chosen is None:
                continue
            result = dataclasses.replace(found, settings=tuple(offload_words(fields)))
            if fields == {"opt_state": HOST}:
                result, options, more = self.with_share(result, options)
                sentences += more
            return dataclasses.replace(result, sentence=" ".join(sentences)), options
        return dataclasses.replace(result, sentence=" ".join(sentences)), {}

    def with_share(
        self, result: SearchResult, options: dict[str, Any]
    ) -> tuple[SearchResult, dict[str, Any], list[str]]:
        """Tries to keep a part of the optimizer state on the device, as much as fits, in place of
        offloading all of it.

        Returns:
          (result, mesh options, sentences about them). They are those of the plan that offloads the
          whole state, unless the new plan fits and its step is shorter.
        """
        chosen, before = result.chosen, result.forecast
        assert chosen is not None
        assert before is not None
        share = share_that_fits(self.run.plan_for(chosen.candidate, options), before)
        if share < LEAST_SHARE or not self.left():
            return result, options, []
        shares = ((DEVICE, share), (HOST, round(1 - share, 2)))
        offload = self.run.offload.chosen(opt_state=shares)
        self.report(f"compiling with {share:.0%} of the optimizer's state on the device")
        try:
            found = self.forecast_of(self.run.plan_for(chosen.candidate, {"offload": offload}))
        except (CompileError, ValueError):
            return result, options, []
        seconds = found.estimate.expected_seconds
        # Missing times compare as no gain.
        if not found.verdict.fits or (seconds or 0.0) >= (chosen.seconds or math.inf):
            return result, options, []
        trial = dataclasses.replace(
            chosen, seconds=seconds, peak=found.memory.peak, status=CHOSEN, reason="state in shares"
        )
        trials: tuple[Trial, ...] = (trial, *(x for x in result.trials if x is not chosen))
        words = tuple(offload_words({"opt_state": shares}))
        result = dataclasses.replace(
            result, trials=trials, chosen=trial, forecast=found, settings=words
        )
        return (
            result,
            {"offload": offload},
            [f"With {words[0]} the plan still fits, and is faster."],
        )

    def with_mixes(self, result: SearchResult, options: Mapping[str, Any]) -> SearchResult:
        """Replaces the recomputation of the chosen candidate by a value for each loop over layers,
        if that is faster."""
        values = {one.remat for one in self.run.candidates if one.remat_option == LIST_OPTION}
        if result.chosen is None or not values:
            return result
        return search_mixes(
            lambda candidate: self.run.plan_for(candidate, options),
            result,
            values=[value for value in LIST_REMATS if value in values],
            forecast_of=self.forecast_of,
            has_time=lambda: self.left() > 0,
            report=self.report,
        )

    def with_buckets(self, result: SearchResult, options: Mapping[str, Any]) -> SearchResult:
        """Adds bucket sizes for the chosen candidate to the result, searched within the remaining
        time."""
        chosen, before = result.chosen, result.forecast
        # One device sends nothing, so buckets change nothing.
        if chosen is None or before is None or before.num_devices == 1:
            return result
        self.report(f"searching sizes of buckets, for {self.left():.0f} s at most")
        found = search_buckets(
            lambda sizes: self.run.plan_for(chosen.candidate, {**options, **sizes}),
            self.gpu,
            forecast_of=self.forecast_of,
            before=before,
            budget=self.left(),
            clock=self.clock,
            report=self.report,
        )
        return dataclasses.replace(result, buckets=found)


def share_that_fits(plan: Plan, forecast: ForecastNumbers) -> float:
    """Returns the share of the optimizer state that fits on the device instead of the host, rounded
    down to hundredths.

    Loading slices of the remaining state needs as much device memory as before.

    Args:
      plan: plan with `opt_state: host`.
      forecast: compiled forecast of the plan.
    """
    on_host = sum(tier.get(HOST, 0) for tier in role_tiers(plan).values())
    if not on_host:
        return 0.0
    return math.floor(100 * min(SPARED * forecast.verdict.headroom / on_host, 0.99)) / 100


def offload_words(fields: Mapping[str, Any]) -> list[str]:
    """Returns the KEY=VALUE texts that set these fields of `OffloadConfig`."""

    def text(value: str | Sequence[tuple[str, float]]) -> str:
        if isinstance(value, str):
            return value
        return f"{{{', '.join(f'{tier}: {share:g}' for tier, share in value)}}}"

    return [f"mesh.offload.{name}={text(value)}" for name, value in fields.items()]


def _chosen_sizes(result: SearchResult) -> dict[str, int]:
    """Returns the bucket sizes that replace the plan's own; {} if the plan's own sizes are kept."""
    if result.buckets is None:
        return {}
    chosen = next((trial for trial in result.buckets.trials if trial.status == CHOSEN), None)
    return {} if chosen is None else dict(chosen.sizes)
