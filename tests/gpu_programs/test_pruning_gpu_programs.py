"""What masks of pruned weights add to the step for 8 H100: their bytes, and no communication.

Needs the compile-only client (extra `plan`), no GPU: pytest -m gpu_programs
"""

import dataclasses
from collections import Counter

import pytest

import zerojax
from tests.support.gpu_plans import compile_step, text_plan
from tests.support.marks import needs_kernels
from tests.support.small_models import reference_model
from zerojax.config import PruningConfig, PruningGroup
from zerojax.config.features import Features
from zerojax.forecasting import hlo
from zerojax.plan.counts import shard_bytes
from zerojax.plan.make import plan_of

pytestmark = [pytest.mark.gpu_programs, needs_kernels]
SMALL = 65536
"""Bytes of scalars and of their alignment."""


def test_masks_add_their_shards_to_a_step_and_nothing_to_the_wire():
    model = reference_model("gpt2", max_seq_len=128, embed_dim=256, num_layers=4)
    options = {"optimizer": zerojax.adamw(1e-3), "zero": 3, "precision": "bf16"}
    plain = text_plan(model, 16, 128, persistence_threshold=0, **options)
    group = PruningGroup(pattern="kernel", dense_ratio=0.5, start_step=10)
    inputs = dataclasses.replace(
        plain.inputs, features=Features.of(pruning=PruningConfig(groups=(group,)))
    )
    plans = plain, plan_of(inputs, plain.mesh, zero=3, persistence_threshold=0)
    found = []
    for plan in plans:
        compiled = compile_step(plan)
        sent = hlo.find_collectives(hlo.read_program(compiled.text), 8)
        found.append((Counter((x.kind, x.payload_bytes, x.times) for x in sent), compiled.memory))
    assert found[0][0] == found[1][0]
    before, after = (memory for _, memory in found)
    shards = shard_bytes(plans[1].abstract_state["masks"])
    added = after.aliased - before.aliased
    assert shards <= added <= shards + SMALL, "stored in place"
    assert after.temporary <= before.temporary + SMALL
