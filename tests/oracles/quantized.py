"""Logits of transformers for folders with 8-bit codes, for tests/zoo/test_quantized_export.py.

Needs torch, transformers and compressed-tensors, which no test imports; run with transformers
5.24.0, compressed-tensors 0.20.0, torch 2.13.0. The folders are written by zerojax:

    PYTHONPATH=. python -m tests.zoo.test_quantized_export FOLDER
    python tests/oracles/quantized.py tests/data/quantized.json FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
import transformers


def logits_of(folder: Path) -> dict[str, Any]:
    """Returns tokens, and the logits at the last three positions."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.config.vocab_size, (2, 9), generator=generator)
    with torch.no_grad():
        logits = model.eval()(tokens).logits
    return {"tokens": tokens.tolist(), "last_logits": logits[:, -3:].tolist()}


def main(out: Path, folders: Path) -> None:
    """Writes the logits of all folders CASE/KIND."""
    cases = {
        f"{folder.parent.name}, {folder.name}": logits_of(folder)
        for folder in sorted(folders.glob("*/*"))
        if folder.name != "plain"
    }
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    out.write_text(json.dumps({"versions": versions, "cases": cases}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
