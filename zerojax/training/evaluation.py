"""Evaluation: its mean loss, and the callbacks that stop a run early or keep its best step.

A callback is a function `(trainer, metrics)`, called at every report; one that returns True ends
the run, and `train` returns its trainer. An object may have further methods:

- `on_start(trainer)`: before the first step;
- `on_evaluation(trainer, metrics)`: after every evaluation on the run's validation data; True ends
  the run;
- `state()` and `load_state(state)`: what a checkpoint is to hold of it, as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax

from zerojax.config.checks import names_keywords, warn_user
from zerojax.data import local_rows, missing_rows, shard_batch
from zerojax.models.trace import has_random_numbers, is_random
from zerojax.optim import EMA
from zerojax.plan.device_mesh import num_data_shards
from zerojax.plan.make import Plan
from zerojax.plan.state import abstract_model, as_read, slice_batch
from zerojax.runtime.memory import allocating_for
from zerojax.training.validation import Filler, LeftOutError, each_batch

VALIDATION = "validation/"
"""Begins the name of a metric of evaluations; others are of training reports."""
_SWITCH = (
    "let the mode decide: an nnx module follows model.eval(); a linen module needs an argument "
    "train, training, deterministic or use_running_average, which the loss does not pass"
)


def check_evaluation_mode(plan: Plan) -> None:
    """Traces the loss in evaluation mode and warns where it is still random.

    Nothing is traced of a model without random numbers and without state of its own.

    Raises:
      ValueError: the loss fails in that mode.
    """
    if not (plan.abstract_canonical["extras"] or has_random_numbers(plan.traced.forward)):
        return
    pieces = plan.num_microbatches * num_data_shards(plan.mesh)
    microbatch = slice_batch(plan.abstract_batch, pieces)
    params, extras = abstract_model(plan.users_model, plan.abstract_batch, plan.loss)
    read = as_read(params, plan.precision)
    try:
        random = is_random(plan.users_model, read, extras, microbatch, plan.loss, train=False)
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"the loss fails in evaluation mode, in which validation runs ({type(error).__name__}: "
            f"{first}); {_SWITCH}, or leave validation away"
        ) from error
    if random:
        warn_user(
            "the loss is random in evaluation mode, too, as by dropout that is always on: a "
            "validation measures it at one draw of the noise, and other numbers of devices draw "
            f"other noise; {_SWITCH}"
        )


class _Watching:
    """A metric, and what counts as better."""

    def __init__(self, metric: str, mode: Literal["min", "max"], min_delta: float) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"mode={mode!r} is not valid; use 'min' or 'max'")
        if not (isinstance(min_delta, int | float) and 0 <= min_delta < math.inf):
            raise ValueError(f"min_delta={min_delta!r} is not valid; use a number of at least 0")
        self.metric, self.mode, self.min_delta = metric, mode, float(min_delta)
        self.best: float | None = None
        self.best_step: int | None = None

    def on_start(self, trainer: Any) -> None:
        """Refuses a run that never evaluates what is watched, or under another name.

        Raises:
          ValueError: with what to pass to `train`.
        """
        if self.metric.startswith(VALIDATION) and not trainer.has_validation:
            raise ValueError(
                f"{type(self).__name__} watches {self.metric!r}, and the run has no validation "
                "data; pass validation=BATCHES and eval_every=STEPS, or watch metric='loss'"
            )
        name = self.metric.removeprefix(VALIDATION)
        own = trainer.plan.traced.metric_names
        if name.startswith(f"{EMA}_") and not trainer.has_ema and name not in own:
            raise ValueError(
                f"{type(self).__name__} watches {self.metric!r}, and the run keeps no average of "
                "its weights; set optimizer.ema_decay or give optimizer=zerojax.with_ema(...)"
            )
        measured = trainer.evaluation_names
        if self.metric.startswith(VALIDATION) and measured and name not in measured:
            names = ", ".join(sorted(f"{VALIDATION}{one}" for one in measured))
            raise ValueError(
                f"{type(self).__name__} watches {self.metric!r}, and an evaluation has {names}; "
                "name one of them"
            )

    def __call__(self, trainer: Any, metrics: Mapping[str, Any]) -> bool:
        """At a report of training."""
        return not self.metric.startswith(VALIDATION) and self._see(trainer, metrics)

    def on_evaluation(self, trainer: Any, metrics: Mapping[str, Any]) -> bool:
        """At an evaluation."""
        return self.metric.startswith(VALIDATION) and self._see(trainer, metrics)

    def _see(self, trainer: Any, metrics: Mapping[str, Any]) -> bool:
        name = self.metric.removeprefix(VALIDATION)
        if name not in metrics:
            is_evaluation = self.metric.startswith(VALIDATION)
            prefix, where = (VALIDATION, "an evaluation") if is_evaluation else ("", "a report")
            names = ", ".join(sorted(f"{prefix}{one}" for one in set(metrics) - {"step"}))
            raise ValueError(
                f"{type(self).__name__} watches {self.metric!r}, and {where} has {names}; name one "
                f"of them ({VALIDATION}NAME is a metric of evaluations, NAME one of training)"
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

    def _improved(self, trainer: Any) -> bool:
        return False

    def _not_improved(self, trainer: Any, value: float) -> bool:
        return False

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"metric": self.metric, "best": self.best, "best_step": self.best_step}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """From the checkpoint of a run that goes on; another metric begins anew."""
        if state.get("metric") == self.metric:
            self.best, self.best_step = state.get("best"), state.get("best_step")


@names_keywords()
class EarlyStopping(_Watching):
    """Ends a run whose metric has not improved for some time.

    A run that is resumed counts on from where it was.

    Args:
      metric: "validation/NAME" of evaluations, or "NAME" of training reports: "loss", or a metric
        of your own loss; "validation/ema_loss" is that of the average of the weights.
      patience: how many evaluations, or reports, in a row may pass without an improvement.
      mode: whether less or more is better.
      min_delta: an improvement is larger than this.

    Attributes:
      best, best_step: the best value so far, and its step.
      stopped: whether it has ended the run.
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

    def on_start(self, trainer: Any) -> None:
        """Refuses a run that evaluates only at its end."""
        super().on_start(trainer)
        if self.metric.startswith(VALIDATION) and trainer.loop_settings.eval_every is None:
            raise ValueError(
                f"EarlyStopping watches {self.metric!r}, and the run evaluates only at its end; "
                "pass eval_every=STEPS"
            )

    def _improved(self, trainer: Any) -> bool:
        self._waited = 0
        return False

    def _not_improved(self, trainer: Any, value: float) -> bool:
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
        """For the checkpoint."""
        return {**super().state(), "waited": self._waited}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """From the checkpoint of a run that goes on."""
        super().load_state(state)
        if state.get("metric") == self.metric:
            self._waited = int(state.get("waited", 0))


