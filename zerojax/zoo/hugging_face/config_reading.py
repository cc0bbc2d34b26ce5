"""Reads config.json and records each key that is read; unread keys are refused by name.

Each architecture reads the keys it supports and lists those without effect. Any other key may
change what the model computes, so it raises an error; the loss is never silently different.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from zerojax.config.checks import MAX_LAYERS
from zerojax.config.display import cut, quoted

NO_EFFECT = frozenset(
    (
        "_name_or_path",
        "_attn_implementation_autoset",
        "_attn_implementation",
        "architectures",
        "auto_map",
        "model_type",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "initializer_range",
        "use_cache",
        "cache_implementation",
        "unsloth_fixed",
        "unsloth_version",
        "is_llama_config",
        "tokenizer_class",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "decoder_start_token_id",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "return_dict_in_generate",
        "torchscript",
        "use_bfloat16",
        "tf_legacy_loss",
        "id2label",
        "label2id",
        "problem_type",
        "finetuning_task",
        "task_specific_params",
        "prefix",
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "num_return_sequences",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "remove_invalid_values",
        "suppress_tokens",
        "begin_suppress_tokens",
        "exponential_decay_length_penalty",
        "transformers.js_config",
        # Quantized weights were refused earlier (`check_unquantized`); an empty value has no
        # effect.
        "quantization_config",
    )
)
"""Keys of every model that do not change what it computes: ids, dtypes of files, caches, sampling
options, names."""

_MISSING = object()
_SAME_EVERYWHERE: Mapping[str, tuple[Any, ...]] = {
    "is_decoder": (False, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "chunk_size_feed_forward": (0, None),
    "pruned_heads": ({}, None),
    "tie_encoder_decoder": (False, None),
    "pretraining_tp": (1, None),
    "use_bidirectional_attention": (False, None),
}

_NUMBER, _WHOLE = "a number", "a whole number"
_COUNTS_OF_LAYERS = (
    "max_window_layers",
    "n_layer",
    "num_decoder_layers",
    "num_hidden_layers",
    "num_layers",
)
"""Keys that are checked against `MAX_LAYERS` before anything is created per layer."""
_KINDS: Mapping[str, tuple[Any, tuple[str, ...]]] = {
    _NUMBER: (
        int | float,
        (
            *("attention_factor", "attention_multiplier", "attn_logit_softcapping", "beta_fast"),
            *("beta_slow", "clip_qkv", "embedding_multiplier", "factor"),
            *("final_logit_softcapping", "high_freq_factor", "layer_norm_eps"),
            *("layer_norm_epsilon", "logit_scale", "logits_scaling", "low_freq_factor"),
            *("mscale", "mscale_all_dim", "partial_rotary_factor", "query_pre_attn_scalar"),
            *("residual_multiplier", "rms_norm_eps", "rope_local_base_freq", "rope_theta"),
            "router_aux_loss_coef",
        ),
    ),
    _WHOLE: (
        int,
        (
            *_COUNTS_OF_LAYERS,
            *("d_ff", "d_kv", "d_model", "head_dim", "hidden_size", "intermediate_size"),
            *("max_position_embeddings", "moe_intermediate_size", "n_ctx", "n_embd", "n_head"),
            *("n_inner", "n_positions", "no_rope_layer_interval", "num_attention_heads"),
            *("num_experts", "num_experts_per_tok", "num_heads", "num_key_value_heads"),
            *("num_local_experts", "original_max_position_embeddings"),
            *("relative_attention_max_distance", "relative_attention_num_buckets"),
            *("sliding_window", "sliding_window_pattern", "_sliding_window_pattern"),
            *("type_vocab_size", "vocab_size"),
        ),
    ),
    "true or false": (
        bool,
        (
            *("attention_bias", "mlp_bias", "norm_topk_prob", "output_router_logits"),
            *("scale_decoder_outputs", "tie_word_embeddings", "truncate", "use_sliding_window"),
        ),
    ),
    "a text": (
        str,
        (
            *("activation_function", "feed_forward_proj", "hidden_act", "hidden_activation"),
            *("model_type", "rope_type", "type"),
        ),
    ),
    "a list": (
        list | tuple,
        ("architectures", "layer_types", "long_factor", "no_rope_layers", "short_factor"),
    ),
    "an object": (Mapping, ("rope_parameters", "rope_scaling")),
}
_NULLABLE = (
    *("attn_logit_softcapping", "final_logit_softcapping", "head_dim", "logit_scale"),
    *("max_window_layers", "num_key_value_heads", "original_max_position_embeddings"),
    "sliding_window",
)
"""Keys of numbers for which null differs from a missing key, or has no effect."""
_KIND_OF = {key: (kinds, name) for name, (kinds, keys) in _KINDS.items() for key in keys}


class UnsupportedError(ValueError):
    """Raised for a Hugging Face folder whose weights or settings zerojax does not support."""


class ConfigReading:
    """A config.json, or an object in it, with the set of keys read so far.

    Attributes:
      values: the JSON object.
      where: name of the object in messages.
      asked: keys that have been read.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self.values, self.where = values, where
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of a key, or the default if the key is missing; null gives None.

        Raises:
          UnsupportedError: the value has another type than in `_KINDS`, is null for a number that
            has a default, or is a number of layers above `MAX_LAYERS`.
        """
        self.asked.add(key)
        value = self.values.get(key, default)
        kinds, kind_name = _KIND_OF.get(key, (object, ""))
        # A bool is an int in Python, but no number in JSON.
        is_wrong = isinstance(value, bool) and kind_name in (_NUMBER, _WHOLE)
        if value is not None and (is_wrong or not isinstance(value, kinds)):
            raise UnsupportedError(f"{self.where}: {key}={quoted(value)} is not {kind_name}")
        is_number = kind_name in (_NUMBER, _WHOLE) and key not in _NULLABLE
        if value is None and default is not None and is_number:
            raise UnsupportedError(
                f"{self.where}: {key} is null, which is not {kind_name}; use one, or remove the "
                f"key for {default}"
            )
        if key in _COUNTS_OF_LAYERS and value is not None and value > MAX_LAYERS:
            raise UnsupportedError(
                f"{self.where}: {key}={quoted(value)} is above the maximum of {MAX_LAYERS} layers; "
                "use fewer"
            )
        return value

    def has(self, key: str) -> bool:
        """Returns whether a key exists and is not null."""
        return self.get(key) is not None

    def needed(self, key: str) -> Any:
        """Returns the value of a key that must exist.

        Raises:
          UnsupportedError: the key is missing or null, or a number is not above 0.
        """
        if self.get(key) is None:
            raise UnsupportedError(
                f"{self.where} has no {key!r}, which the model requires; add it with the value "
                "that the model was trained with"
            )
        value = self.values[key]
        return self.positive(key) if isinstance(value, int | float) else value

    def positive(self, key: str, default: float | None = None) -> Any:
        """Returns the value of a key that must be a number above 0.

        Raises:
          UnsupportedError: the number is null or not above 0.
        """
        value = self.get(key, default)
        if value is None or not value > 0:
            limit = "at least 1" if _KIND_OF.get(key, (int, ""))[1] == _WHOLE else "above 0"
            raise UnsupportedError(
                f"{self.where}: {key}={quoted(value)} must be {limit}; use the value that the "
                "model was trained with"
            )
        return value

    def inside(self, key: str) -> ConfigReading:
        """Returns the nested object of a key, or an empty one if the key is missing or null.

        Raises:
          UnsupportedError: the value is not an object.
        """
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise UnsupportedError(f"{self.where}: {key}={quoted(value)} is not an object")
        return ConfigReading(value or {}, f"{self.where}: {key}")

    def require(self, why: str, **allowed: tuple[Any, ...]) -> None:
        """Checks keys for which zerojax's model supports only some values.

        Args:
          why: clause that says what zerojax's model does.
          **allowed: supported values of each key; the first is the default of a missing key.

        Raises:
          UnsupportedError: a key has another value.
        """
        for key, values in allowed.items():
            value = self.get(key, values[0])
            # 0 counts as False and as 0.0.
            if not any(value == supported for supported in values):
                listed = " or ".join(repr(x) for x in values)
                raise UnsupportedError(
                    f"{self.where}: {key}={quoted(value)}, but {why}; only {listed} is supported"
                )

    def check_rest(self, no_effect: Collection[str] = ()) -> None:
        """Checks that all keys have been read or have no effect.

        Args:
          no_effect: keys that do not change what the model computes.

        Raises:
          UnsupportedError: another key exists; the message has its name and value.
        """
        for key in sorted(set(self.values) - self.asked - set(no_effect)):
            shown = f"{cut(key, 100)}={quoted(self.values[key])}"
            raise UnsupportedError(
                f"{self.where}: {shown} is not supported for this model and may change its "
                "results; if it does not, remove it from a copy of config.json"
            )


def check_common(reading: ConfigReading, no_effect: Collection[str] = ()) -> None:
    """Checks settings that all architectures may have, and that no key is left unread.

    Args:
      reading: config.json with the keys read so far.
      no_effect: keys of this architecture that do not change what the model computes.

    Raises:
      UnsupportedError: a value or key is not supported.
    """
    for key, values in _SAME_EVERYWHERE.items():
        if key not in reading.asked and key not in no_effect:
            reading.require("zerojax does not support this setting", **{key: values})
    reading.check_rest({*NO_EFFECT, *no_effect})
