"""The search: what is listed, in which order it is compiled, what is ruled out, and the choice."""

import dataclasses
import functools
import itertools
import json
import random
import re

import jax
import pytest

import zerojax
from tests.support.forecast_samples import GIB, sample_card, sample_forecast, sample_plan
from tests.support.marks import needs_compiler
from zerojax.config import ModelConfig, MoEConfig
from zerojax.forecasting.forecast_numbers import FORMULA, Expected, RoleBytes
from zerojax.forecasting.settings_search import (
    Candidate,
    chosen_words,
    list_candidates,
    search,
    search_dict,
    search_page,
)
from zerojax.forecasting.settings_search.candidates import (
    REMATS,
    Bounds,
    bounds_of,
    bounds_on,
    repeated,
)
from zerojax.forecasting.settings_search.evidence import (
    SLACK,
    CompiledCandidate,
    OpenCandidate,
    least_busy_seconds,
    passes,
)
from zerojax.forecasting.settings_search.search_result import (
    BEATEN,
    CHOSEN,
    FAILED,
    FITS,
    IMPOSSIBLE,
    NOT_TRIED,
    TOO_LARGE,
    Trial,
)
from zerojax.hardware.compile_client import CompileError
from zerojax.hardware.gpus.achieved import WIRE_SHARE
from zerojax.pipeline import pipeline_costs as costs
from zerojax.placement.device_mesh import make_abstract_mesh
from zerojax.plan.counts import role_bytes, shard_bytes
from zerojax.plan.expert_costs import exchange_bytes
from zerojax.plan.make import make_plan
from zerojax.plan.wire import wire_bytes
from zerojax.zoo import build_model

CARD = sample_card()
LIMIT = 60 * GIB
RECOMPUTE = {"none": 1.0, "dots": 1.05, "attention": 1.25, "full": 4 / 3}
KEPT = {"none": 1.0, "dots": 0.5, "attention": 0.15, "full": 0.1}


any_forecast = functools.cache(sample_forecast)
"""One for all: a world replaces what differs, some thousand times."""


@dataclasses.dataclass
class World:
    """A model on 8 cards in numbers: what formulas say of a candidate, and what compiling shows.

    Attributes:
      activations: GiB with one microbatch and no remat, whatever `model` is: what it splits comes
        back as rows.
      state, weights, gradients: GiB, unsharded; compute: seconds; compile_seconds: on the clock.
      inputs: GiB of the layers' inputs with one microbatch.
    """

    activations: float = 80.0
    state: float = 36.0
    weights: float = 6.0
    gradients: float = 6.0
    compute: float = 1.0
    wire: float = 0.2
    compile_seconds: float = 10.0
    broken: tuple = ()
    inputs: float = 0.0
    compiled: list = dataclasses.field(default_factory=list)
    planned: list = dataclasses.field(default_factory=list)
    now: float = 0.0

    def peak(self, c: Candidate) -> float:
        split = [1, 8, 8, 8][c.zero]
        accumulated = 2 if c.num_microbatches > 1 else 1
        gradients = self.gradients * accumulated / (8 if c.zero >= 2 else 1)
        weights = self.weights / (8 if c.zero == 3 else 1)
        return (self.state / split + gradients + weights) / c.model / c.stage

    def busy(self, c: Candidate) -> float:
        """Seconds of products, empty slots of a pipeline included."""
        idle = (c.stage - 1) / c.num_microbatches
        return self.compute * RECOMPUTE[c.remat] * (1 + idle)

    def bounds(self, c: Candidate) -> Bounds:
        self.plan(c)
        wire = self.wire * (1.5 * c.num_microbatches if c.zero == 3 else 1.0) / c.stage
        return Bounds(
            seconds=max(self.busy(c), wire),
            wire_seconds=wire,
            state=int(self.state / [1, 8, 8, 8][c.zero] / c.model / c.stage * GIB),
            peak=int(self.peak(c) * GIB),
            limit=LIMIT,
            products_seconds=self.busy(c),
            layer_inputs=int(self.inputs * GIB / c.num_microbatches),
        )

    def plan(self, c: Candidate) -> Candidate:
        """A plan is only handed on; the candidate stands for it."""
        if c.model == 8:
            raise ValueError("num_kv_heads=4 is not divisible by model=8; use 4\nand more")
        return c

    def forecast(self, c: Candidate):
        self.compiled.append(c)
        self.now += self.compile_seconds
        if c in self.broken:
            raise CompileError("INTERNAL: a pass failed\nmore")
        in_flight = min(c.num_microbatches, 2 * c.stage - 1)
        activations = self.activations * KEPT[c.remat] * in_flight / c.num_microbatches
        peak = int((self.peak(c) + activations) * GIB)
        bounds = self.bounds(c)
        forecast = any_forecast()
        roles = (
            RoleBytes(role="activations", bytes=int(activations * GIB), formula=None),
            RoleBytes(role="rest", bytes=peak - int(activations * GIB), formula=None),
        )
        return dataclasses.replace(
            forecast,
            memory=dataclasses.replace(forecast.memory, peak=peak, roles=roles),
            estimate=dataclasses.replace(
                forecast.estimate,
                compute_seconds=self.busy(c),
                memory_seconds=0.0,
                step_seconds=bounds.seconds + 0.1 * bounds.wire_seconds,
            ),
            verdict=dataclasses.replace(
                forecast.verdict, fits=peak <= LIMIT, needed=peak, headroom=LIMIT - peak
            ),
        )


