"""Profiler traces of some steps of a run, for Perfetto and XProf."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

FOLDER = "trace"


class Trace:
    """Starts behind the step before the first one, and stops when the last one is over."""

    def __init__(self) -> None:
        self._is_on = False

    def follow(self, step: int, result: Any, wanted: Sequence[int], folder: Path) -> Path | None:
        """To be told of every step when it is under way.

        Args:
          result: of the step, on the devices.
          wanted: (first, last) steps; empty: none.
          folder: of the run.

        Returns:
          Where the trace is, when it has just been written.
        """
        if wanted and not self._is_on and step == wanted[0] - 1:
            result.block_until_ready()
            jax.profiler.start_trace(str(folder / FOLDER))
            self._is_on = True
        elif self._is_on and step >= wanted[1]:
            return self.stop(result, folder)
        return None

    def stop(self, result: Any, folder: Path) -> Path | None:
        """Ends a trace that is under way, after its last step."""
        if not self._is_on:
            return None
        if result is not None:
            result.block_until_ready()
        self._is_on = False
        jax.profiler.stop_trace()
        return folder / FOLDER
