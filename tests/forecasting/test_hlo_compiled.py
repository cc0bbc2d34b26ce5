"""What compilers really print, for programs whose collectives, FLOPs and bytes are known.

Compiled for 8 virtual CPU devices, and for 8 H100 where the compile-only client is installed.
"""

import collections
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.config import ModelConfig
from zerojax.forecasting.hlo import (
    find_collectives,
    find_overlap,
    hbm_bytes,
    matmul_flops,
    opaque_calls,
    read_program,
)
from zerojax.hardware import compile_client, gpus
from zerojax.placement.device_mesh import AXES
from zerojax.plan.make import make_plan
from zerojax.step.build import build_step
from zerojax.zoo import build_model

ON_GPU = pytest.mark.gpu_programs
TARGETS = [
    "cpu",
    pytest.param("gpu", marks=ON_GPU),
    # With the compiler's own choice of kernels: Triton's products and fusions.
    pytest.param("gpu, default options", marks=ON_GPU),
]


def mesh_of(target, shape=(8,), axes=("data",)):
    if target == "cpu":
        devices = jax.devices()
    else:
        devices = compile_client.gpu_devices(gpus.find_gpu("h100"), 8)
    return Mesh(np.array(devices).reshape(shape), axes)


def compiled(target, jitted, *args, **options):
    if target == "gpu":
        options = {**compile_client.SKETCH_OPTIONS, **options}
    lowered = jitted.lower(*args)
    return read_program(lowered.compile(compiler_options=options).as_text())


def abstract(mesh, shape, spec=None, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec or P()))


LENGTH = 5


def talk(x, stack):
    """Every collective once, and two in a loop; x is [64, 128], a layer of the stack [64, 64]."""
    x = lax.psum(x, ("data", "model")) * 0.5
    x = lax.all_gather(x, "data", tiled=True)  # [256, 128]
    x = lax.psum_scatter(x, "model", scatter_dimension=1, tiled=True)  # [256, 64]
    x = lax.all_to_all(x, "data", split_axis=0, concat_axis=1, tiled=True)  # [64, 256]
    x = lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)])

    def layer(x, shard):
        full = lax.all_gather(shard, "data", tiled=True)
        x = lax.psum(jnp.tanh(x @ full), "model")
        return x, jnp.sum(x)

    return lax.scan(layer, x[:, :64], stack)


EVERYONE, DATA, MODEL = tuple(range(8)), (0, 2, 4, 6), (0, 1)
KB = 1024
# kind, depth of loops: times, payload of one execution, sent by one device, first group.
TALK = {
    ("all-reduce", 0): (1, 32 * KB, 56 * KB, EVERYONE),
    ("all-gather", 0): (1, 128 * KB, 96 * KB, DATA),
    ("reduce-scatter", 0): (1, 128 * KB, 64 * KB, MODEL),
    ("all-to-all", 0): (1, 64 * KB, 48 * KB, DATA),
    ("collective-permute", 0): (1, 64 * KB, 64 * KB, DATA),
    ("all-gather", 1): (LENGTH, 16 * KB, 12 * KB, DATA),
    ("all-reduce", 1): (LENGTH, 16 * KB, 16 * KB, MODEL),
}


def compile_talk(target, **options):
    mesh = mesh_of(target, (4, 2), ("data", "model"))
    jitted = jax.jit(
        jax.shard_map(
            talk, mesh=mesh, in_specs=(P(), P(None, "data")), out_specs=P(), check_vma=False
        )
    )
    stack = abstract(mesh, (LENGTH, 64, 64), P(None, "data"))
    return compiled(target, jitted, abstract(mesh, (64, 128)), stack, **options)


