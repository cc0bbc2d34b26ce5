"""Masked tokens: 15 % of a row, 80/10/10 of them, a pure function of seed and row."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from zerojax.data import MaskedSource, TokenSource, as_feed, as_masked_source, tokens_of_array

VOCAB, SEQ, ROWS, MASK = 200, 64, 16, 200
SPECIAL = (0, 7)
PLACES = 10  # 15 % of 64


@functools.cache
def plain(seed: int = 0, count: int = 40_000) -> TokenSource:
    ids = np.random.default_rng(1).integers(1, VOCAB, count).astype(np.uint8)
    return TokenSource(
        tokens=tokens_of_array(ids),
        seq_len=SEQ,
        global_batch_size=ROWS,
        seed=seed,
        vocab_size=VOCAB,
    )


@functools.cache
def masked(seed: int = 0) -> MaskedSource:
    return as_masked_source(plain(seed), mask_token=MASK, special_tokens=SPECIAL)


def test_only_the_places_that_are_asked_for_are_changed() -> None:
    for step in (0, 3, 100):
        batch, before = masked().batch(step), plain().batch(step)["tokens"]
        assert {name: (x.dtype, x.shape) for name, x in batch.items()} == {
            "tokens": (np.int32, (ROWS, SEQ)),
            "positions": (np.int32, (ROWS, PLACES)),
            "targets": (np.int32, (ROWS, PLACES)),
            "weights": (np.float32, (ROWS, PLACES)),
        }
        positions = batch["positions"]
        assert (np.diff(positions, axis=1) > 0).all()
        np.testing.assert_array_equal(
            batch["targets"], np.take_along_axis(before, positions, axis=1)
        )
        restored = batch["tokens"].copy()
        np.put_along_axis(restored, positions, batch["targets"], axis=1)
        np.testing.assert_array_equal(restored, before)


def test_eighty_ten_ten_and_every_place_alike() -> None:
    """40,000 places; each count is within five standard deviations."""
    batches = [masked().batch(step) for step in range(250)]
    join = lambda name: np.concatenate([batch[name] for batch in batches])  # noqa: E731
    positions, targets = join("positions"), join("targets")
    shown = np.take_along_axis(join("tokens"), positions, axis=1)
    count = targets.size
    assert count == 250 * ROWS * PLACES
    assert join("weights").all()

    def near(found: int, share: float) -> None:
        assert abs(found - share * count) < 5 * np.sqrt(count * share * (1 - share)), share

    near((shown == MASK).sum(), 0.8)
    # A drawn token is, once in about 198 times, the one that was there.
    near((shown == targets).sum(), 0.1 + 0.1 / 198)
    near(((shown != MASK) & (shown != targets)).sum(), 0.1 * 197 / 198)
    for place in range(SEQ):
        near((positions == place).sum(), 1 / SEQ)
    drawn = shown[(shown != MASK) & (shown != targets)]
    assert set(drawn) == set(range(VOCAB)) - set(SPECIAL)
    assert np.bincount(drawn).max() < 2.5 * len(drawn) / VOCAB


def test_special_tokens_are_neither_asked_for_nor_drawn() -> None:
    for step in range(20):
        batch = masked().batch(step)
        assert not np.isin(batch["targets"], SPECIAL).any()
        assert (plain().batch(step)["tokens"] == 7).any()


def test_rows_without_enough_ordinary_tokens_count_for_less() -> None:
    ids = np.zeros(SEQ * 2 + 1, np.uint8)
    ids[SEQ + 3 : SEQ + 7] = 5
    tokens = dataclasses.replace(plain(), tokens=tokens_of_array(ids), global_batch_size=2)
    source = as_masked_source(
        dataclasses.replace(tokens, shuffle=False), mask_token=MASK, special_tokens=(0,)
    )
    batch = source.batch(0)
    assert batch["weights"].sum(axis=1).tolist() == [0, 4]
    assert (batch["tokens"][0] == 0).all()
    asked = batch["positions"][1][batch["weights"][1] > 0]
    assert asked.tolist() == [3, 4, 5, 6]
    assert (batch["tokens"][1][:3] == 0).all()


def test_rows_are_a_pure_function_of_seed_and_number() -> None:
    whole = masked().batch(5)
    parts = [masked().batch(5, low, low + 4) for low in range(0, ROWS, 4)]
    for name, value in whole.items():
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), value)
    again = as_masked_source(plain(), mask_token=MASK, special_tokens=SPECIAL).batch(5)
    np.testing.assert_array_equal(again["tokens"], whole["tokens"])
    other = dataclasses.replace(masked(), seed=1, shuffle=False).batch(0)
    same = dataclasses.replace(masked(), shuffle=False).batch(0)
    assert (other["positions"] != same["positions"]).mean() > 0.5


def test_an_epoch_later_the_places_are_others() -> None:
    source = dataclasses.replace(masked(), shuffle=False)
    size = source.num_windows
    first, second = source.rows(0, ROWS), source.rows(size, size + ROWS)
    assert (first["positions"] != second["positions"]).mean() > 0.5


def test_a_resumed_run_sees_the_rows_that_it_would_have_seen() -> None:
    feed = as_feed(masked())
    for _ in range(3):
        next(feed)
    state, expected = feed.state(), next(feed)
    resumed = as_feed(masked())
    resumed.restore(state)
    np.testing.assert_array_equal(next(resumed)["tokens"], expected["tokens"])
    changed = as_feed(dataclasses.replace(masked(), mask_fraction=0.3))
    with pytest.raises(ValueError, match=r"mask_fraction was 0\.15, is 0\.3"):
        changed.restore(state)
