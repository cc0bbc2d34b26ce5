"""Folders that cannot be written are bad input (exit code 2); a full disk is not (exit code 1)."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.support.cli_complaints import fails
from zerojax.checkpoint import Checkpointer
from zerojax.checkpoint.files import new_folder
from zerojax.checkpoint.folders import writable_error
from zerojax.cli import main
from zerojax.cli.complaints import explain
from zerojax.data.preparation import prepare
from zerojax.step.host_budget import NoSpaceError
from zerojax.training.metrics import runlog
from zerojax.training.run_file import make_folder

RUN_FILE = """\
model: {name: gpt2, max_seq_len: 16, num_layers: 1, num_heads: 1, embed_dim: 8}
data: {seq_len: 16}
optimizer: {learning_rate: 0.003}
global_batch_size: 8
steps: 1
eval_every: null
cpu_devices: 8
sweep: {axes: {optimizer.learning_rate: [1e-3]}}
"""
COMMANDS = {
    "run_dir": "train {yaml} run_dir={bad}",
    "checkpoint": "train {yaml} run_dir={ok} checkpoint.path={bad}",
    "offload": "train {yaml} run_dir={ok} mesh.offload.opt_state=nvme mesh.offload.min_elements=1 "
    "mesh.offload.folder={bad}",
    "sweep": "sweep {yaml} --out {bad}",
    "profile": "profile {yaml} run_dir={bad}",
    "data": "data prepare {text} {bad}",
    "export": "checkpoint export {saved} {bad}",
    "csv": "schedule 1f1b --stages 2 --microbatches 4 --csv {bad}",
}
PATHS = {"read-only": "{ro}/x", "below a file": "{text}/x", "nowhere": "/proc/zerojax", "full": ""}
SLOW = ("run_dir", "checkpoint", "offload", "sweep", "profile")


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOTDIR, errno.ENOSPC])
@pytest.mark.parametrize(
    "write",
    [
        make_folder,
        runlog._make_folder,
        lambda path: _raise(writable_error(path, 0)),
        lambda path: prepare(__file__, path),
        lambda path: new_folder(path, 1, remedy=None).__enter__(),
    ],
)
def test_one_rule_for_every_folder(tmp_path, monkeypatch, write, number):
    def refuse(self, *args, **options):
        raise OSError(number, os.strerror(number), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises((OSError, RuntimeError)) as failure:
        write(tmp_path / "new")
    sentence, is_bad_input = explain(failure.value)
    assert sentence is not None
    assert is_bad_input == (number != errno.ENOSPC)


def _raise(error: Exception | None) -> None:
    assert error is not None
    raise error


def test_a_state_that_does_not_fit_on_the_disk_is_no_bad_input(tmp_path):
    assert not explain(NoSpaceError("too little"))[1]
    error = writable_error(tmp_path, 2**60)
    assert error is not None
    assert not explain(error)[1]


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("places")
    (folder / "run.yaml").write_text(RUN_FILE)
    (folder / "text").write_text("hello world " * 200)
    with Checkpointer(folder / "saved") as checkpointer:
        state = {"params": {"x": jax.device_put(np.zeros(2048, np.float32))}}
        checkpointer.save(1, state, data_state={}, config={}, plan={})
    disks = {"ro": "ro,size=1m", "full": "size=16k"}
    try:
        for name, options in disks.items():
            (folder / name).mkdir()
            mount = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder / name)]
            if subprocess.run(mount, capture_output=True).returncode:
                pytest.skip("mounting a small file system needs root")
        names = {"yaml": "run.yaml", "text": "text", "saved": "saved", "ok": "ok", "ro": "ro"}
        yield {key: str(folder / name) for key, name in names.items()} | {"root": str(folder)}
    finally:
        for name in disks:
            subprocess.run(["umount", str(folder / name)], capture_output=True)


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize(
    "command",
    [pytest.param(x, marks=pytest.mark.thorough) if x in SLOW else x for x in COMMANDS],
)
def test_a_command_says_in_one_line_that_it_cannot_write(places, tmp_path, capsys, command, kind):
    bad = PATHS[kind].format(**places)
    if kind == "full":
        full = Path(places["root"], "full")
        with (full / "filler").open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"0" * 4096)
        bad = str(full / command)
    words = COMMANDS[command].format(**places, bad=bad).split()
    code = 1 if kind == "full" else 2
    if command in SLOW:  # these print their progress first
        assert main(words) == code
        assert capsys.readouterr().err.splitlines()[-1].startswith("zerojax: error: ")
    else:
        fails(capsys, *words, code=code)
