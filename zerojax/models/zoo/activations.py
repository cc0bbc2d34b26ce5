"""Sharding constraints of activations by named dimension ("batch", "sequence", "embed").

Models name dimensions ("batch", "sequence", "embed"); they never know a mesh. Without rules in
force `constrain` is the identity, so that a model runs alone as well as inside a training step.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping

import jax
from jax.sharding import PartitionSpec as P

_RULES: contextvars.ContextVar[Mapping[str, str] | None] = contextvars.ContextVar(
    "activation_rules", default=None
)


@contextlib.contextmanager
def activation_rules(rules: Mapping[str, str] | None) -> Iterator[None]:
    """Puts `rules` in force while a function is traced.

    Args:
      rules: dimension name -> mesh axis of the mesh in context; a name that is missing stays
        unconstrained. None: no constraint at all.
    """
    token = _RULES.set(rules)
    try:
        yield
    finally:
        _RULES.reset(token)


def constrain(x: jax.Array, dims: tuple[str, ...]) -> jax.Array:
    """Asks the compiler to split `x` as the rules in force say; the identity without rules.

    Args:
      x: an activation.
      dims: one name per dimension of `x`, such as ("batch", "sequence", "embed").
    """
    rules = _RULES.get()
    if not rules or not any(dim in rules for dim in dims):
        return x
    spec = P(*(rules.get(dim, P.UNCONSTRAINED) for dim in dims))
    return jax.lax.with_sharding_constraint(x, spec)
