"""Token files: written by streaming, read by windows, refused when they are not what they say."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from zerojax.cli import main
from zerojax.data import Tokens, as_source, open_tokens, read_text, verify_tokens
from zerojax.data import preparation as writing
from zerojax.data.preparation import prepare
from zerojax.data.tokens import TokenPart, gather_windows, smallest_dtype


def write_bin(path: Path, ids: np.ndarray, **sidecar) -> Path:
    ids.tofile(path)
    path.with_suffix(".json").write_text(json.dumps({"dtype": ids.dtype.name, **sidecar}))
    return path


def two_parts() -> Tokens:
    first, second = np.arange(11, dtype=np.uint16), np.arange(100, 107, dtype=np.uint16)
    return Tokens(parts=(TokenPart(ids=first, name="a"), TokenPart(ids=second, name="b")))


def test_windows_are_those_of_plain_slicing():
    ids = np.random.default_rng(0).integers(0, 60_000, 5000).astype(np.uint16)
    starts = np.array([0, 4900, 17, 17, 3000])
    windows = gather_windows(ids, starts, 100)
    assert windows.dtype == np.uint16
    assert np.array_equal(windows, np.stack([ids[s : s + 100] for s in starts]))


def test_windows_do_not_cross_from_file_to_file():
    assert two_parts().windows_per_part(3).tolist() == [3, 2]
    assert two_parts().windows_per_part(100).tolist() == [0, 0]


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.2, 0.5, 0.9])
def test_the_split_is_a_cut_without_loss_or_overlap(fraction: float):
    tokens = two_parts()
    head, tail = tokens.split(fraction)
    pieces = [part.ids for half in (head, tail) if half for part in half.parts]
    assert np.array_equal(np.concatenate(pieces), np.concatenate([p.ids for p in tokens.parts]))
    assert (tail.count if tail else 0) == round(18 * fraction)
    for part in tail.parts if tail else ():
        whole = {"a": tokens.parts[0].ids, "b": tokens.parts[1].ids}[part.name]
        assert whole[part.offset] == part.ids[0]


def test_prepare_and_open_give_the_same_tokens_as_encoding_in_memory(tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text(read_text()[:50_000])
    made = prepare(text, tmp_path / "out", validation_fraction=0.1)
    assert (made.num_train_tokens, made.num_validation_tokens) == (45_000, 5_000)
    assert (made.num_documents, made.vocab_size, made.num_text_bytes) == (1, 256, 50_000)
    assert sorted(os.listdir(tmp_path / "out")) == [
        "tokenizer.json", "train.bin", "train.json", "validation.bin", "validation.json",
    ]  # fmt: skip
    sizes = {"seq_len": 64, "global_batch_size": 8}
    files = as_source(tmp_path / "out", **sizes, validation_fraction=0.9)
    memory = as_source(text, **sizes, validation_fraction=0.1)
    for one, other in zip(files[:2], memory[:2], strict=True):
        assert one is not None
        assert other is not None
        assert one.tokens.count == other.tokens.count
        for step in (0, 5, 100):
            for name in ("tokens", "targets"):
                assert np.array_equal(one.batch(step)[name], other.batch(step)[name])
    assert repr(files[2]) == "ByteTokenizer()"
    verify_tokens(tmp_path / "out" / "train.bin")
    verify_tokens(tmp_path / "out" / "validation.bin")


def test_what_is_no_text_is_left_out_and_counted(tmp_path: Path, capsys):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, content in {
        "a.txt": b"one",
        "empty.txt": b"",
        "b.csv": b"x",
        "README": b"y",
        ".hidden": b"z",
    }.items():
        (folder / name).write_bytes(content)
    made = prepare(folder, tmp_path / "out")
    assert (made.num_documents, made.num_train_tokens) == (1, 3)
    assert sorted(made.left_out) == ["", ".csv"]
    assert main(["data", "prepare", str(folder), str(tmp_path / "again")]) == 0
    assert ": 2 (.csv, without an ending)" in capsys.readouterr().out


def test_opening_reads_nothing_of_the_file(tmp_path: Path):
    # A sparse file far larger than this machine's memory: touching all of it would not end.
    path = tmp_path / "huge.bin"
    with path.open("wb") as stream:
        stream.truncate(1 << 40)
    path.with_suffix(".json").write_text('{"dtype": "uint16", "vocab_size": 50257}')
    train, validation, _ = as_source(path, seq_len=1024, global_batch_size=4, vocab_size=50257)
    assert train.tokens.count + validation.tokens.count == 1 << 39
    assert train.batch(10**6)["tokens"].shape == (4, 1024)
    assert np.array_equal(train.batch(3)["tokens"], np.zeros((4, 1024), np.int32))


def test_shards_and_npy_files_are_read_in_the_order_of_their_names(tmp_path: Path):
    np.save(tmp_path / "b_val_0.npy", np.arange(3))
    np.save(tmp_path / "a1.npy", np.arange(5, dtype=np.int64))
    write_bin(tmp_path / "a0.bin", np.arange(7, dtype=np.uint32))
    train, validation = open_tokens([tmp_path])
    assert [len(part.ids) for part in train.parts] == [7, 5]
    assert [len(part.ids) for part in validation.parts] == [3]
    one, none = open_tokens([tmp_path / "b_val_0.npy"])
    assert one.count == 3
    assert none is None
    assert "and 1 more" in train.name


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda p: np.arange(4, dtype=np.uint16).tofile(p / "x.bin"), ValueError, "no sidecar"),
        (lambda p: write_bin(p / "x.bin", np.arange(4, dtype=np.uint16), count=5), ValueError,
         "has 8 bytes, but 5 tokens of uint16 .* make 10"),
        (lambda p: write_bin(p / "x.bin", np.arange(4)), ValueError, "dtype='int64'.*uint16"),
        (lambda p: write_bin(p / "x.bin", np.arange(4, dtype=np.uint16), count="4"), ValueError,
         "count='4'.*a number"),
        (lambda p: np.save(p / "x.npy", np.ones(4)), TypeError, "dtype float64"),
        (lambda p: np.save(p / "x.npy", np.ones((2, 2), int)), ValueError, "shape .2, 2."),
        (lambda p: (p / "x.npy").write_bytes(b"junk"), ValueError, "not a readable .npy"),
        (lambda p: np.save(p / "val.npy", np.ones(4, int)), ValueError, "only validation files"),
        (lambda p: (write_bin(p / "a.bin", np.ones(4, np.uint8), vocab_size=9),
                    write_bin(p / "b.bin", np.ones(4, np.uint8), vocab_size=8)), ValueError,
         r"b.bin' \(vocabulary 8\) was not made by the tokenizer of"),
    ],
)  # fmt: skip
def test_bad_token_files_are_refused(tmp_path: Path, make, error, words):
    make(tmp_path)
    with pytest.raises(error, match=words):
        as_source(tmp_path, seq_len=1, global_batch_size=1)


def test_a_changed_file_does_not_verify(tmp_path: Path):
    prepare(None, tmp_path / "out")
    file = tmp_path / "out" / "train.bin"
    verify_tokens(file)
    with file.open("r+b") as stream:
        stream.seek(1000)
        stream.write(b"\x00")
    with pytest.raises(ValueError, match="its sidecar states"):
        verify_tokens(file)


def test_prepare_refuses_what_it_would_spoil(tmp_path: Path):
    prepare(None, tmp_path / "out")
    with pytest.raises(ValueError, match="already holds token files"):
        prepare(None, tmp_path / "out")
    with pytest.raises(ValueError, match=r"validation_fraction=1.0: it must be"):
        prepare(None, tmp_path / "more", validation_fraction=1.0)
    assert not (tmp_path / "more").exists()
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="could not write token files into"):
        prepare(None, tmp_path / "file" / "out")


def test_a_full_disk_is_one_sentence_and_leaves_nothing_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writing, "_move_tail", full)
    with pytest.raises(OSError, match="the disk is full; about 1065256 bytes"):
        prepare(None, tmp_path / "out", validation_fraction=0.1)
    assert not list((tmp_path / "out").iterdir())


def test_the_narrowest_dtype_holds_the_vocabulary():
    sizes = {1: "uint8", 256: "uint8", 257: "uint16", 65_536: "uint16", 65_537: "uint32"}
    assert {size: smallest_dtype(size).name for size in sizes} == sizes
