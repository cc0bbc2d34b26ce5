"""What each layer is given waits on the host: the same numbers, and the transfers in the program.

That device memory does not grow with depth is in tests/gpu_programs/test_offload_gpu_programs.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.support import small_models
from tests.support.small_models import reference_model
from tests.support.trajectories import TOLERANCE, plan_for, regression_batch, train_for
from zerojax.config.mesh import OffloadConfig
from zerojax.hardware import compile_client
from zerojax.operators.marks import inner_programs
from zerojax.placement.device_mesh import make_abstract_mesh
from zerojax.plan.make import make_plan
from zerojax.step.build import build_step
from zerojax.tracing.activation_offload import find_layer_scans, keep_inputs_on_host
from zerojax.tracing.jaxpr import is_checkpoint

HOST = OffloadConfig(activations="host")
STEPS = 4


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "zero", "microbatches", "model"),
    [("gpt2", 3, 4, 2), slow("llama", 1, 1, 1), slow("gpt2", 0, 1, 2), slow("llama", 2, 4, 1)],
)
def test_bits_are_those_of_layers_computed_again(name, zero, microbatches, model):
    """With remat "full" both runs compute the same things in the same order."""
    options = {
        "zero": zero,
        "num_microbatches": microbatches,
        "mesh": {"model": model},
        "persistence_threshold": 200,
        "steps": STEPS,
    }
    here = train_for(reference_model(name, remat="full"), **options)
    away = train_for(reference_model(name, remat="full"), offload=HOST, **options)
    np.testing.assert_array_equal(away.losses, here.losses)
    np.testing.assert_array_equal(away.norms, here.norms)
    assert len(set(here.losses)) == STEPS  # something changes


USERS = {
    "nnx": (lambda: small_models.UserText, {}),
    "linen": (lambda: small_models.LinenText(), {"loss": small_models.linen_loss}),
    "stacked": (
        lambda: small_models.Layers,
        {"loss": small_models.regression_loss, "batch": regression_batch},
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "zero"), [slow("nnx", 2), slow("linen", 3), ("stacked", 1)])
def test_models_of_users(kind, zero):
    """They keep everything on the device, so that sums are fused otherwise: float32's noise."""
    make, options = USERS[kind]
    options = {"zero": zero, "steps": STEPS, "persistence_threshold": 200, **options}
    here = train_for(make(), **options)
    away = train_for(make(), offload=HOST, **options)
    np.testing.assert_allclose(away.losses, here.losses, rtol=0, atol=TOLERANCE)
    assert len(set(here.losses)) == STEPS


WIDTH, DEPTH = 16, 6


def layers_with(checkpoint):
    """A loss of stacked layers, each of two products in a checkpoint or not."""

    def layer(x, w):
        return x + jnp.tanh(x @ w["in"]) @ w["out"], None

    body = {
        "none": layer,
        "full": jax.checkpoint(layer),
        "dots": jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable),
        "inside a call": lambda x, w: jax.jit(jax.checkpoint(layer))(x, w),
    }[checkpoint]

    def loss(params, x):
        return jnp.sum(lax.scan(body, x, params)[0] ** 2)

    return loss


def abstract_layers():
    weights = jax.ShapeDtypeStruct((DEPTH, WIDTH, WIDTH), jnp.float32)
    return {"in": weights, "out": weights}, jax.ShapeDtypeStruct((4, WIDTH), jnp.float32)


def count(program, wanted):
    """Equations at any depth, each loop's once for each iteration."""
    total = 0
    for equation in program.eqns:
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += wanted(equation)
        for inner in inner_programs(equation.params):
            total += times * count(inner, wanted)
    return total


def is_product(equation):
    return equation.primitive.name == "dot_general"


@pytest.mark.parametrize("checkpoint", ["none", "full", "dots", "inside a call"])
def test_every_layer_is_computed_twice_whatever_the_models_checkpoint(checkpoint):
    """Two products forward, two again (less the last, which nothing needs), four backward."""
    gradient = jax.grad(keep_inputs_on_host(layers_with(checkpoint)))
    program = jax.make_jaxpr(gradient)(*abstract_layers()).jaxpr
    assert count(program, is_product) == DEPTH * (2 + 1 + 4)
    nested = jax.make_jaxpr(keep_inputs_on_host(layers_with(checkpoint)))(*abstract_layers())
    assert count(nested.jaxpr, is_checkpoint) == DEPTH


