"""Dependence of each result of a traced program on the rows of a batch.

The kinds are those of `row_dependence`. What is not understood is other, so each answer but that
one can be relied on. Which numbers a row is computed with besides (parameters, random numbers, the
place of the row) does not matter. What `zerojax.batch_sum` and `batch_mean` give is the same for
all pieces of a microbatch, so it counts as independent of the batch, too.
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
"""Of more, it is not said that none of them counts rows."""

_REARRANGING_NAMES = """
broadcast_in_dim dynamic_slice expand_dims reduce_sum reshape rev slice squeeze tile transpose
unstack
"""
# A total stays one in other shapes, and added up.
_REARRANGES = frozenset(_REARRANGING_NAMES.split())
_KEEPS_TOTALS = frozenset(
    ["convert_element_type", "copy", "copy_p", "name", "reduce_precision", "stop_gradient"]
)
_KEEPS_INPUTS = frozenset(["copy", "copy_p", "name", "optimization_barrier"])
_ADDS = frozenset(["add", "add_any", "neg", "sub"])
_LINEAR_ALONG_A_DIM = frozenset(["concatenate", "cumsum", "split", "stack"])
_MULTIPLIES = frozenset(["dot_general", "integer_pow", "mul", "square"])
# A sum that has a term stays one that has it.
_KEEPS_TERMS = frozenset(["add", "add_any", "div", "mul", "neg", "sub"]) | _REARRANGES


def follow_rows(
    closed: ClosedJaxpr,
    inputs: Sequence[Dependence],
    num_rows: int,
    *,
    over_batch: list[tuple[BatchCall, Dependence]] | None = None,
    compared: list[str] | None = None,
) -> list[Dependence]:
    """How each output of a program depends on the rows of its batch.

    Args:
      closed: traced.
      inputs: for each input; a leaf of the batch is `Rows(0)`, all others `Fixed(place)`.
      num_rows: of the batch.
      over_batch: gets (kind, what it was given) of each call of `zerojax.batch_sum` and
        `batch_mean`, of one in a loop several times.
      compared: gets the primitive of each equation that makes a value for each pair of rows.
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
        found: dict[Any, Dependence] = dict(zip(program.invars, inputs, strict=True))
        for variable, value in zip(program.constvars, consts, strict=False):
            self._numbers[variable] = _number_of(value)

        def of(atom: Any) -> Dependence:
            return FIXED if isinstance(atom, Literal) else found.get(atom, FIXED)

        for equation in program.eqns:
            given = [of(atom) for atom in equation.invars]
            results = [
                self._with_scales(equation, given, x) for x in self._equation(equation, given)
            ]
            found.update(zip(equation.outvars, results, strict=True))
        return [of(atom) for atom in program.outvars]

    def _equation(self, equation: Any, given: list[Dependence]) -> Sequence[Dependence]:
        kind, number = equation.primitive.name, len(equation.outvars)
        if (known := self._renamed(equation, given)) is not None:
            return known
        if kind in ("scan", "while"):
            return (self._scan if kind == "scan" else self._while)(equation, given)
        if kind != "cond" and self._inner(equation) is None:
            given = [plain(one) if isinstance(one, Raised) else one for one in given]
        if all(isinstance(one, Fixed) for one in given):
            inner = self._inner(equation)
            return [FIXED] * number if inner is None else self.outputs(inner, given)
        if kind == "div" and isinstance(given[0], Total) and not isinstance(given[1], Fixed):
            return [Other(is_ratio=True)]
        if kind in _KEEPS_TOTALS and isinstance(given[0], Other):
            return [OTHER] if given[0].is_affine and _rounds(equation) else given
        if _is_product(kind, given):
            return [_PRODUCT] * number
        if any(isinstance(one, Other) for one in given) and not list(
            inner_programs(equation.params)
        ):
            return [_linear(equation, given)] * number
        if kind == "cond":
            return self._cond(equation, given)
        inner = self._inner(equation)
        if inner is not None:
            return self.outputs(inner, given)
        if number != 1 and kind not in SEVERAL_OUTPUTS:
            return [OTHER] * number
        return [self._one(equation, given)] * number

    def _with_scales(
        self, equation: Any, given: list[Dependence], result: Dependence
    ) -> Dependence:
        """A result with the scales of its terms, where it is a sum of totals and not one itself."""
        if not isinstance(result, Total | Other) or scales_of(result) is not None:
            return result
        kind, scales, factor = equation.primitive.name, [scales_of(one) for one in given], None
        if kind in ("add", "add_any"):
            factor = (1.0, 1.0)
        elif kind == "sub":
            factor = (1.0, -1.0)
        elif kind == "neg":
            factor = (-1.0,)
        elif kind in _KEEPS_TOTALS | _REARRANGES and not (scales[1:] or _rounds(equation)):
            factor = (1.0,)
        elif kind in ("mul", "div") and isinstance(given[1], Fixed):
            number = self._number(equation.invars[1])
            if number:
                factor = (1 / number if kind == "div" else number, 0.0)
        elif kind == "mul" and isinstance(given[0], Fixed):
            factor = (0.0, self._number(equation.invars[0]) or math.nan)
        if factor is None or None in scales:
            return result
        terms = tuple(f * one for f, part in zip(factor, scales, strict=True) for one in part or ())
        known = 0 < len(terms) <= _MOST_DIVISORS and all(x and math.isfinite(x) for x in terms)
        return dataclasses.replace(result, scales=terms) if known else result

    def _renamed(self, equation: Any, given: list[Dependence]) -> Sequence[Dependence] | None:
        """Of an equation that gives its inputs under other names, or over the whole batch, or an
        input with something added."""
        kind = equation.primitive.name
        if (call := batch_call(equation)) is not None:
            self._over_batch.append((call, given[0]))
            return [FIXED]
        if kind in _KEEPS_INPUTS and len(given) == len(equation.outvars):
            return given
        if kind == "convert_element_type" and isinstance(given[0], Fixed | Count | Raised):
            same = equation.invars[0].aval.dtype == equation.outvars[0].aval.dtype
            if same or isinstance(given[0], Fixed):
                return given if same else [FIXED]
            return [_linear(equation, [plain(given[0])])]
        raised = _raised(kind, given)
        return None if raised is None else [raised]

    def _inner(self, equation: Any) -> Jaxpr | None:
        """The program of a call, which has the equation's inputs: a reduction's has elements."""
        if equation.primitive.name in ("while", "cond", "scan", "shard_map"):
            return None
        inner = list(inner_programs(equation.params))
        if len(inner) != 1 or len(inner[0].outvars) != len(equation.outvars):
            return None
        return inner[0] if _shapes(inner[0].invars) == _shapes(equation.invars) else None

    def _cond(self, equation: Any, given: list[Dependence]) -> Sequence[Dependence]:
        if not isinstance(given[0], Fixed):
            return [OTHER] * len(equation.outvars)
        branches = [self.outputs(b.jaxpr, given[1:]) for b in equation.params["branches"]]
        return [join(outputs) for outputs in zip(*branches, strict=True)]

    def _scan(self, equation: Any, given: list[Dependence]) -> Sequence[Dependence]:
        """Stacks lose dimension 0 inside; a carry is followed until it stays what it is."""
        num_consts, num_carry = split_scan(equation)
        body = equation.params["jaxpr"].jaxpr
        consts = [plain(one) for one in given[:num_consts]]
        carry = [plain(one) for one in given[num_consts : num_consts + num_carry]]
        items = [_inside(one) for one in given[num_consts + num_carry :]]
        while True:
            outputs = self.outputs(body, [*consts, *carry, *items])
            joined = [
                _joined_carry(a, plain(b)) for a, b in zip(carry, outputs[:num_carry], strict=True)
            ]
            if joined == carry:
                return [*carry, *map(_outside, outputs[num_carry:])]
            carry = joined

    def _while(self, equation: Any, given: list[Dependence]) -> Sequence[Dependence]:
        """As many turns for all rows, or it is not understood."""
        conditions, bodies = (equation.params[f"{part}_nconsts"] for part in ("cond", "body"))
        given = [plain(one) for one in given]
        consts, carry = given[conditions : conditions + bodies], given[conditions + bodies :]
        while True:
            known = [*given[:conditions], *carry]
            (goes_on,) = self.outputs(equation.params["cond_jaxpr"].jaxpr, known)
            if not isinstance(goes_on, Fixed):
                return [OTHER] * len(carry)
            outputs = self.outputs(equation.params["body_jaxpr"].jaxpr, [*consts, *carry])
            joined = [_joined_carry(a, plain(b)) for a, b in zip(carry, outputs, strict=True)]
            if joined == carry:
                return carry
            carry = joined

    # One output

    def _one(self, equation: Any, given: list[Dependence]) -> Dependence:
        kind = equation.primitive.name
        if kind in ("add", "add_any", "sub", "mul", "div", "neg", *_KEEPS_TOTALS) and any(
            isinstance(one, Total | Count) for one in given
        ):
            found = self._of_totals(equation, given)
            return _linear(equation, given) if found == OTHER else found
        if kind in _REARRANGES and isinstance(given[0], Total):
            return given[0] if all(isinstance(one, Fixed) for one in given[1:]) else OTHER
        if any(isinstance(one, Total | Count) for one in given):
            return _linear(equation, given)
        if pairs_rows(equation, given):
            self._compared.append(kind)
        return rows_after(equation, given, self._num_rows)

    def _of_totals(self, equation: Any, given: list[Dependence]) -> Dependence:
        kind = equation.primitive.name
        first = given[0]
        if kind in _KEEPS_TOTALS:
            return OTHER if _rounds(equation) else first
        if kind == "neg":
            return _negated(first)
        second = given[1]
        if kind in ("add", "add_any", "sub"):
            second = _negated(second) if kind == "sub" else second
            zeros = [
                isinstance(one, Fixed) and self._number(atom) == 0
                for one, atom in zip(given, equation.invars, strict=True)
            ]
            if True in zeros:  # as `sum` of Python begins
                return second if zeros[0] else first
            return _added(first, second, commutes=kind != "sub")
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

    def _number(self, atom: Any) -> float | None:
        return _number_of(atom.val) if isinstance(atom, Literal) else self._numbers.get(atom)


