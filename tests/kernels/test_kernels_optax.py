"""The oracle of every kernel follows optax, over schedules, masks and skipped steps.

Both are compiled. They are compared with the size of what they add up: rounding one product and one
sum otherwise costs 2^-24 of the terms, and a parameter gathers that over the steps.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pallas_kernels import optimizers
from pallas_kernels.choice import Choice
from pallas_kernels.elementwise import Updated
from pallas_kernels.update import update, update_trees

XLA = Choice("xla", "the oracle")
STEPS, SKIPPED = 8, (2, 5)
B1, B2, DECAY = 0.9, 0.95, 0.1
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 3e-2, 3, STEPS, 1e-3)
MASK = {"bias": False, "embed": True, "kernel": True}


def make_params():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"bias": (5,), "embed": (33, 7), "kernel": (2, 8, 16)}
    return {
        name: jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def gradient_of(params, step):
    """Of a bowl that moves; small and large leaves, and a leaf that is 0 at first."""
    sizes = {"bias": 10.0, "embed": 1e-3, "kernel": 1.0}
    wave = jnp.sin(jnp.float32(step) + 1)
    return {name: sizes[name] * (x + wave * jnp.cos(3 * x)) for name, x in params.items()}


def decays():
    return {name: DECAY * decayed for name, decayed in MASK.items()}


def run_optax(tx, moments_of, *, state=None):
    """Parameters and moments after the steps that were not skipped."""
    params = make_params()
    state = tx.init(params) if state is None else state

    @jax.jit
    def step(params, state, number):
        updates, state = tx.update(gradient_of(params, number), state, params)
        return optax.apply_updates(params, updates), state

    for number in range(STEPS):
        if number not in SKIPPED:
            params, state = step(params, state, number)
    return params, *moments_of(state)


def run_oracle(step_leaf, num_moments):
    """The same with a rule: skipped steps are given gradients that are not finite."""
    params = make_params()
    state = (params, *[jax.tree.map(jnp.zeros_like, params)] * num_moments)

    @jax.jit
    def step(state, number, count, skip):
        grads = gradient_of(state[0], number)
        grads = jax.tree.map(lambda g: jnp.where(skip, jnp.nan, 4 * g), grads)
        leaf = lambda updated, read, decay: step_leaf(updated, read, decay, count, skip)  # noqa: E731
        return update_trees(leaf, state, (grads,), decays()).updated

    count = 0
    for number in range(STEPS):
        state = step(state, number, count, number in SKIPPED)
        count += number not in SKIPPED
    return state


def check(ours, theirs, tolerance):
    """Largest difference of every leaf, relative to the largest element of that leaf."""
    for mine, other in zip(ours, theirs, strict=True):
        for name in mine:
            assert mine[name].dtype == other[name].dtype
            a, b = np.asarray(mine[name], np.float64), np.asarray(other[name], np.float64)
            assert np.abs(a - b).max() <= tolerance * np.abs(b).max(), name
            assert np.abs(b).max() > 0


def adam(count, skip, decay):
    return optimizers.adam_scalars(
        SCHEDULE(count),
        count=count + 1,
        b1=B1,
        b2=B2,
        weight_decay=decay,
        gradient_scale=0.25,
        skip=skip,
    )


def test_adamw():
    def leaf(updated, read, decay, count, skip):
        return update(optimizers.ADAMW, updated, read, scalars=adam(count, skip, decay), impl=XLA)

    tx = optax.adamw(SCHEDULE, B1, B2, weight_decay=DECAY, mask=MASK)
    theirs = run_optax(tx, lambda state: (state[0].mu, state[0].nu))
    check(run_oracle(leaf, 2), theirs, 5e-7)


def test_lion():
    def leaf(updated, read, decay, count, skip):
        scalars = optimizers.lion_scalars(
            SCHEDULE(count), b1=B1, b2=0.98, weight_decay=decay, gradient_scale=0.25, skip=skip
        )
        return update(optimizers.LION, updated, read, scalars=scalars, impl=XLA)

    tx = optax.lion(SCHEDULE, B1, 0.98, weight_decay=DECAY, mask=MASK)
    check(run_oracle(leaf, 1), run_optax(tx, lambda state: (state[0].mu,)), 5e-7)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd(nesterov):
    rule = optimizers.SGD_NESTEROV if nesterov else optimizers.SGD

    def leaf(updated, read, decay, count, skip):
        scalars = optimizers.SgdScalars(SCHEDULE(count), 0.9, decay, 0.25, skip)
        return update(rule, updated, read, scalars=scalars, impl=XLA)

    tx = optax.chain(
        optax.add_decayed_weights(DECAY, MASK), optax.sgd(SCHEDULE, momentum=0.9, nesterov=nesterov)
    )
    check(run_oracle(leaf, 1), run_optax(tx, lambda state: (state[1][0].trace,)), 1e-6)


@pytest.mark.thorough
def test_lamb():
    def leaf(updated, read, decay, count, skip):
        scalars = adam(count, skip, decay)
        (param, *moments), (grad,) = updated, read
        first = update(optimizers.LAMB_MOMENTS, moments, (param, grad), scalars=scalars, impl=XLA)
        ratio = optimizers.trust_ratio_of(*(jnp.sqrt(x) for x in first.sums))
        second = update(
            optimizers.LAMB_APPLY,
            (param,),
            first.updated,
            scalars=optimizers.lamb_scalars(scalars, trust_ratio=ratio),
            impl=XLA,
        )
        return Updated(second.updated + first.updated, (), ())

    tx = optax.lamb(SCHEDULE, B1, B2, eps=1e-8, weight_decay=DECAY, mask=MASK)
    theirs = run_optax(tx, lambda state: (state[0].mu, state[0].nu))
    check(run_oracle(leaf, 2), theirs, 1e-6)


def test_the_trust_ratio_of_an_empty_leaf_is_one():
    found = optimizers.trust_ratio_of(jnp.array([0.0, 2.0, 3.0]), jnp.array([2.0, 0.0, 2.0]))
    np.testing.assert_array_equal(found, [1.0, 1.0, 1.5])


def test_moments_in_bfloat16_are_stored_so_and_computed_with_in_float32():
    """As optax in float32 whose moment is rounded after each step.

    optax's own `mu_dtype` rounds the product b1 * mu to bfloat16 as well, which moves the parameter
    by a thousandth of the learning rate.
    """
    param, grad = jnp.linspace(-1, 1, 64), jnp.linspace(2, -3, 64)
    tx = optax.adamw(1e-2, B1, B2, weight_decay=DECAY)
    state = tx.init(param)
    ours = (param, state[0].mu.astype(jnp.bfloat16), state[0].nu)
    for count in range(1, 5):
        updates, state = jax.jit(tx.update)(grad, state, param)
        rounded = state[0].mu.astype(jnp.bfloat16)
        state = (state[0]._replace(mu=rounded.astype(jnp.float32)), *state[1:])
        param = optax.apply_updates(param, updates)
        scalars = optimizers.adam_scalars(1e-2, count=count, b1=B1, b2=B2, weight_decay=DECAY)
        ours = update(optimizers.ADAMW, ours, (grad,), scalars=scalars, impl=XLA).updated
        assert ours[1].dtype == jnp.bfloat16
        np.testing.assert_allclose(ours[0], param, rtol=0, atol=5e-7)
        assert float(jnp.mean(ours[1] == rounded)) > 0.95
        grad = grad * 0.7 + 0.1
