"""Whatever a run is told, it trains over pipeline stages as it does without them.

Optimizers, precisions, dropout, frozen parameters, kinds of models, evaluation. Small models, whose
layers are mostly spread unevenly, so that stacks have rows of padding.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from tests.support import pipeline_runs
from tests.support.marks import slow
from tests.support.pipeline_runs import UNEVEN, assert_equal_runs, compile_step, small, train
from tests.support.recipe import CLIPPED, DECAYED, RECIPE
from tests.support.small_models import reference_model
from tests.support.trajectories import plan_for, text_batch, train_for
from zerojax.config import LossScale
from zerojax.optim.precision import Precision
from zerojax.step.build import build_evaluation
from zerojax.step.initialization import init_state
from zerojax.step.reshard import to_portable_state

TWO_STAGES = {"data": 2, "stage": 2, "model": 2}
FOUR_STAGES = {"data": 2, "stage": 4}
UNEVEN_FOUR = {"mesh": FOUR_STAGES, "partition": UNEVEN[4], "num_microbatches": 4}
EIGHT = small(layers=8)


def one_device(model=EIGHT, **options):
    """In four microbatches: a sum of fewer terms at once is closer to the exact one."""
    return train_for(model, devices=1, num_microbatches=4, **options)


# Optimizers

OPTIMIZERS = {
    "sgd": lambda: zerojax.sgd(0.3, momentum=0.9, weight_decay=0.01, **CLIPPED),
    "lamb": lambda: zerojax.lamb(1e-2, **{**DECAYED, "clip_norm": 0.05}),
    "optax lamb": lambda: optax.chain(optax.clip_by_global_norm(0.05), optax.lamb(1e-2)),
}


@pytest.mark.parametrize(("name", "zero"), [slow("lamb", 1), slow("optax lamb", 3), slow("sgd", 2)])
def test_optimizers_see_the_arrays_of_one_device(name, zero):
    """Norms of arrays and of all gradients are over stages, and rows of padding count as nothing.

    LAMB clips gradients of norm 0.1 to 0.05.
    """
    expected = one_device(optimizer=OPTIMIZERS[name]())
    if "lamb" in name:
        assert expected.norms.min() > 0.05
    run = train(EIGHT, zero=zero, optimizer=OPTIMIZERS[name](), **UNEVEN_FOUR)
    assert_equal_runs(run, expected)
    np.testing.assert_allclose(run.norms, expected.norms, rtol=2e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("partition", [(2, 2, 2, 2), UNEVEN[4]])
def test_adafactor_over_interleaved_stages_trains_as_on_one_device(partition):
    """It takes means over a whole stack, for which stages exchange their layers in each step."""
    make = lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8)  # noqa: E731
    settings = {"pipeline_schedule": "interleaved(2)", "partition": partition}
    mesh = {"data": 2, "stage": 2}
    run = train(
        EIGHT, devices=4, zero=1, optimizer=make(), mesh=mesh, num_microbatches=4, **settings
    )
    assert any("exchanged between pipeline stages in every step" in x for x in run.plan.reasons)
    assert_equal_runs(run, one_device(optimizer=make()))


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 3])
def test_eight_bit_moments_follow_those_of_one_device(zero):
    """Blocks are cut within each shard, so codes differ, by a coding error in each step."""
    wide = small(layers=8, width=32)
    make = lambda: zerojax.adam8bit(1e-3, **RECIPE)  # noqa: E731
    expected = one_device(wide, optimizer=make())
    run = train(wide, zero=zero, optimizer=make(), **UNEVEN_FOUR)
    coded = [x for x in jax.tree.leaves(run.state["opt_state"]) if x.dtype == np.int8]
    assert any(x.ndim == 3 for x in coded), "a stack must be coded"
    assert_equal_runs(run, expected, tolerance=2e-4)


# Frozen parameters


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [slow(1), slow(2), 3])
def test_frozen_parameters_stay_and_the_rest_trains(zero):
    freeze = ("embed/.*", "blocks/linear/bias")
    expected = one_device(freeze=freeze)
    before = to_portable_state(expected.plan, init_state(expected.plan, 0))
    assert before["frozen"].keys() == {"embed/embedding", "blocks/linear/bias"}
    run = train(EIGHT, zero=zero, freeze=freeze, **UNEVEN_FOUR)
    assert_equal_runs(run, expected)
    after = to_portable_state(run.plan, run.state)
    assert after["frozen"].keys() == before["frozen"].keys()
    for name, value in after["frozen"].items():
        np.testing.assert_array_equal(value, before["frozen"][name])


# Dropout


@functools.cache
def dropped(rate_behind):
    model = small(rate=0.2, rate_behind=rate_behind)
    return train_for(model, devices=2, num_microbatches=4)


@pytest.mark.parametrize(
    ("schedule", "stash", "mesh", "zero", "behind"),
    [
        slow("1f1b", "residuals", {"stage": 4}, 0, 0.0),
        slow("zb_v", "input", {"stage": 2, "model": 2}, 3, 0.2),
        slow("interleaved(2)", "residuals", {"stage": 2, "model": 2}, 1, 0.2),
        slow("gpipe", "input", {"stage": 2}, 2, 0.2),
    ],
)
def test_dropout_does_not_depend_on_the_schedule(schedule, stash, mesh, zero, behind):
    """Masks follow from the microbatch and the layer, and the counters are where they were."""
    expected = dropped(behind)
    run = train(
        small(rate=0.2, rate_behind=behind),
        mesh={"data": 2, **mesh},
        devices=2 * mesh["stage"] * mesh.get("model", 1),
        zero=zero,
        pipeline_schedule=schedule,
        stash=stash,
        num_microbatches=4,
    )
    assert_equal_runs(run, expected)
    extras, others = (to_portable_state(r.plan, r.state)["extras"] for r in (run, expected))
    assert extras.keys() == others.keys()
    assert extras["blocks/dropout/rngs/count"].tolist() == [4 * 20] * 4
    for name, value in extras.items():
        np.testing.assert_array_equal(value, others[name], err_msg=name)


@pytest.mark.slow
def test_dropout_of_gpt2_does_not_depend_on_the_schedule():
    model = reference_model("gpt2", num_layers=4, embed_dim=16, dropout=0.1, remat="full")
    expected = train_for(model, devices=2, num_microbatches=4)
    options = {"num_microbatches": 4, "zero": 1, "pipeline_schedule": "interleaved(2)"}
    run = train(model, mesh={"data": 2, "stage": 2}, devices=4, **options)
    assert_equal_runs(run, expected)


# Precisions


@functools.cache
def bfloat16():
    return train_for(EIGHT, devices=2, precision="bf16", num_microbatches=4)


@pytest.mark.parametrize(
    ("mesh", "zero", "stash"),
    [
        slow(TWO_STAGES, 2, "residuals"),
        slow(FOUR_STAGES, 3, "input"),
        slow(FOUR_STAGES, 1, "residuals"),
    ],
)
def test_bfloat16_rounds_as_without_a_pipeline(mesh, zero, stash):
    """Each microbatch is computed in the same numbers of 8 bits; a sum that is taken in another
    order turns one of them up or down now and then (5e-5 measured, and 1.5e-3 against float32)."""
    run = train(EIGHT, mesh=mesh, zero=zero, stash=stash, precision="bf16", num_microbatches=4)
    assert_equal_runs(run, bfloat16(), tolerance=2e-4)
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(run.state["params"]))


FLOAT16 = Precision(
    compute_dtype=jnp.float16,
    reduce_dtype=jnp.float16,
    loss_scale=LossScale(initial=2.0**14, window=3),
)
HINTS = {5: (2, 0), 8: (3, 7), 9: (31, 4), 14: (0, 2)}
"""Step -> (row, layer) of which one probe's gradient overflows float16."""


