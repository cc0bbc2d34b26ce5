"""Defines `Trainer`: the training loop with its state, batches, log and checkpoints.

It uses the same five public functions as a training loop that a user writes: `make_mesh`,
`make_plan` (through `replan`), `init_state`, `build_step` and `shard_batch`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import jax

from zerojax.checkpoint import Checkpointer, CheckpointError, named_step
from zerojax.checkpoint.base_weights import BaseWeights
from zerojax.checkpoint.store import StoreError
from zerojax.data import Feed, RowSource, as_feed, local_rows, one_pass, prefetch
from zerojax.data.regrouped_feed import in_sizes
from zerojax.hardware.local_devices import device_memory
from zerojax.optim import EMA, EmaState, Weights
from zerojax.placement.user_shardings import on_mesh_of_plan
from zerojax.plan.make import Plan
from zerojax.runtime.distributed import PeerLostError, is_peer_loss
from zerojax.runtime.preemption import Interrupted, StopRequest
from zerojax.runtime.standstill import WAITING_FOR_DATA
from zerojax.runtime.watchdog import Watchdog
from zerojax.step.reshard import with_weights
from zerojax.tracing.trees import num_bytes
from zerojax.training.checkpointing import (
    as_begun,
    check_data_state,
    end_state,
    save_state,
)
from zerojax.training.evaluation import NoWeightError, mean_loss, of_ema
from zerojax.training.loop_notes import (
    describe_loss_of_stop,
    note_if_donated,
    say_epochs,
    say_if_done,
    say_if_short,
    say_unsaved,
)
from zerojax.training.metrics.stragglers import DATA, EVAL, SAVE
from zerojax.training.process_agreement import check_regrouping, divide_batches
from zerojax.training.reporting import Metrics, compare_peak
from zerojax.training.resumed_settings import NEXT_RATE, next_rate
from zerojax.training.run_generation import (
    ModelReader,
    RunGenerator,
    check_request,
    end_tokens_of,
    log_samples,
)
from zerojax.training.run_spec import RunSpec
from zerojax.training.step_runner import StepRunner
from zerojax.training.validation import Filler
from zerojax.zoo.text_generation import BATCH_SIZE

Callback = Callable[["Trainer", Metrics], Any]
SMALL_BATCH = 1 << 16
"""Size in bytes up to which eight batches are read ahead instead of two. Tiny models have such
batches, and with eight their loop takes a tenth less time: threads take fewer turns."""
CALLBACKS = "callbacks"
"""Key for the states of callbacks in a checkpoint's configuration."""


