"""Causal attention over a sequence in zig-zag order; keys and values circulate around a ring.

Each device holds two chunks of the sequence, a low and a high one (`order.py`). Keys and values
visit every device once (arXiv:2310.01889). Of the keys of another device, exactly two pairs of
chunks are visible. One is (high queries, low keys). The other is (low queries, low keys) if that
device holds an earlier low chunk, else (high queries, high keys). An array index makes this choice,
so all devices do the same work without conditionals. Results are merged by their log-sum-exp. The
backward pass uses the log-sum-exp over all keys, so a merge needs no gradient. Gradients of keys
and values circulate with them in float32; the last step sends them to their own device in their own
dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Tree
from zerojax.operators.chunked_attention import KEPT, Visibility, part_backward, part_forward
from zerojax.operators.context.order import index_of_chunk

LOW, HIGH = 0, 1


class Keys(NamedTuple):
    """Arrays passed around the ring, each as two chunks: [2, batch, tokens / 2, ...], low one
    first."""

    key: jax.Array
    value: jax.Array
    segments: jax.Array | None


class Merged(NamedTuple):
    """Attention over the keys processed so far, in float32, split into two chunks as in `Keys`."""

    out: jax.Array
    log_sum: jax.Array


@dataclass(frozen=True)
class _Ring:
    """Static options of ring attention: mesh axis, window, scale and softcap of the scores."""

    axis: str
    window: int | None
    scale: float
    softcap: float | None = None


def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    axis: str,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    segments: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Computes causal attention over tokens in zig-zag order.

    Must be called inside a `shard_map` that is manual over `axis`. Has only first derivatives in
    reverse mode. A window saves no FLOPs: a pair of chunks is computed even if fully masked.

    Args:
      query: [batch, tokens of this device, heads, head_dim]; the number of tokens is even.
      key, value: [batch, tokens of this device, kv_heads, head_dim].
      axis: mesh axis over which the sequence is split.
      scale: factor of the scores.
      window: a query sees only keys less than `window` tokens before it; None for no limit.
      softcap: soft limit of the scores, as for `zerojax.attention`.
      segments: pair of integers [batch, tokens of this device], for queries and for keys; a query
        sees only keys of its own segment, and keys of negative segments are masked.

    Returns:
      [batch, tokens of this device, heads, head_dim] in the dtype of `query`; 0 for a query that
      sees no key.
    """
    of_query, of_key = (None, None) if segments is None else map(_halves, segments)
    keys = Keys(_halves(key), _halves(value), of_key)
    out = _attend(_Ring(axis, window, scale, softcap), _halves(query), of_query, keys)
    return _whole(out)


