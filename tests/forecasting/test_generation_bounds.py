"""Bounds of generation by formula: bytes counted by hand, and the page of `zerojax plan`."""

import dataclasses
import json

import pytest

from tests.support.refusals import refused
from tests.support.small_models import VOCAB, reference_model
from tests.support.trajectories import plan_for
from zerojax.cli import main
from zerojax.config import MoEConfig
from zerojax.forecasting.generation_bounds import generation_bounds, generation_page
from zerojax.hardware.gpus import find_gpu

H200 = find_gpu("h200")
WIDTH, MLP, HEADS, KV, LAYERS, LENGTH = 32, 128, 4, 2, 2, 16


def bounds_of(**options):
    model = reference_model("llama", mlp_dim=MLP)
    found = generation_bounds(plan_for(model, persistence_threshold=0, **options), H200)
    return {(x.way, x.quantize, x.cache, x.batch): x for x in found}


def test_bytes_are_those_counted_by_hand():
    """A float32 Llama on 8 devices; every kernel and the head have 2 or more dimensions."""
    found = bounds_of(zero=3)
    heads = WIDTH // HEADS
    outputs = WIDTH + 2 * KV * heads + WIDTH + 2 * MLP + WIDTH
    kernels = WIDTH * (WIDTH + 2 * KV * heads + WIDTH + 3 * MLP)
    rest = 4 * (VOCAB * WIDTH + WIDTH + LAYERS * 2 * WIDTH)
    weights = {None: 4 * LAYERS * kernels + rest, "int8": LAYERS * (kernels + 4 * outputs) + rest}
    caches = {None: 4 * heads, "int8": heads + 4}
    for (way, quantize, cache, batch), bound in found.items():
        degree = int(way.split()[-1]) if way.startswith("model") else 1
        rows = -(-batch // (8 // degree))
        kv_heads = KV // degree if KV % degree == 0 else KV
        size = 2 * LAYERS * rows * LENGTH * kv_heads * caches[cache]
        assert bound.cache_bytes == size, way
        if way in ("gathered", "model 1"):
            assert bound.weight_bytes == weights[quantize]
        least = (bound.weight_bytes + size) / H200.memory_bandwidth
        assert bound.seconds == max(least, bound.wire_bytes / H200.node_bandwidth)
        assert bound.tokens_per_second == batch / bound.seconds
    gathered = found["gathered", None, None, 32]
    assert gathered.wire_bytes == pytest.approx(weights[None] * 7 / 8, rel=0.1)
    sums = found["model 4", None, None, 32]
    assert sums.wire_bytes == 2 * LAYERS * 16 * WIDTH * 4 * 2 * 3 // 4
    assert bounds_of(zero=2).keys() == {key for key in found if key[0].startswith("model")}


@pytest.mark.thorough
def test_what_is_not_counted_is_refused():
    experts = reference_model("llama", moe=MoEConfig(num_experts=4, experts_per_token=2))
    refused(lambda: generation_bounds(plan_for(experts), H200), "4 --generation", "leave out")
    stages = {"zero": 1, "mesh": {"data": 4, "stage": 2}, "num_microbatches": 2}
    refused(lambda: bounds_of(**stages), "stage=2", "mesh.stage=1")


def test_a_way_that_does_not_fit_in_the_memory_has_no_rate():
    plan = plan_for(reference_model("llama", mlp_dim=MLP), persistence_threshold=0, zero=3)
    held = max(bound.held_bytes for bound in generation_bounds(plan, H200))
    small = dataclasses.replace(H200, memory_bytes=held - 1)
    bounds = generation_bounds(plan, small)
    assert [bound.fits for bound in bounds] == [bound.held_bytes < held for bound in bounds]
    page = generation_page(bounds, plan, small)
    assert "|-" in page
    assert "fit" in page
    assert "|-" not in generation_page(generation_bounds(plan, H200), plan, H200)


@pytest.mark.thorough
def test_the_command_prints_them(capsys):
    words = ["plan", "configs/tiny_shakespeare.yaml", "--gpu", "h200", "--devices", "8"]
    assert main([*words, "--generation"]) == 0
    page = capsys.readouterr().out
    assert "no GPU has run it" in page
    assert main([*words, "--generation", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["way"] for row in rows} >= {"model 1", "model 8"}
    assert main([*words, "--generation", "--search"]) == 2
    assert "--search" in capsys.readouterr().err
