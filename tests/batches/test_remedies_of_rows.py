"""Refusals of rows: datasets, mixtures, packed texts, folders of texts, ramps and feeds."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zerojax
from tests.batches.test_data_placing import plan_of
from tests.batches.test_mixture import SEQ_LEN, tokens_from
from tests.support.refusals import Refusal, refused, table
from tests.support.text_sets import change_sidecar, some_texts, text_set, write_texts
from zerojax.config import BatchRampConfig
from zerojax.config.batch_ramp import BatchRamp
from zerojax.data import (
    Boundary,
    MixtureSource,
    PackedSource,
    TokenSource,
    as_feed,
    as_masked_source,
    as_source,
    preparation,
    shard_batch,
)
from zerojax.data.batch_sharding import _check_same_ids
from zerojax.data.best_fit import best_fit_decreasing
from zerojax.data.dataset_source import DatasetSource, as_dataset_source
from zerojax.data.feed import REGROUPED
from zerojax.data.packing import boundary_of
from zerojax.data.record_files import read_records, saved_files
from zerojax.data.regrouped_feed import RegroupedFeed
from zerojax.data.subwords import HuggingFaceTokenizer
from zerojax.data.text_set import TextSet, check_targets, open_text_set, verify_text_set
from zerojax.data.tokenizer import as_tokenizer, load_tokenizer
from zerojax.data.tokens import check_unused
from zerojax.features.curriculum.length_ladder import LengthLadder

X = {"x": np.ones((2, 3))}


# --- datasets of rows -----------------------------------------------------------------------------


class Rows:
    """A dataset of rows."""

    def __init__(self, *rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Any:
        return self.rows[number]


class Columns(Rows):
    """One that gives several rows at once, as those of Hugging Face do."""

    def __getitems__(self, numbers: Any) -> Any:
        return [self.rows[number] for number in numbers]


def dataset(*rows: Any, **options: Any) -> Any:
    return DatasetSource(dataset=Rows(*rows), global_batch_size=2, **options).rows(0, 2)


def of_rows(data: Any) -> Any:
    return DatasetSource(dataset=data, global_batch_size=1)


def of_size(size: int | None) -> Any:
    return as_dataset_source(Columns(*[{"x": 1}] * 4), global_batch_size=size, seed=0)


SIZES = {"seq_len": SEQ_LEN, "global_batch_size": 1}


# --- mixtures -------------------------------------------------------------------------------------


def mixed(*sources: Any, **options: Any) -> MixtureSource:
    sources = sources or (tokens_from(0, 9), tokens_from(0, 9))
    names, weights = tuple("ab"[: len(sources)]), (1.0,) * len(sources)
    given = {"weights": weights, "names": names, "global_batch_size": 2, **options}
    return MixtureSource(sources=sources, **given)


def made_by(*kinds: str) -> MixtureSource:
    tokens = tokens_from(0, 9).tokens
    made = [dataclasses.replace(tokens, tokenizer={"kind": kind}) for kind in kinds]
    return mixed(*(TokenSource(tokens=x, **SIZES) for x in made))


def masked(pack: bool = False) -> Any:
    boundary = Boundary(end_token=0) if pack else None
    return as_masked_source(tokens_from(0, 9, vocab_size=50, boundary=boundary), mask_token=3)


def bounded(tokenizer: Any) -> Boundary:
    return boundary_of(tokenizer, "ids.bin")


# --- feeds ----------------------------------------------------------------------------------------


def from_generator(number: int = 0) -> Any:
    yield X


def without_number() -> Any:
    return X


def by_number(number: int) -> Any:
    return X


def first(batches: Any) -> Any:
    return next(as_feed(batches))


def ramped(*batches: Any, state: Any = None) -> RegroupedFeed:
    ramp = BatchRamp(config=BatchRampConfig(start=2, increment=2, ramp_rows=8), final=4)
    feed = RegroupedFeed(as_feed(iter(batches)), ramp)
    if state is not None:
        feed.restore(state)
    next(feed)
    return feed


def state_after(steps: int) -> Any:
    feed = ramped(*[{"x": np.ones((4, 1))}] * 4)
    for _ in range(steps - 1):
        next(feed)
    return feed.state()


def shortened(batch: Any) -> Any:
    config = zerojax.CurriculumConfig(type="seqlen", total_steps=9, min_length=8, max_length=16)
    ladder = LengthLadder(config=config, seq_len=16, keys=("tokens",), adds_weights=False)
    return ladder.cut(batch, 1)


def rows_of(tokens: int) -> Any:
    return np.ones((2, tokens), int)


CALLS = table(
    """
