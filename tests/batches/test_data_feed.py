"""A feed comes back to the same place; reading ahead changes neither the order nor the place."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import threading
import time
import types

import numpy as np
import pytest

import zerojax
from zerojax.data import TokenSource, as_feed, prefetch, tokens_of_array
from zerojax.data.feed import Feed


def number_of(batch) -> int:
    return int(batch["x"][0])


def batch_of(number: int) -> dict[str, np.ndarray]:
    return {"x": np.array([number])}


class Resumable:
    """An endless iterator with get_state and set_state, as grain's are; the state is bytes."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        return batch_of(self.number - 1)

    def get_state(self) -> bytes:
        return str(self.number).encode() + b"\xff"

    def set_state(self, state: bytes) -> None:
        self.number = int(state[:-1])


class OfOneDict(Resumable):
    """The same, whose state is the dict that it changes."""

    def __init__(self) -> None:
        self.state = {"number": 0}

    def __next__(self):
        self.state["number"] += 1
        return batch_of(self.state["number"] - 1)

    def get_state(self) -> dict[str, int]:
        return self.state

    def set_state(self, state: dict[str, int]) -> None:
        self.state = state


class Loader:
    """Gives ten batches each time it is iterated, in an order of its own every time."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        first = self.epoch * 100
        return (batch_of(first + i) for i in range(10))


def token_source(**options) -> TokenSource:
    options = {"seq_len": 4, "global_batch_size": 3, **options}
    return TokenSource(tokens=tokens_of_array(np.arange(101)), **options)


KINDS = {
    "source": token_source,
    "function": lambda: batch_of,
    "list": lambda: [batch_of(i) for i in range(7)],
    "loader": Loader,
    "generator": lambda: (batch_of(i) for i in range(100)),
    "stateful": Resumable,
    "stateful, of one dict": OfOneDict,
}


def read(feed: Feed, count: int) -> list:
    return [{name: array.tolist() for name, array in next(feed).items()} for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_feed_goes_on_where_the_first_one_stopped(kind: str):
    whole = read(as_feed(KINDS[kind]()), 30)
    assert len({str(batch) for batch in whole}) >= 7
    first = as_feed(KINDS[kind]())
    assert read(first, 13) == whole[:13]
    state = first.state()
    assert first.position == 13
    assert read(first, 3) == whole[13:16]  # as reading ahead does
    saved = json.loads(json.dumps(state))
    second = as_feed(KINDS[kind]())
    second.restore(saved)
    assert second.position == 13
    assert second.state() == state
    assert read(second, 17) == whole[13:]
    assert saved == state


@pytest.mark.parametrize("kind", KINDS)
def test_start_means_the_step_to_start_with(kind: str):
    assert read(as_feed(KINDS[kind](), start=9), 5) == read(as_feed(KINDS[kind]()), 14)[9:]


def test_only_this_process_s_rows_are_read():
    whole, mine = as_feed(token_source()), as_feed(token_source(), rows=(1, 3))
    for _ in range(20):
        full, part = next(whole), next(mine)
        assert np.array_equal(full["tokens"][1:3], part["tokens"])
    assert whole.state() == mine.state()
    with pytest.raises(ValueError, match="not within the 3 rows"):
        as_feed(token_source(), rows=(0, 4))


def test_another_batch_size_continues_at_the_row_where_it_stopped():
    feed = as_feed(token_source())
    seen = [row[0] for batch in read(feed, 4) for row in batch["tokens"]]
    wider = as_feed(token_source(global_batch_size=13))
    wider.restore(feed.state())
    assert wider.position == 4
    seen += [row[0] for row in read(wider, 1)[0]["tokens"]]
    assert sorted(seen) == list(range(0, 100, 4))


def test_skipping_says_so_and_only_when_it_happens(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, logger="zerojax.data"):
        next(as_feed(Loader()))
        next(as_feed(batch_of, start=9))
        assert not caplog.records
        next(as_feed(Loader(), start=12))
    assert "discarding 12 batches to reach the batch after step 12" in caplog.text


def test_iterators_end_and_empty_data_are_refused():
    feed = as_feed(batch_of(i) for i in range(3))
    assert [number_of(batch) for batch in feed] == [0, 1, 2]
    assert feed.position == 3
    with pytest.raises(ValueError, match="cannot go back to 1"):
        feed.restore({"kind": "iterable", "position": 1})

    class Empty:
        def __iter__(self):
            return iter(())

    with pytest.raises(ValueError, match=r"the data \(Empty\) returned no batch"):
        next(as_feed(Empty()))
    with pytest.raises(ValueError, match="length 0"):
        as_feed([])


def endless():
    while True:
        yield batch_of(1)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (batch_of(1), "a single batch with keys .'x'.; pass .batch."),
        ("corpus.txt", "as_source"),
        (None, "as_source"),
        (3, "batches is a int"),
        (
            (np.ones((8, 4)), np.ones(8)),
            r"single batch, a tuple of arrays .8, 4., .8., .*pass .batch.",
        ),
        (endless, r"generator function endless, .* such as batches=list\(endless\(\.\.\.\)\)"),
        (
            lambda: batch_of(1),
            r"called with the number of a batch, but <lambda>\(\) cannot be called",
        ),
    ],
)
def test_what_is_no_data_is_refused(bad, words):
    with pytest.raises(TypeError, match=words):
        as_feed(bad)
    with pytest.raises(ValueError, match="start=-1"):
        as_feed(batch_of, start=-1)


def test_a_run_goes_on_with_other_data_where_that_is_allowed(tmp_path):
    model = (lambda key: {"w": np.ones((4, 1), np.float32)}, lambda params, x: x @ params["w"])
    rows = [{"x": np.full((8, 4), number, np.float32)} for number in (1, 2, 3)]

    def train(batches, steps):
        return zerojax.train(
            model,
            {"zero": 1},
            batches,
            loss=lambda model, batch: (model(batch["x"]) ** 2).mean(),
            steps=steps,
            checkpoint=tmp_path,
        )

    train(rows, 2)
    with pytest.raises(ValueError, match=r"batches=zerojax.data.as_feed\(batches, allow_other"):
        train(iter(rows), 3)
    assert train(as_feed(iter(rows), allow_other_data=True), 3).num_steps == 3


# --- prefetch -------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """However busy the machine is, closing waits until the thread has ended."""
    monkeypatch.setattr("zerojax.data.prefetching.JOIN_SECONDS", 120.0)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "zerojax-prefetch"]


@pytest.mark.parametrize("kind", KINDS)
def test_each_item_carries_the_state_after_it(kind: str):
    plain = as_feed(KINDS[kind]())
    expected = [(next(plain)["tokens" if kind == "source" else "x"].tolist(), plain.state())
                for _ in range(20)]  # fmt: skip
    name = "tokens" if kind == "source" else "x"
    with prefetch(as_feed(KINDS[kind]()), put=lambda b: b[name].tolist(), depth=3) as batches:
        assert [next(batches) for _ in range(20)] == expected
        assert batches.state == expected[-1][1]
    assert not threads()


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_read_ahead_is_not_lost(kind: str):
    whole = read(as_feed(KINDS[kind]()), 24)
    feed = as_feed(KINDS[kind]())
    got = []
    for count in (5, 0, 1, 9):
        with prefetch(feed, put=lambda batch: batch, depth=2) as batches:
            for _ in range(count):
                batch, state = next(batches)
                got.append({key: array.tolist() for key, array in batch.items()})
            time.sleep(0.02)
        assert feed.position == len(got)
        assert feed.state() == (state if count else feed.state())
    got += read(feed, 9)
    assert got == whole


def test_reading_overlaps_the_step_and_is_bounded(monkeypatch):
    """By this clock a consumer waits a second for each batch."""
    clock = types.SimpleNamespace(perf_counter=itertools.count().__next__)
    monkeypatch.setattr("zerojax.data.prefetching.time", clock)
    started, all_read, gate = [], threading.Event(), threading.Event()

    def gated(step: int):
        started.append(step)
        if step == 3:
            all_read.set()
        if step >= 4:
            assert gate.wait(120)
        return batch_of(step)

    with prefetch(as_feed(gated), put=number_of, depth=2) as batches:
        assert next(batches)[0] == 0
        assert all_read.wait(120)
        time.sleep(0.1)  # it has the time to read more, and must not
        # Two in the queue and one in the hand of the thread: no more is read.
        assert started == [0, 1, 2, 3]
        # These are there although reading the next one has not ended.
        assert [next(batches)[0] for _ in range(3)] == [1, 2, 3]
        gate.set()
        assert next(batches)[0] == 4
        assert batches.waited_seconds == 5


def test_a_thread_far_ahead_pauses_until_half_of_its_batches_are_used():
    read, changed = [], threading.Condition()

    def counted(step: int):
        with changed:
            read.append(step)
            changed.notify()
        return batch_of(step)

    def wait_for(count: int) -> None:
        with changed:
            assert changed.wait_for(lambda: len(read) >= count, timeout=120)
        time.sleep(0.02)  # it has the time to read more, and must not
        assert len(read) == count

    with prefetch(as_feed(counted), put=number_of, depth=4) as batches:
        wait_for(5)
        next(batches)
        wait_for(5)
        next(batches)
        wait_for(7)
        assert [next(batches)[0] for _ in range(8)] == list(range(2, 10))


def test_errors_reach_the_consumer_after_the_good_batches():
    def failing(step: int):
        if step == 2:
            raise OSError("the disk is gone")
        return batch_of(step)

    batches = prefetch(as_feed(failing), put=number_of)
    assert [next(batches)[0], next(batches)[0]] == [0, 1]
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)
    batches.close()
    batches.close()

    def bad_put(batch):
        raise ValueError(f"batch {number_of(batch)} cannot be placed")

    with (
        prefetch(as_feed(batch_of), put=bad_put) as batches,
        pytest.raises(ValueError, match="batch 0 cannot be placed"),
    ):
        next(batches)
    assert not threads()


def test_an_ending_feed_ends_the_loop():
    with prefetch(as_feed(batch_of(i) for i in range(5)), put=number_of) as batches:
        assert [number for number, _ in batches] == [0, 1, 2, 3, 4]


def test_an_interrupt_or_a_forgotten_close_leaves_no_thread():
    def interrupted_loop():
        with prefetch(as_feed(batch_of), put=number_of) as batches:
            next(batches)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted_loop()
    assert not threads()
    batches = prefetch(as_feed(batch_of), put=number_of)
    next(batches)
    del batches
    gc.collect()
    assert not threads()
