"""JSON is read within limits: nothing hangs, nothing recurses, nothing is another kind of error."""

from __future__ import annotations

import json
import os
import random
import socket
from pathlib import Path

import pytest

from zerojax.runtime import bounded_json
from zerojax.runtime.bounded_json import JsonError


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"[" * 100_000, "nested deeper than 64 levels"),
        (b'{"a":' * 100_000, "nested deeper than 64 levels"),
        (b"[" * 65 + b"]" * 65, "nested deeper than 64 levels"),
        (b"1" * 5000, "a number of 5000 characters; at most 100"),
        (b"-" + b"1" * 5000, "at most 100"),
        (b"0." + b"1" * 5000, "at most 100"),
        (b"1e400", "beyond the range of a float"),
        (b"[NaN]", "has NaN"),
        (b"[-Infinity]", "has -Infinity"),
        (b'{"a": 1, "b": 2, "a": 3}', "the key 'a' twice"),
        (b'{"\\u0061": 1, "a": 3}', "the key 'a' twice"),
        (b'"\\ud800"', "surrogate"),
        (b'{"\\ud800": 1}', "surrogate"),
        (b"\xff{}", "not UTF-8 at byte 0"),
        (b"\xef\xbb\xbf{}", "not valid JSON at line 1"),
        (b"", "not valid JSON at line 1"),
        (b'{"a": \n 1,}', "not valid JSON at line 2"),
        (b'"' + b"\\" * 99_999, "not valid JSON"),
        (b'{"a\x1b[2J": 1, "a\x1b[2J": 2}', "not valid JSON at line 1"),
        (b'{"a\\u001b": 1, "a\\u001b": 2}', r"the key 'a\\x1b' twice"),
    ],
    ids=lambda value: str(value[:20]),
)
def test_what_json_cannot_be_is_refused_with_a_sentence(text: bytes, words: str) -> None:
    with pytest.raises(JsonError, match=words) as refused:
        bounded_json.loads(text)
    assert len(str(refused.value)) < 200


def test_everything_that_json_can_say_is_read_as_the_library_reads_it() -> None:
    value = {
        "": [[], {}, "]}[{", '"\\"', "é\U0001f600", None, True, 1.5e-300, -0.0, 10**99],
        "deep": json.loads("[" * 60 + "]" * 60),
    }
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        assert bounded_json.loads(text) == bounded_json.loads(text.encode()) == value


def test_not_finite_numbers_are_read_where_they_are_wanted() -> None:
    assert bounded_json.loads("[NaN, Infinity, 1e999]", finite=False)[1:] == [float("inf")] * 2


def test_depth_counts_no_brackets_in_strings() -> None:
    assert bounded_json.depth_of(rb'["\\", "[[[\"[[", {"[": 1}]') == 2


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "file").write_text("{}")
    (tmp_path / "zero").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
    for name, words in [
        ("pipe", "is a named pipe, not a regular file"),
        ("socket", "is a socket"),
        ("zero", "is a device"),
        (".", "is a folder"),
    ]:
        with pytest.raises(JsonError, match=words):
            bounded_json.load(tmp_path / name)
    assert bounded_json.load(tmp_path / "link") == {}
    with pytest.raises(JsonError, match="link is a symbolic link, not a regular file"):
        bounded_json.load(tmp_path / "link", follow=False)


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "holes").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(JsonError, match="holes has more than 67108864 bytes"):
        bounded_json.load(tmp_path / "holes")
    (tmp_path / "ten").write_text('"12345678"')
    assert bounded_json.load(tmp_path / "ten", max_bytes=10) == "12345678"
    with pytest.raises(JsonError, match="ten has more than 9 bytes"):
        bounded_json.load(tmp_path / "ten", max_bytes=9)
    with pytest.raises(JsonError, match="more than 0 bytes"):  # its size says 0
        bounded_json.load("/proc/self/status", max_bytes=0)


@pytest.mark.parametrize(
    "name", ["", "/a", "../a", "a/../b", "a/..", "a//b", "./a", "a/", "a\0b", ".", "..", 1, None]
)
def test_names_that_lead_out_of_a_folder(name: object) -> None:
    assert not bounded_json.inside(name)


def test_no_mutation_ends_in_another_error() -> None:
    """What is read agrees with the library, which is the oracle; all else is a `JsonError`."""
    chooser = random.Random(0)
    value = {"a": [1, 2.5, {"b": "text", "c": None}], "d": {"e": [[True], '\u00e9\\"']}}
    whole = json.dumps(value, ensure_ascii=False).encode()
    parts = [
        b"[",
        b"{",
        b"]",
        b"}",
        b'"',
        b"\\",
        b"9" * 200,
        b"NaN",
        b"\xff",
        b",",
        b":",
        b"\\ud83d",
    ]
    read = 0
    for _ in range(4000):
        text = bytearray(whole)
        for _ in range(chooser.randint(1, 4)):
            at = chooser.randrange(len(text))
            text[at : at + chooser.randint(0, 2)] = chooser.choice(
                [*parts, bytes([chooser.randrange(256)])]
            )
        try:
            found = bounded_json.loads(bytes(text))
        except JsonError:
            continue
        read += 1
        assert found == json.loads(text.decode())
    assert 100 < read < 3900
