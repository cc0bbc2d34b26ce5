"""Counters that steer an algorithm count updates or batches: with steps that are skipped, and a
resume in between, a run is one without the skipped batches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from tests.features.pruning import test_prune_masks
from tests.support.saved_states import restore, save
from tests.support.small_models import (
    apply_functions,
    init_functions,
    reference_model,
    regression_loss,
)
from tests.support.trajectories import regression_batch, text_batch
from zerojax.config import BitScheduleConfig, LossScale, MeshConfig, OptimizerConfig
from zerojax.optim import one_bit_adam
from zerojax.plan.inputs import PlanInputs
from zerojax.plan.make import plan_of
from zerojax.step.build import build_step
from zerojax.step.initialization import init_state

FITS, FACTOR, OVERFLOWS = 2.0**6, 2.0**18, 3
"""A loss scale that fits, what an overflow divides it by, and the number of batches that overflow
before it is reached."""
TOO_LARGE = FITS * FACTOR**OVERFLOWS
GOOD = 9
SPOILED, RESUMED = 5, 7
"""Batches of NaN, before these good ones are read, and the batch at which the run goes on."""
BITS = BitScheduleConfig(start_step=2, start_bits=8, period=1)
MODEL = (lambda key, batch: init_functions(key), apply_functions)


def inputs_of(start, **options):
    float16 = zerojax.Precision(
        compute_dtype=jnp.float16,
        reduce_dtype=jnp.float16,
        loss_scale=LossScale(
            initial=start, minimum=FITS, maximum=2.0**60, factor=FACTOR, hysteresis=1
        ),
    )
    options = {"model": MODEL, "loss": regression_loss, "batch": regression_batch, **options}
    example = options.pop("batch")(0)
    return PlanInputs(example_batch=example, precision=float16, **options)


def final(plan, batches, folder=None):
    """The counters, and what a run leaves besides them. It resumes from `folder`, if given."""
    state, step, seen = init_state(plan, 0), build_step(plan), []
    for number, batch in enumerate(batches):
        if folder is not None and number == RESUMED:
            save(folder, plan, state, number)
            state, step = restore(folder, plan)[0], build_step(plan)
        state, metrics = step(state, zerojax.shard_batch(plan, batch, check_values=False))
        if not int(metrics["skipped"]):
            seen.append(float(metrics["loss"]))
    left = jax.device_get({name: state[name] for name in ("params", "opt_state", "extras")})
    return (int(state["step"]), int(state["skipped"])), seen, left


UPDATES = {
    "warm-up and decay": {
        "optimizer": OptimizerConfig(warmup_steps=4, schedule="wsd", decay_fraction=0.4),
        "steps": GOOD,
    },
    "optax's schedules": {
        "optimizer": optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 3, GOOD))
    },
    "a beta as a schedule": {"optimizer": zerojax.lion(1e-3, b1=lambda n: 0.9 - 0.1 * (n > 3))},
    "average of the weights": {"optimizer": zerojax.with_ema(zerojax.adamw(1e-2), 0.99)},
    "1-bit Adam's freeze_step": {
        "optimizer": one_bit_adam(1e-2, freeze_step=4, b2=0.9),
        "mesh": {"zero": 1},
    },
    "1-bit Adam, frozen after the resume": {
        "optimizer": one_bit_adam(1e-2, freeze_step=6, b2=0.9),
        "mesh": {"zero": 0},
    },
    "optax.MultiSteps": {
        "optimizer": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation()
    },
    "microbatches": {
        "optimizer": zerojax.adamw(optax.linear_schedule(0, 1e-2, 5)),
        "num_microbatches": 2,
    },
    "plateaus": {
        "optimizer": optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=2))
    },
    "schedule-free": {"optimizer": optax.contrib.schedule_free_adamw(1e-2, warmup_steps=4)},
    "rounding of 8-bit moments": {"optimizer": zerojax.adam8bit(optax.linear_schedule(0, 1e-2, 5))},
    "state on the host": {
        "optimizer": zerojax.adamw(optax.linear_schedule(0, 1e-2, 5)),
        "mesh": {"zero": 1, "offload": {"opt_state": "host"}},
    },
    "deterministic": {
        "optimizer": zerojax.adamw(optax.linear_schedule(0, 1e-2, 5)),
        "mesh": {"deterministic": "mesh", "virtual_shards": 8},
    },
    "numbers as inputs": {
        "optimizer": zerojax.adamw(optax.linear_schedule(0, 1e-2, 5)),
        "numbers_are_inputs": True,
    },
    "pruning": {
        "model": test_prune_masks.Stacked(nnx.Rngs(0)),
        "loss": None,
        "batch": test_prune_masks.batch_of,
        "optimizer": optax.adamw(1e-2, eps=1e-4),
        "pruning": test_prune_masks.PRUNING,
    },
    "bit widths": {
        "model": reference_model("llama", matmul_dtype="fake_int4", mlp_dim=64, bit_schedule=BITS),
        "loss": None,
        "batch": text_batch,
        "optimizer": optax.sgd(1e-2),
    },
}


QUICK = "1-bit Adam's freeze_step"
CASES = [n if n == QUICK else pytest.param(n, marks=pytest.mark.thorough) for n in UPDATES]


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_a_skipped_batch_is_no_update(name, tmp_path):
    """The first batches overflow in float16; a later one holds a NaN."""
    options = {"batch": regression_batch, **UPDATES[name]}
    mesh, batch_of = MeshConfig(**options.pop("mesh", {})), options["batch"]
    good = [batch_of(number) for number in range(GOOD)]
    spoiled = []
    if batch_of is not text_batch:  # integers have no NaN
        spoiled = [jax.tree.map(lambda x: np.full_like(x, np.nan), good[0])]
    batches = [*good[:1] * OVERFLOWS, *good[:SPOILED], *spoiled, *good[SPOILED:]]
    plans = [plan_of(inputs_of(start, **options), mesh) for start in (TOO_LARGE, FITS)]
    counters, losses, found = final(plans[0], batches, tmp_path)
    expected_counters, expected_losses, expected = final(plans[1], good)
    assert expected_counters == (GOOD, 0)
    assert counters == (len(batches), OVERFLOWS + len(spoiled))
    assert losses == expected_losses
    jax.tree.map(np.testing.assert_array_equal, found, expected)
