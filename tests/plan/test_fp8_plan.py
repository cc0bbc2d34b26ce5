"""What plans and forecasts say of 8-bit products: their time, what they keep and what they send."""

import dataclasses
import re

import jax
import numpy as np
import pytest

import zerojax
from tests.support.forecast_samples import sample_card
from tests.support.gpu_plans import compile_step, text_plan
from tests.support.small_models import reference_model
from tests.support.trajectories import plan_for
from zerojax.config import ModelConfig
from zerojax.forecasting.hlo import find_collectives, find_overlap, read_program
from zerojax.forecasting.roofline import estimate
from zerojax.forecasting.settings_search.candidates import bounds_of
from zerojax.placement.device_mesh import make_abstract_mesh
from zerojax.plan.fp8_costs import eight_bit_share, kept_inputs, wire_bytes_saved
from zerojax.plan.make import make_plan
from zerojax.plan.offload_costs import TierRates, hiding
from zerojax.tracing.flops import count_program_flops
from zerojax.zoo import build_model

LAYERS, WIDTH, TOKENS, VOCAB = 2, 32, 4 * 16, 64
"""Of `plan_for(reference_model(...))`: tokens of one of 8 data shards."""


def plan_of(name="gpt2", matmul_dtype="fp8", **options):
    remat = options.pop("remat", "none")
    return plan_for(
        reference_model(name, matmul_dtype=matmul_dtype, remat=remat),
        **{"precision": "bf16", "persistence_threshold": 1000, **options},
    )


def test_the_share_of_8_bit_products_is_that_of_the_layers_matrices():
    """Scores and mixing (two products of 16 x 16 tokens) and the head stay in bfloat16."""
    program = plan_of().traced.forward
    layers = 2 * TOKENS * LAYERS * 12 * WIDTH**2
    attention = 2 * 2 * TOKENS * 16 * WIDTH * LAYERS
    head = 2 * TOKENS * WIDTH * VOCAB
    assert count_program_flops(program) == layers + attention + head
    assert eight_bit_share(program) == pytest.approx(layers / (layers + attention + head))
    assert eight_bit_share(plan_of(matmul_dtype=None).traced.forward) == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "widths"), [("gpt2", 1 + 1 + 1 + 4), ("llama", 1 + 1 + 1 + 4)])
def test_inputs_that_are_kept_are_one_for_each_distinct_input(name, widths):
    """Of query, key and value, of output, of up (and gate), and of down, which is wider."""
    elements = LAYERS * TOKENS * WIDTH * widths
    assert kept_inputs(plan_of(name).traced.forward) == (elements, 0)
    assert kept_inputs(plan_of(name, remat="full").traced.forward) == (0, elements)
    assert kept_inputs(plan_of(name, matmul_dtype=None).traced.forward) == (0, 0)


@pytest.mark.thorough
def test_the_plan_says_what_waits_in_8_bits():
    said = " ".join(plan_of().reasons)
    kept = LAYERS * TOKENS * WIDTH * 7
    assert re.search(f"{kept / 1024:.1f} KiB .*{2 * kept / 1024:.1f} KiB in bfloat16", said)
    assert "% of the FLOPs of products use 8-bit floats" in said
    assert "8 bits save no memory" in " ".join(plan_of(remat="full").reasons)
    assert "8-bit" not in " ".join(plan_of(matmul_dtype=None).reasons)


def test_what_the_wire_saves_is_half_of_the_gathered_kernels():
    kernels = LAYERS * 12 * WIDTH**2 * 7 / 8
    assert wire_bytes_saved(plan_of(zero=3, wire={"weights": "fp8"})) == 2 * kernels
    assert wire_bytes_saved(plan_of(zero=3)) == 0


def test_each_kind_of_product_has_its_own_peak():
    card = dataclasses.replace(sample_card(), bf16_flops=1e15, fp8_flops=2e15)
    assert card.peak_flops("bfloat16") == card.peak_flops("bfloat16", 0.0) == 1e15
    assert card.peak_flops("bfloat16", 1.0) == pytest.approx(2e15)
    # Of 8 parts 6 run at twice the rate: 2 + 3 in place of 8.
    assert card.peak_flops("bfloat16", 0.75) == pytest.approx(8e15 / 5)
    without = dataclasses.replace(card, fp8_flops=None)
    assert without.peak_flops("bfloat16", 0.75) == 1e15
    assert dataclasses.replace(card, bf16_flops=None).peak_flops("bfloat16", 0.75) is None


def test_the_roofline_counts_8_bit_products_at_their_peak():
    card = dataclasses.replace(sample_card(), bf16_flops=1e15, fp8_flops=2e15)
    given = {"mesh": {"data": 1}, "dtype": "bfloat16", "flops": 8e15, "model_flops": 4e15}
    rest = {"hbm_bytes": 10, "rows": (), "tokens": 10}
    plain = estimate(card, **given, **rest)
    small = estimate(card, **given, **rest, eight_bits=0.75, model_eight_bits=0.5)
    assert (plain.compute_seconds, plain.eight_bits) == (8.0, 0.0)
    assert small.compute_seconds == pytest.approx(5.0)
    assert small.eight_bits == 0.75
    # 2 s of its own products in bfloat16 and 1 s in 8 bits, of 5 s.
    assert small.mfu == pytest.approx(3 / 5)


