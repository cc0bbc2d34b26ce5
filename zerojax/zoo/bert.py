"""BERT: bidirectional encoder, post-layer norms, a head for masked tokens or for a task."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from zerojax.config.attention_layouts import BlockLayout
from zerojax.config.compression import BitScheduleConfig
from zerojax.config.late_dataclasses import dataclass
from zerojax.models.losses import NATS_PER_TOKEN, next_token
from zerojax.operators.attending import Implementation
from zerojax.tracing.stacking import scan_blocks, stack_blocks
from zerojax.zoo.decoder import MEGATRON_RULES, RESIDUAL_DIMS, TensorParallelRules, check_tokens
from zerojax.zoo.decoder_config import LayerKind, check_decoder_sizes
from zerojax.zoo.layers import (
    Dropout,
    Embedding,
    LayerNorm,
    Mlp,
    Projection,
    constrain,
    expand_rank,
)
from zerojax.zoo.self_attention import Attention
from zerojax.zoo.task_heads import TaskConfig, build_task_head, task_loss, tokens_of

INIT_STDDEV = 0.02


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """Sizes of a BERT (arXiv:1810.04805); the defaults are those of the base model, uncased.

    Attributes:
      vocab_size: number of token ids.
      max_seq_len: maximum number of tokens; number of rows of the position table.
      num_types: number of rows of the table of token types (first and second sentence).
      num_layers, num_heads, embed_dim: depth, attention heads, width of the residual stream.
      mlp_dim: width of the MLP; None uses 4 * embed_dim.
      dropout: probability of dropout on embeddings and on the output of each sub-layer. Attention
        probabilities are not dropped, because fused attention never stores them.
      norm_eps: number added to the variance.
      exact_gelu: whether GELU uses the error function, as in the paper; False uses its tanh form.
      has_mlm_head: whether to add a head that predicts masked tokens; the loss requires it.
      has_pooler: whether to add a dense layer on the first token, for classification. The model's
        loss does not use it; `freeze=("pooler/",)` prevents weight decay from shrinking a trained
        one.
      task: classes of texts or of tokens, or answers in a text; its head replaces the one for
        masked tokens. Classes of texts use the pooler, other tasks have none, as in transformers.
        None for no task.
      remat, matmul_dtype, bit_schedule, attention, attention_layout: fields as in `DecoderConfig`.
    """

    vocab_size: int = 30522
    max_seq_len: int = 512
    num_types: int = 2
    num_layers: int = 12
    num_heads: int = 12
    embed_dim: int = 768
    mlp_dim: int | None = None
    dropout: float = 0.0
    norm_eps: float = 1e-12
    exact_gelu: bool = True
    has_mlm_head: bool = True
    has_pooler: bool = False
    remat: str = "none"
    matmul_dtype: str | None = None
    bit_schedule: BitScheduleConfig = dataclasses.field(default_factory=BitScheduleConfig)
    attention: Implementation = "auto"
    attention_layout: BlockLayout | None = None
    task: TaskConfig | None = None

    # `check_decoder_sizes` reads these fields, which are fixed for BERT.
    num_kv_heads: ClassVar[int] = 1
    head_dim: ClassVar[None] = None
    loss_chunk: ClassVar[None] = None
    mlp_chunk: ClassVar[None] = None
    attention_window: ClassVar[None] = None

    def __post_init__(self) -> None:
        if self.mlp_dim is None:
            object.__setattr__(self, "mlp_dim", 4 * self.embed_dim)
        if self.task is not None:
            object.__setattr__(self, "has_mlm_head", False)
            object.__setattr__(self, "has_pooler", self.task.kind == "sequence_classification")
        check_decoder_sizes(self)
        if isinstance(self.num_types, bool) or self.num_types < 1:
            raise ValueError(f"num_types={self.num_types!r} must be at least 1; BERT has 2")

    @property
    def num_parameters(self) -> int:
        """Returns the number of trainable elements."""
        width, mlp = self.embed_dim, self.mlp_dim or 4 * self.embed_dim
        dense, norm = width * width + width, 2 * width
        layer = 4 * dense + 2 * width * mlp + mlp + width + 2 * norm
        tables = (self.vocab_size + self.max_seq_len + self.num_types) * width + norm
        head = dense + norm + self.vocab_size if self.has_mlm_head else 0
        if self.task is not None:
            head = self.task.num_parameters(width, use_bias=True)
        return self.num_layers * layer + tables + head + (dense if self.has_pooler else 0)


class Encoded(NamedTuple):
    """Values passed from layer to layer: hidden states and the mask of padding."""

    hidden: jax.Array
    """[batch, seq, embed]."""
    visible: jax.Array | None
    """bool [batch, seq], False for padding; None without padding."""


class EncoderBlock(nnx.Module):
    """One post-norm layer: x = norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs) -> None:
        width = config.embed_dim
        self.attention = Attention(
            width,
            num_heads=config.num_heads,
            num_kv_heads=config.num_heads,
            qkv_bias=True,
            output_bias=True,
            stddev=INIT_STDDEV,
            output_stddev=INIT_STDDEV,
            kinds=(LayerKind(rope=None),),
            rngs=rngs,
            matmul_dtype=config.matmul_dtype,
            bit_schedule=config.bit_schedule,
            implementation=config.attention,
            layout=config.attention_layout,
            max_seq_len=config.max_seq_len,
            is_causal=False,
        )
        self.attention_dropout = Dropout(config.dropout, rngs=rngs)
        self.attention_norm = LayerNorm(width, eps=config.norm_eps)
        self.mlp = Mlp(
            width,
            config.mlp_dim or 4 * width,
            activation="gelu" if config.exact_gelu else "gelu_tanh",
            gated=False,
            use_bias=True,
            stddev=INIT_STDDEV,
            output_stddev=INIT_STDDEV,
            rngs=rngs,
            matmul_dtype=config.matmul_dtype,
            bit_schedule=config.bit_schedule,
        )
        self.mlp_dropout = Dropout(config.dropout, rngs=rngs)
        self.mlp_norm = LayerNorm(width, eps=config.norm_eps)

    def __call__(self, encoded: Encoded) -> Encoded:
        """Applies the layer; shapes and dtypes are unchanged."""
        x, visible = encoded
        x = self.attention_norm(_add(x, self.attention_dropout(self.attention(x, visible))))
        x = self.mlp_norm(_add(x, self.mlp_dropout(self.mlp(x))))
        return Encoded(constrain(x, RESIDUAL_DIMS), visible)


