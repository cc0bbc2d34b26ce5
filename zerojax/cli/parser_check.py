"""Arguments of `zerojax check`."""

from __future__ import annotations

from zerojax.cli.parser_parts import add_command

_CHECK = """\
Takes a few steps of TARGET's model in float32 in plain JAX and with zerojax, on one device and on N
virtual CPU devices, at ZeRO stages 0 to 3, with one and two microbatches, and compares losses,
gradients, parameters and state. Where they differ it names the reason, your line and the remedy.

TARGET is one of
  train.py          a script, run up to its first zerojax.train, make_plan or engine step
  train.py:parts    a function (or dict) of a script or module: the arguments of zerojax.check, as
                    in {"model": ..., "batch": ..., "loss": ..., "optimizer": ...}
  package.file:parts
  CONFIG.yaml       a run file, with KEY=VALUE laid over it: model.num_layers=2

examples:
  zerojax check configs/tiny_shakespeare.yaml model.num_layers=2
  zerojax check train.py --devices 2 --json

exit codes: 0 all runs agree, 1 the check failed, 2 the input was wrong, 4 runs differ or the model
is refused. In Python: zerojax.check(model, batch, loss=..., optimizer=...)."""


def add(commands) -> None:
    """Declares the command."""
    parser = add_command(
        commands, "check", "check", "prove that a model trains the same on any devices", _CHECK
    )
    parser.add_argument("target", metavar="TARGET", help="script, script:NAME or run file")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="settings of a run file")
    parser.add_argument(
        "--devices", type=int, default=4, metavar="N", help="virtual devices (%(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=3, metavar="N", help="steps of each run (%(default)s)"
    )
    parser.add_argument(
        "--thorough", action="store_true", help="every stage with each number of microbatches"
    )
    parser.add_argument(
        "--strict", action="store_true", help="dropout and batch statistics count as differences"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
