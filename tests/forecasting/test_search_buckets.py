"""The search over sizes of buckets: what is compiled, what is taken, and that it leaves no more."""

import dataclasses
import functools
import json

import jax
import pytest

import zerojax
from tests.support.forecast_samples import sample_card, sample_forecast, sample_memory
from zerojax.config import ModelConfig
from zerojax.forecasting.forecast_numbers import FORMULA
from zerojax.forecasting.settings_search import (
    Candidate,
    SearchResult,
    Trial,
    chosen_words,
    search_buckets,
    search_dict,
    search_page,
)
from zerojax.forecasting.settings_search.buckets import MARGIN, NEARLY, bare_seconds
from zerojax.forecasting.settings_search.search_result import (
    BEATEN,
    CHOSEN,
    FAILED,
    NOT_TRIED,
    TOO_LARGE,
)
from zerojax.hardware.compile_client import CompileError
from zerojax.placement.device_mesh import make_abstract_mesh
from zerojax.plan.make import make_plan
from zerojax.transport import bucket_sizes
from zerojax.zoo import build_model

CARD = sample_card("h100")
OWN = 50_000_000
LAYERS, WIDTH, VOCAB, SEQ = 4, 1024, 50304, 1024
MATRIX = WIDTH * WIDTH
BIASES = (3 + 1 + 4 + 1 + 4) * WIDTH
"""Of query, key and value, output, up and down, and of two norms with scales: a layer of GPT-2."""


@functools.cache
def plan_with(zero: int, devices: int = 8, **sizes: int):
    config = ModelConfig(
        name="gpt2", num_layers=LAYERS, num_heads=8, embed_dim=WIDTH, max_seq_len=SEQ, remat="full"
    )
    tokens = jax.ShapeDtypeStruct((4 * devices, SEQ), jax.numpy.int32)
    return make_plan(
        build_model(config, VOCAB),
        make_abstract_mesh({}, devices),
        example_batch={"tokens": tokens, "targets": tokens},
        precision="bf16",
        zero=zero,
        **sizes,
    )


def forecast_with(exposed: float, step: float = 1.0, *, fits: bool = True):
    found = sample_forecast(memory=sample_memory(scale=1 if fits else 9), gpu=CARD)
    time = dataclasses.replace(
        found.estimate, exposed_wire_seconds=exposed, step_seconds=step + exposed
    )
    return dataclasses.replace(found, estimate=time)


class Compiler:
    """Exposed seconds by (reduce_bucket_size, allgather_bucket_size); others are the plan's own."""

    def __init__(self, own: float = 0.1, **more):
        self.own, self.by_sizes, self.seen = own, {}, []
        self.more = more

    def __call__(self, plan):
        sizes = plan.settings.reduce_bucket_size, plan.settings.allgather_bucket_size
        self.seen.append(sizes)
        found = self.by_sizes.get(sizes, self.own)
        if isinstance(found, Exception):
            raise found
        return found if not isinstance(found, float) else forecast_with(found)


def run(compiler, zero: int = 2, **more):
    return search_buckets(
        lambda sizes: plan_with(zero, **sizes), CARD, forecast_of=compiler, **more
    )


def reduce_sizes(zero: int = 2):
    return [
        size
        for option, size in bucket_sizes.other_bucket_sizes(plan_with(zero))
        if option == bucket_sizes.REDUCE
    ]


def test_the_size_that_leaves_least_is_taken_and_the_sentence_says_before_and_after():
    half = reduce_sizes()[0]
    compiler = Compiler()
    compiler.by_sizes = {(half, OWN): 0.06}
    found = run(compiler)
    assert found.words == (f"mesh.reduce_bucket_size={half}",)
    assert (found.before, found.after) == (0.1, 0.06)
    assert found.own == {"reduce_bucket_size": OWN, "allgather_bucket_size": OWN}
    assert f"mesh.reduce_bucket_size={half} leaves 60 instead of 100 ms" in found.sentence
    assert "a step from 1,100 to 1,060 ms, as expected" in found.sentence
    assert compiler.seen[0] == (OWN, OWN), "what is there is compiled first"
    (chosen,) = [trial for trial in found.trials if trial.status == CHOSEN]
    assert chosen.exposed == 0.06
    assert all(trial.reason for trial in found.trials)


def test_no_more_than_the_plans_own_is_ever_left():
    """Whatever the compiler says of other sizes."""
    for worse in (0.1, 0.1 - 0.9 * MARGIN, 0.2):
        compiler = Compiler()
        compiler.by_sizes = {(size, OWN): worse for size in reduce_sizes()}
        found = run(compiler)
        assert found.words == ()
        assert found.after == found.before == 0.1
        assert "Buckets as they are: 100 ms of communication time not hidden" in found.sentence
        assert {trial.status for trial in found.trials} <= {BEATEN, NOT_TRIED}


def test_nothing_is_compiled_for_a_wire_that_the_step_hides_nearly_whole():
    compiler = Compiler(own=0.015)
    found = run(compiler)
    assert found.words == found.trials == ()
    assert found.after == found.before == 0.015
    assert compiler.seen == [(OWN, OWN)]


