"""Options of the float16 loss scale, and their text in a plan."""

import dataclasses
import math
from dataclasses import dataclass

from zerojax.config.checks import refuse
from zerojax.config.keywords import names_keywords
from zerojax.config.loader import coerce_fields

LARGEST_SCALE = 2.0**64
"""Scales lie between 1 / LARGEST_SCALE and LARGEST_SCALE: float32 has to hold the loss times the
scale, and one over the loss weight times the scale, both with room to spare."""


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class LossScale:
    """The loss scale of a float16 run. The defaults are DeepSpeed's.

    Powers of two are best: multiplying by one and dividing again rounds nothing.
    """

    initial: float = 2.0**16
    """Scale of the first step."""
    window: int = 1000
    """Steps. The scale rises after this many finite steps in a row."""
    hysteresis: int = 2
    """Number of overflows that lower the scale: 1 is the first; 2 tolerates one."""
    consecutive_hysteresis: bool = False
    """true: each finite step resets the count of tolerated overflows. false: only a rise of the
    scale does."""
    minimum: float = 1.0
    """Lower limit of the scale; an overflow at this limit ends the run."""
    maximum: float = 2.0**32
    """Upper limit of the scale. At 2^32, DeepSpeed's largest initial scale, float16 holds
    gradients down to 1e-14 with full precision. DeepSpeed has no maximum: while all gradients
    are zero its scale goes to infinity, from which halving does not return."""
    factor: float = 2.0
    """Factor by which the scale rises and falls."""
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
                f"never changes, so {', '.join(changed)} would do nothing; leave out one or the "
                "other",
            )


def describe_loss_scale(config: LossScale) -> str:
    """One line for people, beginning with "dynamic loss scale" or "static loss scale"."""
    if config.static is not None:
        rounding = "" if _is_power_of_two(config.static) else " (no power of two: it rounds)"
        return f"static loss scale {_written(config.static)}{rounding}; overflows skip the step"
    scales = (config.initial, config.minimum, config.maximum, config.factor)
    rounding = "" if all(map(_is_power_of_two, scales)) else ", not all powers of two: it rounds"
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
    """2^16 for large or small powers of two, the number itself otherwise."""
    exponent = math.frexp(value)[1] - 1
    return f"2^{exponent}" if _is_power_of_two(value) and abs(exponent) > 3 else f"{value:g}"


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"
