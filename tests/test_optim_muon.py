"""Muon on stacked layers: each layer's kernels are matrices, all else is Adam's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optax.contrib import MuonDimensionNumbers, muon

from tests.small_models import reference_model
from tests.trajectories import TOLERANCE, plan_for, train_for
from zerojax.optim import muon_dimensions

TX = muon(0.02, adam_eps_root=1e-5, muon_weight_dimension_numbers=muon_dimensions)
SHAPES = {
    "blocks/attention/output/kernel": (2, 3, 2, 5),
    "blocks/attention/query/bias": (2, 3, 2),
    "blocks/attention/query/kernel": (2, 5, 3, 2),
    "blocks/mlp/up/kernel": (2, 5, 4),
    "token_embedding/embedding": (7, 5),
}
MATRICES = {
    "blocks/attention/output/kernel": (6, 5),
    "blocks/attention/query/kernel": (5, 6),
    "blocks/mlp/up/kernel": (5, 4),
}


def arrays(seed):
    keys = jax.random.split(jax.random.key(seed), len(SHAPES))
    return {n: jax.random.normal(k, SHAPES[n]) for n, k in zip(SHAPES, keys, strict=True)}


def apart(tree):
    """Each layer's kernels as plain matrices."""
    return {
        f"{name}/{layer}": tree[name][layer].reshape(shape)
        for name, shape in MATRICES.items()
        for layer in range(2)
    }


@pytest.mark.thorough
def test_each_layer_is_orthogonalised_as_a_matrix_of_its_own():
    params, grads = arrays(0), arrays(1)
    updates = jax.jit(lambda: TX.update(grads, TX.init(params), params)[0])()
    plain = muon(0.02)
    alone = jax.jit(lambda: plain.update(apart(grads), plain.init(apart(params)), apart(params))[0])
    for name, matrix in alone().items():
        # Five rounds of products of matrices with entries below 1, summed in another order.
        np.testing.assert_allclose(apart(updates)[name], matrix, atol=1e-5)
    for name in SHAPES.keys() - MATRICES.keys():
        sizes = np.abs(updates[name])
        np.testing.assert_allclose(sizes, sizes.max(), rtol=0.05)  # the first update of Adam


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_every_kernel_of_a_layer_and_no_other_parameter_is_a_matrix(name):
    plan = plan_for(reference_model(name), optimizer=TX)
    shapes = {n: leaf.shape for n, leaf in plan.placement.leaves.items()}
    found = muon_dimensions(plan.abstract_state["params"])
    kernels = {n for n in shapes if n.startswith("blocks/") and n.endswith("kernel")}
    assert {n for n, value in found.items() if value is not None} == kernels
    for kernel in kernels:
        inputs, outputs = (np.ravel(axes) for axes in found[kernel])
        assert sorted([0, *inputs, *outputs]) == list(range(len(shapes[kernel])))
    assert not any("muon takes" in reason for reason in plan.reasons)


def test_a_plan_says_what_muon_does_if_it_is_not_told():
    (line,) = [
        r for r in plan_for(reference_model("gpt2"), optimizer=muon(0.02)).reasons if "muon" in r
    ]
    assert "takes 7 stacks of vectors, such as blocks/attention/output/bias" in line
    assert "muon_weight_dimension_numbers=zerojax.optim.muon_dimensions" in line


def test_names_that_match_nothing_and_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="matches none of the 1 parameters, such as layers/kernel"):
        muon_dimensions({"layers": {"kernel": jnp.ones((2, 3, 4))}})
    own = muon_dimensions({"layers": {"kernel": jnp.ones((2, 3, 4))}}, kernels="^layers/")
    assert own == {"layers": {"kernel": MuonDimensionNumbers(1, 2)}}
    with pytest.raises(ValueError, match="blocks/a/kernel has 2 dimensions, and a stacked kernel"):
        muon_dimensions({"blocks/a/kernel": jnp.ones((2, 3))})


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_stacked_layers_at_every_stage_are_those_of_one_device(zero):
    options = {"optimizer": TX, "steps": 8}
    expected = train_for(reference_model("gpt2"), devices=1, **options)
    run = train_for(reference_model("gpt2"), zero=zero, persistence_threshold=20, **options)
    # Orthogonalising amplifies the rounding of a gradient's small directions.
    np.testing.assert_allclose(run.losses, expected.losses, atol=25 * TOLERANCE)
    assert expected.losses[-1] < expected.losses[0] - 0.05
