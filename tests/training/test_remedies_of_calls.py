"""Refusals of calls of `zerojax.train`, of runs that are read back, and of searches."""

from __future__ import annotations

import shutil
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from tests.support.hugging_face_folders import write_chat_model
from tests.support.refusals import Refusal, code_in, refused
from tests.support.small_models import Line
from zerojax.checkpoint.errors import CheckpointError
from zerojax.config import ConfigError, RunConfig, load
from zerojax.data.tokenizer import as_tokenizer
from zerojax.hardware import compile_client
from zerojax.training import search_runs
from zerojax.training.metrics.runlog import _check_own
from zerojax.training.run_file import _model_of
from zerojax.training.run_folder import CONFIG_FILE
from zerojax.training.train_arguments import _as_callbacks

BATCH = {"x": np.ones((8, 4), np.float32)}


def squared(model: Any, batch: Any) -> Any:
    return jnp.mean(model(batch["x"]) ** 2)


def train(**options: Any) -> None:
    quiet = zerojax.LogConfig(console="quiet")
    given = {"loss": squared, "steps": 1, "run_dir": None, "log": quiet, "batches": [BATCH]}
    zerojax.train(options.pop("model", Line), options.pop("mesh", None), **given | options).close()


take = lambda options: train(**options)  # noqa: E731


class Nothing:
    """Batches that can be read again and again, and are none."""

    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.thorough
def test_batches_of_a_run():
    both, rows = {"data": "book.txt"}, {"global_batch_size": 16}
    Refusal(both, "batches data", "one", [{}]).check(take)
    source = zerojax.data.DatasetSource(dataset=[{"x": np.ones(4, np.float32)}] * 16, **rows)
    good = [{}, {"batches": [{"x": np.ones((16, 4), np.float32)}], **rows}, {"batches": source}]
    remedy = "leave 16 zerojax.data.DatasetSource"
    Refusal(rows, "global_batch_size=16 8", remedy, good).check(take)
    Refusal({"batches": iter(())}, "empty", "one", [{}]).check(take)
    good = [{"validation": None}, {"validation": [BATCH]}]
    Refusal({"validation": Nothing()}, "validation", "one None", good).check(take)


@pytest.mark.thorough
def test_settings_beside_a_file_of_deepspeed():
    file = {"train_batch_size": 8, "gradient_clipping": 1.0}
    file["progressive_layer_drop"] = {"enabled": True, "theta": 0.5, "gamma": 0.001}
    other = zerojax.LayerDropConfig(theta=0.9)
    sizes = {"vocab_size": 16, "num_layers": 2, "num_heads": 2, "embed_dim": 8, "max_seq_len": 8}
    model = lambda rngs: zerojax.zoo.GPT2(zerojax.zoo.GPT2Config(**sizes), rngs=rngs)  # noqa: E731
    text = {"batches": [dict.fromkeys(("tokens", "targets"), np.zeros((8, 8), np.int32))]}
    text |= {"model": model, "loss": None}
    good = [text | {"mesh": file}]
    bad = text | {"mesh": file, "layer_drop": other}
    Refusal(bad, "progressive_layer_drop layer_drop", "one", good, ConfigError).check(take)


@pytest.mark.thorough
def test_weights_that_do_not_come_from_a_folder(tmp_path):
    def frozen(kind: str) -> None:
        config = zerojax.CheckpointConfig(path=str(tmp_path / kind), frozen=kind)
        train(freeze="bias", checkpoint=config)

    remedy = "checkpoint.frozen=saved zerojax.from_hugging_face"
    Refusal("source", "checkpoint.frozen=source", remedy, ["saved"]).check(frozen)


@pytest.mark.thorough
def test_runs_that_are_read_back(tmp_path):
    folder, bare = tmp_path / "run", tmp_path / "bare"
    train(run_dir="auto", checkpoint=folder)
    train(run_dir=str(bare))
    names = {"zerojax": zerojax, "MODEL": Line, "LOSS": squared}
    message = refused(lambda: zerojax.load_run(folder), [folder], "model=MODEL loss=LOSS")
    assert eval(code_in(message, "zerojax.load_run("), names).step == 1
    load = lambda folder: zerojax.load_run(folder, model=Line, loss=squared)  # noqa: E731
    shutil.rmtree(bare / "checkpoints", ignore_errors=True)
    remedy = [f"checkpoint='{bare}'"]
    refused(lambda: load(bare), [bare], remedy, error=CheckpointError)
    train(run_dir="auto", checkpoint=bare)
    load(bare)
    (folder / "run.json").rename(tmp_path / "run.json")
    (folder / CONFIG_FILE).touch()
    refused(lambda: load(folder), [folder, "run.json"], "continue")
    train(run_dir="auto", checkpoint=folder)
    load(folder)


def test_files_of_other_programs_in_the_folder_of_a_run(tmp_path):
    (tmp_path / "config.json").touch()
    check = lambda folder: _check_own(folder, ["config.json"])  # noqa: E731
    value, good = [tmp_path / "config.json"], [tmp_path / "another"]
    Refusal(tmp_path, value, "run_dir move", good, FileExistsError).check(check)
    (tmp_path / "config.json").rename(tmp_path / "moved")
    check(tmp_path)


def test_callbacks_that_cannot_be_called():
    class Wrong:
        def __call__(self, trainer: Any, metrics: Any) -> None: ...

        def state(self, more: Any) -> Any: ...

    class Right(Wrong):
        def state(self) -> Any: ...  # type: ignore[override]

    one, two = lambda metrics: None, lambda trainer, metrics: None
    remedy = '"(trainer, metrics)"'
    Refusal([one], "callbacks[0]", remedy, [[two]], TypeError).check(_as_callbacks)
    Refusal([Wrong], "callbacks[0]", '"an instance" Wrong(...)', [[Right()]], TypeError).check(
        _as_callbacks
    )
    Refusal([Wrong()], "callbacks[0].state", '"()"', [[Right()]], TypeError).check(_as_callbacks)


def test_more_tokens_than_a_folder_has_rows_for(tmp_path):
    folder = write_chat_model(tmp_path / "model")
    model = load(RunConfig, None, [f"model.pretrained={folder}"]).model
    own = as_tokenizer(str(folder / "tokenizer.json")).vocab_size
    made = lambda tokens: _model_of(model, tokens)  # noqa: E731
    Refusal(own + 10_000, [own + 10_000, folder], "data.tokenizer tokenizer.json", [own]).check(
        made
    )


def test_searches(monkeypatch):
    monkeypatch.setattr(compile_client, "missing", lambda: None)
    monkeypatch.setattr(search_runs, "find_for", lambda *_, **__: None)

    def search(options: dict[str, Any]) -> None:
        given = {"gpu": "h100", "devices": 8, "example_batch": BATCH, "loss": squared, **options}
        search_runs.search(Line, **given)

    Refusal({"budget": 0}, "budget=0", "300", [{"budget": 300}]).check(search)
    Refusal({"devices": 0}, "devices=0", "1", [{"devices": 1}]).check(search)
