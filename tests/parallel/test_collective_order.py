"""Collectives of CPU programs do not start before a loop in front of them has ended.

XLA mixes up collectives that run at the same time. Whether it starts them at the same time depends
on the buffers that it chooses, so these tests read the compiled programs: each collective after a
loop has to depend on a result of the loop.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.support.collective_order import unordered
from tests.support.marks import gathers_twice
from tests.support.small_models import reference_model
from tests.support.trajectories import plan_for
from zerojax.placement.device_mesh import make_mesh
from zerojax.step.build import build_evaluation, build_step
from zerojax.transport.collective_order import in_program_order

LAYERS, WIDTH = 3, 32


def gather(x):
    return lax.all_gather(x, "data", tiled=True)


def layers(x, weights):
    return lax.scan(lambda x, weight: (jnp.tanh(x @ gather(weight)), None), x, weights)[0]


def two_loops(x, weights, head):
    return layers(x, weights).sum() + layers(2 * x, weights).max()


def two_loops_with_a_zero(x, weights, head):
    """The compiler knows what the 0 is, but not that the loop waits."""

    def layer(carry, weight):
        x, total = carry
        x = jnp.tanh(x @ gather(weight))
        return (x, total + x.sum()), None

    first = lax.scan(layer, (x, 0.0), weights)[0][1]
    return first + lax.scan(layer, (2 * x, 0.0), weights)[0][1]


def after_a_loop_with_a_counter(x, weights, head):
    """The compiler knows the last value of the counter without the loop."""

    def layer(carry):
        number, x = carry
        return number + 1, jnp.tanh(x @ gather(weights[number]))

    number, first = lax.while_loop(lambda carry: carry[0] < LAYERS, layer, (0, x))
    return first.sum() * number + layers(2 * x, weights).max()


def in_a_loop(x, weights, head):
    def step(total, row):
        return total + two_loops(row, weights, head), None

    return lax.scan(step, 0.0, jnp.stack([x, 2 * x]))[0]


def in_a_while_loop(x, weights, head):
    def step(carry):
        number, total = carry
        return number + 1, total + two_loops(total * x, weights, head)

    return lax.while_loop(lambda carry: carry[0] < 2, step, (0, jnp.float32(1)))[1]


def in_a_branch(x, weights, head):
    run = lambda: two_loops(x, weights, head)  # noqa: E731
    return lax.cond(lax.psum(x[0, 0], "data") < 1e9, run, lambda: jnp.float32(0))


def in_calls(x, weights, head):
    run = jax.jit(layers)
    return run(x, weights).sum() + run(2 * x, weights).max()


def gradient_with_recomputation(x, weights, head):
    def loss(weights, head):
        run = jax.checkpoint(lambda x, head: jnp.tanh(x @ gather(head)).sum())
        return run(layers(x, weights), head)

    grads = jax.grad(loss, argnums=(0, 1))(weights, head)
    # The loss of each device contributes to the gradients.
    return lax.psum(sum(grad.sum() for grad in grads), "data") / lax.axis_size("data")


PROGRAMS = [
    two_loops,
    two_loops_with_a_zero,
    after_a_loop_with_a_counter,
    in_a_loop,
    in_a_while_loop,
    in_a_branch,
    in_calls,
    gradient_with_recomputation,
]


def compiled(function, mesh, order, arguments):
    local = in_program_order(function, mesh) if order else function
    specs = (P(), P(None, "data"), P("data"))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    return jax.jit(mapped).lower(*arguments).compile()


@pytest.mark.parametrize("function", PROGRAMS)
def test_a_collective_waits_for_the_loop_before_it(function):
    random = np.random.default_rng(0)
    shapes = (4, WIDTH), (LAYERS, WIDTH, WIDTH), (WIDTH, WIDTH)
    arguments = [random.normal(size=shape).astype(np.float32) / 4 for shape in shapes]
    mesh = make_mesh({}, devices=jax.devices())
    if function is not gradient_with_recomputation or jax.__version_info__ >= (0, 11):
        assert unordered(compiled(function, mesh, False, arguments).as_text())
    program = compiled(function, mesh, True, arguments)
    assert not unordered(program.as_text())
    alone = make_mesh({}, devices=jax.devices()[:1])
    expected = compiled(function, alone, True, arguments)(*arguments)
    # The sums of at most 32 x 32 numbers have another order.
    np.testing.assert_allclose(program(*arguments), expected, rtol=1e-5)


STEPS = {
    "stage 3": {"zero": 3, "persistence_threshold": 0},
    "stage 2, two microbatches": {"zero": 2, "num_microbatches": 2},
    "tensor parallel": {"zero": 3, "persistence_threshold": 0, "mesh": {"data": 4, "model": 2}},
    "context": {"zero": 3, "persistence_threshold": 0, "mesh": {"data": 4, "context": 2}},
    "lamb": {"zero": 3, "persistence_threshold": 0, "optimizer": optax.lamb(1e-3)},
    "pipeline": {"zero": 2, "num_microbatches": 4, "mesh": {"data": 4, "stage": 2}},
}


@pytest.mark.thorough
@pytest.mark.parametrize("options", STEPS.values(), ids=STEPS)
def test_collectives_of_a_step_wait_for_loops(options):
    plan = plan_for(reference_model("gpt2"), **options)
    step = build_step(plan).lower(plan.abstract_state, plan.abstract_batch)
    assert not unordered(step.compile().as_text())


@gathers_twice
@pytest.mark.thorough
def test_a_step_is_also_in_order_when_jax_looks_for_nans():
    plan = plan_for(reference_model("gpt2"), **STEPS["stage 3"])
    with jax.debug_nans(True):
        step = build_step(plan).lower(plan.abstract_state, plan.abstract_batch)
    assert not unordered(step.compile().as_text())


@pytest.mark.thorough
def test_collectives_of_an_evaluation_wait_for_loops():
    plan = plan_for(reference_model("gpt2"), **STEPS["stage 3"])
    evaluation = build_evaluation(plan)
    lowered = evaluation.lower(plan.abstract_state, plan.abstract_batch)
    assert not unordered(lowered.compile().as_text())
