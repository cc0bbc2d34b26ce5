"""Refusals of fine-tuning on chats and of the files of runs. Nothing is trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from tests.support.config_variants import base_of, tensors_of
from tests.support.hugging_face_folders import write_chat_model, write_folder
from tests.support.refusals import Refusal, refused
from tests.support.small_models import Line
from tests.support.text_sets import some_texts, write_texts
from tests.training.test_finetune import chat_file
from zerojax import zoo
from zerojax.config import RunConfig, load
from zerojax.training.fine_tuning import FineTuning, write_run
from zerojax.training.resume_check import _check_run
from zerojax.training.run_file import make_folder, vocab_size_of
from zerojax.training.run_generation import check_request
from zerojax.training.run_spec import CHECKPOINT_FOLDER

pytest.importorskip("jinja2", reason="needs the package jinja2: pip install jinja2")
pytest.importorskip("tokenizers", reason="needs the package tokenizers: pip install tokenizers")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, chats and prepared chats."""
    folder = tmp_path_factory.mktemp("made")
    write_chat_model(folder / "model")
    chat_file(folder / "chats.jsonl", 8)
    write_texts(folder / "prepared", some_texts(8))
    return folder


@pytest.fixture
def write(made, tmp_path) -> Any:
    """Writes the file of a run, into a new folder unless told otherwise."""

    def write(changes: dict[str, Any]) -> Path:
        number = len(list(tmp_path.iterdir()))
        given = {"folder": "model", "data": "chats.jsonl", **changes}
        paths = {key: str(made / given[key]) for key in ("folder", "data")}
        asked = FineTuning(**{"run_dir": str(tmp_path / f"run{number}"), **given, **paths})
        return write_run(asked, count_devices=lambda: 1, is_planned=False).file

    return write


def test_numbers_of_epochs(write):
    Refusal({"epochs": 0}, "epochs=0", "1 3", [{"epochs": 1}, {"epochs": 3}]).check(write)


def test_folders_of_runs(write, tmp_path):
    file = write({"run_dir": str(tmp_path / "run")})
    again = {"run_dir": str(file.parent)}
    remedy = [f"zerojax train {file}", "--out"]
    Refusal(again, [file], remedy, [{"run_dir": str(tmp_path / "another")}]).check(write)
    load(RunConfig, file)
    file.unlink()
    shutil.rmtree(file.parent / "chats")
    (file.parent / CHECKPOINT_FOLDER).mkdir()
    Refusal(again, [file.parent], "--out", [{"run_dir": str(tmp_path / "third")}]).check(write)


@pytest.mark.thorough
def test_models_and_data(write, made):
    bert = write_folder(made / "bert", "llama", tensors=tensors_of("bert"))
    (bert / "config.json").write_text(json.dumps(base_of("bert")[0]))
    Refusal({"folder": "bert"}, "bert", "llama qwen3", [{"folder": "model"}]).check(write)
    prepared = write({}).parent / "chats"
    shutil.copytree(prepared, made / "own", dirs_exist_ok=True)
    bad, good = {"data": "own", "answers": "each"}, [{"data": "own"}, {"answers": "each"}]
    Refusal(bad, "--answers each", "omit original", good).check(write)
    np.arange(200, dtype=np.uint16).tofile(made / "ids.bin")
    (made / "ids.json").write_text('{"dtype": "uint16"}')
    remedy = [".jsonl", f"model.pretrained={made}/model", f"data.path={made}/ids.bin"]
    Refusal({"data": "ids.bin"}, "ids.bin", remedy, [{"data": "chats.jsonl"}]).check(write)
    load(RunConfig, None, [f"model.pretrained={made}/model", f"data.path={made}/ids.bin"])


@pytest.mark.thorough
def test_lengths_of_rows(write, made):
    context = json.loads((made / "model/config.json").read_text())["max_position_embeddings"]
    rows = lambda number: write({"overrides": [f"seq_len={number}"]})  # noqa: E731
    Refusal(context + 1, [f"seq_len={context + 1}"], [context], [context]).check(rows)
    record = json.loads((made / "chats.jsonl").read_text().splitlines()[0])
    name = "messages" if "messages" in record else "conversations"
    record[name][-1] = {"role": "assistant", "content": "I. " * context}
    (made / "long.jsonl").write_text(json.dumps(record))
    words = lambda words: write({"data": "long.jsonl", "overrides": words})  # noqa: E731
    remedy = "data.long_texts=split data.long_texts=drop"
    more = (made / "chats.jsonl").read_text()
    (made / "long.jsonl").write_text(json.dumps(record) + "\n" + more)
    Refusal([], [context], remedy, [[word] for word in remedy.split()]).check(words)


