"""`zerojax launch`: runs a command in several processes that form one run."""

from __future__ import annotations

import argparse
import os

from zerojax.cli.arguments import add_command, finite

_HELP = """\
Runs COMMAND in N processes that form one run: `zerojax ...`, `python script.py ...`,
`python -m module ...`, or any program. Every printed line begins with the number of its process.
If a process fails, its number is printed, and the others are ended within 5 seconds. Ctrl-C and
SIGTERM are forwarded: all processes save and stop with exit code 75; the same command resumes.

Under Slurm, Open MPI, Kubernetes and torchrun no launcher is needed: srun zerojax train ...

examples:
  zerojax launch --nprocs 2 --cpu-devices 2 -- zerojax train configs/tiny_shakespeare.yaml
  zerojax launch --max-restarts 3 -- zerojax train configs/llama_8b_zero3_8xh100.yaml
  zerojax launch --nprocs 8 -- python train.py --my-option 3
on two hosts, where only --node-rank differs:
  zerojax launch --nprocs 8 --nnodes 2 --node-rank 0 --coordinator 10.0.0.1:12355 -- zerojax ...
  zerojax launch --nprocs 8 --nnodes 2 --node-rank 1 --coordinator 10.0.0.1:12355 -- zerojax ...
The launchers authenticate each other by a shared token: ZEROJAX_LAUNCH_TOKEN (at least 16
characters), else the file of --token-file, else a file in ~/.cache/zerojax; host 0 creates a
missing file.

exit codes: the code of the first failing process (128 + n for signal n), else 0, or 75 if a signal
stopped the run and everything is saved. No restart follows 75 or 2 (invalid input)."""


def add(commands) -> None:
    """Adds the command `zerojax launch` to the parser."""
    parser = add_command(commands, "launch", run, "run a command in several processes", _HELP)
    parser.option("--nprocs N", "processes on this host (one for each GPU)", type=int)
    parser.option(
        "--cpu-devices K", "virtual CPU devices per process, for tests without GPUs", type=int
    )
    parser.option(
        "--max-restarts R", "maximum number of restarts after a failure (%(default)s)", default=0
    )
    parser.option(
        "--grace S",
        "seconds before the other processes are killed after a failure (%(default)g)",
        type=finite,
        default=3.0,
    )
    parser.option("--nnodes M", "number of hosts (%(default)s)", default=1)
    parser.option("--node-rank I", "index of this host, from 0", default=0)
    parser.option(
        "--coordinator HOST:PORT",
        "with several hosts: address at which the launcher of host 0 listens",
    )
    parser.option(
        "--token-file PATH",
        "with several hosts: a file, visible to all hosts, with the secret that their launchers "
        "share",
    )
    parser.switch("--show-all", "also print known harmless warnings")
    parser.add_argument(
        "words",
        metavar="-- COMMAND ...",
        nargs=argparse.REMAINDER,
        help="command that each process runs",
    )


def run(args: argparse.Namespace) -> int:
    """Runs `zerojax launch`: checks the options, then runs the command in all processes of this
    host."""
    from zerojax.runtime.launch import Job, check_gpus, launch
    from zerojax.runtime.launch.job import command_line

    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    job = Job(
        command=tuple(words),
        num_processes=_num_processes(args),
        num_hosts=args.nnodes,
        host=args.node_rank,
        coordinator=args.coordinator,
        token_file=args.token_file,
        cpu_devices=args.cpu_devices,
        max_restarts=args.max_restarts,
        grace=args.grace,
        show_all=args.show_all,
    )
    check_gpus(job, os.environ)
    command_line(job)  # raises for an invalid command before any process starts
    return launch(job)


def _num_processes(args: argparse.Namespace) -> int:
    from zerojax.runtime.process_group import visible_gpus

    if args.nprocs is not None:
        return args.nprocs
    number = visible_gpus(os.environ) if args.cpu_devices is None else 0
    if number == 0:
        raise ValueError(
            "no GPU is visible on this host, and the default is one process per GPU; "
            "set --nprocs, such as --nprocs 2 --cpu-devices 2"
        )
    return number
