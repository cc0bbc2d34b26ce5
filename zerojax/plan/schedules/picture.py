"""Drawing of a schedule for terminals, at most 100 columns wide."""

from __future__ import annotations

import textwrap

from zerojax.plan.schedules.catalog import SCHEDULES
from zerojax.plan.schedules.simulation import Simulation
from zerojax.plan.schedules.table import KINDS, Operation, Schedule

WIDTH = 100
MAX_LINES = 80
SHORT_ROWS = 36
GAP = " ..."


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


def draw_short(schedule: Schedule, width: int = WIDTH) -> str:
    """The same in one block: of a table that is too wide the middle is left out.

    Of more than `SHORT_ROWS` rows nothing is drawn, and where to see the rest is said.

    Args:
      width: columns that may be used.
    """
    rows = _label_rows(schedule)
    if len(rows) > SHORT_ROWS:
        return f"{len(rows)} rows are too many to draw here\n{_see(schedule)}"
    heads = [head for head, _ in rows]
    left = max(len(head) for head in heads)
    column = 1 + max(len(str(schedule.num_ticks - 1)), *(len(c) for _, row in rows for c in row))
    shown, gap = list(range(schedule.num_ticks)), schedule.num_ticks
    if left + column * len(shown) > width:
        kept = max(2, (width - left - len(GAP)) // column)
        gap = (kept + 1) // 2
        shown = shown[:gap] + shown[-(kept - gap) :]
    lines = []
    for head, cells in [("tick", [str(tick) for tick in range(schedule.num_ticks)]), *rows]:
        texts = [cells[tick].rjust(column) for tick in shown]
        if gap < schedule.num_ticks:
            texts.insert(gap, GAP)
        lines.append(head.ljust(left) + "".join(texts))
    if gap < schedule.num_ticks:
        left_out = schedule.num_ticks - len(shown)
        lines += [f"{left_out} ticks are left out", _see(schedule)]
    return "\n".join(lines)


def _see(schedule: Schedule) -> str:
    """What to type to have all of a schedule drawn."""
    if schedule.name not in SCHEDULES:
        return "see `zerojax schedule FILE.csv --svg FILE`"
    words = f"{schedule.name} --stages {schedule.num_stages} "
    words += f"--microbatches {schedule.num_microbatches}"
    words += f" --chunks {schedule.num_chunks}" * (schedule.num_chunks > 2)  # 2 is the default
    return f"see `zerojax schedule {words} --svg FILE`"


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
