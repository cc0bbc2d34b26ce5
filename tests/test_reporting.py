"""What is said of the memory at the end of a run."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax import compiler
from zerojax.reporting import compare_peak


@pytest.fixture(scope="module")
def stepped():
    """A step that ran, its plan, and what the compiler said of it."""
    model = (
        lambda key, batch: {"w": jnp.ones((64, 64))},
        lambda params, batch: jnp.mean((batch["x"] @ params["w"]) ** 2),
    )
    batch = {"x": np.ones((8, 64), np.float32)}
    plan = zerojax.make_plan(
        model,
        zerojax.make_mesh({"data": 8}),
        example_batch=batch,
        loss=lambda apply, batch: apply(batch),
        optimizer=optax.sgd(0.1),
    )
    step = zerojax.build_step(plan)
    step(zerojax.init_state(plan), zerojax.shard_batch(plan, batch))
    compiled = step.lower(plan.abstract_state, plan.abstract_batch).compile()
    return step, plan, compiler.memory_of(compiled).peak


def test_measured_and_predicted_peak_stand_side_by_side(stepped):
    step, plan, predicted = stepped
    assert predicted >= 64 * 64 * 4 / 8, "at least this device's part of the master weights"
    line = compare_peak(step, plan, {"source": "device", "peak": 2 * predicted})
    assert line is not None
    assert "measured" in line
    assert line.endswith("predicted (+100.0%)")


def test_nothing_is_compared_where_devices_do_not_count_their_memory(stepped):
    step, plan, _ = stepped
    assert compare_peak(step, plan, {"source": "host RSS", "peak": 1 << 30}) is None
