"""Decoder families: Llama, Mistral, Qwen, Phi-3, SmolLM3, Granite.

Sources: modeling files and configuration classes of transformers 5.23.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zerojax.zoo.decoder import Decoder
from zerojax.zoo.decoder_config import DecoderConfig, LayerKind
from zerojax.zoo.hugging_face import decoder_leaves
from zerojax.zoo.hugging_face.config_reading import ConfigReading, UnsupportedError
from zerojax.zoo.hugging_face.decoder_keys import (
    layers_of,
    patterned,
    read_activation,
    read_biases,
    read_layer_types,
    read_sizes,
    types_of,
    window_in,
    window_of,
    write_activation,
    write_sizes,
)
from zerojax.zoo.hugging_face.layouts import Architecture, Leaf
from zerojax.zoo.hugging_face.rope_keys import FULL, SLIDING, read_rope, replaced, write_rope
from zerojax.zoo.llama import Llama, LlamaConfig
from zerojax.zoo.rope import Rope

Keys = dict[str, Any]


def row(
    model_type: str,
    class_name: str,
    read: Callable[[ConfigReading], Keys],
    write: Callable[[Any], Keys],
    *,
    leaves: Callable[[DecoderConfig], Sequence[Leaf]] = decoder_leaves.leaves,
    no_effect: tuple[str, ...] = (),
    classifier: str | None = "",
) -> Architecture:
    """Builds the `Architecture` of a decoder family.

    Args:
      model_type, class_name, leaves, no_effect: fields of `Architecture`.
      read: function from config.json to the fields of `DecoderConfig` except "family".
      write: function from a configuration to keys of config.json, without those common to all
        models.
      classifier: class of transformers that classifies texts; None if there is none, "" for
        `class_name` with another end.
    """
    if classifier == "":
        classifier = class_name.replace("ForCausalLM", "ForSequenceClassification")
    return Architecture(
        model_type=model_type,
        class_name=class_name,
        config_class=DecoderConfig,
        build=lambda config, rngs: Decoder(config, rngs=rngs),
        leaves=leaves,
        read=lambda reading: {"family": model_type, **read(reading)},
        write_config=write,
        no_effect=no_effect,
        prefix="model.",
        ignored=(r"\.rotary_emb\.inv_freq$",),
        tasks={} if classifier is None else {classifier: "sequence_classification"},
    )


def one_rope(config: DecoderConfig) -> Rope:
    """Returns the rotary positions, which are equal in all layers that have any."""
    return next(kind.rope for kind in config.kinds if kind.rope is not None)


def uniform(config: DecoderConfig) -> Keys:
    """Builds config.json's keys of sizes, rotary positions and activation, as most families
    have."""
    return {
        **write_sizes(config),
        **write_rope(one_rope(config), config.max_seq_len),
        "hidden_act": write_activation(config),
    }


# --- Llama ----------------------------------------------------------------------------------------


def _read_llama(config: ConfigReading) -> Keys:
    """Reads config.json of transformers 4 or 5."""
    config.require("this model's MLP is gated by SiLU", hidden_act=("silu", "swish"))
    config.require("the projections of this model have no biases", attention_bias=(False, None))
    config.require("the MLP of this model has no biases", mlp_bias=(False, None))
    config.require("this model's rotary pairs are not interleaved", rope_interleaved=(False, None))
    sizes = read_sizes(config)
    rope = read_rope(config, longest=sizes["max_seq_len"])
    eps = sizes.pop("norm").eps
    return {**sizes, "norm_eps": eps, "rope_theta": rope.theta, "rope_scaling": rope.scaling}


def _write_llama(config: LlamaConfig) -> Keys:
    """Builds the keys of config.json, readable by transformers 4 and 5."""
    return {
        **uniform(config.as_decoder()),
        "attention_bias": False,
        "head_dim": config.features_per_head,
        "mlp_bias": False,
    }


LLAMA_ROW = dataclasses.replace(
    row("llama", "LlamaForCausalLM", _read_llama, _write_llama),
    config_class=LlamaConfig,
    build=lambda config, rngs: Llama(config, rngs=rngs),
    leaves=lambda config: decoder_leaves.leaves(config.as_decoder()),
    read=_read_llama,  # a `LlamaConfig` has no field "family"
)


# --- Mistral --------------------------------------------------------------------------------------


def _read_mistral(config: ConfigReading) -> Keys:
    """Reads one window for all layers (arXiv:2310.06825), by default 4096."""
    sizes = read_sizes(config, kv_heads=8)
    rope = read_rope(config, longest=sizes["max_seq_len"])
    return {
        **sizes,
        "activation": read_activation(config),
        "kinds": (LayerKind(window=config.get("sliding_window", 4096), rope=rope),),
    }


def _write_mistral(config: DecoderConfig) -> Keys:
    return {
        **uniform(config),
        "head_dim": config.features_per_head,
        "sliding_window": window_in(config),
    }


def _read_ministral(config: ConfigReading) -> Keys:
    """Reads Mistral's keys and a type for each layer, by default sliding if there is a window."""
    sizes = read_sizes(config, kv_heads=8)
    rope = read_rope(config, longest=sizes["max_seq_len"])
    window = config.get("sliding_window", 4096)
    default = [FULL if window is None else SLIDING] * sizes["num_layers"]
    types = read_layer_types(config, default)
    window = window_of(config, types, window)
    layers = [LayerKind(window=window if kind == SLIDING else None, rope=rope) for kind in types]
    return {
        **sizes,
        "activation": read_activation(config),
        **patterned(layers),
    }


