"""`zerojax data prepare`: text files to token files."""

from __future__ import annotations

import argparse

from zerojax.cli.arguments import add_command
from zerojax.config.display import show

_HELP = """\
Tokenises text once, so that training only reads tokens.

examples:
  zerojax data prepare book.txt runs/tokens
  zerojax data prepare folder_of_text runs/tokens --tokenizer bpe:4096
then:
  zerojax train CONFIG data.path=runs/tokens"""


def add(commands) -> None:
    """Declares the command and what is below it."""
    data = commands.add_parser("data", help="make token files", description="Make token files.")
    inner = data.add_subparsers(metavar="COMMAND", required=True)
    parser = add_command(inner, "prepare", run, "tokenise text into token files", _HELP)
    parser.add_argument("source", metavar="IN", help="text file, or folder of text files")
    parser.add_argument("target", metavar="OUT", help="folder to write to")
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="NAME",
        help="bytes, bpe:SIZE (trained on IN), or a tokenizer.json (%(default)s)",
    )
    parser.add_argument(
        "--validation-fraction",
        type=float,
        default=0.05,
        metavar="F",
        help="fraction, from the end, for validation (%(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Writes the token files and says what is in them and how to train on them."""
    from zerojax.data.preparation import prepare

    made = prepare(
        args.source,
        args.target,
        tokenizer=args.tokenizer,
        validation_fraction=args.validation_fraction,
    )
    num_tokens = made.num_train_tokens + made.num_validation_tokens
    plural = "" if made.num_documents == 1 else "s"
    ratio = made.num_text_bytes / max(num_tokens, 1)
    show(
        f"{made.num_train_tokens:,} tokens to train on and {made.num_validation_tokens:,} to "
        f"validate with, from {made.num_documents:,} document{plural} of "
        f"{made.num_text_bytes:,} bytes ({ratio:.2f} bytes a token)"
    )
    if made.left_out:
        kinds = ", ".join(sorted(set(made.left_out) - {""})) or "without an ending"
        show(f"files of other kinds that were left out: {len(made.left_out):,} ({kinds})")
    show(f"vocabulary of {made.vocab_size:,} tokens, written to {made.folder}")
    show(f"next: zerojax train CONFIG.yaml data.path={made.folder}")
    return 0
