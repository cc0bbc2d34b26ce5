"""Defines common parts of the command line: the parser, shared arguments, and command names."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from zerojax.config.display import shorten, show
from zerojax.config.loader import user_path


class Parser(argparse.ArgumentParser):
    """Argument parser with one-line errors that name the nearest valid word and the
    help command."""

    def parse_args(self, args=None, namespace=None):
        """Parses like argparse, but KEY=VALUE words may also follow options such as --steps."""
        found, rest = self.parse_known_args(args, namespace)
        # argparse fills a list of words only once; words behind an option are left in `rest`.
        if rest and hasattr(found, "overrides") and not any(w.startswith("-") for w in rest):
            found.overrides, rest = [*found.overrides, *rest], []
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found

    def option(self, flag: str, help: str, *, default: Any = None, **more: Any) -> None:
        """Adds an option with a value.

        Args:
          flag: flag and name of the value in help texts, such as "--steps N".
          help: help text.
          default: default value; values are whole numbers if it is one and `more` has no type.
          more: further arguments of `add_argument`.
        """
        name, _, metavar = flag.partition(" ")
        if isinstance(default, int):
            more = {"type": int, **more}
        self.add_argument(name, metavar=metavar or None, help=help, default=default, **more)

    def switch(self, flag: str, help: str) -> None:
        """Adds an option without a value: True if it is given."""
        self.add_argument(flag, action="store_true", help=help)

    def error(self, message: str) -> NoReturn:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and "invalid choice" in message:
                typed = message.partition("invalid choice: '")[2].partition("'")[0]
                match = difflib.get_close_matches(typed, list(action.choices), 1, 0.5)
                nearest = (
                    f"did you mean {match[0]!r}?"
                    if match
                    else f"known: {', '.join(action.choices)}"
                )
                message = f"no command {typed!r}; {nearest}"
        show(f"zerojax: error: {shorten(message)} (help: {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def add_command(
    commands,
    name: str,
    command: Callable[[argparse.Namespace], int],
    help_line: str,
    epilog: str = "",
) -> Parser:
    """Adds a sub-command of `zerojax` to the parser.

    Args:
      commands: sub-parsers object that `add_subparsers` returned.
      name: name of the command.
      command: function that runs the command and returns its exit code; stored as `args.command`.
      help_line: purpose of the command, starting with a lower-case verb.
      epilog: more help, with examples.
    """
    parser = commands.add_parser(
        name,
        help=help_line,
        description=help_line[0].upper() + help_line[1:] + ".",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(command=command)
    return parser


def finite(text: str) -> float:
    """Converts the text of an option to a finite number.

    Raises:
      argparse.ArgumentTypeError: the number is infinite or NaN.
    """
    number = float(text)
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return number


def add_settings(parser: Parser) -> None:
    """Adds the arguments CONFIG.yaml and KEY=VALUE, which give the settings of a run."""
    parser.add_argument("config", metavar="CONFIG.yaml", nargs="?", help="YAML file of settings")
    parser.add_argument(
        "overrides", metavar="KEY=VALUE", nargs="*", help="overrides of these settings"
    )


def split_words(config: str | None, overrides: list[str]) -> tuple[str | None, list[str]]:
    """Splits the words before the options into (CONFIG or None, overrides).

    CONFIG is optional: a first word with `=` that is not a file is an override.
    """
    if config is not None and "=" in config and not user_path(config).exists():
        return None, [config, *overrides]
    return config, overrides


def is_python(path: str | None) -> bool:
    """Returns whether a command's first word is a Python script, not a run file."""
    return path is not None and path.endswith(".py")


def add_run(parser: Parser) -> None:
    """Adds the argument RUN, the folder of a run."""
    parser.add_argument("run", metavar="RUN", help="folder of a run, such as runs/tiny_shakespeare")


def add_run_settings(parser: Parser) -> None:
    """Adds the arguments KEY=VALUE and --step, for commands that load a run."""
    parser.option(
        "--step STEP",
        "a saved step, or the name of a named step, such as best (default: the newest)",
        type=step_or_name,
    )
    parser.add_argument(
        "overrides",
        metavar="KEY=VALUE",
        nargs="*",
        help="overrides of the run's cpu_devices and mesh.*",
    )


def add_weights(parser: Parser) -> None:
    """Adds the option --weights, for commands that load a trained model."""
    parser.option(
        "--weights",
        "ema: the average of the weights, of runs with optimizer.ema_decay (%(default)s)",
        default="trained",
        choices=("trained", "ema"),
    )


def add_pretrained(parser: Parser) -> None:
    """Adds the option --pretrained, for commands that need frozen weights missing from a
    checkpoint.
    """
    parser.option(
        "--pretrained FOLDER",
        "folder of the pretrained weights, if the checkpoints omit frozen weights and the folder "
        "has moved",
    )


def add_chats(parser: Parser) -> None:
    """Adds the options --template, --bad and --answers, for commands that read chats."""
    parser.option(
        "--template FILE",
        "chat template: a Jinja file, or a template name of the tokenizer (its default)",
    )
    parser.option(
        "--bad",
        "for an unusable chat: raise an error, or skip and count it (%(default)s)",
        default="refuse",
        choices=("refuse", "skip"),
    )
    parser.option(
        "--answers",
        "one text with all answers of a chat, or one text for each answer (%(default)s)",
        default="all",
        choices=("all", "each"),
    )


def step_or_name(word: str) -> int | str:
    """Converts the value of --step: to an int if it is a number, else to a step's name (best)."""
    return int(word) if word.isdecimal() and len(word) < 20 else word


def command_name() -> str:
    """Returns the command that starts this `zerojax`: its name if on PATH, else its location.

    `make train` runs inside a virtual environment that is not on the user's PATH.
    """
    installed = Path(sys.executable).parent / "zerojax"
    if not installed.exists():
        return f"{shlex.quote(_short(Path(sys.executable)))} -m zerojax"
    found = shutil.which("zerojax")
    if found is not None and Path(found).samefile(installed):
        return "zerojax"
    return shlex.quote(_short(installed))


def _short(path: Path) -> str:
    """Returns `path` relative to the working folder if it is below it, else unchanged."""
    here = Path.cwd()
    return os.path.relpath(path, here) if path.is_relative_to(here) else str(path)
