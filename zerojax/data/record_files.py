"""Reads files of records, row by row: JSON lines, parquet, and folders saved by `datasets`."""

from __future__ import annotations

import codecs
import contextlib
import functools
import importlib
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from zerojax.config.display import quoted
from zerojax.config.regular_files import check_encoding, open_regular
from zerojax.runtime.bounded_json import JsonError, load, loads

JSON_LINES = ".jsonl"
COLUMN_SUFFIXES = (".parquet", ".arrow")
RECORD_SUFFIXES = (JSON_LINES, *COLUMN_SUFFIXES)
# Maximum bytes of one line; a longer line is not a record but a corpus without line ends.
MAX_LINE_BYTES = 1 << 30
_BATCH_ROWS = 1024
_STATE, _SPLITS = "state.json", "dataset_dict.json"
_MISSING = (
    "{} needs the package `pyarrow`, which is not installed: run `pip install 'zerojax[data]'`, or "
    "save the rows as JSON lines (.jsonl)"
)


def read_records(
    file: Path, columns: Sequence[str] | None = None, *, max_bytes: int = MAX_LINE_BYTES
) -> Iterator[tuple[int, Any]]:
    """Yields the rows of one file, in constant memory.

    Args:
      file: a .parquet or .arrow file; any other is read as JSON lines, without empty lines.
      columns: columns of parquet and arrow to read, if they exist; None reads all.
      max_bytes: maximum number of bytes of a line of JSON.

    Yields:
      (number of the line or row, from 1; its value, which is a dict for tables).

    Raises:
      ValueError: a line is not JSON or too long, or the file does not have the format of its
        suffix.
      ImportError: the file is parquet or arrow, and the package pyarrow is not installed.
    """
    if file.suffix.lower() in COLUMN_SUFFIXES:
        yield from _table_rows(file, columns)
        return
    with open(open_regular(file), "rb") as stream:
        check_encoding(stream.peek(4), file)
        # One byte more than the limit is read, never a whole line of any length.
        lines = iter(functools.partial(stream.readline, max_bytes + 1), b"")
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip() and len(line) <= max_bytes:
                continue
            try:
                if len(line) > max_bytes:
                    raise JsonError(f"the line has more than {max_bytes:,} bytes, the limit")
                value = loads(line, max_bytes=max_bytes, finite=False)
            except JsonError as error:
                if number == 1 and line.strip() == b"[":
                    raise _about_a_list(file) from error
                raise ValueError(
                    f"{file}:{number}: not JSON ({error.what}); fix the line"
                ) from error
            if number == 1 and isinstance(value, list):
                raise _about_a_list(file)
            yield number, value


def _about_a_list(file: Path) -> ValueError:
    lines = shlex.quote(str(file.with_suffix(".lines.jsonl")))
    return ValueError(
        f"{file}:1: a list, but every line must be an object; if the whole file is one list: "
        f"jq -c '.[]' {shlex.quote(str(file))} > {lines}"
    )


def column_names(file: Path) -> list[str]:
    """Returns the names of a table's columns, in order; none for JSON lines.

    Raises:
      ValueError: the file does not have the format of its suffix.
      ImportError: the package pyarrow is not installed.
    """
    if file.suffix.lower() not in COLUMN_SUFFIXES:
        return []
    arrow = _import_arrow("pyarrow", file)
    with _readable(file):
        if file.suffix.lower() == ".parquet":
            return _import_arrow("pyarrow.parquet", file).read_schema(file).names
        with arrow.memory_map(str(file)) as source:
            return _open_arrow(arrow, source).schema.names


def saved_files(folder: Path) -> list[Path] | None:
    """Returns the data files of a folder that `datasets` saved, in order; None for other folders.

    For a folder of several splits, these are the files of "train".

    Raises:
      ValueError: there is no split "train", rows are selected by an index, or a file is missing.
    """
    if (folder / _SPLITS).is_file():
        splits = _object(folder / _SPLITS).get("splits")
        if not isinstance(splits, list) or "train" not in splits:
            raise ValueError(
                f"{str(folder)!r} has the splits {quoted(splits)} but no split 'train'; pass "
                "the folder of one split"
            )
        return saved_files(folder / "train")
    if not (folder / _STATE).is_file() or not (folder / "dataset_info.json").is_file():
        return None
    state = _object(folder / _STATE)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise ValueError(
            f"{str(folder)!r} was saved with an index of selected rows, which is not supported; "
            "save "
            "dataset.flatten_indices() instead"
        )
    listed = state.get("_data_files")
    items = listed if isinstance(listed, list) else []
    found = [item.get("filename") if isinstance(item, dict) else None for item in items]
    names = [name for name in found if isinstance(name, str)]
    if not names or len(names) < len(found):
        raise ValueError(f"{str(folder / _STATE)!r} lists no files; save the dataset again")
    # Only the last part of a listed path counts, so that no list leads out of the folder.
    files = [folder / Path(name).name for name in names]
    for file in files:
        if not file.is_file():
            raise ValueError(
                f"{str(file)!r} is listed in {_STATE}, but missing; copy this file as well"
            )
    return files


def _object(file: Path) -> dict[str, Any]:
    try:
        value = load(file)
    except JsonError as error:
        raise ValueError(f"{str(file)!r} {error.what}; save the dataset again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{str(file)!r} contains no JSON object; save the dataset again")
    return value


def _table_rows(file: Path, columns: Sequence[str] | None) -> Iterator[tuple[int, Any]]:
    first = 1
    with _readable(file):
        for batch in _table_batches(file, columns):
            yield from enumerate(batch.to_pylist(), start=first)
            first += batch.num_rows


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Converts errors of pyarrow other than OSError to a ValueError that names the file."""
    try:
        yield
    except (ImportError, OSError):
        raise
    except Exception as error:  # pyarrow raises its own ValueErrors and other types
        if type(error).__module__.partition(".")[0] != "pyarrow":
            raise
        kind = file.suffix[1:].lower()
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{str(file)!r} is not readable as {kind} ({text}); copy or save it again"
        ) from error


def _table_batches(file: Path, columns: Sequence[str] | None) -> Iterator[Any]:
    arrow = _import_arrow("pyarrow", file)
    if file.suffix.lower() == ".parquet":
        table = _import_arrow("pyarrow.parquet", file).ParquetFile(file)
        names = table.schema_arrow.names
        wanted = None if columns is None else [name for name in columns if name in names]
        yield from table.iter_batches(batch_size=_BATCH_ROWS, columns=wanted)
        return
    with arrow.memory_map(str(file)) as source:
        batches = table = _open_arrow(arrow, source)
        if isinstance(table, arrow.ipc.RecordBatchFileReader):
            batches = (table.get_batch(index) for index in range(table.num_record_batches))
        for batch in batches:
            if columns is not None:
                batch = batch.select([name for name in columns if name in batch.schema.names])
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                yield batch.slice(start, _BATCH_ROWS)


def _open_arrow(arrow: ModuleType, source: BinaryIO) -> Any:
    try:
        return arrow.ipc.open_stream(source)  # the format that `datasets` writes
    except arrow.ArrowInvalid:
        source.seek(0)
        return arrow.ipc.open_file(source)


def _import_arrow(module: str, file: Path) -> Any:
    # Imported lazily, because the package is optional, and text does not need it.
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(_MISSING.format(file.suffix.lower())) from error
