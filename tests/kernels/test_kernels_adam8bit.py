"""Moments in one byte: what codes keep, and the kernel against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import adam8bit, optimizers, rounding
from pallas_kernels.adam8bit import Moments8bit, decode_moments, encode_moments, init_moments
from pallas_kernels.adam8bit_kernel import update_adam8bit
from pallas_kernels.choice import Choice
from tests.support.marks import needs_kernels

XLA = Choice("xla", "the oracle")
F32, BF16 = jnp.float32, jnp.bfloat16


def normal(number, shape, dtype=F32):
    return jax.random.normal(jax.random.fold_in(jax.random.key(0), number), shape).astype(dtype)


def seed(number):
    return rounding.seed_of(jax.random.key(number))


def after(steps, shape, *, dtype=F32, impl=XLA, learning_rate=1e-2):
    param, moments = normal(0, shape, dtype), init_moments(shape)
    for count in range(1, steps + 1):
        scalars = optimizers.adam_scalars(learning_rate, count=count, b2=0.95, weight_decay=0.1)
        more = {"scalars": scalars, "seed": seed(count), "impl": impl}
        param, moments, *_ = update_adam8bit(param, moments, normal(count, shape, BF16), **more)
    return param, moments


@pytest.mark.sampled(1)
@needs_kernels
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", [(5,), (3, 512), (768,), (1300,)], ids=str)
def test_the_kernel_computes_what_the_reference_computes(shape, dtype):
    """Bits, codes and scales alike. Another contraction of a product and a sum may tip one code,
    but moves no scale further than its own rounding."""
    param, moments = after(2, shape, dtype=dtype)
    results = []
    for impl in ("interpret", XLA):
        scalars = optimizers.adam_scalars(1e-2, count=3, gradient_scale=0.5)
        more = {"scalars": scalars, "seed": seed(9), "compute_dtype": BF16, "impl": impl}
        results.append(update_adam8bit(param, moments, normal(3, shape, BF16), **more))
    kernel, reference = results
    assert kernel.param.dtype == dtype
    assert kernel.compute.dtype == BF16
    for a, b in zip(jax.tree.leaves(kernel), jax.tree.leaves(reference), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if a.shape != shape:  # scales
            np.testing.assert_allclose(a, b, rtol=1e-6)
        assert np.sum(~np.isclose(a, b, rtol=1e-6, atol=1e-6)) <= 2
    assert float(jnp.abs(reference.moments.mu.astype(F32)).max()) == 127


@pytest.mark.thorough
@needs_kernels
def test_a_skipped_step_changes_nothing_whatever_the_gradient_holds():
    param, moments = after(2, (1300,))
    bad = normal(5, (1300,)).at[jnp.array([3, 1299])].set(jnp.array([jnp.nan, jnp.inf]))
    scalars = optimizers.adam_scalars(1e-2, count=3, skip=True)
    for impl in ("interpret", XLA):
        found = update_adam8bit(param, moments, bad, scalars=scalars, seed=seed(9), impl=impl)
        for before, now in zip((param, *moments), (found.param, *found.moments), strict=True):
            np.testing.assert_array_equal(np.asarray(before), np.asarray(now))


def encoded(values, encode, draws=2000):
    """Mean and all of the values that codes of `values` stand for; the block's largest is 1."""
    x = jnp.broadcast_to(jnp.asarray(values, F32), (draws, len(values)))
    index = jnp.arange(x.size, dtype=jnp.uint32).reshape(x.shape)
    code = encode(x, jnp.full_like(x, 4.0), rounding.bits_at(index, tuple(seed(0)))(0))
    decode = adam8bit.decode_mu if encode is adam8bit.encode_mu else adam8bit.decode_nu
    assert code.min() >= -128
    assert code.max() <= 127
    back = np.asarray(decode(code.astype(jnp.int8).astype(F32), jnp.ones_like(x)), np.float64)
    return back.mean(0), back


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("encode", "values", "power", "levels"),
    [
        (adam8bit.encode_mu, [1.0, 0.5, -0.5, 0.03, -0.001, 1e-5, 0.0], 2, 127),
        (adam8bit.encode_nu, [1.0, 0.5, 1e-2, 1e-4, 1e-6, 1e-8], 4, 256),
    ],
    ids=["mu", "nu"],
)
def test_codes_are_right_on_average_and_lie_beside_the_value(encode, values, power, levels):
    mean, back = encoded(values, encode)
    size = np.abs(values)
    level = np.floor(levels * size ** (1 / power) + 1e-4)
    spacing = ((level + 1) ** power - level**power) / levels**power
    assert (np.abs(back - values) <= spacing * 1.001).all()
    assert (np.abs(mean - values) <= 4 * spacing / 2 / np.sqrt(len(back))).all()
    np.testing.assert_array_equal(back[:, 0], values[0])


