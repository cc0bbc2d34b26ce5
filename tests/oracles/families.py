"""Logits and gradients of small random decoders by transformers, for tests/zoo/test_families.py.

Needs torch and transformers, which no test imports; run with transformers 5.23.0, torch 2.13.0:

    PYTHONPATH=. python tests/oracles/families.py tests/data/families.json

and again, after zerojax has written its own config.json of each (in zerojax's environment), to see
that transformers computes the same with those:

    python -m tests.support.hugging_face_folders written.json
    PYTHONPATH=. python tests/oracles/families.py tests/data/families.json written.json
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open

from tests.support.hugging_face_weights import norms_near, probes, text_of, weights

CLASSES = transformers.models.auto.configuration_auto.CONFIG_MAPPING
SIZES = {
    "vocab_size": 22,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
SEEN = {"last": 3, "tokens": 24}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "rope_theta": 100.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.2, 2.0, 4.5],
    "rope_theta": 100.0,
}
SIX_LAYERS = {"num_hidden_layers": 6}
FULL, SLIDING = "full_attention", "sliding_attention"
# name: (model_type, further keys, tokens)
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "qwen2": ("qwen2", {}, 24),
    "qwen2_windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        24,
    ),
    "qwen2_yarn": ("qwen2", {"head_dim": 16, "rope_parameters": YARN}, 24),
    "qwen3": ("qwen3", {"head_dim": 8}, 24),
    "qwen3_biases": (
        "qwen3",
        {
            "head_dim": 8,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": [SLIDING, FULL, SLIDING],
        },
        24,
    ),
    "mistral": ("mistral", {"sliding_window": 5}, 24),
    "mistral_whole": ("mistral", {"sliding_window": None, "head_dim": 6}, 7),
    "mistral_yarn": (
        "mistral",
        {
            "sliding_window": None,
            "head_dim": 16,
            "rope_parameters": {
                **YARN,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "truncate": False,
                "beta_fast": 4.0,
            },
        },
        24,
    ),
    "ministral": (
        "ministral",
        {"head_dim": 4, "sliding_window": 5, "layer_types": [SLIDING, SLIDING, FULL]},
        24,
    ),
    "gemma": ("gemma", {"head_dim": 6, "hidden_act": "gelu"}, 12),
    "gemma2": ("gemma2", {"head_dim": 6, "sliding_window": 5, "query_pre_attn_scalar": 9}, 24),
    "gemma2_uncapped": (
        "gemma2",
        {
            "head_dim": 6,
            "sliding_window": 5,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
        },
        24,
    ),
    "gemma2_low_caps": (
        "gemma2",
        {
            "head_dim": 6,
            "sliding_window": 7,
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 2.0,
        },
        24,
    ),
    "gemma3": ("gemma3_text", {"head_dim": 6, "sliding_window": 5, **SIX_LAYERS}, 24),
    "gemma3_linear": (
        "gemma3_text",
        {
            "head_dim": 6,
            "sliding_window": 5,
            "layer_types": [SLIDING, SLIDING, FULL],
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
                SLIDING: {"rope_type": "default", "rope_theta": 100.0},
            },
            "final_logit_softcapping": 4.0,
        },
        24,
    ),
    "phi3": ("phi3", {"sliding_window": 6}, 24),
    "phi3_partial": ("phi3", {"num_attention_heads": 2, "partial_rotary_factor": 0.75}, 24),
    "phi3_longrope_short": (
        "phi3",
        {
            "num_attention_heads": 2,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 16,
            "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75},
            "tie_word_embeddings": True,
        },
        16,
    ),
    "phi3_longrope_long": (
        "phi3",
        {
            "num_attention_heads": 2,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 16,
            "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75},
        },
        24,
    ),
    "olmo": ("olmo", {}, 24),
    "olmo_clipped": ("olmo", {"clip_qkv": 0.5, "attention_bias": True}, 24),
    "olmo2": ("olmo2", {}, 24),
    "olmo2_biases": ("olmo2", {"attention_bias": True, "tie_word_embeddings": True}, 12),
    "olmo3": (
        "olmo3",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "sliding_window": 5,
            "rope_parameters": {FULL: YARN, SLIDING: {"rope_type": "default", "rope_theta": 100.0}},
        },
        24,
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}, 24),
    "smollm3_windows": (
        "smollm3",
        {
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 5,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
        24,
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.3,
            "logits_scaling": 8.0,
            "mlp_bias": True,
            "attention_bias": True,
        },
        24,
    ),
    "cohere": ("cohere", {"logit_scale": 0.5}, 24),
    "cohere2": ("cohere2", {"num_hidden_layers": 4, "sliding_window": 5, "logit_scale": 0.5}, 24),
}
IN_BFLOAT16 = ("qwen3", "mistral", "gemma2", "gemma3", "phi3", "olmo2", "smollm3")


def config_of(model_type: str, changes: dict[str, Any]) -> Any:
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": SIZES["vocab_size"] - 1}
    kind = CLASSES[model_type]
    return kind(**{**SIZES, **ids, **changes})


def filled(model: Any, config: Any) -> Any:
    """The same model with weights by formula."""
    near = norms_near(config.model_type)
    state = model.state_dict()
    named = {
        key: torch.from_numpy(weights(key, x.shape, norms_near=near)) for key, x in state.items()
    }
    if config.tie_word_embeddings:
        named["lm_head.weight"] = named["model.embed_tokens.weight"]
    model.load_state_dict(named)
    return model


def run(name: str, model_type: str, changes: dict[str, Any], length: int) -> dict[str, Any]:
    """A model with weights by formula, as it is saved; its logits and gradients."""
    config = config_of(model_type, changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    filled(model, config)
    model.eval()
    tokens = torch.tensor(text_of(length, config.vocab_size))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        saved = json.loads((Path(folder) / "config.json").read_text())
        with safe_open(Path(folder) / "model.safetensors", "pt") as file:
            shapes = {key: list(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, config.vocab_size), tokens[:, 1:].reshape(-1)
    )
    loss.backward()
    found = {
        "config": saved,
        "tensors": shapes,
        "length": length,
        "last_logits": short(logits[:, -SEEN["last"] :]),
        "loss": loss.item(),
        "gradients": {
            key: [float(f"{x:.8g}") for x in probes(key, value.grad.numpy())]
            for key, value in model.named_parameters()
        },
    }
    if name in IN_BFLOAT16:
        with torch.no_grad():
            narrow = model.to(torch.bfloat16)(tokens).logits
        found["logits"] = short(logits[0])
        found["logits_in_bfloat16"] = short(narrow[0])
    return found


def short(values: torch.Tensor) -> Any:
    """Nested lists of numbers of 8 digits."""
    if values.ndim == 1:
        return [float(f"{x:.8g}") for x in values.float().tolist()]
    return [short(each) for each in values]


def check_written(cases: dict[str, Any], written: dict[str, Any]) -> None:
    """Adds what zerojax writes, if the model that transformers makes of it has the same logits."""
    for name, seen in cases.items():
        kind = CLASSES[seen["config"]["model_type"]]
        config = kind.from_dict(copy.deepcopy(written[name]))
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        tokens = torch.tensor(text_of(seen["length"], config.vocab_size))
        with torch.no_grad():
            logits = filled(model, config).eval()(tokens).logits[:, -SEEN["last"] :]
        error = (logits - torch.tensor(seen["last_logits"])).abs().max().item()
        assert error < 1e-6, (name, error)
        seen["written"] = written[name]


if __name__ == "__main__":
    out, *more = map(Path, sys.argv[1:])
    if more:
        found = json.loads(out.read_text())["cases"]
        check_written(found, json.loads(more[0].read_text()))
    else:
        found = {name: run(name, *case) for name, case in CASES.items()}
    about = {"transformers": transformers.__version__, "torch": torch.__version__}
    out.write_text(json.dumps({"versions": about, "cases": found}) + "\n")
