"""What the `zerojax` command does with its words, and with what goes wrong.

Knows commands and exit codes; never knows training. Only the command that is run imports JAX.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from zerojax.cli.complaints import explain
from zerojax.cli.parser import build_parser

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: the words after `zerojax`; None takes them from the process.

    Returns:
      The exit code: 0 it worked, 1 it failed, 2 the input was wrong, 130 Ctrl-C.
    """
    parser = build_parser()
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        parser.print_help()
        return EXIT_BAD_INPUT
    args = parser.parse_args(argv)
    # With its own frames removed JAX's errors would look as if they came from our code.
    os.environ.setdefault("JAX_TRACEBACK_FILTERING", "off")
    try:
        return importlib.import_module(args.module).run(args)
    except KeyboardInterrupt:
        print("\nzerojax: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has left
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return EXIT_FAILED
    except Exception as error:
        return _complain(error)


def _complain(error: Exception) -> int:
    """One sentence for what a user can mend; the traceback for a defect, or when asked for."""
    sentence, is_bad_input = explain(error)
    if sentence is None or os.environ.get("ZEROJAX_DEBUG", "0") not in ("", "0"):
        traceback.print_exception(error)
    if sentence is None:
        sentence = f"{type(error).__name__}: this is a defect of zerojax, not of your input"
    print(f"zerojax: error: {sentence}", file=sys.stderr)
    return EXIT_BAD_INPUT if is_bad_input else EXIT_FAILED
