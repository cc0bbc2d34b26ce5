"""Trees of a few leaves, coded and not, and steps of 8-bit AdamW on them."""

import jax
import jax.numpy as jnp

from pallas_kernels.choice import Choice
from tests.support import equal_trees
from tests.support.recipe import RECIPE
from zerojax.optim.optimizer import UpdateContext

XLA = Choice("xla", "for a test")
SHAPES = {"head/kernel": (96, 48), "layers/bias": (4, 1100), "norm/scale": (48,)}
CODED = ("head/kernel", "layers/bias")
RATE = {"learning_rate": 1e-2, **RECIPE}


def normal(number, shape):
    return jax.random.normal(jax.random.fold_in(jax.random.key(3), number), shape)


def tree(number, shapes=SHAPES):
    return {
        name: normal(100 * number + k, shape)
        for k, (name, shape) in enumerate(sorted(shapes.items()))
    }


def context_of(count, *, scale=1.0, skip=False, chosen=XLA, names=SHAPES, axes=None):
    return UpdateContext(
        gradient_scale=jnp.float32(scale),
        skip=jnp.asarray(skip),
        key=jax.random.fold_in(jax.random.key(0), count),
        axes=axes or dict.fromkeys(names, ()),
        choice=chosen,
    )


def stepped(tx, params, state, *, first=0, steps=3, **more):
    shapes = {name: x.shape for name, x in params.items()}
    for count in range(first, first + steps):
        context = context_of(count, names=params, **more)
        params, state = tx.apply(tree(1 + count, shapes), state, params, context)
    return params, state


def assert_same(one, other):
    """Structures, dtypes and every bit."""
    equal_trees.assert_same(one, other)
