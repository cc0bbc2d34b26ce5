"""Which optimizers are proven not to see padding, and what the others cost."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from tests.optim.test_optax import STEPS, advance, alone, assert_equal, plan_of, trained
from zerojax.checkpoint import Checkpointer
from zerojax.forecasting.hlo import find_collectives, read_program
from zerojax.optim import OnTrueShapes, why_padding_shows
from zerojax.step.build import build_step
from zerojax.step.initialization import init_state
from zerojax.step.reshard import reshard_state, to_portable_state

TRUE = {"a": (5, 6), "b": (7,), "whole": (4, 2)}
STORED = {"a": (8, 6), "b": (8,), "whole": (4, 2)}
DIMS = {"a": {0}, "b": {0}, "whole": ()}


def of_leaves(function):
    return optax.stateless_with_tree_map(function)


def of_trees(function):
    return optax.stateless(lambda updates, params: function(updates, params))


def _loop(g, _):
    return jax.lax.fori_loop(0, 2, lambda _, x: x * 0.5, g)


def _by_sum_of_state():
    """A state that is not zero where there is padding, added up."""
    init, accumulate = optax.scale_by_rss(initial_accumulator_value=0.5)

    def update(updates, state, params=None):
        updates, state = accumulate(updates, state, params)
        size = sum(jnp.sum(x) for x in jax.tree.leaves(state))
        return jax.tree.map(lambda x: x / size, updates), state

    return optax.GradientTransformation(init, update)


PROVEN = {
    "elements": of_leaves(lambda g, p: jnp.tanh(g) * 0.1 + jnp.sign(p)),
    "a constant": of_leaves(lambda g, p: g + 1.0),
    "global norm": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.1)),
    "norm after Adam": optax.chain(optax.scale_by_adam(), optax.normalize_by_update_norm()),
    "a state that is not zero": optax.chain(
        optax.clip_by_global_norm(1.0), optax.scale_by_rss(initial_accumulator_value=0.5)
    ),
    "sums of rows": of_leaves(lambda g, p: g - jnp.sum(g, axis=0, keepdims=True)),
    "means along what is not padded": of_trees(
        lambda g, p: g | {"a": g["a"] - jnp.mean(g["a"], axis=1, keepdims=True)}
    ),
    "means of what is not padded": of_trees(
        lambda g, p: g | {"whole": g["whole"] - jnp.mean(g["whole"])}
    ),
    "several steps": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "transposed": of_leaves(lambda g, p: (g.T * 2).T),
}
NOT_PROVEN = {
    "mean": (of_leaves(lambda g, p: g - jnp.mean(g)), "program that differs|constants"),
    "largest": (of_leaves(lambda g, p: g / jnp.max(g)), "reduce_max of padded"),
    "smallest": (of_leaves(lambda g, p: g / jnp.min(g)), "reduce_min of padded"),
    "number of elements": (
        of_leaves(lambda g, p: g / jnp.sum(jnp.ones_like(g))),
        "reduce_sum of a constant",
    ),
    "sum of roots": (of_leaves(lambda g, p: g / jnp.sum(jnp.sqrt(g * g) + 0.1)), "reduce_sum of"),
    "sum of what does not stay zero": (
        of_leaves(lambda g, p: g + 1.0 - jnp.sum(p)),
        "reduce_sum of padded",
    ),
    "sum of a state": (_by_sum_of_state(), "reduce_sum of padded"),
    "running sum": (of_leaves(lambda g, p: jnp.cumsum(g, axis=0)), "cumsum of padded"),
    "order": (of_leaves(lambda g, p: jnp.sort(g, axis=0)), "sort of padded"),
    "turned round": (of_leaves(lambda g, p: jnp.flip(g, axis=0)), "rev of padded"),
    "noise": (optax.add_noise(0.1, 0.5, key=0), "random"),
    "places": (
        of_leaves(lambda g, p: g * jax.lax.broadcasted_iota(jnp.float32, g.shape, 0)),
        "iota in another shape",
    ),
    "product": (
        of_trees(lambda g, p: g | {"a": g["a"] @ (g["a"].T @ g["a"])}),
        "dot_general of padded",
    ),
    "loop": (of_leaves(_loop), "of padded arrays"),
    "flat": (of_leaves(lambda g, p: (g.ravel() * 2).reshape(g.shape)), "reshape of padded"),
    "mask by size": (
        optax.masked(optax.scale(2.0), lambda p: {n: x.size > 30 for n, x in p.items()}),
        "program that differs",
    ),
    "own shapes": (optax.sm3(0.1), "state of shape"),
}


def structs(shapes):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def why(tx, **options):
    return why_padding_shows(tx, structs(TRUE), structs(STORED), DIMS, frozenset(), **options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PROVEN)
def test_what_is_proven_is_so(name):
    """On zeros at the end of arrays the update is, at the places of the others, the same."""
    tx = PROVEN[name]
    assert why(tx) is None
    random = np.random.default_rng(3)
    trees = [
        {n: random.normal(size=shape).astype(np.float32) for n, shape in TRUE.items()}
        for _ in range(3)
    ]

    @jax.jit
    def run(params, *grads):
        state = tx.init(params)
        for each in grads:
            updates, state = tx.update(each, state, params)
            params = optax.apply_updates(params, updates)
        return params

    def padded(tree):
        widths = {n: [(0, b - a) for a, b in zip(TRUE[n], STORED[n], strict=True)] for n in tree}
        return {n: jnp.pad(x, widths[n]) for n, x in tree.items()}

    found = run(*map(padded, trees))
    cut = {n: x[tuple(map(slice, TRUE[n]))] for n, x in found.items()}
    assert_equal(cut, run(*trees))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", NOT_PROVEN)
def test_what_may_see_padding_is_not_proven(name):
    tx, reason = NOT_PROVEN[name]
    assert re.search(reason, why(tx))


def test_rows_without_a_layer_have_to_stay_zero():
    assert why(PROVEN["global norm"], stays_zero=True) is None
    assert "stay zero" in why(PROVEN["a constant"], stays_zero=True)


def test_rows_in_another_order_are_no_padding_to_noise():
    """Of one size, so that both programs are the same."""
    shapes = structs({"a": (4, 6)})
    noise = optax.add_noise(0.1, 0.5, key=0)
    assert why_padding_shows(noise, shapes, shapes, {"a": {0}}, frozenset()) is not None
    assert why_padding_shows(optax.adam(0.1), shapes, shapes, {"a": {0}}, frozenset()) is None


def compiled(tx):
    """Of a step that updates two kernels, 333 x 777 and 9 x 7 x 3, at stage 1."""
    shapes = {"large": (333, 777), "small": (9, 7, 3)}
    batch = {n: np.zeros((16, 1), np.float32) for n in shapes}

    def init(key):
        return {name: jax.random.normal(key, shape) for name, shape in shapes.items()}

    def apply(params, batch):
        return sum(x * jnp.sum(params[name]) for name, x in batch.items())

    plan = plan_of(tx, model=(init, apply), batch=lambda _: batch, persistence_threshold=10_000)
    state, given = plan.abstract_state, plan.abstract_batch
    return plan, build_step(plan).lower(state, given).compile().as_text()


def sent(program):
    """[(kind, bytes)] of the collectives of arrays that are larger than vectors."""
    found = find_collectives(read_program(program), 8)
    return sorted((c.kind, c.payload_bytes) for c in found if c.payload_bytes > 40_000)


@pytest.fixture(scope="module")
def baseline():
    return sent(compiled(optax.sgd(0.1))[1])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "is_true"),
    [("chain", False), ("clip_by_block_rms", True), ("adafactor", True), ("noise", True)],
)
def test_true_shapes_send_no_more_than_padded_ones(name, is_true, baseline):
    """Each device has the same part of both, so that padding is cut and put back in place."""
    tx = {
        "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
        "clip_by_block_rms": optax.chain(optax.clip_by_block_rms(0.1), optax.adamw(0.1)),
        "adafactor": optax.adafactor(0.1),
        "noise": optax.noisy_sgd(0.1, key=0),
    }[name]
    plan, program = compiled(tx)
    assert isinstance(plan.tx, OnTrueShapes) == is_true
    assert sent(program) == baseline


# The state of an optimizer on true shapes, elsewhere


def _with_rows_and_columns():
    """State of parameters' shapes, of shapes of its own, numbers, and a random key."""
    return optax.chain(
        optax.add_noise(0.1, 0.5, key=jax.random.key(2)),
        optax.adafactor(0.05, min_dim_size_to_factor=4, momentum=0.9),
        optax.contrib.reduce_on_plateau(patience=1),
    )


