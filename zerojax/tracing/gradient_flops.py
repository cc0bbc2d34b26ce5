"""Counts the products of a backward pass that frozen parameters make unnecessary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

from zerojax.tracing.dependence import Follow, Marks, union
from zerojax.tracing.flops import PRODUCTS, products, without_waste


def flops_without_gradient(program: ClosedJaxpr, is_trained: Sequence[bool]) -> float:
    """Returns the FLOPs of products that the backward pass of a forward pass does not compute.

    A product y = x w has two more in a backward pass, one for the gradient of each operand. An
    operand that depends on no trained parameter has no gradient.

    Args:
      program: traced forward pass.
      is_trained: of each input, whether it is a trained parameter.
    """
    needed = without_waste(program)
    operands = _Operands()
    operands.outputs(needed, [int(trained) for trained in is_trained])
    without = lambda equation: operands.found.get(id(equation), [0, 0]).count(0)  # noqa: E731
    return float(sum(flops * without(equation) for equation, flops in products(needed)))


class _Operands(Follow):
    """Records the marks of the two operands of each product.

    Attributes:
      found: {id of the equation: marks of its operands, 1 for a trained parameter}.
    """

    def __init__(self) -> None:
        super().__init__(frozenset())
        self.found: dict[int, list[Marks]] = {}

    def _leaf(self, equation: Any, operands: list[Marks]) -> Marks:
        if equation.primitive.name in PRODUCTS:
            earlier = self.found.get(id(equation), [0, 0])
            # A loop's body is visited until its carry gains no more marks.
            self.found[id(equation)] = [a | b for a, b in zip(earlier, operands[:2], strict=True)]
        return union(operands)
