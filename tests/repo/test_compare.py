"""The comparison with other frameworks: what it counts, what it says of those that are missing."""

from __future__ import annotations

import ast
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from benchmarks import small_gpt
from benchmarks.compare import subject
from benchmarks.compare.catalogue import BARE, BARE_JAX, BARE_TORCH, WAYS_FOLDER, WINDOWS
from benchmarks.compare.lines import code_lines
from benchmarks.compare.probing import Found, probe
from benchmarks.compare.sockets import bytes_sent
from benchmarks.compare.tables import Measured, findings, make_record, num_parameters, wire_unit
from benchmarks.compare.turns import Taken
from benchmarks.workers import WorkerFailed, Workers

ROOT = Path(__file__).resolve().parents[2]
ALL_WAYS = [way for ways in WINDOWS.values() for way in ways]


# --- the subject ----------------------------------------------------------------------------------


@pytest.mark.parametrize("smoke", [False, True])
def test_both_frameworks_read_the_same_sizes(smoke):
    ours, theirs = small_gpt.choose_config(smoke), subject.choose_workload(smoke)
    for name in ("vocab_size", "num_layers", "num_heads", "embed_dim", "mlp_dim", "norm_eps"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.max_seq_len == theirs.seq_len
    assert ours.tie_embeddings is not theirs.untied
    assert theirs.batch_size == small_gpt.BATCH_SIZE
    assert num_parameters(smoke) == ours.num_parameters


def test_processes_get_their_own_rows_of_a_batch():
    batch = {"tokens": np.arange(8)[:, None], "targets": np.arange(8)[:, None]}
    parts = [subject.rows_of(batch, index, 2)["tokens"] for index in range(2)]
    np.testing.assert_array_equal(np.concatenate(parts), batch["tokens"])


def test_every_way_is_a_program_of_its_own():
    for way in ALL_WAYS:
        tree = ast.parse((WAYS_FOLDER / f"{way.file}.py").read_text())
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        assert functions == ["prepare"], way.file
        assert way.bare in BARE
        assert way.lines > 10
    assert len({way.name for way in ALL_WAYS}) == len(ALL_WAYS)
    assert {way.file for way in ALL_WAYS} == {path.stem for path in WAYS_FOLDER.glob("[!_]*.py")}


# --- what is counted ------------------------------------------------------------------------------


PROGRAM = '''"""Docstring,
of two lines."""

from __future__ import annotations

import os  # kept
# a comment

def f():
    """One."""
    x = {
        "a": 1,
    }
    return x

text = """not
a docstring"""
'''


def test_lines_of_code_are_those_that_a_user_writes(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    assert code_lines(path) == 8  # import, def, three of the dictionary, return, two of the text


def test_bytes_are_counted_where_the_kernel_sends_them():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        sender = socket.create_connection(listening.getsockname())
        receiver, _ = listening.accept()
        with sender, receiver:
            before = bytes_sent()
            if before is None:
                pytest.skip("this kernel does not count the bytes of a connection")
            received = []
            reader = threading.Thread(target=lambda: received.append(_read(receiver, 3_000_000)))
            reader.start()
            sender.sendall(b"x" * 3_000_000)
            reader.join(timeout=120)
            assert received == [3_000_000]
            assert bytes_sent() - before == 3_000_000


def _read(receiver: socket.socket, size: int) -> int:
    got = 0
    while got < size:
        got += len(receiver.recv(1 << 20))
    return got


# --- processes that are asked for steps -----------------------------------------------------------

SERVING = """
import sys
from benchmarks.workers import serve
print("noise of a library")
serve(lambda: {"loss": 1.5}, lambda: {"peak_mb": 7})
"""


def start(*programs: str, seconds: float = 60) -> Workers:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    commands = [[sys.executable, "-c", program] for program in programs]
    return Workers(commands, [environment] * len(programs), seconds=seconds)


def test_workers_answer_with_one_entry_per_step():
    workers = start(SERVING, SERVING)
    try:
        for steps in (2, 3):
            answers = workers.ask(steps)
            assert [answer["loss"] for answer in answers] == [[1.5] * steps] * 2
            assert [len(answer["wall"]) for answer in answers] == [steps] * 2
            assert [answer["peak_mb"] for answer in answers] == [7, 7]
    finally:
        workers.end()


@pytest.mark.thorough
def test_a_worker_that_ends_is_noticed_while_another_hangs():
    workers = start("input(); import time; time.sleep(600)", "raise SystemExit(3)")
    try:
        with pytest.raises(WorkerFailed, match="worker 1 ended with status 3"):
            workers.ask(1)
    finally:
        workers.end(seconds=0)


@pytest.mark.thorough
def test_a_worker_that_hangs_is_noticed():
    workers = start("import time; time.sleep(600)", seconds=0.5)
    try:
        with pytest.raises(WorkerFailed, match=r"no answer within 0\.5 s"):
            workers.ask(1)
    finally:
        workers.end(seconds=0)


# --- what is there --------------------------------------------------------------------------------


def test_a_python_that_is_not_there_is_a_reason(tmp_path):
    found = probe("torch", str(tmp_path / "python"))
    assert found.versions == {}
    assert "no such Python" in found.reason


def test_a_framework_that_is_not_installed_is_a_reason(tmp_path):
    stub = tmp_path / "python"
    stub.write_text(
        "#!/bin/sh\necho \"ModuleNotFoundError: No module named 'deepspeed'\" >&2\nexit 1"
    )
    stub.chmod(0o755)
    found = probe("deepspeed", str(stub))
    assert found.reason == "deepspeed is not installed in the Python of --deepspeed"


# --- the table ------------------------------------------------------------------------------------


def taken(cpu: float, *, sent: float = 0, losses: float = 6.0) -> Taken:
    return Taken(
        wall=[2 * cpu, 1.1 * cpu],
        cpu=[cpu, cpu],
        losses=[losses] * 12,
        sent=[int(sent), int(sent)],
        peak_mb=500,
    )


def measured(*, difference: float = 0.0, with_torch: bool = True) -> Measured:
    unit = wire_unit(num_parameters(smoke=False))
    windows = {
        "1": {
            BARE_JAX: taken(0.8),
            "zerojax ZeRO 1": taken(0.42, sent=2 * unit, losses=6.0 + difference),
        }
    }
    found = {"jax": Found({"jax": "0"})}
    if with_torch:
        windows["1"] |= {BARE_TORCH: taken(0.6), "DeepSpeed ZeRO 1": taken(0.36, sent=3 * unit)}
        found["deepspeed"] = Found({"deepspeed": "0"})
    else:
        found["deepspeed"] = Found({}, "deepspeed is not installed in the Python of --deepspeed")
    return Measured(found=found, windows=windows)


def test_each_framework_is_held_to_its_own_bare_step():
    record = make_record(measured(), smoke=False)
    rows = {row["way"]: row for row in record.rows}
    ours, theirs = rows["zerojax ZeRO 1"], rows["DeepSpeed ZeRO 1"]
    assert ours["cpu/bare"] == pytest.approx(2 * 0.42 / 0.8)
    assert theirs["cpu/bare"] == pytest.approx(2 * 0.36 / 0.6)
    assert ours["wall_ms"] == pytest.approx(1e3 * 1.1 * 0.42)
    assert ours["steps/s"] == pytest.approx(1 / (1.55 * 0.42))
    assert ours["sent/unit"] == pytest.approx(2, rel=1e-6)
    goals = {goal.name: goal for goal in record.goals}
    assert goals["ZeRO 1, bytes sent by zerojax / by DeepSpeed"].value == pytest.approx(2 / 3)
    key = "ZeRO 1, T2/(T1/2) of zerojax / that of DeepSpeed, cpu"
    assert goals[key].value == pytest.approx(1.05 / 1.2)
    assert record.goals[0].is_met


def test_another_loss_misses_the_first_goal():
    record = make_record(measured(difference=1e-3), smoke=False)
    assert record.goals[0].value == pytest.approx(1e-3)
    assert not record.goals[0].is_met


def test_what_is_missing_is_a_line_of_the_table():
    record = make_record(measured(with_torch=False), smoke=False)
    rows = {row["way"]: row for row in record.rows}
    assert "not installed" in rows["DeepSpeed ZeRO 1"]["note"]
    assert "steps/s" not in rows["DeepSpeed ZeRO 1"]
    assert not any("DeepSpeed" in goal.name for goal in record.goals)


def test_a_way_that_fails_is_a_line_of_the_table_and_counted():
    one = measured()
    one.windows["1"]["DeepSpeed ZeRO 1"] = Taken(failure="worker 0 ended with status 1\n  log")
    assert one.failed
    rows = {row["way"]: row for row in make_record(one, smoke=False).rows}
    assert rows["DeepSpeed ZeRO 1"]["note"] == "worker 0 ended with status 1"


def test_findings_say_where_zerojax_loses():
    rows = {
        "zerojax": {"wall_ms": 800.0, "cpu_ms": 780.0, "peak_MB": 900},
        BARE_TORCH: {"wall_ms": 600.0, "cpu_ms": 600.0, "peak_MB": 600},
    }
    (said,) = findings(rows)
    assert said.startswith("zerojax takes 1.33 times the wall time, 1.30 times the processor time")
    assert "1.50 times the memory of torch eager" in said


@pytest.mark.slow
@pytest.mark.multihost
def test_the_comparison_runs_with_what_is_installed(tmp_path):
    """zerojax and plain optax always; torch and DeepSpeed where this Python has them."""
    command = [sys.executable, "-m", "benchmarks.compare", "--smoke", "--out", str(tmp_path)]
    result = subprocess.run(
        [*command, "--windows", "one", "0", "3", "--patience", "600"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    record = json.loads((tmp_path / "compare.json").read_text())
    rows = {row["way"]: row for row in record["rows"]}
    assert set(rows) == {way.name for name in ("one", "0", "3") for way in WINDOWS[name]}
    for name in ("zerojax", "zerojax ZeRO 0", "zerojax ZeRO 3", "optax + nnx, data parallel"):
        assert rows[name]["max_loss_diff"] < 1e-5, name
        assert rows[name]["peak_MB"] > 0
    assert rows["zerojax ZeRO 0"]["sent_MB"] > 0
    missing = [row for row in rows.values() if "note" in row]
    assert all("is not installed" in row["note"] for row in missing)
