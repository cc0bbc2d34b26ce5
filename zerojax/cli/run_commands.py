"""`zerojax eval`, `report` and `where`: loss and report of a trained model, state of a hang."""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from zerojax.cli.arguments import (
    add_command,
    add_pretrained,
    add_run,
    add_run_settings,
    add_weights,
)
from zerojax.cli.jax_environment import run_one_program_at_a_time, use_cpu_devices
from zerojax.config import MeshConfig
from zerojax.config.checks import MAX_CPU_DEVICES
from zerojax.config.display import show
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.loader import coerce_fields, load_dataclass, user_path
from zerojax.runtime import bounded_json
from zerojax.runtime.hang_map import describe_hang
from zerojax.runtime.standstill import FOLDER, NOTE_SECONDS, read_notes

RECORD_FILE = "run.json"

_EVAL = """\
The run is loaded with its own mesh if this machine has as many devices as the run was trained on.
Else mesh.expert becomes its largest divisor that divides the devices, and mesh.data the rest.

examples:
  zerojax eval runs/tiny_shakespeare
  zerojax eval runs/mine --step best
  zerojax eval runs/mine --weights ema
  zerojax eval runs/mine --data held_out.txt
  zerojax eval runs/tiny_shakespeare mesh.zero=3 mesh.data=4 --batches 20"""

_REPORT = """\
With one RUN: writes report.html into its folder. With several: one page with their curves on common
axes, their results, and the settings that differ (comparison.html beside the first folder).

examples:
  zerojax report runs/a
  zerojax report runs/a runs/b runs/c --out comparison.html"""

_WHERE = """\
A process that makes no progress for 10 s leaves a note in the folder of its run, and removes it
when it goes on. This command reads the notes of all processes, which must share the folder. It
prints in which step processes wait, at or before which collective, which processes are missing
there, and what those are doing. The watchdog prints the same before it ends a run.

examples:
  zerojax where runs/mine"""


def add_eval(commands) -> None:
    """Adds the command `zerojax eval` to the parser."""
    parser = add_command(commands, "eval", evaluate, "measure the loss of a trained model", _EVAL)
    add_run(parser)
    add_run_settings(parser)
    add_weights(parser)
    add_pretrained(parser)
    parser.option("--data PATH", "text or token files to evaluate on, all of them")
    parser.option("--batches N", "validation batches (the run's eval_batches)", type=int)


def add_report(commands) -> None:
    """Adds the command `zerojax report` to the parser."""
    parser = add_command(
        commands, "report", report, "write the HTML report of a run, or compare runs", _REPORT
    )
    add_run(parser)
    parser.add_argument("others", metavar="RUN", nargs="*", help="runs to compare it with")
    parser.option("--out FILE", "file of the page that compares several runs")


def add_where(commands) -> None:
    """Adds the command `zerojax where` to the parser."""
    parser = add_command(
        commands, "where", where, "say what the processes of a hanging run wait for", _WHERE
    )
    add_run(parser)


def evaluate(args: argparse.Namespace) -> int:
    """Runs `zerojax eval`: prints the loss on validation data in nats, its perplexity, and bits per
    token."""
    if args.batches is not None and args.batches < 1:
        raise ValueError(f"--batches {args.batches} is below 1; use 1 or more")
    loaded = open_run(args.run, args.overrides, args.step, args.weights, args.pretrained)
    found = loaded.evaluate(args.data, num_batches=args.batches)
    loss, of_average = found["loss"], " (ema)" if args.weights == "ema" else ""
    of_data = f"tokens of {args.data}"
    # math.exp overflows above 709.
    show(
        f"step {loaded.step}{of_average}: loss {loss:.4f}, "
        f"perplexity {math.exp(min(loss, 700)):.2f}, {loss / math.log(2):.3f} bits per token, "
        f"over {int(found['weight']):,} {'validation tokens' if args.data is None else of_data}"
    )
    return 0


def report(args: argparse.Namespace) -> int:
    """Runs `zerojax report`: writes the report page of a run and prints its path."""
    from zerojax.training.metrics.comparison import write_comparison
    from zerojax.training.metrics.report import write_report

    if args.out is not None and not args.others:
        raise ValueError(
            f"--out {args.out} is for several runs; a single report is always in its run's folder"
        )
    runs = [args.run, *args.others]
    show(write_comparison(runs, args.out) if args.others else write_report(args.run))
    return 0


def where(args: argparse.Namespace) -> int:
    """Runs `zerojax where`: prints what the processes of a run wait for.

    Raises:
      FileNotFoundError: the folder does not exist.
    """
    folder = user_path(args.run)
    if not folder.is_dir():
        raise FileNotFoundError(f"{args.run} is not a folder; pass the folder of a run")
    notes = read_notes(folder)
    if num_others := len(list((folder / FOLDER).glob("process-*.json"))) - len(notes):
        show(f"files in {folder / FOLDER} that are no notes of processes, left out: {num_others}")
    if not notes:
        show(f"no process of {args.run} has been without progress for {NOTE_SECONDS:g} s")
    for line in describe_hang(notes, time.time()) if notes else []:
        show(line)
    return 0


@dataclass(frozen=True, kw_only=True)
class ReadSettings:
    """Settings that a command may change when it loads a run."""

    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    """Mesh options that replace the run's own."""
    cpu_devices: int | None = None
    """Number of virtual CPU devices to make; default: as many as the run had, if it ran on CPUs."""

    def __post_init__(self) -> None:
        coerce_fields(self)


def open_run(
    run: str,
    overrides: Sequence[str],
    step: int | str | None = None,
    weights: Literal["trained", "ema"] = "trained",
    pretrained: str | None = None,
    *,
    before: Callable[[], None] = lambda: None,
) -> Any:
    """Loads a trained run from its folder.

    Args:
      run: folder of the run.
      overrides: KEY=VALUE words that set fields of `ReadSettings`.
      step: saved step or its name; as for `zerojax.load_run`, like the next two arguments.
      weights: "trained", or "ema" for the average of the weights.
      pretrained: folder of the pretrained weights, if it has moved.
      before: function that is called when JAX can be imported, before the run is read.

    Raises:
      ConfigError: an unknown key or a wrong value; otherwise the errors of `zerojax.load_run`.
    """
    settings = load_dataclass(ReadSettings, None, overrides)
    given = {part for word in overrides for part in word.partition("=")[0].strip().split(".")}
    names = [field.name for field in dataclasses.fields(MeshConfig) if field.name in given]
    count = settings.cpu_devices if "cpu_devices" in given else _cpu_devices_of(user_path(run))
    if count is not None:
        try:
            use_cpu_devices(count)
        except RuntimeError:  # a program whose JAX devices exist already has called this function
            if "cpu_devices" in given:
                raise
        else:
            run_one_program_at_a_time()
    # These imports load JAX; the number of CPU devices is set above.
    from zerojax.training.loading import load_run

    before()
    mesh = {name: getattr(settings.mesh, name) for name in names}
    return load_run(run, step, mesh=mesh or None, weights=weights, pretrained=pretrained)


def _cpu_devices_of(folder: Path) -> int | None:
    """Returns a run's number of CPU devices; None if it ran on other devices or did not record
    it."""
    try:
        record = bounded_json.load(folder / RECORD_FILE)
    except (OSError, ValueError):
        return None  # `load_run` reports the error
    if not isinstance(record, dict) or record.get("platform") != "cpu":
        return None
    count = record.get("num_devices")
    return count if isinstance(count, int) and 0 < count <= MAX_CPU_DEVICES else None
