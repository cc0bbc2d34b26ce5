"""Best-fit decreasing, counted by length: the rows of the plain algorithm, in seconds."""

from __future__ import annotations

import logging
import time

import numpy as np
import pytest

from zerojax.data import best_fit
from zerojax.data.best_fit import Packing, best_fit_decreasing, packing_of
from zerojax.runtime.user_files import CACHE_VARIABLE


def rows_of(packing: Packing, lengths: np.ndarray) -> list[list[int]]:
    """The lengths in each row."""
    cuts = packing.starts[1:-1]
    return [lengths[row].tolist() for row in np.split(packing.order, cuts)]


def plain(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """One text after the other, the longest first, into the row with the least room."""
    rows: list[list[int]] = []
    for length in sorted(lengths.tolist(), reverse=True):
        fitting = [row for row in rows if sum(row) + length <= capacity]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            rows.append([length])
    return rows


@pytest.mark.sampled(5)
@pytest.mark.parametrize("capacity", [1, 7, 64])
@pytest.mark.parametrize("seed", range(5))
def test_rows_are_those_of_the_plain_algorithm(seed, capacity):
    lengths = np.random.default_rng(seed).integers(1, capacity + 1, 120)
    found = rows_of(best_fit_decreasing(lengths, capacity), lengths)
    # Of two rows with the same room either may get a text, so that only their rooms are alike.
    assert sorted(map(sum, found)) == sorted(map(sum, plain(lengths, capacity)))


def test_each_text_is_in_one_row_in_the_order_of_the_texts():
    lengths = np.random.default_rng(0).integers(1, 40, 1000)
    packing = best_fit_decreasing(lengths, 64)
    assert sorted(packing.order.tolist()) == list(range(1000))
    assert packing.starts[0] == 0
    assert packing.starts[-1] == 1000
    rows = np.split(packing.order, packing.starts[1:-1])
    for row in rows:
        assert np.all(np.diff(row) > 0)
        assert lengths[row].sum() <= 64
    firsts = [row[0] for row in rows]
    assert firsts == sorted(firsts)


def test_rows_have_at_most_two_percent_of_padding():
    """Of lengths as those of chats: log-normal around 400, in rows of 4096."""
    random = np.random.default_rng(0)
    for count in (1_000, 20_000):
        for spread in (0.5, 1.0):
            drawn = random.lognormal(np.log(400), spread, count)
            lengths = np.clip(drawn.astype(int), 2, 4096)
            packing = best_fit_decreasing(lengths, 4096)
            assert 1 - lengths.sum() / (packing.num_rows * 4096) <= 0.02


def test_no_texts_and_texts_that_fit_in_no_row():
    assert best_fit_decreasing(np.zeros(0, int), 8).num_rows == 0
    for wrong in (0, 9):
        with pytest.raises(ValueError, match="do not fit into rows of 8; use lengths from 1 to 8"):
            best_fit_decreasing(np.array([3, wrong]), 8)


@pytest.mark.slow
def test_ten_million_texts_take_less_than_thirty_seconds_of_one_core():
    drawn = np.random.default_rng(0).lognormal(np.log(400), 0.8, 10_000_000)
    lengths = np.clip(drawn.astype(int), 2, 4096)
    before = time.process_time()
    packing = best_fit_decreasing(lengths, 4096)
    seconds = time.process_time() - before
    assert seconds < 30, seconds
    assert 1 - lengths.sum() / (packing.num_rows * 4096) <= 0.02


# --- cache ----------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(best_fit, "CACHED_TEXTS", 100)
    return tmp_path / "cache" / "packings"


LENGTHS = np.random.default_rng(1).integers(1, 33, 200)


def computed(monkeypatch) -> list[int]:
    """How many texts were packed each time."""
    calls = []

    def counting(lengths, capacity):
        calls.append(len(lengths))
        return best_fit_decreasing(lengths, capacity)

    monkeypatch.setattr(best_fit, "best_fit_decreasing", counting)
    return calls


def test_a_packing_is_made_once(cache, monkeypatch):
    calls = computed(monkeypatch)
    first, second = packing_of(LENGTHS, 32), packing_of(LENGTHS, 32)
    assert calls == [200]
    assert np.array_equal(first.order, second.order)
    assert np.array_equal(first.starts, second.starts)
    packing_of(LENGTHS, 33)
    packing_of(LENGTHS[::-1], 32)
    packing_of(LENGTHS[:99], 32)
    assert calls == [200, 200, 200, 99]
    assert len(list(cache.glob("*.npz"))) == 3, "few texts are not kept"


def test_damaged_and_foreign_files_are_made_again(cache, monkeypatch, caplog):
    expected = packing_of(LENGTHS, 32)
    [file] = cache.glob("*.npz")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    for damaged in (bytes(content), b"", content[:100]):
        file.write_bytes(damaged)
        with caplog.at_level(logging.WARNING, "zerojax.data"):
            again = packing_of(LENGTHS, 32)
        assert "the texts are packed again" in caplog.text
        assert np.array_equal(again.order, expected.order)
        caplog.clear()
    np.savez(file, order=np.arange(3), starts=np.array([0, 3]))
    with caplog.at_level(logging.WARNING, "zerojax.data"):
        assert np.array_equal(packing_of(LENGTHS, 32).order, expected.order)
    assert "made for other texts" in caplog.text


def test_old_files_go(cache, monkeypatch):
    monkeypatch.setattr(best_fit, "KEPT_FILES", 2)
    for capacity in range(32, 37):
        packing_of(LENGTHS, capacity)
    assert len(list(cache.iterdir())) == 2


def test_the_cache_can_be_switched_off_or_be_unwritable(cache, monkeypatch, caplog):
    monkeypatch.setenv(CACHE_VARIABLE, "off")
    packing_of(LENGTHS, 32)
    assert not cache.exists()
    blocked = cache.parent / "file"
    blocked.parent.mkdir(parents=True)
    blocked.touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(blocked))
    with caplog.at_level(logging.WARNING, "zerojax.data"):
        packing_of(LENGTHS, 32)
    assert "set ZEROJAX_CACHE to another folder, or to off" in caplog.text
