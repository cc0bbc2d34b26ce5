"""Keys of config.json that most decoders have: sizes, biases, activations, types of layers."""

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
}
_WRITTEN = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu", "relu": "relu"}


def read_sizes(
    config: ConfigReading,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    tied: bool = False,
    eps: float = 1e-6,
) -> dict[str, Any]:
    """Sizes and norm of a decoder with RMSNorm, in transformers' defaults of a class.

    Args:
      kv_heads: where the key is missing; None: as many as query heads.
      head_dim: where the key is missing; None: hidden_size / num_attention_heads.
      tied: whether the output weights are the token table where no key says it.
      eps: of norms where no key says it.
    """
    config.require("attention here drops nothing", attention_dropout=(0.0, None))
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
        # As transformers' Llama has it: features get their dtype back before they are scaled.
        "norm": NormConfig(eps=config.get("rms_norm_eps", eps), rounds_first=True),
    }


def read_activation(config: ConfigReading, key: str = "hidden_act", default: str = "silu") -> str:
    """Our name of an activation.

    Raises:
      UnsupportedError: one that is not known.
    """
    value = config.get(key, default)
    if value not in _ACTIVATIONS:
        raise UnsupportedError(
            f"{config.where}: {key}={quoted(value)} is not an activation that is built; "
            f"{', '.join(_ACTIVATIONS)} are"
        )
    return _ACTIVATIONS[value]


def read_biases(config: ConfigReading, *, mlp: bool = False) -> dict[str, bool]:
    """Biases where "attention_bias" means those of all four projections.

    Args:
      mlp: whether the model has a key "mlp_bias".
    """
    attention = bool(config.get("attention_bias", False))
    found = {"qkv_bias": attention, "output_bias": attention}
    return {**found, "mlp_bias": bool(config.get("mlp_bias", False))} if mlp else found


def read_layer_types(config: ConfigReading, default: Sequence[str]) -> list[str]:
    """The type of each layer, FULL or SLIDING.

    Args:
      default: where the key is missing.

    Raises:
      UnsupportedError: another type, or not one for each layer.
    """
    found, count = config.get("layer_types"), config.needed("num_hidden_layers")
    found = list(default) if found is None else found
    unknown = sorted({str(kind) for kind in found} - {FULL, SLIDING})
    if unknown:
        raise UnsupportedError(
            f"{config.where}: layer_types has {unknown[0]!r}; layers of {FULL} and {SLIDING} are "
            "built"
        )
    if len(found) != count:
        raise UnsupportedError(
            f"{config.where}: layer_types has {len(found)} entries for {count} layers"
        )
    return list(found)


def every_nth_full(count: int, period: int) -> list[str]:
    """Types of layers: FULL for each `period`-th, SLIDING for the others."""
    return [FULL if (layer + 1) % period == 0 else SLIDING for layer in range(count)]


def patterned(layers: Sequence[LayerKind]) -> dict[str, Any]:
    """`kinds` and `pattern` of a configuration, from the kind of each layer."""
    kinds, pattern = kinds_and_pattern(layers)
    return {"kinds": kinds, "pattern": pattern}


def window_of(config: ConfigReading, types: Sequence[str], window: int | None) -> int | None:
    """The window of sliding layers.

    Raises:
      UnsupportedError: there are such layers, and no window.
    """
    if SLIDING in types and window is None:
        raise UnsupportedError(
            f"{config.where}: layer_types has {SLIDING}, but there is no sliding_window"
        )
    return window


def layers_of(config: DecoderConfig) -> list[LayerKind]:
    """The kind of each layer."""
    return [config.kinds[index] for index in config.kind_of_layer]


def types_of(config: DecoderConfig) -> list[str]:
    """The type of each layer, as transformers names it."""
    return [FULL if kind.window is None else SLIDING for kind in layers_of(config)]


def window_in(config: DecoderConfig) -> int | None:
    """The window of sliding layers, of which all have one; None: there are none."""
    return next((kind.window for kind in config.kinds if kind.window is not None), None)


def write_sizes(config: DecoderConfig) -> dict[str, Any]:
    """What `read_sizes` reads, but for the length, which goes with rotary positions."""
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
    """Their name of an activation."""
    return _WRITTEN[config.activation]
