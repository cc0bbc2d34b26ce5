"""Smaller sections of a run's options: adapters, data mixtures, the loss scale, the watchdog,
checkpoints, logs and samples of text."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from zerojax.config.checks import (
    check_at_least,
    check_fraction,
    check_positive,
    check_regex,
    check_size,
    expand_folders,
    names_keywords,
    refuse,
)
from zerojax.config.loader import ConfigError, coerce_fields

ADAPTERS_ONLY = (r"^(?!(?:.*/)?lora/[ab]$|task_head/)",)
"""Value of `freeze` with which only adapters and the head of a task are trained: a pattern that
matches every other parameter. The head has to be trained, because a new task has a new one."""
LARGEST_SCALE = 2.0**64
"""Largest loss scale; the smallest is 1 / LARGEST_SCALE. float32 must represent the loss times the
scale, and 1 / (loss weight times scale), both with a margin."""
MIN_STEP_SECONDS = 600.0
"""Smallest default of `step_timeout`: PyTorch's default timeout of an NCCL collective."""
LONGEST_STEPS = 3.0
MIN_STOP_SECONDS, MAX_STOP_SECONDS = 60.0, 600.0
STOP_STEPS = 3.0
"""Steps that may have to end before a run stops: at a signal one step may be running on the devices
and the next one may be dispatched; several processes may agree on the step after that."""


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Settings of LoRA adapters (arXiv:2106.09685): y = W x + alpha / rank * B A x, in which only A
    and B are trained."""

    rank: int = 0
    """Rank of the adapters; 8 is usual. An adapter has rank x (inputs + outputs) parameters. 0: no
    adapters. With adapters all other parameters are frozen, except the head of a task."""
    alpha: float = 16.0
    """Numerator of alpha / rank, the factor of the adapter's output. The default does not depend on
    the rank, so that a learning rate can be reused with another rank."""
    dropout: float = 0.0
    """Dropout probability of the adapter's input."""
    targets: tuple[str, ...] = ("attention/", "mlp/")
    """Regular expressions on names of projections that get an adapter, such as
    blocks/attention/query. The default matches every projection of the layers, which equalled full
    fine-tuning where query and value alone did not (arXiv:2305.14314, section 4)."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        check_size(self, "rank", least=0)
        check_positive(self, "alpha")
        check_fraction(self, "dropout", below_one=True)
        if not self.targets:
            raise ConfigError(
                "[] selects no projection; give regexes such as attention/(query|value)",
                ("targets",),
            )
        for pattern in self.targets:
            check_regex("targets", pattern)

    @property
    def scale(self) -> float:
        """Factor that multiplies an adapter's output: alpha / rank; 0 without adapters."""
        return self.alpha / self.rank if self.rank else 0.0

    @property
    def freeze(self) -> tuple[str, ...]:
        """Value of `freeze` for a run with these adapters: a pattern that matches all other
        parameters, except the head of a task; () without adapters."""
        return ADAPTERS_ONLY if self.rank else ()


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class MixturePart:
    """One data set of a mixture, with its share of the rows."""

    path: str
    """Path of the data: a text file, a folder of text files, or an output folder of `zerojax data
    prepare`."""
    weight: float = 1.0
    """Weight of this data set. Its share of the rows is its weight divided by the sum of all
    weights, and must be at least 1/1,024."""
    at_end: Literal["repeat", "stop"] = "repeat"
    """What follows the last row of this data set. repeat: its next epoch; stop: rows of the other
    data sets only."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        expand_folders(self, "path")
        check_positive(self, "weight")


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class LossScale:
    """Settings of the loss scale of a float16 run. The defaults are DeepSpeed's.

    Powers of two are best, because multiplying and dividing by a power of two causes no rounding.
    """

    initial: float = 2.0**16
    """Loss scale of the first step."""
    window: int = 1000
    """Number of consecutive finite steps after which the scale increases."""
    hysteresis: int = 2
    """Number of overflows after which the scale decreases. 1: at the first overflow; 2: one
    overflow is tolerated."""
    consecutive_hysteresis: bool = False
    """true: each finite step resets the count of tolerated overflows. false: only an increase of
    the scale resets it."""
    minimum: float = 1.0
    """Lower limit of the scale; an overflow at this limit ends the run."""
    maximum: float = 2.0**32
    """Upper limit of the scale. At 2^32, DeepSpeed's largest initial scale, float16 represents
    gradients down to 1e-14 with full precision. DeepSpeed has no such limit: while all gradients
    are zero its scale grows to infinity, and halving infinity does not lower it."""
    factor: float = 2.0
    """Factor by which the scale is multiplied or divided."""
    static: float | None = None
    """Constant scale; non-finite steps are still skipped. null: the scale changes (dynamic)."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        for name in ("initial", "minimum", "maximum", "static"):
            self._check_scale(name)
        self._check_count("window", "1000 is usual")
        self._check_count("hysteresis", "1 lowers the scale at the first overflow")
        if not 1 < self.factor <= LARGEST_SCALE:
            refuse(
                "factor",
                self.factor,
                "must be above 1 and at most 2**64, since it raises the scale; use 2",
            )
        if not self.minimum <= self.initial <= self.maximum:
            refuse(
                "initial",
                self.initial,
                f"is not between minimum ({self.minimum:g}) and maximum ({self.maximum:g}); change "
                "it, or the limit",
            )
        self._check_static_is_alone()

    def _check_scale(self, name: str) -> None:
        value = getattr(self, name)
        if value == 0 and name == "static":
            refuse(
                name,
                getattr(self, name),
                "makes every gradient zero; use null (None) for a dynamic scale",
            )
        if value is not None and not 1 / LARGEST_SCALE <= value <= LARGEST_SCALE:
            refuse(
                name,
                getattr(self, name),
                "must be between 2**-64 and 2**64, so that float32 holds the scaled loss; a power "
                "of two between 1 and 2**32 is usual",
            )

    def _check_count(self, name: str, remedy: str) -> None:
        if not 1 <= getattr(self, name) < 2**31:
            refuse(name, getattr(self, name), f"must be at least 1 and below 2**31; {remedy}")

    def _check_static_is_alone(self) -> None:
        changed = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if field.name != "static" and getattr(self, field.name) != field.default
        ]
        if self.static is not None and changed:
            refuse(
                "static",
                self.static,
                f"makes the scale constant, so {', '.join(changed)} would have no effect; leave "
                "out one or "
                "the other",
            )


