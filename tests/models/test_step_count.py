"""`zerojax.models.StepCount`: counts of all passes of a step, and what is made of them once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from tests.support.trajectories import ROWS, advance, plan_for, regression_batch
from zerojax.config import LossScale
from zerojax.equality import make_request
from zerojax.equality.check_in_child import check_here
from zerojax.models import StepCount
from zerojax.models.losses import mean_squared_error
from zerojax.optim.precision import as_precision
from zerojax.step.build import build_evaluation, build_step
from zerojax.step.initialization import init_state

STEPS = 4
PLACES = 5
PLAIN_SGD = zerojax.sgd(0.05, clip_norm=None)
"""What `optax.sgd(0.05)` does, in chunks whose sums have one order."""


def noted(history, counts):
    """The counts of each step, one row after the other."""
    return jnp.concatenate([history[1:], counts[None]])


class Sorter(nnx.Module):
    """A linear model that counts which of its outputs is the largest."""

    def __init__(self, rngs, *, count=None):
        self.linear = nnx.Linear(12, PLACES, rngs=rngs)
        self.history = nnx.Variable(jnp.zeros((STEPS, PLACES), jnp.int32))
        zeros = jnp.zeros(PLACES, jnp.int32)
        self.winners = count or StepCount(zeros, changes="history", rule=noted)

    def loss(self, batch):
        y = self.linear(batch["x"])
        self.note(jax.nn.one_hot(jnp.argmax(y, -1), PLACES, dtype=jnp.int32))
        return mean_squared_error(y, batch["y"])

    def note(self, hot):
        self.winners[...] += hot.sum(0)


def run(model=Sorter, **options):
    options = {"optimizer": optax.sgd(0.05), "batch": regression_batch, **options}
    plan = plan_for(model, **options)
    return advance(plan, init_state(plan, 0), range(STEPS), batch=regression_batch)


def extras_of(state):
    return {name: np.asarray(value) for name, value in state["extras"].items()}


@functools.cache
def on_one_device():
    return extras_of(run(devices=1).state)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"devices": 1, "num_microbatches": 4},
        {"devices": 2, "zero": 1},
        {"zero": 3, "persistence_threshold": 1},
        {"zero": 2, "num_microbatches": 4},
        {"mesh": {"replica": 2, "data": 4}, "zero": 1},
        {"deterministic": "mesh", "virtual_shards": 8, "optimizer": PLAIN_SGD},
    ],
    ids=[
        "microbatches",
        "2 devices",
        "zero 3",
        "zero 2, microbatches",
        "replicas",
        "deterministic",
    ],
)
def test_counts_are_those_of_one_device_bit_for_bit(options):
    """Of each step, over four steps; the count itself is 0 after each."""
    one, many = on_one_device(), extras_of(run(**options).state)
    assert one["history"].sum(1).tolist() == [ROWS] * STEPS
    assert len({row.tobytes() for row in one["history"]}) > 1
    assert one["winners"].tolist() == [0] * PLACES
    for name, value in one.items():
        assert many[name].dtype == value.dtype == np.int32
        np.testing.assert_array_equal(many[name], value)


@pytest.mark.thorough
def test_stacked_layers_have_a_rule_each():
    """A rule written for one layer, of arrays that a stack has several rows of."""

    class Stack(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.vmap(lambda rngs: Sorter(rngs), in_axes=0, out_axes=0)(rngs.split(3))

        def loss(self, batch):
            graphdef, state = nnx.split(self.layers)

            def layer(total, state):
                one = nnx.merge(graphdef, state)
                return total + one.loss(batch)[0], nnx.state(one)

            total, state = jax.lax.scan(layer, jnp.float32(0), state)
            nnx.update(self.layers, state)
            return total, jnp.float32(batch["y"].size)

    one, many = (extras_of(run(Stack, **o).state) for o in ({"devices": 1}, {"zero": 2}))
    assert one["layers/history"].shape == (3, STEPS, PLACES)
    assert (one["layers/history"].sum(2) == ROWS).all()
    np.testing.assert_array_equal(many["layers/history"], one["layers/history"])


@pytest.mark.thorough
def test_a_skipped_step_changes_nothing():
    """Of a batch with a NaN, and of float16 that overflows; the next step counts again."""
    scale = as_precision("fp16", loss_scale=LossScale(initial=2.0**32, hysteresis=1))
    for options, spoils in (({}, True), ({"precision": scale}, False)):
        plan = plan_for(Sorter, batch=regression_batch, zero=1, **options)
        state, step = init_state(plan, 0), build_step(plan)
        batch = {name: x.copy() for name, x in regression_batch(0).items()}
        if spoils:
            batch["x"][3, 2] = np.nan
        state, metrics = step(state, jax.device_put(batch, plan.batch_sharding))
        assert int(metrics["skipped"]) == 1
        assert not any(value.any() for value in extras_of(state).values())
        if spoils:
            good = jax.device_put(regression_batch(0), plan.batch_sharding)
            state, metrics = step(state, good)
            assert int(metrics["skipped"]) == 0
            assert extras_of(state)["history"].sum() == ROWS


def test_evaluation_changes_nothing():
    plan = plan_for(Sorter, batch=regression_batch)
    state = init_state(plan, 0)
    build_evaluation(plan)(state, jax.device_put(regression_batch(0), plan.batch_sharding))
    assert not any(value.any() for value in extras_of(state).values())


def test_the_plan_says_what_is_made_anew():
    reasons = " ".join(plan_for(Sorter, batch=regression_batch).reasons)
    assert "history" in reasons
    assert "recomputed once per step" in reasons


@pytest.mark.thorough
def test_the_check_has_no_fault_to_find():
    """Steps on one device and on many, with what both keep."""
    result = check_here(make_request(Sorter, regression_batch, devices=4))
    assert result.agrees, result.table()
    assert not result.reasons, result.table()


def refused(words, model):
    with pytest.raises((TypeError, ValueError), match=words) as caught:
        plan_for(model, batch=regression_batch)
    assert "\n" not in str(caught.value)


class CountsPasses(Sorter):
    def note(self, hot):
        self.winners[...] += 1


class SumsTwice(Sorter):
    def note(self, hot):
        self.winners[...] += zerojax.batch_sum(hot.sum(0))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", [CountsPasses, SumsTwice])
def test_what_is_no_count_of_a_pass_is_refused(model):
    refused("winners is a StepCount.* Add to it", model)


def sorter(value=None, **changes):
    """With a count of other settings."""

    def make(rngs):
        zeros = jnp.zeros(PLACES, jnp.int32) if value is None else value
        settings = {"changes": "history", "rule": noted, **changes}
        return Sorter(rngs, count=StepCount(zeros, **settings))

    return make


def test_settings_that_cannot_be_are_refused():
    refused("no untrained variable linear", sorter(changes="linear"))
    refused("no untrained variable winners", sorter(changes="winners"))
