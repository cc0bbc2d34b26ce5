"""Searches for recomputation that differs between the loops over a model's layers.

It begins at a plan with one value for all loops. Formulas, from the program of one iteration of
each loop, give the bytes and FLOPs of every mix of values; the compiler confirms the choice.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

from zerojax.config.late_dataclasses import dataclass
from zerojax.forecasting.forecast_numbers import ForecastNumbers
from zerojax.forecasting.settings_search.candidates import Candidate, MakePlan, Remat
from zerojax.forecasting.settings_search.search_result import (
    CHOSEN,
    FAILED,
    FITS,
    TOO_LARGE,
    SearchResult,
    Trial,
)
from zerojax.hardware.compile_client import CompileError
from zerojax.plan import counts
from zerojax.plan.make import Plan
from zerojax.tracing.rolling import Loop, RolledModel, kept_bytes, trained_flops
from zerojax.tracing.trees import format_bytes

MARGIN = 0.01
"""Share of a step's FLOPs, and of its time, that a mix must save."""
MOST = 3
"""Largest number of mixes that are compiled."""
MOST_LOOPS = 6
"""Largest number of loops whose values vary: those whose recomputation costs most."""

Mix = tuple[str, ...]
"""A value of `roll_remat` for each loop."""


@dataclass(frozen=True)
class MixCost:
    """Cost of a mix for one microbatch on one data shard.

    Attributes:
      kept: bytes that all iterations save for the backward pass.
      flops: FLOPs of the forward and backward pass of all loops, with recomputation.
    """

    kept: int
    flops: float


def search_mixes(
    make_plan_for: MakePlan,
    result: SearchResult,
    *,
    values: Sequence[Remat],
    forecast_of: Callable[[Plan], ForecastNumbers],
    has_time: Callable[[], bool],
    report: Callable[[str], None],
) -> SearchResult:
    """Finds a recomputation for each loop that makes the chosen candidate faster.

    The mix with the fewest FLOPs that should fit, by the memory of the last compiled plan and the
    formula of saved bytes, is compiled next.

    Args:
      make_plan_for: function from a candidate to its plan.
      result: result with a chosen candidate, whose layers have one value.
      values: values that the model's candidates have, from the most memory to the least.
      forecast_of: function from a plan to its `ForecastNumbers`; it compiles the plan.
      has_time: function that returns whether another plan may be compiled.
      report: function that is called with a short text at each stage of the search.

    Returns:
      The result with the mixes that were compiled, of which one may be the choice.
    """
    chosen, forecast = result.chosen, result.forecast
    assert chosen is not None
    assert forecast is not None
    plan = make_plan_for(chosen.candidate)
    loops = plan.model.loops if isinstance(plan.model, RolledModel) else ()
    # With one loop there is nothing to mix, and stages of a pipeline divide the loops.
    if len(loops) < 2 or chosen.candidate.stage > 1 or not has_time():
        return result
    report(f"counting what {len(loops)} loops over layers may recompute")
    costs = costs_of_mixes(loops, ["model" if value == "none" else value for value in values])
    best = now = tuple(loop.remat for loop in loops)
    tried = {now, *_compiled(result, chosen, len(loops))}
    # Memory is predicted from the last compiled plan, which is nearer than a formula.
    trials, kept, room = list(result.trials), costs[now].kept, forecast.verdict.headroom
    saves = MARGIN * flops_of_shard(plan)
    for _ in range(MOST):
        should_fit = [
            mix
            for mix, cost in costs.items()
            if mix not in tried
            and cost.flops <= costs[best].flops - saves
            and cost.kept - kept <= room
        ]
        if not should_fit or not has_time():
            break
        mix = min(should_fit, key=lambda mix: (costs[mix].flops, costs[mix].kept))
        tried.add(mix)
        pairs = tuple((loop.title, value) for loop, value in zip(loops, mix, strict=True))
        candidate = dataclasses.replace(chosen.candidate, mix=pairs)
        report(f"compiling {candidate.describe()}")
        number = 1 + sum(trial.number is not None for trial in trials)
        trial, found = _compile(candidate, number, make_plan_for, forecast_of)
        trials.append(trial)
        if found is None:
            continue
        kept, room = costs[mix].kept, found.verdict.headroom
        assert result.chosen is not None
        if trial.status == FITS and _is_faster(trial, result.chosen):
            best, result = mix, _with_choice(result, trial, found)
    return _with_trials(result, trials)


