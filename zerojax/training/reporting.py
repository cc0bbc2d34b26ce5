"""Reads step metrics one step late, reports and checks them, and writes profiler traces."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.config.tree_types import Tree
from zerojax.hardware import compile_client
from zerojax.optim import Schedule
from zerojax.passes.layer_norms import layer_rows, norms_of_layers
from zerojax.passes.update import leaf_names
from zerojax.plan.make import Plan
from zerojax.runtime.memory import TRAINING_STEP, allocating_for
from zerojax.step.build import LiveStateOnly
from zerojax.tracing import trees
from zerojax.training.metrics import RunLog
from zerojax.training.metrics.stragglers import STEP
from zerojax.training.process_times import LoopClock

Metrics = dict[str, Any]
"""Metrics of a report. All are numbers, except "bad_leaf" and "largest_leaf", which are names of
parameters. With `log.per_layer` it has the norms of each layer, as in "gradient_norm/blocks/3"."""

MAX_STEPS_UNDER_WAY = 16
"""Maximum number of steps that are dispatched and not finished. It is enough to hide the host's
work. Without a limit, a host that is much faster than its devices queues steps without end, and XLA
on CPU hangs after some hundred steps (seen with JAX 0.10.2 on 8 virtual devices)."""

LOOK_SECONDS = 0.01
"""Seconds between two looks at finished steps. Losses of short steps are read several at a time,
which costs a third of reading each one after its step."""

_SPIKE_HINT = (
    "Look at this step's batch; if the loss stays there, go back to the checkpoint before it and "
    "lower the learning rate or optimizer.clip_norm"
)

SHOWN = ("loss", "grad_norm", "learning_rate", "loss_scale")
"""Step metrics that are logged if present, in addition to the loss's own metrics."""

TRACE_FOLDER = "trace"


