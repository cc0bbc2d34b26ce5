"""Dependence of each result of a traced program on the rows of a batch.

A result is one of: independent of the batch; **rows**, where each row of it depends on one row of
the batch; a **total**, the sum over all rows of something computed row by row; a **count**, an
input plus a total; **raised**, an input plus something that is other; or **other**. What is not
understood is other, so each answer but that one can be relied on. Which numbers a row is computed
with besides (parameters, random numbers, the place of the row) does not matter. What
`zerojax.batch_sum` and `batch_mean` give is the same for all pieces of a microbatch, so it counts
as independent of the batch, too.
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

from zerojax.models.jaxpr import BatchCall, batch_call, inner_programs, split_scan


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Independent of the batch. input: the input of the program that it is, unchanged, or None."""

    input: int | None = None


@dataclasses.dataclass(frozen=True)
class Rows:
    """Dimension `dim` has the rows of the batch one after the other, each in as many places."""

    dim: int


@dataclasses.dataclass(frozen=True)
class Total:
    """A sum over rows, times `scale`; None where that is not a number that the program holds.

    is_scaled: whether it was multiplied or divided by anything.
    divisors: the numbers that it was divided by, and the product of any of them. A mean stays one
      under a factor, as in `2 * jnp.mean(x)`.
    num_added: elements that the sum over rows added up for each of its own; None where not known.
    scales: those of its terms, where it has no scale of its own; None where not known.
    """

    scale: float | None = 1.0
    is_scaled: bool = False
    divisors: frozenset[float] = frozenset()
    num_added: int | None = dataclasses.field(default=None, compare=False)
    scales: tuple[float, ...] | None = dataclasses.field(default=None, compare=False)

    def is_sum(self, num_rows: int, weight: float | None = None) -> bool:
        """Whether it is certain that this is not a mean over so many rows.

        A mean over rows and any other dimensions divides by a multiple of the number of rows.

        Args:
          weight: what it will be divided by, where that is known.
        """
        if self.scale is None or self.scale == 0:
            return False
        if num_rows == 1:  # dividing by 1 is all that tells a mean; a weight of 1 tells nothing
            return not self.is_scaled and weight is None
        divisors = {*self.divisors}
        if weight is not None:
            divisors |= {abs(weight), *(abs(weight) * other for other in self.divisors)}
        return not any(_counts_rows(number, num_rows) for number in divisors)

    def is_plain_mean(self, num_rows: int, weight: float = 1.0) -> bool:
        """Whether all it is divided by is the number of rows, or of elements, that it adds up.

        Args:
          weight: what it will be divided by.
        """
        if not self.scale:
            return False
        divisor, counts = abs(weight / self.scale), [num_rows, self.num_added or num_rows]
        return any(math.isclose(divisor, count, rel_tol=1e-2) for count in counts)


def _counts_rows(number: float, num_rows: int) -> bool:
    multiple = round(number / num_rows)
    return multiple >= 1 and math.isclose(number, multiple * num_rows, rel_tol=1e-2)


@dataclasses.dataclass(frozen=True)
class Count:
    """An input plus a total."""

    input: int
    total: Total


@dataclasses.dataclass(frozen=True)
class Raised:
    """An input plus something that is other."""

    input: int


@dataclasses.dataclass(frozen=True)
class Other:
    """Anything else.

    is_ratio: whether it is a total divided by a total; is_product: whether it is a sum of terms one
    of which is a product of totals, times anything that is no row.
    scales: of a sum of totals and of what is independent of the batch, those of the totals.
    """

    is_ratio: bool = False
    is_product: bool = False
    scales: tuple[float, ...] | None = dataclasses.field(default=None, compare=False)


Dependence = Fixed | Rows | Total | Count | Raised | Other

_FIXED, _OTHER, _PRODUCT = Fixed(), Other(), Other(is_product=True)
_MOST_DIVISORS = 64
"""Of more, it is not said that none of them counts rows."""

