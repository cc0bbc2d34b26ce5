"""The kernels of grouped products, interpreted on a CPU, against every matrix on every row.

Tolerances: both sum in float32, in other orders, and round a result once: 2e-6 of the largest value
in float32, one unit in the last place of bfloat16, 2^-8, of the largest.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from pallas_kernels import grouped as kernels
from pallas_kernels import grouped_kernel
from pallas_kernels.choice import KernelUnavailable, missing
from pallas_kernels.grouped import (
    Segments,
    grouped_product,
    reference_product,
    row_tile,
    segments_of,
    why_not,
)
from tests.kernels.test_kernels_lowering import lowered_for_cuda
from tests.parallel.test_expert_axis import mixture
from tests.support.trajectories import text_batch
from zerojax.hardware.gpus import find_gpu
from zerojax.operators import grouped_products, routed_experts
from zerojax.operators.attention_choice import Device
from zerojax.placement.device_mesh import make_abstract_mesh
from zerojax.plan.expert_costs import expert_costs
from zerojax.plan.make import make_plan
from zerojax.tracing.flops import count_flops
from zerojax.zoo.moe import _GatedMlps

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
H100 = Device("NVIDIA H100 80GB HBM3", "gpu", split=1, where="step")
CLOSE = {"float32": 2e-6, "bfloat16": 2**-8}
# name: sizes of groups, rows, in, out
CASES = {
    "two in a tile": ((30, 0, 33), 64, 64, 64),
    "straddling": ((70, 0, 121, 1), 256, 64, 128),
    "four steps": ((30, 34), 64, 256, 64),
    "none": ((0, 0), 64, 64, 64),
    "wide": ((65, 63), 128, 128, 192),
}


def drawn(seed, *shape, dtype):
    return (jax.random.normal(jax.random.key(seed), shape) / shape[-1] ** 0.5).astype(dtype)


def assert_close(found, expected, dtype):
    assert found.dtype == expected.dtype == dtype
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, expected, rtol=0, atol=CLOSE[dtype] * np.abs(expected).max())


def quick(names, *chosen):
    marks = {True: [], False: [pytest.mark.thorough]}
    return [pytest.param(name, marks=marks[name in chosen]) for name in names]


@pytest.mark.thorough
def test_tiles_whose_rows_are_no_power_of_two_are_stored_whole(capfd):
    rows = drawn(0, 192, 64, dtype="float32")
    matrices = drawn(1, 2, 64, 64, dtype="float32")
    segments = segments_of(jnp.asarray((95, 97)))
    visits = kernels.visits_of(segments, 2, 192, 192)
    form = grouped_kernel.Form(192, 64)
    found = grouped_kernel.row_products(form, rows, matrices, visits, interpret=True)
    assert_close(found, reference_product(rows, matrices, segments), "float32")


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", quick(CLOSE, "bfloat16"))
@pytest.mark.parametrize("case", quick(CASES, "two in a tile"))
def test_a_product_and_its_derivatives_are_those_of_each_row(case, dtype, capfd):
    sizes, count, width, result = CASES[case]
    rows = drawn(0, count, width, dtype=dtype)
    slope = drawn(2, count, result, dtype=dtype)
    mine = (jnp.arange(count) < sum(sizes))[:, None]
    # What lies in rows of no group is not looked at.
    rows, slope = (jnp.where(mine, x, jnp.nan) for x in (rows, slope))
    matrices = drawn(1, len(sizes), width, result, dtype=dtype)
    given = jnp.where(mine, rows, 0), matrices, jnp.where(mine, slope, 0)
    segments = segments_of(jnp.asarray(sizes))
    run = functools.partial(grouped_product, impl="interpret")
    found, pull = jax.vjp(lambda *x: run(*x, segments), rows, matrices)
    expected, plainly = jax.vjp(lambda *x: reference_product(*x, segments), *given[:2])
    assert_close(jnp.where(mine, found, 0), expected, dtype)
    for one, other, kept in zip(pull(slope), plainly(given[2]), (mine, True), strict=True):
        assert_close(jnp.where(kept, one, 0), other, dtype)
    assert "RACE DETECTED" not in capfd.readouterr().err


@pytest.mark.thorough
def test_tiles_of_128_rows_and_segments_with_gaps(monkeypatch):
    monkeypatch.setattr(kernels, "ROWS_FOR_LARGE", 32)
    start, count = jnp.asarray([0, 64, 128, 192]), jnp.asarray([64, 10, 0, 33])
    assert row_tile(256, 4) == 128
    segments = Segments(start, count)
    row = np.arange(256)
    mine = np.zeros(256, bool)
    for first, number in zip(start, count, strict=True):
        mine |= (row >= int(first)) & (row < int(first + number))
    mine = jnp.asarray(mine)[:, None]
    rows, slope = (jnp.where(mine, drawn(s, 256, 64, dtype="float32"), jnp.nan) for s in (0, 2))
    matrices = drawn(1, 2, 64, 64, dtype="float32")
    run = functools.partial(grouped_product, impl="interpret")
    found, pull = jax.vjp(lambda *x: run(*x, segments), rows, matrices)
    plain_rows, plain_slope = (jnp.where(mine, x, 0) for x in (rows, slope))
    expected, plainly = jax.vjp(lambda *x: reference_product(*x, segments), plain_rows, matrices)
    assert_close(jnp.where(mine, found, 0), expected, "float32")
    for one, other, kept in zip(pull(slope), plainly(plain_slope), (mine, True), strict=True):
        assert_close(jnp.where(kept, one, 0), other, "float32")


@pytest.mark.thorough
def test_experts_by_the_kernels_are_batched_ones(monkeypatch):
    """Without checkpoints, in which JAX's interpreter cannot be differentiated."""
    run = functools.partial(grouped_product)

    def interpreted(rows, matrices, segments, *, impl):
        assert impl == "mosaic_gpu"
        return run(rows, matrices, segments, impl="interpret")

    monkeypatch.setattr(kernels, "grouped_product", interpreted)
    monkeypatch.setattr(grouped_products, "device_here", lambda: H100)
    monkeypatch.setattr(routed_experts.jax, "checkpoint", lambda function, policy: function)
    tokens, width, hidden, experts, k = 40, 64, 128, 4, 2
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    weights = {
        name: drawn(seed, experts, *shape, dtype="bfloat16")
        for seed, (name, shape) in enumerate(shapes.items())
    }
    x, slope = (drawn(seed, tokens, width, dtype="bfloat16") for seed in (3, 4))
    gates = jax.random.uniform(jax.random.key(5), (tokens, k))
    ids = jax.random.randint(jax.random.key(6), (tokens, k), 0, experts)

    def result(products):
        def way(x, gates, weights):
            return zerojax.experts(x, gates, ids, weights, _GatedMlps("silu"), products=products)

        out, pull = jax.vjp(way, x, gates, weights)
        return out, *pull(slope)

    pairs = zip(*map(jax.tree.leaves, map(result, ("grouped", "batched"))), strict=True)
    for found, expected in pairs:
        assert found.dtype == expected.dtype
        found, expected = (np.asarray(x, np.float64) for x in (found, expected))
        limit = 3 * CLOSE["bfloat16"] * np.abs(expected).max()  # of three products, one by one
        np.testing.assert_allclose(found, expected, rtol=0, atol=limit)