def number_of_output(closed: ClosedJaxpr, place: int) -> float | None:
    """The number that an output of a program is whatever its inputs are; None where it is none."""
    atom = closed.jaxpr.outvars[place]
    if isinstance(atom, Literal):
        return _number_of(atom.val)
    return _number_of(dict(zip(closed.jaxpr.constvars, closed.consts, strict=True)).get(atom))


def _number_of(value: Any) -> float | None:
    """A scalar that is known while a program is traced."""
    if (
        value is None
        or np.ndim(value)
        or jnp.issubdtype(jnp.result_type(value), jax.dtypes.extended)
    ):
        return None
    return float(value)


def _rounds(equation: Any) -> bool:
    """Whether numbers lose what is behind the point, so that parts do not add up to the whole."""
    before, after = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    whole = jnp.integer, jnp.bool_
    return jnp.issubdtype(after, jnp.integer) and not any(jnp.issubdtype(before, x) for x in whole)


def _shapes(atoms: Sequence[Any]) -> list[Any]:
    return [getattr(atom.aval, "shape", None) for atom in atoms]


def _scaled(one: Dependence, number: float | None) -> Dependence:
    if not isinstance(one, Total):
        return OTHER
    if number is None or one.scale is None:
        return Total(None, is_scaled=True)
    scale = one.scale * number
    if scale == 0 or len(one.divisors) >= _MOST_DIVISORS:
        return Total(None, is_scaled=True)
    divisor = abs(1 / number)
    divisors = {divisor, *one.divisors, *(divisor * other for other in one.divisors)}
    return dataclasses.replace(one, scale=scale, is_scaled=True, divisors=frozenset(divisors))


