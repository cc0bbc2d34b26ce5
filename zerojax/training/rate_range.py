"""Learning-rate range test: trains some steps at a growing learning rate, and saves nothing.

The rate grows by the same factor at each step. The largest usable rate is where the loss stops
falling (Smith 2015, arXiv:1506.01186). The run itself does not change: its newest checkpoint is
read, and nothing is written.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.checkpoint.folders import list_steps
from zerojax.config import OptimizerConfig, RunConfig
from zerojax.config.checks import MAX_SIZE, check_whole_number
from zerojax.config.display import as_html
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.loader import user_path
from zerojax.optim.building import with_rate
from zerojax.runtime.distributed import join_processes
from zerojax.training.metrics.charts import Chart, Points, Series, smooth
from zerojax.training.metrics.report import write_page
from zerojax.training.run_file import spec_from_config
from zerojax.training.run_lifecycle import fit
from zerojax.training.run_spec import RunSpec
from zerojax.training.trial_runs import as_trial, check_no_files, open_trial

LOWEST_RATE, HIGHEST_RATE, STEPS = 1e-6, 1.0, 200
LEAST_STEPS = 20
_NAME = "this test"
DIVERGED = 4.0
"""Factor over the lowest loss at which the test ends."""
MARGIN = 10.0
"""Factor by which the suggested rate is below the rate of the lowest loss, because the loss is
lowest just before training becomes unstable."""


@dataclass(frozen=True, kw_only=True)
class RateTest:
    """Losses of a test at growing learning rates.

    Attributes:
      first_step: number of batches that the run had consumed before the test.
      rates: learning rate of each step, ascending.
      losses: loss of each step before its update; None where it was not finite.
      smoothed: means of the losses over a window centred on each step.
    """

    first_step: int
    rates: tuple[float, ...]
    losses: tuple[float | None, ...]
    smoothed: tuple[float | None, ...]

    @property
    def lowest(self) -> int | None:
        """Index of the lowest smoothed loss; None if no loss is finite."""
        found = [(loss, index) for index, loss in enumerate(self.smoothed) if loss is not None]
        return min(found)[1] if found else None

    @property
    def steepest(self) -> int | None:
        """Index of the step before the largest fall of the smoothed loss on the way to its lowest
        value; None if it never falls."""
        falls = [
            (after - before, index)
            for index, (before, after) in enumerate(
                zip(self.smoothed[: self.lowest], self.smoothed[1:], strict=False)
            )
            if before is not None and after is not None
        ]
        return min(falls)[1] if falls and min(falls)[0] < 0 else None

    @property
    def suggestion(self) -> float | None:
        """Learning rate to train with, rounded to two digits; None if the test shows none."""
        if self.lowest is None or self.steepest is None or self.lowest == len(self.rates) - 1:
            return None
        return float(f"{self.rates[self.lowest] / MARGIN:.1e}")

    def describe(self) -> str:
        """Returns the suggested rate with its reason, or why there is none, as text."""
        if self.lowest is None:
            return "no loss was finite; start at a lower rate (--low)"
        low, high = self.rates[0], self.rates[-1]
        loss = self.smoothed[self.lowest]
        best = f"lowest loss {loss:.4g} at rate {self.rates[self.lowest]:.2g}"
        if self.steepest is None:
            return f"{best}; the loss never fell from {low:.2g} to {high:.2g}: use a lower --low"
        fastest = f"fastest fall at rate {self.rates[self.steepest]:.2g}"
        if self.suggestion is None:
            return (
                f"{best}, {fastest}; it still fell at the highest rate: use --high above {high:.2g}"
            )
        return (
            f"{best}, {fastest}\n"
            f"suggested (1/{MARGIN:g} of the rate with the lowest loss):\n"
            f"  optimizer.learning_rate={self.suggestion:g}"
        )


def find_rate(
    config: RunConfig,
    *,
    low: float = LOWEST_RATE,
    high: float = HIGHEST_RATE,
    steps: int = STEPS,
    progress: Callable[[str], None] = lambda text: None,
) -> RateTest:
    """Trains at rates from `low` to `high`, from the run's newest checkpoint if it has one.

    Schedule, warm-up and `optimizer.learning_rate` of the run are not used; parameter groups keep
    their factors of the rate. Batches, clipping, precision and mesh are those of the run.

    Args:
      config: settings of the run.
      low: learning rate of the first step.
      high: learning rate of the last step.
      steps: number of updates; the test stops earlier if the loss diverges.
      progress: function called with a short text after each step.

    Raises:
      ValueError: the range is invalid, or the run has state in files, which training would change.
    """
    check_range(low, high, steps)
    check_no_files(config.mesh, _NAME)
    _check_scaling(config.optimizer, config.global_batch_size)
    join_processes()
    spec = spec_from_config(config.on_devices(jax.device_count()))
    return find_rate_of(spec, low=low, high=high, steps=steps, progress=progress)


def find_rate_of(
    spec: RunSpec,
    *,
    low: float = LOWEST_RATE,
    high: float = HIGHEST_RATE,
    steps: int = STEPS,
    progress: Callable[[str], None] = lambda text: None,
) -> RateTest:
    """Trains at rates from `low` to `high`, as `find_rate` does, from the description of a run.

    Args:
      spec: the run; its optimizer is an `OptimizerConfig`, or the default.
      low, high, steps, progress: as for `find_rate`.

    Raises:
      ValueError: as `find_rate`, or the rate is a part of the optimizer that the run was given.
    """
    check_range(low, high, steps)
    check_no_files(spec.mesh, _NAME)
    optimizer = spec.inputs.optimizer or OptimizerConfig()
    if not isinstance(optimizer, OptimizerConfig):
        raise ValueError(
            f"the optimizer is {type(optimizer).__name__} with a rate of its own, which this test "
            "cannot change; pass optimizer=zerojax.OptimizerConfig(...)"
        )
    _check_scaling(optimizer, jax.tree.leaves(spec.inputs.example_batch)[0].shape[0])
    folder = None if spec.checkpoint is None else spec.checkpoint.path
    saved = [] if folder is None else list_steps(user_path(folder))
    first = max(saved, default=0)
    found: list[tuple[float, float | None]] = []

    def collect(_: object, metrics: dict[str, float]) -> bool:
        """Records one step; returns True if the loss has diverged."""
        loss = metrics["loss"]
        is_finite = math.isfinite(loss)
        found.append((metrics["learning_rate"], loss if is_finite else None))
        progress(
            f"step {len(found)} of {steps}: rate {metrics['learning_rate']:.2g}, loss {loss:.4g}"
        )
        finite = [loss for _, loss in found if loss is not None]
        return not is_finite or (len(found) >= LEAST_STEPS and loss > DIVERGED * min(finite))

    run = open_trial(
        _test_of(spec, optimizer, (low, high), first, steps, collect), saved=bool(saved)
    )
    trainer = fit(run)
    # If the newest checkpoint was damaged, the test began at an older one.
    first = trainer.num_steps - len(found)
    trainer.close()
    points: Points = [(float(number), loss) for number, (_, loss) in enumerate(found)]
    smoothed = smooth(points, half_width=max(2, len(points) // 20))
    return RateTest(
        first_step=first,
        rates=tuple(rate for rate, _ in found),
        losses=tuple(loss for _, loss in found),
        smoothed=tuple(loss for _, loss in smoothed),
    )


def _check_scaling(optimizer: OptimizerConfig, rows: int) -> None:
    if optimizer.scaling is not None:
        raise ValueError(
            f"optimizer.scaling={optimizer.scaling} multiplies the learning rate, and this "
            "test finds the rate itself; test with optimizer.scaling=null and "
            f"optimizer.base_batch=null, and set the result for base_batch={rows}"
        )


def check_range(low: float, high: float, steps: int) -> None:
    """Raises ValueError if the rates or the number of steps are out of range."""
    check_whole_number("steps", steps, LEAST_STEPS, MAX_SIZE)
    if not 0 < low < high < math.inf:
        raise ValueError(
            f"low={low:g}, high={high:g}: both must be above 0, and high above low, such as "
            f"{LOWEST_RATE:g} and {HIGHEST_RATE:g}"
        )


def _test_of(
    spec: RunSpec,
    config: OptimizerConfig,
    ends: tuple[float, float],
    first: int,
    steps: int,
    collect: Callable[[Any, dict[str, float]], bool],
) -> RunSpec:
    """Returns the run of the test: `steps` more steps at growing rates, without any output."""
    low, high = ends

    def rate(count: jax.Array) -> jax.Array:
        # A run that skipped steps has fewer updates than steps; the rate stays `low` for these.
        passed = jnp.clip(count - first, 0, steps - 1) / (steps - 1)
        return low * jnp.exp(passed * math.log(high / low))

    optimizer = with_rate(config, rate)
    inputs = dataclasses.replace(spec.inputs, optimizer=optimizer, steps=first + steps)
    return as_trial(dataclasses.replace(spec, inputs=inputs), collect)


def write_rate_page(test: RateTest, path: str | Path, name: str) -> Path:
    """Writes an HTML page with the losses over the learning rates, and returns its path.

    Args:
      test: result of the test.
      path: path of the HTML page.
      name: name of the run.
    """
    places = [math.log10(rate) for rate in test.rates]
    curves = ("each step", test.losses, "faint"), ("smoothed", test.smoothed, "first")
    chart = Chart(
        title="Loss over learning rate",
        unit="training loss",
        series=[
            Series(label=label, points=list(zip(places, losses, strict=True)), style=style)
            for label, losses, style in curves
        ],
        wide=True,
        log_above=2.5,
        axis="learning rate",
        tick=lambda place: f"{10**place:.2g}",
    )
    return write_page(
        user_path(path),
        name,
        f"{len(test.rates)} steps after step {test.first_step}",
        [chart],
        {"Result": f"<pre>{as_html(test.describe())}</pre>"},
        ends=(places[0], places[-1]),
        folder=str(path),
    )