@pytest.mark.thorough
def test_a_state_with_shapes_of_its_own_is_saved_and_goes_on_on_another_mesh(tmp_path):
    """At stage 3 on 8 devices, then at stage 1 on 4, which pads otherwise; and moved back."""
    tx = _with_rows_and_columns()
    first, then = plan_of(tx, zero=3), plan_of(tx, zero=1, devices=4)
    state = advance(first, init_state(first), range(2))
    moved = reshard_state(first, then, state)
    assert_equal(to_portable_state(then, moved), to_portable_state(first, state))
    with Checkpointer(tmp_path / "run") as checkpointer:
        saved = to_portable_state(first, state)
        checkpointer.save(1, saved, data_state={}, config={}, plan={})
        checkpointer.wait()
        again = checkpointer.restore(then.abstract_portable).state
    assert_equal(again, saved)
    last = to_portable_state(then, advance(then, moved, range(2, STEPS)))
    params, opt_state = alone(tx)
    assert_equal(last["params"], params)
    assert_equal(last["opt_state"], opt_state)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["polyak_sgd", "momo"])
def test_the_loss_that_is_passed_on_is_the_mean_over_devices_and_microbatches(name):
    """Both divide by it, so that a microbatch's or a device's would show."""
    make = {"polyak_sgd": optax.polyak_sgd, "momo": optax.contrib.momo}[name]
    found, (params, _) = trained(make(), 2, num_microbatches=2), alone(make())
    assert_equal(found["params"], params)


@pytest.mark.thorough
@pytest.mark.parametrize("make", [zerojax.adamw, zerojax.adam8bit])
def test_a_mask_that_asks_for_shapes_is_told_the_true_ones(make):
    """Also where the step updates shards in place; decay is half of each parameter."""
    mask = lambda params: {name: x.size == 66 for name, x in params.items()}  # noqa: E731
    decayed, plain = (
        trained(make(0.1, weight_decay=each, mask=mask), 1)["params"] for each in (5.0, 0.0)
    )
    changed = {n for n in plain if not np.array_equal(decayed[n], plain[n])}
    assert changed == {"kernel"}


@pytest.mark.thorough
def test_keywords_that_a_transformation_does_not_take_are_left_out():
    def update(updates, state, params=None, *, value):
        return jax.tree.map(lambda x: -0.01 * x * value, updates), state

    tx = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    assert_equal(trained(tx, 1)["params"], alone(tx)[0])
