"""Mixtures: shares, exactness at every row, ends of sources, and what goes together."""

from __future__ import annotations

import collections
import dataclasses
import itertools

import numpy as np
import pytest

from tests.support.text_sets import some_texts, text_set, write_texts
from zerojax.config import ConfigError, MixturePart
from zerojax.data import (
    Boundary,
    MixtureSource,
    PackedSource,
    TokenSource,
    array_names,
    as_feed,
    as_masked_source,
    as_source,
    tokens_of_array,
)
from zerojax.data.mixture import BLOCK, UNITS, _units, largest_remainders
from zerojax.zoo.decoder import positions_in_texts

SEQ_LEN = 4


def tokens_from(first: int, num_rows: int, **options) -> TokenSource:
    """A source whose row w begins with token first + w."""
    ids = np.repeat(np.arange(first, first + num_rows + 1), SEQ_LEN)
    options = {"seq_len": SEQ_LEN, "global_batch_size": 1, **options}
    return TokenSource(tokens=tokens_of_array(ids[: num_rows * SEQ_LEN + 1]), **options)


def mixture_of(sizes, weights, *, at_end=(), **options) -> MixtureSource:
    sources = [tokens_from(10_000 * i, size) for i, size in enumerate(sizes)]
    options = {"global_batch_size": 6, **options}
    return MixtureSource(
        sources=tuple(sources),
        weights=tuple(weights),
        names=tuple("abcdefgh"[: len(sizes)]),
        at_end=tuple(at_end),
        **options,
    )


def given(mixture: MixtureSource, first: int, last: int) -> list[tuple[int, int]]:
    """(source, which of its rows) of each row, read from the tokens."""
    starts = mixture.rows(first, last)["tokens"][:, 0]
    return [divmod(int(start), 10_000) for start in starts]


# --- shares ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "weights", [(1,), (1, 1), (0.7, 0.3), (1, 2, 4, 0.1), (1023, 1), (1 / 3, 1 / 7, 0.2, 5, 0.02)]
)
def test_shares_are_within_one_row_at_the_end_of_each_block(weights):
    mixture = mixture_of([9] * len(weights), weights)
    shares = np.array(weights) / sum(weights)
    last = np.zeros(len(weights), int)
    for block in range(1, 40):
        sources, _ = mixture.places(np.arange((block - 1) * BLOCK, block * BLOCK))
        last += np.bincount(sources, minlength=len(weights))
        # Shares are parts of 2**20, which after 40 blocks is less than 0.05 rows.
        assert np.abs(last - shares * block * BLOCK).max() < 1.05
        assert last.sum() == block * BLOCK


