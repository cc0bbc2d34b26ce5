"""No collective is inside a conditional of a pipelined step; embedding and head may be.

A collective that only some devices get to never ends. Without tensor parallelism embedding and head
hold none, so that only the first and the last stage compute them; with it, all do and throw away.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.pipeline_runs import THRESHOLD, UNEVEN, small
from tests.support.program_claims import collectives_in_branches
from tests.support.small_models import VOCAB, reference_model
from tests.support.trajectories import plan_for
from zerojax.forecasting.hlo import find_in_branches, read_program
from zerojax.operators.marks import inner_programs
from zerojax.step.build import build_evaluation, build_step

MESHES = {"whole": {"data": 2, "stage": 4}, "tensor parallel": {"data": 2, "stage": 2, "model": 2}}


def plan_of(model, mesh, zero, **options):
    return plan_for(
        model,
        mesh=MESHES[mesh],
        zero=zero,
        num_microbatches=4,
        persistence_threshold=THRESHOLD,
        **options,
    )


def gpt2(mesh, zero, **options):
    model = reference_model("gpt2", num_layers=8, embed_dim=24, dropout=0.1)
    return plan_of(model, mesh, zero, **options)


def equations(program: Any, *, inside: bool = False) -> Iterator[tuple[Any, bool]]:
    """Every equation at any depth, and whether a `cond` decides if it runs."""
    for equation in program.eqns:
        yield equation, inside
        for inner in inner_programs(equation.params):
            yield from equations(inner, inside=inside or equation.primitive.name == "cond")


def of_vocabulary(program: Any) -> dict[str, set[bool]]:
    """Where the embedding's lookups and the head's products are: {what: inside a `cond`?}.

    Nothing else in the model is as long as the vocabulary.
    """
    found: dict[str, set[bool]] = {}
    for equation, inside in equations(program):
        name = equation.primitive.name
        shapes = [v.aval.shape for v in (*equation.invars, *equation.outvars)]
        touches = any(VOCAB in shape for shape in shapes)
        if touches and name in ("gather", "scatter-add", "dot_general"):
            found.setdefault(name, set()).add(inside)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("mesh", MESHES)
def test_traced_steps(mesh, zero):
    plan = gpt2(mesh, zero, partition=UNEVEN[MESHES[mesh]["stage"]], stash="input")
    program = build_step(plan).trace(plan.abstract_state, plan.abstract_batch).jaxpr
    assert collectives_in_branches(program) == []
    found = of_vocabulary(program.jaxpr)
    assert found.keys() == {"gather", "scatter-add", "dot_general"}
    for what, places in found.items():
        assert places == {mesh == "whole"}, what


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", MESHES)
def test_traced_evaluations(mesh):
    plan = gpt2(mesh, 3, pipeline_schedule="interleaved(2)")
    program = build_evaluation(plan).trace(plan.abstract_state, plan.abstract_batch).jaxpr
    assert collectives_in_branches(program) == []
    found = of_vocabulary(program.jaxpr)
    assert found == {what: {mesh == "whole"} for what in ("gather", "dot_general")}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mesh", "zero"),
    [
        ("whole", 3),
        ("tensor parallel", 2),
        *(pytest.param("whole", zero, marks=pytest.mark.slow) for zero in (0, 1, 2)),
        *(pytest.param("tensor parallel", zero, marks=pytest.mark.slow) for zero in (0, 1, 3)),
    ],
)
def test_compiled_steps(mesh, zero):
    """What the partitioner adds for `model`, too. The conditionals are still there."""
    plan = plan_of(small(layers=8), mesh, zero, partition=UNEVEN[MESHES[mesh]["stage"]])
    step = build_step(plan).lower(plan.abstract_state, plan.abstract_batch).compile()
    program = read_program(step.as_text())
    assert find_in_branches(program, 8) == []
    opcodes = {
        instruction.opcode.removesuffix("-start")
        for computation in program.computations.values()
        for instruction in computation.instructions
    }
    assert "collective-permute" in opcodes
    assert ("conditional" in opcodes) == (mesh == "whole")
