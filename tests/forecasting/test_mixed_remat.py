"""The search for a recomputation of each loop: its choice among mixes, with memory and time by
formula."""

import dataclasses
import functools
import itertools
from typing import Any

import pytest

import zerojax
from tests.support.forecast_samples import sample_forecast
from tests.support.two_lists import DECODER, ENCODER, plan_of, remats
from zerojax.config.loader import load_dataclass
from zerojax.forecasting.settings_search import (
    LIST_REMATS,
    Candidate,
    chosen_words,
    search_dict,
    search_page,
)
from zerojax.forecasting.settings_search.mixed_remat import (
    MARGIN,
    MOST,
    MixCost,
    costs_of_mixes,
    flops_of_shard,
    search_mixes,
)
from zerojax.forecasting.settings_search.search_result import (
    CHOSEN,
    FITS,
    TOO_LARGE,
    SearchResult,
    Trial,
)
from zerojax.hardware.compile_client import CompileError

BASE = 10**6
"""Bytes of everything but the values that loops save."""
VALUES = ("model", *LIST_REMATS[1:])
make_plan = functools.cache(functools.partial(plan_of, 3, devices=1))


def plan_for(candidate: Candidate) -> zerojax.Plan:
    return make_plan(candidate.mesh_options()["roll_remat"])


@functools.cache
def costs() -> dict[tuple[str, ...], MixCost]:
    return costs_of_mixes(make_plan("full").model.loops, VALUES)


@dataclasses.dataclass
class World:
    """Compiles plans by formula.

    Attributes:
      limit: bytes of the device.
      growth: bytes of memory for each byte of the formula.
      fails: values of loops that the compiler rejects.
    """

    limit: float
    growth: float = 1.0
    fails: tuple[str, ...] = ()

    def forecast(self, plan: zerojax.Plan) -> Any:
        mix = tuple(loop.remat for loop in plan.model.loops)
        if mix == self.fails:
            raise CompileError("a rejected program")
        cost, found = costs()[mix], sample_forecast()
        peak = BASE + int(self.growth * cost.kept)
        fits = peak <= self.limit
        return dataclasses.replace(
            found,
            memory=dataclasses.replace(found.memory, peak=peak),
            estimate=dataclasses.replace(found.estimate, step_seconds=cost.flops / 1e9),
            verdict=dataclasses.replace(
                found.verdict, fits=fits, headroom=int(self.limit) - peak, reasons=["why"]
            ),
        )

    def begin(self, remat: Any) -> SearchResult:
        """The result of a search for one value."""
        candidate = Candidate(
            zero=3, model=1, num_microbatches=1, remat=remat, remat_option="mesh.roll_remat"
        )
        forecast = self.forecast(plan_for(candidate))
        assert forecast.verdict.fits
        trial = Trial(
            candidate=candidate, status=CHOSEN, reason="", number=1,
            seconds=forecast.estimate.step_seconds, peak=forecast.memory.peak,
        )  # fmt: skip
        return SearchResult(
            trials=(trial,), chosen=trial, forecast=forecast, certain=True, sentence="One value.",
            elapsed=0.0,
        )  # fmt: skip

    def search(self, remat: Any, most: int = 100) -> SearchResult:
        left = iter([True] * most)
        return search_mixes(
            plan_for, self.begin(remat), values=LIST_REMATS, forecast_of=self.forecast,
            has_time=lambda: next(left, False), report=lambda text: None,
        )  # fmt: skip


def mix_of(result: SearchResult) -> tuple[str, ...]:
    assert result.chosen is not None
    return tuple(remats(plan_for(result.chosen.candidate)).values())


def cheapest(limit: float) -> float:
    """FLOPs of the best mix."""
    return min(cost.flops for cost in costs().values() if BASE + cost.kept <= limit)


@pytest.mark.thorough
@pytest.mark.parametrize("spare", sorted({cost.kept for cost in costs().values()})[::3])
def test_the_mix_with_the_fewest_flops_that_fits_is_chosen(spare: int) -> None:
    world = World(BASE + spare)
    result = world.search("full")
    assert costs()[mix_of(result)].flops <= cheapest(world.limit) + MARGIN * flops_of_shard(
        make_plan("full")
    )
    assert result.chosen is not None
    assert result.chosen.peak is not None
    assert result.chosen.peak <= world.limit
    assert [trial.status for trial in result.trials].count(CHOSEN) == 1
    numbers = [trial.number for trial in result.trials]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) <= 1 + MOST


@pytest.mark.thorough
def test_a_mix_beats_every_single_value_and_its_words_set_it() -> None:
    spare = costs()["dots", "elementwise"].kept
    assert costs()["dots", "dots"].kept < spare < costs()["elementwise", "elementwise"].kept
    result = World(BASE + spare).search("dots")
    assert result.chosen is not None
    encoder, decoder = (remats(plan_for(result.chosen.candidate))[t] for t in (ENCODER, DECODER))
    assert encoder != decoder
    (word,) = [w for w in chosen_words(result) if "roll_remat" in w]
    found = load_dataclass(zerojax.MeshConfig, None, [word.removeprefix("mesh.")])
    assert dict(found.roll_remat) == {ENCODER: encoder, DECODER: decoder}
    assert word in search_page(result).replace("\n  ", " ")
    assert word in search_dict(result)["words"]
    assert result.trials[0].status == FITS


@pytest.mark.thorough
def test_memory_beyond_the_formula_leads_to_a_smaller_mix() -> None:
    """The first mix is too large; the room of the next is what the compiler found."""
    spare = costs()["elementwise", "elementwise"].kept
    world = World(BASE + spare, growth=1.3)
    result = world.search("full")
    assert TOO_LARGE in {trial.status for trial in result.trials}
    assert result.chosen is not None
    assert result.chosen.peak is not None
    assert result.chosen.peak <= world.limit
    assert result.chosen.candidate.mix


@pytest.mark.thorough
def test_a_rejected_mix_and_a_spent_budget_keep_what_was_found() -> None:
    world = World(BASE + max(cost.kept for cost in costs().values()))
    first = mix_of(world.search("full"))
    world = dataclasses.replace(world, fails=first)
    assert mix_of(world.search("full")) != first
    assert world.search("full", most=0) == world.begin("full")
    assert len(world.search("full", most=1).trials) == 1


@pytest.mark.thorough
def test_nothing_is_compiled_if_no_flops_can_be_saved() -> None:
    world = World(10 * BASE)
    assert len(world.search("elementwise").trials) == 1


def test_costs_are_sums_of_the_loops() -> None:
    for one, other in itertools.product(VALUES, repeat=2):
        both, swapped = costs()[one, other], costs()[other, one]
        assert both.kept == swapped.kept  # equal lists
        assert 2 * both.flops == costs()[one, one].flops + costs()[other, other].flops
