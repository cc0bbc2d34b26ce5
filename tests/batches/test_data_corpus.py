"""Text in, ids out: which files are read, what is refused, and that text survives."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from zerojax.data import corpus, preparation, subwords
from zerojax.data.corpus import find_text_files, read_documents, read_text
from zerojax.data.tokenizer import (
    BpeTokenizer,
    ByteTokenizer,
    as_tokenizer,
    load_tokenizer,
    save_tokenizer,
    tokenizer_from_dict,
)

needs_tokenizers = pytest.mark.skipif(
    importlib.util.find_spec("tokenizers") is None,
    reason="needs the package tokenizers: pip install tokenizers",
)
TRICKY = "Thé  end,\r\n\n\n  naïve 日本 🙂\tx\n<|endoftext|> a\nB\n"


def test_the_embedded_text_is_about_a_megabyte_of_plain_english():
    text = read_text()
    assert text.isascii()
    assert 1_000_000 < len(text) < 1_200_000
    assert text.count("ACT I.") == 9
    assert "If music be the food of love" in text
    assert "utenberg" not in text
    assert text == read_text(corpus.embedded_path())


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.txt").write_text("one")
    (tmp_path / "a.md").write_text("zero")
    (tmp_path / "c.jsonl").write_text('{"text": "two"}\n\n{"text": "three", "id": 3}\n')
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "no.txt").write_text("no")
    (tmp_path / "empty.txt").touch()
    assert read_text(tmp_path) == "zero\n\none\n\ntwo\n\nthree"


def test_a_long_file_comes_in_pieces_that_are_cut_at_line_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(corpus, "PIECE_CHARACTERS", 64)
    text = "".join(f"line {i} é\n" + "\n" * (i % 3) for i in range(100)) + "x" * 400 + "end"
    (tmp_path / "long.txt").write_text(text)
    [pieces] = [list(document) for document in read_documents([tmp_path / "long.txt"])]
    assert "".join(pieces) == text
    assert len(pieces) > 5
    cut_in_lines = [piece for piece in pieces[:-1] if piece.endswith("é\n")]
    assert len(cut_in_lines) > 5
    assert max(map(len, pieces)) <= 4 * 64 + 64


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda p: p / "no" / "such.txt", FileNotFoundError, "nearest existing folder"),
        (lambda p: p, ValueError, "has no text file: found nothing"),
        (lambda p: _file(p / "x.png", b"1").parent, ValueError, r"found \['.png'\].*\.txt"),
        (lambda p: _file(p / "x.txt", b""), ValueError, "is empty: 1 file"),
        (lambda p: _file(p / "x.txt", b"ab\nc\xff\n"), ValueError, "0xff at offset 4.*iconv"),
        (lambda p: _file(p / "x.jsonl", b'{"text": "a"}\n{"txt": 1}'), ValueError, r"l:2: no \"t"),
        (lambda p: _file(p / "x.jsonl", b"{"), ValueError, "x.jsonl:1: not JSON"),
    ],
)
def test_bad_corpora_are_refused(tmp_path: Path, make, error, words):
    with pytest.raises(error, match=words):
        read_text(make(tmp_path))


def _file(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_bytes_round_trip():
    tokens = ByteTokenizer()
    ids = tokens.encode(TRICKY)
    assert ids.dtype == np.int32
    assert tokens.decode(ids) == TRICKY
    assert tokens.decode(ids[:3]) == "Th\ufffd"
    assert tokens.decode([]) == ""
    assert tokenizer_from_dict(tokens.to_dict()).vocab_size == 256
    with pytest.raises(ValueError, match=r"token id 256 at position 1 is outside \[0, 256\)"):
        tokens.decode([1, 256])
    with pytest.raises(TypeError, match="float"):
        tokens.decode([1.5])


@needs_tokenizers
def test_bpe_round_trip_and_determinism(tmp_path: Path):
    text = read_text()[:60_000]
    first = BpeTokenizer.train([text], vocab_size=400)
    assert first.vocab_size == 400
    assert BpeTokenizer.train([text], vocab_size=400).to_dict() == first.to_dict()
    ids = first.encode(text)
    assert ids.dtype == np.int32
    assert ids.max() < 400
    assert len(ids) < 0.6 * len(text)
    assert first.decode(ids) == text
    assert first.decode(first.encode(TRICKY)) == TRICKY
    assert first.separator.tolist() == first.encode("<|endoftext|>").tolist()
    assert len(first.encode("")) == 0
    again = load_tokenizer(save_tokenizer(first, tmp_path / "tokenizer.json"))
    assert np.array_equal(again.encode(text), ids)
    # The bare file of the tokenizers package is taken as well.
    (tmp_path / "bare.json").write_text(json.dumps(first.to_dict()["json"]))
    assert np.array_equal(as_tokenizer(tmp_path / "bare.json").encode(text), ids)


@needs_tokenizers
def test_cutting_text_into_pieces_leaves_the_ids_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    text = read_text()[:20_000] + TRICKY * 30 + "a\n\n\nb \n c\n  d\n" * 40
    bpe = BpeTokenizer.train([text], vocab_size=500)
    whole = bpe.encode(text)
    monkeypatch.setattr(subwords, "PIECE_CHARACTERS", 50)
    assert np.array_equal(bpe.encode(text), whole)
    monkeypatch.setattr(corpus, "PIECE_CHARACTERS", 500)
    monkeypatch.setattr(subwords, "_BLOCK_PIECES", 10)
    file = tmp_path / "text.txt"
    file.write_bytes(text.encode())
    pieces = list(preparation.encode_files([file], bpe))
    assert len(pieces) > 20
    assert sum(starts for starts, _ in pieces) == 1
    assert np.array_equal(np.concatenate([ids for _, ids in pieces]), whole)


def test_bad_tokenizer_files_are_refused(tmp_path: Path):
    for content, words in (("{", "is not valid JSON"), ("[1]", "a JSON list")):
        with pytest.raises(ValueError, match=words):
            load_tokenizer(_file(tmp_path / "t.json", content.encode()))
    with pytest.raises(ValueError, match="no text was passed to train it on"):
        as_tokenizer("bpe:300")


def test_a_folder_counts_as_empty_only_without_any_byte(tmp_path: Path):
    (tmp_path / "a.txt").touch()
    with pytest.raises(ValueError, match=r"is empty: 1 file\(s\), 0 bytes"):
        find_text_files(tmp_path)
    (tmp_path / "b.txt").write_text("b")
    assert len(find_text_files(tmp_path)) == 2