# --- files and folders of runs --------------------------------------------------------------------


def test_the_number_of_tokens_of_data(tmp_path):
    np.arange(200, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    (tmp_path / "ids.json").write_text('{"dtype": "uint16"}')
    size = lambda words: vocab_size_of(load(RunConfig, None, words.split()))  # noqa: E731
    for name in ("ids.bin", "none"):
        bad = f"data.path={tmp_path}/{name}"
        remedy = "model.vocab_size"
        Refusal(bad, f"{name}", remedy, [f"{bad} {remedy}=200"]).check(size)


def test_a_run_folder_below_a_file(tmp_path):
    (tmp_path / "file").touch()
    bad = tmp_path / "file" / "run"
    Refusal(bad, [bad], "run_dir=", [tmp_path / "run"], OSError).check(make_folder)


def test_prompts_of_a_run():
    sizes = {"vocab_size": 64, "num_heads": 2, "embed_dim": 16, "max_seq_len": 16}
    plan = zerojax.make_plan(
        lambda rngs: zoo.GPT2(zoo.GPT2Config(num_layers=1, **sizes), rngs=rngs),
        {},
        example_batch=dict.fromkeys(("tokens", "targets"), np.zeros((8, 8), np.int32)),
    )
    check = lambda prompts: check_request(plan, prompts, 2)  # noqa: E731
    Refusal(3, "3 int", "text list rows", ["a", ["a"], [[1, 2]]], TypeError).check(check)
    Refusal([], "0", "one", ["a"]).check(check)


BATCH = {"x": np.ones((8, 4), np.float32)}


def squared(model: Any, batch: Any) -> Any:
    return jnp.mean(model(batch["x"]) ** 2)


def train(**options: Any) -> zerojax.Trainer:
    quiet = zerojax.LogConfig(console="quiet")
    given = {"loss": squared, "steps": 1, "run_dir": None, "log": quiet, **options}
    return zerojax.train(Line, None, [BATCH], **given)


@pytest.mark.thorough
def test_runs_without_checkpoints_validation_or_averages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with train() as bare:
        for call in (lambda: bare.keep("best"), bare.restore):
            refused(call, "checkpoints", "checkpoint='runs/name'")
        refused(bare.evaluate, "validation", "batches validation=")
        assert np.isfinite(bare.evaluate([BATCH])["loss"])
        refused(lambda: bare.evaluate([]), "", "one")
        remedy = "optimizer.ema_decay zerojax.with_ema 'trained'"
        refused(lambda: bare.to_model(weights="ema"), "weights='ema'", remedy)
        bare.to_model(weights="trained")
    ema = zerojax.with_ema(zerojax.adamw(1e-3), 0.999)
    with train(checkpoint="runs/name", validation=[BATCH], optimizer=ema) as run:
        run.to_model(weights="ema")
        run.keep("best")
        run.restore("best")
        assert np.isfinite(run.evaluate()["loss"])
    inside = tmp_path / "runs" / "name"
    assert (inside / CHECKPOINT_FOLDER).is_dir()

    def again(path: Path) -> None:
        config = zerojax.CheckpointConfig(path=str(path))
        train(checkpoint=config, validation=[BATCH], optimizer=ema).close()

    value = [inside, CHECKPOINT_FOLDER]
    Refusal(inside, value, "run_dir omit", [inside / CHECKPOINT_FOLDER]).check(again)
    train(run_dir=str(inside), validation=[BATCH], optimizer=ema).close()


def test_folders_that_no_run_file_made(tmp_path):
    def check(folder: Path) -> None:
        _check_run(folder, folder / "config.json")

    bare, good = tmp_path / "bare", tmp_path / "good"
    for folder, content in ((bare, "{}"), (good, '{"run_dir": "good"}')):
        folder.mkdir()
        (folder / "config.json").write_text(content)
    Refusal(bare, [bare, "config.json"], "zerojax train", [good]).check(check)