class Reports:
    """Reports step metrics. Metrics are read only while a later step is running, to avoid waiting.

    Args:
      max_skipped: the run ends after this number of consecutive reports with a non-finite step. A
        dynamic loss scale is exempt, because it ends such a run at its minimum.
      skipped: number of steps skipped before a resume.
      clock: clock of the training loop.
      finished: function called with the number of each finished step.
    """

    def __init__(
        self,
        max_skipped: int,
        *,
        skipped: int = 0,
        clock: LoopClock | None = None,
        finished: Callable[[int], object] = lambda step: None,
    ) -> None:
        self._max_skipped, self._finished = max_skipped, finished
        self._clock = clock or LoopClock()
        self._trace = Trace()
        self._skipped = skipped
        self._in_a_row = 0
        self._was_skipped = False
        self._held: tuple[int, Mapping[str, Any]] | None = None
        self._rate: tuple[Any, Callable[..., jax.Array] | None] | None = None
        self._host_schedule: Schedule | None = None
        self._layer_rows: tuple[Plan, list[str]] | None = None
        self._reported: int | None = None
        self._under_way: collections.deque[tuple[int, Mapping[str, Any]]] = collections.deque()
        self._unseen: collections.deque[tuple[int, Mapping[str, Any]]] = collections.deque()
        self._looked = 0.0

    @allocating_for(TRAINING_STEP)  # waiting for a step's result raises the errors of the step
    def follow(
        self, plan: Plan, step: int, metrics: Mapping[str, Any], log: RunLog | None = None
    ) -> None:
        """Registers a dispatched step; must be called for every step.

        Waits for the step `MAX_STEPS_UNDER_WAY` steps earlier. Logs finished steps that were not
        finite or whose loss jumped, even if they are not reported.

        Raises:
          FloatingPointError: a step overflowed at the smallest loss scale.
        """
        if self._unseen and (now := time.monotonic()) > self._looked + LOOK_SECONDS:
            self._looked = now
            while self._unseen and self._unseen[0][1]["loss"].is_ready():
                self._look(plan, log)  # earlier, it is not known which steps are reported
        self._clock.dispatched(metrics["loss"])
        self._under_way.append((step, metrics))
        if log is not None and log.is_enabled:
            self._unseen.append((step, metrics))
            self._follow_trace(step, metrics["loss"], log)
        if len(self._under_way) > MAX_STEPS_UNDER_WAY:
            self._settle(plan)

    def _follow_trace(self, step: int, loss: jax.Array, log: RunLog) -> None:
        if not log.traced_steps or log.run_dir is None:
            return
        first, last = log.traced_steps
        if step in (first - 1, last):
            with self._clock.during(STEP):  # a trace starts and stops between two steps
                loss.block_until_ready()
        written = self._trace.follow(step, loss, log.traced_steps, log.run_dir)
        if written is not None:
            log.message(f"step {step}: a trace of steps {first} to {last} is in {written}")

    @allocating_for(TRAINING_STEP)
    def settle(self, plan: Plan, log: RunLog | None = None) -> None:
        """Waits for all steps registered by `follow`, and for the gathered process times.

        Raises:
          FloatingPointError: a step overflowed at the smallest loss scale.
        """
        self.wait(plan)
        if log is not None and log.run_dir is not None:
            self._trace.stop(None, log.run_dir)
        while self._unseen:
            self._look(plan, log)
        self._write_processes(self._clock.last_gathered(), log)

    @allocating_for(TRAINING_STEP)
    def wait(self, plan: Plan) -> None:
        """Waits for all steps registered by `follow`, one by one.

        Raises:
          FloatingPointError: a step overflowed at the smallest loss scale.
        """
        while self._under_way:
            self._settle(plan)

    def _settle(self, plan: Plan) -> None:
        step, metrics = self._under_way.popleft()
        with self._clock.during(STEP):
            metrics["loss"].block_until_ready()
        self._finished(step)
        # Only in float16, reads one scalar: the scale may reach its minimum between two reports.
        if "at_floor" in metrics and bool(metrics["at_floor"]):
            self._under_way.clear()
            self._held = None
            raise _floor_error(plan, _read(step, metrics))

    def _look(self, plan: Plan, log: RunLog | None) -> None:
        """Checks a finished step. Reads two scalars, and more metrics only if these are unusual."""
        step, metrics = self._unseen.popleft()
        assert log is not None
        if np.asarray(metrics["skipped"]):
            values = _read(step, metrics)
            found, leaf = _what_was_not_finite(plan, values), _leaf(plan, values, "bad_leaf")
            text = f"step {step}: {found}: not finite, the update was skipped"
            # Not printed: steps with a report of their own, skips by a dynamic loss scale, and in a
            # series of skipped steps all but the first (reports have their number).
            say = step not in (self._reported, self._held and self._held[0])
            say = say and not _scale_is_dynamic(plan) and not self._was_skipped
            self._was_skipped = True
            log.event("not_finite", step, text, say=say, leaf=leaf)
            return
        self._was_skipped = False
        jumped = log.see_loss(step, float(np.asarray(metrics["loss"])))
        if jumped is None:
            return
        values = _read(step, metrics)
        leaf, share = _leaf(plan, values, "largest_leaf"), values.get("largest_share", math.nan)
        text = f"{jumped}; gradient norm {values['grad_norm']:.4g}"
        if leaf is not None and math.isfinite(share):
            text += f", {share:.0%} of its square in '{leaf}'"
        log.event(
            "loss_spike",
            step,
            f"{text}. {_SPIKE_HINT}",
            loss=values["loss"],
            grad_norm=values["grad_norm"],
            leaf=leaf,
            share=share,
        )

    def _write_processes(self, gathered: Sequence[Any] | None, log: RunLog | None) -> None:
        if gathered is not None and log is not None:
            log.write_processes(*gathered)

    def hold(self, plan: Plan, step: int, metrics: Mapping[str, Any]) -> None:
        """Stores the metrics of a step, and starts computing its learning rate on the devices.

        Does not block. If the learning rate were computed when the report is read, it would wait
        for the step that is running then, and no further step could start meanwhile. A schedule
        that returns a host number is called when the report is read.
        """
        schedule, self._host_schedule = plan.learning_rate, None
        if schedule is not None:
            rate_of = self._rate_of(schedule)
            if rate_of is None:
                self._host_schedule = schedule
            else:
                with jax.transfer_guard("allow"):  # transfers the step number
                    rate = rate_of(step - 1, metrics["num_skipped"], metrics["skipped"])
                metrics = {**metrics, "learning_rate": rate}
        self._held = step, metrics

    def _rate_of(self, schedule: Schedule) -> Callable[..., jax.Array] | None:
        """Returns `(steps before, skipped in all, skipped now) -> learning rate`, jitted.

        Returns None for a schedule that computes Python numbers from Python numbers.
        """
        if self._rate is None or self._rate[0] is not schedule:

            def rate(before: jax.Array, num_skipped: jax.Array, skipped: jax.Array) -> jax.Array:
                return jnp.asarray(schedule(before - (num_skipped - skipped)))

            self._rate = schedule, None if _needs_no_device(schedule) else jax.jit(rate)
        return self._rate[1]

    @allocating_for(TRAINING_STEP)
    def read(
        self, plan: Plan, log: RunLog | None, params: Mapping[str, jax.Array] | None = None
    ) -> Metrics | None:
        """Reads the metrics stored by `hold`, logs and returns them; None if nothing is stored.

        Args:
          plan: plan of the step.
          log: log of the run, if it has one.
          params: newest parameters of the state. If the loss is not finite, every process searches
            them for values that are not finite.

        Raises:
          FloatingPointError: too many consecutive reports were not finite, or this step overflowed
            at the smallest loss scale.
        """
        if self._held is None:
            return None
        step, metrics = self._held
        # So that `finished` is called in order of steps.
        while self._under_way and self._under_way[0][0] < step:
            self._settle(plan)
        self._held, self._reported = None, step
        with self._clock.during(STEP):
            values = _read(step, metrics)
        layers = self._norms_of_layers(plan, metrics)
        self._finished(step)
        while log is not None and self._unseen and self._unseen[0][0] <= step:
            self._look(plan, log)
        before, self._skipped = self._skipped, int(values["num_skipped"])
        if self._host_schedule is not None:
            # A schedule counts updates, and skipped steps apply none.
            updates = step - 1 - (self._skipped - int(values["skipped"]))
            values["learning_rate"] = float(self._host_schedule(updates))
        if log is not None:
            shown = (*SHOWN, *plan.traced.metric_names)
            numbers = {name: values[name] for name in shown if name in values}
            spent, times = self._clock.take()
            log.write(step, {**numbers, "skipped": self._skipped}, spent)
            if layers:
                log.write_layers(step, layers)
            if jax.process_count() > 1:
                self._write_processes(self._clock.gather(plan.mesh, step, times), log)
        self._check_finite(plan, values, self._skipped - before, log, params or {})
        return values | layers

    def _norms_of_layers(self, plan: Plan, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Returns {"gradient_norm/LAYER", "update_norm/LAYER", "parameter_norm/LAYER": norm} of a
        step's metrics; {} if the run does not record them.
        """
        if "layer_sums" not in metrics:
            return {}
        if self._layer_rows is None or self._layer_rows[0] is not plan:
            self._layer_rows = plan, layer_rows(plan)
        found = norms_of_layers(self._layer_rows[1], np.asarray(metrics["layer_sums"]))
        return {
            f"{kind}_norm/{layer}": norm
            for kind, norms in found.items()
            for layer, norm in norms.items()
        }

    def nothing_trained(self, plan: Plan, steps: int, log: RunLog | None) -> None:
        """Raises if all steps of a run were skipped, unless its loss scale is dynamic.

        A dynamic loss scale needs a few steps to reach a usable value; in that case a line is
        logged.

        Raises:
          FloatingPointError: all steps were skipped, and the loss scale is not dynamic.
        """
        text = f"all {steps} steps were skipped, so nothing was trained"
        if not _scale_is_dynamic(plan):
            raise FloatingPointError(f"{text}: loss or gradients were not finite. {_remedy(plan)}")
        if log is not None:
            log.message(f"{text}: the loss scale is still being lowered; train for more steps")

    def _check_finite(
        self,
        plan: Plan,
        values: Metrics,
        newly: int,
        log: RunLog | None,
        params: Mapping[str, jax.Array],
    ) -> None:
        if not values["skipped"]:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        ends = self._in_a_row >= self._max_skipped and not _scale_is_dynamic(plan)
        weight = None
        if (self._in_a_row == 1 or ends) and not math.isfinite(values["loss"]):
            weight = _first_bad_weight(plan, params)
        step, found = int(values["step"]), _what_was_not_finite(plan, values, weight)
        if log is not None and self._in_a_row == 1:  # reports have the number of further steps
            log.message(
                f"step {step}: {found}: not finite, the update was skipped "
                f"({newly} skipped since the last report, {self._skipped} in all)"
            )
        if values.get("at_floor"):
            self._under_way.clear()
            raise _floor_error(plan, values)
        if ends:
            raise FloatingPointError(
                f"{found} at step {step}: not finite at {self._in_a_row} reports in a row, "
                f"{self._skipped} updates skipped. The parameters are those before the first "
                f"skipped update. {_remedy(plan)}"
            )


def _needs_no_device(schedule: Schedule) -> bool:
    """Returns True if a learning-rate schedule returns a host number instead of a JAX array."""
    is_array: list[bool] = []  # set inside the trace; no traced value escapes
    jax.eval_shape(lambda: is_array.append(isinstance(schedule(0), jax.Array)))
    return not is_array[0]


def _read(step: int, metrics: Mapping[str, Any]) -> Metrics:
    # All copies are under way before the first one is waited for.
    for array in metrics.values():
        array.copy_to_host_async()
    numbers = {name: array for name, array in metrics.items() if not array.ndim}
    return {"step": step} | {name: float(np.asarray(array)) for name, array in numbers.items()}


def with_names(plan: Plan, values: Metrics) -> Metrics:
    """Replaces the parameter indices "bad_leaf" and "largest_leaf" in metrics by names; drops an
    index of -1."""
    named = {name: _leaf(plan, values, name) for name in ("bad_leaf", "largest_leaf")}
    rest = {name: value for name, value in values.items() if name not in named}
    return rest | {name: leaf for name, leaf in named.items() if leaf is not None}


def _scale_is_dynamic(plan: Plan) -> bool:
    scaling = plan.precision.loss_scale
    return scaling is not None and scaling.static is None


def _leaf(plan: Plan, values: Metrics, number: str) -> str | None:
    """Returns the name of the parameter whose number is `values[number]`; None if that is -1 or
    missing.
    """
    index = int(values.get(number, -1))
    return leaf_names(plan)[index] if index >= 0 else None


def _first_bad_weight(plan: Plan, params: Mapping[str, jax.Array]) -> str | None:
    """Returns the name of the first parameter that has NaN or infinite values, or None.

    A skipped step leaves parameters unchanged, so they are still those of the failed step.
    Parameters on the host are not searched.
    """
    on_device = {n: x for n, x in params.items() if x.sharding.memory_kind != "pinned_host"}
    if not on_device:
        return None

    def search(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return {
            # Keeps dimension 0 of stacked layers, which tells in which layer the value is.
            name: ~jnp.isfinite(x).all(axis=tuple(range(name in plan.stacks, x.ndim)))
            for name, x in arrays.items()
        }

    replicated = NamedSharding(plan.mesh, P())
    is_bad = jax.device_get(jax.jit(search, out_shardings=replicated)(on_device))
    for name, bad in sorted(is_bad.items()):
        if bad.any():
            rows = plan.stacks.get(name)
            stored = plan.placement.leaves[name].layer_rows
            row = int(np.argmax(bad)) if rows else 0
            return name if not rows else rows[row if stored is None else stored[row]]
    return None


def _what_was_not_finite(plan: Plan, values: Metrics, weight: str | None = None) -> str:
    """Describes a skipped step: its metrics and, if known, the first non-finite weight or gradient.

    Args:
      plan: plan of the step.
      values: metrics of the step.
      weight: name of a parameter that has non-finite values, if known.
    """
    found = f"loss {values['loss']:g}, gradient norm {values['grad_norm']:g}"
    leaf = _leaf(plan, values, "bad_leaf")
    if weight is not None:
        found += f", first in the weights of '{weight}'"
    elif leaf is not None:
        found += f", first in the gradient of '{leaf}'"
    if "loss_scale" in values:
        found += f", loss scale {values['loss_scale']:g}"
    return found


def _floor_error(plan: Plan, values: Metrics) -> FloatingPointError:
    """Returns the error for a step that overflowed at the minimum loss scale."""
    layer = _leaf(plan, values, "bad_leaf")
    if not math.isfinite(values["loss"]):
        reason = "the loss itself is not finite, and no loss scale changes that"
        remedy = "Look at the data and at the largest activations"
    else:
        reason = "this loss scale is the smallest allowed, but a smaller one is needed"
        remedy = "Lower the learning rate"
    look = f", or look at '{layer}' and what it is multiplied with" if layer else ""
    return FloatingPointError(
        f"step {int(values['step'])} overflowed: {_what_was_not_finite(plan, values)}: {reason}. "
        f"{int(values['num_skipped'])} updates were skipped, including this one. {remedy}, use "
        f"precision='bf16', which has the range of float32{look}"
    )


def _remedy(plan: Plan) -> str:
    if plan.precision.loss_scale is not None:
        return "Lower loss_scale.static or make it dynamic (null), or use precision='bf16'"
    if plan.precision.compute_dtype == jnp.float32:
        return "Lower the learning rate, or look at the data"
    return "Lower the learning rate, use precision='fp32', or look at the data"


def compare_peak(step: LiveStateOnly, plan: Plan, memory: Mapping[str, Any]) -> str | None:
    """Compares a device's measured peak memory with the prediction for the compiled step.

    The prediction is the compiler's memory analysis of this step, as `zerojax.forecast` returns it
    for absent GPUs. The step is not compiled again, because JAX caches it. The measured peak is
    that of the whole process, including prefetched batches and the evaluation.

    Args:
      step: compiled step from `build_step(plan)`, which must have been called before.
      plan: plan of the step.
      memory: result of `hardware.devices.device_memory`.

    Returns:
      One line of text. None if devices do not report their memory (virtual CPU devices), or if the
      step consists of several programs (`offload.params: nvme`).
    """
    if memory["source"] != "device" or (plan.offload is not None and plan.offload.paged):
        return None
    compiled = step.lower(plan.abstract_state, plan.abstract_batch).compile()
    predicted, measured = compile_client.memory_of(compiled).peak, memory["peak"]
    return (
        f"peak memory of a device: {trees.format_bytes(measured)} measured, "
        f"{trees.format_bytes(predicted)} predicted ({measured / predicted - 1:+.1%})"
    )


class Trace:
    """A profiler trace of some steps: starts before the first one and stops after the last one."""

    def __init__(self) -> None:
        self._is_on = False

    def follow(self, step: int, result: Tree, wanted: Sequence[int], folder: Path) -> Path | None:
        """Starts or stops the trace; must be called for every step after its dispatch.

        Args:
          step: number of the step.
          result: an output array of the step, on the devices.
          wanted: (first, last) step to trace; empty: no trace.
          folder: folder of the run.

        Returns:
          The folder of the trace if it was written just now; else None.
        """
        if wanted and not self._is_on and step == wanted[0] - 1:
            # Otherwise the trace would contain the end of this step.
            result.block_until_ready()
            jax.profiler.start_trace(str(folder / TRACE_FOLDER))
            self._is_on = True
        elif self._is_on and step >= wanted[1]:
            return self.stop(result, folder)
        return None

    def stop(self, result: Tree, folder: Path) -> Path | None:
        """Stops a running trace after its last step, and returns its folder."""
        if not self._is_on:
            return None
        if result is not None:
            result.block_until_ready()
        self._is_on = False
        jax.profiler.stop_trace()
        return folder / TRACE_FOLDER
