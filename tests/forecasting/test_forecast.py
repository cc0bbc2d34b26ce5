"""`zerojax.forecast`: what a step needs on GPUs."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

import zerojax
from tests.support.marks import needs_compiler
from tests.support.small_models import reference_model
from zerojax import make_mesh, make_plan
from zerojax.features.one_bit.sign_plan import compressed_bytes
from zerojax.forecasting import COMPILED, FORMULA
from zerojax.forecasting.compiled_facts import cache_key
from zerojax.hardware import compile_client
from zerojax.hardware.gpus import find_gpu
from zerojax.placement.device_mesh import make_abstract_mesh


def plan_of(zero: int = 3, mesh=None, rows: int = 8):
    shape = jax.ShapeDtypeStruct((rows, 128), jnp.int32)
    model = reference_model(
        "gpt2", num_layers=4, embed_dim=256, max_seq_len=128, tie_embeddings=False, remat="full"
    )
    return make_plan(
        model,
        make_mesh({"data": 8}) if mesh is None else mesh,
        example_batch={"tokens": shape, "targets": shape},
        zero=zero,
        persistence_threshold=0,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def cache(folder, monkeypatch):
    """One for all tests of this file, which ask for less work from the compiler."""
    monkeypatch.setenv("ZEROJAX_CACHE", str(folder))
    monkeypatch.setattr(compile_client, "FAST_OPTIONS", compile_client.SKETCH_OPTIONS)


@pytest.mark.thorough
def test_without_the_compiler_formulas_are_given_and_labelled(monkeypatch):
    monkeypatch.setattr(compile_client, "_PLUGINS", ("no_such_plugin",))
    forecast = zerojax.forecast(plan_of(), gpu="h100")
    assert forecast.source == FORMULA
    assert forecast.memory.peak is None
    assert forecast.verdict.fits is None, "formulas leave out activations"
    page = forecast.page()
    assert "formulas only" in page
    assert "pip install 'zerojax[plan]'" in " ".join(page.split())
    assert forecast.as_dict()["traffic"]["formula_bytes"] > 0
    json.dumps(forecast.as_dict())


@pytest.mark.thorough
def test_another_number_of_devices_is_planned_anew(monkeypatch):
    monkeypatch.setattr(compile_client, "_PLUGINS", ("no_such_plugin",))
    plan = plan_of(rows=64)
    here, there = zerojax.forecast(plan, gpu="h200"), zerojax.forecast(plan, gpu="h200", devices=64)
    assert here.mesh["data"] == 8
    assert there.mesh["data"] == 64
    assert there.memory.state < here.memory.state / 6


def test_devices_that_the_mesh_cannot_make(monkeypatch):
    monkeypatch.setattr(compile_client, "_PLUGINS", ("no_such_plugin",))
    plan = plan_of(mesh=make_abstract_mesh({"data": 4, "model": 2}, 8))
    with pytest.raises(ValueError, match="does not divide the 7 devices"):
        zerojax.forecast(plan, gpu="h100", devices=7)
    with pytest.raises(ValueError, match="8"):
        zerojax.forecast(plan_of(rows=8), gpu="h100", devices=16)  # 8 rows on 16 data shards


@needs_compiler
@pytest.mark.gpu_programs
@pytest.mark.parametrize("zero", [1, 3])
def test_the_step_is_compiled_and_its_numbers_add_up(cache, zero):
    plan = plan_of(zero)
    forecast = zerojax.forecast(plan, gpu="h100", fast=True)
    memory, traffic = forecast.memory, forecast.traffic
    assert forecast.source == COMPILED
    assert forecast.verdict.fits
    assert memory.peak == memory.arguments + memory.outputs - memory.aliased + memory.temporary
    assert sum(role.bytes for role in memory.roles) == memory.peak
    assert memory.arguments == memory.state + memory.batch
    roles = {role.role: role for role in memory.roles}
    for name in ("master weights", "optimizer state"):
        assert roles[name].bytes == roles[name].formula
    assert traffic.data_wire_bytes == pytest.approx(traffic.formula_bytes, rel=0.03)
    assert all(row.axis == "data" and not row.crosses_nodes for row in traffic.rows)
    in_loops = sum(row.wire_bytes for row in traffic.rows if row.loop_depth > 0)
    assert (in_loops > 0.5 * traffic.wire_bytes) == (zero == 3)
    json.dumps(forecast.as_dict())


@needs_compiler
@pytest.mark.gpu_programs
def test_the_step_of_a_pipeline_is_compiled_and_its_numbers_add_up(cache):
    shape = jax.ShapeDtypeStruct((8, 128), jnp.int32)
    plan = make_plan(
        reference_model("gpt2", num_layers=4, embed_dim=256, max_seq_len=128, remat="full"),
        make_abstract_mesh({"data": 2, "stage": 2}, 4),
        example_batch={"tokens": shape, "targets": shape},
        num_microbatches=4,
    )
    forecast = zerojax.forecast(plan, gpu="h100", fast=True)
    memory, traffic = forecast.memory, forecast.traffic
    assert forecast.source == COMPILED
    assert sum(role.bytes or 0 for role in memory.roles) == memory.peak
    roles = {role.role: role for role in memory.roles}
    assert roles["pipeline buffers"].bytes is None
    assert roles["pipeline buffers"].formula > 0
    assert roles["gradients"].bytes == pytest.approx(roles["gradients"].formula, rel=0.05)
    assert traffic.message_wire_bytes == traffic.message_formula_bytes > 0
    assert traffic.data_wire_bytes == pytest.approx(traffic.formula_bytes, rel=0.03)
    assert {row.axis for row in traffic.rows} <= {"data", "stage", "data+stage"}
    page = forecast.page()
    assert "pipeline 1f1b, bubble 20.0%" in page
    assert "messages between neighbours: 100.0% of the formula" in page


@needs_compiler
@pytest.mark.gpu_programs
def test_the_same_step_comes_from_the_cache(cache):
    first = zerojax.forecast(plan_of(3), gpu="h100", fast=True)
    again = zerojax.forecast(plan_of(3), gpu="h100", fast=True)
    assert again.seconds == 0
    assert again.memory == first.memory
    assert again.traffic == first.traffic
    other = zerojax.forecast(plan_of(3), gpu="h200", fast=True)
    assert other.seconds > 0, "another card is another program"


@needs_compiler
@pytest.mark.slow
@pytest.mark.gpu_programs
def test_the_fast_options_change_neither_memory_nor_traffic_and_the_page_names_them(monkeypatch):
    monkeypatch.setenv("ZEROJAX_CACHE", "off")
    plan = plan_of(3)
    fast, full = (zerojax.forecast(plan, gpu="h100", fast=given) for given in (True, False))
    assert fast.memory == full.memory
    assert fast.traffic.wire_bytes == full.traffic.wire_bytes
    assert fast.compiler == f"{full.compiler}, fast options"
    assert "nvidia-cuda-nvcc" in full.compiler
    assert ", fast options (" in " ".join(fast.page().split())
    assert "the GPU measures Triton and cuBLAS for each product" in " ".join(full.page().split())


def test_what_the_programs_text_does_not_name_is_in_the_key(monkeypatch):
    plan, gpu = plan_of(), find_gpu("h100")
    hybrid = make_abstract_mesh({"data": 4, "replica": 2}, 8)
    program = dataclasses.replace(plan.program, options={"xla_gpu_an_option": 2})
    others = [
        (plan, gpu, True),
        (plan, dataclasses.replace(gpu, node_devices=4), False),
        (plan, find_gpu("h200"), False),
        (dataclasses.replace(plan, program=program), gpu, False),
        (dataclasses.replace(plan, mesh=hybrid), gpu, False),
    ]
    keys = {cache_key(*each, program="the same text") for each in [(plan, gpu, False), *others]}
    assert len(keys) == 1 + len(others)
    assert cache_key(plan_of(), find_gpu("h100"), False, program="the same text") in keys
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false")
    assert cache_key(plan_of(), find_gpu("h100"), False, program="the same text") not in keys


@needs_compiler
@pytest.mark.gpu_programs
def test_a_loop_as_long_as_the_data_say_makes_lower_bounds_and_is_named(cache):
    def loss(model, batch):
        rows = batch["tokens"][:, :1]
        halvings = jax.lax.while_loop(
            lambda state: jnp.any(state[1] > 0),
            lambda state: (state[0] + 1, state[1] // 2),
            (jnp.int32(0), rows),
        )[0]
        return model.loss(batch)[0] + 1e-9 * halvings, jnp.float32(1)

    shape = jax.ShapeDtypeStruct((8, 16), jnp.int32)
    plan = make_plan(
        reference_model("gpt2"),
        make_mesh({"data": 8}),
        example_batch={"tokens": shape, "targets": shape},
        loss=loss,
    )
    forecast = zerojax.forecast(plan, gpu="h100", fast=True)
    assert any("length that depends on the data" in remark for remark in forecast.remarks)
    assert "lower bounds" in " ".join(forecast.page().split())


def one_bit_plan(devices: int, zero: int):
    shape = jax.ShapeDtypeStruct((devices, 16), jnp.int32)
    return make_plan(
        reference_model("gpt2", embed_dim=64, num_heads=4),
        make_abstract_mesh({}, devices),
        example_batch={"tokens": shape, "targets": shape},
        optimizer=zerojax.optim.one_bit_adam(1e-3, freeze_step=10),
        zero=zero,
        precision="bf16",
    )


@pytest.mark.thorough
def test_formulas_count_signs_after_the_warm_up(monkeypatch):
    monkeypatch.setattr(compile_client, "_PLUGINS", ("no_such_plugin",))
    plan = one_bit_plan(64, 0)
    forecast = zerojax.forecast(plan, gpu="h100")
    after = forecast.compressed
    assert after is not None
    assert after.compressed is None
    assert after.traffic.formula_bytes == compressed_bytes(plan.placement, plan.precision)
    assert after.traffic.formula_bytes < 0.1 * forecast.traffic.formula_bytes
    assert after.estimate.wire_seconds < 0.1 * forecast.estimate.wire_seconds
    assert "PROGRAMS" in forecast.page()
    assert forecast.as_dict()["compressed"]["traffic"] == after.as_dict()["traffic"]


@needs_compiler
@pytest.mark.gpu_programs
def test_both_programs_of_a_one_bit_optimizer_are_compiled(cache):
    plan = one_bit_plan(64, 1)
    forecast = zerojax.forecast(plan, gpu="h100", fast=True)
    after = forecast.compressed
    assert after is not None
    sent = after.traffic.wire_bytes
    assert sent == pytest.approx(compressed_bytes(plan.placement, plan.precision), rel=0.02)
    assert sent < forecast.traffic.wire_bytes
    # Signs go directly to every device of other nodes; a ring crosses nodes once for eight devices.
    assert after.traffic.network_bytes / sent > 0.15
    assert forecast.traffic.network_bytes / forecast.traffic.wire_bytes == pytest.approx(
        1 / 8, rel=1e-3
    )
    peaks = forecast.memory.peak, after.memory.peak
    assert forecast.verdict.needed == max(peaks)
    assert "after it" in forecast.page()
