"""Subword tokenizers of the package `tokenizers`: trained on the corpus, or read from a file."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from zerojax.config.display import cut, quoted
from zerojax.data.spliced_encoding import PieceSizes, encode_spliced
from zerojax.data.text_barriers import Barriers, barriers_of, is_slow_pattern

END_OF_TEXT = "<|endoftext|>"
NUM_BYTES = 256
# Minimum vocabulary size of a BPE: 256 bytes and END_OF_TEXT, without merges.
MIN_BPE_SIZE = NUM_BYTES + 1
# Number of characters that one core encodes at a time: enough to amortise the call, few enough to
# use many cores.
PIECE_CHARACTERS = 1 << 14
# Number of pieces that are encoded together.
_BLOCK_PIECES = 64
# Maximum number of characters that are encoded in one call because the text cannot be cut; they
# need about 1 GiB, for Chinese about 3.
MAX_WHOLE_CHARACTERS = 1 << 23
# Common names of the end-of-text token, used if no settings file names it.
END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
_MISSING = (
    "a BPE tokenizer needs the package `tokenizers`, which is not installed: run "
    "`pip install tokenizers`, or use tokenizer='bytes'"
)


def _backend_of(content: Mapping[str, Any]) -> Any:
    """Builds the `tokenizers.Tokenizer` of a tokenizer.json.

    Raises:
      ValueError: the package `tokenizers` cannot read it.
      ImportError: the package is not installed.
    """
    tokenizers = import_tokenizers()
    try:
        with _refusals():
            backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    except ValueError as error:
        raise ValueError(
            f"{error}; if a newer version wrote this file, run `pip install --upgrade tokenizers`"
        ) from error
    backend.no_truncation()
    backend.no_padding()
    return backend


class _SubwordTokenizer:
    """What both tokenizers of the package `tokenizers` have in common."""

    def __init__(self, backend: Any, content: Mapping[str, Any] | None = None):
        """Wraps `backend`, a `tokenizers.Tokenizer`, made of the `content` of a tokenizer.json."""
        self._backend = backend
        self._is_slow = content is not None and is_slow_pattern(content)
        ids = backend.get_vocab(with_added_tokens=True).values()
        self.vocab_size: int = max(ids, default=-1) + 1

    @functools.cached_property
    def _barriers(self) -> Barriers | None:
        tokens = self._backend.get_vocab(with_added_tokens=False)
        return barriers_of(json.loads(self._backend.to_str()), tokens)

    def _encodings(self, texts: Sequence[str], with_offsets: bool = True) -> list[Any]:
        """Encodes texts without the template's tokens; returns a `tokenizers.Encoding` for each."""
        call = self._backend.encode_batch if with_offsets else self._backend.encode_batch_fast
        with _refusals("encode the text", self._is_slow):
            return call(list(texts), add_special_tokens=False)

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of `text`, int32 [n]; the template's tokens are not added.

        Long texts are encoded on all cores.

        Raises:
          ValueError: the tokenizer fails, or a long text cannot be cut.
        """
        return np.concatenate(list(self.encode_pieces((text,))))

    def encode_pieces(self, pieces: Iterable[str]) -> Iterator[np.ndarray]:
        """Yields the ids of a text that comes in pieces, int32: together those of `encode`.

        Raises:
          ValueError: the tokenizer fails, or a part of the text that cannot be cut without changing
            ids has more than `MAX_WHOLE_CHARACTERS`.
        """
        sizes = PieceSizes(
            piece=PIECE_CHARACTERS,
            block=PIECE_CHARACTERS * _BLOCK_PIECES,
            whole=MAX_WHOLE_CHARACTERS,
        )
        return encode_spliced(pieces, self._encodings, lambda: self._barriers, sizes)

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns (ids, offsets) for each text: ids int32 [n], and offsets int64 [n, 2], which are
        the characters [start, end) that each id covers.

        The template's tokens are not added. A special token written in a text is encoded as that
        token.
        """
        return [
            (np.asarray(e.ids, np.int32), np.asarray(e.offsets, np.int64).reshape(-1, 2))
            for e in self._encodings(texts)
        ]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decodes ids to text, including special tokens; raises a ValueError for an unknown id."""
        checked = checked_ids(ids, self.vocab_size).tolist()
        with _refusals("decode the ids", self._is_slow):
            return self._backend.decode(checked, skip_special_tokens=False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(vocab_size={self.vocab_size})"


class BpeTokenizer(_SubwordTokenizer):
    """Byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2) by the `tokenizers` package.

    `BpeTokenizer.train(texts, vocab_size=...)` and `tokenizer_from_dict` make one.
    """

    @classmethod
    def from_content(cls, content: Mapping[str, Any]) -> BpeTokenizer:
        """Builds the tokenizer from the tokenizer.json content that `to_dict` stores.

        Raises:
          ValueError: the package `tokenizers` cannot read it.
        """
        return cls(_backend_of(content), content)

    @classmethod
    def train(cls, texts: Iterable[str], *, vocab_size: int) -> BpeTokenizer:
        """Trains the merges on `texts`; deterministic.

        A small corpus may allow fewer merges than requested; `.vocab_size` is the actual size.

        Raises:
          ValueError: `vocab_size` is below 257 (the bytes and the end-of-text token) or above
            2**20.
          ImportError: the package `tokenizers` is not installed; the message has the
            command to install it.
        """
        if not MIN_BPE_SIZE <= vocab_size <= 1 << 20:
            raise ValueError(
                f"bpe vocabulary of {vocab_size}: it must be between {MIN_BPE_SIZE} (256 bytes and "
                f"{END_OF_TEXT}) and {1 << 20}; 'bpe:4096' suits a few MB of text"
            )
        tokenizers = import_tokenizers()
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        with _refusals("be trained on the texts"):
            backend.train_from_iterator(iter(texts), trainer=trainer)
        return cls(backend)

    @property
    def separator(self) -> np.ndarray:
        """Id of the end-of-text token, int32 [1]; empty if a tokenizer trained elsewhere has no
        such token."""
        end = self._backend.token_to_id(END_OF_TEXT)
        return np.asarray([] if end is None else [end], np.int32)

    def to_dict(self) -> dict[str, Any]:
        """Returns the whole tokenizer as a dict that needs no other file."""
        return {"kind": "bpe", "json": json.loads(self._backend.to_str())}


class HuggingFaceTokenizer(_SubwordTokenizer):
    """Tokenizer of a model's tokenizer.json: BPE, WordPiece or Unigram, trained elsewhere.

    Truncation and padding settings of the file are ignored, because they are meant for single texts
    (those of all-MiniLM-L6-v2 would cut a corpus to 128 tokens).

    Attributes:
      vocab_size: largest id plus one; ids may have gaps.
      prefix, suffix: int32 ids that the tokenizer's template puts before and after a text, such as
        [CLS] and [SEP] of BERT or <|begin_of_text|> of Llama 3; often none.
      separator: int32 ids between two documents: the suffix (without a suffix, the id of `end`),
        then the prefix of the next document.
    """

    def __init__(self, content: Mapping[str, Any], *, end: str | None = None):
        """Builds the tokenizer.

        Args:
          content: content of a tokenizer.json.
          end: name of the token that ends a text. None uses the first of `END_NAMES` that exists.

        Raises:
          ValueError: `content` is not that of a tokenizer.json, or the token `end` does not exist.
          ImportError: the package `tokenizers` is not installed.
        """
        self._content = content
        if end is not None and not isinstance(end, str):
            raise ValueError(
                f"the token that ends a text is {quoted(end)}; write its name, such as "
                f"{END_OF_TEXT}, or leave it out"
            )
        super().__init__(backend := _backend_of(content), content)
        self.end = end or next((x for x in END_NAMES if backend.token_to_id(x) is not None), None)
        self.prefix, self.suffix = self._template()
        closing = self.suffix
        if not closing.size and self.end is not None:
            closing = np.asarray([self.id_of(self.end)], np.int32)
        self.separator = np.concatenate([closing, self.prefix])

    def _template(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids that the tokenizer's template puts before and after a text; compares one
        text encoded with and without them."""
        probe = "a"
        bare = self._encodings([probe])[0].ids
        with _refusals("encode the text", self._is_slow):
            full = self._backend.encode(probe, add_special_tokens=True).ids
        extra = len(full) - len(bare)
        start = next((at for at in range(extra + 1) if full[at : at + len(bare)] == bare), 0)
        before, after = full[:start], full[start + len(bare) :]
        return np.asarray(before, np.int32), np.asarray(after, np.int32)

    def id_of(self, token: str) -> int:
        """Returns the id of a token by its name, such as "[MASK]".

        Raises:
          ValueError: there is no token of this name.
        """
        found = self._backend.token_to_id(token)
        if found is None:
            known = [token.content for token in self._backend.get_added_tokens_decoder().values()]
            raise ValueError(
                f"the tokenizer has no token {token!r}; its special tokens are "
                f"{', '.join(known[:12]) or 'none'}"
            )
        return found

    @functools.cached_property
    def special_ids(self) -> np.ndarray:
        """Ids of the special tokens, such as [CLS] and [PAD], int32, sorted."""
        added = self._backend.get_added_tokens_decoder()
        return np.asarray(sorted(i for i, token in added.items() if token.special), np.int32)

    @property
    def special_texts(self) -> tuple[str, ...]:
        """Texts of the special tokens, such as <|im_end|>."""
        added = self._backend.get_added_tokens_decoder().values()
        return tuple(token.content for token in added if token.special)

    def encode_texts(
        self, texts: Sequence[str], *, max_length: int | None = None
    ) -> dict[str, np.ndarray]:
        """Encodes texts for a text model: with the template, truncated and padded to one length.

        Args:
          texts: texts, at least one.
          max_length: maximum number of tokens, including those of the template; longer texts are
            truncated. None for no limit.

        Returns:
          {"tokens": int32 [texts, length], "attention_mask": int32 [texts, length], 0 for padding},
          with the length of the longest text.

        Raises:
          ValueError: there are no texts, or `max_length` leaves no space besides the template.
        """
        around = len(self.prefix) + len(self.suffix)
        if not texts:
            raise ValueError("texts is empty; pass at least one text")
        if max_length is not None and max_length <= around:
            raise ValueError(
                f"max_length={max_length}: the template alone has {around} tokens; use a larger "
                "max_length"
            )
        encodings = self._encodings(texts, with_offsets=False)
        room = None if max_length is None else max_length - around
        rows = [
            np.concatenate([self.prefix, np.asarray(e.ids[:room], np.int32), self.suffix])
            for e in encodings
        ]
        length = max(len(row) for row in rows)
        tokens = np.full((len(rows), length), self._padding_id, np.int32)
        mask = np.zeros((len(rows), length), np.int32)
        for index, row in enumerate(rows):
            tokens[index, : len(row)] = row
            mask[index, : len(row)] = 1
        return {"tokens": tokens, "attention_mask": mask}

    @property
    def _padding_id(self) -> int:
        """Returns the id for padding tokens; any id works, since padding is masked."""
        found = self._backend.token_to_id("[PAD]")
        return 0 if found is None else found

    def to_dict(self) -> dict[str, Any]:
        """Returns the whole tokenizer as a dict that needs no other file."""
        return {"kind": "hugging_face", "end": self.end, "json": self._content}


