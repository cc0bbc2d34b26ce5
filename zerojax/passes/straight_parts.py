"""Finds the layers in straight-line parts of a program by the numbers in parameter names.

A loop over layers has one layer in its body. Layers that a Python loop calls follow each other in
one straight-line part; only names such as `layers/3/attn/q` show where a layer ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr

from zerojax.config.tree_types import Tree
from zerojax.operators.marks import read_name
from zerojax.tracing.jaxpr import free_variables, variables
from zerojax.tracing.trees import layer_of


def cut_at_layers(equations: Sequence[Any], needed: Sequence[Any]) -> list[list[Any]]:
    """Splits straight-line equations at the first read of each layer's parameters.

    No value computed from parameters alone crosses a cut: a checkpoint around the following part
    would save that value for the backward pass. So a value that a model computes in advance from
    all parameters, such as a cast, is moved into the part that uses it.

    Args:
      equations: equations in order, with a mark at every read of a parameter.
      needed: variables that are needed later.
    """
    if not equations:
        return []
    names = _names_read(equations)
    whole = _made_of_reads(equations, names)
    last_use = {v: at for at, e in enumerate(equations) for v in variables(e.invars)}
    last_use |= dict.fromkeys(needed, len(equations))
    parts: list[list[Any]] = [[]]
    layer, held_until = None, -1
    for at, equation in enumerate(equations):
        name = next((names[v] for v in equation.outvars if v in names), None)
        if name is not None and parts[-1] and layer_of(name) != layer and held_until < at:
            parts.append([])
        layer = layer_of(name) if name is not None else layer
        parts[-1].append(equation)
        uses = (last_use.get(v, -1) for v in equation.outvars if v in whole)
        held_until = max(held_until, *uses, -1)
    return parts


def _names_read(equations: Sequence[Any]) -> dict[Any, str]:
    """Returns {variable with the value of a parameter (operand of the mark): name of the
    parameter}.
    """
    marks = ((e.invars[0], read_name(e)) for e in equations if e.invars)
    return {variable: name for variable, name in marks if name is not None}


def _made_of_reads(equations: Sequence[Any], names: Mapping[Any, str]) -> set[Any]:
    """Returns the variables that depend only on parameter reads."""
    whole = set(names)
    for equation in equations:
        given = list(variables(equation.invars))
        if given and whole.issuperset(given):
            whole.update(equation.outvars)
    return whole


def run_in_turn(
    parts: Sequence[Sequence[Any]],
    program: Jaxpr,
    taken: Sequence[Any],
    needed: Sequence[Any],
    run_part: Callable[..., Callable[..., Any]],
) -> Callable[..., list[Any]]:
    """Returns straight-line equations as a function that runs their parts in sequence.

    Args:
      parts: straight-line equations, divided into parts.
      program: the program that contains them.
      taken: input variables of the straight-line equations.
      needed: variables of the result.
      run_part: `(program, equations, taken, needed) -> function`; builds the function of one part.
    """
    later = set(needed)
    wanted: list[list[Any]] = []
    for part in reversed(parts):
        wanted.append([v for equation in part for v in equation.outvars if v in later])
        later |= set(free_variables(part))

    def run(*given: Tree) -> list[Any]:
        values = dict(zip(taken, given, strict=True))
        for part, gives in zip(parts, reversed(wanted), strict=True):
            takes = free_variables(part)
            outputs = run_part(program, part, takes, gives)(*(values[v] for v in takes))
            values |= dict(zip(gives, outputs, strict=True))
        return [values[variable] for variable in needed]

    return run
