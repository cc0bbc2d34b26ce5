"""`zerojax finetune`: from a folder and chats to exported weights, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import zerojax
from tests.support.cli_complaints import fails
from tests.support.hugging_face_folders import write_chat_model, write_folder
from tests.support.hugging_face_weights import weights
from tests.support.sft_cases import chat
from tests.support.text_sets import some_texts, write_texts
from zerojax.cli import main
from zerojax.cli.arguments import command_name
from zerojax.config import RunConfig, load
from zerojax.data import as_source
from zerojax.training.fine_tuning import choose_batch, choose_row_length
from zerojax.training.run_file import plan_from_config

pytest.importorskip("jinja2", reason="needs the package jinja2: pip install jinja2")
pytest.importorskip("tokenizers", reason="needs the package tokenizers: pip install tokenizers")

DATA = Path(__file__).parents[1] / "data"


def chat_file(file: Path, count: int = 80) -> Path:
    file.write_text("".join(f"{json.dumps(chat(number))}\n" for number in range(count)))
    return file


@pytest.fixture
def model(tmp_path) -> Path:
    return write_chat_model(tmp_path / "model")


@pytest.fixture
def chats(tmp_path) -> Path:
    return chat_file(tmp_path / "chats.jsonl")


def not_now(*_, **__):
    """In place of what starts devices."""
    raise AssertionError("the command went on to devices")


# --- from one end to the other --------------------------------------------------------------------


@pytest.mark.thorough
def test_one_command_goes_from_a_folder_and_chats_to_weights_for_transformers(
    model, chats, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["finetune", "model", "chats.jsonl", "learning_rate=0.01", "log.every=1"]) == 0
    run = tmp_path / "runs" / "model-chats"
    said = capsys.readouterr().out
    assert f"settings, with their reasons: {run}/run.yaml" in said
    assert "80 texts of " in said
    config = load(RunConfig, run / "run.yaml")
    assert config.optimizer.learning_rate == 0.01
    assert config.model.lora.rank == 16
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert len(losses) == config.steps
    assert losses[-1] < losses[0] - 0.3, "it learns"

    commands = [
        line.split("zerojax ", 1)[1].split()
        for line in said.splitlines()
        if " checkpoint export " in line
    ]
    assert [words[:2] for words in commands] == [["checkpoint", "export"]] * 2
    for words in commands:
        assert main(words) == 0
    before, after = (load_file(at / "model.safetensors") for at in (model, run / "merged"))
    assert before.keys() == after.keys()
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    assert moved == {name for name in before if "_proj" in name}
    for name in ("chat_template.jinja", "tokenizer.json"):
        assert (run / "merged" / name).read_text() == (model / name).read_text()
    assert (run / "adapters" / "adapter_model.safetensors").is_file()

    tokens = np.arange(24, dtype=np.int32)[None] + 5
    expected = zerojax.load_run(run).to_model()(tokens)
    merged = zerojax.from_hugging_face(run / "merged").to_model()(tokens)
    original = zerojax.from_hugging_face(model).to_model()(tokens)
    np.testing.assert_allclose(merged, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert np.abs(merged - original).max() > 1e-2 * np.abs(expected).max()


@pytest.mark.thorough
def test_the_run_file_resumes_and_all_weights_train_without_adapters(
    model, tmp_path, monkeypatch, capsys
):
    """Chats that were prepared before, another row length, and the file as a run of its own."""
    monkeypatch.chdir(tmp_path)
    words = ["data", "prepare", str(chat_file(tmp_path / "some.jsonl")), "made", "--format", "chat"]
    assert main([*words, "--tokenizer", "model", "--validation-fraction", "0.1"]) == 0
    words = ["finetune", "model", "made", "--out", "run", "lora.rank=0", "seq_len=112", "steps=2"]
    assert main([*words, "--write-only"]) == 0
    said = capsys.readouterr().out
    assert said.endswith(f"next: {command_name()} train {tmp_path}/run/run.yaml\n")
    assert not (tmp_path / "run" / "chats").exists()
    text = (tmp_path / "run" / "run.yaml").read_text()
    assert "learning_rate: 2.0e-05  # usual for all weights" in text
    assert "seq_len: 112\n" in text
    assert main(["train", "run/run.yaml"]) == 0
    assert main(["train", "run/run.yaml", "steps=3"]) == 0
    assert "resuming after step 2 of 3" in capsys.readouterr().out
    assert main(["checkpoint", "export", "run", "out", "--format", "hugging_face"]) == 0
    before, after = (load_file(at / "model.safetensors") for at in (model, tmp_path / "out"))
    assert all(not np.array_equal(before[name], after[name]) for name in before)


# --- what it writes -------------------------------------------------------------------------------


def test_the_file_gives_reasons_and_says_the_same_as_the_words(model, chats, tmp_path, capsys):
    words = ["finetune", str(model), str(chats), "--out", str(tmp_path / "run"), "--write-only"]
    assert main([*words, "lora.rank=4", "zero=1", "--epochs", "2"]) == 0
    file = tmp_path / "run" / "run.yaml"
    config, text = load(RunConfig, file), file.read_text()
    assert config.model.lora.rank == 4
    assert config.mesh.zero == 1
    assert config.model.pretrained == str(model)
    assert "rank: 4  # given\n" in text
    assert f"Fine-tunes {model} on {chats}; written by `zerojax finetune`." in text
    assert f"then: zerojax train {file}\n" in text
    # 76 of 80 texts train, of at most 93 tokens, in rows of 128.
    assert config.data.seq_len == 128
    assert "seq_len: 128  # the longest chat has 93, the model's context 128\n" in text
    rows = int(text.split("rows, of ")[1].split()[0])
    assert config.global_batch_size == 16
    assert config.steps == -(-2 * rows // 16)
    plan = plan_from_config(config, 8)
    assert plan.abstract_batch["weights"].shape == (16, 128)
    assert "watch" not in text, "what was not chosen stays out of it"
    capsys.readouterr()
    assert f"{file} exists already: continue with `zerojax train" in fails(capsys, *words)
    assert file.read_text() == text


def test_rows_are_as_short_as_the_longest_text_and_longer_where_texts_are_many():
    assert choose_row_length(93, 5_000, 8192) == 128
    assert choose_row_length(93, 5_000, 100) == 100
    assert choose_row_length(600, 1_000_000, 8192) == 2560 // 2
    assert choose_row_length(600, 100_000, 8192) == 640
    assert choose_row_length(128, 10**9, 8192) == 2048
    assert choose_row_length(128, 10**9, 1024) == 1024
    assert choose_row_length(3000, 10**9, 8192) == 3008


def test_a_batch_is_a_multiple_of_what_the_devices_take():
    assert choose_batch(1000, 1) == choose_batch(1000, 8) == 16
    assert choose_batch(1000, 24) == 24
    assert choose_batch(1000, 3) == 18
    assert choose_batch(11, 2) == 10
    assert choose_batch(3, 8) == 8  # which the source refuses, with what to do


# --- what it refuses ------------------------------------------------------------------------------


def no_template(model: Path) -> None:
    (model / "chat_template.jinja").unlink()


def no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


def short_context(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 80}))


def all_marked(model: Path) -> None:
    (model / "chat_template.jinja").write_text(
        "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}"
    )


def as_mamba(model: Path) -> None:
    write_folder(model, "llama", model_type="mamba")


ASK, TELL = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("change", "rows", "words", "told"),
    [
        (no_template, None, (), r"chats.jsonl:1: a chat needs a template, but .* --template FILE"),
        (no_weights, None, (), "has no model.safetensors or .*; pass a folder"),
        (no_tokenizer, None, (), r"has no tokenizer.json; .*AutoTokenizer"),
        (as_mamba, None, (), "model_type='mamba' is not supported"),
        (
            short_context,
            None,
            (),
            r"text \d+ of .*chats.jsonl has 93 tokens, but .*/model is 80 .*long_texts=split",
        ),
        (None, None, ("seq_len=64",), "longer than a row of seq_len=64 .* raise seq_len to 93"),
        (None, None, ("seq_len=256",), "seq_len=256 is above .* 128 tokens .* to at most 128"),
        (None, [{"text": "a book"}], (), r"chats.jsonl:1: the row has the keys \['text'\]"),
        (None, ["no JSON"], (), "chats.jsonl:1: 'no JSON' is not an object"),
        (None, [], (), "has no rows; pass at least one chat"),
        (None, [{"messages": [ASK, ASK]}], (), "no message has role 'assistant' .* leave the row"),
        (
            all_marked,
            None,
            (),
            "every token of the text is part of an answer, so it has no question",
        ),
        (
            None,
            [{"messages": [ASK, TELL]}],
            (),
            r"1 texts: 1 rows .*has global_batch_size=8; lower",
        ),
        (
            None,
            None,
            ("model.pretrained=else",),
            "pretrained=else conflicts with FOLDER.*omit the override model.pretrained",
        ),
        (
            None,
            None,
            ("run_dir=else",),
            "run_dir=else conflicts with --out.*; omit the override run_dir",
        ),
        (
            None,
            None,
            ("data.path=else",),
            "data.path=else conflicts with DATA.*; omit the override data.path",
        ),
        (
            None,
            None,
            ("warmup_steps=500",),
            r"500 is above steps \(\d+\); lower it or train longer",
        ),
        (
            None,
            None,
            ("global_batch_size=20",),
            "20 is not divisible by 8 data shards; use global_batch_size=16 or",
        ),
        (None, None, ("mesh.data=3",), "mesh .*data=3.* needs 3 devices, but found 8"),
        (None, None, ("lora.targets=[attn/]",), "attn/"),
        (None, None, ("lora.rnk=4",), "did you mean 'model.lora.rank'"),
        (None, None, ("--epochs", "0"), "epochs=0 is not above 0; use a number such as 1 or 3"),
    ],
)
def test_what_is_wrong_is_one_line_before_devices_and_leaves_nothing(
    model, chats, tmp_path, capsys, monkeypatch, change, rows, words, told
):
    monkeypatch.setattr("zerojax.cli.finetune_command.train", not_now)
    if rows is not None:
        chats.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    if change is not None:
        change(model)
    if told.startswith(("1 texts", "500", "20 is", "mesh", "attn")):  # what devices decide
        monkeypatch.setattr(jax, "device_count", lambda: 8)
    else:
        monkeypatch.setattr(jax, "device_count", not_now)
    run = tmp_path / "run"
    assert re.search(
        told, fails(capsys, "finetune", str(model), str(chats), *words, "--out", str(run))
    )
    assert not run.exists()


@pytest.mark.parametrize("existing", [False, True])
def test_what_was_in_the_folder_of_a_run_before_a_refusal_stays(
    model, chats, tmp_path, capsys, existing
):
    run = tmp_path / "run"
    run.mkdir()
    (run / "mine.txt").write_text("mine")
    if existing:
        (run / "chats").mkdir()
        (run / "chats" / "mine.txt").write_text("mine")
    fails(capsys, "finetune", str(model), str(chats), "--out", str(run), "seq_len=64")
    assert (run / "mine.txt").read_text() == "mine"
    assert (run / "chats").exists() == existing
    assert not existing or (run / "chats" / "mine.txt").read_text() == "mine"


def test_another_run_in_the_folder_is_left_alone(model, chats, tmp_path, capsys):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    told = fails(capsys, "finetune", str(model), str(chats), "--out", str(run))
    assert f"{run} holds another run; choose another folder with --out" in told


def test_a_section_counts_as_given(model, chats, tmp_path, capsys):
    words = ["finetune", str(model), str(chats), "--out", str(tmp_path / "run"), "--write-only"]
    assert main([*words, "data={seq_len: 96}"]) == 0
    text = (tmp_path / "run" / "run.yaml").read_text()
    assert "seq_len: 96\n" in text
    config = load(RunConfig, tmp_path / "run" / "run.yaml")
    rows = as_source(config.data.path, seq_len=96, global_batch_size=1)[0].num_rows
    assert config.steps == -(-3 * rows // 16)


def test_masks_of_prepared_chats_are_looked_at(model, tmp_path, capsys, monkeypatch):
    """All zeros are refused, and all ones are said; on the first token of a text is no loss."""
    monkeypatch.setattr("zerojax.cli.finetune_command.train", not_now)
    texts = [(ids, np.arange(len(ids)) > 0) for ids, _ in some_texts(60)]
    count = sum(len(ids) - 1 for ids, _ in texts)
    write_texts(tmp_path / "zeros", [(ids, ~asked) for ids, asked in texts])
    write_texts(tmp_path / "ones", texts)
    texts[7][1][1] = False
    write_texts(tmp_path / "all_but_one", texts)
    run = tmp_path / "run"
    words = ["finetune", str(model), "--out", str(run), "--write-only"]
    told = fails(capsys, *words, str(tmp_path / "zeros"))
    assert f"none of its {count} target tokens is part of an answer" in told
    assert "--template FILE" in told
    assert main([*words, str(tmp_path / "ones"), "seq_len=16"]) == 0
    note = f"all {count} target tokens are trained on"
    assert note in capsys.readouterr().out
    (run / "run.yaml").unlink()
    told = fails(capsys, *words, str(tmp_path / "ones"), "--bad", "skip")
    assert "--bad skip is an option for preparing chats" in told
    assert "ones is already prepared; omit the option" in told
    assert main([*words, str(tmp_path / "all_but_one"), "seq_len=16"]) == 0
    assert "are trained on" not in capsys.readouterr().out


def test_data_of_other_kinds_are_refused(model, tmp_path, capsys):
    words = ["finetune", str(model), "--out", str(tmp_path / "run")]
    (tmp_path / "book.txt").write_text("A book.\nIts second line.\n")
    assert "book.txt:1: not JSON" in fails(capsys, *words, str(tmp_path / "book.txt"))
    assert main(["data", "prepare", str(tmp_path / "book.txt"), str(tmp_path / "tokens")]) == 0
    capsys.readouterr()
    told = fails(capsys, *words, str(tmp_path / "tokens"))
    assert "holds tokens of plain text, without marked answers; pass chats" in told
    assert "no/such" in fails(capsys, *words, "no/such")
    other = write_chat_model(tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text())
    content["added_tokens"][-1]["content"] = "<another>"
    (other / "tokenizer.json").write_text(json.dumps(content))
    chats = chat_file(tmp_path / "chats.jsonl")
    prepare = ["data", "prepare", str(chats), str(tmp_path / "made"), "--format", "chat"]
    assert main([*prepare, "--tokenizer", str(other)]) == 0
    capsys.readouterr()
    assert "not with tokenizer=" in fails(capsys, *words, str(tmp_path / "made"))


def test_a_model_that_continues_no_text_is_refused(tmp_path, capsys):
    case = next(iter(json.loads((DATA / "t5.json").read_text())["cases"].values()))
    tensors = {name: weights(name, shape) for name, shape in case["tensors"].items()}
    folder = write_folder(tmp_path / "model", "llama", tensors=tensors)
    (folder / "config.json").write_text(json.dumps(case["config"]))
    told = fails(capsys, "finetune", str(folder), str(chat_file(tmp_path / "c.jsonl")))
    assert "has a model of type t5, which is not a decoder" in told
    assert "task=" not in told

    case = json.loads((DATA / "task_heads.json").read_text())["cases"]["bert_classes"]
    tensors = {name: weights(name, shape) for name, shape in case["tensors"].items()}
    bert = write_folder(tmp_path / "bert", "llama", tensors=tensors)
    (bert / "config.json").write_text(json.dumps(case["config"]))
    told = fails(capsys, "finetune", str(bert), str(chat_file(tmp_path / "d.jsonl")))
    assert "has a model of type bert, which is not a decoder" in told
    assert "zerojax.from_hugging_face(FOLDER, task=" in told


def test_one_of_several_processes_is_told_how(model, chats, capsys, monkeypatch):
    for name, value in (("NUM_PROCESSES", "2"), ("PROCESS_ID", "0"), ("COORDINATOR", "a:1")):
        monkeypatch.setenv(f"ZEROJAX_{name}", value)
    told = fails(capsys, "finetune", str(model), str(chats))
    assert "this is one of 2 processes" in told
    assert "--write-only` once, then `zerojax train RUN/run.yaml` on all of them" in told
