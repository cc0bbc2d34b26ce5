"""`zerojax.experts` gives what every expert applied to every token and masked by gates gives.

No row is lost at any routing, and derivatives are those of the plain way.
"""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zerojax
from tests.support.trajectories import TOLERANCE as OF_LOSSES
from tests.support.trajectories import regression_batch, train_for
from zerojax.models.losses import mean_squared_error
from zerojax.operators.expert_rows import from_slots, slots_of_round, sort_choices, to_slots
from zerojax.operators.routed_experts import rounds_needed, slots_per_expert
from zerojax.tracing.flops import count_flops

TOKENS, WIDTH, HIDDEN, EXPERTS, K = 64, 16, 24, 8, 2
TOLERANCE = {"float32": 2e-6, "float64": 1e-12}
"""Of a leaf's largest entry: both ways sum the same products in other orders."""


def swiglu(weights: dict[str, jax.Array], rows: jax.Array) -> jax.Array:
    gate = jnp.einsum("ecd,edf->ecf", rows, weights["gate"])
    up = jnp.einsum("ecd,edf->ecf", rows, weights["up"])
    return jnp.einsum("ecf,efd->ecd", jax.nn.silu(gate) * up, weights["down"])


def plain(x: Any, gates: Any, ids: Any, weights: Any, apply: Any = swiglu) -> jax.Array:
    """Every expert on every token; shares no code with `zerojax.experts`."""
    num_experts = jax.tree.leaves(weights)[0].shape[0]
    each = apply(weights, jnp.broadcast_to(x[None], (num_experts, *x.shape)))
    chosen = jax.nn.one_hot(ids, num_experts, dtype=gates.dtype)  # [T, k, E]
    return jnp.einsum("tke,tk,etd->td", chosen, gates, each)


def arrays(dtype: Any, seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape) / np.sqrt(shape[-2]), dtype)

    return {
        "x": normal(TOKENS, WIDTH) * 8,
        "gates": jnp.asarray(random.random((TOKENS, K)), dtype),
        "weights": {
            "gate": normal(EXPERTS, WIDTH, HIDDEN),
            "up": normal(EXPERTS, WIDTH, HIDDEN),
            "down": normal(EXPERTS, HIDDEN, WIDTH),
        },
        "slope": normal(TOKENS, WIDTH),
    }


def routing(kind: str, seed: int = 0) -> jax.Array:
    random = np.random.default_rng(seed)
    if kind == "balanced":
        ids = (np.arange(TOKENS * K).reshape(TOKENS, K) % EXPERTS)[random.permutation(TOKENS)]
    elif kind == "all to one":
        ids = np.full((TOKENS, K), 3)
    else:
        ids = np.stack([random.permutation(EXPERTS)[:K] for _ in range(TOKENS)])
    return jnp.asarray(ids, jnp.int32)


def result_and_slopes(way: Any, given: dict[str, Any], ids: jax.Array, **options: Any) -> Any:
    def total(x: Any, gates: Any, weights: Any) -> Any:
        out = way(x, gates, ids, weights, swiglu, **options)
        return jnp.sum(given["slope"] * out), out

    run = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)
    (_, out), slopes = jax.jit(run)(given["x"], given["gates"], given["weights"])
    return out, slopes


def assert_close(found: Any, expected: Any, tolerance: float) -> None:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for one, other in pairs:
        one, other = np.asarray(one), np.asarray(other)
        assert one.dtype == other.dtype
        assert np.abs(one - other).max() <= tolerance * np.abs(other).max()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["balanced", "random", "all to one"])
def test_values_and_gradients_are_those_of_every_expert_on_every_token(kind, dtype):
    with jax.enable_x64(dtype == "float64"):
        given, ids = arrays(dtype), routing(kind)
        found = result_and_slopes(zerojax.experts, given, ids)
        assert_close(found, result_and_slopes(plain, given, ids), TOLERANCE[dtype])
        # Many rounds of few rows, and one round that has room for all, are the same function.
        for slack in (0.3, 8.0):
            other = result_and_slopes(zerojax.experts, given, ids, slack=slack)
            assert_close(other, found, TOLERANCE[dtype])


