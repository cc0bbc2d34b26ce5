"""Dimensions that can only be split together, in programs of a few operations."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from zerojax.tracing.splitting import DimGroups, gradient_program
from zerojax.tracing.splitting.factors import Factors

ROWS, TOKENS, WIDTH, HEADS, FEATURES = 2, 8, 24, 6, 4


def shaped(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


X = shaped(ROWS, TOKENS, WIDTH)


def groups_of(function, weights, *others):
    """{parameters with their dimensions: group} of a function of weights and other inputs."""
    program = jax.make_jaxpr(lambda w, *rest: function(w, *rest))(weights, *others)
    names = [f"other {i}" for i in range(len(others))]
    found = DimGroups(program.jaxpr, sorted(weights), [], names).find()
    return {tuple(group.dims.items()): group for group in found}


def group_at(groups, name, dim):
    """The group that a dimension has outermost."""
    return next(group for dims, group in groups.items() if (name, dim) in dims)


def test_a_cut_is_seen_by_every_value_that_has_the_factor():
    factors = Factors()
    features, other = factors.new_dim(24), factors.new_dim(24)
    assert factors.unify(features, other)
    heads, rest = factors.reshape((features,), (6, 4))
    assert factors.leaves(other) == factors.leaves((*heads, *rest))
    assert [factors.size(factor) for factor in factors.leaves(other)] == [6, 4]


def test_factors_of_both_sides_are_cut_to_their_common_ones():
    factors = Factors()
    first, second = factors.new_dim(24), factors.new_dim(24)
    factors.reshape((first,), (12, 2))
    factors.reshape((second,), (4, 6))
    assert factors.unify(first, second)
    assert [factors.size(factor) for factor in factors.leaves(first)] == [4, 3, 2]
    assert factors.leaves(first) == factors.leaves(second)


def test_factors_that_do_not_nest():
    factors = Factors()
    first, second = factors.new_dim(6), factors.new_dim(6)
    factors.reshape((first,), (2, 3))
    factors.reshape((second,), (3, 2))
    assert not factors.unify(first, second)
    assert factors.reshape((factors.new_dim(4), factors.new_dim(6)), (3, 8)) is None


def test_dimensions_of_size_1_and_merged_ones():
    factors = Factors()
    a, b = factors.new_dim(2), factors.new_dim(3)
    assert factors.new_dim(1) == ()
    assert factors.reshape((a, (), b), (1, 6)) == ((), (*a, *b))


def attend(weights, x):
    """Grouped queries: two heads of keys, each for three of queries."""
    split = lambda name, *heads: (x @ weights[name]).reshape(ROWS, TOKENS, *heads, FEATURES)  # noqa: E731
    query, key, value = split("q", 2, 3), split("k", 2), split("v", 2)
    scores = jax.nn.softmax(jnp.einsum("bqkgf,bskf->bkgqs", query, key))
    mixed = jnp.einsum("bkgqs,bskf->bqkgf", scores, value).reshape(ROWS, TOKENS, WIDTH)
    return mixed @ weights["o"] + weights["bias"][None, None]


ATTENTION = {
    "q": shaped(WIDTH, HEADS * FEATURES),
    "k": shaped(WIDTH, 2 * FEATURES),
    "v": shaped(WIDTH, 2 * FEATURES),
    "o": shaped(HEADS * FEATURES, 16),
    "bias": shaped(16),
}


def test_heads_of_keys_are_one_group():
    groups = groups_of(attend, ATTENTION, X)
    group = group_at(groups, "k", 1)
    assert dict(group.dims) == {"q": 1, "k": 1, "v": 1, "o": 0}
    assert (group.size, group.columns, group.rows) == (2, {"q", "k", "v"}, {"o"})
    assert group.obstacles == ()
    # The result of the last product, in float32.
    (one,) = group.sums
    assert (one.kind, one.num_bytes, one.weights) == ("product", ROWS * TOKENS * 16 * 4, {"o"})


def test_inner_factors_and_scores_are_obstacles():
    groups = groups_of(attend, ATTENTION, X)
    features = [group for group in groups.values() if group.size == FEATURES]
    scores = next(group for group in features if dict(group.dims) == {"q": 1, "k": 1})
    assert any("two activations" in why for why in scores.obstacles)
    assert all("not contiguous" in " ".join(group.obstacles) for group in features)


def test_what_all_values_have_is_another_group_and_the_bias_is_of_the_result():
    groups = groups_of(attend, ATTENTION, X)
    assert group_at(groups, "q", 0).inputs == ("other 0",)
    assert dict(group_at(groups, "bias", 0).dims) == {"o": 1, "bias": 0}


def test_layers_of_a_loop():
    def run(weights, x):
        def layer(x, w):
            return x + jnp.tanh(x @ w["up"]) @ w["down"], None

        return lax.scan(layer, x, weights)[0]

    stack = {"up": shaped(5, WIDTH, 64), "down": shaped(5, 64, WIDTH)}
    groups = groups_of(run, stack, X)
    group = group_at(groups, "up", 2)
    assert (dict(group.dims), group.obstacles) == ({"down": 1, "up": 2}, ())
    (one,) = group.sums
    assert (one.num_bytes, one.times) == (ROWS * TOKENS * WIDTH * 4, 5)
    assert group_at(groups, "up", 0).obstacles


def after(change):
    """The group of the hidden features, if they go through a change."""
    function = lambda w, x: change(x @ w["a"]) @ w["b"]  # noqa: E731
    weights = {"a": shaped(WIDTH, 32), "b": shaped(32, WIDTH)}
    return group_at(groups_of(function, weights, X), "a", 1)


@pytest.mark.parametrize(
    "change",
    [
        jnp.tanh,
        lambda y: jnp.where(y > 0, y, 0.1 * y),
        lambda y: jax.checkpoint(jax.nn.gelu)(y),
        lambda y: y.transpose(1, 2, 0).transpose(2, 0, 1),
        lambda y: y.reshape(-1, 32).reshape(ROWS, TOKENS, 32),
        lambda y: jnp.concatenate([y[:, :1], y[:, :-1]], axis=1),
        lambda y: jax.nn.softmax(y, axis=1),
        lambda y: jax.vmap(jax.nn.relu)(y),
        lambda y: lax.cond(jnp.ones(()) > 0, lambda: y, lambda: -y),
        lambda y: lax.fori_loop(0, 3, lambda _, y: y * 2, y),
    ],
)
def test_operations_that_keep_a_split_dimension(change):
    group = after(change)
    assert (dict(group.dims), group.obstacles) == ({"a": 1, "b": 0}, ())
    assert [one.weights for one in group.sums] == [{"b"}]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda y: y[..., ::-1], "reversed"),
        (lambda y: jnp.cumsum(y, axis=-1), "`cumsum`"),
        (lambda y: jnp.sort(y), "`sort`"),
        (lambda y: jnp.concatenate([y[..., 16:], y[..., :16]], axis=-1), "`slice`"),
        (lambda y: jnp.pad(y, ((0, 0), (0, 0), (1, 0)))[..., :32], "`pad`"),
        (
            lambda y: y.reshape(ROWS, TOKENS // 4, 4 * 32)[..., :32].repeat(4, axis=1),
            "not contiguous",
        ),
        (lambda y: jnp.fft.fft(y).real, "`fft`"),
        (lambda y: y + jnp.einsum("btf,btg->bfg", y, y).sum(1)[:, None], "twice"),
    ],
)
def test_operations_that_do_not(change, why):
    assert any(why in obstacle for obstacle in after(change).obstacles)


def test_lookups():
    def run(w, tokens):
        places = jnp.take(w["places"], jnp.arange(TOKENS), axis=0)
        return jnp.take(w["table"], tokens, axis=0) + places[None]

    weights = {"table": shaped(50, WIDTH), "places": shaped(TOKENS, WIDTH)}
    groups = groups_of(run, weights, shaped(ROWS, TOKENS, dtype=jnp.int32))
    rows = group_at(groups, "table", 0)
    assert (rows.tables, rows.by_batch, rows.sums[0].kind) == ({"table"}, True, "lookup")
    assert not group_at(groups, "places", 0).by_batch
    assert dict(group_at(groups, "table", 1).dims) == {"places": 1, "table": 1}


def test_sums_of_both_passes():
    """Two products of one input: their gradients by it are added, and may be reduced together."""

    def loss(weights, x):
        x = jnp.tanh(x @ weights["first"])
        hidden = jax.nn.silu(x @ weights["gate"]) * (x @ weights["up"])
        return jnp.mean((hidden @ weights["down"]) ** 2)

    weights = {
        "first": shaped(WIDTH, WIDTH),
        "gate": shaped(WIDTH, 64),
        "up": shaped(WIDTH, 64),
        "down": shaped(64, WIDTH),
    }
    names = sorted(weights)
    forward = jax.make_jaxpr(loss)(weights, X)
    program = gradient_program(forward, range(len(names)))
    both = DimGroups(program, names, [], ["x"], outputs=names)
    factor = both.group_at("up", 1)
    assert factor == both.group_at("gate", 1) == both.group_at("down", 0)
    one = ROWS * TOKENS * WIDTH * 4
    for added_first, number in ((False, 3), (True, 2)):
        found = both.totals([factor], added_first=added_first)
        assert [one for _, one in found if one.kind != "product"] == []
        assert sum(one.num_bytes for _, one in found) == number * one
