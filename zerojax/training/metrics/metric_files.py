"""Writes and reads metrics.jsonl (append-only), and writes TensorBoard event files.

metrics.jsonl has one JSON object per line; if a step occurs twice, its last line is valid.

Event files are written without TensorBoard. An event file is a sequence of records: length (u64),
its checksum, an Event message, its checksum, all little-endian
(tensorflow/core/lib/io/record_writer.h). The few message fields used here are from
tensorflow/core/util/event.proto and tensorflow/core/framework/summary.proto.
"""

import collections
import dataclasses
import functools
import itertools
import json
import math
import os
import re
import socket
import struct
import time
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from zerojax.config.display import cut, quoted
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.loader import user_path
from zerojax.config.regular_files import open_regular
from zerojax.runtime.user_files import open_appending

FILE_NAME = "metrics.jsonl"
OVERTAKEN = ("train", "eval")
SAMPLE = "sample"
"""Name of the events that hold a text of the current weights."""
KINDS = ("start", "train", "eval", "event", "processes", "layers", "end")
TEXTS = (
    *("event", "text", "leaf", "host", "error", "device_kind", "loss_unit", "memory_source"),
    *("prompt", "sample"),
)
"""Keys whose values are text. Values of other keys are numbers, except extra entries of events."""

READ_BYTES = 8 << 20
"""Bytes of a file of which every line is read. Of a file n times as large, every n-th report is
read, and only lines that begin as `MetricsFile` writes them are records."""
MAX_LINE = 4 << 20
"""Maximum bytes of a line; a longer one is not read."""
_MAX_INTEGER = 10**100
_REPORTS = ("train", "processes", "layers")
# `*+` gives nothing back, so the } must end the line. With `*`, a } inside of a damaged line would
# do.
_OWN_LINE = re.compile(
    rb'\n(\{"kind": "(start|train|eval|event|processes|layers|end)", '
    rb'"step": (\d{1,18}),[^\n]*+(?<=}))'
)
"""A line as `MetricsFile` writes it, with the end of the line before it."""
_NAMES = {kind.encode(): kind for kind in KINDS}
_SPENT = re.compile(rb'"(spent_[a-z_]+)": (\d{1,20}(?:\.\d{1,20})?(?:e-?\d{1,2})?)\b')
_DECODER = json.JSONDecoder()

CRC32C_POLYNOMIAL = 0x82F63B78  # Castagnoli, bit-reversed (RFC 3720, appendix B.4)
MASK_DELTA = 0xA282EAD8  # record_writer.h masks checksums because data may contain checksums


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """The metrics of a run in order of steps, without steps that a resumed run repeated."""

    starts: list[dict[str, Any]]
    """One record per start or resume: devices, units and totals."""
    train: list[dict[str, Any]]
    """One record per report."""
    evals: list[dict[str, Any]]
    """One record per evaluation."""
    events: list[dict[str, Any]]
    """One record per loss spike, non-finite step, slow process or other event."""
    processes: list[dict[str, Any]]
    """One record per report with several processes: the spread of their times."""
    ends: list[dict[str, Any]]
    """One record per start that ended regularly: seconds by activity after the last report."""
    unreadable_lines: int
    """Number of incomplete lines, which killed processes left."""
    layers: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """One record per report with `log.per_layer`: norms by layer, as in
    "gradient_norm/blocks/3"."""
    left_out: int = 0
    """Number of records that were not read, because the file is large."""


_ENCODER = json.JSONEncoder(allow_nan=False)


