"""Attention that stores all scores, in plain XLA; uses `jax.nn`'s function where possible."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from zerojax.operators.chunked_attention import Visibility
from zerojax.operators.sparse_layouts import BlockTable

_NEVER = -0.7 * float(jnp.finfo(jnp.float32).max)
"""Value of a masked score: its softmax is 0, and its difference from other scores is finite."""


def stored_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    visibility: Visibility,
    scale: float,
    segments: tuple[jax.Array, jax.Array] | None = None,
    positions: tuple[jax.Array, jax.Array] | None = None,
    table: BlockTable | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Computes softmax attention with an array of all scores.

    Args:
      query, key, value: arrays as for `zerojax.attention`.
      visibility: mask by positions; its window may be a traced integer, because all scores are
        computed.
      scale, segments, positions, softcap, sinks: options as for `zerojax.attention`.
      table: mask by blocks; None makes all keys visible.
    """
    run = functools.partial(jax.nn.dot_product_attention, scale=scale, implementation="xla")
    plain = positions is None and visibility.window is None and table is None
    as_jax_has_it = softcap is None and sinks is None and not _is_refused(query, key)
    if plain and segments is None and as_jax_has_it:
        return run(query, key, value, is_causal=visibility.causal)
    if positions is None:
        at = (jnp.arange(x.shape[1])[None] for x in (query, key))
    else:
        at = iter(positions)
    seen = visibility.is_visible(*at)
    if segments is not None:
        of_query, of_key = segments
        own = (of_query[:, :, None] == of_key[:, None, :]) & (of_key >= 0)[:, None, :]
        seen = own if seen is None else own & jnp.broadcast_to(seen, own.shape)
    seen = None if seen is None else seen[:, None]
    if table is not None:
        blocks = table.of_tokens(query.shape[1], key.shape[1])[None]
        seen = blocks if seen is None else blocks & seen
    if seen is None and as_jax_has_it:
        return run(query, key, value)
    return masked_attention(query, key, value, seen, scale=scale, softcap=softcap, sinks=sinks)


def masked_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    seen: jax.Array | None,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    code_scales: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Computes softmax attention with an explicit mask and an array of all scores.

    Args:
      query, key, value, scale, softcap, sinks: arguments as for `zerojax.attention`.
      seen: mask, bool [batch or 1, heads or 1, queries, keys]; None makes all keys visible.
      code_scales: factors [batch, keys, kv_heads] of the keys and of the values, if `key` and
        `value` are codes in the dtype of `query`; None without codes.

    Returns:
      [batch, queries, heads, head_dim] in the dtype of `query`; 0 for a query that sees no key.
    """
    as_jax_has_it = softcap is None and sinks is None and code_scales is None
    if as_jax_has_it and not _is_refused(query, key):
        out = jax.nn.dot_product_attention(
            query, key, value, mask=seen, scale=scale, implementation="xla"
        )
    else:
        out = _with_own_scores(query, key, value, seen, scale, softcap, sinks, code_scales)
    if seen is None:
        return out
    # With every key masked the softmax is uniform, but the output must be 0.
    sees_any = jnp.moveaxis(jnp.any(seen, axis=-1), 1, 2)[..., None]
    return jnp.where(sees_any, out, 0)


def _is_refused(query: jax.Array, key: jax.Array) -> bool:
    """Returns True if XLA may refuse the products of `jax.nn` on GPUs: in float16, with one query
    (as in decoding) or one key.

    `jax.nn` names the algorithm of the scores (float16 products, summed in float32). XLA rewrites a
    product with a vector, and knows no such algorithm for it ("Unsupported dot precision algorithm:
    4"; jax 0.11.2 on an H200, 0.12.0 compiled for an H100). Grouped heads give a matrix, except if
    they are split over devices. `_with_own_scores` names no algorithm.
    """
    return query.dtype == jnp.float16 and 1 in (query.shape[1], key.shape[1])


def _with_own_scores(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    seen: jax.Array | None,
    scale: float,
    softcap: float | None,
    sinks: jax.Array | None,
    code_scales: tuple[jax.Array, jax.Array] | None,
) -> jax.Array:
    """Computes attention with explicit scores, which allow a softcap, sinks and codes.

    Scores and softmax are float32; products take operands in the dtype of the inputs. The scales of
    codes are factors of the scores and of the softmax's results, so that no array of decoded keys
    or values is needed.
    """
    batch, queries, heads, features = query.shape
    kv_heads = key.shape[2]
    grouped = query.reshape(batch, queries, kv_heads, heads // kv_heads, features)
    scores = scale * jnp.einsum(
        "bqkgh,bskh->bkgqs", grouped, key, preferred_element_type=jnp.float32
    )
    if code_scales is not None:
        scores = scores * _by_head(code_scales[0])
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if seen is not None:
        by_head = (kv_heads, heads // kv_heads) if seen.shape[1] == heads else (1, 1)
        mask = seen.reshape(seen.shape[0], *by_head, *seen.shape[2:])
        scores = jnp.where(mask, scores, _NEVER)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, kv_heads, heads // kv_heads, 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sink, (*scores.shape[:-1], 1))], -1)
    weights = jax.nn.softmax(scores, axis=-1)
    # A sink has a share of the softmax, but no value to multiply it with.
    if sinks is not None:
        weights = weights[..., :-1]
    if code_scales is not None:
        weights = weights * _by_head(code_scales[1])
        if value.dtype == jnp.float16:  # weight x scale may be too small for float16
            value = value.astype(jnp.float32)
    out = jnp.einsum(
        *("bkgqs,bskh->bqkgh", weights.astype(value.dtype), value),
        preferred_element_type=jnp.float32,
    )
    return out.reshape(query.shape).astype(query.dtype)


def _by_head(scales: jax.Array) -> jax.Array:
    """Converts scales [batch, keys, kv_heads] to factors of scores, float32 [batch, kv_heads, 1, 1,
    keys]."""
    return jnp.moveaxis(scales, 1, 2)[:, :, None, None].astype(jnp.float32)
