"""How reference models train with 8-bit products: on any mesh alike, and on text as bfloat16 does.

What a GPU would run is read from a program compiled for one (`-m gpu_programs`).
"""

from __future__ import annotations

import functools
import re

import chex
import jax
import numpy as np
import optax
import pytest
from flax import linen

from tests.support.gpu_plans import text_plan
from tests.support.marks import slow
from tests.support.small_models import VOCAB, linen_loss, reference_model
from tests.support.trajectories import plan_for, text_batch, train_for
from zerojax.config import ConfigError, MeshConfig, ModelConfig
from zerojax.data.corpus import read_text
from zerojax.hardware import compile_client
from zerojax.operators.marks import inner_programs
from zerojax.placement.device_mesh import make_mesh
from zerojax.plan.make import make_plan
from zerojax.step.build import build_evaluation, build_step
from zerojax.step.initialization import init_state
from zerojax.zoo import GPT2Config, build_model, fp8, generate

HISTORY = "blocks/mlp/up/amax_history"
PROJECTIONS = {"gpt2": 6, "llama": 7}


def gpt2(**changes):
    return reference_model("gpt2", **{"matmul_dtype": "fp8", **changes})


def products_of(plan):
    """(dtype, dtype) of the operands of every product in the step, loop bodies once."""
    found = []

    def visit(program):
        for equation in program.eqns:
            if equation.primitive.name == "dot_general":
                found.append(tuple(str(atom.aval.dtype) for atom in equation.invars))
            for inner in inner_programs(equation.params):
                visit(inner)

    visit(build_step(plan).trace(plan.abstract_state, plan.abstract_batch).jaxpr.jaxpr)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("name", PROJECTIONS)
def test_each_projection_of_a_layer_is_three_8_bit_products(name):
    found = products_of(plan_for(reference_model(name, matmul_dtype="fp8")))
    for pair in [("e4m3fn", "e4m3fn"), ("e5m2", "e4m3fn"), ("e4m3fn", "e5m2")]:
        dtypes = tuple(f"float8_{dtype}" for dtype in pair)
        assert found.count(dtypes) == PROJECTIONS[name], dtypes
    plain = products_of(plan_for(reference_model(name)))
    assert len(plain) == len(found)
    assert not any("float8" in dtype for pair in plain for dtype in pair)


def test_the_plan_says_what_is_8_bits():
    said = " ".join(plan_for(gpt2(), precision="bf16").reasons)
    assert "fp8 in the layers" in said
    assert "overwritten" in said
    assert "averaged" not in said


@pytest.mark.thorough
def test_the_state_is_one_history_per_projection_and_layer():
    plan = plan_for(gpt2(), zero=3)
    extras = plan.abstract_state["extras"]
    assert plan.model.overwritten == set(extras)
    assert len(extras) == PROJECTIONS["gpt2"]
    assert {leaf.shape for leaf in extras.values()} == {(2, 3, fp8.HISTORY_LENGTH)}
    assert not any("amax" in name for name in plan.abstract_state["params"])
    state = init_state(plan)
    kernel = np.asarray(state["params"]["blocks/mlp/up/kernel"])
    wanted = np.zeros((2, 3, fp8.HISTORY_LENGTH), np.float32)
    wanted[:, fp8.KERNEL, 0] = np.abs(kernel).max(axis=(1, 2))
    np.testing.assert_array_equal(state["extras"][HISTORY], wanted)


FIRST, FIRST_TOLERANCE, LOSS_TOLERANCE = 3, 6e-6, 1e-4
"""|difference of losses| of float32 runs of 6 steps: in the first 3 steps, and in all. Measured:
4e-6 in the first 3 and up to 6e-5 later, where the order of a sum moves operands over the border
between two 8-bit values, which then become the other one. 8-bit rounding changes the first losses
by 8e-5."""


def assert_near(found: np.ndarray, expected: np.ndarray) -> None:
    first = found[:FIRST], expected[:FIRST]
    np.testing.assert_allclose(*first, atol=FIRST_TOLERANCE, rtol=0)
    np.testing.assert_allclose(found, expected, atol=LOSS_TOLERANCE, rtol=0)


