"""Validation data: what they may be, that they are tried before step 1, and a short last batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import zerojax
from tests.support.small_models import Line
from zerojax.config import LogConfig
from zerojax.models.losses import mean_squared_error, next_token_of_call
from zerojax.training.evaluation import EarlyStopping
from zerojax.training.validation import each_batch
from zerojax.zoo import GPT2, GPT2Config

ROWS = 16


def rows(number: int, seed: int = 0) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(number, 4)).astype(np.float32)
    return {"x": x, "y": x.sum(1, keepdims=True)}


def errors_of(model, batch):
    return jnp.sum((model(batch["x"]) - batch["y"]) ** 2, axis=1)


def mean(model, batch):
    return mean_squared_error(model(batch["x"]), batch["y"])


def mean_and_metrics(model, batch):
    errors = errors_of(model, batch)
    far = jnp.sum(errors > 1), errors.size
    return jnp.mean(errors), {"errors": jnp.mean(errors), "far": far}


def weighted(model, batch):
    weights = (batch["y"][:, 0] > 0).astype(jnp.float32)
    return jnp.sum(errors_of(model, batch) * weights), weights.sum()


def penalised(model, batch):
    """A mean with terms that do not depend on rows, added to a 0 as a model's layers do."""
    penalty = 0.0
    for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)):
        penalty += jnp.sum(leaf**2)
    loss = 0.0
    loss += jnp.mean(errors_of(model, batch)) + 0.1 * penalty
    return loss, {"with penalty": loss, "penalty": penalty}


def largest(model, batch):
    errors = errors_of(model, batch)
    return jnp.mean(errors), {"largest": jnp.max(errors)}


def softly_largest(model, batch):
    """Over rows with a function of its own."""
    errors = errors_of(model, batch)
    return jnp.mean(errors), {"soft": lax.reduce(errors, -jnp.inf, jnp.logaddexp, (0,))}


def of_the_whole_batch(model, batch):
    return jnp.mean(errors_of(model, batch)) * zerojax.batch_mean(jnp.mean(batch["y"]))


def quotient(model, batch):
    weights = (batch["y"][:, 0] > 0).astype(jnp.float32)
    return jnp.sum(errors_of(model, batch) * weights) / (1 + weights.sum())


def train(validation, loss=mean, *, steps=2, mesh=None, **options):
    options = {"run_dir": None, "log": LogConfig(console="quiet"), **options}
    return zerojax.train(
        Line,
        mesh or {"zero": 1},
        [rows(ROWS)],
        loss=loss,
        optimizer=zerojax.sgd(0.05),
        steps=steps,
        validation=validation,
        **options,
    )


def expected(loss, trainer, batches):
    """Means over all rows of all batches, by one call of the loss."""
    whole = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    result = loss(trainer.to_model(), whole)
    result = result if isinstance(result, tuple) else (result,)
    *numbers, metrics = result if isinstance(result[-1], dict) else (*result, {})
    loss_mean = numbers[0] / (numbers[1] if len(numbers) > 1 else 1)
    pairs = {n: x[0] / x[1] if isinstance(x, tuple) else x for n, x in metrics.items()}
    return {"loss": loss_mean, **pairs}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [1, 5, 8, 15])
@pytest.mark.parametrize("loss", [mean, mean_and_metrics, weighted, penalised])
def test_a_short_last_batch_counts_with_the_rows_it_has(loss, number):
    batches = [rows(ROWS, 1), rows(number, 2)]
    trainer = train(batches, loss, num_microbatches=2)
    found = trainer.evaluations[-1]
    for name, value in expected(loss, trainer, batches).items():
        np.testing.assert_allclose(found[name], value, rtol=2e-6, err_msg=name)
    rows_or_weights = [
        batch["y"] > 0 if loss is weighted else batch["y"] < np.inf for batch in batches
    ]
    assert found["weight"] == sum(x.sum() for x in rows_or_weights)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("loss", "part"),
    [
        (largest, "the metric 'largest'"),
        (softly_largest, "the metric 'soft'"),
        (quotient, "the loss is not known"),
    ],
)
@pytest.mark.filterwarnings("ignore:the loss divides by a number")
def test_a_loss_that_mixes_rows_refuses_it_before_the_first_step(loss, part):
    steps = []
    with pytest.raises(ValueError, match=f"batch 1, has 5 rows, not 16.*{part}"):
        train([rows(ROWS), rows(5)], loss, callbacks=[lambda *_: steps.append(1)])
    assert not steps


@pytest.mark.parametrize(
    ("validation", "remedy"),
    [
        (lambda: [rows(ROWS), rows(5)], "drop the batch, or give it all rows"),
        (lambda: Rows(2 * ROWS + 5), "pass eval_batches=2 to leave out the last 5 rows"),
    ],
)
def test_a_loss_over_the_whole_batch_is_not_advised_to_return_weights(validation, remedy):
    with pytest.raises(
        ValueError, match=f"batch_sum, batch_mean, gather_batch or row_numbers.*; {remedy}$"
    ):
        train(validation(), of_the_whole_batch)


