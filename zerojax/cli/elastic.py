"""`zerojax elastic`: the batch of an elastic run for each number of devices.

This module imports no JAX.
"""

from __future__ import annotations

import argparse
import json

from zerojax.cli.train import split_words
from zerojax.config import ElasticBatch, RunConfig, load
from zerojax.config.display import show


def describe(batch: ElasticBatch, counts: list[int]) -> str:
    """The batch, and a line for each of these numbers of devices."""
    known = batch.device_counts
    lines = [
        f"batch      {batch.global_batch_size} rows, the same on every number of devices",
        f"devices    {len(known)} numbers from {known[0]} to {known[-1]} can cut it",
        "",
        f"{'devices':>9}{'rows per shard':>16}{'microbatches':>14}{'rows each':>11}",
    ]
    for count in counts:
        rows = batch.global_batch_size * batch.devices_per_shard // count
        size, parts = batch.micro_batch_size(count), batch.num_microbatches(count)
        lines.append(f"{count:>9}{rows:>16}{parts:>14}{size:>11}")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """Prints the batch of the settings, whatever batch they name besides."""
    path, overrides = split_words(args.config, args.overrides)
    config = load(RunConfig, path, [*overrides, "elasticity.enabled=false"])
    batch = config.elasticity.choose_batch(config.mesh.stage * config.mesh.model)
    counts = list(batch.device_counts) if args.devices is None else [args.devices]
    if args.json:
        rows = {str(count): batch.num_microbatches(count) for count in counts}
        show(json.dumps({"global_batch_size": batch.global_batch_size, "num_microbatches": rows}))
    else:
        show(describe(batch, counts))
    return 0
