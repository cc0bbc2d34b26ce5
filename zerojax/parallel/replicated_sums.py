"""Sums and maxima over mesh axes of values that every device holds whole.

The arrays are inside a region that is manual over these axes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from zerojax.plan.mesh import AUTO_AXES, DATA_AXES


def over_auto_axes(function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """`function` on the local shards of the axes that are still with the compiler."""
    remaining = set(AUTO_AXES) - set(jax.sharding.get_abstract_mesh().manual_axes)
    if not remaining:
        return function
    return jax.shard_map(
        function,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=remaining,
        check_vma=False,
    )


def sum_replicated(values: Any, over: tuple[str, ...] = DATA_AXES) -> Any:
    """Sums a tree of values that are whole on the compiler's axes over manual axes."""
    specs = jax.tree.map(lambda _: P(), values)
    return over_auto_axes(lambda tree: lax.psum(tree, over), (specs,), specs)(values)


def max_replicated(values: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The largest of each element over the data axes, by one collective for each dtype."""
    result = {}
    for dtype in dict.fromkeys(value.dtype for value in values.values()):
        result |= _max_of_one_dtype({n: x for n, x in values.items() if x.dtype == dtype})
    return {name: result[name] for name in values}


def _max_of_one_dtype(values: dict[str, jax.Array]) -> dict[str, jax.Array]:
    flat = jnp.concatenate([value.reshape(-1) for value in values.values()])
    flat = over_auto_axes(lambda x: lax.pmax(x, DATA_AXES), P(), P())(flat)
    result, start = {}, 0
    for name, value in values.items():
        piece = lax.slice_in_dim(flat, start, start + value.size)
        result[name] = piece.reshape(value.shape)
        start += value.size
    return result
