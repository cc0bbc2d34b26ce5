"""Defines the base of the settings of an optional feature of a run.

Imports no JAX. `zerojax.config.features` lists the features.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from zerojax.config.loader import to_dict


class FeatureSettings:
    """Base of the settings of an optional feature: a frozen dataclass whose default is off.

    Attributes:
      keyword: name of the feature in a run: the keyword of `train`, the section of a run file, and
        the key in the run folder and in checkpoints.
      switch: name of the setting that turns the feature on.
      ds_section: section of a ds_config that sets the feature; None: no section does.
      part: name of the feature's part of a training state, and the first part of its names in a
        checkpoint; None: it has none.
      changes_work: whether the feature changes the rows or tokens of a step.
      regroups: whether steps take other numbers of rows than the batches of the data have.
    """

    keyword: ClassVar[str]
    switch: ClassVar[str]
    ds_section: ClassVar[str | None] = None
    part: ClassVar[str | None] = None
    changes_work: ClassVar[bool] = False
    regroups: ClassVar[bool] = False

    @property
    def is_off(self) -> bool:
        """Whether the settings change nothing."""
        return self == type(self)()

    def check_steps(self, steps: int | None) -> None:
        """Raises if the feature is on and needs the number of steps, but the user has set none.

        Raises:
          ConfigError: `steps` is None.
        """

    def check_batch(self, rows: int, *, elastic: bool) -> None:
        """Raises if the feature is on and does not fit the batch of a run file.

        Args:
          rows: rows of the global batch.
          elastic: whether elasticity chooses the batch.

        Raises:
          ConfigError: the message states the setting and the remedy.
        """

    def summary(self) -> list[tuple[str, str]]:
        """Returns lines about settings that are on: (title of at most 10 letters, text)."""
        raise NotImplementedError

    @classmethod
    def saved_in(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings in the configuration of a saved run; {} if the feature was off.

        Args:
          config: configuration as a checkpoint stores it.
        """
        default = to_dict(cls())
        found = config.get(cls.keyword) or (config.get("model") or {}).get(cls.keyword) or {}
        found = {**default, **found}
        return {} if found == default else found

    @staticmethod
    def resume_note(old: Mapping[str, Any], new: Mapping[str, Any], step: int) -> str:
        """Returns the line of the log for a resumed run whose settings differ from the saved run's.

        Args:
          old: settings of the saved run; {} if the feature was off.
          new: settings of this call; {} if the feature is off.
          step: the first step of this call.
        """
        raise NotImplementedError
