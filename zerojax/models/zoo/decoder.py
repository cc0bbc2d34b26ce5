"""Decoder: embedding, stacked blocks and head; its loss and its cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from zerojax.models.attending import check_implementation
from zerojax.models.chunked_loss import head_next_token
from zerojax.models.context import current_split
from zerojax.models.losses import NATS_PER_TOKEN, next_token
from zerojax.models.sparse_layouts import layout_table
from zerojax.models.zoo.fp8 import check_matmul_dtype
from zerojax.models.zoo.layers import (
    Attention,
    Dropout,
    Embedding,
    GeluMlp,
    Projection,
    SwiGluMlp,
    constrain,
    in_chunks,
)
from zerojax.models.zoo.stacking import check_remat, scan_blocks

RESIDUAL_DIMS = ("batch", "sequence", "embed")
TensorParallelRules = tuple[tuple[str, tuple[str | None, ...]], ...]

# Megatron's cut (arXiv:1909.08053): heads and the MLP's width over `model`, one sum per sub-layer
# after the row-parallel output; the vocabulary over `model` at both ends. Axes are those of the
# trailing dimensions, so the rules hold for stacked and single layers.
MEGATRON_RULES: TensorParallelRules = (
    (r"attention/(query|key|value)/kernel$", (None, "model", None)),
    (r"attention/(query|key|value)/bias$", ("model", None)),
    (r"attention/output/kernel$", ("model", None, None)),
    (r"mlp/(gate|up)/kernel$", (None, "model")),
    (r"mlp/(gate|up)/bias$", ("model",)),
    (r"mlp/down/kernel$", ("model", None)),
    (r"attention/(query|key|value)/lora/b$", (None, "model", None)),
    (r"attention/output/lora/a$", ("model", None, None)),
    (r"mlp/(gate|up)/lora/b$", (None, "model")),
    (r"mlp/down/lora/a$", ("model", None)),
    (r"token_embedding/embedding$", ("model", None)),
    (r"lm_head/kernel$", (None, "model")),
)


class KVCache(NamedTuple):
    """Keys and values of every layer: [layers, batch, length, kv_heads, head_dim] each."""

    keys: jax.Array
    values: jax.Array


class Packed(NamedTuple):
    """What goes from layer to layer where rows hold several texts, or a part of one."""

    hidden: jax.Array
    """[batch, seq, embed]."""
    segments: jax.Array | None
    """Integers [batch, seq]: the text of each token, negative for padding; None: all are of one."""
    positions: jax.Array
    """Integers [batch, seq]: the position of each token in its text."""


class DecoderConfig(Protocol):
    """What `Decoder` asks of a model's configuration."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int | None: ...
    @property
    def head_dim(self) -> int | None: ...
    @property
    def embed_dim(self) -> int: ...
    @property
    def tie_embeddings(self) -> bool: ...
    @property
    def remat(self) -> str: ...
    @property
    def loss_chunk(self) -> int | None: ...
    @property
    def mlp_chunk(self) -> int | None: ...


