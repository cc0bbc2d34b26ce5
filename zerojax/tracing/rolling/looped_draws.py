"""Runs equal random draws of a traced program in one loop.

The compiler inlines each call of a random function and compiles it separately: 200 parameters of
two shapes cost 200 programs. Here equal draws that do not depend on each other become one loop over
their keys, whose body is compiled once.

The loop computes the same bits. A compiler may fuse two operations and round only once, for example
the product at the end of `jax.random.normal` and a sum that follows it. So the loop includes all
arithmetic up to the parameter, and a draw whose result is used in further computations stays
outside. The results of a loop are in memory twice for a moment, stacked and separate, so a loop
contains only results that are small together.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun

from zerojax.config.late_dataclasses import dataclass
from zerojax.operators.equations import Equation, Operand
from zerojax.operators.marks import inner_programs
from zerojax.tracing.jaxpr import free_variables, piece_function, variables
from zerojax.tracing.rolling.equality import Equality, same_literals
from zerojax.tracing.rolling.flat_program import is_plain_call, num_bytes, open_calls
from zerojax.tracing.row_rules import ELEMENTWISE

LOOP_BYTES = 16 * 2**20
"""Largest number of bytes of the results of one loop, over all devices."""
_FEWEST = 3
"""Smallest number of draws for which a loop is made."""
_KEYS = ("random_fold_in", "random_split")
_DRAWS = ("random_bits", "threefry2x32", *_KEYS)
_THREEFRY = "key<fry>"
_MOVE_NAMES = """
broadcast_in_dim concatenate convert_element_type copy dynamic_update_slice pad reshape
sharding_constraint slice split squeeze stack transpose
"""
_MOVES = frozenset(_MOVE_NAMES.split())
"""Primitives that only move data, or cast a parameter to its stored dtype."""
_LONGEST = 32
"""Largest number of equations that compute the constants of one draw, such as a standard deviation.
"""


def loop_draws(function: Callable[..., Any], *, limit: int = LOOP_BYTES) -> Callable[..., Any]:
    """Returns a function that computes the same bits, with equal random draws in loops.

    Args:
      function: function of pytrees of arrays; it is traced.
      limit: largest number of bytes of the results of one loop.
    """

    def looped(*args: jax.Array) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        results = run_looped(closed, jax.tree.leaves(args), limit=limit)
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return looped


def run_looped(closed: ClosedJaxpr, inputs: Sequence[Any], *, limit: int) -> list[Any]:
    """Evaluates a program with equal random draws in loops; traced.

    Args:
      closed: program to evaluate; a program with side effects is evaluated without loops.
      inputs: values of the inputs of the program.
      limit: largest number of bytes of the results of one loop.
    """
    if closed.effects:
        return jaxpr_as_fun(closed)(*inputs)
    flat = open_calls(closed, opens=_holds_several)
    program = flat.jaxpr
    values = dict(zip(program.constvars, flat.consts, strict=True))
    values |= zip(program.invars, inputs, strict=True)
    for group in _in_groups(program):
        size = sum(map(num_bytes, (*group[0].operands, *group[0].results)))
        members = min(len(group), limit // max(size, 1))
        members = members if members >= _FEWEST else 1
        for start in range(0, len(group), members):
            part = group[start : start + members]
            if len(part) >= _FEWEST:
                _run_loop(program, part, values)
                continue
            for one in part:
                _set(values, one, one.run(program)(*(_read(values, x) for x in one.operands)))
    return [_read(values, atom) for atom in program.outvars]


@dataclass(frozen=True, eq=False)
class _Part:
    """Equations that run together.

    Attributes:
      equations: a single equation, or a draw with the equations of its constants and the arithmetic
        that follows it.
      operands: variables and literals from outside of the part, in the same order in equal parts.
      inside: variables under which the equations use the operands.
      results: variables that other parts may use.
    """

    equations: tuple[Any, ...]
    operands: tuple[Any, ...]
    inside: tuple[Any, ...]
    results: tuple[Any, ...]

    def run(self, program: Jaxpr) -> Callable[..., Any]:
        """Returns a function that evaluates the equations of the part on values of `operands`."""
        return piece_function(program, self.equations, self.inside, self.results)


@dataclass(frozen=True)
class _Row:
    """Result of one iteration of a loop over random draws, as a row of the loop's stacked
    results.
    """

    stack: Any
    number: int


def _read(values: dict[Any, Any], atom: Operand) -> Any:
    if isinstance(atom, Literal):
        return atom.val
    value = values[atom]
    if isinstance(value, _Row):
        # Cut out only where a single value is read: a loop of further draws reads the whole stack.
        value = lax.index_in_dim(value.stack, value.number, keepdims=False)
        values[atom] = value
    return value


def _read_stack(values: dict[Any, Any], atoms: Sequence[Any]) -> Any:
    """Returns the values of several atoms as one array."""
    rows = [None if isinstance(atom, Literal) else values[atom] for atom in atoms]
    stacks = [row.stack for row in rows if isinstance(row, _Row)]
    if len(stacks) == len(rows) and all(stack is stacks[0] for stack in stacks):
        return stacks[0][np.array([row.number for row in rows])]
    return jnp.stack([jnp.asarray(_read(values, atom), atom.aval.dtype) for atom in atoms])


def _set(values: dict[Any, Any], part: _Part, results: Sequence[Any]) -> None:
    values |= zip(part.results, results, strict=True)


def _run_loop(program: Jaxpr, parts: Sequence[_Part], values: dict[Any, Any]) -> None:
    """Evaluates equal parts in one loop; operands that differ between the parts are stacked."""
    run = parts[0].run(program)
    operands = list(zip(*(part.operands for part in parts), strict=True))
    shared = {
        place: _read(values, atoms[0]) for place, atoms in enumerate(operands) if _all_same(atoms)
    }
    stacks = {
        place: _read_stack(values, atoms)
        for place, atoms in enumerate(operands)
        if place not in shared
    }

    def body(_: None, rows: dict[int, Any]) -> tuple[None, list[Any]]:
        given = shared | rows
        return None, run(*(given[place] for place in range(len(operands))))

    _, results = lax.scan(body, None, stacks, length=len(parts))
    for number, part in enumerate(parts):
        _set(values, part, [_Row(stack, number) for stack in results])


def _all_same(atoms: Sequence[Any]) -> bool:
    return all(_is_same(atoms[0], atom) for atom in atoms)


def _is_same(first: Operand, second: Operand) -> bool:
    if isinstance(first, Literal) and isinstance(second, Literal):
        return same_literals(first, second)
    return first is second


# --- order of evaluation --------------------------------------------------------------------------


def _in_groups(program: Jaxpr) -> Iterator[list[_Part]]:
    """Yields groups of parts in an order in which they can run; equal draws are in one group.

    Draws wait until nothing else can run; then the draws with the smallest results go first. So all
    keys are computed before the first parameter is drawn, even if each key is split from the
    previous one.
    """
    parts, kinds = _Parts(program).divide()
    maker = {v: number for number, part in enumerate(parts) for v in part.results}
    users: list[list[int]] = [[] for _ in parts]
    missing = []
    for number, part in enumerate(parts):
        makers = {maker[v] for v in variables(part.operands) if v in maker}
        missing.append(len(makers))
        for other in makers:
            users[other].append(number)
    ready: list[int] = []
    draws: dict[int, list[int]] = {}

    def add(number: int) -> None:
        if number in kinds:
            draws.setdefault(kinds[number], []).append(number)
        else:
            heapq.heappush(ready, number)

    for number, count in enumerate(missing):
        if not count:
            add(number)
    while ready or draws:
        if ready:
            group = [heapq.heappop(ready)]
        else:
            group = draws.pop(min(draws, key=lambda k: (sum(map(num_bytes, parts[k].results)), k)))
        yield [parts[number] for number in group]
        for number in group:
            for user in users[number]:
                missing[user] -= 1
                if not missing[user]:
                    add(user)


class _Parts:
    """Divides a program into parts that run together."""

    def __init__(self, program: Jaxpr) -> None:
        self.equations = program.eqns
        self.outputs = set(variables(program.outvars))
        self.maker = {v: n for n, e in enumerate(program.eqns) for v in e.outvars}
        self.users: dict[Any, list[int]] = {}
        self.constant: set[Any] = set()
        for number, equation in enumerate(program.eqns):
            for variable in dict.fromkeys(variables(equation.invars)):
                self.users.setdefault(variable, []).append(number)
            # `all` of no operands is true: an equation without operands makes a constant, too.
            if all(v in self.constant for v in variables(equation.invars)):
                # A draw is no constant, even if its key is one.
                self.constant.update([] if _is_draw(equation) else equation.outvars)
        self.equality = Equality({})
        self.known: dict[Any, list[tuple[int, _Part]]] = {}

    def divide(self) -> tuple[list[_Part], dict[int, int]]:
        """Returns (parts, {position of a draw: position of the first draw equal to it})."""
        parts, taken = {}, set()
        kinds: dict[int, int] = {}
        for number, equation in enumerate(self.equations):
            numbers = self._draw_at(number) if _is_draw(equation) else None
            if numbers is None:
                continue
            before, after = numbers
            kinds[number], parts[number] = self._match(number, before, after)
            taken.update(after)
        for number, equation in enumerate(self.equations):
            if number not in taken and number not in parts:
                free = tuple(dict.fromkeys(variables(equation.invars)))
                parts[number] = _Part((equation,), free, free, tuple(equation.outvars))
        position = {number: place for place, number in enumerate(sorted(parts))}
        in_order = [parts[number] for number in sorted(parts)]
        return in_order, {position[a]: position[b] for a, b in kinds.items()}

    def _draw_at(self, number: int) -> tuple[list[int], list[int]] | None:
        """Returns (equations of a draw's constants, equations of the arithmetic after it).

        Returns None if the draw cannot run in a loop.
        """
        equation = self.equations[number]
        if _makes_keys(equation):
            return [], []
        before, after = self._constants(equation, None), []
        result = equation.outvars[0]
        if before is None or len(equation.outvars) != 1:
            return None
        while len(self.users.get(result, ())) == 1 and result not in self.outputs:
            (user,) = self.users[result]
            following = self.equations[user]
            if following.primitive.name not in (*ELEMENTWISE, "reshape"):
                break
            more = self._constants(following, result)
            if more is None:
                break
            before, after = before + more, [*after, user]
            (result,) = following.outvars
        if len(before) > _LONGEST or not self._is_final(result):
            return None
        return sorted(set(before)), after

    def _constants(self, equation: Equation, result: Operand | None) -> list[int] | None:
        """Returns the equations that compute the constant operands of an equation.

        Returns None if the equation has other operands than constants, keys and `result`, or too
        many constants.
        """
        found: dict[int, None] = {}
        waiting = [v for v in variables(equation.invars) if v is not result]
        while waiting:
            variable = waiting.pop()
            if variable not in self.constant:
                if result is None and _is_key(variable):
                    continue
                return None
            if len(found) > _LONGEST:
                return None
            found[self.maker[variable]] = None
            waiting += variables(self.equations[self.maker[variable]].invars)
        return list(found)

    def _is_final(self, result: Operand) -> bool:
        """Returns whether no further computation uses a result, so that it is stored directly."""
        waiting = [result]
        while waiting:
            for user in self.users.get(waiting.pop(), ()):
                if self.equations[user].primitive.name not in _MOVES:
                    return False
                waiting += self.equations[user].outvars
        return True

    def _match(self, number: int, before: list[int], after: list[int]) -> tuple[int, _Part]:
        """Returns (number of the first equal draw, part with this draw)."""
        equations = tuple(self.equations[n] for n in (*before, number, *after))
        results = tuple(equations[-1].outvars)
        alike = self.known.setdefault(tuple(map(_outline, equations)), [])
        matches = ((first, self._operands(part, equations)) for first, part in alike)
        kind, operands = next((m for m in matches if m[1] is not None), (number, None))
        if operands is None:
            keys = _makes_keys(equations[0])
            operands = tuple(equations[0].invars if keys else free_variables(equations))
        inside = operands
        if _makes_keys(equations[0]):  # operands of equations for keys may be literals
            inside = tuple(Var(atom.aval) for atom in operands)
            equations = (equations[0].replace(invars=list(inside)),)
        part = _Part(equations, operands, inside, results)
        if kind == number:
            alike.append((number, part))
        return kind, part

    def _operands(self, part: _Part, equations: Sequence[Any]) -> tuple[Any, ...] | None:
        """Returns the operands of `equations` if these are equal to the equations of a part;
        otherwise None.

        Literals from which keys are made may differ. All other literals have to be equal.
        """
        if any(
            self.equality.holes(a, b) != set()
            for a, b in zip(part.equations, equations, strict=True)
        ):
            return None
        if _makes_keys(equations[0]):
            return tuple(equations[0].invars)
        names: dict[Any, Any] = {}
        for a, b in zip(part.equations, equations, strict=True):
            for x, y in zip(a.invars, b.invars, strict=True):
                if isinstance(x, Literal) or isinstance(y, Literal):
                    if not (isinstance(x, type(y)) and _is_same(x, y)):
                        return None
                elif names.setdefault(x, y) is not y:
                    return None
            names.update(zip(a.outvars, b.outvars, strict=True))
        return tuple(names[variable] for variable in part.inside)


def _outline(equation: Equation) -> tuple[Any, ...]:
    """Returns a key that is the same for all equal equations, to find candidates."""
    atoms = (*equation.invars, *equation.outvars)
    shapes = tuple((atom.aval.shape, str(atom.aval.dtype)) for atom in atoms)
    return equation.primitive.name, len(equation.invars), shapes


# --- draws ----------------------------------------------------------------------------------------


def _makes_keys(equation: Equation) -> bool:
    return equation.primitive.name in _KEYS


def _is_key(atom: Operand) -> bool:
    return str(atom.aval.dtype).startswith("key<")


def _is_draw(equation: Equation) -> bool:
    """Returns whether an equation draws random numbers by Threefry only."""
    if equation.primitive.name not in _DRAWS and not is_plain_call(equation):
        return False
    return _count_draws(equation) > 0 and not _has_other_keys(equation)


def _holds_several(equation: Equation) -> bool:
    """Returns whether an equation is a call with several draws, such as a whole initialization."""
    return is_plain_call(equation) and _count_draws(equation) > 1


def _count_draws(equation: Equation) -> int:
    if equation.primitive.name in _DRAWS:
        return 1
    return sum(map(_count_draws, _equations_in(equation)))


def _has_other_keys(equation: Equation) -> bool:
    """Returns whether an equation uses keys, or random bits, of another generator than Threefry."""
    if equation.primitive.name == "rng_bit_generator":
        return True
    dtypes = (str(atom.aval.dtype) for atom in (*equation.invars, *equation.outvars))
    if any(dtype.startswith("key<") and dtype != _THREEFRY for dtype in dtypes):
        return True
    return any(map(_has_other_keys, _equations_in(equation)))


def _equations_in(equation: Equation) -> Iterator[Any]:
    for program in inner_programs(equation.params):
        yield from getattr(program, "jaxpr", program).eqns
