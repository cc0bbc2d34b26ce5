"""Numbers that a user's loss returns beside its value: the same on any number of devices, and shown
wherever the loss is."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from tests.support.marks import slow
from tests.support.small_models import regression_loss
from tests.support.trajectories import plan_for
from zerojax.config import LogConfig
from zerojax.models.losses import BUILT_IN_METRICS, BUILT_IN_PREFIXES
from zerojax.step.build import build_evaluation, build_step
from zerojax.step.initialization import init_state
from zerojax.training.metrics.console import OWN_WORDS
from zerojax.training.metrics.report import write_report

ROWS, WIDTH, CLASSES = 32, 8, 5


def init(key):
    first, second, last = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(first, (6, WIDTH)),
        "layers": jax.random.normal(second, (4, WIDTH, WIDTH)) / 3,
        "head": jax.random.normal(last, (WIDTH, CLASSES)),
    }


def apply(params, x):
    def layer(x, kernel):
        return x + jnp.tanh(x @ kernel), None

    return jax.lax.scan(layer, x @ params["embed"], params["layers"])[0] @ params["head"]


def batch_of(index):
    random = np.random.default_rng(index)
    return {
        "x": random.normal(size=(ROWS, 6)).astype(np.float32),
        "label": random.integers(0, CLASSES, (ROWS,), np.int32),
        # Few rows count, so pieces of the batch have very different weights, some of them 0.
        "mask": (random.random(ROWS) < 0.3).astype(np.float32),
    }


def masked_loss(model, batch):
    """(sum, weight, metrics): of a mean, of a pair, of an integer, of a mean of nothing."""
    logits, mask = model(batch["x"]), batch["mask"]
    right = jnp.argmax(logits, -1) == batch["label"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    weight = jnp.sum(mask)
    metrics = {
        "accuracy": jnp.sum(right * mask) / weight,
        "right of all rows": (jnp.sum(right), right.size),
        "largest": jnp.max(jnp.abs(logits)).astype(jnp.int32) * 0 + 3,
        "never": (jnp.float32(0), jnp.float32(0)),
    }
    return jnp.sum(losses * mask), weight, metrics


def mean_loss(model, batch):
    """(loss, metrics): the metric is a mean over the same rows as the loss."""
    logits = model(batch["x"])
    right = jnp.argmax(logits, -1) == batch["label"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), {"accuracy": right.mean()}


def numbers(loss, **options):
    """The metrics of two steps, and the sums of an evaluation, as NumPy."""
    options = {"batch": batch_of, "optimizer": zerojax.sgd(0.1), **options}
    plan = plan_for((init, apply), loss=loss, persistence_threshold=0, **options)
    state, step, found = init_state(plan, 0), build_step(plan), []
    for index in range(2):
        state, metrics = step(state, jax.device_put(batch_of(index), plan.batch_sharding))
        found.append(
            {name: np.asarray(metrics[name]) for name in ("loss", *plan.traced.metric_names)}
        )
    placed = jax.device_put(batch_of(2), plan.batch_sharding)
    sums = jax.tree.map(np.asarray, build_evaluation(plan)(state, placed))
    return found, sums


@functools.cache
def plainly(loss):
    return numbers(loss, devices=1)


HOST = {"params": "host", "opt_state": "host", "min_elements": 1}
FIXED = {"deterministic": "mesh", "virtual_shards": 16}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("loss", "options"),
    [
        slow(masked_loss, {"zero": 0}, id="zero0"),
        pytest.param(masked_loss, {"zero": 1, "num_microbatches": 4}, id="zero1"),
        pytest.param(mean_loss, {"zero": 2, "num_microbatches": 2}, id="zero2"),
        slow(masked_loss, {"zero": 2, "num_microbatches": 2}, id="zero2-masked"),
        pytest.param(masked_loss, {"zero": 3, "mesh": {"replica": 2}}, id="zero3"),
        pytest.param(
            masked_loss, {"mesh": {"stage": 2}, "zero": 1, "num_microbatches": 4}, id="pipeline"
        ),
        slow(mean_loss, {"mesh": {"stage": 2}, "zero": 1, "num_microbatches": 4}, id="pipeline-2"),
        pytest.param(masked_loss, {"zero": 3, **FIXED}, id="deterministic"),
        pytest.param(masked_loss, {"zero": 1, "offload": HOST, "num_microbatches": 2}, id="host"),
    ],
)
def test_own_metrics_are_those_of_one_device(loss, options):
    expected, expected_sums = plainly(loss)
    found, sums = numbers(loss, **options)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=2e-6, err_msg=name)
    for name, theirs in expected_sums["metrics"].items():
        mine = sums["metrics"][name]
        # The sums of means without a weight depend on the number of pieces, their quotient not.
        if theirs["weight"]:
            quotient = theirs["sum"] / theirs["weight"]
            np.testing.assert_allclose(mine["sum"] / mine["weight"], quotient, rtol=2e-6)
        else:
            assert mine["weight"] == 0


@pytest.mark.thorough
def test_what_is_compared_is_right():
    """One device against NumPy."""
    (first, _), sums = plainly(masked_loss)
    batch, params = batch_of(0), init(jax.random.key(0))
    plan = plan_for((init, apply), loss=masked_loss, batch=batch_of, devices=1)
    params = {n: np.asarray(x) for n, x in init_state(plan, 0)["params"].items()}
    right = np.asarray(jnp.argmax(apply(params, batch["x"]), -1)) == batch["label"]
    np.testing.assert_allclose(first["accuracy"], right[batch["mask"] > 0].mean(), rtol=1e-6)
    np.testing.assert_allclose(first["right of all rows"], right.mean(), rtol=1e-6)
    assert first["largest"] == 3
    assert math.isnan(first["never"])
    assert sums["metrics"]["accuracy"]["weight"] == sums["weight"] == batch_of(2)["mask"].sum()
    assert sums["metrics"]["right of all rows"]["weight"] == ROWS


@pytest.mark.thorough
def test_they_are_shown_wherever_the_loss_is(tmp_path, capsys):
    trainer = zerojax.train(
        (init, apply),
        {"zero": 1},
        batch_of,
        loss=masked_loss,
        optimizer=optax.sgd(0.1),
        steps=4,
        validation=[batch_of(7), batch_of(8)],
        log=LogConfig(every=1),
        eval_every=2,
        run_dir=tmp_path,
    )
    assert 0 <= trainer.metrics["accuracy"] <= 1
    assert trainer.history[0]["right of all rows"] > 0
    found = trainer.evaluate()
    weights = [batch_of(7)["mask"].sum(), batch_of(8)["mask"].sum()]
    one, two = (trainer.evaluate([batch_of(index)]) for index in (7, 8))
    assert found["weight"] == sum(weights)
    mean = (one["accuracy"] * weights[0] + two["accuracy"] * weights[1]) / sum(weights)
    np.testing.assert_allclose(found["accuracy"], mean, rtol=1e-6)
    assert math.isnan(found["never"])
    records = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for kind in ("train", "eval"):
        rows = [record for record in records if record["kind"] == kind]
        assert all(0 <= row["accuracy"] <= 1 for row in rows)
        assert all(row["never"] is None for row in rows)
    events = b"".join(path.read_bytes() for path in tmp_path.glob("events.out.tfevents.*"))
    assert b"train/accuracy" in events
    assert b"eval/accuracy" in events
    printed = capsys.readouterr().out
    assert "accuracy 0." in printed
    page = (write_report(tmp_path)).read_text()
    assert page.count("<b>accuracy</b>") == 1


@pytest.mark.thorough
def test_an_engine_has_them():
    rows = {name: x[:8] for name, x in batch_of(0).items()}
    engine = zerojax.initialize(
        model=(init, apply),
        config={
            "train_batch_size": 8,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        },
        loss=mean_loss,
    )
    engine.train_batch(rows)
    assert 0 <= float(engine.metrics["accuracy"]) <= 1
    engine.close()


# --- refusals -------------------------------------------------------------------------------------


def plan_of_loss(result):
    def loss(model, batch):
        return result(jnp.mean(model(batch["x"]) ** 2))

    return plan_for((init, apply), loss=loss, batch=batch_of)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda x: (x, {"two\nlines": x}), "a metric named .*printable characters"),
        (lambda x: (x, {"deep": {"a": x}}), "as metric 'deep'; a metric must be a scalar"),
        (lambda x: (x, {"three": (x, x, x)}), "as metric 'three'; a metric must be a scalar"),
        (lambda x: (x, 1.0, 2.0), "the loss returned .* pair of scalars"),
        (lambda x: (x, {"a": x}, 1.0), "the loss returned .* pair of scalars"),
        (lambda x: ({"a": x}, 1.0), "the loss returned .* pair of scalars"),
    ],
)
def test_what_is_no_metric_is_refused(result, message):
    with pytest.raises(ValueError, match=message):
        plan_of_loss(result)


def test_every_number_of_a_run_has_a_name_that_a_metric_cannot_take():
    plan = plan_for((init, apply), loss=mean_loss, batch=batch_of, precision="bf16")
    step = jax.eval_shape(build_step(plan), plan.abstract_state, plan.abstract_batch)
    names = step[1].keys() - plan.traced.metric_names | OWN_WORDS
    for name in names:
        assert name in BUILT_IN_METRICS or name.startswith(BUILT_IN_PREFIXES)


# --- weights --------------------------------------------------------------------------------------


def weighed(weight):
    def loss(model, batch):
        logits = model(batch["x"])
        return jnp.sum(logits**2), weight(model, logits, batch)

    return loss


def through_a_loop(model, logits, batch):
    return jax.lax.fori_loop(0, 3, lambda _, x: x * 0.5 + jnp.sum(logits), 1.0)


def by_a_branch(model, logits, batch):
    return jax.lax.cond(logits[0, 0] > 0, lambda: 1.0, lambda: 2.0)


@jax.custom_vjp
def own_rule(x):
    return x


own_rule.defvjp(lambda x: (x, None), lambda _, gradient: (gradient,))


DEPENDENT = {
    "accuracy": lambda model, logits, batch: jnp.mean(jnp.argmax(logits, -1) == batch["label"]),
    "count": lambda model, logits, batch: jnp.sum(logits > 0),
    "square": lambda model, logits, batch: jnp.sum(logits**2),
    "parameter": lambda model, logits, batch: model.params["head"][0, 0],
    "loop": through_a_loop,
    "branch": by_a_branch,
    "checkpoint": lambda model, logits, batch: jax.checkpoint(jnp.sum)(logits),
    "custom rule": lambda model, logits, batch: own_rule(jnp.sum(logits)),
    "jit": lambda model, logits, batch: jax.jit(jnp.sum)(logits),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("weight", DEPENDENT.values(), ids=DEPENDENT)
def test_a_weight_that_training_changes_is_refused(weight):
    message = (
        r"whose weight is computed from trained parameters \((embed|head).*has_aux=True .*"
        r'return loss, \{"accuracy": accuracy\}.*'
        r"return loss_sum, jax.lax.stop_gradient\(weight\)"
    )
    with pytest.raises(ValueError, match=message):
        plan_for((init, apply), loss=weighed(weight), batch=batch_of)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("weight", DEPENDENT.values(), ids=DEPENDENT)
def test_each_remedy_of_that_works(weight):
    stopped = weighed(lambda *given: jax.lax.stop_gradient(weight(*given)))
    assert plan_for((init, apply), loss=stopped, batch=batch_of).traced.has_weight

    def named(model, batch):
        total, value = weighed(weight)(model, batch)
        return total / len(batch["x"]), {"value": value}

    assert plan_for((init, apply), loss=named, batch=batch_of).traced.metric_names == ("value",)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "weight",
    [
        lambda model, logits, batch: jnp.sum(jnp.ones_like(logits)),
        lambda model, logits, batch: logits.size,
        lambda model, logits, batch: jnp.sum(batch["mask"]),
        lambda model, logits, batch: jax.lax.scan(
            lambda x, row: (x + row, None), 0.0, batch["mask"]
        )[0],
        # A loop that carries both: the weight beside what depends on parameters.
        lambda model, logits, batch: jax.lax.fori_loop(
            0, 3, lambda _, x: (x[0] + logits, x[1] + jnp.sum(batch["mask"])), (logits, 0.0)
        )[1],
    ],
)
def test_a_weight_of_shapes_and_data_is_allowed(weight):
    assert plan_for((init, apply), loss=weighed(weight), batch=batch_of).traced.has_weight


def test_a_weight_of_frozen_parameters_is_allowed():
    loss = weighed(lambda model, logits, batch: jnp.sum(model.params["embed"]))
    plan_for((init, apply), loss=loss, batch=batch_of, freeze="embed")
    with pytest.raises(ValueError, match=r"trained parameters \(embed\)"):
        plan_for((init, apply), loss=loss, batch=batch_of)


def test_the_habit_of_regression_losses_is_unchanged():
    assert plan_for(
        (init, lambda params, x: apply(params, x[:, :6])),
        loss=regression_loss,
        batch=lambda index: {"x": batch_of(index)["x"], "y": np.zeros((ROWS, CLASSES), np.float32)},
    ).traced.has_weight
