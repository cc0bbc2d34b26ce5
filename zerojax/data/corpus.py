"""Finds the files of a text corpus and reads their documents in order."""

from __future__ import annotations

import importlib.resources
import itertools
import os
import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from zerojax.config.display import quoted
from zerojax.config.loader import user_path
from zerojax.config.regular_files import check_regular, open_regular, open_text
from zerojax.data.record_files import RECORD_SUFFIXES, read_records, saved_files

EMBEDDED_NAME = "shakespeare.txt"
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".tex", ".py", *RECORD_SUFFIXES)
TOKEN_SUFFIXES = (".bin", ".npy")
# Number of characters of a piece, the text of one tokenizer call: enough to amortise the call, few
# enough to read a corpus of any size in constant memory.
PIECE_CHARACTERS = 1 << 20


def read_text(path: str | Path | None = None) -> str:
    """Reads a whole corpus as one string; `None` reads the embedded Shakespeare (1.07 MB, ASCII).

    Documents are joined by a blank line. Use it for small corpora; `read_documents` streams.

    >>> read_text()[:14]
    'AS YOU LIKE IT'

    Raises:
      FileNotFoundError: the path does not exist.
      ValueError: there is no text, or it is not UTF-8 (names the file and the offset).
    """
    return "\n\n".join("".join(document) for document in read_documents(find_text_files(path)))


def embedded_path() -> Path:
    """Returns the path of the embedded text. The package is installed unzipped, so the file
    exists."""
    return Path(str(importlib.resources.files("zerojax.data").joinpath(EMBEDDED_NAME)))


def existing_path(path: str | Path) -> Path:
    """Returns `path` with `~` expanded, if it exists.

    Raises:
      FileNotFoundError: the path does not exist; names the nearest parent folder that does.
      UnreadableError: the path is a pipe, a device or a socket.
    """
    found = user_path(path)
    if found.exists():
        if not found.is_dir():
            check_regular(found.stat(), found)
        return found
    parent = next((p for p in found.absolute().parents if p.exists()), Path("/"))
    raise FileNotFoundError(
        f"data={str(path)!r} does not exist (the nearest existing folder is {str(parent)!r}); "
        "pass a folder of text files, one text file, token files (.bin with a .json sidecar, "
        ".npy), or leave it out (None) for the embedded Shakespeare"
    )


def other_suffixes(path: str | Path | None) -> list[str]:
    """Returns, for each file of a folder that is not read because of its suffix, this suffix; empty
    for a single file and for a folder saved by `datasets`."""
    if path is None or not (root := existing_path(path)).is_dir():
        return []
    if saved_files(root) is not None:  # a saved dataset lists its own files
        return []
    every = find_files(root, {file.suffix.lower() for file in root.rglob("*")})
    return [file.suffix for file in every if file.suffix.lower() not in TEXT_SUFFIXES]


def find_files(folder: Path, suffixes: Collection[str]) -> list[Path]:
    """Returns the files below `folder` with one of `suffixes`, sorted by relative path, without
    hidden files.

    The order is that of the POSIX path strings, and so is the same on every machine.
    """
    found = [
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in suffixes
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and path.is_file()
    ]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def find_text_files(path: str | Path | None) -> list[Path]:
    """Returns the text files at `path`: one file, or all of a folder; None is the embedded text.

    For a folder saved by `datasets`, these are the files of its split "train".

    Raises:
      FileNotFoundError: the path does not exist.
      ValueError: the folder has no text files, or all files are empty.
    """
    if path is None:
        return [embedded_path()]
    root = existing_path(path)
    files = saved_files(root) if root.is_dir() else [root]
    if files is None:
        files = find_files(root, TEXT_SUFFIXES)
    if not files:
        seen = sorted({p.suffix or p.name for p in root.rglob("*") if p.is_file()})[:8]
        raise ValueError(
            f"the folder {str(root)!r} has no text file: found {seen or 'nothing'}, expected one "
            f"of {', '.join(TEXT_SUFFIXES)}; rename the files or pass one file by its name"
        )
    if not any(file.stat().st_size for file in files):
        raise ValueError(
            f"the corpus {str(root)!r} is empty: {len(files)} file(s), 0 bytes; "
            "at least one batch of text is needed"
        )
    return files