def test_every_row_goes_in_and_comes_out_for_100_random_routings():
    rows = jnp.arange(1.0, TOKENS + 1)[:, None]  # each row is its own number: sums are exact

    @functools.partial(jax.jit, static_argnums=1)
    def through(ids: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
        routes = sort_choices(ids, EXPERTS)

        def one(begin: jax.Array) -> tuple[jax.Array, jax.Array]:
            slots = slots_of_round(routes, capacity, begin)
            sent = to_slots(rows, slots)
            return from_slots(sent, slots, jnp.float32), jnp.sum(slots.is_taken)

        out, taken = jax.vmap(one)(jnp.arange(0, TOKENS * K, capacity))
        return jnp.sum(out, axis=0), jnp.sum(taken)

    for seed in range(100):
        random = np.random.default_rng(seed)
        skew = random.dirichlet(np.full(EXPERTS, 0.1 + seed % 10))
        ids = jnp.asarray(random.choice(EXPERTS, (TOKENS, K), p=skew), jnp.int32)
        out, taken = through(ids, slots_per_expert(TOKENS, K, EXPERTS, 1.25))
        assert int(taken) == TOKENS * K
        np.testing.assert_array_equal(np.asarray(out), K * np.asarray(rows))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["balanced", "all to one"])
def test_no_slot_that_is_not_taken_has_part_in_anything(kind):
    """Experts that divide by the length of a row have no value and no derivative at zeros."""
    given, ids = arrays("float32"), routing(kind)

    def normed(weights: Any, rows: jax.Array) -> jax.Array:
        return swiglu(weights, rows / jnp.linalg.norm(rows, axis=-1, keepdims=True))

    def total(way: Any, x: Any, gates: Any, weights: Any) -> jax.Array:
        return jnp.sum(given["slope"] * way(x, gates, ids, weights, normed))

    inputs = given["x"], given["gates"], given["weights"]
    found, expected = (
        jax.jit(jax.grad(functools.partial(total, way), argnums=(0, 1, 2)))(*inputs)
        for way in (zerojax.experts, plain)
    )
    assert_close(found, expected, 2e-6)


@pytest.mark.thorough
def test_a_buffer_full_of_nan_gives_nothing_of_itself():
    """What a slot holds that no choice has is never read, in either direction."""
    routes = sort_choices(routing("random"), EXPERTS)
    slots = slots_of_round(routes, 32, 0)
    is_taken = np.asarray(slots.is_taken)
    assert 0 < is_taken.sum() < is_taken.size
    filled = jnp.where(slots.is_taken[:, None], 1.0, jnp.nan) * jnp.ones((1, WIDTH))
    out, pull = jax.vjp(lambda values: from_slots(values, slots, jnp.float32), filled)
    np.testing.assert_array_equal(out, np.full((TOKENS, WIDTH), K, np.float32))
    (slope,) = pull(jnp.ones_like(out))
    np.testing.assert_array_equal(slope[:, 0], is_taken.astype(np.float32))
    _, pull = jax.vjp(lambda rows: to_slots(rows, slots), jnp.ones((TOKENS, WIDTH)))
    np.testing.assert_array_equal(pull(filled)[0], np.full((TOKENS, WIDTH), K, np.float32))


@pytest.mark.thorough
@pytest.mark.parametrize(("fullest", "rounds"), [(20, 1), (21, 2), (25, 2), (26, 3), (128, 23)])
def test_only_as_many_rounds_run_as_the_fullest_expert_needs(fullest, rounds):
    """Of 20 slots in the first and 5 in each further one."""
    assert slots_per_expert(TOKENS, K, EXPERTS, 1.25) == 20
    flat = np.arange(TOKENS * K) % (EXPERTS - 1) + 1
    flat[:fullest] = 0  # others have at most 19
    given, seen = arrays("float32"), []

    def count(rows: Any) -> Any:
        seen.append(rows.shape)
        return rows

    def apply(weights: Any, rows: jax.Array) -> jax.Array:
        rows = jax.pure_callback(count, jax.ShapeDtypeStruct(rows.shape, rows.dtype), rows)
        return swiglu(weights, rows)

    ids = jnp.asarray(flat.reshape(TOKENS, K), jnp.int32)
    out = zerojax.experts(given["x"], given["gates"], ids, given["weights"], apply)
    assert_close(out, plain(given["x"], given["gates"], ids, given["weights"]), 2e-6)
    assert seen == [(EXPERTS, 20, WIDTH)] + [(EXPERTS, 5, WIDTH)] * (rounds - 1)
    assert rounds_needed(ids, EXPERTS) == rounds


