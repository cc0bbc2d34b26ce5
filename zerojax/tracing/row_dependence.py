"""The kinds of dependence that a traced value can have on the rows of a batch.

A value is one of: independent of the batch; **rows**, where each row of it depends on one row of
the batch; a **total**, the sum over all rows of something computed row by row; a **count**, an
input plus a total; **raised**, an input plus something that is other; or **other**. `batch_rows`
finds which.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence


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
    """An input plus something that is other; is_affine: as of `Other`."""

    input: int
    is_affine: bool = False


@dataclasses.dataclass(frozen=True)
class Other:
    """Anything else.

    is_ratio: whether it is a total divided by a total; is_product: whether it is a sum of terms one
    of which is a product of totals, times anything that is no row.
    is_affine: whether it is a sum of totals and of what is independent of the batch, as a mean plus
    a penalty on parameters is.
    scales: of a sum of totals and of what is independent of the batch, those of the totals.
    """

    is_ratio: bool = False
    is_product: bool = False
    is_affine: bool = False
    scales: tuple[float, ...] | None = dataclasses.field(default=None, compare=False)


Dependence = Fixed | Rows | Total | Count | Raised | Other

FIXED, OTHER, AFFINE = Fixed(), Other(), Other(is_affine=True)


def scales_of(one: Dependence) -> tuple[float, ...] | None:
    """The scale of each total that a value is the sum of; None where that is not known."""
    if isinstance(one, Fixed):
        return ()
    if isinstance(one, Total) and one.scale is not None:
        return (one.scale,)
    return one.scales if isinstance(one, Total | Other) else None


def is_affine(one: Dependence) -> bool:
    """Whether a value is a sum of totals and of what is independent of the batch, of one or more.

    Of pieces with equally many rows, a mean of such values is that of the whole batch.
    """
    return isinstance(one, Fixed | Total | Count) or getattr(one, "is_affine", False)


def join(several: Sequence[Dependence]) -> Dependence:
    """What a value is that is one of these, or computed element by element from them."""
    rest = [one for one in several if not isinstance(one, Fixed)]
    if not rest:
        return several[0] if len(set(several)) == 1 else FIXED
    if all(one == rest[0] for one in rest) and (
        len(rest) == len(several) or isinstance(rest[0], Rows)
    ):
        return plain(rest[0]) if len(rest) > 1 else rest[0]
    return AFFINE if all(map(is_affine, several)) else OTHER


def plain(one: Dependence) -> Dependence:
    """Without the input that a value is, and the scales of its terms: a loop may change them."""
    if isinstance(one, Raised):
        return AFFINE if one.is_affine else OTHER
    if isinstance(one, Total | Other):
        return dataclasses.replace(one, scales=None)
    return FIXED if isinstance(one, Fixed) else one
