"""Retention: the saved steps that are kept, as a function of step numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retention:
    """A saved step is kept when any of the two rules wants it.

    >>> Retention(last=2, every=100).expired([90, 100, 110, 120])
    (90,)
    """

    last: int | None = 3
    """The newest `last` steps are kept; None keeps all. At least 1: the newest is never deleted."""

    every: int | None = None
    """Steps divisible by `every` are kept for ever; None: no such steps."""

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
        """The steps that neither rule keeps, oldest first."""
        ordered = sorted(steps)
        if self.last is None:
            return ()
        return tuple(s for s in ordered[: -self.last] if not self.every or s % self.every)


def as_retention(keep: int | Retention) -> Retention:
    """`3` stands for `Retention(last=3)`."""
    return keep if isinstance(keep, Retention) else Retention(last=keep)
