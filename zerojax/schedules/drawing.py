"""Draws a pipeline schedule as text of at most 100 columns, and as SVG."""

from __future__ import annotations

import textwrap

from zerojax.config.display import as_html
from zerojax.schedules.known_schedules import SCHEDULES
from zerojax.schedules.schedule_table import KINDS, Operation, Schedule
from zerojax.schedules.simulation import Costs, Simulation, simulate, tick_starts, used_slots

WIDTH = 100
MAX_LINES = 80
SHORT_ROWS = 36
ELLIPSIS = " ..."

COLOURS = {"F": "#4c78a8", "B": "#e45756", "W": "#54a24b"}
MEANINGS = {"F": "forward", "B": "backward", "W": "gradient of the weights"}
LANE, GAP, LEFT, TOP = 28, 6, 70, 54
SMALLEST_BOX = 22.0
"""Width in pixels of the box of the cheapest operation; the box is narrower if another operation
costs more than 10 times as much."""


def chunk_letter(chunk: int) -> str:
    """Returns the letter of a chunk (a for 0), or from chunk 26 on its number, such as `.26`."""
    return chr(ord("a") + chunk) if chunk < 26 else f".{chunk}"


def label(operation: Operation, num_chunks: int) -> str:
    """Returns the text of an operation: its microbatch, with a letter for its chunk if there are
    several, such as `4` or `4b`."""
    letter = chunk_letter(operation.chunk) if num_chunks > 1 else ""
    return f"{operation.microbatch}{letter}"


