"""Runs a program with pauses at given shares of its FLOPs, in which other work can be ordered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from zerojax.operators.equations import Equation
from zerojax.tracing.flops import equation_flops, without_waste
from zerojax.tracing.jaxpr import evaluate_in_pieces, free_variables, piece_function

Pause = Callable[[Any, Sequence[Any]], Any]


def run_with_pauses(
    function: Callable[..., Any], arguments: Sequence[Any], count: int, pause: Pause
) -> Any:
    """Runs `function(*arguments)` with `count` pauses that divide its FLOPs evenly; traced.

    A pause is after a product on which later products depend. Products whose results are only
    outputs, such as the gradients of weights, do not have pauses: nothing would keep them apart.

    Args:
      pause: `(a result of the product, results of all products before that are only outputs) ->
        the result, as the program continues with it`. It is called at each pause.

    Returns:
      The result of the function.
    """
    traced, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
    closed = ClosedJaxpr(without_waste(traced), traced.consts)
    chosen, ends = _choose(closed.jaxpr, count)
    done: list[Any] = []

    def run_apart(equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        taken = free_variables([equation])
        known = {
            v: x
            for v, x in zip(equation.invars, operands, strict=True)
            if not isinstance(v, Literal)
        }
        run = piece_function(closed.jaxpr, [equation], taken, equation.outvars)
        outputs = list(run(*(known[var] for var in taken)))
        if id(equation) in ends:
            done.append(outputs[0])
        else:
            outputs[0] = pause(outputs[0], done)
        return outputs

    outputs = evaluate_in_pieces(
        closed,
        jax.tree.leaves(arguments),
        is_apart=lambda equation: id(equation) in chosen | ends,
        run_apart=run_apart,
    )
    return jax.tree.unflatten(jax.tree.structure(shape), outputs)


def _choose(program: Jaxpr, count: int) -> tuple[set[int], set[int]]:
    """Returns the ids of (equations with a pause after them, products that are only outputs)."""
    flops = {id(equation): equation_flops(equation) for equation in program.eqns}
    leading: set[Any] = set()
    ends: set[int] = set()
    for equation in reversed(program.eqns):
        leads = any(var in leading for var in equation.outvars)
        if flops[id(equation)] and not leads:
            ends.add(id(equation))
        if leads or flops[id(equation)]:
            leading.update(var for var in equation.invars if not isinstance(var, Literal))
    chosen, passed, total = set(), 0, sum(flops.values())
    for equation in program.eqns:
        passed += flops[id(equation)]
        # In integers, so that the shares are exact.
        is_due = passed * (count + 1) >= total * (len(chosen) + 1) > 0
        if is_due and len(chosen) < count and flops[id(equation)] and id(equation) not in ends:
            chosen.add(id(equation))
    return chosen, ends