def run(world: World, candidates=None, **options):
    candidates = candidates or list_candidates(8, 64, node_devices=8)

    def bounds(c):
        world.planned.append(c)
        return world.bounds(c)

    return search(
        world.plan,
        candidates,
        CARD,
        forecast_of=world.forecast,
        find_bounds=bounds,
        clock=lambda: world.now,
        **options,
    )


def cheapest_of_all(world: World, candidates=None) -> float:
    """By compiling every candidate."""
    fitting = []
    for candidate in candidates or list_candidates(8, 64, node_devices=8):
        if candidate.model != 8:
            forecast = world.forecast(candidate)
            if forecast.verdict.fits:
                fitting.append(forecast.estimate.step_seconds)
    return min(fitting)


class Weights(World):
    """One in which weights need all time and memory, and activations next to none."""

    def forecast(self, c: Candidate):
        found = super().forecast(c)
        seconds = 0.05 * c.num_microbatches + found.estimate.step_seconds
        waiting = 20 * GIB  # gathered weights, which do not grow with the rows
        return dataclasses.replace(
            found,
            memory=dataclasses.replace(found.memory, peak=found.memory.peak + waiting),
            estimate=dataclasses.replace(
                found.estimate, memory_seconds=seconds, step_seconds=seconds
            ),
        )


def test_fewer_microbatches_are_not_ruled_out_by_weights():
    """Neither by the memory of a plan with many, nor by its time."""
    candidates = [c for c in list_candidates(8, 64, node_devices=8) if c.zero == 3 and c.model == 1]
    world = Weights(activations=0.1)
    found = run(world, candidates)
    assert found.chosen.candidate.num_microbatches == 1
    assert found.chosen.seconds <= cheapest_of_all(world, candidates) * 1.05


# Candidates


def test_every_even_cut_is_listed_once():
    found = list_candidates(8, 32, node_devices=8)
    assert len(found) == len(set(found))
    assert {c.model for c in found} == {1, 2, 4, 8}
    assert {c.num_microbatches for c in found if c.model == 1} == {1, 2, 4}
    assert {c.num_microbatches for c in found if c.model == 8} == {1, 2, 4, 8, 16, 32}
    assert {c.zero for c in found if c.model == 4} == {0, 1, 2, 3}
    assert {c.zero for c in found if c.model == 8} == {0}, "one data shard: nothing to split"


@pytest.mark.parametrize(
    ("devices", "batch", "options", "models"),
    [
        (6, 24, {"node_devices": 8}, {1, 2}),
        (8, 12, {"node_devices": 8}, {2, 4, 8}),
        (16, 64, {"node_devices": 2}, {1, 2}),
        (16, 64, {"node_devices": 1}, {1}),
        (8, 64, {"node_devices": 8, "replicas": 4}, {1, 2}),
        (8, 7, {"node_devices": 8}, {8}),
    ],
)
def test_only_even_cuts_within_a_node(devices, batch, options, models):
    assert {c.model for c in list_candidates(devices, batch, **options)} == models


def test_a_given_number_of_microbatches_is_kept():
    found = list_candidates(4, 48, node_devices=8, num_microbatches=3)
    assert {(c.model, c.num_microbatches) for c in found} == {(1, 3), (2, 3), (4, 3)}
    assert not list_candidates(4, 16, node_devices=8, models=(1,), num_microbatches=3)


def test_a_split_of_sequences_stays_as_it_is():
    """It shares the rows of a data shard, as tensor parallelism does, and ZeRO shards over it."""
    found = list_candidates(8, 2, node_devices=8, context=4, num_layers=12)
    assert {(c.model, c.stage) for c in found} == {(1, 1), (2, 1)}
    assert {c.zero for c in found if c.model == 2} == {0, 1, 2, 3}


def test_loops_are_unrolled_where_no_layer_is_gathered_or_computed_again():
    """And what a loop needs says nothing of straight code."""
    found = list_candidates(8, 64, node_devices=8, num_layers=12, unrolls=True)
    assert {c.unroll for c in found if c.zero < 3 and c.stage == 1 and c.remat == "none"} == {True}
    assert not any(c.unroll for c in found if c.zero == 3 or c.stage > 1 or c.remat != "none")
    assert not any(c.unroll for c in list_candidates(8, 64, node_devices=8, num_layers=12))
    straight = Candidate(zero=1, model=1, num_microbatches=4, remat="none", unroll=True)
    assert "mesh.unroll=true" in straight.words()


