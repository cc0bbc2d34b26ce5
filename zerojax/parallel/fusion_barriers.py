"""Fusion barriers: parts of a program that compile to the same code in any context.

What a compiler fuses with its neighbours may change last bits: one product more is contracted with
an addition, one sum is taken in another order. A sealed part is a computation of its own: nothing
is fused into it and it is fused into nothing. On CPUs `optimization_barrier` does not do that with
every JAX (0.10 takes it out before it fuses), so there the part is a branch of a `cond` whose
predicate is always true, which XLA cannot know. Elsewhere a barrier before and behind does it, with
no predicate to wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractMesh, Mesh

Seal = Literal["branch", "barrier"]


def seal_on(mesh: Mesh | AbstractMesh) -> Seal:
    """What seals on these devices; on devices that this machine does not have it is a barrier."""
    if isinstance(mesh, AbstractMesh) or mesh.devices.flat[0].platform != "cpu":
        return "barrier"
    return "branch"


def zero_at_run_time(witness: jax.Array) -> jax.Array:
    """int32 []: 0, which no compiler pass can know: the second bit of a square is never set.

    Args:
      witness: any array that is known when the program runs, of at least one element.
    """
    first = witness[(0,) * witness.ndim]
    if jnp.issubdtype(first.dtype, jnp.floating):
        first = lax.bitcast_convert_type(first.astype(jnp.float32), jnp.uint32)
    first = first.astype(jnp.uint32)
    return ((first * first) & jnp.uint32(2)).astype(jnp.int32)


def run_sealed(kind: Seal, witness: jax.Array, function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, compiled by itself. Not to be differentiated from outside.

    Args:
      kind: from `seal_on`.
      witness: see `zero_at_run_time`.
      function: of trees of arrays; traced once.
    """
    if kind == "barrier":
        return lax.optimization_barrier(function(*lax.optimization_barrier(args)))
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    leaves, structure = jax.tree.flatten(shape)

    def never(*_: Any) -> list[jax.Array]:
        return [jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves]

    outputs = lax.cond(
        zero_at_run_time(witness) == 0, jaxpr_as_fun(closed), never, *jax.tree.leaves(args)
    )
    return jax.tree.unflatten(structure, outputs)


def seal_values(kind: Seal, witness: jax.Array, values: Any) -> Any:
    """The same values, in buffers of their own: what makes them and what takes them stay apart."""
    if kind == "barrier":
        return lax.optimization_barrier(values)
    return run_sealed(kind, witness, lambda same: same, values)
