"""ZeRO's formulas, from the placement table: bytes on the wire and FLOPs."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from tests.support.pipelines import layout_of
from tests.support.pipelines import plan_of as pipelined
from tests.support.small_models import reference_model
from zerojax import make_plan
from zerojax.placement.device_mesh import make_abstract_mesh
from zerojax.plan import counts
from zerojax.plan.wire import wire_bytes, wire_unit

DEVICES = 8


def plan_of(zero: int, microbatches: int = 1, model: int = 1, **options):
    """A tiny GPT-2 whose parameters are all large enough to be gathered where they are read."""
    shape = jax.ShapeDtypeStruct((DEVICES * microbatches, 16), jnp.int32)
    return make_plan(
        reference_model("gpt2", tie_embeddings=False),
        make_abstract_mesh({"data": -1, "model": model}, DEVICES),
        example_batch={"tokens": shape, "targets": shape},
        zero=zero,
        num_microbatches=microbatches,
        persistence_threshold=0,
        **options,
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("zero", "microbatches", "units"),
    [
        (0, 1, 2),
        (0, 4, 2),
        (1, 1, 2),
        (1, 4, 2),  # one reduction per step, also with microbatches
        (2, 1, 2),
        (2, 4, 1 + 4),  # a reduction per microbatch, weights once
        (3, 1, 3),
        (3, 4, 3 * 4),
    ],
)
def test_wire_bytes_in_units_of_all_parameters(zero, microbatches, units):
    plan = plan_of(zero, microbatches)
    assert wire_bytes(plan) == pytest.approx(units * wire_unit(plan), rel=1e-9)


def test_the_unit_is_two_bytes_per_parameter_and_tensor_parallelism_divides_it():
    plan = plan_of(1)
    assert wire_unit(plan) == 2 * plan.placement.num_parameters() * 7 / 8
    split = plan_of(1, model=2)
    sharded = [leaf for leaf in split.placement.leaves.values() if any(leaf.axes)]
    assert sharded
    whole = split.placement.num_parameters() - sum(
        jnp.prod(jnp.array(leaf.shape)).item() // 2 for leaf in sharded
    )
    assert wire_unit(split) == 2 * whole * 3 / 4


def test_a_float32_reduction_doubles_its_bytes():
    bf16, fp32 = plan_of(1, reduce_dtype="bf16"), plan_of(1, reduce_dtype="fp32")
    unit = wire_unit(bf16)
    assert wire_bytes(fp32) - wire_bytes(bf16) == pytest.approx(unit)


def test_frozen_parameters_are_gathered_and_never_reduced():
    frozen = plan_of(2, freeze=("blocks",))
    share = frozen.placement.num_parameters(frozen=True) / frozen.placement.num_parameters()
    units = wire_bytes(frozen) / wire_unit(frozen)
    assert units == pytest.approx(2 - share)


def test_one_device_sends_nothing():
    shape = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    plan = make_plan(
        reference_model("gpt2"),
        make_abstract_mesh({"data": 1}, 1),
        example_batch={"tokens": shape, "targets": shape},
    )
    assert wire_bytes(plan) == 0


def test_model_flops_are_three_forward_passes_over_the_global_batch():
    one, four = plan_of(1), plan_of(1, microbatches=4)
    assert counts.model_flops(four) == 4 * counts.model_flops(one)
    tokens, width, layers, vocab = DEVICES * 16, 32, 2, 64
    matrices = layers * 12 * width * width + width * vocab
    attention = layers * 2 * 16 * width
    assert counts.model_flops(one) == pytest.approx(6 * tokens * (matrices + attention), rel=0.02)


LAYERS = 12 * 32 * 32 + 13 * 32
"""Parameters of a layer of the tiny GPT-2."""
OTHERS = 64 * 32 + 16 * 32 + 2 * 32
"""Of its embedding, which is also its head, positions and last norm."""
BF16 = 2


def test_a_pipeline_has_the_layers_of_one_stage_in_its_unit():
    plan = pipelined(layout_of(stages=4, microbatches=8, layers=(2, 2, 2, 2)), data=2)
    assert wire_unit(plan) == BF16 * (2 * LAYERS * 1 / 2 + OTHERS * 7 / 8)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("zero", "units"),
    [
        (0, 2),
        (1, 2),  # one gather and one scatter, also with microbatches
        (2, 1 + 11),  # a scatter in each of the m+p-1 ticks with B
        (3, 3 * 11),  # and a gather in each tick with F and each with B
    ],
)
def test_under_a_pipeline_zero_sends_in_every_tick_that_has_the_slot(zero, units):
    plan = pipelined(layout_of(stages=4, microbatches=8, layers=(2, 2, 2, 2)), data=2, zero=zero)
    # What every stage reads goes over data x stage = 8 devices once per step at any stage of ZeRO.
    expected = BF16 * (units * 2 * LAYERS * 1 / 2 + 2 * OTHERS * 7 / 8)
    assert wire_bytes(plan) == expected


def test_a_chunk_is_the_unit_of_a_slot():
    layout = layout_of("interleaved(2)", stages=2, microbatches=4, layers=(1, 1, 1, 1))
    plan = pipelined(layout, data=2, zero=2)
    # 2m + p - 1 ticks have B, each of one of two layers.
    layers = 2 * LAYERS + 9 * LAYERS
    assert wire_bytes(plan) == BF16 * (layers * 1 / 2 + 2 * OTHERS * 3 / 4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("schedule", "stash", "gathers"),
    # Of 2 stages and 4 microbatches: 5 ticks with F, 5 with B, 4 or 5 with W.
    [
        ("1f1b", "residuals", 5 + 5),
        ("1f1b", "input", 5 + 2 * 5),
        ("zb_h1", "residuals", 5 + 5 + 4),
        ("zb_h1", "input", 5 + 2 * 5 + 2 * 4),
    ],
)
def test_every_pass_over_the_layers_gathers_them_at_stage_3(schedule, stash, gathers):
    layout = layout_of(schedule, stages=2, microbatches=4, layers=(1, 1), stash=stash)
    plan = pipelined(layout, data=2, zero=3)
    scatters = 4 if schedule == "zb_h1" else 5
    expected = BF16 * ((gathers + scatters) * LAYERS * 1 / 2 + 2 * OTHERS * 3 / 4)
    assert wire_bytes(plan) == expected


def test_model_flops_do_not_know_of_stages():
    plan = pipelined(layout_of(stages=4, microbatches=8, layers=(2, 2, 2, 2)), data=2)
    whole = dataclasses.replace(plan, pipeline=None)
    assert counts.model_flops(plan) == counts.model_flops(whole)