@pytest.mark.thorough
def test_rounds_are_summed_in_float32():
    """1024 ones, two at a time: in bfloat16 the sum would stay at 512, since 512 + 2 is 512."""
    rows, ids = jnp.ones((1024, 1), jnp.bfloat16), jnp.zeros((1024, 1), jnp.int32)

    def total(weights: jax.Array) -> jax.Array:
        apply = lambda weights, rows: jnp.einsum("ecd,edf->ecf", rows, weights)  # noqa: E731
        gates = jnp.ones((1024, 1), jnp.float32)
        out = zerojax.experts(rows, gates, ids, weights, apply, slack=0.01)
        return jnp.sum(out.astype(jnp.float32))

    slope = jax.jit(jax.grad(total))(jnp.ones((2, 1, 1), jnp.bfloat16))
    assert slope.dtype == jnp.bfloat16
    assert slope.reshape(-1).tolist() == [1024, 0]


def test_a_slot_that_nobody_needs_has_a_row_of_its_own_expert():
    routes = sort_choices(routing("random"), EXPERTS)
    slots = slots_of_round(routes, 32, 0)
    held = np.asarray(routes.expert).reshape(-1)[np.asarray(slots.choice)].reshape(EXPERTS, -1)
    np.testing.assert_array_equal(held, np.arange(EXPERTS)[:, None] * np.ones_like(held))
    assert not np.asarray(slots.is_taken).all()


@pytest.mark.thorough
def test_bfloat16_rows_are_summed_in_float32():
    """16-bit results are within the rounding of one 16-bit number of the same with wide sums."""
    given, ids = arrays("bfloat16"), routing("all to one")
    given["gates"] = given["gates"].astype(jnp.float32)
    out, slopes = result_and_slopes(zerojax.experts, given, ids)
    assert out.dtype == jnp.bfloat16
    assert [x.dtype for x in jax.tree.leaves(slopes)] == [
        jnp.bfloat16,
        jnp.float32,
        *[jnp.bfloat16] * 3,
    ]
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), given)
    exact = result_and_slopes(plain, wide, ids)
    for one, other in zip(jax.tree.leaves((out, slopes)), jax.tree.leaves(exact), strict=True):
        error = np.abs(np.asarray(one, np.float32) - np.asarray(other)).max()
        assert error <= 0.02 * np.abs(np.asarray(other)).max()  # a few roundings of 2**-8


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["balanced", "all to one"])
def test_layers_in_a_scan_with_checkpoints_are_the_same(kind):
    given, ids = arrays("float32"), routing(kind)
    layers = jax.tree.map(lambda w: jnp.stack([w, w * 0.5]), given["weights"])

    def total(way: Any, keep: bool, x: Any, gates: Any, layers: Any) -> jax.Array:
        def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
            return x + way(x, gates, ids, weights, swiglu), None

        body = layer if keep else jax.checkpoint(layer)
        return jnp.sum(given["slope"] * jax.lax.scan(body, x, layers)[0])

    inputs = given["x"], given["gates"], layers
    expected = jax.jit(jax.grad(functools.partial(total, plain, True), argnums=(0, 1, 2)))(*inputs)
    for keep in (True, False):
        run = functools.partial(total, zerojax.experts, keep)
        found = jax.jit(jax.grad(run, argnums=(0, 1, 2)))(*inputs)
        assert_close(found, expected, 4e-6)  # two layers: twice the sums


def test_leading_dimensions_are_rows():
    given, ids = arrays("float32"), routing("random")
    whole = zerojax.experts(given["x"], given["gates"], ids, given["weights"], swiglu)
    shaped = zerojax.experts(
        given["x"].reshape(4, -1, WIDTH),
        given["gates"].reshape(4, -1, K),
        ids.reshape(4, -1, K),
        given["weights"],
        swiglu,
    )
    np.testing.assert_array_equal(shaped.reshape(whole.shape), whole)


