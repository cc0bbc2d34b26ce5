"""Rotary position frequencies, and their scaling for longer contexts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from zerojax.config.checks import check_finite
from zerojax.config.late_dataclasses import dataclass

KINDS = ("linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary positions for texts longer than those of the original training.

    Attributes:
      kind: method of scaling.
        "linear": positions are divided by `factor` (arXiv:2306.15595).
        "llama3": long wavelengths are multiplied by `factor`, short ones are unchanged, with a
        linear transition (as in Llama 3.1).
        "dynamic": the base grows with the length of the text beyond `original_max_seq_len`
        (NTK-aware scaling of transformers).
        "yarn": long wavelengths are multiplied by `factor`, short ones are unchanged, with a linear
        transition over feature pairs; cosine and sine are multiplied by `attention_factor`
        (arXiv:2309.00071).
        "longrope": each feature pair has two factors, one for texts of up to
        `original_max_seq_len` tokens and one for longer texts (arXiv:2402.13753).
      factor: scaling factor, at least 1.
      original_max_seq_len: maximum length in tokens of the original training; for all kinds except
        "linear".
      low_freq_factor, high_freq_factor: limits of "llama3": wavelengths above
        `original_max_seq_len` / low are multiplied by `factor`, those below
        `original_max_seq_len` / high are unchanged.
      beta_fast, beta_slow: limits of "yarn": wavelengths of pairs with more than `beta_fast`
        rotations within `original_max_seq_len` tokens are unchanged; with fewer than `beta_slow`,
        they are multiplied by `factor`.
      truncate: whether "yarn" rounds the bounds of the transition to integer pair indices.
      attention_factor: factor of cosine and sine, for "yarn" and "longrope"; None uses the papers'
        values, 0.1 ln(factor) + 1 and sqrt(1 + ln(factor) / ln(original_max_seq_len)).
      short_factor, long_factor: factors of each pair's wavelength, for "longrope".
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    factor: float
    original_max_seq_len: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_finite(self)
        for name in ("short_factor", "long_factor"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.kind not in KINDS:
            raise ValueError(
                f"rope_scaling.kind={self.kind!r} is unknown; "
                f"use {', '.join(KINDS[:-1])} or {KINDS[-1]}"
            )
        if not self.factor >= 1.0:
            raise ValueError(
                f"rope_scaling.factor={self.factor} must be at least 1; leave rope_scaling out "
                "for no scaling"
            )
        if self.kind != "linear" and not (self.original_max_seq_len or 0) > 1:
            raise ValueError(
                f"rope_scaling.kind={self.kind!r} needs original_max_seq_len of at least 2, not "
                f"{self.original_max_seq_len}; "
                "set it to the maximum text length in tokens of the original training"
            )
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"rope_scaling: low_freq_factor={self.low_freq_factor} must be above 0 and below "
                f"high_freq_factor={self.high_freq_factor}"
            )
        if not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(
                f"rope_scaling: beta_slow={self.beta_slow} must be above 0 and below "
                f"beta_fast={self.beta_fast}"
            )
        if self.attention_factor is not None and not self.attention_factor > 0:
            raise ValueError(
                f"rope_scaling.attention_factor={self.attention_factor} must be above 0"
            )
        if self.kind == "longrope":
            self._check_factors()

    def _check_factors(self) -> None:
        if len(self.short_factor) != len(self.long_factor) or not self.short_factor:
            raise ValueError(
                f"rope_scaling: short_factor has {len(self.short_factor)} numbers and long_factor "
                f"{len(self.long_factor)}; both need equally many, one for each rotated pair of "
                "features"
            )
        smallest = min(*self.short_factor, *self.long_factor)
        if not smallest > 0:
            raise ValueError(
                f"rope_scaling: short_factor and long_factor contain {smallest}, but all numbers "
                "must be above 0"
            )

    @property
    def magnitude(self) -> float:
        """Returns the factor of cosine and sine: `attention_factor`, its default, or 1."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1.0:
            return 1.0
        if self.kind == "yarn":
            return 0.1 * math.log(self.factor) + 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_seq_len or 0))


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions of a layer (arXiv:2104.09864).

    Attributes:
      theta: base of the wavelengths.
      scaling: scaling of the wavelengths for longer texts; None for no scaling.
      fraction: fraction of a head's features that are rotated, starting with the first.
      interleaved: whether pairs are features 2 i and 2 i + 1, as in the paper; False pairs features
        i and i + n / 2 of the n rotated features.
    """

    theta: float = 10000.0
    scaling: RopeScaling | None = None
    fraction: float = 1.0
    interleaved: bool = False

    def __post_init__(self) -> None:
        check_finite(self)
        if self.theta <= 1.0:
            raise ValueError(f"rope_theta={self.theta} must be above 1; 10000.0 is usual")
        if not 0.0 < self.fraction <= 1.0:
            raise ValueError(f"rope fraction={self.fraction} must be above 0 and at most 1")

    @property
    def depends_on_length(self) -> bool:
        """Returns whether the wavelengths depend on the length of the text."""
        return self.scaling is not None and self.scaling.kind in ("dynamic", "longrope")

    def turning(self, head_dim: int) -> int:
        """Returns the number of a head's features that are rotated."""
        return int(head_dim * self.fraction)

    def check(self, head_dim: int) -> None:
        """Raises a ValueError if a head's rotated features do not form pairs, or if the number of
        pairs differs from the number of factors."""
        turning = self.turning(head_dim)
        if turning % 2 or turning < 2:
            raise ValueError(
                f"head_dim={head_dim} with rope fraction={self.fraction} rotates {turning} "
                "features, but rotary positions rotate pairs of features; use an even number of at "
                "least 2"
            )
        scaling = self.scaling
        if scaling is None or scaling.kind != "longrope":
            return
        if len(scaling.short_factor) != turning // 2:
            raise ValueError(
                f"rope_scaling: short_factor and long_factor have {len(scaling.short_factor)} "
                f"numbers, but {turning // 2} pairs of features are rotated (head_dim={head_dim}, "
                f"fraction={self.fraction}); use one number per pair"
            )