class Unrolled(World):
    """One in which straight code holds half of what a loop does."""

    def forecast(self, c: Candidate):
        share = 0.5 if c.unroll else 1.0
        return dataclasses.replace(self, activations=share * self.activations).alone(self, c)

    def alone(self, whole: World, c: Candidate):
        found = World.forecast(self, c)
        whole.compiled.append(c)
        whole.now += whole.compile_seconds
        return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("activations", [40.0, 160.0, 640.0])
def test_what_a_loop_holds_says_nothing_of_straight_code(activations):
    found = list_candidates(8, 64, node_devices=8, num_layers=12, unrolls=True)
    result = run(Unrolled(activations=activations), found)
    best = cheapest_of_all(Unrolled(activations=activations), found)
    assert result.chosen.seconds <= 1.05 * best
    chosen = result.chosen.candidate
    assert chosen.unroll == ("mesh.unroll=true" in chosen_words(result))
    assert chosen.unroll != ("mesh.unroll=false" in chosen_words(result))


def test_words_set_it():
    words = Candidate(zero=3, model=2, num_microbatches=4, remat="full").words()
    assert words == (
        "mesh.data=-1",
        "mesh.zero=3",
        "mesh.model=2",
        "mesh.stage=1",
        "num_microbatches=4",
        "model.remat=full",
    )


def test_pipelines_that_cut_the_layers_and_have_enough_microbatches_are_listed():
    found = list_candidates(8, 64, node_devices=8, num_layers=12)
    piped = [c for c in found if c.stage > 1]
    assert [c for c in found if c.stage == 1] == list_candidates(8, 64, node_devices=8)
    assert {c.stage for c in piped} == {2, 4}, "8 does not divide 12 layers"
    by_mesh = {(c.stage, c.model): set() for c in piped}
    for c in piped:
        by_mesh[c.stage, c.model].add(c.num_microbatches)
    assert by_mesh == {
        (2, 1): {8, 16},  # 64 rows on 4 data shards
        (2, 2): {16, 32},
        (2, 4): {32, 64},
        (4, 1): {16, 32},
        (4, 2): {32, 64},
    }
    assert {c.zero for c in piped if c.stage * c.model < 8} == {1, 2, 3}
    assert {c.zero for c in piped if c.stage * c.model == 8} == {0}
    few = list_candidates(8, 8, node_devices=8, num_layers=12)
    assert {(c.stage, c.model, c.num_microbatches) for c in few if c.stage > 1} == {
        (2, 2, 4),
        (2, 4, 4),
        (2, 4, 8),
        (4, 2, 8),
    }


def test_experts_are_split_over_what_divides_them_and_the_devices():
    found = list_candidates(8, 64, node_devices=8, num_layers=4, num_experts=12)
    assert [c for c in found if c.expert == 1] == list_candidates(
        8, 64, node_devices=8, num_layers=4
    )
    split = [c for c in found if c.expert > 1]
    assert {(c.model, c.expert) for c in split} == {(1, 2), (1, 4), (2, 2), (2, 4), (4, 2)}
    assert {c.stage for c in split} == {1}
    assert {c.zero for c in split} == {0, 1, 2, 3}
    assert {c.expert for c in list_candidates(64, 64, node_devices=8, num_experts=64)} == {
        *(1, 2, 4, 8, 16, 32, 64)
    }
    replicas = list_candidates(8, 64, node_devices=8, num_experts=8, replicas=4)
    assert {c.expert for c in replicas} == {1, 2}
    sequences = list_candidates(8, 64, node_devices=8, num_experts=8, context=2)
    assert {c.expert for c in sequences} == {1}


# Order and pruning


@pytest.mark.parametrize("seconds", [0.0, 25.0])
def test_the_choice_is_never_slower_than_the_runs_own_settings(seconds):
    """Not even if the budget ends after the first compilations."""
    candidates = list_candidates(8, 64, node_devices=8)
    world = World()
    own = run(World(), candidates).chosen.candidate
    found = run(world, candidates, own=own, budget=seconds)
    assert world.compiled[1] == own
    assert found.chosen.candidate == own
    too_large = next(c for c in candidates if c.zero == 0 and c.num_microbatches == 1)
    again = run(World(state=1e3), candidates, own=too_large)
    assert too_large in {trial.candidate for trial in again.trials}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("activations", [1, 30, 80, 200, 400, 1500])
