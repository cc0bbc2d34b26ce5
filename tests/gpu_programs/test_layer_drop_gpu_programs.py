"""A step with layer drop, compiled for 8 H100: gathers in branches, bytes sent, memory.

Needs the compile-only client (extra `plan`) and no GPU: pytest -m gpu_programs.
"""

import functools

import jax
import numpy as np
import pytest

import zerojax
from tests.support.gpu_plans import compile_step
from tests.support.inputs_with_features import plan_inputs
from zerojax.forecasting.hlo import Program, find_collectives, find_in_branches, read_program
from zerojax.hardware import compile_client, gpus
from zerojax.placement.device_mesh import make_mesh
from zerojax.plan.make import Plan, plan_of
from zerojax.plan.wire import wire_bytes
from zerojax.zoo import GPT2, GPT2Config

pytestmark = pytest.mark.gpu_programs
DEVICES, LAYERS, TOKENS = 8, 12, 256
DROP = zerojax.LayerDropConfig(theta=0.5)


@functools.cache
def compiled(config: zerojax.LayerDropConfig, stages: int = 1) -> tuple[Plan, Program, int]:
    """(plan, program, bytes of temporaries) of a GPT with recomputed layers at stage 3."""
    model = GPT2Config(
        vocab_size=512,
        max_seq_len=TOKENS,
        num_layers=LAYERS,
        num_heads=4,
        embed_dim=512,
        remat="full",
    )
    microbatches = 4 * stages if stages > 1 else 1
    tokens = jax.ShapeDtypeStruct((2 * DEVICES * microbatches // stages, TOKENS), np.int32)
    inputs = plan_inputs(
        model=lambda rngs: GPT2(model, rngs=rngs),
        example_batch={"tokens": tokens, "targets": tokens},
        precision="bf16",
        layer_drop=config,
        num_microbatches=microbatches,
    )
    devices = compile_client.gpu_devices(gpus.find_gpu("h100"), DEVICES)
    mesh = make_mesh({"data": DEVICES // stages, "stage": stages}, devices)
    plan = plan_of(inputs, mesh, zero=3, persistence_threshold=0)
    result = compile_step(plan)
    return plan, read_program(result.text), result.memory.temporary


def test_layers_are_gathered_and_reduced_in_branches_alone():
    plan, program, _ = compiled(DROP)
    inside = find_in_branches(program, DEVICES)
    assert sorted({one.kind for one in inside}) == ["all-gather", "reduce-scatter"]
    row = sum(
        2 * np.prod(plan.placement.leaves[name].shape) / LAYERS
        for name in plan.features["layer_drop"].stacks
    )
    names = {one.name for one in inside}
    others = [one for one in find_collectives(program, DEVICES) if one.name not in names]
    assert all(one.loop_depth == 0 for one in others), "no layer is sent outside of its branch"
    gathered = sum(one.payload_bytes for one in inside if one.kind == "all-gather")
    assert gathered == pytest.approx(2 * row, rel=0.01), "forward and backward"


def test_bytes_fall_as_predicted_and_no_weights_are_copied():
    sent, held = {}, {}
    for config in (zerojax.LayerDropConfig(), DROP):
        plan, program, held[config] = compiled(config)
        sent[config] = sum(
            one.wire_bytes * one.times * (DROP.kept(LAYERS) if one.in_branch else 1)
            for one in find_collectives(program, DEVICES)
        )
    whole, dropped = sent.values()
    layer = sum(
        2 * np.prod(plan.placement.leaves[name].shape) / LAYERS
        for name in plan.features["layer_drop"].stacks
    )
    assert dropped / whole == pytest.approx(DROP.kept(LAYERS), rel=0.05)
    before, after = held.values()
    assert after <= before + 2 * layer, "weights and gradients of one layer, not of all"


def test_stages_send_layers_in_branches_alone():
    plan, program, held = compiled(DROP, 2)
    sent = 0.0
    for one in find_collectives(program, DEVICES):
        if one.kind in ("all-gather", "reduce-scatter"):
            assert one.in_branch or one.loop_depth == 0, one
            sent += one.wire_bytes * one.times * (DROP.kept(LAYERS) if one.in_branch else 1)
    assert sent == pytest.approx(wire_bytes(plan), rel=0.02)
    _, _, before = compiled(zerojax.LayerDropConfig(), 2)
    assert held <= 1.02 * before
