"""Computes the mean loss of an evaluation; defines the callbacks `EarlyStopping` and `KeepBest`.

A callback is a function `(trainer, metrics)` that is called at every report. If it returns True,
the run ends and `train` returns its trainer. A callback object may have these methods as well:

- `on_start(trainer)`: called before the first step;
- `on_evaluation(trainer, metrics)`: called after every evaluation on the run's validation data;
  the run ends if it returns True;
- `state()` and `load_state(state)`: return the callback's state as JSON for a checkpoint, and
  restore it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from zerojax.config.checks import names_keywords, warn_user
from zerojax.config.tree_types import Tree
from zerojax.data import local_rows, shard_batch
from zerojax.optim import EMA
from zerojax.placement.state import abstract_model, as_read, slice_batch
from zerojax.plan.make import Plan
from zerojax.runtime.memory import allocating_for
from zerojax.tracing.trace import has_random_numbers, is_random
from zerojax.training.train_arguments import LoopSettings
from zerojax.training.validation import Filler, LeftOutError, each_batch, in_batches

VALIDATION = "validation/"
"""Prefix of names of evaluation metrics; a name without it is a metric of training reports."""
_SWITCH = (
    "let the evaluation mode decide: an nnx module follows model.eval(); a linen module needs an "
    "argument train, training, deterministic or use_running_average, which the loss must not pass"
)


def check_evaluation_mode(plan: Plan) -> None:
    """Traces the loss in evaluation mode, and warns if it is still random.

    Skips models without random numbers and without state besides parameters.

    Raises:
      ValueError: the loss fails in evaluation mode.
    """
    if not (plan.abstract_portable["extras"] or has_random_numbers(plan.traced.forward)):
        return
    pieces = plan.division.unit
    microbatch = slice_batch(plan.abstract_batch, pieces, plan.precision, plan.traced.exact_leaves)
    params, extras = abstract_model(plan.users_model, plan.abstract_batch, plan.loss)
    read = as_read(params, plan.precision)
    try:
        random = is_random(plan.users_model, read, extras, microbatch, plan.loss, train=False)
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"the loss fails in evaluation mode, in which validation runs ({type(error).__name__}: "
            f"{first}); {_SWITCH}, or pass no validation"
        ) from error
    if random:
        warn_user(
            "the loss is random in evaluation mode, too, for example because dropout is always "
            "on: validation measures a single sample of the noise, which depends on the number of "
            f"devices; {_SWITCH}"
        )


class WatchedRun(Protocol):
    """What callbacks of this module read and call of a `Trainer`, whose module imports this one."""

    @property
    def plan(self) -> Plan: ...

    @property
    def num_steps(self) -> int: ...

    @property
    def loop_settings(self) -> LoopSettings: ...

    @property
    def evaluation_names(self) -> frozenset[str]: ...

    @property
    def has_validation(self) -> bool: ...

    @property
    def has_ema(self) -> bool: ...

    @property
    def has_checkpoints(self) -> bool: ...

    def say(self, text: str) -> None: ...

    def kept_steps(self) -> dict[str, dict[str, Any]]: ...

    def keep(self, name: str, about: Mapping[str, Any] | None = None) -> int: ...


class _Watching:
    """Base class of callbacks that track the best value of one metric."""

    def __init__(self, metric: str, mode: Literal["min", "max"], min_delta: float) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"mode={mode!r} is not valid; use 'min' or 'max'")
        if not (isinstance(min_delta, int | float) and 0 <= min_delta < math.inf):
            raise ValueError(f"min_delta={min_delta!r} is not valid; use a number of at least 0")
        self.metric, self.mode, self.min_delta = metric, mode, float(min_delta)
        self.best: float | None = None
        self.best_step: int | None = None

    def on_start(self, trainer: WatchedRun) -> None:
        """Raises if the run does not measure the watched metric.

        Raises:
          ValueError: the run has no validation data, no EMA or no metric of that name; the message
            says what to pass.
        """
        if self.metric.startswith(VALIDATION) and not trainer.has_validation:
            raise ValueError(
                f"{type(self).__name__} watches {self.metric!r}, but the run has no validation "
                "data; pass validation=BATCHES and eval_every=STEPS, or watch metric='loss'"
            )
        name = self.metric.removeprefix(VALIDATION)
        own = trainer.plan.traced.metric_names
        if name.startswith(f"{EMA}_") and not trainer.has_ema and name not in own:
            raise ValueError(
                f"{type(self).__name__} watches {self.metric!r}, but the run keeps no average of "
                "its weights; set optimizer.ema_decay, or pass optimizer=zerojax.with_ema(...)"
            )
        measured = trainer.evaluation_names
        if self.metric.startswith(VALIDATION) and measured and name not in measured:
            names = ", ".join(sorted(f"{VALIDATION}{one}" for one in measured))
            raise ValueError(
                f"{type(self).__name__} watches {self.metric!r}, but an evaluation has the metrics "
                f"{names}; name one of them"
            )

    def __call__(self, trainer: WatchedRun, metrics: Mapping[str, Any]) -> bool:
        """Handles a training report; returns True if the run should end."""
        return not self.metric.startswith(VALIDATION) and self._see(trainer, metrics)

    def on_evaluation(self, trainer: WatchedRun, metrics: Mapping[str, Any]) -> bool:
        """Handles an evaluation; returns True if the run should end."""
        return self.metric.startswith(VALIDATION) and self._see(trainer, metrics)

    def _see(self, trainer: WatchedRun, metrics: Mapping[str, Any]) -> bool:
        name = self.metric.removeprefix(VALIDATION)
        if name not in metrics:
            is_evaluation = self.metric.startswith(VALIDATION)
            prefix, where = (VALIDATION, "an evaluation") if is_evaluation else ("", "a report")
            names = ", ".join(sorted(f"{prefix}{one}" for one in set(metrics) - {"step"}))
            raise ValueError(
                f"{type(self).__name__} watches {self.metric!r}, but {where} has {names}; name one "
                f"of them ({VALIDATION}NAME is a metric of evaluations, NAME a metric of training)"
            )
        value, step = float(metrics[name]), int(metrics["step"])
        if self._is_better(value):
            self.best, self.best_step = value, step
            return self._improved(trainer)
        return self._not_improved(trainer, value)

    def _is_better(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self.best is None:
            return True
        gain = self.best - value if self.mode == "min" else value - self.best
        return gain > self.min_delta

    def _improved(self, trainer: WatchedRun) -> bool:
        return False

    def _not_improved(self, trainer: WatchedRun, value: float) -> bool:
        return False

    def state(self) -> dict[str, Any]:
        """Returns the state of this callback for a checkpoint."""
        return {"metric": self.metric, "best": self.best, "best_step": self.best_step}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores the state from a checkpoint; ignores a state that belongs to another metric."""
        if state.get("metric") == self.metric:
            self.best, self.best_step = state.get("best"), state.get("best_step")


