"""Layers of two windows compiled for 8 H100: cuDNN in both branches, and nothing that waits there.

Needs the compile-only client (extra `plan`) and no GPU: pytest -m gpu_programs. About two minutes
of processor time.
"""

import dataclasses
import functools
from typing import Any

import pytest

import zerojax
from tests.support.gpu_plans import text_plan
from tests.support.recipe import RECIPE
from zerojax.forecasting import hlo
from zerojax.hardware import compile_client
from zerojax.step.build import build_step
from zerojax.zoo import Decoder, DecoderConfig, LayerKind, Rope

pytestmark = pytest.mark.gpu_programs
DEVICES, ROWS, TOKENS, HEADS = 8, 16, 1024, 8
WINDOW = LayerKind(window=256)
FULL = LayerKind(rope=Rope(theta=1e6))
KINDS: dict[str, dict[str, Any]] = {
    "both": {"kinds": (WINDOW, FULL), "pattern": (0, 0, 0, 1)},
    "windows": {"kinds": (WINDOW,)},
    "whole": {"kinds": (FULL,)},
}
MESHES = {"data": {"data": 8}, "three axes": {"data": 2, "model": 2, "stage": 2}}
QUERY = ROWS // DEVICES * TOKENS * HEADS * 128 * 2
"""Bytes of a layer's query on a device; float32 scores of all its heads are 16 times as many."""


@dataclasses.dataclass(frozen=True)
class Built:
    program: hlo.Program
    text: str
    temporary: int


@functools.cache
def built(kinds: str, mesh: str, attention: str) -> Built:
    """The step of four layers at stage 3, in bfloat16."""
    config = DecoderConfig(
        vocab_size=512,
        max_seq_len=TOKENS,
        num_layers=4,
        num_heads=HEADS,
        num_kv_heads=2,
        head_dim=128,
        embed_dim=256,
        mlp_dim=512,
        attention=attention,
        remat="attention",
        loss_chunk=1024,
        **KINDS[kinds],
    )
    plan = text_plan(
        lambda rngs: Decoder(config, rngs=rngs),
        ROWS,
        TOKENS,
        axes=MESHES[mesh],
        devices=DEVICES,
        optimizer=zerojax.adamw(1e-3, **RECIPE),
        precision="bf16",
        zero=3,
        num_microbatches=4 if "stage" in MESHES[mesh] else 1,
    )
    lowered = build_step(plan).lower(plan.abstract_state, plan.abstract_batch)
    done = compile_client.compile_for_gpus(lowered)
    return Built(hlo.read_program(done.text), done.text, done.memory.temporary)


@pytest.mark.parametrize("mesh", MESHES)
def test_cudnn_computes_both_kinds_and_no_collective_is_in_a_branch(mesh):
    """Whole calls, where the compiler splits heads too; products are the mean over layers."""
    both, windows, whole = (built(kinds, mesh, "auto") for kinds in KINDS)
    calls = [x.text.count("__cudnn$fmha") for x in (both, windows, whole)]
    assert calls[0] == calls[1] + calls[2] > 0
    assert hlo.find_in_branches(both.program, DEVICES) == []
    flops = [hlo.matmul_flops(x.program) for x in (both, windows, whole)]
    assert flops[0] == pytest.approx((3 * flops[1] + flops[2]) / 4, rel=1e-9)
    assert flops[1] < flops[2]
    assert both.temporary <= max(windows.temporary, whole.temporary) + QUERY


def test_in_blocks_nothing_holds_the_scores_of_a_branch():
    """XLA copies what a loop inside of a branch reads: query, result and slope, key and value."""
    both, windows, whole = (built(kinds, "data", "chunked") for kinds in KINDS)
    assert both.temporary <= max(windows.temporary, whole.temporary) + 4 * QUERY
    flops = [hlo.matmul_flops(x.program) for x in (both, windows, whole)]
    assert flops[0] == pytest.approx((3 * flops[1] + flops[2]) / 4, rel=1e-9)
