"""Muon, optax's and zerojax's: each layer's kernels are matrices, all else is Adam's."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers, muon

import zerojax
from pallas_kernels.choice import Choice
from tests.support import optim_steps
from tests.support.marks import needs_kernels
from tests.support.small_models import reference_model
from tests.support.trajectories import TOLERANCE, plan_for, train_for
from zerojax.forecasting import hlo
from zerojax.optim import muon_dimensions
from zerojax.optim.matrices import as_stack, newton_schulz, on_whole_matrices
from zerojax.step.build import build_step

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
    assert not any("muon treats" in reason for reason in plan.reasons)


def test_a_plan_says_what_muon_does_if_it_is_not_told():
    (line,) = [
        r for r in plan_for(reference_model("gpt2"), optimizer=muon(0.02)).reasons if "muon" in r
    ]
    assert "7 stacks of vectors, such as blocks/attention/output/bias" in line
    assert "muon_weight_dimension_numbers=zerojax.optim.muon_dimensions" in line


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_stacked_layers_at_every_stage_are_those_of_one_device(zero):
    options = {"optimizer": TX, "steps": 8}
    expected = train_for(reference_model("gpt2"), devices=1, **options)
    run = train_for(reference_model("gpt2"), zero=zero, persistence_threshold=20, **options)
    # Orthogonalising amplifies the rounding of a gradient's small directions.
    np.testing.assert_allclose(run.losses, expected.losses, atol=25 * TOLERANCE)
    assert expected.losses[-1] < expected.losses[0] - 0.05


DIMS = {"block/kernel": MuonDimensionNumbers(1, 2), "embed": MuonDimensionNumbers()}


def own_dimensions(params):
    return {name: DIMS.get(name) for name in params}


def own(**changes):
    options = {"weight_decay": 0.1, "adam_weight_decay": 0.2, "dimensions": own_dimensions}
    options |= {"clip_norm": 1.0}
    return zerojax.optim.muon(optim_steps.SCHEDULE, **{**options, **changes})


@pytest.mark.thorough
@pytest.mark.parametrize(
    "changes",
    [{"nesterov": False, "clip_norm": None}, {"consistent_rms": 0.2, "adam_learning_rate": 1e-3}],
    ids=str,
)
def test_the_update_in_place_is_that_of_optax(changes):
    tx, params = own(**changes), optim_steps.make_params()
    clip = changes.get("clip_norm", 1.0)
    plain = muon(
        optim_steps.SCHEDULE,
        nesterov=changes.get("nesterov", True),
        consistent_rms=changes.get("consistent_rms"),
        adam_learning_rate=changes.get("adam_learning_rate"),
        weight_decay=0.1,
        adam_weight_decay=0.2,
        muon_weight_dimension_numbers=own_dimensions,
    )
    if clip is not None:
        plain = optax.chain(optax.clip_by_global_norm(clip), plain)
    expected = optim_steps.run_update(plain, params)
    ours = optim_steps.run_apply(tx, params, scale_of=optim_steps.clipping_of(tx))
    for found in (ours, optim_steps.run_update(tx, params)):
        optim_steps.check_close(found, expected)


@pytest.mark.thorough
def test_the_authors_way_is_the_same_in_place():
    """What differs from optax's: `tests/deepspeed/test_deepspeed.py` has the author's formulas
    beside it."""
    tx = own(bias_correction=False, adam_nesterov=False, ns_eps=1e-7, eps=1e-10, adam_b2=0.95)
    params = optim_steps.make_params()
    expected = optim_steps.run_update(tx, params)
    ours = optim_steps.run_apply(tx, params, scale_of=optim_steps.clipping_of(tx))
    optim_steps.check_close(ours, expected)
    assert jax.tree.structure(tx.init(params)) == jax.tree.structure(own().init(params))
    other = optim_steps.run_update(own(), params)
    moved = [
        np.abs(a - b).max() for a, b in zip(expected[0].values(), other[0].values(), strict=True)
    ]
    assert min(moved) > 1e-4


@pytest.mark.thorough
def test_a_skipped_step_changes_nothing():
    tx, params = own(), optim_steps.make_params()
    state = tx.init(params)
    spoilt = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params)
    after = jax.jit(lambda *given: tx.apply(*given, optim_steps.context(skip=True)))(
        spoilt, state, params
    )
    optim_steps.check_same(after, (params, state))


@pytest.mark.thorough
@needs_kernels
def test_moments_in_bfloat16_are_rounded_by_the_same_bits():
    """Parameters and moments, which have random bits of their own."""
    tx = own().with_dtypes(jnp.bfloat16, True)
    params = optim_steps.make_params(jnp.bfloat16)
    steps = range(2)
    ours, theirs = (
        optim_steps.run_apply(tx, params, steps, choice=Choice(name, "a test"))
        for name in ("interpret", "xla")
    )
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for mine, other in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        assert mine.dtype == other.dtype
        a, b = np.asarray(mine, np.float32), np.asarray(other, np.float32)
        assert np.mean(a != b) < 0.05
        np.testing.assert_allclose(a, b, rtol=2**-7, atol=1e-3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("shape", "matrix", "spec"),
    [
        ((3, 8, 4, 2), MuonDimensionNumbers(1, (2, 3)), P(None, "data")),
        ((3, 8, 4, 2), MuonDimensionNumbers(1, (2, 3)), P(None, None, "data", "model")),
        ((5, 4, 2, 6), MuonDimensionNumbers((1, 2), 3), P(None, ("data", "model"))),
        ((16, 4, 6), MuonDimensionNumbers(1, 2), P("data", None, "model")),
        ((8, 12), MuonDimensionNumbers(), P("data", "model")),
        ((8, 3, 5), MuonDimensionNumbers(0, 2), P(None)),
    ],
    ids=str,
)
def test_matrices_are_put_together_and_cut_again(shape, matrix, spec):
    """Whatever dimension is split, over one axis or two, and where devices outnumber layers."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    if spec == P(None, ("data", "model")):
        shape = (5, 8, 2, 6)
    x = jax.random.normal(jax.random.key(0), shape)
    run = functools.partial(
        newton_schulz, coefficients=jnp.array([3.4445, -4.7750, 2.0315]), steps=5, eps=1e-8
    )
    entries = (*spec, *[None] * len(shape))[: len(shape)]
    dims = [() if e is None else e if isinstance(e, tuple) else (e,) for e in entries]

    def local(shard, dims=dims):
        stack = as_stack(shard.shape, dims, matrix)
        return on_whole_matrices(run, {"x": shard}, {"x": stack})["x"]

    whole = local(x, [()] * len(shape))
    mapped = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )
    # Entries below 1; batches of another size are summed up in another order.
    np.testing.assert_allclose(mapped(x), whole, atol=2e-6)
    text = mapped.lower(x).compile().as_text()
    sent = hlo.find_collectives(hlo.read_program(text), 8)
    sides = sum(bool(dims[d]) for d in range(len(shape)) if d in _sides_of(matrix))
    assert [one.kind for one in sent] == ["all-to-all"] * (2 * sides)


