"""Rotary positions in config.json: flat or for each type of layer, in the keys of all versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerojax.zoo.hugging_face.config_reading import ConfigReading, UnsupportedError
from zerojax.zoo.rope import Rope, RopeScaling

FULL, SLIDING = "full_attention", "sliding_attention"
_OF_KINDS = (
    *("type", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim", "truncate", "attention_factor", "short_factor", "long_factor"),
)
"""Keys that some kind of rotary positions has; others do not look at them, as in transformers."""
_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def read_rope(
    reading: ConfigReading,
    *,
    theta: float = 10000.0,
    longest: int,
    interleaved: bool = False,
) -> Rope:
    """The rotary positions of a model whose layers all turn alike.

    Args:
      theta: the base where no key says it.
      longest: max_position_embeddings.

    Raises:
      UnsupportedError: a kind of scaling or a key that is not known.
    """
    values = {**(reading.get("rope_parameters") or {}), **(reading.get("rope_scaling") or {})}
    if nested(values):
        raise UnsupportedError(
            f"{reading.where}: rope_parameters has entries for types of layers ({FULL}, ...), and "
            "this model has one for all layers"
        )
    for key in ("rope_theta", "partial_rotary_factor"):
        if reading.has(key):
            values.setdefault(key, reading.get(key))
    return rope_of(values, where=reading.where, theta=theta, longest=longest, alike=interleaved)


def read_ropes(
    reading: ConfigReading, *, theta: Mapping[str, float], longest: int, local_key: str | None
) -> dict[str, Rope]:
    """{type of layer: its rotary positions}, where they may differ between types.

    Args:
      theta: the bases where no key says them, of both types.
      longest: max_position_embeddings.
      local_key: of the base of sliding layers beside "rope_theta" of full ones; None: both have
        that.
    """
    given, scaling = reading.get("rope_parameters") or {}, reading.get("rope_scaling") or {}
    parts: dict[str, dict[str, Any]] = {FULL: {}, SLIDING: {}}
    if given and not nested(given):
        raise UnsupportedError(
            f"{reading.where}: rope_parameters has no entries for {FULL} and {SLIDING}, of which "
            "this model has one each"
        )
    unknown = sorted(set(given) - set(parts))
    if unknown:
        raise UnsupportedError(
            f"{reading.where}: rope_parameters has an entry {unknown[0]!r}; only {FULL} and "
            f"{SLIDING} are types of layers here"
        )
    for kind in parts:
        parts[kind] |= given.get(kind) or {}
    parts[FULL] |= scaling  # older files have scaling of full layers alone
    keys = {FULL: "rope_theta", SLIDING: local_key or "rope_theta"}
    for kind, key in keys.items():
        if reading.has(key):
            parts[kind].setdefault("rope_theta", reading.get(key))
    return {
        kind: rope_of(values, where=reading.where, theta=theta[kind], longest=longest)
        for kind, values in parts.items()
    }


def nested(values: Mapping[str, Any]) -> bool:
    """Whether rope_parameters has an object for each type of layer."""
    return any(isinstance(value, Mapping) for value in values.values())


def rope_of(
    values: Mapping[str, Any], *, where: str, theta: float, longest: int, alike: bool = False
) -> Rope:
    """Rotary positions from the keys of one object; "type" was the key before "rope_type".

    Args:
      values: the object.
      where: of messages.
      theta, longest: see `read_rope`.
      alike: whether pairs are neighbours (`Rope.interleaved`).
    """
    found = ConfigReading(values, f"{where}: rope_parameters or rope_scaling")
    kind = found.get("rope_type") or found.get("type") or "default"
    base = float(found.get("rope_theta") or theta)
    fraction = found.get("partial_rotary_factor")
    original = found.get("original_max_position_embeddings")
    scaling = _scaling(found, kind, original, longest)
    found.check_rest(_OF_KINDS)  # what is of another kind says nothing
    return Rope(
        theta=base,
        scaling=scaling,
        fraction=1.0 if fraction is None else float(fraction),
        interleaved=alike,
    )


def _scaling(
    found: ConfigReading, kind: str, original: int | None, longest: int
) -> RopeScaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=float(found.needed("factor")))
    if kind == "dynamic":
        factor = float(found.needed("factor"))
        return RopeScaling(kind="dynamic", factor=factor, original_max_seq_len=longest)
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=float(found.needed("factor")),
            original_max_seq_len=int(found.needed("original_max_position_embeddings")),
            low_freq_factor=float(found.needed("low_freq_factor")),
            high_freq_factor=float(found.needed("high_freq_factor")),
        )
    if kind in ("yarn", "longrope"):
        before = int(original or longest)
        factor = found.get("factor")
        factor = longest / before if factor is None else float(factor)
        return (_yarn if kind == "yarn" else _longrope)(found, factor, before)
    raise UnsupportedError(
        f"{found.where}: rotary positions of type {kind!r} are not built; "
        f"{', '.join(_KINDS[:-1])} and {_KINDS[-1]} are"
    )


def _yarn(found: ConfigReading, factor: float, before: int) -> RopeScaling:
    magnitude = found.get("attention_factor")
    plain = RopeScaling(kind="yarn", factor=factor, original_max_seq_len=before)
    one, all_dims = found.get("mscale"), found.get("mscale_all_dim")
    if magnitude is None and one and all_dims and factor > 1:
        grown = plain.magnitude - 1.0  # 0.1 ln(factor)
        magnitude = (one * grown + 1.0) / (all_dims * grown + 1.0)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_seq_len=before,
        beta_fast=float(found.get("beta_fast") or 32.0),
        beta_slow=float(found.get("beta_slow") or 1.0),
        truncate=bool(found.get("truncate", True)),
        attention_factor=None if magnitude is None else float(magnitude),
    )


def _longrope(found: ConfigReading, factor: float, before: int) -> RopeScaling:
    magnitude = found.get("attention_factor")
    for key in ("short_mscale", "long_mscale"):  # of Phi-3-MoE alone
        found.require("cosine and sine have one factor here", **{key: (None,)})
    return RopeScaling(
        kind="longrope",
        factor=max(1.0, factor),
        original_max_seq_len=before,
        attention_factor=None if magnitude is None else float(magnitude),
        short_factor=tuple(map(float, found.needed("short_factor"))),
        long_factor=tuple(map(float, found.needed("long_factor"))),
    )


def write_scaling(rope: Rope) -> dict[str, Any] | None:
    """`rope_scaling` without the base, as all versions read it; None where there is none."""
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
    """The keys of a model whose layers all turn alike, in those that transformers 4 and 5 read.

    Args:
      longest: tokens that the model takes; theirs takes the original length of "dynamic" from
        max_position_embeddings.
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
    """`rope_parameters` where types of layers turn differently, as transformers 5 has it."""
    return {
        kind: {"rope_type": "default", "rope_theta": rope.theta, **(write_scaling(rope) or {})}
        for kind, rope in ropes.items()
    }
