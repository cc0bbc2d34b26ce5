"""Self-attention of a transformer's layer: projections, rotary positions, norms, a cache.

Softmax and rotary angles are computed in float32. Layers of several kinds share one program: their
differences are data, except the window size, which must be static. The attention function therefore
has one branch per window size. Parameters are read outside these branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from zerojax.config.attention_layouts import BlockLayout
from zerojax.config.compression import BitScheduleConfig
from zerojax.operators.attending import Implementation, WindowOfLayer, attend_to_cache, attend_with
from zerojax.operators.context import whole_length
from zerojax.operators.rounded_weights import encoded_rows
from zerojax.operators.sparse_layouts import BlockTable, layout_table
from zerojax.zoo.decoder_config import LayerKind
from zerojax.zoo.layers import Norm, NormConfig, Projection, apply_together, expand_rank
from zerojax.zoo.rope import Rope, frequencies_of_kinds


class KVCache(NamedTuple):
    """Keys and values of every layer, each [layers, batch, length, kv_heads, head_dim].

    The cache of one layer lacks the first dimension.
    """

    keys: jax.Array
    values: jax.Array
    key_scales: jax.Array | None = None
    """[layers, batch, length, kv_heads]: scales of the heads, if `keys` are int8 codes."""
    value_scales: jax.Array | None = None
    """[layers, batch, length, kv_heads]: scales of the heads, if `values` are int8 codes."""

    @property
    def scales(self) -> tuple[jax.Array, jax.Array] | None:
        """Returns the scales of keys and values; None without codes."""
        if self.key_scales is None or self.value_scales is None:
            return None
        return self.key_scales, self.value_scales

    def write(self, key: jax.Array, value: jax.Array, position: jax.Array) -> KVCache:
        """Returns the cache of one layer with new entries from `position` on.

        Args:
          key, value: new entries [batch, new, kv_heads, head_dim].
          position: int32 [] or [batch], index of the first entry to write.
        """
        new: tuple[Any, ...] = key, value
        if self.key_scales is not None:
            (key, key_scales), (value, value_scales) = map(encoded_rows, new)
            new = key, value, key_scales, value_scales
        old = [x for x in self if x is not None]
        return KVCache(*(_written(x, y, position) for x, y in zip(old, new, strict=True)))


def rotate_positions(
    x: jax.Array,
    positions: jax.Array,
    ropes: Sequence[Rope | None],
    *,
    kind: jax.Array | None = None,
    seq_len: int | jax.Array = 0,
) -> jax.Array:
    """Applies the rotary position embedding (arXiv:2104.09864) to the features of heads.

    Args:
      x: [batch, seq, heads, head_dim].
      positions: integers [seq] or [batch, seq], position of each token in its text.
      ropes: rotary positions of each kind of layer; all must rotate the same pairs of features.
      kind: int32 [], index of the layer's kind; None if there is one kind.
      seq_len: length of the text in tokens, or int32 [batch] with each row's length.

    Returns:
      An array of the same shape and dtype; angles and rotation are computed in float32.
    """
    rope = next(rope for rope in ropes if rope is not None)
    turning = rope.turning(x.shape[-1])
    frequencies, magnitude = frequencies_of_kinds(ropes, turning // 2, kind=kind, seq_len=seq_len)
    if frequencies.ndim == 2:  # each row has its own frequencies
        positions = expand_rank(positions, 2)
        frequencies = frequencies[:, None]
    angles = positions.astype(jnp.float32)[..., None] * expand_rank(frequencies, positions.ndim + 1)
    cosine, sine = (expand_rank(f(angles), 3)[:, :, None, :] for f in (jnp.cos, jnp.sin))
    if not isinstance(magnitude, float) or magnitude != 1.0:
        cosine, sine = cosine * magnitude, sine * magnitude
    wide = x[..., :turning].astype(jnp.float32)
    if rope.interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = jnp.split(wide, 2, axis=-1)
    rotated = [first * cosine - second * sine, second * cosine + first * sine]
    if rope.interleaved:
        result = jnp.stack(rotated, axis=-1).reshape(wide.shape)
    else:
        result = jnp.concatenate(rotated, axis=-1)
    result = result.astype(x.dtype)
    return result if turning == x.shape[-1] else jnp.concatenate([result, x[..., turning:]], -1)


class Attention(nnx.Module):
    """Self-attention with grouped key/value heads (arXiv:2305.13245), causal by default.

    Query, key and value projections are separate, so that each is sharded over its own heads.
    `matmul_dtype` and `bit_schedule` apply to the four projections; the attention itself uses the
    dtype of the activations. `layout` is for rows of `max_seq_len` tokens. `DecoderConfig`
    documents `kinds`, `pattern`, `norm`, `query_key_norm`, `scale`, `softcap` and `has_sinks`.
    """

    def __init__(
        self,
        embed_dim: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        stddev: float,
        output_stddev: float,
        rngs: nnx.Rngs,
        kinds: tuple[LayerKind, ...],
        pattern: tuple[int, ...] | None = None,
        qkv_bias: bool = False,
        output_bias: bool = False,
        head_dim: int | None = None,
        matmul_dtype: str | None = None,
        bit_schedule: BitScheduleConfig | None = None,
        is_causal: bool = True,
        implementation: Implementation = "auto",
        layout: BlockLayout | None = None,
        max_seq_len: int = 0,
        norm: NormConfig | None = None,
        query_key_norm: Literal["none", "head", "all"] = "none",
        scale: float | None = None,
        softcap: float | None = None,
        has_sinks: bool = False,
        clip: float | None = None,
    ) -> None:
        head_dim = head_dim or embed_dim // num_heads
        heads, kv_heads = (num_heads, head_dim), (num_kv_heads, head_dim)
        self.ropes = tuple(kind.rope for kind in kinds)
        self.windows, self.window_of_kind = _windows(kinds)
        self.layers = _layers(pattern, self.window_of_kind)
        self.is_causal, self.scale, self.softcap, self.clip = is_causal, scale, softcap, clip
        self.implementation: Implementation = implementation
        self.layout, self.max_seq_len, self.num_heads = layout, max_seq_len, num_heads

        def projection(
            in_shape: tuple[int, ...], out_shape: tuple[int, ...], scale: float, use_bias: bool
        ) -> Projection:
            return Projection(
                in_shape,
                out_shape,
                stddev=scale,
                use_bias=use_bias,
                rngs=rngs,
                matmul_dtype=matmul_dtype,
                bit_schedule=bit_schedule,
            )

        self.query = projection((embed_dim,), heads, stddev, qkv_bias)
        self.key = projection((embed_dim,), kv_heads, stddev, qkv_bias)
        self.value = projection((embed_dim,), kv_heads, stddev, qkv_bias)
        self.output = projection(heads, (embed_dim,), output_stddev, output_bias)
        norm = norm or NormConfig()
        # Separate names, because norms over all heads are sharded like the heads, and others are
        # not.
        if query_key_norm == "head":
            self.query_norm, self.key_norm = Norm((head_dim,), norm), Norm((head_dim,), norm)
        if query_key_norm == "all":
            self.query_heads_norm, self.key_heads_norm = Norm(heads, norm), Norm(kv_heads, norm)
        self.query_key_norm = query_key_norm
        self.sinks = nnx.Param(jnp.zeros((num_heads,), jnp.float32)) if has_sinks else None

    def __call__(
        self,
        x: jax.Array,
        visible: jax.Array | None = None,
        *,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
        kind: jax.Array | None = None,
    ) -> jax.Array:
        """Computes attention of each token to itself and earlier tokens; if not causal, to all
        tokens.

        Args:
          x: [batch, seq, embed].
          visible: bool [batch, seq], False for tokens that are not attended to (padding); None
            makes all visible.
          segments: integers [batch, seq], index of each token's text (see `zerojax.attention`);
            cannot be combined with `visible`.
          positions: integers [batch, seq], position of each token in its text, for rotary
            positions; None uses the index in the row.
          kind: int32 [], index of the layer's kind; None if there is one kind.

        Returns:
          [batch, seq, embed].
        """
        positions = jnp.arange(x.shape[1]) if positions is None else positions
        query, key, value = self._project(x, positions, whole_length(x.shape[1]), kind)
        seen: jax.Array | tuple[jax.Array, jax.Array] | None = segments
        if visible is not None:  # all queries and the visible keys get segment 0
            seen = jnp.zeros(visible.shape, jnp.int32), jnp.where(visible, 0, -1)
        mixed = attend_with(
            query,
            key,
            value,
            causal=self.is_causal,
            segments=seen,
            window=self._window(kind),
            layout=self._table(),
            scale=self.scale,
            softcap=self.softcap,
            sinks=None if self.sinks is None else self.sinks[...],
            implementation=self.implementation,
        )
        return self.output(mixed)

    def extend(
        self,
        x: jax.Array,
        cache: KVCache,
        position: jax.Array,
        kind: jax.Array | None = None,
        *,
        text_length: jax.Array | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """Computes attention of new tokens to themselves and to all earlier tokens in a cache.

        Args:
          x: [batch, new, embed], tokens at positions `position` to `position` + new - 1.
          cache: keys and values of this layer, for `length` positions; entries from `position` on
            are overwritten or ignored.
          position: number of tokens before `x`, int32 [], or [batch] if rows differ;
            position + new <= length.
          kind: int32 [], index of the layer's kind; None if there is one kind.
          text_length: int32 [batch], final number of tokens of each text, for rotary positions
            whose wavelengths depend on it; None uses the length of the cache.

        Returns:
          ([batch, new, embed], cache that includes the new keys and values).
        """
        positions = positions_after(position, x.shape[1])
        seq_len = cache.keys.shape[1] if text_length is None else text_length
        query, key, value = self._project(x, positions, seq_len, kind)
        cache = cache.write(key, value, position)
        mixed = attend_to_cache(
            query,
            cache.keys.astype(query.dtype),
            cache.values.astype(query.dtype),
            positions=positions,
            window=self._window(kind),
            table=self._table(),
            scale=self.scale,
            softcap=self.softcap,
            sinks=None if self.sinks is None else self.sinks[...],
            code_scales=cache.scales,
        )
        return self.output(mixed), cache

    def _window(self, kind: jax.Array | None) -> int | WindowOfLayer | None:
        if len(self.windows) == 1:
            return self.windows[0]
        assert kind is not None
        index = jnp.asarray(self.window_of_kind, jnp.int32)[kind]
        return WindowOfLayer(self.windows, index, self.layers)

    def _table(self) -> BlockTable | None:
        """Returns the block table of the longest row; shorter rows and caches use a part of it."""
        if self.layout is None:
            return None
        return layout_table(self.layout, num_heads=self.num_heads, num_tokens=self.max_seq_len)

    def _project(
        self, x: jax.Array, positions: jax.Array, seq_len: int | jax.Array, kind: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Computes query, key and value, normalized, clipped and rotated as configured.

        Args:
          x: [batch, seq, embed].
          positions: position of each token in its text.
          seq_len: length of the whole text in tokens, or int32 [batch] with each row's length.
          kind: int32 [], index of the layer's kind; None if there is one kind.
        """
        projections = self.query, self.key, self.value
        weights = [projection.read() for projection in projections]
        query, key, value = apply_together(projections, weights, x)
        if self.query_key_norm == "head":
            query, key = self.query_norm(query), self.key_norm(key)
        if self.query_key_norm == "all":
            query, key = self.query_heads_norm(query), self.key_heads_norm(key)
        if self.clip is not None:
            query, key, value = (jnp.clip(x, -self.clip, self.clip) for x in (query, key, value))
        if any(rope is not None for rope in self.ropes):
            query, key = (
                rotate_positions(x, positions, self.ropes, kind=kind, seq_len=seq_len)
                for x in (query, key)
            )
        return query, key, value


