"""Finds products with float32 operands in a traced program whose plan computes in 16 bits.

A step passes weights to the model in bfloat16 or float16. The model may still cast them: after an
embedding that returns float32 (as `flax.nnx.Embed` without `dtype`), all later results are float32,
because a product of float32 and bfloat16 is float32. The numbers are correct, but each product runs
at the rate of float32 and stores twice the bytes for the backward pass.
"""

from __future__ import annotations

import collections
import warnings
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from zerojax.config.late_dataclasses import dataclass
from zerojax.operators.equations import Equation, Operand
from zerojax.operators.marks import read_name
from zerojax.tracing.dependence import SAME_NUMBERS, Follow, Marks, union
from zerojax.tracing.flops import PRODUCTS, products, without_waste
from zerojax.tracing.source_lines import line_of_equation


@dataclass(frozen=True)
class WideProducts:
    """Share and cause of the products with float32 operands in a program.

    Attributes:
      share: FLOPs of these products, as a fraction of the FLOPs of all products and convolutions.
      cause: the reason why the operands are float32 that explains most of these FLOPs; None if
        unknown.
    """

    share: float
    cause: str | None


def find_wide_products(program: ClosedJaxpr) -> WideProducts | None:
    """Finds the products of a program whose operands are both float32 or wider.

    Args:
      program: traced program with a mark at every read of a parameter
        (`operators.marks.mark_read`).

    Returns:
      Share and cause of these products; None if there are none.
    """
    needed = without_waste(program)
    follow = _Widened()
    follow.outputs(needed, [0] * len(needed.invars))
    total, wide = 0, collections.Counter[str | None]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a loop without a known length counts once
        for equation, flops in products(needed):
            total += flops
            if id(equation) in follow.wide:
                wide[follow.first_cause(follow.wide[id(equation)])] += flops
    if not wide:
        return None
    return WideProducts(share=wide.total() / total, cause=wide.most_common(1)[0][0])


class _Widened(Follow):
    """Traversal that records for float32 values why they are float32."""

    def __init__(self) -> None:
        super().__init__(frozenset())
        self.wide: dict[int, Marks] = {}
        """{id of each product with float32 operands: marks of its operands}."""
        self._bits: dict[Any, int] = {}
        self._causes: list[str | None] = []

    def first_cause(self, marks: Marks) -> str | None:
        """Returns the cause that comes first in the program."""
        return self._causes[(marks & -marks).bit_length() - 1] if marks else None

    def _ends(self, equation: Equation, operands: list[Marks]) -> bool:
        return not equation.outvars

    def _leaf(self, equation: Equation, operands: list[Marks]) -> Marks:
        name, result = read_name(equation), equation.outvars[0]
        if name is not None:
            return self._bit(("read", name), None) if _is_narrow(result) else union(operands)
        if not _is_float(result):
            return 0
        kind, narrow = equation.primitive.name, any(map(_is_narrow, equation.invars))
        if _is_narrow(result):
            kept = narrow and kind in SAME_NUMBERS
            return union(operands) if kept else 0
        if kind in PRODUCTS and not any(map(_is_narrow, equation.invars[:2])):
            # The body of a loop is traversed more than once, with more marks each time.
            self.wide[id(equation)] = self.wide.get(id(equation), 0) | union(operands)
        if not narrow:
            return union(operands)
        if kind == "convert_element_type" and operands[0]:
            return self._of_parameter(equation, operands[0])
        return self._bit(id(equation), f"a value becomes float32{_at(equation)}")

    def _of_parameter(self, equation: Equation, marks: Marks) -> Marks:
        """Returns the marks of a parameter that is cast, and records the line of its first cast."""
        for key, bit in self._bits.items():
            if marks >> bit & 1 and self._causes[bit] is None:
                self._causes[bit] = f"parameter {key[1]} is cast to float32{_at(equation)}"
        return marks

    def _bit(self, key: int | tuple[str, str], cause: str | None) -> Marks:
        if key not in self._bits:
            self._bits[key] = len(self._causes)
            self._causes.append(cause)
        return 1 << self._bits[key]


def _at(equation: Equation) -> str:
    line = line_of_equation(equation)
    return "" if line is None else f" ({line})"


def _is_float(atom: Operand) -> bool:
    return jnp.issubdtype(atom.aval.dtype, jnp.floating)


def _is_narrow(atom: Operand) -> bool:
    return _is_float(atom) and atom.aval.dtype.itemsize < 4
