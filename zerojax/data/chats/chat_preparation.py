"""Prepares chats: converts records to a folder of texts with the tokens of answers marked."""

from __future__ import annotations

import dataclasses
import datetime
import errno
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from zerojax.config.checks import names_keywords
from zerojax.config.display import printable
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.loader import user_path
from zerojax.data.chats.chat_encoding import (
    EncodedChat,
    MarkedText,
    OffsetTokenizer,
    check_asked,
    encode_marked,
    marked_pair,
    without_frame,
)
from zerojax.data.chats.chat_template import Limits, line_of_marks
from zerojax.data.chats.conversations import (
    COLUMNS,
    Chat,
    Pair,
    RecordError,
    chat_of,
    check_size,
    without_nulls,
)
from zerojax.data.chats.template_files import FoundTemplate, find_template
from zerojax.data.chats.template_process import Rendering, TemplateProcess
from zerojax.data.corpus import existing_path, find_files
from zerojax.data.record_files import (
    COLUMN_SUFFIXES,
    RECORD_SUFFIXES,
    column_names,
    read_records,
    saved_files,
)
from zerojax.data.text_set import SIDECAR, TextSetWriter
from zerojax.data.tokenizer import (
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    as_tokenizer,
    bpe_size,
    read_object,
    save_tokenizer,
)
from zerojax.data.tokens import check_unused, hash_file
from zerojax.runtime.user_files import replace_text

OnBad = Literal["refuse", "skip"]
Answers = Literal["all", "each"]
_BATCH_CHATS, _BATCH_CHARACTERS = 256, 4 << 20
_SHOWN_REASONS = 3
# Number of chats that a template may fail to render within its limits if it renders none.
_MAX_ENDED = 2
# Maximum bytes of a row of JSON lines: its values need ten times as much memory.
_MAX_ROW_BYTES = 32 << 20
_Placed = tuple[str, Chat | Pair]


@dataclass(frozen=True, kw_only=True)
class PreparedChats:
    """Result of `prepare_chats`.

    Attributes:
      folder: output folder.
      num_records: number of rows that were read.
      num_texts: number of texts that were written, including those for validation.
      num_validation_texts: number of texts for validation, which are the last ones.
      num_tokens, num_asked: number of tokens of all texts, and of answers.
      longest: number of tokens of the longest text.
      num_seams: number of answers whose first token also covers the end of the question.
      skipped: number of rows that were left out.
      reasons: why the first of these rows were left out, with file and row number.
      way: how answers were found: by "marks" of the template, by "renderings" of the chat up to an
        answer, or in "pairs" of prompt and completion.
      vocab_size: of the model's config.json if it states a smaller one, else of the tokenizer.
    """

    folder: Path
    num_records: int
    num_texts: int
    num_validation_texts: int
    num_tokens: int
    num_asked: int
    longest: int
    num_seams: int
    skipped: int
    reasons: tuple[str, ...]
    vocab_size: int
    way: Literal["marks", "renderings", "pairs"]