@pytest.mark.parametrize("state", [10, 60, 300])
@pytest.mark.parametrize("wire", [0.01, 0.5, 3.0])
@pytest.mark.parametrize(
    ("remats", "most"),
    [pytest.param(("none", "dots", "full"), 17, id="201"), pytest.param(REMATS, 18, id="268")],
)
def test_the_choice_is_the_cheapest_of_all_and_costs_few_compilations(
    activations, state, wire, remats, most
):
    world = World(activations=activations, state=state, wire=wire)
    candidates = list_candidates(8, 64, node_devices=8, remats=remats)
    result = run(world, candidates, budget=10**9)
    few = len(world.compiled)
    best = cheapest_of_all(world, candidates)
    assert result.certain
    assert result.chosen is not None
    assert result.chosen.seconds <= best / (1 - 0.05)
    assert result.chosen.peak <= LIMIT
    assert few <= most, f"of {len(candidates)} candidates"
    assert sum(trial.status == CHOSEN for trial in result.trials) == 1


class Summed(World):
    """One in which kernels follow one another: products, memory as `passes` says, and half of the
    communication.

    Attributes:
      off: factor from what the search guesses of memory to what a compiled plan takes.
    """

    off: float = 1.0
    memory: float = 0.5

    def forecast(self, c: Candidate):
        found = super().forecast(c)
        kernels = self.busy(c), self.memory * passes(c) * self.off ** (c.remat != "full")
        waits = 0.5 * self.bounds(c).wire_seconds
        none = dict.fromkeys(("attention_seconds", "host_seconds", "disk_seconds"), 0.0)
        expected = Expected(
            seconds=sum(kernels) + waits,
            product_seconds=kernels[0],
            memory_seconds=kernels[1],
            wire_seconds=waits,
            items=(),
            source="",
            mfu=None,
            tokens_per_second=None,
            **none,
        )
        estimate = dataclasses.replace(found.estimate, expected=expected)
        return dataclasses.replace(found, estimate=estimate)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("activations", [1, 80, 1500])
@pytest.mark.parametrize("off", [0.8, 1.0, 1.25])
@pytest.mark.parametrize("wire", [0.01, 0.5])
def test_guesses_end_a_search_and_are_corrected_by_compiled_plans(activations, off, wire):
    """The guess of another remat is off; that of the same remat is right."""
    world = Summed(activations=activations, wire=wire, inputs=1.0)
    world.off = off
    candidates = list_candidates(8, 64, node_devices=8, num_layers=8, unrolls=True)
    result = run(world, candidates, budget=10**9)
    few = len(world.compiled)
    forecasts = [world.forecast(c) for c in candidates if c.model != 8]
    best = min(f.estimate.expected_seconds for f in forecasts if f.verdict.fits)
    assert result.certain
    assert result.chosen.seconds <= best * 1.05
    assert few <= 12, f"of {len(candidates)} candidates"
    guessed = [t for t in result.trials if t.guess is not None]
    assert guessed
    assert all(t.guess > result.chosen.seconds for t in guessed)
    assert f"{len(guessed)} were ruled out by guesses" in result.sentence


@pytest.mark.parametrize(
    ("compiled", "other", "least"),
    [
        ({}, {"num_microbatches": 8}, 1.5),
        ({}, {"num_microbatches": 2}, 1.25),
        ({}, {"stage": 2}, 1.5),
        ({}, {"remat": "full"}, 0.0),
        ({"unroll": True}, {"remat": "full"}, 1.5 + 1 / 3),
        ({}, {"unroll": True}, 0.0),
        ({"zero": 0}, {"zero": 0}, 1.5),
        ({"zero": 0}, {}, 0.0),
        ({"zero": 0}, {"zero": 0, "stage": 2}, 0.0),
        ({"model": 2}, {}, 1.25),
        ({"stage": 2}, {}, 0.0),
        ({"expert": 2}, {}, 1.5),
        ({}, {"expert": 2}, 0.0),
    ],
)
def test_what_a_compiled_plan_says_of_the_kernels_of_others(compiled, other, least):
    """Products take 1 second; memory takes 0.5."""
    usual = Candidate(zero=2, model=1, num_microbatches=4, remat="none")
    theirs, mine = dataclasses.replace(usual, **compiled), dataclasses.replace(usual, **other)
    world = Summed(inputs=1.0)
    forecast = world.forecast(theirs)
    expected = dataclasses.replace(
        forecast.estimate.expected, product_seconds=1.0, memory_seconds=0.5
    )
    forecast = dataclasses.replace(
        forecast, estimate=dataclasses.replace(forecast.estimate, expected=expected)
    )
    bounds = dataclasses.replace(world.bounds(theirs), products_seconds=1.0)
    plan = CompiledCandidate(
        entry=OpenCandidate(candidate=theirs, bounds=bounds),
        trial=Trial(candidate=theirs, status=FITS, reason=""),
        forecast=forecast,
    )
    found = least_busy_seconds(mine, RECOMPUTE[mine.remat], [plan])
    assert found == pytest.approx(least * (1 - SLACK))
    full = dataclasses.replace(plan, trial=Trial(candidate=theirs, status=TOO_LARGE, reason=""))
    assert least_busy_seconds(mine, RECOMPUTE[mine.remat], [full]) == 0.0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("activations", [1, 80, 400])
