"""Files that go, or are cut, while a run uses them; and the last step of a run that ends."""

import errno
import json
import shutil

import numpy as np
import pytest

import zerojax
from tests.support.small_models import Line, regression_loss
from tests.support.text_sets import some_texts, text_set
from zerojax.checkpoint.store import StoreFailedError
from zerojax.cli.complaints import explain
from zerojax.config import CheckpointConfig, LogConfig
from zerojax.data import as_source
from zerojax.data.packed_source import PackedSource
from zerojax.offload import disk
from zerojax.training.metrics import read_metrics

ROWS = {"x": np.ones((8, 4), np.float32), "y": np.ones((8, 1), np.float32)}


def train(folder, steps, *, mesh=None, every=500, save_on_exit=True, **options):
    path = str(folder / "checkpoints")
    checkpoint = CheckpointConfig(path=path, every=every, save_on_exit=save_on_exit)
    options = {"log": LogConfig(every=1, tensorboard=False), "run_dir": folder, **options}
    return zerojax.train(
        Line,
        mesh or {"zero": 1},
        [ROWS],
        loss=regression_loss,
        optimizer=zerojax.adamw(0.1),
        steps=steps,
        checkpoint=checkpoint,
        **options,
    )


# --- the last step --------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(("every", "saved"), [(2, 4), (3, 3)])
def test_without_save_on_exit_the_last_step_is_saved_when_it_is_due(every, saved, tmp_path):
    train(tmp_path, 4, every=every, save_on_exit=False).close()
    assert zerojax.load_run(tmp_path, model=Line, loss=regression_loss).step == saved


def test_without_save_on_exit_no_step_is_saved_before_one_was_taken(tmp_path):
    train(tmp_path, 0, every=1, save_on_exit=False).close()
    assert not list((tmp_path / "checkpoints").glob("[0-9]*"))


# --- the folder of a run --------------------------------------------------------------------------


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_run_folder_that_goes_is_said_and_written_anew(is_replaced, tmp_path, capsys):
    folder = tmp_path / "run"

    def remove(trainer, metrics):
        if metrics["step"] == 3:
            folder.rename(tmp_path / "moved") if is_replaced else shutil.rmtree(folder)
            if is_replaced:
                folder.mkdir()

    train(folder, 6, callbacks=[remove]).close()
    printed = capsys.readouterr().out
    what = "was replaced by another one" if is_replaced else "was removed"
    assert printed.count(f"the run folder {folder} {what} by another program") == 1
    assert [row["step"] for row in read_metrics(folder).train] == [1, 2, 3, 4, 5, 6]
    assert json.loads((folder / "config.json").read_text())["steps"] == 6
    assert zerojax.load_run(folder, model=Line, loss=regression_loss).step == 6


# --- files of an optimizer's state ----------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOENT, errno.EIO])
def test_a_store_that_fails_in_a_run_is_no_bad_input(number, tmp_path, monkeypatch):
    """Bad input (exit code 2) is not started again; a full or vanished disk is."""
    mesh = {"zero": 1, "offload": {"opt_state": "nvme", "min_elements": 1}}
    steps = []

    def fail(self, *_):
        if len(steps) < 2:
            return commit(self, *_)
        raise OSError(number, "the disk is not what it was")

    commit = disk.BucketStore._commit
    monkeypatch.setattr(disk.BucketStore, "_commit", fail)
    with pytest.raises(StoreFailedError, match="start the run again") as raised:
        train(tmp_path, 6, mesh=mesh, every=1, callbacks=[lambda *_: steps.append(1)])
    assert explain(raised.value)[1] is False
    monkeypatch.undo()
    assert train(tmp_path, 6, mesh=mesh).num_steps == 6


# --- token files ----------------------------------------------------------------------------------


def token_file(folder, kind):
    ids = np.arange(40_000, dtype=np.uint16) % 250
    if kind == "npy":
        np.save(folder / "corpus.npy", ids)
        return folder / "corpus.npy"
    (folder / "corpus.json").write_text('{"dtype": "uint16"}')
    ids.tofile(folder / "corpus.bin")
    return folder / "corpus.bin"


@pytest.mark.parametrize("kind", ["bin", "npy"])
def test_a_token_file_that_is_cut_is_an_error_and_not_the_end_of_the_process(kind, tmp_path):
    path = token_file(tmp_path, kind)
    source, validation, _ = as_source(path, seq_len=16, global_batch_size=8)
    before = source.batch(0)
    with path.open("r+b") as file:
        file.truncate(100)
    for part in (source, validation):
        with pytest.raises(ValueError, match=r"has 100 bytes now, but had 80,\d\d\d .*copy or"):
            part.batch(0)
    # A file of the same name that takes its place is another one: the old one is still read.
    path.unlink()
    path = token_file(tmp_path, kind)
    source, *_ = as_source(path, seq_len=16, global_batch_size=8)
    path.unlink()
    token_file(tmp_path, kind)
    np.testing.assert_array_equal(source.batch(0)["tokens"], before["tokens"])


@pytest.mark.parametrize("name", ["tokens.bin", "mask.bin", "offsets.bin"])
def test_so_is_a_file_of_chats(name, tmp_path):
    texts = text_set(tmp_path, some_texts(2000))
    source = PackedSource(texts=texts, seq_len=16, global_batch_size=4)
    source.batch(0)
    with (tmp_path / name).open("r+b") as file:
        file.truncate(10)
    with pytest.raises(ValueError, match=f"{name} has 10 bytes now, but had"):
        source.batch(1)
