"""Makes the gradients of parameters that are read after a loop over layers ready before its
backward loop.

An example is the head of a language model. Its weight gradient needs the cotangents of the logits
[rows, tokens, vocabulary] and the last layer's output. The program does not fix when this product
runs, and XLA schedules it after the backward loop, because no other operation waits for it. Both
arrays then stay in memory during the whole loop. A barrier in the backward pass makes the loop wait
until these gradients are computed and reduce-scattered.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr

from zerojax.config.tree_types import Tree
from zerojax.operators.equations import Operand
from zerojax.operators.marks import read_name
from zerojax.tracing.jaxpr import free_variables, split_scan, variables


def given_by_loops(program: Jaxpr, is_loop: Callable[[Any], bool]) -> set[Any]:
    """Returns the floating-point outputs of layer loops that later equations use.

    Args:
      program: program with the loops at its top level.
      is_loop: function that returns whether a `scan` equation is a loop over layers.
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
    """Returns the shards that exactly one equation of `program` reads, if it is in `equations`.

    Shards with two reads are excluded, because gradients of both reads are added before they are
    reduce-scattered. A tied table, for example, would be scattered twice if the head's gradient had
    to be ready earlier.

    Args:
      program: a program whose inputs are shards.
      equations: equations of the program that contain marks of parameter reads.
      names: names of the parameters to consider.
      operand: position of the shard among the operands of a read.
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
    """Returns an equivalent function whose backward pass computes the gradients of some shards
    first.

    Args:
      run: a function of arrays.
      given_by_loop: positions of the arguments that a loop over layers computed; their cotangents
        wait.
      shards: positions of the arguments whose gradients are computed first.
    """
    places = [*given_by_loop, *shards]

    def ordered(*given: Tree) -> Any:
        arguments = list(given)
        tied = together([arguments[place] for place in places])
        for place, value in zip(places, tied, strict=True):
            arguments[place] = value
        return run(*arguments)

    return ordered


@jax.custom_vjp
def together(values: list[jax.Array]) -> list[jax.Array]:
    """Returns the values unchanged; in the backward pass, all cotangents become available
    together.
    """
    return values


def _forward(values: list[jax.Array]) -> tuple[list[jax.Array], None]:
    return values, None


def _backward(_: None, cotangents: list[jax.Array]) -> tuple[list[jax.Array]]:
    return (lax.optimization_barrier(cotangents),)


together.defvjp(_forward, _backward)


def _is_floating(variable: Operand) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.floating)
