"""When numbers are read back from the devices, and when they say that a run has gone wrong.

Knows metrics and the log; never the batches, the loop or the checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerojax import compiler, trees
from zerojax.metrics import RunLog
from zerojax.plan import Plan

Metrics = dict[str, float]


class Reports:
    """Metrics of a step are held until a later step is under way, so that reading them waits less.

    Args:
      max_skipped: reports in a row with a step that was not finite, after which the run ends.
      skipped: steps skipped before, when the run resumes.
    """

    def __init__(self, max_skipped: int, *, skipped: int = 0) -> None:
        self._max_skipped = max_skipped
        self._skipped = skipped
        self._in_a_row = 0
        self._held: tuple[int, Mapping[str, Any]] | None = None

    def hold(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Keeps the metrics of a step, still on the devices."""
        self._held = step, metrics

    def read(self, plan: Plan, log: RunLog | None) -> Metrics | None:
        """The held metrics on the host, written to the log; None when none are held.

        Raises:
          FloatingPointError: too many reports in a row were not finite.
        """
        if self._held is None:
            return None
        (step, metrics), self._held = self._held, None
        values: Metrics = {"step": step} | {name: float(x) for name, x in metrics.items()}
        before, self._skipped = self._skipped, int(values["num_skipped"])
        if plan.learning_rate is not None:
            updates = step - 1 - (self._skipped - int(values["skipped"]))
            values["learning_rate"] = float(plan.learning_rate(updates))
        if log is not None:
            shown = ("loss", "grad_norm", "learning_rate")
            numbers = {name: values[name] for name in shown if name in values}
            log.write(step, {**numbers, "skipped": self._skipped})
        self._check_finite(values, self._skipped - before, log)
        return values

    def _check_finite(self, values: Metrics, newly: int, log: RunLog | None) -> None:
        step = int(values["step"])
        if not values["skipped"]:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        found = f"loss {values['loss']:g}, gradient norm {values['grad_norm']:g}"
        if log is not None:
            log.message(
                f"step {step}: {found}: not finite, the update was skipped "
                f"({newly} skipped since the last report, {self._skipped} in all)"
            )
        if self._in_a_row >= self._max_skipped:
            raise FloatingPointError(
                f"{found} at step {step}: not finite at {self._in_a_row} reports in a row, "
                f"{self._skipped} updates skipped. The parameters are those before the first of "
                "them. Lower the learning rate, use precision='fp32', or look at the data"
            )


def compare_peak(step: Any, plan: Plan, memory: Mapping[str, Any]) -> str | None:
    """One line: the device's measured peak beside what the compiled step was predicted to need.

    The prediction is the compiler's account of this very step (no second compilation: JAX keeps
    it), the same that `Plan.compile` gives for GPUs that are not here. The measured peak is that of
    the whole process: batches read ahead and the evaluation belong to it.

    Args:
      step: from `build_step(plan)`, and called before.
      memory: from `profile.device_memory`.

    Returns:
      None where devices do not count their memory (virtual CPU devices).
    """
    if memory["source"] != "device":
        return None
    compiled = step.lower(plan.abstract_state, plan.abstract_batch).compile()
    predicted, measured = compiler.memory_of(compiled).peak, memory["peak"]
    return (
        f"peak memory of a device: {trees.format_bytes(measured)} measured, "
        f"{trees.format_bytes(predicted)} predicted ({measured / predicted - 1:+.1%})"
    )