@pytest.mark.parametrize("target", TARGETS)
def test_collectives_are_those_that_were_written(target):
    program = compile_talk(target)
    found = find_collectives(program, 8)
    assert {
        (c.kind, c.loop_depth): (c.times, c.payload_bytes, c.wire_bytes, c.group) for c in found
    } == TALK
    assert len(found) == len(TALK)
    assert {c.dtype for c in found} == {"f32"}
    assert all(c.op_name.startswith("jit(talk)/") for c in found)
    assert program.unknown_loops == ()
    # [64, 64] @ [64, 64], five times.
    assert matmul_flops(program) == LENGTH * 2 * 64**3
    assert opaque_calls(program) == {}


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="the compiler of JAX before 0.11 has no such option"
)
@pytest.mark.parametrize("target", TARGETS[1:])
def test_gathers_that_the_compiler_pipelines(target):
    """The first gather moves before the loop, the others one iteration ahead."""
    program = compile_talk(target, xla_gpu_pipeline_all_gather="COLLECTIVE_PIPELINING_MODE_ON")
    found = find_collectives(program, 8)
    sent = collections.Counter()
    for one in found:
        sent[one.kind] += one.times * one.wire_bytes
    expected = collections.Counter()
    for (kind, _), (times, _, wire, _) in TALK.items():
        expected[kind] += times * wire
    assert sent == expected
    overlap = find_overlap(program, found)
    pipelined = [one for one in found if overlap[one.name].pipelined]
    assert [(one.kind, one.times, one.loop_depth) for one in pipelined] == [
        ("all-gather", LENGTH - 1, 1)
    ]
    assert all(overlap[one.name].done for one in found if one.is_async)


M, K, N = 512, 256, 1024
MB = 2**20
# What a compiler adds to the bytes that were written down: scalars, padding of small buffers.
NOISE = 0.01


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("function", "shapes", "expected", "flops"),
    [
        (jnp.copy, [(M, N)], 2 * M * N, 0),
        (lambda a, b, c: jnp.tanh(a * b) + c, [(M, N)] * 3, 4 * M * N, 0),
        (lambda a, b: a @ b, [(M, K), (K, N)], M * K + K * N + M * N, 2 * M * N * K),
        (lambda a: jnp.sum(a, axis=1), [(M, N)], M * N + M, 0),
    ],
    ids=["copy", "elementwise", "matmul", "reduce"],
)
def test_bytes_of_simple_programs(target, function, shapes, expected, flops):
    mesh = mesh_of(target)
    program = compiled(target, jax.jit(function), *(abstract(mesh, shape) for shape in shapes))
    assert hbm_bytes(program) == pytest.approx(4 * expected, rel=NOISE)
    assert matmul_flops(program) == flops


# The CPU compiler makes a kernel of each result: 40 bytes.
@pytest.mark.parametrize("target", TARGETS[1:])
def test_adam_reads_four_arrays_and_writes_three(target):
    """Weight, two moments and gradient; float32: 28 bytes per parameter."""
    mesh = mesh_of(target)
    adam = optax.adamw(1e-3)
    weights = {"w": abstract(mesh, (M, N))}
    state = jax.tree.map(
        lambda x: abstract(mesh, x.shape, dtype=x.dtype), jax.eval_shape(adam.init, weights)
    )

    def update(weights, state, gradients):
        updates, state = adam.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state

    program = compiled(target, jax.jit(update), weights, state, weights)
    assert hbm_bytes(program) == pytest.approx(28 * M * N, rel=NOISE)


@pytest.mark.parametrize("target", TARGETS)
def test_a_loop_over_layers_reads_each_layer_not_the_stack(target):
    """16 layers of 1 MiB: read by the product, at most cut out of the stack first and copied
    into another layout, each a read and a write. The whole stack in each would be 16 times as much.
    """
    layers, width = 16, 512
    mesh = mesh_of(target)

    def apply(x, stack):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), x), x, stack)

    args = abstract(mesh, (8, width)), abstract(mesh, (layers, width, width))
    program = compiled(target, jax.jit(apply), *args)
    assert matmul_flops(program) == layers * 2 * 8 * width**2
    assert layers * MB <= hbm_bytes(program) <= 5 * layers * MB + 16 * layers * 8 * width * 4


