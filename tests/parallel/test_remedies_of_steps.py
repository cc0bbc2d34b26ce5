"""Refusals of states, steps and evaluations that do not fit their plan."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from tests.config.test_remedies_of_options import text
from tests.support.refusals import Refusal, refused
from tests.support.small_models import Line
from zerojax.step.build import build_evaluation
from zerojax.step.initialization import init_state
from zerojax.step.reshard import reshard_state, to_portable_state

BATCH = {"x": np.ones((16, 4), np.float32)}


def mean(model: Any, batch: Any) -> jax.Array:
    return jnp.mean(model(batch["x"]) ** 2)


def line(mesh: Any = None, **options: Any) -> zerojax.Plan:
    given = {"example_batch": BATCH, "loss": mean, "precision": "fp32", **options}
    return zerojax.make_plan(Line, mesh or {}, **given)


@pytest.mark.thorough
def test_states_of_earlier_steps():
    plan = line()
    step, batch = zerojax.build_step(plan), zerojax.shard_batch(plan, BATCH)
    first = init_state(plan)
    kept = jax.device_get(first)
    state, _ = step(first, batch)
    refused(lambda: step(first, batch), "state", '"state, metrics = step(state, batch)" device_get')
    state, metrics = step(state, batch)
    assert np.isfinite(metrics["loss"])
    again = jax.tree.map(jax.device_put, kept, jax.tree.map(lambda x: x.sharding, state))
    assert np.isfinite(step(again, batch)[1]["loss"])


def test_plans_of_different_states():
    frozen, plan = line(freeze="bias"), line()
    move = lambda new: reshard_state(plan, new, init_state(plan))  # noqa: E731
    Refusal(frozen, "fingerprints", "model optimizer freeze=", [line({"zero": 1})]).check(move)


def test_keys_of_another_size():
    plan = line()
    state = init_state(plan)

    def move(impl: str) -> None:
        key = jax.random.key_data(jax.random.key(0, impl=impl))
        to_portable_state(plan, {**state, "rng": jax.device_put(key, state["rng"].sharding)})

    Refusal("rbg", "4 2", "jax_default_prng_impl before", ["threefry2x32"]).check(move)


@pytest.mark.thorough
def test_evaluations_of_split_sequences():
    plan = text({"context": 2})
    loss = lambda model, batch: jnp.mean(model(batch["tokens"]))  # noqa: E731
    build = lambda given: build_evaluation(*given)  # noqa: E731
    Refusal((plan, loss), "context=2", "loss=None context=1", [(plan,), (text({}), loss)]).check(
        build
    )


@pytest.mark.thorough
def test_rows_of_a_fixed_evaluation():
    plan = line({"deterministic": "mesh", "virtual_shards": 16}, num_microbatches=2)
    evaluate, state = build_evaluation(plan), init_state(plan)

    def take(rows: int) -> None:
        batch = {"x": np.ones((rows, 4), np.float32)}
        placed = jax.device_put(batch, plan.batch_sharding)
        assert np.isfinite(evaluate(state, placed)["loss"])

    Refusal(8, "1 2 deterministic='mesh'", "2", [16, 32]).check(take)
