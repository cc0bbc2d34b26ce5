"""Token files: their format, and memory-mapped reads of windows (ranges of tokens).

A `.bin` file contains only little-endian uint8, uint16 or uint32 ids. A `.json` file with the same
stem, its sidecar, describes it: `dtype` is required; `count`, `vocab_size`, `tokenizer` and
`sha256` are optional.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zerojax.config.checks import MAX_SIZE
from zerojax.config.display import cut, quoted
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.loader import user_path
from zerojax.config.regular_files import check_regular, open_regular
from zerojax.data.corpus import TOKEN_SUFFIXES, find_files
from zerojax.runtime.bounded_json import JsonError, load

FORMAT = "zerojax-tokens"
DTYPES: Mapping[str, np.dtype] = {
    "uint8": np.dtype("<u1"),
    "uint16": np.dtype("<u2"),
    "uint32": np.dtype("<u4"),
}
# Files up to this size are searched for ids outside the vocabulary when they are opened, which
# takes about 0.1 s. In larger files every batch is checked when it is read.
SCAN_BYTES = 256 << 20
_BLOCK = 1 << 22
_NPY_HEADERS: Mapping[tuple[int, int], Callable[..., Any]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
VOCAB_SIZES = f"a number of ids from 1 to {MAX_SIZE}"
_VALIDATION_STEM = re.compile(r"(^|[._-])(val|valid|validation)([._-]|$)")


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenPart:
    """Range of consecutive tokens of one file."""

    ids: np.ndarray
    """Integers [n], usually memory-mapped: values are read only when indexed."""
    name: str
    """Source file of the tokens, for messages."""
    offset: int = 0
    """Position of `ids[0]` in this file, in tokens."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """Token ids in one or several parts; a window never crosses from one part to the next."""

    parts: tuple[TokenPart, ...]
    vocab_size: int | None = None
    """Every id is below this number, as the writer of the file guarantees; None if unknown."""
    tokenizer: Mapping[str, Any] | None = dataclasses.field(default=None, repr=False)
    """`Tokenizer.to_dict` of the tokenizer that made the ids; None if unknown."""
    share: str = ""
    """Which share of its data this is, for messages about its size; "" for all."""

    @property
    def count(self) -> int:
        """Number of tokens in all parts."""
        return sum(len(part.ids) for part in self.parts)

    @property
    def name(self) -> str:
        """Short name of the tokens for messages."""
        more = f" and {len(self.parts) - 1} more" if len(self.parts) > 1 else ""
        return f"{self.parts[0].name}{more}" if self.parts else "no tokens"

    def windows_per_part(self, seq_len: int) -> np.ndarray:
        """Returns the number of windows of seq_len + 1 tokens in each part, int64 [parts].

        Neighbouring windows share one token: the last target of a window is the first input of the
        next.
        """
        sizes = np.array([len(part.ids) for part in self.parts], np.int64)
        return np.maximum(sizes - 1, 0) // seq_len

    def split(self, fraction: float) -> tuple[Tokens, Tokens | None]:
        """Returns `(head, tail)`: tokens for training, and the last `fraction` of all for
        validation.

        Deterministic, without shared tokens or copies. The tail is None if it would have no token.

        Raises:
          ValueError: the fraction is outside [0, 1).
        """
        if not 0 <= fraction < 1:
            raise ValueError(f"validation_fraction={fraction}: it must be at least 0 and below 1")
        left = self.count - round(self.count * fraction)
        if left == self.count:
            return self, None
        head, tail = [], []
        for part in self.parts:
            cut = min(left, len(part.ids))
            left -= cut
            if cut:
                head.append(dataclasses.replace(part, ids=part.ids[:cut]))
            if cut < len(part.ids):
                offset = part.offset + cut
                tail.append(dataclasses.replace(part, ids=part.ids[cut:], offset=offset))
        return (
            dataclasses.replace(
                self, parts=tuple(head), share=f" left by validation_fraction={fraction}"
            ),
            dataclasses.replace(self, parts=tuple(tail), share=" for validation"),
        )

    @functools.cached_property
    def fingerprint(self) -> str:
        """Text of 16 hex digits, computed from the sizes and at most 2048 ids of every part."""
        digest = hashlib.sha256()
        for part in self.parts:
            digest.update(f"{len(part.ids)}:".encode())
            for piece in (part.ids[:1024], part.ids[len(part.ids) // 2 :][:512], part.ids[-512:]):
                digest.update(np.asarray(piece, "<i8").tobytes())
        return digest.hexdigest()[:16]


def check_not_cut(array: np.ndarray, name: str) -> None:
    """Raises if an array's file was truncated after it was mapped; costs one system call.

    A read beyond the end of a mapped file kills the process (SIGBUS) without a message.

    Args:
      array: array, memory-mapped or not.
      name: name of its file, for the message.

    Raises:
      ValueError: the file is shorter than its mapping.
    """
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap) and base.size() < len(base):
        raise ValueError(
            f"{name} has {base.size():,} bytes now, but had {len(base):,} when it was opened: "
            "another program has truncated it; copy or prepare it again, and start the run again"
        )


def gather_windows(ids: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """Copies the windows `ids[start : start + length]` for all starts, in one indexing operation.

    Args:
      ids: [n] of any integer dtype, memory-mapped or not; only the windows are read.
      starts: int64 [b] in [0, n - length].
      length: number of tokens per window.

    Returns:
      A new array [b, length] with the dtype of `ids`.
    """
    return np.lib.stride_tricks.sliding_window_view(np.asarray(ids), length)[starts]


def tokens_of_array(ids: np.ndarray, *, name: str = "the token array") -> Tokens:
    """Makes `Tokens` from an integer array [n] in memory.

    Raises:
      TypeError: the array does not contain integers.
      ValueError: the array is not one-dimensional.
    """
    array = np.asarray(ids)
    _check_array(array.dtype, array.shape, name)
    return Tokens(parts=(TokenPart(ids=array, name=name),))


def is_token_path(path: Path) -> bool:
    """Returns whether `path` is a token file or a folder that contains token files."""
    if path.is_dir():
        return bool(find_files(path, TOKEN_SUFFIXES))
    return path.suffix.lower() in TOKEN_SUFFIXES


def open_tokens(paths: Sequence[Path]) -> tuple[Tokens | None, Tokens | None]:
    """Maps token files into memory; reads only sidecars and file headers.

    Args:
      paths: files, or folders whose token files are used in the order of their names.

    Returns:
      `(train, validation)`. Files whose name has a part "val", "valid" or "validation"
        (`validation.bin`, `corpus_val_000.npy`) are validation data, unless a single file is passed
        by its name. Either is None if it has no file.

    Raises:
      ValueError: a `.bin` has no usable sidecar, a size differs from the sidecar's count, an array
        is not one row or is truncated, or files were made by different tokenizers.
      TypeError: an array does not contain integers.
    """
    files: list[Path] = []
    for path in paths:
        files += find_files(path, TOKEN_SUFFIXES) if path.is_dir() else [path]
    # A file that is named alone is for training, whatever its name.
    if len(files) == 1 and not paths[0].is_dir():
        return _open_files(files), None
    validation = [file for file in files if _VALIDATION_STEM.search(file.stem.lower())]
    train = [file for file in files if file not in validation]
    return _open_files(train), _open_files(validation)


def _open_files(files: Sequence[Path]) -> Tokens | None:
    if not files:
        return None
    opened = [
        _open_npy(file) if file.suffix.lower() == ".npy" else _open_bin(file) for file in files
    ]
    first = opened[0]
    for file, tokens in zip(files, opened, strict=True):
        if (tokens.tokenizer, tokens.vocab_size) != (first.tokenizer, first.vocab_size):
            raise ValueError(
                f"{str(file)!r} (vocabulary {tokens.vocab_size}) was not made by the tokenizer of "
                f"{str(files[0])!r} (vocabulary {first.vocab_size}); one corpus must have one "
                "tokenizer: keep them in separate folders"
            )
    parts = tuple(part for tokens in opened for part in tokens.parts)
    return dataclasses.replace(first, parts=parts)


def _open_npy(file: Path) -> Tokens:
    with open(open_regular(file), "rb") as stream:
        try:
            version = np.lib.format.read_magic(stream)
            if version not in _NPY_HEADERS:
                raise ValueError(f"its version is {version}, but token ids have (1, 0) or (2, 0)")
            shape, _, dtype = _NPY_HEADERS[version](stream)
            if min(shape, default=0) < 0:
                raise ValueError(f"its shape is {shape}, which is not valid")
        except Exception as error:  # a damaged header raises many types
            reason = cut(str(error).partition("\n")[0], 200)
            raise ValueError(
                f"{str(file)!r} is not a readable .npy array: {reason}; save it again with "
                "numpy.save"
            ) from error
        start, size = stream.tell(), os.fstat(stream.fileno()).st_size
    if start + math.prod(shape) * dtype.itemsize > size:
        raise ValueError(
            f"{str(file)!r} has {size} bytes, fewer than an array {quoted(shape)} of {dtype} "
            "needs; the file is truncated: copy or save it again"
        )
    _check_array(dtype, shape, str(file))
    # An empty file cannot be mapped.
    mapped = np.memmap(file, dtype, "r", start, shape) if shape[0] else np.zeros(0, dtype)
    parts = (TokenPart(ids=np.asarray(mapped), name=str(file)),)
    sidecar = read_sidecar(file) if sidecar_path(file).is_file() else {}
    return Tokens(
        parts=parts, vocab_size=sidecar.get("vocab_size"), tokenizer=sidecar.get("tokenizer")
    )


def _open_bin(file: Path) -> Tokens:
    sidecar = read_sidecar(file)
    dtype = DTYPES[sidecar["dtype"]]
    num_bytes = size_of(file)
    count = sidecar.get("count", num_bytes // dtype.itemsize)
    if num_bytes != count * dtype.itemsize:
        raise ValueError(
            f"{str(file)!r} has {num_bytes} bytes, but {count} tokens of {dtype.name} in "
            f"{sidecar_path(file).name} make {count * dtype.itemsize}; the file is truncated or "
            "was changed: copy or prepare it again"
        )
    # An empty file cannot be mapped.
    ids = np.memmap(file, dtype, mode="r") if count else np.zeros(0, dtype)
    return Tokens(
        parts=(TokenPart(ids=np.asarray(ids), name=str(file)),),
        vocab_size=sidecar.get("vocab_size"),
        tokenizer=sidecar.get("tokenizer"),
    )


def size_of(file: Path) -> int:
    """Returns the size of a regular file in bytes."""
    status = file.stat()
    check_regular(status, file)
    return status.st_size


def _check_array(dtype: np.dtype, shape: Sequence[int], name: str) -> None:
    if dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {dtype}; token ids are integers: save them as such")
    if len(shape) != 1:
        raise ValueError(
            f"{name} has shape {quoted(tuple(shape))}; token ids are one row: save "
            "array.reshape(-1)"
        )


def check_unused(folder: Path, names: Iterable[str]) -> None:
    """Raises ValueError if a folder has `.bin` files, or files under names that are to be
    written."""
    if not folder.is_dir():
        return
    if any(folder.glob("*.bin")):
        raise ValueError(
            f"{str(folder)!r} already holds token files; choose another folder or remove them"
        )
    for name in names:
        if os.path.lexists(folder / name):
            raise ValueError(
                f"{str(folder / name)!r} exists already, and would be replaced; choose another "
                "folder or remove it"
            )


def sidecar_path(file: Path) -> Path:
    """Returns the path of a token file's sidecar: `corpus.json` for `corpus.bin`."""
    return file.with_suffix(".json")