_PANICS = threading.Lock()


@contextlib.contextmanager
def _refusals(what: str = "read it", is_slow: bool = False) -> Iterator[None]:
    """Makes a ValueError of any error of the package `tokenizers`, a Rust panic included.

    Args:
      what: what the package was asked for, for the message.
      is_slow: whether a panic is likely, since a regular expression may try too many ways. What
        Rust writes about it to stderr is dropped then.
    """
    try:
        with _silent_panics() if is_slow else contextlib.nullcontext():
            yield
    except BaseException as error:  # a panic is no Exception
        is_panic = type(error).__name__ == "PanicException"
        if not is_panic and type(error) is not Exception:  # the package raises bare Exceptions
            raise
        cause = cut(" ".join(str(error).split()), 200)
        remedy = "; use the tokenizer.json that the model was published with"
        if is_panic:
            remedy += ", or simplify the regular expressions in it"
        raise ValueError(
            f"the package `tokenizers` cannot {what} with this tokenizer.json: {cause}{remedy}"
        ) from None


@contextlib.contextmanager
def _silent_panics() -> Iterator[None]:
    """Drops what is written to file descriptor 2 in the context if it raises; else writes it
    afterwards. Rust writes a panic, of many lines, there before Python can catch it."""
    # Descriptor 2 is that of all threads, so only one at a time may replace it.
    with _PANICS, tempfile.TemporaryFile() as notes:
        sys.stderr.flush()
        saved = os.dup(2)
        os.dup2(notes.fileno(), 2)
        is_good = False
        try:
            yield
            is_good = True
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            notes.seek(0)
            if is_good and (text := notes.read()):
                os.write(2, text)


def checked_ids(ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """Returns token ids as an integer array [n], after checking that each is in [0, vocab_size).

    Raises:
      TypeError: the ids are not integers.
      ValueError: an id is outside [0, vocab_size).
    """
    array = np.asarray(ids).reshape(-1)
    if not array.size:
        return array.astype(np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"token ids have dtype {array.dtype}; pass integers")
    bad = np.flatnonzero((array < 0) | (array >= vocab_size))
    if bad.size:
        raise ValueError(
            f"token id {array[bad[0]]} at position {bad[0]} is outside [0, {vocab_size}); these "
            "ids come from another tokenizer, or from a model with a larger vocabulary"
        )
    return array


def import_tokenizers() -> Any:
    """Imports the package `tokenizers`; an ImportError contains the command to install it."""
    # Lazy, because the package is optional, and byte tokenizers do not need its start-up time.
    # Imported by name, so that type checkers work without the package.
    try:
        return importlib.import_module("tokenizers")
    except ImportError as error:
        raise ImportError(_MISSING) from error
