"""Trainings in several processes over the loopback interface, started by `zerojax launch`."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.processes.test_processes import CONFIG, LIMIT, losses_of, train
from tests.support.process_groups import free_port
from tests.support.trajectories import TOLERANCE
from zerojax.data.chats import prepare_chats

pytestmark = pytest.mark.multihost

ROOT = Path(__file__).resolve().parents[2]


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **variables}


def run(words: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess:
    process = subprocess.Popen(
        [sys.executable, "-m", "zerojax", *words],
        cwd=folder,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, error = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    return subprocess.CompletedProcess(words, process.returncode, output, error)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Losses of 8 steps in one process."""
    return train(tmp_path_factory.mktemp("one"), "one", "steps=8")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_stage_in_several_processes(zero, processes, tmp_path, undisturbed):
    losses = train(tmp_path, "run", f"zero={zero}", "steps=8", processes=processes)
    np.testing.assert_allclose(losses, undisturbed, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_tensor_parallelism_across_processes(processes, tmp_path, undisturbed):
    """With 4 processes of one device each, both halves of a layer are in different ones."""
    losses = train(tmp_path, "run", "mesh.model=2", "zero=3", "steps=8", processes=processes)
    np.testing.assert_allclose(losses, undisturbed, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_four_processes_hand_over_to_two_and_these_to_one(tmp_path, undisturbed):
    for processes, steps in ((4, 3), (2, 6), (1, 8)):
        losses = train(tmp_path, "run", f"steps={steps}", processes=processes)
        assert len(losses) == steps
    np.testing.assert_allclose(losses, undisturbed, rtol=0, atol=TOLERANCE)


def write_chats(folder: Path, name: str, sign: str) -> None:
    """Chats of different lengths, of which several fit into a row."""
    template = folder / "template.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}."
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    rows = [
        [("user", f"{7**a} {sign} {b}?"), ("assistant", f"{7**a + b if sign == '+' else 7**a * b}")]
        for a in range(9)
        for b in range(40)
    ]
    chats = [{"messages": [{"role": x, "content": y} for x, y in row]} for row in rows]
    data = folder / f"{name}.jsonl"
    data.write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))
    prepare_chats(data, folder / name, tokenizer="bytes", template=template)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "data",
    ["data.path=sums", "data.mixture=[{path: sums, weight: 3}, {path: products, weight: 1}]"],
    ids=["packed", "mixture"],
)
def test_two_processes_train_and_resume_on_packed_chats(data, tmp_path):
    """Each reads its own rows; all losses are those of one process, as in the tests above."""
    pytest.importorskip("jinja2", reason="needs the package jinja2: pip install jinja2")
    for name, sign in (("sums", "+"), ("products", "x")):
        write_chats(tmp_path, name, sign)
    one = train(tmp_path, "one", data, "steps=8")
    two = train(tmp_path, "two", data, "steps=3", processes=2)
    resumed = train(tmp_path, "two", data, "steps=8", processes=2)
    assert resumed[:3] == two
    np.testing.assert_allclose(resumed, one, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_two_launchers_run_one_training(tmp_path, undisturbed):
    """As on two hosts: one process of two devices under each launcher.

    A coordinator on loopback is refused to several hosts, unless process 0 is told to listen there.
    """
    (tmp_path / "tiny.yaml").write_text(CONFIG, encoding="utf-8")
    options = f"--nprocs 1 --cpu-devices 2 --nnodes 2 --coordinator localhost:{free_port()}"
    listen = "JAX_COORDINATOR_BIND_ADDRESS=127.0.0.1:${ZEROJAX_COORDINATOR##*:}"
    train = f"{sys.executable} -m zerojax train tiny.yaml run_dir=run steps=8"
    words = [*options.split(), "--", "sh", "-c", f"{listen} exec {train}"]
    launchers = [
        subprocess.Popen(
            [sys.executable, "-m", "zerojax", "launch", "--node-rank", str(host), *words],
            cwd=tmp_path,
            env=environment() | {"ZEROJAX_LAUNCH_TOKEN": "the same on both hosts"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in range(2)
    ]
    try:
        outputs = [launcher.communicate(timeout=LIMIT) for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
    assert [launcher.returncode for launcher in launchers] == [0, 0], outputs
    assert outputs[1][0] == "", "only process 0 reports"
    np.testing.assert_allclose(losses_of(tmp_path / "run"), undisturbed, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torchrun is part of torch")
def test_torchrun_starts_a_training(tmp_path):
    """Also: its agent listens on MASTER_PORT, where the coordinator cannot."""
    (tmp_path / "tiny.yaml").write_text(CONFIG, encoding="utf-8")
    options = f"--nproc-per-node 2 --master-port {free_port()} --no-python".split()
    words = ["zerojax", "train", "tiny.yaml", "run_dir=run", "steps=3", "cpu_devices=2"]
    process = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, sys.executable, "-m", *words],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "2 processes (torchrun's variables) at 127.0.0.1:" in process.stderr
    one = train(tmp_path, "one", "steps=3")
    np.testing.assert_allclose(losses_of(tmp_path / "run"), one, rtol=0, atol=TOLERANCE)


SCRIPT = """
import os, signal, sys, time
import zerojax
from zerojax.zoo import GPT2, GPT2Config

me, restart = int(os.environ["ZEROJAX_PROCESS_ID"]), int(os.environ["ZEROJAX_RESTART"])

def fault(trainer, metrics):
    if trainer.num_steps >= 6 and me == WHO and restart == 0:
        print("fails at", time.time(), flush=True)
        FAULT

config = GPT2Config(num_layers=1, num_heads=2, embed_dim=32, max_seq_len=32, vocab_size=256)
zerojax.train(
    lambda rngs: GPT2(config, rngs=rngs), zerojax.MeshConfig(zero=2, persistence_threshold=100),
    global_batch_size=16, seq_len=32, steps=8, callbacks=[fault], run_dir="run",
    checkpoint=zerojax.CheckpointConfig(path="run/checkpoints", every=4, asynchronous=False),
    log=zerojax.LogConfig(every=1, console="lines", tensorboard=False),
)
print("process", me, "has finished", flush=True)
"""


def train_with_fault(
    folder: Path, fault: str, who: int, *options: str
) -> tuple[subprocess.CompletedProcess, float]:
    """Runs the script above; also how long after the fault everything had ended."""
    script = SCRIPT.replace("WHO", str(who)).replace("FAULT", fault)
    (folder / "script.py").write_text(script, encoding="utf-8")
    launch = ["launch", "--nprocs", "2", "--cpu-devices", "1", *options, "--"]
    result = run([*launch, "python", "script.py"], folder)
    ended = time.time()
    found = re.search(r"fails at ([\d.]+)", result.stdout)
    return result, ended - float(found[1]) if found else 0.0


@pytest.fixture(scope="module")
def without_fault(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calm")
    result, _ = train_with_fault(folder, "pass", 0)
    assert result.returncode == 0, result.stdout + result.stderr
    assert sorted(re.findall(r"process \d has finished", result.stdout)) == [
        f"process {index} has finished" for index in range(2)
    ]
    return losses_of(folder / "run")


FAULTS = {
    "exception": ("raise RuntimeError('bad luck')", 1, "exit code 1"),
    "sys_exit": ("sys.exit(3)", 3, "exit code 3"),
    "kill_9": ("os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL"),
}


@pytest.mark.parametrize(
    ("fault", "who"),
    [
        pytest.param("sys_exit", 1, marks=pytest.mark.slow),
        pytest.param("sys_exit", 0, marks=pytest.mark.slow),
        pytest.param("exception", 0, marks=pytest.mark.slow),
        pytest.param("exception", 1, marks=pytest.mark.slow),
        pytest.param("kill_9", 0, marks=pytest.mark.slow),
        pytest.param("kill_9", 1, marks=pytest.mark.slow),
    ],
)
def test_a_process_that_fails_is_named_and_the_job_ends(fault, who, tmp_path):
    """Left to JAX: 100 to 300 seconds, and exit code -6."""
    code, words = FAULTS[fault][1:]
    result, seconds = train_with_fault(tmp_path, FAULTS[fault][0], who)
    assert result.returncode == code, result.stdout + result.stderr
    assert f"zerojax launch: rank {who} failed first, with {words}" in result.stderr
    assert 0 < seconds < 20, "5 seconds on a machine that has nothing else to do"
    if fault == "exception":
        assert f"[{who}] RuntimeError: bad luck" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "who"), [("kill_9", 0), *((fault, 1) for fault in FAULTS)])
def test_the_restarted_run_ends_as_if_nothing_had_happened(fault, who, tmp_path, without_fault):
    result, _ = train_with_fault(tmp_path, FAULTS[fault][0], who, "--max-restarts", "1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"rank {who} failed first" in result.stderr
    assert "Restart 1 of 1" in result.stderr
    assert losses_of(tmp_path / "run") == without_fault
