"""Steps of an optimizer by `update` and by `apply`, with gradients that do not ask the parameters.

Leaves are of odd shapes, and gradients of very different sizes from leaf to leaf.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pallas_kernels.choice import Choice
from tests.support import equal_trees
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
    equal_trees.assert_near(ours, theirs, tolerance=tolerance)
    for path, other in jax.tree_util.tree_leaves_with_path(theirs):
        assert np.abs(np.asarray(other, np.float64)).max() > 0, path


def check_same(ours, theirs):
    equal_trees.assert_same(ours, theirs)


def clipping_of(tx):
    """What the step does: clipping is part of the gradients' scale."""

    def scale_of(grads):
        norm = optax.tree.norm(grads)
        return 1.0 if tx.clip_norm is None else jnp.minimum(1.0, tx.clip_norm / norm)

    return scale_of
