"""Rotary position frequencies, and their scaling for longer contexts."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How a model that was trained on texts of one length reads longer ones.

    Attributes:
      kind: "linear": positions are divided by `factor` (arXiv:2306.15595). "llama3": only long
        wavelengths are stretched by `factor`, with a ramp in between (as Llama 3.1 is published).
        "dynamic": the base grows with the length of the text beyond `original_max_seq_len`, up to
        it nothing changes (NTK-aware scaling as transformers has it).
      factor: at least 1.
      original_max_seq_len: tokens, of the texts before; "llama3" and "dynamic".
      low_freq_factor, high_freq_factor: "llama3": wavelengths above `original_max_seq_len` / low
        are stretched, those below `original_max_seq_len` / high stay.
    """

    kind: Literal["linear", "dynamic", "llama3"]
    factor: float
    original_max_seq_len: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "dynamic", "llama3"):
            raise ValueError(f"rope_scaling.kind={self.kind!r}: use linear, dynamic or llama3")
        if not self.factor >= 1.0:
            raise ValueError(f"rope_scaling.factor={self.factor} must be at least 1")
        if self.kind != "linear" and not self.original_max_seq_len:
            raise ValueError(
                f"rope_scaling.kind={self.kind!r} needs original_max_seq_len, the number of tokens "
                "of the texts that the model was trained on"
            )
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"rope_scaling: low_freq_factor={self.low_freq_factor} must be above 0 and below "
                f"high_freq_factor={self.high_freq_factor}"
            )


def rotary_frequencies(
    half: int, theta: float, scaling: RopeScaling | None = None, *, seq_len: int = 0
) -> jax.Array:
    """Radians per position by which each pair of features turns: float32 [half].

    Args:
      half: pairs, half of a head's features.
      theta: base of the wavelengths; pair i turns by theta^(-i / half) radians per position.
      scaling: None: as it is.
      seq_len: tokens of the text; "dynamic" alone looks at it.
    """
    if scaling is not None and scaling.kind == "dynamic":
        theta *= _growth(half, scaling, seq_len)
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is None or scaling.kind == "dynamic":
        return frequencies
    stretched = frequencies / scaling.factor
    if scaling.kind == "linear":
        return stretched
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = (scaling.original_max_seq_len or 0) * frequencies / (2 * math.pi)
    kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - kept) * stretched + kept * frequencies


def _growth(half: int, scaling: RopeScaling, seq_len: int) -> float:
    """By what the base grows at this length of text; 1 up to the original one."""
    original = scaling.original_max_seq_len or 0
    longer = scaling.factor * max(seq_len, original) / original - (scaling.factor - 1)
    return longer ** (half / (half - 1)) if half > 1 else 1.0
