"""Optax's updates where a step may be skipped: state as kept, written where it lay."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zerojax.passes.guarded_update import guarded_update

OPTIMIZERS = {
    "adamw": optax.adamw(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "clipped and averaged": optax.chain(
        optax.clip_by_global_norm(0.5), optax.lamb(0.1), optax.ema(0.9)
    ),
    "every second step": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "noise": optax.add_noise(0.1, 0.55, key=0),
    "a constant in the new state": optax.optimistic_gradient_descent(0.1),
    "plain": optax.sgd(0.1),
}


def arrays(seed: int) -> Any:
    numbers = np.random.default_rng(seed)
    return {name: jnp.asarray(numbers.normal(size=(8, 16)), jnp.float32) for name in "ab"}


def step(tx: Any) -> Any:
    full = optax.with_extra_args_support(tx)

    def run(params: Any, state: Any, grads: Any, skip: jax.Array) -> Any:
        return guarded_update(full, grads, state, params, skip=skip, extra={})

    return jax.jit(run, donate_argnums=(0, 1))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_takes_the_steps_of_optax_and_none_where_one_is_skipped(name):
    tx, params = OPTIMIZERS[name], arrays(0)
    state = tx.init(params)
    expected, run = (params, state), step(tx)
    for number, skip in enumerate([False, True, False, False]):
        grads = arrays(number + 1)
        if skip:
            bad = jax.tree.map(lambda x: x * jnp.nan, grads)
        else:
            updates, new = tx.update(grads, expected[1], expected[0])
            expected = optax.apply_updates(expected[0], updates), new
        given = jax.tree.map(jnp.copy, (params, state))
        params, state = run(*given, bad if skip else grads, jnp.bool_(skip))
        for got, wanted in zip(*map(jax.tree.leaves, ((params, state), expected)), strict=True):
            assert got.dtype == wanted.dtype
            if jax.dtypes.issubdtype(got.dtype, jax.dtypes.prng_key):
                got, wanted = jax.random.key_data(got), jax.random.key_data(wanted)
            np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_no_array_of_the_state_is_copied(name):
    tx, params = OPTIMIZERS[name], arrays(0)
    compiled = step(tx).lower(params, tx.init(params), arrays(1), jnp.bool_(False)).compile()
    assert re.findall(r"f32\[8,16\]\S* copy\(", compiled.as_text()) == []