def draw(schedule: Schedule) -> str:
    """Draws a schedule as text with one row per stage and slot, one column per tick, and `.` for an
    idle slot.

    Wide tables continue below; the middle of long tables is left out.
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
            left_out = f"... ticks {start} to {starts[-1] - 1} are not shown"
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
    """Draws a schedule as one block of text; the middle of a wide table is left out.

    A table with more than `SHORT_ROWS` rows is not drawn; the text then states the command that
    draws it.

    Args:
      schedule: the schedule.
      width: number of available columns.
    """
    rows = _label_rows(schedule)
    if len(rows) > SHORT_ROWS:
        return f"{len(rows)} rows are too many to draw here\n{_see(schedule)}"
    heads = [head for head, _ in rows]
    left = max(len(head) for head in heads)
    column = 1 + max(len(str(schedule.num_ticks - 1)), *(len(c) for _, row in rows for c in row))
    shown, gap = list(range(schedule.num_ticks)), schedule.num_ticks
    if left + column * len(shown) > width:
        kept = max(2, (width - left - len(ELLIPSIS)) // column)
        gap = (kept + 1) // 2
        shown = shown[:gap] + shown[-(kept - gap) :]
    lines = []
    for head, cells in [("tick", [str(tick) for tick in range(schedule.num_ticks)]), *rows]:
        texts = [cells[tick].rjust(column) for tick in shown]
        if gap < schedule.num_ticks:
            texts.insert(gap, ELLIPSIS)
        lines.append(head.ljust(left) + "".join(texts))
    if gap < schedule.num_ticks:
        left_out = schedule.num_ticks - len(shown)
        lines += [f"{left_out} ticks are left out", _see(schedule)]
    return "\n".join(lines)


def _see(schedule: Schedule) -> str:
    """Returns a text with the command that draws the whole schedule."""
    if schedule.name not in SCHEDULES:
        return "see `zerojax schedule FILE.csv --svg FILE`"
    words = f"{schedule.name} --stages {schedule.num_stages} "
    words += f"--microbatches {schedule.num_microbatches}"
    words += f" --chunks {schedule.num_chunks}" * (schedule.num_chunks > 2)  # 2 is the default
    return f"see `zerojax schedule {words} --svg FILE`"


def _label_rows(schedule: Schedule) -> list[tuple[str, list[str]]]:
    """Returns (heading, one text for each tick) for every stage and slot."""
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
    """Describes a drawn schedule in words and numbers."""
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
        f"{simulation.bubble:.1%} of the time with all stages in lockstep, as zerojax runs them; "
        f"{simulation.asynchronous_bubble:.1%} if stages waited only for their inputs"
    )


def draw_svg(schedule: Schedule, costs: Costs | None = None) -> str:
    """Draws a schedule as SVG: one lane per stage over time, in lockstep, with a box for each
    operation.

    The width of a box is the operation's cost, later chunks are lighter, and the tooltip of a box
    states its operation, stage and tick.

    Raises:
      ScheduleError: the schedule cannot run.
    """
    costs = costs or Costs()
    simulation = simulate(schedule, costs)
    starts, times = tick_starts(schedule, costs), costs.of(schedule)
    scale = _pixels_per_time(list(times.values()))
    boxes = []
    for tick, (row, kinds) in enumerate(zip(schedule.table, used_slots(schedule), strict=True)):
        left = starts[tick]
        for kind in kinds:
            for stage, cell in enumerate(row):
                for operation in cell:
                    if operation.kind == kind:
                        x, width = LEFT + left * scale, times[kind] * scale
                        boxes.append(_box(schedule, operation, stage, tick, x, width))
            left += times[kind]
    width = max(LEFT + starts[-1] * scale + GAP, 760)
    height = TOP + schedule.num_stages * (LANE + GAP) + 26
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}" font-family="sans-serif" font-size="12">',
        f"<title>{as_html(_title(schedule))}</title>",
        f'<rect width="{width:.0f}" height="{height}" fill="#ffffff"/>',
        *_heading(schedule, simulation),
        *_lanes(schedule, starts[-1] * scale),
        *boxes,
        *_legend(schedule, height),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _pixels_per_time(times: list[float]) -> float:
    """Returns the scale, in pixels per unit of time, at which the cheapest operation has a readable
    box.

    The box is narrower if another operation costs more than 10 times as much.
    """
    cheapest, dearest = min(time for time in times if time > 0), max(times)
    return SMALLEST_BOX / max(cheapest, dearest / 10)


def _title(schedule: Schedule) -> str:
    chunks = f", {schedule.num_chunks} chunks" if schedule.num_chunks > 1 else ""
    return (
        f"{schedule.name}: {schedule.num_stages} stages, "
        f"{schedule.num_microbatches} microbatches{chunks}"
    )


def _text(x: float, y: float, text: str, extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{extra}>{as_html(text)}</text>'


def _heading(schedule: Schedule, simulation: Simulation) -> list[str]:
    numbers = simulation.in_flight
    in_flight = " ".join(map(str, numbers)) if len(numbers) <= 16 else f"at most {max(numbers)}"
    return [
        _text(GAP, 18, _title(schedule), ' font-size="15" font-weight="bold"'),
        _text(
            GAP,
            38,
            f"{simulation.num_ticks} ticks, bubble {simulation.bubble:.1%} in lockstep "
            f"({simulation.asynchronous_bubble:.1%} asynchronous), in flight {in_flight}",
        ),
    ]


def _lanes(schedule: Schedule, width: float) -> list[str]:
    """Draws the name of each stage and the grey background of its idle time."""
    lanes = []
    for stage in range(schedule.num_stages):
        y = TOP + stage * (LANE + GAP)
        lanes.append(_text(GAP, y + LANE / 2 + 4, f"stage {stage}"))
        lanes.append(
            f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{LANE}" fill="#e8e8e8"/>'
        )
    return lanes


def _box(
    schedule: Schedule, operation: Operation, stage: int, tick: int, x: float, width: float
) -> str:
    y = TOP + stage * (LANE + GAP)
    opacity = 1 - 0.5 * operation.chunk / max(1, schedule.num_chunks - 1)
    text = label(operation, schedule.num_chunks)
    size = max(5, min(12, int(1.6 * width / len(text))))
    return (
        f'<g class="operation"><title>{operation}, stage {stage}, tick {tick}</title>'
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LANE}" stroke="#ffffff" '
        f'fill="{COLOURS[operation.kind]}" fill-opacity="{opacity:.2f}"/>'
        f'<text x="{x + width / 2:.1f}" y="{y + LANE / 2 + 4:.1f}" text-anchor="middle" '
        f'font-size="{size}" fill="#000000">{text}</text></g>'
    )


def _legend(schedule: Schedule, height: float) -> list[str]:
    parts, x = [], float(GAP)
    for kind in ("F", "B", "W") if schedule.splits_backward else ("F", "B"):
        parts.append(
            f'<rect x="{x:.1f}" y="{height - 20}" width="12" height="12" fill="{COLOURS[kind]}"/>'
        )
        parts.append(_text(x + 17, height - 10, f"{kind} {MEANINGS[kind]}"))
        x += 40 + 7 * len(MEANINGS[kind])
    parts.append(_text(x, height - 10, "grey: idle; numbers: microbatches"))
    return parts