def hinted_batch(index):
    hints = np.zeros((32, 8), np.float32)
    if index in HINTS:
        hints[HINTS[index]] = 6e4
    return {**text_batch(index), "hints": hints}


@pytest.mark.thorough
@pytest.mark.parametrize(("mesh", "zero"), [(FOUR_STAGES, 1), slow(TWO_STAGES, 3)])
def test_an_overflow_on_one_stage_skips_the_step_on_all(mesh, zero):
    """The gradient of one layer's probe overflows, in one row of the batch; all others are finite.

    The scale follows the same steps as without a pipeline.
    """
    options = {"precision": FLOAT16, "batch": hinted_batch, "num_microbatches": 4, "zero": zero}
    found = []
    for mesh_options in ({"devices": 2}, {"mesh": mesh}):
        compiled = compile_step(EIGHT, **options, **mesh_options)
        plan, state, seen = compiled.plan, init_state(compiled.plan, 0), []
        for index in range(20):
            before = jax.device_get((state["params"], state["opt_state"]))
            batch = jax.device_put(hinted_batch(index), plan.batch_sharding)
            state, metrics = compiled.step(state, batch)
            after = jax.device_get((state["params"], state["opt_state"]))
            same = jax.tree.leaves(jax.tree.map(np.array_equal, before, after))
            assert all(same) == bool(metrics["skipped"]), f"step {index}"
            seen.append({name: float(value) for name, value in metrics.items()})
            if seen[-1]["skipped"] and index in HINTS:
                assert sorted(plan.abstract_state["params"])[int(metrics["bad_leaf"])] == (
                    "blocks/probe"
                )
        found.append(seen)
    without, over_stages = found
    assert {index for index, s in enumerate(over_stages) if s["skipped"]} == HINTS.keys()
    for name in ("skipped", "loss_scale", "num_skipped", "bad_leaf"):
        assert [s[name] for s in over_stages] == [s[name] for s in without]
    scales = [s["loss_scale"] for s in over_stages]
    assert any(a < b for a, b in itertools.pairwise(scales)), "the scale must have risen"
    assert any(a > b for a, b in itertools.pairwise(scales)), "and fallen"
    losses = [np.array([s["loss"] for s in seen]) for seen in found]
    # float16 rounds by up to 5e-4, here and there.
    np.testing.assert_allclose(*losses, rtol=0, atol=5e-4)
    assert losses[1][-1] < losses[1][0] - 0.01


