"""Tokenizers: bytes, byte-pair encoding trained on the corpus, or a model's own file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from zerojax.config.display import quoted
from zerojax.config.loader import user_path
from zerojax.data.subwords import (
    NUM_BYTES,
    BpeTokenizer,
    HuggingFaceTokenizer,
    checked_ids,
)
from zerojax.runtime.bounded_json import JsonError, load
from zerojax.runtime.user_files import replace_text

_BPE_SPEC = re.compile(r"bpe:(\d[\d_]{0,30})")
TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"


@runtime_checkable
class Tokenizer(Protocol):
    """Interface of a tokenizer; any object with these members can be used."""

    @property
    def vocab_size(self) -> int:
        """Number of ids; every id is in [0, vocab_size)."""
        ...

    @property
    def separator(self) -> np.ndarray:
        """Ids between two documents: int32 [n]; n may be 0."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of `text`, int32 [n]; `decode(encode(text)) == text`.

        A method `encode_pieces` with the signature of `ByteTokenizer.encode_pieces` is optional; a
        tokenizer without it gets each document in one call.
        """
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decodes ids to text; incomplete characters become U+FFFD."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-compatible dict; `tokenizer_from_dict` is the inverse."""
        ...


class ByteTokenizer:
    """Tokenizer whose ids are the 256 byte values of UTF-8; needs no training, encodes every text.

    >>> ByteTokenizer().encode("Ah!").tolist()
    [65, 104, 33]
    """

    vocab_size = NUM_BYTES

    @property
    def separator(self) -> np.ndarray:
        """Ids of a blank line, because all 256 ids are bytes and none is free for an end-of-text
        token."""
        return self.encode("\n\n")

    def encode(self, text: str) -> np.ndarray:
        """Returns the UTF-8 bytes of `text`, int32 [n]."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_pieces(self, pieces: Iterable[str]) -> Iterator[np.ndarray]:
        """Yields the ids of a text that comes in pieces, int32: together those of `encode`."""
        return map(self.encode, pieces)

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns (ids, offsets) for each text: ids int32 [n], and offsets int64 [n, 2], which are
        the characters [start, end) that each id covers."""
        made = []
        for text in texts:
            sizes = [len(character.encode("utf-8")) for character in text]
            starts = np.repeat(np.arange(len(text)), sizes)
            made.append((self.encode(text), np.stack([starts, starts + 1], axis=1)))
        return made

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decodes ids to text; an incomplete character becomes U+FFFD. Raises a ValueError for an
        id outside 0-255."""
        return checked_ids(ids, NUM_BYTES).astype(np.uint8).tobytes().decode("utf-8", "replace")

    def to_dict(self) -> dict[str, Any]:
        """Returns the tokenizer as a JSON-compatible dict, `{"kind": "bytes"}`."""
        return {"kind": "bytes"}

    def __repr__(self) -> str:
        return "ByteTokenizer()"


def as_tokenizer(spec: object, texts: Iterable[str] | None = None) -> Tokenizer:
    """Makes a tokenizer from a user's specification.

    Args:
      spec: "bytes", "bpe:2048" (trained on `texts`), the path of a tokenizer file (of zerojax, or a
        tokenizer.json of Hugging Face) or of its folder, the dict of `to_dict`, or a tokenizer.
      texts: text to train a "bpe:..." on; not read otherwise.

    Raises:
      ValueError: the spec is unknown, or "bpe:..." is given without text.
      TypeError: the spec is of another type.
      FileNotFoundError: the path does not exist.
    """
    if isinstance(spec, Mapping):
        return tokenizer_from_dict(spec)
    if isinstance(spec, Tokenizer):
        return spec
    if not isinstance(spec, str | Path):
        raise TypeError(
            f"tokenizer={spec!r} is a {type(spec).__name__}; pass 'bytes', 'bpe:4096', the path of "
            "a tokenizer file, or an object with encode, decode, vocab_size, separator, to_dict"
        )
    if spec == "bytes":
        return ByteTokenizer()
    size = bpe_size(spec)
    if size is None:
        return load_tokenizer(spec)
    if texts is None:
        raise ValueError(
            f"tokenizer={spec!r} must be trained, but no text was passed to train it on; pass the "
            "path of a tokenizer file that `zerojax data prepare` or a run has saved"
        )
    return BpeTokenizer.train(texts, vocab_size=size)


def bpe_size(spec: object) -> int | None:
    """Returns the vocabulary size in a spec, 4096 for "bpe:4096"; None for any other spec.

    Raises:
      ValueError: the spec is "bpe" or "bpe:..." without a number.
    """
    match = _BPE_SPEC.fullmatch(spec) if isinstance(spec, str) else None
    if match:
        return int(match[1])
    if isinstance(spec, str) and (spec == "bpe" or spec.startswith("bpe:")):
        raise ValueError(
            f"tokenizer={quoted(spec)} has no vocabulary size; write for example 'bpe:4096'"
        )
    return None


def tokenizer_from_dict(value: Mapping[str, Any]) -> Tokenizer:
    """Builds a tokenizer from the result of `to_dict`, or from the content of a tokenizer.json of
    `tokenizers`.

    Raises:
      ValueError: the dict has no known kind.
    """
    kind = value.get("kind")
    if kind == "bytes":
        return ByteTokenizer()
    content = value.get("json") if kind in ("bpe", "hugging_face") else value
    if isinstance(content, Mapping) and "model" in content:
        if kind == "bpe":
            return BpeTokenizer.from_content(content)
        return HuggingFaceTokenizer(content, end=value.get("end") if kind else None)
    raise ValueError(
        f"not a tokenizer: keys {quoted(sorted(map(str, value))[:8])}, kind {quoted(kind)}; known "
        "are kind 'bytes', kind 'bpe', kind 'hugging_face', and a tokenizer.json of Hugging Face"
    )


def hugging_face_json(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Returns the content of a tokenizer's Hugging Face tokenizer.json; None for tokenizers without
    one, such as bytes."""
    return tokenizer.to_dict().get("json")


