"""`zerojax deepspeed keys`: all keys of a ds_config.json."""

from __future__ import annotations

import argparse

from zerojax.config.display import show
from zerojax.training.deepspeed import keys_markdown, keys_page


def run(args: argparse.Namespace) -> int:
    """Prints the list."""
    show(keys_markdown() if args.markdown else keys_page(args.word), end="")
    if not args.markdown:
        show()
    return 0
