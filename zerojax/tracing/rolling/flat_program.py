"""Represents a traced loss as one flat list of equations, with the layers that each value depends
on.

Calls of `jax.jit` are inlined, also inside of checkpoints, so that layers are compared by their
computation and not by their wrappers. Nothing else changes, and every variable is defined once.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from zerojax.config.late_dataclasses import dataclass
from zerojax.operators.equations import Equation, Operand
from zerojax.tracing.jaxpr import is_checkpoint, program_of, variables

_CALLS = ("jit", "pjit", "closed_call")


class Mismatch(Exception):
    """Raised if layers cannot form one loop; the message is the reason.

    Attributes:
      iteration: index of the first iteration that differs from those before it; None if unknown.
    """

    def __init__(self, why: str, iteration: int | None = None) -> None:
        super().__init__(why)
        self.iteration = iteration


# --- inlined calls --------------------------------------------------------------------------------


def open_calls(closed: ClosedJaxpr, *, opens: Callable[[Any], bool] | None = None) -> ClosedJaxpr:
    """Returns the same program without calls of `jax.jit` and without dead code.

    Args:
      closed: program to inline.
      opens: function that returns whether to inline a call; None: all calls are inlined.
    """
    program = closed.jaxpr
    consts = list(zip(program.constvars, closed.consts, strict=True))
    names: dict[Any, Any] = {}
    equations = list(_opened(program.eqns, names, consts, opens or is_plain_call))
    outputs = [_read(names, atom) for atom in program.outvars]
    flat = program.replace(
        constvars=[variable for variable, _ in consts],
        eqns=list(_needed(equations, outputs)),
        outvars=outputs,
    )
    return ClosedJaxpr(flat, [value for _, value in consts])


def _opened(
    equations: Iterable[Any],
    names: dict[Any, Any],
    consts: list[tuple[Any, Any]] | None,
    opens: Callable[[Any], bool],
) -> Iterator[Any]:
    """Yields equations with fresh result variables, and with calls inlined.

    Args:
      equations: equations of a program.
      names: {variable: replacement}; new result variables are added.
      consts: list of (variable, value) to which the constants of inlined calls are added; None:
        calls with constants are not inlined.
      opens: function that returns whether to inline a call.
    """
    for equation in equations:
        operands = [_read(names, atom) for atom in equation.invars]
        if opens(equation) and (consts is not None or not program_of(equation).consts):
            yield from _open(equation, operands, names, consts, opens)
            continue
        # A program that is called twice is inlined twice, so each time needs its own variables.
        made = [Var(variable.aval) for variable in equation.outvars]
        names.update(zip(equation.outvars, made, strict=True))
        params = equation.params
        if is_checkpoint(equation):
            params = params | {"jaxpr": _open_inside(params["jaxpr"], opens)}
        yield equation.replace(invars=operands, outvars=made, params=params)


def _open(
    equation: Equation,
    operands: list[Any],
    names: dict[Any, Any],
    consts: list[tuple[Any, Any]] | None,
    opens: Callable[[Any], bool],
) -> Iterator[Any]:
    inner = program_of(equation)
    inside = dict(zip(inner.jaxpr.invars, operands, strict=True))
    for variable, value in zip(inner.jaxpr.constvars, inner.consts, strict=True):
        assert consts is not None
        inside[variable] = Var(variable.aval)
        consts.append((inside[variable], value))
    yield from _opened(inner.jaxpr.eqns, inside, consts, opens)
    results = (_read(inside, atom) for atom in inner.jaxpr.outvars)
    names.update(zip(equation.outvars, results, strict=True))


def _open_inside(program: Jaxpr, opens: Callable[[Any], bool]) -> Any:
    """Returns the program of a checkpoint, with the calls in it inlined."""
    inner: Jaxpr = getattr(program, "jaxpr", program)
    names: dict[Any, Any] = {}
    equations = list(_opened(inner.eqns, names, None, opens))
    outputs = [_read(names, atom) for atom in inner.outvars]
    inner = inner.replace(eqns=list(_needed(equations, outputs)), outvars=outputs)
    return ClosedJaxpr(inner, program.consts) if hasattr(program, "consts") else inner


def _read(names: Mapping[Any, Any], atom: Operand) -> Any:
    return atom if isinstance(atom, Literal) else names.get(atom, atom)


def is_plain_call(equation: Equation) -> bool:
    """Returns whether an equation is a call that can be inlined (no shardings or compiler
    options).
    """
    if equation.primitive.name not in _CALLS:
        return False
    shardings = (
        *equation.params.get("in_shardings", ()),
        *equation.params.get("out_shardings", ()),
    )
    plain = all(type(sharding).__name__ == "UnspecifiedValue" for sharding in shardings)
    return plain and not equation.params.get("compiler_options_kvs")


def _needed(equations: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    needed, kept = set(variables(outputs)), []
    for equation in reversed(equations):
        if equation.effects or any(variable in needed for variable in equation.outvars):
            kept.append(equation)
            needed.update(variables(equation.invars))
    return kept[::-1]


# --- layers ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Location of a parameter in a list of layers: index of the layer, and name inside the
    layer.
    """

    layer: int
    within: str