def read_sidecar(file: Path) -> dict[str, Any]:
    """Reads and checks the sidecar (`.json` file) of a token file; returns its entries except
    nulls.

    Raises:
      ValueError: it is missing or not JSON, or a value has the wrong type.
    """
    path = sidecar_path(file)
    minimal = '{"dtype": "uint16"}'
    if not path.exists():
        raise ValueError(
            f"{str(file)!r} has no sidecar {path.name!r}, so the width of its ids is unknown; "
            f"write {minimal} (or uint8, uint32) into {str(path)!r} if it is raw ids without a "
            "header, or make it again with `zerojax data prepare`"
        )
    try:
        value = load(path)
    except JsonError as error:
        raise ValueError(f"{str(path)!r} {error.what}; write for example {minimal}") from error
    checks: dict[str, tuple[Callable[[Any], bool], str]] = {
        "dtype": (
            lambda x: is_dtype_name(x) or file.suffix == ".npy",
            f"one of {', '.join(DTYPES)}",
        ),
        "count": (lambda x: x is None or is_count(x, 0), "a number of tokens"),
        "vocab_size": (lambda x: x is None or is_vocab_size(x), VOCAB_SIZES),
        "tokenizer": (lambda x: x is None or isinstance(x, dict), "an object"),
    }
    if not isinstance(value, dict):
        raise ValueError(f"{str(path)!r} holds a {type(value).__name__}; write {minimal}")
    for key, (is_good, wanted) in checks.items():
        if not is_good(value.get(key)):
            raise ValueError(
                f"{str(path)!r}: {key}={quoted(value.get(key))}, but it must be {wanted}"
            )
    return {key: item for key, item in value.items() if item is not None}


