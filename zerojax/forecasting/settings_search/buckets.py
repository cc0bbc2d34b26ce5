"""Searches for communication bucket sizes that reduce the exposed communication time, which is the
time that does not overlap with matrix products.

How much of a collective overlaps depends on the compiler's schedule, so only the compiled step
shows it. A formula selects the sizes that are worth a compilation.
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
from zerojax.placement.device_mesh import DATA, PASS_AXES
from zerojax.plan.make import Plan
from zerojax.tracing.trees import num_elements
from zerojax.transport.bucket_sizes import (
    GATHER,
    ONCE,
    OPTIONS,
    REDUCE,
    other_bucket_sizes,
)
from zerojax.transport.collectives import make_buckets

MARGIN = 0.005
"""Share of a step's time that other bucket sizes must save; if they save less, the plan's own sizes
are kept."""
LEAST_EXPOSED = 0.02
"""Smallest exposed communication time, as a share of the step, for which other sizes are compiled:
no size can save more than this time."""
NEARLY = 0.1
"""Smaller differences, relative to the exposed wire time of the plan's sizes by formula, are 0."""
MOST = 4
"""Largest number of sizes that are compiled, in addition to one combination of the best size of
each option."""

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
    """Finds the bucket sizes with the least exposed communication time among the sizes that fit
    into memory.

    All sizes that lead to different collectives are ranked by `bare_seconds`, and the best are
    compiled. If both options gain, their best sizes are also compiled together. The sizes replace
    the plan's own if they reduce both the exposed communication time and the step time, the step
    time by at least `MARGIN`. Nothing is compiled if the exposed communication time is below
    `LEAST_EXPOSED` of the step.

    Args:
      make_plan_for: function from {"reduce_bucket_size" or "allgather_bucket_size": elements} to
        the plan with these sizes; {} gives the plan with its own sizes.
      gpu: specification of the GPU.
      forecast_of: function from a plan to its `ForecastNumbers`; it compiles the plan.
      before: forecast of the plan with its own sizes; None: it is compiled first.
      most: largest number of sizes that are compiled.
      budget: time limit in seconds; a compilation that has begun still finishes.
      clock: function that returns a monotonic time in seconds.
      report: function that is called with a short text at each stage of the search.

    Raises:
      CompileError: the compiler rejected the plan with its own sizes.
    """
    began, plan = clock(), make_plan_for({})
    before = before or forecast_of(plan)
    own: dict[str, int] = {option: getattr(plan.settings, option) for option in OPTIONS}
    # Without a time no two sizes can be compared.
    if before.source != COMPILED or before.estimate.expected_seconds is None:
        why = before.why_formula or f"{gpu.title} has no published peak, so overlap is unknown"
        return BucketSearch(
            trials=(), own=own, before=None, after=None, words=(), sentence=f"Buckets: {why}"
        )
    exposed = before.estimate.expected_wire_seconds
    if exposed < LEAST_EXPOSED * before.estimate.expected_seconds:
        share = exposed / before.estimate.expected_seconds
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
    # Trials that formulas ruled out stay in the list, but they cost no compilation.
    for trial in [one for one in trials if one.status == NOT_TRIED][:most]:
        if clock() - began >= budget:
            break
        ours.compile(trial)
    together = ours.best_of_each_option()
    # The best of each option were measured alone; together they may fit no longer.
    if len(together) == len(OPTIONS) and clock() - began < budget:
        trial = _by_formula(make_plan_for, gpu, together)
        trials.append(trial)
        ours.compile(trial)
    return ours.finish(own)


