"""`zerojax launch`: arguments of the launcher.

This module imports no JAX. The launching itself is `zerojax.runtime.launch`.
"""

from __future__ import annotations

import argparse
import os

from zerojax.runtime.launch import Job, check_gpus, launch
from zerojax.runtime.launch.job import command_line
from zerojax.runtime.local_gpus import visible_gpus


def run(args: argparse.Namespace) -> int:
    """Checks the options, then runs the command in all processes of this host."""
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
    command_line(job)  # says what cannot be launched before anything is
    return launch(job)


def _num_processes(args: argparse.Namespace) -> int:
    if args.nprocs is not None:
        return args.nprocs
    number = visible_gpus(os.environ) if args.cpu_devices is None else 0
    if number == 0:
        raise ValueError(
            "how many processes? No GPU is visible here, for each of which there would be one; "
            "give --nprocs, such as --nprocs 2 --cpu-devices 2"
        )
    return number
