"""Computes how long a compiled step is expected to take, and how much of each transfer is hidden.

On a GPU matrix products and kernels that are bound by memory follow one another on one stream, so
their times add; the roofline's bound, the longer of both, was 0.42 to 0.52 of the measured time of
seven programs on an H100 and an H200. Here each kernel takes the longer of its products and its
memory at rates that programs reach, in addition a launch, and the schedule is replayed: 0.91 to
1.04 of the measured times of 14 of 15 programs (`benchmarks/results/foresight.json`).
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zerojax.forecasting.forecast_numbers import Expected, ExpectedItem, TrafficRow
from zerojax.forecasting.hlo.host_copies import TO_DEVICE
from zerojax.forecasting.hlo.timeline import ATTENTION, COLLECTIVE, COPY, HOST_COPY, PRODUCT
from zerojax.forecasting.replay import Replayed, replay
from zerojax.forecasting.roofline import link_bandwidth
from zerojax.hardware.gpus import Gpu
from zerojax.hardware.gpus.achieved import Achieved, achieved_rates
from zerojax.plan.offload_costs import TierRates, rates_of

Facts = dict[str, Any]

WIRE, FROM_HOST, INTO_HOST = "wire", "from host", "to host"
"""Links. All collectives share one, since NCCL runs one at a time unless the program permits more,
and then they share the same wires."""
NUM_ITEMS = 5
"""Number of the longest items on the page."""


def expected_time(
    facts: Facts,
    gpu: Gpu,
    mesh: Mapping[str, int],
    dtype: str,
    *,
    folder: str | None,
    disk_in_pass: float,
    disk_after: float,
    link_after: float,
    model_flops: float,
    model_peak: float | None,
    tokens: int | None,
) -> Expected | None:
    """Computes the expected time of a compiled step.

    Args:
      facts: of the compiled step.
      gpu: its card.
      mesh: {mesh axis: size}, outermost axis first.
      dtype: of the matrix products.
      folder: of files of offload, whose disk may have been measured.
      disk_in_pass: seconds of files that are read and written beside the forward and backward
        pass, and not by the program; they are added as far as they are longer than these.
      disk_after: seconds of files in an update after the backward pass; they are added as far as
        they are longer than `link_after`, which the program contains.
      link_after: seconds of the link to host memory in an update after the backward pass.
      model_flops: FLOPs of one device without recomputation; model_peak: published FLOP per second
        for them. Their quotient over the step is the MFU.
      tokens: tokens of one global batch.

    Returns:
      The time; None if the card has no rate for the dtype, or the program states nothing that
      takes time.
    """
    reached = achieved_rates(gpu)
    found = replay_at(facts, reached, mesh, dtype, folder=folder)
    if found is None or not found.seconds:
        return None
    # The program contains the update's copies, and these cannot hide the files of the pass.
    passes = max(found.seconds - link_after, 0.0)
    seconds = found.seconds + max(disk_in_pass - passes, 0.0) + max(disk_after - link_after, 0.0)
    kinds: dict[str, float] = collections.defaultdict(float)
    for (kind, _), taken in found.kernels.items():
        kinds[kind] += taken
    return Expected(
        seconds=seconds,
        product_seconds=kinds[PRODUCT],
        attention_seconds=kinds[ATTENTION],
        # What is neither a product nor attention is bound by memory: fusions and copies.
        memory_seconds=found.busy - kinds[PRODUCT] - kinds[ATTENTION],
        wire_seconds=found.waited_for(COLLECTIVE),
        host_seconds=found.waited_for(HOST_COPY),
        disk_seconds=seconds - found.seconds,
        items=tuple(_items(found, facts)),
        source=reached.source,
        mfu=model_flops / (seconds * model_peak) if model_peak else None,
        tokens_per_second=tokens / seconds if tokens else None,
    )


def replay_at(
    facts: Facts, reached: Achieved, mesh: Mapping[str, int], dtype: str, *, folder: str | None
) -> Replayed | None:
    """Replays a compiled step at given rates; None if the card has none for the dtype.

    Rates of the link to host memory that were measured on this machine replace those of the card.
    """
    if not reached.card.peak_flops(dtype):
        return None
    rates = rates_of(reached.card, folder)
    rates = dataclasses.replace(rates, both=min(rates.both, reached.host_both))
    return replay(
        facts["timeline"],
        kernel=_seconds_of_kernel(reached, dtype),
        transfer=_link_of_transfer(facts, reached.card, mesh, rates),
    )


def _seconds_of_kernel(reached: Achieved, dtype: str) -> Callable[[list[Any]], float]:
    def seconds(entry: list[Any]) -> float:
        _, kind, times, flops, eight_bits, moved, keys, _ = entry
        peak = reached.card.peak_flops(dtype, eight_bits)
        assert peak is not None
        # A call with few keys per query does too little work to reach the rate of long sequences.
        share = reached.attention_share(keys) if kind == ATTENTION else 1.0
        # Other kernels are fusions, whose reached bandwidth was measured apart from plain copies.
        is_plain = kind in (COPY, PRODUCT, ATTENTION)
        bandwidth = reached.card.memory_bandwidth if is_plain else reached.fusion_bandwidth
        # The launch is inside the product: a kernel in a loop is launched in every iteration.
        return times * (max(flops / (peak * share), moved / bandwidth) + reached.launch_seconds)

    return seconds


def _link_of_transfer(
    facts: Facts, card: Gpu, mesh: Mapping[str, int], rates: TierRates
) -> Callable[[str, int], tuple[str, float]]:
    wire = [collective_seconds(one, card, mesh) for one in facts["collectives"]]
    # Where copies of both directions are in flight, they share what the link carries both ways.
    both = rates.both / 2

    def link(kind: str, index: int) -> tuple[str, float]:
        if kind == COLLECTIVE:
            return WIRE, wire[index]
        copy = facts["host_copies"][index]
        inward = copy["direction"] == TO_DEVICE
        alone = rates.to_device if inward else rates.to_host
        rate = min(alone, both) if copy["opposite_bytes"] else alone
        return (FROM_HOST if inward else INTO_HOST), copy["bytes"] / rate

    return link


def collective_seconds(one: Facts, card: Gpu, mesh: Mapping[str, int]) -> float:
    """Returns the seconds of one execution of a collective on its link."""
    row = TrafficRow(
        kind=one["kind"],
        axis=one["axis"],
        dtype=one["dtype"],
        count=1,
        payload_bytes=one["payload_bytes"],
        wire_bytes=one["wire_bytes"],
        loop_depth=one["loop_depth"],
        crosses_nodes=one["crosses_nodes"],
        hidden=0.0,
        group=tuple(one["group"]),
    )
    return one["wire_bytes"] / link_bandwidth(card, mesh, row)


def _items(found: Replayed, facts: Facts) -> Sequence[ExpectedItem]:
    """Returns the longest items of a step, the longest first: kernels by their name, and waiting
    for transfers."""
    # Kernels of different kinds may have the same line, and a person looks for the line.
    taken: dict[str, float] = collections.defaultdict(float)
    for (_, where), seconds in found.kernels.items():
        taken[facts["places"][where]] += seconds
    for (kind, index), seconds in found.waited.items():
        if kind == COLLECTIVE:
            one = facts["collectives"][index]
            taken[f"waiting for {one['kind']}s over {one['axis']}"] += seconds
        else:
            direction = facts["host_copies"][index]["direction"]
            taken[f"waiting for copies {direction.replace('_', ' ')}"] += seconds
    longest = sorted(taken.items(), key=lambda item: -item[1])[:NUM_ITEMS]
    return [ExpectedItem(what=what, seconds=s) for what, s in longest if s > 0 and math.isfinite(s)]
