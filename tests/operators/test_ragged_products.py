"""What a plan for NVIDIA GPUs says of products of rows with the matrix of their expert."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.forecasting.hlo import matmul_flops, read_program
from zerojax.hardware import compile_client
from zerojax.hardware.gpus import find_gpu
from zerojax.placement.device_mesh import make_abstract_mesh

ROWS, WIDTH, HIDDEN, LAYERS = 64, 16, 32, 3


def model(experts):
    """Layers whose rows are multiplied with the matrix of their expert, and a head."""

    def init(key):
        keys = jax.random.split(key, 3)
        return {
            "experts": jax.random.normal(keys[0], (LAYERS, experts, WIDTH, WIDTH)) / 4,
            "router": jax.random.normal(keys[1], (LAYERS, WIDTH, experts)) / 4,
            "head": jax.random.normal(keys[2], (WIDTH, HIDDEN)) / 4,
        }

    def layer(x, params):
        chosen = jnp.argmax(x @ params["router"], -1)
        order = jnp.argsort(chosen)
        y = jax.lax.ragged_dot(x[order], params["experts"], jnp.bincount(chosen, length=experts))
        return x + jnp.zeros_like(x).at[order].set(y), None

    def apply(params, x):
        stacks = {name: params[name] for name in ("experts", "router")}
        return jax.lax.scan(layer, x, stacks)[0] @ params["head"]

    return init, apply


def reasons(mesh, experts=8):
    plan = zerojax.make_plan(
        model(experts),
        mesh,
        example_batch={"x": np.zeros((ROWS, WIDTH), np.float32)},
        loss=lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
        zero=3,
    )
    return [reason for reason in plan.reasons if "ragged_dot" in reason]


def h100s(devices=8):
    return make_abstract_mesh({"data": devices}, devices, gpu=find_gpu("h100"))


def test_a_plan_for_h100_says_what_it_costs():
    (reason,) = reasons(h100s())
    assert "jax.lax.ragged_dot with 8 groups" in reason
    assert "8 times the arithmetic" in reason
    # Of WIDTH x WIDTH with experts, WIDTH x 8 with the router in each layer, and the head.
    one, router, head = WIDTH * WIDTH * LAYERS, WIDTH * 8 * LAYERS, WIDTH * HIDDEN
    assert f"{one / (one + router + head):.0%} of the FLOPs" in reason
    assert "same number of rows for each expert" in reason


def test_one_group_and_other_devices_are_not_told():
    assert reasons(h100s(), experts=1) == []
    assert reasons(make_abstract_mesh({"data": 8}, 8)) == []
    assert reasons(zerojax.make_mesh({})) == []


@pytest.mark.gpu_programs
@pytest.mark.parametrize("groups", [4, 8])
def test_the_program_for_h100_has_as_many_times_the_arithmetic(groups):
    rows, width, hidden = 1024, 256, 512
    mesh = Mesh(np.array(compile_client.gpu_devices(find_gpu("h100"), 1)), ("data",))

    def of(shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    def forward(x, w, sizes):
        return jax.lax.ragged_dot(x, w, sizes)

    def backward(x, w, sizes, given):
        return jax.vjp(lambda x, w: forward(x, w, sizes), x, w)[1](given)

    given = of((rows, width)), of((groups, width, hidden)), of((groups,), jnp.int32)
    one = 2 * rows * width * hidden
    for function, arrays, products in (
        (forward, given, 1),
        (backward, (*given, of((rows, hidden))), 2),
    ):
        compiled = compile_client.compile_for_gpus(jax.jit(function).lower(*arrays))
        flops = matmul_flops(read_program(compiled.text))
        assert flops == pytest.approx(groups * products * one, rel=0.01)