def test_what_does_not_fit_or_compile_is_not_taken():
    first, second, *_ = reduce_sizes()
    compiler = Compiler()
    compiler.by_sizes = {
        (first, OWN): forecast_with(0.01, fits=False),
        (second, OWN): CompileError("a pass failed"),
    }
    found = run(compiler)
    statuses = {trial.sizes.get(bucket_sizes.REDUCE): trial.status for trial in found.trials}
    assert statuses[first] == TOO_LARGE
    assert statuses[second] == FAILED
    assert found.words == ()


def test_a_slower_step_is_not_taken_for_less_wire():
    half = reduce_sizes()[0]
    compiler = Compiler()
    compiler.by_sizes = {(half, OWN): forecast_with(0.01, step=1.2)}
    assert run(compiler).words == ()


def test_the_best_of_both_options_are_tried_together():
    half = reduce_sizes()[0]
    gather = OWN // bucket_sizes.FACTOR
    compiler = Compiler()
    compiler.by_sizes = {(half, OWN): 0.08, (OWN, gather): 0.07, (half, gather): 0.05}
    found = run(compiler, most=8)
    assert found.words == (
        f"mesh.allgather_bucket_size={gather}",
        f"mesh.reduce_bucket_size={half}",
    )
    assert found.after == 0.05


def test_as_many_are_compiled_as_were_asked_for_and_the_budget_ends_it():
    compiler = Compiler()
    found = run(compiler, most=2)
    assert len(compiler.seen) == 1 + 2
    left = [trial for trial in found.trials if trial.status == NOT_TRIED]
    tried = [trial for trial in found.trials if trial.exposed is not None]
    assert left
    own = bare_seconds(plan_with(2), CARD)
    least = min(trial.formula for trial in left)
    assert max(trial.formula for trial in tried) <= least + NEARLY * own
    compiler = Compiler()
    run(compiler, before=forecast_with(0.1), budget=0.0)
    assert compiler.seen == []


def test_without_a_compiler_the_buckets_stay():
    formula = dataclasses.replace(forecast_with(0.1), source=FORMULA, why_formula="no client")
    found = run(None, before=formula)
    assert (found.words, found.before, found.after) == ((), None, None)
    assert found.sentence == "Buckets: no client"


def test_bare_seconds_are_a_bucket_at_each_end_and_one_in_each_iteration():
    """Of GPT-2, written out. The table of tokens is larger than a bucket and stands alone."""
    per_element = 2 * 7 / 8 / CARD.node_bandwidth
    layer, table = 12 * MATRIX + BIASES, VOCAB * WIDTH
    assert layer < OWN < table
    # Stage 2: the table is gathered and reduced once, each layer is reduced as one bucket.
    found = bare_seconds(plan_with(2), CARD)
    assert found == pytest.approx((2 * table + LAYERS * layer) * per_element)
    # In parts of 5 matrices the largest is a matrix of the MLP, with what comes before its limit.
    parts = bare_seconds(plan_with(2, reduce_bucket_size=5 * MATRIX), CARD) / per_element
    assert 4 * MATRIX <= (parts - 2 * table) / LAYERS <= 5 * MATRIX
    # Stage 1: nothing is sent in loops. All layers of a kernel of the MLP are 16 matrices.
    assert bare_seconds(plan_with(1), CARD) == pytest.approx(2 * table * per_element)


def test_page_words_and_json_have_the_choice():
    half = reduce_sizes()[0]
    compiler = Compiler()
    compiler.by_sizes = {(half, OWN): 0.06}
    chosen = Trial(
        candidate=Candidate(zero=2, model=1, num_microbatches=1, remat="none"),
        status=CHOSEN,
        reason="",
        number=1,
    )
    result = SearchResult(
        trials=(chosen,),
        chosen=chosen,
        forecast=forecast_with(0.1),
        certain=True,
        sentence="zero=2: the cheapest.",
        elapsed=1.0,
        buckets=run(compiler),
    )
    assert chosen_words(result)[-1] == f"mesh.reduce_bucket_size={half}"
    page = search_page(result)
    assert max(map(len, page.splitlines())) <= 100
    assert f"reduce_bucket_size={half}*" in page
    assert "leaves 60 instead of 100 ms of communication time not hidden" in " ".join(page.split())
    values = json.loads(json.dumps(search_dict(result)))
    assert values["buckets"]["after"] == 0.06
    assert values["words"][-1] == f"mesh.reduce_bucket_size={half}"


@pytest.mark.gpu_programs
@pytest.mark.parametrize(
    ("zero", "devices"),
    [
        (2, 8),
        pytest.param(2, 64, marks=pytest.mark.slow),
        pytest.param(3, 8, marks=pytest.mark.slow),
    ],
)
def test_on_h100_the_chosen_buckets_leave_no_more_and_at_stage_2_less(zero, devices):
    """Compiled: a GPT of four layers of width 1024, four sequences on each device."""
    found = search_buckets(
        lambda sizes: plan_with(zero, devices, **sizes),
        zerojax.hardware.gpus.find_gpu("h100"),
        forecast_of=lambda plan: zerojax.forecast(plan, gpu="h100", devices=devices, fast=True),
        most=2,
        budget=10**6,
    )
    assert found.before is not None
    assert found.after <= found.before
    if zero == 2:
        assert found.words
        assert found.after < 0.95 * found.before
