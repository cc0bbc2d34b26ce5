"""Costs of a pipeline: idle time, balance, buffers and messages.

Counts what the executor does in each run of the table, masked slots included; never knows a model's
parameters, a program or a device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from zerojax.plan.schedules import SCHEDULES, Costs, Simulation, TickRun, simulate
from zerojax.plan.schedules.simulation import bubble_formula
from zerojax.plan.state_layout import PipelineLayout

TRAINING_FACTOR = 3
"""Forward and backward of a model over its forward."""

HEAD_FACTOR = 3
"""The last virtual stage does the head's forward and backward in its F slot."""

EMBED_BACKWARD_FACTOR = 3
"""Forward, done again, and backward of the embedding, behind the first virtual stage's B."""


def slot_costs(layout: PipelineLayout) -> Costs:
    """Time of F, B and W, with 1 for a forward of the layers, as the executor computes them.

    B makes gradients of inputs (1) and, where no W follows, of weights (1). W goes back through the
    chunk once more for the gradients of weights (2). With the stash `input` each of them first
    computes the forward again. What activation checkpointing inside a layer repeats is left out.
    """
    again = float(layout.table.stash == "input")
    split = layout.schedule.splits_backward
    return Costs(1.0, 1.0 + again, 2.0 + again if split else 1.0)


def ticks_of(layout: PipelineLayout, slot: str) -> int:
    """Ticks in which every device computes a slot, masked where it idles.

    Args:
      slot: "forward", "backward", "weight", "embed", "head" or "embed_backward" (attributes
        of `TickRun`).
    """
    return sum(_length(run) for run in layout.table.runs if getattr(run, slot))


def bubble(layout: PipelineLayout) -> float:
    """Share of a step's slots in which a device computes nothing of use, stages being equal.

    All stages are in step and every slot of a run takes its time on all of them, as the executor
    does it; `slot_costs` are the times.
    """
    schedule, times = layout.schedule, slot_costs(layout).of(layout.schedule)
    whole = sum(
        _length(run) * sum(times[kind] for kind in _kinds(run)) for run in layout.table.runs
    )
    work = schedule.num_microbatches * schedule.num_chunks * sum(times.values())
    return max(0.0, 1 - work / whole)


def field_bubble(layout: PipelineLayout) -> float:
    """The same as papers count it: no stage waits for anything but its inputs.

    (p-1)/(m+p-1) for 1f1b and gpipe, with p stages and m microbatches.
    """
    return _simulated(layout).asynchronous_bubble


def in_flight(layout: PipelineLayout) -> tuple[int, ...]:
    """Most microbatches that each stage holds at a time, one for each chunk they are held in."""
    return _simulated(layout).in_flight


def bubble_of_more(layout: PipelineLayout) -> float | None:
    """`bubble` with twice as many microbatches; None for a schedule without a formula."""
    schedule = layout.schedule
    if schedule.name not in SCHEDULES or schedule.name == "1f1b_classic":
        return None
    return bubble_formula(
        schedule.name,
        stages=schedule.num_stages,
        microbatches=2 * schedule.num_microbatches,
        chunks=schedule.num_chunks,
        costs=slot_costs(layout),
    )


@functools.lru_cache(maxsize=2)
def _simulated(layout: PipelineLayout) -> Simulation:
    return simulate(layout.schedule, slot_costs(layout))


def chunk_flops(layout: PipelineLayout) -> tuple[float, ...]:
    """Forward FLOPs of one microbatch in each virtual stage, embedding and head where they are."""
    flops = [number * layout.layer_flops for number in layout.layers]
    flops[0] += layout.embed_flops
    flops[-1] += layout.head_flops
    return tuple(flops)


def stage_flops(layout: PipelineLayout) -> tuple[float, ...]:
    """The same of each stage: the sum over its chunks."""
    return by_stage(layout, chunk_flops(layout))


def by_stage(layout: PipelineLayout, values: Sequence[float]) -> tuple[float, ...]:
    """Sums over the chunks of each stage of one value per virtual stage."""
    schedule = layout.schedule
    sums = [0.0] * schedule.num_stages
    for virtual, value in enumerate(values):
        sums[schedule.locate(virtual)[0]] += value
    return tuple(sums)


