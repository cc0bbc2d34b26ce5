"""Attention by zerojax's own kernels for Hopper: with packed texts, positions and block layouts.

The kernels are in `pallas_kernels.attention`. A layout is converted to blocks of 16 tokens, and
only the visible blocks are computed.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import attention as kernels
from zerojax.config.late_dataclasses import dataclass
from zerojax.operators.chunked_attention import KEPT, Visibility
from zerojax.operators.sparse_layouts import BlockTable

KERNEL_BLOCK = 16
"""Number of tokens of a block in the kernels' tables."""
Pair = tuple[jax.Array, jax.Array]


def obstacle(
    query: jax.Array,
    key: jax.Array,
    table: BlockTable | None,
    *,
    capability: float | None,
    split: int,
) -> str | None:
    """Returns the reason why the kernels do not support a call; None if they do.

    Args:
      query, key: arrays of a call of `zerojax.attention`.
      table: block table of the layout, if any.
      capability: compute capability of the GPU; None if unknown.
      split: number of devices over which the heads are split.
    """

    if (reason := kernels.why_not(query, key, capability=capability)) is not None:
        return reason
    if key.shape[2] % split:
        return f"the {key.shape[2]} key/value heads cannot be split over {split} devices"
    if table is None:
        return None
    if table.block % KERNEL_BLOCK:
        return f"the kernels need layout blocks of a multiple of 16 tokens, not of {table.block}"
    if split > 1 and len(table.seen) > 1:
        return f"each head has its own layout, but heads are split over {split} devices"
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
    """Computes softmax attention by the kernels; lowers only for CUDA.

    The compiler cannot partition the kernel call, so every mesh axis that splits its operands must
    be manual. Has only first derivatives in reverse mode.

    Args:
      query: [batch, queries, heads, head_dim], bfloat16 or float16.
      key, value: [batch, keys, kv_heads, head_dim].
      rows: segments and positions, if any, by these names; see `chunked_attention`.
      visibility, scale, table: options as for `chunked_attention`.

    Returns:
      [batch, queries, heads, head_dim] in the dtype of `query`.
    """
    return _attend(_Options(visibility, scale, table), query, key, value, rows)


@dataclass(frozen=True)
class _Options:
    visibility: Visibility
    scale: float
    table: BlockTable | None

    def of(self, queries: int, keys: int) -> dict[str, Any]:
        """Builds the keyword arguments of the kernels."""
        layout = None
        if self.table is not None:
            times = self.table.block // KERNEL_BLOCK
            layout = self.table.seen.repeat(times, 1).repeat(times, 2)
            # The last block of the table may reach beyond the tokens.
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
    """Computes attention without a derivative; returns (out, log-sum-exp of the scores).

    The log-sum-exp is float32 [batch, queries, heads].
    """
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
    """Computes float32 gradients of query, key and value; see `chunked_attention.part_backward`."""
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
def _attend(
    options: _Options, query: jax.Array, key: jax.Array, value: jax.Array, rows: dict[str, Any]
) -> jax.Array:
    return _part(options, query, key, value, rows)[0]


def _forward(
    options: _Options, query: jax.Array, key: jax.Array, value: jax.Array, rows: dict[str, Any]
) -> Any:
    out, log_sum = checkpoint_name(_part(options, query, key, value, rows), KEPT)
    return out, (query, key, value, rows, out, log_sum)


def _backward(options: _Options, kept: tuple[Any, ...], slope: jax.Array) -> Any:
    query, key, value, rows, out, log_sum = kept
    turned = jnp.sum(slope.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    gradients = kernels.part_gradients(
        *(query, key, value),
        log_sum=log_sum,
        turned=turned,
        slope=slope,
        **options.of(query.shape[1], key.shape[1]),
        **rows,
    )
    return *(x.astype(y.dtype) for x, y in zip(gradients, (query, key, value), strict=True)), None


_attend.defvjp(_forward, _backward)


def _part(
    options: _Options, query: jax.Array, key: jax.Array, value: jax.Array, rows: dict[str, Any]
) -> tuple[Any, Any]:
    result = kernels.attention_part(
        query, key, value, **options.of(query.shape[1], key.shape[1]), **rows
    )
    return tuple(result)