@names_keywords()
class KeepBest(_Watching):
    """Saves the step with the best metric, and keeps it whatever the run saves later.

    It lies among the run's checkpoints, where `checkpoint.keep` and `zerojax checkpoint prune`
    leave it alone: `zerojax.load_run(RUN, step="best")` reads it, `trainer.restore("best")` goes
    back to it. Saving waits until the step is on disk, so that the one before it is given up only
    then.

    Args:
      metric, mode, min_delta: as `EarlyStopping` takes them.

    Attributes:
      best, best_step: the value and the step that are kept.
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

    def on_start(self, trainer: Any) -> None:
        """Takes over what an earlier process has kept.

        Raises:
          ValueError: the run saves nothing.
        """
        super().on_start(trainer)
        if not trainer.has_checkpoints:
            raise ValueError("KeepBest needs checkpoints; pass checkpoint='runs/NAME' to train")
        kept = trainer.kept_steps().get(self.NAME)
        if kept is not None and kept.get("metric") == self.metric:
            self.best, self.best_step = kept.get("value"), kept["step"]

    def _improved(self, trainer: Any) -> bool:
        # The metric may be of an earlier step, whose state is gone by now: the step that is saved
        # is the one after which it was read, at most a report later.
        self.best_step = trainer.keep(self.NAME, {"metric": self.metric, "value": self.best})
        return False

    def load_state(self, state: Mapping[str, Any]) -> None:
        """What is kept is in the folder, which may know of a later step."""


class NoWeightError(ValueError):
    """Batches have no rows with a weight."""


@allocating_for("an evaluation")
def mean_loss(
    evaluate: Any,
    plan: Plan,
    state: Any,
    batches: Any,
    num_batches: int | None,
    default: int,
    *,
    filler: Filler | None = None,
    leave_out: Callable[[str], None] | None = None,
) -> dict[str, float]:
    """`{"loss": mean, "weight": sum}` and own metrics over batches, weighted by their own weights.

    The weight of a loss that returns none is the number of rows. A metric whose weights are all 0
    is NaN. A batch with fewer rows counts with the rows it has.

    Args:
      evaluate: of `build_evaluation`.
      plan: which `state` follows.
      state: not donated.
      batches: as `each_batch` takes them; None: there are none.
      num_batches: at most this many; None: all, of a source or a function `default`.
      default: batches of a source or a function.
      filler: of the plan, which may know of an earlier evaluation what the loss allows.
      leave_out: gets a sentence for each short batch that the loss does not allow, which is left
        out; None: it is an error.

    Raises:
      NoWeightError: there is nothing to evaluate on. ValueError: no batches were given.
    """
    if batches is None:
        raise ValueError("no validation data: pass batches to evaluate, or validation= to train")
    filler = filler or Filler(plan)
    on_host = lambda batch: evaluate(  # noqa: E731
        state, shard_batch(plan, batch, vocab_size=plan.vocab_size)
    )
    totals: dict[str, list[float]] = {}
    rows, rows_of_batch = 0, jax.tree.leaves(plan.abstract_batch)[0].shape[0]
    for batch in each_batch(batches, num_batches, default, lambda: local_rows(plan)):
        try:
            sums = filler.sums(on_host, batch)
        except LeftOutError as error:
            if leave_out is None:
                raise
            leave_out(str(error))
            continue
        rows += rows_of_batch - missing_rows(plan, batch)
        own = {name: (x["sum"], x["weight"]) for name, x in sums.get("metrics", {}).items()}
        for name, pair in {"loss": (sums["loss"], sums["weight"]), **own}.items():
            total = totals.setdefault(name, [0.0, 0.0])
            total[:] = total[0] + float(pair[0]), total[1] + float(pair[1])
    weight = totals.get("loss", [0.0, 0.0])[1]
    if weight == 0:
        raise NoWeightError(
            "nothing to evaluate: the batches are empty, or all their weights are 0"
        )
    means = {name: x / y if y else math.nan for name, (x, y) in totals.items()}
    weight = weight if plan.traced.has_weight else float(rows)
    return {"loss": means.pop("loss"), "weight": weight, **means}


def of_ema(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what was measured with the average of the weights, under names of its own."""
    return {f"{EMA}_{name}": value for name, value in found.items() if name != "weight"}