def _sides_of(matrix):
    return (*np.ravel(matrix.reduction_axis), *np.ravel(matrix.output_axis))


def sent_and_multiplied(optimizer):
    plan = plan_for(reference_model("llama", num_layers=8), zero=1, optimizer=optimizer)
    lowered = build_step(plan).lower(plan.abstract_state, plan.abstract_batch)
    compiled = lowered.compile()
    program = hlo.read_program(compiled.as_text())
    sent = sum(one.wire_bytes * one.times for one in hlo.find_collectives(program, 8))
    return plan, sent


@pytest.mark.slow
def test_what_muon_adds_to_the_wire_is_its_shards_there_and_back():
    """Eight layers over eight devices: each device sends its part of every matrix, twice."""
    plan, adamw = sent_and_multiplied(zerojax.adamw(1e-3))
    ours = sent_and_multiplied(zerojax.optim.muon(1e-3))[1]
    optaxs = sent_and_multiplied(muon(1e-3, muon_weight_dimension_numbers=muon_dimensions))[1]
    params = plan.abstract_state["params"]
    split = [n for n, d in muon_dimensions(params).items() if d and params[n].sharding.spec != P()]
    assert len(split) == 7
    shards = sum(4 * math.prod(params[name].shape) / 8 for name in split)
    assert ours - adamw == pytest.approx(2 * shards * 7 / 8, rel=0.05)
    assert optaxs - adamw > 5 * (ours - adamw)