def test_a_checkpoint_in_a_loop_within_a_layer_stays():
    def inner(x, w):
        return jnp.tanh(x @ w), None

    def layer(x, w):
        again = jnp.stack([w, w])
        return x + lax.scan(jax.checkpoint(inner), x, again)[0], None

    def loss(params, x):
        return jnp.sum(lax.scan(layer, x, params["in"])[0])

    program = jax.make_jaxpr(keep_inputs_on_host(loss))(*abstract_layers()).jaxpr
    assert count(program, is_checkpoint) == DEPTH * (1 + 2)


def crossings(program):
    """{"Host", "Device"} -> transfers to it, each loop's once for each iteration."""

    def to(space):
        return count(
            program,
            lambda e: (
                e.primitive.name == "device_put" and space in str(e.outvars[0].aval.memory_space)
            ),
        )

    return {space: to(space) for space in ("Host", "Device")}


def test_one_array_of_each_layer_leaves_and_comes_back():
    gradient = jax.grad(keep_inputs_on_host(layers_with("full")))
    program = jax.make_jaxpr(gradient)(*abstract_layers()).jaxpr
    assert crossings(program) == {"Host": DEPTH, "Device": DEPTH}
    plain = jax.make_jaxpr(jax.grad(layers_with("full")))(*abstract_layers()).jaxpr
    assert crossings(plain) == {"Host": 0, "Device": 0}


@pytest.mark.thorough
@pytest.mark.parametrize(("zero", "microbatches", "model"), [(1, 1, 1), (3, 4, 2)])
def test_a_step_lowered_for_gpus_holds_the_transfers(zero, microbatches, model):
    """Counted in StableHLO; a CPU's program has none, since all its memory is one.

    A layer's input leaves in the forward loop; the last one comes back before the backward loop,
    and each other one an iteration ahead.
    """
    mesh = make_abstract_mesh({"model": model}, 8)
    tokens = jax.ShapeDtypeStruct((32, 16), np.int32)
    placed = {}
    for offload in (HOST, OffloadConfig()):
        plan = make_plan(
            reference_model("gpt2"),
            mesh,
            example_batch={"tokens": tokens, "targets": tokens},
            zero=zero,
            num_microbatches=microbatches,
            offload=offload,
        )
        traced = build_step(plan).trace(plan.abstract_state, plan.abstract_batch)
        text = compile_client.lower_for_gpus(traced).as_text()
        placed[offload] = text.count("annotate_device_placement")
    assert placed == {HOST: 3, OffloadConfig(): 0}


@pytest.mark.thorough
def test_the_plan_says_what_waits():
    plan = plan_for(reference_model("gpt2"), offload=HOST)
    (line,) = [line for line in plan.reasons if "offloaded to the host" in line]
    # 32 rows over 8 devices, 16 positions, width 32; 2 layers of 8 KiB.
    assert "float32[4, 16, 32] of each of 2 layers (16.0 KiB" in line
    assert "recomputes" in line
    plain = plan_for(reference_model("gpt2"))
    assert not any("offloaded to the host" in line for line in plain.reasons)


@pytest.mark.parametrize("around", ["checkpoint", "cond"])
def test_a_loop_inside_of_something_is_refused(around):
    plain = layers_with("none")
    wrapped = {
        "checkpoint": jax.checkpoint(plain),
        "cond": lambda params, x: lax.cond(x[0, 0] > 0, plain, lambda p, x: x[0, 0], params, x),
    }[around]
    closed = jax.make_jaxpr(wrapped)(*abstract_layers())
    with pytest.raises(
        ValueError, match=r"loop of 6 layers is inside of a `(checkpoint|remat2?|cond)`"
    ):
        find_layer_scans(closed, [True, True, False])


def test_a_loop_over_tokens_is_no_loop_over_layers():
    """As in a loss over chunks: it takes the weights whole, and slices activations."""

    def loss(params, x):
        x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["in"])
        whole = params["out"][0]
        return jnp.sum(lax.map(lambda row: jnp.sum(row @ whole), x))

    closed = jax.make_jaxpr(loss)(*abstract_layers())
    (scan,) = find_layer_scans(closed, [True, True, False])
    assert scan.num_layers == DEPTH
    assert scan.bytes == DEPTH * 4 * WIDTH * 4
