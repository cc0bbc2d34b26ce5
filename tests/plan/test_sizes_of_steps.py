"""Rows and tokens of steps from the settings of a run, and the learning rates that follow."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

import zerojax
from tests.features.curriculum.curriculum_runs import TOKENS, Causal
from tests.support.inputs_with_features import plan_inputs
from tests.support.refusals import refused
from zerojax.config.features import Features
from zerojax.plan.inputs import PlanInputs
from zerojax.plan.make import plan_of
from zerojax.plan.rung_plans import with_rungs
from zerojax.plan.sizes_of_steps import sizes_of_steps

ROWS, STEPS = 24, 30
CURRICULUM = zerojax.CurriculumConfig(type="seqlen", min_length=4, length_step=4, total_steps=20)
RAMP = zerojax.BatchRampConfig(start=8, increment=8, ramp_rows=64)
RATE = zerojax.OptimizerConfig(
    learning_rate=1.0, schedule="linear", schedule_unit="tokens", warmup_steps=0
)


def inputs_of(**options) -> PlanInputs:
    tokens = jax.ShapeDtypeStruct((ROWS, TOKENS), np.int32)
    settings = {
        "model": Causal(nnx.Rngs(0)),
        "loss": zerojax.losses.next_token_of_call,
        "example_batch": {"tokens": tokens, "targets": tokens},
        "optimizer": RATE,
        "steps": STEPS,
    }
    return plan_inputs(**{**settings, **options})


def test_a_curriculum_gives_the_tokens_of_each_step():
    sizes = sizes_of_steps(inputs_of(curriculum=CURRICULUM))
    config = dataclasses.replace(CURRICULUM, max_length=TOKENS)
    expected = np.cumsum([ROWS * config.length(step) for step in range(1, 41)])
    assert [sizes.tokens_until(step) for step in range(1, 41)] == expected.tolist()
    assert {*sizes.rows} == {ROWS}


def test_a_ramp_gives_the_rows_and_tokens_of_each_step():
    sizes = sizes_of_steps(inputs_of(batch_ramp=RAMP))
    assert sizes.rows == (8, 16, 24)
    assert sizes.rows_of(np.arange(7)).tolist() == [8] * 4 + [16] * 2 + [24]
    assert sizes.tokens_until(7) == (4 * 8 + 2 * 16 + 24) * TOKENS


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"curriculum": CURRICULUM}, id="curriculum", marks=pytest.mark.thorough),
        pytest.param({"batch_ramp": RAMP}, id="ramp"),
    ],
)
def test_every_compiled_size_has_the_rates_of_the_run(sizes):
    """Its rate is scaled by its own batch, since a skipped batch advances a ramp, not the count."""
    optimizer = dataclasses.replace(RATE, scaling="sqrt", base_batch=ROWS)
    plan = with_rungs(plan_of(inputs_of(optimizer=optimizer, **sizes), {"zero": 1}))
    known = sizes_of_steps(plan.inputs)
    total = known.tokens_until(STEPS)
    counts = np.arange(STEPS)
    seen = np.asarray([known.tokens_until(int(count)) for count in counts])
    scales = [np.sqrt(np.asarray(known.rows_of(counts)) / ROWS)]
    for one in plan.ladder.plans.values():
        scales.append(np.sqrt(one.abstract_batch["tokens"].shape[0] / ROWS))
    for one, scale in zip((plan, *plan.ladder.plans.values()), scales, strict=True):
        # float32 fractions of tokens
        rates = jax.vmap(one.learning_rate)(counts)
        np.testing.assert_allclose(rates, (1 - 0.9 * seen / total) * scale, rtol=1e-5)
    assert f"{total:,}" in plan.table()


def test_a_batch_without_tokens_is_refused():
    image = jax.ShapeDtypeStruct((ROWS, 4, 4, 3), np.float32)
    inputs = inputs_of(example_batch={"image": image, "label": image})
    refused(lambda: plan_of(inputs, {"zero": 1}), "tokens image", "steps")
    ramped = dataclasses.replace(inputs, features=Features.of(batch_ramp=RAMP))
    refused(lambda: plan_of(ramped, {"zero": 1}), "tokens image", "steps")
    rows = dataclasses.replace(RATE, schedule_unit="steps", scaling="linear", base_batch=ROWS)
    assert sizes_of_steps(dataclasses.replace(inputs, optimizer=rows)).rows == (ROWS,)
