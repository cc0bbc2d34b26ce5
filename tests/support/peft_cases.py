"""Adapters as the package peft saves them, for two programs.

Imports NumPy only, for `tests/oracles/peft_reading.py` runs elsewhere.
"""

from typing import Any

import numpy as np

from tests.support.hugging_face_weights import weights

_SIZES = {
    "vocab_size": 19,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "pad_token_id": 18,
}
_GPT2 = {"vocab_size": 19, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}
_ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# {name: (model_type, keys of config.json, task_type, settings of peft.LoraConfig)}
CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "patterns": (
        *("llama", _SIZES, "CAUSAL_LM"),
        {
            "target_modules": _ALL,
            "rank_pattern": {"q_proj": 4, "layers.1.mlp.up_proj": 2, "o_proj": 1},
            "alpha_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 4, "self_attn.v_proj": 5},
            "r": 3,
            "lora_alpha": 6,
        },
    ),
    "rslora_some_layers": (
        *("llama", _SIZES, "CAUSAL_LM"),
        {
            "target_modules": ["q_proj", "down_proj"],
            "layers_to_transform": [0, 2],
            "use_rslora": True,
            "r": 4,
            "lora_alpha": 3,
            "lora_dropout": 0.1,
        },
    ),
    "whole_modules": (
        *("llama", _SIZES, "CAUSAL_LM"),
        {
            "target_modules": ["v_proj"],
            "modules_to_save": ["embed_tokens", "lm_head", "norm", "input_layernorm"],
            "r": 2,
            "lora_alpha": 4,
        },
    ),
    "biases": (
        *("qwen2", _SIZES, "CAUSAL_LM"),
        {"target_modules": ["q_proj", "o_proj"], "bias": "all", "r": 2, "lora_alpha": 4},
    ),
    "biases_of_adapters": (
        *("gpt2", _GPT2, "CAUSAL_LM"),
        {"target_modules": ["c_attn"], "bias": "lora_only", "r": 2, "lora_alpha": 4},
    ),
    "joined": (
        *("gpt2", _GPT2, "CAUSAL_LM"),
        {"target_modules": ["c_attn", "mlp.c_proj"], "r": 3, "lora_alpha": 6},
    ),
    "joined_rows": (
        *("phi3", _SIZES, "CAUSAL_LM"),
        {"target_modules": ["qkv_proj", "gate_up_proj"], "r": 2, "lora_alpha": 6},
    ),
    "classes_of_llama": (
        *("llama", {**_SIZES, "num_labels": 3}, "SEQ_CLS"),
        {"target_modules": ["q_proj", "v_proj"], "r": 2, "lora_alpha": 4},
    ),
    "classes_of_bert": (
        "bert",
        {
            "vocab_size": 20,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 16,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "num_labels": 3,
        },
        "SEQ_CLS",
        {"target_modules": ["query", "value", "output.dense"], "r": 2, "lora_alpha": 4},
    ),
}


def tokens_of(name: str) -> np.ndarray:
    """int32 [2, 7]."""
    index = np.arange(7)
    return np.stack([(5 * index + 3 * row + index**2) % 17 + 1 for row in (0, 1)]).astype(np.int32)


def tensor_of(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor by formula of its name, of a model or of adapters."""
    return weights(name, shape)
