"""`zerojax convert`: weights of other formats as a Hugging Face folder."""

from __future__ import annotations

import argparse

from zerojax.cli.arguments import add_command
from zerojax.config.display import show
from zerojax.runtime.exit_codes import OK

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_GGUF = """\
FILE.gguf is a Llama model of llama.cpp, of any quantisation that the package gguf reads. Its
weights become float32 (or bfloat16) as they are: what quantisation rounded away does not come back.

examples:
  zerojax convert gguf model.gguf weights/model
  zerojax convert gguf model.gguf weights/model --dtype bf16

exit codes: 0 it worked, 1 it failed, 2 the input was wrong.
Needs: pip install 'zerojax[gguf]'"""


def add(commands) -> None:
    """Declares the command and what is below it."""
    convert = commands.add_parser(
        "convert",
        help="make a folder of Hugging Face from other files",
        description="Make a folder of Hugging Face from other files.",
    )
    inner = convert.add_subparsers(metavar="KIND", required=True)
    parser = add_command(inner, "gguf", run, "convert a file of llama.cpp", _GGUF)
    parser.add_argument("source", metavar="FILE.gguf", help="the file")
    parser.add_argument("target", metavar="OUT", help="a new folder")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16"), default="fp32", help="of the weights (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Writes the folder and says what is in it."""
    import jax

    from zerojax.cli.llama_cpp import convert_gguf
    from zerojax.models.trees import format_bytes

    jax.config.update("jax_platforms", "cpu")  # takes no accelerator from a run
    made = convert_gguf(args.source, args.target, dtype=_DTYPES[args.dtype])
    kinds = ", ".join(f"{count} {kind}" for kind, count in made.kinds.items())
    show(
        f"{made.num_tensors} tensors ({kinds}) as {args.dtype}, {format_bytes(made.num_bytes)}, "
        f"in {made.folder}"
    )
    if made.no_tokenizer is not None:
        show(f"no tokenizer.json: {made.no_tokenizer}; take the model's own")
    return OK
