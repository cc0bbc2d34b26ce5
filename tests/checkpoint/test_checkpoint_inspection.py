"""What cannot be read now is not taken for damage, and a run that saves may be looked at."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from zerojax.checkpoint import Checkpointer, CheckpointError, files, folders, metadata
from zerojax.checkpoint.deletion import STALE_SECONDS, removals
from zerojax.checkpoint.errors import DamagedError, MachineError
from zerojax.checkpoint.inspection import find_checkpoints, leftovers, saved_steps
from zerojax.cli import main

ABOUT = {"data_state": {}, "config": {}, "plan": {}}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    with Checkpointer(folder, keep=9) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"w": jnp.full((4,), float(step))}, **ABOUT)
    return folder


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "checkpoints"))


def make_newer(step: Path) -> None:
    """As a later version would write it."""
    body = json.loads((step / metadata.FILE_NAME).read_text())
    body = {n: x for n, x in body.items() if n not in ("format", "sections", "checksum")}
    body = {"format": metadata.FORMAT + 1, **body}
    (step / metadata.FILE_NAME).write_text(metadata.seal(body))


@contextlib.contextmanager
def refused(path: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reads of a file are answered with an error, as those of a file server may be."""
    read = metadata.read_bytes

    def read_bytes(where: Path, **options: Any) -> bytes:
        if where == path:
            raise OSError(code, os.strerror(code), str(path))
        return read(where, **options)

    with monkeypatch.context() as patch:
        patch.setattr(metadata, "read_bytes", read_bytes)
        yield


