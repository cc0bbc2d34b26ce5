"""Weights of small models by formula, so that two programs have them without a file between them.

Knows names and shapes; imports NumPy only, for `tests/oracles/hugging_face.py` runs elsewhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np


def weights(name: str, shape: Sequence[int]) -> np.ndarray:
    """float32 values of a tensor: random by its name; norms are near 1."""
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    values = 0.3 * generator.standard_normal(shape)
    if "norm" in name or "ln_" in name:
        values = values + 1.0 * name.endswith("weight")
    return values.astype(np.float32)