def test_no_count_ever_falls():
    """Also of the smallest share, over the whole period of the weights."""
    for weights in ((1023, 1), (1, 1, 1, 1021), (1 / 3, 1 / 3, 1 / 3), (0.002, 0.998)):
        units = _units(weights)
        assert units.sum() == UNITS
        assert units.min() >= UNITS // BLOCK
        counts = np.array([largest_remainders(n * BLOCK, units) for n in range(UNITS // BLOCK + 2)])
        assert (counts.sum(1) == np.arange(len(counts)) * BLOCK).all()
        assert (np.diff(counts, axis=0) >= 0).all()
        assert (counts[UNITS // BLOCK] == units).all()


def test_each_row_of_a_source_comes_once_in_each_of_its_epochs():
    mixture = mixture_of([50, 7, 300], (5, 1, 4))
    rows = given(mixture, 0, 3000)
    by_source = collections.defaultdict(list)
    for source, row in rows:
        by_source[source].append(row)
    # Within a block the rows of a source are in another order.
    whole = {0: 50, 1: 7, 2: 300}
    for source, size in whole.items():
        counts = collections.Counter(by_source[source])
        assert set(counts) == set(range(size))
        assert max(counts.values()) - min(counts.values()) <= 1 + BLOCK // size


def test_places_differ_from_block_to_block_and_with_the_seed():
    mixture = mixture_of([10, 10], (1, 1))
    first, second = (mixture.places(np.arange(n, n + BLOCK))[0].tolist() for n in (0, BLOCK))
    assert first != second
    assert first[:20] != sorted(first[:20])
    other = dataclasses.replace(mixture, seed=1)
    assert other.places(np.arange(BLOCK))[0].tolist() != first


# --- exactness ------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [(0, 6), (0, 1, 2, 3, 4, 5, 6), (0, 5, 6)])
def test_rows_are_the_same_however_they_are_cut(cuts):
    mixture = mixture_of([50, 7], (5, 1), at_end=("repeat", "stop"))
    for step in (0, 1, 170, 171, 1000, 10**9):  # also over the end of a block
        pieces = [mixture.batch(step, lo, hi) for lo, hi in itertools.pairwise(cuts)]
        for name, value in mixture.batch(step).items():
            assert np.array_equal(np.concatenate([piece[name] for piece in pieces]), value)


def test_a_run_resumes_at_every_row_with_another_batch_size():
    mixture = mixture_of([50, 7, 30], (5, 1, 2), at_end=("repeat", "stop", "repeat"))
    whole = given(mixture, 0, 2400)
    for size, steps, other in ((6, 7, 4), (8, 128, 3), (341, 3, 5)):
        feed = as_feed(dataclasses.replace(mixture, global_batch_size=size))
        for _ in range(steps):
            next(feed)
        again = as_feed(dataclasses.replace(mixture, global_batch_size=other))
        again.restore(feed.state())
        rows = [
            divmod(int(start), 10_000) for _ in range(20) for start in next(again)["tokens"][:, 0]
        ]
        assert rows == whole[size * steps : size * steps + 20 * other]


def test_a_position_in_another_mixture_is_refused():
    mixture = mixture_of([50, 7], (5, 1))
    state = as_feed(mixture).state()
    for changes in ({"weights": (5, 2)}, {"seed": 1}, {"at_end": ("repeat", "stop")}):
        with pytest.raises(ValueError, match="the data differ from those of the saved run"):
            as_feed(dataclasses.replace(mixture, **changes)).restore(state)
    with pytest.raises(
        ValueError, match=("of type 'mixture', but the current data are of type 'tokens'")
    ):
        as_feed(mixture.sources[0]).restore(state)


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 100, 512, 1024, 5000])
def test_a_source_that_stops_gives_each_row_once(size):
    mixture = mixture_of([40, size, 30], (2, 1, 1), at_end=("repeat", "stop", "repeat"))
    count = 8 * -(-size // BLOCK) * BLOCK
    sources, rows = mixture.places(np.arange(count))
    mine = sources == 1
    assert sorted(rows[mine].tolist()) == list(range(size))
    # Up to its end it has its share; behind it the others have theirs of what is left.
    end = int(np.flatnonzero(mine)[-1]) // BLOCK * BLOCK
    assert abs(np.count_nonzero(sources[:end] == 1) - end / 4) < 1.05
    behind = sources[end + 2 * BLOCK :]  # between the ends of two blocks, each within one row
    assert len(behind) > BLOCK
    assert abs(np.count_nonzero(behind == 0) - len(behind) * 2 / 3) < 2.05
    # Rows of the others go on without a gap.
    for other in (0, 2):
        assert sorted(rows[sources == other].tolist()) == list(range(np.sum(sources == other)))


def test_sources_that_stop_in_one_block_and_one_after_the_other():
    for sizes in ((3, 3, 50), (3, 900, 50), (256, 256, 10)):
        mixture = mixture_of(sizes, (1, 1, 2), at_end=("stop", "stop", "repeat"))
        sources, rows = mixture.places(np.arange(6 * BLOCK))
        for index, size in enumerate(sizes[:2]):
            assert sorted(rows[sources == index].tolist()) == list(range(size))
        assert (sources[5 * BLOCK :] == 2).all()


def test_it_says_which_epoch_each_source_is_in():
    mixture = mixture_of([50, 7], (1, 1), at_end=("repeat", "stop"))
    feed = as_feed(mixture)
    assert feed.epochs(feed.state()) == {"a": 1, "b": 1}
    seen = []
    for _ in range(40):
        next(feed)
        state = feed.state()
        sources, _ = mixture.places(np.arange(state["row"]))
        count = int(np.count_nonzero(sources == 0))
        assert feed.epochs(state) == {"a": 1 + max(count - 1, 0) // 50, "b": 1}
        seen.append(feed.epochs(state)["a"])
    assert seen[0] == 1
    assert seen[-1] > 2
    assert as_feed(mixture.sources[0]).epochs(state) == {}


# --- sorts of sources -----------------------------------------------------------------------------


def test_what_a_source_lacks_is_filled_in(tmp_path):
    packed = PackedSource(
        texts=text_set(tmp_path / "x", some_texts(30)),
        seq_len=16,
        global_batch_size=1,
        vocab_size=64,
    )
    plain = TokenSource(
        tokens=tokens_of_array(np.arange(640) % 64), seq_len=16, global_batch_size=1, vocab_size=64
    )
    cut = dataclasses.replace(plain, boundary=Boundary(end_token=9))
    mixture = MixtureSource(
        sources=(packed, plain, cut),
        weights=(1, 1, 1),
        names=("packed", "plain", "cut"),
        global_batch_size=8,
    )
    assert mixture.vocab_size == 64
    numbers = np.arange(60)
    rows, (sources, own) = mixture.rows_at(numbers), mixture.places(numbers)
    assert set(rows) == {"tokens", "targets", "weights", "segments", "positions"}
    assert rows["positions"].tolist() == positions_in_texts(rows["segments"]).tolist()
    for index, source in enumerate(mixture.sources):
        mine = sources == index
        assert mine.any()
        for name, value in source.rows_at(own[mine]).items():
            assert np.array_equal(rows[name][mine], value)
            assert rows[name].dtype == value.dtype
    mine = sources == 1
    assert (rows["weights"][mine] == 1).all()
    assert (rows["segments"][mine] == 0).all()


def test_masked_sources_mix_with_each_other_alone():
    plain = [
        TokenSource(
            tokens=tokens_of_array(np.arange(200) % 50),
            seq_len=8,
            global_batch_size=1,
            seed=seed,
            vocab_size=50,
        )
        for seed in (0, 1)
    ]
    masked = [as_masked_source(source, mask_token=50) for source in plain]
    options = {"weights": (1, 1), "names": ("a", "b"), "global_batch_size": 4}
    rows = MixtureSource(sources=tuple(masked), **options).batch(0)
    assert rows["positions"].shape == (4, masked[0].num_places)
    with pytest.raises(ValueError, match="mix only sources of the same type"):
        MixtureSource(sources=(masked[0], plain[0]), **options)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"sources": ()}, "mixture has 0 sources"),
        ({"weights": (1,)}, "weights has 1 entries for 2 sources"),
        ({"weights": (1, 0)}, "weight=0 of b is not a number above 0"),
        ({"weights": (1, float("nan"))}, "weight=nan of b"),
        ({"weights": (1, 0.0009)}, r"weight=0.0009 of b is less than 1/1024 of all .*0.000978 or"),
        ({"names": ("a", "a")}, "give each a unique name"),
        ({"at_end": ("stop", "stop")}, "every source of the mixture stops at its end"),
        (
            {"at_end": ("repeat", "end")},
            r"at_end=\['repeat', 'end'\] is not valid; use repeat or stop",
        ),
        ({"global_batch_size": 0}, "global_batch_size=0: it must be at least 1"),
        (
            {"sources": (tokens_from(0, 9), tokens_from(0, 9, seq_len=2))},
            "b has rows of seq_len=2, a of 4",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(changes, why):
    mixture = mixture_of([9, 9], (1, 1))
    with pytest.raises(ValueError, match=why):
        dataclasses.replace(mixture, **changes)


def test_sources_of_several_tokenizers_are_refused():
    one, other = tokens_from(0, 9), tokens_from(0, 9)
    tokens = [
        dataclasses.replace(x.tokens, tokenizer={"kind": "bytes", "n": i})
        for i, x in enumerate((one, other))
    ]
    sources = [dataclasses.replace(one, tokens=x) for x in tokens]
    with pytest.raises(ValueError, match="a and b were made by different tokenizers"):
        MixtureSource(sources=tuple(sources), weights=(1, 1), names=("a", "b"), global_batch_size=1)


# --- as data --------------------------------------------------------------------------------------


def test_paths_with_weights_are_data(tmp_path):
    small = write_texts(tmp_path / "small", some_texts(40), validation_texts=5)
    large = write_texts(tmp_path / "large", some_texts(90, seed=1))
    options = {"seq_len": 16, "global_batch_size": 32, "validation_fraction": 0}
    train, validation, _ = as_source({small: 1, large: 3}, **options)
    assert train.names == (str(small), str(large))
    assert train.sources[0].num_rows < train.global_batch_size, "less than a batch"
    assert train.describe().startswith(f"mixture of 25 % {small}: 35 texts of")
    assert np.bincount(train.places(np.arange(BLOCK))[0]).tolist() == [256, 768]
    assert [x.texts.num_texts for x in validation.sources] == [5]
    parts = (
        MixturePart(path=str(small), weight=1, at_end="stop"),
        MixturePart(path=str(large), weight=3),
    )
    train, validation, _ = as_source(parts, **options)
    assert train.at_end == ("stop", "repeat")
    assert " (stops at its end)" in train.describe()
    assert validation.at_end == ("repeat",)
    names = ("tokens", "targets", "segments", "weights", "positions")
    assert array_names(parts) == array_names(str(small)) == names
    assert array_names(None) == array_names({"not there": 1}) == names[:2]
    assert array_names(None, pack=True) == names[:4]
    with pytest.raises(ConfigError, match="weight: 0.0 must be above 0"):
        as_source({small: 0}, **options)