@names_keywords()
class EarlyStopping(_Watching):
    """Callback that ends a run whose metric has stopped improving.

    A checkpoint stores the number of evaluations without improvement, so a resumed run continues
    the count.

    Args:
      metric: "validation/NAME" for evaluations, or "NAME" for training reports. NAME is "loss" or a
        metric of your own loss; "validation/ema_loss" is the loss of the averaged weights (EMA).
      patience: number of evaluations (or reports) in a row without improvement that ends the run.
      mode: "min" if smaller values are better, "max" if larger values are better.
      min_delta: a change counts as an improvement only if it is larger than this.

    Attributes:
      best: best value so far.
      best_step: step of the best value.
      stopped: True if this callback has ended the run.
    """

    def __init__(
        self,
        metric: str = "validation/loss",
        *,
        patience: int = 3,
        mode: Literal["min", "max"] = "min",
        min_delta: float = 0.0,
    ) -> None:
        super().__init__(metric, mode, min_delta)
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise ValueError(
                f"patience={patience!r} is not valid; use a whole number of at least 1"
            )
        self.patience, self.stopped = patience, False
        self._waited = 0

    def on_start(self, trainer: WatchedRun) -> None:
        """Raises ValueError if the run does not measure the watched metric, or evaluates only at
        its end although a validation metric is watched."""
        super().on_start(trainer)
        if self.metric.startswith(VALIDATION) and trainer.loop_settings.eval_every is None:
            raise ValueError(
                f"EarlyStopping watches {self.metric!r}, but the run evaluates only at its end; "
                "pass eval_every=STEPS"
            )

    def _improved(self, trainer: WatchedRun) -> bool:
        self._waited = 0
        return False

    def _not_improved(self, trainer: WatchedRun, value: float) -> bool:
        self._waited += 1
        if self._waited < self.patience or self.stopped:
            return self.stopped
        self.stopped = True
        best = (
            "" if self.best is None else f"; the best was {self.best:.6g} at step {self.best_step}"
        )
        trainer.say(
            f"step {trainer.num_steps}: stopped early: {self.metric} has not improved "
            f"{self._waited} times in a row{best}"
        )
        return True

    def state(self) -> dict[str, Any]:
        """Returns the state of this callback for a checkpoint."""
        return {**super().state(), "waited": self._waited}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores the state from a checkpoint."""
        super().load_state(state)
        if state.get("metric") == self.metric:
            self._waited = int(state.get("waited", 0))


@names_keywords()
class KeepBest(_Watching):
    """Callback that saves the step with the best metric, and protects it from deletion.

    The step is one of the run's checkpoints. Neither `checkpoint.keep` nor `zerojax checkpoint
    prune` deletes it. Load it with `zerojax.load_run(RUN, step="best")`, or continue from it with
    `trainer.restore("best")`. Saving blocks until the step is on disk; only then may the previous
    best step be deleted.

    Args:
      metric: "validation/NAME" for evaluations, or "NAME" for training reports.
      mode: "min" if smaller values are better, "max" if larger values are better.
      min_delta: a change counts as an improvement only if it is larger than this.

    Attributes:
      best: best value so far.
      best_step: number of the protected step.
    """

    NAME = "best"

    def __init__(
        self,
        metric: str = "validation/loss",
        *,
        mode: Literal["min", "max"] = "min",
        min_delta: float = 0.0,
    ) -> None:
        super().__init__(metric, mode, min_delta)

    def on_start(self, trainer: WatchedRun) -> None:
        """Reads the best value and step stored by an earlier process of this run.

        Raises:
          ValueError: the run has no checkpoints.
        """
        super().on_start(trainer)
        if not trainer.has_checkpoints:
            raise ValueError("KeepBest needs checkpoints; pass checkpoint='runs/NAME' to train")
        kept = trainer.kept_steps().get(self.NAME)
        if kept is not None and kept.get("metric") == self.metric:
            self.best, self.best_step = kept.get("value"), kept["step"]

    def _improved(self, trainer: WatchedRun) -> bool:
        # The metric may belong to an earlier step whose state no longer exists. The current step
        # is saved instead, which is at most one report later.
        self.best_step = trainer.keep(self.NAME, {"metric": self.metric, "value": self.best})
        return False

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Does nothing, because `on_start` reads the best step from the checkpoint folder."""


class NoWeightError(ValueError):
    """The evaluation batches have no row with a nonzero weight."""


@allocating_for("an evaluation")
def mean_loss(
    evaluate: Callable[..., Any],
    plan: Plan,
    state: Tree,
    batches: Any,
    num_batches: int | None,
    default: int | None,
    *,
    filler: Filler | None = None,
    leave_out: Callable[[str], None] | None = None,
) -> dict[str, float]:
    """Returns the weighted means of the loss and the user's metrics over evaluation batches.

    The result has "loss" (the mean), "weight" (the sum of weights), and the mean of each metric. If
    the loss returns no weight, the weight is the number of rows. A metric whose weights are all 0
    is NaN. A batch with fewer rows counts with the rows that it has.

    Args:
      evaluate: evaluation function, from `build_evaluation`.
      plan: plan of `state`.
      state: train state; it is not donated.
      batches: a source, a function of the batch's number, one batch, or an iterable of batches;
        None if the run has no validation data.
      num_batches: maximum number of batches; None: all of an iterable, `default` otherwise.
      default: maximum number of batches of a source or a function.
      filler: fills short batches and caches its analysis of the loss between evaluations.
      leave_out: function called with a sentence for each short batch that is skipped because the
        loss does not allow filling it; None: such a batch raises an error.

    Raises:
      NoWeightError: there is no batch, or no row with a nonzero weight.
      LeftOutError: a short batch cannot be filled, and `leave_out` is None.
      ValueError: `batches` is None.
    """
    if batches is None:
        raise ValueError("no validation data: pass batches to evaluate, or validation= to train")
    batches = in_batches(batches, plan.global_batch_size)
    filler = filler or Filler(plan)
    on_host = lambda batch: evaluate(  # noqa: E731
        state, shard_batch(plan, batch, vocab_size=plan.vocab_size)
    )
    totals: dict[str, list[float]] = {}
    rows = 0
    for batch in each_batch(batches, num_batches, default, lambda: local_rows(plan)):
        try:
            filled = filler.fill(batch)
        except LeftOutError as error:
            if leave_out is None:
                raise
            leave_out(str(error))
            continue
        sums = filler.sums(on_host, filled)
        rows += plan.global_batch_size - filled.missing
        own = {name: (x["sum"], x["weight"]) for name, x in sums.get("metrics", {}).items()}
        for name, pair in {"loss": (sums["loss"], sums["weight"]), **own}.items():
            total = totals.setdefault(name, [0.0, 0.0])
            # Python floats, so the sums of many batches are added in float64.
            total[:] = total[0] + float(pair[0]), total[1] + float(pair[1])
    weight = totals.get("loss", [0.0, 0.0])[1]
    if weight == 0:
        raise NoWeightError(
            "nothing to evaluate: there are no batches, or all their weights are 0; pass at least "
            "one batch with a row whose weight is not 0"
        )
    means = {name: x / y if y else math.nan for name, (x, y) in totals.items()}
    weight = weight if plan.traced.has_weight else float(rows)
    return {"loss": means.pop("loss"), "weight": weight, **means}


def of_ema(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metrics of an evaluation of averaged weights (EMA) with "ema_" before each name;
    leaves out "weight"."""
    return {f"{EMA}_{name}": value for name, value in found.items() if name != "weight"}
