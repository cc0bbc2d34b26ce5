"""Argument parser of the `zerojax` command, and its help."""

from __future__ import annotations

import argparse

import zerojax
from zerojax.cli import (
    parser_check,
    parser_checkpoint,
    parser_convert,
    parser_deepspeed,
    parser_elastic,
    parser_launch,
    parser_profile,
)
from zerojax.cli.parser_parts import Parser, add_command, add_run, add_run_settings, add_settings

_TRAIN = """\
CONFIG is a YAML file; without one the defaults train a small GPT on Shakespeare.
KEY=VALUE changes one setting: mesh.zero=3, or zero=3 where no setting as near the top ends so.

examples:
  zerojax train configs/tiny_shakespeare.yaml
  zerojax train configs/tiny_shakespeare.yaml zero=3 steps=100 run_dir=runs/mine
  zerojax train data.path=my_text.txt tokenizer=bpe:2048

The same command continues a run that was stopped: it looks for checkpoints in the run folder.

exit codes: 0 success, 1 failure, 2 invalid input, 75 stopped by a signal with everything saved (the
same command resumes), 79 a step hung and the watchdog ended it (watch.step_timeout), 130 Ctrl-C and
143 SIGTERM with nothing saved.
`zerojax keys` lists every setting."""

_PLAN = """\
Compiles the training step of `zerojax train CONFIG.yaml KEY=VALUE ...` for GPUs that you do not
have, and prints the needs of one device: memory by role, communication, and a lower bound on time.
Nothing is run and no GPU is needed: pip install 'zerojax[plan]'. Without it, estimates by formula
are printed.

examples:
  zerojax plan configs/llama_7b_zero3_8xh100.yaml --gpu h100 --devices 8
  zerojax plan configs/llama_7b_zero3_8xh100.yaml --gpu h200 --devices 8 zero=2 --json
  zerojax plan configs/llama_7b_zero3_8xh100.yaml --gpu h100 --devices 64 --search
  zerojax plan configs/llama_7b_zero3_8xh100.yaml --gpu h200 --devices 1 opt_state=host
  zerojax plan configs/llama_7b_zero3_8xh100.yaml --devices 8 --parameter blocks/mlp/up/kernel

exit codes: 0 it fits, 1 it does not fit, 2 invalid input, 3 only formulas are available and they do
not decide. ZEROJAX_CACHE is the folder of cached results (or off)."""

_SCHEDULE = """\
Without NAME all schedules are listed. NAME may be a CSV file: one line per tick, one column per
stage, cells such as F4+B0; --csv writes one to start from.

examples:
  zerojax schedule 1f1b --stages 4 --microbatches 8
  zerojax schedule interleaved --stages 4 --microbatches 8 --chunks 2 --svg interleaved.svg
  zerojax schedule zb_h1 --stages 4 --microbatches 8 --costs 1,1.2,0.8 --csv mine.csv
  zerojax schedule mine.csv"""

_GENERATE = """\
examples:
  zerojax generate runs/tiny_shakespeare "To be, or"
  zerojax generate runs/tiny_shakespeare "ROMEO:" --tokens 100 --temperature 0.5 --seed 7"""

_EVAL = """\
The run is loaded with its own mesh, if this machine has as many devices as it was trained on.

examples:
  zerojax eval runs/tiny_shakespeare
  zerojax eval runs/mine --step best
  zerojax eval runs/tiny_shakespeare mesh.zero=3 mesh.data=4 --batches 20"""

_PREPARE = """\
Tokenises text once, so that training only reads tokens.

examples:
  zerojax data prepare book.txt runs/tokens
  zerojax data prepare folder_of_text runs/tokens --tokenizer bpe:4096
then:
  zerojax train CONFIG data.path=runs/tokens"""

_BENCH_IO = """\
Writes and reads a file below PATH past the page cache, with 1 to 8 transfers at once, with the same
code that offloads state to a disk; then removes it.

`zerojax plan` uses the best rate for offload to this disk.

examples:
  zerojax bench io runs
  zerojax bench io /mnt/nvme --size 8192"""

_BENCH_LINK = """\
Copies arrays between the first accelerator and pinned host memory: each way, and both at once.
`zerojax plan` uses the best rate for offload on such a card.

examples:
  zerojax bench link
  zerojax bench link --size 2048 --json"""

