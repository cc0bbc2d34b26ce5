"""Refusals of text, token files, tokenizers, feeds and batches."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import zerojax
from tests.batches.test_data_placing import ROWS, SEQ_LEN, batch_of, plan_of
from tests.support.refusals import Refusal, check_words, code_in, complaint, refused
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
from zerojax.tracing.index_limits import IndexLimit

TEXT = "Once upon a time, in a small house.\n" * 24
wrong_type = functools.partial(refused, error=TypeError)
absent = functools.partial(refused, error=FileNotFoundError)


def source(data: Any, **options: Any) -> TokenSource:
    sizes = {"seq_len": 8, "global_batch_size": 2, "validation_fraction": 0}
    return as_source(data, **sizes | options)[0]


def with_options(data: Any) -> Any:
    return lambda options: source(data, **options)


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
    bad, remedy = tmp_path / "book.txt", "folder file .bin .json .npy None"
    absent(lambda: source(bad), [bad, tmp_path], remedy)
    file = text_file(tmp_path / "texts" / "a.txt")
    np.save(tmp_path / "ids.npy", np.arange(200))
    for good in (file.parent, file, token_file(tmp_path / "ids.bin"), tmp_path / "ids.npy", None):
        source(good)


def test_text_files(tmp_path):
    file = text_file(tmp_path / "a" / "story.doc")
    Refusal(file.parent, [file.parent, ".doc"], ".txt file", [file]).check(source)
    empty = text_file(tmp_path / "empty.txt", "")
    refused(lambda: source(empty), [empty, 0], "text")
    source(text_file(empty))
    lines = text_file(tmp_path / "lines.jsonl", f"{json.dumps({'text': TEXT})}\n{{\n")
    refused(lambda: source(lines), [f"{lines}:2", "JSON"])
    source(text_file(lines, f"{json.dumps({'text': TEXT})}\n{json.dumps({'text': 'fixed'})}\n"))
    other = text_file(tmp_path / "b" / "b.txt")
    Refusal([other, file], [other, ".bin", ".npy"], "folder", [other.parent]).check(source)


@pytest.mark.skipif(shutil.which("iconv") is None, reason="needs iconv")
def test_text_in_latin_1(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "old" / "a book.txt"
    text_file(file).write_bytes(("Größe " * 40).encode("latin1"))
    new = Path("a book.utf8.txt")
    command = f"iconv -f latin1 -t utf-8 '{file}' > '{new}'"
    refused(lambda: source(file.parent), [file, "UTF-8", "0xf6", 2], [command, ".npy", ".bin"])
    subprocess.run(command, shell=True, check=True)
    source(new)
    assert "Größe" in new.read_text(encoding="utf-8")
    text_file(tmp_path / "old" / "b.txt")
    file.unlink()
    source(file.parent)


def test_too_much_text_for_memory(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text_file(tmp_path / "book.txt", " ".join(map(str, range(800))))
    monkeypatch.setattr(preparation, "MAX_TEXT_BYTES", 100)
    command = "zerojax data prepare book.txt tokens/ --tokenizer bpe:32768"
    refused(lambda: source("book.txt"), "book.txt GiB", [command, "data='tokens/'"])
    _, *words = command.split()
    assert main(words) == 0
    source("tokens/")
    # And where token files are already, or there is no folder.
    capsys.readouterr()
    to = lambda folder: [*words[:3], folder, *words[4:]]  # noqa: E731
    complaint(capsys, words, "tokens", "another remove")
    assert main(to("another")) == 0
    shutil.rmtree("tokens")
    assert main(words) == 0
    capsys.readouterr()
    (tmp_path / "file").touch()
    complaint(capsys, to("file/tokens"), "file/tokens 3089", "another")


# --- token files ----------------------------------------------------------------------------------


def test_damaged_token_files(tmp_path):
    file = token_file(tmp_path / "ids.bin")
    whole = shutil.copy(file, tmp_path / "copy")
    file.with_suffix(".json").write_text(json.dumps({"dtype": "uint16", "count": 200}))
    os.truncate(file, 300)
    refused(lambda: source(file), [file, 300, 200, 400], "prepare")
    shutil.copy(whole, file)
    source(file)
    text = text_file(tmp_path / "book.txt")
    made = tmp_path / "tokens"
    preparation.prepare(text, made, tokenizer="bytes")
    train = made / "train.bin"
    train.write_bytes(train.read_bytes()[::-1])
    refused(lambda: verify_tokens(train), [train, "sha256"], "prepare")
    shutil.rmtree(made)
    preparation.prepare(text, made, tokenizer="bytes")
    verify_tokens(train)


@pytest.mark.parametrize(
    ("content", "value", "remedy"),
    [
        ("{", "JSON", ['{"dtype": "uint16"}']),
        ("[1]", "list", ['{"dtype": "uint16"}']),
        ('{"dtype": "x"}', "dtype='x'", "uint8 uint16 uint32"),
        ('{"dtype": "uint16", "count": "x"}', "count='x'", "number"),
        ('{"dtype": "uint16", "vocab_size": "x"}', "vocab_size='x'", f"number 1 {2**31 - 1}"),
        ('{"dtype": "uint16", "tokenizer": "x"}', "tokenizer='x'", "object"),
        (None, "ids.bin width", ['{"dtype": "uint16"}', "uint8", "uint32", "zerojax data prepare"]),
    ],
)
def test_a_sidecar_that_is_none(content, value, remedy, tmp_path):
    file = token_file(tmp_path / "ids.bin")
    sidecar = file.with_suffix(".json")
    if content is None:
        sidecar.unlink()
    else:
        sidecar.write_text(content)
    refused(lambda: source(file), ["ids.json", *value.split()], remedy)
    sidecar.write_text('{"dtype": "uint16"}')
    source(file)
    for kind in ("uint8", "uint16", "uint32"):
        source(token_file(file, dtype=kind, count=200, vocab_size=50, tokenizer={"kind": "bytes"}))
    assert main(["data", "prepare", str(text_file(tmp_path / "a.txt")), str(tmp_path / "new")]) == 0
    source(tmp_path / "new")


def test_ids_that_the_model_does_not_have(tmp_path):
    ids = np.arange(200) % 60
    sized = lambda data: lambda size: source(data, vocab_size=size)  # noqa: E731
    Refusal(50, '50 "[0, 50)"', "vocab_size 60 tokenizer", [60]).check(sized(ids))
    # No vocabulary has ids below 0.
    message = refused(lambda: source(ids - 1, vocab_size=50), '-1 0 "[0, 50)"', "tokenizer")
    assert "vocab_size" not in message
    source(ids % 50, vocab_size=50)
    file = token_file(tmp_path / "ids.bin", vocab_size=60)
    Refusal(50, [file, 60, 50], "vocab_size 60 tokenizer", [60]).check(sized(file))
    source(token_file(file, vocab_size=50), vocab_size=50)
    floats = np.arange(200.0)
    Refusal(floats, "float64", "integers", [floats.astype(int)], TypeError).check(source)


def test_files_of_several_tokenizers_or_only_for_validation(tmp_path):
    for size in (50, 60):
        token_file(tmp_path / "all" / f"{size}.bin", vocab_size=size)
    names = [tmp_path / "all" / name for name in ("60.bin", "50.bin")]
    refused(lambda: source(tmp_path / "all"), [*names, 50, 60], "separate")
    (tmp_path / "60").mkdir()
    for name in ("60.bin", "60.json"):
        (tmp_path / "all" / name).rename(tmp_path / "60" / name)
    source(tmp_path / "all")
    source(tmp_path / "60")
    files = [token_file(tmp_path / "v" / f"{name}-val.bin") for name in "ab"]
    good = [*files, token_file(tmp_path / "v" / "train.bin")]
    Refusal(files, [*files, "validation"], "training", [good]).check(source)


def test_a_source_of_other_sizes():
    ids = np.arange(100)
    good = [{"seq_len": 40}, {"seq_len": 80, "global_batch_size": 1}]
    bad, remedy = {"seq_len": 80}, "seq_len global_batch_size text"
    Refusal(bad, "100 seq_len=80 global_batch_size=2 161", remedy, good).check(with_options(ids))
    source(np.arange(200), **bad)
    made = source(ids)
    refused(lambda: source(made, seq_len=16), "seq_len=8 16", "16")
    source(source(ids, seq_len=16), seq_len=16)
    for name in ("seq_len", "global_batch_size", "vocab_size"):
        row = Refusal({name: 0}, f"{name}=0", "1", [{name: 1}])
        row.check(with_options(ids % 1))
    bad, good = ({"validation_fraction": value} for value in (1, 0.0))
    Refusal(bad, "validation_fraction=1", "0", [good]).check(with_options(ids))
    batch = lambda rows: made.batch(0, 0, rows)  # noqa: E731
    Refusal(9, '"[0, 9)"', '"[0, 2)"', [2]).check(batch)
    remedy = "None path numpy TokenSource"
    Refusal({1, 2}, "data set", remedy, [None, ids, made], TypeError).check(source)


# --- tokenizers -----------------------------------------------------------------------------------


def test_what_is_no_tokenizer(tmp_path):
    with_text = lambda spec: as_tokenizer(spec, [TEXT])  # noqa: E731
    good = ["bytes", "bpe:4096"]
    Refusal(3, "tokenizer=3 int", "'bytes' 'bpe:4096' path", good, TypeError).check(with_text)
    Refusal("bpe", "tokenizer='bpe'", "bpe:4096", ["bpe:4096"]).check(with_text)
    Refusal("bpe:3", "3 257", "bpe:4096", ["bpe:4096"]).check(with_text)
    BpeTokenizer.train([TEXT], vocab_size=257)
    Refusal("byte", "tokenizer='byte'", "'bytes'", ["bytes"], FileNotFoundError).check(with_text)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(with_text("bpe:4096").to_dict()))
    row = Refusal("bpe:4096", "bpe:4096 text", '"zerojax data prepare" file', [file])
    row.check(as_tokenizer)
    made = lambda kind: tokenizer_from_dict({"kind": kind})  # noqa: E731
    Refusal("x", "kind 'x'", "'bytes' 'bpe' 'hugging_face'", ["bytes"]).check(made)


def test_another_tokenizer_than_that_of_the_files(tmp_path):
    text, folder, again = text_file(tmp_path / "book.txt"), tmp_path / "tokens", tmp_path / "again"
    preparation.prepare(text, folder, tokenizer="bytes", validation_fraction=0)
    given = lambda: source(folder, tokenizer="bpe:300")  # noqa: E731
    refused(given, ["bpe:300", folder / "train.bin", "ByteTokenizer()"], "prepare")
    source(folder)
    preparation.prepare(text, again, tokenizer="bpe:300", validation_fraction=0)
    source(again, tokenizer="bpe:300")


def test_a_source_is_printed_without_its_vocabulary(tmp_path):
    text = text_file(tmp_path / "book.txt")
    made = source(text, tokenizer="bpe:300")
    assert "merges" in str(made.tokenizer)
    assert "vocab_size=" in repr(made)
    assert "merges" not in repr(made)


def test_a_part_that_is_too_short_is_named(tmp_path):
    text, folder = text_file(tmp_path / "book.txt"), tmp_path / "tokens"
    large = {"global_batch_size": 9}
    given = lambda: source(text, validation_fraction=0.95, **large)  # noqa: E731
    refused(given, [text, "43 tokens left by validation_fraction=0.95"], "seq_len")
    preparation.prepare(text, folder, tokenizer="bytes", validation_fraction=0.05)
    found = [folder / "validation.bin", "43 tokens for validation"]
    refused(lambda: source(folder, **large), found, "--validation-fraction")
    source(text, validation_fraction=0.5, **large)


def test_without_the_package_of_tokenizers(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    given = lambda: as_tokenizer("bpe:300", [TEXT])  # noqa: E731
    refused(given, "tokenizers", "\"pip install tokenizers\" tokenizer='bytes'", error=ImportError)
    as_tokenizer("bytes")


def test_tokens_and_texts_of_a_tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1}, "[UNK]"))
    known = ["[UNK]", "[CLS]", "[SEP]"]
    backend.add_special_tokens(known)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = HuggingFaceTokenizer(json.loads(backend.to_str()))
    Refusal("[MASK]", "[MASK]", known, known).check(tokenizer.id_of)
    Refusal([], "texts empty", "one", [["a"]]).check(tokenizer.encode_texts)
    limited = lambda length: tokenizer.encode_texts(["a"], max_length=length)  # noqa: E731
    Refusal(1, "max_length=1 2", "larger", [3]).check(limited)
    checked = lambda ids: checked_ids(ids, 4)  # noqa: E731
    Refusal([1.0], "float64", "integers", [[1]], TypeError).check(checked)


def test_masks():
    plain = source(np.arange(100) % 5, vocab_size=5)
    make = lambda options: as_masked_source(plain, **{"mask_token": 5, **options})  # noqa: E731
    usual = {"mask_fraction": 0.15}
    Refusal({"mask_fraction": 0.0}, "mask_fraction=0.0", "0.15", [usual]).check(make)
    Refusal({"mask_token": -1}, "-1", "0", [{"mask_token": 0}]).check(make)
    bad, good = {"special_tokens": range(5)}, {"special_tokens": [0, 1]}
    Refusal(bad, "5 special", "tokenizer", [good]).check(make)


def test_places_of_a_shuffle():
    sized = lambda given: permute([given[0]], given[1], (1,))  # noqa: E731
    Refusal((7, 0), "size=0", "1", [(0, 1)]).check(sized)
    Refusal((7, 5), "7 0 4", "modulo", [(7 % 5, 5)]).check(sized)


# --- feeds ----------------------------------------------------------------------------------------

BATCH = {"x": np.zeros((2, 3))}


def test_what_are_no_batches():
    ids = np.arange(100)
    first = lambda given: next(as_feed(given))  # noqa: E731
    kinds = [source(ids), iter([BATCH]), lambda step: BATCH]
    Refusal(3, "batches int", "TokenSource iterable function", kinds, TypeError).check(first)
    wrong_type(lambda: as_feed(BATCH), "batches x", "[batch]")
    feed = as_feed([BATCH])
    next(feed), next(feed)
    wrong_type(lambda: as_feed(feed, start=1), "Feed start rows", "Feed.restore(state)")
    assert as_feed(feed) is feed
    feed.restore(feed.state())
    next(feed)
    refused(lambda: feed.restore({}), "{} position", "Feed.state()")
    feed.restore(Feed.state(feed))
    Refusal("book.txt", "book.txt", "as_source(...)", [source(ids)], TypeError).check(first)
    Refusal([], "batches empty 0", "one", [[BATCH]]).check(first)
    started = lambda start: next(as_feed([BATCH], start=start))  # noqa: E731
    Refusal(-1, "start=-1", "0", [0]).check(started)
    ranged = lambda rows: next(as_feed(source(ids), rows=rows))  # noqa: E731
    Refusal((0, 3), ["rows=(0, 3)"], "2", [(0, 2)]).check(ranged)

    class Empty:
        def __iter__(self):
            return iter(())

    refused(lambda: first(Empty()), "Empty 0", "one")


def test_going_back_and_forth(caplog):
    numbers = [{"x": np.array([n])} for n in range(4)]

    def second(given: Any) -> None:
        feed = as_feed(given)
        feed.restore({"kind": feed.kind, "position": 1})
        assert next(feed)["x"] == 1

    feed = as_feed(iter(numbers))
    next(feed), next(feed)
    remedy = "iterator list function"
    refused(lambda: feed.restore({"kind": "iterable", "position": 1}), "iterator 2 1", remedy)
    for good in (iter(numbers), numbers, lambda step: numbers[step]):
        second(good)

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
        check_words(text, "function get_state set_state")
        caplog.clear()
        assert next(as_feed(lambda step: numbers[step], start=2))["x"] == 2
        first = as_feed(Placed())
        next(first), next(first)
        placed = as_feed(Placed())
        placed.restore(first.state())
        assert next(placed)["x"] == 2
        assert not caplog.messages


@pytest.mark.parametrize(
    ("other", "value"), [(np.arange(1, 101), "tokens"), (None, "'tokens' 'function'")]
)
def test_other_data_than_those_of_the_saved_run(other, value):
    feed = as_feed(source(np.arange(100)))
    next(feed)
    state = feed.state()
    batches = [BATCH] if other is None else source(other)
    message = refused(lambda: as_feed(batches).restore(state), f"data saved {value}", "batches=")
    names = {"zerojax": zerojax, "batches": batches}
    another = eval(code_in(message, "zerojax.data.as_feed("), names)
    another.restore(state)
    assert next(another)
    same = as_feed(source(np.arange(100)))
    same.restore(state)
    np.testing.assert_array_equal(next(same)["tokens"], next(feed)["tokens"])


def test_reading_ahead():
    def ahead(given: tuple[Any, int]) -> None:
        with prefetch(given[0], put=lambda x: x, depth=given[1]) as feed:
            next(feed)

    feed = as_feed([BATCH])
    Refusal((feed, 0), "depth=0 1", "2", [(feed, 2)]).check(ahead)
    good = as_feed([BATCH])
    Refusal(([BATCH], 2), "feed list", "as_feed(batches)", [(good, 2)], TypeError).check(ahead)


# --- placing --------------------------------------------------------------------------------------


def test_batches_that_are_not_placed():
    plan, tokens = plan_of(), batch_of()["tokens"]
    vocabulary = ROWS * SEQ_LEN

    def place(changes: dict[str, Any], size: int = vocabulary) -> None:
        shard_batch(plan, {**batch_of(), **changes}, vocab_size=size)

    targets = batch_of()["targets"]
    fine = {"targets": np.where(targets < vocabulary, targets, 0)}
    value = ["batch['targets']", 32, "(7, 3)", "[0, 32)"]
    Refusal({}, value, "vocab_size 0 weight", [fine]).check(place)
    place({}, vocabulary + 1)
    refused(lambda: place(fine | {"more": tokens}), "more targets tokens", "example_batch")
    name = "batch['tokens']"
    short, filled = tokens[:3], np.concatenate([tokens[:3], np.zeros_like(tokens[3:])])
    floats = tokens.astype(np.float32)
    rows = [
        Refusal(short, [name, "(3, 4)", "(8, 4)"], "8 weight", [filled]),
        Refusal(tokens[:, :2], [name, "(8, 2)", "(8, 4)"], "example_batch plan"),
        Refusal(
            floats,
            [name, "float32", "int32"],
            ".astype('int32') example_batch",
            [floats.astype("int32")],
            TypeError,
        ),
        Refusal("abc", [name, "str", "'abc'"], "array numbers", error=TypeError),
    ]
    for row in rows:
        row.check(lambda tokens: place(fine | {"tokens": tokens}))
    shard_batch(plan_of(tokens="float32"), {"tokens": floats})


def test_values_that_are_not_finite():
    plan = plan_of(x="float32")
    values = np.zeros((ROWS, SEQ_LEN), np.float32)
    values[1, 2] = np.nan
    value = ["batch['x']", 1, 32, "nan", "(1, 2)"]
    refused(lambda: shard_batch(plan, {"x": values}), value, "check_values=False")
    shard_batch(plan, {"x": values}, check_values=False)
    shard_batch(plan, {"x": np.nan_to_num(values)})


def test_rows_that_a_parameter_does_not_have():
    limit = IndexLimit(low=0, high=4, parameter="embed", window=(slice(None),))
    values = np.arange(6)
    check = lambda given: check_rows_exist("x", *given)  # noqa: E731
    good = [(np.clip(values, 0, 3), limit), (values, dataclasses.replace(limit, high=6))]
    value = ["batch['x']", 4, "(4,)", "embed"]
    Refusal((values, limit), value, ["[0, 4)", "rows"], good).check(check)


def test_a_plan_without_devices():
    kinds = (jax.sharding.AxisType.Auto,) * 2
    abstract = jax.sharding.AbstractMesh((4, 2), ("data", "model"), axis_types=kinds)
    refused(lambda: local_rows(plan_of(abstract)), "data 4 model 2 devices", "make_mesh(...)")
    assert local_rows(plan_of()) == (0, ROWS)