def describe_loss_scale(config: LossScale) -> str:
    """Describes the loss scale in a line for the log that begins with "dynamic loss scale" or
    "static loss scale"."""
    if config.static is not None:
        rounding = (
            "" if _is_power_of_two(config.static) else " (not a power of two, so scaling rounds)"
        )
        return f"static loss scale {_written(config.static)}{rounding}; overflows skip the step"
    scales = (config.initial, config.minimum, config.maximum, config.factor)
    rounding = (
        "" if all(map(_is_power_of_two, scales)) else ", not all powers of two, so scaling rounds"
    )
    by = "2" if config.factor == 2 else f"{config.factor:g}"
    which = "every" if config.hysteresis == 1 else f"the {_ordinal(config.hysteresis)}"
    counted = "in a row" if config.consecutive_hysteresis else "since it last rose"
    counted = "" if config.hysteresis == 1 else f" {counted}"
    return (
        f"dynamic loss scale from {_written(config.initial)}: times {by} after {config.window:,} "
        f"finite steps, divided by {by} at {which} overflow{counted}, between "
        f"{_written(config.minimum)} and {_written(config.maximum)}{rounding}"
    )


def _is_power_of_two(value: float) -> bool:
    return math.frexp(value)[0] == 0.5


def _written(value: float) -> str:
    """Writes a number as text: large or small powers of two as 2^16, other numbers in digits."""
    exponent = math.frexp(value)[1] - 1
    return f"2^{exponent}" if _is_power_of_two(value) and abs(exponent) > 3 else f"{value:g}"


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Time limits of the watchdog. A process that exceeds a limit prints the stacks of its threads
    and exits with code 79."""

    step_timeout: float | None = None
    """Limit in seconds for one step, for loading one batch, and for one batch of an evaluation. 0:
    no limit. null: 600, or three times the longest step so far if that is more; no limit in an
    interactive interpreter."""
    long_timeout: float = 3600.0
    """Limit in seconds for rare, long work: compilation with the first step, a callback, saving and
    restoring a checkpoint. The time of this work does not count toward `step_timeout` or the
    longest step."""
    stop_timeout: float | None = None
    """Limit in seconds for the work in progress to end after the first Ctrl-C or SIGTERM. Then the
    process exits with status 128 + the signal's number, after any save is completed. 0: no limit.
    null: 60, or three times the longest step so far if that is more, at most 600; no limit in an
    interactive interpreter."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        check_at_least(self, 0, "step_timeout", "stop_timeout")
        check_positive(self, "long_timeout")

    @property
    def is_off(self) -> bool:
        """Whether steps have no time limit (step_timeout is 0)."""
        return self.step_timeout == 0

    def step_limit(self, longest_step: float | None) -> float:
        """Returns the time limit of a step in seconds; 0 if it has none (`is_off`).

        Args:
          longest_step: seconds of the longest step so far, without compilation; None: no step has
            ended, and the limit is `long_timeout` unless `step_timeout` is set.
        """
        if self.step_timeout is not None:
            return self.step_timeout
        if longest_step is None:
            return self.long_timeout
        return max(MIN_STEP_SECONDS, LONGEST_STEPS * longest_step)

    def stop_limit(self, longest_step: float | None) -> float | None:
        """Returns the time limit in seconds for a step that is running when a stop signal arrives;
        None: no limit.

        A compilation and an evaluation have the same limit. A save has no limit.

        Args:
          longest_step: seconds of the longest step so far, without compilation; None: no step has
            ended.
        """
        if self.stop_timeout is not None:
            return self.stop_timeout or None
        return min(max(MIN_STOP_SECONDS, STOP_STEPS * (longest_step or 0.0)), MAX_STOP_SECONDS)


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Settings of checkpoints: when the training state is saved, and how many checkpoints are
    kept."""

    path: str | None = None
    """Folder of the checkpoints. null: `checkpoints` in the run folder."""
    every: int = 500
    """Number of steps between saves. A save overlaps with training."""
    keep: int = 3
    """Number of newest checkpoints to keep. One is not enough, because the newest may be
    damaged."""
    save_on_exit: bool = True
    """Whether the state is also saved after the last step and on Ctrl-C. A last step that is
    divisible by `every` is always saved."""
    asynchronous: bool = True
    """Whether a checkpoint is written in the background, after the state was copied to the host."""
    fingerprints: bool = True
    """Whether a fingerprint of each array is computed on its devices and compared after a
    restore."""
    frozen: Literal["auto", "source", "saved"] = "auto"
    """Storage of weights that are not trained. source: they are not saved but read again from the
    Hugging Face folder that they were first read from. saved: they are in every checkpoint. auto:
    source if there is such a folder, else saved."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        expand_folders(self, "path")
        check_at_least(self, 1, "every", "keep")


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class SamplesConfig:
    """Settings of samples: prompts that the run continues with its current weights, before the
    first step, every `eval_every` steps and at the end. The texts are in the log and the report."""

    prompts: tuple[str, ...] = ()
    """Prompts to continue; none: no samples. All processes must have the same."""
    num_tokens: int = 60
    """Largest number of new tokens per prompt."""
    temperature: float = 0.8
    """Divisor of the logits. 0: the most likely token is taken."""
    top_k: int | None = None
    """Number of most likely tokens to sample from; null: all."""
    top_p: float | None = None
    """Samples from the most likely tokens whose probabilities sum to this; null: all."""
    seed: int = 0
    """Seed of the sampling. It is the same at each step, so that texts differ by the weights
    alone."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        check_size(self, "num_tokens")
        check_at_least(self, 0, "temperature", "seed")
        check_at_least(self, 1, "top_k")
        check_positive(self, "top_p")
        if self.top_p is not None and self.top_p > 1:
            refuse("top_p", self.top_p, "must be above 0 and at most 1; 0.9 is usual")
        if "" in self.prompts:
            refuse("prompts", list(self.prompts), "has an empty prompt; give it at least a letter")


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Settings of reports: what is reported, where and how often. metrics.jsonl is always
    written."""

    every: int | None = None
    """Number of steps between reports. Reading metrics waits for the device, so the default is not
    every step. null: 10, or steps_per_print of a ds_config."""
    tensorboard: bool = True
    """Whether TensorBoard event files are written; a report takes microseconds and needs no further
    package."""
    wandb: str | None = None
    """Name of a Weights & Biases project that gets the metrics; null: none."""
    console: Literal["auto", "live", "lines", "quiet"] = "auto"
    """Form of reports on the console. live: one line that is updated in place; lines: one line per
    report; quiet: none. auto: live on a terminal, lines elsewhere."""
    spike: float | None = 8.0
    """Threshold of loss spikes: a loss is reported as a spike if it is this many robust standard
    deviations above the median of the last 100 steps. null: no detection."""
    per_layer: bool = False
    """Whether each report has the norms of gradients, updates and parameters of every layer, in
    metrics.jsonl, TensorBoard and the report of the run. The step then has one more all-reduce, and
    keeps a copy of the old weights until they are compared with the new ones."""
    straggler: float | None = 0.2
    """Threshold of stragglers: a process is reported as a straggler if at three successive reports
    the others waited for it for more than this fraction of a step. null: no detection."""
    samples: SamplesConfig = dataclasses.field(default_factory=SamplesConfig)
    """Prompts that the run continues with its current weights, for the log."""
    profile: tuple[int, ...] = ()
    """[FIRST, LAST] steps of which process 0 writes a profiler trace into the run folder, as in
    [10, 13]. The first is at least 2, because step 1 compiles."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        check_at_least(self, 1, "every")
        check_positive(self, "spike", "straggler")
        steps = self.profile
        if steps and not (len(steps) == 2 and 2 <= steps[0] <= steps[1]):
            refuse("profile", list(self.profile), "is not [FIRST, LAST] with 2 <= FIRST <= LAST")

    @property
    def report_every(self) -> int:
        """Number of steps between reports: `every`, or 10 if it is null."""
        return 10 if self.every is None else self.every
