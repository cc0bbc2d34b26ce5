"""Checks program rules of a plan: `zerojax.expect`, for tests, and the report of `zerojax plan`."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import Mesh

from zerojax.config import ExpectConfig, from_dict, to_dict
from zerojax.config.checks import check_kind, names_keywords
from zerojax.config.late_dataclasses import dataclass
from zerojax.forecasting.compiled_facts import axes_of
from zerojax.forecasting.compiled_step import Forecast, forecast_step
from zerojax.forecasting.hlo import find_collectives, read_program
from zerojax.forecasting.program_rules.rule_checks import check_rules
from zerojax.forecasting.program_rules.rule_results import (
    CheckedRule,
    ExpectationError,
    Violation,
)
from zerojax.forecasting.step_contents import (
    StepContents,
    contents_of,
    lines_in_programs,
    read_sent,
)
from zerojax.hardware import compile_client
from zerojax.hardware.gpus import Gpu
from zerojax.operators.cudnn_attention import FORWARD
from zerojax.placement.device_mesh import has_nvidia_gpus
from zerojax.plan.make import Plan, require_plan
from zerojax.step.build import build_step

_WIDTH = 100
_LESS_WORK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclass(frozen=True, kw_only=True)
class CheckedStep:
    """Program rules and what a compiled step has of them; `print(checked.page())`.

    Attributes:
      rules: each rule that is set, with the value found.
      contents: what was read from the step.
      plan: of the step, on the mesh that it was compiled for.
      forecast: of the step; None if it was compiled for devices of this process.
    """

    rules: tuple[CheckedRule, ...]
    contents: StepContents
    plan: Plan
    forecast: Forecast | None = None

    @property
    def violations(self) -> tuple[Violation, ...]:
        """All violations, in the order of the rules."""
        return tuple(one for rule in self.rules for one in rule.violations)

    def page(self) -> str:
        """Returns one line for each rule that is kept, and every violation."""
        lines = [f"EXPECT, {len(self.rules)} rules of the compiled step"]
        for rule in self.rules:
            if not rule.violations:
                lines += _wrapped(f"kept {rule.rule}: {rule.value}; {rule.limit}")
            for violation in rule.violations:
                lines += _wrapped(f"VIOLATED {violation.describe()}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Returns the rules and violations for JSON."""
        return {"rules": [dataclasses.asdict(rule) for rule in self.rules]}


@names_keywords(also=[field.name for field in dataclasses.fields(ExpectConfig)])
def expect(
    plan: Plan,
    rules: ExpectConfig | Mapping[str, Any] | None = None,
    *,
    gpu: Gpu | str | None = None,
    devices: int | None = None,
    **fields: Any,
) -> CheckedStep:
    """Checks rules that the compiled training step of a plan must keep. Nothing is run.

    Without `gpu` the step is compiled for the devices of the plan, CPU devices too; with it for
    GPUs that need not be there (`zerojax[plan]`).

    Args:
      plan: from `make_plan`.
      rules: an `ExpectConfig` or its fields; None: all of them by keyword.
      gpu: a card's name ("h100"), its YAML file, or a `Gpu`.
      devices: number of GPUs; None: as many as in the plan's mesh.
      **fields: fields of `ExpectConfig` that are added to `rules`, such as max_peak_gib=70.

    Returns:
      Each rule with the value that was found.

    Raises:
      ExpectationError: at least one rule is violated; an `AssertionError` that lists all
        violations, each with its value, limit, collective and line.
      ValueError: no rule is set, a rule cannot be checked for these devices, or an invalid value.
      CompilerMissing: `gpu` is given and the compile-only client is not installed.
    """
    checked = check_step(require_plan(plan, "expect"), _config(rules, fields), gpu, devices)
    if checked.violations:
        raise ExpectationError(checked.violations)
    return checked


def _config(rules: ExpectConfig | Mapping[str, Any] | None, fields: dict[str, Any]) -> ExpectConfig:
    check_kind("rules", rules, (ExpectConfig, Mapping), "an ExpectConfig or its fields")
    base = to_dict(rules) if isinstance(rules, ExpectConfig) else dict(rules or {})
    pattern = fields.get("no_gather")
    if isinstance(pattern, str):
        # One pattern may be given as a text, which would else be read as a sequence of characters.
        fields = {**fields, "no_gather": (pattern,)}
    config = from_dict(ExpectConfig, {**base, **fields})
    # A check without a rule cannot fail, so a typing error would pass unseen.
    if not config.names:
        names = ", ".join(field.name for field in dataclasses.fields(ExpectConfig))
        raise ValueError(f"expect has no rule to check; set one of {names}")
    return config


def check_step(
    plan: Plan,
    expected: ExpectConfig,
    gpu: Gpu | str | None = None,
    devices: int | None = None,
    *,
    fast: bool = True,
    progress: Callable[[str], None] | None = None,
) -> CheckedStep:
    """Compiles a plan's step, reads it and checks rules; returns also violated ones.

    Args:
      plan, gpu, devices: as in `expect`.
      expected: the rules; none may be set.
      fast, progress: as in `zerojax.forecast`.

    Raises:
      ValueError, CompilerMissing: as in `expect`.
    """
    if gpu is not None:
        step = forecast_step(
            plan, gpu=gpu, devices=devices, fast=fast, progress=progress, with_contents=True
        )
        # Formulas cannot keep or break a rule about a compiled step.
        if step.contents is None:
            raise compile_client.CompilerMissing(
                f"rules are checked in the compiled step, but {step.forecast.why_formula}"
            )
        rules = check_rules(step.contents, step.plan, expected)
        return CheckedStep(
            rules=rules, contents=step.contents, plan=step.plan, forecast=step.forecast
        )
    if devices is not None and devices != plan.mesh.size:
        raise ValueError(
            f"devices={devices}, but the plan has {plan.mesh.size}; give gpu= to compile for "
            "absent devices, or leave devices out"
        )
    contents = _contents_here(plan)
    return CheckedStep(rules=check_rules(contents, plan, expected), contents=contents, plan=plan)


def _contents_here(plan: Plan) -> StepContents:
    """Compiles a plan's step for the devices of its mesh, and reads it."""
    if not isinstance(plan.mesh, Mesh):
        raise ValueError(
            "the plan's mesh is abstract, so there is no device to compile for; give gpu=, such "
            'as gpu="h100", or make the plan with zerojax.make_mesh'
        )
    traced = build_step(plan).trace(plan.abstract_state, plan.abstract_batch)
    # Lines are lost in the text of a program unless they are asked for before it is lowered.
    with lines_in_programs():
        lowered = traced.lower()
    # On CPUs, options that change the machine code only: half the time to compile.
    on_gpus = has_nvidia_gpus(plan.mesh)
    options = {} if on_gpus else _LESS_WORK
    compiled = compile_client.compile_for_gpus(lowered, options=options)
    program = read_program(compiled.text)
    collectives = find_collectives(program, plan.mesh.size)
    axes = {one.name: axes_of(one.group, plan.mesh) for one in collectives}
    return contents_of(
        plan,
        traced.jaxpr,
        read_sent(program, collectives, axes, plan),
        peak=compiled.memory.peak,
        wire_bytes=sum(one.wire_bytes * one.times for one in collectives),
        # Which devices share a node is known for the GPUs of a card only.
        network_bytes=None,
        calls_cudnn=FORWARD in compiled.text,
        on_gpus=on_gpus,
    )


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent="  - ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
