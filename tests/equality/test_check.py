"""`zerojax.check` tells models that train the same on any devices from others, and why."""

from __future__ import annotations

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from tests.support import checked_models as cases
from tests.support.checked_models import Counting, Iterating, Normalised, batch
from zerojax.equality import check_in_child, make_request
from zerojax.equality.check_in_child import check_here
from zerojax.equality.experiments import Experiments, dropout_reason
from zerojax.equality.short_runs import (
    CheckInputs,
    Configuration,
    PlainRun,
    RunOutcome,
    differing_state,
    one_unit_away,
    plan_of,
)
from zerojax.passes import gradients
from zerojax.passes.microbatch import split_batch

DEVICES = 4
STEEP = optax.adamw(1e-2, eps=1e-4)


def experiments(model, loss) -> Experiments:
    given = CheckInputs(
        zerojax.models.adapt.as_model(model), loss, STEEP, [batch(0)], freeze=(), seed=0
    )
    return Experiments(PlainRun(given, plan_of(given, Configuration(1))), DEVICES)


def found_here(model, loss, monkeypatch=None, *, only=None, **options):
    """The result of a check in this process; `only`: of these runs."""
    if only is not None:
        monkeypatch.setattr(check_in_child, "configurations", lambda devices, thorough: only)
    options = {"optimizer": STEEP, "devices": DEVICES, **options}
    return check_here(make_request(model, batch, loss=loss, **options))


LAST = Configuration(DEVICES, 3, 2)


# --- what the forward pass tells ------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("loss", cases.RIGHT, ids=lambda loss: loss.__name__)
def test_a_mean_over_rows_has_no_fault(loss):
    assert experiments(cases.PAIR, loss).forward(train=True).reason is None


@pytest.mark.thorough
@pytest.mark.parametrize("loss", cases.WRONG, ids=lambda loss: loss.__name__)
def test_a_loss_that_is_no_mean_over_rows_is_told_with_its_line(loss):
    kind, line = cases.WRONG[loss]
    reason = experiments(cases.PAIR, loss).forward(train=True).reason
    assert reason is not None
    assert reason.kind == kind
    assert "checked_models.py" in reason.where
    assert line in reason.where
    assert reason.remedy


@pytest.mark.thorough
def test_a_product_of_means_is_mended_with_batch_mean():
    reason = experiments(cases.PAIR, cases.balanced).forward(train=True).reason
    assert "zerojax.batch_mean(jnp.mean(x, axis=0))" in reason.remedy


@pytest.mark.parametrize("loss", [cases.contrastive, cases.pairwise_distances])
def test_rows_that_are_compared_with_each_other_are_put_into_groups(loss):
    reason = experiments(cases.PAIR, loss).forward(train=True).reason
    assert "jax.vmap" in reason.remedy
    assert "zerojax.gather_batch(x)" in reason.remedy
    assert "batch_mean" not in reason.remedy


def weighted(numbers):
    """A loss in which rows have weights by their numbers."""
    return lambda model, batch: jnp.mean(cases.errors(model, batch) * numbers(batch["x"])[:, None])


PLACES = {
    "row number": weighted(lambda x: jnp.arange(len(x))),
    "number of rows": lambda model, batch: jnp.mean(
        (model(batch["x"]) / len(batch["x"]) - batch["y"]) ** 2
    ),
    "noise of one key": weighted(lambda x: jax.random.normal(jax.random.key(0), (len(x),))),
}


@pytest.mark.parametrize("loss", PLACES.values(), ids=PLACES)
def test_places_of_rows_are_told_from_rows_that_depend_on_others(loss):
    reason = experiments(cases.PAIR, loss).forward(train=True).reason
    assert "on its place in the batch or on the number of rows" in reason.sentence
    assert "zerojax.row_numbers(x)" in reason.remedy
    assert "batch_mean" not in reason.remedy
    right = weighted(zerojax.row_numbers)
    assert experiments(cases.PAIR, right).forward(train=True).reason is None