@functools.cache
def on_one_device(name="gpt2", **changes):
    return train_for(reference_model(name, matmul_dtype="fp8", **changes), steps=6, devices=1)


@pytest.mark.thorough
def test_the_losses_are_near_those_without_8_bits_but_not_the_same():
    plain = train_for(reference_model("gpt2"), steps=6, devices=1)
    difference = np.abs(on_one_device().losses - plain.losses)
    assert difference[:FIRST].max() > 10 * FIRST_TOLERANCE
    assert difference.max() < 2e-3


STAGES = {
    "0": slow({"zero": 0}),
    "1-replica": slow({"zero": 1, "mesh": {"replica": 2}}),
    "2-accumulate": {"zero": 2, "num_microbatches": 2},
    "3": slow({"zero": 3}),
    "3-tensor": {"zero": 3, "mesh": {"model": 2, "data": 4}},
}


@pytest.mark.thorough
@pytest.mark.parametrize("options", STAGES.values(), ids=STAGES)
def test_any_stage_on_8_devices_trains_as_one_device_does(options):
    found = train_for(gpt2(), steps=6, persistence_threshold=100, **options)
    assert_near(found.losses, on_one_device().losses)
    check_same_histories(found.state["extras"], on_one_device().state["extras"])


@pytest.mark.thorough
@pytest.mark.parametrize("remat", [slow("full"), "dots"])
def test_doing_the_forward_pass_again_writes_the_same_histories(remat):
    found = train_for(gpt2(remat=remat), steps=6, zero=3, persistence_threshold=100)
    assert_near(found.losses, on_one_device().losses)
    check_same_histories(found.state["extras"], on_one_device().state["extras"])


def check_same_histories(found, wanted):
    """The same on every device, and near those of one device.

    Sums in another order move gradients over 8-bit borders, and an e5m2 border moves a value by
    1/8 or more; measured: 5 %, of a gradient near zero. That histories are those of the whole batch
    is tested to 1e-4 after the first step (below).
    """
    assert found.keys() == wanted.keys()
    for name, history in found.items():
        copies = [np.asarray(shard.data) for shard in history.addressable_shards]
        for copy in copies:
            np.testing.assert_array_equal(copy, copies[0])
        filled = copies[0][:, :, :6]
        assert (filled > 0).all(), name
        assert (copies[0][:, [fp8.INPUT, fp8.OUTPUT_GRADIENT], 6:] == 0).all(), name
        np.testing.assert_allclose(filled, np.asarray(wanted[name])[:, :, :6], rtol=0.125)


@pytest.mark.slow
def test_llama_with_grouped_heads_trains():
    one, model = on_one_device("llama"), reference_model("llama", matmul_dtype="fp8")
    many = train_for(model, steps=6, zero=3, persistence_threshold=100)
    assert_near(many.losses, one.losses)
    assert many.losses[-1] < many.losses[0] - 0.02


@pytest.mark.slow
def test_a_step_of_a_shard_alone_would_be_noticed():
    """The history after one step is that of the whole batch, not of any shard's rows."""
    rows = text_batch(0)
    whole = train_for(gpt2(), steps=1, devices=1).state["extras"][HISTORY]
    part = {name: x[:4] for name, x in rows.items()}
    shard = train_for(gpt2(), steps=1, devices=1, batch=lambda index: part).state["extras"][HISTORY]
    many = train_for(gpt2(), steps=1, num_microbatches=4).state["extras"][HISTORY]
    newest = np.s_[:, [fp8.INPUT, fp8.OUTPUT_GRADIENT], 0]
    # The first step: parameters are the same, so only the order of float32 sums is free.
    np.testing.assert_allclose(many[newest], whole[newest], rtol=1e-4)
    assert (np.abs(shard[newest] / whole[newest] - 1) > 1e-3).any()


