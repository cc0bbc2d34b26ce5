"""What depends on the number of pieces that a batch is cut into: refused, or made independent."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import zerojax
from tests.support.trajectories import plan_for
from zerojax.step.build import build_step
from zerojax.step.initialization import init_state
from zerojax.step.trained_model import model_of

ROWS = 32


def init(key):
    return {"kernel": jax.random.normal(key, (12, 5))}


def apply(params, x):
    return jnp.tanh(x @ params["kernel"])


def batch_of(index):
    random = np.random.default_rng(index)
    return {
        "x": random.normal(size=(ROWS, 12)).astype(np.float32),
        "y": random.normal(size=(ROWS, 5)).astype(np.float32),
        "mask": (random.random(ROWS) < 0.5).astype(np.float32),
    }


def plan_of(loss, **options):
    return plan_for((init, apply), loss=loss, batch=batch_of, **options)


def squares(model, batch):
    return (model(batch["x"]) - batch["y"]) ** 2


# --- losses ---------------------------------------------------------------------------------------

SUMS = {
    "sum": lambda model, batch: jnp.sum(squares(model, batch)),
    "weight of 1": lambda model, batch: (jnp.sum(squares(model, batch)), 1.0),
    "scaled": lambda model, batch: 0.3 * jnp.sum(squares(model, batch)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loss", SUMS.values(), ids=SUMS)
@pytest.mark.parametrize(
    ("options", "cut"),
    [
        ({"devices": 8}, "8 parts of 4 rows"),
        ({"devices": 1, "num_microbatches": 2}, "2 parts of 16 rows"),
    ],
)
def test_a_sum_over_rows_is_refused_where_there_are_several_pieces(loss, options, cut):
    with pytest.raises(ValueError, match=f"{cut}.*return jnp.sum.losses., losses.size"):
        plan_of(loss, **options)


def test_a_sum_over_one_row_is_told_from_its_mean():
    with pytest.raises(ValueError, match="32 parts of 1 rows"):
        plan_of(SUMS["sum"], num_microbatches=4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("loss", SUMS.values(), ids=SUMS)
def test_on_one_piece_it_is_said(loss):
    plan = plan_of(loss, devices=1)
    assert any("the loss is a sum over the rows" in reason for reason in plan.reasons)


BATCH_SIZES = {  # that of one device, whatever rows there are
    "sum": lambda model, batch: jnp.sum(squares(model, batch)) / ROWS,
    "factor": lambda model, batch: jnp.sum(squares(model, batch).mean(-1)) * (1 / ROWS),
    "weight": lambda model, batch: (jnp.sum(squares(model, batch)), ROWS),
    "two sums": lambda model, batch: (
        jnp.sum(squares(model, batch)) + 0.1 * jnp.sum(model(batch["x"]) ** 2)
    ),
    "two terms": lambda model, batch: (
        jnp.mean(squares(model, batch)) - jnp.sum(model(batch["x"])) / ROWS
    ),
    "with decay": lambda model, batch: (
        jnp.sum(squares(model, batch)) / ROWS + 1e-3 * jnp.sum(model(jnp.eye(12)) ** 2)
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loss", BATCH_SIZES.values(), ids=BATCH_SIZES)
def test_a_sum_over_rows_that_is_divided_by_a_constant_batch_size_is_refused(loss):
    with pytest.raises(ValueError, match=r"16 parts of 2 rows .* is 0\.0625 times (the|a term)"):
        plan_of(loss, num_microbatches=2)
    plan_of(loss, devices=1)


def test_a_batch_size_that_is_also_the_number_of_elements_of_a_piece_is_refused():
    """8 pieces of 4 rows, of which 8 values each are summed: 32, as the batch has rows."""

    def values(model, batch):
        return squares(model, batch) @ jnp.ones((5, 8))

    with pytest.raises(ValueError, match="8 parts of 4 rows"):
        plan_of(lambda model, batch: jnp.sum(values(model, batch)) / ROWS)
    plan_of(lambda model, batch: jnp.mean(values(model, batch)))


def test_a_mean_with_the_number_of_rows_as_its_weight_is_refused():
    loss = lambda model, batch: (jnp.mean(squares(model, batch)), len(batch["x"]))  # noqa: E731
    with pytest.raises(ValueError, match="8 parts of 4 rows .* is 8 times the loss"):
        plan_of(loss)


RIGHT = {
    "mean": lambda model, batch: jnp.mean(squares(model, batch)),
    "pair": lambda model, batch: (jnp.sum(squares(model, batch)), squares(model, batch).size),
    "rows as weight": lambda model, batch: (
        jnp.sum(squares(model, batch)),
        jnp.float32(len(batch["x"])),
    ),
    "masked pair": lambda model, batch: (
        jnp.sum(squares(model, batch).mean(-1) * batch["mask"]),
        jnp.sum(batch["mask"]),
    ),
    "scaled mean": lambda model, batch: jnp.mean(squares(model, batch)) / ROWS,
    "scaled pair": lambda model, batch: (
        jnp.sum(squares(model, batch)) / ROWS,
        jnp.float32(len(batch["x"])),
    ),
    "two means": lambda model, batch: (
        jnp.mean(squares(model, batch)) / 3
        - 0.1 * jnp.sum(model(batch["x"]) ** 2) / len(batch["x"])
        + 1e-3 * jnp.sum(model(jnp.eye(12)) ** 2)
    ),
    "means of means": lambda model, batch: jnp.mean(
        jnp.mean(squares(model, batch), 0) * jnp.arange(5.0)
    ),
    "for these rows alone": lambda model, batch: (
        jnp.sum(squares(model, batch).reshape(1, 5)) / ROWS
    ),
    "not understood": lambda model, batch: jnp.linalg.norm(squares(model, batch)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loss", RIGHT.values(), ids=RIGHT)
def test_other_losses_are_planned(loss):
    plan = plan_of(loss, num_microbatches=4)
    assert not any("sum over the rows" in reason for reason in plan.reasons)


def contrast(queries, keys):
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(queries @ keys.T)))


def distances(queries, keys):
    pairs = jnp.sum((queries[:, None] - keys[None]) ** 2, axis=-1)
    return jnp.mean(jax.nn.logsumexp(-pairs, axis=1))


@pytest.mark.parametrize("compare", [contrast, distances])
def test_rows_that_are_compared_with_each_other_are_warned_of(compare):
    def loss(model, batch):
        return compare(model(batch["x"]), batch["y"])

    with pytest.warns(RuntimeWarning, match="compares the rows.* 8 parts of 4 rows.*jax.vmap"):
        plan_of(loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan_of(loss, devices=1)
        plan_for((init, apply), loss=in_groups(compare), batch=groups_of)


def groups_of(index):
    return {name: x.reshape(8, 4, *x.shape[1:]) for name, x in batch_of(index).items()}


def in_groups(compare):
    return lambda model, batch: jnp.mean(jax.vmap(compare)(model(batch["x"]), batch["y"]))


def odd_pair(total, weight):
    return lambda model, batch: (
        total(squares(model, batch).mean(-1) * batch["mask"]),
        weight(batch["mask"]),
    )


def per_value(model, batch):
    """Sums over 4 rows of 4 values each, divided by 4 values: not by the number of rows."""
    weights = jnp.broadcast_to(batch["mask"][:, None], (len(batch["x"]), 4))
    return jnp.sum(squares(model, batch)[:, :4] * weights) / 4, jnp.sum(weights) / 4


ODD_PAIRS = {
    "a share": (odd_pair(jnp.mean, jnp.mean), "weight is a mean over rows"),
    "a share of some": (
        odd_pair(jnp.mean, lambda mask: (mask * mask).sum() / mask.sum()),
        "weight is a mean over rows",
    ),
    "a count": (odd_pair(jnp.mean, jnp.sum), "the first number is a mean"),
}


@pytest.mark.parametrize(("loss", "what"), ODD_PAIRS.values(), ids=ODD_PAIRS)
def test_a_metric_in_place_of_a_weight_is_warned_of(loss, what):
    """`return loss, metric`, where the metric reads no parameter, is a valid pair."""
    for options in ({}, {"devices": 1}):
        with pytest.warns(RuntimeWarning, match=f"{what}.*return loss, ..share.: share."):
            plan = plan_of(loss, **options)
        assert sum(what in reason for reason in plan.reasons) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan_of(odd_pair(jnp.sum, jnp.sum))
        plan_of(odd_pair(jnp.sum, lambda mask: jnp.maximum(mask.sum(), 1)))
        plan_of(per_value)


def test_a_masked_mean_is_warned_of():
    def loss(model, batch):
        return jnp.sum(squares(model, batch).mean(-1) * batch["mask"]) / jnp.sum(batch["mask"])

    with pytest.warns(RuntimeWarning, match="return loss_sum, weight"):
        plan_of(loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan_of(loss, devices=1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("metric", [jnp.sum, jnp.mean, lambda near: (near.sum(), near.size)])
def test_of_a_metric_that_is_a_sum_it_is_said(metric):
    def loss(model, batch):
        errors = squares(model, batch)
        return jnp.mean(errors), {"near": metric(errors < 1)}

    said = [line for line in plan_of(loss).reasons if "the metric 'near' is a sum" in line]
    assert len(said) == (metric is jnp.sum)
    assert not said or "{'near': (x.sum(), x.size)}" in said[0]


# --- state ----------------------------------------------------------------------------------------


class State(nnx.Variable):
    """State that is neither parameters nor batch statistics."""


class Counting(nnx.Module):
    """Counts in integers and floating point, calls, a histogram by layers' loop, a running mean."""

    def __init__(self, rngs):
        self.first = nnx.Linear(12, 8, rngs=rngs)
        self.blocks = nnx.Param(jax.random.normal(rngs.params(), (4, 8, 8)) / 3)
        self.last = nnx.Linear(8, 5, rngs=rngs)
        self.positive = State(jnp.int32(5))
        self.total = State(jnp.float32(2))
        self.largest = State(jnp.zeros(5, jnp.int32))
        self.calls = State(jnp.int32(0))
        self.mean = State(jnp.float32(0))

    def __call__(self, x):
        self.positive[...] += jnp.sum(x[:, 0] > 0)
        self.total[...] = self.total[...] + jnp.sum(x[:, 0] > 0).astype(jnp.float32)
        self.calls[...] += 1
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * jnp.mean(x)

        def layer(x, kernel):
            return x + jnp.tanh(x @ kernel), None

        y = self.last(jax.lax.scan(layer, self.first(x), self.blocks[...])[0])
        chosen = jax.nn.one_hot(jnp.argmax(y, -1), 5, dtype=jnp.int32)
        self.largest[...] += jnp.sum(chosen, 0)
        return y


