"""Smaller groups of options: adapters, mixtures, loss scale, watchdog, checkpoints and logs."""

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

ADAPTERS_ONLY = (r"^(?!(?:.*/)?lora/[ab]$)",)
"""Value of `freeze` that trains adapters only: a pattern for every parameter that does not belong
to an adapter."""
LARGEST_SCALE = 2.0**64
"""Largest loss scale; the smallest is 1 / LARGEST_SCALE. float32 has to represent the loss times
the scale, and 1 / (loss weight times scale), both with a margin."""
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
    """LoRA (arXiv:2106.09685): y = W x + alpha / rank * B A x, and only A and B are trained."""

    rank: int = 0
    """Rank of the adapters; 8 is usual. An adapter has rank x (inputs + outputs) parameters. 0:
    no adapters. With adapters all other parameters are frozen."""
    alpha: float = 16.0
    """alpha / rank scales the adapter's output. The default does not depend on the rank, so that a
    learning rate can be reused with another rank."""
    dropout: float = 0.0
    """Dropout probability of the input of A."""
    targets: tuple[str, ...] = ("attention/", "mlp/")
    """Regular expressions on names of projections, such as blocks/attention/query. The default
    is every projection of the layers, which matched full fine-tuning where query and value
    alone did not (arXiv:2305.14314, section 4)."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        check_size(self, "rank", least=0)
        check_positive(self, "alpha")
        check_fraction(self, "dropout", below_one=True)
        if not self.targets:
            raise ConfigError(
                "names no projection; give regexes such as attention/(query|value)", ("targets",)
            )
        for pattern in self.targets:
            check_regex("targets", pattern)

    @property
    def scale(self) -> float:
        """Factor of an adapter's output."""
        return self.alpha / self.rank if self.rank else 0.0

    @property
    def freeze(self) -> tuple[str, ...]:
        """Value of `freeze` for a run with these adapters: patterns for all other parameters; ()
        without adapters."""
        return ADAPTERS_ONLY if self.rank else ()


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class MixturePart:
    """One set of data of a mixture, with its share of the rows."""

    path: str
    """As data.path."""
    weight: float = 1.0
    """This set's share of the rows is weight / sum of all weights; at least 1/1,024."""
    at_end: Literal["repeat", "stop"] = "repeat"
    """After its last row: repeat starts its next epoch, stop uses only rows of the others."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        expand_folders(self, "path")
        check_positive(self, "weight")


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class LossScale:
    """Loss scale of a float16 run. The defaults are DeepSpeed's.

    Powers of two are best: multiplying and dividing by one causes no rounding.
    """

    initial: float = 2.0**16
    """Scale of the first step."""
    window: int = 1000
    """Steps. The scale increases after this many consecutive finite steps."""
    hysteresis: int = 2
    """Number of overflows that decrease the scale: 1 is the first; 2 tolerates one."""
    consecutive_hysteresis: bool = False
    """true: each finite step resets the count of tolerated overflows. false: only an increase of
    the scale does."""
    minimum: float = 1.0
    """Lower limit of the scale; an overflow at this limit ends the run."""
    maximum: float = 2.0**32
    """Upper limit of the scale. At 2^32, DeepSpeed's largest initial scale, float16 represents
    gradients down to 1e-14 with full precision. DeepSpeed has no maximum: while all gradients are
    zero its scale grows to infinity, from which halving does not return."""
    factor: float = 2.0
    """Factor by which the scale increases and decreases."""
    static: float | None = None
    """A fixed scale; non-finite steps are still skipped. null: dynamic."""

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
    """Returns a line for the log that starts with "dynamic loss scale" or "static loss scale"."""
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
    """Returns 2^16 for large or small powers of two, otherwise the number itself."""
    exponent = math.frexp(value)[1] - 1
    return f"2^{exponent}" if _is_power_of_two(value) and abs(exponent) > 3 else f"{value:g}"


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Watchdog: a process without progress dumps the stacks of its threads and exits with code
    79."""

    step_timeout: float | None = None
    """Seconds for one step, for one batch of data, and for one batch of an evaluation. 0: no
    limit. null: 600, or three times the longest step so far if that is more; no limit in an
    interactive interpreter."""
    long_timeout: float = 3600.0
    """Seconds for rare, long work: compilation with the first step, a callback, saving and
    restoring a checkpoint. This work does not count for `step_timeout` or for the longest step."""
    stop_timeout: float | None = None
    """Seconds after the first Ctrl-C or SIGTERM for the work in progress to end; then the process
    exits with status 128 + the signal's number. Saves are completed first. 0: no limit. null: 60,
    or three times the longest step so far if that is more, at most 600; no limit in an interactive
    interpreter."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        check_at_least(self, 0, "step_timeout", "stop_timeout")
        check_positive(self, "long_timeout")

    @property
    def is_off(self) -> bool:
        """Whether steps have no time limit."""
        return self.step_timeout == 0

    def step_limit(self, longest_step: float | None) -> float:
        """Returns the limit of a step in seconds.

        Args:
          longest_step: seconds of the longest step so far, without compiling; None: no step yet.
        """
        if self.step_timeout is not None:
            return self.step_timeout
        if longest_step is None:
            return self.long_timeout
        return max(MIN_STEP_SECONDS, LONGEST_STEPS * longest_step)

    def stop_limit(self, longest_step: float | None) -> float | None:
        """Returns the seconds that a step may still take after a signal; None: no limit.

        The same limit holds for a compilation and an evaluation. A save has no limit.

        Args:
          longest_step: as in `step_limit`.
        """
        if self.stop_timeout is not None:
            return self.stop_timeout or None
        return min(max(MIN_STOP_SECONDS, STOP_STEPS * (longest_step or 0.0)), MAX_STOP_SECONDS)


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state is saved, and how many checkpoints are kept."""

    path: str | None = None
    """Folder. null: `checkpoints` in the run folder."""
    every: int = 500
    """Steps between saves. A save overlaps with training."""
    keep: int = 3
    """Number of newest checkpoints to keep; one is not enough in case the newest is damaged."""
    save_on_exit: bool = True
    """Also save after the last step and on Ctrl-C. A last step that is divisible by `every` is
    always saved."""
    asynchronous: bool = True
    """Write in the background after one copy to the host."""
    fingerprints: bool = True
    """Compute a fingerprint of each array on its devices, and compare it after a restore."""
    frozen: Literal["auto", "source", "saved"] = "auto"
    """Weights that are not trained. source: they stay in the Hugging Face folder that they were
    read from, and are read from there again. saved: they are in every checkpoint. auto: source if
    there is such a folder."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        expand_folders(self, "path")
        check_at_least(self, 1, "every", "keep")


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is reported, where and how often. metrics.jsonl is always written."""

    every: int | None = None
    """Steps between reports. Reading metrics waits for the device, so the default is not every
    step: null is 10, or steps_per_print of a ds_config."""
    tensorboard: bool = True
    """Write TensorBoard event files; this takes microseconds and no dependency."""
    wandb: str | None = None
    """Weights & Biases project; null: not used."""
    console: Literal["auto", "live", "lines", "quiet"] = "auto"
    """auto: one live line on a terminal, one line per report elsewhere."""
    spike: float | None = 8.0
    """A loss is reported as a spike if it is this many robust standard deviations above the
    median of the last 100 steps. null: no detection."""
    straggler: float | None = 0.2
    """A process is reported as a straggler if the others wait for it for more than this
    fraction of a step, at three reports in a row. null: no detection."""
    profile: tuple[int, ...] = ()
    """[FIRST, LAST] steps whose trace process 0 writes into the run folder, as in [10, 13]; not
    step 1, which compiles."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        check_at_least(self, 1, "every")
        check_positive(self, "spike", "straggler")
        steps = self.profile
        if steps and not (len(steps) == 2 and 2 <= steps[0] <= steps[1]):
            refuse("profile", list(self.profile), "is not [FIRST, LAST] with 2 <= FIRST <= LAST")

    @property
    def report_every(self) -> int:
        """Steps between reports, with 10 for null."""
        return 10 if self.every is None else self.every
