"""Drawing of a schedule as SVG."""

from __future__ import annotations

from zerojax.config.display import as_html
from zerojax.plan.schedules.picture import label
from zerojax.plan.schedules.simulation import Costs, Simulation, simulate, tick_starts, used_slots
from zerojax.plan.schedules.table import Operation, Schedule

COLOURS = {"F": "#4c78a8", "B": "#e45756", "W": "#54a24b"}
MEANINGS = {"F": "forward", "B": "backward", "W": "gradient of the weights"}
LANE, GAP, LEFT, TOP = 28, 6, 70, 54
SMALLEST_BOX = 22.0
"""Width in pixels of the cheapest operation; less only beside one that costs over 10 times it."""


def draw_svg(schedule: Schedule, costs: Costs | None = None) -> str:
    """Lanes of stages over time, all stages in step; a box for each operation.

    The width of a box is its cost, lighter boxes are later chunks, and every box names its
    operation, stage and tick when pointed at.

    Raises:
      ScheduleError: the table cannot run.
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
    """The cheapest operation gets a box one can read, unless another costs 10 times as much."""
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
            f"{simulation.num_ticks} ticks, bubble {simulation.bubble:.1%} in step "
            f"({simulation.asynchronous_bubble:.1%} asynchronous), in flight {in_flight}",
        ),
    ]


def _lanes(schedule: Schedule, width: float) -> list[str]:
    """The name of each stage and the grey that shows through where it idles."""
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
