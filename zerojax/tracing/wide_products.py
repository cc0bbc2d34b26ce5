"""Products of a traced program that take float32 operands where the plan computes in 16 bits.

A step hands the model its weights in bfloat16 or float16. What the model does with them is its own:
an embedding that returns float32 (`flax.nnx.Embed` without `dtype` does) makes all that follows
float32, since a product of float32 with bfloat16 is one of float32. The numbers are right, but each
product then runs at the rate of float32 and keeps twice the bytes for the backward pass.
"""

from __future__ import annotations

import collections
import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from zerojax.operators.marks import read_name
from zerojax.tracing.dependence import SAME_NUMBERS, Follow, Marks, union
from zerojax.tracing.flops import PRODUCTS, products, without_waste
from zerojax.tracing.source_lines import line_of_equation


@dataclasses.dataclass(frozen=True)
class WideProducts:
    """Products that take float32 operands.

    Attributes:
      share: of the FLOPs of all products and convolutions of the program.
      cause: what made the operands float32 first, for most of these FLOPs; None where nothing
        did that can be named.
    """

    share: float
    cause: str | None


def find_wide_products(
    program: ClosedJaxpr, inputs: Mapping[int, str] | None = None
) -> WideProducts | None:
    """The products of a program both of whose operands are float32, or wider.

    Args:
      program: traced with reads of parameters marked (`jaxpr.mark_read`).
      inputs: {number of an input: its name}, for inputs that are float32 when the program starts.

    Returns:
      None where no product takes such operands.
    """
    needed = without_waste(program)
    follow = _Widened()
    marks = [follow.bit_of_input((inputs or {}).get(i)) for i in range(len(needed.invars))]
    follow.outputs(needed, marks)
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
    """Marks float32 values with what made them float32, and 16-bit ones that are a parameter."""

    def __init__(self) -> None:
        super().__init__(frozenset())
        self.wide: dict[int, Marks] = {}
        """id of each product of float32 operands -> the marks of these."""
        self._bits: dict[Any, int] = {}
        self._causes: list[str | None] = []

    def bit_of_input(self, name: str | None) -> Marks:
        return 0 if name is None else self._bit(("input", name), f"{name} is float32")

    def first_cause(self, marks: Marks) -> str | None:
        """Of several causes the one that the program meets first."""
        return self._causes[(marks & -marks).bit_length() - 1] if marks else None

    def _ends(self, equation: Any, given: list[Marks]) -> bool:
        return not equation.outvars

    def _leaf(self, equation: Any, given: list[Marks]) -> Marks:
        name, result = read_name(equation), equation.outvars[0]
        if name is not None:
            return self._bit(("read", name), None) if _is_narrow(result) else union(given)
        if not _is_float(result):
            return 0
        kind, narrow = equation.primitive.name, any(map(_is_narrow, equation.invars))
        if _is_narrow(result):
            kept = narrow and kind in SAME_NUMBERS
            return union(given) if kept else 0
        if kind in PRODUCTS and not any(map(_is_narrow, equation.invars[:2])):
            self.wide[id(equation)] = self.wide.get(id(equation), 0) | union(given)
        if not narrow:
            return union(given)
        if kind == "convert_element_type" and given[0]:
            return self._of_parameter(equation, given[0])
        return self._bit(id(equation), f"a value becomes float32{_at(equation)}")

    def _of_parameter(self, equation: Any, marks: Marks) -> Marks:
        """The mark of a parameter that is cast, which gets the line of its first cast."""
        for key, bit in self._bits.items():
            if marks >> bit & 1 and self._causes[bit] is None:
                self._causes[bit] = f"parameter {key[1]} is cast to float32{_at(equation)}"
        return marks

    def _bit(self, key: Any, cause: str | None) -> Marks:
        if key not in self._bits:
            self._bits[key] = len(self._causes)
            self._causes.append(cause)
        return 1 << self._bits[key]


def _at(equation: Any) -> str:
    line = line_of_equation(equation)
    return "" if line is None else f" ({line})"


def _is_float(atom: Any) -> bool:
    return jnp.issubdtype(atom.aval.dtype, jnp.floating)


def _is_narrow(atom: Any) -> bool:
    return _is_float(atom) and atom.aval.dtype.itemsize < 4