def _halves(array: jax.Array) -> jax.Array:
    """Splits [batch, tokens, ...] -> [2, batch, tokens / 2, ...]."""
    batch, tokens, *rest = array.shape
    return jnp.moveaxis(array.reshape(batch, 2, tokens // 2, *rest), 1, 0)


def _whole(array: jax.Array) -> jax.Array:
    """Reverses `_halves`."""
    array = jnp.moveaxis(array, 0, 1)
    return array.reshape(array.shape[0], -1, *array.shape[3:])


# --- differentiation ------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: _Ring, query: jax.Array, segments: jax.Array | None, keys: Keys) -> jax.Array:
    return _forward(ring, query, segments, keys)[0]


def _forward(
    ring: _Ring, query: jax.Array, segments: jax.Array | None, keys: Keys
) -> tuple[Any, Any]:
    out, log_sum = checkpoint_name(_as_one_operation(ring, query, segments, keys), KEPT)
    return out, (query, segments, keys, out, log_sum)


def _backward(ring: _Ring, kept: tuple[Any, ...], slope: jax.Array) -> tuple[Any, ...]:
    query, segments, keys, out, log_sum = kept
    turned = jnp.sum(slope.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    rows = {"log_sum": log_sum, "turned": turned, "slope": slope}
    of_query, of_key, of_value = _backward_pass(ring, query, segments, keys, rows)
    return of_query.astype(query.dtype), None, Keys(of_key, of_value, None)


_attend.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _as_one_operation(
    ring: _Ring, query: jax.Array, segments: jax.Array | None, keys: Keys
) -> Merged:
    """Wraps the ring as one operation for an outer `jax.checkpoint`."""
    out, log_sum = _forward_pass(ring, query, segments, keys)
    return Merged(out.astype(query.dtype), log_sum)


def _refuse(*_: object) -> Any:
    raise NotImplementedError(
        "context_parallel='ring' has no second derivative; use context_parallel='ulysses' with "
        "implementation='xla'"
    )


_as_one_operation.defvjp(_refuse, _refuse)


# --- one pair of chunks ---------------------------------------------------------------------------


def _pair(
    ring: _Ring,
    source: jax.Array,
    segments: jax.Array | None,
    keys: Keys,
    half: tuple[int | jax.Array, int | jax.Array],
    *,
    same_chunk: bool = False,
) -> tuple[tuple[jax.Array, jax.Array], dict[str, Any]]:
    """Selects (key, value) of a pair of chunks, and returns them with options for `part_forward`.

    Args:
      ring: static options.
      source: index of the device that the keys come from.
      segments: segments of the queries, as two chunks; None for one segment.
      keys: keys and values of the source.
      half: (chunk of the queries, chunk of the keys), each LOW or HIGH.
      same_chunk: whether queries and keys belong to the same chunk; otherwise all keys come before
        the queries.
    """
    devices, size = lax.axis_size(ring.axis), keys.key.shape[2]
    options: dict[str, Any] = {"scale": ring.scale, "segments": None, "positions": None}
    options["visibility"] = Visibility(causal=same_chunk, window=ring.window)
    options["softcap"] = ring.softcap
    if segments is not None and keys.segments is not None:
        options["segments"] = segments[half[0]], keys.segments[half[1]]
    # The distance between two chunks depends on the device, so a window needs positions as data.
    if ring.window is not None and not same_chunk:
        options["visibility"] = Visibility(causal=True, window=ring.window)
        at = zip((lax.axis_index(ring.axis), source), half, strict=True)
        # Device d holds chunk d (LOW) and chunk 2 P - 1 - d (HIGH) of the sequence.
        chunks = (device + x * (2 * devices - 1 - 2 * device) for device, x in at)
        options["positions"] = tuple(index_of_chunk(chunk, size) for chunk in chunks)
    return (keys.key[half[1]], keys.value[half[1]]), options


def merge(first: Merged, second: Merged) -> Merged:
    """Merges attention over two disjoint sets of keys; log-sum-exp is -inf if no key is visible.

    >>> import jax.numpy as jnp
    >>> none = Merged(jnp.zeros((1, 2)), jnp.full((1,), -jnp.inf))
    >>> some = Merged(jnp.ones((1, 2)), jnp.zeros((1,)))
    >>> merge(none, some).out.tolist(), merge(none, none).log_sum.tolist()
    ([[1.0, 1.0]], [-inf])
    """
    greatest = jnp.maximum(first.log_sum, second.log_sum)
    # -inf - -inf would be NaN where neither part sees a key.
    shift = jnp.where(greatest == -jnp.inf, 0, greatest)
    shares = [jnp.exp(part.log_sum - shift) for part in (first, second)]
    total = shares[0] + shares[1]
    seen = total > 0
    total = jnp.where(seen, total, 1)
    out = sum(
        part.out * (share / total)[..., None]
        for part, share in zip((first, second), shares, strict=True)
    )
    return Merged(jnp.asarray(out), jnp.where(seen, shift + jnp.log(total), -jnp.inf))


# --- the ring -------------------------------------------------------------------------------------


def _pass_on(ring: _Ring, tree: Tree) -> Any:
    """Sends arrays to the next device of the ring, and returns the arrays received from the
    previous device.
    """
    devices = lax.axis_size(ring.axis)
    hops = [(i, (i + 1) % devices) for i in range(devices)]
    return jax.tree.map(lambda x: lax.ppermute(x, ring.axis, hops), tree)


def _around(ring: _Ring, carry: Tree, step: Callable[[Any, jax.Array, bool], Any]) -> Any:
    """Runs `step(carry, number, is_last)` for ring steps 1 .. P - 1; the last one outside the
    loop."""
    devices = lax.axis_size(ring.axis)
    # A loop repeats one body, but the last step sends no keys on, so it is outside.
    if devices > 2:
        carry, _ = lax.scan(
            lambda carry, number: (step(carry, number, False), None),
            carry,
            jnp.arange(1, devices - 1),
        )
    return step(carry, jnp.asarray(devices - 1), True) if devices > 1 else carry


def _source(ring: _Ring, number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the source device of a step's keys, and which chunks form its second visible pair."""
    me, devices = lax.axis_index(ring.axis), lax.axis_size(ring.axis)
    # A source beyond the end of the ring is a later device: its low chunk is later than all low
    # queries, and its high chunk is earlier than the high queries.
    return (me - number) % devices, (number > me).astype(jnp.int32)


def _forward_pass(ring: _Ring, query: jax.Array, segments: jax.Array | None, keys: Keys) -> Merged:
    me = lax.axis_index(ring.axis)

    def seen(
        keys: Keys, source: jax.Array, half: tuple[Any, Any], *, same_chunk: bool = False
    ) -> Merged:
        pair, options = _pair(ring, source, segments, keys, half, same_chunk=same_chunk)
        return Merged(*part_forward(query[half[0]], *pair, **options))

    own = functools.partial(seen, keys, me)
    low = own((LOW, LOW), same_chunk=True)
    high = merge(own((HIGH, LOW)), own((HIGH, HIGH), same_chunk=True))
    merged = Merged(*(jnp.stack(both) for both in zip(low, high, strict=True)))

    def add(merged: Merged, half: jax.Array | int, part: Merged) -> Merged:
        new = merge(Merged(merged.out[half], merged.log_sum[half]), part)
        return Merged(*(old.at[half].set(x) for old, x in zip(merged, new, strict=True)))

    def step(carry: tuple[Keys, Merged], number: jax.Array, is_last: bool) -> Any:
        keys, merged = carry
        following = keys if is_last else _pass_on(ring, keys)  # overlaps with the computation
        source, half = _source(ring, number)
        merged = add(merged, HIGH, seen(keys, source, (HIGH, LOW)))
        return following, add(merged, half, seen(keys, source, (half, half)))

    return _around(ring, (_pass_on(ring, keys), merged), step)[1]


def _backward_pass(
    ring: _Ring,
    query: jax.Array,
    segments: jax.Array | None,
    keys: Keys,
    rows: dict[str, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes gradients of query (float32), and of keys and values in their dtype, as two chunks.

    Args:
      ring: static options.
      query: queries, as two chunks.
      segments: segments of the queries, as two chunks; None for one segment.
      keys: keys and values of this device.
      rows: `log_sum`, `turned` and `slope` of `part_backward`, over all keys, as two chunks.
    """
    me = lax.axis_index(ring.axis)

    def slopes(
        keys: Keys, source: jax.Array, half: tuple[Any, Any], *, same_chunk: bool = False
    ) -> Any:
        pair, options = _pair(ring, source, segments, keys, half, same_chunk=same_chunk)
        of_half: dict[str, Any] = {name: x[half[0]] for name, x in rows.items()}
        return part_backward(query[half[0]], *pair, **of_half, **options)

    def add(
        sums: tuple[jax.Array, ...], half: tuple[Any, Any], parts: Sequence[jax.Array]
    ) -> tuple[jax.Array, ...]:
        at = (half[0], half[1], half[1])
        return tuple(x.at[i].add(part) for x, i, part in zip(sums, at, parts, strict=True))

    def step(carry: tuple[Keys, Any], number: jax.Array, is_last: bool) -> Any:
        keys, (of_query, *of_keys) = carry
        following = keys if is_last else _pass_on(ring, keys)
        # The sums travel with the keys they belong to: at each step both are those of `source`.
        sums = of_query, *_pass_on(ring, of_keys)
        source, half = _source(ring, number)
        for at in ((HIGH, LOW), (half, half)):
            sums = add(sums, at, slopes(keys, source, at))
        return following, sums

    sums = tuple(jnp.zeros(x.shape, jnp.float32) for x in (query, keys.key, keys.value))
    for half in ((LOW, LOW), (HIGH, LOW), (HIGH, HIGH)):
        sums = add(sums, half, slopes(keys, me, half, same_chunk=half[0] == half[1]))
    _, (of_query, *of_keys) = _around(ring, (_pass_on(ring, keys), sums), step)
    pair = (keys.key, keys.value)
    home = [x.astype(y.dtype) for x, y in zip(of_keys, pair, strict=True)]
    of_key, of_value = _pass_on(ring, home)
    return of_query, of_key, of_value
