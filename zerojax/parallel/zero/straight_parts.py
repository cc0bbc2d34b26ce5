"""Layers of a straight piece of a program, told by the numbers in the names of what it reads.

A loop over layers has one layer in its body. Layers that a Python loop calls stand one after the
other in one piece; only their names, `layers/3/attn/q`, tell where one ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr

from zerojax.models.jaxpr import free_variables, read_name, variables
from zerojax.models.trees import layer_of


def cut_at_layers(equations: Sequence[Any], needed: Sequence[Any]) -> list[list[Any]]:
    """Equations of a straight piece, cut where the reads of another layer begin.

    Nothing made of parameters alone goes over a cut: a checkpoint around the part after it would
    keep that value for the backward pass. What a model makes of all parameters beforehand, such as
    a cast, is therefore in one part with its uses.

    Args:
      equations: in order, with a mark at every read.
      needed: what is needed of them later.
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
    """{what a read gives, before its mark: the parameter}."""
    marks = ((e.invars[0], read_name(e)) for e in equations if e.invars)
    return {variable: name for variable, name in marks if name is not None}


def _made_of_reads(equations: Sequence[Any], names: Mapping[Any, str]) -> set[Any]:
    """What is read, and what is made of that alone."""
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
    """A straight piece as a function of what it takes, its parts one after the other.

    Args:
      parts: equations of the piece, cut.
      program: that they are of.
      taken: what the piece takes; needed: what is needed of it.
      run_part: (program, equations, taken, needed) -> the part as a function of what it takes.
    """
    later = set(needed)
    wanted: list[list[Any]] = []
    for part in reversed(parts):
        wanted.append([v for equation in part for v in equation.outvars if v in later])
        later |= set(free_variables(part))

    def run(*given: Any) -> list[Any]:
        values = dict(zip(taken, given, strict=True))
        for part, gives in zip(parts, reversed(wanted), strict=True):
            takes = free_variables(part)
            outputs = run_part(program, part, takes, gives)(*(values[v] for v in takes))
            values |= dict(zip(gives, outputs, strict=True))
        return [values[variable] for variable in needed]

    return run
