"""What an error about data, models' files and runs tells to do is done, and helps.

Each remedy is read from the sentence where it can be, so that another sentence is another deed.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import zerojax
from tests.remedies import complained, told
from tests.test_data_placing import ROWS, SEQ_LEN, batch_of, plan_of
from zerojax.cli import main
from zerojax.data import (
    as_feed,
    as_masked_source,
    as_source,
    local_rows,
    prefetch,
    preparation,
    shard_batch,
)
from zerojax.data.batch_sharding import check_rows_exist
from zerojax.data.feed import Feed
from zerojax.data.shuffle import permute
from zerojax.data.source import TokenSource
from zerojax.data.subwords import BpeTokenizer, HuggingFaceTokenizer, checked_ids
from zerojax.data.tokenizer import as_tokenizer, tokenizer_from_dict
from zerojax.data.tokens import verify_tokens
from zerojax.models.index_limits import IndexLimit

TEXT = "Once upon a time, in a small house.\n" * 24


def source(data: Any, **options: Any) -> TokenSource:
    sizes = {"seq_len": 8, "global_batch_size": 2, "validation_fraction": 0}
    return as_source(data, **sizes | options)[0]


def text_file(path: Path, content: str = TEXT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def token_file(path: Path, **sidecar: Any) -> Path:
    """200 ids below 50."""
    path.parent.mkdir(parents=True, exist_ok=True)
    dtype = sidecar.get("dtype", "x").replace("x", "uint16")
    (np.arange(200) % 50).astype(dtype).tofile(path)
    path.with_suffix(".json").write_text(json.dumps({"dtype": "uint16", **sidecar}))
    return path


# --- text -----------------------------------------------------------------------------------------


def test_data_that_are_not_there(tmp_path):
    kinds = told(
        lambda: source(tmp_path / "book.txt"),
        r"pass a (folder of text files), one (text file), token files \((\.bin) with a (\.json)"
        r" sidecar, (\.npy)\), or (None) for the embedded Shakespeare",
    )
    folder = text_file(tmp_path / kinds[0] / "a.txt").parent
    source(folder)
    source(folder / "a.txt")
    file = token_file(tmp_path / f"ids{kinds[2]}")
    assert file.with_suffix(kinds[3]).exists()
    source(file)
    np.save(tmp_path / f"ids{kinds[4]}", np.arange(200))
    source(tmp_path / f"ids{kinds[4]}")
    source(eval(kinds[5]))


def test_text_files(tmp_path):
    file = text_file(tmp_path / "a" / "story.doc")
    told(lambda: source(file.parent), r"or pass one file by its name$")
    source(file)
    empty = text_file(tmp_path / "empty.txt", "")
    told(lambda: source(empty), r"; at least one batch of text is needed$")
    source(text_file(empty))
    lines = text_file(tmp_path / "lines.jsonl", f"{json.dumps({'text': TEXT})}\n{{\n")
    path, number = told(lambda: source(lines), r"^(\S+):(\d+): not JSON .*; fix the line$")
    rows = lines.read_text().splitlines()
    rows[int(number) - 1] = '{"text": "fixed"}'
    source(text_file(Path(path), "\n".join(rows)))
    told(
        lambda: source([text_file(tmp_path / "b" / "b.txt"), file]),
        r": put text files into one folder and pass the folder$",
    )
    source(tmp_path / "b")


@pytest.mark.skipif(shutil.which("iconv") is None, reason="needs iconv")
def test_text_in_latin_1(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "old" / "a book.txt"
    text_file(file).write_bytes(("Größe " * 40).encode("latin1"))
    command, new, npy, _ = told(
        lambda: source(file.parent),
        r"convert it \(if it is Latin-1: (iconv .* > ('.*'))\), remove it from the folder, or, if "
        r"it holds token ids, save it as (\.npy) or as (\.bin)",
    )
    subprocess.run(command, shell=True, check=True)
    source(new.strip("'"))
    assert "Größe" in Path(new.strip("'")).read_text(encoding="utf-8")
    text_file(tmp_path / "old" / "b.txt")
    file.unlink()
    source(file.parent)
    np.save(tmp_path / f"ids{npy}", np.arange(200))
    source(tmp_path / f"ids{npy}")


def test_too_much_text_for_memory(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text_file(tmp_path / "book.txt", " ".join(map(str, range(800))))
    monkeypatch.setattr(preparation, "MAX_TEXT_BYTES", 100)
    command, data = told(
        lambda: source("book.txt"), r"run once `zerojax (.*?)` and pass data='(.*)'$"
    )
    assert main(command.split()) == 0
    source(data)
    # And where token files are already.
    words = command.split()
    other, _ = complained(capsys, r"; (choose another folder) or (remove them)", *words)
    assert main([*words[:3], other, *words[4:]]) == 0
    shutil.rmtree(data)
    assert main(words) == 0
    (tmp_path / "file").touch()
    words[3] = "file/tokens"
    complained(capsys, r"; about \d+ bytes of text are to be stored, choose another", *words)
    words[3] = "another"
    assert main(words) == 0


# --- token files ----------------------------------------------------------------------------------


def test_damaged_token_files(tmp_path):
    file = token_file(tmp_path / "ids.bin")
    whole = shutil.copy(file, tmp_path / "copy")
    file.with_suffix(".json").write_text(json.dumps({"dtype": "uint16", "count": 200}))
    os.truncate(file, 300)
    told(lambda: source(file), r"is cut or was changed: copy or prepare it again$")
    shutil.copy(whole, file)
    source(file)
    text = text_file(tmp_path / "book.txt")
    made = tmp_path / "tokens"
    preparation.prepare(text, made, tokenizer="bytes")
    train = made / "train.bin"
    train.write_bytes(train.read_bytes()[::-1])
    told(lambda: verify_tokens(train), r"; copy or prepare it again$")
    shutil.rmtree(made)
    preparation.prepare(text, made, tokenizer="bytes")
    verify_tokens(train)


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_sidecar_that_is_none(content, tmp_path):
    file = token_file(tmp_path / "ids.bin")
    file.with_suffix(".json").write_text(content)
    path, example = told(lambda: source(file), r"^'(\S+)' .*; write for example (\{.*\})$")
    Path(path).write_text(example)
    source(file)


@pytest.mark.parametrize(
    ("key", "pattern", "values"),
    [
        ("dtype", r"must be one of (\w+), (\w+), (\w+)$", str),
        ("count", r"must be a number of (tokens)$", lambda _: 200),
        ("vocab_size", r"must be a number of (ids) from 1 to \d+$", lambda _: 50),
        ("tokenizer", r"must be an (object)$", lambda _: {"kind": "bytes"}),
    ],
)
def test_values_of_a_sidecar(key, pattern, values, tmp_path):
    file = token_file(tmp_path / "ids.bin", **{key: "x"})
    for word in told(lambda: source(file), pattern):
        source(token_file(file, **{key: values(word)}), vocab_size=1 << 16)


def test_a_token_file_without_sidecar_is_made_again(tmp_path):
    file = token_file(tmp_path / "ids.bin")
    file.with_suffix(".json").unlink()
    others, again = told(
        lambda: source(file),
        r"\(or (uint8, uint32)\) into .*, or make it again with `zerojax (.*)`$",
    )
    for kind in others.split(", "):
        file.with_suffix(".json").write_text(json.dumps({"dtype": kind}))
        source(file)
    text_file(tmp_path / "book.txt")
    assert main([*again.split(), str(tmp_path / "book.txt"), str(tmp_path / "new")]) == 0
    source(tmp_path / "new")


def test_ids_that_the_model_does_not_have(tmp_path):
    ids = np.arange(200) % 60
    (size,) = told(
        lambda: source(ids, vocab_size=50), r"set the model's vocab_size to (\d+) or more"
    )
    source(ids, vocab_size=int(size))
    # No vocabulary has ids below 0.
    told(lambda: source(ids - 1, vocab_size=50), r"\[0, 50\); make the file again with the model's")
    source(ids % 50, vocab_size=50)
    file = token_file(tmp_path / "ids.bin", vocab_size=60)
    (size,) = told(
        lambda: source(file, vocab_size=50),
        r"; set it to (\d+) or more, or prepare the data with the model's tokenizer$",
    )
    source(file, vocab_size=int(size))
    source(token_file(tmp_path / "ids.bin", vocab_size=50), vocab_size=50)
    floats = np.arange(200.0)
    told(lambda: source(floats), r"token ids are integers: save them as such$")
    source(floats.astype(int))


def test_files_of_several_tokenizers_or_only_for_validation(tmp_path):
    for size in (50, 60):
        token_file(tmp_path / "all" / f"{size}.bin", vocab_size=size)
    told(lambda: source(tmp_path / "all"), r": keep them in separate folders$")
    (tmp_path / "60").mkdir()
    for name in ("60.bin", "60.json"):
        (tmp_path / "all" / name).rename(tmp_path / "60" / name)
    source(tmp_path / "all")
    source(tmp_path / "60")
    token_file(tmp_path / "v" / "a-val.bin")
    token_file(tmp_path / "v" / "b-val.bin")
    files = [tmp_path / "v" / f"{name}-val.bin" for name in "ab"]
    told(lambda: source(files), r"hold only validation files; add the training files$")
    source([*files, token_file(tmp_path / "v" / "train.bin")])


def test_a_source_of_other_sizes():
    ids = np.arange(100)
    told(
        lambda: source(ids, seq_len=80), r"; lower seq_len or global_batch_size, or give more text$"
    )
    source(ids, seq_len=40)
    source(ids, seq_len=80, global_batch_size=1)
    source(np.arange(200), seq_len=80)
    made = source(ids)
    (wanted,) = told(lambda: source(made, seq_len=16), r"; make both (\d+)$")
    source(source(ids, seq_len=int(wanted)), seq_len=int(wanted))
    for name in ("seq_len", "global_batch_size", "vocab_size"):
        (least,) = told(lambda name=name: source(ids, **{name: 0}), r"must be at least (\d)$")
        source(ids % int(least), **{name: int(least)})
    least, _ = told(lambda: source(ids, validation_fraction=1), r"at least (\d) and below (\d)$")
    source(ids, validation_fraction=float(least))
    size = int(told(lambda: made.batch(0, 0, 9), r"rows lie in \[0, (\d)\)")[0])
    made.batch(0, 0, size)
    kinds = told(
        lambda: source({1, 2}), r"pass (None), a path, .*, an integer numpy (array), or a (\w+)\."
    )
    for data in (eval(kinds[0]), getattr(np, kinds[1])(ids), made):
        source(data)


# --- tokenizers -----------------------------------------------------------------------------------


def test_what_is_no_tokenizer(tmp_path):
    texts = [TEXT]
    spec, trained = told(lambda: as_tokenizer(3), r"pass '(bytes)', '(bpe:4096)', the path of")
    as_tokenizer(spec)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(as_tokenizer(trained, texts).to_dict()))
    told(lambda: as_tokenizer(trained), r"pass the path of a tokenizer file that `zerojax data")
    as_tokenizer(file)
    (example,) = told(lambda: as_tokenizer("bpe", texts), r"for example '(.*)'$")
    as_tokenizer(example, texts)
    (good,) = told(lambda: as_tokenizer("bpe:3", texts), r"'(bpe:\d+)' is a good size")
    as_tokenizer(good, texts)
    least = re.search(r"between (\d+)", str(told(lambda: as_tokenizer("bpe:3", texts), "(.*)")))[1]
    BpeTokenizer.train(texts, vocab_size=int(least))
    (spec,) = told(lambda: as_tokenizer("byte"), r"is neither '(bytes)', nor")
    as_tokenizer(spec)
    (kind,) = told(lambda: tokenizer_from_dict({"kind": "x"}), r"known are kind '(bytes)'")
    tokenizer_from_dict({"kind": kind})


def test_another_tokenizer_than_that_of_the_files(tmp_path):
    text = text_file(tmp_path / "book.txt")
    preparation.prepare(text, tmp_path / "tokens", tokenizer="bytes", validation_fraction=0)
    told(
        lambda: source(tmp_path / "tokens", tokenizer="bpe:300"),
        r"; leave the option out, .*, or prepare the text again$",
    )
    source(tmp_path / "tokens")
    preparation.prepare(text, tmp_path / "again", tokenizer="bpe:300", validation_fraction=0)
    source(tmp_path / "again", tokenizer="bpe:300")


def test_without_the_package_of_tokenizers(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (spec,) = told(lambda: as_tokenizer("bpe:300", [TEXT]), r"or use tokenizer='(bytes)'$")
    as_tokenizer(spec)


def test_tokens_and_texts_of_a_tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1}, "[UNK]"))
    backend.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = HuggingFaceTokenizer(json.loads(backend.to_str()))
    for name in told(lambda: tokenizer.id_of("[MASK]"), r"are (\S+), (\S+), (\S+)$"):
        tokenizer.id_of(name)
    told(lambda: tokenizer.encode_texts([]), r"; give at least one$")
    around = told(
        lambda: tokenizer.encode_texts(["a"], max_length=1), r"alone has (\d) tokens; give more$"
    )
    tokenizer.encode_texts(["a"], max_length=int(around[0]) + 1)
    told(lambda: checked_ids([1.0], 4), r"; pass integers$")
    checked_ids([1], 4)


def test_masks():
    plain = source(np.arange(100) % 5, vocab_size=5)
    make = lambda **options: as_masked_source(plain, **{"mask_token": 5, **options})  # noqa: E731
    (fraction,) = told(lambda: make(mask_fraction=0.0), r"BERT has ([\d.]+)$")
    make(mask_fraction=float(fraction))
    (least,) = told(lambda: make(mask_token=-1), r"are at least (\d)$")
    make(mask_token=int(least))
    told(lambda: make(special_tokens=range(5)), r"; give the special tokens of this tokenizer$")
    make(special_tokens=[0, 1])


def test_places_of_a_shuffle():
    (size,) = told(lambda: permute([7], 0, (1,)), r"at least (\d) element")
    permute([0], int(size), (1,))
    told(lambda: permute([7], 5, (1,)), r"; take them modulo the size$")
    permute([7 % 5], 5, (1,))


# --- feeds ----------------------------------------------------------------------------------------

BATCH = {"x": np.zeros((2, 3))}


def test_what_are_no_batches():
    for word, given in (("TokenSource", 3), ("iterable", 3), ("function", 3)):
        told(lambda given=given: as_feed(given), rf"pass a .*\b{word}\b")
    for good in (source(np.arange(100)), iter([BATCH]), lambda step: BATCH):
        next(as_feed(good))
    (code,) = told(lambda: as_feed(BATCH), r"pass (\[batch\]) to train on it again and again")
    feed = as_feed(eval(code, {"batch": BATCH}))
    next(feed), next(feed)
    told(
        lambda: as_feed(feed, start=1),
        r"; leave start and rows out, or use Feed\.restore\(state\)$",
    )
    assert as_feed(feed) is feed
    state = feed.state()
    feed.restore(state)
    next(feed)
    told(lambda: feed.restore({}), r"; pass Feed\.state\(\)$")
    feed.restore(Feed.state(feed))
    (name,) = told(lambda: as_feed("book.txt"), r"with (as_source)\(\.\.\.\)$")
    next(as_feed({"as_source": source}[name](np.arange(100))))
    told(lambda: as_feed([]), r"; pass at least one batch$")
    next(as_feed([BATCH]))
    (least,) = told(lambda: as_feed([BATCH], start=-1), r"is at least (\d)$")
    next(as_feed([BATCH], start=int(least)))
    (size,) = told(lambda: as_feed(source(np.arange(100)), rows=(0, 3)), r"within the (\d) rows")
    next(as_feed(source(np.arange(100)), rows=(0, int(size))))

    class Empty:
        def __iter__(self):
            return iter(())

    told(lambda: next(as_feed(Empty())), r"; pass an iterable with at least one$")


def test_going_back_and_forth(caplog):
    numbers = [{"x": np.array([n])} for n in range(4)]
    feed = as_feed(iter(numbers))
    next(feed), next(feed)
    told(
        lambda: feed.restore({"kind": "iterable", "position": 1}),
        r"; pass a (fresh iterator), a (list), or a (function) of the step$",
    )
    for good in (iter(numbers), numbers, lambda step: numbers[step]):
        fresh = as_feed(good)
        fresh.restore({"kind": fresh.kind, "position": 1})
        assert next(fresh)["x"] == 1

    class Placed:
        place = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.place += 1
            return numbers[self.place - 1]

        def get_state(self):
            return {"place": self.place}

        def set_state(self, state):
            self.place = state["place"]

    caplog.clear()
    with caplog.at_level(logging.WARNING):
        next(as_feed(iter(numbers), start=2))
        (text,) = caplog.messages
        assert "give a function of the step, or an iterator with get_state and set_state" in text
        caplog.clear()
        assert next(as_feed(lambda step: numbers[step], start=2))["x"] == 2
        first = as_feed(Placed())
        next(first), next(first)
        second = as_feed(Placed())
        second.restore(first.state())
        assert next(second)["x"] == 2
        assert not caplog.messages


@pytest.mark.parametrize("other", [np.arange(1, 101), None], ids=["data", "kind"])
def test_other_data_than_those_of_the_saved_run(other):
    feed = as_feed(source(np.arange(100)))
    next(feed)
    state = feed.state()
    batches = [BATCH] if other is None else source(other)
    (code,) = told(
        lambda: as_feed(batches).restore(state),
        r"give the (?:same data|data of the saved run).*, or go on with others: batches=(.*)$",
    )
    another = eval(code, {"zerojax": zerojax, "batches": batches})
    another.restore(state)
    assert next(another)
    same = as_feed(source(np.arange(100)))
    same.restore(state)
    np.testing.assert_array_equal(next(same)["tokens"], next(feed)["tokens"])


def test_reading_ahead():
    (depth,) = told(
        lambda: prefetch(as_feed([BATCH]), put=lambda x: x, depth=0), r"; (\d) is a good value$"
    )
    with prefetch(as_feed([BATCH]), put=lambda x: x, depth=int(depth)) as ahead:
        next(ahead)
    (code,) = told(lambda: prefetch([BATCH], put=lambda x: x), r"; make one with (.*)$")
    feed = eval(code, {"as_feed": as_feed, "batches": [BATCH]})
    with prefetch(feed, put=lambda x: x) as ahead:
        next(ahead)


# --- placing --------------------------------------------------------------------------------------


def test_batches_that_are_not_placed():
    plan = plan_of()
    vocabulary = ROWS * SEQ_LEN
    good = batch_of()

    def trial(**changes: Any) -> None:
        shard_batch(plan, {**good, **changes}, vocab_size=vocabulary)

    told(trial, r"; use the model's tokenizer, raise vocab_size, or give such places an id of 0")
    shard_batch(plan, good, vocab_size=vocabulary + 1)
    good["targets"] = np.where(good["targets"] < vocabulary, good["targets"], 0)
    trial()
    told(lambda: trial(more=good["tokens"]), r": give every batch the names of example_batch$")
    short = good["tokens"][:3]
    (rows,) = told(
        lambda: trial(tokens=short), r"needs (\d+) rows here: drop a smaller last batch, or fill it"
    )
    trial(tokens=np.concatenate([short, np.zeros((int(rows) - 3, SEQ_LEN), np.int32)]))
    told(
        lambda: trial(tokens=good["tokens"][:, :2]),
        r"; give every batch the shape of example_batch, or make the plan with this one$",
    )
    floats = good["tokens"].astype(np.float32)
    kind, other = told(
        lambda: trial(tokens=floats),
        r"; convert the data with \.astype\('(.*)'\), or make the plan with .* of (\w+)$",
    )
    trial(tokens=floats.astype(kind))
    shard_batch(plan_of(tokens=other), {"tokens": floats})
    told(lambda: trial(tokens="abc"), r"; pass an array \[rows, \.\.\.\] of numbers$")


def test_values_that_are_not_finite():
    plan = plan_of(x="float32")
    values = np.zeros((ROWS, SEQ_LEN), np.float32)
    values[1, 2] = np.nan
    (option,) = told(
        lambda: shard_batch(plan, {"x": values}),
        r"; clean the data, or, in a loop of your own, pass (\w+=False) to shard_batch",
    )
    shard_batch(plan, {"x": values}, **eval(f"dict({option})"))
    shard_batch(plan, {"x": np.nan_to_num(values)})


def test_rows_that_a_parameter_does_not_have():
    limit = IndexLimit(low=0, high=4, parameter="embed", window=(slice(None),))
    values = np.arange(6)
    least, high = told(
        lambda: check_rows_exist("x", values, limit),
        r"; use values in \[(\d), (\d)\), or give the model more rows$",
    )
    check_rows_exist("x", np.clip(values, int(least), int(high) - 1), limit)
    check_rows_exist("x", values, dataclasses.replace(limit, high=6))


def test_a_plan_without_devices():
    kinds = (jax.sharding.AxisType.Auto,) * 2
    abstract = jax.sharding.AbstractMesh((4, 2), ("data", "model"), axis_types=kinds)
    told(
        lambda: local_rows(plan_of(abstract)),
        r"; make the plan with make_mesh\(\.\.\.\) on the machine that trains$",
    )
    assert local_rows(plan_of()) == (0, ROWS)