def _negated(one: Dependence) -> Dependence:
    if isinstance(one, Total):
        return dataclasses.replace(one, scale=None if one.scale is None else -one.scale)
    return one if isinstance(one, Fixed) else OTHER


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
    # A sum of totals is one, but of no single scale: 1 where one of them is a plain sum.
    return Total(None, is_scaled=True)


def _raised(kind: str, given: Sequence[Dependence]) -> Raised | None:
    """What an input, or what was raised already, becomes with one more term that is other."""
    if kind not in ("add", "add_any"):
        return None
    for one, added in (given, given[::-1]):
        starts = isinstance(one, Fixed) and one.input is not None and isinstance(added, Other)
        more = isinstance(one, Count) and isinstance(added, Other)
        again = isinstance(one, Raised) and isinstance(added, Other | Total)
        if starts or more or again:
            affine = is_affine(one) and is_affine(added)
            return Raised(one.input, affine)  # type: ignore[union-attr]
    return None


def _joined_carry(before: Dependence, after: Dependence) -> Dependence:
    """What a loop carries: a sum that has got a term keeps it, and other stays other."""
    return after if after == _PRODUCT and before != OTHER else join([before, after])


def _linear(equation: Any, given: Sequence[Dependence]) -> Other:
    """What an equation makes of such sums that it does not tell more closely."""
    kind, is_fixed = equation.primitive.name, [isinstance(one, Fixed) for one in given]
    if not all(map(is_affine, given)):
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


def _is_product(kind: str, given: Sequence[Dependence]) -> bool:
    """Whether a result is a product of totals, or a sum with such a term."""
    if any(isinstance(one, Rows) for one in given):
        return False
    if kind in _MULTIPLIES and all(isinstance(one, Total) for one in given):
        return True
    terms = given[:1] if kind == "div" else given
    return kind in _KEEPS_TERMS and _PRODUCT in terms


def _inside(one: Dependence) -> Dependence:
    if isinstance(one, Rows):
        return Rows(one.dim - 1) if one.dim else OTHER
    if isinstance(one, Fixed):
        return (
            one  # of an input of the program the part of each turn, which makes that of the stack
        )
    return plain(one) if isinstance(one, Total) or one == AFFINE else OTHER


def _outside(one: Dependence) -> Dependence:
    return Rows(one.dim + 1) if isinstance(one, Rows) else one
