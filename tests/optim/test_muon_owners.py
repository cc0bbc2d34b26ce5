"""Muon without repeated work: each matrix is put together on one device and multiplied there once.

Compiled for eight virtual devices, and compared with `optax.contrib.muon` on one.
"""

import functools

import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers, muon

import zerojax
from tests.support.recipe import RECIPE
from tests.support.saved_states import restore, save
from tests.support.small_models import reference_model
from tests.support.trajectories import advance, plan_for, train_for
from zerojax.forecasting import hlo
from zerojax.forecasting.hlo.costs import Matmuls
from zerojax.optim import muon_dimensions
from zerojax.optim.matrices import newton_schulz_flops
from zerojax.plan.muon_matrices import classes_of_plan, matrix_bytes
from zerojax.plan.wire import wire_bytes
from zerojax.step.build import build_step
from zerojax.step.reshard import to_portable_state
from zerojax.tracing.trees import flatten_names

LAYERS = 6
"""Not divisible by the devices."""
SPLIT = {"persistence_threshold": 20}
"""At stage 3 matrices this small are split, too."""
ADAM = 1e-3
"""Its rate: the first steps blow the rounding of gradients near zero up to whole updates."""


@functools.cache
def compiled(zero: int, model: int, is_muon: bool):
    plan = plan_for(
        reference_model("llama", num_layers=LAYERS),
        zero=zero,
        mesh={"model": model},
        optimizer=zerojax.muon(1e-3, clip_norm=1.0) if is_muon else zerojax.adamw(1e-3, **RECIPE),
        **SPLIT,
    )
    lowered = build_step(plan).lower(plan.abstract_state, plan.abstract_batch)
    program = hlo.read_program(lowered.compile().as_text())
    return plan, program, hlo.find_collectives(program, 8)


def sent(collectives) -> int:
    return sum(one.wire_bytes * one.times for one in collectives)


@pytest.mark.thorough
@pytest.mark.parametrize(("zero", "model"), [(1, 1), (2, 1), (3, 1), (1, 2), (3, 2)])
def test_each_matrix_is_orthogonalised_once(zero, model):
    plan, program, collectives = compiled(zero, model, True)
    _, other_program, others = compiled(zero, model, False)
    classes = classes_of_plan(plan)
    named = {name for one in classes for name in one.counts}
    taken = muon_dimensions(plan.abstract_state["params"])
    assert named == {name for name, dims in taken.items() if dims is not None}
    assert all(one.exchanges for one in classes)
    # Two all-to-alls for each class and each axis that splits its matrices.
    exchanges = [one for one in collectives if one.kind == "all-to-all"]
    assert len(exchanges) == sum(2 * len(one.exchanges) for one in classes)
    assert {one.dtype for one in exchanges} == {"f32"}
    assert sent(exchanges) == pytest.approx(sum(matrix_bytes(plan).values()), rel=1e-3)
    assert sent(collectives) - sent(others) == pytest.approx(sent(exchanges), rel=0.03)
    if model == 1:
        assert sent(collectives) == pytest.approx(
            wire_bytes(plan) + sum(matrix_bytes(plan).values()), rel=0.03
        )
    reduced = [
        sum(c.payload_bytes * c.times for c in found if c.kind == "all-reduce")
        for found in (collectives, others)
    ]
    assert reduced[0] - reduced[1] < 1024
    # The products: all work over the devices, and padding by less than one matrix of each class.
    multiplied = total_flops(program) - total_flops(other_program)
    work = padding = 0.0
    for one in classes:
        matrix = newton_schulz_flops(*one.shape, steps=5)
        work += sum(one.counts.values()) * matrix / one.devices
        padding += len(one.exchanges) * matrix
    assert work <= multiplied <= work + padding


def total_flops(program) -> int:
    return Matmuls(program).total_flops.of_program()


def one_matrix(params):
    """One layer's `up` alone, a class of one."""
    names = {"blocks/mlp/up/kernel": MuonDimensionNumbers(1, 2)}
    return {name: names.get(name) for name in params}


def optaxs(dimensions=muon_dimensions):
    plain = muon(0.02, adam_learning_rate=ADAM, muon_weight_dimension_numbers=dimensions)
    return optax.chain(optax.clip_by_global_norm(1.0), plain)


@functools.cache
def on_one_device(layers: int, dimensions):
    options = {"devices": 1, "optimizer": optaxs(dimensions), "steps": 4}
    run = train_for(reference_model("llama", num_layers=layers), **options)
    return params_of(run)


def params_of(run):
    named = flatten_names(to_portable_state(run.plan, run.state)["params"])
    return {name: np.asarray(x) for name, x in named.items()}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("zero", "model", "layers", "dimensions"),
    [
        (1, 1, LAYERS, muon_dimensions),
        (2, 1, LAYERS, muon_dimensions),
        (3, 1, LAYERS, muon_dimensions),
        (1, 2, LAYERS, muon_dimensions),
        (3, 2, LAYERS, muon_dimensions),
        (2, 1, 1, muon_dimensions),
        (3, 1, 1, one_matrix),
    ],
)
def test_parameters_are_those_of_optax_on_one_device(zero, model, layers, dimensions):
    """Grouped heads, layers that no mesh divides, one layer, one matrix; four steps."""
    expected = on_one_device(layers, dimensions)
    run = train_for(
        reference_model("llama", num_layers=layers),
        zero=zero,
        mesh={"model": model},
        optimizer=zerojax.muon(0.02, adam_learning_rate=ADAM, dimensions=dimensions, clip_norm=1.0),
        steps=4,
        **SPLIT,
    )
    for name, value in params_of(run).items():
        # Gradients are summed in another order, by 1e-7 of them; five rounds multiply what is
        # small in a direction by up to 3.4445^5 = 485, times the rate 0.02 and four steps.
        np.testing.assert_allclose(value, expected[name], atol=1e-5, err_msg=name)
    assert max(np.abs(value).max() for value in expected.values()) > 0.1


def portable(plan, state):
    named = flatten_names(to_portable_state(plan, state))
    return {name: np.asarray(x) for name, x in named.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("from_optax", [True, False])
def test_a_checkpoint_goes_to_optax_and_comes_from_it(tmp_path, from_optax):
    """Bit for bit, between one device and stage 3 on eight; and the run goes on."""
    model = reference_model("llama", num_layers=LAYERS)
    places = [
        {"devices": 1, "optimizer": optaxs()},
        {
            "zero": 3,
            "optimizer": zerojax.muon(0.02, adam_learning_rate=ADAM, clip_norm=1.0),
            **SPLIT,
        },
    ]
    first, second = places if from_optax else places[::-1]
    run = train_for(model, steps=2, **first)
    save(tmp_path, run.plan, run.state, 2)
    plan = plan_for(model, **second)
    state, _ = restore(tmp_path, plan)
    saved, found = portable(run.plan, run.state), portable(plan, state)
    assert saved.keys() == found.keys()
    assert any("mu/blocks/mlp/up/kernel" in name for name in found)
    for name, value in saved.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    further = advance(plan, state, range(2, 4))
    for name, value in params_of(further).items():
        expected = on_one_device(LAYERS, muon_dimensions)[name]
        np.testing.assert_allclose(value, expected, atol=1e-5, err_msg=name)
