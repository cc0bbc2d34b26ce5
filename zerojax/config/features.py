"""Lists the optional features of a run, and holds the settings of those that a run has.

What passes, records or compares the settings of a run reads these lists, so that a new feature
changes none of it. Imports no JAX.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from zerojax.config.batch_ramp import BatchRampConfig
from zerojax.config.checks import check_kind
from zerojax.config.compression import BitScheduleConfig, PruningConfig
from zerojax.config.curriculum import CurriculumConfig
from zerojax.config.feature_settings import FeatureSettings
from zerojax.config.layer_drop import LayerDropConfig
from zerojax.config.loader import to_dict

FEATURES: tuple[type[FeatureSettings], ...] = (
    CurriculumConfig,
    BatchRampConfig,
    LayerDropConfig,
    PruningConfig,
)
"""Features that a run has by keywords of `train` or sections of a run file."""
FEATURES_OF_MODELS: tuple[type[FeatureSettings], ...] = (BitScheduleConfig,)
"""Features that a reference model has by its own settings."""

T = TypeVar("T", bound=FeatureSettings)


@dataclass(frozen=True)
class Features:
    """Settings of the optional features of a run.

    Attributes:
      given: settings that the caller gave, at most one of each type, which may be off.
    """

    given: tuple[FeatureSettings, ...] = ()

    @classmethod
    def of(cls, **settings: Any) -> Self:
        """Returns the features from their settings by keyword; None: not given.

        Raises:
          TypeError: settings have the type of another feature, or there is no such feature.
        """
        kinds = {kind.keyword: kind for kind in FEATURES}
        for name, value in settings.items():
            if name not in kinds:
                raise TypeError(f"no feature {name!r}; the features are {', '.join(kinds)}")
            check_kind(name, value, kinds[name], f"a zerojax.{kinds[name].__name__}")
        return cls(tuple(value for value in settings.values() if value is not None))

    @classmethod
    def found_in(cls, source: object, kinds: tuple[type[FeatureSettings], ...] = FEATURES) -> Self:
        """Returns the features that an object has as attributes with the names of their keywords.

        Args:
          source: a `RunConfig`, the translation of a ds_config, or the settings of a model.
          kinds: features to look for.
        """
        found = (getattr(source, kind.keyword, None) for kind in kinds)
        return cls(tuple(settings for settings in found if settings is not None))

    def get(self, kind: type[T]) -> T:
        """Returns the settings of a feature; its default, which is off, if none were given."""
        return self.find(kind) or kind()

    def find(self, kind: type[T]) -> T | None:
        """Returns the settings of a feature; None if none were given."""
        return next((x for x in self.given if isinstance(x, kind)), None)

    @property
    def regroups(self) -> str | None:
        """Keyword of a feature that is on and regroups rows of the data; None without one."""
        return next((x.keyword for x in self.given if x.regroups and not x.is_off), None)

    def check_steps(self, steps: int | None) -> None:
        """Raises if a feature needs the number of steps, but the user has set none.

        Raises:
          ConfigError: `steps` is None.
        """
        for settings in self.given:
            settings.check_steps(steps)

    def check_batch(self, rows: int, *, elastic: bool) -> None:
        """Raises if a feature does not fit the batch of a run file.

        Args:
          rows: rows of the global batch.
          elastic: whether elasticity chooses the batch.

        Raises:
          ConfigError: the message states the setting and the remedy.
        """
        for settings in self.given:
            settings.check_batch(rows, elastic=elastic)

    def replaced(self, *settings: FeatureSettings) -> "Features":
        """Returns the features with other settings of some of them."""
        kept = (x for x in self.given if type(x) not in map(type, settings))
        return Features((*kept, *settings))

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Returns {keyword: settings as JSON values} of the features that are on."""
        return {x.keyword: to_dict(x) for x in self.given if not x.is_off}


def resume_notes(old: Mapping[str, Any], new: Mapping[str, Any], step: int) -> list[str]:
    """Returns a line for each feature whose settings differ between a saved run and this call.

    Args:
      old: configuration of the saved run; new: that of this call.
      step: the first step of this call.
    """
    kinds = (*FEATURES, *FEATURES_OF_MODELS)
    both = [(kind, kind.saved_in(old), kind.saved_in(new)) for kind in kinds]
    return [kind.resume_note(was, now, step) for kind, was, now in both if was != now]