def test_products_beside_a_collective_are_counted_by_their_operands():
    groups = "replica_groups={{0,1}}, dimensions={0}"
    text = (
        "HloModule m, is_scheduled=true\n\n"
        "ENTRY %main (x: f8e4m3fn[8,16], w: f8e5m2[16,8], y: bf16[8,16]) -> bf16[16,16] {\n"
        "  %x = f8e4m3fn[8,16] parameter(0)\n"
        "  %w = f8e5m2[16,8] parameter(1)\n"
        "  %y = bf16[8,16] parameter(2)\n"
        f"  %s = ((bf16[8,16]), bf16[16,16]) all-gather-start(%y), {groups}\n"
        "  %a = bf16[8,8] dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
        "  %b = bf16[8,8] dot(%y, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
        "  ROOT %d = bf16[16,16] all-gather-done(%s)\n"
        "}\n"
    )
    program = read_program(text)
    found = find_overlap(program, find_collectives(program, 2))["s"]
    assert (found.matmul_flops, found.eight_bit_flops) == (2 * 2 * 8 * 8 * 16, 2 * 8 * 8 * 16)


@pytest.mark.thorough
def test_shorter_products_hide_less_of_an_offload():
    card = dataclasses.replace(sample_card(), bf16_flops=1e15, fp8_flops=2e15)
    rates = TierRates(to_device=1e9, to_host=1e9, both=2e9, disk=None, link="", disk_source="")
    offload = {"opt_state": "host", "min_elements": 1, "slice_elements": 4096}
    offloaded = {"offload": offload, "optimizer": zerojax.adamw(1e-3)}
    wide, small = (
        hiding(plan_of(matmul_dtype=dtype, **offloaded), card, rates) for dtype in (None, "fp8")
    )
    share = eight_bit_share(plan_of().traced.forward)
    assert wide.update_seconds == small.update_seconds
    assert small.tokens / wide.tokens == pytest.approx(1 / (1 - share / 2), rel=0.01)


@pytest.mark.thorough
def test_the_search_for_a_plan_counts_them_so_too():
    card = dataclasses.replace(sample_card(), bf16_flops=1e12, fp8_flops=2e12)
    wide, small = (
        bounds_of(plan_of(matmul_dtype=d), card, 1.0).products_seconds for d in (None, "fp8")
    )
    share = eight_bit_share(plan_of().traced.forward)
    assert small / wide == pytest.approx(1 - share / 2)


@pytest.mark.thorough
def test_the_page_of_a_forecast_says_so():
    def forecast(card, matmul_dtype="fp8"):
        config = ModelConfig(
            name="gpt2", num_layers=2, num_heads=4, embed_dim=128, matmul_dtype=matmul_dtype
        )
        tokens = jax.ShapeDtypeStruct((16, 128), np.int32)
        plan = make_plan(
            build_model(config, 256),
            make_abstract_mesh({}, 8),
            example_batch={"tokens": tokens, "targets": tokens},
            zero=3,
            precision="bf16",
            wire={"weights": "fp8" if matmul_dtype else "compute"},
        )
        return zerojax.forecast(plan, gpu=card, fast=True)

    small, wide, older = forecast("h100"), forecast("h100", None), forecast("a100-80gb")
    page = small.page()
    assert "in 8 bits at their own peak" in page
    assert "inputs of 8-bit products saved for the backward pass take" in page
    assert "kernels that are gathered in 8 bits send" in page
    assert small.estimate.compute_seconds < 0.8 * wide.estimate.compute_seconds
    assert small.estimate.flops == wide.estimate.flops
    assert "8 bits" not in wide.page()
    assert "A100 SXM 80 GB has no units for 8-bit floats" in " ".join(older.page().split())
    assert "at their own peak" not in older.page()


@pytest.mark.gpu_programs
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_on_8_h100_a_step_needs_less_than_in_bfloat16_by_what_the_plan_says(name):
    """Measured of that: 1.16 of it for GPT-2, 1.50 for Llama."""
    sizes = {"num_layers": 8, "num_heads": 16, "embed_dim": 2048, "max_seq_len": 1024}

    def build(matmul_dtype):
        config = ModelConfig(name=name, matmul_dtype=matmul_dtype, **sizes)
        plan = text_plan(build_model(config, 8192), 8 * 4, 1024, zero=3)
        return plan, compile_step(plan).memory.temporary

    plan, small = build("fp8")
    kept, _ = kept_inputs(plan.traced.forward)
    assert kept <= build(None)[1] - small <= 2 * kept
