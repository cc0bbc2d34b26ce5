"""`zerojax deepspeed` and `zerojax elastic`: explain DeepSpeed's keys, compare with DeepSpeed, and
choose elastic batches."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING

from zerojax.cli.arguments import add_command, add_settings, split_words
from zerojax.cli.jax_environment import run_one_program_at_a_time, use_cpu_devices
from zerojax.cli.progress import Progress
from zerojax.config import ConfigError, ElasticBatch, RunConfig, load, to_dict
from zerojax.config.checks import MAX_CPU_DEVICES, check_whole_number
from zerojax.config.display import show
from zerojax.config.features import FEATURES
from zerojax.config.loader import user_path
from zerojax.runtime.shutdown import BAD_INPUT, OK
from zerojax.runtime.user_files import replace_text

if TYPE_CHECKING:
    from zerojax.deepspeed_config import Translation

DIFFERS = 4
"""Exit code of a comparison that finds a difference."""

_EXPLAIN = """\
Prints a line for every key of the file: honoured (same meaning as in DeepSpeed), mapped (supported
through a different mechanism), not needed (zerojax does this anyway, or has no such mechanism),
compiler (XLA decides), ignored (by DeepSpeed, too), or refused; with the reason. Nothing is run.

examples:
  zerojax deepspeed explain ds_config.json
  zerojax deepspeed explain ds_config.json --devices 8 --steps 1000 --hidden-size 4096
  zerojax deepspeed explain ds_config.json --json

then, in Python: zerojax.train(model, "ds_config.json", batches)

exit codes: 0 the file is supported, 2 a key, a value or a combination in it is refused."""

_COMPARE = """\
Trains the same weights on the same batches with DeepSpeed and with zerojax, on CPUs of this
machine, and compares losses, the gradient of every tensor in the first step, and its update. Tokens
are random, and dropout is off. DeepSpeed runs in processes of its own; --python names a Python that
has torch, deepspeed and transformers, if it is not this one.

examples:
  zerojax deepspeed compare ds_config.json --model my_folder
  zerojax deepspeed compare ds_config.json --model my_folder --processes 4 --out compared.json

exit codes: 0 equal up to rounding, 4 a loss, a gradient or an update differs."""

_ELASTIC = """\
Chooses the global batch size of an elastic run from the section `elasticity`, by DeepSpeed's
arithmetic. The batch is the same on every listed number of devices. For a scheduler use --json.

