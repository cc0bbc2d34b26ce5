"""Weights of small models by formula, so that two programs have them without a file between them.

Knows names and shapes; imports NumPy only, for `tests/oracles/hugging_face.py` runs elsewhere.
"""

import zlib
from collections.abc import Sequence

import numpy as np


def weights(name: str, shape: Sequence[int], *, norms_near: float = 1.0) -> np.ndarray:
    """float32 values of a tensor: random by its name; norms are near 1, or as said (Gemma's: 0)."""
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    values = 0.3 * generator.standard_normal(shape)
    if "norm" in name or "ln_" in name:
        values = values + norms_near * name.endswith("weight")
    return values.astype(np.float32)


def text_of(length: int, vocab_size: int) -> list[list[int]]:
    """Two rows of tokens. The last ids are left out: torch has no gradient for padding's vector."""
    ids = vocab_size - 2
    return [[(7 * i + 3 * row + i * i) % ids for i in range(length)] for row in (0, 1)]


def norms_near(model_type: str) -> float:
    """Where the weights of a family's norms begin."""
    return 0.0 if model_type.startswith("gemma") else 1.0


def probes(name: str, gradient: np.ndarray) -> list[float]:
    """A few numbers of a gradient: its length, and products with random directions by its name."""
    wide = np.asarray(gradient, np.float64).reshape(-1)
    generator = np.random.default_rng(zlib.crc32(f"probe of {name}".encode()))
    directions = generator.standard_normal((3, wide.size))
    return [float(np.linalg.norm(wide)), *map(float, directions @ wide)]


def weights_of_t5(name: str, shape: Sequence[int]) -> np.ndarray:
    """The same; queries are smaller, since scores are not divided by sqrt(head_dim)."""
    return weights(name, shape) * np.float32(0.3 if name.endswith("Attention.q.weight") else 1)
