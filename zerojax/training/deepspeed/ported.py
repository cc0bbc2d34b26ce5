"""A ds_config with the arguments of the call beside it, read again once batches are known."""

from __future__ import annotations

import dataclasses
import warnings

from zerojax.training.deepspeed.result import Given, Translation
from zerojax.training.deepspeed.translating import Source, translate


@dataclasses.dataclass(frozen=True)
class Ported:
    """What `zerojax.train` and `zerojax.initialize` are given, and take in the same way.

    Attributes:
      source: the file, its text, or its content.
      num_devices: of the run.
      given: what the call says beside it.
    """

    source: Source
    num_devices: int
    given: Given

    def translate(self) -> Translation:
        """What the file says before anything is known of the batches.

        Raises:
          ConfigError: see `translate`.
        """
        return translate(self.source, num_devices=self.num_devices, given=self.given)

    def with_rows(self, rows: int | None) -> Translation:
        """What it says of batches with so many rows, over all devices.

        Args:
          rows: None: the batches have none.

        Raises:
          ConfigError: these are not train_batch_size.
        """
        given = dataclasses.replace(self.given, global_batch_size=rows)
        return dataclasses.replace(self, given=given).translate()


def warn_of(translation: Translation, *, stacklevel: int) -> None:
    """Gives the warnings of a configuration, in the one form that a user meets.

    Args:
      stacklevel: frames from the caller of this to the user's line; 1 is the caller itself. A
        decorator of a function in between is one frame.
    """
    for text in translation.warnings:
        warnings.warn(f"{translation.source}: {text}", UserWarning, stacklevel=stacklevel + 1)
