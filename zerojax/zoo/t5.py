"""T5: encoder and decoder with relative position biases, cross-attention, one token table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from zerojax.config.checks import check_finite
from zerojax.config.late_dataclasses import dataclass
from zerojax.models.losses import NATS_PER_TOKEN, next_token
from zerojax.operators.chunked_loss import head_next_token
from zerojax.tracing.stacking import check_remat, scan_blocks, stack_blocks
from zerojax.zoo.decoder import (
    MEGATRON_RULES,
    RESIDUAL_DIMS,
    TensorParallelRules,
    build_lm_head,
    check_tokens,
)
from zerojax.zoo.decoder_config import check_at_least_one
from zerojax.zoo.layers import (
    Dropout,
    Embedding,
    Mlp,
    Norm,
    NormConfig,
    Projection,
    constrain,
    normal,
)


@dataclass(frozen=True, kw_only=True)
class T5Config:
    """Sizes of a T5 (arXiv:1910.10683); the defaults are those of the small model.

    Attributes:
      vocab_size: number of token ids.
      max_seq_len: maximum number of tokens of a source and of a target; only a limit, because
        positions are relative.
      num_layers, num_decoder_layers: depth of the encoder and of the decoder; None uses num_layers.
      num_heads, head_dim, embed_dim: number of attention heads, features of a head, width of the
        residual stream; num_heads * head_dim need not equal embed_dim.
      mlp_dim: width of the MLP.
      gated_gelu: whether the MLP is down(gelu(gate(x)) * up(x)), as in version 1.1
        (arXiv:2002.05202), with the tanh form of GELU; False: down(relu(up(x))).
      relative_buckets: number of rows of the table of position biases.
      relative_max_distance: distance in tokens from which all pairs share the last row.
      dropout: probability of dropout on embeddings, on the output of each sub-layer and inside the
        MLP. Attention probabilities are not dropped.
      norm_eps: number added to the mean square.
      tie_embeddings: whether the output weights are the token table; False in version 1.1.
      scale_output: whether the decoder's result is divided by sqrt(embed_dim); None uses the value
        of tie_embeddings.
      start_token: input id of the decoder before the first target token.
      remat: recomputation in the backward pass: "none", "full", "attention" or "dots" (see
        `stacking.scan_blocks`).
      loss_chunk: number of tokens whose logits `loss` computes at a time; None for all, "auto" for
        the choice of `operators.chunked_loss.head_next_token`.
    """

    vocab_size: int = 32128
    max_seq_len: int = 512
    num_layers: int = 6
    num_decoder_layers: int | None = None
    num_heads: int = 8
    head_dim: int = 64
    embed_dim: int = 512
    mlp_dim: int = 2048
    gated_gelu: bool = False
    relative_buckets: int = 32
    relative_max_distance: int = 128
    dropout: float = 0.0
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    scale_output: bool | None = None
    start_token: int = 0
    remat: str = "none"
    loss_chunk: int | Literal["auto"] | None = None

    # The export of every model reads these fields, which are fixed for T5.
    attention_layout: ClassVar[None] = None
    attention_window: ClassVar[None] = None

    def __post_init__(self) -> None:
        check_finite(self)
        if self.num_decoder_layers is None:
            object.__setattr__(self, "num_decoder_layers", self.num_layers)
        if self.scale_output is None:
            object.__setattr__(self, "scale_output", self.tie_embeddings)
        for field in (
            "vocab_size",
            "max_seq_len",
            "num_layers",
            "num_decoder_layers",
            "num_heads",
            "head_dim",
            "embed_dim",
            "mlp_dim",
            "relative_buckets",
            "relative_max_distance",
        ):
            check_at_least_one(field, getattr(self, field))
        if self.loss_chunk not in (None, "auto"):
            check_at_least_one("loss_chunk", self.loss_chunk)
        if self.relative_buckets % 4:
            raise ValueError(
                f"relative_buckets={self.relative_buckets} is not a multiple of 4: the encoder "
                "uses one half for later keys, and half of each half for single distances; "
                "T5 uses 32"
            )
        if self.relative_max_distance <= self.relative_buckets // 2:
            raise ValueError(
                f"relative_max_distance={self.relative_max_distance} must be above half of "
                f"relative_buckets={self.relative_buckets}; T5 uses 128"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout} is not in [0, 1); use 0.0 for none")
        if not 0 <= self.start_token < self.vocab_size:
            raise ValueError(
                f"start_token={self.start_token} is outside the vocabulary of {self.vocab_size} "
                "token ids; T5 uses 0"
            )
        check_remat(self.remat)

    @property
    def num_parameters(self) -> int:
        """Returns the number of trainable elements."""
        width, heads = self.embed_dim, self.num_heads * self.head_dim
        attention, mlp = 4 * width * heads, (3 if self.gated_gelu else 2) * width * self.mlp_dim
        encoder = self.num_layers * (attention + mlp + 2 * width)
        decoder = (self.num_decoder_layers or 0) * (2 * attention + mlp + 3 * width)
        tables = (1 if self.tie_embeddings else 2) * self.vocab_size * width
        biases = 2 * self.relative_buckets * self.num_heads
        return encoder + decoder + tables + biases + 2 * width


class Source(NamedTuple):
    """Output of the encoder.

    Attributes:
      hidden: [batch, source, embed].
      visible: bool [batch, source], False for padding; None without padding.
    """

    hidden: jax.Array
    visible: jax.Array | None


class DecoderCache(NamedTuple):
    """Keys and values of the decoder's layers, for the source and for the target so far.

    Attributes:
      keys, values: keys and values of the target, [layers, batch, length, heads, head_dim].
      source_keys, source_values: keys and values of the source, [layers, batch, source, heads,
        head_dim].
      visible: bool [batch, source], False for padding; None without padding.
    """

    keys: jax.Array
    values: jax.Array
    source_keys: jax.Array
    source_values: jax.Array
    visible: jax.Array | None


class RelativeBias(nnx.Module):
    """Learned bias of the scores per head and distance bucket, shared by all layers."""

    def __init__(self, config: T5Config, *, is_causal: bool, rngs: nnx.Rngs) -> None:
        self.is_causal, self.max_distance = is_causal, config.relative_max_distance
        shape = (config.relative_buckets, config.num_heads)
        self.embedding = normal(rngs, shape, config.embed_dim**-0.5)

    def __call__(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """Computes biases, float32 [heads, queries, keys], from integer positions."""
        table = self.embedding[...].astype(jnp.float32)
        buckets = relative_bucket(
            keys[None, :] - queries[:, None],
            num_buckets=table.shape[0],
            max_distance=self.max_distance,
            is_causal=self.is_causal,
        )
        return jnp.moveaxis(jnp.take(table, buckets, axis=0, mode="fill"), -1, 0)


def relative_bucket(
    offset: jax.Array, *, num_buckets: int, max_distance: int, is_causal: bool
) -> jax.Array:
    """Computes the bucket of a key `offset` tokens after its query.

    Half of the buckets cover one distance each, the others logarithmically growing ranges up to
    `max_distance` (arXiv:1910.10683, section 2.1). Without a causal mask, later keys use the second
    half of the buckets and earlier keys the first half.

    Args:
      offset: integers of any shape, position of the key minus position of the query.
      num_buckets: number of buckets.
      max_distance: distance from which all keys share a bucket.
      is_causal: whether there is a causal mask.

    Returns:
      int32 of the same shape, in [0, num_buckets).
    """
    first = jnp.zeros_like(offset)
    if is_causal:
        distance = jnp.maximum(-offset, 0)
    else:
        num_buckets //= 2
        first = jnp.where(offset > 0, num_buckets, 0)
        distance = jnp.abs(offset)
    exact = num_buckets // 2
    growth = (num_buckets - exact) / math.log(max_distance / exact)
    # Small distances have buckets of their own; the maximum only avoids the logarithm of 0.
    far = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / exact) * growth
    far = jnp.minimum(exact + far.astype(jnp.int32), num_buckets - 1)
    return (first + jnp.where(distance < exact, distance, far)).astype(jnp.int32)


class BiasedAttention(nnx.Module):
    """Multi-head attention with biased scores, which are not divided by sqrt(head_dim).

    All scores are materialized; scores and softmax are float32.
    """

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs) -> None:
        width, heads = (config.embed_dim,), (config.num_heads, config.head_dim)

        def projection(inputs: tuple[int, ...], outputs: tuple[int, ...], stddev: float):
            return Projection(inputs, outputs, stddev=stddev, use_bias=False, rngs=rngs)

        inner = config.num_heads * config.head_dim
        # The query's initial weights include the scores' usual factor 1 / sqrt(head_dim).
        self.query = projection(width, heads, (config.embed_dim * config.head_dim) ** -0.5)
        self.key = projection(width, heads, config.embed_dim**-0.5)
        self.value = projection(width, heads, config.embed_dim**-0.5)
        self.output = projection(heads, width, inner**-0.5)

    def __call__(
        self, x: jax.Array, source: jax.Array, bias: jax.Array | None, seen: jax.Array | None
    ) -> jax.Array:
        """Computes attention of tokens to a source, which may be the tokens themselves.

        Args:
          x: [batch, queries, embed].
          source: [batch, keys, embed].
          bias: float32 [heads, queries, keys]; None for no bias.
          seen: bool mask that broadcasts to [batch, heads, queries, keys]; None for no mask.

        Returns:
          [batch, queries, embed].
        """
        return self.attend(x, self.key(source), self.value(source), bias, seen)

    def attend(
        self,
        x: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None,
        seen: jax.Array | None,
    ) -> jax.Array:
        """Computes `__call__` from the source's keys and values [batch, keys, heads, head_dim]."""
        query = self.query(x)
        scores = jnp.einsum(
            "bqhd,bkhd->bhqk", query, key.astype(query.dtype), preferred_element_type=jnp.float32
        )
        if bias is not None:
            scores = scores + bias[None]
        if seen is not None:
            # Not infinite: a row in which nothing is seen would be NaN.
            scores = jnp.where(seen, scores, jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
        return self.output(jnp.einsum("bhqk,bkhd->bqhd", weights, value.astype(query.dtype)))


def _build_mlp(config: T5Config, rngs: nnx.Rngs) -> Mlp:
    return Mlp(
        config.embed_dim,
        config.mlp_dim,
        activation="gelu_tanh" if config.gated_gelu else "relu",
        gated=config.gated_gelu,
        use_bias=False,
        stddev=config.embed_dim**-0.5,
        output_stddev=config.mlp_dim**-0.5,
        rngs=rngs,
        dropout=config.dropout,
    )


def _build_norm(config: T5Config) -> Norm:
    return Norm((config.embed_dim,), NormConfig(eps=config.norm_eps))


class T5EncoderBlock(nnx.Module):
    """Two pre-norm sub-layers: attention to the whole source, MLP."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = _build_norm(config)
        self.attention = BiasedAttention(config, rngs=rngs)
        self.attention_dropout = Dropout(config.dropout, rngs=rngs)
        self.mlp_norm = _build_norm(config)
        self.mlp = _build_mlp(config, rngs)
        self.mlp_dropout = Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: jax.Array, bias: jax.Array, seen: jax.Array | None) -> jax.Array:
        """Applies the layer to [batch, source, embed]; see `BiasedAttention` for the arguments."""
        normed = self.attention_norm(x)
        x = _add(x, self.attention_dropout(self.attention(normed, normed, bias, seen)))
        return _add(x, self.mlp_dropout(self.mlp(self.mlp_norm(x))))


class T5DecoderBlock(nnx.Module):
    """Three pre-norm sub-layers: attention to earlier target tokens, attention to the source,
    MLP."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = _build_norm(config)
        self.attention = BiasedAttention(config, rngs=rngs)
        self.attention_dropout = Dropout(config.dropout, rngs=rngs)
        self.cross_attention_norm = _build_norm(config)
        self.cross_attention = BiasedAttention(config, rngs=rngs)
        self.cross_attention_dropout = Dropout(config.dropout, rngs=rngs)
        self.mlp_norm = _build_norm(config)
        self.mlp = _build_mlp(config, rngs)
        self.mlp_dropout = Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: jax.Array, bias: jax.Array, seen: jax.Array, source: Source) -> jax.Array:
        """Applies the layer to [batch, target, embed]; see `BiasedAttention` for the arguments."""
        normed = self.attention_norm(x)
        x = _add(x, self.attention_dropout(self.attention(normed, normed, bias, seen)))
        normed = self.cross_attention_norm(x)
        of_source = self.cross_attention(normed, source.hidden, None, _keys_seen(source.visible))
        x = _add(x, self.cross_attention_dropout(of_source))
        return _add(x, self.mlp_dropout(self.mlp(self.mlp_norm(x))))

    def extend(
        self, x: jax.Array, cache: DecoderCache, bias: jax.Array, position: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Applies the layer to new tokens after cached ones, without dropout.

        Args:
          x: [batch, new, embed], tokens at positions `position` to `position` + new - 1.
          cache: cache of this layer, without the layer dimension.
          bias: float32 [heads, new, length].
          position: int32 [], number of tokens before `x`.

        Returns:
          ([batch, new, embed], keys and values of the target that include the new ones).
        """
        length, new = cache.keys.shape[1], x.shape[1]
        normed = self.attention_norm(x)
        keys, values = (
            lax.dynamic_update_slice_in_dim(old, new_rows.astype(old.dtype), position, 1)
            for old, new_rows in (
                (cache.keys, self.attention.key(normed)),
                (cache.values, self.attention.value(normed)),
            )
        )
        seen = jnp.arange(length)[None, :] <= (position + jnp.arange(new))[:, None]
        x = _add(x, self.attention.attend(normed, keys, values, bias, seen[None, None]))
        normed = self.cross_attention_norm(x)
        of_source = self.cross_attention.attend(
            normed, cache.source_keys, cache.source_values, None, _keys_seen(cache.visible)
        )
        x = _add(x, of_source)
        return _add(x, self.mlp(self.mlp_norm(x))), (keys, values)


class T5Encoder(nnx.Module):
    """Layers, relative bias and final norm of the encoder."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs) -> None:
        self.relative_bias = RelativeBias(config, is_causal=False, rngs=rngs)
        self.blocks = stack_blocks(
            lambda layer_rngs: T5EncoderBlock(config, rngs=layer_rngs), config.num_layers, rngs=rngs
        )
        self.final_norm = _build_norm(config)


class T5Decoder(nnx.Module):
    """Layers, relative bias and final norm of the decoder."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs) -> None:
        self.relative_bias = RelativeBias(config, is_causal=True, rngs=rngs)
        number = config.num_decoder_layers or config.num_layers
        self.blocks = stack_blocks(
            lambda layer_rngs: T5DecoderBlock(config, rngs=layer_rngs), number, rngs=rngs
        )
        self.final_norm = _build_norm(config)


class T5(nnx.Module):
    """T5. `model(tokens, targets) -> logits`, `model.loss(batch) -> (sum, weight)`."""

    tensor_parallel_rules: ClassVar[TensorParallelRules] = (
        *MEGATRON_RULES,
        (r"relative_bias/embedding$", (None, "model")),
    )
    loss_unit: ClassVar[str] = NATS_PER_TOKEN

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.token_embedding = Embedding(config.vocab_size, config.embed_dim, stddev=1.0, rngs=rngs)
        self.source_dropout = Dropout(config.dropout, rngs=rngs)
        self.encoder = T5Encoder(config, rngs=rngs)
        self.encoded_dropout = Dropout(config.dropout, rngs=rngs)
        self.target_dropout = Dropout(config.dropout, rngs=rngs)
        self.decoder = T5Decoder(config, rngs=rngs)
        self.decoded_dropout = Dropout(config.dropout, rngs=rngs)
        self.lm_head = build_lm_head(config, stddev=1.0, rngs=rngs)

    def encode(self, tokens: jax.Array, attention_mask: jax.Array | None = None) -> Source:
        """Encodes sources (input texts).

        Args:
          tokens: integers [batch, source].
          attention_mask: [batch, source], 0 for padding; None without padding.

        Raises:
          TypeError: `tokens` are not integers.
          ValueError: `tokens` are not [batch, source], or source is above `max_seq_len`.
        """
        x = self.source_dropout(self._look_up(tokens))
        visible = None if attention_mask is None else attention_mask != 0
        index = jnp.arange(tokens.shape[1])
        shared = self.encoder.relative_bias(index, index), _keys_seen(visible)
        x = scan_blocks(self.encoder.blocks, x, remat=self.config.remat, shared=shared)
        return Source(self.encoded_dropout(self.encoder.final_norm(x)), visible)

    def decode(self, tokens: jax.Array, source: Source) -> jax.Array:
        """Computes the decoder's hidden states for target tokens.

        Args:
          tokens: integers [batch, target]; the first is `start_token`.
          source: result of `encode`.

        Returns:
          Hidden states [batch, target, embed], for `head`.

        Raises:
          TypeError, ValueError: `tokens` are invalid, as for `encode`.
        """
        x = self.target_dropout(self._look_up(tokens))
        index = jnp.arange(tokens.shape[1])
        seen = index[None, :] <= index[:, None]
        shared = self.decoder.relative_bias(index, index), seen[None, None], source
        x = scan_blocks(self.decoder.blocks, x, remat=self.config.remat, shared=shared)
        return self.decoded_dropout(self._scaled(self.decoder.final_norm(x)))

    def head(self, x: jax.Array) -> jax.Array:
        """Maps [batch, target, embed] from `decode` to logits [batch, target, vocab]."""
        return self.token_embedding.attend(x) if self.lm_head is None else self.lm_head(x)

    def __call__(
        self, tokens: jax.Array, targets: jax.Array, attention_mask: jax.Array | None = None
    ) -> jax.Array:
        """Computes logits [batch, target, vocab] of each target token from the tokens before it.

        Args:
          tokens: integers [batch, source].
          targets: integers [batch, target], without the start token.
          attention_mask: [batch, source], 0 for padding; None without padding.
        """
        source = self.encode(tokens, attention_mask)
        return self.head(self.decode(self.shifted(targets), source))

    def loss(self, batch: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
        """Computes the cross-entropy of the targets in float32, as (sum, weight).

        Args:
          batch: dict with "tokens", integers [batch, source], and "targets", integers [batch,
            target], without the start token; optional "attention_mask" [batch, source], 0 for
            padding; optional "weights" [batch, target], 0 for padding.
        """
        source = self.encode(batch["tokens"], batch.get("attention_mask"))
        targets, weights = batch["targets"], batch.get("weights")
        x, chunk = self.decode(self.shifted(targets), source), self.config.loss_chunk
        if chunk is None:
            return next_token(self.head(x), targets, weights)
        if self.lm_head is None:
            table = self.token_embedding.embedding[...]
            return head_next_token(x, table, targets, weights, vocab_dim=0, chunk=chunk)
        kernel = self.lm_head.kernel[...]
        return head_next_token(x, kernel, targets, weights, vocab_dim=1, chunk=chunk)

    def shifted(self, targets: jax.Array) -> jax.Array:
        """Returns the decoder's input: `start_token`, then all targets except the last."""
        start = jnp.full_like(targets[:, :1], self.config.start_token)
        return jnp.concatenate([start, targets[:, :-1]], axis=1)

    def init_cache(
        self, tokens: jax.Array, length: int, attention_mask: jax.Array | None = None
    ) -> DecoderCache:
        """Encodes sources (without dropout only after `eval()`) and returns a cache for empty
        targets.

        Args:
          tokens: integers [batch, source].
          attention_mask: [batch, source], 0 for padding; None without padding.
          length: maximum length of a target in tokens.
        """
        source = self.encode(tokens, attention_mask)
        graphdef, state = nnx.split(self.decoder.blocks)

        def layer(_: None, slices: nnx.State) -> tuple[None, tuple[jax.Array, jax.Array]]:
            block = nnx.merge(graphdef, slices)
            attention = block.cross_attention
            return None, (attention.key(source.hidden), attention.value(source.hidden))

        _, (keys, values) = lax.scan(layer, None, state)
        shape = (*keys.shape[:2], length, *keys.shape[3:])
        empty = jnp.zeros(shape, keys.dtype)
        return DecoderCache(empty, empty, keys, values, source.visible)

    def extend(
        self, tokens: jax.Array, cache: DecoderCache, position: jax.Array
    ) -> tuple[jax.Array, DecoderCache]:
        """Computes the decoder's hidden states of new tokens after cached ones, without dropout.

        Args:
          tokens: integers [batch, new]; the first of a target is `start_token`.
          cache: result of `init_cache` or of an earlier call.
          position: int32 [], number of target tokens in the cache.

        Returns:
          (hidden states [batch, new, embed] for `head`, cache that includes the new tokens).
        """
        index = jnp.arange(tokens.shape[1])
        bias = self.decoder.relative_bias(position + index, jnp.arange(cache.keys.shape[2]))
        graphdef, state = nnx.split(self.decoder.blocks)

        def layer(
            x: jax.Array, slices: tuple[Any, ...]
        ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            block = nnx.merge(graphdef, slices[0])
            block.eval()
            return block.extend(x, slices[1]._replace(visible=cache.visible), bias, position)

        x = self.token_embedding(tokens)
        # The loop goes over layers, of which `visible` has no dimension.
        x, (keys, values) = lax.scan(layer, x, (state, cache._replace(visible=None)))
        return self._scaled(self.decoder.final_norm(x)), cache._replace(keys=keys, values=values)

    def _look_up(self, tokens: jax.Array) -> jax.Array:
        check_tokens(tokens, max_seq_len=self.config.max_seq_len)
        return constrain(self.token_embedding(tokens), RESIDUAL_DIMS)

    def _scaled(self, x: jax.Array) -> jax.Array:
        return x * self.config.embed_dim**-0.5 if self.config.scale_output else x


def _keys_seen(visible: jax.Array | None) -> jax.Array | None:
    """Reshapes a mask [batch, keys] to [batch, 1, 1, keys], for all heads and queries."""
    return None if visible is None else visible[:, None, None, :]


def _add(x: jax.Array, change: jax.Array) -> jax.Array:
    return constrain(x + change.astype(x.dtype), RESIDUAL_DIMS)
