"""Windows of layers, soft-caps and sinks: each implementation gives what the formula gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.operators.test_attention import largest_array
from zerojax.hardware.gpus import named_gpu
from zerojax.operators import attention, chunked_attention
from zerojax.operators.attending import WindowOfLayer, attend_with, calls_of_attention
from zerojax.operators.attention_choice import attention_measured, attention_planned_for
from zerojax.placement.device_mesh import make_abstract_mesh
from zerojax.tracing.flops import count_flops
from zerojax.tracing.stacking import REMAT_POLICIES

ROWS, TOKENS, HEADS, KV_HEADS, FEATURES = 2, 21, 4, 2, 8
CLOSE = {"rtol": 0, "atol": 4e-6}
"""Sums of up to 21 products of float32 in other orders, of values up to 4."""
WINDOWS = (5, None)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(chunked_attention, "BLOCK", 4)


def drawn(seed=0, dtype=jnp.float32):
    """Query, key, value, sinks and the slope of the result."""
    keys = jax.random.split(jax.random.key(seed), 5)
    shapes = [(ROWS, TOKENS, n, FEATURES) for n in (HEADS, KV_HEADS, KV_HEADS)]
    shapes += [(HEADS,), (ROWS, TOKENS, HEADS, FEATURES)]
    pairs = zip(keys, shapes, strict=True)
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in pairs]


def segments():
    return jnp.asarray(np.repeat([[0] * 9 + [1] * 10 + [-1] * 2], ROWS, 0))


def formula(query, key, value, sinks, *, window, softcap, segments, scale):
    """Softmax attention with one more score of each head, by the definition."""
    groups = HEADS // KV_HEADS
    key, value = (jnp.repeat(x, groups, axis=2) for x in (key, value))
    scores = jnp.einsum("bqhf,bkhf->bhqk", query, key, precision="highest") * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    distance = jnp.arange(TOKENS)[:, None] - jnp.arange(TOKENS)[None]
    seen = (distance >= 0) & (distance < (window or TOKENS))
    seen = jnp.broadcast_to(seen[None, None], scores.shape)
    if segments is not None:
        same = (segments[:, :, None] == segments[:, None]) & (segments >= 0)[:, None]
        seen = seen & same[:, None]
    exponents = jnp.where(seen, jnp.exp(scores), 0)
    total = exponents.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks)[None, :, None, None]
    weights = exponents / jnp.where(total == 0, 1, total)
    return jnp.einsum("bhqk,bkhf->bqhf", weights, value, precision="highest")


CASES = {
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "both, a window and a scale": {"softcap": 2.0, "sinks": True, "window": 6, "scale": 0.7},
    "texts": {"softcap": 1.5, "sinks": True, "segments": True},
}


def both_passes(function, arrays, slope):
    out, pull = jax.vjp(function, *arrays)
    return out, *pull(slope)


@pytest.mark.thorough
@pytest.mark.parametrize("implementation", ["xla", "chunked"])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_the_formula(case, implementation):
    """The sinks' too, whose gradient JAX's own log-sum-exp does not hand on."""
    given = dict(CASES[case])
    *arrays, sinks, slope = drawn()
    arrays += [sinks] if given.pop("sinks", False) else []
    texts = segments() if given.pop("segments", False) else None
    window, softcap = given.get("window"), given.get("softcap")
    scale = given.get("scale", FEATURES**-0.5)

    def ours(query, key, value, sinks=None):
        options = {"causal": True, "sinks": sinks, "segments": texts, **given}
        return attention(query, key, value, implementation=implementation, **options)

    def theirs(query, key, value, sinks=None):
        rest = {"window": window, "softcap": softcap, "segments": texts, "scale": scale}
        return formula(query, key, value, sinks, **rest)

    found = jax.jit(functools.partial(both_passes, ours))(arrays, slope)
    for mine, expected in zip(found, both_passes(theirs, arrays, slope), strict=True):
        np.testing.assert_allclose(mine, expected, **CLOSE)


def of_layer(index, implementation="chunked", **options):
    """Attention whose window is that of the kind `index`."""
    window = WindowOfLayer(WINDOWS, index, ((3, 4), (1, 4)))
    return functools.partial(
        attend_with, causal=True, window=window, implementation=implementation, **options
    )


@pytest.mark.thorough
@pytest.mark.parametrize("implementation", ["xla", "chunked"])
@pytest.mark.parametrize("index", [0, 1])
def test_a_layer_has_the_window_of_its_kind(index, implementation):
    *arrays, _, slope = drawn()
    options = {"segments": segments(), "implementation": implementation}
    plain = functools.partial(attention, causal=True, window=WINDOWS[index], **options)

    def chosen(arrays, slope, index):
        return both_passes(of_layer(index, **options), arrays, slope)

    found = jax.jit(chosen)(arrays, slope, jnp.int32(index))
    for mine, expected in zip(found, both_passes(plain, arrays, slope), strict=True):
        np.testing.assert_allclose(mine, expected, **CLOSE)


@pytest.mark.thorough
def test_kinds_may_be_computed_by_different_implementations():
    """As measurements may say; "xla" is then one tile of all scores."""
    *arrays, _, slope = drawn()
    with calls_of_attention() as calls:
        of_layer(jnp.int32(0), "auto")(*arrays)
    whole = next(call.kind for call in calls if call.window is None)
    with attention_measured({whole: "chunked"}), calls_of_attention() as calls:
        for index in (0, 1):
            found = both_passes(of_layer(jnp.int32(index), "auto"), arrays, slope)
            plain = functools.partial(
                attention, causal=True, window=WINDOWS[index], implementation="xla"
            )
            for mine, expected in zip(found, both_passes(plain, arrays, slope), strict=True):
                np.testing.assert_allclose(mine, expected, **CLOSE)
    assert [call.implementation for call in calls[:2]] == ["xla", "chunked"]


def test_a_measured_call_does_not_keep_the_reason_of_another():
    query = jnp.zeros((1, 8, 2, 4))
    with calls_of_attention() as calls:
        attention(query, query, query)
        with attention_measured({calls[0].kind: calls[0].implementation}):
            attention(query, query, query)
        with attention_measured({calls[0].kind: "chunked"}):
            attention(query, query, query)
    assert calls[1] == calls[0]
    assert (calls[2].implementation, calls[2].why) == ("chunked", "auto: measured on these devices")


def test_each_kind_is_a_call_of_its_own():
    with calls_of_attention() as calls:
        jax.eval_shape(of_layer(jnp.int32(0)), *drawn()[:3])
    said = [call.describe() for call in calls]
    assert said[0].endswith("; 3 of 4 layers, a window of 5")
    assert said[1].endswith("; 1 of 4 layers, all tokens")
    assert calls[0].computed < calls[1].keys
    assert len({call.kind for call in calls}) in (1, 2)


@pytest.mark.thorough
def test_it_keeps_no_more_than_one_implementation_does():
    """Of a loop over layers: query, key, value, the result and its log-sum-exp, for both kinds."""
    *arrays, _, _ = drawn()

    def loss(window, policy=None):
        def layer(x, kind):
            own = (
                of_layer(kind)
                if window == "kinds"
                else functools.partial(
                    attention, causal=True, window=window, implementation="chunked"
                )
            )
            return own(x, *arrays[1:]), None

        if policy is not None:
            layer = jax.checkpoint(layer, policy=REMAT_POLICIES[policy], prevent_cse=False)
        return lambda x: jnp.sum(jax.lax.scan(layer, x, jnp.asarray([0, 1, 0, 0]))[0])

    for policy in (None, "attention"):
        temporary = {
            window: jax.jit(jax.grad(loss(window, policy)))
            .lower(arrays[0])
            .compile()
            .memory_analysis()
            .temp_size_in_bytes
            for window in ("kinds", None)
        }
        layer = 4 * ROWS * TOKENS * HEADS * FEATURES
        assert temporary["kinds"] <= temporary[None] + 2 * layer
    assert largest_array(jax.jit(jax.grad(loss("kinds"))).lower(arrays[0]).compile()) < (
        4 * ROWS * HEADS * TOKENS * TOKENS
    )


def test_products_are_the_mean_over_layers():
    """Three of four layers have the window, whichever of them is traced."""
    *arrays, _, _ = drawn()
    kinds = count_flops(lambda *x: of_layer(jnp.int32(0))(*x), *arrays)
    each = [
        count_flops(
            functools.partial(attention, causal=True, window=window, implementation="chunked"),
            *arrays,
        )
        for window in WINDOWS
    ]
    assert each[0] < each[1]
    assert kinds == pytest.approx((3 * each[0] + each[1]) / 4, rel=1e-12)


def test_a_second_derivative_is_refused():
    *arrays, _, _ = drawn()
    run = lambda x: jnp.sum(of_layer(jnp.int32(0))(x, *arrays[1:]))  # noqa: E731
    with pytest.raises(NotImplementedError, match="no second derivative"):
        jax.grad(lambda x: jnp.sum(jax.grad(run)(x)))(arrays[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sinks": jnp.zeros(3)}, r"sinks has shape \(3,\), but must be \(4,\)"),
        ({"window": 0}, "window=0 must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        attention(*drawn()[:3], causal=True, **options)


@pytest.mark.parametrize("implementation", ["cudnn", "mosaic_gpu"])
def test_fused_kernels_refuse_what_they_lack(implementation):
    """With the value and what computes it; and `auto` takes what can, with the reason."""
    arrays = drawn(dtype=jnp.bfloat16)
    hopper = make_abstract_mesh(None, 1, gpu=named_gpu("h100"))
    with attention_planned_for(hopper):
        for options, words in (
            ({"softcap": 2.0}, "not support softcap"),
            ({"sinks": arrays[3]}, "not support sinks"),
        ):
            run = functools.partial(attention, causal=True, implementation=implementation)
            with pytest.raises(ValueError, match=words):
                jax.eval_shape(functools.partial(run, **options), *arrays[:3])
        with calls_of_attention() as calls:
            run = functools.partial(attention, causal=True, softcap=2.0)
            jax.eval_shape(run, *arrays[:3])
            jax.eval_shape(of_layer(jnp.int32(0), "auto"), *arrays[:3])
    assert [call.implementation for call in calls] == ["xla", "cudnn", "cudnn"]
    assert "not support softcap" in calls[0].why
