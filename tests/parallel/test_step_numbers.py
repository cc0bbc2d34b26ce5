"""Steps that take their optimizer's numbers as inputs: one program, and the bits of plain steps."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.parallel.test_step import Model, batch_of
from tests.support.equal_trees import assert_same
from tests.support.small_models import regression_loss
from tests.support.trajectories import plan_for, regression_batch
from zerojax.config import OptimizerConfig
from zerojax.plan.make import plan_of
from zerojax.step.build import build_step
from zerojax.step.initialization import init_state

FIRST = {
    "learning_rate": 3e-3,
    "weight_decay": 0.1,
    "beta1": 0.9,
    "beta2": 0.95,
    "clip_norm": 0.5,
    "warmup_steps": 2,
}
OTHER = {
    "learning_rate": 0.02,
    "weight_decay": 0.03,
    "beta1": 0.8,
    "beta2": 0.99,
    "eps": 1e-6,
    "clip_norm": 3.0,
    "warmup_steps": 0,
    "schedule": "wsd",
    "decay_fraction": 0.4,
    "final_lr_fraction": 0.0,
}


# The decay of a group is between those of FIRST and OTHER.
GROUPS = {"last/kernel": {"learning_rate_factor": 0.5}, "first/": {"weight_decay": 0.05}}


def plan_with(numbers, *, as_inputs, name="adamw", groups=GROUPS):
    plan = plan_for(
        Model,
        devices=2,
        loss=regression_loss,
        batch=regression_batch,
        optimizer=OptimizerConfig(name=name, groups=groups, **numbers),
        zero=2,
    )
    inputs = dataclasses.replace(plan.inputs, steps=20, numbers_are_inputs=as_inputs)
    return plan_of(inputs, plan.mesh, zero=plan.zero)


def text_of(plan):
    return build_step(plan).lower(plan.abstract_state, plan.abstract_batch).as_text()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["adamw", "lion", "sgd", "lamb"])
def test_other_numbers_are_the_same_program(name):
    texts = {text_of(plan_with(each, as_inputs=True, name=name)) for each in (FIRST, OTHER)}
    assert len(texts) == 1
    assert text_of(plan_with(FIRST, as_inputs=False, name=name)) not in texts


@pytest.mark.thorough
def test_what_is_no_input_is_another_program():
    """Without decay all parameters have equal settings, so the program has fewer inputs."""

    def text(**changes):
        return text_of(plan_with({**FIRST, **changes}, as_inputs=True, groups={}))

    assert text(weight_decay=0.01) == text()
    assert text(weight_decay=0.0) != text()
    assert text(clip_norm=None) != text()
    eight_bits = [
        text_of(plan_with(each, as_inputs=True, name="adam8bit")) for each in (FIRST, OTHER)
    ]
    assert eight_bits[0] != eight_bits[1]


@pytest.mark.thorough
@pytest.mark.parametrize("numbers", [FIRST, OTHER], ids=["first", "other"])
@pytest.mark.parametrize("name", ["adamw", "lion", "sgd", "lamb"])
def test_the_state_has_the_bits_of_a_plain_step(name, numbers):
    """Step 3 is skipped, since its loss is not finite: the schedule counts updates, not steps."""
    states = []
    for as_inputs in (False, True):
        plan = plan_with(numbers, as_inputs=as_inputs, name=name)
        step, state = build_step(plan), init_state(plan)
        for index in range(6):
            batch = regression_batch(index)
            lost = {"x": np.full_like(batch["x"], np.nan)} if index == 2 else {}
            state, metrics = step(state, batch_of(plan, index, **lost))
        assert int(metrics["num_skipped"]) == 1
        states.append(jax.device_get((state, metrics)))
    assert_same(states[1], states[0])
