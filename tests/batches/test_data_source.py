"""Batches are a pure function of the step: every window once per epoch, however rows are cut."""

from __future__ import annotations

import collections
import itertools
from pathlib import Path

import numpy as np
import pytest

from zerojax.data import TokenSource, as_source, tokens_of_array
from zerojax.data.preparation import prepare as write_token_files
from zerojax.data.tokens import TokenPart, Tokens

SEQ_LEN = 4


def source_of(num_windows: int, **options) -> TokenSource:
    """A source whose window w starts with token w * SEQ_LEN, so that windows can be told apart."""
    tokens = tokens_of_array(np.arange(num_windows * SEQ_LEN + 1))
    return TokenSource(
        tokens=tokens, **{"seq_len": SEQ_LEN, "global_batch_size": 6, "seed": 0, **options}
    )


def windows_of(batch: dict[str, np.ndarray]) -> list[int]:
    return (batch["tokens"][:, 0] // SEQ_LEN).tolist()


def test_targets_are_the_tokens_one_place_on():
    batch = source_of(50).batch(3)
    for array in batch.values():
        assert array.shape == (6, SEQ_LEN)
        assert array.dtype == np.int32
        assert array.flags.c_contiguous
    assert np.array_equal(batch["targets"], batch["tokens"] + 1)
    assert not np.shares_memory(batch["tokens"], batch["targets"])


@pytest.mark.parametrize("num_windows", [6, 7, 50, 64])
def test_every_window_is_read_once_in_each_epoch(num_windows: int):
    source = source_of(num_windows)
    rows = [window for step in range(num_windows) for window in windows_of(source.batch(step))]
    epochs = [rows[start : start + num_windows] for start in range(0, len(rows), num_windows)]
    assert len(epochs) == 6
    for epoch in epochs:
        assert sorted(epoch) == list(range(num_windows))
    assert len({tuple(epoch) for epoch in epochs}) > 1


@pytest.mark.parametrize("cuts", [(0, 6), (0, 3, 6), (0, 1, 2, 3, 4, 5, 6), (0, 5, 6)])
def test_rows_are_the_same_however_they_are_cut(cuts: tuple[int, ...]):
    source = source_of(40)
    for step in (0, 6, 1000):
        pieces = [source.batch(step, lo, hi) for lo, hi in itertools.pairwise(cuts)]
        for name, array in source.batch(step).items():
            assert np.array_equal(np.concatenate([piece[name] for piece in pieces]), array)


def test_batches_do_not_depend_on_what_was_read_before():
    first, second = source_of(40), source_of(40)
    later = first.batch(17)
    for step in range(17):
        second.batch(step)
    assert np.array_equal(second.batch(17)["tokens"], later["tokens"])
    assert not np.array_equal(first.batch(18)["tokens"], later["tokens"])


def test_seeds_differ_and_unshuffled_is_in_order():
    assert windows_of(source_of(40, seed=1).batch(0)) != windows_of(source_of(40).batch(0))
    assert windows_of(source_of(40, shuffle=False).batch(2)) == [12, 13, 14, 15, 16, 17]


def test_several_files_give_the_windows_of_each():
    runs = ((0, 15, np.uint8), (100, 3, np.uint16), (200, 22, np.int64))
    parts = tuple(
        TokenPart(ids=np.arange(start, start + count, dtype=dtype), name="x")
        for start, count, dtype in runs
    )
    source = TokenSource(tokens=Tokens(parts=parts), seq_len=4, global_batch_size=8)
    assert source.num_windows == 3 + 0 + 5
    batch = source.batch(0)
    assert sorted(batch["tokens"][:, 0].tolist()) == [0, 4, 8, 200, 204, 208, 212, 216]
    assert np.array_equal(batch["targets"], batch["tokens"] + 1)
    assert batch["tokens"].dtype == np.int32


@pytest.mark.parametrize("arguments", [(-1,), (0, 3, 2), (0, 0, 7), (0, -1)])
def test_rows_outside_the_batch_are_refused(arguments):
    with pytest.raises(ValueError, match=r"rows within \[0, 6\)"):
        source_of(10).batch(*arguments)


def test_the_default_is_the_embedded_text_with_a_fixed_validation_part():
    train, validation, tokenizer = as_source(None, seq_len=64, global_batch_size=8)
    assert tokenizer.vocab_size == train.vocab_size == 256
    assert (validation.shuffle, train.shuffle) == (False, True)
    assert validation.tokens.count == round(0.05 * (validation.tokens.count + train.tokens.count))
    other = as_source(None, seq_len=64, global_batch_size=8, seed=5)[1]
    assert np.array_equal(validation.batch(1)["tokens"], other.batch(1)["tokens"])
    assert tokenizer.decode(validation.tokens.parts[0].ids[-8:]) == "[Exit.]\n"
    assert "the embedded Shakespeare" in train.describe()


def test_token_files_bring_their_tokenizer(tmp_path: Path):
    write_token_files(None, tmp_path / "t")
    sizes = {"seq_len": 8, "global_batch_size": 2}
    assert repr(as_source(tmp_path / "t", **sizes)[2]) == "ByteTokenizer()"
    with pytest.raises(ValueError, match="not with tokenizer='bpe:300'"):
        as_source(tmp_path / "t", tokenizer="bpe:300", **sizes)
    np.save(tmp_path / "plain.npy", np.arange(1000))
    train, _, tokenizer = as_source(tmp_path / "plain.npy", **sizes)
    assert tokenizer is None
    assert train.vocab_size is None


def test_a_list_of_files_and_a_ready_source(tmp_path: Path):
    for name in ("a", "b"):
        np.save(tmp_path / f"{name}.npy", np.arange(100))
    sizes = {"seq_len": 8, "global_batch_size": 2}
    paths = [tmp_path / "b.npy", str(tmp_path / "a.npy")]
    train, _, _ = as_source(paths, **sizes, validation_fraction=0)
    assert [Path(part.name).stem for part in train.tokens.parts] == ["b", "a"]
    assert as_source(train, **sizes)[0] is train
    with pytest.raises(ValueError, match="has seq_len=8, .* 9"):
        as_source(train, seq_len=9, global_batch_size=2)
    (tmp_path / "c.txt").write_text("text")
    with pytest.raises(ValueError, match=r"c.txt' is not a token file"):
        as_source([*paths, tmp_path / "c.txt"], **sizes)
    for bad in (3, {}, [], iter([])):
        with pytest.raises(TypeError, match="pass None, a path, a list"):
            as_source(bad, **sizes)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        as_source(tmp_path / "none", **sizes)


def test_the_shuffle_is_even_over_the_batch_boundaries():
    # Batches that hold the end of one epoch and the start of the next see both in full.
    source = source_of(8)
    counts = collections.Counter(w for step in range(4) for w in windows_of(source.batch(step)))
    assert set(counts.values()) == {3}
