"""Lists the settings of a run that change how a step computes, and refuses those with which a
feature was not shown to equal the plain way.

A feature names the settings with which it was shown to be right (`Feature.works_with`). It is
refused with every other one, so that a new setting is refused with each feature until a test of
both is there: `tests/equality/fuzz.py` trains the pairs that are not refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from zerojax.config import ConfigError
from zerojax.config.feature_settings import FeatureSettings
from zerojax.config.features import FEATURES
from zerojax.config.late_dataclasses import dataclass
from zerojax.features.seam import Combination
from zerojax.optim import one_bit_of
from zerojax.placement.device_mesh import AXES, DATA

_LEAVE_OUT = "leave one of them out"


@dataclass(frozen=True)
class OtherSetting:
    """A setting that changes how a step computes.

    Attributes:
      name: its name in `Feature.works_with`.
      written: function of a run: the setting as the user wrote it; a false value if it is off.
      remedy: what to use instead.
    """

    name: str
    written: Callable[[Combination], object]
    remedy: str = _LEAVE_OUT


def _axis(name: str) -> OtherSetting:
    def written(c: Combination) -> str | None:
        size = c.mesh.shape[name]
        return f"{name}={size}" if size > 1 else None

    return OtherSetting(name, written, f"use {name}=1")


def _feature(kind: type[FeatureSettings]) -> OtherSetting:
    def written(c: Combination) -> str | None:
        settings = c.features.get(kind)
        return None if settings.is_off else f"{kind.keyword} ({settings.summary()[0][1]})"

    return OtherSetting(kind.keyword, written)


def _mesh(name: str, remedy: str = _LEAVE_OUT) -> OtherSetting:
    def written(c: Combination) -> str | None:
        value = getattr(c.settings, name)
        return f"{name}={value}" if value else None

    return OtherSetting(name, written, remedy)


def _weights(*kinds: str) -> OtherSetting:
    def written(c: Combination) -> str | None:
        kind = c.settings.wire.weights
        return f"wire.weights={kind}" if kind in kinds else None

    return OtherSetting(f"wire.weights={kinds[0]}", written, "use wire.weights=compute")


OTHERS: tuple[OtherSetting, ...] = (
    OtherSetting("offload", lambda c: None if c.settings.offload.is_off else "offload"),
    OtherSetting(
        "offload.tile_bytes",
        lambda c: (tile := c.settings.offload.tile_bytes) and f"offload.tile_bytes={tile}",
    ),
    _mesh("deterministic"),
    _mesh("unroll", "use unroll=False"),
    _weights("fp8"),
    _weights("int8"),
    _weights("delta_int8", "delta_int4"),
    OtherSetting(
        "wire.gradients",
        lambda c: (sent := c.settings.wire.gradients) != "reduce" and f"wire.gradients={sent}",
        "use wire.gradients=reduce",
    ),
    OtherSetting("wire.secondary", lambda c: c.settings.wire.secondary and "wire.secondary=true"),
    OtherSetting("lookup", lambda c: c.settings.lookup == "owners" and "lookup=owners"),
    _mesh("sequence_sharding", "use sequence_sharding=False"),
    *(_axis(name) for name in AXES if name != DATA),
    OtherSetting("one_bit", lambda c: one_bit_of(c.tx) and "a 1-bit optimizer", "use adamw"),
    OtherSetting("ema", lambda c: getattr(c.tx, "ema", None) and "with_ema"),
    *map(_feature, FEATURES),
)


def check_others(run: Combination, kind: type[FeatureSettings], works: Collection[str]) -> None:
    """Raises if a run has a setting with which a feature was not shown to be right.

    Args:
      run: settings of the run.
      kind: settings of the feature, which is on.
      works: names of the settings with which it was shown to be right.

    Raises:
      ConfigError: the message states the other setting and the remedy.
    """
    for other in OTHERS:
        if other.name in works or other.name == kind.keyword:
            continue
        if written := other.written(run):
            raise ConfigError(
                f"{kind.keyword} cannot be combined with {written}; {other.remedy}",
                (kind.keyword, kind.switch),
            )
