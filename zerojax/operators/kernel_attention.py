"""Attention by zerojax's own kernels for Hopper: with packed texts, positions and block layouts.

The kernels are `pallas_kernels.attention`. A layout becomes blocks of 16 tokens, and only those
that are seen are computed.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import attention as kernels
from zerojax.operators.chunked_attention import KEPT, Visibility
from zerojax.operators.sparse_layouts import BlockTable

KERNEL_BLOCK = 16
"""Tokens of a block of the kernels' tables."""
Pair = tuple[jax.Array, jax.Array]


def obstacle(
    query: jax.Array,
    key: jax.Array,
    table: BlockTable | None,
    *,
    capability: float | None,
    split: int,
) -> str | None:
    """Why the kernels cannot compute this; None if they can.

    Args:
      query, key, table: of a call of `zerojax.attention`.
      capability: compute capability of the GPU; None: not known.
      split: over how many devices the heads are split.
    """

    if (found := kernels.why_not(query, key, capability=capability)) is not None:
        return found
    if key.shape[2] % split:
        return f"their {key.shape[2]} key/value heads cannot be split over {split} devices"
    if table is None:
        return None
    if table.block % KERNEL_BLOCK:
        return f"they take layouts of blocks of 16 tokens or a multiple, not of {table.block}"
    if split > 1 and len(table.seen) > 1:
        return f"each head has a layout of its own, and heads are split over {split} devices"
    return None


def kernel_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    rows: dict[str, Pair],
    *,
    visibility: Visibility,
    scale: float,
    table: BlockTable | None,
) -> jax.Array:
    """Softmax attention by the kernels; lowers for CUDA alone.

    A program that the compiler would cut cannot hold it: it is called where every mesh axis that
    splits its operands is manual. First derivatives in reverse mode only.

    Args:
      query: [batch, queries, heads, head_dim], bfloat16 or float16.
      key, value: [batch, keys, kv_heads, head_dim].
      rows: "segments" and "positions", as far as they are given; see `chunked_attention`.
      visibility, scale, table: see there.

    Returns:
      [batch, queries, heads, head_dim] in the dtype of `query`.
    """
    return _attend(_Options(visibility, scale, table), query, key, value, rows)


@dataclasses.dataclass(frozen=True)
class _Options:
    visibility: Visibility
    scale: float
    table: BlockTable | None

    def of(self, queries: int, keys: int) -> dict[str, Any]:
        """What the kernels take."""
        layout = None
        if self.table is not None:
            times = self.table.block // KERNEL_BLOCK
            layout = self.table.seen.repeat(times, 1).repeat(times, 2)
            layout = layout[:, : -(-queries // KERNEL_BLOCK), : -(-keys // KERNEL_BLOCK)]
        causal, window = self.visibility.causal, self.visibility.window
        return {
            "seen": kernels.Seen(causal=causal, window=window, layout=layout),
            "scale": self.scale,
        }


def part_forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    rows: dict[str, Any],
    *,
    visibility: Visibility,
    scale: float,
    table: BlockTable | None,
) -> tuple[jax.Array, jax.Array]:
    """(out, log-sum-exp of the scores, float32 [batch, queries, heads]), without a derivative."""
    return _part(_Options(visibility, scale, table), query, key, value, rows)


def part_backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    rows: dict[str, Any],
    *,
    log_sum: jax.Array,
    turned: jax.Array,
    slope: jax.Array,
    visibility: Visibility,
    scale: float,
    table: BlockTable | None,
) -> tuple[jax.Array, ...]:
    """Float32 gradients of query, key and value; see `chunked_attention.part_backward`."""
    options = _Options(visibility, scale, table)
    return kernels.part_gradients(
        *(query, key, value),
        log_sum=log_sum,
        turned=turned,
        slope=slope,
        **options.of(query.shape[1], key.shape[1]),
        **rows,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: _Options, query: Any, key: Any, value: Any, rows: Any) -> jax.Array:
    return _part(options, query, key, value, rows)[0]


def _forward(options: _Options, query: Any, key: Any, value: Any, rows: Any) -> Any:
    out, log_sum = checkpoint_name(_part(options, query, key, value, rows), KEPT)
    return out, (query, key, value, rows, out, log_sum)


def _backward(options: _Options, kept: Any, slope: jax.Array) -> Any:
    query, key, value, rows, out, log_sum = kept
    turned = jnp.sum(slope.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    found = kernels.part_gradients(
        *(query, key, value),
        log_sum=log_sum,
        turned=turned,
        slope=slope,
        **options.of(query.shape[1], key.shape[1]),
        **rows,
    )
    return *(x.astype(y.dtype) for x, y in zip(found, (query, key, value), strict=True)), None


_attend.defvjp(_forward, _backward)


def _part(options: _Options, query: Any, key: Any, value: Any, rows: Any) -> tuple[Any, Any]:
    found = kernels.attention_part(
        query, key, value, **options.of(query.shape[1], key.shape[1]), **rows
    )
    return tuple(found)
