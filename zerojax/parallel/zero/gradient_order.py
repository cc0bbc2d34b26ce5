"""Schedules gradients of parameters read after a loop over layers before the backward loop.

A head's gradient needs the cotangents of its logits [rows, tokens, vocabulary] and the last layer's
output. The program does not say when it is computed, and XLA schedules that product after the
backward loop, where nothing waits for it: both arrays then stay in memory during the whole loop. A
barrier in the backward pass makes the loop wait for the gradients, which are scattered by then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr

from zerojax.operators.marks import read_name
from zerojax.tracing.jaxpr import free_variables, split_scan, variables


def given_by_loops(program: Jaxpr, is_loop: Callable[[Any], bool]) -> set[Any]:
    """Returns the floating-point outputs of layer loops that later equations use.

    Args:
      program: has the loops at its top level.
      is_loop: whether an equation, a `scan`, is such a loop.
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
    """Returns the shards that one equation of `equations` reads, and no other of `program`.

    Gradients of two reads that are available together are added before they are scattered: a table
    that is also the head's would be scattered twice if one of them had to be ready earlier.

    Args:
      program: a program whose inputs are shards.
      equations: equations of the program, with a mark at every read.
      names: names of the parameters that count.
      operand: position of the shard among a read's operands.
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
    """Returns an equivalent function that computes shards' gradients first.

    Args:
      run: a function of arrays.
      given_by_loop: positions of arguments whose cotangents wait.
      shards: positions of arguments for whose gradients they wait.
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
    """Returns the same values; in the backward pass, no cotangent is used before all are
    computed.
    """
    return values


def _forward(values: list[jax.Array]) -> tuple[list[jax.Array], None]:
    return values, None


def _backward(_: None, cotangents: list[jax.Array]) -> tuple[list[jax.Array]]:
    return (lax.optimization_barrier(cotangents),)


together.defvjp(_forward, _backward)


def _is_floating(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.floating)
