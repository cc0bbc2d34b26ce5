"""Formats the pipeline section of a plan's page, and the same facts as a dictionary."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from zerojax.pipeline import pipeline_costs as costs
from zerojax.placement.device_mesh import DATA
from zerojax.placement.state_layout import PipelineLayout
from zerojax.placement.table import Placement
from zerojax.schedules.drawing import WIDTH, draw_short
from zerojax.schedules.schedule_table import format_cell
from zerojax.tracing import trees

MAX_CELLS = 20_000
"""Limit of ticks x stages for a table in the dictionary."""

MAX_STAGE_ROWS = 16
"""Maximum stages with one row each; beyond it the middle is left out."""

ZERO_SENTENCES = (
    "zero=0: gradients are summed over data once per step, after the last tick",
    "zero=1: weights are gathered once per step, gradients scattered once, after the last tick",
    "zero=2: weights are gathered once per step; gradients of the layers are scattered in the B "
    "slot of every tick, so full gradients are never stored",
    "zero=3: weights of the layers are gathered in the F slot of every tick and again in the B "
    "slot, which scatters their gradients",
)


def pipeline_line(layout: PipelineLayout) -> str:
    """Formats a short summary of a pipeline: schedule, stages and idle share (bubble)."""
    schedule = layout.schedule
    chunks = f" x {schedule.num_chunks} chunks" if schedule.num_chunks > 1 else ""
    return (
        f"pipeline {schedule.name}, {schedule.num_stages} stages{chunks}, "
        f"bubble {costs.bubble(layout):.1%}"
    )


def pipeline_lines(layout: PipelineLayout, placement: Placement) -> list[str]:
    """Formats the pipeline section of a plan's page: schedule, stages, bytes and a picture, at most
    100 columns."""
    schedule = layout.schedule
    lines = [
        f"pipeline: {schedule.name}, {schedule.num_stages} stages, {schedule.num_microbatches} "
        f"microbatches, {schedule.num_ticks} ticks, stash {layout.table.stash}",
        *_wrap(_bubble_sentence(layout)),
        *_stage_rows(layout, placement),
        *_wrap(_balance_sentence(layout)),
        *_wrap(_buffer_sentence(layout)),
        *_wrap(_message_sentence(layout)),
    ]
    if placement.axis_sizes[DATA] > 1:
        lines += _wrap(ZERO_SENTENCES[placement.zero])
    lines += _wrap(_shared_sentence(layout, placement))
    picture = draw_short(schedule, WIDTH - 2).split("\n")
    return [*lines, "", *(f"  {line}" for line in picture)]


def _bubble_sentence(layout: PipelineLayout) -> str:
    sentence = (
        f"bubble {costs.bubble(layout):.1%} with all stages in lockstep, as executed; "
        f"{costs.field_bubble(layout):.1%} if stages waited only for their inputs, as in papers"
    )
    if layout.schedule.name in ("1f1b", "gpipe"):
        sentence += ", (p-1)/(m+p-1)"
    larger = costs.bubble_of_more(layout)
    if larger is not None and layout.schedule.num_stages > 1:
        sentence += f"; {larger:.1%} with num_microbatches={2 * layout.schedule.num_microbatches}"
    return sentence


def _stage_rows(layout: PipelineLayout, placement: Placement) -> list[str]:
    schedule, flops = layout.schedule, costs.stage_flops(layout)
    rows: list[Sequence[str]] = [
        ("stage", "layers", "parameters", "forward FLOP", "in flight", "stash")
    ]
    parameters, stash = stage_parameters(layout, placement), costs.stash_bytes_of_stages(layout)
    for stage, number in enumerate(costs.in_flight(layout)):
        rows.append(
            (
                str(stage),
                " + ".join(map(str, _chunks(layout, stage))),
                trees.format_count(parameters[stage]),
                trees.format_count(flops[stage]),
                str(number),
                trees.format_bytes(stash[stage]),
            )
        )
    if schedule.num_stages > MAX_STAGE_ROWS:
        half = MAX_STAGE_ROWS // 2
        rows = [*rows[: half + 1], ("...",) * 6, *rows[-half:]]
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    return [
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


def _chunks(layout: PipelineLayout, stage: int) -> list[int]:
    """Returns the number of layers in each chunk of a stage."""
    schedule = layout.schedule
    places = [schedule.locate(virtual) for virtual in range(schedule.num_virtual_stages)]
    found = {chunk: layout.layers[v] for v, (where, chunk) in enumerate(places) if where == stage}
    return [found[chunk] for chunk in sorted(found)]


def stage_parameters(layout: PipelineLayout, placement: Placement) -> tuple[int, ...]:
    """Returns the number of parameters of each stage's layers, unpadded, before ZeRO and tensor
    parallelism split them."""
    layer = sum(
        trees.num_elements(placement.leaves[name].shape) // layout.num_layers
        for name in layout.stacked
    )
    return tuple(int(layers) * layer for layers in costs.by_stage(layout, layout.layers))


def shared_parameters(layout: PipelineLayout, placement: Placement) -> int:
    """Returns the number of parameters that every stage has, which are those of embedding and
    head."""
    return sum(
        trees.num_elements(leaf.shape)
        for name, leaf in placement.leaves.items()
        if name not in layout.stacked
    )


def _balance_sentence(layout: PipelineLayout) -> str:
    part = "chunk" if layout.schedule.num_chunks > 1 else "stage"
    sentence = (
        f"balance: every tick takes {costs.balance(layout):.2f} times the mean {part}, as long "
    )
    sentence += f"as the slowest, which has {_what_is_slowest(layout)}"
    padding = layout.schedule.num_virtual_stages * layout.chunk_rows - layout.num_layers
    if padding:
        how = "passed over" if layout.skips_padding else "computed like layers"
        sentence += f"; {padding} rows of each stack are padding, {how}"
    return sentence


def _what_is_slowest(layout: PipelineLayout) -> str:
    if not layout.embed_flops and not layout.head_flops:
        return "the same work as the others"
    return "the head" if layout.head_flops >= layout.embed_flops else "the embedding"


def _buffer_sentence(layout: PipelineLayout) -> str:
    parts = [
        f"{name} {slots} x {trees.format_bytes(size)}"
        for name, (slots, size) in costs.buffer_bytes(layout).items()
    ]
    total = trees.format_bytes(costs.total_buffer_bytes(layout))
    return f"buffers on every device: {', '.join(parts)} = {total} (including one unused slot each)"


def _message_sentence(layout: PipelineLayout) -> str:
    number, size = costs.num_permutes(layout), costs.activation_bytes(layout)
    return (
        f"sent by a device to neighbour stages: {number} x {trees.format_bytes(size)} = "
        f"{trees.format_bytes(costs.message_bytes(layout))} per step, both directions, idle ticks "
        "included"
    )


def _shared_sentence(layout: PipelineLayout, placement: Placement) -> str:
    count = trees.format_count(shared_parameters(layout, placement))
    if placement.zero == 0:
        how = "are replicated on every stage; their gradients are summed over data and stage"
    else:
        how = (
            "are sharded over data and stage; all stages gather them and reduce-scatter their "
            "gradients"
        )
    return f"embedding and head, {count} parameters, {how} once per step"


def _wrap(sentence: str) -> list[str]:
    return textwrap.wrap(sentence, WIDTH, initial_indent="  ", subsequent_indent="    ")


def pipeline_dict(layout: PipelineLayout, placement: Placement) -> dict[str, Any]:
    """Returns the pipeline of a plan as a JSON-compatible dictionary.

    Memory and messages are in bytes.

    `table` is None if the schedule has more than `MAX_CELLS` cells.
    """
    schedule, times = layout.schedule, costs.slot_costs(layout)
    small = schedule.num_ticks * schedule.num_stages <= MAX_CELLS
    return {
        "schedule": schedule.name,
        "placement": schedule.placement,
        "num_stages": schedule.num_stages,
        "num_chunks": schedule.num_chunks,
        "num_microbatches": schedule.num_microbatches,
        "num_ticks": schedule.num_ticks,
        "table": [[format_cell(cell) for cell in row] for row in schedule.table] if small else None,
        "costs": {"forward": times.forward, "backward": times.backward, "weight": times.weight},
        "stash": layout.table.stash,
        "bubble": costs.bubble(layout),
        "field_bubble": costs.field_bubble(layout),
        "bubble_of_more": costs.bubble_of_more(layout),
        "layers": list(layout.layers),
        "in_flight": list(costs.in_flight(layout)),
        "stage_parameters": list(stage_parameters(layout, placement)),
        "shared_parameters": shared_parameters(layout, placement),
        "stage_forward_flops": list(costs.stage_flops(layout)),
        "balance": costs.balance(layout),
        "executed_flops_per_device": costs.executed_flops(layout),
        "useful_flops_per_device": costs.useful_flops(layout),
        "stage_stash_bytes": list(costs.stash_bytes_of_stages(layout)),
        "buffers": {
            name: {"slots": slots, "bytes": slots * size}
            for name, (slots, size) in costs.buffer_bytes(layout).items()
        },
        "num_permutes": costs.num_permutes(layout),
        "message_bytes": costs.message_bytes(layout),
    }