class LayerProgram:
    """Flat program, with the positions of the layers of one list in it.

    Attributes:
      closed: program, a result of `open_calls`.
      places: {input of the program: layer and name within the layer} for the parameters of the
        list.
      numbers: numbers of the layers in their names, for messages.
      position: {variable: index of the equation that defines it}, without inputs.
      made_by: {variable: (equation that defines it, index of the result)}.
      depth: {variable: last layer whose parameters it depends on, -1 for none}.
      plain: variables that depend only on parameters of the list, such as casts or `1 + scale`.
    """

    def __init__(
        self, closed: ClosedJaxpr, places: Mapping[Any, Place], numbers: Sequence[int]
    ) -> None:
        self.closed, self.places, self.numbers = closed, places, numbers
        self.equations = closed.jaxpr.eqns
        self.position: dict[Any, int] = {}
        self.made_by: dict[Any, tuple[Any, int]] = {}
        self.depth: dict[Any, int] = {variable: place.layer for variable, place in places.items()}
        self.plain: set[Any] = set(places)
        self._first: dict[int, int] = {}
        self._last: dict[int, int] = {}
        for number, equation in enumerate(self.equations):
            self._follow(number, equation)
        self._reach = self._reached()

    def _follow(self, number: int, equation: Equation) -> None:
        operands = list(variables(equation.invars))
        depth = max((self.depth.get(v, -1) for v in operands), default=-1)
        plain = bool(operands) and all(v in self.plain for v in operands)
        for k, variable in enumerate(equation.outvars):
            self.position[variable], self.made_by[variable] = number, (equation, k)
            self.depth[variable] = depth
            if plain:
                self.plain.add(variable)
        if plain:
            return
        for variable in operands:  # the equation uses parameters of a layer with other values
            if variable in self.plain:
                layer = self.depth[variable]
                self._first.setdefault(layer, number)
                self._last[layer] = number

    def _reached(self) -> dict[Any, int]:
        """Returns {variable: last layer that uses values depending on it}."""
        reach: dict[Any, int] = {}
        for equation in reversed(self.equations):
            operands = list(variables(equation.invars))
            met = [self.depth[v] for v in operands if v in self.plain]
            anchors = met if any(v not in self.plain for v in operands) else []
            last = max([*anchors, *(reach.get(v, -1) for v in equation.outvars)], default=-1)
            for variable in operands:
                reach[variable] = max(last, reach.get(variable, -1))
        return reach

    def depends_on(self, sources: Iterable[Any]) -> set[Any]:
        """Returns the variables that depend on `sources`, themselves included."""
        dependent = set(sources)
        for equation in self.equations:
            if any(variable in dependent for variable in variables(equation.invars)):
                dependent.update(equation.outvars)
        return dependent

    def goes_on(self, variable: Operand, layer: int) -> bool:
        """Returns whether a layer after `layer` uses values that depend on this variable."""
        return self._reach.get(variable, -1) > layer

    @property
    def span(self) -> tuple[int, int]:
        """Indices of the first and the last equation that use parameters of the list of layers."""
        return min(self._first.values(), default=0), max(self._last.values(), default=0)

    def cuts(self, start: int, layers: Sequence[int], *, early: bool) -> list[list[Any]]:
        """Returns, for each of these layers, the values that are live between it and the next
        layer.

        The cut between two layers is after the last use of the first layer's parameters and before
        the first use of the next layer's. Of these positions, the one with the fewest live bytes of
        values defined since the previous cut is chosen.

        Args:
          start: first layer; values that depend on no layer from `start` on are ignored.
          layers: numbers of the layers after which to cut.
          early: whether to choose the first of equally good positions, not the last. Then a
            computation before the next layer's first parameter, such as an activation function,
            belongs to the next layer.

        Raises:
          Mismatch: two layers are interleaved, or a layer uses none of its parameters.
        """
        last_use = self._last_uses()
        before, cuts = -1, []
        for iteration, layer in enumerate(layers, 1):
            if layer not in self._last or layer + 1 not in self._first:
                numbers = f"{self.numbers[layer]} or {self.numbers[layer + 1]}"
                raise Mismatch(f"layer {numbers} reads none of its parameters", iteration)
            low, high = self._last[layer], self._first[layer + 1]
            if low >= high:
                numbers = f"{self.numbers[layer]} and {self.numbers[layer + 1]}"
                raise Mismatch(
                    f"layers {numbers} are interleaved: the first one's parameters are used again "
                    "after the second one's, as in a U-net or in a model that takes its own "
                    "gradient",
                    iteration,
                )
            before, live = self._best_cut(start, before, (low, high), last_use, early)
            cuts.append(live)
        return cuts

    def _last_uses(self) -> list[tuple[int, int, Any]]:
        """Returns (index of definition, index of last use, variable) of each value, in order of
        definition.
        """
        use = {v: n for n, e in enumerate(self.equations) for v in variables(e.invars)}
        use |= dict.fromkeys(variables(self.closed.jaxpr.outvars), len(self.equations))
        uses = [(self.position[v], last, v) for v, last in use.items() if v in self.position]
        return sorted(uses, key=lambda entry: (entry[0], self.made_by[entry[2]][1]))

    def _best_cut(
        self,
        start: int,
        before: int,
        between: tuple[int, int],
        last_use: Sequence[tuple[int, int, Any]],
        early: bool,
    ) -> tuple[int, list[Any]]:
        low, high = between
        # The list is sorted by definition; to search all of it for each cut would be slow.
        first = bisect.bisect_right(last_use, before, key=lambda entry: entry[0])
        end = bisect.bisect_left(last_use, high, key=lambda entry: entry[0])
        # What depends on parameters alone is no value that goes from layer to layer.
        near = [
            (made, last, variable)
            for made, last, variable in last_use[first:end]
            if last > low and self.depth[variable] >= start and variable not in self.plain
        ]
        best: tuple[int, int, list[Any]] | None = None
        for cut in range(low, high):
            live = [variable for made, last, variable in near if made <= cut < last]
            size = sum(map(num_bytes, live))
            if best is None or size < best[0] or (size == best[0] and not early):
                best = size, cut, live
        assert best is not None
        return best[1], best[2]


def num_bytes(variable: Operand) -> int:
    """Returns the bytes of a value; dtypes without item size, such as keys, count as 8 bytes."""
    return variable.aval.size * getattr(variable.aval.dtype, "itemsize", 8)