class MetricsFile:
    """Appends records to a file; starts a new line if a killed process left a partial line."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_appending(self.path)
        if self._file.tell():
            self._file.seek(-1, 2)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def write(self, record: Mapping[str, Any]) -> None:
        """Writes a record and flushes; NaN and infinities become null, because JSON lacks them."""
        finite = {key: _finite(value) for key, value in record.items()}
        self._file.write(_ENCODER.encode(finite).encode() + b"\n")
        self._file.flush()

    def copy(self, other: "MetricsFile") -> None:
        """Appends the content of `other`, whose file may have been deleted while it was open."""
        other._file.seek(0)
        self._file.write(other._file.read())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def set_aside(path: str | Path) -> Path | None:
    """Renames the metrics file of an earlier run, so that a new run gets a file of its own.

    Removes the file if all its lines are of a run that has not reported anything, for example
    after a failure at the first step.

    Args:
      path: path of a `MetricsFile`.

    Returns:
      The new path, such as metrics.1.jsonl; None if nothing is left to rename.
    """
    path = Path(path)
    if not path.is_file():
        return None
    # The kind is "" where lines are unreadable; such a file is renamed, not removed.
    if all(kind and kind not in OVERTAKEN for _, _, kind, _ in _lines_of(path)):
        path.unlink()
        return None
    names = (path.with_suffix(f".{number}{path.suffix}") for number in itertools.count(1))
    # `lexists`: a broken link has its name, too, and would be replaced.
    return path.rename(next(name for name in names if not os.path.lexists(name)))


def first_loss(run_dir: Path) -> float | None:
    """Returns the first loss that a run has reported; None if its file has none.

    Raises:
      ValueError: a value of this report is invalid.
    """
    path = run_dir / FILE_NAME
    if not path.exists():
        return None
    for number, line, kind, _ in _lines_of(path):
        record = _record_of(line, f"{path}:{number}") if kind == "train" else None
        if record is not None and record.get("loss") is not None:
            return record["loss"]
    return None


def read_metrics(run_dir: str | Path) -> Metrics:
    """Reads the metrics of a run folder.

    A run that resumes from step 500 after it had reported step 540 repeats some steps. Later lines
    replace earlier lines, and earlier reports of steps after the resumed step are dropped.

    Of a large file only every n-th report is kept, with the sum of the seconds (`spent_...`) of
    those left out, and only the newest events: time and memory have limits (`READ_BYTES`).

    Raises:
      FileNotFoundError: the folder has no metrics; the message names the folder.
      ValueError: a value is invalid; the message names file, line and key.
    """
    path = user_path(run_dir) / FILE_NAME
    if not path.exists():
        raise FileNotFoundError(
            f"no {FILE_NAME} in '{run_dir}'; pass the folder of a run, such as runs/default"
        )
    every = 1 + path.stat().st_size // READ_BYTES
    kept = {kind: _Kept(kind, every if kind in _REPORTS else 1) for kind in KINDS}
    unreadable = newest = 0
    for number, line, kind, step in _lines_of(path):
        if not kind:
            unreadable += step
            continue
        if kind in OVERTAKEN and step > newest:
            newest = step
        elif kind in OVERTAKEN:
            for other in OVERTAKEN:
                # A step can have a report and an evaluation, so the other kind keeps its record of
                # this step.
                kept[other].drop(step if kind == other else step + 1)
        elif kind == "start":
            # Records of later steps before this line belong to an abandoned attempt.
            for other in ("event", "processes", "layers"):
                kept[other].drop(step + 1)
        kept[kind].add(step, number, line)
    found = {kind: one.finish(path) for kind, one in kept.items()}
    return Metrics(
        starts=found["start"],
        train=found["train"],
        evals=found["eval"],
        events=found["event"],
        processes=found["processes"],
        ends=found["end"],
        layers=found["layers"],
        unreadable_lines=unreadable + sum(one.unreadable for one in kept.values()),
        left_out=sum(one.left_out for one in kept.values()),
    )


class _Kept:
    """The lines of one kind that are kept: every n-th, and of these the newest `READ_BYTES`.

    Lines are parsed when all are known, so that those that are not kept take little time.
    """

    def __init__(self, kind: str, every: int) -> None:
        self._kind = kind
        self.left_out = self.unreadable = 0
        self._every, self._seen, self._num_bytes = every, 0, 0
        self._lines: collections.deque[tuple[int, int, bytes, dict[bytes, float]]] = (
            collections.deque()
        )
        self._spent: dict[bytes, float] = {}
        self._last: tuple[int, int, bytes] | None = None

    def add(self, step: int, number: int, line: bytes) -> None:
        """Keeps a line, or leaves it out, but adds its seconds to the next one that is kept."""
        is_left_out = self._seen % self._every
        self._seen += 1
        if is_left_out:
            self.left_out += 1
            self._last = (step, number, line)
            first = line.find(b'"spent_')
            if first >= 0:
                for name, seconds in _SPENT.findall(line, first):
                    self._spent[name] = self._spent.get(name, 0.0) + float(seconds)
            return
        self._last = None
        self._lines.append((step, number, line, self._spent))
        self._spent = {}
        self._num_bytes += len(line)
        while self._num_bytes > READ_BYTES and len(self._lines) > 1:
            self._num_bytes -= len(self._lines.popleft()[2])
            self.left_out += 1

    def drop(self, at_least: int) -> None:
        """Drops the lines of this and later steps."""
        while self._lines and self._lines[-1][0] >= at_least:
            self._num_bytes -= len(self._lines.pop()[2])
        if self._last is not None and self._last[0] >= at_least:
            self._last = None

    def finish(self, path: Path) -> list[dict[str, Any]]:
        """Returns the records; the newest one is always there.

        Raises:
          ValueError: a value is of a wrong type; the message names file and line.
        """
        records = []
        for step, number, line, spent in self._lines:
            record = _record_of(line, f"{path}:{number}")
            if record is None or (record["kind"], record["step"]) != (self._kind, step):
                self.unreadable += 1
                continue
            for name, seconds in spent.items():
                record[name.decode()] = (record.get(name.decode()) or 0.0) + seconds
            records.append(record)
        record = _record_of(self._last[2], f"{path}:{self._last[1]}") if self._last else None
        if record is not None:
            self.left_out -= 1
            records.append(record | {name.decode(): s for name, s in self._spent.items()})
        return records


_Lines: TypeAlias = Generator[tuple[int, bytes, str, int], None, int]


def _lines_of(path: Path) -> Iterator[tuple[int, bytes, str, int]]:
    """Yields (number, line, kind, step) of the lines that are records or begin like one.

    Where others are, yields ("", their number) for kind and step. Of a line that is too long, only
    a part is in memory at any time, and only its begin is yielded.
    """
    number = 0
    with open(open_regular(path), "rb", buffering=1 << 20) as file:
        is_large = os.fstat(file.fileno()).st_size > READ_BYTES
        while block := file.read(MAX_LINE):
            rest = block
            if not block.endswith(b"\n"):
                rest = file.readline(MAX_LINE)
                block += rest
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(MAX_LINE)
            number = yield from (_own_lines if is_large else _all_lines)(block, number)


def _own_lines(block: bytes, number: int) -> _Lines:
    """Yields each line that begins as `MetricsFile` writes it, and at the end how many others are.

    Takes little time for others, which can be millions.

    Args:
      block: whole lines.
      number: number of lines before them.

    Returns:
      The number of lines up to the end of the block.
    """
    text = b"\n" + block.removesuffix(b"\n")
    end = num_others = 0
    for found in _OWN_LINE.finditer(text):
        start = found.start()
        if start != end:
            between = text.count(b"\n", end, start)
            num_others += between
            number += between
        end = found.end()
        number += 1
        yield number, found[1], _NAMES[found[2]], int(found[3])
    rest = text.count(b"\n", end)
    yield number + rest, b"", "", num_others + rest
    return number + rest


def _all_lines(block: bytes, number: int) -> _Lines:
    """Yields each line like `_own_lines`, and also records that others wrote."""
    for line in block.removesuffix(b"\n").split(b"\n"):
        number += 1
        found = _OWN_LINE.match(b"\n" + line)
        if found is not None:
            yield number, line, _NAMES[found[2]], int(found[3])
            continue
        record = _parsed(line)
        if record is None:
            yield number, line, "", bool(line.strip())
        else:
            step = record["step"]  # another value is refused when the record is read
            yield number, line, record["kind"], step if isinstance(step, int) else 0
    return number


def _record_of(line: bytes, place: str) -> dict[str, Any] | None:
    """Returns the record in a line; None if the line is none.

    Raises:
      ValueError: a value is of a wrong type; the message has `place`.
    """
    record = _parsed(line)
    return None if record is None else _checked(record, place)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Returns the record in a line, with values of any type; None if the line is none."""
    try:
        record = _DECODER.decode(line.decode("utf-8", "replace"))
        return record if record["kind"] in KINDS and "step" in record else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _checked(record: dict[str, Any], place: str) -> dict[str, Any]:
    """Checks the types of a record's values; returns the record with non-finite values as None."""
    kind = record["kind"]
    for key, value in record.items():
        if type(value) is float:
            if not math.isfinite(value):
                record[key] = None
            if key not in TEXTS and key != "step":
                continue
        if key == "step":
            is_good, wanted = type(value) is int and 0 <= value < 2**63, "a number of steps"
        elif key in TEXTS:
            is_good, wanted = value is None or isinstance(value, str), "a text"
        else:
            is_fact = kind == "event" and key not in ("time", "seconds")
            is_number = isinstance(value, int) and abs(value) < _MAX_INTEGER
            is_good = is_fact or key == "kind" or value is None or is_number
            wanted = "a number"
        if not is_good:
            raise ValueError(
                f"{place}: {cut(key, 100)}={quoted(value)} is not {wanted}; remove the line, or "
                "rename the file"
            )
    if kind == "event" and not isinstance(record.get("event"), str):
        raise ValueError(f'{place} is an event without a name (key "event"); remove the line')
    return record


