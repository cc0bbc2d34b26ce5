"""Bytes that attention over 8 H100 sends, read from the programs they would run.

Needs the compile-only client (extra `plan`) and no GPU: pytest -m gpu_programs. About two minutes
of processor time.
"""

import jax
import jax.numpy as jnp
import pytest

import zerojax
from tests.operators.test_context import largest_array, lowered
from zerojax.config import ModelConfig
from zerojax.forecasting import hlo
from zerojax.hardware import compile_client, gpus
from zerojax.operators.context import WAYS, Sizes, wire_bytes
from zerojax.placement.device_mesh import make_abstract_mesh, make_mesh
from zerojax.plan.make import make_plan

pytestmark = pytest.mark.gpu_programs
DEVICES, TOKENS = 8, 32768


def compiled(way, kv_heads, *, backward):
    devices = compile_client.gpu_devices(gpus.find_gpu("h100"), DEVICES)
    mesh = make_mesh({"model": DEVICES}, devices)
    sizes = Sizes(
        rows=1,
        tokens=TOKENS,
        heads=32,
        kv_heads=kv_heads,
        head_dim=128,
        itemsize=2,
        devices=DEVICES,
    )
    program = lowered(mesh, way, sizes, jnp.bfloat16, backward=backward)
    return compile_client.compile_for_gpus(program, sketch=True), wire_bytes(way, sizes)


@pytest.mark.parametrize("kv_heads", [32, 8, 2])
@pytest.mark.parametrize("way", WAYS)
def test_bytes_are_those_of_the_formulas_and_no_device_decides_whether_others_wait(way, kv_heads):
    for backward in (False, True):
        built, expected = compiled(way, kv_heads, backward=backward)
        program = hlo.read_program(built.text)
        found = hlo.find_collectives(program, DEVICES)
        wanted = sum(expected) if backward else expected.forward
        assert sum(x.times * x.wire_bytes for x in found) == pytest.approx(wanted, rel=0.04)
        assert hlo.find_in_branches(program, DEVICES) == []
        assert program.unknown_loops == ()
        assert largest_array(built.text) <= TOKENS * 32 * 128  # keys of all heads and tokens


def step_of_a_llama(way, mesh, *, tokens, **options):
    """Of 4 layers in bfloat16, each computed again."""
    sizes = {"num_layers": 4, "num_heads": 16, "num_kv_heads": 8, "embed_dim": 1024}
    config = ModelConfig(name="llama", max_seq_len=tokens, remat="full", loss_chunk=2048, **sizes)
    shape = jax.ShapeDtypeStruct((8, tokens), jnp.int32)
    return make_plan(
        zerojax.zoo.build_model(config, 512),
        make_abstract_mesh(mesh, DEVICES),
        example_batch={"tokens": shape, "targets": shape},
        context_parallel=way,
        precision="bf16",
        zero=3,
        num_microbatches=8 // mesh.get("data", 1),
        **options,
    )


@pytest.mark.parametrize("mesh", [{"data": 1, "context": 8}, {"data": 2, "context": 4}], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_a_forecast_tells_bytes_of_attention_from_those_of_zero(way, mesh, tmp_path, monkeypatch):
    """And the step holds no array of all scores: less than its bytes is all that it needs."""
    monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path))
    plan = step_of_a_llama(way, mesh, tokens=TOKENS)
    forecast = zerojax.forecast(plan, gpu="h100", fast=True)
    traffic = forecast.traffic
    expected = traffic.attention_traced_bytes
    if way == "ring":
        # The backward pass, and the forward pass that remat computes again, begin with the same
        # hop of keys and values, which the compiler sends once.
        keys_and_values = 2 * 8 * 64 * TOKENS // mesh["context"] * 2
        expected -= 4 * plan.num_microbatches * keys_and_values
    assert traffic.attention_wire_bytes == pytest.approx(expected, rel=0.01)
    assert traffic.data_wire_bytes == pytest.approx(traffic.formula_bytes, rel=0.04)
    assert forecast.memory.peak < TOKENS**2 * 2
    assert "attention along context sends " in forecast.page()