def pair(model, batch):
    losses = squares(model, batch)
    return jnp.sum(losses), losses.size


def state_after(model, steps=3, loss=pair, **options):
    """{name: its value on each device} of a model's state."""
    options = {"optimizer": zerojax.sgd(0.1), "persistence_threshold": 0, **options}
    plan = plan_for(model, loss=loss, batch=batch_of, **options)
    state, step = init_state(plan, 0), build_step(plan)
    for index in range(steps):
        state, _ = step(state, jax.device_put(batch_of(index), plan.batch_sharding))
    copies = {
        name: [np.asarray(shard.data) for shard in value.addressable_shards]
        for name, value in state["extras"].items()
    }
    for name, values in copies.items():
        for value in values:
            np.testing.assert_array_equal(value, values[0], err_msg=name)
    return plan, {name: values[0] for name, values in copies.items()}


FIXED = {"deterministic": "mesh", "virtual_shards": 16}
HOST = {"params": "host", "opt_state": "host", "min_elements": 1}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"zero": 0}, marks=pytest.mark.slow, id="zero0"),
        pytest.param({"zero": 1, "num_microbatches": 2}, id="zero1"),
        pytest.param({"zero": 3, "mesh": {"replica": 2}}, id="zero3"),
        pytest.param(
            {"zero": 1, "mesh": {"stage": 2}, "num_microbatches": 4}, id="pipeline"
        ),
        pytest.param({"zero": 2, **FIXED}, id="deterministic"),
        pytest.param(
            {"zero": 1, "offload": HOST, "num_microbatches": 2}, marks=pytest.mark.slow, id="host"
        ),
    ],
)  # fmt: skip
def test_counts_are_those_of_one_device(options):
    plan, found = state_after(lambda rngs: Counting(rngs), **options)
    assert plan.traced.counted_state == {"positive", "total", "largest"}
    positive = sum(int((batch_of(index)["x"][:, 0] > 0).sum()) for index in range(3))
    assert found["positive"] == 5 + positive
    assert found["total"] == 2 + positive
    assert found["largest"].sum() == 3 * ROWS
    assert found["calls"] > 0
    assert any("3 arrays (such as largest)" in reason for reason in plan.reasons)
    one = _of_one_device()
    if "num_microbatches" not in options:
        np.testing.assert_allclose(found["mean"], one["mean"], rtol=1e-5)
    # Which output is the largest changes with rounding for no row of these batches.
    np.testing.assert_array_equal(found["largest"], one["largest"])


