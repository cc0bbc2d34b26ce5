"""How a schedule looks in a terminal: plain characters, at most 100 columns.

Knows tables and what was simulated; the drawing for a page is in `svg`.
"""

from __future__ import annotations

import textwrap

from zerojax.schedules.simulation import Simulation
from zerojax.schedules.table import KINDS, Operation, Schedule

WIDTH = 100
MAX_LINES = 80


def chunk_letter(chunk: int) -> str:
    """a, b, c ...; behind z the number itself."""
    return chr(ord("a") + chunk) if chunk < 26 else f".{chunk}"


def label(operation: Operation, num_chunks: int) -> str:
    """The microbatch, and its chunk as a letter where there are several: `4` or `4b`."""
    letter = chunk_letter(operation.chunk) if num_chunks > 1 else ""
    return f"{operation.microbatch}{letter}"


def draw(schedule: Schedule) -> str:
    """One row for each stage and slot, one column for each tick, `.` where a slot is idle.

    A table that is too wide goes on below; of one that is too long the middle is left out.
    """
    rows = _label_rows(schedule)
    heads = [head for head, _ in rows]
    width = max(len(head) for head in heads)
    column = 1 + max(len(str(schedule.num_ticks - 1)), *(len(c) for _, row in rows for c in row))
    per_block = max(1, (WIDTH - width) // column)
    starts = list(range(0, schedule.num_ticks, per_block))
    kept = max(2, MAX_LINES // (len(rows) + 2))
    blocks = []
    for place, start in enumerate(starts):
        if len(starts) > kept and place == kept - 1:
            left_out = f"... ticks {start} to {starts[-1] - 1} are left out"
            blocks.append([f"{left_out}; `zerojax schedule ... --svg FILE` draws them all"])
        if place < kept - 1 or place == len(starts) - 1:
            stop = min(start + per_block, schedule.num_ticks)
            ticks = [str(tick) for tick in range(start, stop)]
            lines = [("tick", ticks)] + [(head, row[start:stop]) for head, row in rows]
            blocks.append(
                [h.ljust(width) + "".join(c.rjust(column) for c in row) for h, row in lines]
            )
    return "\n\n".join("\n".join(block) for block in blocks)


def _label_rows(schedule: Schedule) -> list[tuple[str, list[str]]]:
    """(heading, one text for each tick), stage by stage and slot by slot."""
    kinds = KINDS if schedule.splits_backward else KINDS[:2]
    rows = []
    for stage in range(schedule.num_stages):
        for kind in kinds:
            texts = [
                next((label(o, schedule.num_chunks) for o in row[stage] if o.kind == kind), ".")
                for row in schedule.table
            ]
            name = f"stage {stage}" if kind == "F" else ""
            rows.append((f"{name:<{len(f'stage {schedule.num_stages - 1}')}} {kind}", texts))
    return rows


def describe(schedule: Schedule, simulation: Simulation) -> str:
    """What the picture shows, in words and numbers."""
    split = schedule.splits_backward
    slots = "F forward, B backward" + (" (gradient of the input), W gradient of weights" * split)
    chunks = schedule.num_chunks
    lines = [("slots", f"{slots}; the numbers are microbatches")]
    if chunks > 1:
        names = ", ".join(map(chunk_letter, range(chunks))) if chunks < 7 else "a, b, c, ..."
        lines.append(("chunks", f"{names}: the {chunks} parts of the model on each stage"))
    unit = "microbatches" if chunks == 1 else f"activations of 1/{chunks} of a stage"
    in_flight = " ".join(map(str, simulation.in_flight))
    lines += [
        ("ticks", f"{simulation.num_ticks}"),
        ("bubble", _describe_bubble(simulation)),
        ("in flight", f"{in_flight} {unit} at most, stage by stage"),
    ]
    wrapped = []
    for head, text in lines:
        first, later = f"{head:<11}", " " * 11
        wrapped += textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=later)
    return "\n".join(wrapped)


def _describe_bubble(simulation: Simulation) -> str:
    return (
        f"{simulation.bubble:.1%} of the time with all stages in step, as zerojax runs them; "
        f"{simulation.asynchronous_bubble:.1%} if no stage waited for the others"
    )
