"""A traced loss as one flat list of equations, with the layers that each value depends on.

Calls of `jax.jit` are opened, also inside of checkpoints, so that layers are compared by what they
compute and not by how it is wrapped. Nothing else changes, and every variable is made once.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from zerojax.tracing.jaxpr import is_checkpoint, program_of, variables

_CALLS = ("jit", "pjit", "closed_call")


class Mismatch(Exception):
    """Layers cannot be one loop; the text says why.

    Attributes:
      turn: number of the first turn that differs from those before it; None where that is unknown.
    """

    def __init__(self, why: str, turn: int | None = None) -> None:
        super().__init__(why)
        self.turn = turn


# --- calls, opened --------------------------------------------------------------------------------


def open_calls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program without calls of `jax.jit` and without equations that nothing needs."""
    program = closed.jaxpr
    consts = list(zip(program.constvars, closed.consts, strict=True))
    names: dict[Any, Any] = {}
    equations = list(_opened(program.eqns, names, consts))
    outputs = [_read(names, atom) for atom in program.outvars]
    flat = program.replace(
        constvars=[variable for variable, _ in consts],
        eqns=list(_needed(equations, outputs)),
        outvars=outputs,
    )
    return ClosedJaxpr(flat, [value for _, value in consts])


def _opened(
    equations: Iterable[Any], names: dict[Any, Any], consts: list[tuple[Any, Any]] | None
) -> Iterator[Any]:
    """Equations with fresh results.

    Args:
      names: variable -> what stands for it; results are added.
      consts: (variable, value) of constants, to which those of calls are added; None where a call
        with constants has to stay.
    """
    for equation in equations:
        given = [_read(names, atom) for atom in equation.invars]
        if _opens(equation) and (consts is not None or not program_of(equation).consts):
            yield from _open(equation, given, names, consts)
            continue
        made = [Var(variable.aval) for variable in equation.outvars]
        names.update(zip(equation.outvars, made, strict=True))
        params = equation.params
        if is_checkpoint(equation):
            params = params | {"jaxpr": _open_inside(params["jaxpr"])}
        yield equation.replace(invars=given, outvars=made, params=params)


def _open(
    equation: Any, given: list[Any], names: dict[Any, Any], consts: list[tuple[Any, Any]] | None
) -> Iterator[Any]:
    inner = program_of(equation)
    inside = dict(zip(inner.jaxpr.invars, given, strict=True))
    for variable, value in zip(inner.jaxpr.constvars, inner.consts, strict=True):
        assert consts is not None
        inside[variable] = Var(variable.aval)
        consts.append((inside[variable], value))
    yield from _opened(inner.jaxpr.eqns, inside, consts)
    results = (_read(inside, atom) for atom in inner.jaxpr.outvars)
    names.update(zip(equation.outvars, results, strict=True))


def _open_inside(program: Any) -> Any:
    """The program of a checkpoint, with the calls in it opened."""
    inner: Jaxpr = getattr(program, "jaxpr", program)
    names: dict[Any, Any] = {}
    equations = list(_opened(inner.eqns, names, None))
    outputs = [_read(names, atom) for atom in inner.outvars]
    inner = inner.replace(eqns=list(_needed(equations, outputs)), outvars=outputs)
    return ClosedJaxpr(inner, program.consts) if hasattr(program, "consts") else inner


def _read(names: Mapping[Any, Any], atom: Any) -> Any:
    return atom if isinstance(atom, Literal) else names.get(atom, atom)


def _opens(equation: Any) -> bool:
    """Whether an equation is a call that asks for nothing but its program."""
    if equation.primitive.name not in _CALLS:
        return False
    shardings = (
        *equation.params.get("in_shardings", ()),
        *equation.params.get("out_shardings", ()),
    )
    plain = all(type(one).__name__ == "UnspecifiedValue" for one in shardings)
    return plain and not equation.params.get("compiler_options_kvs")