def num_text_bytes(files: Sequence[Path]) -> int:
    """Returns the total size of all files in bytes, without reading them."""
    return sum(file.stat().st_size for file in files)


def read_documents(files: Sequence[Path]) -> Iterator[Iterator[str]]:
    """Yields one iterator of text pieces per document, in the order of `files`, in constant memory.

    A text file is one document. Each line of a `.jsonl` file, and each row of a `.parquet` or
    `.arrow` file, is one document: its `"text"` value. Read each document to its end before
    requesting the next one. Empty documents are skipped.

    Raises:
      ValueError: a text is not UTF-8, or a row has no "text" string.
      ImportError: a file is parquet or arrow, and the package pyarrow is not installed.
    """
    for file in files:
        if file.suffix.lower() in RECORD_SUFFIXES:
            for text in _texts_of_rows(file):
                if text:
                    yield iter((text,))
        else:
            pieces = _text_pieces(file)
            if (first := next(pieces, None)) is not None:
                yield itertools.chain((first,), pieces)


def _text_pieces(file: Path) -> Iterator[str]:
    """Yields pieces of about PIECE_CHARACTERS that end at line ends."""
    held = ""
    # newline="" keeps \r\n unchanged, so that the bytes of the text equal those of the file.
    with open_text(file, newline="") as stream:
        while True:
            try:
                block = stream.read(PIECE_CHARACTERS)
            except UnicodeDecodeError as error:
                raise ValueError(_not_utf8(file)) from error
            if not block:
                break
            held += block
            if cut := _cut_place(held):
                yield held[:cut]
                held = held[cut:]
    if held:
        yield held


def _cut_place(text: str) -> int:
    """Returns the last position between a single line end and a visible character, or 0.

    A byte-level BPE splits at such positions in any case, so the ids equal those of the uncut text.
    A text without line ends is cut anywhere once it is as long as four pieces.
    """
    cut = text.rfind("\n", 0, len(text) - 1) + 1
    while cut > 1 and (text[cut - 2].isspace() or text[cut].isspace()):
        cut = text.rfind("\n", 0, cut - 1) + 1
    if cut > 1:
        return cut
    return len(text) if len(text) >= 4 * PIECE_CHARACTERS else 0


def _not_utf8(file: Path) -> str:
    """Returns the error message for a file that is not UTF-8; reads it to find the exact offset."""
    offset = 0
    with open(open_regular(file), "rb") as stream:
        # Reads by lines, because the byte of a line end is never part of another UTF-8 character.
        for line in stream:
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                offset += error.start
                value = line[error.start]
                return (
                    f"{str(file)!r} is not UTF-8 text: byte 0x{value:02x} at offset {offset}; "
                    f"convert it ({_to_utf8(file)}), remove it from the folder, or, if it holds "
                    "token ids, save it as .npy or as .bin with a .json sidecar"
                )
            offset += len(line)
    return f"{str(file)!r} is not UTF-8 text; convert it ({_to_utf8(file)})"


def _to_utf8(file: Path) -> str:
    """Returns an iconv command that converts a file from Latin-1. Without -f, iconv assumes the
    locale's encoding, which is mostly UTF-8."""
    new = shlex.quote(f"{file.stem}.utf8{file.suffix}")
    return f"if it is Latin-1: iconv -f latin1 -t utf-8 {shlex.quote(os.fspath(file))} > {new}"


def _texts_of_rows(file: Path) -> Iterator[str]:
    for number, value in read_records(file, ("text",)):
        if not isinstance(value, dict) or not isinstance(value.get("text"), str):
            raise ValueError(
                f'{file}:{number}: no "text" string in {quoted(value)}; every row must be '
                'an object such as {"text": "..."}, or a chat: --format chat'
            )
        yield value["text"]
