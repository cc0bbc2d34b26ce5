"""`zerojax generate`: text that continues a prompt."""

from __future__ import annotations

import argparse

from zerojax.cli.reading import open_run
from zerojax.config.display import show


def run(args: argparse.Namespace) -> int:
    """Prints the prompt and its continuation."""
    loaded = open_run(args.run, args.overrides, args.step)
    text = loaded.generate(
        args.prompt,
        args.tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        seed=args.seed,
    )
    show(text)
    return 0