@pytest.mark.thorough
def test_a_second_moment_is_never_zero_beside_a_larger_one():
    """A moment of 0 under a first moment that is not 0 would make a step of mu / eps."""
    _, back = encoded([1e-11, 0.0], adam8bit.encode_nu)
    np.testing.assert_array_equal(back, 2.0**-32)
    grad = jnp.full((512,), 1e-6).at[0].set(1.0)
    param, moments = jnp.zeros((512,)), init_moments((512,))
    for count in range(1, 30):
        scalars = optimizers.adam_scalars(1e-3, count=count, weight_decay=0.0)
        more = {"scalars": scalars, "seed": seed(count), "impl": XLA}
        param, moments, *_ = update_adam8bit(param, moments, grad * (count < 10), **more)
    assert float(jnp.abs(param).max()) < 29 * 1e-3 * 4


@pytest.mark.thorough
def test_a_zero_gradient_leaves_zero_moments():
    param, moments = after(0, (700,))
    scalars = optimizers.adam_scalars(1e-2, count=1, weight_decay=0.0)
    more = {"scalars": scalars, "seed": seed(1), "impl": XLA}
    found = update_adam8bit(param, moments, jnp.zeros((700,)), **more)
    np.testing.assert_array_equal(np.asarray(found.param), np.asarray(param))
    for moment in decode_moments(found.moments):
        np.testing.assert_array_equal(np.asarray(moment), 0.0)


def trained_on(grads, b1=0.5, b2=0.3):
    """Moments after steps on these gradients, yielded after each."""
    param, moments = jnp.zeros(grads[0].shape), init_moments(grads[0].shape)
    for count, grad in enumerate(grads, 1):
        scalars = optimizers.adam_scalars(1e-3, count=count, b1=b1, b2=b2)
        more = {"scalars": scalars, "seed": seed(count), "impl": XLA}
        param, moments, *_ = update_adam8bit(param, moments, jnp.asarray(grad, F32), **more)
        yield moments


