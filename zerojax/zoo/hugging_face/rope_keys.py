"""Rotary positions in config.json, for all layers or per layer type, with keys of all versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerojax.config.display import quoted
from zerojax.zoo.hugging_face.config_reading import ConfigReading, UnsupportedError
from zerojax.zoo.rope import Rope, RopeScaling

FULL, SLIDING = "full_attention", "sliding_attention"
_OF_KINDS = (
    *("type", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim", "truncate", "attention_factor", "short_factor", "long_factor"),
)
"""Keys of some kinds of rotary positions; other kinds ignore them, as in transformers."""
_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def read_rope(
    reading: ConfigReading,
    *,
    theta: float = 10000.0,
    longest: int,
    interleaved: bool = False,
    partial: bool = False,
) -> Rope:
    """Reads the rotary positions of a model in which all layers have the same ones.

    As in transformers, a `rope_scaling` that is not empty replaces `rope_parameters`, and keys
    outside of both are defaults.

    Args:
      reading: the config.json.
      theta: default of the base.
      longest: value of max_position_embeddings.
      interleaved: value for `Rope.interleaved`.
      partial: whether the family may rotate only a part of the features of a head.

    Raises:
      UnsupportedError: the kind of scaling is not supported, or a key is unknown.
    """
    values = replaced(reading)
    if nested(values):
        raise UnsupportedError(
            f"{reading.where}: rope_parameters has one entry per type of layer ({FULL}, ...), but "
            "this model needs the same for all layers"
        )
    for key in ("rope_theta", "partial_rotary_factor"):
        if reading.has(key):
            values.setdefault(key, reading.positive(key))
    kinds = {"alike": interleaved, "partial": partial}
    return rope_of(values, where=reading.where, theta=theta, longest=longest, **kinds)


def replaced(reading: ConfigReading) -> dict[str, Any]:
    """Returns `rope_scaling` if it is not empty, or else `rope_parameters`; {} without both."""
    scaling, parameters = reading.get("rope_scaling"), reading.get("rope_parameters")
    return dict(scaling or parameters or {})


def read_ropes(
    reading: ConfigReading, *, theta: Mapping[str, float], longest: int, local_key: str | None
) -> dict[str, Rope]:
    """Reads {type of layer: its rotary positions}, which may differ between types.

    Args:
      reading: the config.json.
      theta: default base of each type.
      longest: value of max_position_embeddings.
      local_key: key of the base of sliding layers; None: they have no key outside of
        `rope_parameters` (in transformers, `rope_theta` applies to full layers only).
    """
    parameters, scaling = reading.get("rope_parameters") or {}, reading.get("rope_scaling") or {}
    parts: dict[str, dict[str, Any]] = {FULL: {}, SLIDING: {}}
    if parameters and not nested(parameters):
        raise UnsupportedError(
            f"{reading.where}: rope_parameters needs entries for {FULL} and {SLIDING} in this "
            "model, but has none"
        )
    unknown = sorted(set(parameters) - set(parts))
    if unknown:
        raise UnsupportedError(
            f"{reading.where}: rope_parameters has an entry {unknown[0]!r}; only the layer types "
            f"{FULL} and {SLIDING} are supported"
        )
    for kind in parts:
        parts[kind] |= parameters.get(kind) or {}
    if "type" in scaling and "rope_type" not in scaling:
        # transformers keeps its own default of "rope_type", and so does not scale.
        raise UnsupportedError(
            f"{reading.where}: rope_scaling has type={quoted(scaling['type'])}, which transformers "
            "ignores for this model; rename the key to rope_type, or remove rope_scaling"
        )
    parts[FULL] |= scaling  # in older files rope_scaling applies to full layers only
    for kind, key in ((FULL, "rope_theta"), (SLIDING, local_key)):
        if key is not None and reading.has(key):
            parts[kind].setdefault("rope_theta", reading.positive(key))
    return {
        kind: rope_of(values, where=reading.where, theta=theta[kind], longest=longest)
        for kind, values in parts.items()
    }


def nested(values: Mapping[str, Any]) -> bool:
    """Returns whether rope_parameters has an object for each type of layer."""
    return any(isinstance(value, Mapping) for value in values.values())


def rope_of(
    values: Mapping[str, Any],
    *,
    where: str,
    theta: float,
    longest: int,
    alike: bool = False,
    partial: bool = False,
) -> Rope:
    """Reads rotary positions from one object; "type" is the old name of "rope_type".

    Args:
      values: the object.
      where: name of the file in messages.
      theta, longest: default of the base, and max_position_embeddings.
      alike: value for `Rope.interleaved`.
      partial: whether the family may rotate only a part of the features of a head.

    Raises:
      UnsupportedError: a value is not supported. transformers ignores a `partial_rotary_factor` of
        other families, which other programs may apply.
    """
    reading = ConfigReading(values, f"{where}: rope_parameters or rope_scaling")
    kind = reading.get("rope_type") or reading.get("type") or "default"
    base = reading.positive("rope_theta") if reading.has("rope_theta") else theta
    fraction = reading.get("partial_rotary_factor")
    if not partial and fraction not in (None, 1.0):
        raise UnsupportedError(
            f"{where}: partial_rotary_factor is {fraction}, but this model rotates all features of "
            "a head; only 1.0 is supported"
        )
    original = "original_max_position_embeddings"
    original = reading.positive(original) if reading.has(original) else None
    scaling = _scaling(reading, kind, original, longest)
    reading.check_rest(_OF_KINDS)  # keys of other kinds have no effect
    return Rope(
        theta=float(base),
        scaling=scaling,
        fraction=1.0 if fraction is None else float(fraction),
        interleaved=alike,
    )


def _scaling(
    reading: ConfigReading, kind: str, original: int | None, longest: int
) -> RopeScaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=float(reading.needed("factor")))
    if kind == "dynamic":
        factor = float(reading.needed("factor"))
        return RopeScaling(kind="dynamic", factor=factor, original_max_seq_len=longest)
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=float(reading.needed("factor")),
            original_max_seq_len=longest if original is None else int(original),
            low_freq_factor=float(reading.needed("low_freq_factor")),
            high_freq_factor=float(reading.needed("high_freq_factor")),
        )
    if kind in ("yarn", "longrope"):
        before = longest if original is None else int(original)
        factor = reading.get("factor")
        factor = longest / before if factor is None else float(factor)
        return (_yarn if kind == "yarn" else _longrope)(reading, factor, before)
    raise UnsupportedError(
        f"{reading.where}: rotary positions of type {kind!r} are not supported; "
        f"use {', '.join(_KINDS[:-1])} or {_KINDS[-1]}"
    )


def _yarn(reading: ConfigReading, factor: float, before: int) -> RopeScaling:
    magnitude = reading.get("attention_factor")
    plain = RopeScaling(kind="yarn", factor=factor, original_max_seq_len=before)
    mscale, mscale_all_dim = reading.get("mscale"), reading.get("mscale_all_dim")
    if magnitude is None and mscale and mscale_all_dim and factor > 1:
        growth = plain.magnitude - 1.0  # 0.1 ln(factor)
        magnitude = (mscale * growth + 1.0) / (mscale_all_dim * growth + 1.0)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_seq_len=before,
        beta_fast=float(reading.get("beta_fast") or 32.0),
        beta_slow=float(reading.get("beta_slow") or 1.0),
        truncate=bool(reading.get("truncate", True)),
        attention_factor=None if magnitude is None else float(magnitude),
    )


def _longrope(reading: ConfigReading, factor: float, before: int) -> RopeScaling:
    magnitude = reading.get("attention_factor")
    for key in ("short_mscale", "long_mscale"):  # only in Phi-3-MoE
        reading.require("cosine and sine have a single factor", **{key: (None,)})
    return RopeScaling(
        kind="longrope",
        factor=max(1.0, factor),
        original_max_seq_len=before,
        attention_factor=None if magnitude is None else float(magnitude),
        short_factor=tuple(map(float, reading.needed("short_factor"))),
        long_factor=tuple(map(float, reading.needed("long_factor"))),
    )


def write_scaling(rope: Rope) -> dict[str, Any] | None:
    """Builds `rope_scaling` with keys of all versions, without the base; None without scaling."""
    scaling = rope.scaling
    if scaling is None:
        return None
    written: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        written |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
        }
    if scaling.kind == "yarn":
        written |= {
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
        }
    if scaling.kind == "longrope":
        written |= {
            "short_factor": list(scaling.short_factor),
            "long_factor": list(scaling.long_factor),
        }
    if scaling.kind in ("llama3", "yarn", "longrope"):
        written["original_max_position_embeddings"] = scaling.original_max_seq_len
    if scaling.attention_factor is not None:
        written["attention_factor"] = scaling.attention_factor
    return written


def write_rope(rope: Rope, longest: int) -> dict[str, Any]:
    """Builds the keys of a model with one `Rope`, readable by transformers 4 and 5.

    Args:
      rope: rotary positions of all layers.
      longest: max_seq_len of the model, written to max_position_embeddings. For "dynamic" scaling
        the original length is written, because transformers reads it from this key.
    """
    written: dict[str, Any] = {
        "max_position_embeddings": longest,
        "rope_scaling": write_scaling(rope),
        "rope_theta": rope.theta,
    }
    if rope.fraction != 1.0:
        written["partial_rotary_factor"] = rope.fraction
    if rope.scaling is not None and rope.scaling.kind == "dynamic":
        written["max_position_embeddings"] = rope.scaling.original_max_seq_len
    return written


def write_ropes(ropes: Mapping[str, Rope]) -> dict[str, Any]:
    """Builds `rope_parameters` with one entry per type of layer, as in transformers 5."""
    return {
        kind: {"rope_type": "default", "rope_theta": rope.theta, **(write_scaling(rope) or {})}
        for kind, rope in ropes.items()
    }