examples:
  zerojax elastic CONFIG.yaml max_global_batch_size=512
  zerojax elastic micro_batch_sizes=[2,4,8] max_global_batch_size=512 --devices 24
  zerojax train CONFIG.yaml elasticity.enabled=true max_global_batch_size=512"""


def add_elastic(commands) -> None:
    """Adds the command `zerojax elastic` to the parser."""
    parser = add_command(
        commands,
        "elastic",
        choose,
        "choose a batch size that many numbers of devices divide",
        _ELASTIC,
    )
    add_settings(parser)
    parser.option("--devices N", "show only this number of devices", type=int)
    parser.switch("--json", "print the result as JSON")


def add_deepspeed(commands) -> None:
    """Adds the command `zerojax deepspeed` to the parser, with its sub-commands."""
    deepspeed = commands.add_parser(
        "deepspeed",
        help="explain how zerojax interprets a ds_config.json",
        description="Explain how zerojax interprets a ds_config.json.",
    )
    inner = deepspeed.add_subparsers(metavar="COMMAND", required=True)
    parser = add_command(
        inner, "explain", explain, "explain every key of a ds_config.json", _EXPLAIN
    )
    parser.add_argument(
        "file", metavar="FILE", help="JSON, hjson, or the base64 of either, as text"
    )
    parser.option("--devices N", "number of GPUs of the run; the batch depends on it", type=int)
    parser.option(
        "--steps N", 'number of steps of the run, used where the file has "auto"', type=int
    )
    parser.option(
        "--hidden-size N", 'hidden size of the model, used where the file has "auto"', type=int
    )
    parser.switch("--json", "print the result as JSON")
    parser = add_command(
        inner, "compare", compare, "train with DeepSpeed and with zerojax, and compare", _COMPARE
    )
    parser.add_argument("file", metavar="FILE", help="ds_config.json")
    parser.option("--model FOLDER", "Hugging Face folder of a decoder", required=True)
    parser.option("--processes N", "processes and devices (%(default)s)", default=2)
    parser.option("--steps N", "steps to compare (%(default)s)", default=3)
    parser.option("--length N", "tokens per row (%(default)s)", default=32)
    parser.option("--python PATH", "Python with DeepSpeed (default: this one)")
    parser.option("--out FILE", "also write the result as JSON")
    parser = add_command(
        inner, "keys", list_keys, "list every key of DeepSpeed and how zerojax handles it"
    )
    parser.add_argument("word", metavar="WORD", nargs="?", help="only keys that contain this word")
    parser.switch("--markdown", "print it as docs/ds_config_keys.md")


def choose(args: argparse.Namespace) -> int:
    """Runs `zerojax elastic`: prints the batch size chosen from the section `elasticity` of the
    settings; other batch settings are ignored."""
    path, overrides = split_words(args.config, args.overrides)
    config = load(RunConfig, path, [*overrides, "elasticity.enabled=false"])
    batch = config.elasticity.choose_batch(config.mesh.devices_per_shard)
    counts = list(batch.device_counts) if args.devices is None else [args.devices]
    if args.json:
        rows = {str(count): batch.num_microbatches(count) for count in counts}
        show(json.dumps({"global_batch_size": batch.global_batch_size, "num_microbatches": rows}))
    else:
        show(_table(batch, counts))
    return OK


def _table(batch: ElasticBatch, counts: list[int]) -> str:
    """Formats the elastic batch size, and a line for each number of devices in `counts`."""
    known = batch.device_counts
    lines = [
        f"batch      {batch.global_batch_size} rows, the same on every number of devices",
        f"devices    {len(known)} possible numbers from {known[0]} to {known[-1]}",
        "",
        f"{'devices':>9}{'rows per shard':>16}{'microbatches':>14}{'rows each':>11}",
    ]
    for count in counts:
        rows = batch.global_batch_size * batch.devices_per_shard // count
        size, parts = batch.micro_batch_size(count), batch.num_microbatches(count)
        lines.append(f"{count:>9}{rows:>16}{parts:>14}{size:>11}")
    return "\n".join(lines)


def explain(args: argparse.Namespace) -> int:
    """Runs `zerojax deepspeed explain`: prints one line per key; returns exit code 2 if a key, a
    value or a combination is refused, else 0."""
    from zerojax import deepspeed_config

    for name in ("devices", "steps", "hidden_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1")
    given = deepspeed_config.CallerValues(steps=args.steps, hidden_size=args.hidden_size)
    translation = deepspeed_config.explain(args.file, num_devices=args.devices, given=given)
    show(
        json.dumps(_as_dict(translation))
        if args.json
        else deepspeed_config.explanation(translation)
    )
    refused = any(line.verdict == "refused" for line in translation.lines)
    return BAD_INPUT if refused or translation.conflicts else OK


def compare(args: argparse.Namespace) -> int:
    """Runs `zerojax deepspeed compare`: prints the comparison of both sides.

    Returns:
      Exit code: 0 equal up to rounding, 4 something differs.
    """
    for name in ("processes", "steps", "length"):
        check_whole_number(f"--{name}", getattr(args, name), 1, MAX_CPU_DEVICES)
    use_cpu_devices(args.processes)
    run_one_program_at_a_time()

    from zerojax.equality.deepspeed_compare import compare_with_deepspeed

    with Progress(quiet=False) as progress:
        found = compare_with_deepspeed(
            user_path(args.file),
            user_path(args.model),
            processes=args.processes,
            steps=args.steps,
            length=args.length,
            python=args.python or sys.executable,
            progress=progress,
        )
    show(found.page())
    if args.out is not None:
        replace_text(user_path(args.out), json.dumps(found.as_dict(), indent=1))
    return OK if found.first is None else DIFFERS


def _as_dict(translation: Translation) -> dict[str, object]:
    return {
        "lines": [dataclasses.asdict(line) for line in translation.lines],
        "mesh": to_dict(translation.mesh),
        "train_batch_size": translation.train_batch_size,
        "micro_batch_size": translation.micro_batch_size,
        "num_microbatches": translation.num_microbatches,
        "gradient_clipping": translation.gradient_clipping,
        "precision": translation.precision.describe(),
        **{
            kind.keyword: to_dict(translation.features.get(kind))
            for kind in FEATURES
            if kind.ds_section is not None
        },
        "conflicts": translation.conflicts,
        "warnings": translation.warnings,
        "reasons": translation.reasons,
    }


def list_keys(args: argparse.Namespace) -> int:
    """Runs `zerojax deepspeed keys`: prints all keys of a ds_config.json."""
    from zerojax.deepspeed_config import keys_markdown, keys_page

    show(keys_markdown() if args.markdown else keys_page(args.word), end="")
    if not args.markdown:
        show()
    return OK
