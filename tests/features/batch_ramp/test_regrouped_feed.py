"""Batches of a ramp's sizes: every row once, in order, at any position and in any process."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.support.refusals import refused
from zerojax.config import BatchRamp, BatchRampConfig
from zerojax.data import DatasetSource, as_feed
from zerojax.data.feed import REGROUPED
from zerojax.data.regrouped_feed import in_sizes

WHOLE = 12
RAMP = BatchRamp(config=BatchRampConfig(start=2, increment=5, ramp_rows=11), final=WHOLE)
"""Sizes 2, 2, 2, 7, 12, ...: the fourth and later batches cross those of the data."""
SIZES = (2, 2, 2, 7, 12, 12, 12)


class Rows:
    """Its row r has the number r."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, row: int) -> dict:
        return {"row": np.asarray([row], np.int32)}


def source():
    return DatasetSource(dataset=Rows(), global_batch_size=WHOLE, shuffle=False)


def batch(number: int) -> dict:
    return {"row": np.arange(WHOLE * number, WHOLE * (number + 1), dtype=np.int32)[:, None]}


def once():
    return (batch(number) for number in range(6))


KINDS = {
    "source": source,
    "function": lambda: batch,
    "list": lambda: [batch(number) for number in range(6)],
    "iterator": once,
}


@pytest.fixture(params=KINDS)
def data(request):
    return KINDS[request.param]


def read(feed, count: int) -> list[list[int]]:
    return [next(feed)["row"][:, 0].tolist() for _ in range(count)]


def expected(count: int = len(SIZES)) -> list[list[int]]:
    ends = np.cumsum(SIZES).tolist()
    return [list(range(end - size, end)) for end, size in zip(ends, SIZES, strict=True)][:count]


def test_every_row_is_read_once_in_order(data):
    assert tuple(RAMP.rows(step) for step in range(1, 8)) == SIZES
    feed = as_feed(data())
    feed.give_back([(next(feed), feed.state())], {"kind": feed.kind, "position": 0, "row": 0})
    assert read(in_sizes(feed, RAMP), 7) == expected()


@pytest.mark.parametrize("done", range(7))
def test_a_feed_continues_at_the_next_row(data, done):
    feed = in_sizes(as_feed(data()), RAMP)
    read(feed, done)
    state = json.loads(json.dumps(feed.state()))
    assert state["position"] == done
    resumed = in_sizes(as_feed(data()), RAMP)
    resumed.restore(state)
    assert read(resumed, 7 - done) == expected()[done:]
    assert resumed.state()["position"] == 7


def test_batches_that_were_read_ahead_are_given_back(data):
    feed = in_sizes(as_feed(data()), RAMP)
    read(feed, 2)
    before = feed.state()
    ahead = [(next(feed), feed.state()) for _ in range(3)]
    feed.give_back(ahead, before)
    assert feed.state() == before
    assert read(feed, 5) == expected()[2:]


@pytest.mark.parametrize("kind", ["source", "function", "list", "iterator"])
def test_a_new_feed_starts_after_the_rows_of_earlier_steps(kind):
    feed = in_sizes(as_feed(KINDS[kind]()), RAMP, start=4)
    assert read(feed, 3) == expected()[4:]


def test_a_ramp_may_begin_at_a_saved_position(data):
    plain = as_feed(data())
    read(plain, 2)
    feed = in_sizes(as_feed(data()), RAMP)
    feed.restore(plain.state())
    assert read(feed, 2) == [[24, 25], [26, 27, 28, 29, 30, 31, 32]]


def test_rows_of_a_source_continue_without_the_ramp():
    feed = in_sizes(as_feed(source()), RAMP)
    read(feed, 4)
    plain = as_feed(source())
    plain.restore(feed.state())
    assert read(plain, 1) == [list(range(13, 25))]


def test_other_data_need_the_ramp_of_the_saved_run():
    feed = in_sizes(as_feed(batch), RAMP)
    read(feed, 4)
    assert REGROUPED in feed.state()
    refused(lambda: as_feed(batch).restore(feed.state()), "4", "batch_ramp")


def test_processes_share_the_rows_of_each_batch():
    ramp = BatchRamp(config=BatchRampConfig(start=4, increment=4, ramp_rows=9), final=WHOLE)
    feeds = [in_sizes(as_feed(source(), rows=rows), ramp) for rows in ((0, 6), (6, 9), (9, 12))]
    for step in range(1, 6):
        low, size = ramp.rows_before(step), ramp.rows(step)
        parts = [read(feed, 1)[0] for feed in feeds]
        assert [len(part) for part in parts] == [size // 2, size // 4, size // 4]
        assert [row for part in parts for row in part] == list(range(low, low + size))


def test_an_empty_batch_is_refused():
    feed = in_sizes(as_feed([batch(0), {"row": np.zeros((0, 1), np.int32)}]), RAMP)
    read(feed, 3)
    refused(lambda: next(feed), "1 0", "rows")


def test_the_end_of_an_iterator_is_said(caplog):
    feed = in_sizes(as_feed(once()), RAMP)
    assert len(list(feed)) == 8  # 2 + 2 + 2 + 7 + 4 * 12 of 72 rows
    assert "11 rows" in caplog.text
    feed = in_sizes(as_feed(once()), RAMP)
    refused(lambda: feed.restore({"position": 20}, allow_other_data=True), "end", "data")