class MaskedTokenHead(nnx.Module):
    """Head for masked tokens: token_table @ norm(gelu(dense(x))) + bias."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs) -> None:
        width = (config.embed_dim,)
        self.exact_gelu = config.exact_gelu
        self.transform = Projection(width, width, stddev=INIT_STDDEV, use_bias=True, rngs=rngs)
        self.norm = LayerNorm(config.embed_dim, eps=config.norm_eps)
        self.bias = nnx.Param(jnp.zeros((config.vocab_size,), jnp.float32))

    def __call__(self, x: jax.Array, table: Embedding) -> jax.Array:
        """Maps [batch, seq, embed] to logits [batch, seq, vocab]."""
        x = self.norm(jax.nn.gelu(self.transform(x), approximate=not self.exact_gelu))
        logits = table.attend(x)
        return logits + expand_rank(self.bias[...].astype(logits.dtype), logits.ndim)


class Bert(nnx.Module):
    """BERT. `model(tokens) -> logits`, `model.loss(batch) -> (sum, weight)`.

    With `config.task`, the logits are those of the task, and the loss takes labels.
    """

    tensor_parallel_rules: ClassVar[TensorParallelRules] = (
        *MEGATRON_RULES,
        (r"mlm_head/bias$", ("model",)),
    )
    loss_unit: str | None = NATS_PER_TOKEN
    """Unit of the mean loss; None for tasks."""
    task_head: Projection | None = None

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config

        def table(rows: int) -> Embedding:
            return Embedding(rows, config.embed_dim, stddev=INIT_STDDEV, rngs=rngs)

        self.token_embedding = table(config.vocab_size)
        self.position_embedding = table(config.max_seq_len)
        self.type_embedding = table(config.num_types)
        self.embed_norm = LayerNorm(config.embed_dim, eps=config.norm_eps)
        self.embed_dropout = Dropout(config.dropout, rngs=rngs)
        self.blocks = stack_blocks(
            lambda layer_rngs: EncoderBlock(config, rngs=layer_rngs), config.num_layers, rngs=rngs
        )
        self.mlm_head = MaskedTokenHead(config, rngs=rngs) if config.has_mlm_head else None
        self.pooler = _build_pooler(config, rngs) if config.has_pooler else None
        if config.task is not None:
            has_dropout = config.task.kind != "question_answering"
            self.task_dropout = Dropout(config.dropout if has_dropout else 0.0, rngs=rngs)
            self.task_head = build_task_head(
                config.task, config.embed_dim, use_bias=True, rngs=rngs
            )
            self.loss_unit = None

    def embed(self, tokens: jax.Array, token_types: jax.Array | None = None) -> jax.Array:
        """Embeds tokens, integers [batch, seq], as [batch, seq, embed].

        Args:
          tokens: integers [batch, seq].
          token_types: integers [batch, seq] below `num_types`; None uses type 0.
        Raises:
          TypeError: `tokens` are not integers.
          ValueError: `tokens` do not have two dimensions, or are longer than `max_seq_len`.
        """
        check_tokens(tokens, max_seq_len=self.config.max_seq_len)
        types = jnp.zeros_like(tokens) if token_types is None else token_types
        x = self.token_embedding(tokens)
        positions = self.position_embedding.embedding[...][None, : tokens.shape[1]]
        x = x + self.type_embedding(types).astype(x.dtype) + positions.astype(x.dtype)
        return constrain(self.embed_dropout(self.embed_norm(x)), RESIDUAL_DIMS)

    def hidden(
        self,
        tokens: jax.Array,
        attention_mask: jax.Array | None = None,
        token_types: jax.Array | None = None,
    ) -> jax.Array:
        """Computes the hidden states after the last layer.

        Args:
          tokens: integers [batch, seq].
          attention_mask: [batch, seq], 0 for padding; None without padding.
          token_types: integers [batch, seq]; None uses type 0.

        Returns:
          Hidden states [batch, seq, embed]; values at padding positions are undefined.
        """
        visible = None if attention_mask is None else attention_mask != 0
        start = Encoded(self.embed(tokens, token_types), visible)
        return scan_blocks(self.blocks, start, remat=self.config.remat).hidden

    def __call__(
        self,
        tokens: jax.Array,
        attention_mask: jax.Array | None = None,
        token_types: jax.Array | None = None,
    ) -> jax.Array:
        """Computes logits [batch, seq, vocab] of the token at each position; see `hidden`. With a
        task, `classify`.

        Raises:
          ValueError: the model has no head for masked tokens and no task.
        """
        if self.task_head is not None:
            return self.classify(tokens, attention_mask, token_types)
        return self.head(self.hidden(tokens, attention_mask, token_types))

    def classify(
        self,
        tokens: jax.Array,
        attention_mask: jax.Array | None = None,
        token_types: jax.Array | None = None,
    ) -> jax.Array:
        """Computes the logits of the model's task; arguments as in `hidden`.

        Returns:
          Logits [batch, labels] of a text; [batch, seq, labels] of tokens; [batch, seq, 2] of the
          first and the last token of an answer. Values at padding positions are undefined.

        Raises:
          ValueError: the model has no head for a task.
        """
        if self.task_head is None:
            raise ValueError(
                "this BERT has no head for a task; build it with task=zerojax.zoo.TaskConfig(...)"
            )
        x = self.hidden(tokens, attention_mask, token_types)
        x = x if self.pooler is None else self.pool(x)
        return self.task_head(self.task_dropout(x))

    def head(self, x: jax.Array) -> jax.Array:
        """Maps [batch, positions, embed] to logits [batch, positions, vocab].

        Raises:
          ValueError: the model has no head for masked tokens.
        """
        if self.mlm_head is None:
            raise ValueError(
                "this BERT has no head for masked tokens (has_mlm_head=False), so it computes "
                "neither their logits nor a loss of them; use model.hidden or model.embed_texts, "
                "or pass loss="
            )
        return self.mlm_head(x, self.token_embedding)

    def loss(self, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        """Computes the cross-entropy of the masked tokens in float32, as (sum, weight), or the loss
        of the task.

        Args:
          batch: dict with "tokens" [batch, seq], some of them masked, and "targets", the original
            tokens. With "positions", integers [batch, n], logits are computed only at these
            positions, and targets are [batch, n]; otherwise targets are [batch, seq]. Optional
            "weights", in the shape of the targets, are 0 for positions to ignore. Optional
            "attention_mask" and "token_types" are arguments of `hidden`. With a task, the labels of
            `task_heads.task_loss` instead of targets, positions and weights of tokens.

        Raises:
          ValueError: the batch has neither positions nor weights, like batches for next-token
            prediction, in which a bidirectional model would copy the next token from its input;
            or rows hold several texts ("segments").
        """
        if "segments" in batch:
            raise ValueError(
                "each row holds several texts (batch['segments'], from chats or packed text), but "
                "BERT cannot separate them; make batches with zerojax.data.as_masked_source"
            )
        if self.config.task is not None:
            inputs = (batch.get(name) for name in ("attention_mask", "token_types"))
            return task_loss(self.classify(tokens_of(batch), *inputs), batch, self.config.task)
        if "positions" not in batch and "weights" not in batch:
            raise ValueError(
                f"a batch for BERT needs 'positions' or 'weights' of the masked tokens, but has "
                f"only {sorted(batch)}; make batches with zerojax.data.as_masked_source(source, "
                "mask_token=...), or, if batch['tokens'] is masked already, add weights of 1 to "
                "count every token"
            )
        x = self.hidden(tokens_of(batch), batch.get("attention_mask"), batch.get("token_types"))
        if "positions" in batch:
            # A position outside the row gives NaN, and not another token's values.
            x = jnp.take_along_axis(x, batch["positions"][..., None], axis=1, mode="fill")
        return next_token(self.head(x), batch["targets"], batch.get("weights"))

    def pool(self, hidden: jax.Array) -> jax.Array:
        """Computes tanh(dense(first token)): [batch, seq, embed] -> [batch, embed].

        Raises:
          ValueError: the model has no pooler.
        """
        if self.pooler is None:
            raise ValueError("this BERT has no pooler; build it with has_pooler=True")
        return jnp.tanh(self.pooler(hidden[:, 0]))

    def embed_texts(self, tokens: jax.Array, attention_mask: jax.Array | None = None) -> jax.Array:
        """Computes the mean hidden state of each text, normalized to length 1.

        This is the embedding of sentence-transformers models with mean pooling (arXiv:1908.10084),
        such as all-MiniLM-L6-v2.

        Args:
          tokens: integers [batch, seq].
          attention_mask: [batch, seq], 0 for padding; None without padding.

        Returns:
          Embeddings, float32 [batch, embed].
        """
        hidden = self.hidden(tokens, attention_mask).astype(jnp.float32)
        mask = jnp.ones(tokens.shape, bool) if attention_mask is None else attention_mask != 0
        counted = mask.astype(jnp.float32)[..., None]
        # At least 1, for a row that is all padding.
        mean = jnp.sum(hidden * counted, axis=1) / jnp.maximum(jnp.sum(counted, axis=1), 1.0)
        return mean / jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), 1e-12)


def _build_pooler(config: BertConfig, rngs: nnx.Rngs) -> Projection:
    width = (config.embed_dim,)
    return Projection(width, width, stddev=INIT_STDDEV, use_bias=True, rngs=rngs)


def _add(x: jax.Array, change: jax.Array) -> jax.Array:
    return constrain(x + change.astype(x.dtype), RESIDUAL_DIMS)
