"""Steps of an optimizer by `update` and by `apply`, with gradients that do not ask the parameters.

Leaves are of odd shapes, and gradients of very different sizes from leaf to leaf.
"""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from pallas_kernels.choice import Choice
from zerojax.optim import UpdateContext

STEPS = 5
SHAPES = {"block/bias": (2, 7), "block/kernel": (2, 5, 7), "embed": (13, 3), "norm/scale": (5,)}
XLA = Choice("xla", "a test")
MASK = {"block/bias": True, "block/kernel": False, "embed": True, "norm/scale": False}
SCHEDULE = optax.warmup_cosine_decay_schedule(1e-3, 3e-2, 2, STEPS, 1e-3)
TOLERANCE = 1e-6
"""Of a leaf's largest element. Each step rounds a few times, by 2^-24 of the terms that it adds up,
and a parameter gathers that over five steps. A wrong coefficient or count is off by 1e-3 or more.
"""


def make_params(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    return {
        name: jax.random.normal(key, shape).astype(dtype)
        for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }


@functools.cache
def gradient(step):
    key = jax.random.fold_in(jax.random.key(1), step)
    sizes = dict(zip(SHAPES, (1e-3, 1.0, 30.0, 0.1), strict=True))
    return {
        name: sizes[name] * jax.random.normal(jax.random.fold_in(key, number), SHAPES[name])
        for number, name in enumerate(SHAPES)
    }


def context(*, scale=1.0, skip=False, key=0, choice=XLA, axes=None, shapes=None, layers=None):
    return UpdateContext(
        gradient_scale=jnp.float32(scale),
        skip=jnp.bool_(skip),
        key=jax.random.key(key),
        axes=dict.fromkeys(SHAPES, ()) if axes is None else axes,
        choice=choice,
        shapes=shapes or {},
        layers=layers or {},
    )


def run_update(tx, params, steps=range(STEPS)):
    state = tx.init(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for number in steps:
        params, state = step(params, state, gradient(number))
    return params, state


def run_apply(tx, params, steps=range(STEPS), *, scale_of=lambda grads: 1.0, state=None, **options):
    """With gradients that are 4 times as large, which `gradient_scale` takes back."""
    state = tx.init(params) if state is None else state

    @jax.jit
    def step(params, state, grads):
        scale = 0.25 * scale_of(grads)
        grads = jax.tree.map(lambda g: 4 * g, grads)
        return tx.apply(grads, state, params, context(scale=scale, **options))

    for number in steps:
        params, state = step(params, state, gradient(number))
    return params, state


def check_close(ours, theirs, tolerance=TOLERANCE):
    """The same tree; integers equal; every float leaf within `tolerance` of its largest element."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    paths = jax.tree_util.tree_flatten_with_path(theirs)[0]
    for mine, (path, other) in zip(jax.tree.leaves(ours), paths, strict=True):
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype), path
        a, b = np.asarray(mine, np.float64), np.asarray(other, np.float64)
        limit = 0 if jnp.issubdtype(other.dtype, jnp.integer) else tolerance * np.abs(b).max()
        assert np.abs(a - b).max() <= limit, path
        assert np.abs(b).max() > 0, path


def check_same(ours, theirs):
    chex.assert_trees_all_equal(ours, theirs, strict=True)


def clipping_of(tx):
    """What the step does: clipping is part of the gradients' scale."""

    def scale_of(grads):
        norm = optax.tree.norm(grads)
        return 1.0 if tx.clip_norm is None else jnp.minimum(1.0, tx.clip_norm / norm)

    return scale_of