class Routed(nnx.Module):
    """Two scanned layers of a router and its experts."""

    def __init__(self, rngs: nnx.Rngs):
        make = nnx.initializers.lecun_normal(batch_axis=0)
        key = rngs.params
        self.router = nnx.Param(make(key(), (2, 12, 4)))
        self.up = nnx.Param(make(key(), (2, 4, 12, 20)))
        self.down = nnx.Param(make(key(), (2, 4, 20, 12)))
        self.head = nnx.Linear(12, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        def apply(weights: Any, rows: jax.Array) -> jax.Array:
            hidden = jnp.einsum("ecd,edf->ecf", rows, weights[0])
            return jnp.einsum("ecf,efd->ecd", jax.nn.gelu(hidden), weights[1])

        def layer(x: jax.Array, held: Any) -> tuple[jax.Array, None]:
            router, *weights = held
            gates, ids = jax.lax.top_k(jax.nn.softmax(x @ router), 2)
            return x + zerojax.experts(x, gates, ids, weights, apply), None

        return self.head(jax.lax.scan(layer, x, (self.router, self.up, self.down))[0])


def routed_loss(model: Any, batch: Any) -> jax.Array:
    return mean_squared_error(model(batch["x"]), batch["y"])


@pytest.mark.thorough
@pytest.mark.parametrize(("zero", "num_microbatches"), [(0, 1), (1, 2), (2, 1), (3, 2)])
def test_a_model_of_experts_trains_as_on_one_device(zero, num_microbatches):
    options = {"batch": regression_batch, "loss": routed_loss, "steps": 8}
    expected = train_for(lambda rngs: Routed(rngs), devices=1, **options)
    run = train_for(
        lambda rngs: Routed(rngs),
        zero=zero,
        num_microbatches=num_microbatches,
        persistence_threshold=20,
        **options,
    )
    np.testing.assert_allclose(run.losses, expected.losses, rtol=0, atol=OF_LOSSES)
    assert expected.losses[0] - expected.losses[-1] > 0.02


def test_flops_are_those_of_one_round():
    given, ids = arrays("float32"), routing("random")
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flops = count_flops(
            lambda x, gates, weights: zerojax.experts(x, gates, ids, weights, swiglu),
            shapes["x"],
            shapes["gates"],
            shapes["weights"],
        )
    slots = EXPERTS * slots_per_expert(TOKENS, K, EXPERTS, 1.25)
    assert flops == 3 * 2 * slots * WIDTH * HIDDEN


# --- refusals -------------------------------------------------------------------------------------


def refused(match: str, kind: type[Exception] = ValueError, **changes: Any) -> None:
    given = arrays("float32")
    asked = {
        "x": given["x"],
        "gates": given["gates"],
        "ids": routing("random"),
        "weights": given["weights"],
        "apply": swiglu,
        **changes,
    }
    with pytest.raises(kind, match=match):
        zerojax.experts(**asked)


def test_shapes_that_do_not_fit_are_refused():
    given, ids = arrays("float32"), routing("random")
    refused(r"gates have shape \[64, 1\] and ids .*\[64, 2\]", gates=given["gates"][:, :1])
    refused(r"ids have shape \[63, 2\] and x .*\[64, 16\]", ids=ids[:-1])
    refused("gates has int32; use a floating-point dtype", TypeError, gates=ids)
    refused("first dimension .* number of experts", weights={})
    uneven = {**given["weights"], "up": given["weights"]["up"][:4]}
    refused("first dimension .* number of experts", weights=uneven)
    refused("slack=0 must be a number above 0", slack=0)
    refused(r"has no rows", x=given["x"][:0], gates=given["gates"][:0], ids=ids[:0])


def test_traced_values_that_are_wrong_show_as_nan():
    given, ids = arrays("float32"), routing("random")
    run = jax.jit(
        lambda gates, ids: zerojax.experts(given["x"], gates, ids, given["weights"], swiglu)
    )
    for gates, changed in (
        (given["gates"].at[5, 0].set(jnp.nan), ids),
        (given["gates"], ids.at[5, 1].set(EXPERTS)),
        (given["gates"], ids.at[5, 1].set(-1)),
    ):
        is_nan = np.isnan(np.asarray(run(gates, changed))).all(axis=1)
        np.testing.assert_array_equal(np.flatnonzero(is_nan), [5])
