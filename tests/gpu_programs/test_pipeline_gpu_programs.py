"""What a pipeline with ZeRO promises, read from the programs that 8, 64 and 512 H100 would run.

Needs the compile-only client (extra `plan`) and no GPU: pytest -m gpu_programs. About two minutes
of processor time. The expectations are those of `benchmarks.pipeline_programs`.
"""

import dataclasses

import pytest

from benchmarks.pipeline_programs import BF16, SMALL, Case, compile_case, wire
from tests.support.program_claims import Claims
from zerojax.forecasting import hlo
from zerojax.pipeline.pipeline_costs import total_buffer_bytes

pytestmark = pytest.mark.gpu_programs

DEEP = dataclasses.replace(SMALL, num_layers=16)
"""Four layers on each of 4 stages, two on each of 8: of a single layer XLA would gather only once
what is read in F and in B of the same tick."""
CASES = [
    *(Case(zero=zero, config=SMALL) for zero in range(3)),
    Case(zero=3, config=DEEP),
    *(Case(zero=zero, stage=2, model=2, config=SMALL) for zero in (1, 3)),
    *(Case(zero=zero, data=8, stage=8, microbatches=16, config=DEEP) for zero in (1, 3)),
    Case(zero=1, data=32, stage=8, model=2, microbatches=16, config=DEEP),
]
SLOW = [case for case in CASES if (case.zero, case.stage, case.model) == (1, 8, 1)]
"""Stage 1 is shown on 8 devices, and on 8 stages with matrices that are split."""
SMALL_REST = 0.005
"""Biases and norms, which the formulas leave out: 0.2 % of these models, 0.3 % of half matrices."""
FOLDED = 0.5
"""Of a tick's two messages, the one that may be missing in all: where XLA takes the first tick out
of a loop it drops the permute of the zeros that are there before anything was computed."""
TINY = 1024
"""Bytes: sums of losses and weights, and the optimizer's norms."""


claim = Claims()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case in SLOW else [])
        for case in CASES
    ],
)
def test_a_program_keeps_every_promise_of_its_stage(case):
    claim.check(case, compile_case(case))


@claim()
def no_device_decides_whether_others_wait(built):
    assert hlo.find_in_branches(built.program, built.case.devices) == []
    assert built.program.unknown_loops == ()


@claim()
def layers_cost_what_zero_says_in_every_tick(built):
    """2, 2, 1 + ticks and 3 ticks, times the bytes of one stage's layers."""
    assert wire(built.over("data")) == pytest.approx(built.case.layer_bytes, rel=SMALL_REST)


@claim()
def tables_cost_one_gather_and_one_scatter(built):
    """Over `data` and `stage` together, at every stage of ZeRO; at 0 the same bytes as a sum."""
    found = built.over("data", "stage")
    assert wire(found) == pytest.approx(built.case.common_bytes, rel=SMALL_REST)
    assert [c for c in found if c.loop_depth] == []


@claim()
def neighbours_get_activations_and_nothing_else(built):
    case = built.case
    sent = wire(built.permutes) / case.message
    assert 2 * case.ticks * (1 - FOLDED / case.ticks) <= sent <= 2 * case.ticks
    assert {c.payload_bytes for c in built.permutes} == {case.message}
    others = [c for c in built.over("stage") if c not in built.permutes]
    assert wire(others + built.over("data", "stage", "model")) < TINY


@claim(lambda case: case.zero < 2)
def nothing_of_the_weights_is_sent_inside_a_loop(built):
    """However many microbatches and ticks there are."""
    assert [c for c in built.over("data") if c.loop_depth] == []


@claim(lambda case: case.zero == 2)
def weights_are_gathered_once_and_gradients_scattered_in_every_tick(built):
    gathers = [c for c in built.over("data") if c.kind == "all-gather"]
    assert gathers
    assert [c for c in gathers if c.loop_depth] == []
    scatters = wire(c for c in built.over("data") if c.kind == "reduce-scatter" and c.loop_depth)
    once = built.case.layer_bytes / built.case.layer_units
    assert scatters == pytest.approx(built.case.ticks * once, rel=SMALL_REST)


@claim(lambda case: case.zero == 3 and case.config.num_layers / case.stage > 2)
def never_more_than_two_layers_are_gathered_at_once(built):
    """The first of an F slot and the last of the B slot behind it may travel together."""
    layer = BF16 * built.case.layer_parameters / (built.case.config.num_layers / built.case.stage)
    found = built.over("data")
    assert max(c.payload_bytes for c in found) < 2 * layer * (1 + SMALL_REST)


@claim(lambda case: case.model > 1)
def shards_of_a_matrix_sum_activations_only(built):
    found = built.over("model")
    assert {c.kind for c in found} == {"all-reduce"}
    assert max(c.payload_bytes for c in found) <= 2 * built.case.message  # two may go together


@claim()
def messages_travel_beside_other_work(built):
    """Where both slots are in a tick, each of its two messages is under way while at least 30 times
    its bytes are read and written: at 3.3 TB/s as long as a link of 110 GB/s takes for it. On 512
    GPUs with matrices that are split one of the two has 28 times (see the control below).
    """
    least = 25 if built.case.model > 1 and built.case.stage > 2 else 30
    steady = built.steady_permutes
    assert len(steady) == 2
    for permute in steady:
        assert permute.is_async
        assert built.overlap[permute.name].hbm_bytes > least * built.case.message


@claim(lambda case: case.zero < 2 and case.model == 1)
def messages_travel_beside_a_whole_slot(built):
    """Where nothing else is sent in a tick: gradients beside F, activations beside B."""
    flops = sorted(built.overlap[c.name].matmul_flops for c in built.steady_permutes)
    assert flops[0] >= 0.99 * built.case.forward_flops
    assert flops[1] >= 2 * 0.99 * built.case.forward_flops


@claim(lambda case: case.zero == 2 or case.model > 1)
def messages_wait_for_other_collectives(built):
    """The control of the claim above. XLA has one collective under way at a time unless told
    otherwise, so that one of the two messages has only what lies between slots beside it."""
    flops = min(built.overlap[c.name].matmul_flops for c in built.steady_permutes)
    assert flops < 0.99 * built.case.forward_flops


def sizes(schedule: str, stash: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """For 8 and 32 microbatches: temporary bytes as compiled, bytes of buffers as planned."""
    found = []
    for number in (8, 32):
        case = Case(microbatches=number, schedule=schedule, stash=stash, config=SMALL)
        built = compile_case(case)
        assert built.plan.pipeline is not None
        found.append((built.memory.temporary, total_buffer_bytes(built.plan.pipeline)))
    return found[0], found[1]


@pytest.mark.parametrize("stash", [pytest.param("residuals", marks=pytest.mark.slow), "input"])
def test_memory_does_not_grow_with_the_number_of_microbatches(stash):
    """To a thousandth: the table of a longer schedule is some kilobytes."""
    (few, few_planned), (many, many_planned) = sizes("1f1b", stash)
    assert few_planned == many_planned
    assert many == pytest.approx(few, rel=1e-3)


def test_gpipe_grows_by_what_the_plan_says():
    """The control of the test above. To a hundredth: buffers lie at multiples of some bytes."""
    (few, few_planned), (many, many_planned) = sizes("gpipe", "residuals")
    assert many_planned > 3 * few_planned
    assert many - few == pytest.approx(many_planned - few_planned, rel=0.01)
