"""Finds attention that stores its scores, and attention in kernels, in a traced program.

Attention by plain products is found by its structure: a product with batch dimensions, whose result
passes through an exponential and, with as many numbers as before, is summed over as many numbers as
another such product contracts. Products inside kernels (`pallas_call`) store nothing and are not
found.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr

from zerojax.config.late_dataclasses import dataclass
from zerojax.operators.cudnn_attention import FORWARD
from zerojax.operators.equations import Equation
from zerojax.operators.marks import inner_programs
from zerojax.tracing.dependence import Follow, Marks, union
from zerojax.tracing.source_lines import line_of_equation

_EXPONENTIALS = frozenset({"exp", "exp2"})


@dataclass(frozen=True)
class StoredScores:
    """Scores of attention that a program stores.

    Attributes:
      shape: shape of the array of scores, on one device.
      dtype: name of the dtype of this array.
      line: line of the user's code, as "file:line: source"; None if unknown.
    """

    shape: tuple[int, ...]
    dtype: str
    line: str | None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


def find_stored_scores(program: Jaxpr) -> tuple[StoredScores, ...]:
    """Returns the scores that attention by plain products stores, each line and shape once.

    Args:
      program: traced step or loss, without dead code. Scores of the backward pass are those of the
        forward pass.
    """
    follow = _Scores()
    follow.outputs(program, [0] * len(program.invars))
    found = (
        StoredScores(
            shape=tuple(equation.outvars[0].aval.shape),
            dtype=equation.outvars[0].aval.dtype.name,
            line=line_of_equation(equation),
        )
        for equation in follow.found()
    )
    return tuple(dict.fromkeys(found))


def count_attention_kernels(program: Jaxpr) -> int:
    """Returns the number of calls of attention kernels in a program; a call in a loop counts once.

    These are calls of cuDNN's attention, and Pallas kernels that compute an exponential.
    """
    return sum(map(_is_kernel, _equations(program, inside_kernels=False)))


def _is_kernel(equation: Equation) -> bool:
    if equation.primitive.name == "pallas_call":
        kernels = inner_programs(equation.params)
        inside = (e for kernel in kernels for e in _equations(kernel, inside_kernels=True))
        return any(e.primitive.name in _EXPONENTIALS for e in inside)
    return equation.params.get("target_name", equation.params.get("call_target_name")) == FORWARD


def _equations(program: Jaxpr, *, inside_kernels: bool) -> Iterator[Any]:
    for equation in program.eqns:
        yield equation
        if inside_kernels or equation.primitive.name != "pallas_call":
            for inner in inner_programs(equation.params):
                yield from _equations(inner, inside_kernels=inside_kernels)


class _Scores(Follow):
    """Walk that marks results of products, and the same after an exponential.

    Product i has bit 2i; after an exponential also bit 2i + 1.
    """

    def __init__(self) -> None:
        super().__init__(frozenset())
        self._products: list[Any] = []
        self._numbers: dict[int, int] = {}
        # For each product: how many of its numbers (after the exponential) are combined at once.
        self._summed: dict[int, set[int]] = defaultdict(set)
        self._contracted: dict[int, set[int]] = defaultdict(set)

    def found(self) -> list[Any]:
        """Returns the products whose results are scores, in the order of the program."""
        return [
            product
            for number, product in enumerate(self._products)
            if self._summed[number] & self._contracted[number]
        ]

    def _ends(self, equation: Equation, operands: list[Marks]) -> bool:
        # Also equations without marks are visited: products begin the marks.
        return not equation.outvars

    def _leaf(self, equation: Equation, operands: list[Marks]) -> Marks:
        kind = equation.primitive.name
        if kind == "dot_general":
            return self._product(equation, operands)
        if kind == "pallas_call" or not any(operands):
            return 0
        size, marks = getattr(equation.outvars[0].aval, "size", 0), 0
        if kind == "reduce_sum":
            for number in self._after_exponential(operands[0]):
                self._summed[number].add(equation.invars[0].aval.size // max(size, 1))
        for number in self._in(operands):
            if self._products[number].outvars[0].aval.size == size:
                here = 3 << 2 * number if kind in _EXPONENTIALS else 0
                marks |= here | (union(operands) & 3 << 2 * number)
        return marks

    def _product(self, equation: Equation, operands: list[Marks]) -> Marks:
        contracted, batch = equation.params["dimension_numbers"]
        # Products with weights have no batch dimensions; scores have those of rows and heads.
        if not batch[0]:
            return 0
        for variable, marks, dims in zip(equation.invars, operands, contracted, strict=True):
            for number in self._after_exponential(marks):
                self._contracted[number].add(math.prod(variable.aval.shape[dim] for dim in dims))
        # The body of a loop is traversed more than once.
        if id(equation) not in self._numbers:
            self._numbers[id(equation)] = len(self._products)
            self._products.append(equation)
        return 1 << 2 * self._numbers[id(equation)]

    def _after_exponential(self, marks: Marks) -> list[int]:
        return [number for number in self._in([marks]) if marks >> 2 * number & 2]

    def _in(self, operands: list[Marks]) -> list[int]:
        """Returns the numbers of the products in marks."""
        marks, numbers = union(operands), []
        while marks:
            number = ((marks & -marks).bit_length() - 1) // 2
            numbers.append(number)
            marks &= ~(3 << 2 * number)
        return numbers