@pytest.mark.parametrize("state", [10, 300])
@pytest.mark.parametrize("wire", [0.01, 3.0])
def test_pipelines_are_chosen_where_they_are_the_cheapest(activations, state, wire):
    candidates = list_candidates(8, 64, node_devices=8, num_layers=8)
    world = World(activations=activations, state=state, wire=wire)
    result = run(world, candidates, budget=10**9)
    few = len(world.compiled)
    assert result.chosen.seconds <= cheapest_of_all(world, candidates) / (1 - 0.05)
    assert few <= 24, f"of {len(candidates)} candidates"
    if wire < 1 and activations == 1:
        assert result.chosen.candidate.stage == 1, "a bubble for nothing"
    if wire > 1:
        assert result.chosen.candidate.stage > 1, "of this wire less is sent"


def test_nothing_depends_on_the_order_of_the_candidates():
    candidates = list_candidates(8, 64, node_devices=8)
    first = run(World(), candidates)
    shuffled = random.Random(0).sample(candidates, len(candidates))
    assert run(World(), shuffled) == first
    assert len(first.trials) == len(candidates)


def test_what_fits_at_once_is_tried_in_its_simplest_form():
    world = World(activations=1, state=8)
    result = run(world)
    tried = [c.num_microbatches for c in world.compiled]
    assert tried == [8, 8, 1], "the smallest, the likeliest, the simplest"
    assert result.chosen.candidate == Candidate(
        zero=2, model=1, num_microbatches=1, remat="none"
    ), "stages 0 and 1 need more memory and send as much; stage 3 sends more"
    reasons = {t.candidate: t for t in result.trials}
    other = reasons[Candidate(zero=0, model=1, num_microbatches=1, remat="none")]
    assert (other.status, other.number) == (BEATEN, None)
    assert "needs no more memory and sends no more" in other.reason


def test_what_the_best_beats_by_products_alone_is_not_even_planned():
    world = World(activations=1, wire=0.01)
    candidates = list_candidates(8, 64, node_devices=8, num_layers=8)
    own = Candidate(zero=2, model=1, num_microbatches=8, remat="none")
    result = run(world, candidates, own=own)
    planned = world.planned
    fewer = {dataclasses.replace(own, num_microbatches=number) for number in (1, 2, 4)}
    assert fewer < set(planned), "they are simpler, and may fit"
    assert len(planned) <= len(fewer) + 1 + len(REMATS)
    assert result.certain
    assert len(result.trials) == len(candidates)
    assert result.chosen.candidate == dataclasses.replace(own, num_microbatches=1)
    assert result.chosen.seconds <= cheapest_of_all(World(activations=1, wire=0.01)) / 0.95


def test_state_that_cannot_fit_is_not_even_planned_again():
    world = World(state=500.0)
    result = run(world)
    whole = [t for t in result.trials if (t.candidate.zero, t.candidate.model) == (0, 1)]
    assert {t.status for t in whole} == {TOO_LARGE}
    assert "518.0 GiB of 60.0 GiB needed even without activations" in whole[0].reason
    assert len([c for c in world.planned if (c.zero, c.model) == (0, 1)]) == 1


def test_activations_of_one_compiled_plan_rule_out_others():
    world = World(activations=300)
    result = run(world)
    for trial in result.trials:
        if trial.status == TOO_LARGE and trial.number is None:
            forecast = World(activations=300).forecast(trial.candidate)
            assert not forecast.verdict.fits, trial
    reasons = [t.reason for t in result.trials if t.status == TOO_LARGE and t.number is None]
    assert any("by the activations of #" in reason for reason in reasons)


def test_the_sentence_says_how_many_faster_ones_do_not_fit():
    result = run(World(activations=15_000))
    assert result.chosen.candidate.remat == "full"
    assert "that might be faster do not fit" in result.sentence


def test_impossible_settings_are_listed_with_their_reason():
    trials = [t for t in run(World()).trials if t.candidate.model == 8]
    assert {t.status for t in trials} == {IMPOSSIBLE}
    assert {t.reason for t in trials} == {"num_kv_heads=4 is not divisible by model=8; use 4"}


def test_the_budget_ends_the_search_and_is_said():
    world = World(activations=1500, compile_seconds=100.0)
    result = run(world, budget=50.0)
    assert len(world.compiled) == 1
    assert not result.certain
    assert "budget was used up" in result.sentence
    assert NOT_TRIED in {t.status for t in result.trials}
    assert result.elapsed == 100.0


def test_no_compilation_begins_that_would_end_after_the_budget():
    """The third would end at 120 seconds if it took as long as the first ones."""
    world = World(activations=200, compile_seconds=40.0)
    result = run(world, budget=110.0)
    assert (len(world.compiled), result.elapsed) == (2, 80.0)


