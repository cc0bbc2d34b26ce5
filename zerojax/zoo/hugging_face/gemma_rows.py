"""Gemma 1-3: norm scales around 1, four norms per layer, soft caps, alternating windows.

Sources: arXiv:2403.08295, arXiv:2408.00118, arXiv:2503.19786, and transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerojax.zoo.decoder_config import DecoderConfig, LayerKind
from zerojax.zoo.hugging_face.config_reading import ConfigReading
from zerojax.zoo.hugging_face.decoder_keys import (
    every_nth_full,
    patterned,
    read_activation,
    read_biases,
    read_layer_types,
    read_period,
    read_sizes,
    types_of,
    window_in,
    window_of,
    write_activation,
    write_sizes,
)
from zerojax.zoo.hugging_face.families import Keys, row, uniform
from zerojax.zoo.hugging_face.layouts import Architecture
from zerojax.zoo.hugging_face.rope_keys import (
    FULL,
    SLIDING,
    read_rope,
    read_ropes,
    write_ropes,
    write_scaling,
)
from zerojax.zoo.layers import NormConfig

_TANH = "gelu_pytorch_tanh"
_THETA = {FULL: 1e6, SLIDING: 1e4}


def _sizes(config: ConfigReading, *, kv_heads: int) -> Keys:
    """Reads the settings of all Gemmas: scaled tied embeddings, head_dim 256, norm scales around
    1."""
    sizes = read_sizes(config, kv_heads=kv_heads, head_dim=256, tied=True)
    return {
        **sizes,
        **read_biases(config),
        "norm": NormConfig(eps=sizes["norm"].eps, scale_offset=1.0),
        "embed_scale": float(sizes["embed_dim"]) ** 0.5,
    }


def _written(config: DecoderConfig) -> Keys:
    return {
        "attention_bias": config.qkv_bias,
        "head_dim": config.features_per_head,
        "hidden_act": write_activation(config),
        "hidden_activation": write_activation(config),
    }


def _read_gemma(config: ConfigReading) -> Keys:
    """Returns the decoder fields of Gemma 1.

    "gelu" means the tanh form in its files, as in transformers.
    """
    sizes = _sizes(config, kv_heads=16)
    rope = read_rope(config, longest=sizes["max_seq_len"])
    activation = read_activation(config, default=_TANH)
    config.require("hidden_act sets the activation", hidden_activation=(None, "gelu", _TANH))
    return {
        **sizes,
        "activation": "gelu_tanh" if activation == "gelu" else activation,
        "kinds": (LayerKind(rope=rope),),
    }


def _write_gemma(config: DecoderConfig) -> Keys:
    return {**uniform(config), **_written(config)}


def _read_gemma2(config: ConfigReading) -> Keys:
    sizes = _sizes(config, kv_heads=4)
    rope = read_rope(config, longest=sizes["max_seq_len"])
    count = sizes["num_layers"]
    types = read_layer_types(config, [FULL if n % 2 else SLIDING for n in range(count)])
    window = window_of(config, types, config.get("sliding_window", 4096))
    layers = [LayerKind(window=window if kind == SLIDING else None, rope=rope) for kind in types]
    return {
        **sizes,
        **_capped(config, attention=50.0, final=30.0),
        **patterned(layers),
    }


def _capped(config: ConfigReading, *, attention: float | None, final: float | None) -> Keys:
    """Reads activation, norms, attention scale and soft caps of Gemma 2 and 3."""
    config.get("hidden_act")  # unused: hidden_activation sets the activation
    return {
        "activation": read_activation(config, "hidden_activation", _TANH),
        "norm_places": "pre_post",
        "attention_scale": float(config.positive("query_pre_attn_scalar", 256)) ** -0.5,
        "attention_softcap": config.get("attn_logit_softcapping", attention),
        "logit_softcap": config.get("final_logit_softcapping", final),
    }


def _write_gemma2(config: DecoderConfig) -> Keys:
    return {**uniform(config), **_written(config), **_write_capped(config)}


def _write_capped(config: DecoderConfig) -> Keys:
    return {
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
        "layer_types": types_of(config),
        "query_pre_attn_scalar": _scalar(config),
        "sliding_window": window_in(config),
    }


def _scalar(config: DecoderConfig) -> float:
    """Returns query_pre_attn_scalar, which is scale^-2; an int if it is a whole number."""
    scale = config.attention_scale or config.features_per_head**-0.5
    value = scale**-2
    # The powers round: 128, for example, comes back as 127.99999999999999.
    return round(value) if abs(value - round(value)) < 1e-9 * value else value


def _read_gemma3(config: ConfigReading) -> Keys:
    """Returns the decoder fields of Gemma 3.

    Norms of query and key, separate rotary bases of sliding and full layers.
    """
    sizes = _sizes(config, kv_heads=4)
    # transformers reads this key but never uses it.
    config.require("this model has no soft cap of scores", attn_logit_softcapping=(None,))
    # transformers 4 wrote this key beside layer_types; no version reads it.
    config.asked.add("_sliding_window_pattern")
    period = read_period(config, "sliding_window_pattern", 6)
    types = read_layer_types(config, every_nth_full(sizes["num_layers"], period))
    window = window_of(config, types, config.get("sliding_window", 4096))
    ropes = read_ropes(
        config, theta=_THETA, longest=sizes["max_seq_len"], local_key="rope_local_base_freq"
    )
    layers = [
        LayerKind(window=window if kind == SLIDING else None, rope=ropes[kind]) for kind in types
    ]
    return {
        **sizes,
        **_capped(config, attention=None, final=None),
        "query_key_norm": "head",
        **patterned(layers),
    }


def _write_gemma3(config: DecoderConfig) -> Keys:
    ropes: dict[str, Any] = {
        FULL if kind.window is None else SLIDING: kind.rope for kind in config.kinds
    }
    # A type that no layer has gets transformers' default base, so that both types are written.
    default = read_ropes(
        ConfigReading({}), theta=_THETA, longest=config.max_seq_len, local_key=None
    )
    ropes = {**default, **ropes}
    return {
        **write_sizes(config),
        **_written(config),
        **_write_capped(config),
        "max_position_embeddings": config.max_seq_len,
        # The first three keys are for transformers 4, the last one for 5.
        "rope_theta": ropes[FULL].theta,
        "rope_local_base_freq": ropes[SLIDING].theta,
        "rope_scaling": write_scaling(ropes[FULL]),
        "rope_parameters": write_ropes(ropes),
    }


ROWS: Mapping[str, Architecture] = {
    entry.model_type: entry
    for entry in (
        row("gemma", "GemmaForCausalLM", _read_gemma, _write_gemma),
        row("gemma2", "Gemma2ForCausalLM", _read_gemma2, _write_gemma2),
        row(
            "gemma3_text",
            "Gemma3ForCausalLM",
            _read_gemma3,
            _write_gemma3,
            # Gemma3ForSequenceClassification has images, too.
            classifier="Gemma3TextForSequenceClassification",
        ),
    )
}
"""{model_type: architecture}."""
