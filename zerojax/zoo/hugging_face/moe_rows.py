"""Families with mixtures of experts: Mixtral, OLMoE, Qwen3-MoE, gpt-oss.

Sources: arXiv:2401.04088, arXiv:2409.02060, arXiv:2505.09388, arXiv:2508.10925, and transformers
5.23. Files have one tensor for each expert of each layer; those of gpt-oss, one for each layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from zerojax.config.expert_settings import MoEConfig
from zerojax.zoo.decoder_config import DecoderConfig, LayerKind
from zerojax.zoo.hugging_face import decoder_leaves
from zerojax.zoo.hugging_face.config_reading import ConfigReading, UnsupportedError
from zerojax.zoo.hugging_face.decoder_keys import (
    patterned,
    read_activation,
    read_biases,
    read_layer_types,
    read_sizes,
    types_of,
    window_in,
    window_of,
)
from zerojax.zoo.hugging_face.families import Keys, row, uniform
from zerojax.zoo.hugging_face.layouts import Architecture
from zerojax.zoo.hugging_face.rope_keys import FULL, SLIDING, read_rope, rope_of
from zerojax.zoo.layers import NormConfig

_WHEN_ON = "router_aux_loss_coef"
"""Keys that are read only if "output_router_logits" adds the balance loss; else without effect."""


def _read_experts(
    config: ConfigReading,
    *,
    number: int,
    chosen: int,
    width: int,
    balance: float,
    renormalize: bool,
) -> Keys:
    """Reads the settings of experts that all families share.

    Args:
      config: the config.json.
      number, chosen, balance: transformers' defaults of num_experts, num_experts_per_tok and
        router_aux_loss_coef.
      width: width of one expert.
      renormalize: whether the scores of the chosen experts are divided by their sum.
    """
    names = ("num_experts", "num_local_experts")  # names in transformers 4 and 5
    counts = {name: config.get(name) for name in names if config.has(name)}
    if len(set(counts.values())) > 1:
        raise UnsupportedError(
            f"{config.where}: {' and '.join(f'{k}={x!r}' for k, x in counts.items())} are two "
            "names of the same number, with different values; remove one"
        )
    is_balanced = bool(config.get("output_router_logits", False))
    moe = MoEConfig(
        num_experts=next(iter(counts.values()), number),
        experts_per_token=config.positive("num_experts_per_tok", chosen),
        expert_dim=width,
        renormalize=renormalize,
        balance="hugging_face",
        balance_weight=float(config.get(_WHEN_ON, balance)) if is_balanced else 0.0,
    )
    return {"moe": moe}


def _write_experts(config: DecoderConfig) -> Keys:
    moe = config.moe
    is_balanced = moe.balance == "hugging_face" and moe.weight_of_balance > 0
    return {
        "num_experts_per_tok": moe.experts_per_token,
        "output_router_logits": is_balanced,
        **({_WHEN_ON: moe.weight_of_balance} if is_balanced else {}),
    }


# --- Mixtral --------------------------------------------------------------------------------------


def _read_mixtral(config: ConfigReading) -> Keys:
    """Returns the decoder fields of Mixtral.

    Renormalized scores, and one window or none for all layers.
    """
    sizes = read_sizes(config, kv_heads=8, eps=1e-5)
    config.require("zerojax's router has no noise", router_jitter_noise=(0.0, None))
    rope = read_rope(config, longest=sizes["max_seq_len"], theta=1e6)
    width = sizes["mlp_dim"]
    defaults = {"number": 8, "chosen": 2, "balance": 0.001}
    return {
        **sizes,
        **_read_experts(config, width=width, renormalize=True, **defaults),
        "activation": read_activation(config),
        "kinds": (LayerKind(window=config.get("sliding_window"), rope=rope),),
    }


def _write_mixtral(config: DecoderConfig) -> Keys:
    return {
        **uniform(config),
        **_write_experts(config),
        "intermediate_size": config.moe.expert_dim,
        "num_local_experts": config.moe.num_experts,
        "router_jitter_noise": 0.0,
        "sliding_window": window_in(config),
    }


# --- OLMoE ----------------------------------------------------------------------------------------


def _read_olmoe(config: ConfigReading) -> Keys:
    """Returns the decoder fields of OLMoE.

    Norms over all heads of query and key, followed by clipping.
    """
    sizes = read_sizes(config, eps=1e-5)
    of_head = sizes["embed_dim"] // sizes["num_heads"]
    config.require("head_dim is hidden_size / num_attention_heads", head_dim=(None, of_head))
    rope = read_rope(config, longest=sizes["max_seq_len"])
    width, renormalize = sizes["mlp_dim"], bool(config.get("norm_topk_prob", False))
    defaults = {"number": 64, "chosen": 8, "balance": 0.01}
    return {
        **sizes,
        **read_biases(config),
        **_read_experts(config, width=width, renormalize=renormalize, **defaults),
        "head_dim": None,
        "query_key_norm": "all",
        "clip_qkv": config.get("clip_qkv"),
        "activation": read_activation(config),
        "kinds": (LayerKind(rope=rope),),
    }


def _write_olmoe(config: DecoderConfig) -> Keys:
    written = {
        **uniform(config),
        **_write_experts(config),
        "attention_bias": config.qkv_bias,
        "clip_qkv": config.clip_qkv,
        "intermediate_size": config.moe.expert_dim,
        "norm_topk_prob": config.moe.renormalize,
        "num_experts": config.moe.num_experts,
    }
    written.pop("head_dim", None)
    return written


# --- Qwen3-MoE ------------------------------------------------------------------------------------


def _read_qwen3_moe(config: ConfigReading) -> Keys:
    """Returns the decoder fields of Qwen3-MoE: norms of query and key.

    "intermediate_size" has no effect, because all layers have experts. A window applies to all
    layers, as in transformers.
    """
    sizes = read_sizes(config, kv_heads=4)
    everywhere = {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)}
    config.require("all layers have experts", **everywhere)
    rope = read_rope(config, longest=sizes["max_seq_len"])
    # Also read if it has no effect: a key that is not read is refused.
    window = config.get("sliding_window", 4096)
    width = config.get("moe_intermediate_size", 768)
    renormalize = bool(config.get("norm_topk_prob", False))
    defaults = {"number": 128, "chosen": 8, "balance": 0.001}
    if not config.get("use_sliding_window", False):
        window = None
    return {
        **sizes,
        **read_biases(config),
        **_read_experts(config, width=width, renormalize=renormalize, **defaults),
        "query_key_norm": "head",
        "activation": read_activation(config),
        "kinds": (LayerKind(window=window, rope=rope),),
    }


def _write_qwen3_moe(config: DecoderConfig) -> Keys:
    window = window_in(config)
    return {
        **uniform(config),
        **_write_experts(config),
        "attention_bias": config.qkv_bias,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": config.moe.expert_dim,
        "norm_topk_prob": config.moe.renormalize,
        "num_experts": config.moe.num_experts,
        "sliding_window": window,
        "use_sliding_window": window is not None,
    }


# --- gpt-oss --------------------------------------------------------------------------------------

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Rotary positions of a config.json that has none, as in transformers."""


