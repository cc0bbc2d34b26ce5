"""Llama: RMSNorm, rotary positions, grouped key/value heads, SwiGLU, no biases."""

from __future__ import annotations

import dataclasses
from typing import Literal

from flax import nnx

from zerojax.config.attention_layouts import BlockLayout
from zerojax.config.compression import BitScheduleConfig
from zerojax.config.expert_settings import MoEConfig
from zerojax.config.late_dataclasses import dataclass
from zerojax.operators.attending import Implementation
from zerojax.zoo.decoder import Decoder
from zerojax.zoo.decoder_config import (
    DecoderConfig,
    LayerKind,
    check_decoder_sizes,
    check_decoder_task,
    check_experts,
    fill_sizes,
    shared_fields,
)
from zerojax.zoo.layers import NormConfig
from zerojax.zoo.rope import Rope, RopeScaling
from zerojax.zoo.task_heads import TaskConfig


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes of a Llama-style decoder (arXiv:2302.13971, arXiv:2307.09288).

    Attributes:
      vocab_size: number of token ids.
      max_seq_len: maximum number of tokens; only a limit, because rotary positions need no table.
      num_layers, num_heads, embed_dim: depth, query heads, width of the residual stream.
      num_kv_heads: number of key/value heads, a divisor of num_heads; None uses num_heads.
      mlp_dim: width of the gated MLP; None uses 8/3 * embed_dim rounded up to a multiple of 128,
        which has about as many parameters as an ungated MLP of 4 * embed_dim.
      head_dim: number of features of one head, even; None uses embed_dim / num_heads.
      dropout: probability of dropout on embeddings and on the output of each sub-layer.
      tie_embeddings: whether the output weights are the token table.
      rope_theta: base of the rotary wavelengths.
      rope_scaling: scaling of the wavelengths for longer texts; None for no scaling. With a cache,
        "dynamic" uses the cache's length, so that all keys are rotated with one base (in
        transformers the base changes while the text grows).
      norm_eps: number added to the mean square.
      remat, loss_chunk, mlp_chunk, matmul_dtype, bit_schedule, attention, attention_layout, task:
        fields as in `DecoderConfig`.
      moe: settings of experts that replace the MLP (arXiv:2401.04088); their default width
        `expert_dim` is `mlp_dim`.
      attention_window: number of tokens that each token attends to, including itself (Mistral's
        `sliding_window`); None for all earlier tokens.
    """

    vocab_size: int
    max_seq_len: int = 2048
    num_layers: int = 16
    num_heads: int = 32
    embed_dim: int = 2048
    num_kv_heads: int | None = None
    mlp_dim: int | None = None
    head_dim: int | None = None
    dropout: float = 0.0
    tie_embeddings: bool = False
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    remat: str = "none"
    loss_chunk: int | Literal["auto"] | None = None
    mlp_chunk: int | None = None
    matmul_dtype: str | None = None
    bit_schedule: BitScheduleConfig = dataclasses.field(default_factory=BitScheduleConfig)
    attention: Implementation = "auto"
    attention_layout: BlockLayout | None = None
    attention_window: int | None = None
    moe: MoEConfig = dataclasses.field(default_factory=MoEConfig)
    task: TaskConfig | None = None

    def __post_init__(self) -> None:
        fill_sizes(self)
        check_decoder_sizes(self)
        check_experts(self)
        check_decoder_task(self)
        if self.features_per_head % 2 or self.features_per_head < 1:
            origin = (
                f"embed_dim={self.embed_dim} / num_heads={self.num_heads} ="
                f" {self.features_per_head}"
                if self.head_dim is None
                else f"head_dim={self.head_dim}"
            )
            raise ValueError(
                f"{origin} is odd, but rotary positions rotate pairs of features; use"
                f" head_dim={2 * (max(self.features_per_head, 0) // 2 + 1)}"
            )
        if self.rope_theta <= 1.0:
            raise ValueError(f"rope_theta={self.rope_theta} must be above 1; 10000.0 is usual")

    @property
    def features_per_head(self) -> int:
        """Returns `head_dim`, or its default embed_dim / num_heads."""
        return self.head_dim or self.embed_dim // self.num_heads

    def as_decoder(self) -> DecoderConfig:
        """Converts to a `DecoderConfig` of the same architecture."""
        rope = Rope(theta=self.rope_theta, scaling=self.rope_scaling)
        return DecoderConfig(
            **shared_fields(self),
            norm=NormConfig(eps=self.norm_eps),
            kinds=(LayerKind(window=self.attention_window, rope=rope),),
            family="llama",
        )

    @property
    def num_parameters(self) -> int:
        """Returns the number of trainable elements."""
        return self.as_decoder().num_parameters

    @property
    def num_active_parameters(self) -> int:
        """Returns the number of trainable elements used per token; experts that a token does not
        choose are not counted."""
        return self.as_decoder().num_active_parameters


class Llama(Decoder):
    """Llama-style decoder. `model(tokens) -> logits`, `model.loss(batch) -> (sum, weight)`."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config.as_decoder(), rngs=rngs)
        self.config = config
