"""All of optax where ZeRO pads parameters: equal to one device, or refused with a sentence."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from tests.support.optax_table import (
    CONTRIB,
    NO_OPTIMIZERS,
    NOT_FUNCTIONS,
    OPTAX,
    REFUSED,
    TRUE,
    public_names,
)
from tests.support.trajectories import plan_for
from zerojax.optim import OnTrueShapes
from zerojax.step.build import build_step
from zerojax.step.initialization import init_state
from zerojax.step.reshard import to_portable_state

STEPS = 3
SHAPES = {"bias": (13,), "kernel": (6, 11), "table": (9, 7, 3)}
"""Nothing is divisible by 8."""
TOLERANCE = 2e-6
"""Of the largest element of each array. Gradients are the same bits on any mesh (means of 16 whole
numbers, which do not depend on parameters), so what is left is the order in which norms and
products are summed. Before true sizes were used, adafactor was off by 0.1 and `centralize` by
0.03."""
ROWS = {**OPTAX, **CONTRIB}


def batch(index):
    random = np.random.default_rng(index)
    return {
        name: random.integers(-8, 9, (16, *shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def init(key):
    del key
    random = np.random.default_rng(7)
    return {
        name: jnp.asarray(random.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()
    }


def apply(params, batch):
    products = [
        jnp.sum(batch[name] * params[name][None], axis=range(1, params[name].ndim + 1))
        for name in SHAPES
    ]
    return 40.0 + sum(products)


def loss(model, batch):
    return jnp.mean(model(batch))


def plan_of(tx, *, model=(init, apply), batch=batch, zero=1, **options):
    options = {"persistence_threshold": 0, "loss": loss, **options}
    return plan_for(model, batch=batch, optimizer=tx, zero=zero, **options)


def advance(plan, state, indices):
    """The state after the steps of these batches."""
    step = build_step(plan)
    for index in indices:
        state, metrics = step(state, jax.device_put(batch(index), plan.batch_sharding))
        assert int(metrics["skipped"]) == 0
    return state


def trained(tx, zero, **options):
    """The state in its portable form after some steps on 8 devices."""
    plan = plan_of(tx, zero=zero, **options)
    return to_portable_state(plan, advance(plan, init_state(plan), range(STEPS)))


def alone(tx):
    """(parameters, optax's state) after the same steps of a plain loop on one device."""
    tx = optax.with_extra_args_support(tx)
    params = init(None)

    @functools.partial(jax.jit, static_argnames="names")
    def step(params, state, batch, names):
        value, grad = jax.value_and_grad(lambda p: jnp.mean(apply(p, batch)))(params)
        given = {"value": value, "grad": grad}
        updates, state = tx.update(grad, state, params, **{name: given[name] for name in names})
        return optax.apply_updates(params, updates), state

    def try_keywords(params, state, batch):
        for names in (("value", "grad"), ("value",)):
            with contextlib.suppress(TypeError):  # where one is not taken
                return step(params, state, batch, names)
        return step(params, state, batch, ())

    state = tx.init(params)
    for index in range(STEPS):
        params, state = try_keywords(params, state, batch(index))
    return params, state


def assert_equal(found, expected):
    """Of two trees of arrays; states of optax are the same tree."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(other.dtype, jax.dtypes.prng_key):
            other = jax.random.key_data(other)  # as a state stores it
        one, other = np.asarray(one), np.asarray(other)
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        if jnp.issubdtype(other.dtype, jnp.floating):
            scale = np.abs(other).max(initial=0)
            np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE * max(scale, 1e-30))
        else:
            np.testing.assert_array_equal(one, other)


@pytest.fixture
def optax_promotes(name):
    """`scale_by_distance_over_gradients` itself multiplies [1] by [rows, columns]."""
    allowed = "allow" if name == "scale_by_distance_over_gradients" else "raise"
    with jax.numpy_rank_promotion(allowed):
        yield


@pytest.mark.parametrize("module", [optax, optax.contrib], ids=lambda module: module.__name__)
def test_every_name_of_optax_is_in_the_table(module):
    """A new one has to be tried and given a row."""
    known = {name for names in NO_OPTIMIZERS.values() for name in names.split()}
    known |= ROWS.keys() | REFUSED.keys() | NOT_FUNCTIONS
    assert not public_names(module) - known
    makers = public_names(optax) | public_names(optax.contrib)
    newest = tuple(map(int, optax.__version__.split(".")[:3])) >= (0, 2, 8)
    assert not newest or not known - makers


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", ROWS)
def test_an_optimizer_runs_on_the_arrays_that_the_table_says(name, optax_promotes):
    where, make = ROWS[name]
    plan = plan_of(make())
    assert isinstance(plan.tx, OnTrueShapes) == (where == TRUE), plan.reasons
    assert any("unpadded shapes" in reason for reason in plan.reasons) == (where == TRUE)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_step_cannot_do_is_refused_with_a_sentence(name):
    sentence, make = REFUSED[name]
    with pytest.raises(ValueError, match=sentence):
        plan_of(make())
    with pytest.raises(ValueError, match=sentence):
        plan_of(make(), zero=0)


def test_a_multisteps_object_is_told_what_to_give():
    steps = optax.MultiSteps(optax.adam(1e-2), 2)
    with pytest.raises(TypeError, match=r"optimizer.gradient_transformation\(\)"):
        plan_of(steps)
    plan_of(steps.gradient_transformation())


QUICK = {
    ("adafactor", 3),
    ("muon", 1),
    ("noisy_sgd", 2),
    ("sm3", 1),
    ("chain", 3),
    ("sam", 2),
    ("reduce_on_plateau", 0),
}
"""Every stage, both kinds of arrays, noise, own shapes of state, and the loss that is passed on."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "zero"),
    [
        pytest.param(name, zero, marks=[] if (name, zero) in QUICK else [pytest.mark.slow])
        for name in ROWS
        for zero in range(4)
    ],
)
def test_padded_parameters_are_updated_as_on_one_device(name, zero, optax_promotes):
    make = ROWS[name][1]
    found, (params, state) = trained(make(), zero), expected(name)
    assert_equal(found["params"], params)
    assert_equal(found["opt_state"], state)


@functools.cache
def expected(name):
    return alone(ROWS[name][1]())