def costs_of_mixes(loops: Sequence[Loop], values: Sequence[str]) -> dict[Mix, MixCost]:
    """Returns {mix: its cost} of all mixes of `values`, and of the values that the loops have."""
    single = [
        {
            value: MixCost(
                kept_bytes(loop.body, value) * loop.count,
                trained_flops(loop.body, value) * loop.count,
            )
            # The loop's own value may be none of the search's, but costs must be compared with it.
            for value in dict.fromkeys([*values, loop.remat])
        }
        for loop in loops
    ]
    ranges = [
        max(c.flops for c in one.values()) - min(c.flops for c in one.values()) for one in single
    ]
    # All mixes of many loops are too many; only loops where the choice matters are varied.
    varied = sorted(range(len(loops)), key=lambda n: -ranges[n])[:MOST_LOOPS]
    choices = [[*one] if n in varied else [loops[n].remat] for n, one in enumerate(single)]
    found = {}
    for mix in itertools.product(*choices):
        parts = [one[value] for one, value in zip(single, mix, strict=True)]
        found[mix] = MixCost(sum(part.kept for part in parts), sum(part.flops for part in parts))
    return found


def flops_of_shard(plan: Plan) -> float:
    """Returns the FLOPs without recomputation of a microbatch on one data shard."""
    return counts.model_flops(plan) / plan.division.unit


def _compiled(result: SearchResult, chosen: Trial, num_loops: int) -> set[Mix]:
    """Returns the values for all loops that were compiled with the other settings of `chosen`."""
    alike = [
        trial.candidate
        for trial in result.trials
        if trial.number is not None
        # Trials that differ in recomputation alone are mixes with one value.
        and dataclasses.replace(trial.candidate, remat=chosen.candidate.remat) == chosen.candidate
    ]
    return {(str(candidate.mesh_options()["roll_remat"]),) * num_loops for candidate in alike}


def _compile(
    candidate: Candidate,
    number: int,
    make_plan_for: MakePlan,
    forecast_of: Callable[[Plan], ForecastNumbers],
) -> tuple[Trial, ForecastNumbers | None]:
    """Compiles a candidate; the forecast is None if it cannot be planned or compiled."""
    trial = Trial(candidate=candidate, status=FAILED, reason="", number=number)
    try:
        forecast = forecast_of(make_plan_for(candidate))
    except (CompileError, ValueError) as error:
        return dataclasses.replace(trial, reason=str(error).split("\n")[0]), None
    verdict = forecast.verdict
    spare = format_bytes(abs(verdict.headroom))
    trial = dataclasses.replace(
        trial,
        status=FITS if verdict.fits else TOO_LARGE,
        reason=f"{spare} to spare" if verdict.fits else f"{spare} too much",
        seconds=forecast.estimate.expected_seconds,
        peak=forecast.memory.peak,
    )
    return trial, forecast


def _is_faster(trial: Trial, chosen: Trial) -> bool:
    # Without times nothing shows that a mix is faster, and it is not taken on trust.
    if trial.seconds is None or chosen.seconds is None:
        return False
    return trial.seconds <= chosen.seconds * (1 - MARGIN)


def _with_choice(result: SearchResult, trial: Trial, forecast: ForecastNumbers) -> SearchResult:
    before = result.chosen
    assert before is not None
    assert before.seconds is not None
    assert trial.seconds is not None
    sentence = (
        f"{result.sentence} With {trial.candidate.remat_word} the plan still fits, and a step "
        f"takes {trial.seconds:.3g} instead of {before.seconds:.3g} s, as expected."
    )
    return dataclasses.replace(result, chosen=trial, forecast=forecast, sentence=sentence)


def _with_trials(result: SearchResult, trials: Sequence[Trial]) -> SearchResult:
    """Returns the result with all trials, the compiled ones first, and one of them chosen."""
    chosen = result.chosen
    assert chosen is not None
    marked = dataclasses.replace(chosen, status=CHOSEN)
    statuses = []
    for trial in trials:
        # Numbers of compiled plans are unique, but two trials may be equal otherwise.
        if trial.number == chosen.number:
            trial = marked
        elif trial.status == CHOSEN:
            trial = dataclasses.replace(trial, status=FITS)
        statuses.append(trial)
    statuses.sort(key=lambda trial: trial.number is None)  # stable: keeps both orders
    return dataclasses.replace(result, chosen=marked, trials=tuple(statuses))