@pytest.mark.thorough
@pytest.mark.parametrize("size", [512 * 2500, 384 * 301 + 5, 130, 3], ids=str)
def test_moments_that_are_decoded_and_coded_again_keep_every_bit(size):
    """Thousands of blocks, of gradients from 1e-22 to 1e18 and of 0, while they grow and decay."""
    rng = np.random.default_rng(size)
    decode, encode = jax.jit(decode_moments), jax.jit(encode_moments)

    def gradients(count):
        lowest, highest = ((-22, 18), (-38, -10))[count % 2]
        exponents = np.repeat(rng.uniform(lowest, highest, size // 512 + 1), 512)[:size]
        grad = rng.standard_normal(size) * 10.0**exponents * (rng.random(size) < 0.9)
        return grad * (exponents > lowest + 4) * (count < 6)

    for moments in (init_moments((size,)), *trained_on([gradients(count) for count in range(10)])):
        mu, nu = decode(moments)
        assert bool(jnp.isfinite(mu).all() & jnp.isfinite(nu).all())
        for before, after in zip(moments, encode(mu, nu), strict=True):
            np.testing.assert_array_equal(np.asarray(before), np.asarray(after))


@pytest.mark.thorough
def test_the_largest_element_of_a_block_has_the_largest_code():
    """Otherwise its scale would shrink when moments are stored; below a floor it has a smaller."""
    rng = np.random.default_rng(0)
    exponents = np.repeat(rng.uniform(-20, 18, 4000), 512)
    for moments in trained_on([rng.standard_normal(512 * 4000) * 10.0**exponents] * 3):
        mu, nu = (np.asarray(x, np.int32).reshape(-1, 512) for x in moments[:2])
        floor = np.asarray(moments.nu_scale) == adam8bit.NU_FLOOR
        assert (np.abs(mu).max(1) == 127).all()
        assert (nu.max(1) == 127)[~floor].all()
        assert 0 < floor.mean() < 0.5


def test_a_division_that_rounds_down_costs_no_code():
    """A GPU's is off by up to 2 units in the last place; the highest random bits round down."""
    one, highest = jnp.ones((8,)), jnp.full((8,), 2**16 - 1, jnp.uint32)
    for four_over in (4 * (1 - 2**-22), 4.0, 4 * (1 + 2**-22)):
        found = adam8bit.encode_mu(-one, jnp.full((8,), four_over), highest)
        np.testing.assert_array_equal(np.asarray(found), -127)
        found = adam8bit.encode_nu(one, jnp.full((8,), four_over), highest)
        np.testing.assert_array_equal(np.asarray(found), 127)


@pytest.mark.thorough
def test_tiny_second_moments_keep_their_size():
    """Gradients of 1e-16, whose squares lie below the smallest scale, are as exact as it allows:
    one code, a 256th of the fourth root of the scale, or two, since the smallest stands for 0."""
    grad = 1e-16 * np.asarray(normal(1, (512,)), np.float64)
    (moments,) = trained_on([grad], b2=0.9)
    mu, nu = (np.asarray(x, np.float64) for x in decode_moments(moments))
    code = adam8bit.NU_FLOOR**0.25 / 256
    np.testing.assert_allclose(nu**0.25, (0.1 * grad**2) ** 0.25, atol=2 * code)
    assert np.median(nu**0.25) > 10 * code
    np.testing.assert_allclose(mu, 0.5 * grad, atol=0.016 * np.abs(grad).max())


@pytest.mark.thorough
def test_coding_by_hand_rounds_to_nearest():
    """The middle between two neighbours is half of the sum of their values, not of their roots."""
    code = np.arange(-127, 127)
    value = np.sign(code) * (code / 127) ** 2
    above = np.sign(code + 1) * ((code + 1) / 127) ** 2
    for share, rises in ((0.49, 0), (0.51, 1)):
        mu = jnp.asarray(np.append(value + share * (above - value), 1.0), F32)
        found = encode_moments(mu, jnp.abs(mu)).mu[:-1]
        np.testing.assert_array_equal(np.asarray(found), code + rises)


@pytest.mark.thorough
def test_blocks_do_not_touch_each_other():
    """A value of 1e6 in one block costs the next nothing, and the short last block has its own."""
    shape = (1100,)
    grad = normal(1, shape).at[100].set(1e6)
    scalars = optimizers.adam_scalars(1e-2, count=1)
    more = {"scalars": scalars, "seed": seed(1), "impl": XLA}
    mu, nu = decode_moments(update_adam8bit(normal(0, shape), init_moments(shape), grad, **more)[1])
    exact = 0.1 * np.asarray(grad)
    assert np.abs(np.asarray(mu)[512:] - exact[512:]).max() < 0.02 * np.abs(exact[512:]).max()
    assert np.abs(np.asarray(nu)[1024:] - 1e-3 * np.asarray(grad)[1024:] ** 2).max() < 3e-4
    assert float(mu[100]) == pytest.approx(1e5)


def test_arrays_of_another_leaf_are_refused():
    x, moments, scalars = (
        jnp.zeros((600,)),
        init_moments((600,)),
        optimizers.adam_scalars(1, count=1),
    )
    more = {"scalars": scalars, "seed": seed(0), "impl": XLA}
    with pytest.raises(ValueError, match=r"mu_scale has shape \(3,\), .* it must be \(2,\)"):
        update_adam8bit(x, moments._replace(mu_scale=jnp.zeros((3,))), x, **more)
    with pytest.raises(ValueError, match="differ in shape"):
        update_adam8bit(x, moments, x[:5], **more)
    with pytest.raises(TypeError, match="grad is int32"):
        update_adam8bit(x, moments, x.astype(jnp.int32), **more)
    with pytest.raises(TypeError, match="float16 parameters"):
        update_adam8bit(x.astype(jnp.float16), moments, x, **more)


def test_blocks_divide_a_leaf_where_they_can():
    found = {size: adam8bit.block_of(size) for size in (4096, 768, 2304, 50257 * 768, 1280, 640)}
    assert list(found.values()) == [512, 384, 384, 384, 256, 128]
    assert adam8bit.num_blocks(1300) == 3
    assert adam8bit.num_blocks(768) == 2


def test_moments_take_two_bytes_and_sixteen_per_block():
    moments = jax.eval_shape(lambda: init_moments((4, 1024)))
    assert isinstance(moments, Moments8bit)
    assert sum(x.size * x.dtype.itemsize for x in moments) == 2 * 4096 + 8 * 8
