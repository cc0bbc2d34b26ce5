"""Result of an equality check: its runs and reasons, formatted as a table and a dict.

This module does not import JAX.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping
from typing import Any

from zerojax.config.late_dataclasses import dataclass

BY_DESIGN = frozenset(["dropout", "batch_statistics", "passes"])
"""Kinds of differences that data-parallel training has by design: each device draws its own dropout
mask and normalises by its own rows, and each microbatch runs a separate forward pass."""


@dataclass(frozen=True)
class Reason:
    """One cause of a difference between runs.

    Attributes:
      kind: "refused", "failed", "not_finite", "sum", "uneven_mean", "coupled_rows",
        "auxiliary_loss", "weight_gradient", "nonlinear_backward", "integers", "counter",
        "optimizer", "batch_statistics", "dropout", "passes" or "unknown".
      sentence: description of the cause, with its numbers.
      remedy: advice on what to change.
      where: "file:line: source" of the user's code, if known.
    """

    kind: str
    sentence: str
    remedy: str
    where: str | None = None

    @property
    def by_design(self) -> bool:
        """Returns whether data-parallel training is expected to have this difference."""
        return self.kind in BY_DESIGN


@dataclass(frozen=True)
class ComparedRun:
    """One training run, compared with a reference run.

    Attributes:
      name: name of the run, such as "4 devices, zero=3, 2 microbatches".
      against: name of the reference run.
      agrees: whether `loss`, `norm` and `params` are within their tolerances; `state` does not
        count.
      loss: largest difference of the loss over the steps, divided by the loss (by 1 if it is
        below 1).
      norm: largest relative difference of the gradient norm over the steps.
      params: difference of the change of parameter `worst`, divided by that change (L2 norms).
      worst: name of the parameter whose difference is largest relative to its tolerance.
      state: names of other arrays of the model that differ.
      refusal: error message if the run was refused or failed; all numbers are then None.
      mode: "training", or "evaluation" for a control run without dropout and batch statistics.
      noise: {"loss", "norm", "params": the model's own rounding noise, which was added to the
        tolerance of this number; of "params" that of `worst`}.
    """

    name: str
    against: str
    agrees: bool
    loss: float | None = None
    norm: float | None = None
    params: float | None = None
    worst: str | None = None
    state: tuple[str, ...] = ()
    refusal: str | None = None
    mode: str = "training"
    noise: Mapping[str, float] = dataclasses.field(default_factory=dict)


class DisagreementError(RuntimeError):
    """Raised by `CheckResult.require` if the runs of a check do not agree."""


@dataclass(frozen=True, repr=False)
class CheckResult:
    """Result of `zerojax.check`.

    Attributes:
      agrees: whether all runs agree. Differences that data-parallel training has by design
        (`BY_DESIGN`) do not count, unless `strict` is set; each is listed as a reason.
      reasons: causes of all differences.
      runs: all compared runs.
      notes: remarks about what the check left out or changed.
      tolerances: {"loss", "norm", "params": maximum of this number in `ComparedRun`}; rounding
        noise is added to each.
      seconds: duration of the check.
    """

    agrees: bool
    reasons: tuple[Reason, ...]
    runs: tuple[ComparedRun, ...]
    notes: tuple[str, ...]
    tolerances: Mapping[str, float]
    seconds: float

    def __repr__(self) -> str:
        word = "agrees" if self.agrees else "differs"
        kinds = ", ".join(dict.fromkeys(reason.kind for reason in self.reasons))
        return f"<check: {word}, {len(self.runs)} runs{': ' + kinds if kinds else ''}>"

    def require(self) -> None:
        """Raises `DisagreementError` if the runs of the check do not agree.

        Raises:
          DisagreementError: the runs do not agree; contains the table and the reasons.
        """
        if not self.agrees:
            raise DisagreementError(self.table())

    def table(self) -> str:
        """Formats the result as text: a table of runs, and the reasons."""
        rows = [("run", "loss", "gradient norm", "parameters", "")]
        for run in self.runs:
            name = run.name if run.mode == "training" else f"{run.name}, in evaluation mode"
            if run.refusal is not None:
                rows.append((name, "-", "-", "-", "refused"))
                continue
            verdict = "agrees" if run.agrees else "differs"
            numbers = (_number(run.loss), _number(run.norm), _number(run.params))
            rows.append((name, *numbers, verdict))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            "  ".join(
                [row[0].ljust(widths[0])]
                + [row[column].rjust(widths[column]) for column in (1, 2, 3)]
                + [row[4]]
            ).rstrip()
            for row in rows
        ]
        lines += ["", self._verdict()]
        for reason in self.reasons:
            label = f"{reason.kind} (by design)" if reason.by_design else reason.kind
            lines += ["", *_wrapped(f"{label}: {reason.sentence}")]
            if reason.where:
                lines += [f"  at {reason.where}"]
            lines += _wrapped(f"remedy: {reason.remedy}", indent="  ")
        if self.notes:
            lines += ["", *(line for note in self.notes for line in _wrapped(f"note: {note}"))]
        return "\n".join(lines)

    def _verdict(self) -> str:
        limits = ", ".join(self._limit(name) for name in self.tolerances)
        if not self.agrees:
            refused = sum(run.refusal is not None for run in self.runs)
            differing = sum(not run.agrees for run in self.runs) - refused
            numbers = [(differing, "differ"), (refused, "are refused")]
            found = [f"{count} of {len(self.runs)} runs {what}" for count, what in numbers if count]
            word = "REFUSED" if refused and not differing else "DIFFERS"
            what = ", ".join(found) or "not proven"
            return f"{word}: {what} (tolerances: {limits}; {self.seconds:.0f} s)"
        but = ", except by design" if any(r.by_design for r in self.reasons) else ""
        return f"AGREES: all runs{but} (tolerances: {limits}; {self.seconds:.0f} s)"

    def _limit(self, name: str) -> str:
        """Returns the name and tolerance of a number, with the most noise that was added to it."""
        text = f"{name} {self.tolerances[name]:.0e}"
        noise = max((run.noise.get(name, 0.0) for run in self.runs), default=0.0)
        return f"{text} + noise {noise:.0e}" if noise > self.tolerances[name] / 10 else text

    def as_dict(self) -> dict[str, Any]:
        """Returns the result as a JSON-serialisable dict."""
        return {
            "agrees": self.agrees,
            "reasons": [
                {**dataclasses.asdict(reason), "by_design": reason.by_design}
                for reason in self.reasons
            ],
            "runs": [dataclasses.asdict(run) for run in self.runs],
            "notes": list(self.notes),
            "tolerances": dict(self.tolerances),
            "seconds": round(self.seconds, 2),
        }


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        width=98,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
