"""`zerojax generate`: continues one text, or the prompts of a file, with a trained model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from zerojax.cli.arguments import (
    add_command,
    add_pretrained,
    add_run,
    add_run_settings,
    add_weights,
)
from zerojax.cli.run_commands import RECORD_FILE, open_run
from zerojax.config.display import quoted, show
from zerojax.config.generation_limits import check_generation
from zerojax.config.loader import user_path
from zerojax.config.regular_files import decode_text
from zerojax.runtime import bounded_json

if TYPE_CHECKING:
    from zerojax.zoo.text_generation import Continuation

_EXAMPLES = """\
Prompts are divided over the data axes of the mesh, and the weights stay in their shards. The tokens
of a prompt depend on the seed, its number in the file and their positions; not on other prompts,
--batch-size or the mesh.

examples:
  zerojax generate runs/tiny_shakespeare "To be, or"
  zerojax generate runs/tiny_shakespeare "ROMEO:" --tokens 100 --temperature 0.5 --seed 7
  zerojax generate runs/mine --prompts prompts.txt --top-p 0.9
  zerojax generate runs/mine --prompts prompts.jsonl --format jsonl mesh.data=4
  zerojax generate runs/mine "To be" --quantize int8 --cache int8"""

_OPTIONS = (
    *("temperature", "top_k", "top_p", "repetition_penalty", "end_tokens", "seed", "batch_size"),
    *("quantize", "cache"),
)
"""Options of the command that are arguments of `continuations`."""


def add(commands) -> None:
    """Adds the command `zerojax generate` to the parser."""
    parser = add_command(
        commands, "generate", generate, "continue texts with a trained model", _EXAMPLES
    )
    add_run(parser)
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="text to continue")
    add_run_settings(parser)
    add_weights(parser)
    add_pretrained(parser)
    parser.option(
        "--prompts FILE",
        'texts to continue in place of PROMPT: a .jsonl file of objects with "prompt", or one text '
        "per line",
    )
    parser.option(
        "--format",
        "text: each prompt with its continuation, and an empty line between two; jsonl: an object "
        "for each prompt (%(default)s)",
        default="text",
        choices=("text", "jsonl"),
    )
    parser.option("--tokens N", "tokens to add (200, or as many as the model holds)", type=int)
    parser.option(
        "--temperature T",
        "0 takes the most likely token, 1 samples from the model's distribution (%(default)s)",
        type=float,
        default=0.8,
    )
    parser.option("--top-k K", "sample from the K most likely tokens (all)", type=int)
    parser.option(
        "--top-p P",
        "sample from the most likely tokens whose probabilities sum to P (all)",
        type=float,
    )
    parser.option(
        "--repetition-penalty R",
        "above 1: tokens that the text already has become less likely (%(default)s)",
        type=float,
        default=1.0,
    )
    parser.option(
        "--end-tokens IDS",
        "token ids that end a text, such as 2 or 2,7, or none (those of the Hugging Face folder "
        "that the run started from, or the tokenizer's)",
        type=_ids,
    )
    parser.option("--seed N", "seed of the sampling (%(default)s)", default=0)
    parser.option("--batch-size N", "prompts that are continued together (%(default)s)", default=32)
    parser.option(
        "--quantize",
        "round the kernels of the layers to 8-bit codes (the compute dtype)",
        choices=("int8", "fp8"),
    )
    parser.option(
        "--cache", "store keys and values as int8 codes (the compute dtype)", choices=("int8",)
    )


def generate(args: argparse.Namespace) -> int:
    """Runs `zerojax generate`: prints the prompts and their continuations."""
    prompts, overrides = _prompts_and_overrides(args)
    options = {name: getattr(args, name) for name in _OPTIONS}
    folder = user_path(args.run)
    sizes = _sizes_of(folder)
    # Before JAX is imported and the model is loaded, which takes seconds.
    check_generation(num_tokens=args.tokens, **options, **sizes)
    loaded = open_run(
        args.run,
        overrides,
        args.step,
        args.weights,
        args.pretrained,
        before=lambda: _check_prompts(folder, prompts, args.tokens, sizes),
    )
    found = loaded.continuations(prompts, args.tokens, **options)
    for number, each in enumerate(found):
        if args.format == "jsonl":
            show(_as_json(each))
        else:
            show(each.text, end="\n" if number == len(found) - 1 else "\n\n")
    return 0


def _sizes_of(folder: Path) -> dict[str, int]:
    """Returns vocabulary size and context of the model of a run; {} if its record has none."""
    try:
        record = bounded_json.load(folder / RECORD_FILE)
    except (OSError, ValueError):
        return {}  # `load_run` reports the error
    sizes = record.get("sizes") if isinstance(record, dict) else None
    sizes = sizes if isinstance(sizes, dict) else {}
    named = {"vocab_size": sizes.get("vocab_size"), "context": sizes.get("max_seq_len")}
    return {name: size for name, size in named.items() if type(size) is int and size > 0}


def _check_prompts(
    folder: Path, prompts: list[str], num_tokens: int | None, sizes: dict[str, int]
) -> None:
    """Checks prompts before the model of a run is loaded."""
    # These imports load JAX.
    from zerojax.data.tokenizer import TOKENIZER_FILE, load_tokenizer
    from zerojax.zoo.text_generation import encoded_prompts

    if "context" in sizes:
        file = folder / TOKENIZER_FILE
        tokenizer = load_tokenizer(file) if file.is_file() else None
        encoded_prompts(tokenizer, prompts, num_tokens, sizes["context"])


def _as_json(each: Continuation) -> str:
    values = {
        "prompt": each.prompt,
        "continuation": each.added,
        "num_tokens": each.num_tokens,
        "has_ended": each.has_ended,
    }
    return json.dumps(values, ensure_ascii=True)


def _prompts_and_overrides(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Splits the arguments into (prompts, KEY=VALUE words).

    PROMPT may follow options. With --prompts, argparse stores the first KEY=VALUE as PROMPT.
    """
    words = [*([] if args.prompt is None else [args.prompt]), *args.overrides]
    if args.prompts is None:
        if not words:
            raise ValueError(
                f'0 prompts are given; write one: zerojax generate {args.run} "To be", or name a '
                "file: --prompts FILE"
            )
        return [words[0]], words[1:]
    if words and "=" not in words[0]:
        raise ValueError(
            f"both PROMPT ({quoted(words[0])}) and --prompts {args.prompts} are given; use one"
        )
    return read_prompts(args.prompts), words


