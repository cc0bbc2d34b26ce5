"""Represents dimensions of traced values as products of factors, and records which factors are
equal.

A dimension is a tuple of factors, outermost first, whose sizes multiply to its size; a dimension of
size 1 is the empty tuple. A reshape that splits `heads * features` into two dimensions splits a
factor into two, for every value that has the factor. An operation that pairs two dimensions, such
as an addition, makes their factors equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Dim = tuple[int, ...]
"""Factors of one dimension, outermost first."""
Dims = tuple[Dim, ...]
"""The dimensions of one value."""


class Factors:
    """Union-find structure of dimension factors; a factor can also be split into two."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._parents: list[int] = []
        self._parts: dict[int, tuple[int, int]] = {}

    def new_dim(self, size: int) -> Dim:
        """Returns a new dimension of this size, which is not (yet) equal to any other dimension."""
        return () if size == 1 else (self._new(size),)

    def new_dims(self, shape: Sequence[int]) -> Dims:
        """Returns new dimensions of these sizes, which are not (yet) equal to any other
        dimension.
        """
        return tuple(map(self.new_dim, shape))

    def size(self, factor: int) -> int:
        """Returns the size of a factor."""
        return self._sizes[factor]

    def leaves(self, dim: Iterable[int]) -> Dim:
        """Returns the factors of a dimension after all splits and merges recorded so far."""
        found: list[int] = []
        for factor in dim:
            root = self._root(factor)
            parts = self._parts.get(root)
            found += [root] if parts is None else self.leaves(parts)
        return tuple(found)

    def unify(self, first: Dim, second: Dim) -> bool:
        """Records that two dimensions of equal size are the same dimension.

        Returns:
          Whether this is possible: the factors have to nest. 6 = 2 x 3 and 6 = 3 x 2 do not, and
          stay separate.
        """
        left, right = [*self.leaves(first)], [*self.leaves(second)]
        while left and right:
            a, b = self.size(left[0]), self.size(right[0])
            if a == b:
                self._join(left.pop(0), right.pop(0))
            elif a % b == 0:
                self._cut(left[0], b)
            elif b % a == 0:
                self._cut(right[0], a)
            else:
                return False
            # A join or a cut may have changed factors of both sides.
            left, right = [*self.leaves(left)], [*self.leaves(right)]
        return not left and not right

    def reshape(self, dims: Dims, shape: Sequence[int]) -> Dims | None:
        """Returns the dimensions of a reshaped value; None if the factors do not nest."""
        left = [*self.leaves(factor for dim in dims for factor in dim)]
        result: list[Dim] = []
        for size in shape:
            taken: list[int] = []
            while size > 1 and left:
                first = self.size(left[0])
                if size % first == 0:
                    taken.append(left.pop(0))
                    size //= first
                elif first % size == 0:
                    self._cut(left[0], size)
                    left = [*self.leaves(left)]
                else:
                    return None
            if size != 1:
                return None
            result.append(tuple(taken))
        return tuple(result)

    def total(self, dim: Dim) -> int:
        """Returns the size of a dimension."""
        return math.prod(map(self.size, dim))

    def _new(self, size: int) -> int:
        self._sizes.append(size)
        self._parents.append(len(self._parents))
        return len(self._parents) - 1

    def _root(self, factor: int) -> int:
        while self._parents[factor] != factor:
            # Shortens the way, so that later searches are fast.
            self._parents[factor] = self._parents[self._parents[factor]]
            factor = self._parents[factor]
        return factor

    def _join(self, first: int, second: int) -> None:
        """Records that two uncut factors of equal size are the same."""
        self._parents[self._root(second)] = self._root(first)

    def _cut(self, leaf: int, outer: int) -> None:
        """Splits a factor into one of size `outer` and the remaining factor."""
        root = self._root(leaf)
        self._parts[root] = (self._new(outer), self._new(self._sizes[root] // outer))
