"""Computes one row of a stacked result, from a program that computes all rows.

A model may draw the stack of its layers at once: by `jax.vmap` over keys, in a loop, by one call
with the shape of the stack, or layer after layer. If a row depends on no value that is as large as
the stack, it is computed separately, by the same operations on the same values. This works for
random bits, because bits of JAX's partitionable Threefry are functions of a key and the position of
an element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, Var, jaxpr_as_fun
from jax.extend.random import threefry2x32_p

from zerojax.operators.equations import Equation
from zerojax.tracing.jaxpr import cut_piece, split_scan, variables
from zerojax.tracing.rolling.equality import (
    Equality,
    abstract_value,
    equation_function,
    same_literals,
)
from zerojax.tracing.rolling.flat_program import num_bytes, open_calls
from zerojax.tracing.row_rules import ELEMENTWISE, REDUCTIONS

_SMALL = 2**20
"""Largest number of bytes of a value of all layers (such as their keys) that is computed anew for
each row.
"""
_THREEFRY = "threefry2x32"
_UINTS = {8: np.uint8, 16: np.uint16, 32: np.uint32}


class NotByRow(Exception):
    """Raised if a row cannot be computed separately; the message is the reason."""


class SingleRow:
    """Function `(row number, *inputs) -> [1, ...]` that computes one row of a result [rows,
    ...].
    """

    def __init__(self, program: ClosedJaxpr, output: int, *, limit: int | None = None) -> None:
        """Selects a result of a program.

        Args:
          program: program without side effects, and without the calls that `open_calls` inlines.
          output: position of the result among the outputs.
          limit: largest number of bytes of an intermediate value that may be computed for all rows;
            None: the bytes of a row of the result, but at least `_SMALL`.
        """
        self._program, self._atom = program, program.jaxpr.outvars[output]
        atom: Any = program.jaxpr.outvars[output]
        of_a_row = num_bytes(atom) // max(atom.aval.shape[0], 1)
        self._limit = max(_SMALL, of_a_row) if limit is None else limit

    def __call__(self, row: jax.Array, *inputs: jax.Array) -> jax.Array:
        """Computes a row; traced.

        Args:
          row: number of the row, int32 [].
          *inputs: inputs of the program.

        Raises:
          NotByRow: the row needs all rows of a value that is too large.
        """
        return _Values(self._program, inputs, row, self._limit).row(self._atom)


def find_rows(
    closed: ClosedJaxpr, names: Sequence[str]
) -> tuple[dict[str, SingleRow], dict[str, str]]:
    """Finds the results of a program whose rows can be computed separately.

    Args:
      closed: program whose results are stacks [rows, ...].
      names: names of the results, in order.

    Returns:
      ({name: function that computes a row}, {name of each other result: reason why it has none}).
    """
    flat, rows, whole = open_calls(closed), {}, {}
    inputs = list(map(abstract_value, flat.jaxpr.invars))
    for place, name in enumerate(names):
        one = SingleRow(flat, place)
        try:
            jax.eval_shape(one, jax.ShapeDtypeStruct((), jnp.int32), *inputs)
            rows[name] = one
        except NotByRow as error:
            whole[name] = str(error)
    return rows, whole


class _Values:
    """Computes values of one program when they are needed, for all rows or for one row; traced."""

    def __init__(
        self, program: ClosedJaxpr, inputs: Sequence[Any], number: jax.Array, limit: int
    ) -> None:
        self.number, self._limit, self._equality = number, limit, Equality({})
        flat = program.jaxpr
        self._whole: dict[Any, Any] = dict(zip(flat.constvars, program.consts, strict=True))
        self._whole |= zip(flat.invars, inputs, strict=True)
        self._rows: dict[Any, Any] = {}
        self._outer: dict[Any, tuple[_Values, Any]] = {}
        self._chosen: dict[tuple[int, ...], Any] = {}
        self._made = {
            variable: (equation, place)
            for equation in flat.eqns
            for place, variable in enumerate(equation.outvars)
        }

    def whole(self, atom: Var | Literal) -> Any:
        """Returns a value for all rows.

        Raises:
          NotByRow: the value, or a value that it depends on, is too large.
        """
        if isinstance(atom, Literal):
            return atom.val
        # The error names the operation that was asked for, not one that it depends on.
        waiting, asked = [atom], self._made.get(atom, (None,))[0]
        while waiting:  # no recursion: the counter of a random stream is a long chain
            if waiting[-1] in self._outer:
                outer, operand = self._outer[waiting[-1]]
                self._whole[waiting[-1]] = outer.whole(operand)
            if waiting[-1] in self._whole:
                waiting.pop()
                continue
            equation, _ = self._made[waiting[-1]]
            taken = list(dict.fromkeys(variables(equation.invars)))
            missing = [variable for variable in taken if variable not in self._whole]
            if missing:
                waiting += missing
                continue
            self._check(sum(map(num_bytes, equation.outvars)), asked)
            results = equation_function(equation, taken)(*(self._whole[v] for v in taken))
            self._whole |= zip(equation.outvars, results, strict=True)
        return self._whole[atom]

    def row(self, atom: Var | Literal) -> Any:
        """Returns a row of a value [rows, ...], as [1, ...].

        Raises:
          NotByRow: the row needs all rows of a value that is too large.
        """
        if isinstance(atom, Literal) or atom in self._whole:
            return self._cut(self.whole(atom))
        if atom in self._outer:
            outer, operand = self._outer[atom]
            return outer.row(operand)
        if atom not in self._rows:
            equation, place = self._made[atom]
            rule = _RULES.get(equation.primitive.name)
            results = None if rule is None else rule(self, equation, place)
            self._rows[atom] = self._cut(self.whole(atom)) if results is None else results
        return self._rows[atom]

    def row_inside(self, program: ClosedJaxpr, operands: Sequence[Any], place: int) -> Any:
        """Returns a row of a result of a nested program that an equation calls.

        Args:
          program: nested program.
          operands: variables of the outer program that are its inputs.
          place: position of the result among its outputs.
        """
        flat = open_calls(program)
        # Without inputs: `_outer` looks them up in the outer program when they are needed.
        inside = _Values(
            ClosedJaxpr(flat.jaxpr.replace(invars=[]), flat.consts), [], self.number, self._limit
        )
        inside._outer = {
            variable: (self, atom)
            for variable, atom in zip(flat.jaxpr.invars, operands, strict=True)
        }
        return inside.row(flat.jaxpr.outvars[place])

    def choose(self, atoms: Sequence[Any]) -> Any:
        """Returns the value of `atoms[row]`, where all `atoms` have the same shape and dtype.

        If equal equations define the values, one of these equations is computed from the operands
        of the row.

        Raises:
          NotByRow: no equal equations define the values, and all values together are too large.
        """
        first = atoms[0]
        if all(atom is first for atom in atoms):
            return self.whole(first)
        if all(isinstance(atom, Literal) and same_literals(first, atom) for atom in atoms):
            return first.val
        key = tuple(map(id, atoms))
        if key not in self._chosen:
            chosen = self._choose_equation(atoms)
            self._chosen |= self._choose_value(atoms) if chosen is None else chosen
        return self._chosen[key]

    def _choose_equation(self, atoms: Sequence[Any]) -> dict[tuple[int, ...], Any] | None:
        """Returns {ids of the values of all rows: value of this row} for results of equal
        equations, or None.
        """
        if any(isinstance(atom, Literal) or atom not in self._made for atom in atoms):
            return None
        made = [self._made[atom] for atom in atoms]
        first, place = made[0]
        alike = all(
            at == place and not equation.effects and self._equality.holes(first, equation) == set()
            for equation, at in made
        )
        if not alike:
            return None
        values = [
            self.choose(operands)
            for operands in zip(*(equation.invars for equation, _ in made), strict=True)
        ]
        # New variables, since an operand may be a literal or occur twice.
        taken: list[Any] = [Var(atom.aval) for atom in first.invars]
        results = equation_function(first.replace(invars=taken), taken)(*values)
        outputs = zip(*(equation.outvars for equation, _ in made), strict=True)
        return {
            tuple(map(id, output)): value for output, value in zip(outputs, results, strict=True)
        }

    def _choose_value(self, atoms: Sequence[Any]) -> dict[tuple[int, ...], Any]:
        made = [self._made[a][0] for a in atoms if not isinstance(a, Literal) and a in self._made]
        self._check(sum(map(num_bytes, atoms)), made[0] if made else None)
        every = jnp.stack([jnp.asarray(self.whole(a), a.aval.dtype) for a in atoms])
        return {tuple(map(id, atoms)): self._cut(every)[0]}

    def _cut(self, value: jax.Array) -> Any:
        return lax.dynamic_slice_in_dim(value, self.number, 1)

    def _check(self, size: int, equation: Equation | None) -> None:
        if size > self._limit:
            name = "a constant" if equation is None else equation.primitive.name
            raise NotByRow(f"{name} computes several layers at once")


# --- rules: (values, equation, position of the result) -> row of the result; None: not possible ---

_Rule = Callable[[_Values, Any, int], Any]


def _bind(equation: Equation, operands: Sequence[Any], place: int = 0, **changed: Any) -> Any:
    """Runs an equation on other operands; returns one of its results."""
    results = equation.primitive.bind(*operands, **{**equation.params, **changed})
    return results[place] if equation.primitive.multiple_results else results


def _elementwise(values: _Values, equation: Equation, _: int) -> Any:
    """Computes a row of an element-wise result from rows of the operands, and from shared
    operands.
    """
    rows = equation.outvars[0].aval.shape[0]
    operands = [
        values.row(atom) if atom.aval.shape[:1] == (rows,) else values.whole(atom)
        for atom in equation.invars
    ]
    return _bind(equation, operands)


def _reduction(values: _Values, equation: Equation, _: int) -> Any:
    return None if 0 in equation.params["axes"] else _of_rows(values, equation)


def _of_rows(values: _Values, equation: Equation, place: int = 0, **changed: Any) -> Any:
    """Runs an equation on the rows of all its operands."""
    return _bind(equation, [values.row(atom) for atom in equation.invars], place, **changed)


def _broadcast(values: _Values, equation: Equation, _: int) -> Any:
    operand, params = equation.invars[0], equation.params
    shape = (1, *params["shape"][1:])
    # A dimension of size 1 is repeated for all rows, so they share the value.
    of_rows = 0 in params["broadcast_dimensions"] and operand.aval.shape[0] > 1
    value = values.row(operand) if of_rows else values.whole(operand)
    return lax.broadcast_in_dim(value, shape, params["broadcast_dimensions"])


def _reshape(values: _Values, equation: Equation, _: int) -> Any:
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    # With `dimensions` the operand is transposed first.
    if not before or before[0] != after[0] or equation.params["dimensions"] is not None:
        return None
    return lax.reshape(values.row(equation.invars[0]), (1, *after[1:]))


def _squeeze(values: _Values, equation: Equation, _: int) -> Any:
    return None if 0 in equation.params["dimensions"] else _of_rows(values, equation)


def _transpose(values: _Values, equation: Equation, _: int) -> Any:
    return None if equation.params["permutation"][0] else _of_rows(values, equation)


def _along(key: str) -> _Rule:
    """Returns the rule of an operation along one dimension, whose number is the parameter `key`."""

    def rule(values: _Values, equation: Equation, place: int) -> Any:
        return _of_rows(values, equation, place) if equation.params[key] else None

    return rule


def _concatenate(values: _Values, equation: Equation, _: int) -> Any:
    if equation.params["dimension"]:
        return _of_rows(values, equation)
    # Each piece must be one row; otherwise it is not known which of them has the row.
    if any(atom.aval.shape[0] != 1 for atom in equation.invars):
        return None
    return values.choose(equation.invars)


def _stack(values: _Values, equation: Equation, _: int) -> Any:
    if equation.params["axis"]:
        return _of_rows(values, equation)
    return values.choose(equation.invars)[None]


def _slice(values: _Values, equation: Equation, _: int) -> Any:
    starts, limits, strides = (
        equation.params[key] for key in ("start_indices", "limit_indices", "strides")
    )
    rows = equation.invars[0].aval.shape[0]
    if starts[0] or limits[0] != rows or (strides and strides[0] != 1):
        return None
    return _of_rows(values, equation, limit_indices=(1, *limits[1:]))


def _pad(values: _Values, equation: Equation, _: int) -> Any:
    widths = equation.params["padding_config"]
    if any(widths[0]):
        return None
    return lax.pad(values.row(equation.invars[0]), values.whole(equation.invars[1]), widths)


def _gather(values: _Values, equation: Equation, _: int) -> Any:
    """Computes a row of a gather that takes the same elements of each row, such as a diagonal."""
    operand, indices = equation.invars
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    moved = (
        *numbers.collapsed_slice_dims,
        *numbers.start_index_map,
        *numbers.operand_batching_dims,
    )
    # No index may select among the rows, and all of them must be taken, in order.
    if 0 in moved or numbers.offset_dims[:1] != (0,) or sizes[0] != operand.aval.shape[0]:
        return None
    operands = values.row(operand), values.whole(indices)
    return _bind(equation, operands, slice_sizes=(1, *sizes[1:]))


def _iota(values: _Values, equation: Equation, _: int) -> Any:
    aval, dimension = equation.outvars[0].aval, equation.params["dimension"]
    shape = (1, *aval.shape[1:])
    if dimension:
        return lax.broadcasted_iota(aval.dtype, shape, dimension)
    return jnp.broadcast_to(values.number.astype(aval.dtype), shape)


def _of_matrices(values: _Values, equation: Equation, place: int) -> Any:
    """Computes a row of a function of the last two dimensions, such as a matrix decomposition."""
    return None if equation.outvars[place].aval.ndim < 3 else _of_rows(values, equation, place)


def _loop(values: _Values, equation: Equation, place: int) -> Any:
    """Computes one row of a scan's stacked results by running only that iteration.

    Returns None if the row depends on carried values.
    """
    num_consts, num_carry = split_scan(equation)
    if place < num_carry:
        return None
    body = equation.params["jaxpr"]
    piece = cut_piece(body, [body.jaxpr.outvars[place]])
    if any(num_consts <= number < num_consts + num_carry for number in piece.inputs):
        return None
    operands = [
        values.whole(equation.invars[number])
        if number < num_consts
        else values.row(equation.invars[number])[0]
        for number in piece.inputs
    ]
    return jaxpr_as_fun(piece.closed)(*operands)[0][None]


def _call(values: _Values, equation: Equation, place: int) -> Any:
    return values.row_inside(equation.params["call_jaxpr"], equation.invars, place)


def _branches(values: _Values, equation: Equation, place: int) -> Any:
    """Computes a row of the result of a `cond`: runs all branches, and selects one result."""
    index, *operands = equation.invars
    rows = [values.row_inside(x, operands, place) for x in equation.params["branches"]]
    return lax.select_n(values.whole(index), *rows)


def _random_bits(values: _Values, equation: Equation, _: int) -> Any:
    """Draws the random bits of one row, from the row's key or from the positions of its
    elements.
    """
    (keys,), params = equation.invars, equation.params
    if keys.aval.ndim:
        own = values.row(keys)
        if str(jax.random.key_impl(own)) != _THREEFRY:
            return None  # other generators use only the first of several keys
        return _bind(equation, [own])
    shape, key = params["shape"], values.whole(keys)
    of_a_row, width = math.prod(shape[1:]), params["bit_width"]
    # Within a row at most one carry reaches the upper word.
    known = str(jax.random.key_impl(key)) == _THREEFRY and width in _UINTS and of_a_row < 2**32
    # Without this option the bits of an element depend on the size of the whole draw.
    if not known or not jax.config.jax_threefry_partitionable:  # pyrefly: ignore
        return None
    # Threefry's counter of an element is its position in the stack, as two words of 32 bits.
    starts = np.arange(shape[0], dtype=np.uint64) * np.uint64(of_a_row)
    words = (starts >> np.uint64(32), starts & np.uint64(2**32 - 1))
    high, low = (jnp.asarray(word.astype(np.uint32))[values.number] for word in words)
    inside = jnp.zeros((1, *shape[1:]), jnp.uint32)
    for dimension in range(1, len(shape)):
        stride = np.uint32(math.prod(shape[dimension + 1 :]))
        inside += lax.broadcasted_iota(jnp.uint32, inside.shape, dimension) * stride
    counter = low + inside
    # The lower word overflowed if it became smaller.
    carried = high + (counter < low).astype(jnp.uint32)
    first, second = jax.random.key_data(key)
    bits = threefry2x32_p.bind(first, second, carried, counter)
    # As JAX combines the two words of an element.
    return (bits[0] ^ bits[1]).astype(_UINTS[width])


_MATRICES = "cholesky eigh householder_product geqrf lu qr svd triangular_solve"
_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(REDUCTIONS, _reduction),
    **dict.fromkeys(_MATRICES.split(), _of_matrices),
    **{name: _along("axis") for name in ("cumsum", "cumprod", "cummax", "cummin", "split")},
    "bitcast_convert_type": _elementwise,
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "cond": _branches,
    "custom_jvp_call": _call,
    "gather": _gather,
    "iota": _iota,
    "pad": _pad,
    "random_bits": _random_bits,
    "reshape": _reshape,
    "scan": _loop,
    "slice": _slice,
    "sort": _along("dimension"),
    "squeeze": _squeeze,
    "stack": _stack,
    "transpose": _transpose,
}
