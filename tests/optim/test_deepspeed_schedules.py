"""Schedules that are DeepSpeed's to the update, and what they refuse.

tests/oracles/deepspeed_schedules.py wrote the numbers, with DeepSpeed's own classes.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support.optim_steps import context, gradient, make_params
from zerojax.config import ConfigError
from zerojax.optim import DEEPSPEED_SCHEDULES, adam8bit, adamw, build_deepspeed_schedule, lamb, lion

FOUND = json.loads((Path(__file__).parents[1] / "data/deepspeed_schedules.json").read_text())
RATE = FOUND["learning_rate"]
CYCLE = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 4}


def build(kind, **params):
    return build_deepspeed_schedule(kind, params, learning_rate=RATE)


def values(schedule, num):
    """Of updates 0, 1, ...: counts come in as int32, as a step gives them."""
    return np.asarray(jax.vmap(schedule)(jnp.arange(num, dtype=jnp.int32)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", FOUND["cases"], ids=lambda case: case["type"])
def test_every_update_has_deepspeeds_numbers(case):
    schedule = build(case["type"], **case["params"])
    expected = np.asarray(case["rates"])
    # Float32 here, double there: a few roundings of 6e-8, and of 1 where a cosine reaches -1.
    np.testing.assert_allclose(
        values(schedule.learning_rate, len(expected)), expected, rtol=1e-6, atol=1e-9
    )
    assert (schedule.b1 is None) == ("betas" not in case)
    if schedule.b1 is not None:
        b1, b2 = np.asarray(case["betas"]).T
        np.testing.assert_allclose(values(schedule.b1, len(b1)), b1, rtol=1e-6)
        assert set(b2) == {schedule.b2}


def test_the_numbers_cover_every_schedule_and_setting():
    assert {case["type"] for case in FOUND["cases"]} == set(DEEPSPEED_SCHEDULES)
    for kind, cls in DEEPSPEED_SCHEDULES.items():
        set_somewhere = {
            n for case in FOUND["cases"] if case["type"] == kind for n in case["params"]
        }
        assert set_somewhere == set(cls.__dataclass_fields__), kind


def test_adamw_with_cycled_betas_goes_where_torchs_goes():
    run = FOUND["adamw_with_one_cycle"]
    schedule = build("OneCycle", **run["params"])
    tx = adamw(
        schedule.learning_rate,
        b1=schedule.b1,
        b2=schedule.b2,
        weight_decay=run["weight_decay"],
        mask=None,
        clip_norm=None,
    )
    params = {"x": jnp.asarray(FOUND["start"])}
    state = tx.init(params)
    update = jax.jit(tx.update)
    for grad, expected in zip(run["gradients"], run["values"], strict=True):
        changes, state = update({"x": jnp.asarray(grad)}, state, params)
        params = optax.apply_updates(params, changes)
        # Twelve steps of float32 on both sides; betas that are one update late are off by 1e-4.
        np.testing.assert_allclose(params["x"], expected, rtol=2e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("make", [adamw, lamb, lion, adam8bit])
def test_shards_in_place_follow_the_same_betas(make):
    schedule = build("OneCycle", **CYCLE)
    tx = make(schedule.learning_rate, b1=schedule.b1, b2=schedule.b2, clip_norm=None)
    plain = optax.with_extra_args_support(tx)
    whole, shards = make_params(), make_params()
    whole_state, shard_state = plain.init(whole), tx.init(shards)
    update = jax.jit(plain.update)
    apply = jax.jit(lambda *arrays: tx.apply(*arrays, context()))
    for step in range(4):
        changes, whole_state = update(gradient(step), whole_state, whole)
        whole = optax.apply_updates(whole, changes)
        shards, shard_state = apply(gradient(step), shard_state, shards)
    for name in whole:
        np.testing.assert_allclose(shards[name], whole[name], rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_a_skipped_update_keeps_its_place():
    schedule = build("OneCycle", **CYCLE)
    tx = adamw(schedule.learning_rate, b1=schedule.b1, b2=schedule.b2, clip_norm=None)
    params, state = make_params(), tx.init(make_params())
    kept, kept_state = tx.apply(gradient(0), state, params, context(skip=True))
    for params_before, state_before in [(params, state), (kept, kept_state)]:
        after, _ = tx.apply(gradient(1), state_before, params_before, context())
        expected, _ = tx.apply(gradient(1), state, params, context())
        assert all((after[name] == expected[name]).all() for name in expected)


def test_what_surprises_people_is_said():
    notes = " ".join(build("WarmupLR", warmup_num_steps=100).notes)
    assert "half of the rise is done after 10 of 100 updates" in notes
    assert build("WarmupLR", warmup_num_steps=100, warmup_type="linear").notes == (
        "the first update has learning rate 0, as in DeepSpeed",
    )
    assert "beta2 is 0.99" in build("OneCycle", **CYCLE).notes[0]
    assert (
        "below warmup_num_steps (8)"
        in build("WarmupDecayLR", total_num_steps=4, warmup_num_steps=8).notes[-1]
    )


def test_the_update_at_which_beta1_reaches_one_is_named():
    schedule = build("OneCycle", **CYCLE, decay_step_size=2, decay_mom_rate=0.1)
    # Counts start at 0, updates at 1: after 8 updates of the cycle, 2.2 more.
    assert "reach 1 at update 12" in schedule.notes[-1]
    assert float(schedule.b1(10)) < 1 <= float(schedule.b1(11))


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("StepLR", {}, "type: 'StepLR' is not one of DeepSpeed's own schedules"),
        ("WarmupLR", {"warmup_steps": 3}, "warmup_steps: unknown key; did you mean"),
        ("WarmupLR", {"warmup_num_steps": 0}, "warmup_num_steps: 0 must be above 0"),
        ("WarmupLR", {"warmup_num_steps": 2.5}, "expected an integer, got 2.5"),
        ("WarmupLR", {"warmup_type": "cubic"}, "'cubic' is not one of log, linear"),
        ("WarmupLR", {"last_batch_iteration": 7}, "load the checkpoint"),
        ("WarmupDecayLR", {}, "total_num_steps: WarmupDecayLR needs this key"),
        ("WarmupCosineLR", {"total_num_steps": 0}, "total_num_steps: 0 must be above 0"),
        ("WarmupCosineLR", {"total_num_steps": 9, "cos_min_ratio": -1}, "must be >= 0"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "must be above 0"),
        ("OneCycle", {"cycle_max_lr": 1.0}, "cycle_min_lr: OneCycle needs this key"),
        ("OneCycle", CYCLE | {"cycle_max_mom": 1.0}, "must be in \\[0, 1\\)"),
        ("OneCycle", CYCLE | {"cycle_max_lr": [1.0, 2.0]}, "single group; give one number"),
        ("OneCycle", CYCLE | {"cycle_first_stair_count": 2**30}, "below 2\\*\\*31"),
    ],
)
def test_refused(kind, params, message):
    with pytest.raises(ConfigError, match=message):
        build(kind, **params)


def test_a_list_of_one_group_and_whole_numbers_as_floats_are_taken():
    listed = build("WarmupLR", warmup_max_lr=[0.5], warmup_num_steps=1e1)
    assert listed.settings == build("WarmupLR", warmup_max_lr=0.5, warmup_num_steps=10).settings