of_rows(iter([])) | list_iterator "len(dataset)" | iterable | of_rows(Rows(X)) ; first(iter([X]))
of_rows(Rows()) | no | one | of_rows(Rows(X))
of_size(None) | Columns 4 | global_batch_size= | of_size(2)
dataset({"x": "a"}, {"x": "b"}) | 'x' | remove numbers | dataset({"x": 1}, {"x": 2})
dataset({"x": 1}, {"y": 1}) | 'x' 'y' | keys collate | dataset({"x": 1}, {"x": 1})
mixed(weights=()) | weights 0 2 | one | mixed(weights=(1, 1))
MixtureSource(sources=(), weights=(), names=(), global_batch_size=2) | 0 | one
  | mixed(tokens_from(0, 9))
mixed(names=("a", "a")) | 'a' | unique one | mixed(names=("a", "b")) ; mixed(tokens_from(0, 9))
mixed(tokens_from(0, 9), tokens_from(0, 9, seq_len=2)) | b seq_len=2 4 | same
  | mixed(tokens_from(0, 9, seq_len=2), tokens_from(0, 9, seq_len=2))
mixed(at_end=("stop", "stop")) | stops | "at_end: repeat" | mixed(at_end=("stop", "repeat"))
mixed(at_end=("repeat", "end")) | 'end' | repeat stop
  | mixed(at_end=("repeat", "repeat")) ; mixed(at_end=("repeat", "stop"))
mixed(weights=(1, 0)) | weight=0 b | change remove | mixed() ; mixed(tokens_from(0, 9))
mixed(weights=(1, 1e-4)) | weight=0.0001 b 1024 | 0.000978 remove
  | mixed(weights=(1, 0.00098)) ; mixed(tokens_from(0, 9))
made_by("bytes", "bpe") | a b | one | made_by("bytes", "bytes")
mixed(tokens_from(0, 9), masked()) | b | same | mixed(masked(), masked())
masked(pack=True) | pack | without | masked()
bounded(None) | ids.bin | leave "zerojax data prepare" | bounded(as_tokenizer("bpe:300", ["a a"]))
bounded(as_tokenizer("bytes")) | none | bpe:4096 leave | bounded(as_tokenizer("bpe:4096", ["a a"]))
Boundary(end_token=1, start_token=2) | end_token=1 start_token=2 | one
  | Boundary(end_token=1) ; Boundary(start_token=2)
best_fit_decreasing(np.array([2, 9]), 8) | 2 9 8 | 1 8 | best_fit_decreasing(np.array([2, $]), 8)
first(from_generator) | from_generator | list function
  | first(list(from_generator())) ; first(by_number)
first(without_number) | without_number | number list | first(by_number) ; first([X])
first([np.ones((2, 3)), np.ones((2, 1))]) | list "[2, 3]" "[2, 1]" | [batch] iterable
  | first([(np.ones((2, 3)), np.ones((2, 1)))]) ; first(iter([X]))
ramped({"x": np.ones((0, 1))}) | 0 | one end | ramped({"x": np.ones((4, 1))})
ramped({"x": np.ones((4, 1))}, state=state_after(3)) | 3 | saved
  | ramped(*[{"x": np.ones((4, 1))}] * 4, state=state_after(3))
