"""Chooses the offload with which a run fits its GPUs and its step should take the least time
(`offload.auto`), by compiling its step.

Choices are tried in order of the bytes that they move per step: no offload, parts of the state in
host memory, and last files. A choice that fits rules out all that move the same and more. The
others are compiled unless formulas show that they do not fit or are not faster.

Several processes try the choices together. Each compares a choice with the host memory and the disk
of its own machine, and one that fits not everywhere is ruled out; process 0 alone compiles.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from zerojax.checkpoint.agreement import computed_by_process_0, first_text
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.mesh import DEVICE, HOST, NVME, OffloadConfig
from zerojax.forecasting.compiled_step import forecast
from zerojax.forecasting.forecast_numbers import ForecastNumbers, Verdict
from zerojax.forecasting.settings_search.candidates import bounds_of
from zerojax.forecasting.settings_search.rounds import (
    LEAST_SHARE,
    OFFLOADS,
    offload_words,
    share_that_fits,
)
from zerojax.hardware import compile_client
from zerojax.hardware.compile_client import CompileError
from zerojax.hardware.gpus import Gpu
from zerojax.plan.make import Plan, Remake
from zerojax.tracing.trees import format_bytes

FILES: tuple[Mapping[str, Any], ...] = (
    {"opt_state": NVME, "params": NVME},
    {"opt_state": NVME, "params": NVME, "activations": NVME},
)
"""Choices with files, the least transfers per step first."""

_STATE_ON_HOST = {"opt_state": HOST}
Compile = Callable[[Plan], ForecastNumbers]


@dataclass(frozen=True)
class OffloadChoice:
    """The plan of a run with the least offload that fits.

    Attributes:
      plan: with the chosen offload; its reasons contain `sentence`.
      sentence: the choice, and why other choices were ruled out.
    """

    plan: Plan
    sentence: str


def choose_offload(
    plan_with: Callable[[OffloadConfig], Plan],
    asked: OffloadConfig,
    gpu: Gpu,
    *,
    files: bool,
    check: Callable[[Plan], None] = lambda plan: None,
    compile_plan: Compile | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> OffloadChoice:
    """Returns the plan of a run with the offload that fits and has the shortest expected step.

    Collective, if the job has several processes.

    Args:
      plan_with: plans the run with the given offload; raises ValueError where that is impossible.
      asked: settings of the run, with `auto`.
      gpu: the card.
      files: whether files may be used, which need a folder.
      check: raises ValueError if the plan needs more host memory or disk space than is free for
        this process.
      compile_plan: plan -> forecast of its compiled step; None uses `forecast`.
      report: called with a few words about each stage of the work.

    Raises:
      ValueError: no choice fits, or the run cannot be planned without offload.
    """
    compile_plan = compile_plan or (lambda plan: forecast(plan, gpu=gpu, fast=True))
    files = computed_by_process_0(lambda: files)
    search = _Choice(plan_with, asked, gpu, check, compile_plan, report)
    for fields in ({}, *OFFLOADS, *(FILES if files else ())):
        # What is at least as far away moves at least as many bytes, so it cannot be faster.
        if search.best is None or not _moves_as_much(fields, search.best.fields):
            search.consider(fields)
    if search.best is not None:
        return search.found(search.best)
    more = "" if files else ", or set offload.folder, which permits files"
    raise ValueError(
        f"offload.auto: the step does not fit {gpu.title} with any offload; {search.why()}; use "
        f"more devices, a smaller batch or more microbatches{more}"
    )


def plan_choosing_offload(
    make: Callable[[OffloadConfig], Plan],
    asked: OffloadConfig,
    gpu: Gpu | None,
    *,
    check: Callable[[Plan], None] = lambda plan: None,
    report: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Returns the plan of a run whose offload may be `auto`.

    Args:
      make: plans the run with the given offload.
      asked: settings of the run.
      gpu: the card; None (a CPU, or a card without a description): `auto` offloads nothing, and a
        reason says so.
      check, report: as in `choose_offload`.

    Raises:
      ValueError: as in `choose_offload`.
      CompilerMissing: `auto` needs the compile-only client, which is not installed.
    """
    if not asked.auto:
        return make(asked)
    if gpu is None:
        why = (
            "offload.auto: nothing is offloaded, because the memory size of the devices is unknown"
            # The memory of the card is unknown, so it cannot be asked whether a step fits.
        )
        return _with_reason(make(asked.chosen()), why)
    missing = computed_by_process_0(compile_client.missing)
    if missing is not None:
        raise compile_client.CompilerMissing(f"offload.auto compares compiled plans, but {missing}")
    files = asked.folder is not None
    return choose_offload(make, asked, gpu, files=files, check=check, report=report).plan


def _with_reason(plan: Plan, reason: str) -> Plan:
    assert isinstance(plan.remake, Remake)
    inputs = dataclasses.replace(plan.inputs, reasons=(*plan.inputs.reasons, reason))
    remake = dataclasses.replace(plan.remake, inputs=inputs)
    return dataclasses.replace(plan, reasons=(*plan.reasons, reason), remake=remake)


@dataclass(frozen=True)
class _Fitting:
    """An offload that fits: its fields of `OffloadConfig`, its plan, and the expected seconds of a
    step, infinite if unknown."""

    fields: Mapping[str, Any]
    plan: Plan
    seconds: float


