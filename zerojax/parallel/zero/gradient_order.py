"""Gradients of what is read behind a loop over layers, before the backward pass enters that loop.

A head's gradient needs the cotangents of its logits [rows, tokens, vocabulary] and the last layer's
output. Nothing in the program says when it is computed, and XLA schedules that product behind the
backward loop, where nothing waits for it: both arrays then live through the whole loop. A barrier
in the backward pass makes the loop wait for the gradients, which are scattered by then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr

from zerojax.models.jaxpr import free_variables, read_name, split_scan, variables


def given_by_loops(program: Jaxpr, is_loop: Callable[[Any], bool]) -> set[Any]:
    """The floating-point variables that loops over layers hand on to what follows them.

    Args:
      program: at whose top level the loops are.
      is_loop: whether an equation, a `scan`, is one.
    """
    found: set[Any] = set()
    for equation in program.eqns:
        if equation.primitive.name == "scan" and is_loop(equation):
            _, num_carry = split_scan(equation)
            found.update(filter(_is_floating, equation.outvars[:num_carry]))
    return found


def shards_read_once(
    program: Jaxpr, equations: Sequence[Any], names: Collection[str], operand: int
) -> set[Any]:
    """The variables of the shards that these equations read and no others do.

    Gradients of two reads are added before they are scattered, if they are there together: a table
    that is also the head's, told to be there earlier, would be scattered twice.

    Args:
      program: whose inputs are shards.
      equations: of it, with a mark at every read.
      names: of the parameters that count.
      operand: which operand of a read is the shard.
    """
    calls = {call.outvars[0]: call for call in equations if len(call.outvars) == 1}
    marks = [e for e in equations if read_name(e) in names and e.invars[0] in calls]
    read = [calls[mark.invars[0]].invars[operand] for mark in marks]
    here = set(map(id, equations))
    elsewhere = free_variables([e for e in program.eqns if id(e) not in here])
    once = set(variables(read)).difference(elsewhere)
    return {variable for variable in once if _is_floating(variable) and read.count(variable) == 1}


def with_gradients_first(
    run: Callable[..., Any], given_by_loop: Sequence[int], shards: Sequence[int]
) -> Callable[..., Any]:
    """A function with the same values and derivatives, whose gradients of shards come first.

    Args:
      run: of arrays.
      given_by_loop: the places of arguments whose cotangents wait.
      shards: the places of those for whose gradients they wait.
    """
    places = [*given_by_loop, *shards]

    def ordered(*given: Any) -> Any:
        arguments = list(given)
        tied = together([arguments[place] for place in places])
        for place, value in zip(places, tied, strict=True):
            arguments[place] = value
        return run(*arguments)

    return ordered


@jax.custom_vjp
def together(values: list[jax.Array]) -> list[jax.Array]:
    """The same values; in the backward pass no cotangent goes on before all are there."""
    return values


def _forward(values: list[jax.Array]) -> tuple[list[jax.Array], None]:
    return values, None


def _backward(_: None, cotangents: list[jax.Array]) -> tuple[list[jax.Array]]:
    return (lax.optimization_barrier(cotangents),)


together.defvjp(_forward, _backward)


def _is_floating(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.floating)
