"""Tokenizes a corpus of any size into token files."""

from __future__ import annotations

import dataclasses
import errno
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.loader import user_path
from zerojax.data.corpus import find_text_files, num_text_bytes, other_suffixes, read_documents
from zerojax.data.subwords import MAX_WHOLE_CHARACTERS
from zerojax.data.tokenizer import Tokenizer, as_tokenizer, save_tokenizer
from zerojax.data.tokens import (
    FORMAT,
    TokenPart,
    Tokens,
    check_unused,
    hash_file,
    sidecar_path,
    smallest_dtype,
)
from zerojax.runtime.user_files import replace_text

# Characters to train a BPE on. More do not improve it; these take about a minute.
BPE_SAMPLE_CHARACTERS = 64 << 20
# Bytes of text that `train` encodes in memory at most; larger text needs `prepare`.
MAX_TEXT_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Result of `prepare`."""

    folder: Path
    num_documents: int
    num_train_tokens: int
    num_validation_tokens: int
    num_text_bytes: int
    vocab_size: int
    left_out: tuple[str, ...] = ()
    """Suffix of each of the folder's files that were not read because it is not a suffix of texts;
    repeated for several files."""


def prepare(
    data: str | Path | None,
    out: str | Path,
    *,
    tokenizer: object = "bytes",
    validation_fraction: float = 0.0,
) -> Prepared:
    """Tokenizes a corpus into a folder: `train.bin`, `validation.bin`, sidecars, `tokenizer.json`.

    Text is streamed, so memory does not grow with the corpus. `zerojax.train(..., data=out)` reads
    the result. The sidecar of a `.bin` is written last, so that files of an interrupted run are
    never mistaken for complete ones.

    Args:
      data: a text file, a folder of text files, or None for the embedded Shakespeare.
      out: output folder; created if missing; must not contain token files yet.
      tokenizer: "bytes", "bpe:4096" (trained on at most 64 M characters, an equal share of each
        file), the path of a tokenizer file, or a tokenizer.
      validation_fraction: fraction of the tokens, from the end, that is written to
        `validation.bin`.

    Raises:
      ValueError: the fraction is invalid, the text is empty or not UTF-8, or `out` already has
        token files, or other files under the names that are written.
      FileNotFoundError: the data or the tokenizer file do not exist.
      ImportError: a package that the tokenizer or the files need is missing.
      OSError: the disk is full or the folder is not writable.
    """
    if not 0 <= validation_fraction < 1:
        raise ValueError(
            f"validation_fraction={validation_fraction}: it must be at least 0 and below 1"
        )
    files, left_out = find_text_files(data), tuple(other_suffixes(data))
    folder = user_path(out)
    check_unused(folder, ("train.json", "validation.json", "tokenizer.json"))
    ready = make_tokenizer(tokenizer, files)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made = _write(files, folder, ready, validation_fraction)
        return dataclasses.replace(made, left_out=left_out)
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
        raise OSError(
            error.errno or errno.EIO,
            f"could not write token files into {str(folder)!r}: {reason}; about "
            f"{num_text_bytes(files)} bytes of text have to be stored, choose another folder",
        ) from error


def _write(files: Sequence[Path], folder: Path, tokenizer: Tokenizer, fraction: float) -> Prepared:
    dtype = smallest_dtype(tokenizer.vocab_size)
    train, validation = folder / "train.bin", folder / "validation.bin"
    partial = folder / "tokens.zerojax-partial"
    partial.unlink(missing_ok=True)
    count = num_documents = 0
    try:
        with partial.open("xb") as stream:
            for starts_document, ids in encode_files(files, tokenizer):
                num_documents += starts_document
                count += len(ids)
                stream.write(ids.astype(dtype).tobytes())
        num_validation = round(count * fraction)
        if num_validation:
            _move_tail(partial, validation, num_validation * dtype.itemsize)
        partial.replace(train)
    finally:
        partial.unlink(missing_ok=True)
    save_tokenizer(tokenizer, folder / "tokenizer.json")
    for file, tokens in ((train, count - num_validation), (validation, num_validation)):
        if tokens:
            _write_sidecar(file, dtype, tokens, tokenizer)
    return Prepared(
        folder=folder,
        num_documents=num_documents,
        num_train_tokens=count - num_validation,
        num_validation_tokens=num_validation,
        num_text_bytes=num_text_bytes(files),
        vocab_size=tokenizer.vocab_size,
    )


def _move_tail(source: Path, target: Path, num_bytes: int) -> None:
    """Moves the last `num_bytes` bytes of `source` to the file `target`; uses at most 16 MB."""
    keep = source.stat().st_size - num_bytes
    with source.open("r+b") as stream:
        stream.seek(keep)
        with target.open("wb") as tail:
            while block := stream.read(16 << 20):
                tail.write(block)
        stream.truncate(keep)


def _write_sidecar(file: Path, dtype: np.dtype, count: int, tokenizer: Tokenizer) -> None:
    content = {
        "format": FORMAT,
        "version": 1,
        "dtype": dtype.name,
        "count": count,
        "vocab_size": tokenizer.vocab_size,
        "sha256": hash_file(file),
        "tokenizer": tokenizer.to_dict(),
    }
    replace_text(sidecar_path(file), json.dumps(content, ensure_ascii=False) + "\n")


def make_tokenizer(spec: object, files: Sequence[Path]) -> Tokenizer:
    """Makes the tokenizer of `as_tokenizer`; "bpe:..." is trained on an equal share of each
    file."""
    return as_tokenizer(spec, _sample(files))


def _sample(files: Sequence[Path]) -> Iterator[str]:
    share = max(BPE_SAMPLE_CHARACTERS // len(files), 1)
    for file in files:
        left = share
        for document in read_documents([file]):
            for piece in document:
                yield piece[:left]
                left -= len(piece)
                if left <= 0:
                    break
            if left <= 0:
                break


def encode_files(files: Sequence[Path], tokenizer: Tokenizer) -> Iterator[tuple[bool, np.ndarray]]:
    """Yields the ids of all documents of `files`, with the tokenizer's separator between documents.

    Yields:
      `(starts_document, ids)`, with ids int32 [n] of one piece of text.
    """
    is_first = True
    for document in read_documents(files):
        starts_document = True
        for ids in encode_document(document, tokenizer):
            if starts_document and not is_first:
                ids = np.concatenate([tokenizer.separator, ids])
            yield starts_document, ids
            starts_document = is_first = False


def encode_document(pieces: Iterable[str], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yields the ids of one document that comes in pieces: together those of `tokenizer.encode`.

    Raises:
      ValueError: the tokenizer needs the document in one call, and it is longer than
        `MAX_WHOLE_CHARACTERS`.
    """
    if hasattr(tokenizer, "encode_pieces"):
        yield from tokenizer.encode_pieces(pieces)
        return
    held: list[str] = []
    for piece in pieces:
        held.append(piece)
        if (size := sum(map(len, held))) > MAX_WHOLE_CHARACTERS:
            raise ValueError(
                f"a document has more than {size:,} characters, but {tokenizer!r} has no method "
                f"encode_pieces, so it gets documents of at most {MAX_WHOLE_CHARACTERS:,} in one "
                'call; give it this method, or make several documents, {"text": "..."} per row of '
                "a .jsonl file"
            )
    yield tokenizer.encode("".join(held))


def tokens_of_text(path: Path | None, tokenizer: object) -> tuple[Tokens, Tokenizer]:
    """Encodes a text corpus in memory; returns (its tokens, its tokenizer).

    Raises:
      ValueError: the text exceeds MAX_TEXT_BYTES; contains the command that prepares it.
    """
    files = find_text_files(path)
    size = num_text_bytes(files)
    if size > MAX_TEXT_BYTES:
        raise ValueError(
            f"{str(path)!r} holds {size / 2**30:.1f} GiB of text, more than the "
            f"{MAX_TEXT_BYTES / 2**30:g} GiB that are encoded in memory; run once `zerojax data "
            f"prepare {path} tokens/ --tokenizer bpe:32768` and pass data='tokens/'"
        )
    ready = make_tokenizer(tokenizer, files)
    dtype = smallest_dtype(ready.vocab_size)
    pieces = [ids.astype(dtype) for _, ids in encode_files(files, ready)]
    part = TokenPart(
        ids=np.concatenate(pieces) if pieces else np.zeros(0, dtype),
        name="the embedded Shakespeare" if path is None else str(path),
    )
    return Tokens(parts=(part,), vocab_size=ready.vocab_size, tokenizer=ready.to_dict()), ready