def is_dtype_name(value: object) -> bool:
    """Returns whether a value is the name of a dtype that token files may have."""
    return isinstance(value, str) and value in DTYPES


def is_count(value: object, least: int) -> bool:
    """Returns whether a value is an integer of at least `least` that fits into 64 bits."""
    return type(value) is int and least <= value < 2**63


def is_vocab_size(value: Any) -> bool:
    """Returns whether a value is a valid vocabulary size of a model."""
    return is_count(value, 1) and value <= MAX_SIZE


def smallest_dtype(vocab_size: int) -> np.dtype:
    """Returns the narrowest dtype of a token file that can store ids below `vocab_size`."""
    return next(d for d in DTYPES.values() if vocab_size - 1 <= np.iinfo(d).max)


def check_ids(tokens: Tokens, vocab_size: int) -> None:
    """Checks before training that all ids are in [0, vocab_size): by the sidecar, else by the file.

    Reads no ids if the sidecar states a vocabulary size, or the dtype excludes larger ids. Files
    larger than SCAN_BYTES are not searched here; `TokenSource` checks each window when it is read.

    Raises:
      ValueError: an id is outside (names the file, the offset and the id), or the sidecar states a
        larger vocabulary than `vocab_size`.
    """
    if tokens.vocab_size is not None:
        check_vocab_sizes(tokens.name, tokens.vocab_size, vocab_size)
        return
    for part in tokens.parts:
        if part.ids.nbytes <= SCAN_BYTES:
            for start, block in _blocks(part.ids):
                check_block(block, vocab_size, name=part.name, offset=part.offset + start)


