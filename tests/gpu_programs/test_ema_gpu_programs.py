"""What an average of the weights adds to programs for GPUs: 8 bytes per parameter, and no more.

Needs the compile-only client (extra `plan`), no GPU: pytest -m gpu_programs
"""

from typing import Any

import optax
import pytest

import zerojax
from benchmarks import update_phase
from tests.support.gpu_plans import compile_step, text_plan
from tests.support.marks import needs_kernels
from tests.support.recipe import RECIPE
from tests.support.small_models import reference_model
from zerojax.forecasting import hlo
from zerojax.optim import ema_of
from zerojax.plan.counts import shard_bytes

pytestmark = [pytest.mark.gpu_programs, needs_kernels]
SHAPES = update_phase._shapes(2, stacked=True)
SMALL = 8192
"""Bytes of scalars: a buffer of 256 for each of 16 arrays, and some more."""
OPTAX = "optax.adamw"
CASES = [
    ("adamw", "bf16"),
    ("adamw", update_phase.WITHOUT_MASTERS),
    ("lion", "bf16"),
    ("sgd", "bf16"),
    ("lamb", "bf16"),
    ("adam8bit", "bf16"),
    (OPTAX, "bf16"),
]


def optimizer_of(name: str) -> Any:
    return optax.adamw(1e-3) if name == OPTAX else getattr(zerojax, name)(1e-3, weight_decay=0.1)


@pytest.mark.parametrize("way", ["xla", "mosaic_gpu"])
@pytest.mark.parametrize(("name", "precision"), CASES)
def test_the_update_moves_8_bytes_more_and_holds_nothing_more(name, precision, way, monkeypatch):
    """In one pass: the average is read once and written once, in its place, for an H200."""
    found, plain = [], optimizer_of(name)
    for tx in (plain, zerojax.with_ema(plain)):
        monkeypatch.setattr(update_phase, "_optimizer", lambda _, tx=tx: tx)
        found.append(update_phase._read(SHAPES, name, precision, way))
    plain, averaged = found
    added = averaged["bytes_per_parameter"] - plain["bytes_per_parameter"]
    assert added == pytest.approx(8, abs=0.01)
    assert averaged["temporary_MB"] <= plain["temporary_MB"] + SMALL / 1e6
    assert averaged["kernels"] == plain["kernels"]


def compiled_step(optimizer: Any, zero: int) -> tuple[Any, Any, Any]:
    """(plan, memory, (kind, bytes) of all collectives) of a step on 8 H100."""
    plan = text_plan(
        reference_model("gpt2", max_seq_len=128, embed_dim=256, num_layers=4),
        16,
        128,
        optimizer=optimizer,
        zero=zero,
        precision="bf16",
        persistence_threshold=0,
    )
    found = compile_step(plan)
    program = hlo.read_program(found.text)
    sent = sorted((c.kind, c.wire_bytes) for c in hlo.find_collectives(program, 8))
    return plan, found.memory, sent


@pytest.mark.parametrize("zero", [1, 3])
def test_a_step_sends_nothing_more_and_updates_it_in_its_shards(zero):
    tx = zerojax.adamw(1e-3, **RECIPE)
    _, memory, sent = compiled_step(tx, zero)
    plan, with_one, sent_with = compiled_step(zerojax.with_ema(tx), zero)
    assert sent_with == sent
    shards = shard_bytes(ema_of(plan.abstract_state["opt_state"]))
    assert shards == shard_bytes(plan.abstract_state["params"])
    added = with_one.aliased - memory.aliased
    assert shards <= added <= shards + 64, "in place, with a counter"
    assert with_one.temporary <= memory.temporary * 1.01 + SMALL
