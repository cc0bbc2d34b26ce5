"""Compares traced equations by their computation.

Names of variables, and the source lines of a derivative rule, do not matter. Custom derivatives are
compared by the programs of their vector-Jacobian products, because two rules from one factory may
have captured different numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from zerojax.operators.equations import Equation, Operand
from zerojax.operators.marks import read_name, read_shape
from zerojax.tracing.jaxpr import is_checkpoint, variables

Hole = tuple[int, int]
"""Position of a literal in a nested program: (index of the equation, index of the operand)."""


def same_literals(first: Literal, second: Literal) -> bool:
    """Returns whether two literals have the same type and the same bits, so 0.0 differs
    from -0.0.
    """
    if first.aval != second.aval:
        return False
    dtype = getattr(first.aval, "dtype", None)
    left, right = (np.asarray(atom.val, dtype) for atom in (first, second))
    return left.tobytes() == right.tobytes()


def same_kind(first: Operand, second: Operand) -> bool:
    """Returns whether two atoms have the same shape and dtype, ignoring weak types."""
    left, right = first.aval, second.aval
    return getattr(left, "shape", None) == getattr(right, "shape", None) and (
        getattr(left, "dtype", None) == getattr(right, "dtype", None)
    )


def _is_float(atom: Operand) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def is_program(value: object) -> bool:
    """Returns whether a parameter of an equation is a program."""
    return isinstance(value, (Jaxpr, ClosedJaxpr))


class Equality:
    """Compares equations of different layers.

    Attributes:
      places: {name of a parameter: its name within the layer}; marks of reads are equal if these
        names are equal.
    """

    def __init__(self, places: Mapping[str, Any]) -> None:
        self.places = places
        self._derivatives: dict[int, tuple[Any, ClosedJaxpr]] = {}
        self._compared: dict[tuple[int, int], tuple[Any, Any, set[Hole] | None]] = {}

    def holes(self, first: Equation, second: Equation) -> set[Hole] | None:
        """Returns the literals in which two equations differ; None if they also differ in something
        else.

        The operands of the equations are not compared. Only literals in the program of a checkpoint
        may differ.
        """
        key = id(first), id(second)
        known = self._compared.get(key)
        if known is None:  # the cache also stores the equations, so that their ids are not reused
            holes: set[Hole] = set()
            allowed = holes if is_checkpoint(first) else None
            same = self._same_equation(first, second, allowed, True)
            known = self._compared[key] = first, second, holes if same else None
        return known[2]

    def _same_equation(
        self, first: Equation, second: Equation, holes: set[Hole] | None, rules: bool
    ) -> bool:
        if first.primitive is not second.primitive or len(first.invars) != len(second.invars):
            return False
        if first.params.keys() != second.params.keys() or _context(first) != _context(second):
            return False
        names = read_name(first), read_name(second)
        if None not in names:
            places = (self.places.get(name, name) for name in names if name is not None)
            return len(set(places)) == 1 and read_shape(first) == read_shape(second)
        own = _rules(first)
        rest = first.params.keys() - own
        if not all(self._same(first.params[k], second.params[k], holes, rules) for k in rest):
            return False
        if not own or not rules:
            return True
        return self._same(self._derivative(first), self._derivative(second), None, False)

    def _same(self, first: Any, second: Any, holes: set[Hole] | None, rules: bool) -> bool:
        """Returns whether two parameters of equations (settings, nested programs) are equal.

        Args:
          first, second: parameters to compare.
          holes: set to which differing literals are added; None: all literals must be equal.
          rules: whether to compare custom derivatives; inside of a derivative only values are
            compared.
        """
        if first is second:
            return True
        if is_program(first) and is_program(second):
            return self._same_program(first, second, holes, rules)
        if isinstance(first, (tuple, list)) and type(first) is type(second):
            pairs = zip(first, second, strict=False)
            same_length = len(first) == len(second)
            return same_length and all(self._same(a, b, None, rules) for a, b in pairs)
        if isinstance(first, (np.ndarray, jax.Array)) or isinstance(
            second, (np.ndarray, jax.Array)
        ):
            return _same_arrays(first, second)
        # As bits: NaN is equal to itself, and 0.0 differs from -0.0.
        if isinstance(first, float | complex) and type(first) is type(second):
            return np.asarray(first).tobytes() == np.asarray(second).tobytes()
        try:
            return bool(first == second)
        except Exception:  # values that cannot be compared count as different
            return False

    def _same_program(
        self, first: Jaxpr, second: Jaxpr, holes: set[Hole] | None, rules: bool
    ) -> bool:
        left, right = _Opened(first), _Opened(second)
        if len(left.consts) != len(right.consts) or len(left.eqns) != len(right.eqns):
            return False
        pairs = zip(left.consts, right.consts, strict=True)
        if not all(self._same(a, b, None, rules) for a, b in pairs):
            return False
        names: dict[Any, Any] = {}
        if not _bind(names, left.inputs, right.inputs):
            return False
        for number, (a, b) in enumerate(zip(left.eqns, right.eqns, strict=True)):
            if not self._same_equation(a, b, None, rules):
                return False
            for place, (x, y) in enumerate(zip(a.invars, b.invars, strict=True)):
                if _same_atom(names, x, y):
                    continue
                if holes is None or not _differ_in_value(x, y):
                    return False
                holes.add((number, place))
            if not _bind(names, a.outvars, b.outvars):
                return False
        if len(left.outputs) != len(right.outputs):
            return False
        return all(
            _same_atom(names, x, y) for x, y in zip(left.outputs, right.outputs, strict=True)
        )

    def _derivative(self, equation: Equation) -> ClosedJaxpr:
        """Returns the program of an equation's vector-Jacobian product, from a cache."""
        known = self._derivatives.get(id(equation))
        # An id is used again after its equation is gone.
        if known is None or known[0] is not equation:
            known = self._derivatives[id(equation)] = (equation, vjp_program(equation))
        return known[1]


