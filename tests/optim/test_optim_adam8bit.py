"""8-bit AdamW in the step and as optax has it: against its reference, and on real text."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from pallas_kernels import adam8bit as codes
from pallas_kernels import optimizers
from pallas_kernels.choice import Choice
from tests.support.adam8bit_steps import (
    CODED,
    RATE,
    SHAPES,
    assert_same,
    context_of,
    normal,
    stepped,
    tree,
)
from tests.support.marks import needs_kernels
from tests.support.recipe import DECAYED, RECIPE
from zerojax.config import ModelConfig
from zerojax.data.corpus import read_text
from zerojax.optim import adamw, coding_of
from zerojax.optim.adam8bit import adam8bit
from zerojax.optim.adam8bit_state import part_of
from zerojax.zoo import build_model

INTERPRET = Choice("interpret", "for a test")


def test_the_step_computes_what_the_reference_computes():
    tx, params = adam8bit(**RATE), tree(0)
    state, context = tx.init(params), context_of(0, scale=0.5)
    found, new_state = tx.apply(tree(1), state, params, context)
    new = part_of(new_state)
    assert int(new.count) == 1
    for name in CODED:
        decay = 0.0 if name.endswith("bias") else 0.1
        scalars = optimizers.adam_scalars(
            1e-2, count=1, b2=0.95, weight_decay=decay, gradient_scale=0.5
        )
        expected, moments, _ = jax.jit(codes.reference_adam8bit)(
            params[name],
            codes.init_moments(SHAPES[name]),
            tree(1)[name],
            scalars,
            seed=context.seed(name),
        )
        coded = codes.Moments8bit(*(each[name] for each in new[1:]))
        assert_same((found[name], coded), (expected, moments))
    plain = adamw(**RATE)
    small, plain_state = plain.apply(tree(1), plain.init(params), params, context)
    np.testing.assert_array_equal(found["norm/scale"], small["norm/scale"])
    np.testing.assert_array_equal(new.nu["norm/scale"], plain_state[1][0].nu["norm/scale"])


@pytest.mark.thorough
@needs_kernels
def test_the_kernel_runs_where_it_is_chosen():
    """In interpret mode; another contraction of a product and a sum may tip one code of 5632."""
    shapes = {"whole blocks": (8, 512), "vector": (48,)}
    tx, params = adam8bit(**RATE), tree(0, shapes)
    start = stepped(tx, params, tx.init(params), steps=2)
    program = jax.jit(functools.partial(stepped, tx, first=2, steps=1, chosen=INTERPRET))
    kernel = program(*start)
    reference = stepped(tx, *start, first=2, steps=1)
    for a, b in zip(jax.tree.leaves(kernel), jax.tree.leaves(reference), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.sum(~np.isclose(a, b, rtol=1e-6, atol=1e-6)) <= 2
    assert "adam8bit" in str(jax.make_jaxpr(program)(*start))


@pytest.mark.thorough
def test_update_and_apply_are_one_optimizer():
    """Same codes and scales to the bit; a parameter is rounded once more: by up to 2^-23 of its
    value, or, where it passes 0, of the value it had, which was below 0.02."""
    tx = adam8bit(optax.linear_schedule(1e-2, 1e-3, 4), **RECIPE)
    params = tree(0)
    state, applied_state = tx.init(params), tx.init(params)
    update = jax.jit(tx.update)
    for count in range(4):
        grads = tree(1 + count)
        updates, state = update(grads, state, params)
        norm = optax.tree.norm(grads)
        context = context_of(count, scale=jnp.where(norm < 1, 1.0, 1 / norm))
        new, applied_state = tx.apply(grads, applied_state, params, context)
        params = optax.apply_updates(params, updates)
        assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(jnp.float32)}
        for name in params:
            np.testing.assert_allclose(params[name], new[name], rtol=2**-23, atol=2**-23 * 0.02)
        # Moments do not depend on parameters: both states went the same way.
        assert_same(state, applied_state)
    assert update._cache_size() == 1
    assert int(state[1][-1].count) == 4
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, applied_state)


def test_a_skipped_step_changes_nothing_at_all():
    tx = adam8bit(optax.constant_schedule(1e-2), **RECIPE)
    params, state = stepped(tx, tree(0), tx.init(tree(0)))
    bad = {name: grad.at[(0,) * grad.ndim].set(jnp.nan) for name, grad in tree(9).items()}
    context = context_of(9, scale=jnp.inf, skip=True)
    assert_same(tx.apply(bad, state, params, context), (params, state))
    assert int(part_of(state).count) == int(state[1][-1].count) == 3


@pytest.mark.thorough
def test_masks_and_groups_decide_what_decays():
    """With gradients of 0 a parameter moves by learning rate times decay, or not at all."""
    params = tree(0)
    zeros = jax.tree.map(jnp.zeros_like, params)
    options = {"weight_decay": 0.1, "groups": {"^head": {"learning_rate_factor": 0.5}}}
    everything = dict.fromkeys(params, True) | {"norm/scale": False}
    for mask, decays in ((None, params), (everything, CODED), (lambda p: everything, CODED)):
        tx = adam8bit(0.1, mask=mask, **options)
        new, _ = tx.apply(zeros, tx.init(params), params, context_of(0))
        updates, _ = tx.update(zeros, tx.init(params), params)
        for name in params:
            rate = (0.05 if name == "head/kernel" else 0.1) * 0.1 * (name in decays)
            np.testing.assert_allclose(new[name], params[name] * (1 - rate), rtol=1e-6)
            np.testing.assert_allclose(updates[name], -rate * params[name], rtol=1e-4, atol=1e-7)


@pytest.mark.thorough
def test_it_goes_into_chains_of_any_tree_and_leaves_masked_parameters_alone():
    params = {"a": [normal(0, (70, 70)), normal(1, (8,))], "b": {"frozen": normal(2, (5, 5))}}
    mask = {"a": True, "b": False}
    decay = {"a": [True, False], "b": {"frozen": True}}
    for tx in (
        optax.chain(optax.scale(2.0), adam8bit(1e-2, mask=decay)),
        optax.masked(adam8bit(1e-2), mask),
    ):
        state = tx.init(params)
        grads = jax.tree.map(lambda x: x / 3, params)
        updates, new_state = jax.jit(tx.update)(grads, state, params)
        assert jax.tree.structure(state) == jax.tree.structure(new_state)
        direction = np.asarray(updates["a"][0])
        np.testing.assert_array_equal(np.sign(direction), -np.sign(params["a"][0]))
    assert updates["b"]["frozen"] is grads["b"]["frozen"] or bool(
        (updates["b"]["frozen"] == grads["b"]["frozen"]).all()
    )


def test_bfloat16_parameters_are_rounded_stochastically():
    """1 + 2^-12 lies a 32nd of the way to the next bfloat16: on average it is kept, and rounding to
    nearest would never move. 4800 draws: a standard error of 2e-5 for a mean of 1 - 2.4e-4."""
    tx = adam8bit(2**-12, weight_decay=0.0, clip_norm=None).with_dtypes(jnp.float32, True)
    params = {"w": jnp.ones((80, 60), jnp.bfloat16)}
    new, _ = tx.apply({"w": params["w"]}, tx.init(params), params, context_of(0, names=params))
    assert new["w"].dtype == jnp.bfloat16
    assert float(jnp.mean(new["w"].astype(jnp.float32))) == pytest.approx(1 - 2**-12, abs=8e-5)
    assert len(np.unique(np.asarray(new["w"], np.float32))) == 2


def text_loss(steps, tx, rows=16, length=32):
    """The loss of a GPT-2 of two layers and width 64 on held-out Shakespeare."""
    ids = np.frombuffer(read_text().encode(), np.uint8).astype(np.int32)
    train, held_out = ids[:900_000], ids[900_000:960_000]
    config = ModelConfig(name="gpt2", num_layers=2, num_heads=4, embed_dim=64, max_seq_len=length)
    graph, params, rest = nnx.split(build_model(config, 128)(nnx.Rngs(0)), nnx.Param, ...)

    def loss_of(params, windows):
        model = nnx.merge(graph, params, rest)
        logits = model(windows[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()

    @functools.partial(jax.jit, donate_argnums=0)
    def step(carry, windows):
        params, state = carry
        grads = jax.grad(loss_of)(params, windows)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    rng = np.random.default_rng(1)

    def cut(text, number):
        starts = rng.integers(0, len(text) - length - 1, number)
        return text[starts[:, None] + np.arange(length + 1)]

    carry = params, tx.init(params)
    for _ in range(steps):
        carry = step(carry, cut(train, rows))
    assert any(x.dtype == jnp.int8 for x in jax.tree.leaves(carry[1])) == (
        coding_of(tx) is not None
    )
    return float(jax.jit(loss_of)(carry[0], cut(held_out, 256)))


@pytest.mark.slow
@pytest.mark.parametrize("b2", [0.999, 0.95])
def test_on_text_it_reaches_the_loss_of_float32_moments(b2):
    """From 5 to 2.45. Measured: within 0.00003 after 200 steps, 0.0012 after 300. With a learning
    rate 1.1 times as large it moves by 0.02."""
    schedule, options = optax.linear_schedule(3e-3, 3e-4, 200), {**DECAYED, "b2": b2}
    whole = text_loss(200, adamw(schedule, **options))
    coded = text_loss(200, adam8bit(schedule, **options))
    assert whole < 2.6
    assert coded == pytest.approx(whole, abs=0.003)
