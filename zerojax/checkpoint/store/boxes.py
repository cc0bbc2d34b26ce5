"""Boxes: rectangular parts of an array, and conversions from runs of consecutive elements."""

from __future__ import annotations

import math
from collections.abc import Iterator

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]
"""(index of a box's first element in each dimension, its sizes)."""


def boxes_of_run(shape: Shape, first: int, count: int) -> Iterator[Box]:
    """Yields, in order, the boxes that cover elements `first` to `first + count` (exclusive) of an
    array.

    Elements are counted in C order. There are at most two boxes for each dimension but the last,
    plus one box.

    >>> list(boxes_of_run((4, 10), 5, 20))
    [((0, 5), (1, 5)), ((1, 0), (1, 10)), ((2, 0), (1, 5))]
    """
    if not shape:
        if count:
            yield (), ()
        return
    row = math.prod(shape[1:])
    end = first + count
    start, inside = divmod(first, row)
    if count and (inside or count < row):
        stop = min(end, (start + 1) * row)
        for at, size in boxes_of_run(shape[1:], inside, stop - first):
            yield (start, *at), (1, *size)
        first, start = stop, start + 1
    whole = (end - first) // row
    if whole:
        yield (start, *(0 for _ in shape[1:])), (whole, *shape[1:])
        first, start = first + whole * row, start + whole
    if first < end:
        for at, size in boxes_of_run(shape[1:], 0, end - first):
            yield (start, *at), (1, *size)


def overlap(box: Box, other: Box) -> Box | None:
    """Returns the intersection of two boxes of one array, or None if it is empty.

    >>> overlap(((0, 5), (2, 5)), ((1, 0), (4, 7)))
    ((1, 5), (1, 2))
    """
    starts = tuple(max(a, b) for a, b in zip(box[0], other[0], strict=True))
    ends = (
        min(a + m, b + n) for a, m, b, n in zip(box[0], box[1], other[0], other[1], strict=True)
    )
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return None if any(size <= 0 for size in sizes) else (starts, sizes)


def box_of(index: tuple[slice, ...], shape: Shape) -> Box:
    """Converts an index (a tuple of slices) into an array of shape `shape` to a box.

    >>> box_of((slice(2, 4), slice(None)), (4, 10))
    ((2, 0), (2, 10))
    """
    ranges = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    return tuple(low for low, _ in ranges), tuple(high - low for low, high in ranges)


def slices_of(box: Box, origin: Shape) -> tuple[slice, ...]:
    """Returns the slices that select a box from a part of the array that starts at `origin`."""
    return tuple(
        slice(at - zero, at - zero + size)
        for at, size, zero in zip(box[0], box[1], origin, strict=True)
    )


def parts_of_run(
    block: Box, run: tuple[int, int], rows: tuple[int, ...] | None, wanted: Box
) -> Iterator[tuple[int, Shape, tuple[slice, ...], Box]]:
    """Yields the parts of the box `wanted` whose values are in one run of a block's elements.

    A block is a stored rectangular part of an array. A run is a sequence of its elements in C
    order.

    Args:
      block: (index of the block's first element in the stored array, shape of the block).
      run: (index of the run's first element in the block, number of elements).
      rows: row in the array for each stored row, -1 for padding; None if rows were stored in the
        order of the array.
      wanted: requested part of the array.

    Yields:
      (number of run elements before a box, shape of the box, index of the values inside the box,
      box of the array with these values).
    """
    (start, shape), before = block, 0
    if not run[1]:
        return
    for at, size in boxes_of_run(shape, *run):
        begin = tuple(a + b for a, b in zip(at, start, strict=True))
        for stored, array in _rows_of_array((begin, size), rows):
            common = overlap(array, wanted)
            if common is not None:
                # From rows of the array to stored rows.
                moved = zip(stored[0], common[0], array[0], strict=True)
                place = tuple(row + part - whole for row, part, whole in moved), common[1]
                yield before, size, slices_of(place, begin), common
        before += math.prod(size)


def _rows_of_array(box: Box, rows: tuple[int, ...] | None) -> Iterator[tuple[Box, Box]]:
    """Yields (rows of the stored box, the same rows as a box of the array) for each stretch of
    consecutive rows, without padding."""
    if rows is None:
        yield box, box
        return
    (first, *start), (count, *size) = box
    for row in range(first, first + count):
        if rows[row] >= 0:
            yield ((row, *start), (1, *size)), ((rows[row], *start), (1, *size))
