"""FLOPs counted from the jaxpr agree with formulas and with XLA's count of loop-free programs."""

import mmap
import warnings
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from zerojax.hardware import local_devices
from zerojax.hardware.local_devices import device_kind, device_memory
from zerojax.tracing.flops import TRAINING_FACTOR, count_flops, eight_bit_flops


def abstract(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


X, W = abstract(8, 16), abstract(16, 16)
ONE = 2 * 8 * 16 * 16


def product(x, w):
    return x @ w


def repeat(x, w, n=5):
    return jax.lax.scan(lambda carry, _: (jnp.tanh(carry @ w), None), x, None, length=n)[0]


def xla_flops(fn, *args):
    return jax.jit(fn).lower(*args).compile().cost_analysis()["flops"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("fn", "args", "expected"),
    [
        (product, (X, W), ONE),
        (lambda x, w: jnp.tanh(x) + w[0, 0], (X, W), 0),
        (lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k), (abstract(2, 3, 4, 5),) * 2, 720),
        (repeat, (X, W), 5 * ONE),
        (lambda x, w: jax.vmap(product, (0, None))(x, w), (abstract(7, 8, 16), W), 7 * ONE),
        (jax.jit(product), (X, W), ONE),
        (jax.checkpoint(product), (X, W), ONE),
        (lambda x, w: jax.lax.fori_loop(0, 6, lambda _, c: c @ w, x), (X, W), 6 * ONE),
        (lambda x, w: jax.lax.cond(x[0, 0] > 0, lambda: x @ w @ w, lambda: x @ w), (X, W), 2 * ONE),
    ],
    ids=["dot", "elementwise", "batch", "scan", "vmap", "jit", "remat", "fori", "cond"],
)
def test_formulas(fn, args, expected):
    assert count_flops(fn, *args) == expected


def test_backward_is_twice_forward():
    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w) @ w)

    forward = count_flops(loss, W, X)
    assert forward == 2 * ONE
    assert count_flops(jax.value_and_grad(loss, (0, 1)), W, X) == TRAINING_FACTOR * forward


def test_remat_in_a_backward_pass_is_counted_as_it_runs():
    def loss(w, x):
        return jnp.sum(repeat(x, w))

    def remat_loss(w, x):
        body = jax.checkpoint(lambda c, _: (jnp.tanh(c @ w), None))
        return jnp.sum(jax.lax.scan(body, x, None, length=5)[0])

    assert count_flops(jax.grad(loss, (0, 1)), W, X) == 3 * 5 * ONE
    assert count_flops(jax.grad(remat_loss, (0, 1)), W, X) == 4 * 5 * ONE


def test_custom_vjp_is_counted_both_ways():
    @jax.custom_vjp
    def f(x, w):
        return x @ w

    f.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))
    assert count_flops(f, X, W) == ONE
    both = jax.value_and_grad(lambda x, w: f(x, w).sum(), (0, 1))
    assert count_flops(both, X, W) == 3 * ONE


def test_what_no_result_depends_on_is_not_counted():
    assert count_flops(lambda x, w: (x @ w, x)[1], X, W) == 0
    # The gradient of a sum needs no forward product.
    assert count_flops(jax.grad(lambda x, w: (x @ w).sum(), (0, 1)), X, W) == 2 * ONE

    def loop(x, w):
        return jax.lax.scan(lambda c, _: (c @ w, (c.T @ c).sum()), x, None, length=5)[0]

    assert count_flops(loop, X, W) == 5 * ONE


@pytest.mark.parametrize("step", [1, 3])
def test_while_with_constant_bounds(step):
    def loop(x, w):
        return jax.lax.while_loop(
            lambda carry: carry[0] < 10, lambda carry: (carry[0] + step, carry[1] @ w), (1, x)
        )

    assert count_flops(loop, X, W) == (9 if step == 1 else 3) * ONE


