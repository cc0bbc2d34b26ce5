"""Llama in transformers' format: kernels [out, in], heads and features in one dimension."""

from __future__ import annotations

from typing import Any

from zerojax.zoo.hugging_face import decoder_leaves
from zerojax.zoo.hugging_face.config_reading import ConfigReading
from zerojax.zoo.hugging_face.layouts import Architecture, Leaf
from zerojax.zoo.hugging_face.rope_keys import read_rope, write_rope
from zerojax.zoo.llama import Llama, LlamaConfig
from zerojax.zoo.rope import Rope


def leaves(config: LlamaConfig) -> list[Leaf]:
    """Lists a model's parameters and the tensors that contain them."""
    return decoder_leaves.leaves(config.as_decoder())


def read_config(config: ConfigReading) -> dict[str, Any]:
    """Reads config.json of transformers 4 or 5."""
    config.require("this model's MLP is gated by SiLU", hidden_act=("silu", "swish"))
    config.require("the projections of this model have no biases", attention_bias=(False, None))
    config.require("the MLP of this model has no biases", mlp_bias=(False, None))
    config.require("zerojax has no attention dropout", attention_dropout=(0.0, None))
    config.require("this model's rotary pairs are not interleaved", rope_interleaved=(False, None))
    longest = config.needed("max_position_embeddings")
    rope = read_rope(config, longest=longest)
    return {
        "vocab_size": config.needed("vocab_size"),
        "max_seq_len": longest,
        "num_layers": config.needed("num_hidden_layers"),
        "num_heads": config.needed("num_attention_heads"),
        "num_kv_heads": config.get("num_key_value_heads"),
        "embed_dim": config.needed("hidden_size"),
        "mlp_dim": config.needed("intermediate_size"),
        "head_dim": config.get("head_dim"),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "norm_eps": config.get("rms_norm_eps", 1e-6),
    }


def write_config(config: LlamaConfig) -> dict[str, Any]:
    """Builds the keys of config.json, readable by transformers 4 and 5."""
    rope = Rope(theta=config.rope_theta, scaling=config.rope_scaling)
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": config.features_per_head,
        "hidden_act": "silu",
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "mlp_bias": False,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.norm_eps,
        **write_rope(rope, config.max_seq_len),
        "tie_word_embeddings": config.tie_embeddings,
        "vocab_size": config.vocab_size,
    }


LLAMA_ROW = Architecture(
    model_type="llama",
    class_name="LlamaForCausalLM",
    config_class=LlamaConfig,
    build=lambda config, rngs: Llama(config, rngs=rngs),
    leaves=leaves,
    read=read_config,
    write_config=write_config,
    prefix="model.",
    ignored=(r"\.rotary_emb\.inv_freq$",),
)
