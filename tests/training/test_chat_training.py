"""Training on whole texts in rows: as on each alone, on any mesh, from a folder to an export."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zerojax
from tests.support.chat_samples import CHATS, TEMPLATES
from tests.support.hugging_face_folders import write_folder
from tests.support.small_models import VOCAB
from tests.support.text_sets import some_texts, text_set, write_texts
from tests.support.trajectories import ROWS, TOLERANCE, train_for
from zerojax.config import (
    CheckpointConfig,
    DataConfig,
    LogConfig,
    MixturePart,
    ModelConfig,
    RunConfig,
)
from zerojax.data import PackedSource, as_source
from zerojax.data.chats import prepare_chats
from zerojax.models.losses import next_token_of_call
from zerojax.operators import chunked_attention
from zerojax.training.hugging_face_export import to_hugging_face
from zerojax.training.run_file import plan_from_config, vocab_size_of
from zerojax.zoo import Bert, BertConfig

SEQ_LEN = 16


@functools.cache
def model_of(name: str, attention: str = "xla", **more):
    sizes = {"num_layers": 2, "num_heads": 4, "embed_dim": 16, "max_seq_len": SEQ_LEN, **more}
    return zerojax.zoo.build_model(ModelConfig(name=name, attention=attention, **sizes), VOCAB)


def source_of(folder, texts, **options) -> PackedSource:
    options = {"seq_len": SEQ_LEN, "global_batch_size": ROWS, **options}
    return PackedSource(texts=text_set(folder, texts), **options)


def alone(texts, seq_len: int = SEQ_LEN) -> dict[str, np.ndarray]:
    """Each text in a row of its own, without segments: what follows it is padding."""
    made = {name: np.zeros((len(texts), seq_len), np.int32) for name in ("tokens", "targets")}
    made["weights"] = np.zeros((len(texts), seq_len), np.float32)
    for row, (ids, asked) in enumerate(texts):
        made["tokens"][row, : len(ids)] = ids
        made["targets"][row, : len(ids) - 1] = ids[1:]
        made["weights"][row, : len(ids) - 1] = asked[1:]
    return made


def as_floats64(tree):
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]


# --- as on each text alone ------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("attention", ["xla", "chunked"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_loss_and_gradients_are_those_of_the_texts_one_by_one(
    tmp_path, name, attention, monkeypatch
):
    """Relative to the largest gradient of each array; both are sums of the same float32 terms."""
    monkeypatch.setattr(chunked_attention, "BLOCK", 4)
    texts = some_texts(24, vocab_size=VOCAB)
    source = source_of(tmp_path, texts, global_batch_size=1, shuffle=False)
    packed = source.rows(0, source.num_rows)
    assert len(packed["tokens"]) < 0.75 * len(texts), "rows hold several texts"
    graphdef, params = nnx.split(model_of(name, attention)(nnx.Rngs(0)))

    @functools.partial(jax.value_and_grad, has_aux=True)
    def grad(params, batch):
        return nnx.merge(graphdef, params).loss(batch)

    (total, count), slopes = jax.jit(grad)(params, packed)
    (expected, expected_count), expected_slopes = jax.jit(grad)(params, alone(texts))
    assert count == expected_count == sum(int(asked[1:].sum()) for _, asked in texts)
    assert abs(total - expected) <= 1e-6 * abs(expected)
    for found, wanted in zip(as_floats64(slopes), as_floats64(expected_slopes), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max() + 1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize("attention", ["xla", "chunked"])
def test_another_text_in_the_row_changes_no_bit(tmp_path, attention, monkeypatch):
    monkeypatch.setattr(chunked_attention, "BLOCK", 4)
    texts = some_texts(40, vocab_size=VOCAB, longest=7)
    source = source_of(tmp_path, texts, global_batch_size=1, shuffle=False)
    rows = source.rows(0, source.num_rows)
    row = int(np.argmax(rows["segments"].max(axis=1)))  # the one with most texts
    batch = {name: value[row : row + 1] for name, value in rows.items()}
    segments = batch["segments"][0]
    graphdef, params = nnx.split(model_of("llama", attention)(nnx.Rngs(0)))

    @jax.jit
    def losses(batch):
        model = nnx.merge(graphdef, params)
        logits = model.head(model.hidden(batch["tokens"], batch["segments"], batch["positions"]))
        picked = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
        return (jax.nn.logsumexp(logits, axis=-1) - picked) * batch["weights"]

    before = np.asarray(losses(batch))[0]
    assert segments.max() >= 2
    for number in range(int(segments.max()) + 1):
        mine = segments == number
        changed = {name: value.copy() for name, value in batch.items()}
        changed["tokens"][0, mine] = (changed["tokens"][0, mine] + 7) % VOCAB
        after = np.asarray(losses(changed))[0]
        assert np.array_equal(after[~mine], before[~mine])
        assert not np.array_equal(after[mine], before[mine])


@pytest.mark.thorough
def test_positions_of_a_batch_are_those_of_its_segments(tmp_path):
    source = source_of(tmp_path, some_texts(40, vocab_size=VOCAB), global_batch_size=4)
    batch = source.batch(0)
    model = model_of("gpt2")(nnx.Rngs(0))
    without = {name: value for name, value in batch.items() if name != "positions"}
    assert model.loss(batch)[0] == model.loss(without)[0]
    shifted = batch | {"positions": batch["positions"][:, ::-1].copy()}
    assert model.loss(shifted)[0] != model.loss(batch)[0]


# --- on any mesh ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    """`step -> batch` of packed rows, whose weights are far from equal from row to row."""
    texts = some_texts(300, vocab_size=VOCAB)
    for number, (ids, asked) in enumerate(texts):
        asked[:] = np.arange(len(ids)) >= (1 if number % 5 == 0 else len(ids) - 1)
    source = source_of(tmp_path_factory.mktemp("texts"), texts)
    weights = source.batch(0)["weights"].sum(axis=1)
    assert weights.max() >= 4 * max(weights.min(), 1)
    return source.batch


@pytest.fixture(scope="module")
def one_device(batches):
    return train_for(model_of("llama", "chunked"), devices=1, batch=batches)


@pytest.fixture(scope="module")
def first_steps(batches):
    return train_for(model_of("llama"), devices=1, batch=batches, steps=3)


@pytest.mark.thorough
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_accumulation_of_unequal_weights_changes_nothing(batches, first_steps, parts):
    """The first steps, before rounding is carried on, of a batch in 1 to 8 parts."""
    options = {"devices": 4, "steps": 3, "num_microbatches": parts}
    found, expected = train_for(model_of("llama"), batch=batches, **options), first_steps
    np.testing.assert_allclose(found.losses, expected.losses, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        *(pytest.param({"zero": zero, "num_microbatches": 4}, id=f"{zero}") for zero in range(4)),
        pytest.param({"mesh": {"data": 2, "context": 4}, "zero": 3}, id="context"),
        pytest.param(
            {"mesh": {"data": 4, "stage": 2}, "zero": 1, "num_microbatches": 2}, id="stages"
        ),
        pytest.param(
            {"mesh": {"data": 2, "stage": 2, "model": 2}, "zero": 3, "num_microbatches": 2},
            id="stages and tensors",
            marks=pytest.mark.slow,
        ),
        pytest.param({"mesh": {"data": 4, "model": 2}, "zero": 3}, marks=pytest.mark.slow),
        pytest.param({"mesh": {"data": 2, "context": 2, "model": 2}}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.thorough
def test_packed_texts_train_as_on_one_device(batches, one_device, options, monkeypatch):
    monkeypatch.setattr(chunked_attention, "BLOCK", 4)
    found = train_for(
        model_of("llama", "chunked"), batch=batches, persistence_threshold=0, **options
    )
    np.testing.assert_allclose(found.losses, one_device.losses, rtol=0, atol=TOLERANCE)


# --- from a folder --------------------------------------------------------------------------------


def folders(tmp_path) -> tuple[str, str]:
    small = write_texts(tmp_path / "small", some_texts(60, vocab_size=VOCAB), validation_texts=9)
    large = write_texts(tmp_path / "large", some_texts(200, vocab_size=VOCAB, seed=1))
    return str(small), str(large)


@pytest.mark.thorough
def test_train_takes_a_folder_resumes_and_is_read_back(tmp_path):
    small, _ = folders(tmp_path)
    # A schedule would depend on the number of steps.
    options = {"data": small, "global_batch_size": 8, "optimizer": zerojax.adamw(1e-3)}
    whole = zerojax.train(model_of("llama"), {"zero": 1}, steps=6, run_dir=None, **options)
    assert whole.plan.abstract_batch.keys() >= {"segments", "positions", "weights"}
    first = zerojax.train(
        model_of("llama"), {"zero": 3}, steps=3, checkpoint=str(tmp_path / "run"), **options
    )
    first.close()
    again = zerojax.train(
        model_of("llama"),
        {"zero": 2},
        steps=6,
        checkpoint=str(tmp_path / "run"),
        **options,
    )
    losses = [(m["step"], m["loss"]) for m in again.history]
    wanted = {m["step"]: m["loss"] for m in whole.history}
    assert losses
    for step, loss in losses:
        assert abs(loss - wanted[step]) < TOLERANCE
    expected = again.evaluate()["loss"]
    again.close()
    assert zerojax.load_run(tmp_path / "run").evaluate()["loss"] == expected
    assert abs(whole.evaluate()["loss"] - expected) < TOLERANCE


@pytest.mark.thorough
def test_an_evaluation_sees_each_text_once(tmp_path):
    """Fewer rows than a batch has: what is missing is padding, which counts for nothing."""
    small, _ = folders(tmp_path)
    _, validation, _ = as_source(small, seq_len=SEQ_LEN, global_batch_size=8)
    trainer = zerojax.train(
        model_of("llama"), {"zero": 1}, data=small, global_batch_size=8, steps=1, run_dir=None
    )
    found = trainer.evaluate()
    texts = some_texts(60, vocab_size=VOCAB)[-9:]
    total, weight = trainer.to_model().loss(alone(texts))
    assert found["weight"] == weight == sum(int(asked[1:].sum()) for _, asked in texts)
    assert abs(found["loss"] - total / weight) < 1e-5
    assert abs(trainer.evaluate(validation)["loss"] - found["loss"]) < 1e-6


@pytest.mark.thorough
def test_a_run_file_mixes_and_says_which_epoch_each_source_is_in(tmp_path, capsys):
    small, large = folders(tmp_path)
    (tmp_path / "small" / "chat_template.jinja").write_text("a template")
    config = RunConfig(
        model=ModelConfig(num_layers=1, num_heads=2, embed_dim=8, max_seq_len=SEQ_LEN),
        data=DataConfig(
            mixture=(
                MixturePart(path=small, weight=3),
                MixturePart(path=large, weight=1, at_end="stop"),
            ),
            seq_len=SEQ_LEN,
        ),
        steps=20,
        global_batch_size=8,
        eval_batches=1,
        run_dir=str(tmp_path / "run"),
        checkpoint=CheckpointConfig(every=10),
        log=LogConfig(every=1),
    )
    assert vocab_size_of(config) == VOCAB
    planned = plan_from_config(config, 8)
    trainer = zerojax.run_from_config(config)
    assert trainer.plan.abstract_batch.keys() == planned.abstract_batch.keys()
    expected = trainer.evaluate()["loss"]
    trainer.close()
    said = capsys.readouterr().out
    assert f"data: {small}: epoch 1, {large}: epoch 1" in said
    assert f"data: {small}: epoch 2\n" in said
    assert f"mixture of 75 % {small}" in (tmp_path / "run" / "plan.txt").read_text()
    kinds = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    epochs = [x["epochs"] for x in kinds if x.get("event") == "epoch"]
    assert epochs[:2] == [{small: 1, large: 1}, {small: 2}]
    assert zerojax.load_run(tmp_path / "run").evaluate()["loss"] == expected
    resumed = zerojax.run_from_config(dataclasses.replace(config, steps=21))
    assert resumed.num_steps == 21
    resumed.close()


def test_settings_of_data_that_do_not_go_together_are_refused():
    parts = ({"path": "a", "weight": 3},)
    assert DataConfig(mixture=parts).mixture[0] == MixturePart(path="a", weight=3)
    with pytest.raises(zerojax.config.ConfigError, match="path: 'b'.*data.mixture"):
        DataConfig(mixture=parts, path="b")
    with pytest.raises(zerojax.config.ConfigError, match="weight: 0.0 must be above 0"):
        DataConfig(mixture=({"path": "a", "weight": 0},))
    with pytest.raises(zerojax.config.ConfigError, match="MixturePart needs this key"):
        DataConfig(mixture=({"weight": 1},))
    with pytest.raises(zerojax.config.ConfigError, match="'end' is not one of repeat, stop"):
        DataConfig(mixture=({"path": "a", "at_end": "end"},))


# --- models that tell no texts apart --------------------------------------------------------------


@pytest.mark.thorough
def test_train_refuses_a_model_that_is_called_with_tokens_alone(tmp_path):
    class Bare(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(VOCAB, 8, rngs=rngs)

        def __call__(self, tokens):
            return self.embed.attend(self.embed(tokens))

    small, _ = folders(tmp_path)
    with pytest.raises(ValueError, match=r"batch\[.segments.\].* method loss\(batch\)"):
        zerojax.train(Bare, data=small, seq_len=SEQ_LEN, global_batch_size=8, run_dir=None)


@pytest.mark.thorough
def test_a_call_with_tokens_alone_takes_weights_and_no_segments():
    batch = alone(some_texts(3))
    logits = lambda tokens: jax.nn.one_hot(tokens, 64)  # noqa: E731
    assert next_token_of_call(logits, batch)[1] == batch["weights"].sum()
    with pytest.raises(ValueError, match="segments"):
        next_token_of_call(logits, batch | {"segments": batch["tokens"]})


def test_a_bert_is_refused(tmp_path):
    source = source_of(tmp_path, some_texts(40), global_batch_size=4)
    config = BertConfig(vocab_size=64, max_seq_len=16, num_layers=1, num_heads=2, embed_dim=8)
    model = nnx.eval_shape(lambda: Bert(config, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="segments.* BERT .*as_masked_source"):
        model.loss(source.batch(0))


# --- export ---------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_an_exported_model_keeps_the_templates_of_its_folder(tmp_path):
    source = write_folder(tmp_path / "source", "llama")
    names = ["tokenizer.json", "chat_template.jinja", "added_tokens.json", "tokenizer.model"]
    for name in names:
        (source / name).write_text(f"{name} of the source")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "short.jinja").write_text("short")
    texts = write_texts(tmp_path / "texts", some_texts(60, vocab_size=20, longest=8), vocab_size=20)
    batches, _, _ = as_source(texts, seq_len=8, global_batch_size=8)
    trainer = zerojax.train(
        zerojax.from_hugging_face(source), {"zero": 1}, batches, steps=1, run_dir=None
    )
    to_hugging_face(trainer, tmp_path / "out")
    for name in names:
        assert (tmp_path / "out" / name).read_text() == f"{name} of the source"
    assert (tmp_path / "out" / "additional_chat_templates" / "short.jinja").is_file()


@pytest.mark.thorough
def test_the_template_of_the_chats_is_exported_with_the_model(tmp_path):
    pytest.importorskip("jinja2")
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps(CHATS['one'])}\n" * 40)
    template = tmp_path / "own.jinja"
    template.write_text(TEMPLATES["chatml"])
    chats = prepare_chats(
        tmp_path / "chats.jsonl", tmp_path / "chats", tokenizer="bytes", template=template
    ).folder
    sizes = {"num_layers": 1, "num_heads": 2, "embed_dim": 8, "max_seq_len": 128}
    model = zerojax.zoo.build_model(ModelConfig(name="llama", **sizes), 256)
    trainer = zerojax.train(
        model, {"zero": 1}, data=chats, global_batch_size=8, steps=1, checkpoint=tmp_path / "run"
    )
    trainer.close()
    assert (tmp_path / "run" / "chat_template.jinja").read_text() == TEMPLATES["chatml"]
    to_hugging_face(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == TEMPLATES["chatml"]
