"""GPT-2: learned positions, LayerNorm before each sub-layer, GELU, tied output embedding."""

from __future__ import annotations

import dataclasses
from typing import Literal

from flax import nnx

from zerojax.config.attention_layouts import BlockLayout
from zerojax.config.compression import BitScheduleConfig
from zerojax.config.late_dataclasses import dataclass
from zerojax.operators.attending import Implementation
from zerojax.zoo.decoder import Decoder
from zerojax.zoo.decoder_config import (
    DecoderConfig,
    LayerKind,
    check_decoder_sizes,
    check_decoder_task,
    shared_fields,
)
from zerojax.zoo.layers import NormConfig
from zerojax.zoo.task_heads import TaskConfig


@dataclass(frozen=True, kw_only=True)
class GPT2Config:
    """Sizes of a GPT-2 (Radford et al. 2019); the defaults are those of the 124M model.

    Attributes:
      vocab_size: number of token ids.
      max_seq_len: maximum number of tokens; number of rows of the position table.
      num_layers, num_heads, embed_dim: depth, attention heads, width of the residual stream.
      mlp_dim: width of the MLP; None uses 4 * embed_dim.
      dropout: probability of dropout on embeddings and on the output of each sub-layer. Attention
        probabilities are not dropped, because fused attention never stores them.
      tie_embeddings: whether the output weights are the token table.
      norm_eps: number added to the variance.
      remat, loss_chunk, mlp_chunk, matmul_dtype, bit_schedule, attention, attention_layout, task:
        fields as in `DecoderConfig`.
      attention_window: number of tokens that each token attends to, including itself (Mistral's
        `sliding_window`); None for all earlier tokens.
    """

    vocab_size: int = 50257
    max_seq_len: int = 1024
    num_layers: int = 12
    num_heads: int = 12
    embed_dim: int = 768
    mlp_dim: int | None = None
    dropout: float = 0.0
    tie_embeddings: bool = True
    norm_eps: float = 1e-5
    remat: str = "none"
    loss_chunk: int | Literal["auto"] | None = None
    mlp_chunk: int | None = None
    matmul_dtype: str | None = None
    bit_schedule: BitScheduleConfig = dataclasses.field(default_factory=BitScheduleConfig)
    attention: Implementation = "auto"
    attention_layout: BlockLayout | None = None
    attention_window: int | None = None
    task: TaskConfig | None = None

    def __post_init__(self) -> None:
        if self.mlp_dim is None:
            object.__setattr__(self, "mlp_dim", 4 * self.embed_dim)
        check_decoder_sizes(self)
        check_decoder_task(self)

    @property
    def num_kv_heads(self) -> int:
        """Returns `num_heads`: GPT-2 has one key/value head per query head."""
        return self.num_heads

    @property
    def head_dim(self) -> None:
        """Returns None, the default embed_dim / num_heads."""

    def as_decoder(self) -> DecoderConfig:
        """Converts to a `DecoderConfig` of the same architecture."""
        return DecoderConfig(
            **shared_fields(self),
            norm=NormConfig(kind="layer", eps=self.norm_eps, has_bias=True),
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            kinds=(LayerKind(window=self.attention_window, rope=None),),
            activation="gelu_tanh",
            gated=False,
            learned_positions=True,
            family="gpt2",
        )

    @property
    def num_parameters(self) -> int:
        """Returns the number of trainable elements."""
        return self.as_decoder().num_parameters


class GPT2(Decoder):
    """GPT-2. `model(tokens) -> logits`, `model.loss(batch) -> (sum, weight)`."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs) -> None:
        super().__init__(config.as_decoder(), rngs=rngs)
        self.config = config