shortened({"targets": rows_of(16)}) | 'tokens' | names | shortened({"tokens": rows_of(16)})
shortened({"tokens": rows_of(6)}) | "(2, 6)" 16 | length | shortened({"tokens": rows_of(16)})
""",
    (ValueError, TypeError),
)
IMPORTED = (as_tokenizer, best_fit_decreasing, tokens_from)
NAMES = {one.__name__: one for one in IMPORTED}


@pytest.mark.parametrize("row", CALLS)
def test_calls(row):
    CALLS[row].check(lambda call: eval(call, globals() | NAMES))


# --- folders of texts -----------------------------------------------------------------------------

TEXTS = some_texts(12)
"""Texts of up to 14 tokens below 64."""


def packed(texts: TextSet, **options: Any) -> PackedSource:
    sizes = {"seq_len": 16, "global_batch_size": 2, **options}
    return PackedSource(texts=texts, **sizes)


def test_packed_texts(tmp_path):
    texts = text_set(tmp_path / "texts", TEXTS)
    longest = int(texts.lengths.max())
    make = lambda options: packed(texts, **options)  # noqa: E731
    few = {"global_batch_size": 99}
    good = [{}, {"seq_len": longest, "global_batch_size": 1}]
    Refusal(few, "12 99", "seq_len global_batch_size texts", good).check(make)
    ways = [{"seq_len": longest}, *({"seq_len": 8, "long_texts": x} for x in ("split", "drop"))]
    value = [f"seq_len={8}", longest]
    Refusal({"seq_len": 8}, value, [longest, "split", "drop", "long_texts="], ways).check(make)
    none = {"seq_len": 1, "long_texts": "drop"}
    Refusal(none, "12 seq_len=1", "split", [{"seq_len": 1, "long_texts": "split"}]).check(make)
    ids = int(texts.tokens.max())
    read = lambda size: packed(texts, vocab_size=size).rows(0, 4)  # noqa: E731
    Refusal(8, "[0, 8)", "vocab_size prepare", [ids + 1]).check(read)


SIDECARS = {
    "a dtype": ({"dtype": "x"}, "dtype='x' uint16"),
    "no texts": ({"texts": 0}, "texts=0 1"),
    "another version": ({"version": 99}, "99"),
    "another format": ({"format": "x"}, "sidecar"),
}


@pytest.mark.parametrize("name", SIDECARS)
def test_a_changed_description_of_texts(name, tmp_path):
    folder = write_texts(tmp_path / "texts", TEXTS)
    changes, value = SIDECARS[name]
    change_sidecar(folder, **changes)
    refused(lambda: open_text_set(folder), ["texts.json", *value.split()], '"zerojax data prepare"')
    write_texts(folder, TEXTS)
    open_text_set(folder)


def spoilt(folder: Path, name: str) -> None:
    """Changes one byte of a file."""
    content = bytearray((folder / name).read_bytes())
    content[0] ^= 1
    (folder / name).write_bytes(content)


def test_damaged_folders_of_texts(tmp_path):
    whole, folder = write_texts(tmp_path / "whole", TEXTS), tmp_path / "texts"
    copy = lambda: shutil.copytree(whole, folder, dirs_exist_ok=True)  # noqa: E731
    copy()
    names = [file.name for file in folder.iterdir() if file.suffix != ".json"]
    for name in names:
        spoilt(folder, name)
        refused(lambda: verify_text_set(folder), [folder / name, "sha256"], "copy prepare")
        os.truncate(folder / name, 3)
        refused(lambda: open_text_set(folder), [folder / name, 3], "copy prepare")
        copy()
        verify_text_set(folder)
        open_text_set(folder)
    (folder / "texts.json").write_text("{")
    refused(lambda: open_text_set(folder), "texts.json", '"zerojax data prepare"')
    copy()
    texts = open_text_set(folder)[0]
    turned = lambda offsets: dataclasses.replace(texts, offsets=offsets).lengths  # noqa: E731
    offsets = np.asarray(texts.offsets)
    Refusal(offsets[::-1], "offsets", "copy prepare", [offsets]).check(turned)


def test_texts_without_answers(tmp_path):
    none = [(ids, np.zeros(len(ids), bool)) for ids, _ in TEXTS]
    train = text_set(tmp_path / "train", TEXTS)
    unasked = text_set(tmp_path / "none", none)
    check = lambda given: check_targets(*given)  # noqa: E731
    Refusal((unasked, None), "none", "--template", [(train, None)]).check(check)
    good = [(train, train), (train, None)]
    Refusal((train, unasked), "none 12", "validation_fraction 0", good).check(check)


# --- files of records, tokens and tokenizers ------------------------------------------------------


def saved(folder: Path, state: Any = None, splits: Any = None) -> Path:
    """A folder as `datasets` saves it; its data file has no rows that are read here."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "data.arrow").touch()
    state = {"_data_files": [{"filename": "data.arrow"}]} if state is None else state
    (folder / "state.json").write_text(state if isinstance(state, str) else json.dumps(state))
    if splits is not None:
        (folder / "dataset_dict.json").write_text(json.dumps({"splits": splits}))
    return folder