def check_vocab_sizes(name: str, of_data: int, of_model: int) -> None:
    """Checks that the data's tokenizer does not have more entries than the model's vocabulary.

    Raises:
      ValueError: it has more; names the data and both sizes.
    """
    if of_data > of_model:
        raise ValueError(
            f"{name} holds ids of a tokenizer with {of_data} entries, the model's vocab_size is "
            f"{of_model}; set it to {of_data} or more, or prepare the data with the model's "
            "tokenizer"
        )


def check_block(block: np.ndarray, vocab_size: int, *, name: str, offset: int) -> None:
    """Checks that the ids in a block [n] that begins at `offset` of a file are in [0, vocab_size).

    Raises:
      ValueError: an id is outside; names the first one, the file and the offset.
    """
    limits = np.iinfo(block.dtype)
    if not block.size or (limits.min >= 0 and limits.max < vocab_size):
        return
    if block.max() < vocab_size and (limits.min >= 0 or block.min() >= 0):
        return
    first = int(np.flatnonzero((block < 0) | (block >= vocab_size))[0])
    raise_it = f"set the model's vocab_size to {block.max() + 1} or more, or "
    raise ValueError(
        f"{name}: token id {block[first]} at offset {offset + first} is outside the vocabulary "
        f"[0, {vocab_size}); {raise_it if block.min() >= 0 else ''}make the file again with the "
        "model's tokenizer"
    )


def verify_tokens(file: str | Path) -> None:
    """Reads a whole `.bin` file and compares it with the sha256 of its sidecar.

    Raises:
      ValueError: they differ, or the sidecar has no sha256.
    """
    path = user_path(file)
    wanted = read_sidecar(path).get("sha256")
    found = hash_file(path)
    if wanted != found:
        raise ValueError(
            f"{str(path)!r} has sha256 {found}, but its sidecar states {wanted}; copy or prepare "
            "it again"
        )


def hash_file(path: Path) -> str:
    """Computes the sha256 of a file, as hex digits."""
    with open(open_regular(path), "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _blocks(ids: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    for start in range(0, len(ids), _BLOCK):
        yield start, ids[start : start + _BLOCK]