_EXIT_CODES = """\
exit codes: 0 success, 1 failure, 2 invalid input, 75 stopped by a signal with everything
saved, 79 ended by the watchdog, 130 stopped with Ctrl-C.
ZEROJAX_DEBUG=1 shows the traceback of an error."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command; `args.module` is the module whose `run(args)` carries it out."""
    parser = Parser(
        prog="zerojax",
        description="Train JAX models with ZeRO, pipelines, tensor parallelism and offload.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"zerojax {zerojax.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_train(commands)
    parser_launch.add(commands)
    _add_plan(commands)
    parser_check.add(commands)
    _add_schedule(commands)
    parser_elastic.add(commands)
    parser_deepspeed.add(commands)
    parser_checkpoint.add(commands)
    parser_profile.add(commands)
    parser_convert.add(commands)
    _add_generate(commands)
    _add_eval(commands)
    _add_report(commands)
    _add_keys(commands)
    _add_env(commands)
    _add_data(commands)
    _add_bench(commands)
    return parser


def _add_train(commands) -> None:
    parser = add_command(commands, "train", "train", "train a model, or continue a run", _TRAIN)
    add_settings(parser)
    parser.add_argument(
        "--print-config", action="store_true", help="print the resolved settings and stop"
    )


def _add_plan(commands) -> None:
    parser = add_command(
        commands,
        "plan",
        "plan",
        "predict memory, communication and time on GPUs that you do not have",
        _PLAN,
    )
    add_settings(parser)
    parser.add_argument(
        "--gpu", metavar="NAME", help="GPU, such as h200, or a YAML file that describes one"
    )
    parser.add_argument("--devices", type=int, metavar="N", help="number of GPUs")
    parser.add_argument(
        "--parameter",
        metavar="NAME",
        help="explain one parameter: sharding, collectives, update, memory, names in a checkpoint",
    )
    parser.add_argument("--json", action="store_true", help="print every number as JSON")
    parser.add_argument(
        "--no-compile", action="store_true", help="estimates by formula only, in a second"
    )
    parser.add_argument(
        "--fast", action="store_true", help="compile faster, with the same memory and communication"
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="find zero, model, stage, num_microbatches and remat that fit and cost the least",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="time limit of the search (%(default)g)",
    )


def _add_schedule(commands) -> None:
    parser = add_command(
        commands,
        "schedule",
        "schedule",
        "draw a pipeline schedule, its bubble and memory",
        _SCHEDULE,
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="such as 1f1b, or a CSV file")
    parser.add_argument("--stages", type=int, metavar="N", help="pipeline stages")
    parser.add_argument("--microbatches", type=int, metavar="N", help="microbatches in a step")
    parser.add_argument(
        "--chunks", type=int, metavar="V", help="parts of the model on a stage (interleaved: 2)"
    )
    parser.add_argument(
        "--costs",
        default="1,1,1",
        metavar="F,B,W",
        help="times of a microbatch: forward, gradient of the input, of the weights (%(default)s)",
    )
    parser.add_argument("--svg", metavar="FILE", help="also write the picture as SVG")
    parser.add_argument("--csv", metavar="FILE", help="also write the table as CSV")


def _add_generate(commands) -> None:
    parser = add_command(
        commands, "generate", "generate", "continue a text with a trained model", _GENERATE
    )
    add_run(parser)
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue")
    add_run_settings(parser)
    parser.add_argument(
        "--tokens", type=int, metavar="N", help="tokens to add (200, or as many as the model holds)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0 takes the likeliest token, 1 samples from the model's distribution (%(default)s)",
    )
    parser.add_argument(
        "--top-k", type=int, metavar="K", help="sample among the K likeliest tokens (all)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the sampling (%(default)s)"
    )


def _add_eval(commands) -> None:
    parser = add_command(commands, "eval", "evaluate", "measure the loss of a trained model", _EVAL)
    add_run(parser)
    add_run_settings(parser)
    parser.add_argument(
        "--batches", type=int, metavar="N", help="validation batches (the run's eval_batches)"
    )


def _add_report(commands) -> None:
    parser = add_command(commands, "report", "report", "write the HTML report of a run")
    add_run(parser)


def _add_keys(commands) -> None:
    parser = add_command(commands, "keys", "keys", "list all settings with defaults and meaning")
    parser.add_argument(
        "word", metavar="WORD", nargs="?", help="only settings that contain this word"
    )


def _add_env(commands) -> None:
    parser = add_command(
        commands, "env", "env", "show versions, devices, memory and missing packages"
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def _add_data(commands) -> None:
    data = commands.add_parser("data", help="make token files", description="Make token files.")
    inner = data.add_subparsers(metavar="COMMAND", required=True)
    parser = add_command(inner, "prepare", "prepare", "tokenise text into token files", _PREPARE)
    parser.add_argument("source", metavar="IN", help="text file, or folder of text files")
    parser.add_argument("target", metavar="OUT", help="folder to write to")
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="NAME",
        help="bytes, bpe:SIZE (trained on IN), or a tokenizer.json (%(default)s)",
    )
    parser.add_argument(
        "--validation-fraction",
        type=float,
        default=0.05,
        metavar="F",
        help="fraction, from the end, for validation (%(default)s)",
    )


def _add_bench(commands) -> None:
    bench = commands.add_parser(
        "bench", help="measure this machine", description="Measure this machine."
    )
    inner = bench.add_subparsers(metavar="COMMAND", required=True)
    parser = add_command(inner, "io", "bench", "measure the bandwidth of a disk", _BENCH_IO)
    parser.add_argument("path", metavar="PATH", help="folder on the disk to be measured")
    parser.add_argument(
        "--size", type=int, default=1024, metavar="MIB", help="bytes to write (%(default)s MiB)"
    )
    parser.add_argument("--json", action="store_true", help="print every number as JSON")
    parser = add_command(
        inner, "link", "bench_link", "measure the bandwidth between host and device", _BENCH_LINK
    )
    parser.add_argument(
        "--size", type=int, metavar="MIB", help="size of an array (16, 128 and 1024)"
    )
    parser.add_argument("--json", action="store_true", help="print every number as JSON")
