"""Settings of compression during training: bit widths by schedule, and pruning.

This module only computes numbers and imports no JAX. The rules are DeepSpeed's: the widths those of
`runtime/quantize.py`, where each width lasts twice as long as the one before, and the pruned
weights those of `compression/basic_layer.py` with `method: l1` (0.19.6).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from zerojax.config.checks import check_regex, check_size, names_keywords, refuse
from zerojax.config.display import quoted
from zerojax.config.feature_settings import FeatureSettings
from zerojax.config.loader import coerce_fields

MAX_BITS = 16
"""Largest width of a schedule. Codes of up to 16 bits are exact in float32."""


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class BitScheduleConfig(FeatureSettings):
    """Schedule of the bit width of rounded kernels, for matmul_dtype fake_int8 and fake_int4."""

    keyword = "bit_schedule"
    switch = "start_bits"

    start_step: int = 0
    """Number of applied updates after which kernels are rounded; before, they are not."""
    start_bits: int | None = None
    """Bit width at first, up to 16. null: the width of matmul_dtype, from the beginning."""
    period: int | None = None
    """Number of the update since start_step, counted from 1, that is the first with a smaller
    width. The next widths last period, 2 x period, 4 x period, ... updates, as in DeepSpeed's
    quantization_period."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        check_size(self, "start_step", least=0)
        check_size(self, "period")
        if self.start_bits is None and self.period is not None:
            refuse("period", self.period, "has no effect without start_bits; set start_bits, or 8")
        if self.start_bits is None:
            return
        if not 2 <= self.start_bits <= MAX_BITS:
            refuse("start_bits", self.start_bits, f"must be in 2 to {MAX_BITS}; 8 is usual")
        if self.period is None:
            refuse(
                "start_bits",
                self.start_bits,
                "needs period, the number of updates until the first smaller width; set both",
            )

    def summary(self) -> list[tuple[str, str]]:
        return [("bits", f"from {self.start_bits} bits on, after {self.start_step} updates")]

    @staticmethod
    def resume_note(old: Mapping[str, Any], new: Mapping[str, Any], step: int) -> str:
        return (
            f"the bit_schedule of this call, {new}, is used from step {step} on; the saved run "
            f"had {old}"
        )

    def check_target(self, bits: int) -> None:
        """Raises a ConfigError if the schedule begins below its last width, `bits`."""
        if self.start_bits is not None and self.start_bits < bits:
            refuse(
                "start_bits",
                self.start_bits,
                f"is below the {bits} bits of matmul_dtype, where the schedule ends; use at least "
                f"{bits}",
            )

    def falls(self, bits: int) -> tuple[int, ...]:
        """Returns the numbers of applied updates with which the width falls by one.

        Args:
          bits: width of matmul_dtype, at which the schedule ends.
        """
        if self.start_bits is None or self.period is None:
            return ()
        number = self.start_bits - bits
        return tuple(self.start_step - 1 + self.period * 2**drop for drop in range(number))

    def last_change(self, bits: int) -> int:
        """Returns the number of applied updates after which the width does not change any more."""
        return max(self.start_step, *self.falls(bits), 0)

    def bits_after(self, num_updates: int, bits: int) -> int | None:
        """Returns the width of a step; None if it does not round.

        Args:
          num_updates: number of updates applied before the step.
          bits: width of matmul_dtype.
        """
        if num_updates < self.start_step:
            return None
        begin = bits if self.start_bits is None else self.start_bits
        return begin - sum(num_updates >= fall for fall in self.falls(bits))

    def describe(self, bits: int) -> str:
        """Returns one line on the widths of all steps for the plan; steps are counted from 1.

        Args:
          bits: width of matmul_dtype.
        """
        changes = sorted({0, self.start_step, *(max(0, fall) for fall in self.falls(bits))})
        widths = [(change, self.bits_after(change, bits)) for change in changes]
        shown = [
            f"{'not rounded' if width is None else f'{width} bits'} from step {change + 1} on"
            for change, width in widths
        ]
        return f"kernels of the layers: {', '.join(shown)} (skipped steps do not count)"


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class PruningGroup:
    """Parameters that are pruned by one rule."""

    pattern: str
    """Regular expression that is searched in the names of parameters."""
    dense_ratio: float
    """Fraction of the units of each parameter, in each layer, that is kept, rounded up."""
    unit: Literal["weight", "row", "head", "channel"] = "weight"
    """Part of a parameter that is kept or pruned. weight: one element. row: all weights of one
    output, with its bias. head: the inputs of one attention head, in the output projection of
    attention. channel: one output channel of a convolution, with its bias."""
    num_heads: int | None = None
    """Number of heads of the parameter, only with unit=head; null: not checked."""
    start_step: int = 0
    """Number of applied updates after which pruned weights are 0. The choice is made when the run
    starts, by the sums of absolute values of the initial weights."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        check_regex("pattern", self.pattern)
        if not 0 < self.dense_ratio <= 1:
            refuse("dense_ratio", self.dense_ratio, "must be above 0 and at most 1; 0.5 keeps half")
        if self.num_heads is not None and self.unit != "head":
            refuse("num_heads", self.num_heads, f"has no effect with unit={self.unit}; remove it")
        check_size(self, "start_step", least=0)


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class PruningConfig(FeatureSettings):
    """Pruning of weights by their magnitude: pruned weights are 0 in the model from some step
    on."""

    keyword = "pruning"
    switch = "groups"
    ds_section = "compression_training"
    part = "masks"

    groups: tuple[PruningGroup, ...] = ()
    """Rules; a parameter may belong to one of them. (): no weight is pruned."""

    def __post_init__(self) -> None:
        coerce_fields(self)

    def summary(self) -> list[tuple[str, str]]:
        return [
            (
                "pruning",
                f"{group.unit}s of {quoted(group.pattern, 35)}: {group.dense_ratio:.4g} of them "
                f"kept from step {group.start_step + 1} on",
            )
            for group in self.groups
        ]

    @staticmethod
    def resume_note(old: Mapping[str, Any], new: Mapping[str, Any], step: int) -> str:
        return (
            f"the masks of pruned weights are those of the checkpoint, chosen by {old}; of {new} "
            "of this call only each start_step is used"
        )
