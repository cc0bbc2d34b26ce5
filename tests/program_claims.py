"""Promises about compiled programs: registered one by one, checked together for each program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Claims:
    """Promises, each with the cases that it holds for."""

    def __init__(self) -> None:
        self._claims: list[tuple[Callable[[Any], bool], Callable[[Any], None]]] = []

    def __call__(self, holds_for: Callable[[Any], bool] = lambda case: True) -> Any:
        """A promise about the program of every case that `holds_for` picks, as a decorator."""

        def register(check: Callable[[Any], None]) -> Callable[[Any], None]:
            self._claims.append((holds_for, check))
            return check

        return register

    def check(self, case: Any, built: Any) -> None:
        """Raises an ExceptionGroup of every promise that a program breaks."""
        broken = []
        for holds_for, check in self._claims:
            if holds_for(case):
                try:
                    check(built)
                except AssertionError as error:
                    broken.append(AssertionError(f"{check.__name__}: {error}"))
        if broken:
            raise ExceptionGroup(f"{case.name} breaks {len(broken)} promises", broken)
