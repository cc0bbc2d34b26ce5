"""Looks up rows of a table that is sharded by columns, without gathering the table.

Each device sends the row ids that it needs to all other devices. From each device it receives that
device's columns of these rows. The backward pass sends the rows' gradients back the same way, and
each device sums those of its own columns. The communicated size depends only on the number of ids.
Equal ids load all devices equally; if the table were sharded by rows, they would load the device of
that row.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from zerojax.config.late_dataclasses import dataclass
from zerojax.operators.marks import LINEAR_RULE


@dataclass(frozen=True)
class OwnedTable:
    """A table [rows, width] sharded by columns: a static, hashable value for traced programs.

    Attributes:
      rows, width: numbers of rows and columns of the unsharded table; the number of devices divides
        `width`.
      over: mesh axes over which the columns are sharded, outermost first; manual where it is used.
      compute_dtype: name of the dtype in which rows are sent.
      reduce_dtype: name of the dtype in which gradients of rows are sent.
    """

    rows: int
    width: int
    over: tuple[str, ...]
    compute_dtype: str
    reduce_dtype: str


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def look_up(table: OwnedTable, shard: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns rows of a table; supports first derivatives in reverse mode.

    Args:
      shard: this device's columns, [rows, width / shards].
      ids: numbers of rows, int32 [T], with the same T on each device. An id out of range reads the
        nearest row, and its gradient is dropped.

    Returns:
      The rows, [T, width], in `compute_dtype`. The gradient of `shard` is summed over all ids of
      all devices in float32 or wider, and has the dtype of `shard`.
    """
    return _forward(table, shard, ids)[0]


def _forward(
    table: OwnedTable, shard: jax.Array, ids: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    with jax.named_scope("lookup"):
        asked = lax.all_gather(ids, table.over, tiled=True)
        found = shard.at[jnp.clip(asked, 0, table.rows - 1)].get(mode="promise_in_bounds")
        found = found.astype(table.compute_dtype)
        rows = lax.all_to_all(found, table.over, split_axis=0, concat_axis=1, tiled=True)
        rows = checkpoint_name(rows, LINEAR_RULE)
    return rows, (asked, jnp.zeros((), shard.dtype))


def _backward(
    table: OwnedTable, kept: tuple[jax.Array, jax.Array], slope: jax.Array
) -> tuple[jax.Array, np.ndarray]:
    asked, like = kept
    with jax.named_scope("lookup"):
        slopes = slope.astype(table.reduce_dtype)
        slopes = lax.all_to_all(slopes, table.over, split_axis=1, concat_axis=0, tiled=True)
        wide = jnp.promote_types(slopes.dtype, jnp.float32)
        # Without the clip a negative index would count from the end.
        place = jnp.where(asked < 0, table.rows, asked)
        total = jnp.zeros((table.rows, slopes.shape[1]), wide)
        total = total.at[place].add(slopes.astype(wide), mode="drop")
    return total.astype(like.dtype), np.zeros(slope.shape[:1], jax.dtypes.float0)


look_up.defvjp(_forward, _backward)


def in_32_bits(ids: jax.Array, rows: int) -> jax.Array:
    """Converts ids to int32; ids below 0 become -1, ids of `rows` or more become `rows`.

    Args:
      ids: integers of any dtype.
    """
    bits, signed = jnp.iinfo(ids.dtype).bits, jnp.issubdtype(ids.dtype, jnp.signedinteger)
    if bits >= 32:
        ids = jnp.clip(ids, -1, rows) if signed else jnp.minimum(ids, rows)
    return jnp.clip(ids.astype(jnp.int32), -1, rows)


def take_rows(
    table: OwnedTable,
    shard: jax.Array,
    ids: jax.Array,
    *,
    mode: str | None,
    fill: ArrayLike | None,
    casts: Sequence[Any] = (),
) -> jax.Array:
    """Looks up rows like a `gather` on the unsharded table in `compute_dtype`: returns [...,
    width].

    Args:
      shard: this device's columns, [rows, width / shards].
      ids: numbers of rows, integers [...].
      mode: `jax.lax.GatherScatterMode`, the treatment of ids out of range. FILL_OR_DROP returns
        `fill`; CLIP reads the nearest row, also in the backward pass; PROMISE_IN_BOUNDS reads the
        nearest row and drops its gradient, as XLA does.
      fill: value for ids out of range with FILL_OR_DROP; None: NaN.
      casts: dtypes to which the table is cast before the lookup, one after the other.
    """
    modes = lax.GatherScatterMode
    flat = in_32_bits(ids.reshape(-1), table.rows)
    if mode == modes.CLIP:
        flat = jnp.clip(flat, 0, table.rows - 1)
    rows = look_up(table, shard, flat)
    for dtype in casts:
        rows = rows.astype(dtype)
    if mode == modes.FILL_OR_DROP:
        known = (flat >= 0) & (flat < table.rows)
        rows = jnp.where(known[:, None], rows, jnp.nan if fill is None else fill)
    return rows.reshape(*ids.shape, table.width)
