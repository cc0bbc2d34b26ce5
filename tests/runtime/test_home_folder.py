"""`~` is the home folder wherever a user gives a path."""

import re
from pathlib import Path

import numpy as np
import optax
import pytest

import zerojax
from zerojax.checkpoint import Checkpointer
from zerojax.config import ConfigError, LogConfig, RunConfig
from zerojax.config.loader import from_dict, user_path
from zerojax.data import as_source, load_tokenizer
from zerojax.data.tokenizer import as_tokenizer, save_tokenizer
from zerojax.models.losses import mean_squared_error
from zerojax.schedules.known_schedules import build_gpipe, read_csv, write_csv
from zerojax.training.metrics import read_metrics, write_report

SOURCES = Path(zerojax.__file__).parent


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The home folder; at the end nothing lies in a folder named `~`."""
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    yield home
    assert not list(here.iterdir())


def test_every_path_of_a_run_file(home):
    values = {
        "run_dir": "~/run",
        "checkpoint": {"path": "~/saved"},
        "data": {"mixture": [{"path": "~/a"}], "tokenizer": "~/tokenizer.json"},
        "model": {"pretrained": "~/llama"},
        "mesh": {"offload": {"folder": "~/disk"}},
    }
    config = from_dict(RunConfig, values)
    assert (config.run_dir, config.checkpoint.path) == (f"{home}/run", f"{home}/saved")
    assert config.data.mixture[0].path == f"{home}/a"
    assert config.data.tokenizer == f"{home}/tokenizer.json"
    assert config.model.pretrained == f"{home}/llama"
    assert config.mesh.offload.folder == f"{home}/disk"
    other = {"data": {"path": "~/b"}, "model": {"config": "~/config.json"}}
    config = from_dict(RunConfig, other)
    assert (config.data.path, config.model.config) == (f"{home}/b", f"{home}/config.json")


def test_an_unknown_user_is_refused_with_what_to_write():
    with pytest.raises(ConfigError, match=r"no home folder for ~nobody-here; write \./~nobody"):
        user_path("~nobody-here/run")


def line(params, x):
    return x @ params["w"]


MODEL = (lambda key: {"w": np.ones((4, 1), np.float32)}, line)
ROWS = {"x": np.ones((8, 4), np.float32), "y": np.ones((8, 1), np.float32)}


def squared(model, batch):
    return mean_squared_error(model(batch["x"]), batch["y"])


def test_train_and_what_reads_its_folder(home):
    options = {"loss": squared, "optimizer": optax.sgd(0.1), "log": LogConfig(every=1)}
    zerojax.train(MODEL, {"zero": 1}, [ROWS], checkpoint="~/saved", run_dir="~/run", **options)
    assert (home / "saved/checkpoints/1").is_dir()
    assert read_metrics("~/run").train
    assert write_report("~/run").is_relative_to(home)
    assert zerojax.load_run("~/run", model=MODEL, loss=squared).step == 1
    with Checkpointer("~/saved/checkpoints") as checkpointer:
        assert checkpointer.steps() == (1,)


def test_the_engine_of_deepspeed(home):
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 1.0,
        "csv_monitor": {"enabled": True, "output_path": "~/monitor", "job_name": "mine"},
    }
    engine = zerojax.initialize(model=MODEL, config=config, loss=squared)
    engine.train_batch(ROWS)
    engine.save_checkpoint("~/tags", "one")
    assert engine.load_checkpoint("~/tags")[0] is not None
    engine.close()
    assert (home / "tags/one").is_dir()
    assert (home / "monitor/mine").is_dir()


def test_files_that_are_written_and_read_by_name(home):
    (home / "text.txt").write_text("To be, or not to be. " * 100)
    source, *_ = as_source("~/text.txt", seq_len=8, global_batch_size=4)
    assert source.global_batch_size == 4
    save_tokenizer(as_tokenizer("bytes"), "~/tokenizer.json")
    assert load_tokenizer("~/tokenizer.json").vocab_size == 256
    write_csv(build_gpipe(2, 2), "~/table.csv")
    assert read_csv("~/table.csv").num_stages == 2


def test_one_function_knows_home_folders():
    found = {
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*.py")
        if re.search(r"\bexpanduser\(", path.read_text(encoding="utf-8"))
    }
    assert found == {"config/loader.py", "runtime/redaction.py"}
