"""`zerojax schedule`: shows a drawing, the bubble and the memory of a pipeline schedule."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from zerojax.cli.arguments import add_command
from zerojax.config.display import show
from zerojax.config.loader import user_path
from zerojax.runtime.user_files import replace_text

if TYPE_CHECKING:
    from zerojax.schedules.simulation import Costs


_HELP = """\
Without NAME all schedules are listed. NAME may be a CSV file: one line per tick, one column per
stage, cells such as F4+B0; --csv writes one to start from.

examples:
  zerojax schedule 1f1b --stages 4 --microbatches 8
  zerojax schedule interleaved --stages 4 --microbatches 8 --chunks 2 --svg interleaved.svg
  zerojax schedule zb_h1 --stages 4 --microbatches 8 --costs 1,1.2,0.8 --csv mine.csv
  zerojax schedule mine.csv"""


def add(commands) -> None:
    """Adds the command `zerojax schedule` to the parser."""
    parser = add_command(
        commands,
        "schedule",
        run,
        "draw a pipeline schedule; print its bubble and memory",
        _HELP,
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="such as 1f1b, or a CSV file")
    parser.option("--stages N", "pipeline stages", type=int)
    parser.option("--microbatches N", "microbatches in a step", type=int)
    parser.option("--chunks V", "chunks (model parts) on each stage (interleaved: 2)", type=int)
    parser.option(
        "--costs F,B,W",
        "relative times per microbatch: forward, input gradient, weight gradient (%(default)s)",
        default="1,1,1",
    )
    parser.option("--svg FILE", "also write the picture as SVG")
    parser.option("--csv FILE", "also write the table as CSV")


def run(args: argparse.Namespace) -> int:
    """Runs `zerojax schedule`: prints the names, or the drawing of one schedule; writes the
    requested files."""
    from zerojax.schedules.drawing import describe, draw, draw_svg
    from zerojax.schedules.known_schedules import make_schedule, write_csv
    from zerojax.schedules.simulation import simulate

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
        replace_text(user_path(args.svg), draw_svg(schedule, costs))
        lines.append(f"written    {args.svg}")
    if args.csv:
        lines.append(f"written    {write_csv(schedule, args.csv)}")
    show("\n".join(lines))
    return 0


def list_names() -> str:
    """Returns a text with the name of every pipeline schedule and its use."""
    from zerojax.schedules.known_schedules import SCHEDULES

    width = max(map(len, SCHEDULES)) + 2
    lines = [f"{name:<{width}}{text}" for name, text in SCHEDULES.items()]
    return "\n".join([*lines, "", "draw one: zerojax schedule 1f1b --stages 4 --microbatches 8"])


def parse_costs(text: str) -> Costs:
    """Parses the text `F,B,W`: relative times of forward, input-gradient and weight-gradient work.

    Raises:
      ValueError: the text is not three numbers.
    """
    from zerojax.schedules.simulation import Costs

    try:
        forward, backward, weight = (float(word) for word in text.split(","))
    except ValueError:
        raise ValueError(
            f"--costs {text!r} must be the times of F, B and W, such as --costs 1,1,1"
        ) from None
    return Costs(forward, backward, weight)
