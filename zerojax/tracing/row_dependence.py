"""Defines the kinds of dependence of a traced value on the rows of a batch.

A value has one of these kinds. **Fixed**: independent of the batch. **Rows**: each row of the value
depends on one row of the batch. **Total**: the sum over all rows of a value computed row by row.
**Count**: an input plus a total. **Raised**: an input plus a value of the kind other. **Other**:
any other dependence. `batch_rows` determines the kind.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from zerojax.config.late_dataclasses import dataclass


@dataclass(frozen=True)
class Fixed:
    """Value that does not depend on the batch.

    Attributes:
      input: position of the program input that the value equals; None if it equals no input.
    """

    input: int | None = None


@dataclass(frozen=True)
class Rows:
    """Value with the rows of the batch, in order, along dimension `dim`.

    Every row has the same size.
    """

    dim: int


@dataclass(frozen=True)
class Total:
    """Sum over the rows of the batch, times `scale`.

    Attributes:
      scale: constant factor of the sum; None if the factor is not a constant of the program.
      is_scaled: whether the sum was multiplied or divided by any value.
      divisors: numbers by which the sum was divided, and all products of them. They allow to
        recognise a mean with a factor, such as `2 * jnp.mean(x)`.
      num_added: number of elements that were added to get one element; None if unknown.
      scales: scales of the terms, if there is no single scale; None if unknown.
    """

    scale: float | None = 1.0
    is_scaled: bool = False
    divisors: frozenset[float] = frozenset()
    num_added: int | None = dataclasses.field(default=None, compare=False)
    scales: tuple[float, ...] | None = dataclasses.field(default=None, compare=False)

    def is_sum(self, num_rows: int, weight: float | None = None) -> bool:
        """Returns whether this value is certainly not a mean over `num_rows` rows.

        A mean over rows and any other dimensions divides by a multiple of the number of rows.

        Args:
          num_rows: number of rows of the batch.
          weight: number by which the value is divided later; None if unknown.
        """
        if self.scale is None or self.scale == 0:
            return False
        if num_rows == 1:  # only a division shows that it is a mean; a weight of 1 does not
            return not self.is_scaled and weight is None
        divisors = {*self.divisors}
        if weight is not None:
            divisors |= {abs(weight), *(abs(weight) * other for other in self.divisors)}
        return not any(_counts_rows(number, num_rows) for number in divisors)

    def is_plain_mean(self, num_rows: int, weight: float = 1.0) -> bool:
        """Returns whether the only divisor of the sum is its number of rows, or of added elements.

        Args:
          num_rows: number of rows of the batch.
          weight: number by which the value is divided later.
        """
        if not self.scale:
            return False
        divisor, counts = abs(weight / self.scale), [num_rows, self.num_added or num_rows]
        return any(math.isclose(divisor, count, rel_tol=1e-2) for count in counts)


def _counts_rows(number: float, num_rows: int) -> bool:
    multiple = round(number / num_rows)
    return multiple >= 1 and math.isclose(number, multiple * num_rows, rel_tol=1e-2)


@dataclass(frozen=True)
class Count:
    """Program input plus a `Total` (sum over all rows of the batch), such as a counter of
    tokens.
    """

    input: int
    total: Total


@dataclass(frozen=True)
class Raised:
    """Program input plus an `Other` value (one that depends on the batch in another way than as a
    sum).

    Attributes:
      input: position of the program input.
      is_affine: whether the added value is affine (see `Other.is_affine`).
    """

    input: int
    is_affine: bool = False


@dataclass(frozen=True)
class Other:
    """Value whose dependence on the rows of the batch has no other kind.

    Attributes:
      is_ratio: whether the value is a total (sum over all rows of the batch) divided by a total.
      is_product: whether the value is a sum in which a term is a product of totals (times any value
        without rows).
      is_affine: whether the value is a sum of totals and of values that are independent of the
        batch, such as a mean plus a penalty on parameters.
      scales: scales of the totals in such a sum; None if unknown.
    """

    is_ratio: bool = False
    is_product: bool = False
    is_affine: bool = False
    scales: tuple[float, ...] | None = dataclasses.field(default=None, compare=False)


Dependence = Fixed | Rows | Total | Count | Raised | Other

FIXED, OTHER, AFFINE = Fixed(), Other(), Other(is_affine=True)


def scales_of(value: Dependence) -> tuple[float, ...] | None:
    """Returns the scale of each total in a sum; None if unknown."""
    if isinstance(value, Fixed):
        return ()
    if isinstance(value, Total) and value.scale is not None:
        return (value.scale,)
    return value.scales if isinstance(value, Total | Other) else None


def is_affine(value: Dependence) -> bool:
    """Returns whether a value is a sum of totals and of values that are independent of the batch.

    If a batch is divided into parts with equal numbers of rows, the mean of such a value over the
    parts is its value for the whole batch.
    """
    return isinstance(value, Fixed | Total | Count) or getattr(value, "is_affine", False)


def join(several: Sequence[Dependence]) -> Dependence:
    """Returns the dependence of a value that is computed elementwise from several values."""
    rest = [value for value in several if not isinstance(value, Fixed)]
    if not rest:
        return several[0] if len(set(several)) == 1 else FIXED
    # A value for each row may be combined with fixed ones, but a total and a fixed term give no
    # total.
    if all(value == rest[0] for value in rest) and (
        len(rest) == len(several) or isinstance(rest[0], Rows)
    ):
        # `==` ignores the field `scales`, so equal values may differ in it.
        return plain(rest[0]) if len(rest) > 1 else rest[0]
    return AFFINE if all(map(is_affine, several)) else OTHER


def plain(value: Dependence) -> Dependence:
    """Removes `scales`, and the `input` of `Fixed` and `Raised`, because they may differ between
    loop iterations. `Raised` becomes `AFFINE` or `OTHER`.
    """
    if isinstance(value, Raised):
        return AFFINE if value.is_affine else OTHER
    if isinstance(value, Total | Other):
        return dataclasses.replace(value, scales=None)
    return FIXED if isinstance(value, Fixed) else value