@pytest.mark.parametrize(
    ("of", "name"),
    [(lambda x: x.std(0), "std"), (lambda x: jax.lax.top_k(x.reshape(-1), 8)[0], "top_k")],
)
def test_what_combines_rows_is_named_as_written(of, name):
    loss = lambda model, batch: jnp.mean(of(cases.errors(model, batch)))  # noqa: E731
    reason = experiments(cases.PAIR, loss).forward(train=True).reason
    assert f"`{name}` combines the rows" in reason.sentence
    assert "zerojax.gather_batch(x)" in reason.remedy


@pytest.mark.thorough
def test_rows_that_are_compared_in_groups_agree(monkeypatch):
    def groups(step):
        return {"groups": batch(step)["x"].reshape(-1, 1, 5) + np.arange(4)[:, None] / 10}

    monkeypatch.setattr(check_in_child, "configurations", lambda devices, thorough: [LAST])
    options = {"loss": cases.contrastive_in_groups, "optimizer": STEEP, "devices": DEVICES}
    result = check_here(make_request(cases.PAIR, groups, **options))
    assert result.agrees, result.table()


def test_shardings_in_the_code_need_no_mesh(monkeypatch):
    def loss(model, batch):
        errors = cases.errors(model, batch)
        return jnp.mean(jax.lax.with_sharding_constraint(errors, jax.P("data")))

    result = found_here(cases.PAIR, loss, monkeypatch, only=[LAST])
    assert result.agrees, result.table()


def test_own_metrics_that_are_no_means_are_found():
    def loss(model, batch):
        errors = cases.errors(model, batch)
        far = jnp.sum(errors > 1), errors.size
        return jnp.mean(errors), {"far": far, "mean": errors.mean(), "psnr": jnp.log(errors.mean())}

    found = experiments(cases.PAIR, loss).metrics(train=False)
    assert list(found) == ["psnr"]
    whole, pieces = found["psnr"]
    assert whole > pieces
    assert experiments(cases.PAIR, cases.balanced_over_batch).metrics(train=False) == {}


def test_a_row_inside_of_a_scan_is_found_inside_of_it():
    def loss(model, batch):
        def layer(x, _):
            return jnp.tanh(x - x.mean(0, keepdims=True)), None

        y, _ = jax.lax.scan(layer, model(batch["x"]), None, length=2)
        return jnp.mean((y - batch["y"]) ** 2)

    reason = experiments(cases.PAIR, loss).forward(train=True).reason
    assert reason.kind == "coupled_rows"
    assert "jnp.tanh(x - x.mean(0" in reason.where


@pytest.mark.thorough
def test_a_backward_pass_that_clips_is_not_linear():
    found = experiments(cases.PAIR, cases.clipping)
    assert found.forward(train=True).reason is None
    reason = found.backward(train=True)
    assert reason.kind == "nonlinear_backward"
    assert "clipped(model" in reason.where
    assert "Its backward rule is" in reason.sentence
    assert "clipped.defvjp(lambda x" in reason.sentence
    assert experiments(cases.PAIR, cases.mean).backward(train=True) is None


# --- whole checks ---------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_model_that_trains_the_same_agrees(monkeypatch):
    result = found_here(cases.PAIR, cases.pair, monkeypatch, only=[LAST])
    assert result.agrees, result.table()
    assert not result.reasons
    assert "AGREES" in result.table()
    assert repr(result) == "<check: agrees, 1 runs>"
    json.dumps(result.as_dict())
    result.require()


@pytest.mark.thorough
@pytest.mark.parametrize("loss", [cases.balanced_over_batch, cases.normalised_over_batch])
def test_sums_over_the_batch_agree(loss, monkeypatch):
    """With several microbatches they are those of the same microbatches in plain JAX."""
    result = found_here(cases.PAIR, loss, monkeypatch, only=[Configuration(DEVICES), LAST])
    assert result.agrees, result.table()
    assert not result.reasons
    assert [run.against for run in result.runs] == [
        "plain JAX, 1 device",
        "plain JAX, 1 device, the same microbatches",
    ]


