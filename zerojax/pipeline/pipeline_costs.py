"""Computes the costs of a pipeline: idle time, balance, buffers and messages.

The computation counts what the executor does in each run of the schedule's table, including masked
slots. It needs no parameters, no program and no device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from zerojax.placement.state_layout import PipelineLayout
from zerojax.schedules import SCHEDULES, Costs, Simulation, TickRun, simulate
from zerojax.schedules.simulation import bubble_formula

TRAINING_FACTOR = 3
"""FLOPs of a model's forward (1) and backward (2) over those of its forward."""

HEAD_FACTOR = 3
"""FLOPs of the head in an F slot over those of its forward: forward (1) and backward (2)."""

EMBED_BACKWARD_FACTOR = 3
"""FLOPs of the embedding after the first virtual stage's B, over those of its forward: the
recomputed forward (1) and the backward (2)."""


def slot_costs(layout: PipelineLayout) -> Costs:
    """Returns the times of the F, B and W operations (forward, gradient of the input, gradient of
    the weights), in units of a forward pass of the layers.

    B computes gradients of inputs (1) and, if there is no W, also of weights (1). W goes backward
    through the chunk once more for the gradients of weights (2). With stash `input` B and W each
    first recompute the forward pass. Recomputation by checkpoints inside a layer is not counted.
    """
    again = float(layout.table.stash == "input")
    split = layout.schedule.splits_backward
    return Costs(1.0, 1.0 + again, 2.0 + again if split else 1.0)


def ticks_of(layout: PipelineLayout, slot: str) -> int:
    """Returns the number of ticks in which every device computes a slot; a stage that is idle
    computes it with a mask.

    Args:
      layout: pipeline layout.
      slot: "forward", "backward", "weight", "embed", "head" or "embed_backward" (attributes of
        `TickRun`).
    """
    return sum(_length(run) for run in layout.table.runs if getattr(run, slot))


def bubble(layout: PipelineLayout) -> float:
    """Returns the share of a step's time without useful computation, for equal stages.

    All stages run in lockstep: in each tick, every slot of the loop body (`TickRun`) takes its time
    (`slot_costs`) on every stage, also on stages where its result is discarded.
    """
    schedule, times = layout.schedule, slot_costs(layout).of(layout.schedule)
    whole = sum(
        _length(run) * sum(times[kind] for kind in _kinds(run)) for run in layout.table.runs
    )
    work = schedule.num_microbatches * schedule.num_chunks * sum(times.values())
    return max(0.0, 1 - work / whole)


def field_bubble(layout: PipelineLayout) -> float:
    """Returns the share of idle time as papers count it, in which stages wait only for their
    inputs.

    For 1f1b and gpipe it is (p-1)/(m+p-1), with p stages and m microbatches.
    """
    return _simulated(layout).asynchronous_bubble


def in_flight(layout: PipelineLayout) -> tuple[int, ...]:
    """Returns the largest number of microbatches in flight on each stage, counted once per
    chunk."""
    return _simulated(layout).in_flight


def bubble_of_more(layout: PipelineLayout) -> float | None:
    """Returns the share of idle slots (`bubble`) with twice as many microbatches; None for a
    schedule without a formula."""
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
    """Returns the forward FLOPs of one microbatch on each virtual stage, including its embedding or
    head."""
    flops = [number * layout.layer_flops for number in layout.layers]
    flops[0] += layout.embed_flops
    flops[-1] += layout.head_flops
    return tuple(flops)


def stage_flops(layout: PipelineLayout) -> tuple[float, ...]:
    """Returns the forward FLOPs of one microbatch on each stage, summed over its chunks."""
    return by_stage(layout, chunk_flops(layout))


def by_stage(layout: PipelineLayout, values: Sequence[float]) -> tuple[float, ...]:
    """Sums `values`, which has one number per virtual stage, over the virtual stages of each
    stage."""
    schedule = layout.schedule
    sums = [0.0] * schedule.num_stages
    for virtual, value in enumerate(values):
        sums[schedule.locate(virtual)[0]] += value
    return tuple(sums)


