"""Every optimizer of zerojax does what optax's does: the same states, in place the same numbers.

`update` is made of optax's parts and equals it bit for bit. `apply` runs the fused rule, which
divides and contracts in another order; `optim_steps.TOLERANCE` says what that may cost.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support.optim_steps import (
    MASK,
    SCHEDULE,
    SHAPES,
    check_close,
    check_same,
    clipping_of,
    context,
    gradient,
    make_params,
    run_apply,
    run_update,
)
from tests.support.recipe import DECAYED, RECIPE
from zerojax.optim import adamw, decay_mask, lamb, lion, sgd


def decayed_sgd(rate, decay, mask, **options):
    return optax.chain(optax.add_decayed_weights(decay, mask), optax.sgd(rate, **options))


def clipped(limit, tx):
    return optax.chain(optax.clip_by_global_norm(limit), tx)


PAIRS = {
    "adamw": (
        adamw(3e-2, b2=0.95, weight_decay=0.1, mask=decay_mask),
        optax.adamw(3e-2, 0.9, 0.95, weight_decay=0.1, mask=decay_mask),
    ),
    "adamw, schedule, tree as mask": (
        adamw(SCHEDULE, b1=0.8, b2=0.999, eps=1e-6, weight_decay=0.5, mask=MASK),
        optax.adamw(SCHEDULE, 0.8, 0.999, 1e-6, weight_decay=0.5, mask=MASK),
    ),
    "adamw, no mask": (
        adamw(3e-2, b2=0.95, weight_decay=0.1),
        optax.adamw(3e-2, 0.9, 0.95, weight_decay=0.1),
    ),
    "adamw, clipped": (
        adamw(SCHEDULE, **{**RECIPE, "clip_norm": 0.5}),
        clipped(0.5, optax.adamw(SCHEDULE, 0.9, 0.95, weight_decay=0.1, mask=decay_mask)),
    ),
    "lion": (
        lion(SCHEDULE, weight_decay=0.3, mask=decay_mask),
        optax.lion(SCHEDULE, 0.9, 0.99, weight_decay=0.3, mask=decay_mask),
    ),
    "lion, a number": (
        lion(1e-2, b1=0.95, b2=0.98, weight_decay=0.0, mask=MASK),
        optax.lion(1e-2, 0.95, 0.98, weight_decay=0.0, mask=MASK),
    ),
    "lamb": (
        lamb(SCHEDULE, weight_decay=0.01, mask=decay_mask, clip_norm=2.0),
        clipped(2.0, optax.lamb(SCHEDULE, weight_decay=0.01, mask=decay_mask)),
    ),
    "lamb, a number": (
        lamb(1e-2, b1=0.8, b2=0.95, eps=1e-4, weight_decay=0.3),
        optax.lamb(1e-2, 0.8, 0.95, 1e-4, weight_decay=0.3),
    ),
    "sgd": (sgd(1e-2), optax.sgd(1e-2)),
    "sgd, schedule": (sgd(SCHEDULE, clip_norm=1.0), clipped(1.0, optax.sgd(SCHEDULE))),
    "sgd, momentum": (sgd(SCHEDULE, momentum=0.9), optax.sgd(SCHEDULE, momentum=0.9)),
    "sgd, momentum and decay": (
        sgd(1e-2, momentum=0.8, weight_decay=0.3, mask=MASK),
        decayed_sgd(1e-2, 0.3, MASK, momentum=0.8),
    ),
    "sgd, decay": (sgd(1e-2, weight_decay=0.3), decayed_sgd(1e-2, 0.3, None)),
    "sgd, nesterov": (
        sgd(SCHEDULE, momentum=0.9, nesterov=True, **DECAYED),
        clipped(1.0, decayed_sgd(SCHEDULE, 0.1, decay_mask, momentum=0.9, nesterov=True)),
    ),
}
pairs = pytest.mark.parametrize(("mine", "theirs"), PAIRS.values(), ids=PAIRS)


@pytest.mark.sampled(2)
@pairs
def test_it_is_optax(mine, theirs):
    params = make_params()
    check_same(mine.init(params), theirs.init(params))
    assert jax.tree.structure(mine.init(params)) == jax.tree.structure(theirs.init(params))
    expected = run_update(theirs, params)
    check_same(run_update(mine, params), expected)
    check_close(run_apply(mine, params, scale_of=clipping_of(mine)), expected)


@pytest.mark.sampled(2)
@pairs
def test_a_skipped_step_changes_nothing(mine, theirs):
    params = make_params()
    before = run_apply(mine, params, range(2), scale_of=clipping_of(mine))
    bad = jax.tree.map(lambda g: jnp.full_like(g, jnp.nan).at[0].set(jnp.inf), gradient(2))
    skip = functools.partial(context, scale=jnp.nan, skip=True)
    after = jax.jit(lambda p, s: mine.apply(bad, s, p, skip()))(*before)
    check_same(after, before)
    again = run_apply(mine, after[0], range(3, 5), scale_of=clipping_of(mine), state=after[1])
    check_close(again, run_update(theirs, params, (0, 1, 3, 4)))


@pytest.mark.thorough
def test_in_a_chain_it_is_a_transformation_like_others():
    params = make_params()
    ours = optax.chain(optax.scale(0.5), adamw(SCHEDULE, **{**RECIPE, "clip_norm": 0.5}))
    same = PAIRS["adamw, clipped"][1]
    check_same(run_update(ours, params), run_update(optax.chain(optax.scale(0.5), same), params))


@pytest.mark.thorough
def test_a_step_that_has_the_norm_hands_it_over():
    params, tx = make_params(), adamw(1e-2, **RECIPE)
    alone = tx.update(gradient(0), tx.init(params), params)
    given = tx.update(gradient(0), tx.init(params), params, grad_norm=optax.tree.norm(gradient(0)))
    check_same(given, alone)


def test_learning_rates_and_decay_can_be_injected():
    make = optax.inject_hyperparams(adamw, static_args=("mask", "groups", "impl"))
    params = make_params()
    # Injected numbers are float32, in which 1 - 0.999 has lost three digits, and 1 - 0.95 one.
    injected, plain = make(learning_rate=1e-2, **RECIPE), adamw(3e-2, **RECIPE)
    state = injected.init(params)
    state.hyperparams["learning_rate"] = jnp.float32(3e-2)
    updates, _ = injected.update(gradient(0), state, params)
    expected, _ = plain.update(gradient(0), plain.init(params), params)
    check_close(updates, expected)


def test_decay_can_be_injected_beside_groups():
    groups = {"embed": {"weight_decay": 0.0}}
    make = optax.inject_hyperparams(functools.partial(adamw, groups=groups))
    plain = adamw(1e-2, b2=0.95, weight_decay=0.1, groups=groups)
    params, injected = make_params(), make(learning_rate=1e-2, b2=0.95, weight_decay=0.1)
    updates, _ = jax.jit(injected.update)(gradient(0), injected.init(params), params)
    expected, _ = plain.update(gradient(0), plain.init(params), params)
    check_close(updates, expected)


GROUPS = {
    "^embed": {"learning_rate_factor": 0.1, "weight_decay": 0.0},
    "kernel$": {"weight_decay": 0.4},
    "bias|embed": {"learning_rate_factor": 3.0},
}
LABELS = dict(zip(SHAPES, ("bias", "kernel", "embed", "rest"), strict=True))


def grouped_by_optax(make, decay, clip_norm=None):
    """`optax.partition` over optimizers of their own, which is how optax has groups."""
    scaled = lambda factor: lambda count: factor * SCHEDULE(count)  # noqa: E731
    tx = optax.partition(
        {
            "embed": make(scaled(0.1), 0.0),
            "kernel": make(SCHEDULE, 0.4),
            "bias": make(scaled(3.0), decay),
            "rest": make(SCHEDULE, decay),
        },
        LABELS,
    )
    return tx if clip_norm is None else clipped(clip_norm, tx)


def decay_all(params):
    """A mask that stays right for what `optax.partition` leaves of the parameters."""
    return jax.tree.map(lambda x: True, params)


UNMASKED = {"b2": 0.95, "weight_decay": 0.1, "mask": decay_all, "clip_norm": 0.5}
GROUPED = {
    "adamw": (
        adamw(SCHEDULE, **UNMASKED, groups=GROUPS),
        adamw(SCHEDULE, **UNMASKED),
        grouped_by_optax(lambda r, d: optax.adamw(r, 0.9, 0.95, weight_decay=d), 0.1, 0.5),
    ),
    "lion": (
        lion(SCHEDULE, weight_decay=0.3, groups=GROUPS),
        lion(SCHEDULE, weight_decay=0.3),
        grouped_by_optax(lambda r, d: optax.lion(r, 0.9, 0.99, weight_decay=d), 0.3),
    ),
    "lamb": (
        lamb(SCHEDULE, weight_decay=0.01, groups=GROUPS),
        lamb(SCHEDULE, weight_decay=0.01),
        grouped_by_optax(lambda r, d: optax.lamb(r, weight_decay=d), 0.01),
    ),
    "sgd": (
        sgd(SCHEDULE, momentum=0.9, weight_decay=0.2, groups=GROUPS),
        sgd(SCHEDULE, momentum=0.9, weight_decay=0.2),
        grouped_by_optax(lambda r, d: decayed_sgd(r, d, None, momentum=0.9), 0.2),
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("mine", "plain", "theirs"), GROUPED.values(), ids=GROUPED)
def test_groups_are_optax_partition_with_the_state_of_one_optimizer(mine, plain, theirs):
    params = make_params()
    assert jax.tree.structure(mine.init(params)) == jax.tree.structure(plain.init(params))
    expected, _ = run_update(theirs, params)
    updated, state = run_update(mine, params)
    check_close(updated, expected)
    applied, fused = run_apply(mine, params, scale_of=clipping_of(mine))
    check_close(applied, expected)
    check_close(fused, state)
    # The groups matter.
    difference = run_update(plain, params)[0]["embed"] - expected["embed"]
    assert float(jnp.abs(difference).max()) > 1e-3


def test_the_mask_holds_in_groups_as_well():
    groups = {"block": {"weight_decay": 0.25}}
    tx = sgd(1.0, weight_decay=0.5, mask=decay_mask, groups=groups)
    params = make_params()
    zeros = jax.tree.map(jnp.zeros_like, params)
    after, _ = tx.apply(zeros, tx.init(params), params, context())
    expected = {"block/bias": 1, "block/kernel": 0.75, "embed": 0.5, "norm/scale": 1}
    for name, factor in expected.items():
        np.testing.assert_allclose(after[name], factor * params[name], rtol=1e-6)


def test_names_come_from_any_tree():
    params = {"block": [{"kernel": jnp.ones((2, 2))}, {"kernel": jnp.ones((2, 2))}]}
    tx = adamw(1.0, weight_decay=0.5, groups={"block/1": {"learning_rate_factor": 0.0}})
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = tx.update(zeros, tx.init(params), params)
    np.testing.assert_array_equal(updates["block"][0]["kernel"], -0.5)
    np.testing.assert_array_equal(updates["block"][1]["kernel"], 0.0)


def test_which_state_belongs_to_a_parameter_is_known_to_optax():
    params = make_params()
    tx = adamw(SCHEDULE, groups=GROUPS, clip_norm=1.0)
    named = optax.tree_utils.tree_map_params(
        tx.init, lambda _, name: name, tx.init(params), {name: name for name in params}
    )
    assert named[1][0].mu == named[1][0].nu == {name: name for name in params}


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: adamw(1e-3, groups={"kernle": {}}),
            "'kernle' matches none of the 4 .* block/kernel",
        ),
        (
            lambda: adamw(1e-3, groups={"block": {}, "block/bias": {}}),
            "the 1 parameters that 'block/bias' matches already belong to earlier groups",
        ),
        (
            lambda: adamw(1e-3, mask=decay_mask, groups={"scale": {"weight_decay": 0.1}}),
            "'scale' sets weight_decay=0.1, but the mask excludes all of its 1 .*mask=None",
        ),
        (
            lambda: adamw(1e-3, mask={"embd": True}),
            r"mask: its entries \(embd\) match .*\(block/bias, .*decay_mask",
        ),
    ],
)
def test_what_does_not_fit_the_parameters_is_refused_by_init(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make().init(make_params())


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: adamw(-1.0), r"learning_rate=-1.0 must be at least 0"),
        (lambda: adamw(1e-3, b1=1.0), r"b1=1.0 must be in \[0, 1\); 0.9 is usual"),
        (lambda: lion(1e-3, b2=-0.1), r"b2=-0.1 must be in \[0, 1\)"),
        (lambda: lamb(1e-3, eps=0.0), "eps=0.0 must be above 0"),
        (lambda: sgd(1.0, momentum=1), r"momentum=1 must be in \[0, 1\)"),
        (lambda: sgd(1.0, nesterov=True), "nesterov=True needs momentum"),
        (lambda: adamw(1e-3, weight_decay=-0.1), "weight_decay=-0.1 must be at least 0"),
        (lambda: adamw(1e-3, clip_norm=0), "clip_norm=0 must be above 0, or None"),
        (lambda: adamw(1e-3, groups={"(": {}}), r"groups: '\(' is not a regular expression"),
        (
            lambda: adamw(1e-3, groups={"embed": {"learning_rate": 1e-3}}),
            "groups: 'embed': learning_rate: unknown key; did you mean 'learning_rate_factor'",
        ),
        (
            lambda: adamw(1e-3, groups={"embed": {"weight_decay": -1}}),
            "groups: 'embed': weight_decay: -1.0 must be >= 0",
        ),
    ],
)
def test_numbers_out_of_range_are_refused_at_once(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()
