"""Searches for bucket sizes that reduce exposed communication time (time not overlapped with
products).

How much of a collective the compiler hides depends on its schedule, so only the compiled step
shows it. The formula selects the sizes that are worth a compilation.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence

from zerojax.forecasting.forecast_numbers import COMPILED, ForecastNumbers, TrafficRow
from zerojax.forecasting.roofline import link_bandwidth
from zerojax.forecasting.settings_search.search_result import (
    BEATEN,
    CHOSEN,
    FAILED,
    IMPOSSIBLE,
    NOT_TRIED,
    TOO_LARGE,
    BucketSearch,
    BucketTrial,
)
from zerojax.hardware.compile_client import CompileError
from zerojax.hardware.gpus import Gpu
from zerojax.parallel.bucket_sizes import (
    GATHER,
    IN_LOOPS,
    ONCE,
    OPTIONS,
    REDUCE,
    other_bucket_sizes,
)
from zerojax.parallel.collectives import make_buckets
from zerojax.plan.device_mesh import DATA, PASS_AXES
from zerojax.plan.make import Plan
from zerojax.tracing.trees import num_elements

MARGIN = 0.005
"""Share of a step's time that other sizes have to gain; otherwise the plan's own stay."""
LEAST_EXPOSED = 0.02
"""Least exposed wire time, as a share of the step, for which sizes are compiled: no size can gain
more than that."""
NEARLY = 0.1
"""Smaller differences, relative to the exposed wire time of the plan's sizes by formula, are 0."""
MOST = 4
"""Sizes that are compiled, in addition to a combination of the two best."""

Sizes = Mapping[str, int]
MakePlan = Callable[[Sizes], Plan]
MakeForecast = Callable[[Plan], ForecastNumbers]


def search_buckets(
    make_plan_for: MakePlan,
    gpu: Gpu,
    *,
    forecast_of: MakeForecast,
    before: ForecastNumbers | None = None,
    most: int = MOST,
    budget: float = 300.0,
    clock: Callable[[], float] = time.monotonic,
    report: Callable[[str], None] = lambda text: None,
) -> BucketSearch:
    """Finds the sizes with the least exposed wire time among those that fit.

    All sizes that lead to other collectives are ranked by `bare_seconds`; the best of them are
    compiled, and, if both options gain, their best sizes together. Sizes replace the plan's own if
    exposed wire time and step are both shorter, the step by `MARGIN`. Nothing is compiled if the
    exposed wire time is below `LEAST_EXPOSED` of the step.

    Args:
      make_plan_for: {"reduce_bucket_size" or "allgather_bucket_size": elements} -> the plan with
        these sizes; {}: with its own.
      gpu: the card.
      forecast_of: plan -> its `ForecastNumbers`; compiles the plan.
      before: the forecast of the plan with its own sizes; None compiles it.
      most: number of sizes that are compiled.
      budget: time limit in seconds; a compilation that has begun still finishes.
      clock: returns the time in seconds; monotonic.
      report: called with a short text about each stage of the search.

    Raises:
      CompileError: the compiler rejected the plan with its own sizes.
    """
    began, plan = clock(), make_plan_for({})
    before = before or forecast_of(plan)
    own: dict[str, int] = {option: getattr(plan.settings, option) for option in OPTIONS}
    if before.source != COMPILED or before.estimate.step_seconds is None:
        why = before.why_formula or f"{gpu.title} has no published peak to hide the wire behind"
        return BucketSearch(
            trials=(), own=own, before=None, after=None, words=(), sentence=f"Buckets: {why}"
        )
    exposed = before.estimate.exposed_wire_seconds
    if exposed < LEAST_EXPOSED * before.estimate.step_seconds:
        share = exposed / before.estimate.step_seconds
        return BucketSearch(
            trials=(), own=own, before=exposed, after=exposed, words=(),
            sentence=(
                f"Buckets as they are: {exposed * 1e3:.3g} ms of communication time not hidden, "
                f"{share:.1%} "
                "of the step; no other size was compiled."
            ),
        )  # fmt: skip
    trials = _ranked(make_plan_for, gpu, other_bucket_sizes(plan), bare_seconds(plan, gpu))
    ours = _Search(make_plan_for, forecast_of, before, trials, report)
    for trial in [one for one in trials if one.status == NOT_TRIED][:most]:
        if clock() - began >= budget:
            break
        ours.compile(trial)
    together = ours.best_of_each_option()
    if len(together) == len(OPTIONS) and clock() - began < budget:
        trial = _by_formula(make_plan_for, gpu, together)
        trials.append(trial)
        ours.compile(trial)
    return ours.finish(own)


