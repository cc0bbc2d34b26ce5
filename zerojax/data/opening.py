"""Opens a user's data as sources of rows: paths, arrays, and mixtures of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zerojax.config.display import quoted
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.loader import user_path
from zerojax.config.regular_files import decode_text
from zerojax.config.sections import MixturePart
from zerojax.data.corpus import existing_path
from zerojax.data.mixture import MixtureSource
from zerojax.data.packed_source import PACKED_NAMES, LongTexts, PackedSource
from zerojax.data.packing import boundary_of
from zerojax.data.preparation import tokens_of_text
from zerojax.data.source import RowSource, TokenSource
from zerojax.data.text_set import (
    TextSet,
    check_targets,
    is_text_set,
    open_text_set,
    read_text_sidecar,
)
from zerojax.data.tokenizer import (
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    Tokenizer,
    as_tokenizer,
    bpe_size,
    load_tokenizer,
    tokenizer_from_dict,
)
from zerojax.data.tokens import (
    Tokens,
    check_ids,
    check_vocab_sizes,
    hash_file,
    is_token_path,
    open_tokens,
    tokens_of_array,
)


def as_source(
    data: object,
    *,
    tokenizer: Tokenizer | str | Path | None = "bytes",
    seq_len: int,
    global_batch_size: int,
    seed: int = 0,
    validation_fraction: float = 0.05,
    vocab_size: int | None = None,
    pack: bool = False,
    long_texts: LongTexts = "refuse",
) -> tuple[RowSource, RowSource | None, Tokenizer | None]:
    """Opens a user's data; returns training source, validation source and tokenizer.

    Args:
      data: None (the embedded Shakespeare), a text file, a folder of text files, a token file, a
        folder or sequence of token files, a folder of chats (made by `prepare_chats`), an integer
        array [n], or a `RowSource`, which must have the same `seq_len` and `global_batch_size` and
        has no validation source. For a mixture, several of these with weights: `{path: weight}` or
        a sequence of `MixturePart`s.
      tokenizer: tokenizer of text, as for `as_tokenizer`. Token files and chats name their own
        tokenizer: it replaces "bytes", the default, and must equal any other value.
      seq_len: number of input tokens per row.
      global_batch_size: number of rows per batch over all processes.
      seed: random seed for the order of the training rows.
      validation_fraction: fraction of the tokens, or of the chats, from the end, that is used for
        validation; 0 for none. Ignored if the folder has validation data (`validation.bin`, or
        chats that `prepare_chats` separated).
      vocab_size: vocabulary size of the model, if known; ids are checked against it.
      pack: whether batches separate the texts of a row (`TokenSource.boundary`), by the id that the
        tokenizer puts between two texts. Chats are always packed as whole texts (`PackedSource`).
      long_texts: handling of chats that are longer than a row: "refuse", "split" or "drop".

    Returns:
      `(train, validation, tokenizer)`. The validation source is not shuffled, and is None without
      validation data. The tokenizer is None if the data do not name one and `tokenizer` is "bytes",
      "bpe:..." or None.

    Raises:
      FileNotFoundError, ValueError, TypeError: an argument is invalid.
    """
    if isinstance(data, RowSource):
        return _given_source(data, tokenizer, seq_len, global_batch_size)
    if vocab_size is not None and vocab_size < 1:
        raise ValueError(f"vocab_size={vocab_size}: it must be at least 1")
    opening = _Opening(
        tokenizer=tokenizer,
        seq_len=seq_len,
        global_batch_size=global_batch_size,
        seed=seed,
        validation_fraction=validation_fraction,
        vocab_size=vocab_size,
        pack=pack,
        long_texts=long_texts,
    )
    parts = mixture_parts(data)
    return opening.mixture(parts) if parts else opening.source(data)


def mixture_parts(data: object) -> tuple[MixturePart, ...]:
    """Converts `{path: weight}` or `MixturePart`s to a tuple; returns () for other kinds of data.

    Raises:
      ConfigError: a weight is not a number above 0.
    """
    if isinstance(data, Mapping):
        return tuple(MixturePart(path=str(path), weight=x) for path, x in data.items())
    is_mixture = isinstance(data, Sequence) and not isinstance(data, str)
    if is_mixture and data and all(isinstance(part, MixturePart) for part in data):
        return tuple(data)
    return ()


def array_names(data: object, *, pack: bool = False) -> tuple[str, ...]:
    """Returns the names of the arrays in the rows of these data, as far as their sidecars tell.

    Args:
      data, pack: arguments as for `as_source`; data that do not exist count as text.
    """
    parts = mixture_parts(data)
    if parts:
        found = [array_names(part.path, pack=pack) for part in parts]
        return tuple(dict.fromkeys(name for names in found for name in names))
    if isinstance(data, RowSource):
        return tuple(data.rows(0, 1))
    if isinstance(data, str | Path) and is_text_set(user_path(data)):
        return PACKED_NAMES
    return PACKED_NAMES[:4] if pack else PACKED_NAMES[:2]


@dataclass(frozen=True, kw_only=True)
class _Opening:
    """Arguments of `as_source` while its data are opened."""

    tokenizer: Tokenizer | str | Path | None
    seq_len: int
    global_batch_size: int
    seed: int
    validation_fraction: float
    vocab_size: int | None
    pack: bool
    long_texts: LongTexts

    def source(self, data: object) -> tuple[RowSource, RowSource | None, Tokenizer | None]:
        """Opens one data set (not a mixture)."""
        if isinstance(data, str | Path) and is_text_set(existing_path(data)):
            return self._chats(existing_path(data))
        tokens, validation, ready = _open(data, self.tokenizer)
        if validation is not None:
            share = " for validation (the share is --validation-fraction of `zerojax data prepare`)"
            validation = dataclasses.replace(validation, share=share)
        else:
            fraction = self.validation_fraction
            tokens, validation = tokens.split(fraction)
            sizes = self.seq_len, self.global_batch_size
            _check_validation_size(tokens, validation, fraction, *sizes)
        for part in (tokens, validation):
            if self.vocab_size is not None and part is not None:
                check_ids(part, self.vocab_size)
        train = TokenSource(
            tokens=tokens,
            seq_len=self.seq_len,
            global_batch_size=self.global_batch_size,
            seed=self.seed,
            vocab_size=self.vocab_size or tokens.vocab_size,
            boundary=boundary_of(ready, tokens.name) if self.pack else None,
        )
        if validation is None:
            return train, None, ready
        return train, dataclasses.replace(train, tokens=validation, shuffle=False), ready

    def _chats(self, folder: Path) -> tuple[RowSource, RowSource | None, Tokenizer | None]:
        texts, validation = open_texts(folder)
        ready = _tokenizer_of(texts.tokenizer, texts.name, self.tokenizer)
        if self.vocab_size is not None and texts.vocab_size is not None:
            check_vocab_sizes(texts.name, texts.vocab_size, self.vocab_size)
        if validation is None:
            apart = round(texts.num_texts * self.validation_fraction)
            if apart:
                validation = texts.part(texts.num_texts - apart, texts.num_texts)
                texts = texts.part(0, texts.num_texts - apart)
        check_targets(texts, validation)
        train = PackedSource(
            texts=texts,
            seq_len=self.seq_len,
            global_batch_size=self.global_batch_size,
            seed=self.seed,
            vocab_size=self.vocab_size or texts.vocab_size,
            long_texts=self.long_texts,
        )
        if validation is None:
            return train, None, ready
        return (
            train,
            dataclasses.replace(train, texts=validation, shuffle=False, fill=True),
            ready,
        )

    def mixture(
        self, parts: Sequence[MixturePart]
    ) -> tuple[RowSource, RowSource | None, Tokenizer | None]:
        """Opens several data sets with weights, as a mixture."""
        alone = dataclasses.replace(self, global_batch_size=1)  # one of them may have few rows
        opened = [alone.source(part.path) for part in parts]
        train = self._mixed(parts, [each[0] for each in opened])
        apart = [(part, each[1]) for part, each in zip(parts, opened, strict=True) if each[1]]
        validation = None
        if apart:
            # An evaluation reads few rows, so a data set that ends is read again.
            repeated = [dataclasses.replace(part, at_end="repeat") for part, _ in apart]
            validation = self._mixed(repeated, [each for _, each in apart])
        return train, validation, next((each[2] for each in opened if each[2] is not None), None)

    def _mixed(self, parts: Sequence[MixturePart], sources: Sequence[Any]) -> MixtureSource:
        return MixtureSource(
            sources=tuple(sources),
            weights=tuple(part.weight for part in parts),
            names=tuple(part.path for part in parts),
            at_end=tuple(part.at_end for part in parts),
            global_batch_size=self.global_batch_size,
            seed=self.seed,
        )


def open_texts(folder: Path) -> tuple[TextSet, TextSet | None]:
    """Opens the folder that `prepare_chats` wrote, with its tokenizer and its template.

    Returns:
      (training texts, validation texts or None).

    Raises:
      ValueError: the folder is damaged, or its tokenizer or template was changed afterwards.
    """
    sums = read_text_sidecar(folder)["sha256"]
    for name in (TOKENIZER_FILE, TEMPLATE_FILE):
        file = folder / name
        if name in sums and not (file.is_file() and hash_file(file) == sums[name]):
            raise ValueError(
                f"{str(file)!r} is not the file that the texts were made with; restore it, or "
                "prepare the folder again with `zerojax data prepare`"
            )
    tokenizer = template = None
    if TOKENIZER_FILE in sums:
        tokenizer = load_tokenizer(folder / TOKENIZER_FILE).to_dict()
    if TEMPLATE_FILE in sums:
        template = decode_text((folder / TEMPLATE_FILE).read_bytes(), folder / TEMPLATE_FILE)
    return open_text_set(folder, tokenizer=tokenizer, template=template)


def _open(data: object, tokenizer: object) -> tuple[Tokens, Tokens | None, Tokenizer | None]:
    if data is None:
        tokens, ready = tokens_of_text(None, tokenizer)
        return tokens, None, ready
    if isinstance(data, np.ndarray):
        return tokens_of_array(data), None, _stated_tokenizer(tokenizer)
    paths = [data] if isinstance(data, str | Path) else data
    if not (
        isinstance(paths, Sequence) and paths and all(isinstance(p, str | Path) for p in paths)
    ):
        raise TypeError(
            f"data is a {type(data).__name__}; pass None, a path, a list of token files, {{path: "
            f"weight, ...}}, an integer numpy array, or a TokenSource; pass batches (an iterable "
            "or a callable) as the argument batches instead"
        )
    found = [existing_path(path) for path in paths]
    if len(found) == 1 and not is_token_path(found[0]):
        tokens, ready = tokens_of_text(found[0], tokenizer)
        return tokens, None, ready
    for path in found:
        if not is_token_path(path):
            raise ValueError(
                f"{str(path)!r} is not a token file (.bin, .npy); a list may hold token files "
                "only: put text files into one folder and pass the folder"
            )
    train, validation = open_tokens(found)
    if train is None:
        raise ValueError(
            f"{[str(path) for path in found]} hold only validation files; add the training files"
        )
    return train, validation, _tokenizer_of(train.tokenizer, train.name, tokenizer)


def _tokenizer_of(known: Mapping[str, Any] | None, name: str, spec: object) -> Tokenizer | None:
    """Returns the tokenizer that made token files; checks that it is the one the user chose.

    Args:
      known: `Tokenizer.to_dict` of the tokenizer that made the files.
      name: name of the data, for messages.
      spec: the user's choice.
    """
    if known is None:
        return _stated_tokenizer(spec)
    try:
        own = tokenizer_from_dict(known)
    except ValueError as error:
        raise ValueError(f"{name}: its tokenizer: {error}") from error
    # "bytes" is the default, so the user may not have chosen it.
    if spec is None or spec == "bytes":
        return own
    size = bpe_size(spec)
    agrees = (
        known.get("kind") == "bpe" and own.vocab_size <= size
        if size is not None
        else as_tokenizer(spec).to_dict() == own.to_dict()
    )
    if not agrees:
        raise ValueError(
            f"{name} was made with {own!r}, not with tokenizer={quoted(spec)}; leave the "
            "option out, since token files have their own tokenizer, or prepare the text again"
        )
    return own


def _stated_tokenizer(spec: object) -> Tokenizer | None:
    """Returns the tokenizer that the user chose explicitly, for ids of unknown origin; None for
    "bytes" (the default), "bpe:..." and None."""
    return None if spec is None or spec == "bytes" or bpe_size(spec) else as_tokenizer(spec)


def _given_source(
    source: RowSource, tokenizer: object, seq_len: int, global_batch_size: int
) -> tuple[RowSource, None, Tokenizer | None]:
    for name, wanted in (("seq_len", seq_len), ("global_batch_size", global_batch_size)):
        if getattr(source, name) != wanted:
            raise ValueError(
                f"the source has {name}={getattr(source, name)}, but the run has {wanted}; make "
                f"both {wanted}"
            )
    return source, None, _tokenizer_of(source.tokenizer, type(source).__name__, tokenizer)


def _check_validation_size(
    train: Tokens,
    validation: Tokens | None,
    fraction: float,
    seq_len: int,
    global_batch_size: int,
) -> None:
    if validation is None or validation.windows_per_part(seq_len).sum() >= global_batch_size:
        return
    total = train.count + validation.count
    wanted = global_batch_size * seq_len + 1
    enough = f"validation_fraction={wanted / total + 0.001:.3f}, " if wanted * 2 < total else ""
    raise ValueError(
        f"validation_fraction={fraction} of {total} tokens leaves {validation.count}, but one "
        f"batch of {global_batch_size} x {seq_len} needs {wanted}; set {enough}a smaller "
        "global_batch_size or seq_len, or validation_fraction=0 for no validation"
    )
