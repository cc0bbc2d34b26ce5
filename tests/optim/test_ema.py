"""The average of the weights is NumPy's recurrence, bit for bit, however a run is split.

NumPy follows each run from its stored parameters. Decays are such that no product is rounded
(`tests.support.ema_runs.DECAY`); where one is, the tolerance says so.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from tests.support.ema_runs import DECAY, Followed, average_of, differing, num_bytes_of, weights_of
from tests.support.marks import thorough
from tests.support.offload_disk_runs import Regression
from tests.support.optim_steps import check_close, clipping_of, make_params, run_apply, run_update
from tests.support.recipe import CLIPPED, DECAYED, RECIPE
from tests.support.small_models import reference_model
from tests.support.trajectories import regression_batch, text_batch
from tests.tracing.test_rolled_training import ZERO_3
from tests.tracing.test_rolled_training import batch as rolled_batch
from tests.tracing.test_rolled_training import plan_of as rolled_plan
from zerojax.optim import EmaState, ema_of
from zerojax.optim.ema import WithEma

RATE = 1e-2
averaged = functools.partial(zerojax.with_ema, decay=DECAY, warmup=False)
OPTIMIZERS = {
    "adamw": lambda: zerojax.adamw(RATE, **RECIPE),
    "lion": lambda: zerojax.lion(RATE, **DECAYED),
    "sgd": lambda: zerojax.sgd(RATE, momentum=0.9, **CLIPPED),
    "sgd without momentum": lambda: zerojax.sgd(RATE),
    "lamb": lambda: zerojax.lamb(RATE, **DECAYED),
    "adam8bit": lambda: zerojax.adam8bit(RATE, **RECIPE),
    "muon": lambda: zerojax.optim.muon(RATE, dimensions=None, clip_norm=1.0),
    "optax": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(RATE)),
    "optax on true shapes": lambda: optax.adafactor(RATE),
}


def plan_of(optimizer: Any, *, mesh: Any = None, devices: int = 8, **options: Any) -> Any:
    """A plan of a model whose sizes nothing divides."""
    made = zerojax.make_mesh(mesh or {}, jax.devices()[:devices])
    options = {"precision": "fp32", "persistence_threshold": 0, **options}
    return zerojax.make_plan(
        Regression, made, example_batch=regression_batch(0), optimizer=optimizer, **options
    )


def text_plan(model: Any, mesh: Any, **options: Any) -> Any:
    size = int(np.prod(list(mesh.values())))
    made = zerojax.make_mesh(mesh, jax.devices()[:size])
    options = {"precision": "fp32", "persistence_threshold": 0, **options}
    return zerojax.make_plan(model, made, example_batch=text_batch(0), **options)


BATCHES = [regression_batch(index) for index in range(4)]
TOO_LARGE = {**BATCHES[0], "y": BATCHES[0]["y"] * np.float32(1e30)}
"""Whose loss is not finite."""
TEXTS = [text_batch(index) for index in range(3)]


@pytest.mark.parametrize("zero", [thorough(0), thorough(1), thorough(2), 3])
def test_it_is_numpys_recurrence_at_any_stage(zero):
    plan = plan_of(averaged(zerojax.adamw(RATE)), zero=zero)
    run = Followed(plan)(*BATCHES)
    run.check()
    params, average = run.state["params"], ema_of(run.state["opt_state"])
    assert {n: x.sharding for n, x in params.items()} == {n: x.sharding for n, x in average.items()}
    assert num_bytes_of(average) == num_bytes_of(params)


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_keeps_one(name):
    plan = plan_of(averaged(OPTIMIZERS[name]()), zero=2)
    Followed(plan)(*BATCHES).check()


@pytest.mark.thorough
def test_moments_of_one_byte_keep_one():
    model = reference_model("gpt2", embed_dim=64)  # with parameters that are coded
    plan = text_plan(
        model, {"data": 8}, zero=1, optimizer=averaged(zerojax.adam8bit(RATE)), precision="bf16"
    )
    run = Followed(plan)(*TEXTS)
    run.check()
    moments = jax.tree.leaves(run.state["opt_state"].inner)
    assert any(x.dtype == jnp.int8 for x in moments)


@pytest.mark.thorough
def test_it_changes_nothing_of_the_weights():
    plain, with_one = (
        Run(plan_of(tx, zero=2)) for tx in (zerojax.adamw(RATE), averaged(zerojax.adamw(RATE)))
    )
    assert differing(plain.weights, with_one.weights) == []


class Run:
    """Weights after a few steps."""

    def __init__(self, plan: Any) -> None:
        step, state = zerojax.build_step(plan), zerojax.init_state(plan)
        for batch in BATCHES:
            state, _ = step(state, zerojax.shard_batch(plan, batch))
        self.weights = weights_of(plan, state)


MESHES = {
    "tensor parallel": ("llama", {"data": 2, "model": 2}, {"zero": 3}),
    "pipeline": ("gpt2", {"data": 2, "stage": 2}, {"zero": 1, "num_microbatches": 2}),
    "pipeline of uneven stages": (
        "gpt2",
        {"stage": 2},
        {"num_microbatches": 2, "layers": 3, "partition": (2, 1)},
    ),
    "interleaved": (
        "gpt2",
        {"stage": 2},
        {"num_microbatches": 2, "layers": 4, "pipeline_schedule": "interleaved(2)"},
    ),
    "replicas": ("gpt2", {"data": 2, "replica": 2}, {"zero": 2}),
    "context": ("llama", {"data": 2, "context": 2}, {"zero": 3}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", MESHES)
def test_it_is_numpys_recurrence_on_any_mesh(name):
    kind, mesh, options = MESHES[name]
    options = dict(options)
    model = reference_model(kind, num_layers=options.pop("layers", 2))
    plan = text_plan(model, mesh, optimizer=averaged(zerojax.adamw(RATE)), **options)
    Followed(plan)(*TEXTS).check()


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [1, 3])
def test_gradients_of_microbatches_move_it_once(zero):
    plan = plan_of(averaged(zerojax.adamw(RATE)), zero=zero, num_microbatches=2)
    run = Followed(plan)(*BATCHES)
    run.check()
    assert run.count == len(BATCHES)


@pytest.mark.thorough
def test_frozen_parameters_have_none():
    plan = plan_of(averaged(zerojax.adamw(RATE)), zero=3, freeze="^up/")
    run = Followed(plan)(*BATCHES)
    run.check()
    assert not any(name.startswith("up/") for name in run.expected)
    assert any(name.startswith("up/") for name in run.state["frozen"])


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", [zerojax.adamw(RATE), optax.adamw(RATE)])
def test_layers_of_a_list_that_are_rolled_keep_theirs_under_their_names(optimizer):
    plan = rolled_plan(ZERO_3, optimizer=averaged(optimizer))
    assert plan.stacks
    run = Followed(plan)(*[rolled_batch()] * 3)
    run.check()
    assert "layers/3/up/kernel" in run.expected


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [1, 3])
def test_without_masters_it_is_of_the_parameters_as_they_are_stored(zero):
    """Which are rounded stochastically; the average itself is float32 and is not."""
    precision = zerojax.Precision(
        param_dtype=jnp.bfloat16, compute_dtype=jnp.float32, reduce_dtype=jnp.float32
    )
    plan = plan_of(averaged(zerojax.adamw(RATE)), zero=zero, precision=precision)
    run = Followed(plan)(*BATCHES)
    assert {x.dtype.name for x in run.state["params"].values()} == {"bfloat16"}
    run.check()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["adamw", "lamb", "adam8bit", "muon", "optax"])
def test_a_step_that_is_skipped_does_not_move_it(name):
    plan = plan_of(averaged(OPTIMIZERS[name]()), zero=1)
    run = Followed(plan)(BATCHES[0])
    run(TOO_LARGE, BATCHES[2]).check()
    assert run.count == 2
    assert int(run.state["skipped"]) == 1


# --- meshes and bits ------------------------------------------------------------------------------


@pytest.mark.slow
def test_deterministic_runs_have_the_same_bits_on_any_mesh():
    found = {}
    for devices in (1, 2, 8):
        plan = plan_of(
            averaged(OPTIMIZERS["adamw"]()), devices=devices, zero=3, deterministic="mesh"
        )
        run = Followed(plan)(*BATCHES)
        run.check()
        found[devices] = run.expected
    assert differing(found[1], found[2]) == differing(found[1], found[8]) == []


@pytest.mark.thorough
def test_a_live_run_changes_stage_and_mesh_without_losing_a_bit():
    optimizer = averaged(zerojax.adamw(RATE))
    run = Followed(plan_of(optimizer, zero=1))(*BATCHES)
    for options in ({"zero": 3}, {"zero": 2, "devices": 2}, {"zero": 0, "devices": 1}):
        plan = plan_of(optimizer, **options)
        state = zerojax.reshard_state(run.plan, plan, run.state)
        assert differing(average_of(plan, state), run.expected) == []
        run = run.on(plan, state)(*BATCHES[:2])
        run.check()


# --- decays ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("warmup", [True, False])
def test_the_decay_of_each_update(warmup):
    """By the formula, in float64; each step rounds a difference, a product and a sum."""
    tx = zerojax.with_ema(zerojax.sgd(0.1), 0.6, warmup=warmup)
    params = make_params()
    state, average = tx.init(params), {n: np.asarray(x, np.float64) for n, x in params.items()}
    for count in range(12):
        decay = min(0.6, (1 + count) / (10 + count)) if warmup else 0.6
        params, state = run_apply(tx, params, range(count, count + 1), state=state)
        average = {n: decay * average[n] + (1 - decay) * np.asarray(params[n]) for n in average}
    for name, expected in average.items():
        limit = 12 * 3 * 2**-24 * np.abs(expected).max()
        np.testing.assert_allclose(state.ema[name], expected, rtol=0, atol=limit)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["adamw", "lion", "lamb", "sgd"])
def test_the_update_in_place_is_optax_with_the_same_average(name):
    tx = zerojax.with_ema(OPTIMIZERS[name](), 0.9)
    assert isinstance(tx, zerojax.optim.Optimizer)
    params, state = run_update(tx, make_params())
    again, in_place = run_apply(tx, make_params(), scale_of=clipping_of(tx))
    check_close(again, params)
    check_close(in_place.ema, state.ema)
    assert int(state.count) == int(in_place.count) == 5


@pytest.mark.parametrize("in_chain", [False, True])
def test_gradients_that_optax_accumulates_move_it_once(in_chain):
    inner = optax.adamw(RATE)
    several = optax.MultiSteps(inner, 2).gradient_transformation()
    several = optax.chain(optax.clip_by_global_norm(1e9), several) if in_chain else several
    found = []
    for tx, repeats in ((inner, 1), (several, 2)):
        tx, params = zerojax.with_ema(tx, 0.99), make_params()
        state = tx.init(params)
        for number in range(3):
            for _ in range(repeats):
                grads = jax.tree.map(lambda x, n=number: jnp.cos(x + n), params)
                updates, state = jax.jit(tx.update)(grads, state, params)
                params = optax.apply_updates(params, updates)
        found.append((params, state.ema, state.count))
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.thorough
def test_it_is_around_a_whole_chain_of_optax():
    tx = zerojax.with_ema(optax.chain(optax.clip(1.0), optax.sgd(0.1)), 0.9)
    assert isinstance(tx, WithEma)
    params = make_params()
    state = tx.init(params)
    assert isinstance(state, EmaState)
    assert all(state.ema[name] is not params[name] for name in params)
    _, after = tx.update(params, state, params)
    with pytest.raises(ValueError, match=r"call update\(gradients, state, params\)"):
        tx.update(params, state)
    assert int(after.count) == 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: zerojax.with_ema(zerojax.sgd(1.0), 1.0), ValueError, r"in \[0, 1\)"),
        (lambda: zerojax.with_ema(zerojax.sgd(1.0), None), ValueError, r"0\.999 is usual"),
        (lambda: averaged(averaged(optax.sgd(1.0))), ValueError, "use with_ema once"),
        (lambda: averaged(averaged(zerojax.sgd(1.0))), ValueError, "use with_ema once"),
        (lambda: zerojax.with_ema(optax.sgd), TypeError, "with_ema takes an optimizer"),
        (lambda: zerojax.OptimizerConfig(ema_decay=1.5), ValueError, r"must be in \[0, 1\)"),
        (lambda: zerojax.OptimizerConfig(ema_warmup=False), ValueError, "set ema_decay as well"),
    ],
)
def test_what_makes_no_average_is_refused(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


def test_a_plan_counts_its_bytes_by_name_and_says_what_it_is():
    plan = plan_of(zerojax.OptimizerConfig(ema_decay=0.999), zero=3)
    sizes = plan.as_dict()["bytes_per_device"]
    assert sizes["average of weights"] == sizes["master weights"] > 0
    table = plan.table()
    assert "average of weights" in table
    assert "decay 0.999, at most (1 + t) / (10 + t) at update t" in table
    without = plan_of(zerojax.OptimizerConfig(), zero=3)
    assert "average of weights" not in without.as_dict()["bytes_per_device"]
    assert without.fingerprint != plan.fingerprint
    assert "opt_state/ema/up/kernel" in plan.explain("up/kernel")