def balance(layout: PipelineLayout) -> float:
    """What the forward of a tick costs, over the mean of the virtual stages.

    Where padding is computed, all of them compute as many rows as the longest has layers; the
    dearest has the embedding or the head besides.
    """
    flops = math.fsum(chunk_flops(layout))
    if layout.skips_padding:
        return max(chunk_flops(layout)) * len(layout.layers) / flops if flops else 1.0
    ends = [0.0] * len(layout.layers)
    ends[0] += layout.embed_flops
    ends[-1] += layout.head_flops
    tick = layout.chunk_rows * layout.layer_flops + max(ends)
    return tick * len(layout.layers) / flops if flops else 1.0


def executed_flops(layout: PipelineLayout) -> float:
    """FLOPs that one device goes through in a step, masked slots and padding included.

    Embedding and head are computed where a run has them, the embedding's forward again before its
    backward. Where padding is passed over it is what a device waits for: in the forward slot the
    dearest of the virtual stages with its embedding or head, in the others the longest.
    """
    times, chunk = slot_costs(layout).of(layout.schedule), layout.chunk_rows * layout.layer_flops
    chunk *= layout.schedule.num_chunks  # of which the times are those of one
    total = 0.0
    for run in layout.table.runs:
        tick = sum(times[kind] for kind in _kinds(run)) * chunk
        ends = run.embed * layout.embed_flops, run.head * HEAD_FACTOR * layout.head_flops
        tick += _forward_ends(layout, *ends) if run.forward else 0.0
        tick += run.embed_backward * EMBED_BACKWARD_FACTOR * layout.embed_flops
        total += _length(run) * tick
    return total


def _forward_ends(layout: PipelineLayout, embed: float, head: float) -> float:
    """What embedding and head add to the forward slot of the longest chunk."""
    if not layout.skips_padding:
        return embed + head
    parts = [count * layout.layer_flops for count in layout.layers]
    longest = max(parts)
    parts[0] += embed
    parts[-1] += head
    return max(parts) - longest


def useful_flops(layout: PipelineLayout) -> float:
    """FLOPs of one device's share of a step: three forward passes of the model over its stages.

    As everywhere for model FLOPs, nothing that is computed again counts.
    """
    whole = layout.embed_flops + layout.num_layers * layout.layer_flops + layout.head_flops
    return TRAINING_FACTOR * whole * layout.schedule.num_microbatches / layout.schedule.num_stages


def activation_bytes(layout: PipelineLayout) -> int:
    """Of what travels from stage to stage for one microbatch of one data shard."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in layout.activations)


def buffer_bytes(layout: PipelineLayout) -> dict[str, tuple[int, int]]:
    """Buffer -> (slots, bytes of each slot), the spare slot included; the same on every device.

    `sent` are the gradients that leave at the end of a tick and arrive in the next.
    """
    table, message = layout.table, activation_bytes(layout)
    buffers = {
        "residuals": (table.num_residuals + 1, layout.stash_bytes),
        "inputs": (table.num_inputs + 1, message),
        "gradients": (table.num_gradients + 1, message),
        "sent": (1, message),
    }
    return {
        name: (slots, size)
        for name, (slots, size) in buffers.items()
        if name != "residuals" or table.num_residuals
    }


def total_buffer_bytes(layout: PipelineLayout) -> int:
    """Bytes of all buffers on each device."""
    return sum(slots * size for slots, size in buffer_bytes(layout).values())


def stash_bytes_of_stages(layout: PipelineLayout) -> tuple[int, ...]:
    """Bytes that each stage keeps for its backward passes at most; the buffer has as many slots
    as the stage that keeps most."""
    return tuple(number * layout.stash_bytes for number in in_flight(layout))


def num_permutes(layout: PipelineLayout) -> int:
    """Messages to neighbours that a device in the middle sends in a step, masked ticks included.

    One in each tick of a run, for each direction in which the run receives something; from one
    chunk to another of the same stage nothing is sent.
    """
    return sum(
        _length(run) * sum(direction != "local" for _, direction in run.receives)
        for run in layout.table.runs
    )


def message_bytes(layout: PipelineLayout) -> int:
    """Bytes that such a device sends to its neighbours in a step, both directions."""
    return num_permutes(layout) * activation_bytes(layout)


def _length(run: TickRun) -> int:
    return run.stop - run.start


def _kinds(run: TickRun) -> list[str]:
    slots = (("F", run.forward), ("B", run.backward), ("W", run.weight))
    return [kind for kind, used in slots if used]
