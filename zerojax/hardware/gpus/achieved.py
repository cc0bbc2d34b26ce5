"""Rates that programs reach on a card, as measured; published peaks are never reached.

Two cards were measured by `benchmarks/gpu/run.sh` (`benchmarks/results/gpu_h100.md`,
`gpu_h200.md`). For any other card the published peaks are multiplied by the shares that these two
reached. What `zerojax bench` measured on this machine comes first, for its own card.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from zerojax.config.late_dataclasses import dataclass
from zerojax.hardware.gpus.card import MEASURED, Gpu, Measured
from zerojax.hardware.gpus.catalog import gpu_of_device
from zerojax.hardware.machine_rates import (
    MeasuredDevice,
    MeasuredLink,
    MeasuredNode,
    kept_rates,
)

PRODUCT_SHARE = 0.757
"""Share of the published rate of 16-bit products that a product of 8192 x 8192 x 8192 reaches: mean
of 0.778 on an H100 and 0.735 on an H200."""
COPY_SHARE = 0.890
"""Share of the published bandwidth that a copy of 4 GiB in device memory reaches: mean of 0.896 on
an H100 and 0.884 on an H200."""
HOST_SHARE = 0.825
"""Share of the published rate of the link to host memory that `device_put` of 1 GiB reaches on both
cards."""
WIRE_SHARE = 0.8
"""Share of the published rate of links between GPUs: assumed, no two cards were measured."""
FUSION_SHARE = 0.79
"""Share of a copy's bandwidth that fusions of a training step reach: the 704 fusions of GPT-2 on an
H200 took 11.8 ms without their launches, for bytes that a copy moves in 9.3 ms (the trace of the
unrolled step in `gpu_h200.json`)."""
LAUNCH_SECONDS = 2.2e-6
"""Seconds that each kernel takes in addition: an AdamW update of 148 arrays in 150 launches takes
0.33 ms longer than the same bytes in one array, on an H100 and on an H200."""
ATTENTION_SHARES: Mapping[int, float] = {1024: 0.32, 4096: 0.59, 32768: 0.63}
"""{keys: share of the rate of products} of cuDNN's attention, forward and backward pass, causal, 32
heads of 128 features on an H100."""


@dataclass(frozen=True, kw_only=True)
class Achieved:
    """Rates that a program can expect on one card.

    Attributes:
      card: the card with its measured or expected rates in place of the published ones.
      fusion_bandwidth: bytes per second of kernels that compute while they read and write memory.
      host_both: bytes per second between device and host in both directions at once, summed.
      launch_seconds: seconds that each kernel takes in addition.
      attention: {keys: share of the rate of products that attention reaches}.
      source: what the rates are and where they are from, as a part of a sentence.
    """

    card: Gpu
    fusion_bandwidth: float
    host_both: float
    launch_seconds: float
    attention: Mapping[int, float]
    source: str

    def attention_share(self, keys: int) -> float:
        """Returns the share of the rate of products that attention over `keys` keys reaches:
        interpolated by the logarithm of the length between measured lengths, that of the nearest
        one outside."""
        known = sorted(self.attention)
        keys = min(max(keys, known[0]), known[-1])
        # At least 1, so that there is a length below, too.
        above = max(bisect.bisect_left(known, keys), 1)
        low, high = known[above - 1], known[above]
        part = math.log(keys / low) / math.log(high / low)
        return self.attention[low] + part * (self.attention[high] - self.attention[low])


def achieved_rates(gpu: Gpu) -> Achieved:
    """Returns the rates that a program can expect on a card.

    Args:
      gpu: the card. Rates that were measured on this machine count first, if they are of the same
        card and the user did not state them (`Gpu.stated`); then the card's `measured` rates; then
        shares of the published ones.
    """
    known, source = _with_rates_here(gpu)
    share, published = PRODUCT_SHARE, gpu.bf16_flops or gpu.fp16_flops
    if known.product_flops and published:
        share = known.product_flops / published
    peaks = ("bf16_flops", "fp16_flops", "fp8_flops", "fp32_flops")
    rates: dict[str, Any] = {name: (getattr(gpu, name) or 0.0) * share or None for name in peaks}
    copy = known.copy_bandwidth or gpu.memory_bandwidth * COPY_SHARE
    host = known.host_bandwidth or gpu.host_bandwidth * HOST_SHARE
    inside = known.node_bandwidth or gpu.node_bandwidth * WIRE_SHARE
    rates |= {"node_bandwidth": inside, "network_bandwidth": gpu.network_bandwidth * WIRE_SHARE}
    return Achieved(
        card=dataclasses.replace(gpu, memory_bandwidth=copy, host_bandwidth=host, **rates),
        fusion_bandwidth=copy * FUSION_SHARE,
        host_both=known.host_both or 2 * host,
        launch_seconds=LAUNCH_SECONDS,
        attention=ATTENTION_SHARES,
        source=source,
    )


def _with_rates_here(gpu: Gpu) -> tuple[Measured, str]:
    """Returns measured rates of a card, those of this machine first, and what they are."""
    known = gpu.measured or Measured()
    source = "published rates times the shares that an H100 and an H200 reached"
    if known.product_flops and known.copy_bandwidth:
        source = f"rates measured on {gpu.title}"
    found, dates = {}, {}
    for rates in rates_here(gpu):
        if isinstance(rates, MeasuredDevice):
            one = {"product_flops": rates.product_flops, "copy_bandwidth": rates.copy_bandwidth}
        elif isinstance(rates, MeasuredLink):
            one = {"host_bandwidth": min(rates.to_device, rates.to_host), "host_both": rates.both}
        else:
            one = {"node_bandwidth": rates.bandwidth}
        one = {name: rate for name, rate in one.items() if not _is_stated(gpu, name)}
        found |= one
        dates |= dict.fromkeys(one, rates.date)
    kernels = dates.get("product_flops") or dates.get("copy_bandwidth")
    if kernels:
        source = f"rates measured on this machine on {kernels}"
    if "node_bandwidth" in dates:
        source += f", between its GPUs on {dates['node_bandwidth']}"
    return dataclasses.replace(known, **found), source


def _is_stated(gpu: Gpu, name: str) -> bool:
    """Returns whether the user stated a rate (a field of `Measured`) or the published one."""
    keys = next(one.published for one in MEASURED.values() if one.field == name)
    return bool({"measured", *keys}.intersection(gpu.stated))


def published_rates(gpu: Gpu) -> Achieved:
    """Returns the published peaks of a card; times computed with them are lower bounds."""
    return Achieved(
        card=gpu,
        fusion_bandwidth=gpu.memory_bandwidth,
        host_both=2 * gpu.host_bandwidth,
        launch_seconds=0.0,
        # Two lengths, because `attention_share` interpolates between two of them.
        attention={1: 1.0, 2: 1.0},
        source="published peaks",
    )


def rates_here(gpu: Gpu) -> list[MeasuredDevice | MeasuredLink | MeasuredNode]:
    """Returns the rates that were measured on this machine with the same card."""
    found = kept_rates(MeasuredDevice, MeasuredLink, MeasuredNode)
    cards = [gpu_of_device(rates.device_kind) for rates in found]
    return [
        rates
        for rates, card in zip(found, cards, strict=True)
        if card is not None and card.name == gpu.name
    ]
