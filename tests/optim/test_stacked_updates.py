"""Updates of stacks: what optax does to each layer in an array of its own."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from tests.support import equal_trees
from tests.support.recipe import DECAYED
from zerojax.optim import adamw, extra_arguments, lamb
from zerojax.optim.padding import why_padding_shows
from zerojax.placement.layer_stacks import RowsDifferError, StackRows, group_rows, ungroup_rows
from zerojax.plan.stacked_updates import over_stacks

STACKS = {
    "layers/0..3/kernel": tuple(f"layers/{i}/kernel" for i in range(4)),
    "layers/0..3/bias": tuple(f"layers/{i}/bias" for i in range(4)),
}
SHAPES = {"embed": (16, 8)} | {
    name: (8, 16) if name.endswith("kernel") else (16,) for s in STACKS.values() for name in s
}
ROUNDING = 1e-6
"""Of each array's largest value: mapped over rows, XLA adds some sums up in another order."""


def mask_of_matrices(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


OPTIMIZERS = {
    "adamw": optax.adamw(1e-2, weight_decay=0.5, mask=mask_of_matrices),
    "adamw of zerojax": adamw(1e-2, weight_decay=0.5, mask=mask_of_matrices, clip_norm=1.0),
    "lamb of zerojax": optax.chain(lamb(1e-2, **DECAYED)),
    "lamb": optax.lamb(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "muon": optax.contrib.muon(1e-2),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "clipped by array": optax.chain(
        optax.clip_by_block_rms(0.1), optax.adaptive_grad_clip(0.1), optax.lion(1e-3)
    ),
    "injected": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2),
    "polyak": optax.polyak_sgd(1.0),
    "two parts": optax.multi_transform(
        {"layers": optax.adam(1e-2), "rest": optax.sgd(1e-1)},
        lambda params: {n: "layers" if "layers" in n else "rest" for n in params},
    ),
}


def values(seed: int) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), len(SHAPES))
    pairs = zip(SHAPES.items(), keys, strict=True)
    return {name: jax.random.normal(key, shape) for (name, shape), key in pairs}


def stack(tree: Any) -> Any:
    def join(leaf: Any) -> Any:
        return jnp.stack(leaf.values) if isinstance(leaf, StackRows) else leaf

    return jax.tree.map(join, group_rows(tree, STACKS))


def unstack(tree: Any) -> Any:
    return ungroup_rows(tree, STACKS, lambda leaf, row: leaf[row])


def assert_close(found: Any, wanted: Any) -> None:
    equal_trees.assert_near(found, wanted, tolerance=ROUNDING)


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_are_updated_as_arrays_of_their_own(name: str) -> None:
    plain = optax.with_extra_args_support(OPTIMIZERS[name])
    stacked = over_stacks(OPTIMIZERS[name], STACKS)
    params = values(0)
    state, stored = plain.init(params), stacked.init(stack(params))
    assert_close(unstack(stored), state)
    for seed in (1, 2):
        grads = values(seed)
        loss, norm = jnp.float32(3.0), optax.tree.norm(grads)
        extra = extra_arguments(grads, norm, loss, frozenset())
        wanted, state = jax.jit(lambda g, s, e: plain.update(g, s, params, **e))(grads, state, {
            key: x for key, x in extra.items() if key != "layers"
        })  # fmt: skip
        extra = extra_arguments(stack(grads), norm, loss, frozenset(STACKS))
        del extra["layers"]
        found, stored = jax.jit(lambda g, s, e: stacked.update(g, s, stack(params), **e))(
            stack(grads), stored, extra
        )
        assert_close(unstack(found), wanted)
        assert_close(unstack(stored), state)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["adamw", "injected", "two parts"])
def test_what_goes_element_by_element_has_the_same_bits(name: str) -> None:
    plain, stacked = OPTIMIZERS[name], over_stacks(OPTIMIZERS[name], STACKS)
    params, grads = values(0), values(1)
    state, stored = plain.init(params), stacked.init(stack(params))
    wanted = jax.jit(plain.update)(grads, state, params)
    found = unstack(jax.jit(stacked.update)(stack(grads), stored, stack(params)))
    equal_trees.assert_same(found, wanted)


def test_parameters_by_name_go_to_the_transformation_itself() -> None:
    tx, params = optax.adam(1e-2), values(0)
    assert_close(over_stacks(tx, STACKS).init(params), tx.init(params))


def test_rows_in_different_forms_are_refused() -> None:
    tx = optax.masked(optax.adam(1e-2), lambda p: {name: "layers/2/" not in name for name in p})
    with pytest.raises(RowsDifferError, match="layers/0/bias and layers/2/bias"):
        over_stacks(tx, STACKS).init(stack(values(0)))


def test_names_are_grouped_and_come_back() -> None:
    tree = {"count": 3, "mu": dict(values(0))}
    grouped = group_rows(tree, STACKS)
    assert set(grouped["mu"]) == {"embed", *STACKS}
    assert jax.tree.structure(ungroup_rows(grouped, STACKS)) == jax.tree.structure(tree)


def test_a_missing_row_is_refused_by_name() -> None:
    tree = {name: x for name, x in values(0).items() if name != "layers/3/bias"}
    with pytest.raises(RowsDifferError, match="layers/3/bias is missing"):
        group_rows(tree, STACKS)


def test_stacks_with_rows_that_a_pipeline_leaves_empty_are_given_without_them() -> None:
    """Three and two layers on two stages lie in six rows; new moments would have five."""
    rows = tuple(f"layers/{i}" for i in range(5))
    tx = over_stacks(optax.adamw(1e-2), {"layers/0..4": rows})
    true, stored = ({"layers/0..4": jax.ShapeDtypeStruct((n, 8), jnp.float32)} for n in (5, 6))
    why = why_padding_shows(tx, true, stored, {"layers/0..4": {0}}, frozenset(), stays_zero=True)
    assert why == "new arrays of 5 layers in stacks of 6 rows"
