"""Curricula of the row length: DeepSpeed's schedules, the compiled lengths, refused settings."""

from __future__ import annotations

import math

import pytest

from tests.support.refusals import Refusal
from zerojax.config import ConfigError, CurriculumConfig, RunConfig, from_dict, load
from zerojax.config.curriculum import MAX_RUNGS

STEPS = range(1, 10_001)


class DeepSpeedScheduler:
    """The scheduler's state machine, from its formula: the length changes until it is the maximum.

    Args:
      formula: step -> length.
      low, high: limits.
    """

    def __init__(self, formula, low: int, high: int) -> None:
        self.formula, self.now, self.high = formula, low, high

    def update(self, step: int) -> int:
        if self.now < self.high:
            self.now = self.formula(step)
        return self.now


def root(low: int, high: int, total: int, multiple: int, degree: float):
    def formula(step: int) -> int:
        value = math.floor((float(step) / total) ** (1.0 / degree) * (high - low) + low)
        value -= value % multiple
        return min(value, high)

    return DeepSpeedScheduler(formula, low, high)


def discrete(lengths: list[int], last_steps: list[int]):
    def formula(step: int) -> int:
        if step > last_steps[-1]:
            return lengths[-1]
        return next(n for n, last in zip(lengths, last_steps, strict=False) if step <= last)

    return DeepSpeedScheduler(formula, lengths[0] - 1, lengths[-1])


def grown(low: int, high: int, total: int, multiple: int, degree: float | None = None):
    named = {} if degree is None else {"schedule_type": "fixed_root", "root_degree": degree}
    return CurriculumConfig(
        type="seqlen",
        min_length=low,
        max_length=high,
        total_steps=total,
        length_step=multiple,
        **named,
    )


@pytest.mark.parametrize(
    ("config", "scheduler"),
    [
        (grown(8, 1024, 4000, 8), root(8, 1024, 4000, 8, 1)),
        (grown(64, 1000, 6007, 24), root(64, 1000, 6007, 24, 1)),
        (grown(13, 2048, 9999, 1), root(13, 2048, 9999, 1, 1)),
        (grown(64, 64, 100, 8), root(64, 64, 100, 8, 1)),
        (grown(8, 1024, 4000, 8, 2), root(8, 1024, 4000, 8, 2)),
        (grown(80, 2047, 5003, 16, 3), root(80, 2047, 5003, 16, 3)),
        (
            CurriculumConfig(
                type="seqlen",
                schedule_type="fixed_discrete",
                lengths=(8, 64, 64, 384, 1024),
                until_steps=(10, 11, 700, 9000),
            ),
            discrete([8, 64, 64, 384, 1024], [10, 11, 700, 9000]),
        ),
    ],
)
def test_lengths_equal_those_of_deepspeeds_scheduler(config, scheduler):
    lengths = [config.length(step) for step in STEPS]
    assert lengths == [scheduler.update(step) for step in STEPS]
    assert set(lengths) <= {*config.all_lengths}

    rungs = config.rungs
    assert len(rungs) <= MAX_RUNGS
    assert rungs[-1] == config.last_length
    assert {*rungs} <= {*config.all_lengths}
    assert all(config.rung(n) == min(r for r in rungs if r >= n) for n in {*lengths})

    spans = [length for length, count in config.spans(0, STEPS[-1]) for _ in range(count)]
    assert spans == lengths
    assert list(config.spans(100, 100)) == []
    for after in (0, 57, 9990):
        for length in (rungs[0], rungs[-1] // 2, rungs[-1]):
            later = [step for step in STEPS if step > after and lengths[step - 1] > length]
            found = config.first_step_above(length, after)
            assert found == (later[0] if later else None) or (found or 0) > STEPS[-1]


def test_few_lengths_are_all_compiled():
    """Then no weights are needed; the usual schedule of 128 lengths has equal distances."""
    assert grown(8, 64, 100_000, 8).rungs == (8, 16, 24, 32, 40, 48, 56, 64)
    assert grown(8, 1024, 4000, 8).rungs == tuple(range(128, 1025, 128))
    four = grown(8, 1024, 4, 8)  # 4 steps have 4 lengths
    assert four.rungs == four.all_lengths == (256, 512, 768, 1024)
    assert len(grown(8, 10**6, 10**7, 8).rungs) == MAX_RUNGS


def test_a_run_file_has_a_curriculum():
    config = from_dict(
        RunConfig,
        {"curriculum": {"type": "seqlen", "total_steps": 100, "min_length": 16, "length_step": 16}},
    )
    assert config.curriculum.length_step == 16
    assert load(RunConfig, None, ["curriculum.type=seqlen", "curriculum.total_steps=9"]).curriculum
    assert RunConfig().curriculum.type is None


LINEAR = {"type": "seqlen", "total_steps": 100}
LISTS = {"type": "seqlen", "schedule_type": "fixed_discrete", "lengths": (8, 16)}
GOOD_LISTS = LISTS | {"until_steps": (5,)}


@pytest.mark.parametrize(
    ("bad", "value", "remedy", "good"),
    [
        ({"min_length": 8}, "min_length 8", "type=seqlen", LINEAR),
        ({"type": "seqlen"}, "fixed_linear", "total_steps", LINEAR),
        (LINEAR | {"min_length": 7}, "min_length 7", "length_step", LINEAR | {"min_length": 8}),
        (LINEAR | {"max_length": 7}, "max_length 7", "min_length", LINEAR | {"max_length": 8}),
        (LINEAR | {"total_steps": 0}, "total_steps 0", "1", LINEAR),
        (LINEAR | {"root_degree": 0}, "root_degree 0", [], LINEAR),
        (LINEAR | {"lengths": (8,)}, "lengths fixed_linear", "leave", LINEAR),
        (LISTS, "until_steps", "one", GOOD_LISTS),
        (LISTS | {"until_steps": (0,)}, "until_steps", "ascending", GOOD_LISTS),
        (GOOD_LISTS | {"lengths": (16, 8)}, "[16, 8]", "ascending", GOOD_LISTS),
        (GOOD_LISTS | {"total_steps": 9}, "total_steps 9 fixed_discrete", "leave", GOOD_LISTS),
    ],
)
def test_settings_that_cannot_be_followed_are_refused(bad, value, remedy, good):
    Refusal(bad, value, remedy, [good], ConfigError).check(lambda one: CurriculumConfig(**one))


def test_a_step_far_beyond_the_schedule_has_the_last_length():
    config = CurriculumConfig(
        type="seqlen",
        schedule_type="fixed_root",
        root_degree=0.01,
        total_steps=2,
        max_length=64,
    )
    assert config.length(10**6) == 64
