"""What Muon sends, read from the programs that 8 and 64 H100 would run; beside AdamW's 2 units.

Needs the compile-only client (extra `plan`) and no GPU: pytest -m gpu_programs.
"""

import pytest

from tests.support.gpu_programs import LAYERS, WIDTH, Case, compile_case, wire_unit, wire_units
from zerojax.forecasting.hlo.costs import Matmuls
from zerojax.optim.matrices import newton_schulz_flops
from zerojax.plan.muon_matrices import classes_of_plan, matrix_bytes
from zerojax.plan.wire import wire_bytes

pytestmark = pytest.mark.gpu_programs
LIMIT = 4.5
"""Units at stages 1 and 2; optax's Muon, left to the compiler, sends 14.4 (a GPT of 25M)."""
MATRIX = WIDTH * WIDTH
SQUARE, LONG = 4 * LAYERS, 2 * LAYERS
"""Matrices of attention [width, width] and of the MLP [width, 4 x width]."""


def slow(*case, **more):
    return pytest.param(Case(*case, optimizer="muon", **more), marks=pytest.mark.slow)


def sent(found):
    return sum(one.wire_bytes * one.times for one in found)


def padded(count, devices):
    return -(-count // devices) * devices


@pytest.mark.parametrize(
    "case",
    [
        Case(8, 2, optimizer="muon"),
        Case(64, 1, optimizer="muon"),
        slow(8, 1),
        slow(64, 2),
        slow(8, 3),
        slow(64, 3),
    ],
    ids=lambda case: case.name,
)
def test_each_matrix_travels_to_one_owner_and_back(case):
    built = compile_case(case)
    exchanges = built.over_data("all-to-all")
    units, unit = sent(built.collectives) / wire_unit(built), wire_unit(built)
    if case.zero < 3:
        assert units <= LIMIT
    # Shards of matrices in float32, there and back, with the padding of two classes.
    n = case.devices
    elements = padded(SQUARE, n) * MATRIX + padded(LONG, n) * 4 * MATRIX
    added = 2 * 4 * elements / n * (n - 1) / n
    assert sent(exchanges) == pytest.approx(added, rel=1e-6)
    assert units == pytest.approx(wire_units(case) + added / unit, rel=0.03)
    # What the plan says.
    assert sent(exchanges) == pytest.approx(matrix_bytes(built.plan)["data"], rel=1e-6)
    others = [one for one in built.over_data() if one.kind != "all-to-all"]
    assert sent(others) == pytest.approx(wire_bytes(built.plan), rel=0.005)
    assert len(classes_of_plan(built.plan)) == 2
    assert len(exchanges) == 4
    assert {one.dtype for one in exchanges} == {"f32"}
    assert max(one.payload_bytes for one in built.over_data("all-reduce")) < 1024


@pytest.mark.slow
def test_it_multiplies_its_part_and_holds_no_more_than_adamw_and_two_classes():
    adamw, muon = (compile_case(Case(8, 1, optimizer=name)) for name in ("adamw", "muon"))
    flops = [Matmuls(built.program).total_flops.of_program() for built in (adamw, muon)]
    square, long = (newton_schulz_flops(WIDTH, k * WIDTH, steps=5) for k in (1, 4))
    assert flops[1] - flops[0] == pytest.approx((SQUARE * square + LONG * long) / 8, rel=1e-6)
    both = 4 * (SQUARE * MATRIX + LONG * 4 * MATRIX) / 8
    assert muon.memory.temporary < adamw.memory.temporary + both


@pytest.mark.slow
def test_beside_tensor_parallelism_each_axis_has_its_exchange():
    built = compile_case(Case(8, 1, model=2, optimizer="muon"))
    over_data, over_model = (
        [one for one in found if one.kind == "all-to-all"]
        for found in (built.over_data(), built.over_model())
    )
    said = matrix_bytes(built.plan)
    assert sent(over_data) == pytest.approx(said["data"], rel=1e-6)
    assert sent(over_model) == pytest.approx(said["model"], rel=1e-6)
    count = sum(len(one.exchanges) for one in classes_of_plan(built.plan))
    assert len(over_data) + len(over_model) == 2 * count
