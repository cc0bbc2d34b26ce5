"""Keys of config.json that most decoders share: sizes, biases, activations, types of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zerojax.config.display import quoted
from zerojax.zoo.decoder_config import DecoderConfig, LayerKind, kinds_and_pattern
from zerojax.zoo.hugging_face.config_reading import ConfigReading, UnsupportedError
from zerojax.zoo.hugging_face.rope_keys import FULL, SLIDING
from zerojax.zoo.layers import NormConfig

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "quick_gelu": "quick_gelu",
}
_WRITTEN = {name: name for name in ("silu", "gelu", "relu", "quick_gelu")} | {
    "gelu_tanh": "gelu_pytorch_tanh"
}


def read_sizes(
    config: ConfigReading,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    tied: bool = False,
    eps: float = 1e-6,
) -> dict[str, Any]:
    """Reads sizes and norm of a decoder with RMSNorm.

    Args:
      config: the config.json.
      kv_heads: default of num_key_value_heads; None uses num_attention_heads.
      head_dim: default of head_dim; None uses hidden_size / num_attention_heads.
      tied: default of tie_word_embeddings.
      eps: default of rms_norm_eps.
    """
    config.require("zerojax has no attention dropout", attention_dropout=(0.0, None))
    return {
        "vocab_size": config.needed("vocab_size"),
        "max_seq_len": config.needed("max_position_embeddings"),
        "num_layers": config.needed("num_hidden_layers"),
        "num_heads": config.needed("num_attention_heads"),
        "num_kv_heads": config.get("num_key_value_heads", kv_heads),
        "head_dim": config.get("head_dim", head_dim),
        "embed_dim": config.needed("hidden_size"),
        "mlp_dim": config.needed("intermediate_size"),
        "tie_embeddings": bool(config.get("tie_word_embeddings", tied)),
        # As in transformers' Llama, features are cast back before they are scaled.
        "norm": NormConfig(eps=config.get("rms_norm_eps", eps), rounds_first=True),
    }


def read_activation(config: ConfigReading, key: str = "hidden_act", default: str = "silu") -> str:
    """Reads an activation and returns zerojax's name for it.

    Raises:
      UnsupportedError: the activation is not supported.
    """
    value = config.get(key, default)
    if value not in _ACTIVATIONS:
        raise UnsupportedError(
            f"{config.where}: {key}={quoted(value)} is not a supported activation; "
            f"use one of {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[value]


def read_biases(config: ConfigReading, *, mlp: bool = False) -> dict[str, bool]:
    """Reads biases of models in which "attention_bias" applies to all four projections.

    Args:
      config: the config.json.
      mlp: whether the model has a key "mlp_bias".
    """
    attention = bool(config.get("attention_bias", False))
    biases = {"qkv_bias": attention, "output_bias": attention}
    return {**biases, "mlp_bias": bool(config.get("mlp_bias", False))} if mlp else biases


def read_layer_types(config: ConfigReading, default: Sequence[str]) -> list[str]:
    """Reads the type of each layer, FULL or SLIDING.

    Args:
      config: the config.json.
      default: types of the layers if the key is missing.

    Raises:
      UnsupportedError: a type is unknown, or the number of types is wrong.
    """
    types, count = config.get("layer_types"), config.needed("num_hidden_layers")
    types = list(default) if types is None else types
    unknown = sorted({str(kind) for kind in types} - {FULL, SLIDING})
    if unknown:
        raise UnsupportedError(
            f"{config.where}: layer_types has {unknown[0]!r}; only {FULL} and {SLIDING} are "
            "supported"
        )
    if len(types) != count:
        raise UnsupportedError(
            f"{config.where}: layer_types has {len(types)} entries, but there are {count} layers; "
            "use one entry per layer"
        )
    return list(types)


def read_period(config: ConfigReading, key: str, default: int) -> int:
    """Reads the period n, if each n-th layer is full; not used if layer_types exists.

    Raises:
      UnsupportedError: the period is needed, but is not above 0.
    """
    # Counts as read, since it has no effect beside layer_types.
    config.asked.add(key)
    return default if config.has("layer_types") else config.positive(key, default)


def every_nth_full(count: int, period: int) -> list[str]:
    """Returns layer types: FULL for each `period`-th layer, SLIDING for the others."""
    return [FULL if (layer + 1) % period == 0 else SLIDING for layer in range(count)]


def patterned(layers: Sequence[LayerKind]) -> dict[str, Any]:
    """Returns `kinds` and `pattern` of a configuration from the kind of each layer."""
    kinds, pattern = kinds_and_pattern(layers)
    return {"kinds": kinds, "pattern": pattern}


def window_of(config: ConfigReading, types: Sequence[str], window: int | None) -> int | None:
    """Returns `window`, the window of sliding layers, after checking that it is set if there are
    such layers.

    Raises:
      UnsupportedError: there are sliding layers but no window.
    """
    if SLIDING in types and window is None:
        raise UnsupportedError(
            f"{config.where}: layer_types has {SLIDING}, but there is no window; add "
            "sliding_window, in tokens, with the value that the model was trained with, and "
            '"use_sliding_window": true if the model has this key'
        )
    return window


def layers_of(config: DecoderConfig) -> list[LayerKind]:
    """Lists the kind of each layer."""
    return [config.kinds[index] for index in config.kind_of_layer]


def types_of(config: DecoderConfig) -> list[str]:
    """Lists transformers' type of each layer."""
    return [FULL if kind.window is None else SLIDING for kind in layers_of(config)]


def window_in(config: DecoderConfig) -> int | None:
    """Returns the window that all sliding layers share, or None if there are none."""
    return next((kind.window for kind in config.kinds if kind.window is not None), None)


def write_sizes(config: DecoderConfig) -> dict[str, Any]:
    """Builds the keys that `read_sizes` reads, except max_position_embeddings.

    `write_rope` writes that key.
    """
    own_heads = {} if config.head_dim is None else {"head_dim": config.head_dim}
    return {
        **own_heads,
        "attention_dropout": 0.0,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.norm.eps,
        "tie_word_embeddings": config.tie_embeddings,
        "vocab_size": config.vocab_size,
    }


def write_activation(config: DecoderConfig) -> str:
    """Returns transformers' name for the activation."""
    return _WRITTEN[config.activation]