@pytest.mark.thorough
def test_a_model_that_does_not_is_reported(monkeypatch):
    result = found_here(cases.PAIR, cases.centred, monkeypatch, only=[LAST])
    assert not result.agrees
    assert [reason.kind for reason in result.reasons] == ["coupled_rows"]
    assert "y = y - y.mean(0" in result.table()
    assert json.loads(json.dumps(result.as_dict()))["reasons"][0]["kind"] == "coupled_rows"
    with pytest.raises(zerojax.errors.DisagreementError, match="DIFFERS: 1 of 1 runs differ"):
        result.require()


@pytest.mark.slow
@pytest.mark.parametrize("loss", [*cases.RIGHT, cases.clipping], ids=lambda loss: loss.__name__)
def test_right_losses_agree_in_all_runs(loss):
    """A rule that clips is given gradients of the mean over the whole batch, so it may."""
    result = found_here(cases.PAIR, loss, thorough=True)
    assert result.agrees, result.table()
    assert len(result.runs) == 10


ALL_WRONG = {
    **{loss: {kind} for loss, (kind, _) in cases.WRONG.items()},
    cases.clipping_under_own_weight: {"nonlinear_backward"},
    cases.weight_of_parameters: {"weight_gradient", "refused"},
}


@pytest.mark.slow
@pytest.mark.parametrize("loss", ALL_WRONG, ids=lambda loss: loss.__name__)
def test_wrong_losses_differ_or_are_refused(loss):
    """One that a plan refuses by now is reported as refused."""
    result = found_here(cases.PAIR, loss)
    assert not result.agrees
    assert {reason.kind for reason in result.reasons} <= ALL_WRONG[loss] | {"refused"}
    assert result.reasons


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["integers", pytest.param("counter", marks=pytest.mark.slow)])
def test_state_that_counts_rows_is_found(kind, monkeypatch):
    """Or summed or refused by the plan, which then is the finding; calls may be counted."""
    model = functools.partial(Counting, kind)

    def loss(model, batch):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    result = found_here(lambda rngs: model(rngs=rngs), loss, monkeypatch, only=[LAST])
    if not result.agrees:
        assert {reason.kind for reason in result.reasons} <= {kind, "refused"}
        assert "seen" in result.reasons[0].sentence


@pytest.mark.thorough
def test_the_line_of_refused_state_is_named(monkeypatch):
    result = found_here(cases.LastSeen, cases.mean, monkeypatch, only=[LAST])
    refused, reason = result.reasons
    assert refused.kind == "refused"
    assert "zerojax.check prints the line" in refused.sentence
    assert reason.kind == "integers"
    assert "self.most[...] = jnp.max" in reason.where


@pytest.mark.thorough
def test_state_that_each_pass_changes_is_told(monkeypatch):
    """A microbatch is a pass; plain JAX that takes the same ones agrees."""
    model = Iterating(nnx.Rngs(0))
    only = [Configuration(1, 0, 2), Configuration(DEVICES), LAST]
    result = found_here(model, cases.mean, monkeypatch, only=only)
    assert result.agrees, result.table()
    assert [run.agrees for run in result.runs] == [False, True, False]
    assert [reason.kind for reason in result.reasons] == ["passes"]
    assert "direction" in result.reasons[0].sentence


