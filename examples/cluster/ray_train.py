"""zerojax on a Ray cluster: one worker per GPU, restarted from the last complete checkpoint.

    python examples/cluster/ray_train.py --workers 16 -- configs/llama_8b_zero3_8xh100.yaml zero=3

The arguments after -- are those of `zerojax train`; run_dir must be a folder that all hosts share.
Ray places the workers and gives each worker one GPU. The training runs in a separate process, which
ends when its worker ends. Try it with `--gpus 0 --cpu-devices 1` on a machine without GPUs.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

SAVED_AND_STOPPED, BAD_INPUT = 75, 2


@ray.remote(max_restarts=0)
class Worker:
    """One process of the run, on a host that Ray selected."""

    def address(self) -> str:
        """Returns the address of this worker for the others, with a port that is free now."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"{host}:{probe.getsockname()[1]}"

    def train(self, words: list[str], variables: dict[str, str]) -> int:
        """Runs `zerojax train`; returns the exit code, or minus the number of a signal."""
        # The boot module ends the process when this worker ends for any reason.
        boot = ["-m", "zerojax.runtime.launch.boot", f"--launcher={os.getpid()}", "-m", "zerojax"]
        command = [sys.executable, *boot, "train", *words]
        return subprocess.run(command, env={**os.environ, **variables}, check=False).returncode


def run_once(args: argparse.Namespace, restart: int) -> int:
    """Runs all workers once; returns the exit code of the first that failed, else 0 or 75."""
    bundle = {"CPU": args.cpus, "GPU": args.gpus}
    group = placement_group([bundle] * args.workers, strategy="PACK")
    ray.get(group.ready())
    try:
        workers = [
            Worker.options(
                num_cpus=args.cpus,
                num_gpus=args.gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=index
                ),
            ).remote()
            for index in range(args.workers)
        ]
        variables = {
            "ZEROJAX_COORDINATOR": ray.get(workers[0].address.remote()),
            "ZEROJAX_NUM_PROCESSES": str(args.workers),
            "ZEROJAX_RESTART": str(restart),
        }
        if args.cpu_devices is not None:
            variables |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(args.cpu_devices)}
        running = [
            worker.train.remote(args.words, {**variables, "ZEROJAX_PROCESS_ID": str(index)})
            for index, worker in enumerate(workers)
        ]
        return first_code(running)
    finally:
        remove_placement_group(group)  # also ends the workers, which end their trainings


def first_code(running: list) -> int:
    """Waits until all workers have succeeded or one has failed; returns the exit code."""
    code = 0
    names = {reference: index for index, reference in enumerate(running)}
    while running:
        (ended,), running = ray.wait(running, num_returns=1)
        try:
            code = ray.get(ended)
        except ray.exceptions.RayError as error:  # its host is lost, or Ray has killed the worker
            print(f"rank {names[ended]}: {error}", file=sys.stderr)
            return 1
        if code not in (0, SAVED_AND_STOPPED):
            print(f"rank {names[ended]} failed first, with {code}", file=sys.stderr)
            return code
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, required=True, help="number of processes")
    parser.add_argument("--gpus", type=float, default=1, help="GPUs of each worker (%(default)s)")
    parser.add_argument("--cpus", type=float, default=8, help="cores of each worker (%(default)s)")
    parser.add_argument("--cpu-devices", type=int, help="virtual CPU devices of each worker")
    parser.add_argument("--max-restarts", type=int, default=10, help="restarts (%(default)s)")
    parser.add_argument("words", nargs="+", help="arguments of `zerojax train`")
    args = parser.parse_args()
    ray.init()
    for restart in range(args.max_restarts + 1):
        code = run_once(args, restart)
        if code in (0, BAD_INPUT, SAVED_AND_STOPPED):
            break
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
