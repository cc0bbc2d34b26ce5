"""GPT-2: learned positions, LayerNorm before each sub-layer, GELU, tied output embedding."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from zerojax.config.attention_layouts import BlockLayout
from zerojax.models.attending import Implementation
from zerojax.models.zoo.decoder import Block, Decoder, build_lm_head, check_decoder_sizes
from zerojax.models.zoo.layers import Attention, Dropout, Embedding, GeluMlp, LayerNorm
from zerojax.models.zoo.stacking import stack_blocks

INIT_STDDEV = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2Config:
    """Sizes of a GPT-2 (Radford et al. 2019); the defaults are the 124M model.

    Attributes:
      vocab_size: number of token ids.
      max_seq_len: tokens; rows of the position table.
      num_layers, num_heads, embed_dim: depth, attention heads, width of the residual stream.
      mlp_dim: width of the MLP; None: 4 * embed_dim.
      dropout: probability, on embeddings and on the output of each sub-layer. Attention
        probabilities are not dropped, since a fused attention never holds them.
      tie_embeddings: the output weights are the token table.
      norm_eps: added to the variance.
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
    loss_chunk: int | None = None
    mlp_chunk: int | None = None
    matmul_dtype: str | None = None
    attention: Implementation = "auto"
    attention_layout: BlockLayout | None = None
    attention_window: int | None = None

    def __post_init__(self) -> None:
        if self.mlp_dim is None:
            object.__setattr__(self, "mlp_dim", 4 * self.embed_dim)
        check_decoder_sizes(self)

    @property
    def num_kv_heads(self) -> int:
        """GPT-2 has one key/value head for each query head."""
        return self.num_heads

    @property
    def head_dim(self) -> None:
        """As wide as heads get when they share the width."""

    @property
    def num_parameters(self) -> int:
        """Number of trainable elements."""
        width, mlp = self.embed_dim, self.mlp_dim or 4 * self.embed_dim
        attention = 4 * (width * width + width)
        layer = attention + 2 * width * mlp + mlp + width + 4 * width
        tables = (self.vocab_size + self.max_seq_len) * width
        head = 0 if self.tie_embeddings else width * self.vocab_size
        return self.num_layers * layer + tables + 2 * width + head


class GPT2(Decoder):
    """GPT-2. `model(tokens) -> logits`, `model.loss(batch) -> (sum, weight)`."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.token_embedding = Embedding(
            config.vocab_size, config.embed_dim, stddev=INIT_STDDEV, rngs=rngs
        )
        self.position_embedding = Embedding(
            config.max_seq_len, config.embed_dim, stddev=INIT_STDDEV, rngs=rngs
        )
        self.embed_dropout = Dropout(config.dropout, rngs=rngs)
        self.blocks = stack_blocks(
            lambda layer_rngs: _build_block(config, layer_rngs), config.num_layers, rngs=rngs
        )
        self.final_norm = LayerNorm(config.embed_dim, eps=config.norm_eps)
        self.lm_head = build_lm_head(config, stddev=INIT_STDDEV, rngs=rngs)

    def look_up(self, tokens: jax.Array, position: jax.Array | int) -> jax.Array:
        """[batch, new] tokens -> [batch, new, embed], without dropout; see `Decoder.look_up`."""
        x = self.token_embedding(tokens)
        if jnp.ndim(position) == 2:
            return x + self.position_embedding(jnp.asarray(position)).astype(x.dtype)
        positions = lax.dynamic_slice_in_dim(
            self.position_embedding.embedding[...], position, tokens.shape[1], axis=0
        )
        return x + positions[None].astype(x.dtype)


def _build_block(config: GPT2Config, rngs: nnx.Rngs) -> Block:
    # Each of the 2 * num_layers outputs added to the residual stream starts smaller, so that the
    # stream's variance does not grow with depth (Radford et al. 2019, section 2.3).
    output_stddev = INIT_STDDEV / (2 * config.num_layers) ** 0.5
    return Block(
        attention_norm=LayerNorm(config.embed_dim, eps=config.norm_eps),
        attention=Attention(
            config.embed_dim,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            use_bias=True,
            stddev=INIT_STDDEV,
            output_stddev=output_stddev,
            rope_theta=None,
            rngs=rngs,
            matmul_dtype=config.matmul_dtype,
            implementation=config.attention,
            layout=config.attention_layout,
            window=config.attention_window,
            max_seq_len=config.max_seq_len,
        ),
        mlp_norm=LayerNorm(config.embed_dim, eps=config.norm_eps),
        mlp=GeluMlp(
            config.embed_dim,
            config.mlp_dim or 4 * config.embed_dim,
            stddev=INIT_STDDEV,
            output_stddev=output_stddev,
            rngs=rngs,
            matmul_dtype=config.matmul_dtype,
        ),
        mlp_chunk=config.mlp_chunk,
        dropout=config.dropout,
        rngs=rngs,
    )
