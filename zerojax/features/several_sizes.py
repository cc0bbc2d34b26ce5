"""Checks runs whose steps have several compiled sizes, of rows or of batches."""

from __future__ import annotations

from zerojax.config import ConfigError
from zerojax.features.seam import Combination
from zerojax.optim import one_bit_of


def check_sizes(run: Combination, what: str, key: tuple[str, ...]) -> None:
    """Raises for settings with which steps of several compiled sizes have not been shown to be
    exact.

    Args:
      run: settings of the run.
      what: name of the feature that changes the size, for messages.
      key: its setting.

    Raises:
      ConfigError: the message states the setting and the remedy.
    """
    on = [x for x in run.features.given if x.changes_work and not x.is_off]
    both = [f"{x.keyword} ({x.summary()[0][1]})" for x in on]
    if len(both) > 1:
        raise ConfigError(
            f"{' together with '.join(sorted(both))} is not supported, since each pair of sizes "
            "would be a compiled step; leave one of them out",
            key,
        )
    offload = run.settings.offload
    if one_bit_of(run.tx) is not None:
        raise ConfigError(
            f"{what} together with a 1-bit optimizer, which has two programs per size, is "
            "not supported; use adamw, or leave one of them out",
            key,
        )
    if not offload.is_off or offload.tile_bytes is not None:
        other = "offload" if not offload.is_off else f"offload.tile_bytes={offload.tile_bytes}"
        raise ConfigError(
            f"{what} together with {other} is not supported; leave one of them out", key
        )