def test_a_newer_format_is_not_damage_and_stays(run, capsys):
    make_newer(run / "3")
    (newer,) = [one for one in saved_steps(run) if one.step == 3]
    assert newer.problem is not None
    assert not newer.is_damaged
    assert removals(run, damaged=True) == []
    assert main(["checkpoint", "list", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "cannot be read: " in lines[3]
    assert f"has checkpoint format {metadata.FORMAT + 1}" in lines[3]
    assert "damaged" not in "".join(lines)
    assert lines[-1].endswith("1 cannot be read")
    assert main(["checkpoint", "list", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["steps"][2]
    assert "update zerojax" in found["problem"]
    assert found["damaged"] is False
    assert main(["checkpoint", "prune", str(run), "--keep", "1", "--damaged"]) == 0
    assert sorted(os.listdir(run)) == ["2", "3"]
    assert main(["checkpoint", "export", str(run), "3", str(run.parent / "out")]) == 2
    error = capsys.readouterr().err
    assert "update zerojax" in error
    assert "damaged" not in error


@pytest.mark.parametrize("code", [errno.EACCES, errno.ESTALE, errno.EIO])
def test_what_the_system_refuses_to_read_stays(run, capsys, monkeypatch, code):
    """EIO is damage to a run, which goes on from an earlier step; it is no reason to delete."""
    with refused(run / "3" / metadata.FILE_NAME, code, monkeypatch):
        (refusing,) = [one for one in saved_steps(run) if one.error is not None]
        assert refusing.step == 3
        assert os.strerror(code).lower() in refusing.problem
        assert not refusing.is_damaged
        assert main(["checkpoint", "list", str(run)]) == 0
        assert "cannot be read: " in capsys.readouterr().out.splitlines()[3]
        assert main(["checkpoint", "prune", str(run), "--damaged"]) == 0
    assert all(one.error is None for one in saved_steps(run))
    assert sorted(os.listdir(run)) == ["1", "2", "3"]


def test_damage_is_damage(run):
    os.truncate(run / "1" / metadata.FILE_NAME, 10)
    os.truncate(next((run / "2" / "arrays").rglob("manifest.ocdbt")), 1)
    first, second, _ = saved_steps(run)
    for one in (first, second):
        assert isinstance(one.error, DamagedError)
        assert one.is_damaged
        assert str(run) not in one.problem
    assert [one.step for one in removals(run, damaged=True)] == [1, 2]


@pytest.mark.parametrize("newest", ["damaged", "newer"])
def test_damaged_steps_stay_when_none_would_be_left(run, capsys, newest):
    for step in ("1", "2"):
        os.truncate(run / step / metadata.FILE_NAME, 10)
    if newest == "newer":
        make_newer(run / "3")
    else:
        os.truncate(run / "3" / metadata.FILE_NAME, 10)
    assert main(["checkpoint", "prune", str(run), "--damaged"]) == 2
    assert "no step in " in capsys.readouterr().err
    assert sorted(os.listdir(run)) == ["1", "2", "3"]
    for step in ("1", "2", "3"):
        shutil.rmtree(run / step)
    (run / "9.partial-1").mkdir()
    later = os.stat(run / "9.partial-1").st_mtime + STALE_SECONDS + 1
    assert len(removals(run, damaged=True, now=later)) == 1, "nobody misses half a save"
    (run / "8.damaged").mkdir()
    with pytest.raises(CheckpointError, match=r"nothing is deleted: 8\.damaged"):
        removals(run, damaged=True, now=later)


def test_a_step_that_a_run_deletes_meanwhile_is_not_damaged(run, monkeypatch):
    read = metadata.read_metadata

    def delete_then_read(folder: Path) -> metadata.Metadata:
        if folder.name == "1":
            shutil.rmtree(folder)
        return read(folder)

    monkeypatch.setattr("zerojax.checkpoint.inspection.read_metadata", delete_then_read)
    assert [(one.step, one.problem) for one in saved_steps(run)] == [(2, None), (3, None)]


@pytest.mark.thorough
def test_a_folder_that_is_being_written_can_be_looked_at(run):
    """Names come and go while they are listed: Orbax renames what it has written."""
    partial = run / "4.partial-1"
    (partial / "arrays").mkdir(parents=True)
    stop, rounds = threading.Event(), 0

    def save() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            draft = partial / "arrays" / f"{number % 50}.tmp"
            draft.mkdir()
            (draft / "d").write_bytes(b"1234")
            target = partial / "arrays" / str(number % 50)
            shutil.rmtree(target, ignore_errors=True)
            os.rename(draft, target)
            (run / f"{number}.expired").mkdir()
            (run / f"{number}.expired").rmdir()

    thread = threading.Thread(target=save)
    thread.start()
    try:
        while rounds < 150:
            rounds += 1
            found = leftovers(run)
            assert "4.partial-1" in [one.folder.name for one in found]
            assert find_checkpoints(run)[0] == run
    finally:
        stop.set()
        thread.join()


def test_errors_of_a_machine_are_no_bad_input(run, capsys, monkeypatch):
    path = run / "3" / metadata.FILE_NAME
    with refused(path, errno.ESTALE, monkeypatch), Checkpointer(run) as checkpointer:
        with pytest.raises(MachineError, match="stale file handle") as failure:
            checkpointer.metadata(3)
        assert not failure.value.is_bad_input
        with pytest.raises(MachineError, match="stale file handle"):
            checkpointer.usable_step()
        with pytest.raises(MachineError, match="stale file handle"):
            checkpointer.verify(3)
        assert main(["checkpoint", "verify", str(run), "3"]) == 1
        assert "stale file handle" in capsys.readouterr().err
    assert main(["checkpoint", "verify", str(run), "4"]) == 2


def test_a_save_whose_file_server_goes_is_no_bad_input(run, monkeypatch):
    """Nothing of the folder can be read any more, not even what else is saved there."""

    def stale(*_: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(run))

    def settle(*_: object) -> None:
        monkeypatch.setattr(folders, "list_steps", stale)
        stale()

    monkeypatch.setattr(files, "settle", settle)
    checkpointer = Checkpointer(run)
    checkpointer.save(4, {"w": jnp.zeros(4)}, **ABOUT)
    with pytest.raises(MachineError, match="step 4 was not saved .*: stale file handle") as failure:
        checkpointer.close()
    assert "earlier checkpoints cannot be listed now (stale file handle" in str(failure.value)
    with pytest.raises(MachineError, match="checkpoint folder cannot be listed: stale"):
        checkpointer.steps()
