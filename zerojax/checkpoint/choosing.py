"""Choice of the next step to restore when the newest one is damaged."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from zerojax.checkpoint import agreement, folders
from zerojax.checkpoint.errors import CheckpointError, DamagedError
from zerojax.checkpoint.restoring import check_quickly
from zerojax.checkpoint.saving import is_first_process


class Candidates:
    """The saved steps that a run may go on from.

    Process 0 looks and all others follow; every method is called by all of them.

    Attributes:
      notes: what was found wrong, a sentence each; process 0 has them.
    """

    def __init__(self, path: Path, steps: Callable[[], tuple[int, ...]]) -> None:
        """Takes the folder of the checkpoints, and what lists the steps there."""
        self.notes: list[str] = []
        self._path, self._steps = path, steps
        self._damaged: set[int] = set()

    def existing(self, step: int | None) -> int:
        """A saved step, None being the newest. Not collective.

        Raises:
          CheckpointError: there is none.
        """
        steps = self._steps()
        if step is None and not steps:
            raise CheckpointError(
                f"{self._path} has no checkpoints; check the path, or train first"
            )
        if step is not None and step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(f"{self._path} has no step {step}; the saved steps are: {there}")
        return steps[-1] if step is None else step

    def first(self, step: int | None) -> int:
        """The step to begin with.

        Raises:
          CheckpointError: there is none.
        """
        error, chosen = None, -1
        if is_first_process():
            try:
                chosen = self.existing(step)
                if step is None:
                    chosen = max(self._not_passed_over(), default=chosen)
            except CheckpointError as failure:
                error = failure
        agreement.raise_together(error)
        return agreement.from_process_0(chosen)

    def below(self, lost: Mapping[int, str]) -> int:
        """The step before damaged ones.

        Args:
          lost: step -> what is wrong with it.

        Raises:
          DamagedError: there is none.
        """
        earlier = [step for step in self._steps() if step < min(lost)]
        chosen = agreement.from_process_0(max(earlier, default=-1))
        if chosen < 0:
            raise _none_left(lost)
        return chosen

    def usable(self) -> int | None:
        """The newest step that looks whole; passes over those above it. None: nothing is saved.

        Raises:
          CheckpointError: all are damaged, or the newest is of a newer format.
        """
        error, found, lost = None, -1, {}
        if is_first_process():
            try:
                for found in reversed(self._not_passed_over()):
                    try:
                        check_quickly(folders.step_folder(self._path, found))
                        break
                    except DamagedError as damage:
                        lost[found] = str(damage)
                if found in lost:
                    raise _none_left(lost)
            except CheckpointError as failure:
                error = failure
        agreement.raise_together(error)
        self.pass_over(lost, f"step {found} is used in its place")
        found = agreement.from_process_0(found)
        return None if found < 0 else found

    def check(self, step: int | None) -> None:
        """Refuses a step that is not there or looks damaged; None: when no step will do.

        Raises:
          CheckpointError: what is wrong.
        """
        if step is None and self.usable() is not None:
            return
        error = None
        if is_first_process():
            try:
                check_quickly(folders.step_folder(self._path, self.existing(step)))
            except DamagedError as failure:
                error = DamagedError(f"{failure}; {self.remedy(self.existing(step))}")
            except CheckpointError as failure:
                error = failure
        agreement.raise_together(error)

    def pass_over(self, lost: Mapping[int, str], instead: str) -> None:
        """Warns of damaged steps, and remembers them."""
        for step, text in sorted(lost.items(), reverse=True):
            self.note(f"{text}; {instead}; the next save renames its folder {step}.damaged")
        self._damaged.update(lost)

    def note(self, text: str) -> None:
        """Warns, once for all processes."""
        if is_first_process():
            self.notes.append(text)
            warnings.warn(text, RuntimeWarning, stacklevel=4)

    def set_aside(self) -> None:
        """Renames the steps that were passed over. Only in process 0.

        Raises:
          OSError: what the system says.
        """
        for step in sorted(self._damaged.intersection(self._steps())):
            folders.set_aside(self._path, step)
        self._damaged.clear()

    def remedy(self, damaged: int) -> str:
        """Names a step that would do: the newest earlier one that looks whole, or a later one."""
        others = [step for step in self._steps() if step != damaged]
        for step in sorted(others, key=lambda step: (step > damaged, -step)):
            with contextlib.suppress(CheckpointError):
                check_quickly(folders.step_folder(self._path, step))
                return f"restore step {step}"
        return "no other step is whole" if others else "no other step is saved"

    def _not_passed_over(self) -> list[int]:
        return [step for step in self._steps() if step not in self._damaged]


def _none_left(lost: Mapping[int, str]) -> DamagedError:
    others = ", ".join(str(step) for step in sorted(lost)[:-1])
    also = f"so are the earlier steps ({others})" if others else "no earlier step is saved"
    return DamagedError(
        f"{lost[max(lost)]}; {also}; nothing was changed; restore a step from a"
        " copy, or start again in another, empty folder"
    )