def bare_seconds(plan: Plan, gpu: Gpu) -> float:
    """Returns the communication time per step, by formula, that cannot overlap with products in any
    schedule.

    The first all-gather of a step comes before all products that read it, and the last reduction
    comes after all products whose gradients it sums: one bucket each. The last reduction in each
    iteration of a loop over layers cannot overlap either, because XLA does not move it into the
    next iteration. The compiler chooses which bucket is first or last, so the largest is assumed.
    """
    leaves = plan.placement.leaves.values()
    elements = 0
    # Elements of both options add up, since a step has one first gather and one last reduction.
    for option in OPTIONS:
        once = {x.name: num_elements(x.shape) for x in leaves if ONCE[option](x.access)}
        elements += _largest(once, getattr(plan.settings, option))
    limit = getattr(plan.settings, GATHER if plan.zero == 3 else REDUCE)
    loops = [leaf for leaf in leaves if leaf.access.scatters_early and not leaf.frozen]
    for slices in {leaf.num_slices for leaf in loops}:
        layer = {x.name: num_elements(x.shape) // slices for x in loops if x.num_slices == slices}
        elements += plan.num_microbatches * slices * _largest(layer, limit)
    devices = math.prod(plan.mesh.shape.get(axis, 1) for axis in PASS_AXES)
    sent = elements * plan.precision.compute_dtype.itemsize * (devices - 1) / devices
    return sent / _ring_bandwidth(plan, gpu)


def _largest(elements: Mapping[str, int], limit: int) -> int:
    """Returns the number of elements in the largest bucket."""
    buckets = make_buckets(elements, limit)
    return max((sum(elements[name] for name in names) for names in buckets), default=0)


def _ring_bandwidth(plan: Plan, gpu: Gpu) -> float:
    axes = [axis for axis in PASS_AXES if plan.mesh.shape.get(axis, 1) > 1]
    # Only the link is asked for, so the bytes of the row do not matter.
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

    Sizes with the least exposed communication time by formula come first; among nearly equal sizes
    the largest, which make the fewest buckets. Sizes that expose more time than the plan's own are
    ruled out.
    """
    found = [_by_formula(make_plan_for, gpu, {option: size}) for option, size in sizes]
    for place, trial in enumerate(found):
        if trial.status == NOT_TRIED and (trial.formula or 0.0) > own:
            reason = "exposes more communication time, by formula"
            found[place] = dataclasses.replace(trial, status=BEATEN, reason=reason)
    # If the plan's own sizes expose nothing, no step can be derived from them.
    step = NEARLY * own or 1.0
    return sorted(found, key=lambda x: (_steps(x.formula, step), -max(x.sizes.values())))


def _steps(formula: float | None, step: float) -> float:
    return math.inf if formula is None else round(formula / step)


def _by_formula(make_plan_for: MakePlan, gpu: Gpu, sizes: Sizes) -> BucketTrial:
    try:
        bare = bare_seconds(make_plan_for(sizes), gpu)
    # A size may be impossible for a plan; the other sizes are still tried.
    except ValueError as error:
        reason = str(error).split("\n")[0]
        return BucketTrial(sizes=dict(sizes), status=IMPOSSIBLE, reason=reason)
    reason = "the time budget was used up, or other sizes are better by formula"
    return BucketTrial(sizes=dict(sizes), status=NOT_TRIED, reason=reason, formula=bare)


class _Search:
    """Compilations of one search for bucket sizes, and their results."""

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
        """Compiles a trial, and replaces it in the list by its result."""
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
            exposed=forecast.estimate.expected_wire_seconds,
            seconds=forecast.estimate.expected_seconds,
            peak=forecast.memory.peak,
            status=BEATEN if fits else TOO_LARGE,
            reason="" if fits else forecast.verdict.reasons[0],
        )

    def gains(self, trial: BucketTrial) -> bool:
        """Returns whether a trial fits into memory and reduces both the exposed communication time
        and the step time."""
        own = self.before.estimate
        assert own.expected_seconds is not None
        return (
            trial.status == BEATEN
            and trial.exposed is not None
            and trial.seconds is not None
            and trial.exposed < own.expected_wire_seconds
            and trial.seconds < own.expected_seconds * (1 - MARGIN)
        )

    def best_of_each_option(self) -> dict[str, int]:
        """Returns {option: size that gains most when changed alone}; an option without gain is left
        out."""
        found: dict[str, int] = {}
        # The dearest come first, so that the best size of an option overwrites the others.
        for trial in sorted(filter(self.gains, self.trials), key=_cost, reverse=True):
            found |= trial.sizes
        return found

    def finish(self, own: dict[str, int]) -> BucketSearch:
        before = self.before.estimate
        best = min(filter(self.gains, self.trials), key=_cost, default=None)
        tried = sum(trial.exposed is not None for trial in self.trials)
        now = f"{before.expected_wire_seconds * 1e3:.3g} ms of communication time not hidden"
        if best is None:
            sizes = f"{tried} other size{'s were' if tried != 1 else ' was'} compiled"
            kept = (
                f"Buckets as they are: {now}; {sizes}, and none reduces this time and gains "
                f"{MARGIN:.1%}."
            )
            return BucketSearch(
                trials=self._explained(None),
                own=own,
                before=before.expected_wire_seconds,
                after=before.expected_wire_seconds,
                words=(),
                sentence=kept,
            )
        assert best.exposed is not None
        assert best.seconds is not None
        assert before.expected_seconds is not None
        from_to = f"{before.expected_seconds * 1e3:,.4g} to {best.seconds * 1e3:,.4g} ms"
        return BucketSearch(
            trials=self._explained(best),
            own=own,
            before=before.expected_wire_seconds,
            after=best.exposed,
            words=best.words(),
            sentence=(
                f"Buckets: {', '.join(best.words())} leaves {best.exposed * 1e3:.3g} instead of "
                f"{now}; a step from {from_to}, as expected."
            ),
        )

    def _explained(self, best: BucketTrial | None) -> tuple[BucketTrial, ...]:
        """Returns the trials with a reason for each, and with the chosen trial marked."""
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
