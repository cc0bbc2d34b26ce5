"""Rows of whole texts: what they hold, and that they are a pure function of their number."""

from __future__ import annotations

import collections
import dataclasses
import itertools

import numpy as np
import pytest

from tests.support.text_sets import some_texts, text_set, write_texts
from zerojax.data import PackedSource, as_feed, as_source
from zerojax.data.packed_source import PACKED_NAMES
from zerojax.zoo.decoder import positions_in_texts

SEQ_LEN = 16


@pytest.fixture
def texts():
    return some_texts(60)


@pytest.fixture
def source(tmp_path, texts):
    return source_of(tmp_path, texts)


def source_of(folder, texts, **options) -> PackedSource:
    options = {"seq_len": SEQ_LEN, "global_batch_size": 4, **options}
    return PackedSource(texts=text_set(folder / f"{len(list(folder.iterdir()))}", texts), **options)


def texts_of_row(row: dict) -> list[tuple[list[int], list[bool]]]:
    """What a row says its texts are: their tokens, and which of them are asked for."""
    found = []
    for number in range(int(row["segments"].max()) + 1):
        mine = np.flatnonzero(row["segments"] == number)
        assert np.all(np.diff(mine) == 1)
        assert row["positions"][mine].tolist() == list(range(len(mine)))
        tokens = row["tokens"][mine].tolist()
        assert row["targets"][mine][:-1].tolist() == tokens[1:]
        assert row["weights"][mine][-1] == 0, "its target would be another text's"
        found.append((tokens, [False, *(row["weights"][mine][:-1] == 1).tolist()]))
    padding = row["segments"] < 0
    assert not row["weights"][padding].any()
    return found


def rows_of(source: PackedSource, count: int) -> list[dict]:
    made = source.rows(0, count)
    return [{name: value[i] for name, value in made.items()} for i in range(count)]


def as_key(ids, asked) -> tuple:
    return tuple(map(int, ids)), tuple(map(bool, asked))


def test_every_text_is_in_one_row_of_each_epoch(source, texts):
    wanted = collections.Counter(
        # Nothing comes before a text's first token, so that it is never a target.
        as_key(ids, [False, *asked[1:]])
        for ids, asked in texts
    )
    rows = rows_of(source, 3 * source.num_rows)
    for start in range(0, len(rows), source.num_rows):
        found = [one for row in rows[start : start + source.num_rows] for one in texts_of_row(row)]
        assert collections.Counter(as_key(*one) for one in found) == wanted
    first = [row["tokens"].tolist() for row in rows[: source.num_rows]]
    second = [row["tokens"].tolist() for row in rows[source.num_rows : 2 * source.num_rows]]
    assert first != second
    assert sorted(first) == sorted(second)


def test_what_a_row_has(source):
    batch = source.batch(0)
    assert set(batch) == set(PACKED_NAMES)
    for name, value in batch.items():
        assert value.shape == (4, SEQ_LEN)
        assert value.dtype == (np.float32 if name == "weights" else np.int32)
        assert value.flags.c_contiguous
    assert batch["positions"].tolist() == positions_in_texts(batch["segments"]).tolist()


@pytest.mark.parametrize("cuts", [(0, 4), (0, 1, 2, 3, 4), (0, 3, 4), (0, 2, 2, 4)])
def test_rows_are_the_same_however_they_are_cut(source, cuts):
    for step in (0, 3, 50):
        whole = source.batch(step)
        pieces = [source.batch(step, lo, hi) for lo, hi in itertools.pairwise(cuts)]
        for name, value in whole.items():
            assert np.array_equal(np.concatenate([piece[name] for piece in pieces]), value)


