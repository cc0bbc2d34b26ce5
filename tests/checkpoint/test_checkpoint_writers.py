"""One process writes into a folder of checkpoints; a failed save lets its process end."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import pytest

from tests.cli.test_cli_runs import TINY
from tests.runtime.test_folder_lock import FOREIGN, holder
from zerojax.checkpoint import Checkpointer, CheckpointError
from zerojax.checkpoint import saving as saving_module
from zerojax.checkpoint.deletion import alone_in
from zerojax.checkpoint.errors import FolderInUseError
from zerojax.cli import main
from zerojax.deepspeed_engine.engine_tags import hold_tags
from zerojax.runtime.folder_lock import NAME, hold

ABOUT = {"data_state": {}, "config": {}, "plan": {}}


def state() -> dict:
    return {"w": jnp.arange(6.0)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with step 1."""
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, state(), **ABOUT)
    return tmp_path / "run"


@pytest.fixture
def taken(saved: Path) -> Iterator[Path]:
    """The same, being written by another process."""
    with holder(saved):
        yield saved


def listing(folder: Path) -> list[tuple[str, int]]:
    files = (x for x in folder.rglob("*") if x.name != NAME and not x.is_dir())
    return sorted((str(x), x.stat().st_mtime_ns) for x in files)


def test_a_second_writer_is_refused_before_anything_is_written(taken: Path) -> None:
    before = listing(taken)
    with Checkpointer(taken) as checkpointer:
        with pytest.raises(FolderInUseError, match="is being written by process .* since") as told:
            checkpointer.check_writable(1)
        assert told.value.is_bad_input, "the same command will not do as long as the first one runs"
        with pytest.raises(FolderInUseError, match="use another folder"):
            checkpointer.save(2, state(), **ABOUT)
    assert listing(taken) == before


def test_readers_need_no_leave(taken: Path, capsys: pytest.CaptureFixture) -> None:
    with Checkpointer(taken) as checkpointer:
        assert checkpointer.usable_step() == 1
        assert checkpointer.verify().is_good
        assert checkpointer.metadata().step == 1
    for command in (["list"], ["verify", "--all"], ["prune", "--keep", "1", "--dry-run"]):
        assert main(["checkpoint", command[0], str(taken), *command[1:]]) == 0
    assert main(["checkpoint", "prune", str(taken), "--keep", "1"]) == 2
    assert "nothing is deleted: " in (error := capsys.readouterr().err)
    assert "is being written by process" in error
    assert NAME in os.listdir(taken), "the lock of the other one is there"


@pytest.mark.thorough
def test_what_a_killed_run_held_is_taken_over_with_a_note(saved: Path) -> None:
    with holder(saved) as first:
        first.kill()
        first.wait()
        with Checkpointer(saved) as checkpointer:
            checkpointer.check_writable()
            (note,) = checkpointer.take_notes()
            assert f"by process {first.pid}" in note
            checkpointer.save(2, state(), **ABOUT)
    assert sorted(os.listdir(saved)) == ["1", "2"]


