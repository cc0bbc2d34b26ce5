"""Folders of texts: what was written is read, and damage is one sentence."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.support.text_sets import change_sidecar, some_texts, text_set, write_texts
from zerojax.data import text_set as text_sets
from zerojax.data.text_set import (
    TextSetWriter,
    is_text_set,
    open_text_set,
    read_text_sidecar,
    verify_text_set,
)


def read_back(texts) -> list:
    return [
        (
            texts.tokens[start:end].tolist(),
            texts.asked(np.arange(start, end)).tolist(),
        )
        for start, end in zip(texts.offsets[:-1].tolist(), texts.offsets[1:].tolist(), strict=True)
    ]


def as_lists(texts: list) -> list:
    return [(ids.tolist(), asked.tolist()) for ids, asked in texts]


@pytest.mark.parametrize(("vocab_size", "width"), [(64, 1), (300, 2), (70_000, 4)])
def test_texts_and_masks_are_read_as_they_were_written(tmp_path, vocab_size, width):
    texts = some_texts(50, vocab_size=vocab_size)
    made = text_set(tmp_path / "x", texts, vocab_size=vocab_size)
    assert read_back(made) == as_lists(texts)
    assert made.tokens.itemsize == width
    assert made.num_texts == 50
    assert made.num_tokens == sum(len(ids) for ids, _ in texts)
    assert made.lengths.tolist() == [len(ids) for ids, _ in texts]
    about = read_text_sidecar(tmp_path / "x")
    assert about["asked_tokens"] == sum(int(asked.sum()) for _, asked in texts)
    assert (tmp_path / "x" / "mask.bin").stat().st_size == -(-made.num_tokens // 8)
    verify_text_set(tmp_path / "x")


def test_parts_are_views_with_fingerprints_of_their_own(tmp_path):
    texts = some_texts(20)
    made = text_set(tmp_path / "x", texts)
    low, high = made.part(0, 15), made.part(15, 20)
    assert read_back(high) == as_lists(texts)[15:]
    assert np.shares_memory(high.tokens, made.tokens)
    assert len({made.fingerprint, low.fingerprint, high.fingerprint}) == 3
    texts[3] = (texts[3][0], ~texts[3][1])
    other = text_set(tmp_path / "y", texts)
    assert other.fingerprint != made.fingerprint


def test_targets_of_parts_are_counted(tmp_path, monkeypatch):
    """Parts begin and end within a byte of the mask, which is read in pieces."""
    monkeypatch.setattr(text_sets, "_MASK_BYTES", 3)
    texts = some_texts(40)
    texts = [(ids, asked | (np.arange(len(ids)) == 0)) for ids, asked in texts]
    made = text_set(tmp_path / "x", texts)
    for low, high in ((0, 40), (0, 7), (7, 23), (23, 40), (39, 40)):
        part = made.part(low, high)
        assert part.num_asked == sum(int(asked[1:].sum()) for _, asked in texts[low:high])
        assert part.num_targets == sum(len(ids) - 1 for ids, _ in texts[low:high])


def test_texts_know_their_rows(tmp_path):
    """Of two files, some of whose rows gave no text or two; not a part of what the texts are."""
    texts = some_texts(6)
    places = [("a", 1), ("a", 4), ("a", 4), ("dir/b:c", 2), ("dir/b:c", 3), ("dir/b:c", 9)]
    with TextSetWriter(tmp_path, 64) as writer:
        for (ids, asked), place in zip(texts, places, strict=True):
            writer.add(ids, asked, place)
        writer.finish({"vocab_size": 64, "validation_texts": 2})
    train, validation = open_text_set(tmp_path)
    assert [train.where(text) for text in (0, 2, 3)] == [
        "text 1 (a:1)",
        "text 3 (a:4)",
        "text 4 (dir/b:c:2)",
    ]
    assert validation.where(1) == "text 6 (dir/b:c:9)"
    verify_text_set(tmp_path)
    without = write_texts(tmp_path / "without", texts, validation_texts=2)
    assert open_text_set(without)[0].where(2) == "text 3"
    assert open_text_set(without)[0].fingerprint == train.fingerprint
    for files in ([["a", 0]], [[1, "a"]], [[0, "a"], [6, "b"]], "a"):
        change_sidecar(tmp_path, files=files)
        with pytest.raises(ValueError, match="files=.*it must be a list of"):
            open_text_set(tmp_path)


def test_texts_that_were_set_apart_validate(tmp_path):
    folder = write_texts(tmp_path / "x", some_texts(20), validation_texts=4)
    train, validation = open_text_set(folder)
    assert (train.num_texts, validation.num_texts, validation.first) == (16, 4, 16)


def test_what_was_not_finished_leaves_nothing(tmp_path):
    with TextSetWriter(tmp_path, 64) as writer:
        writer.add(np.array([1, 2]), np.array([False, True]))
    assert list(tmp_path.iterdir()) == []
    with TextSetWriter(tmp_path, 64) as writer:
        writer.add(np.array([1, 2]), np.array([False, True]))
        names = sorted(file.name for file in tmp_path.iterdir())
        assert names == [f"{name}.bin.partial" for name in ("mask", "offsets", "rows", "tokens")]
        assert not is_text_set(tmp_path)
        writer.finish({})
    assert is_text_set(tmp_path)
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["mask.bin", "offsets.bin", "texts.json", "tokens.bin"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"format": "x"}, "sidecar.*prepare the folder again"),
        ({"version": 2}, "has version 2, this zerojax reads 1"),
        ({"dtype": "int8"}, "dtype='int8', but it must be one of uint8, uint16, uint32"),
        ({"texts": 0}, "texts=0, but it must be a number of texts, at least 1"),
        ({"tokens": "1"}, "tokens='1', but it must be a number of tokens"),
        ({"sha256": [1]}, "it must be an object of checksums"),
        ({"vocab_size": 0}, "vocab_size=0, but it must be a number of ids"),
        ({"validation_texts": 20}, "it must be a number of texts smaller than the total"),
        ({"texts": 19}, r"offsets.bin' has 168 bytes, but texts.json .* 160; the file is"),
        ({"tokens": 9}, r"tokens.bin' has \d+ bytes, but texts.json .* 9"),
    ],
)
def test_a_damaged_sidecar_is_one_sentence(tmp_path, changes, why):
    folder = write_texts(tmp_path / "x", some_texts(20))
    change_sidecar(folder, **changes)
    with pytest.raises(ValueError, match=why):
        open_text_set(folder)


def test_other_damage_is_one_sentence(tmp_path):
    folder = write_texts(tmp_path / "x", some_texts(20))
    (folder / "texts.json").write_text("{")
    with pytest.raises(ValueError, match="texts.json' is not valid JSON.*prepare the folder"):
        open_text_set(folder)
    folder = write_texts(tmp_path / "y", some_texts(20))
    offsets = np.fromfile(folder / "offsets.bin", "<i8")
    offsets[[3, 4]] = offsets[[4, 3]]
    offsets.tofile(folder / "offsets.bin")
    with pytest.raises(ValueError, match="offsets.bin' has sha256 .*prepare the folder again"):
        verify_text_set(folder)
    with pytest.raises(ValueError, match="is not a list of increasing offsets into"):
        _ = open_text_set(folder)[0].lengths
    (folder / "mask.bin").unlink()
    with pytest.raises(ValueError, match="mask.bin' has 0 bytes"):
        open_text_set(folder)


def test_the_sidecar_has_checksums_of_every_file(tmp_path):
    folder = write_texts(tmp_path / "x", some_texts(3), sha256={"tokenizer.json": "abc"})
    about = json.loads((folder / "texts.json").read_text())
    assert set(about["sha256"]) == {"tokens.bin", "mask.bin", "offsets.bin", "tokenizer.json"}
