"""Rows of JSON lines, parquet, arrow and saved `datasets` folders, as chats and as text."""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path

import pytest

from zerojax.data.chats.chat_preparation import find_record_files
from zerojax.data.corpus import find_text_files, other_suffixes, read_text
from zerojax.data.preparation import prepare
from zerojax.data.record_files import read_records, saved_files

pyarrow = pytest.importorskip("pyarrow", reason="needs the package pyarrow: pip install pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ROWS = [{"text": f"Text {i}.", "n": i} for i in range(3000)]


@pytest.fixture
def saved(tmp_path) -> Path:
    """A folder that `datasets` itself has saved, of two splits."""
    with tarfile.open(Path(__file__).parents[1] / "data" / "saved_dataset.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "saved"


def write_parquet(file: Path, rows: list) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=700)
    return file


def write_arrow(file: Path, rows: list, *, as_stream: bool) -> Path:
    table = pyarrow.Table.from_pylist(rows)
    new = pyarrow.ipc.new_stream if as_stream else pyarrow.ipc.new_file
    with new(str(file), table.schema) as writer:
        writer.write_table(table, max_chunksize=1300)
    return file


def write_lines(file: Path, rows: list) -> Path:
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return file


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("x.jsonl", write_lines),
        ("x.parquet", write_parquet),
        ("x.arrow", lambda file, rows: write_arrow(file, rows, as_stream=True)),
        ("x.arrow", lambda file, rows: write_arrow(file, rows, as_stream=False)),
    ],
)
def test_all_rows_come_with_their_numbers(tmp_path, name, write):
    file = write(tmp_path / name, ROWS)
    found = list(read_records(file))
    assert [number for number, _ in found] == list(range(1, 3001))
    assert [row for _, row in found] == ROWS
    if name != "x.jsonl":
        assert next(read_records(file, ("text", "no such column"))) == (1, {"text": "Text 0."})
    assert read_text(file).startswith("Text 0.\n\nText 1.\n\n")


def test_a_saved_dataset_is_its_split_train(saved):
    [file] = saved_files(saved)
    assert file == saved / "train" / "data-00000-of-00001.arrow"
    assert find_record_files(saved) == find_text_files(saved) == [file]
    rows = [row for _, row in read_records(file)]
    assert [row["text"] for row in rows] == ["Text 2.", "Text 4.", "Text 3."]
    assert rows[0]["messages"][0] == {"role": "user", "content": "Question 2", "name": None}
    assert read_text(saved / "test") == "Text 3.\n\nText 4."
    assert other_suffixes(saved) == []
    assert prepare(saved, saved.parent / "out").num_documents == 3


def test_what_lies_beside_the_files_of_a_saved_dataset_is_left(saved):
    """Results of `datasets.map` are kept there."""
    write_arrow(saved / "train" / "cache-1.arrow", ROWS, as_stream=True)
    assert len(saved_files(saved)) == 1
    (saved / "train" / "state.json").unlink()
    assert saved_files(saved / "train") is None
    assert len(find_record_files(saved / "train")) == 2


def change(file: Path, **values) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_a_saved_dataset_that_cannot_be_read_is_one_sentence(saved):
    state = saved / "train" / "state.json"
    change(state, _indices_data_files=[{"filename": "x"}])
    with pytest.raises(ValueError, match=r"save dataset.flatten_indices\(\) instead"):
        saved_files(saved)
    change(state, _indices_data_files=None, _data_files=[{"filename": "../other.arrow"}])
    with pytest.raises(ValueError, match="train/other.arrow' is listed in state.json, but missing"):
        saved_files(saved)
    change(state, _data_files=[])
    with pytest.raises(ValueError, match="lists no files; save the dataset again"):
        saved_files(saved)
    state.write_text("[")
    with pytest.raises(ValueError, match="is not valid JSON.*save the dataset again"):
        saved_files(saved)
    change(saved / "dataset_dict.json", splits=["test"])
    with pytest.raises(ValueError, match=r"has the splits \['test'\].*'train'"):
        saved_files(saved)


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_a_damaged_table_is_one_sentence(tmp_path, name):
    (tmp_path / name).write_bytes(b"PAR1 and no table" * 9)
    with pytest.raises(ValueError, match=rf"is not readable as {name[2:]} \(.*\); copy or save"):
        list(read_records(tmp_path / name))


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_without_pyarrow_the_command_that_installs_it_is_named(tmp_path, name, monkeypatch):
    (tmp_path / name).touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=rf"\.{name[2:]} needs .*pip install 'zerojax\[data\]'"):
        list(read_records(tmp_path / name))
    assert len(list(read_records(write_lines(tmp_path / "x.jsonl", ROWS)))) == 3000


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('{"a": 1}\n{"a"', "x.jsonl:2: not JSON .*; fix the line"),
        ('[{"a": 1}]', r"x.jsonl:1: a list, .*: jq -c '.\[\]' .*x.jsonl > .*x.lines.jsonl"),
        ('[\n{"a": 1}\n]', r"x.jsonl:1: a list, .*: jq -c"),
        ('{"a": "\\ud83d"}', "x.jsonl:1: not JSON .*surrogate.*fix the line"),
        ("[" * 100 + "]" * 100, "x.jsonl:1: not JSON .is nested deeper than 64 levels"),
    ],
)
def test_damaged_lines_are_one_sentence(tmp_path, content, why):
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(ValueError, match=why):
        list(read_records(tmp_path / "x.jsonl"))


def test_a_table_without_text_is_one_sentence(tmp_path):
    file = write_parquet(tmp_path / "x.parquet", [{"text": "a"}, {"text": None}])
    with pytest.raises(ValueError, match='x.parquet:2: no "text" string in .*or a chat: --format'):
        read_text(file)
    file = write_parquet(tmp_path / "y.parquet", [{"content": "a"}])
    with pytest.raises(ValueError, match='y.parquet:1: no "text" string'):
        read_text(file)


def test_a_folder_without_records_is_one_sentence(tmp_path):
    (tmp_path / "x.txt").touch()
    with pytest.raises(
        ValueError, match=r"no file of records \(.jsonl, .parquet, .arrow\); pass a"
    ):
        find_record_files(tmp_path)
    with pytest.raises(FileNotFoundError):
        find_record_files(tmp_path / "not there")