def rotary_frequencies(
    half: int, theta: float, scaling: RopeScaling | None = None, *, seq_len: int | jax.Array = 0
) -> jax.Array:
    """Computes the rotation of each feature pair in radians per position, float32 [half].

    The result is [batch, half] if rows have different lengths and the wavelengths depend on them.

    Args:
      half: number of pairs, half of the rotated features.
      theta: base; without scaling, pair i rotates by theta^(-i / half) radians per position.
      scaling: scaling for longer texts; None for no scaling.
      seq_len: length of the text in tokens, or int32 [batch] with each row's length; only "dynamic"
        and "longrope" use it.
    """
    exponents = -jnp.arange(half, dtype=jnp.float32) / half
    if scaling is not None and scaling.kind == "dynamic":
        base = theta * _growth(half, scaling, seq_len)
        if isinstance(base, jax.Array):
            return base[:, None] ** exponents[None]
        return base**exponents
    frequencies = theta**exponents
    if scaling is None:
        return frequencies
    if scaling.kind == "longrope":
        short, long = (
            frequencies / jnp.asarray(factors, jnp.float32)
            for factors in (scaling.short_factor, scaling.long_factor)
        )
        is_long = seq_len > (scaling.original_max_seq_len or 0)
        if isinstance(is_long, jax.Array):
            return jnp.where(is_long[:, None], long[None], short[None])
        return long if is_long else short
    stretched = frequencies / scaling.factor
    if scaling.kind == "linear":
        return stretched
    if scaling.kind == "yarn":
        kept = _kept_by_yarn(half, theta, scaling)
        return (1 - kept) * stretched + kept * frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = (scaling.original_max_seq_len or 0) * frequencies / (2 * math.pi)
    kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - kept) * stretched + kept * frequencies


def frequencies_of_kinds(
    ropes: Sequence[Rope | None],
    half: int,
    *,
    kind: jax.Array | None,
    seq_len: int | jax.Array,
) -> tuple[jax.Array, jax.Array | float]:
    """Computes (radians per position, float32 [half]; factor of cosine and sine) for a layer.

    The radians are [batch, half] if each row has its own length and they depend on it.

    Args:
      ropes: rotary positions of each kind of layer; None for no rotation (all radians are 0).
      half: number of pairs.
      kind: int32 [], index of the layer's kind; None if there is one kind.
      seq_len: length of the text in tokens, or int32 [batch] with each row's length.
    """
    tables: list[jax.Array] = []
    magnitudes: list[float] = []
    for rope in ropes:
        if rope is None:
            tables.append(jnp.zeros(half, jnp.float32))
            magnitudes.append(1.0)
            continue
        tables.append(rotary_frequencies(half, rope.theta, rope.scaling, seq_len=seq_len))
        magnitudes.append(1.0 if rope.scaling is None else rope.scaling.magnitude)
    if kind is None or len(ropes) == 1:
        return tables[0], magnitudes[0]
    magnitude = jnp.asarray(magnitudes, jnp.float32)[kind]
    whole = jnp.broadcast_shapes(*(table.shape for table in tables))
    stacked = jnp.stack([jnp.broadcast_to(table, whole) for table in tables])
    return stacked[kind], magnitude if set(magnitudes) != {1.0} else 1.0


def _growth(half: int, scaling: RopeScaling, seq_len: int | jax.Array) -> Any:
    """Computes the factor of the base at length `seq_len` ("dynamic" scaling), a scalar or [batch].

    The factor is 1 up to the original length.
    """
    original = scaling.original_max_seq_len or 0
    if isinstance(seq_len, jax.Array):
        length: Any = jnp.maximum(seq_len, original).astype(jnp.float32)
    else:
        length = max(seq_len, original)
    longer = scaling.factor * length / original - (scaling.factor - 1)
    return longer ** (half / (half - 1)) if half > 1 else 1.0


def _kept_by_yarn(half: int, theta: float, scaling: RopeScaling) -> jax.Array:
    """Computes float32 [half]: 1 for pairs whose wavelength is unchanged, 0 for scaled ones."""

    def pair_of(turns: float) -> float:
        """Returns the (fractional) index of the pair with `turns` rotations in original texts."""
        length = scaling.original_max_seq_len or 0
        return half * math.log(length / (turns * 2 * math.pi)) / math.log(theta)

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    width = (high - low) or 0.001  # if both bounds are the same pair, as in transformers
    ramp = (jnp.arange(half, dtype=jnp.float32) - low) / width
    return 1 - jnp.clip(ramp, 0.0, 1.0)