def test_where_the_length_is_not_known_it_is_left_out_and_said(capsys):
    class Endless:
        def __iter__(self):
            yield rows(ROWS, 1)
            yield rows(5, 2)

    trainer = train(Endless(), largest, log=LogConfig(console="lines"))
    assert "left out of the evaluation at step 2: a batch has 5" in capsys.readouterr().out
    whole = trainer.evaluate([rows(ROWS, 1)])
    assert trainer.evaluations[-1]["loss"] == whole["loss"]


def test_a_first_batch_without_weight_is_no_failure():
    nothing = {**rows(ROWS, 1), "y": -np.ones((ROWS, 1), np.float32)}
    trainer = train([nothing, rows(ROWS, 1)], weighted)
    assert trainer.evaluations[-1]["loss"] == trainer.evaluate([rows(ROWS, 1)])["loss"]


@pytest.mark.thorough
def test_validation_takes_what_batches_take():
    kinds = [[rows(ROWS, 1)] * 2, lambda number: rows(ROWS, 1), rows(ROWS, 1)]
    found = [train(kind, eval_batches=2).evaluations[-1] for kind in kinds]
    assert found[0] == found[1]
    assert found[2]["weight"] == found[0]["weight"] / 2
    trainer = train(None)
    same = [trainer.evaluate(kind, 2)["loss"] for kind in kinds]
    assert len(set(same)) == 1
    with pytest.raises(TypeError, match="batches='text.txt' is a path; give batches"):
        trainer.evaluate("text.txt")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("validation", "kind", "part"),
    [
        (iter([rows(ROWS)]), TypeError, "can be read only once"),
        ("data/text.txt", TypeError, "is a path; give batches"),
        (3, TypeError, "validation is a int; give a list of batches"),
        (
            lambda: rows(ROWS),
            TypeError,
            "validation is a function, which is called with the number",
        ),
        ([], ValueError, "validation is empty"),
        ([rows(ROWS), {"x": np.ones((ROWS, 4))}], ValueError, "batch 1: the batch has arrays"),
        ([{**rows(ROWS), "x": np.ones((ROWS, 3))}], ValueError, r"batch 0: .* shape \(16, 3\)"),
        (
            lambda number: rows(ROWS + 1),
            ValueError,
            "batch 0: .*have 16 rows in this process: split it",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_the_first_step(validation, kind, part):
    steps = []
    with pytest.raises(kind, match=part):
        train(validation, callbacks=[lambda *_: steps.append(1)])
    assert not steps


def test_a_loss_that_fails_in_evaluation_mode_fails_before_the_first_step():
    class Fails(Line):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x):
            if self.dropout.deterministic:
                raise NotImplementedError("no evaluation")
            return self.out(x)

    steps, options = [], {"loss": mean, "run_dir": None, "steps": 1, "validation": [rows(ROWS)]}
    with pytest.raises(ValueError, match="fails in evaluation mode.*no evaluation"):
        zerojax.train(
            Fails, {"zero": 1}, rows_of, callbacks=[lambda *_: steps.append(1)], **options
        )
    assert not steps


def rows_of(step):
    return rows(ROWS, step)


def test_an_unknown_metric_is_refused_before_the_first_step_with_the_names_there_are():
    steps = []
    callbacks = [EarlyStopping("validation/acuracy"), lambda *_: steps.append(1)]
    with pytest.raises(ValueError, match="validation/errors, validation/far, validation/loss"):
        train([rows(ROWS)], mean_and_metrics, callbacks=callbacks, eval_every=1)
    with pytest.raises(ValueError, match="validation/NAME is a metric of evaluations"):
        train([rows(ROWS)], callbacks=[EarlyStopping("accuracy")], log=LogConfig(every=1))
    assert not steps


class FailsLater:
    """The first batch is fine, what is read after two steps is not."""

    def __init__(self):
        self.calls = 0

    def __call__(self, number):
        self.calls += 1
        if self.calls > 2:
            raise OSError("the disk is gone")
        return rows(ROWS)


def test_an_evaluation_that_fails_at_the_end_costs_no_weights(tmp_path):
    with pytest.warns(RuntimeWarning, match=r"after the last step failed \(OSError: the disk"):
        trainer = train(FailsLater())
    assert trainer.num_steps == 2
    with pytest.raises(OSError, match="the disk is gone"):
        train(FailsLater(), checkpoint=tmp_path, run_dir="auto")
    assert zerojax.load_run(tmp_path, model=Line, loss=mean).step == 2


class Rows:
    """A dataset of rows that notes which are read."""

    def __init__(self, number):
        self.batch, self.read = rows(number, 3), set()

    def __len__(self):
        return len(self.batch["x"])

    def __getitem__(self, number):
        self.read.add(number)
        return {name: values[number] for name, values in self.batch.items()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [1, ROWS - 3, ROWS, 3 * ROWS + 5, 9 * ROWS])
def test_an_evaluation_of_a_dataset_counts_each_row_once(number, capsys):
    data = Rows(number)
    trainer = train(data, mean_and_metrics, num_microbatches=2, log=LogConfig(console="lines"))
    assert "rows (" not in capsys.readouterr().out
    assert data.read == set(range(number))
    assert trainer.evaluations[-1]["weight"] == number
    for name, value in expected(mean_and_metrics, trainer, [data.batch]).items():
        found = trainer.evaluations[-1][name]
        np.testing.assert_allclose(found, value, rtol=2e-6, atol=1e-6, err_msg=name)


class Texts:
    def __len__(self):
        return ROWS + 5

    def __getitem__(self, number):
        text = np.random.default_rng(number).integers(0, 32, 9).astype(np.int32)
        return {"tokens": text[:-1], "targets": text[1:]}


@pytest.mark.thorough
def test_a_short_dataset_is_evaluated_with_one_row_per_device_and_microbatch():
    config = GPT2Config(vocab_size=32, max_seq_len=8, num_layers=1, num_heads=2, embed_dim=8)
    texts = [Texts()[number] for number in range(len(Texts()))]
    batch = {name: np.stack([text[name] for text in texts]) for name in texts[0]}
    trainer = zerojax.train(
        lambda rngs: GPT2(config, rngs=rngs),
        {"data": -1, "zero": 2},
        [jax.tree.map(lambda x: x[:ROWS], batch)],
        num_microbatches=ROWS // 8,
        steps=1,
        precision="fp32",
        validation=Texts(),
        run_dir=None,
        log=LogConfig(console="quiet"),
    )
    loss, weight = next_token_of_call(trainer.to_model(), batch)
    np.testing.assert_allclose(trainer.evaluations[-1]["loss"], loss / weight, rtol=2e-6)


def test_what_eval_batches_leaves_out_of_a_dataset_is_said(capsys):
    data = Rows(3 * ROWS + 5)
    trainer = train(data, eval_batches=2, log=LogConfig(console="lines"))
    assert f"reads {2 * ROWS} of {len(data)} rows (2 batches" in capsys.readouterr().out
    assert data.read == set(range(2 * ROWS))
    assert trainer.evaluations[-1]["weight"] == 2 * ROWS


@pytest.mark.parametrize("number", [5, 2 * ROWS + 5])
def test_a_loss_that_mixes_rows_refuses_a_short_dataset_with_a_remedy_that_works(number):
    steps = []
    remedy = "pass eval_batches=2" if number > ROWS else "with at least that many rows"
    with pytest.raises(ValueError, match=f"last batch has 5 rows, not 16.*'largest'.*{remedy}"):
        train(Rows(number), largest, callbacks=[lambda *_: steps.append(1)])
    assert not steps
    given = {"eval_batches": 2} if number > ROWS else {}
    trainer = train(Rows(max(number, ROWS)), largest, **given)
    assert trainer.evaluations[-1]["weight"] == max(number // ROWS, 1) * ROWS


def test_processes_fill_the_last_batch_of_a_dataset_with_the_same_row():
    source = zerojax.data.DatasetSource(dataset=Rows(ROWS + 5), global_batch_size=ROWS, seed=1)
    parts = [(0, 4), (4, 8), (8, 16)]
    whole, *of_processes = (
        list(each_batch(source, None, None, lambda part=part: part))[-1]
        for part in [(0, ROWS), *parts]
    )
    assert {part.missing for part in of_processes} == {whole.missing} == {ROWS - 5}
    joined = np.concatenate([part.batch["x"] for part in of_processes])
    np.testing.assert_array_equal(joined, whole.batch["x"])
    np.testing.assert_array_equal(whole.batch["x"][:5], source.rows(ROWS, ROWS + 5)["x"])
    last = source.rows(ROWS + 4, ROWS + 5)["x"]
    copies = [whole.batch["x"][5:], whole.copies["x"], *(part.copies["x"] for part in of_processes)]
    assert all((rows == last).all() for rows in copies)


def test_evaluate_takes_a_dataset_as_validation_does(tmp_path):
    data = Rows(ROWS + 5)
    trainer = train(data, run_dir=tmp_path, checkpoint=zerojax.CheckpointConfig())
    found = trainer.evaluations[-1]
    small = zerojax.data.DatasetSource(dataset=data, global_batch_size=3, shuffle=False)
    loaded = zerojax.load_run(tmp_path, model=Line, loss=mean)
    for evaluate in (trainer.evaluate, loaded.evaluate):
        for given in (data, small):
            again = evaluate(given)
            assert again["weight"] == found["weight"] == len(data)
            np.testing.assert_allclose(again["loss"], found["loss"], rtol=2e-6)
        assert evaluate(data, 1)["weight"] == ROWS
