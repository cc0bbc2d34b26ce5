"""How text becomes token ids and back: bytes by default, or a BPE trained on the corpus itself.

Knows strings and ids; never touches files of tokens, batches or JAX.
"""

from __future__ import annotations

import importlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

END_OF_TEXT = "<|endoftext|>"
NUM_BYTES = 256
# 256 byte symbols and END_OF_TEXT: what a BPE without a single merge has.
MIN_BPE_SIZE = NUM_BYTES + 1
# What one core encodes at a time: long enough to amortise the call, short enough for many cores.
PIECE_CHARACTERS = 1 << 14
_CUT = re.compile(r"(?<=\S\n)(?=\S)")
_BPE_SPEC = re.compile(r"bpe:(\d[\d_]*)")
_MISSING = (
    "a BPE tokenizer needs the package `tokenizers`, which is not installed: run "
    "`pip install tokenizers`, or use tokenizer='bytes'"
)


@runtime_checkable
class Tokenizer(Protocol):
    """What zerojax needs of a tokenizer; anything with these members will do."""

    @property
    def vocab_size(self) -> int:
        """Number of ids; every id is in [0, vocab_size)."""
        ...

    @property
    def separator(self) -> np.ndarray:
        """The ids between two documents: int32 [n], n may be 0."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """int32 [n] ids; `decode(encode(text)) == text`."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of the ids; incomplete characters become U+FFFD."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; `tokenizer_from_dict` is its inverse."""
        ...


class ByteTokenizer:
    """The 256 bytes of UTF-8: no vocabulary to train, nothing is ever out of vocabulary.

    >>> ByteTokenizer().encode("Ah!").tolist()
    [65, 104, 33]
    """

    vocab_size = NUM_BYTES

    @property
    def separator(self) -> np.ndarray:
        """A blank line: bytes leave no id for an end-of-text mark."""
        return self.encode("\n\n")

    def encode(self, text: str) -> np.ndarray:
        """int32 [n]: the UTF-8 bytes of `text`."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text; a cut character becomes U+FFFD. Raises ValueError for an id outside 0-255."""
        return _checked_ids(ids, NUM_BYTES).astype(np.uint8).tobytes().decode("utf-8", "replace")

    def to_dict(self) -> dict[str, Any]:
        """`{"kind": "bytes"}`."""
        return {"kind": "bytes"}

    def __repr__(self) -> str:
        return "ByteTokenizer()"


class BpeTokenizer:
    """Byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2) by the `tokenizers` package.

    Make one with `BpeTokenizer.train(texts, vocab_size=...)` or `tokenizer_from_dict`.
    """

    def __init__(self, backend: Any):
        """`backend`: a `tokenizers.Tokenizer`."""
        self._backend = backend
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    @classmethod
    def train(cls, texts: Iterable[str], *, vocab_size: int) -> BpeTokenizer:
        """Learns the merges of `texts`; deterministic.

        A small corpus may hold fewer merges than asked for: `.vocab_size` is what was reached.

        Raises:
          ValueError: `vocab_size` below 257 (the bytes and the end-of-text mark) or above 2**20.
          ImportError: the package `tokenizers` is not installed (with the command to get it).
        """
        if not MIN_BPE_SIZE <= vocab_size <= 1 << 20:
            raise ValueError(
                f"bpe vocabulary of {vocab_size}: it must be between {MIN_BPE_SIZE} (256 bytes and "
                f"{END_OF_TEXT}) and {1 << 20}; 'bpe:4096' is a good size for a few MB of text"
            )
        tokenizers = _import_tokenizers()
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator(iter(texts), trainer=trainer)
        return cls(backend)

    @property
    def separator(self) -> np.ndarray:
        """The end-of-text id, int32 [1]; [0] for a foreign tokenizer that has no such token."""
        end = self._backend.token_to_id(END_OF_TEXT)
        return np.asarray([] if end is None else [end], np.int32)

    def encode(self, text: str) -> np.ndarray:
        """int32 [n] ids of `text`; no special tokens are added."""
        # Pieces are encoded on all cores: twice as fast as one call on two cores.
        encodings = self._backend.encode_batch_fast(_pieces(text), add_special_tokens=False)
        return np.concatenate([np.asarray(e.ids, np.int32) for e in encodings])

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of the ids, end-of-text marks written out; ValueError for an unknown id."""
        checked = _checked_ids(ids, self.vocab_size).tolist()
        return self._backend.decode(checked, skip_special_tokens=False)

    def to_dict(self) -> dict[str, Any]:
        """The whole tokenizer; needs no file beside it."""
        return {"kind": "bpe", "json": json.loads(self._backend.to_str())}

    def __repr__(self) -> str:
        return f"BpeTokenizer(vocab_size={self.vocab_size})"


def as_tokenizer(spec: Any, texts: Iterable[str] | None = None) -> Tokenizer:
    """A tokenizer from what a user writes.

    Args:
      spec: "bytes", "bpe:2048" (trained on `texts`), the path of a tokenizer file (ours, or a
        `tokenizer.json` of the `tokenizers` package), the dict of `to_dict`, or a tokenizer.
      texts: what a "bpe:..." is trained on; only read in that case.

    Raises:
      ValueError: an unknown spec, or "bpe:..." without text.
      FileNotFoundError: a path that does not exist.
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
            f"tokenizer={spec!r} is to be trained, but there is no text here to train it on; pass "
            "the path of a tokenizer file that `zerojax data prepare` or a run has saved"
        )
    return BpeTokenizer.train(texts, vocab_size=size)