def test_a_run_resumes_at_the_row_with_another_batch_size(source):
    feed = as_feed(source)
    for _ in range(5):
        next(feed)
    state, following = feed.state(), [next(feed) for _ in range(6)]
    other = as_feed(dataclasses.replace(source, global_batch_size=2))
    other.restore(state)
    again = [next(other) for _ in range(12)]
    for name in PACKED_NAMES:
        assert np.array_equal(
            np.concatenate([batch[name] for batch in following]),
            np.concatenate([batch[name] for batch in again]),
        )


def test_a_position_of_other_data_is_refused(source, texts, tmp_path):
    state = as_feed(source).state()
    texts[0][1][:] = True
    for other in (
        source_of(tmp_path, texts),
        dataclasses.replace(source, seed=1),
        dataclasses.replace(source, long_texts="split"),
    ):
        with pytest.raises(ValueError, match="the data differ from those of the saved run"):
            as_feed(other).restore(state)
    plain, _, _ = as_source(np.arange(2000), seq_len=SEQ_LEN, global_batch_size=4)
    with pytest.raises(
        ValueError, match=("of type 'packed texts', but the current data are of type")
    ):
        as_feed(plain).restore(state)


def test_without_shuffling_rows_are_in_the_order_of_their_first_texts(source, texts):
    rows = rows_of(dataclasses.replace(source, shuffle=False), source.num_rows)
    place = {as_key(ids, [False, *asked[1:]]): i for i, (ids, asked) in enumerate(texts)}
    found = [[place[as_key(*one)] for one in texts_of_row(row)] for row in rows]
    assert [numbers[0] for numbers in found] == sorted(numbers[0] for numbers in found)
    assert all(numbers == sorted(numbers) for numbers in found)


# --- long texts -----------------------------------------------------------------------------------


@pytest.fixture
def long_texts():
    """Texts of 5, 16, 17 and 40 tokens, numbered through."""
    ids = np.arange(1, 79) % 60
    cuts = [0, 5, 21, 38, 78]
    return [(ids[a:b], np.arange(b - a) % 2 == 1) for a, b in itertools.pairwise(cuts)]


def test_texts_longer_than_a_row_are_refused_with_their_number(tmp_path, long_texts):
    with pytest.raises(
        ValueError,
        match=r"2 of the 4 texts of .* longer than a row of seq_len=16 tokens \(the longest, text "
        r"4, has 40\); raise seq_len to 40, or set data.long_texts to split or drop",
    ):
        source_of(tmp_path, long_texts, global_batch_size=1)
    source = source_of(tmp_path, long_texts, global_batch_size=1, seq_len=40)
    assert ": 4 texts of 78 tokens in 2 rows of 40, 2.5 % of them padding" in source.describe()


def test_split_texts_ask_for_each_token_once(tmp_path, long_texts):
    source = source_of(tmp_path, long_texts, global_batch_size=1, long_texts="split", shuffle=False)
    assert "4 texts of 78 tokens (2 longer than a row were split) in" in source.describe()
    rows = rows_of(source, source.num_rows)
    asked = [
        (int(target), int(token))
        for row in rows
        for target, token, weight in zip(row["targets"], row["tokens"], row["weights"], strict=True)
        if weight
    ]
    wanted = [
        (int(ids[i]), int(ids[i - 1]))
        for ids, marks in long_texts
        for i in range(1, len(ids))
        if marks[i]
    ]
    assert sorted(asked) == sorted(wanted)
    tokens = sorted(int(x) for row in rows for x in row["tokens"][row["segments"] >= 0])
    assert tokens == sorted(int(x) for ids, _ in long_texts for x in ids)


def test_dropped_texts_are_counted(tmp_path, long_texts):
    source = source_of(tmp_path, long_texts, global_batch_size=1, long_texts="drop")
    assert "(2 longer than a row were left out) in 2 rows" in source.describe()
    found = [one for row in rows_of(source, 2) for one in texts_of_row(row)]
    assert sorted(len(tokens) for tokens, _ in found) == [5, 16]
    with pytest.raises(ValueError, match="all 4 texts of .* so none is left; raise seq_len"):
        source_of(tmp_path, long_texts, global_batch_size=1, long_texts="drop", seq_len=4)


