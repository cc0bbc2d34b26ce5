"""Over every axis whose sums zerojax writes, gradients are summed in `reduce_dtype`; over `model`,
whose sums the compiler places, the plan says that they are not."""

import re

import pytest

import zerojax
from tests.support.small_models import reference_model
from tests.support.trajectories import text_batch

_SUM = re.compile(
    r'stablehlo\.(?:all_reduce|reduce_scatter)"\(.*?mesh_axes<(.*?)>\]>.*?\}\) : \(([^)]*)\)',
    re.DOTALL,
)
"""The axes of a sum, and the types of what it sums."""
MESHES = {
    "data": ({"data": 8}, {"zero": 2}),
    "context": ({"data": 4, "context": 2}, {"zero": 2}),
    "stage": ({"data": 4, "stage": 2}, {"zero": 1, "num_microbatches": 4}),
    "replica": ({"data": 4, "replica": 2}, {"zero": 3}),
    "expert": ({"data": 4, "expert": 2}, {"moe": {"num_experts": 4}}),
}


def plan_of(mesh, *, moe=None, **options):
    name, changes = ("gpt2", {}) if moe is None else ("llama", {"moe": moe})
    return zerojax.make_plan(
        reference_model(name, **changes),
        zerojax.make_mesh(mesh),
        example_batch=text_batch(0),
        persistence_threshold=0,
        **{"precision": "bf16", "reduce_dtype": "fp32", "zero": 1, **options},
    )


@pytest.mark.thorough
@pytest.mark.parametrize("axis", MESHES)
def test_sums_over_an_axis_are_in_reduce_dtype(axis):
    mesh, options = MESHES[axis]
    for dtype, unwanted in (("fp32", "bf16"), ("bf16", None)):
        plan = plan_of(mesh, reduce_dtype=dtype, **options)
        program = zerojax.build_step(plan).lower(plan.abstract_state, plan.abstract_batch)
        sums = [
            types
            for axes, types in _SUM.findall(program.as_text())
            if any(plan.mesh.shape[name] > 1 for name in re.findall(r'name = "(\w+)"', axes))
        ]
        arrays = {one for types in sums for one in re.findall(r"tensor<(?:\d+x)+(\w+)>", types)}
        assert "f32" in arrays if unwanted else "bf16" in arrays
        assert unwanted not in arrays
        assert not any("sums over `model`" in reason for reason in plan.reasons)


@pytest.mark.parametrize(
    ("options", "is_said"),
    [
        ({"precision": "bf16", "reduce_dtype": "fp32"}, True),
        ({"precision": "bf16", "reduce_dtype": None}, False),
        ({"precision": "fp32", "reduce_dtype": None}, False),
    ],
)
def test_the_plan_says_that_sums_over_model_are_not(options, is_said):
    plan = plan_of({"data": 4, "model": 2}, **options)
    said = [reason for reason in plan.reasons if "sums over `model`" in reason]
    assert bool(said) == is_said
    for word in ("bfloat16", "reduce_dtype=float32", "precision=fp32", "expect.gradients_in=fp32"):
        assert all(word in reason for reason in said)
