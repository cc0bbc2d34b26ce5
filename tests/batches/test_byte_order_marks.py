"""A byte order mark is no text, whatever file it begins; other encodings are one sentence."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.refusals import refused
from zerojax.cli.generate_command import read_prompts
from zerojax.config import RunConfig
from zerojax.config.loader import read_text as read_settings
from zerojax.config.run import load as load_run_file
from zerojax.data import ByteTokenizer, load_tokenizer, read_text, save_tokenizer
from zerojax.data.chats.template_files import find_template
from zerojax.data.preparation import encode_files
from zerojax.data.record_files import read_records
from zerojax.deepspeed_config.ds_config import read as read_ds_config
from zerojax.runtime import bounded_json
from zerojax.schedules import known_schedules

MARK = codecs.BOM_UTF8.decode()
RUN = "seed: 3\n"
READERS: dict[str, tuple[str, str, Callable[[Path], Any]]] = {
    "text": ("a.txt", "Té\r\nb", read_text),
    "rows": ("a.jsonl", '{"text": "Té"}\n{"text": "b"}\n', read_text),
    "records": ("a.jsonl", '{"n": 1}\n', lambda file: list(read_records(file))),
    "prompts": ("a.txt", "Té\nb\n", lambda file: read_prompts(str(file))),
    "prompts in rows": ("a.jsonl", '{"prompt": "Té"}\n', lambda file: read_prompts(str(file))),
    "template": ("a.jinja", "{{ messages }}", lambda file: find_template(None, file).source),
    "JSON": ("config.json", '{"a": ["é"]}', bounded_json.load),
    "YAML": ("a.yaml", RUN, lambda file: load_run_file(RunConfig, str(file))),
    "settings": ("a.yaml", RUN, read_settings),
    "ds_config": ("a.json", '{"train_batch_size": 8}', read_ds_config),
}


@pytest.mark.parametrize("name", READERS)
def test_a_mark_at_the_start_of_a_file_is_no_text(name: str, tmp_path: Path) -> None:
    file, content, read = READERS[name]
    path = tmp_path / file
    path.write_bytes(content.encode())
    expected = str(read(path))
    path.write_bytes((MARK + content).encode())
    assert str(read(path)) == expected
    # Anywhere else the character is text, so it is kept or refused, but never dropped.
    if name in ("text", "prompts"):
        path.write_bytes(f"a{MARK}\n{MARK}b".encode())
        assert str(read(path)).count(MARK) + str(read(path)).count(r"\ufeff") == 2


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", READERS)
def test_another_encoding_is_one_sentence_with_a_remedy(
    name: str, encoding: str, tmp_path: Path
) -> None:
    file, content, read = READERS[name]
    path = tmp_path / file
    mark = codecs.BOM_UTF16_BE if encoding.endswith("be") else b""
    path.write_bytes(mark + content.encode(encoding))
    said = refused(lambda: read(path), encoding[:6].upper(), "iconv UTF-8")
    assert len(said.splitlines()) == 1
    path.write_bytes(content.encode())
    read(path)


def test_a_tokenizer_file_and_a_schedule_with_a_mark(tmp_path: Path) -> None:
    file = save_tokenizer(ByteTokenizer(), tmp_path / "tokenizer.json")
    file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    assert isinstance(load_tokenizer(file), ByteTokenizer)
    table = tmp_path / "schedule.csv"
    table.write_bytes("é".encode("utf-16"))
    refused(lambda: known_schedules.read_csv(table), "UTF-16", "iconv UTF-8")


def test_a_file_of_nothing_but_a_mark_is_no_document(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.txt", "b.txt", "c.txt")]
    for file, content in zip(files, (b"a", codecs.BOM_UTF8, codecs.BOM_UTF8 + b"b"), strict=True):
        file.write_bytes(content)
    found = [ids.tolist() for _, ids in encode_files(files, ByteTokenizer())]
    assert found == [[97], [10, 10, 98]]


def test_a_chat_with_a_mark(tmp_path: Path) -> None:
    rows = [{"n": 1}, {"n": 2}]
    file = tmp_path / "a.jsonl"
    file.write_bytes(codecs.BOM_UTF8 + "\n".join(map(json.dumps, rows)).encode())
    assert list(read_records(file)) == [(1, rows[0]), (2, rows[1])]