class Trainer(StepRunner):
    """A training run with its state. Created by `zerojax.train`.

    Args:
      plan: plan of the run, on devices of this machine.
      spec: description of the run from which `plan` was made; None: inputs of the plan, without log
        and validation data.
      checkpointer: checkpointer of the run; its newest checkpoint is restored if there is one.
      watchdog: watchdog that supervises the run; None: no time limits.
      base: frozen weights that checkpoints do not store.

    Attributes:
      plan: current plan; `reshard` replaces it.
      state: current train state, in which no update waits. It is donated to each step, so do not
        keep references to its arrays.
      num_steps: number of batches consumed.
      metrics: metrics of the last report, on the host.
      history: metrics of every report, oldest first.
      evaluations: metrics of every evaluation on the run's validation data, oldest first, each with
        its "step".
      evaluation_names: names of the evaluation metrics, known from the first step on; empty without
        validation data.
      jitted_step: compiled step of the current plan; if steps have several sizes, of the last
        step.
      step_plan: plan of `jitted_step`.
    """

    def __init__(
        self,
        plan: Plan,
        spec: RunSpec | None = None,
        *,
        checkpointer: Checkpointer | None = None,
        watchdog: Watchdog | None = None,
        base: BaseWeights | None = None,
    ) -> None:
        super().__init__(plan, spec, watchdog=watchdog)
        self.loop_settings = self._spec.loop
        self.evaluations: list[Metrics] = []
        self.evaluation_names: frozenset[str] = frozenset()
        self._checkpointer = checkpointer
        self._validation = self._spec.validation
        self._feed: tuple[Any, Feed] | None = None
        self._epochs: dict[str, int] = {}
        self._saved_step: int | None = None
        self._base = base
        self._base_of_state: BaseWeights | None = None
        """Frozen weights of this state that come from the pretrained folder."""
        self._said_unsaved = False
        self._sampled_step: int | None = None
        self._stop: StopRequest | None = None
        latest = None if checkpointer is None else checkpointer.usable_step()
        if self.begin(latest):
            self._base_of_state = None if base is None else as_begun(base, plan, self.state)
            # Durable files may hold a later step than the checkpoints.
            self._saved_step = latest if self.num_steps == latest else None
        else:
            self.restore()  # no new state is made, so two states never exist at the same time

    def _build(self) -> None:
        super()._build()
        self._filler = Filler(self.plan)
        self._reader = ModelReader(self.plan)

    def __repr__(self) -> str:
        loss = self.metrics.get("loss")
        parts = [f"{self.num_steps} steps", *([] if loss is None else [f"loss {loss:.4g}"])]
        saved = "no checkpoints" if self._checkpointer is None else self._checkpointer.path
        return f"Trainer({', '.join(parts)}, {self.plan.describe()}, {saved})"

    # --- stepping ---------------------------------------------------------------------------------

    @on_mesh_of_plan
    def fit(self, batches: Any, steps: int | None = None) -> Self:
        """Trains until the run has consumed `steps` batches in total, or the batches end.

        Args:
          batches: batches in any form that `zerojax.data.as_feed` takes.
          steps: total number of steps of the run, including steps before a resume; None: until the
            batches end. A list ends after one pass. Text and functions never end; a callback can
            end the run by returning True.

        Raises:
          Interrupted: Ctrl-C or SIGTERM; the state was saved first if the run has checkpoints.
          FloatingPointError: loss or gradients were not finite in too many reports.
        """
        if steps is None:
            batches, count = one_pass(batches)
            if count is not None:
                self.plan.inputs.features.check_steps(None)
            # A run that was resumed within a pass over the batches ends with that pass.
            steps = count if count is None else self.num_steps - self.num_steps % count + count
        feed, self._last_step = self._as_feed(batches), steps
        before = self.num_steps, int(self.held_state["skipped"])
        with self._watchdog, self._logging(steps), self._failing_well():
            say_if_done(self._log, self.num_steps, steps)
            self._say_if_nothing_is_saved()
            with self._stopping() as stop:
                if steps is None or self.num_steps < steps:
                    self._try_evaluation()
                    self._log_samples()
                for start in self._methods("on_start"):
                    start(self)
                with self._watchdog.during("in a step"):
                    while self._fit_plan(feed, steps, stop):
                        pass
                    self.finish_reports()
                stop.step_over()
                if not stop.is_due:
                    self._check_trained(*before)
                self._compare_peak()
                if self._validation is not None and not (self._is_evaluated() or stop.is_due):
                    self._evaluate_at_end()
                if self.loop_settings.save_on_exit or self._is_due("save_every"):
                    self.save()
                if not stop.is_due:
                    self._log_samples()
                if stop.is_due:
                    error = self._interrupted(stop)
                    error.trainer = self
                    raise error
        return self

    @contextlib.contextmanager
    def _stopping(self) -> Iterator[StopRequest]:
        """Converts a signal in a `with` block into a request to stop after the current step."""

        def describe() -> str:
            hint = self.loop_settings.resume_hint
            return describe_loss_of_stop(self._watchdog.doing(), self._checkpointer, hint)

        with StopRequest(limit=self._watchdog.stop_limit, describe=describe) as stop:
            self._stop = stop
            try:
                yield stop
            finally:
                self._stop = None

    def _unhurried(self) -> contextlib.AbstractContextManager[None]:
        """Suspends the time limit after a signal in a `with` block, so that a write completes."""
        return contextlib.nullcontext() if self._stop is None else self._stop.unhurried()

    @contextlib.contextmanager
    def _logging(self, steps: int | None) -> Iterator[None]:
        """Opens the run's log for a `with` block, and logs an error that ends it."""
        if self._checkpointer is not None:
            self._notes = [*self._checkpointer.take_notes(), *self._notes]
        self.open_log(steps)
        try:
            yield
        except BaseException as error:
            kind = "interrupted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed"
            text = str(error) or type(error).__name__
            if self._log is not None:
                self._log.event(kind, self.num_steps, text, say=False, error=type(error).__name__)
            raise
        finally:
            self.close_log()

    @contextlib.contextmanager
    def _failing_well(self) -> Iterator[None]:
        """Saves the state if data or a callback raise an error in a `with` block.

        With several processes nothing is saved, because a save needs all of them, and the others do
        not know of the error. If another process has ended, raises `PeerLostError` instead.
        """
        try:
            yield
        except Exception as error:
            note_if_donated(error)
            if jax.process_count() > 1:
                if is_peer_loss(error):
                    saved = () if self._checkpointer is None else self._checkpointer.steps()
                    hint = self.loop_settings.resume_hint
                    raise PeerLostError(self.num_steps, saved, hint) from error
                raise
            is_ours = isinstance(error, (CheckpointError, FloatingPointError, StoreError))
            # A failed step (for example, out of memory) has donated its state and returned none.
            is_lost = not self.num_steps or isinstance(error, jax.errors.JaxRuntimeError)
            is_lost = is_lost or any(x.is_deleted() for x in jax.tree.leaves(self.held_state))
            if not (is_ours or is_lost):
                try:
                    self._read_report()  # report of the step that began before the error
                    self._reports.settle(self.plan, self._log)
                    if self.loop_settings.save_on_exit:
                        self.save()
                except (CheckpointError, FloatingPointError) as failure:
                    error.add_note(f"Also: {failure}")
            raise

    def _say_if_nothing_is_saved(self) -> None:
        if self._checkpointer is None and self._log is not None and not self._said_unsaved:
            self._said_unsaved = True
            say_unsaved(self._log)

    def _check_trained(self, steps_before: int, skipped_before: int) -> None:
        """Raises or logs that a run has skipped all of its steps, depending on its loss scale."""
        skipped = int(self.held_state["skipped"]) - skipped_before
        steps = self.num_steps - steps_before
        if steps and steps == skipped:
            self._reports.nothing_trained(self.plan, steps, self._log)

    def _as_feed(self, batches: Any) -> Feed:
        """Returns a feed of `batches`, positioned after the last consumed batch.

        If the same object is passed again, the earlier feed continues, because a generator has a
        position of its own.
        """
        before, feed = self._feed or (None, None)
        if feed is None or not (before is batches or feed.advances(batches)):
            feed = self._new_feed(batches)
            if self._checkpointer is not None:
                check_data_state(feed.state())
        self._feed = batches, feed
        if self._data_state is not None and feed.state() != self._data_state:
            feed.restore(self._data_state)
        return feed

    def _new_feed(self, batches: Any) -> Feed:
        rows_of_steps = None if self.plan.ladder is None else self.plan.ladder.rows_of_steps
        feed, start = batches, None
        if not isinstance(batches, Feed):
            start = self.num_steps
            rows = local_rows(self.plan) if isinstance(batches, RowSource) else None
            feed = as_feed(batches, start=0 if rows_of_steps else start, rows=rows)
            if jax.process_count() > 1:
                divide_batches(feed, self.plan.mesh)
        if rows_of_steps is None:
            return feed
        check_regrouping(feed, self.plan.inputs.features)
        return in_sizes(feed, rows_of_steps, start=start)

    def _fit_plan(self, feed: Feed, steps: int | None, stop: StopRequest) -> bool:
        """Trains until the run is done or its plan changes; returns True if the plan changed."""
        plan, expected = self.plan, self.num_steps
        is_small = num_bytes(plan.abstract_batch) <= SMALL_BATCH
        put, depth = self._programs.placing(self.num_steps), 8 if is_small else 2
        with prefetch(feed, put=put, depth=depth) as incoming:
            while (steps is None or self.num_steps < steps) and not stop.due():
                try:
                    with self.clock.during(DATA), self._watchdog.during(WAITING_FOR_DATA):
                        batch, data_state = next(incoming)
                except StopIteration:
                    say_if_short(self._log, self.num_steps, steps)
                    return False
                metrics = self._step_on_devices(batch, data_state)
                expected += 1
                # Only after the step: a save after its failure counts the batch as not consumed.
                self._data_state = data_state
                last = self.num_steps == steps
                is_reported = self._is_due("log_every") or self.num_steps == 1 or last
                done = self.follow(metrics, is_reported=is_reported)
                if self._saves_each_step or (self._is_due("save_every") and not last):
                    # A kill must not leave a saved step without its report. The save waits for the
                    # step anyway.
                    done = self._report() or done
                if is_reported:
                    say_epochs(self._log, self.num_steps, self._epochs, feed.epochs(data_state))
                done = self._evaluate_and_save_if_due(last) or done
                if done:
                    return False
                if self.plan is not plan or self.num_steps != expected:
                    return True  # batches were placed for the old plan, or for other steps
        return False

    def _compare_peak(self) -> None:
        # A step that was never called is not compiled only for this line.
        if self._log is None or not self._step_was_called:
            return
        line = compare_peak(self.jitted_step, self.step_plan, device_memory())
        if line is not None:
            self._log.message(line)

    def _evaluate_and_save_if_due(self, last: bool) -> bool:
        """Evaluates, saves and logs samples if they are due at this step, but not after the last
        step; returns True if a callback ends the run."""
        done = False
        if last:
            return False
        if self._validation is not None and self._is_due("eval_every"):
            done = self._report()
            with self._untimed():
                done = self._evaluate_validation() or done
        if self._checkpointer is not None and self._is_due("save_every"):
            with self._untimed():
                self.save()
        if self._is_due("eval_every") and not done:  # at the end, the last save comes first
            self._log_samples()
        return done

    @property
    def _saves_each_step(self) -> bool:
        """Whether each step writes files from which a killed run resumes."""
        offload = self.plan.settings.offload
        return offload.durable and offload.on_disk

    def _is_due(self, setting: str) -> bool:
        """Returns True if this step is a multiple of the interval in the loop setting `setting`."""
        every = getattr(self.loop_settings, setting)
        return every is not None and self.num_steps > 0 and self.num_steps % every == 0

    def _evaluate_validation(self) -> bool:
        """Evaluates on the run's validation data; returns True if a callback ends the run.

        A run with EMA evaluates both the trained and the averaged weights.
        """
        found = self._measure(None, None, "trained")
        if self.has_ema:
            found |= of_ema(self._measure(None, None, EMA))
        self._log_evaluation(found)
        values = {"step": float(self.num_steps)} | found
        self.evaluations.append(values)
        with self._watchdog.during("in a callback", is_long=True):
            return True in [see(self, values) for see in self._methods("on_evaluation")]

    def _try_evaluation(self) -> None:
        """Evaluates one batch before the first step, so that errors appear early."""
        if self._validation is not None and not self._evaluate_was_called:
            try:
                with self._untimed():
                    names = self._measure(None, 1, "trained").keys()
            except NoWeightError:  # other batches may have a nonzero weight
                return
            averages = of_ema(dict.fromkeys(names, 0.0)) if self.has_ema else {}
            self.evaluation_names = frozenset([*names, *averages])

    def _evaluate_at_end(self) -> None:
        """Evaluates after the last step; a failure does not lose the trained weights."""
        if self.loop_settings.save_on_exit and jax.process_count() > 1:
            self.save()  # before the evaluation: after an error, processes cannot save together
        try:
            self._evaluate_validation()
        except Exception as error:
            if self._checkpointer is not None or jax.process_count() > 1:
                raise
            warnings.warn(
                f"the evaluation after the last step failed ({type(error).__name__}: {error}); "
                "the run has no checkpoints, so its trainer is returned nevertheless",
                RuntimeWarning,
                stacklevel=2,
            )

    def _log_samples(self) -> None:
        """Logs texts of the current weights, if the run's settings have prompts."""
        settings = None if self._spec.log is None else self._spec.log.samples
        if settings is not None and settings.prompts and self._sampled_step != self.num_steps:
            self._sampled_step = self.num_steps
            with self._untimed():
                # A process that is killed while it writes texts loses no checkpoint.
                if self._checkpointer is not None:
                    with self.clock.during(SAVE), self._watchdog.during("saving", is_long=True):
                        self._checkpointer.wait()
                with self.clock.during(EVAL):
                    log_samples(self, settings, self._log)

    def _is_evaluated(self) -> bool:
        """Returns True if the current state was already evaluated, or no step was taken."""
        last = self.evaluations[-1]["step"] if self.evaluations else 0
        return self.num_steps == last

    def _methods(self, name: str) -> list[Any]:
        """Returns the bound method `name` of each callback that has such a method."""
        found = (getattr(callback, name, None) for callback in self.loop_settings.callbacks)
        return [method for method in found if callable(method)]

    # --- evaluation -------------------------------------------------------------------------------

    @on_mesh_of_plan
    def evaluate(
        self,
        batches: Any = None,
        num_batches: int | None = None,
        *,
        weights: Weights = "trained",
    ) -> Metrics:
        """Returns the mean loss over batches in evaluation mode, weighted by each batch's weight.

        The result has "loss", "weight" (the sum of weights, or the number of rows if the loss
        returns no weight) and the loss's own metrics.

        Args:
          batches: validation data in any form that `zerojax.train` takes; None: the run's
            validation data.
          num_batches: maximum number of batches; None: the run's `eval_batches` for a source or a
            function, all batches otherwise.
          weights: "ema" evaluates the averaged weights (`zerojax.with_ema`) instead of the trained
            ones; their metrics are logged as "ema_loss" and so on.

        Raises:
          ValueError: there is nothing to evaluate on, or the run keeps no EMA.
        """
        result = self._measure(batches, num_batches, weights)
        self._log_evaluation(result if weights == "trained" else of_ema(result))
        return result

    def _measure(self, batches: Any, num_batches: int | None, weights: Weights) -> Metrics:
        state = with_weights(self.plan, self.state, weights)
        leave_out = self._say_left_out if batches is None else None
        batches = self._validation if batches is None else batches
        default = self.loop_settings.eval_batches
        self.wait()
        options = {"is_long": not self._evaluate_was_called, "is_apart": True}
        with self.clock.during(EVAL), self._watchdog.during("evaluating", **options):
            evaluate = self._evaluate_one
            return mean_loss(
                evaluate,
                self.plan,
                state,
                batches,
                num_batches,
                default,
                filler=self._filler,
                leave_out=leave_out,
            )

    @on_mesh_of_plan
    def generate(
        self,
        prompts: str | Sequence[str],
        num_tokens: int | None = None,
        *,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float = 1.0,
        end_tokens: Sequence[int] | None = None,
        seed: int = 0,
        batch_size: int = BATCH_SIZE,
        weights: Weights = "trained",
        quantize: str | None = None,
        cache: str | None = None,
    ) -> Any:
        """Returns prompts and their continuations by the current weights, on the run's own mesh.

        The weights stay sharded at every ZeRO stage. A copy in the compute dtype, sharded in the
        same way, is made and deleted afterwards. With several processes, each passes the same
        prompts and gets all results.

        Args:
          prompts: a text, a sequence of texts, or rows of token ids; each of at least one token.
          num_tokens: number of tokens to add; None: 200, or as many as fit the model's context.
          temperature: 0 takes the most likely token, 1 samples from the model's distribution.
          top_k: number of most likely tokens to sample from; None: all tokens.
          top_p: sample from the most likely tokens whose probabilities sum to `top_p`; None: all
            tokens.
          repetition_penalty: a value above 1 makes tokens that the text already has less likely.
          end_tokens: token ids that each end their text; None: the run's own; (): no token does.
          seed: seed of the sampling.
          batch_size: number of prompts that are continued together.
          weights: "ema" generates with the averaged weights (`zerojax.with_ema`).
          quantize: "int8" or "fp8" rounds the kernels of the layers to 8-bit codes; None: no codes.
          cache: "int8" stores keys and values as int8 codes; None: in the compute dtype.

        Returns:
          A text for a text, a list of texts for texts, and a list of int32 arrays for rows. Each is
          the prompt and the new tokens, up to its end token.

        Raises:
          ValueError: the run has no tokenizer or no EMA, a prompt is empty or fills the context, or
            an option is out of range.
          TypeError: the model is not a decoder of zerojax.
        """
        options = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "repetition_penalty": repetition_penalty,
            "end_tokens": end_tokens,
            "seed": seed,
            "batch_size": batch_size,
        }
        self.wait()
        notes = self._spec.notes
        tokenizer = None if notes is None else notes.tokenizer
        with self._watchdog.during("generating", is_long=True, is_apart=True):
            formats = {"quantize": quantize, "cache": cache}
            check_request(self.plan, prompts, num_tokens, weights=weights, **formats, **options)
            apart = self._reader.generates_apart
            model = self._reader.read(self.state, weights, quantize, apart=apart)
            vocab_size = getattr(getattr(model, "config", None), "vocab_size", 0)
            ends = end_tokens_of(self.plan, tokenizer, vocab_size=vocab_size)
            generator = RunGenerator(
                plan=self.plan,
                model=model,
                tokenizer=tokenizer,
                end_tokens=ends,
                cache_kind=cache,
            )
            return generator.generate(prompts, num_tokens, **options)

    def _say_left_out(self, why: str) -> None:
        text = f"left out of the evaluation at step {self.num_steps}: {why}"
        if self._log is None:
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        else:
            self._log.message(text)

    def _log_evaluation(self, found: Metrics) -> None:
        if self._log is not None:
            shown = {name: value for name, value in found.items() if name != "weight"}
            self._log.write_eval(self.num_steps, shown)

    # --- saving, moving, handing over -------------------------------------------------------------

    @on_mesh_of_plan
    def save(self) -> None:
        """Saves the state now, if the run has checkpoints and this step is not saved yet."""
        if self._checkpointer is None or self._saved_step == self.num_steps:
            return
        self._reports.wait(self.plan)
        saving, self._saved_step = self.num_steps, None
        rate = next_rate(self.plan, saving - int(self.held_state["skipped"]))
        config = {**self._settings, **({} if rate is None else {NEXT_RATE: rate})}
        about = {"data_state": self._data_state or {}, "config": config}
        about["plan"] = self.plan.as_dict()
        if states := {name: callback.state() for name, callback in self._stateful().items()}:
            config[CALLBACKS] = states
        what = f"saving step {saving}"
        watched = self._watchdog.during(what, is_long=True)
        with self.clock.during(SAVE), watched, self._unhurried():
            base = self._base_of_state
            save_state(
                self._checkpointer, self.plan, self.state, step=saving, about=about, base=base
            )
        self._saved_step = saving

    @property
    def has_validation(self) -> bool:
        """True if the run has validation data."""
        return self._validation is not None

    @property
    def has_ema(self) -> bool:
        """True if the run keeps an exponential moving average (EMA) of its weights."""
        return isinstance(self.plan.abstract_state["opt_state"], EmaState)

    @property
    def has_checkpoints(self) -> bool:
        """True if the run saves checkpoints."""
        return self._checkpointer is not None

    def kept_steps(self) -> dict[str, dict[str, Any]]:
        """Returns {name: {"step": number, ...}} of the saved steps that are protected by a name."""
        return {} if self._checkpointer is None else self._checkpointer.kept_steps()

    @on_mesh_of_plan
    def keep(self, name: str, about: Mapping[str, Any] | None = None) -> int:
        """Saves the current state, if it is not saved yet, and protects it under a name.

        Blocks until the step is on disk. A step that had the name before loses its protection, and
        is deleted when it is too old.

        Args:
          name: name under which the step is protected, such as "best". `restore` and
            `zerojax.load_run` accept it instead of a step number.
          about: JSON values that `kept_steps` returns with the step.

        Returns:
          The number of the protected step.

        Raises:
          ValueError: the run has no checkpoints.
          CheckpointError: the state cannot be saved.
        """
        if self._checkpointer is None:
            raise ValueError("this run has no checkpoints; pass checkpoint='runs/name' to train")
        self.save()
        with self._watchdog.during(f"saving step {self.num_steps}", is_long=True):
            self._checkpointer.keep_step(name, self.num_steps, about)
        return self.num_steps

    def _stateful(self) -> dict[str, Any]:
        """Returns {name in a checkpoint: callback} of the callbacks that have a state."""
        found: dict[str, Any] = {}
        for callback in self.loop_settings.callbacks:
            if callable(getattr(callback, "state", None)) and hasattr(callback, "load_state"):
                kind = type(callback).__name__
                number = sum(name.partition(" ")[0] == kind for name in found)
                found[f"{kind} {number}"] = callback
        return found

    @on_mesh_of_plan
    def restore(self, step: int | str | None = None) -> Self:
        """Restores a checkpoint, saved with any ZeRO stage, mesh and number of devices.

        Args:
          step: number of a saved step, or the name of a protected step, such as "best"; None: the
            newest.

        Raises:
          ValueError: the run has no checkpoints.
          CheckpointError: the step does not exist, or belongs to another model.
        """
        if self._checkpointer is None:
            raise ValueError("this run has no checkpoints; pass checkpoint='runs/name' to train")
        if isinstance(step, str):
            step = named_step(self._checkpointer.kept_steps(), step)
        self._checkpointer.wait()  # the save in progress may still read the files of this state
        restored = self.restore_from(self._checkpointer, step)
        self._base_of_state = None if self._base is None else self._base.as_read(restored.base)
        if self._base is not None and self._base_of_state is None:
            self._notes.append(
                f"step {restored.step} holds frozen weights, and later steps will, too: it is not "
                "known whether they equal those in the pretrained folder"
            )
        states = restored.config.get(CALLBACKS, {})
        for name, callback in self._stateful().items():
            if name in states:
                callback.load_state(states[name])
        # The state may come from durable files, of a step that no checkpoint has.
        self._saved_step = self.num_steps if self.num_steps in self._checkpointer.steps() else None
        return self

    def _release_files(self) -> None:
        if (disk := self.held_state.get("disk")) and disk.store.is_durable:
            self.save()
            if self._checkpointer is not None:
                self._checkpointer.wait()

    def close(self) -> None:
        """Waits until the last checkpoint is on disk, and closes files. May be called twice."""
        try:
            if self._checkpointer is not None:
                self._checkpointer.close()
        finally:  # after the save in progress, which may read the state's files
            end_state(self.held_state)
            self.wait_for_compilation()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _interrupted(self, stop: StopRequest) -> Interrupted:
        if self._checkpointer is None:
            return stop.interrupted(
                self.num_steps,
                "not saved, because the run has no checkpoints; "
                "the exception's attribute `trainer` still holds the state",
            )
        if not self.loop_settings.save_on_exit and self._saved_step != self.num_steps:
            text = "not saved, because checkpoint.save_on_exit is off"
            return stop.interrupted(self.num_steps, text)
        saving = self._watchdog.during(f"saving step {self.num_steps}", is_long=True)
        with saving, self._unhurried():
            self._checkpointer.wait()
        text = f"saved in {self._checkpointer.path}; {self.loop_settings.resume_hint}"
        return stop.interrupted(self.num_steps, text, saved=True)
