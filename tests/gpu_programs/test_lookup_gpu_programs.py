"""Bytes and buffers of lookups on 8 H100, read from the programs they would run.

Needs the compile-only client (extra `plan`) and no GPU: pytest -m gpu_programs. About a minute of
processor time.
"""

import functools
import math
import re

import jax.numpy as jnp
import pytest
from flax import nnx

from tests.support.gpu_plans import compile_step, text_plan
from zerojax.forecasting import hlo
from zerojax.models.losses import next_token
from zerojax.plan.wire import leaf_transfers, wire_bytes

pytestmark = pytest.mark.gpu_programs
DEVICES, TOKENS, ROWS, WIDTH = 8, 8192, 131_072, 4096
TABLE = "embed/embedding"
ONE_WAY = (DEVICES - 1) / DEVICES * TOKENS * WIDTH * 2
"""Bytes of the rows of one device's tokens that other devices have, in bfloat16: 58.7 MB."""


class Reader(nnx.Module):
    """A table and a small head, so that what is large in a program is the table's."""

    def __init__(self, rngs, remat):
        self.remat = remat
        self.embed = nnx.Embed(ROWS, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 64, rngs=rngs)

    def loss(self, batch):
        read = lambda model, tokens: model.head(jnp.tanh(model.embed(tokens)))  # noqa: E731
        read = nnx.remat(read) if self.remat else read
        return next_token(read(self, batch["tokens"]), batch["targets"])


@functools.cache
def compiled(zero, lookup="owners", remat=False, microbatches=1):
    """(the plan, the compiled step in bfloat16 with TOKENS on each device)."""
    plan = text_plan(
        lambda rngs: Reader(rngs, remat),
        DEVICES * microbatches,
        TOKENS // microbatches,
        precision="bf16",
        num_microbatches=microbatches,
        zero=zero,
        lookup=lookup,
    )
    return plan, compile_step(plan)


def sent(program, *kinds):
    return [
        one.times * one.wire_bytes
        for one in hlo.find_collectives(hlo.read_program(program.text), DEVICES)
        if one.kind in kinds
    ]


CASES = [(1, False, 1), (2, False, 1), (3, False, 1), (3, True, 1), (2, False, 4)]


@pytest.mark.parametrize(("zero", "remat", "microbatches"), CASES)
def test_rows_travel_as_often_as_the_formula_says(zero, remat, microbatches):
    """There and back, and there once more where a checkpoint reads them again: whatever the ids."""
    plan, program = compiled(zero, remat=remat, microbatches=microbatches)
    travels = 3 if remat else 2
    assert sum(sent(program, "all-to-all")) == pytest.approx(travels * ONE_WAY, rel=0.001)
    transfers = leaf_transfers(plan, plan.placement.leaves[TABLE])
    assert {one.kind for one in transfers if one.num_bytes} == {"all-to-all"}
    assert sum(one.num_bytes for one in transfers) == pytest.approx(travels * ONE_WAY, rel=1e-6)


@pytest.mark.parametrize(("zero", "remat", "microbatches"), CASES)
def test_nothing_else_of_the_tables_size_travels(zero, remat, microbatches):
    """All other collectives, of ids and the head, are together a thousandth of the table."""
    _, program = compiled(zero, remat=remat, microbatches=microbatches)
    others = sent(program, "all-gather", "all-reduce", "reduce-scatter", "collective-permute")
    assert sum(others) <= ROWS * WIDTH * 2 / 200
    assert sum(others) >= (DEVICES - 1) / DEVICES * DEVICES * TOKENS * 4  # the ids at least


def test_no_buffer_is_larger_than_a_devices_share():
    """In float32, which its sum of gradients is in; gathered, the table is there whole."""

    def largest(program):
        found = re.findall(r"(?:bf16|f32)\[([0-9,]+)\]", program.text)
        return max(math.prod(map(int, dims.split(","))) for dims in found)

    share = ROWS * WIDTH // DEVICES
    assert largest(compiled(3)[1]) == share
    assert largest(compiled(3, "gather")[1]) == share * DEVICES


def test_a_fifteenth_of_the_bytes_and_a_sixth_of_the_memory():
    """Of this step: 118 MB for 1,880 and 513 MiB of temporaries for 3,202."""
    (plan, looked_up), (_, gathered) = compiled(3), compiled(3, "gather")
    kinds = "all-gather", "all-reduce", "reduce-scatter", "all-to-all"
    few, many = sum(sent(looked_up, *kinds)), sum(sent(gathered, *kinds))
    assert few < many / 15
    assert looked_up.memory.temporary < gathered.memory.temporary / 6
    assert few == pytest.approx(wire_bytes(plan), rel=0.02)