def test_folders_of_datasets(tmp_path):
    good = saved(tmp_path / "good")
    check = lambda folder: saved_files(folder)  # noqa: E731
    indexed = {"_data_files": [{"filename": "data.arrow"}], "_indices_data_files": [1]}
    absent = {"_data_files": [{"filename": "other.arrow"}]}
    for name, state, value, remedy in (
        ("indexed", indexed, "index", "dataset.flatten_indices()"),
        ("empty", {"_data_files": []}, "state.json", "save"),
        ("absent", absent, "other.arrow state.json", "copy"),
        ("broken", "{", "state.json", "save"),
        ("list", "[]", "state.json", "save"),
    ):
        Refusal(saved(tmp_path / name, state), value, remedy, [good]).check(check)
    split = saved(tmp_path / "splits", splits=["test"])
    Refusal(split, "test 'train'", "one", [saved(split / "test")]).check(check)


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
def test_a_list_in_place_of_lines_by_jq(tmp_path, monkeypatch):
    a_list(tmp_path, monkeypatch, lambda command: os.system(command))


def test_a_list_in_place_of_lines(tmp_path, monkeypatch):
    def write(command: str) -> None:
        assert command == "jq -c '.[]' rows.jsonl > rows.lines.jsonl"
        Path("rows.lines.jsonl").write_text('{"text": "a"}\n')

    a_list(tmp_path, monkeypatch, write)


def a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('[{"text": "a"}]')
    message = refused(lambda: [*read_records(Path("rows.jsonl"))], "rows.jsonl list", "jq")
    run(message[message.index("jq -c") :])
    assert [*read_records(Path("rows.lines.jsonl"))] == [(1, {"text": "a"})]


def test_damaged_arrays_of_tokens(tmp_path):
    file = tmp_path / "ids.npy"
    read = lambda: as_source(file, seq_len=8, global_batch_size=2, validation_fraction=0)  # noqa: E731
    file.write_bytes(b"not an array of numpy")
    refused(read, [file], "numpy.save")
    np.save(file, np.arange(200))
    source = read()[0]
    os.truncate(file, 900)
    refused(lambda: source.batch(0), [file, 900], "copy again")
    refused(read, [file, 900], "copy save")
    np.save(file, np.arange(200))
    read()[0].batch(0)


def test_files_that_would_be_replaced(tmp_path):
    (tmp_path / "train.json").touch()
    check = lambda folder: check_unused(folder, ["train.json"])  # noqa: E731
    value = [tmp_path / "train.json"]
    Refusal(tmp_path, value, "another remove", [tmp_path / "another"]).check(check)
    (tmp_path / "train.json").unlink()
    check(tmp_path)