@pytest.mark.slow
def test_in_float16_too_with_a_loss_scale():
    """Its gradients are of the mean loss times the scale, and so are their histories."""
    run = train_for(gpt2(), steps=6, zero=3, persistence_threshold=100, precision="fp16")
    # float16 has 11 bits to round to, 8-bit borders add up to 3e-4.
    np.testing.assert_allclose(run.losses, on_one_device().losses, atol=2e-3, rtol=0)
    assert int(run.state["skipped"]) == 0
    scaled, plain = (
        np.asarray(one.state["extras"][HISTORY])[:, fp8.OUTPUT_GRADIENT, 0]
        for one in (run, on_one_device())
    )
    factor = float(run.state["loss_scale"]["scale"]) / text_batch(0)["tokens"].size
    np.testing.assert_allclose(scaled / plain, factor, rtol=0.1)


# --- what leaves the state alone --------------------------------------------------------------


def weighted_batch(index):
    batch = text_batch(index)
    return {**batch, "weights": np.ones(batch["tokens"].shape, np.float32)}


@pytest.mark.thorough
def test_a_skipped_step_and_an_evaluation_keep_the_histories():
    plan = plan_for(gpt2(), zero=1, batch=weighted_batch)
    step, evaluate = build_step(plan), build_evaluation(plan)
    state, _ = step(init_state(plan), jax.device_put(weighted_batch(0), plan.batch_sharding))
    before = jax.device_get(state["extras"])
    poisoned = weighted_batch(1)
    poisoned["weights"][5, 3] = np.nan
    state, metrics = step(state, jax.device_put(poisoned, plan.batch_sharding))
    assert int(metrics["skipped"]) == 1
    chex.assert_trees_all_equal(jax.device_get(state["extras"]), before, strict=True)
    batch = jax.device_put(weighted_batch(2), plan.batch_sharding)
    first, second = evaluate(state, batch), evaluate(state, batch)
    assert float(first["loss"]) == float(second["loss"])
    chex.assert_trees_all_equal(jax.device_get(state["extras"]), before, strict=True)
    # The training step's loss on the same batch, before its update.
    state, metrics = step(state, batch)
    mean = float(first["loss"]) / float(first["weight"])
    assert mean == pytest.approx(float(metrics["loss"]), abs=1e-6)


@pytest.mark.thorough
def test_generation_reads_the_scales_and_changes_nothing():
    run = on_one_device()
    model = run.plan.model.to_source(run.state["params"], run.state["extras"])
    model.eval()
    prompt = np.array([[3, 9, 4]], np.int32)
    before = np.asarray(model.blocks.mlp.up.amax_history[...])
    found = generate(model, prompt, 3, temperature=0.0)
    tokens = prompt
    for _ in range(3):
        likeliest = np.argmax(model(tokens)[:, -1:], axis=-1)
        tokens = np.concatenate([tokens, likeliest.astype(np.int32)], axis=1)
    np.testing.assert_array_equal(found, tokens)
    np.testing.assert_array_equal(model.blocks.mlp.up.amax_history[...], before)


# --- a user's model with Flax's own 8-bit layers ----------------------------------------------


