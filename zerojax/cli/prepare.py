"""`zerojax data prepare`: text files to token files."""

from __future__ import annotations

import argparse

from zerojax.config.display import show
from zerojax.data.prepare import prepare


def run(args: argparse.Namespace) -> int:
    """Writes the token files and says what is in them and how to train on them."""
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
