"""Arguments of `zerojax convert`."""

from __future__ import annotations

from zerojax.cli.parser_parts import add_command

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
    parser = add_command(inner, "gguf", "convert", "convert a file of llama.cpp", _GGUF)
    parser.add_argument("source", metavar="FILE.gguf", help="the file")
    parser.add_argument("target", metavar="OUT", help="a new folder")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16"), default="fp32", help="of the weights (%(default)s)"
    )