@pytest.mark.parametrize(
    ("activations", "inputs", "numbers"),
    [(80, 5.0, [1]), (80, 40.0, [2]), (1500, 5.0, [1, 8]), (80, 0.0, [8])],
)
def test_the_first_one_has_as_few_microbatches_as_leave_room(activations, inputs, numbers):
    """With full remat activations are guessed as 1.7 times the layers' inputs. If the first one
    does not fit, the smallest one is next."""
    world = World(activations=activations, inputs=inputs, wire=0.01)
    run(world)
    tried = [(c.zero, c.remat, c.num_microbatches) for c in world.compiled]
    assert tried[: len(numbers)] == [(3, "full", number) for number in numbers]


def at(candidate, number):
    return dataclasses.replace(candidate, num_microbatches=number)


@pytest.mark.parametrize("inputs", [1.0, 0.1])
def test_own_settings_that_need_far_too_much_are_not_compiled_before_others(inputs):
    """Without remat activations are guessed as 28 times the layers' inputs."""
    world, own = World(activations=40 * inputs, inputs=20 * inputs), own_settings()
    run(world, own=own)
    assert (own in world.compiled[:2]) == (inputs == 0.1)


@pytest.mark.parametrize("number", [1, 2, 8])
def test_own_settings_beside_the_smallest_are_compiled_too(number):
    """Those that a guess does not leave room for, and the smallest, stay open when another one with
    other microbatches is compiled first."""
    world = World(activations=80, inputs=40.0, wire=0.01)
    own = Candidate(zero=3, model=1, num_microbatches=number, remat="full")
    result = run(world, own=own)
    assert own in world.compiled[:2]
    listed = [trial.candidate for trial in result.trials]
    assert listed.count(own) == 1


def own_settings():
    listed = list_candidates(8, 64, node_devices=8)
    return next(c for c in listed if (c.zero, c.remat, c.num_microbatches) == (1, "none", 1))


@pytest.mark.parametrize("compilations", [1, 2])
def test_an_interrupt_keeps_the_best_so_far(compilations):
    """The compiler of the next candidate is interrupted, as Ctrl-C does."""
    world, whole, said = World(activations=40), World(activations=40), []
    compile_one = world.forecast

    def forecast(candidate):
        if len(world.compiled) == compilations:
            raise KeyboardInterrupt
        return compile_one(candidate)

    world.forecast = forecast
    result = run(world, improved=said.append)
    assert len(run(whole).trials) == len(result.trials)  # each is listed
    assert len(whole.compiled) > compilations
    assert result.interrupted
    assert not result.certain
    assert "interrupted" in result.sentence
    assert result.chosen.candidate == said[-1].candidate
    assert [t.seconds for t in said] == sorted((t.seconds for t in said), reverse=True)


def test_a_compilation_that_fails_does_not_end_the_search():
    first = run(World(activations=1)).chosen.candidate
    world = World(activations=1, broken=(first,))
    result = run(world)
    failed = next(trial for trial in result.trials if trial.candidate == first)
    assert (failed.status, failed.reason) == (FAILED, "INTERNAL: a pass failed")
    assert failed.number is not None
    assert result.chosen.status == CHOSEN
    assert result.chosen.candidate != first


def test_nothing_fits():
    result = run(World(activations=10**6))
    assert result.certain
    assert result.chosen is None
    assert result.forecast is None
    assert result.sentence == f"None of the candidates fits on {CARD.title}."


def test_without_a_compiler_nothing_is_chosen():
    world = World()

    def formula(candidate):
        return sample_forecast(source=FORMULA, why_formula="pip install 'zerojax[plan]'")

    result = search(
        world.plan,
        list_candidates(8, 64, node_devices=8),
        CARD,
        forecast_of=formula,
        find_bounds=world.bounds,
    )
    assert result.chosen is None
    assert not result.certain
    assert "Nothing was chosen: pip install 'zerojax[plan]'" in result.sentence
    assert {t.status for t in result.trials} >= {NOT_TRIED}


# Experts


@dataclasses.dataclass
class Mixtures(World):
    """A model of experts on 16 cards, 8 in a node.

    Attributes:
      experts: GiB of weights of all experts in two bytes; rows: seconds on the wire if every row
        leaves, inside a node; slower: of the link between nodes.
    """

    experts: float = 8.0
    rows: float = 0.1
    slower: float = 9.0

    def peak(self, c: Candidate) -> float:
        state = 6 * self.experts / (c.expert if c.zero == 0 else 16)
        weights = self.experts / (c.expert if c.zero < 3 else 16)
        return super().peak(c) + (state + 2 * weights) / c.model

    def bounds(self, c: Candidate) -> Bounds:
        bounds = super().bounds(c)
        data = 16 // c.model // c.expert
        gathered = 0.05 * self.experts * (data - 1) / data / c.expert
        sent = self.rows * (c.expert - 1) / c.expert * (self.slower if c.expert > 8 else 1)
        wire = bounds.wire_seconds + gathered + sent
        return dataclasses.replace(
            bounds, wire_seconds=wire, seconds=max(self.busy(c), wire), peak=int(self.peak(c) * GIB)
        )

    def plan(self, c: Candidate) -> Candidate:
        if c.expert > 1 and c.model > 1:
            raise ValueError(f"expert={c.expert} with model={c.model} is not supported")
        return super().plan(c)