def bare_seconds(plan: Plan, gpu: Gpu) -> float:
    """Returns the communication time per step, by formula, that no schedule can overlap with
    products.

    The first gather of a step comes before all products that read it, and its last reduction after
    all products whose gradients it sums: one bucket each. So does the last reduction of each
    iteration of a loop over layers, which XLA does not carry into the next one. Other collectives
    may be hidden. The compiler chooses which bucket is the first or the last; the largest is
    assumed.
    """
    leaves = plan.placement.leaves.values()
    elements = 0
    for option in OPTIONS:
        once = {x.name: num_elements(x.shape) for x in leaves if x.access in ONCE[option]}
        elements += _largest(once, getattr(plan.settings, option))
    limit = getattr(plan.settings, GATHER if plan.zero == 3 else REDUCE)
    loops = [leaf for leaf in leaves if leaf.access in IN_LOOPS and not leaf.frozen]
    for slices in {leaf.num_slices for leaf in loops}:
        layer = {x.name: num_elements(x.shape) // slices for x in loops if x.num_slices == slices}
        elements += plan.num_microbatches * slices * _largest(layer, limit)
    devices = math.prod(plan.mesh.shape.get(axis, 1) for axis in PASS_AXES)
    sent = elements * plan.precision.compute_dtype.itemsize * (devices - 1) / devices
    return sent / _ring_bandwidth(plan, gpu)


def _largest(elements: Mapping[str, int], limit: int) -> int:
    """Returns the elements of the largest bucket."""
    buckets = make_buckets(elements, limit)
    return max((sum(elements[name] for name in names) for names in buckets), default=0)


def _ring_bandwidth(plan: Plan, gpu: Gpu) -> float:
    axes = [axis for axis in PASS_AXES if plan.mesh.shape.get(axis, 1) > 1]
    ring = TrafficRow(
        kind="all-gather",
        axis="+".join(axes) or DATA,
        dtype="",
        count=1,
        payload_bytes=0,
        wire_bytes=0,
        loop_depth=0,
        crosses_nodes=plan.mesh.size > gpu.node_devices,
        hidden=0.0,
    )
    return link_bandwidth(gpu, {str(n): size for n, size in plan.mesh.shape.items()}, ring)


def _ranked(
    make_plan_for: MakePlan, gpu: Gpu, sizes: Sequence[tuple[str, int]], own: float
) -> list[BucketTrial]:
    """Returns trials that each change one bucket size, in the order in which they are compiled.

    The least exposed wire time by formula comes first, among nearly equal ones the largest buckets,
    which are fewest. Sizes that expose more than the plan's own are ruled out.
    """
    found = [_by_formula(make_plan_for, gpu, {option: size}) for option, size in sizes]
    for place, trial in enumerate(found):
        if trial.status == NOT_TRIED and (trial.formula or 0.0) > own:
            reason = "exposes more communication time, by formula"
            found[place] = dataclasses.replace(trial, status=BEATEN, reason=reason)
    step = NEARLY * own or 1.0
    return sorted(found, key=lambda x: (_steps(x.formula, step), -max(x.sizes.values())))


def _steps(formula: float | None, step: float) -> float:
    return math.inf if formula is None else round(formula / step)


def _by_formula(make_plan_for: MakePlan, gpu: Gpu, sizes: Sizes) -> BucketTrial:
    try:
        bare = bare_seconds(make_plan_for(sizes), gpu)
    except ValueError as error:
        reason = str(error).split("\n")[0]
        return BucketTrial(sizes=dict(sizes), status=IMPOSSIBLE, reason=reason)
    reason = "the time budget was used up, or other sizes are better by formula"
    return BucketTrial(sizes=dict(sizes), status=NOT_TRIED, reason=reason, formula=bare)


class _Search:
    """The compilations of one search."""

    def __init__(
        self,
        make_plan_for: MakePlan,
        forecast_of: MakeForecast,
        before: ForecastNumbers,
        trials: list[BucketTrial],
        report: Callable[[str], None],
    ):
        self.make_plan_for, self.forecast_of, self.report = make_plan_for, forecast_of, report
        self.before, self.trials = before, trials

    def compile(self, trial: BucketTrial) -> None:
        """Compiles a trial and replaces it by the result."""
        self.report(f"compiling with {', '.join(trial.words())}")
        place = self.trials.index(trial)
        try:
            forecast = self.forecast_of(self.make_plan_for(trial.sizes))
        except CompileError as error:
            reason = str(error).split("\n")[0]
            self.trials[place] = dataclasses.replace(trial, status=FAILED, reason=reason)
            return
        fits = forecast.verdict.fits
        self.trials[place] = dataclasses.replace(
            trial,
            exposed=forecast.estimate.exposed_wire_seconds,
            seconds=forecast.estimate.step_seconds,
            peak=forecast.memory.peak,
            status=BEATEN if fits else TOO_LARGE,
            reason="" if fits else forecast.verdict.reasons[0],
        )

    def gains(self, trial: BucketTrial) -> bool:
        """Returns whether a trial fits and reduces both exposed communication time and step
        time.
        """
        own = self.before.estimate
        assert own.step_seconds is not None
        return (
            trial.status == BEATEN
            and trial.exposed is not None
            and trial.seconds is not None
            and trial.exposed < own.exposed_wire_seconds
            and trial.seconds < own.step_seconds * (1 - MARGIN)
        )

    def best_of_each_option(self) -> dict[str, int]:
        """Returns, for each option, the size that gains most alone, if any gains."""
        found: dict[str, int] = {}
        for trial in sorted(filter(self.gains, self.trials), key=_cost, reverse=True):
            found |= trial.sizes
        return found

    def finish(self, own: dict[str, int]) -> BucketSearch:
        before = self.before.estimate
        best = min(filter(self.gains, self.trials), key=_cost, default=None)
        tried = sum(trial.exposed is not None for trial in self.trials)
        now = f"{before.exposed_wire_seconds * 1e3:.3g} ms of communication time not hidden"
        if best is None:
            sizes = f"{tried} other size{'s were' if tried != 1 else ' was'} compiled"
            kept = (
                f"Buckets as they are: {now}; {sizes}, and none reduces this time and gains "
                f"{MARGIN:.1%}."
            )
            return BucketSearch(
                trials=self._explained(None),
                own=own,
                before=before.exposed_wire_seconds,
                after=before.exposed_wire_seconds,
                words=(),
                sentence=kept,
            )
        assert best.exposed is not None
        assert best.seconds is not None
        assert before.step_seconds is not None
        from_to = f"{before.step_seconds * 1e3:,.4g} to {best.seconds * 1e3:,.4g} ms"
        return BucketSearch(
            trials=self._explained(best),
            own=own,
            before=before.exposed_wire_seconds,
            after=best.exposed,
            words=best.words(),
            sentence=(
                f"Buckets: {', '.join(best.words())} leaves {best.exposed * 1e3:.3g} instead of "
                f"{now}; a step from {from_to} at best."
            ),
        )

    def _explained(self, best: BucketTrial | None) -> tuple[BucketTrial, ...]:
        """Returns the trials with a reason for each, and with the chosen one marked."""
        found = []
        for trial in self.trials:
            if trial is best:
                trial = dataclasses.replace(
                    trial, status=CHOSEN, reason="least communication time not hidden"
                )
            elif trial.status == BEATEN and not trial.reason:
                why = (
                    "exposes more communication time than the chosen one"
                    if self.gains(trial)
                    else "gains too little"
                )
                trial = dataclasses.replace(trial, reason=why)
            found.append(trial)
        return tuple(found)


def _cost(trial: BucketTrial) -> tuple[float, float]:
    return trial.exposed or 0.0, trial.seconds or 0.0