def read_prompts(path: str) -> list[str]:
    """Reads prompts from a file: "prompt" of each object of a .jsonl file, else each line.

    Empty lines are skipped.

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: the file is not UTF-8, has no prompts, or an object has no "prompt".
    """
    file = user_path(path)
    if not file.exists():
        raise FileNotFoundError(f"--prompts {path}: there is no such file; name an existing file")
    prompts = _of_objects(file) if file.suffix.lower() == ".jsonl" else _of_lines(file)
    if not prompts:
        raise ValueError(f"--prompts {path}: the file has 0 prompts; write at least one line")
    return prompts


def _of_lines(file: Path) -> list[str]:
    text = decode_text(bounded_json.read_bytes(file), file)
    return [line for line in text.splitlines() if line.strip()]


def _of_objects(file: Path) -> list[str]:
    # This import loads JAX.
    from zerojax.data.record_files import read_records

    prompts = []
    for number, value in read_records(file):
        prompt = value.get("prompt") if isinstance(value, dict) else None
        if not isinstance(prompt, str):
            raise ValueError(
                f'{file}:{number}: no "prompt" string in {quoted(value)}; every line must be an '
                'object such as {"prompt": "To be"}'
            )
        prompts.append(prompt)
    return prompts


def _ids(text: str) -> tuple[int, ...]:
    """Parses a list of token ids, such as 2,7, from the text of an option."""
    if text == "none":
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of token ids; write 2, 2,7 or none"
        ) from None
