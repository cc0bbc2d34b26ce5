"""Decides which saved steps are not deleted: by their number, or by a name such as "best".

One small file in the folder of checkpoints stores the names. Every save, by this or a later
process, and every deletion by a user, reads that file and leaves the named steps alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zerojax.checkpoint.errors import CheckpointError, MachineError, reason
from zerojax.config.display import quoted
from zerojax.config.late_dataclasses import dataclass
from zerojax.runtime import bounded_json
from zerojax.runtime.user_files import replace_text

FILE_NAME = "kept.json"
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Rules that protect saved steps from deletion: a step is kept if either rule applies.

    >>> Retention(last=2, every=100).expired([90, 100, 110, 120])
    (90,)
    """

    last: int | None = 3
    """Number of newest steps that are kept, at least 1; None keeps all steps."""

    every: int | None = None
    """Steps divisible by this number are kept permanently; None: the rule keeps no step."""

    def __post_init__(self) -> None:
        for name in ("last", "every"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"keep: {name}={value!r} is not an integer; use 1, 2, ... or None")
            if value < 1:
                raise ValueError(f"keep: {name}={value} is below 1; use 1 or more, or None")

    def expired(self, steps: Iterable[int]) -> tuple[int, ...]:
        """Returns the steps that neither rule keeps, oldest first."""
        ordered = sorted(steps)
        if self.last is None:
            return ()
        return tuple(s for s in ordered[: -self.last] if not self.every or s % self.every)


def as_retention(keep: int | Retention) -> Retention:
    """Converts a number to a `Retention`: `3` means `Retention(last=3)`."""
    return keep if isinstance(keep, Retention) else Retention(last=keep)


def kept_steps(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the steps of a folder of checkpoints that are protected under a name: {name:
    {"step": number, ...}}.

    Raises:
      MachineError: the file exists but cannot be read, so the steps to keep are unknown.
    """
    try:
        found = bounded_json.load(path / FILE_NAME, max_bytes=_MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise MachineError(
            f"{path / FILE_NAME} cannot be read ({reason(error)}); it lists the steps to keep: fix "
            "it, or remove it and keep none"
        ) from None
    if not isinstance(found, dict) or not all(
        isinstance(about, dict) and type(about.get("step")) is int for about in found.values()
    ):
        raise MachineError(
            f"{path / FILE_NAME} lists no valid steps; remove the file (then no step is kept by "
            "name)"
        )
    return found


def named_step(kept: Mapping[str, Mapping[str, Any]], name: str) -> int:
    """Returns the number of the step that is protected under a name.

    Raises:
      CheckpointError: no step has the name.
    """
    if name not in kept:
        names = ", ".join(map(repr, sorted(kept))) or "none"
        raise CheckpointError(
            f"no step is kept as {quoted(name)} (kept by name: {names}); give a step number, or "
            "train with callbacks=[zerojax.KeepBest()] to keep the best"
        )
    return kept[name]["step"]


def keep_step(path: Path, name: str, step: int, about: Mapping[str, Any]) -> None:
    """Protects a saved step from deletion under a name, and releases the previous step of that
    name. Called by one process only.

    Raises:
      MachineError: the file cannot be written.
    """
    steps = {**kept_steps(path), name: {"step": step, **about}}
    try:
        # Durable, because the next save deletes every expired step that this file does not name.
        replace_text(path / FILE_NAME, json.dumps(steps, indent=1) + "\n", durable=True)
    except OSError as error:
        raise MachineError(
            f"step {step} is saved, but not protected from deletion as {name!r}: "
            f"{path / FILE_NAME} cannot be written: {reason(error)}; fix that before later saves "
            "delete the step"
        ) from None