MODEL_SIZES = {"num_layers": 3, "num_heads": 4, "embed_dim": 256, "max_seq_len": 64}
VOCAB = 512
ROWS = 8


@functools.cache
def compile_step(target, zero):
    """One row per device, all layers rematerialized; attention is the same on every target."""
    mesh = mesh_of(target, tuple(8 if axis == "data" else 1 for axis in AXES), AXES)
    config = ModelConfig(name="gpt2", remat="full", attention="xla", **MODEL_SIZES)
    model = build_model(config, VOCAB)
    tokens = jax.ShapeDtypeStruct((ROWS, MODEL_SIZES["max_seq_len"]), jnp.int32)
    plan = make_plan(
        model,
        mesh,
        example_batch={"tokens": tokens, "targets": tokens},
        zero=zero,
        persistence_threshold=100,
    )
    program = compiled(target, build_step(plan), plan.abstract_state, plan.abstract_batch)
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(plan.abstract_state["params"]))
    return program, count


def step_flops():
    """Of the layers' weights, attention and the head, one row per device.

    A layer runs four times: forward, forward again, and two products for each one in the backward
    pass; the second forward leaves out the last product, whose result nothing needs. The head runs
    three times.
    """
    width, length = MODEL_SIZES["embed_dim"], MODEL_SIZES["max_seq_len"]
    attention = 2 * 2 * length * length * width
    layer = 2 * 12 * width**2 * length + attention
    last = 2 * 4 * width**2 * length
    head = 2 * width * VOCAB * length
    return MODEL_SIZES["num_layers"] * (4 * layer - last) + 3 * head


# Bytes, dtypes and loops of stages 0 to 2 are claims of `test_gpu_programs.py` too.
STAGES = [pytest.param(zero, 2, marks=pytest.mark.slow) for zero in range(3)] + [(3, 3)]


@pytest.mark.parametrize("target", TARGETS[1:2])
@pytest.mark.parametrize(("zero", "theory"), STAGES)
def test_a_step_sends_what_its_stage_promises(zero, theory, target):
    """Units of 2 bytes x parameters x 7/8; within 1 % for small leaves, losses and norms.

    The loss makes its gradients while the head's weights are there: these are not gathered again.
    """
    program, count = compile_step(target, zero)
    if zero == 3:
        theory -= VOCAB * MODEL_SIZES["embed_dim"] / count
    found = find_collectives(program, 8)
    sent = sum(one.wire_bytes * one.times for one in found)
    assert sent / (2 * count * 7 / 8) == pytest.approx(theory, rel=0.01)
    assert {one.dtype for one in found if one.payload_bytes > 1000} == {"bf16"}
    in_loops = {(one.kind, one.times) for one in found if one.loop_depth}
    # At stage 3 the plan asks for the next layer's gather ahead: one iteration leaves the loop.
    layers = MODEL_SIZES["num_layers"] - (zero == 3)
    gathers, scatters = ("all-gather", layers), ("reduce-scatter", layers)
    assert in_loops == {0: set(), 1: set(), 2: {scatters}, 3: {gathers, scatters}}[zero]
    overlap = find_overlap(program, found)
    assert all(overlap[one.name].done for one in found if one.is_async)
    ahead = [one for one in found if overlap[one.name].pipelined]
    assert {one.kind for one in ahead} == ({"all-gather"} if zero == 3 else set())
    if ahead:
        # The products of the forward layer hide the next layer's gather: all but the first.
        forward = next(one for one in ahead if "rematted" not in one.op_name)
        assert overlap[forward.name].matmuls >= 5


@pytest.mark.thorough
@pytest.mark.parametrize("target", TARGETS)
def test_flops_of_a_step_are_the_same_for_every_compiler(target):
    program, _ = compile_step(target, 3)
    assert matmul_flops(program) == step_flops()
    assert opaque_calls(program) == {}
