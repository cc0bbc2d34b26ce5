"""Proposes other bucket sizes for a plan: sizes that change which parameters share a collective.

It does not know which size is faster; the caller has to measure.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator

from zerojax.placement.decisions import Decisions
from zerojax.tracing.trees import num_elements
from zerojax.transport.collectives import make_buckets

SMALLEST_BUCKET = 1_000_000
"""Smallest proposed bucket, in elements: a smaller collective takes as long as an empty one."""
PARTS = (2, 4, 8)
"""Proposed numbers of buckets (collectives) into which the parameters of one layer are divided."""
FACTOR = 4
"""Factor by which the buckets of once-per-step collectives are made smaller or larger."""
REDUCE, GATHER = "reduce_bucket_size", "allgather_bucket_size"
OPTIONS = (REDUCE, GATHER)
ONCE = {
    REDUCE: lambda access: access.has_whole_gradient,
    GATHER: lambda access: access.gathers_once,
}
"""{bucket option: whether the once-per-step collectives of a parameter with an access have this
bucket size}.
"""


def other_bucket_sizes(plan: Decisions) -> list[tuple[str, int]]:
    """Returns [(bucket option, elements)] that would change which parameters share a collective.

    There are two kinds of candidates:
    - smaller buckets that divide one layer's parameters into several all-gathers or
      reduce-scatters: the compiler can overlap one of them with the matrix products of another;
    - for once-per-step collectives, smaller buckets (one can be sent while others are computed) or
      larger ones (fewer collectives are started).
    """
    return list(dict.fromkeys([*_parts_of_a_layer(plan), *_once_per_step(plan)]))


def _parts_of_a_layer(plan: Decisions) -> Iterator[tuple[str, int]]:
    option = GATHER if plan.zero == 3 else REDUCE
    limit, largest = getattr(plan.settings, option), elements_of_a_layer(plan)
    for parts in PARTS:
        size = largest // parts
        if SMALLEST_BUCKET <= size < min(limit, largest):
            yield option, size


def _once_per_step(plan: Decisions) -> Iterator[tuple[str, int]]:
    for option in OPTIONS:
        limit = getattr(plan.settings, option)
        for size in (limit // FACTOR, limit * FACTOR):
            if size >= SMALLEST_BUCKET and _once(plan, option, size) != _once(plan, option, limit):
                yield option, size


def _once(plan: Decisions, option: str, size: int) -> list[list[str]]:
    leaves = plan.placement.leaves
    elements = {n: num_elements(x.shape) for n, x in leaves.items() if ONCE[option](x.access)}
    return make_buckets(elements, size)


def elements_of_a_layer(plan: Decisions) -> int:
    """Returns the number of elements of one layer of the largest loop with collectives inside it.

    Collectives are all-gathers of weights or reduce-scatters of gradients; without such a loop the
    result is 0. Arrays with the same number of layers are assumed to belong to the same loop.
    """
    layer: collections.Counter[int] = collections.Counter()
    for leaf in plan.placement.leaves.values():
        in_tiles = leaf.name in plan.tiles.cut
        if leaf.access.scatters_early and leaf.num_slices > 1 and not in_tiles:
            layer[leaf.num_slices] += num_elements(leaf.shape) // leaf.num_slices
    return max(layer.values(), default=0)
