"""Bytes and buffers of experts on 8 and 64 H100, read from the programs they would run.

Needs the compile-only client (extra `plan`) and no GPU: pytest -m gpu_programs. About a minute of
processor time.
"""

import collections
import functools
import math
import re

import pytest

from tests.support.gpu_plans import compile_step, text_plan
from zerojax.config import MoEConfig
from zerojax.forecasting import hlo
from zerojax.operators.marks import FURTHER_ROUNDS
from zerojax.operators.routed_experts import slots_per_expert
from zerojax.plan.expert_costs import expert_costs
from zerojax.plan.wire import leaf_transfers
from zerojax.zoo.llama import Llama, LlamaConfig

pytestmark = pytest.mark.gpu_programs
DEVICES, TOKENS, LAYERS, WIDTH, HIDDEN, EXPERTS, K = 8, 2048, 2, 512, 256, 16, 2


@functools.cache
def compiled(data, zero, remat, model=1, count=DEVICES):
    """(the plan, the program of a step in bfloat16 with one row of TOKENS for each data shard)."""
    moe = MoEConfig(num_experts=EXPERTS, experts_per_token=K, expert_dim=HIDDEN)
    sizes = {"num_layers": LAYERS, "num_heads": 8, "num_kv_heads": 8, "embed_dim": WIDTH}
    config = LlamaConfig(vocab_size=512, max_seq_len=TOKENS, remat=remat, moe=moe, **sizes)
    axes = {"data": data, "expert": count // data // model, "model": model}
    options = {"precision": "bf16", "zero": zero, "persistence_threshold": 1}
    build = lambda rngs: Llama(config, rngs=rngs)  # noqa: E731
    plan = text_plan(build, count // model, TOKENS, axes=axes, devices=count, **options)
    return plan, compile_step(plan).text


CASES = [(1, 1, "none"), (2, 1, "none"), (2, 3, "none"), (2, 3, "full")]


ON_8 = [(*one, DEVICES) for one in CASES]
ON_64 = [(8, 1, "none", 64), (8, 3, "full", 64), (4, 1, "full", 64)]
"""Experts on the 8 devices of a node, and on two nodes."""


@pytest.mark.parametrize(("data", "zero", "remat", "count"), [*ON_8, *ON_64])
def test_rows_travel_as_often_as_the_formula_says(data, zero, remat, count):
    """In one round: rows and results forward and their gradients backward, with remat rows once
    more; gates travel with rows and back, 4 bytes each. Ids do not travel."""
    plan, text = compiled(data, zero, remat, count=count)
    expert = count // data
    program = hlo.read_program(text)
    sent = sum(
        one.times * one.wire_bytes
        for one in hlo.find_collectives(program, count)
        if one.kind == "all-to-all" and FURTHER_ROUNDS not in one.op_name
    )
    slots = slots_per_expert(TOKENS, K, EXPERTS, 1.25) * EXPERTS
    rows, gates = (4, 2) if remat == "none" else (5, 3)
    expected = LAYERS * (expert - 1) / expert * slots * (rows * WIDTH * 2 + gates * 4)
    costs = expert_costs(plan)
    assert costs.exchange == round(expected)
    assert sent == pytest.approx(costs.exchange, rel=0.01)
    assert further_bytes(program) * (expert - 1) / expert == pytest.approx(
        costs.further_bytes, rel=0.01
    )


def further_bytes(program):
    """Bytes that all-to-alls are given in loops of further rounds, each of which runs once."""
    total = 0
    for computation in program.computations.values():
        for loop in computation.instructions:
            if loop.opcode == "while" and FURTHER_ROUNDS in loop.op_name:
                (body,) = (program.computations[name] for name in loop.callees["body"])
                given = sum(
                    array.bytes
                    for one in body.instructions
                    if one.opcode.removesuffix("-start") == "all-to-all"
                    for array in body.operand_arrays(one)
                )
                total += program.times_run(computation.name) * given
    return total


@pytest.mark.parametrize(("data", "zero", "remat"), CASES)
def test_no_buffer_is_as_many_times_the_rows_as_there_are_devices(data, zero, remat):
    """An all-gather in place of the exchange would have one."""
    _, text = compiled(data, zero, remat)
    expert = DEVICES // data
    rows = slots_per_expert(TOKENS, K, EXPERTS, 1.25) * EXPERTS
    sizes = {
        math.prod(map(int, dims.split(",")))
        for dims in re.findall(r"(?:bf16|f32)\[([0-9,]+)\]", text)
    }
    wide = [size for size in sizes if size % WIDTH == 0 and size >= expert * rows * WIDTH]
    assert rows * WIDTH in sizes
    assert wide == []


@pytest.mark.parametrize(("data", "zero", "remat"), CASES)
def test_experts_are_never_gathered_over_expert(data, zero, remat):
    """All-gathers are those of the plan: dense parameters over 8 devices, the experts that a device
    has over `data`."""
    plan, text = compiled(data, zero, remat)
    found, expected = collections.Counter(), collections.Counter()
    for one in hlo.find_collectives(hlo.read_program(text), DEVICES):
        if one.kind == "all-gather":
            found[tuple(one.group)] += one.times * one.wire_bytes
    groups = {("data", "expert"): tuple(range(DEVICES)), ("data",): (0, DEVICES // 2)}
    for leaf in plan.placement.leaves.values():
        for one in leaf_transfers(plan, leaf):
            if one.kind == "all-gather" and one.num_bytes:
                axes = ("data", "expert") if "expert" in one.over else ("data",)
                expected[groups[axes]] += one.num_bytes
    assert found.keys() == expected.keys()
    # At stage 3 the compiler gathers the head once for forward and backward.
    head = 7 / 8 * 512 * WIDTH * 2
    for group, size in expected.items():
        less = head if zero == 3 and len(group) == DEVICES else 0
        assert found[group] == pytest.approx(size - less, rel=0.02)
    own = LAYERS * EXPERTS // (DEVICES // data) * 3 * WIDTH * HIDDEN * 2
    times = 2 if zero == 3 else 1
    assert expected[groups["data",]] == (data - 1) / data * own * times


SPLIT = [(2, 1, "none", 2), (1, 3, "none", 2), (1, 3, "full", 2), (1, 1, "none", 4)]


def collectives_of(text):
    """All but those of rounds that equal loads do not take."""
    found = hlo.find_collectives(hlo.read_program(text), DEVICES)
    return [one for one in found if one.times and FURTHER_ROUNDS not in one.op_name]


@pytest.mark.parametrize(("data", "zero", "remat", "model"), SPLIT)
def test_beside_model_rows_travel_over_expert_alone(data, zero, remat, model):
    """As many bytes on each device as without `model`: rows are whole on each device of it."""
    _, text = compiled(data, zero, remat, model)
    expert = DEVICES // data // model
    sent = [one for one in collectives_of(text) if one.kind == "all-to-all"]
    assert {tuple(one.group) for one in sent} == {tuple(range(0, expert * model, model))}
    slots = slots_per_expert(TOKENS, K, EXPERTS, 1.25) * EXPERTS
    rows, gates = (4, 2) if remat == "none" else (5, 3)
    expected = LAYERS * (expert - 1) / expert * slots * (rows * WIDTH * 2 + gates * 4)
    assert sum(one.times * one.wire_bytes for one in sent) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("data", "zero", "remat", "model"), SPLIT)
def test_beside_model_results_of_experts_are_summed_over_model(data, zero, remat, model):
    """All that experts send over `model`: sums of the rows' results in the forward pass and of
    their gradients in the backward pass, in bfloat16; no part of an expert. With remat results
    once more, of which the gradients of gates are made."""
    _, text = compiled(data, zero, remat, model)
    over_model = [one for one in collectives_of(text) if tuple(one.group) == tuple(range(model))]
    assert {one.kind for one in over_model} == {"all-reduce"}
    sums = [one for one in over_model if "/experts/" in one.op_name]
    rows = slots_per_expert(TOKENS, K, EXPERTS, 1.25) * EXPERTS * WIDTH * 2
    times = 2 if remat == "none" else 3
    expected = LAYERS * times * 2 * (model - 1) / model * rows
    assert sum(one.times * one.wire_bytes for one in sums) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("data", "zero", "remat", "model"), SPLIT)
def test_beside_model_parts_of_experts_are_gathered_over_data_alone(data, zero, remat, model):
    """All-gathers are those of the plan, of the part that `model` leaves."""
    plan, text = compiled(data, zero, remat, model)
    found, expected = collections.Counter(), collections.Counter()
    for one in collectives_of(text):
        if one.kind == "all-gather":
            found[len(one.group)] += one.times * one.wire_bytes
    for leaf in plan.placement.leaves.values():
        for one in leaf_transfers(plan, leaf):
            if one.kind == "all-gather" and one.num_bytes:
                expected[DEVICES // model if "expert" in one.over else data] += one.num_bytes
    assert found.keys() == expected.keys()
    head = (1 - model / DEVICES) / model * 512 * WIDTH * 2
    for size, num_bytes in expected.items():
        less = head if zero == 3 and size == DEVICES // model else 0
        assert found[size] == pytest.approx(num_bytes - less, rel=0.02)
