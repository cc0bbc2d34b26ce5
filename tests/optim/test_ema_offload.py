"""An average of the weights in slices on the host and in files: the bits of a run on the device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zerojax
from tests.support.ema_runs import DECAY, Followed, average_of, differing
from tests.support.offload_disk_runs import SHARES, Regression, close, offload
from tests.support.offload_disk_runs import plan_of as regression_plan
from tests.support.recipe import RECIPE
from tests.support.small_models import reference_model
from tests.support.trajectories import regression_batch, text_batch
from zerojax.config.mesh import HOST_KIND
from zerojax.optim import EMA, ema_of
from zerojax.plan.counts import AVERAGE, MASTERS, state_tiers
from zerojax.step.reshard import model_parts, with_weights

BATCHES = [regression_batch(index) for index in range(4)]
TEXTS = [text_batch(index) for index in range(3)]
averaged = functools.partial(zerojax.with_ema, decay=DECAY, warmup=False)
ADAMW = averaged(zerojax.adamw(1e-2, **RECIPE))
IN_LAYERS = {"params": "host", "opt_state": "host", "min_elements": 30, "slice_elements": 60}


def evaluated(plan: Any, state: Any, weights: str) -> float:
    batch = zerojax.shard_batch(plan, TEXTS[0] if plan.vocab_size else BATCHES[0])
    found = zerojax.build_evaluation(plan)(with_weights(plan, state, weights), batch)
    return float(found["loss"] / found["weight"])


@pytest.mark.thorough
@pytest.mark.parametrize("share", ["host", SHARES, "nvme"], ids=["host", "shares", "nvme"])
def test_in_slices_it_is_numpys_recurrence(tmp_path, share):
    config = offload(tmp_path, share)
    run = Followed(regression_plan(config, zero=3, optimizer=ADAMW))(*BATCHES)
    run.check()
    on_device = Followed(regression_plan(None, zero=3, optimizer=ADAMW))(*BATCHES)
    assert differing(run.expected, on_device.expected) == []
    assert run.plan.offload.arrays[-1] == EMA
    tiers = state_tiers(run.plan)
    assert tiers[AVERAGE] == tiers[MASTERS], "it lies where the masters do, and has their bytes"
    for weights in ("trained", "ema"):
        # The same products of the same numbers, but masters are cast by other programs.
        pair = evaluated(run.plan, run.state, weights), evaluated(*of(on_device), weights)
        assert pair[0] == pytest.approx(pair[1], rel=1e-6)
    close(run.state)


def of(run: Followed) -> tuple[Any, Any]:
    return run.plan, run.state


@pytest.mark.thorough
def test_without_masters_slices_have_it_in_float32(tmp_path):
    precision = zerojax.Precision(
        param_dtype=jnp.bfloat16,
        compute_dtype=jnp.float32,
        reduce_dtype=jnp.float32,
        moments_dtype=jnp.bfloat16,
    )
    plan = regression_plan(offload(tmp_path, SHARES), zero=1, optimizer=ADAMW, precision=precision)
    run = Followed(plan)(*BATCHES)
    run.check()
    close(run.state)


@pytest.mark.thorough
def test_a_skipped_step_does_not_move_what_is_in_files(tmp_path):
    run = Followed(regression_plan(offload(tmp_path), optimizer=ADAMW))(*BATCHES[:2])
    run({**BATCHES[0], "y": BATCHES[0]["y"] * np.float32(1e30)}, BATCHES[2]).check()
    assert int(run.state["skipped"]) == 1
    close(run.state)


def layered_plan(offload: Any, **options: Any) -> Any:
    optimizer = averaged(zerojax.adamw(1e-2, clip_norm=None))
    given = {} if offload is None else {"offload": offload}
    return zerojax.make_plan(
        reference_model("gpt2"),
        zerojax.make_mesh({"data": 2}, jax.devices()[:2]),
        example_batch=TEXTS[0],
        optimizer=optimizer,
        precision="fp32",
        persistence_threshold=0,
        **given,
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("zero", [1, 3])
def test_layers_that_come_one_by_one_move_it(in_backward, zero):
    """Also where each is updated in the backward pass."""
    plan = layered_plan({**IN_LAYERS, "update_in_backward": in_backward}, zero=zero)
    run = Followed(plan)(*TEXTS)
    run.check()
    assert plan.offload.streamed
    changed = with_weights(plan, run.state, EMA)["params"]
    on_host = {n for n, x in changed.items() if x.sharding.memory_kind == HOST_KIND}
    assert on_host == plan.offload.streamed
    plain = layered_plan(None, zero=zero)
    parts = {**model_parts(plan, run.state, weights="ema"), "rng": run.state["rng"]}
    moved = zerojax.step.reshard.from_model_parts(plain, parts)
    batch = zerojax.shard_batch(plain, TEXTS[0])
    found = zerojax.build_evaluation(plain)(moved, batch)
    expected = float(found["loss"] / found["weight"])
    assert evaluated(plan, run.state, "ema") == pytest.approx(expected, rel=1e-6)
    assert evaluated(plan, run.state, "trained") != pytest.approx(expected, rel=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("offload_config", [None, "host", "nvme"])
def test_weights_of_a_module_begin_it(tmp_path, offload_config):
    """A module brings its own values; `Followed` compares them with the average at step 0."""
    config = None if offload_config is None else offload(tmp_path, offload_config)
    given = {} if config is None else {"offload": config}
    model = Regression(nnx.Rngs(3))
    plan = zerojax.make_plan(
        model,
        zerojax.make_mesh({}, jax.devices()),
        example_batch=BATCHES[0],
        optimizer=ADAMW,
        precision="fp32",
        **given,
    )
    run = Followed(plan)
    kernel = np.asarray(model.up.kernel[...])
    np.testing.assert_array_equal(run.expected["up/kernel"], kernel)
    run(*BATCHES[:2]).check()
    close(run.state)


@pytest.mark.thorough
def test_a_live_run_moves_it_between_tiers_and_stages(tmp_path):
    run = Followed(regression_plan(offload(tmp_path / "a"), zero=1, optimizer=ADAMW))(*BATCHES)
    for number, (share, zero, data) in enumerate([("host", 3, 4), (SHARES, 2, 8), (None, 0, 1)]):
        config = None if share is None else offload(tmp_path / str(number), share)
        plan = regression_plan(config, zero=zero, data=data, optimizer=ADAMW)
        state = zerojax.reshard_state(run.plan, plan, run.state)
        assert differing(average_of(plan, state), run.expected) == []
        run = run.on(plan, state)(*BATCHES[:1])
        run.check()
    close(run.state)


def test_the_average_of_a_plan_lies_with_the_masters():
    """Without arrays: what a plan on the host says of it."""
    plan = regression_plan(offload("unused", "host"), zero=1, optimizer=ADAMW)
    table = plan.table()
    assert "slices of master, mu, nu, ema" in table
    average = ema_of(plan.abstract_state["opt_state"])
    masters = plan.abstract_state["masters"]
    assert {n: x for n, x in average.items() if n in masters} == masters
