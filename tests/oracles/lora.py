"""What peft and transformers make of adapters, for tests/zoo/test_peft.py; and of a GGUF file.

Needs torch, transformers and peft, which no test imports; run with peft 0.21.2, transformers
5.23.0, torch 2.13.0:

    PYTHONPATH=. python tests/oracles/lora.py tests/data/lora.json
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import peft
import torch
import transformers
from safetensors import safe_open

from tests.support.hugging_face_weights import weights
from tests.support.peft_weights import ALPHA, CASES, RANK, adapter_tensor

CONFIGS = {
    "gpt2": transformers.GPT2Config(vocab_size=19, n_embd=16, n_layer=2, n_head=4, n_positions=16),
    "llama": transformers.LlamaConfig(
        vocab_size=19,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    ),
}


def run(case: str) -> dict:
    """A model with adapters, all weights by formula: what is saved of it, and its logits."""
    config = CONFIGS[case]
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    state = model.state_dict()
    named = {name: torch.from_numpy(weights(name, x.shape)) for name, x in state.items()}
    if config.tie_word_embeddings:
        named["lm_head.weight"] = named[next(iter(state))]
    model.load_state_dict(named)
    shapes = {name: list(x.shape) for name, x in state.items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        base_config = json.loads((Path(folder) / "config.json").read_text())
    targets = CASES[case]
    joined = {name: len(parts) for name, parts in targets.items() if len(parts) > 1}
    adapted = peft.get_peft_model(
        model,
        peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=RANK,
            lora_alpha=ALPHA,
            target_modules=list(targets),
            rank_pattern={name: RANK * count for name, count in joined.items()},
            alpha_pattern={name: ALPHA * count for name, count in joined.items()},
            fan_in_fan_out=case == "gpt2",
        ),
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                saved = name.replace(".default", "")
                value = adapter_tensor(case, saved, tuple(parameter.shape))
                parameter.copy_(torch.from_numpy(value))
    adapted.eval()
    tokens = [[(7 * i + 3 * row + i * i) % 19 for i in range(12)] for row in (0, 1)]
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        adapted.save_pretrained(folder)
        saved = json.loads((Path(folder) / "adapter_config.json").read_text())
        with safe_open(Path(folder) / "adapter_model.safetensors", "pt") as file:
            tensors = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        logits = adapted(torch.tensor(tokens)).logits
        merged = adapted.merge_and_unload()(torch.tensor(tokens)).logits
    assert torch.allclose(logits, merged, atol=1e-4)
    rounded = [[[float(f"{x:.7g}") for x in at] for at in row[-3:]] for row in logits.tolist()]
    return {
        "config": base_config,
        "base_tensors": shapes,
        "adapter_config": saved,
        "adapter_tensors": tensors,
        "tokens": tokens,
        "last_logits": rounded,
    }


if __name__ == "__main__":
    found = {case: run(case) for case in CASES}
    about = {
        "peft": peft.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    Path(sys.argv[1]).write_text(json.dumps({"versions": about, "cases": found}) + "\n")
