"""Finds the learning rate of an optax transformation in the traced program of its update.

An optax transformation does not say its rate. But the last thing that its update does is, as a
rule, a product with a number that depends on the number of updates alone: the negative rate.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jax.interpreters import partial_eval
from jax.typing import ArrayLike

from zerojax.config.tree_types import Tree
from zerojax.operators.equations import Operand
from zerojax.optim.schedules import Schedule

_LIKE = {"kernel": jax.ShapeDtypeStruct((2, 3), jnp.float32)}
"""Parameters for which the update is traced."""
_SAME = frozenset(["broadcast_in_dim", "convert_element_type", "copy", "copy_p", "reshape"])


def schedule_of(tx: optax.GradientTransformation) -> Schedule | None:
    """Returns the learning rate of an optax transformation as a function of the number of updates.

    Returns:
      The rate; None if the update of a matrix does not end with a product with such a number,
      differs between parameters, or cannot be traced (as one that needs the model's parameters).
    """
    try:
        state = jax.eval_shape(tx.init, _LIKE)
        closed, shape = jax.make_jaxpr(tx.update, return_shape=True)(_LIKE, state, _LIKE)
    except Exception:  # a user's function, which may need anything
        return None
    given = [*jax.tree.leaves(_LIKE), *jax.tree.leaves(state), *jax.tree.leaves(_LIKE)]
    counts = [x.shape == () and jnp.issubdtype(x.dtype, jnp.integer) for x in given]
    if len(jax.tree.leaves(shape[0])) != 1 or _has_groups(state):
        return None
    sign, factors = _factors(closed, counts)
    # With two numbers it is not known which one is the rate, as in chain(scale(0.5), sgd(0.1)).
    return (lambda count: -sign * factors[0](count)) if len(factors) == 1 else None


def _has_groups(state: Tree) -> bool:
    """Returns whether a state is that of a transformation with a rule for each group of names."""
    is_group = lambda x: isinstance(x, optax.MultiTransformState)  # noqa: E731
    return any(map(is_group, jax.tree.leaves(state, is_leaf=is_group)))


def _factors(closed: ClosedJaxpr, counts: list[bool]) -> tuple[float, list[Callable[[Any], Any]]]:
    """Returns (sign, functions of the count) of the last products of a program's first output.

    Numbers 1 and -1 are no factors: they only change the sign.
    """
    program, sign = closed.jaxpr, 1.0
    found: list[Callable[[Any], Any]] = []
    made = {variable: equation for equation in program.eqns for variable in equation.outvars}
    atom: Operand = program.outvars[0]
    while not isinstance(atom, Literal) and atom in made:
        equation = made[atom]
        kind, operands = equation.primitive.name, equation.invars
        if kind in _SAME:
            atom = operands[0]
        elif kind == "neg":
            sign, atom = -sign, operands[0]
        elif kind == "mul":
            first, second = (_number(closed, operand, counts) for operand in operands)
            factor, atom = (second, operands[0]) if first is None else (first, operands[1])
            if factor is None or (first is not None and second is not None):
                break
            if isinstance(factor, float):
                sign, size = math.copysign(sign, factor * sign), abs(factor)
                found += [functools.partial(_constant, size)] if size != 1 else []
            else:
                found.append(factor)
        else:
            break
    return sign, found


def _constant(number: float, count: ArrayLike) -> float:
    return number


def _number(
    closed: ClosedJaxpr, atom: Operand, counts: list[bool]
) -> float | Callable[[Any], Any] | None:
    """Returns an operand that is a number, or a function of the count of updates; else None."""
    if isinstance(atom, Literal):
        return float(atom.val)
    program: Jaxpr = closed.jaxpr.replace(outvars=[atom])
    needed, used = partial_eval.dce_jaxpr(program, [True])
    if any(use and not is_count for use, is_count in zip(used, counts, strict=True)):
        return None
    run = jaxpr_as_fun(ClosedJaxpr(needed, closed.consts))
    avals: list[Any] = [variable.aval for variable in needed.invars]
    # All entries are equal: they were made from counts.
    return lambda count: run(*(jnp.asarray(count, x.dtype) for x in avals))[0].reshape(-1)[0]