@names_keywords()
def prepare_chats(
    data: str | Path,
    out: str | Path,
    *,
    tokenizer: object,
    template: str | Path | None = None,
    validation_fraction: float = 0.0,
    bad: OnBad = "refuse",
    answers: Answers = "all",
    date: str | None = None,
    limits: Limits | None = None,
) -> PreparedChats:
    """Converts chats in files of records to a folder `out` for `zerojax.train(..., data=out)`.

    Chats are streamed, so memory does not grow with their number. The sidecar (texts.json) is
    written last, so that files of an interrupted run are never mistaken for complete ones.

    Args:
      data: a file of JSON lines, a .parquet or .arrow file, a folder of them, or a folder saved by
        `datasets`. Rows have "messages", "conversations", or "prompt" and "completion".
      out: output folder; created if missing; must not contain token files or a file that would be
        replaced (texts.json, tokenizer, template).
      tokenizer: a model's folder or tokenizer.json, or any other value for `as_tokenizer`.
      template: a Jinja file, or the name of a template in the tokenizer's folder; None uses its
        default template.
      validation_fraction: fraction of the texts, from the end, for validation; at least one text
        remains for training.
      bad: "refuse" raises at the first row that cannot be trained on; "skip" leaves such rows out
        and counts them.
      answers: "all" makes one text per chat, which trains all its answers; "each" makes one text
        per answer, with the messages before it, for templates that render a turn differently if
        messages follow it.
      date: time that `strftime_now` in a template uses, in ISO format; None uses the current time.
      limits: limits of rendering one chat.

    Returns:
      The folder, the numbers of rows, texts and tokens, and why rows were left out.

    Raises:
      ValueError: a row is not a chat (names file and row number), the template fails, there are no
        answers, or `out` has such files.
      TypeError: the tokenizer has no method `encode_with_offsets`.
      FileNotFoundError: the data do not exist.
      ImportError: a package is missing; contains the command to install it.
      OSError: the disk is full or the folder is not writable.
    """
    _check_choices(validation_fraction, bad, answers)
    files = find_record_files(data)
    folder = user_path(out)
    check_unused(folder, (SIDECAR, TOKENIZER_FILE, TEMPLATE_FILE))
    ready = _tokenizer_of(tokenizer)
    home = _home_of(tokenizer)
    made = _Preparation(
        tokenizer=ready,
        template=find_template(home, template),
        home=home,
        skips=bad == "skip",
        answers=answers,
        now=date or datetime.datetime.now().isoformat(timespec="seconds"),
        limits=limits or Limits(),
        model_size=_model_size(home),
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return made.write(files, folder, validation_fraction)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
        raise OSError(
            error.errno or errno.EIO,
            f"could not write texts into {str(folder)!r}: {reason}; choose another folder",
        ) from error


def find_record_files(data: str | Path) -> list[Path]:
    """Returns the files of records at a path.

    Raises:
      FileNotFoundError: the path does not exist.
      ValueError: the folder has no file of records.
    """
    root = existing_path(data)
    if not root.is_dir():
        return [root]
    files = saved_files(root)
    if files is None:
        files = find_files(root, RECORD_SUFFIXES)
    if not files:
        raise ValueError(
            f"the folder {str(root)!r} has no file of records ({', '.join(RECORD_SUFFIXES)}); pass "
            "a file by its name"
        )
    return files


def _check_choices(fraction: float, bad: str, answers: str) -> None:
    if not 0 <= fraction < 1:
        raise ValueError(f"validation_fraction={fraction}: it must be at least 0 and below 1")
    for name, value, known in (
        ("bad", bad, ("refuse", "skip")),
        ("answers", answers, ("all", "each")),
    ):
        if value not in known:
            raise ValueError(f"{name}={value!r} is not one of {', '.join(known)}")


def _tokenizer_of(spec: object) -> OffsetTokenizer:
    if bpe_size(spec) is not None:
        raise ValueError(
            f"tokenizer={spec!r} has to be trained, but chats need the tokenizer of the model that "
            "learns them; pass its folder or its tokenizer.json"
        )
    ready = as_tokenizer(spec)
    if not isinstance(ready, OffsetTokenizer):
        raise TypeError(
            f"tokenizer={spec!r} has no method encode_with_offsets, which chats need to separate "
            "answers from questions; pass a model's tokenizer.json"
        )
    return ready


def _home_of(spec: object) -> Path | None:
    """Returns the folder that contains the files of tokenizer `spec`; None if it is not an existing
    path."""
    path = user_path(spec) if isinstance(spec, str | Path) else None
    if path is None or not path.exists():
        return None
    return path if path.is_dir() else path.parent


def _model_size(home: Path | None) -> int | None:
    """Returns the vocabulary size in a tokenizer folder's config.json; None if there is none."""
    file = None if home is None else home / "config.json"
    if file is None or not file.is_file():
        return None
    about = read_object(file, "a model's configuration")
    size = about.get("vocab_size")
    return size if type(size) is int and size > 0 else None


@dataclasses.dataclass(kw_only=True)
class _Preparation:
    """State of one call of `prepare_chats`; the first fields are its arguments."""

    tokenizer: OffsetTokenizer
    template: FoundTemplate | None
    home: Path | None
    skips: bool
    answers: Answers
    now: str
    limits: Limits
    model_size: int | None
    num_records: int = 0
    num_seams: int = 0
    longest: int = 0
    skipped: int = 0
    num_ended: int | None = 0
    """Number of chats at which the rendering process ended; None once one was rendered."""
    reasons: list[str] = dataclasses.field(default_factory=list)
    process: TemplateProcess | None = None
    special: tuple[str, ...] = ()

    def write(self, files: Sequence[Path], folder: Path, fraction: float) -> PreparedChats:
        """Reads, renders, encodes and writes all records."""
        self.special = tuple(getattr(self.tokenizer, "special_texts", ()))
        vocab_size = min(x for x in (self.tokenizer.vocab_size, self.model_size) if x is not None)
        with TextSetWriter(folder, self.tokenizer.vocab_size) as writer:
            try:
                for place, encoded in self._encoded(self._chats(files)):
                    if self._is_good(place, encoded):
                        file, _, row = place.rpartition(":")
                        writer.add(encoded.ids, encoded.asked, (file, int(row)))
                        self.num_seams += encoded.num_seams
                        self.longest = max(self.longest, len(encoded.ids))
            finally:
                if self.process is not None:
                    self.process.close()
            self._check_any(files, writer)
            apart = round(writer.num_texts * fraction)
            sums = self._write_beside(folder)
            writer.finish(
                {
                    "vocab_size": vocab_size,
                    # At least one text is left for training.
                    "validation_texts": min(apart, writer.num_texts - 1),
                    "template": None if self.template is None else self.template.name,
                    "answers": self.answers,
                    "date": self.now,
                    "sha256": sums,
                }
            )
        return PreparedChats(
            folder=folder,
            num_records=self.num_records,
            num_texts=writer.num_texts,
            num_validation_texts=min(apart, writer.num_texts - 1),
            num_tokens=writer.num_tokens,
            num_asked=writer.num_asked,
            longest=self.longest,
            num_seams=self.num_seams,
            skipped=self.skipped,
            reasons=tuple(self.reasons),
            vocab_size=vocab_size,
            way=self._way(),
        )

    def _way(self) -> Literal["marks", "renderings", "pairs"]:
        if self.process is None:
            return "pairs"
        return "marks" if self.process.has_markers else "renderings"

    def _write_beside(self, folder: Path) -> dict[str, str]:
        """Writes the files of the tokenizer and the template into `folder`, and returns {file name:
        sha256}."""
        files = [save_tokenizer(self.tokenizer, folder / TOKENIZER_FILE)]
        if self.process is not None and self.template is not None:
            files.append(folder / TEMPLATE_FILE)
            replace_text(files[-1], self.template.source)
        return {file.name: hash_file(file) for file in files}

    def _chats(self, files: Sequence[Path]) -> Iterator[_Placed]:
        for file in files:
            is_table = file.suffix.lower() in COLUMN_SUFFIXES
            names = column_names(file)
            for number, record in read_records(file, COLUMNS, max_bytes=_MAX_ROW_BYTES):
                self.num_records += 1
                place = f"{file}:{number}"
                try:
                    chat = chat_of(without_nulls(record) if is_table else record, names)
                    check_size(chat, self.limits.characters, each=self.answers == "each")
                except RecordError as error:
                    self._leave_out(place, str(error))
                    continue
                if self.answers == "each" and isinstance(chat, Chat):
                    yield from ((place, one) for one in chat.each_answer())
                else:
                    yield place, chat

    def _leave_out(self, place: str, why: str) -> None:
        """Counts a row that cannot be trained on, or raises.

        Raises:
          ValueError: rows are not skipped.
        """
        if not self.skips:
            raise ValueError(f"{place}: {why}; or leave such rows out with --bad skip")
        self.skipped += 1
        if len(self.reasons) < _SHOWN_REASONS:
            self.reasons.append(f"{place}: {why}")

    def _encoded(self, chats: Iterable[_Placed]) -> Iterator[tuple[str, EncodedChat]]:
        """Yields all encoded texts in order; renders one batch while the previous one is
        encoded."""
        waiting: list[_Placed] = []
        # The empty batch at the end is there to receive the last one.
        for batch in itertools.chain(_batches(chats), [[]]):
            # `TemplateProcess` demands that everything is received before more is sent. It then
            # renders the next batch while this one is encoded.
            rendered = self._receive(waiting)
            self._send(batch)
            waiting = batch
            if rendered:
                places = [place for place, _ in rendered]
                try:
                    encoded = encode_marked(self.tokenizer, [one for _, one in rendered])
                except ValueError:
                    yield from self._encoded_alone(rendered)
                else:
                    yield from zip(places, encoded, strict=True)

    def _encoded_alone(
        self, rendered: Iterable[tuple[str, MarkedText]]
    ) -> Iterator[tuple[str, EncodedChat]]:
        """Yields encoded texts one by one, and leaves out those at which the tokenizer fails."""
        for place, one in rendered:
            try:
                [encoded] = encode_marked(self.tokenizer, [one])
            except ValueError as error:
                self._leave_out(place, str(error))
            else:
                yield place, encoded

    def _send(self, batch: Sequence[_Placed]) -> None:
        requests = [chat.as_request() for _, chat in batch if isinstance(chat, Chat)]
        if requests:
            if self.process is None:
                self.process = self._start(next(p for p, chat in batch if isinstance(chat, Chat)))
            self.process.send(requests)

    def _start(self, place: str) -> TemplateProcess:
        if self.template is None:
            where = "the tokenizer" if self.home is None else str(self.home)
            raise ValueError(
                f"{place}: a chat needs a template, but {where} has none ({TEMPLATE_FILE}, or "
                "chat_template in tokenizer_config.json); pass a model's folder with --tokenizer "
                "FOLDER, or a template with --template FILE"
            )
        return TemplateProcess(
            self.template.source,
            name=f"the template {self.template.name}",
            variables=self.template.variables,
            now=self.now,
            limits=self.limits,
        )

    def _receive(self, batch: Sequence[_Placed]) -> list[tuple[str, MarkedText]]:
        """Receives the renderings of a sent batch: (place, rendered text) of each chat that is not
        left out."""
        is_chat = [isinstance(chat, Chat) for _, chat in batch]
        answers = self.process.receive() if self.process is not None and any(is_chat) else iter(())
        found = []
        for place, chat in batch:
            if isinstance(chat, Pair):
                found.append((place, marked_pair(chat)))
                continue
            rendering = next(answers)
            self._check_template(place, rendering)
            if (why := _why_not(rendering)) is not None:
                self._leave_out(place, why)
            else:
                found.append((place, self._marked(rendering)))
        return found

    def _check_template(self, place: str, rendering: Rendering) -> None:
        """Raises if the process ended at each of the first `_MAX_ENDED` chats: then the template,
        not a chat, is the cause."""
        if not rendering.has_ended or self.num_ended is None:
            self.num_ended = None
            return
        self.num_ended += 1
        if self.num_ended == _MAX_ENDED:
            raise ValueError(
                f"{place}: the template renders none of the first {_MAX_ENDED} chats "
                f"({rendering.error}); pass another with --template FILE"
            )

    def _marked(self, rendering: Rendering) -> MarkedText:
        assert self.process is not None
        answers = rendering.answers
        if not self.process.has_markers:
            answers = without_frame(rendering.text, answers, self.special)
        return MarkedText(text=rendering.text, answers=answers)

    def _is_good(self, place: str, encoded: EncodedChat) -> bool:
        try:
            if not encoded.ids.size:
                raise RecordError("the text has no tokens; leave the row out")
            check_asked(encoded, self._line_of_marks())
            self._check_vocabulary(encoded.ids)
        except RecordError as error:
            self._leave_out(place, str(error))
            return False
        return True

    def _line_of_marks(self) -> str | None:
        marks = None if self.template is None else line_of_marks(self.template.source)
        return None if marks is None else printable(marks)

    def _check_vocabulary(self, ids: np.ndarray) -> None:
        if self.model_size is not None and ids.max() >= self.model_size:
            raise RecordError(
                f"token id {ids.max()} is outside the vocabulary [0, {self.model_size}) of "
                f"{self.home}/config.json; use the tokenizer of that model"
            )

    def _check_any(self, files: Sequence[Path], writer: TextSetWriter) -> None:
        if writer.num_texts:
            return
        where = str(files[0]) + (f" and {len(files) - 1} more" if len(files) > 1 else "")
        if not self.num_records:
            raise ValueError(f"{where} has no rows; pass at least one chat")
        raise ValueError(
            f"{where}: none of its {self.num_records} rows can be trained on; the first: "
            f"{self.reasons[0]}"
        )


def _why_not(rendering: Rendering) -> str | None:
    """Returns why a rendered chat has no text with answers; None if it has."""
    if rendering.error is not None:
        return (
            f"the template cannot render this chat ({rendering.error}); fix the row, or pass "
            "--template FILE"
        )
    if rendering.turn is not None:
        return (
            f"{rendering.turn}, so the answer's tokens cannot be identified; use a template with "
            f"{{% generation %}} marks (--template FILE), or make one text per answer (--answers "
            "each)"
        )
    return None


def _batches(chats: Iterable[_Placed]) -> Iterator[list[_Placed]]:
    batch: list[_Placed] = []
    size = 0
    for place, chat in chats:
        batch.append((place, chat))
        size += chat.num_characters
        if len(batch) >= _BATCH_CHATS or size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