def positions_after(position: jax.Array | int, num_new: int) -> jax.Array:
    """Returns the positions of new tokens, int32 [new], or [batch, new] if rows differ.

    Args:
      position: int32 [] or [batch], number of tokens before the new ones.
      num_new: number of new tokens of each row.
    """
    if jnp.ndim(position) == 0:
        return position + jnp.arange(num_new)
    return jnp.asarray(position)[:, None] + jnp.arange(num_new)[None]


def _written(cache: jax.Array, new: jax.Array, position: jax.Array) -> jax.Array:
    """Returns a cache [batch, length, ...] with new entries [batch, new, ...] from `position` on.

    Args:
      cache: the old cache.
      new: entries to write.
      position: int32 [] or [batch], index of the first entry to write.
    """
    new = new.astype(cache.dtype)
    if jnp.ndim(position) == 0:
        return lax.dynamic_update_slice_in_dim(cache, new, position, 1)

    def write(row: jax.Array, entries: jax.Array, start: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(row, entries, start, 0)

    return jax.vmap(write)(cache, new, position)


def _windows(kinds: Sequence[LayerKind]) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
    """Returns (distinct windows, index of each kind's window)."""
    windows = tuple(dict.fromkeys(kind.window for kind in kinds))
    return windows, tuple(windows.index(kind.window) for kind in kinds)


def _layers(
    pattern: tuple[int, ...] | None, window_of_kind: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    """Returns (number of layers with the window, number of all layers) for each window."""
    if pattern is None:
        return ()
    windows = [window_of_kind[kind] for kind in pattern]
    return tuple((windows.count(index), len(pattern)) for index in sorted(set(windows)))
