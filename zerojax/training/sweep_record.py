"""File of a sweep's results: the losses of its trials, their ranking, and who goes on.

The file is replaced as a whole after every result, so a killed sweep goes on from it. This module
knows numbers of trials and losses only.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zerojax.config.late_dataclasses import dataclass
from zerojax.runtime import bounded_json
from zerojax.runtime.user_files import replace_text
from zerojax.training.sweep_trials import SweepRung

FILE_NAME = "trials.json"


@dataclass(frozen=True, kw_only=True)
class RungResult:
    """Result of a trial at the end of a rung.

    Attributes:
      loss: loss that ranks the trial; None if it was not finite.
      reason: reason why it is None; "" otherwise.
    """

    loss: float | None
    reason: str = ""


class SweepRecord:
    """Results of a sweep so far, in its file.

    Args:
      folder: existing folder of the sweep.
      settings: settings that decide the ranking, as JSON values; a file with others is refused.

    Attributes:
      results: {number of a trial: {steps at the end of a rung: its result}}.

    Raises:
      ValueError: the file belongs to a sweep with other settings, or cannot be read.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.path, self._settings = folder / FILE_NAME, settings
        self.results: dict[int, dict[int, RungResult]] = {}
        if not self.path.exists():
            return
        try:
            saved = bounded_json.load(self.path)
            before = saved["settings"]
            for number, rungs in saved["results"].items():
                found = {int(steps): RungResult(**result) for steps, result in rungs.items()}
                self.results[int(number)] = found
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"'{self.path}' is not the file of a sweep ({error}); name another folder with "
                "--out, or delete this one"
            ) from None
        if before != settings:
            changed = _first_difference(before, settings)
            raise ValueError(
                f"'{folder}' holds a sweep with other settings ({changed}); name another folder "
                "with --out, or delete this one"
            )

    def result(self, trial: int, steps: int) -> RungResult | None:
        """Returns the result of a trial at the end of a rung; None if there is none yet."""
        return self.results.get(trial, {}).get(steps)

    def add(self, trial: int, steps: int, result: RungResult) -> None:
        """Records a result and writes the file."""
        self.results.setdefault(trial, {})[steps] = result
        self.write()

    def write(self) -> None:
        """Writes the file."""
        results = {
            str(number): {str(steps): dataclasses.asdict(one) for steps, one in rungs.items()}
            for number, rungs in sorted(self.results.items())
        }
        saved = {"settings": self._settings, "results": results}
        replace_text(self.path, json.dumps(saved, indent=1) + "\n")

    def survivors(self, rungs: Sequence[SweepRung], rung: int) -> list[int] | None:
        """Returns the trials that train in a rung, best first; None if a result before is missing.

        A trial without a finite loss never goes on, so there may be fewer than the rung has room
        for.

        Args:
          rungs: all rungs.
          rung: number of the rung, from 0.
        """
        if rung == 0:
            return list(range(rungs[0].trials))
        before = self.survivors(rungs, rung - 1)
        if before is None:
            return None
        steps, losses = rungs[rung - 1].steps, {}
        for trial in before:
            result = self.result(trial, steps)
            if result is None:
                return None
            losses[trial] = result.loss
        finite = [trial for trial in before if losses[trial] is not None]
        return sorted(finite, key=lambda trial: (losses[trial], trial))[: rungs[rung].trials]

    def ranking(self) -> list[int]:
        """Returns the numbers of all trials that have a result, best first.

        A trial with more steps is before one with fewer, and a lower loss before a higher one. A
        trial whose last loss is not finite is after all others.
        """

        def place(trial: int) -> tuple[bool, int, float, int]:
            steps, result = max(self.results[trial].items())
            return result.loss is None, -steps, result.loss or 0.0, trial

        return sorted(self.results, key=place)


def as_result(loss: float) -> RungResult:
    """Returns the result for a loss, which may be infinite or NaN."""
    if math.isfinite(loss):
        return RungResult(loss=float(loss))
    return RungResult(loss=None, reason=f"the loss is {loss}")


def _first_difference(before: object, now: object, at: str = "") -> str:
    """Returns the first setting in which two trees of JSON values differ, with both values."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in {**before, **now}:
            if before.get(key) != now.get(key):
                return _first_difference(before.get(key), now.get(key), f"{at}.{key}".strip("."))
    return f"{at} was {json.dumps(before)}, and is {json.dumps(now)} now"