class Block(nnx.Module):
    """One pre-norm residual layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        *,
        attention_norm: Callable[[jax.Array], jax.Array],
        attention: Attention,
        mlp_norm: Callable[[jax.Array], jax.Array],
        mlp: GeluMlp | SwiGluMlp,
        dropout: float,
        rngs: nnx.Rngs,
        mlp_chunk: int | None = None,
    ) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.attention_dropout = Dropout(dropout, rngs=rngs)
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mlp_dropout = Dropout(dropout, rngs=rngs)
        self.mlp_chunk = mlp_chunk

    def __call__(self, x: jax.Array | Packed) -> jax.Array | Packed:
        """[batch, seq, embed] -> the same shape and dtype; so of rows of several texts."""
        if isinstance(x, Packed):
            texts = {"segments": x.segments, "positions": x.positions}
            return x._replace(hidden=self._layer(x.hidden, **texts))
        return self._layer(x)

    def _layer(self, x: jax.Array, **texts: jax.Array | None) -> jax.Array:
        x = self._add(x, self.attention_dropout(self.attention(self.attention_norm(x), **texts)))
        normed = self.mlp_norm(x)
        chunk = self.mlp_chunk
        change = self.mlp(normed) if chunk is None else in_chunks(self.mlp, normed, chunk)
        return self._add(x, self.mlp_dropout(change))

    def extend(
        self, x: jax.Array, cache: tuple[jax.Array, jax.Array], position: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """`__call__` for new tokens after cached ones, without dropout; see `Attention.extend`."""
        change, cache = self.attention.extend(self.attention_norm(x), cache, position)
        x = self._add(x, change)
        return self._add(x, self.mlp(self.mlp_norm(x))), cache

    def _add(self, x: jax.Array, change: jax.Array) -> jax.Array:
        return constrain(x + change.astype(x.dtype), RESIDUAL_DIMS)


class Decoder(nnx.Module):
    """A decoder-only language model: `head(blocks(embed(tokens)))`.

    A subclass gives `look_up` and builds the attributes named below.
    """

    tensor_parallel_rules: ClassVar[TensorParallelRules] = MEGATRON_RULES
    loss_unit: ClassVar[str] = NATS_PER_TOKEN

    config: DecoderConfig
    token_embedding: Embedding
    embed_dropout: Dropout
    blocks: Block
    final_norm: Callable[[jax.Array], jax.Array]
    lm_head: Projection | None

    def look_up(self, tokens: jax.Array, position: jax.Array | int) -> jax.Array:
        """[batch, new] tokens -> [batch, new, embed], without dropout.

        Args:
          position: of the first token, or integers [batch, new] of all.
        """
        raise NotImplementedError(f"{type(self).__name__} must define look_up(tokens, position)")

    def embed(self, tokens: jax.Array, positions: jax.Array | int = 0) -> jax.Array:
        """Integers [batch, seq] -> [batch, seq, embed].

        Args:
          positions: see `look_up`.

        Raises:
          TypeError: tokens are not integers.
          ValueError: not two dimensions, or longer than the model's `max_seq_len`.
        """
        check_tokens(tokens, max_seq_len=self.config.max_seq_len)
        return constrain(self.embed_dropout(self.look_up(tokens, positions)), RESIDUAL_DIMS)

    def head(self, x: jax.Array) -> jax.Array:
        """[batch, seq, embed] -> logits [batch, seq, vocab], in the dtype of the output weights."""
        x = self.final_norm(x)
        return self.token_embedding.attend(x) if self.lm_head is None else self.lm_head(x)

    def hidden(
        self,
        tokens: jax.Array,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Integers [batch, seq] -> what the blocks make of them [batch, seq, embed], for `head`.

        Args:
          segments: integers [batch, seq], the text of each token where rows hold several: tokens
            see their own text alone, and positions begin anew in each.
          positions: integers [batch, seq] of each token in its text; None: from `segments`, or the
            indices.
        """
        if positions is None and segments is not None:
            positions = positions_in_texts(segments)
        if positions is None:
            return scan_blocks(self.blocks, self.embed(tokens), remat=self.config.remat)
        x = Packed(self.embed(tokens, positions), segments, positions)
        return scan_blocks(self.blocks, x, remat=self.config.remat).hidden

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Integers [batch, seq] -> logits [batch, seq, vocab] of the token that follows each."""
        return self.head(self.hidden(tokens))

    @staticmethod
    def before_cut(batch: Mapping[str, Any]) -> dict[str, Any]:
        """A batch of which `loss` needs only a part of each row on each device.

        Made where rows are whole: the position of each token in its text, and the weights within
        texts, which depend on the tokens around.

        Args:
          batch: as `loss` has it.

        Returns:
          "tokens", "targets", "positions" and, where the batch has them, "weights" and "segments",
          [batch, seq] each.
        """
        names = ("tokens", "targets", "weights", "segments")
        prepared = {name: batch[name] for name in names if name in batch}
        segments = batch.get("segments")
        if segments is None:
            index = jnp.arange(batch["tokens"].shape[1], dtype=jnp.int32)
            prepared["positions"] = jnp.broadcast_to(index, batch["tokens"].shape)
        else:
            prepared["positions"] = positions_in_texts(segments)
            prepared["weights"] = _weights_within_texts(segments, batch.get("weights"))
        return prepared

    def loss(self, batch: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
        """Next-token cross-entropy in float32, as (sum, weight).

        With `config.loss_chunk` logits are made for so many tokens at a time; the output weights
        are still read once, outside of that loop.

        Args:
          batch: "tokens" and "targets", integers [batch, seq]; "weights" [batch, seq] if some
            positions do not count; "segments", integers [batch, seq], if rows hold several texts:
            nothing goes from one to another, and a token whose target is another text's, or that
            is padding (a negative segment), does not count.
        """
        targets, weights = batch["targets"], batch.get("weights")
        segments, positions = batch.get("segments"), None
        if current_split() is not None:  # this is a part of what `before_cut` made
            positions = batch["positions"]
        elif segments is not None:
            weights = _weights_within_texts(segments, weights)
        x = self.hidden(batch["tokens"], segments, positions)
        chunk = self.config.loss_chunk
        if chunk is None:
            return next_token(self.head(x), targets, weights)
        x = self.final_norm(x)
        if self.lm_head is None:
            table = self.token_embedding.embedding[...]
            return head_next_token(x, table, targets, weights, vocab_dim=0, chunk=chunk)
        kernel = self.lm_head.kernel[...]
        return head_next_token(x, kernel, targets, weights, vocab_dim=1, chunk=chunk)

    def init_cache(self, batch_size: int, length: int) -> KVCache:
        """A cache of zeros for `length` positions, in the dtype of the activations."""
        config, dtype = self.config, self.token_embedding.embedding[...].dtype
        head_dim = config.head_dim or config.embed_dim // config.num_heads
        kv_heads = config.num_kv_heads or config.num_heads
        shape = (config.num_layers, batch_size, length, kv_heads, head_dim)
        return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def extend(
        self, tokens: jax.Array, cache: KVCache, position: jax.Array
    ) -> tuple[jax.Array, KVCache]:
        """What the blocks make of new tokens, given the cache of the earlier ones; no dropout.

        Args:
          tokens: integers [batch, new].
          cache: from `init_cache` or an earlier call.
          position: i32[], number of tokens that the cache holds.

        Returns:
          (hidden states [batch, new, embed] for `head`, the longer cache).
        """
        graphdef, state = nnx.split(self.blocks)

        def layer(
            x: jax.Array, slices: tuple[nnx.State, KVCache]
        ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            block = nnx.merge(graphdef, slices[0])
            block.eval()  # an adapter may have dropout of its own
            return block.extend(x, slices[1], position)

        x, longer = lax.scan(layer, self.look_up(tokens, position), (state, cache))
        return x, KVCache(*longer)


def positions_in_texts(segments: jax.Array) -> jax.Array:
    """int32 [batch, seq], counted from 0 in each run of equal `segments` [batch, seq]."""
    index = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
    begins = segments[:, 1:] != segments[:, :-1]
    begins = jnp.concatenate([jnp.ones_like(begins[:, :1]), begins], axis=1)
    return index - lax.cummax(jnp.where(begins, index, 0), axis=1)


def _weights_within_texts(segments: jax.Array, weights: jax.Array | None) -> jax.Array:
    """`weights`, 0 where the next token is of another text; the last one counts as given."""
    same = segments[:, 1:] == segments[:, :-1]
    counts = jnp.concatenate([same, jnp.ones_like(same[:, :1])], axis=1) & (segments >= 0)
    return counts.astype(jnp.float32) if weights is None else jnp.where(counts, weights, 0)


def build_lm_head(config: DecoderConfig, *, stddev: float, rngs: nnx.Rngs) -> Projection | None:
    """The output weights `[embed, vocab]`, or None when the token table serves for them."""
    if config.tie_embeddings:
        return None
    shapes = (config.embed_dim,), (config.vocab_size,)
    return Projection(*shapes, stddev=stddev, use_bias=False, rngs=rngs)


def check_tokens(tokens: jax.Array | np.ndarray, *, max_seq_len: int) -> None:
    """Raises TypeError or ValueError for tokens that a decoder cannot take; looks at the shape."""
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(
            f"tokens are {tokens.dtype}, but must be integers; encode text with a tokenizer, or "
            "cast ids with tokens.astype('int32')"
        )
    if tokens.ndim != 2:
        raise ValueError(
            f"tokens have shape {tokens.shape}, but must be [batch, seq];"
            " write tokens[None] for a single text"
        )
    if tokens.shape[1] > max_seq_len:
        raise ValueError(
            f"tokens are {tokens.shape[1]} long, but the model takes at most"
            f" max_seq_len={max_seq_len}; cut them or build the model with a larger max_seq_len"
        )


def check_decoder_sizes(config: Any) -> None:
    """Checks the sizes that every decoder's configuration has.

    Raises:
      ValueError: a size below 1, heads that do not divide, a dropout outside [0, 1), an unknown
        remat name, matmul dtype or attention, a layout with more blocks than max_seq_len has, a
        window, loss or MLP chunk below 1, or an MLP chunk with 8-bit products.
    """
    for field in ("vocab_size", "max_seq_len", "num_layers", "num_heads", "num_kv_heads"):
        _check_at_least_one(field, getattr(config, field))
    for field in ("embed_dim", "mlp_dim"):
        _check_at_least_one(field, getattr(config, field))
    if config.head_dim is None and config.embed_dim % config.num_heads:
        # Rotary positions turn pairs of a head's features.
        unit = config.num_heads * (2 if hasattr(config, "rope_theta") else 1)
        raise ValueError(
            f"embed_dim={config.embed_dim} is not divisible by num_heads={config.num_heads};"
            f" use embed_dim={-(-config.embed_dim // unit) * unit}"
        )
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"num_heads={config.num_heads} is not divisible by num_kv_heads={config.num_kv_heads}; "
            f"each key/value head serves as many query heads; use num_kv_heads=1 or "
            f"{config.num_heads}"
        )
    if not 0.0 <= config.dropout < 1.0:
        raise ValueError(f"dropout={config.dropout} is not in [0, 1); use 0.0 for none")
    check_remat(config.remat)
    check_matmul_dtype(config.matmul_dtype)
    check_implementation("attention", config.attention)
    if config.attention_layout is not None:
        layout_table(
            config.attention_layout, num_heads=config.num_heads, num_tokens=config.max_seq_len
        )
    for field in ("loss_chunk", "mlp_chunk", "attention_window"):
        if getattr(config, field) is not None:
            _check_at_least_one(field, getattr(config, field))
    if config.mlp_chunk is not None and config.matmul_dtype is not None:
        raise ValueError(
            f"mlp_chunk={config.mlp_chunk} with matmul_dtype={config.matmul_dtype!r}: 8-bit "
            "products are scaled by all tokens of a step; use mlp_chunk=None, or matmul_dtype=None"
        )


def _check_at_least_one(field: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{field}={value!r} must be a whole number of at least 1")
