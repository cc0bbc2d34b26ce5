"""What a plan says of arrays that a loss closes over, and of parameters in float64."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax

REFERENCE = np.ones((512, 1024), np.float32)  # 2 MiB
LINE = (lambda key: {"w": jnp.ones((4, 512))}, lambda params, x: x @ params["w"])


def plan_of(loss, **options):
    batch = {"x": np.ones((16, 4), np.float32)}
    return zerojax.make_plan(LINE, {"zero": 3}, example_batch=batch, loss=loss, **options)


def distance(model, batch):
    """Closes over an array twice, once inside of a call."""
    hidden = model(batch["x"])
    return jnp.mean(jax.jit(lambda x: x @ REFERENCE)(hidden) + hidden @ REFERENCE)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_constants_are_a_role_of_the_memory_table_with_a_remedy(num_microbatches):
    plan = plan_of(distance, num_microbatches=num_microbatches)
    assert plan.as_dict()["bytes_per_device"]["constants"] // 2**20 == 2
    table = plan.table()
    assert re.search(r"  constants +2\.0+ MiB", table)
    assert "make them parameters of the model and name them in freeze=" in table


def test_a_loss_without_large_constants_has_no_such_role():
    plan = plan_of(lambda model, batch: jnp.mean(model(batch["x"]) * REFERENCE[:1, :512]))
    assert "constants" not in plan.as_dict()["bytes_per_device"]
    assert "constants" not in plan.table()


def test_parameters_in_float64_are_said_to_become_float32():
    with jax.enable_x64(True):
        model = (lambda key: {"w": jnp.ones((4, 512), "float64")}, LINE[1])
        plan = zerojax.make_plan(
            model,
            {"zero": 1},
            example_batch={"x": np.ones((16, 4), np.float32)},
            loss=lambda model, batch: jnp.mean(model(batch["x"])),
        )
    assert plan.abstract_state["params"]["w"].dtype == jnp.float32
    assert any("float64 in the model, stored in float32" in x for x in plan.reasons)
