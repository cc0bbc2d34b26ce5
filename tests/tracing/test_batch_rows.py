"""How results depend on the rows of a batch, against what the functions say."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from zerojax.tracing.batch_rows import follow_rows, number_of_output
from zerojax.tracing.row_dependence import Count, Fixed, Other, Rows, Total, is_affine

R = 4
X, KERNEL = jnp.ones((R, 6)), jnp.ones((6, 5))
LABELS, TOKENS = jnp.zeros((R,), jnp.int32), jnp.zeros((R, 7), jnp.int32)
TABLE = jnp.ones((11, 6))
COUNT, FLOAT = jnp.int32(0), jnp.float32(0)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def follow(function, batch, fixed):
    """What the one result of `function(batch, fixed)` is; both are single arrays."""
    program = jax.make_jaxpr(function)(batch, fixed)
    (found,) = follow_rows(program, [Rows(0), Fixed(1)], R)
    return found


def attention(tokens, table):
    x = table[tokens]
    scores = jax.nn.softmax(jnp.einsum("bsd,btd->bst", x, x))
    return jnp.sum(jnp.einsum("bst,btd->bsd", scores, x))


def layers(x, kernels):
    def layer(x, kernel):
        return x + jnp.tanh(x @ kernel), x.mean(-1)

    x, means = lax.scan(jax.checkpoint(layer), x, kernels)
    return jnp.sum(x) + jnp.sum(means[1])


SUMS = {
    "sum": (lambda x, w: jnp.sum(jnp.tanh(x @ w)), X, KERNEL),
    "negative": (lambda x, w: -jnp.sum(x), X, KERNEL),
    "sum of means": (lambda x, w: jnp.sum(jnp.mean(x, 1)), X, KERNEL),
    "in steps": (lambda x, w: jnp.sum(jnp.sum((x @ w) ** 2, 0)), X, KERNEL),
    "of examples": (lambda x, w: jax.vmap(lambda row: jnp.sum((row @ w) ** 2))(x).sum(), X, KERNEL),
    "labels": (lambda n, x: cross_entropy(x, n).sum(), LABELS, jnp.ones((R, 5))),
    "tokens": (lambda t, w: cross_entropy(w[t], t % 6).sum(), TOKENS, TABLE),
    "flat tokens": (
        lambda t, w: cross_entropy(w[t].reshape(-1, 6), t.reshape(-1) % 6).sum(),
        TOKENS,
        TABLE,
    ),
    "last token": (lambda t, w: jnp.sum(w[t][:, -1]), TOKENS, TABLE),
    "one hot": (lambda t, w: jnp.sum(w[t] @ w.T * jax.nn.one_hot(t, 11)), TOKENS, TABLE),
    "attention": (attention, TOKENS, TABLE),
    "scaled": (lambda x, w: 0.3 * jnp.sum(x), X, KERNEL),
    "convolution": (
        lambda x, w: jnp.sum(
            lax.conv_general_dilated(x.reshape(R, 6, 1), w[None, :1], (1,), "SAME", None, None,
                                     ("NWC", "WIO", "NWC"))
        ),
        X,
        KERNEL,
    ),
    "stacked": (lambda x, w: jnp.sum(jnp.stack([x @ w, x[:, 1:]]) * jnp.stack([x[:, 1:], x @ w])),
                X, KERNEL),
    "unstacked": (lambda x, w: sum(map(jnp.sum, jnp.unstack(x, axis=1))), X, KERNEL),
    "tiled": (lambda x, w: jnp.sum(jnp.tile(x, (1, 2)) ** 2), X, KERNEL),
    "largest of each": (
        lambda x, w: jnp.sum(lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID")),
        X,
        KERNEL,
    ),
    "own reduction": (lambda x, w: jnp.sum(lax.reduce(x, 0.0, jnp.logaddexp, (1,))), X, KERNEL),
    "segments": (
        lambda t, w: jnp.sum(
            jax.vmap(lambda v, i: jax.ops.segment_sum(v, i, num_segments=3))(w[t], t % 3) ** 2
        ),
        TOKENS,
        TABLE,
    ),
    "first place": (lambda x, w: jnp.sum(x.at[:, 0].set(0.0) ** 2), X, KERNEL),
    "added": (lambda x, w: jnp.sum(jnp.zeros((R, 2)).at[:, 1].add(x[:, 0]) ** 2), X, KERNEL),
    "until": (
        lambda x, w: jnp.sum(
            lax.while_loop(lambda c: c[0] < w[0, 0], lambda c: (c[0] + 1, c[1] * 2), (0.0, x))[1]
        ),
        X,
        KERNEL,
    ),
    "spectrum": (lambda x, w: jnp.sum(jnp.abs(jnp.fft.rfft(x))), X, KERNEL),
    "roots": (
        lambda x, w: jnp.sum(jnp.linalg.cholesky(x[:, :, None] * x[:, None] + jnp.eye(6)[None])),
        X,
        KERNEL,
    ),
    "relu and branch": (
        lambda x, w: jnp.sum(lax.cond(w[0, 0] > 0, lambda: jax.nn.relu(x), lambda: x)),
        X,
        KERNEL,
    ),
}  # fmt: skip


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("function", "batch", "fixed"), SUMS.values(), ids=SUMS)
def test_sums_over_rows(function, batch, fixed):
    found = follow(function, batch, fixed)
    assert isinstance(found, Total)
    assert found.is_sum(R)


def test_sums_of_sums_have_no_scale():
    found = follow(layers, X, jnp.ones((3, 6, 6)))
    assert found == Total()
    found = follow(lambda x, w: jnp.sum(x) + 2.0 * jnp.sum(x**2), X, KERNEL)
    assert found == Total(None, is_scaled=True)
    assert not found.is_sum(R)


MEANS = {
    "mean": (lambda x, w: jnp.mean(jnp.tanh(x @ w)), X, KERNEL),
    "bfloat16": (lambda x, w: jnp.mean((x @ w).astype(jnp.bfloat16)), X, KERNEL),
    "of sums": (lambda x, w: jnp.mean(jnp.sum(x, 1)), X, KERNEL),
    "in steps": (lambda x, w: jnp.sum(jnp.mean(x, 0)), X, KERNEL),
    "by hand": (lambda x, w: jnp.sum(x) / x.shape[0], X, KERNEL),
    "half": (lambda x, w: 0.5 * jnp.mean(x**2), X, KERNEL),
    "twice": (lambda x, w: 2.0 * jnp.mean(x**2), X, KERNEL),
    "a share": (lambda x, w: 0.7 * jnp.mean(x**2), X, KERNEL),
    "a multiple before": (lambda x, w: jnp.sum(6.0 * x) * 3.0 / x.shape[0], X, KERNEL),
    "its double and itself": (lambda x, w: 3.0 * (jnp.mean(x) + jnp.mean(x @ w)), X, KERNEL),
    "by hand in steps": (lambda x, w: 0.7 * (jnp.sum(x) / 2) / (x.shape[0] / 2), X, KERNEL),
    "tokens": (lambda t, w: cross_entropy(w[t], t % 6).mean(), TOKENS, TABLE),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("function", "batch", "fixed"), MEANS.values(), ids=MEANS)
def test_means_over_rows_are_no_sums(function, batch, fixed):
    found = follow(function, batch, fixed)
    assert isinstance(found, Total)
    assert not found.is_sum(R)


UNKNOWN = {
    "coupled": (lambda x, w: jnp.sum((x - x.mean(0, keepdims=True)) ** 2), X, KERNEL),
    "norm": (lambda x, w: jnp.linalg.norm(x), X, KERNEL),
    "largest": (lambda x, w: jnp.max(x), X, KERNEL),
    "first row": (lambda x, w: jnp.sum(x[0]), X, KERNEL),
    "contrast": (lambda x, w: jnp.sum(x @ x.T), X, KERNEL),
    "branch": (lambda x, w: lax.cond(x[0, 0] > 0, lambda: 1.0, lambda: 2.0), X, KERNEL),
    "loop over rows": (lambda x, w: lax.scan(lambda s, r: (s + r[0], None), 0.0, x)[0], X, KERNEL),
    "sorted rows": (lambda x, w: jnp.sum(jnp.sort(x, 0)[:2]), X, KERNEL),
    "cumulated": (lambda x, w: jnp.sum(jnp.cumsum(x, 0)), X, KERNEL),
    "reversed": (lambda x, w: jnp.sum(x * x[::-1]), X, KERNEL),
    "transposed": (lambda x, w: jnp.sum(x[:, :R] * x[:, :R].T), X, KERNEL),
    "own reduction": (lambda x, w: jnp.sum(lax.reduce(x, 0.0, jnp.logaddexp, (0,))), X, KERNEL),
    "own windows": (
        lambda x, w: jnp.sum(lax.reduce_window(x, 0.0, jnp.logaddexp, (R, 1), (1, 1), "SAME")),
        X,
        KERNEL,
    ),
    "windows": (
        lambda x, w: jnp.sum(lax.reduce_window(x, 0.0, lax.max, (2, 1), (1, 1), "SAME")),
        X,
        KERNEL,
    ),
    "strides": (
        lambda x, w: jnp.sum(lax.reduce_window(x, 0.0, lax.max, (1, 1), (2, 1), "VALID")),
        X,
        KERNEL,
    ),
    "unstacked": (lambda x, w: jnp.sum(jnp.unstack(x)[0]), X, KERNEL),
    "stacked columns": (lambda x, w: jnp.sum(x[:R, :R] * jnp.stack([*x[:, :R].T])), X, KERNEL),
    "twice": (lambda x, w: jnp.sum(jnp.tile(x, (2, 1))[1:] ** 2), X, KERNEL),
    "one graph": (
        lambda t, w: jnp.sum(jax.ops.segment_sum(w[t[:, 0]], t[:, 1], num_segments=R) ** 2),
        TOKENS,
        TABLE,
    ),
    "first place": (lambda x, w: jnp.sum(x.at[0].set(0.0) ** 2), X, KERNEL),
    "until": (
        lambda x, w: jnp.sum(lax.while_loop(lambda x: x[0, 0] < 3, lambda x: x * 2, x)),
        X,
        KERNEL,
    ),
    "spectrum": (lambda x, w: jnp.sum(jnp.abs(jnp.fft.rfft2(x))), X, KERNEL),
    "one matrix": (lambda x, w: jnp.sum(jnp.linalg.cholesky(x[:, :R] + jnp.eye(R))), X, KERNEL),
    "weights by row": (lambda x, w: jnp.ones((3, R)) @ x, X, KERNEL),
}  # fmt: skip


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("function", "batch", "fixed"), UNKNOWN.values(), ids=UNKNOWN)
def test_what_couples_rows_is_not_taken_for_a_sum(function, batch, fixed):
    assert isinstance(follow(function, batch, fixed), Other)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: jnp.sum(x * x[:, :1]) / jnp.sum(x[:, 0]),
        lambda x, w: jnp.sum(x) / jnp.maximum(jnp.sum(x[:, 0]), 1.0),
        lambda x, w: jnp.average(x[:, 1], weights=x[:, 0]),
    ],
)
def test_quotients_of_sums(function):
    assert follow(function, X, KERNEL) == Other(is_ratio=True)


def penalties(x, w):
    def layer(loss, kernel):
        return loss + jnp.mean(jnp.tanh(x) @ kernel) + jnp.sum(kernel**2), None

    return lax.scan(layer, 0.0, w[None])[0]


AFFINE = {
    "penalty": (lambda x, w: jnp.mean(x @ w) + 0.1 * jnp.sum(w**2), X, KERNEL),
    "from 0": (lambda x, w: sum([jnp.mean(x), 2 * jnp.mean(x @ w)], 0.0), X, KERNEL),
    "in a loop": (penalties, X, KERNEL),
    "learned scale": (lambda x, s: jnp.mean(x) * jnp.exp(-s) + s, X, FLOAT),
    "twice": (lambda x, s: (jnp.mean(x) + s) + (jnp.mean(x**2) - s) / 2, X, FLOAT),
    "raised": (lambda x, s: s + (1.0 + jnp.mean(x)) + s, X, FLOAT),
    "stacked": (lambda x, w: jnp.stack([jnp.mean(x), 1.0 - jnp.mean(x @ w)]).mean(), X, KERNEL),
    "weights": (lambda x, w: w[0, :2] @ jnp.stack([x.mean(), (x**2).mean()]), X, KERNEL),
    "half": (lambda x, s: (jnp.mean(x) + 1).astype(jnp.bfloat16).astype(jnp.float32), X, FLOAT),
    "branch": (lambda x, s: lax.cond(s > 0, lambda: jnp.mean(x) + s, lambda: 0.0), X, FLOAT),
    "chosen": (lambda x, s: jnp.where(s > 0, jnp.mean(x) + 1, jnp.mean(x**2)), X, FLOAT),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("function", "batch", "fixed"), AFFINE.values(), ids=AFFINE)
def test_totals_and_terms_that_are_independent_of_the_batch(function, batch, fixed):
    assert is_affine(follow(function, batch, fixed))


NOT_AFFINE = {
    "root": (lambda x, w: jnp.sqrt(jnp.mean(x**2)) + jnp.sum(w**2), X, KERNEL),
    "root of both": (lambda x, w: jnp.sqrt(jnp.mean(x**2) + jnp.sum(w**2)), X, KERNEL),
    "ratio": (lambda x, w: jnp.sum(x) / jnp.sum(x[:, 0]) + 1, X, KERNEL),
    "product": (lambda x, s: (jnp.mean(x) + s) * (jnp.mean(x**2) + 1), X, FLOAT),
    "below": (lambda x, s: s / (1 + jnp.mean(x**2)), X, FLOAT),
    "rounded": (lambda x, s: (1.5 + jnp.mean(x)).astype(jnp.int32) + 1, X, FLOAT),
    "halved": (lambda x, c: lax.div(1 + jnp.sum(x > 0), 2), X, COUNT),
    "largest": (lambda x, s: jnp.maximum(s, 1.0 + jnp.mean(x)), X, FLOAT),
    "largest of two": (lambda x, s: jnp.max(jnp.stack([s, 1.0 + jnp.mean(x)])), X, FLOAT),
    "coupled": (lambda x, w: 1.0 + jnp.sum((x - x.mean(0, keepdims=True)) ** 2), X, KERNEL),
    "branch": (lambda x, s: lax.cond(x[0, 0] > 0, lambda: jnp.mean(x), lambda: s), X, FLOAT),
    "rows": (lambda x, w: x + 1, X, KERNEL),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("function", "batch", "fixed"), NOT_AFFINE.values(), ids=NOT_AFFINE)
def test_what_is_made_of_such_a_sum_otherwise(function, batch, fixed):
    assert not is_affine(follow(function, batch, fixed))


COUNTS = {
    "integer": (lambda x, c: c + jnp.sum(x[:, 0] > 0).astype(jnp.int32), X, COUNT),
    "other side": (lambda x, c: jnp.sum(x > 0) + c, X, COUNT),
    "minus": (lambda x, c: c - jnp.sum(x > 0), X, COUNT),
    "twice": (lambda x, c: c + jnp.sum(x > 0) + 3 * jnp.sum(x > 1), X, COUNT),
    "histogram": (lambda t, c: c + jax.nn.one_hot(t, 11, dtype=jnp.int32).sum((0, 1)), TOKENS,
                  jnp.zeros(11, jnp.int32)),
    "float": (lambda x, c: c + jnp.sum(x > 0).astype(jnp.float32), X, FLOAT),
}  # fmt: skip


@pytest.mark.parametrize(("function", "batch", "fixed"), COUNTS.values(), ids=COUNTS)
def test_counts(function, batch, fixed):
    found = follow(function, batch, fixed)
    assert isinstance(found, Count)
    assert found.input == 1


NO_COUNTS = {
    "largest": (lambda x, c: jnp.maximum(c, jnp.max(x).astype(jnp.int32)), X, COUNT),
    "any": (lambda x, c: c + jnp.any(x > 0), X, COUNT),
    "rounded": (lambda x, c: c + jnp.sum(x).astype(jnp.int32), X, COUNT),
    "halved": (lambda x, c: c + lax.div(jnp.sum(x > 0), 2), X, COUNT),
    "decayed": (lambda x, c: 0.9 * c + jnp.sum(x), X, FLOAT),
    "doubled": (lambda x, c: 2 * c + jnp.sum(x > 0), X, COUNT),
    "taken from": (lambda x, c: jnp.sum(x > 0) - c, X, COUNT),
    "until": (lambda x, c: jnp.where(c > 5, c, c + jnp.sum(x > 0)), X, COUNT),
}


@pytest.mark.parametrize(("function", "batch", "fixed"), NO_COUNTS.values(), ids=NO_COUNTS)
def test_what_is_no_count(function, batch, fixed):
    assert not isinstance(follow(function, batch, fixed), Count | Fixed)


def test_what_is_independent_of_the_batch():
    assert follow(lambda x, c: c + 1, X, COUNT) == Fixed()
    assert follow(lambda x, c: c, X, COUNT) == Fixed(1)
    assert follow(lambda x, c: c + x.shape[0], X, COUNT) == Fixed()
    assert follow(lambda x, c: lax.fori_loop(0, 3, lambda _, c: c * 2, c), X, COUNT) == Fixed()


def test_one_row():
    """A mean over one row divides by 1, a sum by nothing."""

    def one(function):
        program = jax.make_jaxpr(function)(X[:1])
        (found,) = follow_rows(program, [Rows(0)], 1)
        return found.is_sum(1)

    assert one(jnp.sum)
    assert one(lambda x: -jnp.sum(x))
    assert not one(jnp.mean)
    assert not one(lambda x: jnp.sum(x) / x.shape[0])


def test_numbers_of_outputs():
    assert not Total().is_sum(1, weight=1.0)  # the rows counted, as well as a constant
    assert Total().is_sum(4, weight=1.0)
    assert not Total().is_sum(4, weight=8.0)
    assert not Total(2.0, is_scaled=True).is_sum(8, weight=8.0)  # 2 * jnp.sum(x), the rows
    program = jax.make_jaxpr(lambda x: (jnp.sum(x), 1.0, jnp.float32(3), x.shape[0]))(X)
    assert [number_of_output(program, place) for place in range(4)] == [None, 1.0, 3.0, 4.0]
