"""`zerojax convert`: weights of other formats as a Hugging Face folder."""

from __future__ import annotations

import argparse

import jax

from zerojax.cli.llama_cpp import convert_gguf
from zerojax.config.display import show
from zerojax.models.trees import format_bytes
from zerojax.runtime.exit_codes import OK

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def run(args: argparse.Namespace) -> int:
    """Writes the folder and says what is in it."""
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
