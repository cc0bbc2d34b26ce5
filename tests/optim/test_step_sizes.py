"""Learning rates that count tokens: exact numbers of tokens, and schedules as functions of them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.refusals import refused
from zerojax.config import OptimizerConfig
from zerojax.optim import build_optimizer, build_schedule
from zerojax.optim.step_sizes import StepSizes

SIZES = StepSizes(after=(0, 3, 5, 20), rows=(4, 8, 8, 16), tokens=(40, 80, 160, 320))
"""Number of tokens of a step: 40 three times, 80 twice, 160 fifteen times, then 320."""
EACH = [40] * 3 + [80] * 2 + [160] * 15 + [320] * 20
SUMS = [0, *itertools.accumulate(EACH)]
TOTAL = 40


def test_tokens_and_rows_are_those_of_each_step():
    counts = np.arange(TOTAL)
    assert [SIZES.tokens_until(count) for count in range(TOTAL)] == SUMS[:-1]
    np.testing.assert_array_equal(SIZES.tokens_of(counts), SUMS[:-1])
    assert SIZES.rows_of(counts).tolist() == [4] * 3 + [8] * 17 + [16] * 20
    for tokens in range(0, SUMS[-1], 7):
        expected = next(n for n, total in enumerate(SUMS) if total >= tokens)
        assert SIZES.steps_until(tokens) == expected


def rates(sizes, steps=TOTAL, **options) -> np.ndarray:
    schedule, _ = build_schedule(OptimizerConfig(learning_rate=2.0, **options), steps, sizes)
    return np.asarray(jax.jit(jax.vmap(schedule))(jnp.arange(steps)), np.float64)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("warmup", [{"warmup_steps": 4}, {"warmup_steps": 0}])
def test_tokens_of_equal_steps_give_the_rates_of_steps(schedule, warmup):
    equal = StepSizes.constant(8, 64 * 8)
    options = {"schedule": schedule, **warmup}
    # float32 fractions of tokens instead of steps
    np.testing.assert_allclose(
        rates(equal, schedule_unit="tokens", **options), rates(None, **options), rtol=1e-5
    )


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_the_decay_follows_the_tokens(schedule):
    """The rate of a step is that of a run of one step per 40 tokens, after as many tokens."""
    total = SUMS[-1] // 40
    options = {"schedule": schedule, "warmup_steps": 3, "decay_fraction": 45 / total}
    found = rates(SIZES, schedule_unit="tokens", **options)
    fine = rates(None, steps=total, **options)
    # float32 fractions of tokens instead of steps
    np.testing.assert_allclose(found, fine[np.asarray(SUMS[:-1]) // 40], rtol=1e-5)


def test_a_warm_up_may_count_tokens():
    found = rates(SIZES, warmup_tokens=200, schedule="constant")
    np.testing.assert_allclose(found[:5], [0.4, 0.8, 1.2, 2.0, 2.0], rtol=1e-6)
    # the decay then counts what it is told to
    by_steps = rates(SIZES, warmup_tokens=200, schedule="linear")
    np.testing.assert_allclose(by_steps[4:], rates(SIZES, warmup_steps=4, schedule="linear")[4:])
    options = {"schedule": "linear", "schedule_unit": "tokens"}
    by_tokens = rates(SIZES, warmup_tokens=200, **options)
    np.testing.assert_allclose(by_tokens[4:], rates(SIZES, warmup_steps=4, **options)[4:])


def test_billions_of_tokens_are_counted():
    sizes = StepSizes(after=(0, 1000), rows=(512, 2048), tokens=(2**20, 2**23))
    options = {"schedule": "linear", "schedule_unit": "tokens", "warmup_steps": 0}
    schedule, why = build_schedule(OptimizerConfig(learning_rate=1.0, **options), 100_000, sizes)
    seen = 1000 * 2**20 + 59_000 * 2**23
    assert sizes.tokens_until(60_000) == seen
    share = seen / sizes.tokens_until(100_000)
    assert float(schedule(60_000)) == pytest.approx(1 - 0.9 * share, rel=1e-6)
    assert f"{sizes.tokens_until(100_000):,}" in why
    later = {"schedule": "linear", "schedule_unit": "tokens", "warmup_tokens": 4 * 10**9}
    schedule, _ = build_schedule(OptimizerConfig(learning_rate=1.0, **later), 100_000, sizes)
    assert float(schedule(999)) == pytest.approx(1000 * 2**20 / 4e9, rel=1e-6)
    risen = sizes.tokens_until(sizes.steps_until(4 * 10**9))
    share = (seen - risen) / (sizes.tokens_until(100_000) - risen)
    assert float(schedule(60_000)) == pytest.approx(1 - 0.9 * share, rel=1e-6)


def test_tokens_that_are_not_known_are_refused():
    unknown = StepSizes.constant(8, why_unknown="the batch has no 'tokens'")
    for options in ({"schedule_unit": "tokens"}, {"warmup_tokens": 100}):
        refused(lambda options=options: rates(unknown, **options), "tokens", "steps")
    refused(lambda: rates(SIZES, steps=5, warmup_tokens=10_000), "10000 280 5", "lower")


def test_settings_that_contradict_each_other_are_refused():
    options = {"warmup_tokens": 100, "warmup_steps": 2}
    refused(lambda: OptimizerConfig(**options), "warmup_tokens 100", "leave")
    options = {"schedule_unit": "tokens", "schedule": "constant"}
    refused(lambda: OptimizerConfig(**options), "schedule_unit tokens", "cosine")


def scaled(scaling: str, sizes, base: int = 8, **options) -> np.ndarray:
    return rates(sizes, scaling=scaling, base_batch=base, **options)


@pytest.mark.parametrize(("scaling", "power"), [("linear", 1), ("sqrt", 0.5)])
def test_the_rate_follows_the_batch(scaling, power):
    plain = rates(None, warmup_steps=2)
    for rows in (2, 8, 32):
        found = scaled(scaling, StepSizes.constant(rows), warmup_steps=2)
        np.testing.assert_allclose(found, plain * (rows / 8) ** power, rtol=1e-6)


def test_in_a_ramp_the_batch_of_the_step_counts():
    found = scaled("linear", SIZES, schedule="constant", warmup_steps=0)
    assert found.tolist() == [1.0] * 3 + [2.0] * 17 + [4.0] * 20


def test_the_effective_rate_is_said():
    config = OptimizerConfig(learning_rate=2.0, scaling="sqrt", base_batch=4)
    reason = build_optimizer(config, TOTAL, SIZES).reasons[0]
    for part in ("1 for 4 rows", "1.414 for 8 rows", "2 for 16 rows", "base_batch=4", "at most 4"):
        assert part in reason


def test_scaling_needs_a_base_and_a_known_batch():
    refused(lambda: OptimizerConfig(scaling="linear"), "scaling linear", "base_batch")
    refused(lambda: OptimizerConfig(base_batch=8), "base_batch 8", "scaling")
    refused(lambda: scaled("sqrt", None), "sqrt", "learning_rate")