def _write_ministral(config: DecoderConfig) -> Keys:
    return {**_write_mistral(config), "layer_types": types_of(config)}


# --- Qwen -----------------------------------------------------------------------------------------


def _read_qwen2(config: ConfigReading) -> Keys:
    """Reads Qwen 2, which has biases of query, key and value (arXiv:2407.10671)."""
    config.require("only text positions are supported", use_mrope=(False, None))
    return {**_read_qwen(config), "qkv_bias": True}


def _read_qwen3(config: ConfigReading) -> Keys:
    """Reads Qwen 3, with norms of query and key (arXiv:2505.09388); head_dim defaults to 128."""
    return {
        **_read_qwen(config, head_dim=128),
        **read_biases(config),
        "query_key_norm": "head",
    }


def _read_qwen(config: ConfigReading, head_dim: int | None = None) -> Keys:
    sizes = read_sizes(config, kv_heads=32, head_dim=head_dim)
    rope = read_rope(config, longest=sizes["max_seq_len"])
    window, first = config.get("sliding_window", 4096), config.get("max_window_layers", 28)
    if not config.get("use_sliding_window", False):
        window = None
    if window is not None and first is None:
        # Raises, because the key is null.
        config.needed("max_window_layers")
    count = sizes["num_layers"]
    default = [SLIDING if window is not None and n >= first else FULL for n in range(count)]
    types = read_layer_types(config, default)
    window = window_of(config, types, window)
    layers = [LayerKind(window=window if kind == SLIDING else None, rope=rope) for kind in types]
    return {**sizes, "activation": read_activation(config), **patterned(layers)}


def _write_qwen(config: DecoderConfig) -> Keys:
    types, window = types_of(config), window_in(config)
    return {
        **uniform(config),
        "layer_types": types,
        # Index of the first sliding layer, for readers that do not support layer_types.
        "max_window_layers": types.index(SLIDING) if SLIDING in types else config.num_layers,
        "sliding_window": window,
        "use_sliding_window": window is not None,
    }


def _write_qwen3(config: DecoderConfig) -> Keys:
    return {
        **_write_qwen(config),
        "attention_bias": config.qkv_bias,
        "head_dim": config.features_per_head,
    }


# --- Phi-3 and Phi-4 ------------------------------------------------------------------------------


def _read_phi3(config: ConfigReading) -> Keys:
    """Reads the config of Phi-3 and Phi-4, which may have partial rotary positions.

    Sources: arXiv:2404.14219, arXiv:2503.01743.
    """
    sizes = read_sizes(config, eps=1e-5)
    config.require("dropout is set per run", resid_pdrop=(0.0,), embd_pdrop=(0.0,))
    absent = {"attention_bias": (False,), "mlp_bias": (False,), "lm_head_bias": (False,)}
    config.require("projections have no biases", **absent)
    config.require("all layers are equal", full_attn_mod=(1,), interpolate_factor=(1,))
    original = config.get("original_max_position_embeddings", 4096)
    values = replaced(config)
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind in ("su", "yarn", "longrope"):  # older files call longrope by the other two names
        values |= {"rope_type": "longrope", "original_max_position_embeddings": original}
    elif kind != "default":
        raise UnsupportedError(
            f"{config.where}: rotary positions of type {kind!r}, but this model supports only "
            "default and longrope"
        )
    # With the completed values. What is read of them counts as read here, too.
    inner = ConfigReading({**config.values, "rope_parameters": values, "rope_scaling": None})
    rope = read_rope(inner, longest=sizes["max_seq_len"], partial=True)
    config.asked |= inner.asked
    return {
        **sizes,
        "activation": read_activation(config),
        "kinds": (LayerKind(window=config.get("sliding_window"), rope=rope),),
    }