class LinenFp8(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(VOCAB - 3, 16)(tokens)
        x = x + linen.Dense(16, dot_general_cls=linen.fp8_ops.Fp8DirectDotGeneralOp)(x)
        return linen.Dense(VOCAB - 3)(x)


@pytest.mark.thorough
def test_flax_8_bit_layers_train_on_any_mesh():
    options = {"loss": linen_loss, "steps": 5}
    one = train_for(LinenFp8(), devices=1, **options)
    many = train_for(LinenFp8(), zero=2, num_microbatches=2, **options)
    prefix = "_overwrite_with_gradient/Dense_0/Fp8DirectDotGeneralOp_0/"
    names = {prefix + f"{part}_amax_history" for part in ("input", "kernel", "output_grad")}
    assert names < many.plan.model.overwritten
    for name in names:
        found, wanted = (np.asarray(run.state["extras"][name]) for run in (many, one))
        assert np.count_nonzero(wanted) == 5
        np.testing.assert_allclose(found, wanted, rtol=1e-3)
    assert_near(many.losses, one.losses)


# --- mistakes ---------------------------------------------------------------------------------


def test_an_unknown_matmul_dtype_is_refused():
    with pytest.raises(ValueError, match=r"matmul_dtype='int8' is unknown; use 'fp8'"):
        GPT2Config(matmul_dtype="int8")
    with pytest.raises(ConfigError, match=r"matmul_dtype.*fp8"):
        ModelConfig(matmul_dtype="fp4")


# --- on text ----------------------------------------------------------------------------------


def loss_on_text(matmul_dtype, steps=200, rows=16, length=64):
    """The loss of a GPT-2 of two layers and width 64 on held-out Shakespeare, in bfloat16."""
    ids = np.frombuffer(read_text().encode(), np.uint8).astype(np.int32)
    random = np.random.default_rng(5)

    def cut(first, last, number):
        starts = random.integers(first, last - length - 1, number)
        windows = ids[starts[:, None] + np.arange(length + 1)]
        return {"tokens": windows[:, :-1], "targets": windows[:, 1:]}

    sizes = {"num_layers": 2, "num_heads": 4, "embed_dim": 64, "max_seq_len": length}
    config = ModelConfig(name="gpt2", matmul_dtype=matmul_dtype, **sizes)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 20, steps, 1e-4)
    plan = make_plan(
        build_model(config, 128),
        make_mesh(MeshConfig(), devices=jax.devices()[:2]),
        example_batch=cut(0, 900_000, rows),
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95)),
    )
    state, step = init_state(plan), build_step(plan)
    for _ in range(steps):
        state, _ = step(state, jax.device_put(cut(0, 900_000, rows), plan.batch_sharding))
    assert int(state["skipped"]) == 0
    held_out = jax.device_put(cut(900_000, 1_000_000, 256), plan.batch_sharding)
    sums = build_evaluation(plan)(state, held_out)
    return float(sums["loss"] / sums["weight"])


@pytest.mark.slow
def test_on_text_it_reaches_the_loss_of_bfloat16():
    """Measured: 2.625 with bfloat16 and with float32, 0.003 to 0.005 more with 8 bits.

    Tripled, that is the limit; two initial seeds of either differ by 0.007.
    """
    plain, small = loss_on_text(None), loss_on_text("fp8")
    assert plain < 2.7
    assert small == pytest.approx(plain, abs=0.015)


# --- what a GPU would run ---------------------------------------------------------------------


@pytest.mark.gpu_programs
@pytest.mark.parametrize("cublas", [True, False], ids=["cublaslt", "triton"])
def test_on_an_h100_every_product_of_a_layer_has_8_bit_operands(cublas):
    """Without Triton they are cuBLASLt's 8-bit calls, with it dots of 8-bit arrays."""
    config = ModelConfig(
        name="gpt2", num_layers=2, num_heads=4, embed_dim=512, max_seq_len=512, matmul_dtype="fp8"
    )
    plan = text_plan(build_model(config, 1024), 8, 512, devices=1)
    lowered = build_step(plan).lower(plan.abstract_state, plan.abstract_batch)
    text = compile_client.compile_for_gpus(lowered, sketch=cublas).text
    if cublas:
        calls = len(re.findall(r'custom_call_target="__cublas\$lt\$matmul\$f8"', text))
    else:
        dtypes = dict(re.findall(r"%(\S+) = (\S+?)\[", text))
        operands = re.findall(r" dot\(%([^,\s]+), %([^,\s)]+)\)", text)
        pairs = [{dtypes[left][:3], dtypes[right][:3]} for left, right in operands]
        calls = pairs.count({"f8e"})
        assert not any("f8e" in pair and len(pair) > 1 for pair in pairs)
    # Forward, and twice backward; the products of query, key and value with their one input are
    # one forward, and so are the three gradients of their kernels. The compiler may peel loops.
    expected = 3 * PROJECTIONS["gpt2"] - 2 * 2
    assert calls >= expected
    assert calls % expected == 0
