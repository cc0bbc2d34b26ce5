"""Self-attention of a transformer's layer: projections, rotary positions, norms, a cache.

Softmax and rotary angles are in float32. Layers of several kinds run through one program: what
differs is data, and only the attention function itself has a branch for each window, since a window
has to be known before there are arrays. Parameters are read outside of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from zerojax.config.attention_layouts import BlockLayout
from zerojax.operators.attending import Implementation, WindowOfLayer, attend_to_cache, attend_with
from zerojax.operators.context import whole_length
from zerojax.operators.sparse_layouts import BlockTable, layout_table
from zerojax.zoo.decoder_config import LayerKind
from zerojax.zoo.layers import Norm, NormConfig, Projection, apply_together, expand_rank
from zerojax.zoo.rope import Rope, frequencies_of_kinds


def rotate_positions(
    x: jax.Array,
    positions: jax.Array,
    ropes: Sequence[Rope | None],
    *,
    kind: jax.Array | None = None,
    seq_len: int = 0,
) -> jax.Array:
    """Rotary position embedding (arXiv:2104.09864) of the features of heads.

    Args:
      x: [batch, seq, heads, head_dim].
      positions: [seq] or [batch, seq] integers, the position of each token in its text.
      ropes: of each kind of layer, which turn the same features in the same pairs.
      kind, seq_len: see `rope.frequencies_of_kinds`.

    Returns:
      The same shape and dtype; the angles and the rotation are computed in float32.
    """
    rope = next(rope for rope in ropes if rope is not None)
    turning = rope.turning(x.shape[-1])
    frequencies, magnitude = frequencies_of_kinds(ropes, turning // 2, kind=kind, seq_len=seq_len)
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
        turned = jnp.stack(rotated, axis=-1).reshape(wide.shape)
    else:
        turned = jnp.concatenate(rotated, axis=-1)
    turned = turned.astype(x.dtype)
    return turned if turning == x.shape[-1] else jnp.concatenate([turned, x[..., turning:]], -1)


class Attention(nnx.Module):
    """Self-attention with grouped key/value heads (arXiv:2305.13245), causal unless told otherwise.

    Query, key and value are separate, so that each splits over its own heads. `matmul_dtype` is
    that of the four projections; scores and mixing stay in the dtype of the activations. `layout`
    is of rows of `max_seq_len` tokens. Of `kinds`, `pattern`, `norm`, `query_key_norm` and the
    scores' `scale`, `softcap` and `has_sinks` see `DecoderConfig`.
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
            )

        self.query = projection((embed_dim,), heads, stddev, qkv_bias)
        self.key = projection((embed_dim,), kv_heads, stddev, qkv_bias)
        self.value = projection((embed_dim,), kv_heads, stddev, qkv_bias)
        self.output = projection(heads, (embed_dim,), output_stddev, output_bias)
        norm = norm or NormConfig()
        # Two names, since a norm over all heads is split with them, and that of each head is not.
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
        """Attention of every token to the tokens before it and itself, or to all.

        Args:
          x: [batch, seq, embed].
          visible: bool [batch, seq], False where nobody looks (padding); None: all are seen.
          segments: integers [batch, seq], the text of each token, see `zerojax.attention`; where
            they are given, `visible` is not.
          positions: integers [batch, seq] of each token in its text, for rotary positions; None:
            the indices.
          kind: int32 [], the kind of this layer; None: there is one.

        Returns:
          [batch, seq, embed].
        """
        positions = jnp.arange(x.shape[1]) if positions is None else positions
        query, key, value = self._project(x, positions, whole_length(x.shape[1]), kind)
        seen: Any = segments
        if visible is not None:  # all queries are of segment 0, and so are the keys that are seen
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
        cache: tuple[jax.Array, jax.Array],
        position: jax.Array,
        kind: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Attention of new tokens to themselves and to all earlier ones, held in a cache.

        Args:
          x: [batch, new, embed], the tokens at position .. position + new - 1.
          cache: keys and values, each [batch, length, kv_heads, head_dim]; what lies at and after
            `position` is overwritten or not looked at.
          position: i32[], number of tokens before `x`; position + new <= length.
          kind: see `__call__`.

        Returns:
          ([batch, new, embed], the cache with the new keys and values written).
        """
        positions = position + jnp.arange(x.shape[1])
        query, key, value = self._project(x, positions, cache[0].shape[1], kind)
        keys = lax.dynamic_update_slice_in_dim(cache[0], key.astype(cache[0].dtype), position, 1)
        values = lax.dynamic_update_slice_in_dim(
            cache[1], value.astype(cache[1].dtype), position, 1
        )
        mixed = attend_to_cache(
            query,
            keys.astype(query.dtype),
            values.astype(query.dtype),
            positions=positions,
            window=self._window(kind),
            table=self._table(),
            scale=self.scale,
            softcap=self.softcap,
            sinks=None if self.sinks is None else self.sinks[...],
        )
        return self.output(mixed), (keys, values)

    def _window(self, kind: jax.Array | None) -> int | WindowOfLayer | None:
        if len(self.windows) == 1:
            return self.windows[0]
        assert kind is not None
        index = jnp.asarray(self.window_of_kind, jnp.int32)[kind]
        return WindowOfLayer(self.windows, index, self.layers)

    def _table(self) -> BlockTable | None:
        """The blocks of the longest row; those of a shorter one, or of a cache, are a part."""
        if self.layout is None:
            return None
        return layout_table(self.layout, num_heads=self.num_heads, num_tokens=self.max_seq_len)

    def _project(
        self, x: jax.Array, positions: jax.Array, seq_len: int, kind: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`seq_len`: tokens of the whole text; with a cache, those that it has room for."""
        each = self.query, self.key, self.value
        query, key, value = apply_together(each, [projection.read() for projection in each], x)
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


def _windows(kinds: Sequence[LayerKind]) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
    """(the windows there are, which of them each kind has)."""
    windows = tuple(dict.fromkeys(kind.window for kind in kinds))
    return windows, tuple(windows.index(kind.window) for kind in kinds)


def _layers(
    pattern: tuple[int, ...] | None, window_of_kind: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    """(layers of each window, layers of all)."""
    if pattern is None:
        return ()
    windows = [window_of_kind[kind] for kind in pattern]
    return tuple((windows.count(index), len(pattern)) for index in sorted(set(windows)))
