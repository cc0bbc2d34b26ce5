"""What the program of a pipelined step computes and sends, against what the plan says of it."""

import functools

import jax
import jax.numpy as jnp
import pytest

from tests.support.gpu_plans import compile_step, gpu_mesh
from tests.support.program_claims import collectives_in_branches
from tests.support.small_models import reference_model
from zerojax import make_plan
from zerojax.forecasting import hlo
from zerojax.pipeline import pipeline_costs as costs
from zerojax.placement.device_mesh import make_abstract_mesh
from zerojax.plan import counts
from zerojax.plan.wire import wire_bytes
from zerojax.step.build import build_step
from zerojax.tracing.flops import count_program_flops

STAGES, DATA, MICROBATCHES = 2, 2, 4
SIZES = {"num_layers": 4, "embed_dim": 64, "tie_embeddings": False, "attention": "xla"}
NORMS = 512
"""Bytes per step of what is summed besides: loss, weight and the gradients' norm."""


def plan_on(mesh, zero: int = 1, model: str = "gpt2", **options):
    rows = jax.ShapeDtypeStruct((DATA * MICROBATCHES, 16), jnp.int32)
    return make_plan(
        reference_model(model, **SIZES),
        mesh,
        example_batch={"tokens": rows, "targets": rows},
        zero=zero,
        num_microbatches=MICROBATCHES,
        persistence_threshold=0,
        **options,
    )


@functools.cache
def traced_step(zero: int, schedule: str, stash: str, partition="uniform"):
    mesh = make_abstract_mesh({"data": DATA, "stage": STAGES}, DATA * STAGES)
    plan = plan_on(mesh, zero, pipeline_schedule=schedule, stash=stash, partition=partition)
    return plan, build_step(plan).trace(plan.abstract_state, plan.abstract_batch)


CASES = [
    ("1f1b", "residuals"),
    ("1f1b", "input"),
    ("gpipe", "residuals"),
    ("interleaved", "residuals"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("schedule", "stash"), CASES)
def test_a_device_computes_what_its_table_says(schedule, stash):
    """To the last product: embedding, head and masked slots included."""
    plan, traced = traced_step(1, schedule, stash)
    computed = count_program_flops(traced.jaxpr) / plan.mesh.size
    assert computed == costs.executed_flops(plan.pipeline)


@pytest.mark.thorough
def test_padding_is_computed_like_layers():
    plan, traced = traced_step(1, "1f1b", "residuals", (3, 1))
    computed = count_program_flops(traced.jaxpr) / plan.mesh.size
    assert computed == costs.executed_flops(plan.pipeline)
    even, _ = traced_step(1, "1f1b", "residuals")
    assert computed > 1.3 * costs.executed_flops(even.pipeline)


@pytest.mark.thorough
def test_where_the_backward_is_split_the_count_is_close():
    """W is taken to go back through all of a chunk; it leaves out its first layer's input."""
    plan, traced = traced_step(1, "zb_h1", "residuals")
    computed = count_program_flops(traced.jaxpr) / plan.mesh.size
    assert computed == pytest.approx(costs.executed_flops(plan.pipeline), rel=0.05)


@pytest.mark.thorough
def test_model_flops_of_a_device_are_its_part_of_all_stages():
    plan, _ = traced_step(1, "1f1b", "residuals")
    whole = plan_on(make_abstract_mesh({"data": DATA}, DATA))
    assert counts.model_flops(plan) == counts.model_flops(whole)
    share = counts.model_flops(plan) / plan.mesh.size
    assert share == pytest.approx(costs.useful_flops(plan.pipeline), rel=1e-12)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("zero", range(4))
def test_no_collective_is_inside_a_conditional(zero):
    plan, traced = traced_step(zero, "1f1b", "residuals")
    assert plan.pipeline is not None
    assert collectives_in_branches(traced.jaxpr) == []
    assert "cond" in str(traced.jaxpr), "embedding and head are skipped where they are not"


@pytest.mark.gpu_programs
@pytest.mark.parametrize("zero", range(4))
def test_a_pipelined_step_sends_what_the_formulas_say(zero):
    """Weights once per step at ZeRO 1 and 2; scatters and gathers in every tick from 2 and 3 on."""
    axes = {"data": DATA, "stage": STAGES}
    plan = plan_on(gpu_mesh(axes, devices=DATA * STAGES), zero)
    program = hlo.read_program(compile_step(plan).text)
    found = hlo.find_collectives(program, plan.mesh.size)
    messages = [one for one in found if one.kind == "collective-permute"]
    sent = sum(one.times * one.wire_bytes for one in messages)
    assert sent == costs.message_bytes(plan.pipeline)
    rest = sum(one.times * one.wire_bytes for one in found if one not in messages)
    assert 0 <= rest - wire_bytes(plan) <= NORMS
    gathers = [one for one in found if one.kind == "all-gather"]
    assert (max((one.loop_depth for one in gathers), default=0) > 0) == (zero == 3)
    assert hlo.find_in_branches(program, plan.mesh.size) == []
    assert hlo.matmul_flops(program) == costs.executed_flops(plan.pipeline)
    overlap = hlo.find_overlap(program, messages)
    hidden = [overlap[one.name].matmuls > 0 for one in messages if one.loop_depth]
    # Beside ZeRO's own collectives in the loop, which the compiler does not run at the same time,
    # one of the two has no slot to travel beside.
    assert all(hidden) if zero < 2 else any(hidden)
    assert hidden