@pytest.mark.thorough
def test_two_kernels_forward_and_backward_lower_for_cuda():
    def both(rows, matrices, sizes, slope):
        out, pull = jax.vjp(
            lambda rows, matrices: grouped_product(rows, matrices, segments_of(sizes)),
            rows,
            matrices,
        )
        return out, pull(slope)

    def struct(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    b = jnp.bfloat16
    given = struct(b, 4096, 256), struct(b, 8, 256, 512), struct(jnp.int32, 8), struct(b, 4096, 512)
    text = lowered_for_cuda(both, *given)
    assert len(re.findall("@mosaic_gpu_v2", text)) == 3
    assert "grouped_product" in text
    assert "grouped_outer_product" in text
    ideal = 2 * 4096 * 256 * 512
    assert count_flops(both, *given) == 3 * ideal


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_what_the_kernels_cannot_is_said_before_anything_is_traced():
    rows, matrices = struct(64, 128), struct(4, 128, 64)
    assert why_not(rows, matrices, capability=9.0) is None
    assert "9.0 (Hopper), not 8.0" in why_not(rows, matrices, capability=8.0)
    assert "multiples of 64, not 72" in why_not(rows, struct(4, 128, 72))
    single = struct(64, 128, dtype=jnp.float32), struct(4, 128, 64, dtype=jnp.float32)
    assert "bfloat16 and float16, not float32" in why_not(*single)
    assert why_not(*single, interpret=True) is None
    assert "rows are bfloat16 and weights float32" in why_not(rows, single[1])
    with pytest.raises(KernelUnavailable, match="by Mosaic GPU: .* not float32"):
        grouped_product(jnp.ones((64, 128)), jnp.ones((4, 128, 64)), segments_of(jnp.arange(4)))
    with pytest.raises(ValueError, match="a multiple of 64 rows, not 65"):
        grouped_product(
            jnp.ones((65, 8)), jnp.ones((4, 8, 8)), segments_of(jnp.ones(4)), impl="loop"
        )


def planned(*, gpu="h100", precision="bf16", sizes=None, **changes):
    """A plan of two layers in which 256 rows of each device go to 8 experts, for absent GPUs."""
    mesh = make_abstract_mesh({"data": 8, **(sizes or {})}, 8, gpu=find_gpu(gpu))
    model = mixture(**{"products": "grouped", "width": 64, "hidden": 64, **changes})
    return make_plan(model, mesh, example_batch=text_batch(0), precision=precision, zero=1)


def refused(words, **options):
    with pytest.raises(ValueError, match=words) as caught:
        planned(**options)
    assert "\n" not in str(caught.value)


def test_a_plan_refuses_what_its_gpus_cannot_in_one_sentence():
    refused(
        r"'grouped' of experts: the kernels need .* 9.0 \(Hopper\), not 8.0; use .*",
        gpu="a100-80gb",
    )
    refused(
        "the kernels take bfloat16 and float16, not float32; use .*moe.products", precision="fp32"
    )
    refused("widths that are multiples of 64, not 12", hidden=12)
    refused("split over the 2 devices of tensor parallelism", sizes={"data": 4, "model": 2})


@pytest.mark.thorough
def test_a_plan_for_h100s_says_what_experts_multiply():
    plan = planned()
    costs = expert_costs(plan)
    assert costs.products == "grouped"
    batched = planned(products="batched")
    assert expert_costs(batched).grouped == costs.computed
    assert "products of experts: grouped" in str(plan.table()) + "".join(plan.reasons)
