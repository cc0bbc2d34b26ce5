"""Refusals of rules of compiled steps, golden files, and what is counted without a compiler."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import zerojax
from tests.forecasting.test_program_rules import MLP_BATCH, Mlp
from tests.support.refusals import Refusal, refused, table
from tests.support.small_models import Line, reference_model
from tests.support.trajectories import plan_for
from zerojax.config import MoEConfig
from zerojax.forecasting.generation_bounds import generation_bounds
from zerojax.forecasting.hlo.communication import find_collectives
from zerojax.forecasting.hlo.program import read_program
from zerojax.forecasting.program_rules import check_golden
from zerojax.hardware.gpus import find_gpu
from zerojax.placement.device_mesh import make_abstract_mesh
from zerojax.plan.rule_proposal import propose_for


def plan_on(mesh: Any) -> zerojax.Plan:
    return zerojax.make_plan(Mlp, mesh, example_batch=MLP_BATCH, precision="fp32")


@pytest.mark.thorough
def test_rules_that_cannot_be_checked():
    here = plan_on({"data": 8})
    expect = lambda given: zerojax.expect(given.pop("plan", here), **given)  # noqa: E731
    limit, absent = {"max_peak_gib": 1.0}, plan_on(make_abstract_mesh({"data": 8}))
    for bad, value, remedy in (
        ({}, "rule", "max_peak_gib"),
        ({"devices": 4, **limit}, "devices=4 8", "gpu= leave"),
        ({"plan": absent, **limit}, "abstract", "zerojax.make_mesh"),
        ({"max_network_gb": 1.0, **limit}, "max_network_gb", "gpu= leave"),
        ({"fused_attention": True, **limit}, "fused_attention", "gpu= leave"),
    ):
        refused(lambda bad=bad: expect(dict(bad)), value, remedy)
    expect(dict(limit))
    expect({"plan": plan_on(zerojax.make_mesh({"data": 8})), **limit})


def test_golden_files(tmp_path):
    record = {"format": 1, "steps": {}}
    file = tmp_path / "golden.json"
    check = lambda path: check_golden(record, path)  # noqa: E731
    for content, value, remedy in (
        ("{", "golden", "another delete"),
        ('{"format": 99}', "99", "delete"),
    ):
        file.write_text(content)
        refused(lambda: check(file), [file, value], remedy)
        assert check(tmp_path / f"another{len(content)}.json") is None
        file.unlink()
        assert check(file) is None


H200 = find_gpu("h200")


def counted(model: Any = None, **options: Any) -> Any:
    model = reference_model("llama", num_layers=2) if model is None else model
    return generation_bounds(plan_for(model, **options), H200)


def proposed(model: int) -> Any:
    plan = plan_on({"data": 8 // model, "model": model})
    return propose_for(plan.inputs, plan.mesh)


def of_line() -> Any:
    loss = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)  # noqa: E731
    batch = {"x": jax.ShapeDtypeStruct((8, 4), jnp.float32)}
    plan = zerojax.make_plan(Line, {}, example_batch=batch, loss=loss)
    return generation_bounds(plan, H200)


EXPERTS = MoEConfig(num_experts=4, experts_per_token=2, expert_dim=8)
CALLS = table(
    """
of_line() | --generation | GPT2 Llama Decoder | counted() ; counted(reference_model("gpt2"))
counted(reference_model("llama", moe=EXPERTS)) | 4 | leave | counted()
counted(mesh={"stage": 2}) | stage=2 | mesh.stage=1 | counted(mesh={"stage": 1})
proposed(1) | model=1 | 4 | proposed(2)
""",
    (ValueError, TypeError),
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("row", CALLS)
def test_what_is_counted(row):
    CALLS[row].check(lambda call: eval(call, globals()))


def test_programs_of_other_numbers_of_devices():
    program = read_program(HLO)
    find = lambda number: find_collectives(program, number)  # noqa: E731
    Refusal(4, "num_devices=4 8 1", "num_devices=8", [8]).check(find)


HLO = """HloModule m, is_scheduled=true, num_partitions=8

ENTRY e {
  ROOT x = f32[] parameter(0)
}
"""