@pytest.mark.thorough
def test_rounding_is_measured_beside_dropout(monkeypatch):
    """The gradient of a bias before a batch norm is rounding, which Adam makes a step of."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first, self.norm = nnx.Linear(5, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
            self.dropout, self.last = nnx.Dropout(0.3, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)

        def __call__(self, x):
            return self.last(self.dropout(jnp.tanh(self.norm(self.first(x)))))

    options = {"optimizer": optax.adam(1e-2), "only": [Configuration(DEVICES, 2)]}
    result = found_here(Model, cases.mean, monkeypatch, **options)
    assert result.agrees, result.table()
    assert any("first/bias" in note for note in result.notes), result.notes
    places = {reason.kind: reason.where for reason in result.reasons}
    assert "self.norm(self.first(x))" in places["batch_statistics"]


def test_infinities_in_state_hide_no_difference():
    def run(last):
        mask = np.array([-np.inf, 0.0, np.nan, last], np.float32)
        return RunOutcome(np.zeros(1), np.zeros(1), {}, {"mask": [mask]})

    assert differing_state(run(1.0), run(1.0)) == ()
    assert differing_state(run(1.01), run(1.0)) == ("mask",)
    assert differing_state(run(np.inf), run(1.0)) == ("mask",)


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "kind"), [(0.0, "batch_statistics"), (0.5, "dropout")])
def test_what_differs_by_design_is_told_and_the_rest_is_proven(rate, kind, monkeypatch):
    model = lambda rngs: Normalised(rate, rngs)  # noqa: E731
    result = found_here(model, cases.mean)
    assert result.agrees, result.table()
    assert [reason.kind for reason in result.reasons] == [kind]
    assert {"evaluation", "training"} == {run.mode for run in result.runs}
    assert all(run.agrees for run in result.runs if run.mode == "evaluation")
    assert "by design" in result.table()
    assert not found_here(model, cases.mean, monkeypatch, only=[LAST], strict=True).agrees


@pytest.mark.slow
def test_a_fault_beside_dropout_is_found():
    result = found_here(lambda rngs: Normalised(0.5, rngs), cases.plain_sum)
    assert not result.agrees
    assert "sum" in {reason.kind for reason in result.reasons}


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", [optax.adafactor(1e-2, min_dim_size_to_factor=2), optax.contrib.muon(1e-2)]
)
def test_an_optimizer_that_sees_padding_is_found(optimizer):
    """Or refused, or right: an optimizer that gives the update of one device agrees."""
    result = found_here(cases.PAIR, cases.mean, optimizer=optimizer)
    if not result.agrees:
        assert {reason.kind for reason in result.reasons} <= {"optimizer", "refused"}


@pytest.mark.thorough
def test_an_optimizer_that_depends_on_the_split_is_told_from_a_wrong_gradient(monkeypatch):
    """No known optimizer does any more, so one run's update is changed by hand."""
    take = check_in_child.run_zerojax

    def changed(given, configuration, **options):
        run = take(given, configuration, **options)
        if not configuration.optimizer:
            return run
        after = {**run.after, "last": 1.01 * run.after["last"] - 0.01 * given.before["last"]}
        return dataclasses.replace(run, after=after)

    monkeypatch.setattr(check_in_child, "run_zerojax", changed)
    result = found_here(cases.PAIR, cases.mean, monkeypatch, only=[LAST])
    (reason,) = result.reasons
    assert reason.kind == "optimizer"
    assert "update of last" in reason.sentence
    assert "1.0e-02" in reason.sentence


@pytest.mark.thorough
def test_gradients_of_the_last_microbatch_alone_are_found(monkeypatch):
    """As DeepSpeed #7718: the loss is right, and the gradient norm is far too small."""
    accumulate = gradients._accumulate

    def last_alone(config, differentiate, inputs, extras, key, rows, scales):
        sums, _, after = accumulate(config, differentiate, inputs, extras, key, rows, scales)
        last = jax.tree.map(lambda x: x[-1], split_batch(rows, config.num_microbatches))
        return sums, differentiate(inputs, extras, key, last)[1], after

    monkeypatch.setattr(gradients, "_accumulate", last_alone)
    result = found_here(cases.PAIR, cases.mean, monkeypatch, only=[Configuration(DEVICES, 2, 2)])
    assert not result.agrees
    (run,), (reason,) = result.runs, result.reasons
    assert run.norm > 0.1
    assert reason.kind == "unknown"
    assert "zero=2, 2 microbatches, most in the parameter" in reason.sentence
    assert re.search(r"checked_models[.]py:\d+: ", reason.sentence), reason.sentence


def test_a_refused_plan_is_shown_with_its_sentence(monkeypatch):
    def vector(model, batch):
        return cases.errors(model, batch)

    result = found_here(cases.PAIR, vector, monkeypatch, only=[LAST])
    assert not result.agrees
    (reason,) = result.reasons
    assert reason.kind == "refused"
    assert "return a scalar" in reason.sentence
    assert "REFUSED: 1 of 1 runs are refused (" in result.table()


