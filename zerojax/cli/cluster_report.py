"""`zerojax env --cluster`: compares all processes of a run, measures their network, and checks
shared folders."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zerojax.cli import cluster_facts
from zerojax.cli.arguments import Parser
from zerojax.config.display import printable, show
from zerojax.runtime.shutdown import FAILED, OK

if TYPE_CHECKING:
    from zerojax.hardware.collective_rates import CollectiveTimes
    from zerojax.runtime.roll_call import RollCall

DEFAULT_TIMEOUT = 120
"""Seconds in which all processes have to come, and in which each part has to end."""
_MIB, _GIB, _GB = 2**20, 2**30, 1e9
_ONLY_WITH_CLUSTER = ("folder", "timeout", "size")
DescribeDevices = Callable[[], tuple[list[dict[str, Any]], str | None]]
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"

HELP = """\
With --cluster, run it once in each process of a run, in the same way as the training: under srun,
in the pods of a Job, by ssh or by `zerojax launch`. Process 0 reports all processes.

examples:
  zerojax env
  zerojax env --cluster --folder runs
  zerojax launch --nprocs 2 --cpu-devices 2 -- zerojax env --cluster --size 1 --folder runs
under Slurm:
  srun zerojax env --cluster --folder /shared/runs

exit codes with --cluster: 0 no differences, 1 differences, or a process that did not come, 2
invalid input."""


def add_options(parser: Parser) -> None:
    """Adds --cluster and its options to the parser of `zerojax env`."""
    parser.switch("--cluster", "compare all processes of a run; each of them runs this command")
    parser.option(
        "--folder DIR",
        "with --cluster: a folder that all processes must share, such as that of the checkpoints; "
        "may be repeated",
        action="append",
    )
    parser.option(
        "--timeout S",
        f"with --cluster: seconds in which all processes must come ({DEFAULT_TIMEOUT}), and each "
        "measurement must end",
        type=int,
    )
    parser.option(
        "--size MIB", "with --cluster: size of the arrays in collectives (1 and 64)", type=int
    )


def check_options(args: argparse.Namespace) -> None:
    """Raises ValueError for options that need --cluster, and for values out of range."""
    for name in _ONLY_WITH_CLUSTER:
        if not args.cluster and getattr(args, name) is not None:
            raise ValueError(f"--{name} {_given(args, name)} has no effect alone; add --cluster")
    for name, unit in (("timeout", "second"), ("size", "MiB")):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value} is below 1 {unit}; use 1 or more")


def _given(args: argparse.Namespace, name: str) -> str:
    value = getattr(args, name)
    return value[0] if isinstance(value, list) else str(value)


def show_cluster(args: argparse.Namespace, describe_devices: DescribeDevices) -> int:
    """Runs `zerojax env --cluster` on one process; returns the same exit code on all.

    Args:
      args: parsed arguments.
      describe_devices: function that starts JAX's devices and describes those of this process.
    """
    from zerojax.runtime.distributed import JOIN_SECONDS
    from zerojax.runtime.roll_call import RollCall
    from zerojax.runtime.schedulers import process_group_of

    seconds = DEFAULT_TIMEOUT if args.timeout is None else args.timeout
    group = process_group_of(os.environ)
    local = None if group is None else group.local_process_id
    process = 0 if group is None else group.process_id
    facts = cluster_facts.collect_facts(process, is_first_of_host=local in (None, 0))
    os.environ[JOIN_SECONDS] = str(seconds)
    os.environ.setdefault(_PREALLOCATE, "false")  # another program may use the GPUs
    with RollCall(group, seconds) as roll:
        report = _Report(roll, args, seconds, describe_devices)
        problems = report.make(facts)
        code = roll.share(FAILED if problems else OK)
    if code not in (OK, FAILED):
        raise ConnectionError(f"process 0 reported the exit code {code!r}")
    return code


class _Report:
    """The parts of a report in their order. Process 0 prints each when it is complete, so that what
    is known is shown even if a later part fails; with --json it prints all at the end.

    Args:
      roll: the processes.
      args: parsed arguments.
      seconds: time limit of each part.
      describe_devices: function that starts JAX's devices and describes those of this process.
    """

    def __init__(
        self,
        roll: RollCall,
        args: argparse.Namespace,
        seconds: float,
        describe_devices: DescribeDevices,
    ) -> None:
        self._roll, self._args, self._seconds = roll, args, seconds
        self._describe_devices = describe_devices
        self._names = cluster_facts.Names(roll.hosts)
        self._folders: list[str] = args.folder or []

    def make(self, facts: dict[str, Any]) -> list[str]:
        """Makes the whole report; returns the problems on process 0, [] on the others."""
        self._compare_options()
        problems, rows = self._compare_processes(facts)
        found = self._try_folders()
        if found is not None:
            problems += cluster_facts.folder_problems(found, self._names)
            self._say(_format_folders(found, self._names))
        measured = self._measure()
        problems += _network_problems(measured, self._names)
        self._say(_format_network(measured, self._roll.num_processes))
        if self._roll.process:
            return []
        if self._args.json:
            values = {
                "processes": rows,
                "folders": found,
                "collectives": [list(map(dataclasses.asdict, times)) for times in measured],
                "differences": problems,
            }
            show(json.dumps(values, indent=2))
        elif problems:
            self._say("\n".join(["differences:", *(f"* {problem}" for problem in problems)]))
        else:
            self._say("no differences")
        return problems

    def _say(self, text: str) -> None:
        if self._roll.process == 0 and not self._args.json and text:
            show(text, end="\n\n", flush=True)

    def _compare_options(self) -> None:
        own = {"--folder": len(self._folders), "--size": self._args.size}
        for process, other in enumerate(self._roll.gather(own, "its options") or ()):
            for name, value in own.items():
                if other[name] != value:
                    what = "times" if name == "--folder" else "MiB"
                    raise ValueError(
                        f"{name} is given {other[name]} {what} on "
                        f"{self._names.of([process])}, but {value} {what} on "
                        f"{self._names.of([0])}; run the same command everywhere"
                    )
        self._roll.share(None)

    def _compare_processes(self, facts: dict[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
        """Shows what needs no device, then joins `jax.distributed` as a training does and shows all
        processes with their devices; returns (differences, facts of all processes)."""
        from zerojax.runtime.distributed import join_processes
        from zerojax.runtime.roll_call import within

        rows = self._roll.gather(facts, "its versions and variables") or []
        self._say(_format_topologies(rows, self._names))
        self._say(_format_variables(rows, self._names))
        known = cluster_facts.differences(rows, self._names)
        if known:
            self._say("\n".join(["differences before JAX starts:", *(f"* {x}" for x in known)]))
        self._roll.share(None)
        with within(self._seconds, f"process {self._roll.process}: {_NOT_JOINED}"):
            join_processes()
            devices, failure = self._describe_devices()
        all_devices = self._roll.gather([devices, failure], "its devices") or []
        problems = []
        for row, (own, why) in zip(rows, all_devices, strict=True):
            row["devices"] = " + ".join(f"{one['number']} x {one['kind']}" for one in own)
            row["is_cpu"] = all(one["platform"] == "cpu" for one in own)
            if why:
                problems.append(f"JAX could not start on {self._names.of([row['process']])}: {why}")
        self._say(_format_processes(rows))
        self._roll.share(None)
        problems += known + cluster_facts.device_differences(rows, self._names)
        return problems, rows

    def _try_folders(self) -> list[list[dict[str, Any]]] | None:
        """Returns for each process and folder what was found, on process 0; None if there is
        nothing to show."""
        if not self._folders:
            return None
        probe = cluster_facts.FolderProbe(self._folders)
        try:
            own = probe.make_tokens()
            tokens = self._roll.share(own)
            seen = probe.see(tokens)
            rows = [{**row, "sees_0": is_there} for row, is_there in zip(own, seen, strict=True)]
            found = self._roll.gather(rows, "its folders")
            self._roll.share(None)  # before, another process may look for the files
        finally:
            probe.remove()
        for row in (row for rows in found or () for row in rows):
            row.pop("content")
            row.pop("name")
        return found

    def _measure(self) -> list[list[CollectiveTimes]]:
        """Returns on process 0 the times of all processes, one list for each collective."""
        from zerojax.hardware.collective_rates import (
            MEASURED_BYTES,
            CollectiveTimes,
            measure_collectives,
        )

        size = self._args.size
        sizes = MEASURED_BYTES if size is None else (size * _MIB,)
        found = []
        with _other_output():
            for times in measure_collectives(sizes, around=self._limited):
                rows = self._roll.gather(dataclasses.asdict(times), f"its time of an {times.kind}")
                if rows is not None:
                    found.append([CollectiveTimes(**row) for row in rows])
                self._roll.share(None)
        return found

    @contextlib.contextmanager
    def _limited(self, kind: str, num_bytes: int) -> Iterator[None]:
        from zerojax.runtime.roll_call import within

        what = f"an {kind} of {num_bytes / _MIB:g} MiB over all devices"
        with within(
            self._seconds,
            f"process {self._roll.process}: {what} has not ended within {self._seconds} s, though "
            "all processes are there; NCCL_DEBUG=INFO shows which network it takes, and --timeout "
            "sets the limit",
        ):
            yield


@contextlib.contextmanager
def _other_output() -> Iterator[None]:
    """Sends what C++ libraries print to descriptor 2: gloo prints to standard output, which would
    be no JSON then."""
    # What Python holds back would otherwise go to the other descriptor.
    sys.stdout.flush()
    try:
        shown = os.dup(1)
    except OSError:  # it is closed
        yield
        return
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(shown, 1)
        os.close(shown)


_NOT_JOINED = (
    "all processes have come, but JAX did not start the devices of all of them in time; the output "
    "of the others may have the reason, and --timeout sets the limit"
)


def _network_problems(
    measured: Sequence[Sequence[CollectiveTimes]], names: cluster_facts.Names
) -> list[str]:
    found = []
    for times in measured:
        wrong = [process for process, one in enumerate(times) if not one.is_right]
        if wrong:
            found.append(
                f"the {times[0].kind} of {times[0].num_bytes / _MIB:g} MiB has a wrong result on "
                f"{names.of(wrong)}; its cards or links are faulty"
            )
    return found


# --- text -----------------------------------------------------------------------------------------


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rows = [heading, *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heading))]
    lines = ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _format_processes(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    packages = ("jax", "jaxlib")
    heading = ("process", "host", "devices", "driver", "python", *packages, "zerojax", "sources")
    heading = (*heading, "/dev/shm", "ulimit -l")
    cells = [
        (
            str(row["process"]),
            row["host"],
            row["devices"] or "none",
            row["driver"] or "-",
            row["python"],
            *(row["packages"].get(name, "-") for name in packages),
            row["zerojax"],
            row["sources"],
            _size(row["shared_memory_bytes"], "-"),
            _size(row["locked_memory_bytes"], "unlimited"),
        )
        for row in rows
    ]
    return _table(heading, [[printable(cell) for cell in row] for row in cells])


def _size(number: int | None, missing: str) -> str:
    if number is None:
        return missing
    return f"{number / _GIB:.1f} GiB" if number >= _GIB else f"{number / _MIB:.3g} MiB"


def _format_topologies(rows: Sequence[Mapping[str, Any]], names: cluster_facts.Names) -> str:
    told = [row for row in rows if row["topology"] or row["no_topology"]]
    groups: dict[tuple[Any, Any], list[int]] = {}
    for row in told:
        groups.setdefault((row["topology"], row["no_topology"]), []).append(row["process"])
    parts = []
    for (table, why), processes in groups.items():
        where = names.of(processes)
        if table is None:
            parts.append(f"links of the cards, {where}: not known, {printable(why)}")
        else:
            lines = [f"  {printable(line.expandtabs())}" for line in table.splitlines()]
            parts.append("\n".join([f"links of the cards, {where}:", *lines]))
    return "\n".join(parts)


def _format_variables(rows: Sequence[Mapping[str, Any]], names: cluster_facts.Names) -> str:
    lines = []
    for name in sorted({name for row in rows for name in row["variables"]}):
        groups = cluster_facts.groups_of([row["variables"].get(name) for row in rows])
        for value, processes in groups.items():
            where = f"  on {names.of(processes)}" if len(groups) > 1 else ""
            shown = "not set" if value is None else f"= {printable(value)}"
            lines.append(f"  {printable(name)} {shown}{where}")
    if not rows:
        return ""
    return "\n".join(["variables:", *lines] if lines else ["variables: none that NCCL or XLA read"])


def _format_folders(
    found: Sequence[Sequence[Mapping[str, Any]]], names: cluster_facts.Names
) -> str:
    if not found:
        return ""
    lines = []
    for number, first in enumerate(found[0]):
        column = [row[number] for row in found]
        free = [one["free"] for one in column if one["free"] is not None]
        room = f", {_size(min(free), '')} free" if free else ""
        writable = sum(one["error"] is None for one in column)
        shared = sum(one["sees_0"] is True for one in column)
        lines.append(
            f"  {printable(first['path'])}: written by {writable} of {len(column)} processes; the "
            f"file of {names.of([0])} is seen by {shared}{room}"
        )
    return "\n".join(["folders:", *lines])


def _format_network(measured: Sequence[Sequence[CollectiveTimes]], num_processes: int) -> str:
    from zerojax.hardware.collective_rates import PASSES, algorithm_bandwidth, bus_bandwidth

    if not measured:
        return "network: one device alone, so nothing was measured"
    heading = ("collective", "MiB", "ms", "GB/s", "bus GB/s", "ms by process", "longest call")
    rows = []
    for times in measured:
        medians = [one.seconds for one in times]
        first, slowest = times[0], max(medians)
        size, number = first.num_bytes, first.num_devices
        rows.append(
            [
                first.kind,
                f"{size / _MIB:g}",
                f"{slowest * 1e3:.3f}",
                f"{algorithm_bandwidth(size, slowest) / _GB:.2f}",
                f"{bus_bandwidth(first.kind, size, number, slowest) / _GB:.2f}",
                f"{min(medians) * 1e3:.3f} to {slowest * 1e3:.3f}",
                f"{max(one.longest for one in times) * 1e3:.3f}",
            ]
        )
    first = measured[0][0]
    processes = f"{num_processes} process{'es' * (num_processes > 1)}"
    return "\n".join(
        [
            f"network: {first.num_devices} devices of {processes}, float32, median of {PASSES} "
            "calls, each waited for",
            _table(heading, rows),
            "ms: median of the slowest process. GB/s (10^9 bytes): size of the result on one "
            "device / ms.\nbus GB/s: that times (n - 1) / n for an all-gather, 2 (n - 1) / n for "
            "an all-reduce of n devices.",
        ]
    )
