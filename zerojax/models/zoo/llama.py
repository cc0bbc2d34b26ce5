"""Llama: RMSNorm, rotary positions, grouped key/value heads, SwiGLU, no biases."""

from __future__ import annotations

import dataclasses

import jax
from flax import nnx

from zerojax.config.attention_layouts import BlockLayout
from zerojax.models.attending import Implementation
from zerojax.models.zoo.decoder import Block, Decoder, build_lm_head, check_decoder_sizes
from zerojax.models.zoo.layers import Attention, Dropout, Embedding, RMSNorm, SwiGluMlp
from zerojax.models.zoo.rope import RopeScaling
from zerojax.models.zoo.stacking import stack_blocks

INIT_STDDEV = 0.02
MLP_MULTIPLE = 128  # the default MLP width is rounded up to whole tiles of a matrix unit


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes of a Llama-style decoder (arXiv:2302.13971, arXiv:2307.09288).

    Attributes:
      vocab_size: number of token ids.
      max_seq_len: tokens; rotary positions need no table, so this only bounds what is accepted.
      num_layers, num_heads, embed_dim: depth, query heads, width of the residual stream.
      num_kv_heads: key/value heads, a divisor of num_heads; None: num_heads.
      mlp_dim: width of the gated MLP; None: 8/3 * embed_dim rounded up to a multiple of 128, which
        has about the parameters of an ungated MLP of 4 * embed_dim.
      head_dim: features of one head, even; None: embed_dim / num_heads.
      dropout: probability, on embeddings and on the output of each sub-layer.
      tie_embeddings: the output weights are the token table.
      rope_theta: base of the rotary wavelengths.
      rope_scaling: how they are stretched to longer texts; None: not. "dynamic" takes a text of the
        cache's length, so that all keys in a cache turn alike (transformers turns new ones by
        another base than old ones).
      norm_eps: added to the mean square.
      remat: "none", "full", "attention" or "dots" (see `stacking.scan_blocks`).
      loss_chunk: tokens whose logits `loss` holds at once; None: those of all.
      mlp_chunk: tokens of a row whose hidden activations of the MLP a layer holds at once; None:
        those of all.
      matmul_dtype: "fp8" for 8-bit products in the layers (see `fp8`); None: the compute dtype.
      attention: "auto", "xla", "chunked", "cudnn" or "mosaic_gpu" (see `zerojax.attention`).
      attention_layout: which blocks of tokens see which, in a row of max_seq_len tokens; shorter
        ones have a part of it (see `zerojax.attention`).
      attention_window: how many tokens each one sees, itself included (a sliding window, Mistral's
        `sliding_window`); None: all before it.
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
    loss_chunk: int | None = None
    mlp_chunk: int | None = None
    matmul_dtype: str | None = None
    attention: Implementation = "auto"
    attention_layout: BlockLayout | None = None
    attention_window: int | None = None

    def __post_init__(self) -> None:
        if self.num_kv_heads is None:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.mlp_dim is None:
            object.__setattr__(self, "mlp_dim", default_mlp_dim(self.embed_dim))
        check_decoder_sizes(self)
        if self.features_per_head % 2 or self.features_per_head < 1:
            origin = (
                f"embed_dim={self.embed_dim} / num_heads={self.num_heads} ="
                f" {self.features_per_head}"
                if self.head_dim is None
                else f"head_dim={self.head_dim}"
            )
            raise ValueError(
                f"{origin} is odd, but rotary positions turn pairs of features; use"
                f" head_dim={2 * (max(self.features_per_head, 0) // 2 + 1)}"
            )
        if self.rope_theta <= 1.0:
            raise ValueError(f"rope_theta={self.rope_theta} must be above 1; 10000.0 is usual")

    @property
    def features_per_head(self) -> int:
        """`head_dim`, also where it follows from the others."""
        return self.head_dim or self.embed_dim // self.num_heads

    @property
    def num_parameters(self) -> int:
        """Number of trainable elements."""
        width, kv_heads = self.embed_dim, self.num_kv_heads or self.num_heads
        attention = 2 * width * (self.num_heads + kv_heads) * self.features_per_head
        mlp = 3 * width * (self.mlp_dim or default_mlp_dim(width))
        tables = (1 if self.tie_embeddings else 2) * self.vocab_size * width
        return self.num_layers * (attention + mlp + 2 * width) + tables + width


def default_mlp_dim(embed_dim: int) -> int:
    """8/3 * embed_dim, rounded up to a multiple of `MLP_MULTIPLE`."""
    return -(-8 * embed_dim // (3 * MLP_MULTIPLE)) * MLP_MULTIPLE


class Llama(Decoder):
    """A Llama-style decoder. `model(tokens) -> logits`, `model.loss(batch) -> (sum, weight)`."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.token_embedding = Embedding(
            config.vocab_size, config.embed_dim, stddev=INIT_STDDEV, rngs=rngs
        )
        self.embed_dropout = Dropout(config.dropout, rngs=rngs)
        self.blocks = stack_blocks(
            lambda layer_rngs: _build_block(config, layer_rngs), config.num_layers, rngs=rngs
        )
        self.final_norm = RMSNorm(config.embed_dim, eps=config.norm_eps)
        self.lm_head = build_lm_head(config, stddev=INIT_STDDEV, rngs=rngs)

    def look_up(self, tokens: jax.Array, position: jax.Array | int) -> jax.Array:
        """[batch, new] tokens -> [batch, new, embed]; the position acts inside the attention."""
        return self.token_embedding(tokens)


def _build_block(config: LlamaConfig, rngs: nnx.Rngs) -> Block:
    # As in GPT-2: outputs added to the residual stream start smaller, the deeper the model.
    output_stddev = INIT_STDDEV / (2 * config.num_layers) ** 0.5
    return Block(
        attention_norm=RMSNorm(config.embed_dim, eps=config.norm_eps),
        attention=Attention(
            config.embed_dim,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads or config.num_heads,
            use_bias=False,
            stddev=INIT_STDDEV,
            output_stddev=output_stddev,
            rope_theta=config.rope_theta,
            rope_scaling=config.rope_scaling,
            head_dim=config.head_dim,
            rngs=rngs,
            matmul_dtype=config.matmul_dtype,
            implementation=config.attention,
            layout=config.attention_layout,
            window=config.attention_window,
            max_seq_len=config.max_seq_len,
        ),
        mlp_norm=RMSNorm(config.embed_dim, eps=config.norm_eps),
        mlp=SwiGluMlp(
            config.embed_dim,
            config.mlp_dim or default_mlp_dim(config.embed_dim),
            stddev=INIT_STDDEV,
            output_stddev=output_stddev,
            rngs=rngs,
            matmul_dtype=config.matmul_dtype,
        ),
        mlp_chunk=config.mlp_chunk,
        dropout=config.dropout,
        rngs=rngs,
    )