def balance(layout: PipelineLayout) -> float:
    """Returns how uneven virtual stages are: the forward cost of a tick, divided by the mean cost
    of virtual stages.

    If padding is computed, every virtual stage computes as many rows as the longest has layers; the
    most expensive virtual stage also has the embedding or the head.
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
    """Returns the FLOPs that one device executes in a step, including masked slots and padding.

    Embedding and head count in the runs that have them; the embedding's forward pass is recomputed
    before its backward pass. If padding is skipped, a device takes as long as the stage it waits
    for: in the forward slot the most expensive virtual stage with its embedding or head, in other
    slots the longest virtual stage.
    """
    times, chunk = slot_costs(layout).of(layout.schedule), layout.chunk_rows * layout.layer_flops
    chunk *= layout.schedule.num_chunks  # slot times are those of one chunk
    total = 0.0
    for run in layout.table.runs:
        tick = sum(times[kind] for kind in _kinds(run)) * chunk
        ends = run.embed * layout.embed_flops, run.head * HEAD_FACTOR * layout.head_flops
        tick += _forward_ends(layout, *ends) if run.forward else 0.0
        tick += run.embed_backward * EMBED_BACKWARD_FACTOR * layout.embed_flops
        total += _length(run) * tick
    return total


def _forward_ends(layout: PipelineLayout, embed: float, head: float) -> float:
    """Returns the FLOPs that embedding and head add to the forward slot of the longest chunk."""
    if not layout.skips_padding:
        return embed + head
    parts = [count * layout.layer_flops for count in layout.layers]
    longest = max(parts)
    parts[0] += embed
    parts[-1] += head
    return max(parts) - longest


def useful_flops(layout: PipelineLayout) -> float:
    """Returns one device's share of a step's FLOPs without recomputation: three forward passes,
    divided among the stages."""
    whole = layout.embed_flops + layout.num_layers * layout.layer_flops + layout.head_flops
    return TRAINING_FACTOR * whole * layout.schedule.num_microbatches / layout.schedule.num_stages


def activation_bytes(layout: PipelineLayout) -> int:
    """Returns the bytes that are sent from one stage to the next for one microbatch of one data
    shard."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in layout.activations)


def buffer_bytes(layout: PipelineLayout) -> dict[str, tuple[int, int]]:
    """Returns {buffer: (number of slots including a spare slot, bytes of each slot)}, the same on
    every device.

    The buffer `sent` contains the gradients that are sent at the end of a tick and received in the
    next tick.
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
    """Returns the bytes of all pipeline buffers on each device."""
    return sum(slots * size for slots, size in buffer_bytes(layout).values())


def stash_bytes_of_stages(layout: PipelineLayout) -> tuple[int, ...]:
    """Returns the largest number of bytes that each stage stores for its backward passes.

    The buffer on every device has as many slots as the stage that stores the most needs.
    """
    return tuple(number * layout.stash_bytes for number in in_flight(layout))


def num_permutes(layout: PipelineLayout) -> int:
    """Returns the number of messages per step from a device of a middle stage to its neighbours,
    including masked ticks.

    There is one message per tick of a run for each direction in which the run receives something;
    nothing is sent between chunks of the same stage.
    """
    return sum(
        _length(run) * sum(direction != "local" for _, direction in run.receives)
        for run in layout.table.runs
    )


def message_bytes(layout: PipelineLayout) -> int:
    """Returns the bytes that a device of a middle stage sends to both neighbours in a step."""
    return num_permutes(layout) * activation_bytes(layout)


def _length(run: TickRun) -> int:
    return run.stop - run.start


def _kinds(run: TickRun) -> list[str]:
    slots = (("F", run.forward), ("B", run.backward), ("W", run.weight))
    return [kind for kind, used in slots if used]