def save_tokenizer(tokenizer: Tokenizer, path: str | Path) -> Path:
    """Writes the `to_dict` of a tokenizer as a JSON file; returns its path."""
    path = user_path(path)
    replace_text(path, json.dumps(tokenizer.to_dict(), ensure_ascii=False) + "\n")
    return path


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Reads a file written by `save_tokenizer`, or a tokenizer.json of Hugging Face.

    For a tokenizer.json of Hugging Face, the token that ends a text is the `eos_token` of a
    tokenizer_config.json in the same folder, if there is one.

    Args:
      path: the file, or a folder that has a tokenizer.json.

    Raises:
      FileNotFoundError: the path does not exist, or is a folder without a tokenizer.json.
      ValueError: the file is not a tokenizer.
    """
    given = user_path(path)
    file = given / TOKENIZER_FILE if given.is_dir() else given
    if given.is_dir() and not file.is_file():
        raise FileNotFoundError(
            f"the folder {str(given)!r} has no {TOKENIZER_FILE}; for a model in another format "
            "(vocab.txt, tokenizer.model), write one with transformers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    if not file.exists():
        raise FileNotFoundError(
            f"tokenizer={quoted(str(path), 200)} is neither 'bytes', nor 'bpe:<size>', nor an "
            "existing file or folder"
        )
    value = read_object(file, "a tokenizer file")
    end = None
    if "kind" not in value and "model" in value:
        end = _stated_end(file.with_name(SETTINGS_FILE))
    try:
        if "kind" in value or "model" not in value:
            return tokenizer_from_dict(value)
        return HuggingFaceTokenizer(value, end=end)
    except ValueError as error:
        raise ValueError(f"{str(file)!r}: {error}") from error


def _stated_end(settings: Path) -> str | None:
    """Returns the end-of-text token that a tokenizer_config.json states: a name, or an object that
    contains it."""
    if not settings.is_file():
        return None
    end = read_object(settings, "a tokenizer's settings").get("eos_token")
    return end.get("content") if isinstance(end, Mapping) else end


def read_object(file: Path, what: str) -> dict[str, Any]:
    """Reads the object in a JSON file.

    Args:
      file: JSON file.
      what: description of the expected content, for the message.

    Raises:
      ValueError: the file does not contain an object.
    """
    try:
        value = load(file)
    except JsonError as error:
        raise ValueError(f"{str(file)!r} is not {what}: it {error.what}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{str(file)!r} is not {what}: a JSON {type(value).__name__}")
    return value
