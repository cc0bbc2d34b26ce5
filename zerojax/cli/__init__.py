"""The `zerojax` command: one module for each sub-command, and one sentence for each mistake.

Only the subcommand that runs imports JAX.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from zerojax.cli.complaints import explain
from zerojax.cli.parser import build_parser
from zerojax.config.display import show
from zerojax.runtime.exit_codes import BAD_INPUT, FAILED
from zerojax.runtime.shutdown import AGREED, exit_code_of, in_group, leave


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    In a process that has joined others a failure ends the process here and now, since the others
    wait for it in a collective.

    Args:
      argv: the words after `zerojax`; None takes them from the process.

    Returns:
      The exit code, see `zerojax.runtime.exit_codes`.
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
    # With its own frames removed JAX's errors would look as if they came from our code.
    os.environ.setdefault("JAX_TRACEBACK_FILTERING", "off")
    try:
        return importlib.import_module(args.module).run(args)
    except KeyboardInterrupt as error:
        show("\nzerojax: interrupted", file=sys.stderr)
        return exit_code_of(error)
    except BrokenPipeError:  # the reader, such as `head`, has left
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return FAILED
    except Exception as error:
        return _complain(error)


def _complain(error: Exception) -> int:
    """One sentence for what a user can mend; the traceback for a defect, or when asked for."""
    sentence, is_bad_input = explain(error)
    if sentence is None or os.environ.get("ZEROJAX_DEBUG", "0") not in ("", "0"):
        show("".join(traceback.format_exception(error)), file=sys.stderr, end="")
    if sentence is None:
        sentence = f"{type(error).__name__}: this is a defect of zerojax, not of your input"
    show(f"zerojax: error: {sentence}", file=sys.stderr)
    return BAD_INPUT if is_bad_input else FAILED
