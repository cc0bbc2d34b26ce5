"""Logits of small random models by transformers, for tests/zoo/test_hugging_face.py.

Needs torch and transformers, which no test imports; run with transformers 5.23.0, torch 2.13.0:

    PYTHONPATH=. python tests/oracles/hugging_face.py tests/data/hugging_face.json
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors import safe_open

from tests.support.hugging_face_weights import weights

LLAMA = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GPT2 = {"vocab_size": 19, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}

CASES = {
    "gpt2": (transformers.GPT2Config(**GPT2), 12),
    "gpt2_untied": (transformers.GPT2Config(**GPT2, n_inner=24, tie_word_embeddings=False), 7),
    "llama": (transformers.LlamaConfig(**LLAMA | {"num_hidden_layers": 3}), 12),
    "llama_tied": (transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True), 12),
    "llama_head_dim": (transformers.LlamaConfig(**LLAMA, head_dim=6), 7),
    "llama_rope_llama3": (
        transformers.LlamaConfig(**LLAMA, rope_parameters={**LLAMA3, "rope_theta": 100.0}),
        24,
    ),
    "llama_rope_linear": (
        transformers.LlamaConfig(
            **LLAMA, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
        ),
        24,
    ),
    "llama_rope_dynamic": (
        transformers.LlamaConfig(
            **{**LLAMA, "max_position_embeddings": 8},
            rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        ),
        24,
    ),
}


def run(config, length: int) -> dict:
    """A model of this configuration with weights by formula, as it is saved, and its logits."""
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    state = model.state_dict()
    named = {name: torch.from_numpy(weights(name, x.shape)) for name, x in state.items()}
    if config.tie_word_embeddings:
        named["lm_head.weight"] = named[next(iter(state))]
    model.load_state_dict(named)
    model.eval()
    tokens = [
        [(7 * i + 3 * row + i * i) % config.vocab_size for i in range(length)] for row in (0, 1)
    ]
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        logits = model(torch.tensor(tokens)).logits
        saved = json.loads((Path(folder) / "config.json").read_text())
        with safe_open(Path(folder) / "model.safetensors", "pt") as file:
            tensors = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    rounded = [[[float(f"{x:.7g}") for x in at] for at in row[-3:]] for row in logits.tolist()]
    return {"config": saved, "tensors": tensors, "tokens": tokens, "last_logits": rounded}


if __name__ == "__main__":
    found = {name: run(*case) for name, case in CASES.items()}
    about = {"transformers": transformers.__version__, "torch": torch.__version__}
    text = json.dumps({"versions": about, "cases": found})
    Path(sys.argv[1]).write_text(text + "\n")