# Kinds of models


@pytest.mark.parametrize(
    ("kind", "zero"),
    [*(slow("function", zero) for zero in range(4)), *(slow("linen", zero) for zero in range(4))],
)
def test_other_kinds_of_models_equal_one_device(kind, zero):
    model, options = getattr(pipeline_runs, f"{kind}_model")()
    expected = one_device(model, **options)
    mesh = {"data": 4, "stage": 2} if zero % 2 else TWO_STAGES
    run = train(
        model, mesh=mesh, zero=zero, partition=(3, 1), stash="input", num_microbatches=4, **options
    )
    assert_equal_runs(run, expected)


@pytest.mark.slow
def test_sequence_sharding_equals_one_device():
    model = reference_model("llama", num_layers=4)
    expected = one_device(model)
    options = {"sequence_sharding": True, "num_microbatches": 4, "zero": 3}
    assert_equal_runs(train(model, mesh=TWO_STAGES, **options), expected)


# Evaluation


def weighted_batch(rows):
    batch = {name: x[:rows] for name, x in text_batch(0).items()}
    return {**batch, "weights": np.random.default_rng(0).random((rows, 16)).astype(np.float32)}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("schedule", "zero", "rows"),
    [
        ("interleaved(2)", 3, (32, 20)),
        slow("zb_v", 1, (14,)),
        slow("1f1b", 0, (32, 20, 14)),
        slow("gpipe", 2, (20, 14)),
    ],
)
def test_evaluation_equals_one_device(schedule, zero, rows):
    """32, 20 and 14 rows on two shards of the batch are 4, 2 and 1 microbatches.

    Dropout is off; a weight per token shows that every row counts once.
    """
    model = small(rate=0.2)
    single = plan_for(model, devices=1, num_microbatches=4)
    plan = plan_for(
        model,
        mesh=TWO_STAGES,
        zero=zero,
        persistence_threshold=pipeline_runs.THRESHOLD,
        pipeline_schedule=schedule,
        partition=(1, 1, 1, 1) if plan_chunks(schedule) == 2 else (3, 1),
        num_microbatches=4,
    )
    found = []
    for one in (single, plan):
        state, evaluate = init_state(one, 0), build_evaluation(one)
        results = []
        for number in rows:
            batch = jax.device_put(weighted_batch(number), one.batch_sharding)
            results.append([float(x) for x in jax.tree.leaves(evaluate(state, batch))])
        found.append(np.array(results))
    # Sums of up to 512 numbers in another order: 512 roundings of 6e-8 would be 3e-5, and they do
    # not all go one way.
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)


def plan_chunks(schedule):
    return 2 if schedule in ("interleaved(2)", "zb_v") else 1
