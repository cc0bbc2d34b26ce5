"""Arguments of `zerojax profile`."""

from __future__ import annotations

from zerojax.cli.parser_parts import add_command, add_settings

_PROFILE = """\
Runs the very step of `zerojax train CONFIG.yaml KEY=VALUE ...`: N steps to warm up, N that are
measured, N that are traced; then one save. Prints the time per step and where it goes, the
operations that take most of a device's time, and the FLOPs of every parameter.

examples:
  zerojax profile configs/tiny_shakespeare.yaml
  zerojax profile configs/tiny_shakespeare.yaml zero=3 --steps 10 --out runs/looked_at
  zerojax profile configs/tiny_shakespeare.yaml --json

A trace of a run as it goes on: zerojax train CONFIG.yaml log.profile=[100,103]"""


def add(commands) -> None:
    """Declares the command."""
    parser = add_command(
        commands, "profile", "profile", "measure a few training steps, by operation", _PROFILE
    )
    add_settings(parser)
    parser.add_argument(
        "--steps", type=int, default=5, metavar="N", help="steps to measure (%(default)s)"
    )
    parser.add_argument(
        "--out", metavar="DIR", help="new folder of trace and numbers (RUN_DIR/profile)"
    )
    parser.add_argument("--no-save", action="store_true", help="do not time a save of the state")
    parser.add_argument("--json", action="store_true", help="print every number as JSON")
