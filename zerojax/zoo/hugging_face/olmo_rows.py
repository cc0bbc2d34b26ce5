"""OLMo and Cohere: norms without weights, after sub-layers, or shared by attention and MLP.

Sources: arXiv:2402.00838, arXiv:2501.00656, huggingface.co/docs on Cohere, and transformers 5.23.
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
from zerojax.zoo.hugging_face.rope_keys import FULL, SLIDING, read_rope, read_ropes, write_ropes
from zerojax.zoo.layers import NormConfig

OLMO_EPS = 1e-5
"""Epsilon of OLMo's norms; config.json does not contain it."""
_OLMO3_THETA = {FULL: 5e5, SLIDING: 5e5}


# --- OLMo -----------------------------------------------------------------------------------------


def _read_olmo(config: ConfigReading) -> Keys:
    """Returns the decoder fields of OLMo: LayerNorm without scale and bias."""
    sizes = read_sizes(config)
    return {
        **sizes,
        **read_biases(config),
        "norm": NormConfig(kind="layer", eps=OLMO_EPS, has_scale=False),
        "clip_qkv": config.get("clip_qkv"),
        "activation": read_activation(config),
        "kinds": (LayerKind(rope=read_rope(config, longest=sizes["max_seq_len"])),),
    }


def _write_olmo(config: DecoderConfig) -> Keys:
    written = {**uniform(config), "attention_bias": config.qkv_bias, "clip_qkv": config.clip_qkv}
    written.pop("rms_norm_eps")
    return written


def _read_olmo2(config: ConfigReading) -> Keys:
    """Returns the decoder fields of OLMo 2.

    Norms after attention and MLP, and over all heads of query and key.
    """
    sizes = _olmo2_sizes(config)
    return {**sizes, "kinds": (LayerKind(rope=read_rope(config, longest=sizes["max_seq_len"])),)}


def _olmo2_sizes(config: ConfigReading) -> Keys:
    sizes = read_sizes(config, eps=1e-5)
    return {
        **sizes,
        **read_biases(config),
        "norm": NormConfig(eps=sizes["norm"].eps),
        "norm_places": "post",
        "query_key_norm": "all",
        "activation": read_activation(config),
    }


def _write_olmo2(config: DecoderConfig) -> Keys:
    return {**uniform(config), "attention_bias": config.qkv_bias}


def _read_olmo3(config: ConfigReading) -> Keys:
    """Returns the decoder fields of OLMo 3.

    Three sliding layers before each full layer; only full layers scale positions.
    """
    sizes = _olmo2_sizes(config)
    types = read_layer_types(config, every_nth_full(sizes["num_layers"], 4))
    window = window_of(config, types, config.get("sliding_window", 4096))
    ropes = read_ropes(config, theta=_OLMO3_THETA, longest=sizes["max_seq_len"], local_key=None)
    layers = [
        LayerKind(window=window if kind == SLIDING else None, rope=ropes[kind]) for kind in types
    ]
    return {**sizes, **patterned(layers)}


def _write_olmo3(config: DecoderConfig) -> Keys:
    ropes: dict[str, Any] = {
        FULL if kind.window is None else SLIDING: kind.rope for kind in config.kinds
    }
    # Both types are written, also one that no layer has.
    some = next(iter(ropes.values()))
    return {
        **write_sizes(config),
        "attention_bias": config.qkv_bias,
        "hidden_act": write_activation(config),
        "layer_types": types_of(config),
        "max_position_embeddings": config.max_seq_len,
        "rope_parameters": write_ropes({FULL: some, SLIDING: some, **ropes}),
        "sliding_window": window_in(config),
    }


# --- Cohere ---------------------------------------------------------------------------------------


def _read_cohere(config: ConfigReading) -> Keys:
    """Returns the decoder fields of Cohere: attention and MLP in parallel."""
    config.require("norms of query and key are not supported", use_qk_norm=(False, None))
    sizes = _cohere_sizes(config)
    rope = read_rope(config, theta=5e5, longest=sizes["max_seq_len"], interleaved=True)
    return {**sizes, "kinds": (LayerKind(rope=rope),)}


def _cohere_sizes(config: ConfigReading) -> Keys:
    sizes = read_sizes(config, tied=True)
    # `read_sizes` asks for it, but Cohere's norms have another key, so this one is refused.
    config.asked.discard("rms_norm_eps")
    scale = config.get("logit_scale", 0.0625)
    return {
        **sizes,
        **read_biases(config),
        "norm": NormConfig(kind="layer", eps=config.get("layer_norm_eps", 1e-5)),
        "norm_places": "parallel",
        "activation": read_activation(config),
        "logit_scale": 1.0 if scale is None else float(scale),
    }


def _write_cohere(config: DecoderConfig) -> Keys:
    written = {
        **uniform(config),
        "attention_bias": config.qkv_bias,
        "layer_norm_eps": config.norm.eps,
        "logit_scale": config.logit_scale,
    }
    written.pop("rms_norm_eps")
    return written


def _read_cohere2(config: ConfigReading) -> Keys:
    """Returns the decoder fields of Cohere 2.

    Three sliding layers with rotary positions, then a full layer without them.
    """
    sizes = _cohere_sizes(config)
    rope = read_rope(config, longest=sizes["max_seq_len"], interleaved=True)
    period = read_period(config, "sliding_window_pattern", 4)
    types = read_layer_types(config, every_nth_full(sizes["num_layers"], period))
    window = window_of(config, types, config.get("sliding_window", 4096))
    kinds = {SLIDING: LayerKind(window=window, rope=rope), FULL: LayerKind(rope=None)}
    return {**sizes, **patterned([kinds[kind] for kind in types])}


def _write_cohere2(config: DecoderConfig) -> Keys:
    return {
        **_write_cohere(config),
        "layer_types": types_of(config),
        "sliding_window": window_in(config),
    }


ROWS: Mapping[str, Architecture] = {
    entry.model_type: entry
    for entry in (
        row("olmo", "OlmoForCausalLM", _read_olmo, _write_olmo, no_effect=("rms_norm_eps",)),
        row("olmo2", "Olmo2ForCausalLM", _read_olmo2, _write_olmo2),
        row("olmo3", "Olmo3ForCausalLM", _read_olmo3, _write_olmo3),
        row("cohere", "CohereForCausalLM", _read_cohere, _write_cohere, classifier=None),
        row("cohere2", "Cohere2ForCausalLM", _read_cohere2, _write_cohere2, classifier=None),
    )
}
"""{model_type: architecture}."""
