"""Implements the `zerojax` command: one module per sub-command, and one-line messages for mistakes.

The modules import JAX, and packages that need JAX, only inside the functions that run a command.
Help texts and argument errors therefore appear without loading JAX.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

import zerojax
from zerojax.cli import (
    bench_commands,
    check_command,
    checkpoint_command,
    data_command,
    deepspeed_command,
    finetune_command,
    generate_command,
    keys_command,
    launch_command,
    machine_commands,
    plan_command,
    profile_command,
    rate_command,
    run_commands,
    schedule_command,
    sweep_command,
    train_command,
    tune_command,
)
from zerojax.cli.arguments import Parser
from zerojax.cli.complaints import explain
from zerojax.config.display import shorten, show
from zerojax.runtime.plugin_errors import hide_plugin_errors
from zerojax.runtime.shutdown import AGREED, BAD_INPUT, FAILED, exit_code_of, in_group, leave

_EXIT_CODES = """\
exit codes: 0 success, 1 failure, 2 invalid input, 75 stopped by a signal with everything
saved, 79 ended by the watchdog, 130 stopped with Ctrl-C.
ZEROJAX_DEBUG=1 shows the traceback of an error."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one `zerojax` command and returns its exit code.

    If this process is part of a multi-process run, a failure exits it immediately, because the
    other processes would wait for it in a collective.

    Args:
      argv: command-line arguments after `zerojax`; None takes them from `sys.argv`.

    Returns:
      The exit code, as listed in `zerojax.runtime.shutdown`.
    """
    code = _run(argv)
    if code not in AGREED and in_group():
        leave(code)
    return code


def _run(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        parser.print_help()
        return BAD_INPUT
    args = parser.parse_args(argv)
    hide_plugin_errors()
    # JAX hides its own frames by default; its errors would look like errors of zerojax.
    os.environ.setdefault("JAX_TRACEBACK_FILTERING", "off")
    try:
        return args.command(args)
    except KeyboardInterrupt as error:
        show("\nzerojax: interrupted", file=sys.stderr)
        return exit_code_of(error)
    except BrokenPipeError:  # the program that reads the output, such as `head`, has ended
        # Otherwise Python would flush the rest into the closed pipe at its end, and print an error.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return FAILED
    except Exception as error:
        return _complain(error)


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser of all `zerojax` commands; `args.command(args)` runs the parsed command."""
    parser = Parser(
        prog="zerojax",
        description="Train JAX models with ZeRO, pipelines, tensor parallelism and offload.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"zerojax {zerojax.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    train_command.add(commands)
    finetune_command.add(commands)
    launch_command.add(commands)
    plan_command.add(commands)
    tune_command.add(commands)
    rate_command.add(commands)
    sweep_command.add(commands)
    check_command.add(commands)
    schedule_command.add(commands)
    deepspeed_command.add_elastic(commands)
    deepspeed_command.add_deepspeed(commands)
    checkpoint_command.add(commands)
    profile_command.add(commands)
    generate_command.add(commands)
    run_commands.add_eval(commands)
    run_commands.add_report(commands)
    run_commands.add_where(commands)
    keys_command.add(commands)
    machine_commands.add_env(commands)
    data_command.add(commands)
    bench_commands.add_bench(commands)
    return parser


def _complain(error: Exception) -> int:
    """Prints an error as one sentence; with the traceback for a bug or with ZEROJAX_DEBUG=1."""
    sentence, is_bad_input = explain(error)
    if sentence is None or os.environ.get("ZEROJAX_DEBUG", "0") not in ("", "0"):
        show("".join(traceback.format_exception(error)), file=sys.stderr, end="")
    if sentence is None:
        sentence = f"{type(error).__name__}: this is a bug in zerojax, not in your input"
    show(f"zerojax: error: {shorten(sentence)}", file=sys.stderr)
    return BAD_INPUT if is_bad_input else FAILED