def _write_phi3(config: DecoderConfig) -> Keys:
    rope = one_rope(config)
    scaling = rope.scaling
    original = config.max_seq_len if scaling is None else scaling.original_max_seq_len
    return {
        **uniform(config),
        "original_max_position_embeddings": original,
        "partial_rotary_factor": rope.fraction,
        "sliding_window": window_in(config),
    }


# --- SmolLM3 --------------------------------------------------------------------------------------


def _read_smollm3(config: ConfigReading) -> Keys:
    """Reads SmolLM3: every fourth layer has no rotary positions (huggingface.co/blog/smollm3)."""
    sizes = read_sizes(config, kv_heads=4, tied=True)
    rope = read_rope(config, longest=sizes["max_seq_len"], theta=2e6)
    count, turns = sizes["num_layers"], config.get("no_rope_layers")
    config.asked.add("no_rope_layer_interval")
    if turns is None:
        interval = config.positive("no_rope_layer_interval", 4)
        turns = [int((layer + 1) % interval != 0) for layer in range(count)]
    if len(turns) < count or not set(turns) <= {0, 1}:
        raise UnsupportedError(
            f"{config.where}: no_rope_layers is {turns!r}, but must have a 0 or 1 for each of "
            f"{count} layers"
        )
    window = config.get("sliding_window")
    if not config.get("use_sliding_window", False):
        window = None
    default = [SLIDING if window is not None and not turn else FULL for turn in turns[:count]]
    types = read_layer_types(config, default)
    window = window_of(config, types, window)
    layers = [
        LayerKind(window=window if kind == SLIDING else None, rope=rope if turn else None)
        for kind, turn in zip(types, turns[:count], strict=True)
    ]
    return {
        **sizes,
        "activation": read_activation(config),
        **read_biases(config, mlp=True),
        **patterned(layers),
    }


def _write_smollm3(config: DecoderConfig) -> Keys:
    window = window_in(config)
    return {
        **uniform(config),
        "attention_bias": config.qkv_bias,
        "layer_types": types_of(config),
        "mlp_bias": config.mlp_bias,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [int(kind.rope is not None) for kind in layers_of(config)],
        "sliding_window": window,
        "use_sliding_window": window is not None,
    }


# --- Granite --------------------------------------------------------------------------------------


def _read_granite(config: ConfigReading) -> Keys:
    """Reads Granite with its four scale factors (arXiv:2407.13739)."""
    sizes = read_sizes(config)
    rope = read_rope(config, longest=sizes["max_seq_len"])
    return {
        **sizes,
        **read_biases(config, mlp=True),
        "activation": read_activation(config),
        "kinds": (LayerKind(rope=rope),),
        "embed_scale": float(config.get("embedding_multiplier", 1.0)),
        "residual_scale": float(config.get("residual_multiplier", 1.0)),
        "attention_scale": float(config.positive("attention_multiplier", 1.0)),
        "logit_scale": 1.0 / float(config.positive("logits_scaling", 1.0)),
    }


def _write_granite(config: DecoderConfig) -> Keys:
    scale = config.attention_scale
    return {
        **uniform(config),
        "attention_bias": config.qkv_bias,
        "attention_multiplier": config.features_per_head**-0.5 if scale is None else scale,
        "embedding_multiplier": config.embed_scale,
        "logits_scaling": 1.0 / config.logit_scale,
        "mlp_bias": config.mlp_bias,
        "residual_multiplier": config.residual_scale,
    }


ROWS: Mapping[str, Architecture] = {
    entry.model_type: entry
    for entry in (
        row("mistral", "MistralForCausalLM", _read_mistral, _write_mistral),
        row("ministral", "MinistralForCausalLM", _read_ministral, _write_ministral),
        row("qwen2", "Qwen2ForCausalLM", _read_qwen2, _write_qwen),
        row("qwen3", "Qwen3ForCausalLM", _read_qwen3, _write_qwen3),
        row(
            "phi3",
            "Phi3ForCausalLM",
            _read_phi3,
            _write_phi3,
            leaves=decoder_leaves.joined_leaves,
        ),
        row(
            "smollm3",
            "SmolLM3ForCausalLM",
            _read_smollm3,
            _write_smollm3,
            no_effect=("max_window_layers", "pretraining_tp"),
        ),
        row("granite", "GraniteForCausalLM", _read_granite, _write_granite, classifier=None),
    )
}
"""{model_type: architecture}."""