def _needed(equations: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    wanted, kept = set(variables(outputs)), []
    for equation in reversed(equations):
        if equation.effects or any(variable in wanted for variable in equation.outvars):
            kept.append(equation)
            wanted.update(variables(equation.invars))
    return kept[::-1]


# --- layers ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Place:
    """A parameter within a list of layers: the number of its layer, and its name in there."""

    layer: int
    within: str


class LayerProgram:
    """A flat program and the layers of one list in it.

    Attributes:
      closed: the program, see `open_calls`.
      places: {input of the program: its place}, of the parameters of the list.
      numbers: of the layers, for people.
      position: variable -> number of the equation that makes it; inputs are not in it.
      made_by: variable -> (equation, number of the result).
      depth: variable -> the last layer whose parameters it depends on, -1 for none.
      plain: the variables that depend on parameters of the list alone: casts, `1 + scale`.
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

    def _follow(self, number: int, equation: Any) -> None:
        given = list(variables(equation.invars))
        depth = max((self.depth.get(v, -1) for v in given), default=-1)
        plain = bool(given) and all(v in self.plain for v in given)
        for k, variable in enumerate(equation.outvars):
            self.position[variable], self.made_by[variable] = number, (equation, k)
            self.depth[variable] = depth
            if plain:
                self.plain.add(variable)
        if plain:
            return
        for variable in given:  # an anchor: a layer's parameters meet something else
            if variable in self.plain:
                layer = self.depth[variable]
                self._first.setdefault(layer, number)
                self._last[layer] = number

    def _reached(self) -> dict[Any, int]:
        """Variable -> the last layer whose parameters meet something that is computed from it."""
        reach: dict[Any, int] = {}
        for equation in reversed(self.equations):
            given = list(variables(equation.invars))
            met = [self.depth[v] for v in given if v in self.plain]
            anchors = met if any(v not in self.plain for v in given) else []
            last = max([*anchors, *(reach.get(v, -1) for v in equation.outvars)], default=-1)
            for variable in given:
                reach[variable] = max(last, reach.get(variable, -1))
        return reach

    def depends_on(self, sources: Iterable[Any]) -> set[Any]:
        """The variables that are computed from these, themselves included."""
        found = set(sources)
        for equation in self.equations:
            if any(variable in found for variable in variables(equation.invars)):
                found.update(equation.outvars)
        return found

    def goes_on(self, variable: Any, layer: int) -> bool:
        """Whether a later layer computes with what this variable becomes."""
        return self._reach.get(variable, -1) > layer

    @property
    def span(self) -> tuple[int, int]:
        """The numbers of the first and the last equation that use parameters of the list."""
        return min(self._first.values(), default=0), max(self._last.values(), default=0)

    def cuts(self, start: int, layers: Sequence[int], *, early: bool) -> list[list[Any]]:
        """Returns for each of these layers the values that are live between it and the next.

        A cut lies between the last use of a layer's parameters and the first of the next layer's,
        where the fewest bytes are live that were made since the cut before.

        Args:
          start: layer from which on values count.
          early: take the first of places that are alike, and not the last one: what is computed
            before the next layer's first parameter, such as an activation, is of that layer.

        Raises:
          Mismatch: two layers are interleaved, or a layer uses none of its parameters.
        """
        last_use = self._last_uses()
        before, found = -1, []
        for turn, layer in enumerate(layers, 1):
            if layer not in self._last or layer + 1 not in self._first:
                numbers = f"{self.numbers[layer]} or {self.numbers[layer + 1]}"
                raise Mismatch(f"layer {numbers} reads none of its parameters", turn)
            low, high = self._last[layer], self._first[layer + 1]
            if low >= high:
                numbers = f"{self.numbers[layer]} and {self.numbers[layer + 1]}"
                raise Mismatch(
                    f"layers {numbers} are interleaved: the first one's parameters are used again "
                    "after the second one's, as in a U-net or where the model takes a gradient of "
                    "itself",
                    turn,
                )
            before, live = self._best_cut(start, before, (low, high), last_use, early)
            found.append(live)
        return found

    def _last_uses(self) -> list[tuple[int, int, Any]]:
        """(where it is made, where it is used last, variable), in order of the first."""
        use = {v: n for n, e in enumerate(self.equations) for v in variables(e.invars)}
        use |= dict.fromkeys(variables(self.closed.jaxpr.outvars), len(self.equations))
        found = [(self.position[v], last, v) for v, last in use.items() if v in self.position]
        return sorted(found, key=lambda one: (one[0], self.made_by[one[2]][1]))

    def _best_cut(
        self,
        start: int,
        before: int,
        between: tuple[int, int],
        last_use: Sequence[tuple[int, int, Any]],
        early: bool,
    ) -> tuple[int, list[Any]]:
        low, high = between
        first = bisect.bisect_right(last_use, before, key=lambda one: one[0])
        end = bisect.bisect_left(last_use, high, key=lambda one: one[0])
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


def num_bytes(variable: Any) -> int:
    """Bytes of a value; 8 for each element of what has no item size, such as keys."""
    return variable.aval.size * getattr(variable.aval.dtype, "itemsize", 8)
