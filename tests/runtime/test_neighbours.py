"""Files of a user in the folders that zerojax writes into: none is deleted or replaced."""

import io
import os
import shutil
from pathlib import Path

import pytest

from tests.support.refusals import refused
from zerojax.checkpoint import deletion
from zerojax.checkpoint.files import new_folder
from zerojax.checkpoint.folders import list_steps, make_partial, partial_folder
from zerojax.checkpoint.inspection import saved_steps
from zerojax.checkpoint.store.direct_io import StoreError
from zerojax.checkpoint.store.store import BucketStore
from zerojax.cli import profile_command
from zerojax.config import LogConfig, OffloadConfig
from zerojax.data.preparation import prepare
from zerojax.deepspeed_engine import engine_tags
from zerojax.offload.disk import SIDE_FILES
from zerojax.runtime.folder_lock import EXPIRES, hold
from zerojax.training.metrics.metric_files import FILE_NAME, set_aside
from zerojax.training.metrics.runlog import RunLog


def fill(folder: Path, *names: str) -> list[Path]:
    """Writes files of a user, old ones; returns their paths."""
    paths = [folder / name for name in names]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
        os.utime(path, (1, 1))
    return paths


def check_there(paths: list[Path]) -> None:
    assert [path.read_text() for path in paths] == ["mine"] * len(paths)


def test_folders_of_a_user_beside_checkpoints(tmp_path, monkeypatch):
    """Of such names as those of steps, and behind links; a file and a pipe too."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    mine = fill(run, "2024/x", "2023.partial-1/x", "2023.expired/x", "2022.damaged/x", "99")
    mine += fill(elsewhere, "x")
    (run / "5.expired").symlink_to(elsewhere)
    (run / "98").symlink_to(elsewhere)
    os.mkfifo(run / "97")
    for name in ("7.partial-1/arrays", "5.partial-1", "3/arrays"):
        (run / name).mkdir(parents=True)
    assert list_steps(run) == (3,)
    assert [one.step for one in saved_steps(run)] == [3]
    assert deletion.removals(run, keep=1, now=1e12) == []
    monkeypatch.setattr(deletion, "saved_steps", lambda path: [])
    found = deletion.removals(run, damaged=True, now=1e12)
    assert sorted(one.folder.name for one in found) == ["5.partial-1", "7.partial-1"]
    make_partial(partial_folder(run, 8, 1, 1))
    check_there(mine)
    assert not (run / "7.partial-1").exists()
    assert not (run / "5.partial-1").exists()


def test_drafts_of_folders(tmp_path):
    (mine,) = fill(tmp_path, "model.partial/x")
    value = [str(mine.parent), str(tmp_path / "model")]
    export = lambda: new_folder(tmp_path / "model", 1, remedy=None)  # noqa: E731
    refused(lambda: export().__enter__(), value, "rename", error=FileExistsError)
    check_there([mine])
    shutil.rmtree(mine.parent)
    stopped = export()
    (stopped.__enter__() / "half").touch()  # and the process is killed
    with export() as draft:
        (draft / "x").touch()
    assert os.listdir(tmp_path / "model") == ["x"]
    del stopped


def test_locks_of_a_user(tmp_path):
    mine = fill(tmp_path, "writer.lock.txt", "writer.lock.backup")
    (old,) = fill(tmp_path, "writer.lock.0123456789abcdef")
    assert EXPIRES < 1e9
    hold(tmp_path).release()
    check_there(mine)
    assert not old.exists()


@pytest.mark.parametrize("content", ["mine", '{"loss": 1}\n', "\0\n", '{"kind": "start"}\n'])
def test_metrics_of_another_program(content, tmp_path):
    (path,) = fill(tmp_path, FILE_NAME)
    path.write_text(content)
    (tmp_path / "metrics.1.jsonl").symlink_to("nowhere")
    aside = set_aside(path)
    assert aside == tmp_path / "metrics.2.jsonl"
    assert aside.read_text() == content


def test_a_folder_of_a_model_as_run_folder(tmp_path):
    def start(folder: Path) -> None:
        with RunLog(folder, LogConfig(), total_steps=1, stream=io.StringIO()) as log:
            log.start("a line", [], "a table", {}, {})

    (mine,) = fill(tmp_path / "model", "config.json")
    for _ in range(2):  # the first leaves nothing that makes the folder a run's
        refused(lambda: start(mine.parent), str(mine), "run_dir", error=FileExistsError)
    check_there([mine])
    for _ in range(2):
        start(tmp_path / "run")


def test_files_beside_offloaded_state(tmp_path):
    (mine,) = fill(tmp_path / "a", "manifest.json")
    make = lambda name: BucketStore.create(  # noqa: E731
        tmp_path / name, num_buckets=1, bucket_bytes=8, replace=True
    )
    with pytest.raises(StoreError, match=r"manifest.json.*choose another folder"):
        make("a")
    check_there([mine])
    for _ in range(2):
        make("b").close()
    (tmp_path / "b" / "manifest.json").write_bytes(b"damaged")
    make("b").close()
    names = ("arrays.npz", "frozen.npz", "state-7.npz", "state-x.npz", "my-state-7.npz")
    assert [name for name in names if SIDE_FILES.fullmatch(name)] == ["frozen.npz", "state-7.npz"]


def test_the_folder_of_offloaded_state_in_a_profile(tmp_path):
    """The profile's own state lies in a folder of its own, which it removes."""
    mine = fill(tmp_path / "scratch", "x", "profile/x")
    offload = OffloadConfig(opt_state="nvme", folder=str(tmp_path / "scratch"))
    run_dir = str(tmp_path / "run")
    folder = profile_command.free_folder(None, run_dir, offload)
    assert folder == tmp_path / "run" / "profile-2"
    assert not Path(profile_command.disk_folder(offload, folder)).exists()
    out = str(tmp_path / "profile")
    refused(lambda: profile_command.free_folder(out, run_dir, offload), out, "new")
    check_there(mine)


@pytest.mark.parametrize("name", ["tokenizer.json", "train.json", "validation.json"])
def test_files_in_a_folder_of_prepared_data(name, tmp_path):
    (text,) = fill(tmp_path, "text.txt")
    mine = fill(tmp_path / "out", name, "tokens.partial", "tokens.bin.partial")
    again = lambda: prepare(text, tmp_path / "out", tokenizer="bytes")  # noqa: E731
    refused(again, str(mine[0]), "another remove")
    check_there(mine)
    mine.pop(0).unlink()
    again()
    check_there(mine)


@pytest.mark.parametrize("name", ["thesis.txt", "2024/x", ".hidden", "3/../thesis"])
def test_a_folder_of_a_user_as_a_tag(name, tmp_path):
    (tmp_path / "tag" / "3" / "arrays").mkdir(parents=True)
    engine_tags._check_own([tmp_path / "tag"])
    (mine,) = fill(tmp_path / "tag", name)
    with pytest.raises(FileExistsError, match="choose another tag"):
        engine_tags._check_own([tmp_path / "nothing", tmp_path / "tag"])
    check_there([mine])