# --- few texts, and wrong ones --------------------------------------------------------------------


def test_rows_of_padding_fill_the_last_batch_of_an_evaluation(tmp_path, texts):
    source = source_of(tmp_path, texts[:5], global_batch_size=8, fill=True, shuffle=False)
    assert source.num_rows == 8
    assert source.steps_per_epoch == 1
    rows = rows_of(source, 8)
    real = source.packing.num_rows
    assert 0 < real < 8
    assert sum(len(texts_of_row(row)) for row in rows) == 5
    assert all((row["segments"] == -1).all() and not row["weights"].any() for row in rows[real:])
    with pytest.raises(ValueError, match="one batch has global_batch_size=8; lower seq_len or"):
        dataclasses.replace(source, fill=False)


def test_ids_outside_the_vocabulary_are_found_when_they_are_read(tmp_path):
    texts = some_texts(60, vocab_size=60)
    texts[17][0][1] = 63
    source = source_of(tmp_path, texts, vocab_size=63)
    assert source.vocab_size == 63
    with pytest.raises(
        ValueError,
        match=r"text 18 holds token id 63, outside the vocabulary \[0, 63\); set the model's "
        "vocab_size to 64 or more, or prepare the texts again with the model's tokenizer",
    ):
        source.rows(0, source.num_rows)
    dataclasses.replace(source, vocab_size=64).rows(0, source.num_rows)


def test_masks_of_a_folder_are_looked_at(tmp_path):
    """Of no target is refused, in both parts; of all of them is said before the first step."""
    texts = [(ids, np.arange(len(ids)) > 0) for ids, _ in some_texts(60)]
    sizes = {"seq_len": 16, "global_batch_size": 2}
    nothing = [(ids, ~asked) for ids, asked in texts]
    folder = write_texts(tmp_path / "zeros", nothing)
    with pytest.raises(
        ValueError, match="none of its .* target tokens is part of .*--template FILE"
    ):
        as_source(folder, **sizes)
    folder = write_texts(tmp_path / "late", texts[:50] + nothing[:10], validation_texts=10)
    with pytest.raises(ValueError, match="10 validation texts is part .*validation_fraction"):
        as_source(folder, **sizes)
    count = sum(len(ids) - 1 for ids, _ in texts)
    source = as_source(write_texts(tmp_path / "ones", texts), validation_fraction=0, **sizes)[0]
    assert (
        f"all {count} target tokens are trained on, including those of questions"
        in source.describe()
    )
    texts[7][1][1] = False
    source = as_source(write_texts(tmp_path / "few", texts), validation_fraction=0, **sizes)[0]
    assert "are trained on" not in source.describe()


def test_a_folder_of_texts_is_opened_as_data(tmp_path, texts):
    folder = write_texts(tmp_path / "x", texts)
    options = {"seq_len": SEQ_LEN, "global_batch_size": 4}
    train, validation, tokenizer = as_source(str(folder), **options, validation_fraction=0.1)
    assert (train.texts.num_texts, validation.texts.num_texts) == (54, 6)
    assert (validation.shuffle, validation.fill, tokenizer) == (False, True, None)
    assert train.vocab_size == 64
    write_texts(folder, texts, validation_texts=9)
    train, validation, _ = as_source(folder, **options, validation_fraction=0.1)
    assert (train.texts.num_texts, validation.texts.first) == (51, 51)
    assert as_source(folder, **options, long_texts="drop")[0].long_texts == "drop"
    with pytest.raises(ValueError, match="tokenizer with 64 entries, the model's vocab_size is 50"):
        as_source(folder, **options, vocab_size=50)
    with pytest.raises(ValueError, match="long_texts='cut' is not one of refuse, split, drop"):
        as_source(folder, **options, long_texts="cut")
