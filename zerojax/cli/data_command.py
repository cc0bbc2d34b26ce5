"""`zerojax data prepare`: converts texts and chats to files of tokens."""

from __future__ import annotations

import argparse

from zerojax.cli.arguments import add_chats, add_command, finite
from zerojax.config.display import show

_HELP = """\
Tokenises once, so that training only reads tokens. IN is a text file, JSON lines (.jsonl), a
.parquet or .arrow file, a folder of these, or a folder that Hugging Face's datasets has saved. The
loss of a chat is on the assistant's turns alone.

examples:
  zerojax data prepare book.txt runs/tokens
  zerojax data prepare folder_of_text runs/tokens --tokenizer bpe:4096
  zerojax data prepare chats.jsonl runs/chats --format chat --tokenizer MODEL_FOLDER
then:
  zerojax train CONFIG data.path=runs/tokens"""
_OF_CHATS = {"template": None, "bad": "refuse", "answers": "all"}
_WAYS = {
    "marks": "marked by the template",
    "renderings": "found by rendering each chat up to its answers",
    "pairs": "the completions of prompts",
}


def add(commands) -> None:
    """Adds the command `zerojax data` to the parser, with its sub-commands."""
    data = commands.add_parser("data", help="make token files", description="Make token files.")
    inner = data.add_subparsers(metavar="COMMAND", required=True)
    parser = add_command(inner, "prepare", run, "tokenise text into token files", _HELP)
    parser.add_argument("source", metavar="IN", help="file or folder to read")
    parser.add_argument("target", metavar="OUT", help="folder to write to")
    parser.option(
        "--format",
        "text: rows with the key text; chat: with messages, conversations, or prompt and "
        "completion (%(default)s)",
        default="text",
        choices=("text", "chat"),
    )
    parser.option(
        "--tokenizer NAME",
        "bytes, bpe:SIZE (trained on IN), or a tokenizer.json or its folder (%(default)s)",
        default="bytes",
    )
    add_chats(parser)
    parser.option(
        "--validation-fraction F",
        "fraction of the data for validation, from its end (%(default)s)",
        type=finite,
        default=0.05,
    )


def run(args: argparse.Namespace) -> int:
    """Runs `zerojax data prepare`: writes token files, and prints their contents and the command to
    train on them."""
    if args.format == "chat":
        return _run_chats(args)
    given = [f"--{name}" for name in _OF_CHATS if getattr(args, name) != _OF_CHATS[name]]
    if given:
        raise ValueError(f"{given[0]} applies to chats only; add --format chat, or leave it out")
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
        kinds = ", ".join(sorted({suffix or "without an ending" for suffix in made.left_out}))
        show(f"files not read, because of their suffixes: {len(made.left_out):,} ({kinds})")
    _show_next(made)
    return 0


def _run_chats(args: argparse.Namespace) -> int:
    from zerojax.data.chats import prepare_chats

    made = prepare_chats(
        args.source,
        args.target,
        tokenizer=args.tokenizer,
        template=args.template,
        validation_fraction=args.validation_fraction,
        bad=args.bad,
        answers=args.answers,
    )
    show("\n".join(lines_of_chats(made)))
    _show_next(made)
    return 0


def lines_of_chats(made) -> list[str]:
    """Describes the result of `prepare_chats` in lines to print."""
    share = 100 * made.num_asked / made.num_tokens
    apart = (
        f", {made.num_validation_texts:,} of them to validate with"
        if made.num_validation_texts
        else ""
    )
    lines = [
        f"{made.num_texts:,} texts of {made.num_tokens:,} tokens from {made.num_records:,} rows"
        f"{apart}; the longest has {made.longest:,} tokens",
        f"{made.num_asked:,} tokens ({share:.1f} %) are answers, {_WAYS[made.way]}",
    ]
    if made.num_seams:
        lines.append(f"answers whose first character is inside a token: {made.num_seams:,}")
    if made.skipped:
        lines.append(f"skipped rows: {made.skipped:,}, such as")
        lines += [f"  {reason}" for reason in made.reasons]
    return lines


def _show_next(made) -> None:
    show(f"vocabulary of {made.vocab_size:,} tokens, written to {made.folder}")
    show(f"next: zerojax train CONFIG.yaml data.path={made.folder}")
