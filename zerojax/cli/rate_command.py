"""`zerojax lr-test`: finds a learning rate for a run file by a range test."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerojax.cli.arguments import add_command, add_settings, finite, is_python, split_words
from zerojax.cli.jax_environment import prepare_devices
from zerojax.cli.progress import Progress
from zerojax.config import RunConfig, load
from zerojax.config.display import show
from zerojax.config.loader import user_path

if TYPE_CHECKING:
    from zerojax.training.rate_range import RateTest

ROWS = 12
"""Rows of the printed table."""

_HELP = """\
Trains some steps at a learning rate that grows by the same factor at each step (Smith 2015,
arXiv:1506.01186), and stops where the loss diverges. If the run has checkpoints, it begins at the
newest one. Nothing is saved, and the run is not changed. Warm-up and schedule of the run are not
used.

The suggested rate is a tenth of the one with the lowest loss. It is a place to start: a test of
200 steps does not see what happens later.

examples:
  zerojax lr-test configs/tiny_shakespeare.yaml
  zerojax lr-test configs/tiny_shakespeare.yaml --low 1e-5 --high 0.3 --out rates.html
  zerojax lr-test configs/tiny_shakespeare.yaml optimizer.name=lion --steps 100
  zerojax lr-test train.py

A script runs up to its call of zerojax.train, whose arguments are tested; its optimizer must be a
zerojax.OptimizerConfig, or the default."""


def add(commands) -> None:
    """Adds the command `zerojax lr-test` to the parser."""
    parser = add_command(
        commands, "lr-test", run, "find a learning rate: train some steps at a growing rate", _HELP
    )
    add_settings(parser)
    parser.option("--low RATE", "first rate (%(default)g)", type=finite, default=1e-6)
    parser.option("--high RATE", "last rate (%(default)g)", type=finite, default=1.0)
    parser.option("--steps N", "steps to train (%(default)s)", default=200)
    parser.option("--out FILE", "write a page with the curve (.html)")


def run(args: argparse.Namespace) -> int:
    """Runs `zerojax lr-test`: trains, prints losses and the suggestion, and writes the page.

    Returns:
      Exit code: 0 if a learning rate is suggested, 1 if the tested range shows none.
    """
    path, overrides = split_words(args.config, args.overrides)
    options = {"low": args.low, "high": args.high, "steps": args.steps}
    of = _of_script if is_python(path) else _of_file
    found = of(path, overrides, options)
    import jax

    from zerojax.training.rate_range import write_rate_page

    if jax.process_index():
        return 0 if found.suggestion else 1
    show("\n".join([*_table(found), "", found.describe()]))
    if args.out is not None:
        name = Path(path).stem if path else "the default run"
        show(f"written to {write_rate_page(found, user_path(args.out), name)}")
    return 0 if found.suggestion else 1


def _of_file(path: str | None, overrides: list[str], options: dict[str, Any]) -> RateTest:
    config = load(RunConfig, path, overrides)
    prepare_devices(config)
    from zerojax.training.rate_range import find_rate

    with Progress(quiet=False) as progress:
        progress("compiling the training step")
        return find_rate(config, progress=progress, **options)


def _of_script(path: str | None, overrides: list[str], options: dict[str, Any]) -> RateTest:
    from zerojax.cli.script_runs import spec_of_script
    from zerojax.training.rate_range import find_rate_of

    assert path is not None
    spec = spec_of_script(path, overrides, command="lr-test")
    with Progress(quiet=False) as progress:
        progress("compiling the training step")
        return find_rate_of(spec, progress=progress, **options)


def _table(found: RateTest) -> list[str]:
    """Formats a selection of the learning rates with their smoothed losses as table rows."""
    last = len(found.rates) - 1
    places = sorted({round(number * last / (ROWS - 1)) for number in range(ROWS)})
    lines = [f"{'rate':>10}  loss (smoothed), {last + 1} steps after step {found.first_step}"]
    for place in places:
        loss = found.smoothed[place]
        lines.append(
            f"{found.rates[place]:>10.2g}  {'not finite' if loss is None else f'{loss:.4f}'}"
        )
    return lines