def test_an_error_for_fewer_rows_than_the_batch_says_how_to_have_all(monkeypatch):
    def hardest(model, batch):
        errors = cases.errors(model, batch)
        return jnp.mean(jax.lax.top_k(errors.reshape(-1), errors.size // len(errors) * 8)[0])

    failed = found_here(cases.PAIR, hardest, monkeypatch, only=[LAST]).reasons[0]
    assert failed.kind == "failed"
    assert "zerojax.gather_batch(x) has all" in failed.remedy


@pytest.mark.thorough
def test_a_sentence_is_told_once_whatever_its_numbers(monkeypatch):
    only = [Configuration(DEVICES), Configuration(2), LAST]
    result = found_here(cases.PAIR, cases.plain_sum, monkeypatch, only=only)
    (refused,) = [reason for reason in result.reasons if reason.kind == "refused"]
    assert "4 parts of 4 rows" in refused.sentence
    assert "likewise 2 devices, zero=0; 4 devices, zero=3" in refused.sentence


def test_noise_in_evaluation_mode_is_told():
    assert "draw no random numbers" in dropout_reason(quiet=False).remedy
    assert "draw no random" not in dropout_reason(quiet=True).remedy


def test_a_loss_that_is_not_finite_is_told(monkeypatch):
    def broken(model, batch):
        return jnp.mean(jnp.log(model(batch["x"]) - 1e6))

    result = found_here(cases.PAIR, broken, monkeypatch, only=[LAST])
    assert [reason.kind for reason in result.reasons] == ["not_finite"]


# --- what is given --------------------------------------------------------------------------------


def test_rows_that_do_not_divide_are_left_out_with_a_note():
    request = make_request(cases.PAIR, {"x": np.zeros((21, 5))}, devices=4)
    assert {len(one["x"]) for one in request.batches} == {16}
    assert "16 of 21 rows" in request.notes[0]
    fewer = make_request(cases.PAIR, {"x": np.zeros((7, 5))}, devices=4)
    assert (fewer.devices, len(fewer.batches[0]["x"])) == (3, 6)


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ({"x": np.zeros((3, 5))}, {}, "the batch has 3 rows; a check needs at least 4"),
        ({"x": np.zeros((8, 5)), "y": np.zeros(4)}, {}, "give every array the same number"),
        ({"x": np.zeros((8, 5))}, {"devices": 1}, "devices"),
        ({"x": np.zeros((8, 5))}, {"steps": 0}, "steps"),
    ],
)
def test_what_cannot_be_checked_is_refused(given, options, message):
    with pytest.raises(ValueError, match=message):
        zerojax.check(cases.PAIR, given, **options)


class Shifted(nnx.Module):
    """A shift of all logits changes no loss: its gradient is what rounding leaves of 0."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.out = nnx.Linear(8, 6, rngs=rngs)
        self.shift = nnx.Param(jnp.full((1, 1), 0.3))

    def __call__(self, x):
        return self.out(x) + self.shift


@pytest.mark.thorough
def test_a_gradient_of_rounding_alone_is_told_where_rows_are_alike():
    """Another order of equal rows changes nothing; halves of them round differently, and Adam
    divides by the size of the gradient."""

    def loss(model, batch):
        losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
        return jnp.mean(losses)

    row = np.random.default_rng(0).normal(size=(1, 8)).astype(np.float32)
    rows = {"x": np.repeat(row, 8, 0), "y": np.full((8,), 3)}
    result = check_here(
        make_request(Shifted, rows, loss=loss, optimizer=optax.adam(1e-2), devices=2)
    )
    assert result.agrees, result
    (note,) = result.notes
    assert note.startswith("not compared: shift, whose gradient is rounding noise")


def test_parameters_move_by_one_unit_in_the_last_place():
    before = {"w": np.float32([1.5, -3.5, 0.0]), "n": np.int32([3])}
    after = one_unit_away(before)
    assert after["w"].dtype == np.float32
    units = np.spacing(np.abs(before["w"]))
    assert np.abs(after["w"] - before["w"]).tolist() == [units[0], units[1], 0]
    assert after["n"].tolist() == [3]