def _read_gpt_oss(config: ConfigReading) -> Keys:
    """Reads gpt-oss: attention sinks, alternating windows, clipped experts with biases.

    The router's softmax is over the chosen experts, which equals `renormalize`.
    """
    sizes = read_sizes(config, kv_heads=8, head_dim=64, eps=1e-5)
    config.require("experts use x * sigmoid(1.702 x)", hidden_act=("silu",), swiglu_alpha=(1.702,))
    if not config.has("rope_parameters") and not config.get("rope_scaling"):
        config.asked |= {"rope_parameters", "rope_scaling"}
        theta = config.positive("rope_theta", 150000.0)
        values = {**_YARN, "rope_theta": theta}
        rope = rope_of(values, where=config.where, theta=theta, longest=sizes["max_seq_len"])
    else:
        rope = read_rope(config, longest=sizes["max_seq_len"], theta=150000.0)
    count = sizes["num_layers"]
    types = read_layer_types(config, [FULL if n % 2 else SLIDING for n in range(count)])
    window = window_of(config, types, config.get("sliding_window", 128))
    layers = [LayerKind(window=window if kind == SLIDING else None, rope=rope) for kind in types]
    biases = bool(config.get("attention_bias", True))
    defaults = {"number": 128, "chosen": 4, "balance": 0.001}
    return {
        **sizes,
        **patterned(layers),
        **_read_experts(config, width=sizes["mlp_dim"], renormalize=True, **defaults),
        "norm": NormConfig(eps=sizes["norm"].eps),
        "qkv_bias": biases,
        "output_bias": biases,
        "mlp_bias": True,
        "attention_sinks": True,
        "activation": "quick_gelu",
        "expert_limit": float(config.positive("swiglu_limit", 7.0)),
    }


def _write_gpt_oss(config: DecoderConfig) -> Keys:
    return {
        **uniform(config),
        **_write_experts(config),
        "attention_bias": config.qkv_bias,
        "head_dim": config.features_per_head,
        "hidden_act": "silu",
        "intermediate_size": config.moe.expert_dim,
        "layer_types": types_of(config),
        "num_local_experts": config.moe.num_experts,
        "sliding_window": window_in(config),
        "swiglu_alpha": 1.702,
        "swiglu_limit": config.expert_limit,
    }


ROWS: Mapping[str, Architecture] = {
    entry.model_type: entry
    for entry in (
        row(
            "mixtral",
            "MixtralForCausalLM",
            _read_mixtral,
            _write_mixtral,
            leaves=decoder_leaves.mixtral_leaves,
            no_effect=(_WHEN_ON,),
        ),
        row(
            "olmoe",
            "OlmoeForCausalLM",
            _read_olmoe,
            _write_olmoe,
            no_effect=(_WHEN_ON,),
            classifier=None,
        ),
        row(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            _read_qwen3_moe,
            _write_qwen3_moe,
            no_effect=(_WHEN_ON, "max_window_layers"),
        ),
        row(
            "gpt_oss",
            "GptOssForCausalLM",
            _read_gpt_oss,
            _write_gpt_oss,
            leaves=decoder_leaves.gpt_oss_leaves,
            # The initial context is in rope_parameters; experts_per_token is an older name.
            no_effect=(_WHEN_ON, "initial_context_length", "experts_per_token"),
        ),
    )
}
"""{model_type: architecture}."""


def as_mixtral(config: Any) -> DecoderConfig:
    """Converts the configuration of a Llama with experts to an equal one of the family Mixtral.

    Args:
      config: a `LlamaConfig` with experts.
    """
    decoder = config.as_decoder()
    return dataclasses.replace(decoder, family="mixtral", mlp_dim=decoder.moe.expert_dim)