MIXTURES = list_candidates(16, 64, node_devices=8, num_experts=16)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("experts", [0.5, 8, 30])
@pytest.mark.parametrize("rows", [0.01, 1.0, 10.0])
@pytest.mark.parametrize("slower", [1.0, 9.0])
def test_the_degree_of_experts_is_the_cheapest_of_all(experts, rows, slower):
    world = Mixtures(experts=experts, rows=rows, slower=slower, compute=0.5)
    result = run(world, MIXTURES, budget=10**9)
    best = cheapest_of_all(world, [c for c in MIXTURES if c.model == 1 or c.expert == 1])
    assert result.certain
    assert result.chosen.seconds <= best / (1 - 0.05)
    assert {c.expert for c in (t.candidate for t in result.trials)} == {1, 2, 4, 8, 16}
    reasons = {t.candidate: t.status for t in result.trials if t.candidate.model > 1}
    assert all(status == IMPOSSIBLE for c, status in reasons.items() if c.expert > 1)


def test_experts_lie_in_several_nodes_where_that_pays_and_the_sentence_says_so():
    large = {"experts": 60.0, "compute": 0.1, "activations": 1.0}
    near = run(Mixtures(rows=1.0, slower=9.0, **large), MIXTURES, budget=10**9)
    assert near.chosen.candidate.expert == 8
    assert "nodes" not in near.sentence
    far = run(Mixtures(rows=0.01, slower=1.0, **large), MIXTURES, budget=10**9)
    assert far.chosen.candidate.expert == 16
    assert "Its experts are on several nodes" in far.sentence
    page = search_page(far)
    assert "  expert  " in page
    assert max(map(len, page.splitlines())) <= 100
    assert "mesh.expert=16" in chosen_words(far)


def test_the_words_set_experts_on_one_device_too():
    result = run(Mixtures(rows=50.0, experts=0.1), MIXTURES, budget=10**9)
    assert result.chosen.candidate.expert == 1
    assert chosen_words(result)[-1] == "mesh.expert=1"
    assert not any("expert" in word for word in chosen_words(run(World())))


@functools.cache
def mixture_plan(expert: int):
    moe = MoEConfig(num_experts=16, experts_per_token=2, expert_dim=128)
    sizes = {"num_layers": 2, "num_heads": 8, "embed_dim": 256, "max_seq_len": 128}
    tokens = jax.ShapeDtypeStruct((64, 128), jax.numpy.int32)
    return make_plan(
        build_model(ModelConfig(name="llama", moe=moe, **sizes), 256),
        make_abstract_mesh({"expert": expert}, 16),
        example_batch={"tokens": tokens, "targets": tokens},
        precision="bf16",
        zero=1,
    )


@pytest.mark.parametrize(("expert", "speed"), [(1, 1), (8, 450e9), (16, 50e9 * 15 / 8)])
def test_the_bound_counts_rows_at_the_speed_of_their_link(expert, speed):
    """Of 16 devices on two nodes each sends 8 of 15 parts through its network card."""
    plan = mixture_plan(expert)
    found = bounds_of(plan, CARD, 1.0)
    weights = wire_bytes(plan) / 400e9  # a ring over two nodes, through 8 cards
    seconds = (weights + exchange_bytes(plan) / speed) / WIRE_SHARE
    assert found.wire_seconds == pytest.approx(seconds)
    assert (exchange_bytes(plan) > 0) == (expert > 1)


# What is shown


def test_the_page_shows_what_was_tried_and_the_words():
    page = search_page(run(World()))
    lines = page.splitlines()
    assert max(map(len, lines)) <= 100
    assert page.isascii()
    assert sum("*" in line for line in lines) == 1
    assert any(line.startswith("  mesh.data=-1 mesh.zero=") for line in lines[-2:])
    assert re.search(r"not compiled: \d+ \(--json lists them\)", page)
    assert re.search(r"- \d+ beaten, such as zero=", page)


def test_json_lists_every_candidate():
    result = run(World())
    values = json.loads(json.dumps(search_dict(result)))
    assert len(values["trials"]) == len(result.trials)
    assert values["chosen"]["status"] == CHOSEN
    assert values["words"] == list(result.chosen.candidate.words())
    assert values["forecast"]["memory"]["peak"] == result.chosen.peak
    assert values["certain"] is True


# Bounds of real plans


def candidate(**changes) -> Candidate:
    values = {"zero": 1, "model": 1, "num_microbatches": 1, "remat": "none"}
    return Candidate(**{**values, **changes})