def bpe_size(spec: Any) -> int | None:
    """4096 for "bpe:4096"; None for any other spec.

    Raises:
      ValueError: "bpe" or "bpe:..." without a number.
    """
    match = _BPE_SPEC.fullmatch(spec) if isinstance(spec, str) else None
    if match:
        return int(match[1])
    if isinstance(spec, str) and (spec == "bpe" or spec.startswith("bpe:")):
        raise ValueError(f"tokenizer={spec!r}: write the vocabulary size, for example 'bpe:4096'")
    return None


def tokenizer_from_dict(value: Mapping[str, Any]) -> Tokenizer:
    """The inverse of `to_dict`; also takes the content of a `tokenizers` tokenizer.json.

    Raises:
      ValueError: a dict of no known kind.
    """
    kind = value.get("kind")
    if kind == "bytes":
        return ByteTokenizer()
    content = value.get("json") if kind == "bpe" else value
    if isinstance(content, Mapping) and "model" in content:
        return BpeTokenizer(_import_tokenizers().Tokenizer.from_str(json.dumps(content)))
    raise ValueError(
        f"not a tokenizer: keys {sorted(map(str, value))[:8]}, kind {kind!r}; known are kind "
        "'bytes', kind 'bpe', and the tokenizer.json of the package `tokenizers`"
    )


def save_tokenizer(tokenizer: Tokenizer, path: str | Path) -> Path:
    """Writes `to_dict` as JSON; returns the path."""
    path = Path(path)
    path.write_text(json.dumps(tokenizer.to_dict(), ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Reads what `save_tokenizer` wrote, or a tokenizer.json of the `tokenizers` package.

    Raises:
      FileNotFoundError: no such file, and the text is no known spec either.
      ValueError: the file is not a tokenizer.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(
            f"tokenizer={str(path)!r} is neither 'bytes', nor 'bpe:<size>', nor an existing file"
        )
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(file)!r} is not a tokenizer file: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{str(file)!r} is not a tokenizer file: a JSON {type(value).__name__}")
    return tokenizer_from_dict(value)


def _pieces(text: str) -> list[str]:
    """`text` cut at single line ends before a visible character, where no token reaches across."""
    cuts = [0]
    while match := _CUT.search(text, cuts[-1] + PIECE_CHARACTERS):
        cuts.append(match.end())
    return [text[start:end] for start, end in itertools.pairwise([*cuts, len(text)])]


def _checked_ids(ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    array = np.asarray(ids).reshape(-1)
    if not array.size:
        return array.astype(np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"token ids of dtype {array.dtype}; pass integers")
    bad = np.flatnonzero((array < 0) | (array >= vocab_size))
    if bad.size:
        raise ValueError(
            f"token id {array[bad[0]]} at position {bad[0]} is outside [0, {vocab_size}); these "
            "ids come from another tokenizer, or from a model with a larger vocabulary"
        )
    return array


def _import_tokenizers() -> Any:
    # Lazy: an optional package, and bytes need none of its start-up time. By name: a type checker
    # without the package has nothing to complain about.
    try:
        return importlib.import_module("tokenizers")
    except ImportError as error:
        raise ImportError(_MISSING) from error