@dataclasses.dataclass
class _Choice:
    """State of one choice: the best offload so far, and a clause for each that was ruled out."""

    plan_with: Callable[[OffloadConfig], Plan]
    asked: OffloadConfig
    gpu: Gpu
    check: Callable[[Plan], None]
    compile_plan: Compile
    report: Callable[[str], None]
    best: _Fitting | None = None
    ruled_out: list[str] = dataclasses.field(default_factory=list)

    def consider(self, fields: Mapping[str, Any]) -> None:
        """Makes these fields of `OffloadConfig` the best so far if they fit and are faster, or
        notes why not."""
        error, found = None, {}
        # Every process must reach the calls below together, so an error of one is shared before it
        # is raised.
        try:
            plan = self.plan_with(self.asked.chosen(**fields))
            self.check(plan)
        except ValueError as caught:
            error = caught
        why = first_text(None if error is None else str(error))
        # A run that cannot be planned without offload has another fault, which no offload repairs.
        if why is not None and not fields:  # not a question of offload
            raise error or ValueError(why)
        if why is None:
            found = computed_by_process_0(lambda: self.judge(plan, fields))
            why = found.get("why")
        if why is not None:
            self.ruled_out.append(f"{_name(fields)}: {why}")
            return
        # The new choice is the faster one: `judge` rules out all that are not.
        if self.best is not None:
            self.ruled_out.append(f"{_name(self.best.fields)}: a longer step")
        self.best = _Fitting(fields, plan, _or_infinite(found["seconds"]))
        if fields == _STATE_ON_HOST:
            self.try_share(self.best, found["share"])

    def judge(self, plan: Plan, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Returns {"why": reason against a plan}, or {"seconds": expected seconds of a step,
        "share": share of the optimizer's state that would fit on the device}."""
        most = math.inf if self.best is None else self.best.seconds
        # The bound costs a plan and no compilation, so it is asked first.
        if self.best is not None and bounds_of(plan, self.gpu, 1.0).seconds >= most:
            return {"why": self.slower()}
        # Formulas leave out activations: what does not fit by them cannot fit when it is compiled.
        bound = forecast(plan, gpu=self.gpu, why_formula="a bound rules out what cannot fit")
        if bound.verdict.fits is False:
            return {"why": _needs(bound.verdict)}
        self.report(f"compiling with {_name(fields)}")
        try:
            found = self.compile_plan(plan)
        # A choice that the compiler rejects must not end the search for others.
        except CompileError as error:
            return {"why": str(error)}
        if not found.verdict.fits:
            return {"why": _needs(found.verdict)}
        seconds = found.estimate.expected_seconds
        if self.best is not None and _or_infinite(seconds) >= most:
            return {"why": self.slower()}
        share = share_that_fits(plan, found) if fields == _STATE_ON_HOST else 0.0
        return {"seconds": seconds, "share": share}

    def slower(self) -> str:
        """Says that an offload should not be faster than the best one."""
        assert self.best is not None
        return f"should not be faster than {_name(self.best.fields)}"

    def try_share(self, whole: _Fitting, share: float) -> None:
        """Makes a share of the optimizer's state on the device the best choice, if that fits and is
        not slower.

        Args:
          whole: the choice with the whole state in host memory.
          share: on the device, from `judge`.
        """
        if share < LEAST_SHARE:
            return
        fields = {"opt_state": ((DEVICE, share), (HOST, round(1 - share, 2)))}
        try:
            plan = self.plan_with(self.asked.chosen(**fields))
        # A share is an improvement of a choice that fits; without it the run can go on.
        except ValueError:
            return
        fits, seconds = computed_by_process_0(lambda: self.fits(plan, fields))
        if fits and (seconds is None or seconds <= whole.seconds):
            self.best = dataclasses.replace(whole, plan=plan, seconds=_or_infinite(seconds))

    def fits(self, plan: Plan, fields: Mapping[str, Any]) -> tuple[bool, float | None]:
        """Returns whether the compiled step of a plan fits, and its expected seconds; None if
        unknown."""
        self.report(f"compiling with {_name(fields)}")
        try:
            found = self.compile_plan(plan)
        except (CompileError, ValueError):
            return False, None
        return bool(found.verdict.fits), found.estimate.expected_seconds

    def found(self, best: _Fitting) -> OffloadChoice:
        """Returns the choice with its sentence."""
        plan = best.plan
        offload = plan.settings.offload
        # The words are of the plan, because a share of the state has replaced the fields of
        # `best`.
        fields = {
            name: value
            for name in ("opt_state", "params", "activations")
            if (value := getattr(offload, name)) != DEVICE
        }
        sentence = f"offload.auto: {_name(fields)}"
        if self.ruled_out:
            sentence += f"; ruled out: {self.why()}"
        return OffloadChoice(_with_reason(plan, sentence), sentence)

    def why(self) -> str:
        """Returns why each offload that was considered was ruled out."""
        return "; ".join(self.ruled_out)


def _or_infinite(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds


def _moves_as_much(fields: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Returns whether fields of `OffloadConfig` put each part of the state at least as far away as
    others do."""
    far = [DEVICE, HOST, NVME]
    return all(far.index(fields.get(name, DEVICE)) >= far.index(to) for name, to in others.items())


def _name(fields: Mapping[str, Any]) -> str:
    return ", ".join(offload_words(fields)) or "no offload"


def _needs(verdict: Verdict) -> str:
    return (
        f"needs {format_bytes(verdict.needed)} of the {format_bytes(verdict.limit)} that JAX may "
        "use"
    )