def test_folders_of_tokenizers(tmp_path):
    (tmp_path / "vocab.txt").touch()
    load = lambda: load_tokenizer(tmp_path)  # noqa: E731
    refused(load, [tmp_path, "tokenizer.json"], "save_pretrained", error=FileNotFoundError)
    written = as_tokenizer("bpe:300", ["a b"]).to_dict()
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    load()


def test_documents_that_a_tokenizer_gets_whole(monkeypatch):
    monkeypatch.setattr(preparation, "MAX_WHOLE_CHARACTERS", 8)

    class Whole:
        def encode(self, text: str) -> list[int]:
            return [ord(letter) for letter in text]

    class Pieces(Whole):
        def encode_pieces(self, pieces: Any) -> Any:
            return map(self.encode, pieces)

    encode = lambda given: [*preparation.encode_document(given[1], given[0])]  # noqa: E731
    long = ["abcdefgh", "i"]
    good = [(Pieces(), long), *((Whole(), [part]) for part in long)]
    Refusal((Whole(), long), "9 8", "encode_pieces several", good).check(encode)


# --- placing --------------------------------------------------------------------------------------


def test_numbers_that_a_dtype_cannot_hold():
    plan = plan_of()
    tokens = np.zeros((8, 4), np.int64)
    place = lambda tokens: shard_batch(plan, {"tokens": tokens, "targets": tokens})  # noqa: E731
    Refusal(tokens + 2**40, [2**40, "int32", 2**31 - 1], "check", [tokens]).check(place)


def test_numbers_that_only_integers_hold():
    """Whole numbers of floats that the dtype of the plan rounds."""
    kept = np.array([[1.0, 2.0]], np.float32)
    check = lambda given: _check_same_ids("ids", given, given.astype(np.float16))  # noqa: E731
    value = ["batch['ids']", "2049", "2048", "float16"]
    Refusal(kept + 2048, value, ".astype('int64')", [kept]).check(check)
    plan = plan_of(tokens="int32", targets="int32")
    tokens = np.full((8, 4), 2049.0).astype("int64")
    shard_batch(plan, {"tokens": tokens, "targets": tokens})


def test_names_of_ends_of_texts():
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1}, "[UNK]"))
    backend.add_special_tokens(["<|endoftext|>"])
    content = json.loads(backend.to_str())
    make = lambda end: HuggingFaceTokenizer(content, end=end)  # noqa: E731
    Refusal(3, "3", "<|endoftext|> leave", ["<|endoftext|>", None]).check(make)
    build = lambda content: HuggingFaceTokenizer(content)  # noqa: E731
    remedy = '"pip install --upgrade tokenizers"'
    Refusal({"model": {"type": "New"}}, "tokenizer.json", remedy, [content]).check(build)


def test_tables_without_the_package_that_reads_them(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": ["a"]}), file)
    read = lambda: [*read_records(file)]  # noqa: E731
    with monkeypatch.context() as absent:
        absent.setitem(sys.modules, "pyarrow", None)
        absent.setitem(sys.modules, "pyarrow.parquet", None)
        refused(read, ".parquet", "pyarrow .jsonl", error=ImportError)
    assert len(read()) == 1
    whole = file.read_bytes()
    file.write_bytes(whole[:20])
    refused(read, [file], "copy again")
    file.write_bytes(whole)
    assert len(read()) == 1


def test_a_run_that_had_a_ramp():
    state = state_after(2)
    assert REGROUPED in state
    plain = lambda **options: as_feed([X], **options)  # noqa: E731
    message = refused(lambda: plain().restore(state), "2", "batch_ramp batches=")
    ramped({"x": np.ones((4, 1))}, {"x": np.ones((4, 1))}, state=state)
    plain(allow_other_data="allow_other_data=True" in message).restore(state)
