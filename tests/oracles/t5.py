"""Logits, gradients and targets of small random T5s by transformers, for tests/zoo/test_t5.py.

Needs torch and transformers, which no test imports; run with transformers 5.23.0, torch 2.13.0:

    PYTHONPATH=. python tests/oracles/t5.py tests/data/t5.json
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

from tests.support.hugging_face_weights import weights_of_t5

SIZES = {
    "vocab_size": 21,
    "d_model": 16,
    "d_kv": 6,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "decoder_start_token_id": 0,
}
# (changes to the sizes, whether the files hold output weights of their own)
CASES = {
    "first": ({}, False),
    "version_1_1": ({"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, True),
    "tied_not_scaled": ({"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, False),
}
SOURCE, TARGET = 30, 20  # longer than the distance from which on all share a bucket
GRADIENTS = (
    "shared.weight",
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    "encoder.block.1.layer.0.SelfAttention.q.weight",
    "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    "decoder.block.2.layer.1.EncDecAttention.k.weight",
    "decoder.block.1.layer.2.layer_norm.weight",
)


def run(changes: dict, has_head: bool) -> dict:
    """A model with weights by formula, as it is saved, and what it computes."""
    config = transformers.T5Config(**SIZES, **changes)
    model = transformers.T5ForConditionalGeneration(config)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder)
        saved = json.loads((folder / "config.json").read_text())
        shapes = {
            n: list(x.shape) for n, x in model.state_dict().items() if "embed_tokens" not in n
        }
        if not has_head:
            del shapes["lm_head.weight"]
        named = {n: torch.from_numpy(weights_of_t5(n, shape)) for n, shape in shapes.items()}
        save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
        model = transformers.T5ForConditionalGeneration.from_pretrained(folder).double().eval()
    rows = (0, 1)
    tokens = torch.tensor([[(7 * i + 3 * r + i * i) % 21 for i in range(SOURCE)] for r in rows])
    targets = torch.tensor([[(5 * i + r + i * i) % 20 + 1 for i in range(TARGET)] for r in rows])
    mask = torch.tensor([[int(i < SOURCE - 9 * r) for i in range(SOURCE)] for r in rows])
    found = model(input_ids=tokens, attention_mask=mask, labels=targets)
    found.loss.backward()
    parameters = dict(model.named_parameters())
    return {
        "config": saved,
        "tensors": shapes,
        "tokens": tokens.tolist(),
        "targets": targets.tolist(),
        "attention_mask": mask.tolist(),
        "last_logits": [_rounded(row[-3:]) for row in found.logits],
        "loss": float(found.loss.detach()),
        "gradients": {n: _rounded(parameters[n].grad.reshape(1, -1))[0] for n in GRADIENTS},
        "drawn": _draw(model, tokens, mask),
    }


def _draw(model, tokens: torch.Tensor, mask: torch.Tensor) -> list:
    # Their cache has as many layers as the encoder.
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "use_cache": False}
    drawn = model.generate(input_ids=tokens, attention_mask=mask, **options)
    return drawn[:, 1:].tolist()


def _rounded(values: torch.Tensor) -> list:
    return [[float(f"{x:.7g}") for x in row] for row in values.tolist()]


if __name__ == "__main__":
    found = {name: run(*case) for name, case in CASES.items()}
    about = {"transformers": transformers.__version__, "torch": torch.__version__}
    Path(sys.argv[1]).write_text(json.dumps({"versions": about, "cases": found}) + "\n")
