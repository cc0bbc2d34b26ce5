"""Kinds of dependence of a traced value on the rows of a batch.

A value is one of: independent of the batch (fixed); **rows**, whose each row depends on one row of
the batch; a **total**, the sum over all rows of a value computed row by row; a **count**, an input
plus a total; **raised**, an input plus a value that is other; or **other**. `batch_rows` determines
the kind.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Value that does not depend on the batch.

    Attributes:
      input: position of the input of the program that it equals, or None.
    """

    input: int | None = None


@dataclasses.dataclass(frozen=True)
class Rows:
    """Value with the rows of the batch, in order, along dimension `dim`.

    Each row has equally many places.
    """

    dim: int


@dataclasses.dataclass(frozen=True)
class Total:
    """Sum over the rows of the batch, times `scale`.

    Attributes:
      scale: constant factor; None if it is not a constant of the program.
      is_scaled: whether it was multiplied or divided by anything.
      divisors: the numbers that it was divided by, and the products of any of them. A mean with a
        factor, as in `2 * jnp.mean(x)`, is recognised by them.
      num_added: number of elements in the sum of each element; None if not known.
      scales: scales of its terms, if it has no single scale; None if not known.
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
          num_rows: of the batch.
          weight: divisor of the value later on, if known.
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
        """Returns whether its only divisor is the number of rows, or of elements, that it sums.

        Args:
          num_rows: of the batch.
          weight: divisor of the value later on.
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
    """Program input plus a `Total`, as in a counter."""

    input: int
    total: Total


@dataclasses.dataclass(frozen=True)
class Raised:
    """Program input plus an `Other` value; for `is_affine` see `Other`."""

    input: int
    is_affine: bool = False


@dataclasses.dataclass(frozen=True)
class Other:
    """Value with any other dependence.

    Attributes:
      is_ratio: whether it is a total divided by a total.
      is_product: whether it is a sum in which a term is a product of totals, times anything but
        rows.
      is_affine: whether it is a sum of totals and of values that are independent of the batch, such
        as a mean plus a penalty on parameters.
      scales: scales of the totals in such a sum; None if not known.
    """

    is_ratio: bool = False
    is_product: bool = False
    is_affine: bool = False
    scales: tuple[float, ...] | None = dataclasses.field(default=None, compare=False)


Dependence = Fixed | Rows | Total | Count | Raised | Other

FIXED, OTHER, AFFINE = Fixed(), Other(), Other(is_affine=True)


def scales_of(value: Dependence) -> tuple[float, ...] | None:
    """Returns the scale of each total in a sum; None if not known."""
    if isinstance(value, Fixed):
        return ()
    if isinstance(value, Total) and value.scale is not None:
        return (value.scale,)
    return value.scales if isinstance(value, Total | Other) else None


def is_affine(value: Dependence) -> bool:
    """Returns whether a value is a sum of totals and of values that are independent of the batch.

    The mean of such values over pieces with equally many rows is the value of the whole batch.
    """
    return isinstance(value, Fixed | Total | Count) or getattr(value, "is_affine", False)


def join(several: Sequence[Dependence]) -> Dependence:
    """Returns the dependence of a value that is computed elementwise from several values."""
    rest = [value for value in several if not isinstance(value, Fixed)]
    if not rest:
        return several[0] if len(set(several)) == 1 else FIXED
    if all(value == rest[0] for value in rest) and (
        len(rest) == len(several) or isinstance(rest[0], Rows)
    ):
        return plain(rest[0]) if len(rest) > 1 else rest[0]
    return AFFINE if all(map(is_affine, several)) else OTHER


def plain(value: Dependence) -> Dependence:
    """Drops `input` and `scales` of a dependence, which may differ between loop iterations."""
    if isinstance(value, Raised):
        return AFFINE if value.is_affine else OTHER
    if isinstance(value, Total | Other):
        return dataclasses.replace(value, scales=None)
    return FIXED if isinstance(value, Fixed) else value