_ELEMENTWISE_NAMES = """
abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy
copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow
is_finite le lgamma log log1p logistic lt max min mul name ne neg nextafter not or pow real
reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign
sin sinh sqrt square stop_gradient sub tan tanh xor
"""
_REDUCTION_NAMES = """
argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor
"""
_REARRANGING_NAMES = """
broadcast_in_dim dynamic_slice expand_dims reduce_sum reshape rev slice squeeze transpose
"""
# One output, computed element by element from inputs of its shape.
_ELEMENTWISE = frozenset(_ELEMENTWISE_NAMES.split())
_REDUCTIONS = frozenset(_REDUCTION_NAMES.split())
# A total stays one in other shapes, and added up.
_REARRANGES = frozenset(_REARRANGING_NAMES.split())
_KEEPS_TOTALS = frozenset(
    ["convert_element_type", "copy", "copy_p", "name", "reduce_precision", "stop_gradient"]
)
_KEEPS_INPUTS = frozenset(["copy", "copy_p", "name", "optimization_barrier"])
_MULTIPLIES = frozenset(["dot_general", "integer_pow", "mul", "square"])
# A sum that has a term stays one that has it.
_KEEPS_TERMS = frozenset(["add", "add_any", "div", "mul", "neg", "sub"]) | _REARRANGES
_ALONG_A_DIM = {
    "concatenate": "dimension",
    "cumlogsumexp": "axis",
    "cummax": "axis",
    "cummin": "axis",
    "cumprod": "axis",
    "cumsum": "axis",
    "sort": "dimension",
    "split": "axis",
}


def follow_rows(
    closed: ClosedJaxpr,
    inputs: Sequence[Dependence],
    num_rows: int,
    *,
    over_batch: list[tuple[BatchCall, Dependence]] | None = None,
) -> list[Dependence]:
    """How each output of a program depends on the rows of its batch.

    Args:
      closed: traced.
      inputs: for each input; a leaf of the batch is `Rows(0)`, all others `Fixed(place)`.
      num_rows: of the batch.
      over_batch: gets (kind, what it was given) of each call of `zerojax.batch_sum` and
        `batch_mean`, of one in a loop several times.
    """
    return _Follow(num_rows, over_batch).outputs(closed.jaxpr, inputs, closed.consts)