@functools.cache
def _of_one_device():
    return state_after(lambda rngs: Counting(rngs), devices=1)[1]


class Tracking(nnx.Module):
    """Integer state that is no count."""

    def __init__(self, change, rngs):
        self.change, self.linear = change, nnx.Linear(12, 5, rngs=rngs)
        self.state = State(jnp.int32(1))

    def __call__(self, x):
        self.state[...] = self.change(self.state[...], x).astype(jnp.int32)
        return self.linear(x)


CHANGES = {
    "largest": lambda old, x: jnp.maximum(old, (x.max() * 100).astype(jnp.int32)),
    "any": lambda old, x: old + jnp.any(x > 2),
    "replaced": lambda old, x: jnp.sum(x > 0),
    "rounded": lambda old, x: old + jnp.sum(x).astype(jnp.int32),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_integer_state_that_is_no_count_is_refused_on_several_shards(change):
    message = (
        r"the model's state state \(int32\) depends on the rows .* each of 8 shards .*"
        r"state \+ jnp.sum.*return loss, \{'state': value\}"
    )
    with pytest.raises(ValueError, match=message):
        plan_for(lambda rngs: Tracking(change, rngs), loss=pair, batch=batch_of)
    plan = plan_for(lambda rngs: Tracking(change, rngs), loss=pair, batch=batch_of, devices=1)
    assert any("state depends on the rows" in reason for reason in plan.reasons)


def test_state_that_does_not_depend_on_the_batch_is_kept():
    change = lambda old, x: old * 3 + x.shape[1]  # noqa: E731
    _, found = state_after(lambda rngs: Tracking(change, rngs), steps=2, zero=1)
    assert found["state"] == 3 * (3 + 12) + 12


class LinenCounting(linen.Module):
    """A count and batch statistics in collections of linen."""

    @linen.compact
    def __call__(self, x):
        seen = self.variable("counts", "seen", lambda: jnp.int32(0))
        if not self.is_initializing():
            seen.value = seen.value + jnp.sum(x[:, 0] > 0)
        return linen.BatchNorm(use_running_average=False)(linen.Dense(5)(x))


@pytest.mark.thorough
def test_linen_counts_and_batch_statistics():
    plan, found = state_after(LinenCounting(), zero=2)
    assert plan.traced.counted_state == {"counts/seen"}
    true = sum(int((batch_of(index)["x"][:, 0] > 0).sum()) for index in range(3))
    assert found["counts/seen"] == true
    assert any("then the updates are averaged" in reason for reason in plan.reasons)


@pytest.mark.thorough
def test_a_run_with_checkpoints_saves_counts(tmp_path):
    """The copies of a count differed before, and the save blamed a device for it."""
    trainer = zerojax.train(
        lambda rngs: Counting(rngs),
        {"zero": 1},
        batch_of,
        loss=pair,
        optimizer=optax.adam(1e-3),
        steps=2,
        checkpoint=tmp_path / "run",
    )
    trainer.close()
    true = 5 + sum(int((batch_of(index)["x"][:, 0] > 0).sum()) for index in range(2))
    assert int(trainer.to_model().positive[...]) == true
    assert int(model_of(trainer.plan, trainer.state).positive[...]) == true


# --- rows of padding ------------------------------------------------------------------------------

REAL = 18
"""Rows of a batch that count; the others fill it up, and are all that three of 8 devices have."""


def layers(key):
    first, second = jax.random.split(key)
    kernels = jax.random.normal(first, (3, 12, 12)) / 4
    return {"layers": kernels, "head": jax.random.normal(second, (12, 5))}


def through_layers(params, x):
    layer = lambda x, kernel: (x + jnp.tanh(x @ kernel), None)  # noqa: E731
    return jax.lax.scan(layer, x, params["layers"])[0] @ params["head"]


def filled_up(index, filling=0.0):
    batch = batch_of(index)
    batch["mask"] = (np.arange(ROWS) < REAL).astype(np.float32)
    batch["x"][REAL:] = batch["y"][REAL:] = filling
    return batch


def of_real_rows(model, batch):
    losses = jnp.mean(squares(model, batch), -1) * batch["mask"]
    return jnp.sum(losses), jnp.sum(batch["mask"])


STREAMED = {"params": "host", "opt_state": "host", "min_elements": 1}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"offload": {"opt_state": "host", "min_elements": 1}}, id="state-on-host"),
        pytest.param({"offload": STREAMED, "num_microbatches": 2}, id="layers-from-host"),
        pytest.param({"offload": {**STREAMED, "update_in_backward": True}}, id="in-backward"),
        pytest.param({"deterministic": "mesh", "virtual_shards": 16}, id="deterministic"),
    ],
)
def test_rows_of_padding_count_nowhere(options):
    """Not in the loss, nor in its weight, the gradient's norm or what is learned from it."""
    plan = plan_for(
        (layers, through_layers),
        loss=of_real_rows,
        batch=filled_up,
        optimizer=zerojax.sgd(0.1, clip_norm=None),
        persistence_threshold=0,
        **{"zero": 1, **options},
    )
    found = []
    for filling in (0.0, 50.0):
        state, step = init_state(plan, 0), build_step(plan)
        start = {name: np.asarray(x) for name, x in model_of(plan, state).items()}
        for index in range(2):
            batch = jax.device_put(filled_up(index, filling), plan.batch_sharding)
            state, metrics = step(state, batch)
            found.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    wanted, params = [], start
    for index in range(2):
        batch = {name: x[:REAL] for name, x in filled_up(index).items()}

        def mean(params, batch=batch):
            return jnp.mean((through_layers(params, batch["x"]) - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(mean)(params)
        wanted.append([float(loss), float(optax.tree.norm(grads))])
        params = jax.tree.map(lambda x, grad: x - 0.1 * grad, params, grads)
    np.testing.assert_allclose(found, [*wanted, *wanted], rtol=2e-5)
