"""`zerojax schedule`: drawing, bubble and memory of a pipeline schedule.

This module imports no JAX.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from zerojax.config.display import show
from zerojax.plan.schedules.catalog import SCHEDULES, make_schedule
from zerojax.plan.schedules.files import write_csv
from zerojax.plan.schedules.picture import describe, draw
from zerojax.plan.schedules.simulation import Costs, simulate
from zerojax.plan.schedules.svg import draw_svg


def parse_costs(text: str) -> Costs:
    """`F,B,W` as three numbers.

    Raises:
      ValueError: it is anything else.
    """
    try:
        forward, backward, weight = (float(word) for word in text.split(","))
    except ValueError:
        raise ValueError(
            f"--costs {text!r} must be the times of F, B and W, such as --costs 1,1,1"
        ) from None
    return Costs(forward, backward, weight)


def list_names() -> str:
    """Every name and what it is good for."""
    width = max(map(len, SCHEDULES)) + 2
    lines = [f"{name:<{width}}{text}" for name, text in SCHEDULES.items()]
    return "\n".join([*lines, "", "draw one: zerojax schedule 1f1b --stages 4 --microbatches 8"])


def run(args: argparse.Namespace) -> int:
    """Prints the names, or one picture; writes the files that were asked for."""
    if args.name is None:
        show(list_names())
        return 0
    costs = parse_costs(args.costs)
    schedule = make_schedule(
        args.name, stages=args.stages, microbatches=args.microbatches, chunks=args.chunks
    )
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    lines = [
        f"{schedule.name}: {stages} stage{'s' * (stages != 1)}, "
        f"{microbatches} microbatch{'es' * (microbatches != 1)}",
        "",
        draw(schedule),
        "",
        describe(schedule, simulate(schedule, costs)),
    ]
    if args.svg:
        Path(args.svg).write_text(draw_svg(schedule, costs), encoding="utf-8")
        lines.append(f"written    {args.svg}")
    if args.csv:
        lines.append(f"written    {write_csv(schedule, args.csv)}")
    show("\n".join(lines))
    return 0
