"""Logits and gradients of small mixtures of experts by transformers, for test_families.py.

Needs torch and transformers, which no test imports; run with transformers 5.23.0, torch 2.13.0:

    PYTHONPATH=. python tests/oracles/moe_families.py tests/data/moe_families.json

and again, after zerojax has written its own config.json of each (in zerojax's environment), to see
that transformers computes the same with those:

    python -m tests.support.hugging_face_folders written.json
    PYTHONPATH=. python tests/oracles/moe_families.py tests/data/moe_families.json written.json

The values are put into files as they lie on a disk, one tensor for each expert, and read by
`from_pretrained`, which joins them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.oracles.families import SEEN, SIZES, config_of, short
from tests.support.hugging_face_weights import probes, text_of, weights

MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}
QWEN3 = {**MIXTRAL, "num_experts": 4, "moe_intermediate_size": 12, "head_dim": 8}
del QWEN3["num_local_experts"]
OLMOE = {"num_experts": 6, "num_experts_per_tok": 3, "num_hidden_layers": 2}
GPT_OSS = {
    **MIXTRAL,
    "head_dim": 4,
    "sliding_window": 6,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "rope_theta": 100.0,
        "truncate": False,
    },
}
WITH_BALANCE = {"output_router_logits": True, "router_aux_loss_coef": 0.25}
# name: (model_type, further keys, tokens)
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "mixtral": ("mixtral", {**MIXTRAL, "sliding_window": 5}, 24),
    "mixtral_balance": ("mixtral", {**MIXTRAL, **WITH_BALANCE, "head_dim": 6}, 24),
    "olmoe": ("olmoe", {**OLMOE, "num_key_value_heads": 4}, 24),
    "olmoe_clipped": (
        "olmoe",
        {**OLMOE, **WITH_BALANCE, "clip_qkv": 0.5, "attention_bias": True, "norm_topk_prob": True},
        24,
    ),
    "qwen3_moe": ("qwen3_moe", {**QWEN3, "norm_topk_prob": True}, 24),
    "qwen3_moe_windows": (
        "qwen3_moe",
        {
            **QWEN3,
            **WITH_BALANCE,
            "num_experts_per_tok": 1,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 6,
        },
        24,
    ),
    "gpt_oss": ("gpt_oss", {**GPT_OSS, "swiglu_limit": 0.5}, 24),  # which clips half of the units
    "gpt_oss_balance": (
        "gpt_oss",
        {
            **GPT_OSS,
            **WITH_BALANCE,
            "num_local_experts": 6,
            "num_hidden_layers": 3,
            "num_experts_per_tok": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "attention_bias": False,
            "tie_word_embeddings": True,
        },
        24,
    ),
}
NARROWEST = 2e-5
"""Between the probability of the last expert that is chosen and the next: no rounding decides."""


def in_files(model_type: str, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """A parameter of the model as the tensors that files have of it."""
    if model_type == "gpt_oss":
        return {name: tensor}
    parts = ("w1", "w3", "w2") if model_type == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    if model_type == "mixtral":
        name = name.replace(".mlp.", ".block_sparse_moe.")
    base, _, last = name.rpartition(".")
    if last == "down_proj":
        return {f"{base}.{n}.{parts[2]}.weight": each for n, each in enumerate(tensor)}
    if last == "gate_up_proj":
        halves = [each.chunk(2) for each in tensor]
        return {
            f"{base}.{n}.{part}.weight": half
            for n, both in enumerate(halves)
            for part, half in zip(parts[:2], both, strict=True)
        }
    return {name: tensor}


def saved_by(model: Any) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """(config.json, {tensor: shape}) as transformers saves a model."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        saved = json.loads((Path(folder) / "config.json").read_text())
        with safe_open(Path(folder) / "model.safetensors", "pt") as file:
            shapes = {key: list(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    return saved, shapes


def loaded(config: dict[str, Any], shapes: dict[str, list[int]]) -> Any:
    """The model that transformers makes of a folder with weights by formula."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        tensors = {key: torch.from_numpy(weights(key, shape)) for key, shape in shapes.items()}
        save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        )
    return model.eval()


def check_choices(router_logits: Any, count: int) -> None:
    """No token's choice of experts is a matter of rounding."""
    for logits in router_logits:
        ordered = logits.softmax(-1).sort(-1, descending=True).values
        narrowest = (ordered[:, count - 1] - ordered[:, count]).min().item()
        assert narrowest > NARROWEST, narrowest


def run(model_type: str, changes: dict[str, Any], length: int) -> dict[str, Any]:
    """A model with weights by formula, as it is saved; its logits and gradients."""
    config = config_of(model_type, changes)
    saved, shapes = saved_by(transformers.AutoModelForCausalLM.from_config(config))
    model = loaded(saved, shapes)
    tokens = torch.tensor(text_of(length, config.vocab_size))
    out = model(tokens, output_router_logits=True)
    check_choices(out.router_logits, config.num_experts_per_tok)
    loss = torch.nn.functional.cross_entropy(
        out.logits[:, :-1].reshape(-1, config.vocab_size), tokens[:, 1:].reshape(-1)
    )
    seen = {"cross_entropy": loss.item(), "balance": out.aux_loss.item()}
    if config.output_router_logits:
        loss = loss + config.router_aux_loss_coef * out.aux_loss
    loss.backward()
    gradients = {}
    for name, value in model.named_parameters():
        gradients |= in_files(model_type, name, value.grad)
    assert gradients.keys() == shapes.keys(), gradients.keys() ^ shapes.keys()
    return {
        "config": saved,
        "tensors": shapes,
        "length": length,
        "last_logits": short(out.logits[:, -SEEN["last"] :]),
        "loss": loss.item(),
        **seen,
        "gradients": {
            key: [float(f"{x:.8g}") for x in probes(key, value.numpy())]
            for key, value in gradients.items()
        },
    }


def check_written(cases: dict[str, Any], written: dict[str, Any]) -> None:
    """Adds what zerojax writes, if the model that transformers makes of it has the same logits."""
    for name, seen in cases.items():
        model = loaded(written[name], seen["tensors"])
        tokens = torch.tensor(text_of(seen["length"], SIZES["vocab_size"]))
        with torch.no_grad():
            out = model(tokens, output_router_logits=True)
        error = out.logits[:, -SEEN["last"] :] - torch.tensor(seen["last_logits"])
        assert error.abs().max().item() < 1e-6, (name, error)
        for key in ("output_router_logits", "router_aux_loss_coef"):
            if model.config.output_router_logits:
                assert getattr(model.config, key) == seen["config"][key], name
        seen["written"] = written[name]


def decoded_codes() -> dict[str, Any]:
    """All codes of MXFP4 with small, middle and large scales, decoded by transformers."""
    codes = torch.from_numpy(np.random.default_rng(0).permutation(256).astype(np.uint8))
    blocks = codes.reshape(2, 4, 2, 16)
    scales = [0, 1, 64, 100, 120, 126, 127, 128, 129, 130, 140, 200, 240, 250, 251, 252]
    scales = torch.tensor(scales, dtype=torch.uint8).reshape(2, 4, 2)
    values = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert values.isfinite().all()
    return {
        "blocks": blocks.tolist(),
        "scales": scales.tolist(),
        "values": values.to(torch.float64).tolist(),
    }


if __name__ == "__main__":
    out, *more = map(Path, sys.argv[1:])
    codes = decoded_codes()
    if more:
        found = json.loads(out.read_text())["cases"]
        check_written(found, json.loads(more[0].read_text()))
    else:
        found = {name: run(*case) for name, case in CASES.items()}
    about = {"transformers": transformers.__version__, "torch": torch.__version__}
    out.write_text(json.dumps({"versions": about, "cases": found, "mxfp4": codes}) + "\n")
