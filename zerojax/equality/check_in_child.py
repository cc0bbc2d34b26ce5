"""Runs an equality check inside the child process: training runs, comparisons and reasons."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from zerojax import optim
from zerojax.config import OptimizerConfig
from zerojax.config.late_dataclasses import dataclass
from zerojax.equality.check_result import CheckResult, ComparedRun, Reason
from zerojax.equality.experiments import (
    Experiments,
    Forward,
    dropout_reason,
    optimizer_reason,
    passes_reason,
    reason_of_state,
)
from zerojax.equality.short_runs import (
    CHAOTIC,
    TOLERANCES,
    CheckInputs,
    Configuration,
    Noise,
    PlainRun,
    RunOutcome,
    compare,
    differing_state,
    largest_noise,
    microbatches_of,
    noise_of,
    plan_of,
    prepare,
    relative_changes,
    reversed_rows,
    run_zerojax,
    starting_one_unit_away,
    with_eight_bits,
    with_initial_arrays,
)
from zerojax.equality.tracing import Relation, line_of_error
from zerojax.models.adapt import as_loss, as_model, evaluation_mode
from zerojax.operators.marks import takes_over_batch, what_needs_all_rows
from zerojax.optim.step_sizes import StepSizes
from zerojax.tracing.protocol import Loss, ModelLike
from zerojax.tracing.reads import line_of_read
from zerojax.tracing.source_lines import is_of_zerojax

MICROBATCHES = 2


@dataclass(frozen=True, kw_only=True)
class Request:
    """Arguments of `zerojax.check`, with batches as NumPy arrays."""

    model: ModelLike
    loss: Loss | None
    optimizer: optax.GradientTransformation | OptimizerConfig | None
    batches: Sequence[Any]
    freeze: tuple[str, ...]
    devices: int
    seed: int
    thorough: bool
    strict: bool
    notes: tuple[str, ...] = ()


def check_here(
    request: Request, progress: Callable[[str], None] = lambda text: None
) -> CheckResult:
    """Runs an equality check in this process, on its CPU devices.

    Args:
      request: arguments of the check.
      progress: function called with the name of each run before the run starts.
    """
    started = time.monotonic()
    check = _Check(request, progress)
    with contextlib.suppress(_Stop):
        check.go()
    differs = [run for run in check.compared if not run.agrees]
    counted = [r for r in check.reasons if request.strict or not r.by_design]
    return CheckResult(
        agrees=not counted and not (differs and not check.reasons),
        reasons=tuple(check.reasons),
        runs=tuple(check.compared),
        notes=tuple(check.notes),
        tolerances=TOLERANCES,
        seconds=time.monotonic() - started,
    )


def configurations(devices: int, thorough: bool) -> list[Configuration]:
    """Returns the configurations of the runs of a check.

    Together the runs cover every ZeRO stage, one and several devices, and one and several
    microbatches; with `thorough`, every combination of them.
    """
    one = Configuration(1, 0, MICROBATCHES)
    many = [Configuration(devices, zero, n) for zero in range(4) for n in (1, MICROBATCHES)]
    if thorough:
        return [Configuration(1), one, *many]
    chosen = {(0, 1), (1, MICROBATCHES), (2, 1), (3, MICROBATCHES)}
    return [one, *(c for c in many if (c.zero, c.num_microbatches) in chosen)]


class _Stop(Exception):
    """Ends a check that cannot continue."""


class _Check:
    def __init__(self, request: Request, progress: Callable[[str], None]):
        self.request, self.progress = request, progress
        self.notes = list(request.notes)
        self.reasons: list[Reason] = []
        self.compared: list[ComparedRun] = []
        self.devices = min(request.devices, len(jax.devices("cpu")))
        self.runs: dict[Configuration, RunOutcome] = {}
        self._noisy = False  # whether the loss is random in evaluation mode, too
        self._references: dict[tuple[int, int], RunOutcome] = {}

    # --- the order of it ----------------------------------------------------------------------

    def go(self) -> None:
        self._read()
        self._start()
        for configuration in self._configurations():
            self._run_and_compare(configuration)
        self._refused()
        experiments = Experiments(self.plain, self.devices)
        if not (all(run.agrees for run in self.compared) and not self._state_differs()):
            self._explain(experiments)
        self._compare_metrics(experiments)

    def _configurations(self) -> list[Configuration]:
        """Returns the runs of the check, with one microbatch if the loss needs all rows."""
        chosen = configurations(self.devices, self.request.thorough)
        if (call := what_needs_all_rows(self.plan.traced.forward.jaxpr)) is None:
            return chosen
        self.notes.append(
            f"all runs have one microbatch, because zerojax.{call} needs all rows at once"
        )
        return list(dict.fromkeys(dataclasses.replace(c, num_microbatches=1) for c in chosen))

    def _read(self) -> None:
        """Converts the request's model, loss and optimizer to zerojax's internal types.

        The learning rate of an `OptimizerConfig` becomes constant, with a note.

        Raises:
          ValueError, TypeError: the model, loss or optimizer is invalid.
        """
        request = self.request
        model = as_model(request.model)
        optimizer = request.optimizer
        if optimizer is None or isinstance(optimizer, OptimizerConfig):
            optimizer = optimizer or OptimizerConfig()
            if optimizer.warmup_steps != 0 or optimizer.schedule != "constant":
                optimizer = dataclasses.replace(
                    optimizer,
                    warmup_steps=0,
                    warmup_tokens=None,
                    schedule="constant",
                    schedule_unit="steps",
                )
                self.notes.append(
                    "the check used a constant learning rate, because a warm-up would change "
                    "parameters too little for a comparison"
                )
        rows = jax.tree.leaves(request.batches[0])[0].shape[0]
        sizes = StepSizes.constant(rows, why_unknown="the rate is constant in a check")
        built = optim.build_optimizer(optimizer, len(request.batches), sizes)
        self.given = CheckInputs(
            model=model,
            loss=as_loss(request.loss, model),
            tx=built.tx,
            batches=request.batches,
            freeze=request.freeze,
            seed=request.seed,
        )

    def _start(self) -> None:
        """Runs the reference training in plain JAX, and measures its rounding noise."""
        self.progress("plain JAX, 1 device")
        try:
            self.plan = plan_of(self.given, Configuration(1))
            self.plain = PlainRun(self.given, self.plan)
        except Exception as error:
            self._refuse(Configuration(1), error)
            self._refused()
            raise _Stop from error
        try:
            self.reference = self.plain.run()
            self._over_batch = takes_over_batch(self.plan.traced.forward.jaxpr)
        except Exception as error:
            self._refuse(Configuration(0), error)
            self._refused()
            raise _Stop from error
        if (
            not np.isfinite(self.reference.losses).all()
            or not np.isfinite(self.reference.norms).all()
        ):
            self.reasons.append(_not_finite(self.reference))
            raise _Stop
        before = self.plain.params
        whole = {**before, **self.plain.frozen}
        self.given = dataclasses.replace(
            self.given,
            model=with_initial_arrays(self.given.model, whole, self.plain.extras),
            before=before,
        )
        self.noise = noise_of(self.plain, self.reference)
        if self.given.model.overwritten:
            self.noise = with_eight_bits(self.noise)
            self.notes.append("tolerances are wider, as neighbouring 8-bit values are 6 % apart")
        if self.noise.chaotic:
            names = ", ".join(self.noise.chaotic[:3])
            self.notes.append(
                f"not compared: {names}{', ...' if len(self.noise.chaotic) > 3 else ''}, whose "
                "gradient is rounding noise (true gradient 0)"
            )
        if not any(np.any(self.reference.after[n] != x) for n, x in before.items()):
            self.notes.append(
                f"updates were not compared, as no parameter changed in {len(self.given.batches)} "
                "steps; does the learning rate start at 0?"
            )

    def _reference_of(self, configuration: Configuration) -> tuple[RunOutcome, str]:
        """Returns (the plain JAX run to compare a zerojax run with, the name of the plain JAX run).

        A sum over the batch (`zerojax.batch_mean`) covers one microbatch. A run with several
        microbatches is therefore compared with plain JAX that accumulates the gradients of the same
        microbatches.
        """
        if not self._over_batch or configuration.num_microbatches == 1:
            return self.reference, Configuration(0).name
        same = configuration.devices, configuration.num_microbatches
        if same not in self._references:
            self._references[same] = self.plain.run(cut=_microbatches_in(configuration))
        return self._references[same], f"{Configuration(0).name}, the same microbatches"

    def _run_and_compare(self, configuration: Configuration) -> None:
        self.progress(configuration.name)
        try:
            run = run_zerojax(self.given, configuration)
        except Exception as error:
            self._refuse(configuration, error)
            return
        self.runs[configuration] = run
        reference, against = self._reference_of(configuration)
        found = compare(
            run,
            reference,
            self.given.before,
            name=configuration.name,
            against=against,
            noise=self.noise,
        )
        state = differing_state(run, reference)
        self.compared.append(dataclasses.replace(found, state=state))

    # --- what is refused ----------------------------------------------------------------------

    def _refuse(self, configuration: Configuration, error: Exception) -> None:
        run = ComparedRun(configuration.name, "-", False, refusal=_sentence(error))
        self.compared.append(run)
        self._errors = [*getattr(self, "_errors", []), (configuration, error)]

    def _refused(self) -> None:
        """Adds a reason for each distinct error message of refused runs, ignoring numbers in it."""
        seen: dict[str, list[tuple[Configuration, Exception]]] = {}
        for configuration, error in getattr(self, "_errors", []):
            alike = re.sub(r"\d[\d.,e+-]*", "#", _sentence(error))
            seen.setdefault(alike, []).append((configuration, error))
        for (first, error), *others in seen.values():
            names = "; ".join(configuration.name for configuration, _ in others)
            deliberate = isinstance(error, ValueError | TypeError) and is_of_zerojax(error)
            self.reasons.append(
                Reason(
                    "refused" if deliberate else "failed",
                    f"{_sentence(error)} ({first.name}{f'; likewise {names}' if names else ''})",
                    "follow the message above"
                    if deliberate
                    else "see the line. The loss gets the rows of one microbatch on one device, "
                    "which are fewer than those of the batch; zerojax.gather_batch(x) has all of "
                    "them. If plain JAX with as many rows does not raise it, it is a defect of "
                    "zerojax",
                    line_of_error(error),
                )
            )

    # --- why runs differ ----------------------------------------------------------------------

    def _state_differs(self) -> list[str]:
        names = dict.fromkeys(name for run in self.compared for name in run.state)
        return [name for name in names if name not in self.given.model.overwritten]

    def _refused_state(self) -> list[str]:
        """Returns the names of the model's integer arrays that an error message of a run
        contains."""
        sentences = [run.refusal for run in self.compared if run.refusal is not None]
        return [
            name
            for name, value in self.plain.extras.items()
            if not jax.dtypes.issubdtype(value.dtype, np.inexact)
            and any(name in x for x in sentences)
        ]

    def _compare_metrics(self, experiments: Experiments) -> None:
        """Adds notes on metrics of the loss whose values depend on the number of parts of the
        batch."""
        if self._noisy or not self.plan.traced.metric_names or hasattr(self, "_errors"):
            return
        for name, (whole, pieces) in experiments.metrics(train=False).items():
            self.notes.append(
                f"the metric {name!r} is {whole:.6g} for the whole batch and {pieces:.6g} for "
                f"{self.devices} parts of the batch; training does not depend on it. Return the "
                "metric as a pair "
                "(sum, weight), or compute it after the step from means"
            )

    def _explain(self, experiments: Experiments) -> None:
        self.progress("looking for the reason")
        differing = [run for run in self.compared if not run.agrees and run.refusal is None]
        random = experiments.is_random(train=True)
        quiet = random and not experiments.is_random(train=False)
        self._noisy = random and not quiet
        try:
            analysed = experiments.forward(train=not random)
        except Exception:
            if not hasattr(self, "_errors"):
                raise
            return  # the loss takes no part of so few rows, as the error of a run says
        before = len(self.reasons)
        if random and differing:
            self.reasons.append(dropout_reason(quiet=quiet))
        own = experiments.forward(train=True) if random else analysed
        self._explain_state(own.state, own.places)
        statistics = any(reason.kind == "batch_statistics" for reason in self.reasons[before:])
        if not differing:
            if before and analysed.reason is not None:
                self.reasons.append(analysed.reason)  # contains the line that the plan refused
            return
        if random or (statistics and analysed.reason is not None):
            self._control(experiments, possible=quiet or not random)
            return
        self._explain_numbers(experiments, analysed, train=True)

    def _explain_state(
        self, relations: Mapping[str, Relation], places: Mapping[str, str | None]
    ) -> None:
        found: dict[str, Reason] = {}
        for name in dict.fromkeys([*self._state_differs(), *self._refused_state()]):
            relation = relations.get(name)
            if relation is None:
                continue
            value = self.plain.extras[name]
            reason = reason_of_state(name, relation, value, places.get(name))
            if reason is not None:
                found.setdefault(reason.kind, reason)
        self.reasons += found.values()

    def _explain_numbers(self, experiments: Experiments, forward: Forward, *, train: bool) -> None:
        """Adds the reasons for differing losses, gradients or updates."""
        found = [
            forward.reason,
            experiments.weight_gradient(train=train),
            experiments.backward(train=train),
        ]
        found = [reason for reason in found if reason is not None]
        if not found:
            reason = self._passes(forward) or self._optimizer(train=train)
            found = [reason] if reason is not None else []
        self.reasons += found or [self._unknown()]

    def _passes(self, forward: Forward) -> Reason | None:
        """Returns a reason if runs differ only because each microbatch updates the model's
        state."""
        names = [x for x in self._state_differs() if forward.state.get(x) is Relation.SAME]
        differing = [
            configuration
            for configuration, run in self.runs.items()
            if not self._agree(run, self._reference_of(configuration)[0])
        ]
        if not names or any(configuration.num_microbatches == 1 for configuration in differing):
            return None
        self.progress("plain JAX, 1 device, the same microbatches")
        for configuration in differing:
            in_turn = self.plain.run(cut=_microbatches_in(configuration))
            if not self._agree(self.runs[configuration], in_turn):
                return None
        return passes_reason(names)

    def _optimizer(self, *, train: bool) -> Reason | None:
        """Returns a reason if the user's optimizer alone makes runs differ.

        In that case runs on one and on several devices agree when SGD replaces the optimizer.
        """
        differing = [
            configuration
            for configuration, run in self.runs.items()
            if not self._agree(run, self._reference_of(configuration)[0])
            and not (self._over_batch and configuration.num_microbatches > 1)
        ]
        # With zero=0 no parameter is split, so the difference has another reason.
        if not differing or any(configuration.zero == 0 for configuration in differing):
            return None
        worst = max(differing, key=lambda c: (c.zero, -c.num_microbatches))
        self.progress(f"{worst.name}: gradients alone")
        bare = [
            run_zerojax(self.given, dataclasses.replace(c, optimizer=False, train=train), steps=1)
            for c in (Configuration(1), worst)
        ]
        if not self._agree(bare[1], bare[0]):
            return None
        changes = relative_changes(self.runs[worst], self.reference, self.given.before)
        names = sorted(
            (n for n, x in changes.items() if TOLERANCES["params"] < x),
            key=lambda n: -changes[n],
        )
        if not names:
            return None
        origin = getattr(self.given.tx.update, "__module__", "optax")
        return optimizer_reason(names, changes[names[0]], f"its update is of {origin}")

    def _agree(self, run: RunOutcome, reference: RunOutcome) -> bool:
        return compare(run, reference, self.given.before, noise=self.noise).agrees

    def _control(self, experiments: Experiments, *, possible: bool) -> None:
        """Runs controls: compares each ZeRO stage with stage 0, and trains in evaluation mode if
        that is `possible`, because the loss is not random then."""
        self._stages_agree()
        if not possible:
            self.notes.append(
                "the loss is random in evaluation mode too, so ZeRO stages were compared only with "
                "each other"
            )
            return
        self.progress("plain JAX, 1 device, in evaluation mode")
        given = dataclasses.replace(self.given, model=evaluation_mode(self.given.model))
        plain = PlainRun(given, self.plan)
        reference = plain.run()
        noise = noise_of(plain, reference)
        agree = True
        for zero, number in ((0, 1), (3, MICROBATCHES)):
            configuration = Configuration(self.devices, zero, number, train=False)
            self.progress(f"{configuration.name}, in evaluation mode")
            apart = self._over_batch and number > 1
            found = compare(
                run_zerojax(self.given, configuration),
                plain.run(cut=_microbatches_in(configuration)) if apart else reference,
                given.before,
                name=configuration.name,
                against=Configuration(0).name,
                noise=noise,
                mode="evaluation",
            )
            self.compared.append(found)
            agree &= found.agrees
        if not agree:
            forward = experiments.forward(train=False)
            self._explain_numbers(experiments, forward, train=False)

    def _stages_agree(self) -> None:
        """Compares each ZeRO stage with stage 0 on the same devices and number of microbatches."""
        noises: dict[Configuration, Noise | None] = {}
        bases: dict[Configuration, RunOutcome] = {}
        for configuration, run in self.runs.items():
            base = dataclasses.replace(configuration, zero=0)
            if configuration.zero == 0:
                continue
            if base not in bases:
                self.progress(base.name)
                prepared = prepare(self.given, base)
                bases[base] = run_zerojax(self.given, base, prepared=prepared)
                # The same parts in reverse order, so that statistics of each part do not change.
                turned = [reversed_rows(batch) for batch in self.given.batches]
                turned = dataclasses.replace(self.given, batches=turned)
                again = (
                    run_zerojax(turned, base, prepared=prepared),
                    run_zerojax(self.given, base, prepared=starting_one_unit_away(prepared)),
                )
                noises[base] = largest_noise(bases[base], again, self.given.before)
            noise = noises[base]
            if noise is None:
                # The loss is random. If the true gradient is 0, the change is only rounding.
                changes = relative_changes(run, bases[base], self.given.before)
                noise = Noise(0.0, 0.0, {n: 1.0 for n, x in changes.items() if x > CHAOTIC})
            found = compare(
                run,
                bases[base],
                self.given.before,
                name=f"{configuration.name}, compared with zero=0",
                against=base.name,
                noise=noise,
            )
            self.compared.append(found)
            if not found.agrees:
                self.reasons.append(self._unknown(found))

    def _unknown(self, run: ComparedRun | None = None) -> Reason:
        """Returns the reason to report for a difference whose cause no experiment found.

        Args:
          run: the differing run; None takes the first one.
        """
        differing = [run for run in self.compared if not run.agrees and run.refusal is None]
        first = run or next(iter(differing), None)
        most = ""
        if first is not None and first.worst:
            line = line_of_read(self.plan.traced.forward.jaxpr, {first.worst})
            most = f", most in the parameter {first.worst}{f' ({line})' if line else ''}"
        which = "" if first is None else f" A run that differs: {first.name}{most}"
        return Reason(
            "unknown",
            f"runs differ, and no experiment found the reason.{which}",
            "look at the table; if the model is right, this is a defect of zerojax: please report "
            "it with the model",
        )


def _microbatches_in(configuration: Configuration) -> Callable[[Any], list[Any]]:
    """Returns a function that splits a batch into the microbatches of a run."""
    return lambda batch: microbatches_of(batch, configuration)


def _not_finite(reference: RunOutcome) -> Reason:
    steps = np.flatnonzero(~(np.isfinite(reference.losses) & np.isfinite(reference.norms)))
    return Reason(
        "not_finite",
        f"loss or gradient is not finite at step {int(steps[0])} in plain JAX on one device",
        "fix this first (possible causes: a logarithm of 0 or a division by 0, a learning rate "
        "that is too large, token "
        "ids outside of the embedding); nothing was compared",
    )


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    ours = isinstance(error, ValueError | TypeError) and is_of_zerojax(error)
    return text[:600] if ours else f"{type(error).__name__}: {text[:600]}"