def plan_for(c: Candidate):
    return sample_plan(
        zero=c.zero,
        model=c.model,
        num_microbatches=c.num_microbatches,
        remat=c.remat,
        stage=c.stage,
    )


@pytest.mark.thorough
def test_bounds_are_those_of_the_plan():
    find = bounds_on(CARD, plan_for)
    plain, full = find(candidate()), find(candidate(remat="full"))
    assert plain.limit == int(CARD.memory_bytes * 0.75)
    assert plain.state == shard_bytes(plan_for(candidate()).abstract_state)
    assert plain.peak == sum(role_bytes(plan_for(candidate())).values()) > plain.state
    assert repeated(sample_plan()) == pytest.approx(1.0, abs=1e-6)
    assert 1.2 < repeated(sample_plan(remat="full")) <= 4 / 3
    assert (full.state, full.peak, full.wire_seconds) == (
        plain.state,
        plain.peak,
        plain.wire_seconds,
    )
    more = find(candidate(zero=3, num_microbatches=4))
    assert more.wire_seconds > find(candidate(zero=2)).wire_seconds
    assert more.peak < plain.peak


@pytest.mark.thorough
def test_bounds_of_every_remat_are_those_of_its_own_plan():
    find = bounds_on(CARD, plan_for)
    for remat in REMATS:
        own = candidate(zero=3, num_microbatches=2, remat=remat)
        assert find(own) == bounds_of(plan_for(own), CARD, repeated(plan_for(own)))


@pytest.mark.thorough
@pytest.mark.parametrize("remat", REMATS)
def test_products_take_the_same_time_on_every_mesh(remat):
    """As `Bounds.products_seconds` says, and longer in a pipeline."""
    find = bounds_on(CARD, plan_for)
    one = find(candidate(zero=2, remat=remat)).products_seconds
    for zero, model, number in [(0, 1, 1), (1, 1, 8), (3, 1, 4), (1, 4, 8)]:
        other = find(candidate(zero=zero, model=model, num_microbatches=number, remat=remat))
        assert other.products_seconds == pytest.approx(one)
    staged = find(candidate(zero=1, stage=2, num_microbatches=8, remat=remat))
    assert staged.products_seconds > one > 0


@pytest.mark.thorough
def test_bounds_of_a_pipeline_count_its_bubble_and_its_least_buffers():
    find = bounds_on(
        dataclasses.replace(CARD, node_bandwidth=1e15), plan_for
    )  # no wire to wait for
    whole = find(candidate(num_microbatches=8))
    piped = {remat: find(candidate(num_microbatches=8, stage=2, remat=remat)) for remat in REMATS}
    plan = plan_for(candidate(num_microbatches=8, stage=2))
    assert plan.pipeline is not None
    slower = piped["none"].seconds / whole.seconds
    assert slower == pytest.approx(
        costs.executed_flops(plan.pipeline) / costs.useful_flops(plan.pipeline)
    )
    # Idle in 1 of 9 ticks, and the head makes one of two stages slower; the other waits.
    assert 9 / 8 < slower < 1.25
    assert len({bounds.peak for bounds in piped.values()}) == 1
    for remat, bounds in piped.items():
        own = plan_for(candidate(num_microbatches=8, stage=2, remat=remat))
        assert bounds.peak <= sum(role_bytes(own).values())


@pytest.mark.slow
@needs_compiler
def test_a_small_search_with_the_compiler():
    compiled = []

    def forecast(plan):
        compiled.append(plan)
        return zerojax.forecast(plan, gpu="h200", devices=8, fast=True)

    candidates = [
        candidate(zero=zero, num_microbatches=number)
        for zero, number in itertools.product((1, 3), (1, 2))
    ]
    result = search(plan_for, candidates, CARD, forecast_of=forecast)
    assert result.certain
    assert result.chosen.candidate.num_microbatches in (1, 2)
    assert result.forecast.source == "compiled"
    assert result.chosen.peak == result.forecast.memory.peak > result.chosen.formula_peak * 0.5
    assert len(compiled) <= len(candidates)
    assert {t.status for t in result.trials} <= {CHOSEN, FITS, BEATEN}


def test_of_what_does_not_fit_in_its_smallest_form_nothing_else_is_planned():
    world = World(activations=5000.0)
    candidates = [c for c in list_candidates(8, 64, node_devices=8) if c.model == 1]
    result = run(world, candidates)
    assert len(world.planned) == len(world.compiled) == 1
    assert (result.chosen, result.certain) == (None, True)
    assert {trial.status for trial in result.trials} == {TOO_LARGE}


def test_after_the_budget_the_smallest_that_fits_is_the_choice():
    world = World()
    result = run(world, budget=world.compile_seconds)
    assert len(world.compiled) == 1
    chosen = result.chosen.candidate
    assert (chosen.zero, chosen.remat, chosen.num_microbatches) == (3, "full", 8)
    assert not result.certain
    assert NOT_TRIED in {trial.status for trial in result.trials}
