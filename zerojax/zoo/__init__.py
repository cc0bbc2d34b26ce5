"""Reference models in plain Flax NNX, with LoRA, generation, and Hugging Face weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flax import nnx

from zerojax.config import ModelConfig
from zerojax.zoo.bert import Bert, BertConfig
from zerojax.zoo.decoder import MEGATRON_RULES, Block, Decoder, KVCache, TensorParallelRules
from zerojax.zoo.decoder_config import DecoderConfig, LayerKind
from zerojax.zoo.generation import generate, generate_from_source
from zerojax.zoo.gpt2 import GPT2, GPT2Config
from zerojax.zoo.layers import NormConfig
from zerojax.zoo.llama import Llama, LlamaConfig
from zerojax.zoo.lora import add_lora, merge_lora
from zerojax.zoo.moe import MoE, Routing, balance_losses
from zerojax.zoo.rope import Rope, RopeScaling
from zerojax.zoo.stages import Stages
from zerojax.zoo.t5 import T5, T5Config
from zerojax.zoo.task_heads import TaskConfig

__all__ = [
    "GPT2",
    "MODELS",
    "T5",
    "Bert",
    "BertConfig",
    "Block",
    "Decoder",
    "DecoderConfig",
    "GPT2Config",
    "KVCache",
    "LayerKind",
    "Llama",
    "LlamaConfig",
    "MoE",
    "NormConfig",
    "Rope",
    "RopeScaling",
    "Routing",
    "Stages",
    "T5Config",
    "TaskConfig",
    "add_lora",
    "as_decoder_config",
    "balance_losses",
    "build_model",
    "generate",
    "generate_from_source",
    "merge_lora",
    "tensor_parallel_rules",
]

MODELS: Mapping[str, tuple[type, Callable[..., nnx.Module]]] = {
    "gpt2": (GPT2Config, GPT2),
    "llama": (LlamaConfig, Llama),
    "bert": (BertConfig, Bert),
    "t5": (T5Config, T5),
    "decoder": (DecoderConfig, Decoder),
}
"""{model name in the record of a run: (config class, model class)}."""

_RULES: dict[str, TensorParallelRules] = {"gpt2": MEGATRON_RULES, "llama": MEGATRON_RULES}


def as_decoder_config(config: ModelConfig, vocab_size: int) -> GPT2Config | LlamaConfig:
    """Returns a decoder's configuration with every size resolved.

    Args:
      config: model section of the run; its `vocab_size`, if set, overrides the tokenizer's.
      vocab_size: number of tokens of the tokenizer.

    Raises:
      ValueError: sizes are inconsistent, `vocab_size` is below the tokenizer's, or the
        architecture does not support an option.
    """
    if config.vocab_size is not None and config.vocab_size < vocab_size:
        raise ValueError(
            f"model.vocab_size={config.vocab_size} is smaller than the tokenizer's {vocab_size}"
            f" tokens; use {vocab_size} or more, or leave it out"
        )
    vocab_size = config.vocab_size or vocab_size
    if config.name == "gpt2":
        if config.num_kv_heads not in (None, config.num_heads):
            raise ValueError(
                f"model.num_kv_heads={config.num_kv_heads}: gpt2 has one key/value head for each of"
                f" its {config.num_heads} query heads; remove it, or use model.name=llama"
            )
        if config.moe.num_experts:
            raise ValueError(
                f"model.moe.num_experts={config.moe.num_experts}: experts are gated MLPs without "
                "biases, but the MLPs of gpt2 are ungated with biases; use model.name=llama"
            )
        return GPT2Config(
            vocab_size=vocab_size,
            max_seq_len=config.max_seq_len,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            embed_dim=config.embed_dim,
            mlp_dim=config.mlp_dim,
            dropout=config.dropout,
            # None means the model's own choice: GPT-2 ties its embeddings, Llama does not.
            tie_embeddings=config.tie_embeddings is not False,
            norm_eps=config.norm_eps,
            remat=config.remat,
            loss_chunk=config.loss_chunk,
            mlp_chunk=config.mlp_chunk,
            matmul_dtype=config.matmul_dtype,
            bit_schedule=config.bit_schedule,
            attention=config.attention,
            attention_layout=config.attention_layout.layout,
            attention_window=config.attention_window,
        )
    return LlamaConfig(
        vocab_size=vocab_size,
        max_seq_len=config.max_seq_len,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        embed_dim=config.embed_dim,
        mlp_dim=config.mlp_dim,
        dropout=config.dropout,
        tie_embeddings=config.tie_embeddings is True,
        rope_theta=config.rope_theta,
        norm_eps=config.norm_eps,
        remat=config.remat,
        loss_chunk=config.loss_chunk,
        mlp_chunk=config.mlp_chunk,
        matmul_dtype=config.matmul_dtype,
        bit_schedule=config.bit_schedule,
        attention=config.attention,
        attention_layout=config.attention_layout.layout,
        attention_window=config.attention_window,
        moe=config.moe,
    )


def build_model(config: ModelConfig, vocab_size: int) -> Callable[[nnx.Rngs], Decoder]:
    """Returns a factory `rngs -> model` for the model section of a run.

    Sizes are checked before any array exists; see `as_decoder_config`.
    """
    sizes = as_decoder_config(config, vocab_size)

    def factory(rngs: nnx.Rngs) -> Decoder:
        if isinstance(sizes, GPT2Config):
            return GPT2(sizes, rngs=rngs)
        return Llama(sizes, rngs=rngs)

    return add_lora(factory, config.lora) if config.lora.rank else factory


def tensor_parallel_rules(name: str) -> TensorParallelRules:
    """Returns a model's Megatron-style rules: pairs (regex, mesh axis of each trailing dimension).
    Raises ValueError for a name other than "gpt2" and "llama"."""
    if name not in _RULES:
        raise ValueError(
            f"name={name!r} has no tensor-parallel rules; use one of {', '.join(_RULES)}"
        )
    return _RULES[name]
