"""Text sets: many texts of token ids, with a mask of the tokens to predict.

A folder with these files, little-endian and without headers:

    tokens.bin    uint8, uint16 or uint32 [tokens], all texts one after the other
    mask.bin      one bit per token, the lowest of a byte first: 1 if it is to be predicted
    offsets.bin   int64 [texts + 1]: text i is tokens[offsets[i]:offsets[i + 1]]
    rows.bin      int64 [texts], the row of its file that each text is from; optional
    texts.json    sizes, checksums, and the origin of the texts; written last
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from zerojax.config.display import quoted
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.loader import user_path
from zerojax.data.tokens import (
    DTYPES,
    VOCAB_SIZES,
    check_not_cut,
    hash_file,
    is_count,
    is_dtype_name,
    is_vocab_size,
    size_of,
    smallest_dtype,
)
from zerojax.runtime.bounded_json import JsonError, load
from zerojax.runtime.user_files import replace_text

FORMAT, VERSION = "zerojax-texts", 1
TOKENS, MASK, OFFSETS, SIDECAR = "tokens.bin", "mask.bin", "offsets.bin", "texts.json"
ROWS = "rows.bin"
_PARTIAL = ".partial"
_MASK_BYTES = 1 << 22
"""Number of bytes of mask.bin whose bits are counted at a time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TextSet:
    """Texts as token ids, with a mask of the tokens to predict; arrays are read only when indexed.

    Attributes:
      tokens: token ids as unsigned integers, all texts of the folder.
      mask: uint8, the bits of mask.bin.
      offsets: int64 [texts + 1], positions in `tokens`; a part of the folder's texts has only its
        own offsets.
      first: index, within the folder, of the first text of this part.
      name: name of the folder, for messages.
      vocab_size: every id is below this number, as the writer of the folder guarantees; None if
        unknown.
      tokenizer: `Tokenizer.to_dict` of the tokenizer that made the ids; None if unknown.
      checksum: checksum of the whole folder.
      template: chat template that made the texts; None if there was none.
      rows: int64, for every text of the folder its row in its source file, from 1; None if unknown.
      files: pairs (index within the folder of a file's first text, the file), ascending.
    """

    tokens: np.ndarray
    mask: np.ndarray
    offsets: np.ndarray
    first: int = 0
    name: str
    vocab_size: int | None = None
    tokenizer: Mapping[str, Any] | None = dataclasses.field(default=None, repr=False)
    checksum: str
    template: str | None = dataclasses.field(default=None, repr=False)
    rows: np.ndarray | None = None
    files: tuple[tuple[int, str], ...] = ()

    @property
    def num_texts(self) -> int:
        """Number of texts."""
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all texts together."""
        return int(self.offsets[-1] - self.offsets[0])

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each text, int64 [texts].

        Raises:
          ValueError: the offsets do not increase, or exceed the number of tokens.
        """
        lengths = np.diff(self.offsets)
        inside = self.offsets[0] >= 0 and self.offsets[-1] <= len(self.tokens)
        if not inside or (lengths.size and lengths.min() < 1):
            raise ValueError(
                f"{self.name}/{OFFSETS} is not a list of increasing offsets into "
                f"{len(self.tokens)} tokens; copy or prepare the folder again"
            )
        return lengths

    @property
    def fingerprint(self) -> str:
        """Text of 16 hex digits that identifies the content, and which part of the folder this
        is."""
        text = f"{self.checksum}:{self.first}:{self.num_texts}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def num_targets(self) -> int:
        """Number of tokens that follow another token of their text."""
        return self.num_tokens - self.num_texts

    @functools.cached_property
    def num_asked(self) -> int:
        """Number of targets that the mask selects for prediction; reads the mask.

        The first token of a text is never a target, whatever its mask.
        """
        first, end = (int(x) for x in self.offsets[[0, -1]])
        total = 0
        # From the start of a byte; its bits before `first` are left out of the sum.
        for low in range(first & ~7, end, 8 * _MASK_BYTES):
            bits = self.mask[low >> 3 : min((low >> 3) + _MASK_BYTES, -(-end // 8))]
            bits = np.unpackbits(bits, bitorder="little")
            total += int(bits[max(first - low, 0) : end - low].sum())
        return total - int(np.count_nonzero(self.asked(self.offsets[:-1])))

    def where(self, text: int) -> str:
        """Describes a text for messages: its number in the folder, from 1, and its file and row if
        known."""
        number = self.first + text
        if self.rows is None or not self.files:
            return f"text {number + 1}"
        at = bisect.bisect_right(self.files, number, key=lambda entry: entry[0]) - 1
        return f"text {number + 1} ({self.files[at][1]}:{self.rows[number]})"

    def part(self, low: int, high: int) -> TextSet:
        """Returns the texts `low` to `high` (exclusive) as a `TextSet`, without a copy."""
        offsets = self.offsets[low : high + 1]
        return dataclasses.replace(self, offsets=offsets, first=self.first + low)

    def check_not_cut(self) -> None:
        """Checks that no file was truncated after it was mapped.

        Raises:
          ValueError: a file was truncated; names it.
        """
        for name, array in ((TOKENS, self.tokens), (MASK, self.mask), (OFFSETS, self.offsets)):
            check_not_cut(array, f"{self.name}/{name}")

    def asked(self, places: np.ndarray) -> np.ndarray:
        """Returns whether the tokens at `places` (int64 positions in `tokens`) are to be predicted;
        bool, same shape."""
        return (self.mask[places >> 3] >> (places & 7).astype(np.uint8)) & 1 == 1


def is_text_set(path: Path) -> bool:
    """Returns True if a path is the folder of a text set."""
    return (path / SIDECAR).is_file()


def open_text_set(
    folder: Path, *, tokenizer: Mapping[str, Any] | None = None, template: str | None = None
) -> tuple[TextSet, TextSet | None]:
    """Maps a folder of texts into memory; reads only its sidecar.

    Args:
      folder: folder with the files of a text set.
      tokenizer, template: contents of the folder's tokenizer and template files, already checked by
        the caller.

    Returns:
      (training texts, validation texts or None).

    Raises:
      ValueError: the sidecar is invalid, or the sizes of files differ from it.
    """
    about = read_text_sidecar(folder)
    dtype = DTYPES[about["dtype"]]
    num_texts, num_tokens = about["texts"], about["tokens"]
    arrays = {
        name: _map(folder / name, kind, count)
        for name, kind, count in (
            (TOKENS, dtype, num_tokens),
            (MASK, np.dtype(np.uint8), -(-num_tokens // 8)),
            (OFFSETS, np.dtype("<i8"), num_texts + 1),
        )
    }
    files = about.get("files", [])
    rows = _map(folder / ROWS, np.dtype("<i8"), num_texts) if files else None
    # The origin of the texts is not part of their identity.
    sums = {name: value for name, value in about["sha256"].items() if name != ROWS}
    whole = TextSet(
        tokens=arrays[TOKENS],
        mask=arrays[MASK],
        offsets=arrays[OFFSETS],
        name=str(folder),
        vocab_size=about.get("vocab_size"),
        tokenizer=tokenizer,
        checksum=hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest(),
        template=template,
        rows=rows,
        files=tuple((first, name) for first, name in files),
    )
    apart = about.get("validation_texts", 0)
    if not apart:
        return whole, None
    return whole.part(0, num_texts - apart), whole.part(num_texts - apart, num_texts)


def read_text_sidecar(folder: Path) -> dict[str, Any]:
    """Reads and checks texts.json, the sidecar.

    Raises:
      ValueError: it is not JSON, or a value is missing or has the wrong type.
    """
    path = folder / SIDECAR
    remedy = "prepare the folder again with `zerojax data prepare`"
    try:
        about = load(path)
    except JsonError as error:
        raise ValueError(f"{str(path)!r} {error.what}; {remedy}") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ValueError(
            f"{str(path)!r} is not the JSON description (sidecar) of a text set; {remedy}"
        )
    if about.get("version") != VERSION:
        raise ValueError(
            f"{str(path)!r} has version {quoted(about.get('version'))}, this zerojax reads "
            f"{VERSION}; {remedy}"
        )
    sums = about.get("sha256")
    wanted = {
        "dtype": (is_dtype_name(about.get("dtype")), f"one of {', '.join(DTYPES)}"),
        "texts": (is_count(about.get("texts"), 1), "a number of texts, at least 1"),
        "tokens": (is_count(about.get("tokens"), 1), "a number of tokens, at least 1"),
        "sha256": (
            isinstance(sums, dict) and all(isinstance(x, str) for x in sums.values()),
            "an object of checksums",
        ),
        "vocab_size": (
            about.get("vocab_size") is None or is_vocab_size(about["vocab_size"]),
            VOCAB_SIZES,
        ),
        "files": (
            _are_files(about.get("files", []), about.get("texts")),
            "a list of [number of its first text, file], ascending from 0",
        ),
        "validation_texts": (
            is_count(about.get("validation_texts", 0), 0)
            and is_count(about.get("texts"), about.get("validation_texts", 0) + 1),
            "a number of texts smaller than the total",
        ),
    }
    for key, (is_good, kind) in wanted.items():
        if not is_good:
            value = quoted(about.get(key))
            raise ValueError(f"{str(path)!r}: {key}={value}, but it must be {kind}; {remedy}")
    return about


def _are_files(files: object, num_texts: object) -> bool:
    """Returns whether `files` is a valid sidecar value that assigns texts to source files."""
    if not isinstance(files, list):
        return False
    for entry in files:
        is_pair = isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], str)
        if not is_pair or not is_count(entry[0], 0):
            return False
    starts = [first for first, _ in files]
    inside = not starts or (starts[0] == 0 and is_count(num_texts, starts[-1] + 1))
    return inside and starts == sorted(starts)


def verify_text_set(folder: str | Path) -> None:
    """Reads all files of a folder of texts and compares them with the checksums of its sidecar.

    Raises:
      ValueError: a file differs; names the first one.
    """
    folder = user_path(folder)
    for name, wanted in read_text_sidecar(folder)["sha256"].items():
        found = hash_file(folder / name)
        if found != wanted:
            raise ValueError(
                f"{str(folder / name)!r} has sha256 {found}, but {SIDECAR} states {wanted}; copy "
                "or prepare the folder again"
            )


def check_targets(train: TextSet, validation: TextSet | None) -> str | None:
    """Raises if the training or validation texts have no target to predict; returns a note for the
    log if the mask selects all training targets, else None.

    Raises:
      ValueError: there is nothing to learn, or nothing to evaluate.
    """
    if not train.num_asked:
        raise ValueError(
            f"{train.name}: none of its {train.num_targets:,} target tokens is part of an "
            "answer, so "
            "there is nothing to learn; prepare the chats again with a template that marks answers "
            "(--template FILE)"
        )
    if validation is not None and not validation.num_asked:
        raise ValueError(
            f"{validation.name}: none of the {validation.num_targets:,} target tokens of its "
            f"{validation.num_texts:,} validation texts is part of an answer, so there is nothing "
            "to evaluate; keep more texts for validation (validation_fraction), or 0 for none"
        )
    if train.num_asked == train.num_targets:
        return f"all {train.num_asked:,} target tokens are trained on, including those of questions"
    return None


class TextSetWriter:
    """Writes a text set, text by text; memory does not grow with their number.

    The method `finish` renames the files to their final names, the sidecar last. If the `with`
    block ends without `finish`, the written files are removed.
    """

    def __init__(self, folder: Path, vocab_size: int):
        """Opens partial files in an existing `folder`; `vocab_size` determines the width of ids."""
        self._folder, self._dtype = folder, smallest_dtype(vocab_size)
        names = (TOKENS, MASK, OFFSETS, ROWS)
        partials = {name: folder / f"{name}{_PARTIAL}" for name in names}
        for partial in partials.values():
            partial.unlink(missing_ok=True)
        self._streams = {name: partial.open("xb") for name, partial in partials.items()}
        self._bits = np.zeros(0, bool)  # bits that do not fill a byte yet
        self.num_texts = self.num_tokens = self.num_asked = 0
        self._streams[OFFSETS].write(np.zeros(1, "<i8").tobytes())
        self._files: list[tuple[int, str]] = []

    def __enter__(self) -> TextSetWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del kind, error, trace
        for name, stream in self._streams.items():
            stream.close()
            (self._folder / f"{name}{_PARTIAL}").unlink(missing_ok=True)

    def add(self, ids: np.ndarray, asked: np.ndarray, place: tuple[str, int] | None = None) -> None:
        """Adds one text.

        Args:
          ids: token ids, integers [n] with n >= 1, below the vocabulary size.
          asked: bool [n], whether each token is to be predicted.
          place: (source file of the text, number of its row there, from 1). Pass it for all texts,
            in the order of files, or for none.
        """
        assert (place is not None) == bool(self._files) or not self.num_texts, "all or none"
        if place is not None:
            if not self._files or self._files[-1][1] != place[0]:
                self._files.append((self.num_texts, place[0]))
            self._streams[ROWS].write(np.array([place[1]], "<i8").tobytes())
        self._streams[TOKENS].write(ids.astype(self._dtype).tobytes())
        bits = np.concatenate([self._bits, asked])
        whole = len(bits) & ~7
        self._streams[MASK].write(np.packbits(bits[:whole], bitorder="little").tobytes())
        self._bits = bits[whole:]
        self.num_texts += 1
        self.num_tokens += len(ids)
        self.num_asked += int(np.count_nonzero(asked))
        self._streams[OFFSETS].write(np.array([self.num_tokens], "<i8").tobytes())

    def finish(self, about: Mapping[str, Any]) -> None:
        """Renames the files to their final names and writes the sidecar.

        Args:
          about: JSON-compatible entries besides sizes and checksums; its "sha256" has the checksums
            of further files.
        """
        self._streams[MASK].write(np.packbits(self._bits, bitorder="little").tobytes())
        sums = dict(about.get("sha256", {}))
        for name, stream in self._streams.items():
            stream.close()
            if name == ROWS and not self._files:
                continue
            (self._folder / f"{name}{_PARTIAL}").replace(self._folder / name)
            sums[name] = hash_file(self._folder / name)
        content = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": self._dtype.name,
            "texts": self.num_texts,
            "tokens": self.num_tokens,
            "asked_tokens": self.num_asked,
            **({"files": self._files} if self._files else {}),
            **about,
            "sha256": sums,
        }
        replace_text(self._folder / SIDECAR, json.dumps(content, indent=1) + "\n")


def _map(file: Path, dtype: np.dtype, count: int) -> np.ndarray:
    num_bytes = size_of(file) if file.exists() else 0
    if num_bytes != count * dtype.itemsize:
        raise ValueError(
            f"{str(file)!r} has {num_bytes} bytes, but {SIDECAR} states {count * dtype.itemsize}; "
            "the file is truncated or was changed: copy or prepare the folder again"
        )
    return np.asarray(np.memmap(file, dtype, mode="r"))
