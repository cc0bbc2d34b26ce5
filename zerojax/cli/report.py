"""`zerojax report`: the HTML report of a run."""

from __future__ import annotations

import argparse

from zerojax.config.display import show
from zerojax.training.metrics.report import write_report


def run(args: argparse.Namespace) -> int:
    """Writes the page and prints its path."""
    show(write_report(args.run))
    return 0
