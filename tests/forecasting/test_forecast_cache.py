"""The cache of forecasts: what was stored comes back, and nothing that goes wrong stops a plan."""

import json
import os
import threading
from pathlib import Path

import pytest

from zerojax.forecasting import forecast_cache

KEY = forecast_cache.key_of("a program")
VALUE = {"peak": 2**40 + 1, "seconds": 0.1 + 0.2, "roles": [["x", None]], "name": "été"}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path))
    return tmp_path / "forecasts"


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_stored_comes_back(folder):
    assert forecast_cache.load(KEY) is None
    forecast_cache.store(KEY, VALUE)
    assert forecast_cache.load(KEY) == VALUE
    assert forecast_cache.load(forecast_cache.key_of("another")) is None
    assert entries(folder) == [f"{KEY}.json"]


@pytest.mark.parametrize(
    "other",
    [
        ("a", "b", {"fast": False, "z": 2}),
        ("ab", "", {"fast": True, "z": 2}),
        ("b", "a", {"fast": True, "z": 2}),
        ("a", "b"),
        (b"a", "b", {"fast": True, "z": 2}),
        ("a", "b", {"fast": True, "z": "2"}),
    ],
)
def test_another_content_is_another_key(other):
    key = forecast_cache.key_of("a", "b", {"z": 2, "fast": True})
    assert key == forecast_cache.key_of("a", "b", {"fast": True, "z": 2})
    assert key != forecast_cache.key_of(*other)


def test_a_part_whose_content_is_not_seen_is_refused():
    with pytest.raises(TypeError):
        forecast_cache.key_of(object())


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"ZEROJAX_CACHE": "/a/b"}, "/a/b/forecasts"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/zerojax/forecasts"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/zerojax/forecasts"),
        ({}, "/home/me/.cache/zerojax/forecasts"),
        ({"ZEROJAX_CACHE": "off"}, None),
        ({"ZEROJAX_CACHE": "OFF", "XDG_CACHE_HOME": "/c"}, None),
    ],
)
def test_where_it_lies(variables, expected, monkeypatch):
    for name in ("ZEROJAX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert forecast_cache.cache_folder() == (expected and Path(expected))


def test_off_stores_and_loads_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROJAX_CACHE", "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forecast_cache.store(KEY, VALUE)
    assert forecast_cache.load(KEY) is None
    assert list(tmp_path.iterdir()) == []


def damage(text: str, how: str) -> bytes:
    entry = json.loads(text)
    if how == "cut":
        return text[: len(text) // 2].encode()
    if how == "empty":
        return b""
    if how == "not text":
        return b"\xff\xfe\x00"
    if how == "a number":
        return b"7"
    if how == "a flipped digit":
        entry["value"]["peak"] += 1
    if how == "of another key":
        entry["key"] = forecast_cache.key_of("another")
    if how == "no value":
        del entry["value"]
    return json.dumps(entry).encode()


@pytest.mark.parametrize(
    "how", ["cut", "empty", "not text", "a number", "a flipped digit", "of another key", "no value"]
)
def test_a_damaged_entry_is_said_and_made_again(folder, how):
    forecast_cache.store(KEY, VALUE)
    path = folder / f"{KEY}.json"
    path.write_bytes(damage(path.read_text(), how))
    with pytest.warns(UserWarning, match=rf"{KEY}.json is ignored .*ZEROJAX_CACHE"):
        assert forecast_cache.load(KEY) is None
    forecast_cache.store(KEY, VALUE)
    assert forecast_cache.load(KEY) == VALUE


def test_an_entry_that_cannot_be_read_is_ignored(folder):
    (folder / f"{KEY}.json").mkdir(parents=True)
    with pytest.warns(UserWarning, match="is ignored"):
        assert forecast_cache.load(KEY) is None


def test_a_writer_that_stops_half_way_leaves_nothing(folder, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        forecast_cache.store(KEY, VALUE)
    assert entries(folder) == []


def test_the_longest_unused_entries_go(folder, monkeypatch):
    keys = [forecast_cache.key_of(number) for number in range(4)]
    value = {"text": "x" * 1000}
    for age, key in enumerate(keys[:3]):
        forecast_cache.store(key, value)
        os.utime(folder / f"{key}.json", (100 + age, 100 + age))
    assert forecast_cache.load(keys[0]) == value  # used again: now the youngest
    size = (folder / f"{keys[0]}.json").stat().st_size
    monkeypatch.setattr(forecast_cache, "MAX_BYTES", 3 * size)
    forecast_cache.store(keys[3], value)
    assert forecast_cache.load(keys[1]) is None
    assert all(forecast_cache.load(key) == value for key in (keys[0], keys[2], keys[3]))


def test_one_entry_above_the_bound_is_kept(folder, monkeypatch):
    monkeypatch.setattr(forecast_cache, "MAX_BYTES", 1)
    forecast_cache.store(KEY, VALUE)
    assert forecast_cache.load(KEY) == VALUE


def test_files_that_another_process_may_be_writing_are_kept(folder, monkeypatch):
    forecast_cache.store(KEY, VALUE)
    written, abandoned = (folder / f".{digit * 16}.partial" for digit in "ab")
    for path in (written, abandoned):
        path.write_text("{")
    os.utime(abandoned, (100, 100))
    monkeypatch.setattr(forecast_cache, "MAX_BYTES", 1)
    forecast_cache.store(KEY, VALUE)
    assert (written.exists(), abandoned.exists()) == (True, False)


def test_writers_beside_each_other_never_show_a_torn_entry(folder):
    seen = []

    def write(number: int) -> None:
        for _ in range(20):
            forecast_cache.store(KEY, {"numbers": [number] * 2000})
            seen.append(forecast_cache.load(KEY))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 80
    assert all(value is not None and len(set(value["numbers"])) == 1 for value in seen)
    assert entries(folder) == [f"{KEY}.json"]
