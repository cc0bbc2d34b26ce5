"""`zerojax env --cluster` in real processes: alike, different, absent, stuck in a collective."""

import json
import time
from pathlib import Path

import pytest

from tests.support.process_groups import ROOT, end_group, free_port
from tests.support.refusals import check_words
from zerojax.runtime.shutdown import FAILED, OK

pytestmark = [pytest.mark.multihost, pytest.mark.thorough]

LIMIT = 120.0
"""Seconds until a process is killed; one needs about five."""

PROGRAM = """
import json, os, sys
os.environ.update(json.loads(sys.argv[1]))
exec(sys.argv[2])
from zerojax.cli import main
sys.exit(main(["env", "--cluster", "--size", "1", *sys.argv[3:]]))
"""


def process(*words: str, before: str = "", **variables: str) -> list[str]:
    """What stands behind `python` for a process with these options and variables of its own."""
    return ["-c", PROGRAM, json.dumps(variables), before, *words]


def end(*processes: list[str], join: bool = True) -> list[tuple[int, str]]:
    return end_group(
        processes, folder=ROOT, variables={"JAX_PLATFORMS": "cpu"}, join=join, seconds=LIMIT
    )


def by_slurm(index: int, port: int) -> dict[str, str]:
    """The variables of one of two tasks."""
    return {
        "ZEROJAX_COORDINATOR_PORT": str(port),
        "SLURM_JOB_ID": "4242",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_PROCID": str(index),
        "SLURM_LOCALID": str(index),
        "SLURM_NODEID": "0",
    }


def json_in(text: str) -> dict:
    """The JSON among the lines that other libraries print."""
    start = text.index("{\n")
    return json.JSONDecoder().raw_decode(text[start:])[0]


def test_two_processes_of_slurm_are_reported_by_the_first(tmp_path: Path):
    port = free_port()
    words = ["--json", "--folder", str(tmp_path)]
    found = end(*(process(*words, **by_slurm(index, port)) for index in range(2)), join=False)
    assert [code for code, _ in found] == [OK, OK], found
    (_, output), (_, other) = found
    assert "2 processes (Slurm) at " in output
    assert "{\n" not in other, "only process 0 reports"
    report = json_in(output)
    assert [row["process"] for row in report["processes"]] == [0, 1]
    assert report["differences"] == []
    kinds = {(one["kind"], one["num_devices"]) for times in report["collectives"] for one in times}
    assert kinds == {("all-gather", 2), ("all-reduce", 2)}
    assert all(one["is_right"] for times in report["collectives"] for one in times)
    assert [[row["sees_0"] for row in rows] for rows in report["folders"]] == [[True], [True]]
    assert list(tmp_path.iterdir()) == []


def test_a_variable_a_folder_and_devices_that_differ_are_named(tmp_path: Path):
    folders = [tmp_path / name for name in ("a", "b")]  # as a local $SCRATCH of two hosts
    for folder in folders:
        folder.mkdir()
    found = end(
        process("--folder", str(folders[0])),
        process("--folder", str(folders[1]), NCCL_IB_HCA="mlx5_9", JAX_NUM_CPU_DEVICES="2"),
    )
    assert [code for code, _ in found] == [FAILED, FAILED], found
    listed = found[0][1].rpartition("differences:")[2].splitlines()
    expected = {
        "* variable NCCL_IB_HCA: ": "none mlx5_9 process 1",
        "* variable JAX_NUM_CPU_DEVICES: ": "none 2 process 1",
        "* devices of a process: ": '"1 x cpu" "2 x cpu" process 1',
        "* folder ": [*map(str, folders), "process 1", "mount"],
    }
    assert len([line for line in listed if line.startswith("* ")]) == len(expected), listed
    for start, words in expected.items():
        (line,) = [line for line in listed if line.startswith(start)]
        check_words(line, words)


def test_a_process_that_never_comes_is_named_in_time():
    began = time.monotonic()
    came = {"ZEROJAX_NUM_PROCESSES": "3"}
    found = end(process("--timeout", "4", **came), process("--timeout", "4", **came))
    assert time.monotonic() - began < LIMIT / 2
    for code, output in found:
        assert code == FAILED, output
        check_words(output, ["1 of 3", "process 2", "4 s"], "--timeout")


def test_a_process_that_is_killed_is_named():
    killed = (
        "from zerojax.cli import cluster_report\n"
        "cluster_report._Report.make = lambda *_: os.kill(os.getpid(), 9)"
    )
    (code, output), (ended, _) = end(process(), process(before=killed))
    assert (code, ended) == (FAILED, -9), output
    check_words(output, ["process 1", "has ended"], "output")


def test_a_collective_that_does_not_end_is_named():
    """Process 1 does not take part; process 0 waits in a compiled program."""
    sleeps = (
        "import time\nfrom zerojax.hardware import collective_rates\n"
        "collective_rates._measure = lambda *_: time.sleep(100)"
    )
    found = end(process("--timeout", "8"), process("--timeout", "8", before=sleeps))
    for index, (code, output) in enumerate(found):
        assert code == FAILED, output
        check_words(output, [f"process {index}", "all-gather of 1 MiB", "8 s"], "--timeout")