def _finite(value: object) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (CRC32C_POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    """Returns the CRC-32C (Castagnoli) checksum of `data`."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + MASK_DELTA) & 0xFFFFFFFF)


# Fields of protocol buffers: each is a key (field number and wire type) and a payload.


def _varint(value: int) -> bytes:
    # Most numbers are small, and a report encodes many: without the loop it is faster.
    if value <= 0x7F:
        return bytes((value,))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, payload: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(payload)) + payload


@functools.cache
def _tag(text: str) -> bytes:
    return _bytes(1, text.encode())


def _float(field: int, value: float) -> bytes:
    try:
        packed = struct.pack("<f", value)
    except OverflowError:  # beyond float32
        packed = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    return _varint(field << 3 | 5) + packed


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


class EventWriter:
    """Appends scalars to a new event file in `folder`; TensorBoard may read it at the same time.

    Args:
      folder: folder of the event file; created if missing.
      first_step: first step of this file. TensorBoard ignores values of this and later steps in
        older files of the folder, so a resumed run does not draw repeated steps twice.
    """

    def __init__(self, folder: str | Path, *, first_step: int = 0):
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        stamp = f"{time.time():.6f}"
        name = f"events.out.tfevents.{stamp}.{socket.gethostname()}.{os.getpid()}"
        self.path = folder / name
        self._file = open_appending(self.path)
        self._write(_bytes(3, b"brain.Event:2"))
        session_start = _bytes(7, _integer(1, 1))
        self._write(_integer(2, first_step) + session_start)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one number for each tag, such as {"train/loss": 3.2}, and flushes."""
        summary = b"".join(_bytes(1, _tag(tag) + _float(2, value)) for tag, value in values.items())
        self._write(_integer(2, step) + _bytes(5, summary))

    def image(self, step: int, tag: str, png: bytes, size: tuple[int, int, int]) -> None:
        """Writes an image, and flushes.

        Args:
          step: number of the step.
          tag: name of the image.
          png: content of a PNG file.
          size: height, width, and number of channels.
        """
        numbers = b"".join(_integer(field, value) for field, value in enumerate(size, 1))
        value = _tag(tag) + _bytes(4, numbers + _bytes(4, png))
        self._write(_integer(2, step) + _bytes(5, _bytes(1, value)))

    def close(self) -> None:
        self._file.close()

    def _write(self, body: bytes) -> None:
        event = _double(1, time.time()) + body
        length = struct.pack("<Q", len(event))
        self._file.write(length + _masked(length) + event + _masked(event))
        self._file.flush()