def test_a_writer_that_lost_its_folder_makes_nothing_visible(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was stopped, or cut off, while another machine took its place."""
    real = saving_module.write_metadata

    def lose(folder: Path, metadata: object) -> None:
        real(folder, metadata)
        (saved / "other").write_text(FOREIGN)
        os.rename(saved / "other", saved / NAME)
        (saved / "9.partial-7").mkdir()  # of the other one

    monkeypatch.setattr(saving_module, "write_metadata", lose)
    with Checkpointer(saved) as checkpointer:
        checkpointer.save(2, state(), **ABOUT)
        with pytest.raises(FolderInUseError, match="locked by process 4242 on far"):
            checkpointer.wait()
        with pytest.raises(FolderInUseError, match="locked by process 4242 on far"):
            checkpointer.save(3, state(), **ABOUT)
    assert sorted(os.listdir(saved)) == ["1", "9.partial-7", NAME]
    assert (saved / NAME).read_text() == FOREIGN


def test_two_writers_of_one_process_give_their_drafts_two_names(tmp_path: Path) -> None:
    names = []
    for _ in range(2):
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.check_writable()
            assert checkpointer._hold is not None
            names.append(checkpointer._hold.number)
    assert names[0] != names[1]


def test_nothing_is_deleted_beside_a_run_that_writes(saved: Path) -> None:
    with (
        holder(saved) as first,
        pytest.raises(CheckpointError, match=f"process {first.pid} .*checkpoint.keep"),
        alone_in(saved),
    ):
        pytest.fail("the block was entered")
    with alone_in(saved):
        assert NAME in os.listdir(saved)
    assert NAME not in os.listdir(saved)


END = """
import os, sys, warnings
import jax.numpy as jnp
from zerojax.checkpoint import Checkpointer, CheckpointError
real = os.mkdir

def mkdir(path, *arguments, **options):
    if str(path).endswith("/arrays.orbax-checkpoint-tmp/state") and "/1.partial" in str(path):
        raise FileNotFoundError(2, "no such folder", path)  # as where another one removed it
    return real(path, *arguments, **options)

os.mkdir = mkdir
state = {f"w{i}": jnp.ones((200, 50)) for i in range(3)} | {"big": jnp.ones((600, 600))}
checkpointer = Checkpointer(sys.argv[1])
try:
    checkpointer.save(1, state, data_state={}, config={}, plan={})
    checkpointer.wait()
except CheckpointError as error:
    print("failed", flush=True)
checkpointer.save(2, state, data_state={}, config={}, plan={})
checkpointer.close()
print(checkpointer.steps(), flush=True)
sys.exit(7)
"""


@pytest.mark.thorough
def test_a_process_whose_save_has_failed_ends_with_its_own_exit_code(tmp_path: Path) -> None:
    """Threads of Orbax waited for the signal of a folder that was not made, for 30 years."""
    command = [sys.executable, "-c", END, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.split("\n") == ["failed", "(2,)", ""], done.stderr
    assert done.returncode == 7
    assert "Traceback" not in done.stderr


WRITE = """
import json, sys, time, warnings
import jax.numpy as jnp
from zerojax.checkpoint import Checkpointer, CheckpointError
who, refused, saved = int(sys.argv[2]), [], 0
print("ready", flush=True)
sys.stdin.readline()
checkpointer = Checkpointer(sys.argv[1], keep=2)
for step in range(1, 7):
    state = {f"w{i}": jnp.full((100, 50), 1000.0 * who + step + i) for i in range(8)}
    try:
        checkpointer.save(step, state, data_state={"who": who}, config={}, plan={})
        checkpointer.wait()
        saved += 1
    except CheckpointError as error:
        refused.append(str(error))
checkpointer.close()
print(json.dumps([saved, refused]))
"""


@pytest.mark.slow
def test_of_three_runs_in_one_folder_one_saves_and_all_end(tmp_path: Path) -> None:
    for round_number in range(3):
        folder = tmp_path / str(round_number)
        runs = [
            subprocess.Popen(
                [sys.executable, "-c", WRITE, str(folder), str(who)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for who in range(3)
        ]
        for one in runs:
            assert one.stdout is not None
            assert one.stdout.readline() == "ready\n"
        for one in runs:
            assert one.stdin is not None
            one.stdin.write("\n")
            one.stdin.flush()
        told = [json.loads(one.communicate(timeout=200)[0]) for one in runs]
        assert all(one.returncode == 0 for one in runs)
        with Checkpointer(folder) as checkpointer:
            writers = {checkpointer.metadata(x).data_state["who"] for x in checkpointer.steps()}
            assert len(writers) == 1
            assert all(checkpointer.verify(step).is_good for step in checkpointer.steps())
        assert max(saved for saved, _ in told) >= 1
        for _, refused in told:
            assert all("written by process" in x or "already has step" in x for x in refused)


@pytest.mark.thorough
def test_a_second_run_is_refused_before_it_writes_or_makes_arrays(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["train", *TINY, f"run_dir={tmp_path}"]
    assert main([*command, "steps=1"]) == 0
    before = listing(tmp_path)
    monkeypatch.setattr("zerojax.training.run_lifecycle.Trainer", None)
    capsys.readouterr()
    with release_own(tmp_path / "checkpoints"), holder(tmp_path / "checkpoints") as first:
        assert main([*command, "steps=2", "data.tokenizer=bpe:300"]) == 2
    error = capsys.readouterr().err
    assert f"is being written by process {first.pid} on " in error
    assert error.endswith("end it, or use another folder\n")
    assert listing(tmp_path) == before


@contextlib.contextmanager
def release_own(folder: Path) -> Iterator[None]:
    """As the end of this process would."""
    hold(folder).release()
    yield


def test_two_engines_cannot_save_into_one_folder(tmp_path: Path) -> None:
    with (
        holder(tmp_path) as first,
        pytest.raises(FolderInUseError, match=f"written by process {first.pid}"),
    ):
        hold_tags(tmp_path)
    held = hold_tags(tmp_path)
    assert held is hold_tags(tmp_path), "engines of one process share the folder"
    assert held is not None
    held.release()