def vjp_program(equation: Equation) -> ClosedJaxpr:
    """Traces the vector-Jacobian product of one equation for its floating-point operands."""
    taken = list(dict.fromkeys(variables(equation.invars)))
    run = equation_function(equation, taken)
    floats = [place for place, variable in enumerate(taken) if _is_float(variable)]

    def product(*values: jax.Array) -> Any:
        def outputs(*float_values: jax.Array) -> list[Any]:
            every = list(values)
            for place, value in zip(floats, float_values, strict=True):
                every[place] = value
            return [x for x in run(*every) if jnp.issubdtype(x.dtype, jnp.inexact)]

        result, pull = jax.vjp(outputs, *(values[place] for place in floats))
        return result, pull(result)

    return jax.make_jaxpr(product)(*(abstract_value(v) for v in taken))


def equation_function(equation: Equation, taken: Sequence[Any]) -> Any:
    """Returns one equation as a function of the distinct variables that it takes."""
    like = next((p for p in equation.params.values() if is_program(p)), None)
    template = _any_program() if like is None else getattr(like, "jaxpr", like)
    alone = template.replace(
        constvars=[],
        invars=list(taken),
        outvars=list(equation.outvars),
        eqns=[equation],
        effects=equation.effects,
    )
    return jaxpr_as_fun(ClosedJaxpr(alone, []))


@functools.cache
def _any_program() -> Jaxpr:
    return jax.make_jaxpr(lambda x: x)(jax.ShapeDtypeStruct((), jnp.float32)).jaxpr


def abstract_value(atom: Operand) -> jax.ShapeDtypeStruct:
    """Returns the shape, dtype and weak type of a variable."""
    weak = getattr(atom.aval, "weak_type", False)
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype, weak_type=weak)


def _context(equation: Equation) -> list[Any]:
    """Returns the settings of JAX's context managers, such as compute_on, for an equation."""
    context = equation.ctx
    names = (name for name in type(context).__slots__ if not name.startswith("__"))
    return [getattr(context, name, None) for name in names]


def _rules(equation: Equation) -> frozenset[str]:
    """Returns the names of an equation's parameters that are derivative rules (Python
    callables).
    """
    if not equation.primitive.name.startswith("custom_"):
        return frozenset()
    params = equation.params.items()
    return frozenset(name for name, value in params if not is_program(value) and _is_rule(value))


def _is_rule(value: object) -> bool:
    return callable(value) or type(value).__name__ == "WrappedFun"


class _Opened:
    """A nested `Jaxpr` or `ClosedJaxpr` as constants, inputs, equations and outputs."""

    def __init__(self, program: Jaxpr) -> None:
        inner = getattr(program, "jaxpr", program)
        self.consts = list(getattr(program, "consts", ()))
        self.inputs = [*inner.constvars, *inner.invars]
        self.eqns, self.outputs = inner.eqns, inner.outvars


def _bind(names: dict[Any, Any], first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Records that variables correspond to each other; returns False if their types differ."""
    if len(first) != len(second):
        return False
    names.update(zip(first, second, strict=True))
    return all(a.aval == b.aval for a, b in zip(first, second, strict=True))


def _same_atom(names: Mapping[Any, Any], first: Operand, second: Operand) -> bool:
    if isinstance(first, Literal) and isinstance(second, Literal):
        return same_literals(first, second)
    if isinstance(first, Literal) or isinstance(second, Literal):
        return False
    return names.get(first) is second


def _differ_in_value(first: Operand, second: Operand) -> bool:
    both = isinstance(first, Literal) and isinstance(second, Literal)
    return both and first.aval == second.aval


def _same_arrays(first: Any, second: Any) -> bool:
    if type(first) is not type(second) or first.shape != second.shape:
        return False
    # The value of a tracer is not known.
    if first.dtype != second.dtype or isinstance(first, jax.core.Tracer):
        return False
    if jax.dtypes.issubdtype(first.dtype, jax.dtypes.prng_key):
        first, second = jax.random.key_data(first), jax.random.key_data(second)
    return np.asarray(first).tobytes() == np.asarray(second).tobytes()