def test_while_without_a_constant_bound_warns_and_counts_once():
    def loop(n, x, w):
        return jax.lax.fori_loop(0, n, lambda _, carry: carry @ w, x)

    with pytest.warns(
        UserWarning, match="FLOPs are too low: .* its matrix products are counted once"
    ):
        assert count_flops(loop, 3, X, W) == ONE
    with warnings.catch_warnings():  # a loop with nothing to count is nobody's problem
        warnings.simplefilter("error")
        counted = lambda n: jax.lax.fori_loop(0, n, lambda i, c: c + i, 0)  # noqa: E731
        assert count_flops(counted, 3) == eight_bit_flops(jax.make_jaxpr(counted)(3)) == 0


def test_shard_map_counts_every_device():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    mapped = partial(jax.shard_map, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    assert count_flops(mapped(product, axis_names={"data"}), X, W) == ONE
    # Not split over `model`, so both of its devices do the whole product.
    assert count_flops(mapped(product), X, W) == 2 * ONE


def test_pallas_counts_every_grid_cell():
    def kernel(x_ref, w_ref, o_ref):
        o_ref[...] = x_ref[...] @ w_ref[...]

    rows = pl.BlockSpec((2, 16), lambda i: (i, 0))

    def call(x, w):
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((8, 16), jnp.float32),
            grid=(4,),
            in_specs=[rows, pl.BlockSpec((16, 16), lambda i: (0, 0))],
            out_specs=rows,
            interpret=True,
        )(x, w)

    assert count_flops(call, X, W) == ONE


def test_ragged_dot():
    sizes = jax.ShapeDtypeStruct((3,), jnp.int32)
    assert count_flops(jax.lax.ragged_dot, X, abstract(3, 16, 4), sizes) == 2 * 8 * 16 * 4


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("stride", [1, 2])
def test_convolution_agrees_with_xla(groups, stride):
    conv = partial(
        jax.lax.conv_general_dilated,
        window_strides=(stride, stride),
        padding="VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )
    x, kernel = abstract(2, 13, 13, 4), abstract(3, 3, 4 // groups, 6)
    side = 11 if stride == 1 else 6
    assert count_flops(conv, x, kernel) == 2 * (2 * side * side * 6) * (9 * 4 // groups)
    assert xla_flops(conv, x, kernel) == pytest.approx(count_flops(conv, x, kernel), rel=0.01)


def test_gradients_of_a_convolution_are_twice_the_forward():
    def loss(x, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, kernel, (2, 2), "SAME", dimension_numbers=numbers
        ).sum()

    x, kernel = abstract(2, 16, 16, 8), abstract(3, 3, 8, 8)
    forward = count_flops(loss, x, kernel)
    assert count_flops(jax.value_and_grad(loss, (0, 1)), x, kernel) == pytest.approx(
        3 * forward,
        rel=0.15,  # the gradient's windows reach one row and column past the edge
    )


def test_matrix_products_agree_with_xla():
    def attention(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    args = (abstract(2, 32, 4, 64),) * 3
    ours = count_flops(attention, *args)
    assert ours == 2 * (2 * 2 * 4 * 32 * 32 * 64)
    # XLA also counts the softmax: about 8 operations per score beside 256 of the products.
    assert ours <= xla_flops(attention, *args) <= 1.1 * ours


def test_host_memory_where_the_backend_counts_none():
    before = device_memory()
    assert before["source"] == "host RSS"
    # Pages of its own: the allocator may have kept some that were freed.
    ballast = np.frombuffer(mmap.mmap(-1, 64 * 2**20), np.float32)
    ballast[:] = 1
    after = device_memory()
    assert after["in_use"] - before["in_use"] >= 0.9 * ballast.nbytes
    assert 0 < after["in_use"] <= after["peak"] <= after["limit"]
    assert device_kind() == "cpu"


def test_device_memory_is_that_of_the_fullest_device(monkeypatch):
    def device(in_use, peak):
        stats = {"bytes_in_use": in_use, "peak_bytes_in_use": peak, "bytes_limit": 100}
        return SimpleNamespace(memory_stats=lambda: stats)

    monkeypatch.setattr(local_devices.jax, "local_devices", lambda: [device(1, 20), device(9, 10)])
    assert device_memory() == {"source": "device", "in_use": 1, "peak": 20, "limit": 100}
