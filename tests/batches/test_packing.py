"""Rows that hold several texts: nothing goes from one text to another, in any way of training."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from zerojax.config import ConfigError, DataConfig, ModelConfig, RunConfig
from zerojax.data import Boundary, TokenSource, as_masked_source, as_source, tokens_of_array
from zerojax.data.packing import boundary_of
from zerojax.data.subwords import BpeTokenizer
from zerojax.data.tokenizer import ByteTokenizer
from zerojax.training.run_file import plan_from_config
from zerojax.zoo.decoder import positions_in_texts

END, TOKENS = 9, [1, 2, 9, 3, 9, 9, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5]


def source_of(tokens=TOKENS, boundary=Boundary(end_token=END), **options):  # noqa: B008
    options = {"seq_len": 4, "global_batch_size": 2, "shuffle": False, **options}
    return TokenSource(
        tokens=tokens_of_array(np.array(tokens)), vocab_size=10, boundary=boundary, **options
    )


# --- data -----------------------------------------------------------------------------------------


def test_texts_of_a_row_and_targets_of_another_text():
    batch = source_of().batch(0)
    assert batch["tokens"].tolist() == [[1, 2, 9, 3], [9, 9, 4, 5]]
    assert batch["targets"].tolist() == [[2, 9, 3, 9], [9, 4, 5, 6]]
    assert batch["segments"].tolist() == [[0, 0, 0, 1], [0, 1, 2, 2]]
    assert batch["weights"].tolist() == [[1, 1, 0, 1], [0, 0, 1, 1]]
    assert (batch["segments"].dtype, batch["weights"].dtype) == (np.int32, np.float32)


def test_texts_that_begin_with_a_token():
    batch = source_of(boundary=Boundary(start_token=END)).batch(0)
    assert batch["segments"].tolist() == [[0, 0, 1, 1], [0, 1, 1, 1]]
    assert batch["weights"].tolist() == [[1, 0, 1, 0], [0, 1, 1, 1]]


def test_nothing_is_lost_or_said_twice():
    """All tokens in order; each is a target once, and counts unless it begins a text."""
    source = source_of(global_batch_size=1)
    rows = [source.batch(step) for step in range(4)]
    joined = {name: np.concatenate([row[name][0] for row in rows]) for name in rows[0]}
    assert joined["tokens"].tolist() == TOKENS[:-1]
    assert joined["targets"].tolist() == TOKENS[1:]
    assert joined["weights"].tolist() == [float(token != END) for token in TOKENS[:-1]]


def test_a_source_is_another_one_with_other_boundaries():
    plain, packed = source_of(boundary=None), source_of()
    assert plain.batch(0).keys() == {"tokens", "targets"}
    assert plain.fingerprint() != packed.fingerprint()
    assert packed.fingerprint() != source_of(boundary=Boundary(end_token=1)).fingerprint()


def test_where_texts_end_is_read_from_the_tokenizer():
    bpe = BpeTokenizer.train(["some text to train on, and some more of it"] * 3, vocab_size=300)
    assert boundary_of(bpe, "a test") == Boundary(end_token=int(bpe.separator[0]))

    class Framed(ByteTokenizer):
        """As BERT: [SEP] behind and [CLS] in front of each text."""

        prefix = np.array([101], np.int32)
        separator = np.array([102, 101], np.int32)

        def to_dict(self):
            return {"kind": "hugging_face"}

    assert boundary_of(Framed(), "a test") == Boundary(end_token=102)
    Framed.separator = Framed.prefix
    assert boundary_of(Framed(), "a test") == Boundary(start_token=101)


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(ValueError, match="has none; use data.tokenizer=bpe:4096"):
        as_source(None, seq_len=8, global_batch_size=2, pack=True)
    with pytest.raises(ValueError, match="prepare them with `zerojax data prepare`"):
        as_source(np.arange(1000), seq_len=8, global_batch_size=2, pack=True)
    with pytest.raises(ValueError, match="pass exactly one of them"):
        Boundary()
    with pytest.raises(ValueError, match="make it without pack"):
        as_masked_source(source_of(), mask_token=0)


# --- models ---------------------------------------------------------------------------------------


def test_positions_begin_anew_in_each_text():
    segments = jnp.array([[0, 0, 1, 1, 1, -1], [3, 2, 2, 5, 5, 5]])
    expected = [[0, 1, 0, 1, 2, 0], [0, 0, 1, 0, 1, 2]]
    assert positions_in_texts(segments).tolist() == expected


# --- runs -----------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_run_file_packs(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    random = np.random.default_rng(0)
    for number in range(30):
        words = random.choice(["to", "be", "or", "not", "that", "is"], 40)
        (texts / f"{number:02}.txt").write_text(" ".join(words))
    config = RunConfig(
        model=ModelConfig(num_layers=1, num_heads=2, embed_dim=8, max_seq_len=32),
        data=DataConfig(
            path=str(texts), tokenizer="bpe:300", seq_len=32, pack=True, validation_fraction=0.3
        ),
        steps=2,
        global_batch_size=8,
        eval_batches=1,
        run_dir=str(tmp_path / "run"),
    )
    trainer = zerojax.run_from_config(config)
    assert np.isfinite(trainer.metrics["loss"])
    assert trainer.plan.abstract_batch.keys() == {"tokens", "targets", "segments", "weights"}
    expected = trainer.evaluate()["loss"]
    trainer.close()
    assert zerojax.load_run(tmp_path / "run").evaluate()["loss"] == expected
    sized = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=300))
    assert plan_from_config(sized, 8).abstract_batch.keys() == trainer.plan.abstract_batch.keys()


def test_bytes_are_refused_in_a_run_file(tmp_path):
    config = RunConfig(data=DataConfig(pack=True), run_dir=str(tmp_path / "run"))
    with pytest.raises((ValueError, ConfigError), match="leave data.pack out"):
        zerojax.run_from_config(config)
