"""Sums over the whole batch, compiled for 8 H100: what they send, and over which devices.

Needs the compile-only client (extra `plan`), no GPU: pytest -m gpu_programs.
"""

import collections
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from tests.support.gpu_plans import compile_step, gpu_mesh
from zerojax.forecasting import hlo
from zerojax.plan.batch_sums import bytes_sent
from zerojax.tracing.batch_calls import find_batch_sums

pytestmark = pytest.mark.gpu_programs
LAYERS, WIDTH, HIDDEN, ROWS = 4, 1024, 2048, 256


def init(key):
    first, second = jax.random.split(key)
    return {
        "up": jax.random.normal(first, (LAYERS, WIDTH, HIDDEN)) / 32,
        "down": jax.random.normal(second, (LAYERS, HIDDEN, WIDTH)) / 32,
    }


def build_apply(mean):
    """Layers whose hidden activations are normalised: statistics are split as these are."""

    def layer(x, params):
        y = (x @ params["up"]).astype(jnp.float32)
        center = mean(jnp.mean(y, 0, keepdims=True))
        square = mean(jnp.mean(y * y, 0, keepdims=True))
        y = jnp.tanh((y - center) * jax.lax.rsqrt(square - center * center + 0.1))
        return x + y.astype(x.dtype) @ params["down"], None

    return lambda params, x: jax.lax.scan(layer, x, params)[0]


def loss(model, batch):
    return jnp.mean((model(batch["x"]).astype(jnp.float32) - batch["x"]) ** 2)


def sent(mean, *, model, zero):
    """(the plan, {(kind, devices that send, apart by): bytes of one device in a step})."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = zerojax.make_plan(
            (init, build_apply(mean)),
            gpu_mesh({"model": model}),
            example_batch={"x": jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32)},
            loss=loss,
            zero=zero,
            precision="bf16",
            rules=[("up", (None, None, "model")), ("down", (None, "model", None))],
        )
    program = hlo.read_program(compile_step(plan).text)
    found = collections.Counter()
    for one in hlo.find_collectives(program, 8):
        found[one.kind, len(one.group), one.group[1] - one.group[0]] += one.wire_bytes * one.times
    return plan, found


@pytest.mark.parametrize(("model", "zero"), [(1, 3), (2, 3)])
def test_they_add_their_own_bytes_over_the_data_axis_alone(model, zero):
    plan, found = sent(zerojax.batch_mean, model=model, zero=zero)
    _, without = sent(lambda x: x, model=model, zero=zero)
    sums = find_batch_sums(plan.traced.forward.jaxpr, trained=[True] * 2, num_extras=0)
    more = {key: size - without[key] for key, size in found.items() if size != without[key]}
    data = 8 // model
    assert list(more) == [("all-reduce", data, model)]
    # With tensor parallelism a device has the statistics of its own part of the features.
    assert more["all-reduce", data, model] == bytes_sent(sums, plan.mesh, 1) / model
    assert any("zerojax.batch_mean" in reason for reason in plan.reasons)