class _Follow:
    def __init__(
        self, num_rows: int, over_batch: list[tuple[BatchCall, Dependence]] | None = None
    ) -> None:
        self._num_rows = num_rows
        self._over_batch = [] if over_batch is None else over_batch
        self._numbers: dict[Any, float | None] = {}

    def outputs(
        self, program: Jaxpr, inputs: Sequence[Dependence], consts: Sequence[Any] = ()
    ) -> list[Dependence]:
        found: dict[Any, Dependence] = dict(zip(program.invars, inputs, strict=True))
        for variable, value in zip(program.constvars, consts, strict=False):
            self._numbers[variable] = _number_of(value)

        def of(atom: Any) -> Dependence:
            return _FIXED if isinstance(atom, Literal) else found.get(atom, _FIXED)

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
        if kind == "scan":
            return self._scan(equation, given)
        if kind != "cond" and self._inner(equation) is None:
            given = [_OTHER if isinstance(one, Raised) else one for one in given]
        if all(isinstance(one, Fixed) for one in given):
            inner = self._inner(equation)
            return [_FIXED] * number if inner is None else self.outputs(inner, given)
        if kind == "div" and isinstance(given[0], Total) and not isinstance(given[1], Fixed):
            return [Other(is_ratio=True)]
        if kind in _KEEPS_TOTALS and isinstance(given[0], Other):
            return given
        if _is_product(kind, given):
            return [_PRODUCT] * number
        if any(isinstance(one, Other) for one in given) and not list(
            inner_programs(equation.params)
        ):
            return [_OTHER] * number
        if kind == "cond":
            return self._cond(equation, given)
        inner = self._inner(equation)
        if inner is not None:
            return self.outputs(inner, given)
        if number != 1 and kind not in ("sort", "split", "top_k"):
            return [_OTHER] * number
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
            return [_FIXED]
        if kind in _KEEPS_INPUTS and len(given) == len(equation.outvars):
            return given
        if kind == "convert_element_type" and isinstance(given[0], Fixed | Count | Raised):
            same = equation.invars[0].aval.dtype == equation.outvars[0].aval.dtype
            return given if same else [_FIXED if isinstance(given[0], Fixed) else _OTHER]
        raised = _raised(kind, given)
        return None if raised is None else [raised]

    def _inner(self, equation: Any) -> Jaxpr | None:
        """The program of a call."""
        if equation.primitive.name in ("while", "cond", "scan", "shard_map"):
            return None
        inner = list(inner_programs(equation.params))
        if len(inner) != 1 or len(inner[0].invars) != len(equation.invars):
            return None
        return inner[0] if len(inner[0].outvars) == len(equation.outvars) else None

    def _cond(self, equation: Any, given: list[Dependence]) -> Sequence[Dependence]:
        if not isinstance(given[0], Fixed):
            return [_OTHER] * len(equation.outvars)
        branches = [self.outputs(b.jaxpr, given[1:]) for b in equation.params["branches"]]
        return [_join(outputs) for outputs in zip(*branches, strict=True)]

    def _scan(self, equation: Any, given: list[Dependence]) -> Sequence[Dependence]:
        """Stacks lose dimension 0 inside; a carry is followed until it stays what it is."""
        num_consts, num_carry = split_scan(equation)
        body = equation.params["jaxpr"].jaxpr
        consts = [_plain(one) for one in given[:num_consts]]
        carry = [_plain(one) for one in given[num_consts : num_consts + num_carry]]
        items = [_inside(one) for one in given[num_consts + num_carry :]]
        while True:
            outputs = self.outputs(body, [*consts, *carry, *items])
            joined = [
                _joined_carry(a, _plain(b)) for a, b in zip(carry, outputs[:num_carry], strict=True)
            ]
            if joined == carry:
                return [*carry, *map(_outside, outputs[num_carry:])]
            carry = joined

    # One output

    def _one(self, equation: Any, given: list[Dependence]) -> Dependence:
        kind = equation.primitive.name
        if kind in ("add", "add_any", "sub", "mul", "div", "neg", *_KEEPS_TOTALS) and any(
            isinstance(one, Total | Count) for one in given
        ):
            return self._of_totals(equation, given)
        if kind in _REARRANGES and isinstance(given[0], Total):
            return given[0] if all(isinstance(one, Fixed) for one in given[1:]) else _OTHER
        if any(isinstance(one, Total | Count) for one in given):
            return _OTHER
        if kind in _ELEMENTWISE:
            return _join([one for one in given if not isinstance(one, Fixed)])
        rule = _RULES.get(kind)
        return _OTHER if rule is None else rule(self, equation, given)

    def _of_totals(self, equation: Any, given: list[Dependence]) -> Dependence:
        kind = equation.primitive.name
        first = given[0]
        if kind in _KEEPS_TOTALS:
            return _OTHER if _rounds(equation) else first
        if kind == "neg":
            return _negated(first)
        second = given[1]
        if kind in ("add", "add_any", "sub"):
            second = _negated(second) if kind == "sub" else second
            return _added(first, second, commutes=kind != "sub")
        if kind == "div" and jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.integer):
            return _OTHER
        if isinstance(first, Total) and isinstance(second, Fixed):
            number = self._number(equation.invars[1])
            if kind == "div":
                number = None if not number else 1 / number
            return _scaled(first, number)
        if kind == "mul" and isinstance(second, Total) and isinstance(first, Fixed):
            return _scaled(second, self._number(equation.invars[0]))
        return _OTHER

    def _number(self, atom: Any) -> float | None:
        return _number_of(atom.val) if isinstance(atom, Literal) else self._numbers.get(atom)

    def _reduction(self, equation: Any, given: list[Dependence]) -> Dependence:
        (rows,) = given
        assert isinstance(rows, Rows)
        axes = equation.params["axes"]
        if rows.dim in axes:
            if equation.primitive.name != "reduce_sum":
                return _OTHER
            before, after = equation.invars[0].aval, equation.outvars[0].aval
            return Total(num_added=before.size // max(after.size, 1))
        return Rows(rows.dim - sum(axis < rows.dim for axis in axes))

    def _along_a_dim(self, equation: Any, given: list[Dependence]) -> Dependence:
        rows = _join([one for one in given if not isinstance(one, Fixed)])
        along = equation.params[_ALONG_A_DIM[equation.primitive.name]]
        return rows if isinstance(rows, Rows) and rows.dim != along else _OTHER

    def _reshape(self, equation: Any, given: list[Dependence]) -> Dependence:
        """Rows stay whole blocks where what is before them keeps its size."""
        (rows, *_) = given
        old, new = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
        if not isinstance(rows, Rows) or equation.params.get("dimensions") is not None:
            return _OTHER
        before = math.prod(old[: rows.dim])
        for dim, size in enumerate(new):
            fits = math.prod(new[:dim]) == before and size % self._num_rows == 0
            if fits and (size > 1 or old[rows.dim] == 1):
                return Rows(dim)
        return _OTHER

    def _squeeze(self, equation: Any, given: list[Dependence]) -> Dependence:
        (rows,) = given
        assert isinstance(rows, Rows)
        removed = equation.params["dimensions"]
        if rows.dim in removed:
            return _OTHER
        return Rows(rows.dim - sum(dim < rows.dim for dim in removed))

    def _expand_dims(self, equation: Any, given: list[Dependence]) -> Dependence:
        (rows,) = given
        assert isinstance(rows, Rows)
        made = set(equation.params["dimensions"])
        kept = [d for d in range(equation.outvars[0].aval.ndim) if d not in made]
        return Rows(kept[rows.dim])

    def _broadcast_in_dim(self, equation: Any, given: list[Dependence]) -> Dependence:
        rows, *rest = given
        if not isinstance(rows, Rows) or any(not isinstance(one, Fixed) for one in rest):
            return _OTHER
        dim = equation.params["broadcast_dimensions"][rows.dim]
        same = equation.invars[0].aval.shape[rows.dim] == equation.outvars[0].aval.shape[dim]
        return Rows(dim) if same else _OTHER

    def _transpose(self, equation: Any, given: list[Dependence]) -> Dependence:
        (rows,) = given
        assert isinstance(rows, Rows)
        return Rows(equation.params["permutation"].index(rows.dim))

    def _rev(self, equation: Any, given: list[Dependence]) -> Dependence:
        (rows,) = given
        assert isinstance(rows, Rows)
        return _OTHER if rows.dim in equation.params["dimensions"] else rows

    def _top_k(self, equation: Any, given: list[Dependence]) -> Dependence:
        (rows,) = given
        last = equation.invars[0].aval.ndim - 1
        along = equation.params.get("axis", last) % (last + 1)
        return rows if isinstance(rows, Rows) and rows.dim != along else _OTHER

    def _keeping(self, equation: Any, given: list[Dependence]) -> Dependence:
        """What leaves the dimension of the rows as it is."""
        rows, *rest = given
        if not isinstance(rows, Rows) or any(not isinstance(one, Fixed) for one in rest):
            return _OTHER
        before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
        return rows if before[rows.dim] == after[rows.dim] else _OTHER

    def _dynamic_update_slice(self, equation: Any, given: list[Dependence]) -> Dependence:
        """Rows that are written in place, all at once."""
        rows, *places = _join([one for one in given[:2] if not isinstance(one, Fixed)]), *given[2:]
        if not isinstance(rows, Rows) or any(not isinstance(one, Fixed) for one in places):
            return _OTHER
        array, update = (atom.aval.shape for atom in equation.invars[:2])
        return rows if array[rows.dim] == update[rows.dim] else _OTHER

    def _dot_general(self, equation: Any, given: list[Dependence]) -> Dependence:
        (contracted, batched), sides = equation.params["dimension_numbers"], []
        for side, one in enumerate(given):
            if isinstance(one, Rows):
                sides.append((side, one.dim))
        if len(sides) == 2:
            pair = sides[0][1], sides[1][1]
            if pair in zip(*batched, strict=True):
                return Rows(list(batched[0]).index(pair[0]))
            return Total() if pair in zip(*contracted, strict=True) else _OTHER
        ((side, dim),) = sides
        if dim in contracted[side]:
            return _OTHER
        if dim in batched[side]:
            return Rows(list(batched[side]).index(dim))
        ndim = [atom.aval.ndim for atom in equation.invars]
        taken = {*contracted[side], *batched[side]}
        place = [d for d in range(ndim[side]) if d not in taken].index(dim) + len(batched[0])
        if side == 1:
            place += ndim[0] - len(contracted[0]) - len(batched[0])
        return Rows(place)

    def _conv_general_dilated(self, equation: Any, given: list[Dependence]) -> Dependence:
        rows, kernel = given
        numbers = equation.params["dimension_numbers"]
        alone = equation.params["batch_group_count"] == 1 and isinstance(kernel, Fixed)
        if not alone or not isinstance(rows, Rows) or rows.dim != numbers.lhs_spec[0]:
            return _OTHER
        return Rows(numbers.out_spec[0])

    def _gather(self, equation: Any, given: list[Dependence]) -> Dependence:
        """Rows of a table by tokens, and elements of each row by its labels."""
        numbers = equation.params["dimension_numbers"]
        table, index = given
        if not isinstance(index, Rows):
            return self._take(equation, table)
        if isinstance(table, Rows):
            pairs = zip(
                numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
            )
            if (table.dim, index.dim) not in pairs:
                return _OTHER
        out = equation.outvars[0].aval.ndim
        batch = [dim for dim in range(out) if dim not in numbers.offset_dims]
        return Rows(batch[index.dim])

    def _take(self, equation: Any, table: Dependence) -> Dependence:
        """The same places of every row."""
        numbers, shape = equation.params["dimension_numbers"], equation.invars[0].aval.shape
        gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
        kept = [dim for dim in range(len(shape)) if dim not in gone]
        if not isinstance(table, Rows) or table.dim not in kept:
            return _OTHER
        if equation.params["slice_sizes"][table.dim] != shape[table.dim]:
            return _OTHER
        return Rows(numbers.offset_dims[kept.index(table.dim)])


_RULES = {
    **dict.fromkeys(_REDUCTIONS, _Follow._reduction),
    **dict.fromkeys(_ALONG_A_DIM, _Follow._along_a_dim),
    **dict.fromkeys(["slice", "dynamic_slice", "pad"], _Follow._keeping),
    "broadcast_in_dim": _Follow._broadcast_in_dim,
    "conv_general_dilated": _Follow._conv_general_dilated,
    "dot_general": _Follow._dot_general,
    "dynamic_update_slice": _Follow._dynamic_update_slice,
    "expand_dims": _Follow._expand_dims,
    "gather": _Follow._gather,
    "reshape": _Follow._reshape,
    "rev": _Follow._rev,
    "squeeze": _Follow._squeeze,
    "top_k": _Follow._top_k,
    "transpose": _Follow._transpose,
}


def scales_of(one: Dependence) -> tuple[float, ...] | None:
    """The scale of each total that a value is the sum of; None where that is not known."""
    if isinstance(one, Fixed):
        return ()
    if isinstance(one, Total) and one.scale is not None:
        return (one.scale,)
    return one.scales if isinstance(one, Total | Other) else None


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


def _scaled(one: Dependence, number: float | None) -> Dependence:
    if not isinstance(one, Total):
        return _OTHER
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
    return one if isinstance(one, Fixed) else _OTHER


def _added(first: Dependence, second: Dependence, *, commutes: bool) -> Dependence:
    if commutes and isinstance(second, Fixed | Count) and isinstance(first, Total):
        first, second = second, first
    if not isinstance(second, Total):
        return _OTHER
    if isinstance(first, Fixed) and first.input is not None:
        return Count(first.input, second)
    if isinstance(first, Count):
        total = _added(first.total, second, commutes=True)
        return Count(first.input, total) if isinstance(total, Total) else _OTHER
    if not isinstance(first, Total):
        return _OTHER
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
            return Raised(one.input)  # type: ignore[union-attr]
    return None


def _join(several: Sequence[Dependence]) -> Dependence:
    """What a value is that is one of these, or computed element by element from them."""
    rest = [one for one in several if not isinstance(one, Fixed)]
    if not rest:
        return several[0] if len(set(several)) == 1 else _FIXED
    if all(one == rest[0] for one in rest) and (
        len(rest) == len(several) or isinstance(rest[0], Rows)
    ):
        return _plain(rest[0]) if len(rest) > 1 else rest[0]
    return _OTHER


def _joined_carry(before: Dependence, after: Dependence) -> Dependence:
    """What a loop carries: a sum that has got a term keeps it, and other stays other."""
    return after if after == _PRODUCT and before != _OTHER else _join([before, after])


def _is_product(kind: str, given: Sequence[Dependence]) -> bool:
    """Whether a result is a product of totals, or a sum with such a term."""
    if any(isinstance(one, Rows) for one in given):
        return False
    if kind in _MULTIPLIES and all(isinstance(one, Total) for one in given):
        return True
    terms = given[:1] if kind == "div" else given
    return kind in _KEEPS_TERMS and _PRODUCT in terms


def _plain(one: Dependence) -> Dependence:
    """Without the input that a value is, and the scales of its terms: a loop may change them."""
    if isinstance(one, Raised):
        return _OTHER
    if isinstance(one, Total | Other):
        return dataclasses.replace(one, scales=None)
    return _FIXED if isinstance(one, Fixed) else one


def _inside(one: Dependence) -> Dependence:
    if isinstance(one, Rows):
        return Rows(one.dim - 1) if one.dim else _OTHER
    return _plain(one) if isinstance(one, Fixed | Total) else _OTHER


def _outside(one: Dependence) -> Dependence:
    return Rows(one.dim + 1) if isinstance(one, Rows) else one
