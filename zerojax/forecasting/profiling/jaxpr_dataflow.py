"""Follows parameters through a jaxpr: which parameters each value contains, and which equations the
outputs need."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, Literal

from zerojax.config.late_dataclasses import dataclass
from zerojax.operators.equations import Equation
from zerojax.operators.marks import inner_programs, is_wait
from zerojax.tracing.jaxpr import split_scan

_SAME = frozenset(
    [
        *("convert_element_type", "reduce_precision", "copy", "copy_p", "name", "clamp"),
        *("pvary", "pbroadcast", "pcast", "mesh_cast", "sharding_constraint", "reshard"),
        *("device_put", "dynamic_slice", "pad", "select_n", "mul", "div"),
    ]
)
"""Primitives that pass on their first operand that is a parameter, element by element. Products and
quotients only with a broadcast scalar, which is a scale."""

Flags = tuple[bool, ...]


@dataclass(frozen=True)
class ParameterOrigin:
    """Parameters whose elements a value contains.

    Attributes:
      names: names of the parameters, in order.
      sizes: number of elements of each parameter along `dim`, if several are concatenated.
      dim: dimension of the concatenation. None: the value contains one parameter, or several that
        can no longer be separated.
      is_scalar: whether the value is a scalar or a broadcast scalar; it then has no names.
      number: the value, if it is a constant whole number.
    """

    names: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    dim: int | None = None
    is_scalar: bool = False
    number: int | None = None


NOTHING, SCALAR = ParameterOrigin(), ParameterOrigin(is_scalar=True)


def join_origins(first: ParameterOrigin, second: ParameterOrigin) -> ParameterOrigin:
    """Combines the origins of two possible sources of a value, such as the two branches of a
    conditional."""
    # An origin without names is a possible source as well, but it adds no parameter.
    if first == second or not second.names:
        return first
    if not first.names:
        return second
    return ParameterOrigin(tuple(dict.fromkeys([*first.names, *second.names])))


def origin_of_output(equation: Equation, given: Sequence[ParameterOrigin]) -> ParameterOrigin:
    """Returns the origin of an equation's first output: the parameters of its input if the equation
    only rearranges its input, else no parameters."""
    kind, params = equation.primitive.name, equation.params
    if not any(origin.names for origin in given):
        spread = kind == "broadcast_in_dim" or kind in _SAME
        shapes = [atom.aval.shape for atom in equation.invars]
        scalars = [o.is_scalar or shape == () for o, shape in zip(given, shapes, strict=True)]
        # A scalar that is spread stays a scale, so a later product with it keeps its parameter.
        return SCALAR if spread and all(scalars) else NOTHING
    if kind == "concatenate":
        return _concatenated(equation, given)
    if kind == "dynamic_slice" and given[0].dim is not None:
        first, size = given[1 + given[0].dim].number, params["slice_sizes"][given[0].dim]
        # Without a constant start the slice may be of any part, so all names stay.
        return given[0] if first is None else _between(given[0], first, first + size)
    origin = next(origin for origin in given if origin.names)
    if kind in _SAME:
        others = [
            o.names or o.is_scalar or atom.aval.shape == ()
            for o, atom in zip(given, equation.invars, strict=True)
        ]
        # The product of two arrays has numbers of both, so it is no longer the parameter.
        return origin if kind not in ("mul", "div") or all(others) else NOTHING
    if kind not in _MOVES:
        return NOTHING
    return origin if origin.dim is None else _MOVES[kind](equation, params, origin)


def _concatenated(equation: Equation, given: Sequence[ParameterOrigin]) -> ParameterOrigin:
    dim = equation.params["dimension"]
    names: list[str] = []
    sizes: list[int] = []
    for origin, atom in zip(given, equation.invars, strict=True):
        if origin.dim == dim:
            names += origin.names
            sizes += origin.sizes
        elif len(origin.names) <= 1:
            # An array without a parameter keeps its place under an empty name, so that offsets
            # stay right.
            names.append(origin.names[0] if origin.names else "")
            sizes.append(atom.aval.shape[dim])
        else:
            # Concatenated again along another dimension, the parts can no longer be told apart by
            # an offset.
            return ParameterOrigin(tuple(name for one in given for name in one.names))
    if len({*names}) == 1:
        return ParameterOrigin((names[0],))
    return ParameterOrigin(tuple(names), tuple(sizes), dim)


def _sliced(
    equation: Equation, params: Mapping[str, Any], origin: ParameterOrigin
) -> ParameterOrigin:
    dim = origin.dim
    return _between(origin, params["start_indices"][dim], params["limit_indices"][dim])


def _between(origin: ParameterOrigin, first: int, last: int) -> ParameterOrigin:
    """Returns the origin of the entries `first` to `last` along the dimension of concatenation."""
    names, sizes, start = [], [], 0
    for name, size in zip(origin.names, origin.sizes, strict=True):
        inside = min(last, start + size) - max(first, start)
        if inside > 0:
            names.append(name)
            sizes.append(inside)
        start += size
    if len(names) == 1:
        return ParameterOrigin((names[0],)) if names[0] else NOTHING
    return ParameterOrigin(tuple(names), tuple(sizes), origin.dim)


def _reshaped(
    equation: Equation, params: Mapping[str, Any], origin: ParameterOrigin
) -> ParameterOrigin:
    """Returns the origin after a reshape; finds the dimension of the new shape with the same size
    and the same number of elements before it."""
    assert origin.dim is not None
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    ahead = math.prod(before[: origin.dim])
    for dim in range(len(after)):
        if math.prod(after[:dim]) == ahead and after[dim] == before[origin.dim]:
            return dataclasses.replace(origin, dim=dim)
    # The dimension was merged with others, so the parts cannot be separated any more.
    return ParameterOrigin(tuple(name for name in origin.names if name))


def _transposed(
    equation: Equation, params: Mapping[str, Any], origin: ParameterOrigin
) -> ParameterOrigin:
    return dataclasses.replace(origin, dim=params["permutation"].index(origin.dim))


def _spread(
    equation: Equation, params: Mapping[str, Any], origin: ParameterOrigin
) -> ParameterOrigin:
    return dataclasses.replace(origin, dim=params["broadcast_dimensions"][origin.dim])


def _squeezed(
    equation: Equation, params: Mapping[str, Any], origin: ParameterOrigin
) -> ParameterOrigin:
    assert origin.dim is not None
    gone = sum(dim < origin.dim for dim in params["dimensions"])
    return dataclasses.replace(origin, dim=origin.dim - gone)


def _gathered(
    equation: Equation, params: Mapping[str, Any], origin: ParameterOrigin
) -> ParameterOrigin:
    assert origin.dim is not None
    # Tiled gathers repeat the parts along the dimension once per shard, and offsets lose their
    # meaning.
    if params["tiled"]:
        return (
            origin
            if params["all_gather_dimension"] != origin.dim
            else ParameterOrigin(origin.names)
        )
    return dataclasses.replace(
        origin, dim=origin.dim + (params["all_gather_dimension"] <= origin.dim)
    )


_MOVES = {
    "slice": _sliced,
    "reshape": _reshaped,
    "transpose": _transposed,
    "broadcast_in_dim": _spread,
    "squeeze": _squeezed,
    "all_gather": _gathered,
    "all_gather_invariant": _gathered,
    "all_gather_reduced": _gathered,
}


class RequiredEquations:
    """Finds the inputs and equations of a jaxpr on which its outputs depend; stores results for
    reuse."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, Flags], tuple[Flags, list[Flags]]] = {}

    def of(self, program: Jaxpr, outputs: Sequence[bool]) -> tuple[Flags, list[Flags]]:
        """Finds the inputs and equations of a jaxpr on which the flagged outputs depend.

        Returns:
          (a flag for each input, a flag for each output of each equation).
        """
        # Callers hold the programs, so an `id` stays that of one program while the results are
        # stored.
        key = id(program), tuple(outputs)
        if key not in self._known:
            self._known[key] = self._find(program, outputs)
        return self._known[key]

    def _find(self, program: Jaxpr, outputs: Sequence[bool]) -> tuple[Flags, list[Flags]]:
        needed = {
            atom
            for atom, flag in zip(program.outvars, outputs, strict=True)
            if flag and not isinstance(atom, Literal)
        }
        found: list[Flags] = []
        # Backwards every user of a value is known before the equation that computes it.
        for equation in reversed(program.eqns):
            flags = tuple(variable in needed for variable in equation.outvars)
            found.append(flags)
            if any(flags):
                for atom, flag in zip(equation.invars, self._inputs(equation, flags), strict=True):
                    if flag and not isinstance(atom, Literal):
                        needed.add(atom)
        return tuple(variable in needed for variable in program.invars), found[::-1]

    def _inputs(self, equation: Equation, outputs: Flags) -> Sequence[bool]:
        kind, everything = equation.primitive.name, [True] * len(equation.invars)
        if kind == "scan":
            return self.of_scan(equation, outputs)[0]
        if kind == "optimization_barrier":  # each output depends on its own input
            return outputs
        # A wait passes no number on: its input is only ordered before.
        if is_wait(equation):
            return [False]
        programs = list(inner_programs(equation.params))
        if kind == "cond":
            each = [self.of(program, outputs)[0] for program in programs]
            return [True, *(any(flags) for flags in zip(*each, strict=True))]
        for program in programs:
            # An equation whose inner program has other inputs may read everything.
            if is_call(equation, program):
                return self.of(program, outputs)[0]
        return everything

    def of_scan(self, equation: Equation, outputs: Flags) -> tuple[Flags, Flags]:
        """Finds the inputs of a scan on which its flagged outputs depend, also through the carry.

        Returns:
          (a flag for each input of the scan, a flag for each output of its body).
        """
        constants, carried = split_scan(equation)
        body = equation.params["jaxpr"].jaxpr
        wanted = list(outputs)
        # A carry that is needed may need other carries of the iteration before, until nothing is
        # added.
        while True:
            inputs = self.of(body, wanted)[0]
            carry = inputs[constants : constants + carried]
            joined = [old or new for old, new in zip(wanted[:carried], carry, strict=True)]
            if joined == wanted[:carried]:
                return inputs, tuple(wanted)
            wanted[:carried] = joined


def is_call(equation: Equation, program: Jaxpr) -> bool:
    """Returns whether an equation runs a jaxpr exactly once, with the equation's own inputs and
    outputs."""
    return (
        # These have an inner program of the same size, but run it not at all, or several times.
        equation.primitive.name not in ("scan", "while", "cond", "pallas_call")
        and len(program.invars) == len(equation.invars)
        and len(program.outvars) == len(equation.outvars)
    )
