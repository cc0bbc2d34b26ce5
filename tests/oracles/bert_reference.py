"""Writes tests/data/bert_reference.json: what transformers makes of the BERT of tests/bert_weights.

Needs torch and transformers; run with torch 2.13.0 (CPU) and transformers 5.23.0:
`python tests/oracles/bert_reference.py` from the root of the repository.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support import bert_weights as tiny  # noqa: E402


def reference(activation: str) -> dict[str, object]:
    """Logits, loss, norms of gradients, pooled output of a BertForPreTraining's parts."""
    config = transformers.BertConfig(
        **tiny.SIZES,
        hidden_act=activation,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )
    model = transformers.BertForPreTraining(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(tiny.weight(name, tuple(parameter.shape))))
    inputs = {
        "input_ids": torch.from_numpy(tiny.TOKENS).long(),
        "attention_mask": torch.from_numpy(tiny.ATTENTION_MASK),
        "token_type_ids": torch.from_numpy(tiny.TOKEN_TYPES).long(),
    }
    encoded = model.bert(**inputs)
    logits = model.cls.predictions(encoded.last_hidden_state)
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(tiny.TARGETS).long().flatten(), reduction="none"
    )
    loss = (losses * torch.from_numpy(tiny.WEIGHTS).flatten()).sum()
    loss.backward()
    norms = {
        name: parameter.grad.double().norm().item()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return {
        "hidden": encoded.last_hidden_state.tolist(),
        "pooled": encoded.pooler_output.tolist(),
        "logits": logits.tolist(),
        "loss": loss.item(),
        "gradient_norms": norms,
    }


def rounded(value: object) -> object:
    """Floats to 8 significant digits."""
    if isinstance(value, float):
        return float(f"{value:.8g}")
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return value


def main() -> None:
    """Writes the file."""
    made = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        **{activation: reference(activation) for activation in ("gelu", "gelu_new")},
    }
    path = ROOT / "tests" / "data" / "bert_reference.json"
    path.write_text(json.dumps(rounded(made)) + "\n", encoding="utf-8")
    print(path, path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
