"""Computes how each result of a traced program depends on the rows of a batch.

The kinds of dependence are defined in `row_dependence`. An operation without a rule gives `Other`,
so every other result is reliable. Dependence on other values (parameters, random numbers, the index
of the row) is ignored. Results of `zerojax.batch_sum` and `batch_mean` are the same for all
microbatches and data shards, so they count as independent of the batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from zerojax.operators.equations import Equation, Operand
from zerojax.operators.marks import BatchCall, batch_call, inner_programs
from zerojax.tracing.jaxpr import split_scan
from zerojax.tracing.row_dependence import (
    AFFINE,
    FIXED,
    OTHER,
    Count,
    Dependence,
    Fixed,
    Other,
    Raised,
    Rows,
    Total,
    is_affine,
    join,
    plain,
    scales_of,
)
from zerojax.tracing.row_rules import SEVERAL_OUTPUTS, pairs_rows, rows_after

_PRODUCT = Other(is_product=True)
_MOST_DIVISORS = 64
"""Largest number of recorded divisors of a total; with more, its divisors count as unknown."""

_REARRANGING_NAMES = """
broadcast_in_dim dynamic_slice expand_dims reduce_sum reshape rev slice squeeze tile transpose
unstack
"""
# Reshapes and sums of a total are totals.
_REARRANGES = frozenset(_REARRANGING_NAMES.split())
_KEEPS_TOTALS = frozenset(
    ["convert_element_type", "copy", "copy_p", "name", "reduce_precision", "stop_gradient"]
)
_KEEPS_INPUTS = frozenset(["copy", "copy_p", "name", "optimization_barrier"])
_ADDS = frozenset(["add", "add_any", "neg", "sub"])
_LINEAR_ALONG_A_DIM = frozenset(["concatenate", "cumsum", "split", "stack"])
_MULTIPLIES = frozenset(["dot_general", "integer_pow", "mul", "square"])
# These primitives keep the terms of a sum.
_KEEPS_TERMS = frozenset(["add", "add_any", "div", "mul", "neg", "sub"]) | _REARRANGES


def follow_rows(
    closed: ClosedJaxpr,
    inputs: Sequence[Dependence],
    num_rows: int,
    *,
    over_batch: list[tuple[BatchCall, Dependence]] | None = None,
    compared: list[str] | None = None,
) -> list[Dependence]:
    """Returns, for each output of a program, how it depends on the rows of the batch.

    Args:
      closed: traced program.
      inputs: dependence of each input: `Rows(0)` for a leaf of the batch, else `Fixed(place)`.
      num_rows: number of rows of the batch.
      over_batch: list that receives (kind, dependence of the operand) of each call of
        `zerojax.batch_sum` and `batch_mean`. A call in a loop may be appended several times.
      compared: list that receives the primitive name of each equation that computes a value for
        each pair of rows.
    """
    return _Follow(num_rows, over_batch, compared).outputs(closed.jaxpr, inputs, closed.consts)


class _Follow:
    def __init__(
        self,
        num_rows: int,
        over_batch: list[tuple[BatchCall, Dependence]] | None,
        compared: list[str] | None,
    ) -> None:
        self._num_rows = num_rows
        self._over_batch = [] if over_batch is None else over_batch
        self._compared = [] if compared is None else compared
        self._numbers: dict[Any, float | None] = {}

    def outputs(
        self, program: Jaxpr, inputs: Sequence[Dependence], consts: Sequence[Any] = ()
    ) -> list[Dependence]:
        held: dict[Any, Dependence] = dict(zip(program.invars, inputs, strict=True))
        for variable, value in zip(program.constvars, consts, strict=False):
            # Programs inside of others are followed without the values of their constants.
            self._numbers[variable] = _number_of(value)

        def of(atom: Operand) -> Dependence:
            return FIXED if isinstance(atom, Literal) else held.get(atom, FIXED)

        for equation in program.eqns:
            operands = [of(atom) for atom in equation.invars]
            results = [
                self._with_scales(equation, operands, x) for x in self._equation(equation, operands)
            ]
            held.update(zip(equation.outvars, results, strict=True))
        return [of(atom) for atom in program.outvars]

    def _equation(self, equation: Equation, operands: list[Dependence]) -> Sequence[Dependence]:
        kind, number = equation.primitive.name, len(equation.outvars)
        if (known := self._renamed(equation, operands)) is not None:
            return known
        if kind in ("scan", "while"):
            return (self._scan if kind == "scan" else self._while)(equation, operands)
        if kind != "cond" and self._inner(equation) is None:
            operands = [
                plain(operand) if isinstance(operand, Raised) else operand for operand in operands
            ]
        # Followed even if nothing depends on rows: calls of `batch_sum` inside are noted.
        if all(isinstance(operand, Fixed) for operand in operands):
            inner = self._inner(equation)
            return [FIXED] * number if inner is None else self.outputs(inner, operands)
        if kind == "div" and isinstance(operands[0], Total) and not isinstance(operands[1], Fixed):
            return [Other(is_ratio=True)]
        if kind in _KEEPS_TOTALS and isinstance(operands[0], Other):
            return [OTHER] if operands[0].is_affine and _rounds(equation) else operands
        if _is_product(kind, operands):
            return [_PRODUCT] * number
        if any(isinstance(operand, Other) for operand in operands) and not list(
            inner_programs(equation.params)
        ):
            return [_linear(equation, operands)] * number
        if kind == "cond":
            return self._cond(equation, operands)
        inner = self._inner(equation)
        if inner is not None:
            return self.outputs(inner, operands)
        if number != 1 and kind not in SEVERAL_OUTPUTS:
            return [OTHER] * number
        return [self._single_output(equation, operands)] * number

    def _with_scales(
        self, equation: Equation, operands: list[Dependence], result: Dependence
    ) -> Dependence:
        """Adds the scales of the terms to the dependence of a value that is a sum of row totals.

        For other values, `result` is returned unchanged.
        """
        if not isinstance(result, Total | Other) or scales_of(result) is not None:
            return result
        kind, factor = equation.primitive.name, None
        scales = [scales_of(operand) for operand in operands]
        if kind in ("add", "add_any"):
            factor = (1.0, 1.0)
        elif kind == "sub":
            factor = (1.0, -1.0)
        elif kind == "neg":
            factor = (-1.0,)
        elif kind in _KEEPS_TOTALS | _REARRANGES and not (scales[1:] or _rounds(equation)):
            factor = (1.0,)
        elif kind in ("mul", "div") and isinstance(operands[1], Fixed):
            number = self._number(equation.invars[1])
            if number:
                factor = (1 / number if kind == "div" else number, 0.0)
        elif kind == "mul" and isinstance(operands[0], Fixed):
            # NaN is not finite, so an unknown factor makes the scales unknown.
            factor = (0.0, self._number(equation.invars[0]) or math.nan)
        if factor is None or None in scales:
            return result
        terms = tuple(f * x for f, part in zip(factor, scales, strict=True) for x in part or ())
        known = 0 < len(terms) <= _MOST_DIVISORS and all(x and math.isfinite(x) for x in terms)
        return dataclasses.replace(result, scales=terms) if known else result

    def _renamed(
        self, equation: Equation, operands: list[Dependence]
    ) -> Sequence[Dependence] | None:
        """Returns the dependence of the outputs of a copy, a cast, a batch reduction, or an
        addition to an input.

        Returns None for other equations.
        """
        kind = equation.primitive.name
        if (call := batch_call(equation)) is not None:
            self._over_batch.append((call, operands[0]))
            return [FIXED]
        if kind in _KEEPS_INPUTS and len(operands) == len(equation.outvars):
            return operands
        if kind == "convert_element_type" and isinstance(operands[0], Fixed | Count | Raised):
            same = equation.invars[0].aval.dtype == equation.outvars[0].aval.dtype
            if same or isinstance(operands[0], Fixed):
                return operands if same else [FIXED]
            return [_linear(equation, [plain(operands[0])])]
        raised = _raised(kind, operands)
        return None if raised is None else [raised]

    def _inner(self, equation: Equation) -> Jaxpr | None:
        """Returns the program inside a call, if its inputs have the shapes of the equation's;
        otherwise, and for loops, `cond` and `shard_map`, None.

        The program inside a reduction, for example, takes single elements, so the result is None.
        """
        if equation.primitive.name in ("while", "cond", "scan", "shard_map"):
            return None
        inner = list(inner_programs(equation.params))
        if len(inner) != 1 or len(inner[0].outvars) != len(equation.outvars):
            return None
        return inner[0] if _shapes(inner[0].invars) == _shapes(equation.invars) else None

    def _cond(self, equation: Equation, operands: list[Dependence]) -> Sequence[Dependence]:
        if not isinstance(operands[0], Fixed):
            return [OTHER] * len(equation.outvars)
        branches = [self.outputs(b.jaxpr, operands[1:]) for b in equation.params["branches"]]
        return [join(outputs) for outputs in zip(*branches, strict=True)]

    def _scan(self, equation: Equation, operands: list[Dependence]) -> Sequence[Dependence]:
        """Processes the body of a scan repeatedly, until the dependence of its carry no longer
        changes.

        Inside the body, scanned arrays lack dimension 0.
        """
        num_consts, num_carry = split_scan(equation)
        body = equation.params["jaxpr"].jaxpr
        consts = [plain(operand) for operand in operands[:num_consts]]
        carry = [plain(operand) for operand in operands[num_consts : num_consts + num_carry]]
        items = [_inside(operand) for operand in operands[num_consts + num_carry :]]
        while True:
            outputs = self.outputs(body, [*consts, *carry, *items])
            joined = [
                _joined_carry(a, plain(b)) for a, b in zip(carry, outputs[:num_carry], strict=True)
            ]
            if joined == carry:
                return [*carry, *map(_outside, outputs[num_carry:])]
            carry = joined

    def _while(self, equation: Equation, operands: list[Dependence]) -> Sequence[Dependence]:
        """Processes the body of a while loop repeatedly, until the dependence of its carry no
        longer changes.

        If the trip count depends on rows, the result is `OTHER`.
        """
        conditions, bodies = (equation.params[f"{part}_nconsts"] for part in ("cond", "body"))
        operands = [plain(operand) for operand in operands]
        consts, carry = operands[conditions : conditions + bodies], operands[conditions + bodies :]
        while True:
            known = [*operands[:conditions], *carry]
            (predicate,) = self.outputs(equation.params["cond_jaxpr"].jaxpr, known)
            if not isinstance(predicate, Fixed):
                return [OTHER] * len(carry)
            outputs = self.outputs(equation.params["body_jaxpr"].jaxpr, [*consts, *carry])
            joined = [_joined_carry(a, plain(b)) for a, b in zip(carry, outputs, strict=True)]
            if joined == carry:
                return carry
            carry = joined

    # Equations with one output

    def _single_output(self, equation: Equation, operands: list[Dependence]) -> Dependence:
        kind = equation.primitive.name
        if kind in ("add", "add_any", "sub", "mul", "div", "neg", *_KEEPS_TOTALS) and any(
            isinstance(operand, Total | Count) for operand in operands
        ):
            result = self._of_totals(equation, operands)
            return _linear(equation, operands) if result == OTHER else result
        if kind in _REARRANGES and isinstance(operands[0], Total):
            return (
                operands[0]
                if all(isinstance(operand, Fixed) for operand in operands[1:])
                else OTHER
            )
        if any(isinstance(operand, Total | Count) for operand in operands):
            return _linear(equation, operands)
        if pairs_rows(equation, operands):
            self._compared.append(kind)
        return rows_after(equation, operands, self._num_rows)

    def _of_totals(self, equation: Equation, operands: list[Dependence]) -> Dependence:
        kind = equation.primitive.name
        first = operands[0]
        if kind in _KEEPS_TOTALS:
            return OTHER if _rounds(equation) else first
        if kind == "neg":
            return _negated(first)
        second = operands[1]
        if kind in ("add", "add_any", "sub"):
            second = _negated(second) if kind == "sub" else second
            zeros = [
                isinstance(operand, Fixed) and self._number(atom) == 0
                for operand, atom in zip(operands, equation.invars, strict=True)
            ]
            if True in zeros:  # Python's `sum` starts from 0
                return second if zeros[0] else first
            return _added(first, second, commutes=kind != "sub")
        # The quotient of a sum, rounded, is not the sum of rounded quotients.
        if kind == "div" and jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.integer):
            return OTHER
        if isinstance(first, Total) and isinstance(second, Fixed):
            number = self._number(equation.invars[1])
            if kind == "div":
                number = None if not number else 1 / number
            return _scaled(first, number)
        if kind == "mul" and isinstance(second, Total) and isinstance(first, Fixed):
            return _scaled(second, self._number(equation.invars[0]))
        return OTHER

    def _number(self, atom: Operand) -> float | None:
        return _number_of(atom.val) if isinstance(atom, Literal) else self._numbers.get(atom)


def number_of_output(closed: ClosedJaxpr, place: int) -> float | None:
    """Returns the value of a program output that is a constant number; None for other outputs."""
    atom = closed.jaxpr.outvars[place]
    if isinstance(atom, Literal):
        return _number_of(atom.val)
    return _number_of(dict(zip(closed.jaxpr.constvars, closed.consts, strict=True)).get(atom))


def _number_of(value: Any) -> float | None:
    """Returns a scalar that is known during tracing as a float; None for other values."""
    if (
        value is None
        or np.ndim(value)
        or jnp.issubdtype(jnp.result_type(value), jax.dtypes.extended)
    ):
        return None
    return float(value)


def _rounds(equation: Equation) -> bool:
    """Returns whether an equation casts floats to integers; sums of the results may then differ."""
    before, after = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    whole = jnp.integer, jnp.bool_
    return jnp.issubdtype(after, jnp.integer) and not any(jnp.issubdtype(before, x) for x in whole)


def _shapes(atoms: Sequence[Any]) -> list[Any]:
    return [getattr(atom.aval, "shape", None) for atom in atoms]


def _scaled(total: Dependence, number: float | None) -> Dependence:
    if not isinstance(total, Total):
        return OTHER
    if number is None or total.scale is None:
        return Total(None, is_scaled=True)
    scale = total.scale * number
    if scale == 0 or len(total.divisors) >= _MOST_DIVISORS:
        return Total(None, is_scaled=True)
    divisor = abs(1 / number)
    divisors = {divisor, *total.divisors, *(divisor * other for other in total.divisors)}
    return dataclasses.replace(total, scale=scale, is_scaled=True, divisors=frozenset(divisors))


def _negated(value: Dependence) -> Dependence:
    if isinstance(value, Total):
        return dataclasses.replace(value, scale=None if value.scale is None else -value.scale)
    return value if isinstance(value, Fixed) else OTHER


def _added(first: Dependence, second: Dependence, *, commutes: bool) -> Dependence:
    if commutes and isinstance(second, Fixed | Count) and isinstance(first, Total):
        first, second = second, first
    if not isinstance(second, Total):
        return OTHER
    if isinstance(first, Fixed) and first.input is not None:
        return Count(first.input, second)
    if isinstance(first, Count):
        total = _added(first.total, second, commutes=True)
        return Count(first.input, total) if isinstance(total, Total) else OTHER
    if not isinstance(first, Total):
        return OTHER
    if first == second:
        return first
    # A sum of two totals is a total, but it has no single scale.
    return Total(None, is_scaled=True)


def _raised(kind: str, operands: Sequence[Dependence]) -> Raised | None:
    """Returns `Raised` if an equation adds an `Other` value to an input of the program, or to such
    an input with earlier additions; else None.
    """
    if kind not in ("add", "add_any"):
        return None
    for base, added in (operands, operands[::-1]):
        starts = isinstance(base, Fixed) and base.input is not None and isinstance(added, Other)
        more = isinstance(base, Count) and isinstance(added, Other)
        again = isinstance(base, Raised) and isinstance(added, Other | Total)
        if starts or more or again:
            affine = is_affine(base) and is_affine(added)
            return Raised(base.input, affine)  # type: ignore[union-attr]
    return None


def _joined_carry(before: Dependence, after: Dependence) -> Dependence:
    """Merges the dependence of a loop's carry before and after one iteration.

    If an iteration adds a product to a sum, the result contains a product; `OTHER` stays `OTHER`.
    """
    return after if after == _PRODUCT and before != OTHER else join([before, after])


def _linear(equation: Equation, operands: Sequence[Dependence]) -> Other:
    """Returns `AFFINE` if the equation keeps sums of totals and fixed values, otherwise `OTHER`.

    For example a sum, a product with a fixed value, or a reshape does.
    """
    kind, is_fixed = equation.primitive.name, [isinstance(operand, Fixed) for operand in operands]
    if not all(map(is_affine, operands)):
        return OTHER
    if kind == "div":
        whole = jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.integer)
        stays = is_fixed[1] and not whole
    elif kind in ("mul", "dot_general"):
        stays = any(is_fixed)
    elif kind in _KEEPS_TOTALS:
        stays = not _rounds(equation)
    elif kind in _REARRANGES | {"gather"}:
        stays = all(is_fixed[1:])
    elif kind == "select_n":
        stays = is_fixed[0]
    else:
        stays = kind in _ADDS | _LINEAR_ALONG_A_DIM
    return AFFINE if stays else OTHER


def _is_product(kind: str, operands: Sequence[Dependence]) -> bool:
    """Returns whether the result of an equation is a product of totals, or a sum with such
    a term.
    """
    if any(isinstance(operand, Rows) for operand in operands):
        return False
    if kind in _MULTIPLIES and all(isinstance(operand, Total) for operand in operands):
        return True
    terms = operands[:1] if kind == "div" else operands
    return kind in _KEEPS_TERMS and _PRODUCT in terms


def _inside(value: Dependence) -> Dependence:
    if isinstance(value, Rows):
        return Rows(value.dim - 1) if value.dim else OTHER
    if isinstance(value, Fixed):
        return value  # slices of an input have the dependence of the input
    return plain(value) if isinstance(value, Total) or value == AFFINE else OTHER


def _outside(value: Dependence) -> Dependence:
    return Rows(value.dim + 1) if isinstance(value, Rows) else value
