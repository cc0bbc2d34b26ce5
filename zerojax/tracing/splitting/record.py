"""Defines the records of a traversal over a program: dimensions, sums, uses of weights,
obstacles.
"""

from __future__ import annotations

import math
from typing import Any

from zerojax.config.late_dataclasses import dataclass
from zerojax.operators.equations import Operand
from zerojax.tracing.splitting.factors import Dim, Dims, Factors

NOT_OF_WEIGHTS = None
"""`Value.weights` of a value that depends on the batch."""


@dataclass(frozen=True)
class Value:
    """Value of a traced program, with its dimensions.

    Attributes:
      dims: dimensions of the value.
      weights: names of the parameters from which the value is computed; None if it also depends on
        the batch.
      total: number, in `Record.totals`, of the sum (or addition of sums) whose result the value is;
        None: no sum.
    """

    dims: Dims
    weights: frozenset[str] | None = NOT_OF_WEIGHTS
    total: int | None = None


@dataclass(frozen=True, kw_only=True)
class Sum:
    """An operation whose result lacks a dimension of its operands.

    If that dimension is split over devices, each device computes a part of the sum, and an
    all-reduce follows.

    Attributes:
      kind: "product", "lookup" or "reduction".
      over: dimensions that the result lacks.
      num_bytes: bytes of the result of one run.
      times: number of times that the operation runs.
      weights: parameters from which an operand is computed.
      is_matrix: whether the operation is a product of two activations whose result has a dimension
        from each, such as the scores of attention.
    """

    kind: str
    over: Dims
    num_bytes: int
    times: float
    weights: frozenset[str] = frozenset()
    is_matrix: bool = False


@dataclass(frozen=True, kw_only=True)
class WeightUse:
    """A matrix product, convolution or lookup with parameters.

    Attributes:
      weights: names of the parameters.
      free: dimensions of the parameters that the result has.
      contracted: dimensions that are summed over.
      looked_up: dimensions along which rows are looked up.
      by_batch: whether the batch decides which rows are looked up.
    """

    weights: frozenset[str]
    free: Dims
    contracted: Dims = ()
    looked_up: Dims = ()
    by_batch: bool = True


class Record:
    """All facts found by a traversal of one program; equal factors are resolved afterwards.

    `totals` contains sums. It also contains additions of two sums, as a pair of their numbers,
    because the compiler may add parts before it all-reduces them.
    """

    def __init__(self) -> None:
        self.factors = Factors()
        self.totals: list[Sum | tuple[int, int]] = []
        self.uses: list[WeightUse] = []
        self.obstacles: list[tuple[Dim, str]] = []
        self.links: list[tuple[Dim, Dim]] = []
        self.seen: dict[Dims, None] = {}
        self.times: float = 1.0

    def unify(self, first: Dim, second: Dim) -> None:
        """Records that two dimensions are equal; if their factors do not nest, neither can be
        split.
        """
        if self.factors.total(first) != self.factors.total(second):
            return  # one of them is 1: broadcast
        if not self.factors.unify(first, second):
            self.block(first, "is cut in two ways that do not nest")
            self.block(second, "is cut in two ways that do not nest")

    def block(self, dim: Dim, why: str) -> None:
        """Records why a dimension cannot be split without moving values between devices."""
        if dim:
            self.obstacles.append((dim, why))

    def cut_from(self, dim: Dim, size: int, why: str) -> Dim:
        """Returns a new dimension, a part (or concatenation) of an old one; neither can be
        split.
        """
        made = self.factors.new_dim(size)
        self.block(dim, why)
        self.block(made, why)
        if dim and made:
            self.links.append((dim, made))
        return made

    def add_sum(self, kind: str, over: Dims, result: Operand, **more: Any) -> None:
        """Records a sum; `result` is the variable of the sum."""
        over = tuple(dim for dim in over if dim)
        if over:
            size = math.prod(result.aval.shape) * result.aval.dtype.itemsize
            self.totals.append(Sum(kind=kind, over=over, num_bytes=size, times=self.times, **more))
