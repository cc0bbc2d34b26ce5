"""`zerojax eval`: the validation loss of a trained model."""

from __future__ import annotations

import argparse
import math

from zerojax.cli.reading import open_run
from zerojax.config.display import show


def run(args: argparse.Namespace) -> int:
    """Prints the loss; of text also perplexity and bits per token."""
    if args.batches is not None and args.batches < 1:
        raise ValueError(f"--batches {args.batches}: at least 1 is needed")
    loaded = open_run(args.run, args.overrides, args.step)
    found = loaded.evaluate(num_batches=args.batches)
    loss = found["loss"]
    show(
        f"step {loaded.step}: loss {loss:.4f}, perplexity {math.exp(min(loss, 700)):.2f}, "
        f"{loss / math.log(2):.3f} bits per token, over {int(found['weight']):,} validation tokens"
    )
    return 0
