"""Kernels that are gathered in 8 bits: every bit of a run that gathers them wider, half the bytes.

What is gathered is what a product would round the kernel to: the scale is known before the step,
and the largest magnitude of all shards is that of the kernel.
"""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from tests.support.gpu_plans import compile_step, text_plan
from tests.support.pipeline_runs import THRESHOLD
from tests.support.recipe import RECIPE
from tests.support.small_models import reference_model
from tests.support.trajectories import plan_for, train_for
from zerojax.config import ConfigError, LoraConfig, ModelConfig, WireConfig
from zerojax.forecasting import hlo
from zerojax.operators.marks import inner_programs
from zerojax.plan.counts import GATHERED, role_bytes
from zerojax.plan.wire import leaf_transfers, wire_bytes, wire_unit
from zerojax.step.build import build_evaluation, build_step
from zerojax.step.initialization import init_state
from zerojax.zoo import build_model, fp8
from zerojax.zoo.lora import add_lora

EIGHT = {"weights": "fp8"}
KERNEL = "blocks/mlp/up/kernel"


def model_of(name="gpt2", **options):
    return reference_model(name, **{"matmul_dtype": "fp8", **options})


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("remembered", [0.0, 1e-3, 0.3, 60000.0])
def test_bits_that_are_sent_are_those_of_the_product(dtype, remembered):
    """For values below, at and above what the history remembers, not finite ones too."""
    history = jnp.zeros((3, 4)).at[fp8.KERNEL, 2].set(remembered)
    magnitudes = np.geomspace(1e-7, 65504, 5001).astype(np.float32)
    x = np.concatenate([magnitudes, -magnitudes, [0, np.inf, -np.inf, np.nan]])
    kernel = jnp.asarray(x).astype(dtype)
    read = fp8.from_bits(fp8.in_bits(kernel, history), dtype)
    assert read.dtype == dtype
    sent = lambda x: jax.lax.bitcast_convert_type(x, jnp.uint8)  # noqa: E731
    _, scale, _ = fp8.scales_from(history)
    wanted = fp8.quantise(kernel, scale, fp8.FORWARD)
    np.testing.assert_array_equal(sent(read.astype(fp8.FORWARD)), sent(wanted))


def test_a_product_of_what_was_sent_is_that_of_the_kernel_to_the_last_bit():
    random = np.random.default_rng(3)
    x, kernel, gradient = (
        jnp.asarray(random.normal(size=shape), jnp.bfloat16) for shape in [(6, 8), (8, 4), (6, 4)]
    )
    history = jnp.full((3, 4), 0.7)

    def products(kernel, largest):
        run = lambda x, k, h: fp8.fp8_dots(x, (k,), (h,), (largest,), 1)[0]  # noqa: E731
        result, pull = jax.vjp(run, x, kernel, history)
        return result, *pull(gradient)

    read = fp8.from_bits(fp8.in_bits(kernel, history), kernel.dtype)
    assert not np.array_equal(read, kernel)
    chex.assert_trees_all_equal(
        products(read, fp8.largest_magnitude(kernel)), products(kernel, None), strict=True
    )


def check_same_bits(model, steps=3, **options):
    options = {"zero": 3, "precision": "bf16", "persistence_threshold": THRESHOLD, **options}
    narrow, wide = (
        train_for(model, steps=steps, wire={"weights": w}, **options) for w in ("fp8", "compute")
    )
    in_bits = {n for n, leaf in narrow.plan.placement.leaves.items() if leaf.eight_bits}
    assert KERNEL in in_bits
    assert not any(leaf.eight_bits for leaf in wide.plan.placement.leaves.values())
    np.testing.assert_array_equal(narrow.losses, wide.losses)
    np.testing.assert_array_equal(narrow.norms, wide.norms)
    for part in ("params", "frozen", "extras", "opt_state"):
        found, wanted = (jax.device_get(run.state[part]) for run in (narrow, wide))
        chex.assert_trees_all_equal(found, wanted, strict=True)
    return narrow


@pytest.mark.thorough
def test_on_8_devices_the_bits_are_those_of_the_wider_gather():
    run = check_same_bits(model_of(num_layers=1))
    assert run.losses[-1] < run.losses[0]
    histories = run.state["extras"]["blocks/mlp/up/amax_history"]
    assert (np.asarray(histories)[:, fp8.KERNEL, :4] > 0).all()


CASES = {
    "float32": ({}, {"precision": "fp32"}),
    "float16": ({}, {"precision": "fp16"}),
    "one gather each": ({}, {"allgather_bucket_size": 1}),
    "tensor and microbatches": ({}, {"mesh": {"data": 4, "model": 2}, "num_microbatches": 2}),
    "replicas": ({}, {"mesh": {"data": 4, "replica": 2}}),
    "llama, remat full": ({"name": "llama", "remat": "full"}, {}),
    "remat dots": ({"remat": "dots"}, {}),
    "padded": ({"num_heads": 3, "embed_dim": 30, "num_layers": 1}, {}),
    "same bits on any mesh": (
        {},
        {"deterministic": "mesh", "optimizer": zerojax.adamw(1e-3, **RECIPE)},
    ),
    "a split sequence": ({}, {"mesh": {"data": 4, "context": 2}}),
    "1f1b": (
        {"num_layers": 4},
        {"mesh": {"data": 2, "stage": 2}, "devices": 4, "num_microbatches": 2},
    ),
    "zb_v, uneven": (
        {"num_layers": 6},
        {
            "mesh": {"data": 2, "stage": 2},
            "devices": 4,
            "num_microbatches": 4,
            "pipeline_schedule": "zb_v",
            "partition": (2, 1, 2, 1),
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "options"), CASES.values(), ids=CASES)
def test_the_bits_are_the_same_whatever_else_a_run_does(model, options):
    check_same_bits(model_of(**model), **options)


@pytest.mark.slow
def test_frozen_kernels_under_adapters_are_gathered_in_8_bits_too():
    lora = LoraConfig(rank=3, alpha=12.0)
    run = check_same_bits(add_lora(model_of(), lora), freeze=lora.freeze)
    leaf = run.plan.placement.leaves[KERNEL]
    assert leaf.frozen
    assert leaf.eight_bits


@pytest.mark.thorough
def test_evaluation_gathers_in_8_bits_unless_it_reads_the_kernel_itself():
    def norm(model, batch):
        del batch
        return jnp.sum(model.blocks.mlp.up.kernel[...] ** 2)

    found = []
    for weights in ("fp8", "compute"):
        plan = plan_for(model_of(), zero=3, persistence_threshold=100, wire={"weights": weights})
        state, batch = init_state(plan), plan.abstract_batch
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), batch)
        given = jax.device_put(zeros, plan.batch_sharding)
        found.append(
            [float(build_evaluation(plan, loss)(state, given)["loss"]) for loss in (None, norm)]
        )
    assert found[0] == found[1]


def gathers_of(plan):
    """[(dtype, elements that are sent)] of every all-gather in the step, loop bodies once."""
    found = []

    def visit(program):
        for equation in program.eqns:
            if equation.primitive.name == "all_gather":
                sent = equation.invars[0].aval
                found.append((sent.dtype.name, sent.size))
            for inner in inner_programs(equation.params):
                visit(inner)

    visit(build_step(plan).trace(plan.abstract_state, plan.abstract_batch).jaxpr.jaxpr)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("remat", ["none", "full"])
def test_forward_and_backward_gather_every_kernel_of_a_layer_in_8_bits(remat):
    plan = plan_for(
        model_of(remat=remat), zero=3, precision="bf16", persistence_threshold=1000, wire=EIGHT
    )
    kernels = 12 * 32 * 32  # of one layer, whose biases and norms are gathered once per step
    found = gathers_of(plan)
    assert [size for dtype, size in found if dtype == "uint8"] == [kernels // 8] * 2
    assert all(size < kernels // 8 for dtype, size in found if dtype != "uint8")


def test_the_formula_knows_half_the_bytes():
    wide, narrow = (
        plan_for(
            model_of(num_layers=8, tie_embeddings=True),
            zero=3,
            precision="bf16",
            persistence_threshold=1000,
            wire={"weights": weights},
        )
        for weights in ("compute", "fp8")
    )
    kernels = 8 * 12 * 32 * 32 * 7 / 8
    assert wire_bytes(wide) - wire_bytes(narrow) == 2 * kernels
    assert wire_bytes(wide) / wire_unit(wide) == pytest.approx(3, abs=0.1)
    assert role_bytes(wide)[GATHERED] - role_bytes(narrow)[GATHERED] == 12 * 32 * 32
    leaf = narrow.placement.leaves[KERNEL]
    dtypes = [(t.kind, t.dtype) for t in leaf_transfers(narrow, leaf)]
    assert dtypes == [
        ("all-gather", "uint8"),
        ("all-gather", "uint8"),
        ("reduce-scatter", "bfloat16"),
    ]
    page = narrow.explain(KERNEL)
    assert "gather on use, as float8_e4m3fn[32, 128]" in page
    assert "all-gather over data in uint8" in page


@pytest.mark.thorough
def test_the_plan_says_what_is_sent_in_8_bits_and_what_could_be():
    def said(**options):
        plan = plan_for(model_of(), persistence_threshold=1000, **options)
        return " ".join(plan.reasons)

    assert "wire.weights=fp8: 6 of 7 parameters" in said(zero=3, wire=EIGHT)
    assert "wire.weights=fp8 would send them in 8 bits" in said(zero=3)
    assert "wire.weights" not in said(zero=2)
    assert "wire.weights=fp8 has no effect" in said(zero=3, wire=EIGHT, devices=1)


def test_what_could_send_nothing_in_8_bits_is_refused():
    with pytest.raises(
        ValueError, match=r"zero=2 gathers none on use; use zero=3, or wire.weights=compute"
    ):
        plan_for(model_of(), zero=2, wire=EIGHT)
    plan_for(model_of(), zero=3, wire=EIGHT)
    plan_for(model_of(), zero=2, wire={"weights": "compute"})
    plain = reference_model("gpt2")
    with pytest.raises(ValueError, match=r"matmul_dtype='fp8' .*or use wire.weights=compute"):
        plan_for(plain, zero=3, wire=EIGHT)
    with pytest.raises(ConfigError, match=r"weights.*compute"):
        WireConfig(weights="int2")


def compiled(name, devices, weights):
    """(plan, {(kind, dtype): units}, text, temporaries) of a decoder of 8 layers at stage 3."""
    sizes = {"num_layers": 8, "num_heads": 16, "embed_dim": 2048, "max_seq_len": 1024}
    config = ModelConfig(name=name, matmul_dtype="fp8", remat="full", **sizes)
    options = {"zero": 3, "wire": {"weights": weights}}
    plan = text_plan(build_model(config, 8192), devices, 1024, devices=devices, **options)
    built = compile_step(plan)
    units = {}
    for one in hlo.find_collectives(hlo.read_program(built.text), devices):
        key = one.kind, one.dtype
        units[key] = units.get(key, 0) + one.wire_bytes * one.times / wire_unit(plan)
    return plan, units, built.text, built.memory.temporary


@pytest.mark.gpu_programs
@pytest.mark.parametrize(("name", "devices"), [("gpt2", 8), ("llama", 8), ("gpt2", 64)])
def test_on_h100_stage_3_sends_two_units_in_place_of_three(name, devices):
    """The rest, in bfloat16, is the token table and what is gathered once per step."""
    before_plan, wide, _, before = compiled(name, devices, "compute")
    plan, narrow, text, temporaries = compiled(name, devices, "fp8")
    assert sum(wide.values()) == pytest.approx(3, rel=0.03)
    assert sum(narrow.values()) == pytest.approx(2, rel=0.03)
    kernels = sum(np.prod(leaf.shape) for leaf in plan.placement.leaves.values() if leaf.eight_bits)
    share = kernels / plan.placement.num_parameters()
    assert narrow["all-gather", "u8"] == pytest.approx(share, rel=1e-3)  # 2 gathers of a half
    lost = wide["all-gather", "bf16"] - narrow["all-gather", "bf16"]
    assert lost == pytest.approx(2 * share, rel=1e-3)
    assert narrow["reduce-scatter", "bf16"] == wide["reduce-scatter", "bf16"]
    # Formulas count two gathers of tables too, of which XLA leaves one.
    formula = (wire_bytes(before_plan) - wire_bytes(plan)) / wire_unit(plan)
    assert sum(wide.values()) - sum(narrow.values()) == pytest.approx(formula, rel=1e-3)
    # What was gathered goes into products as it is: nothing of a whole kernel in a wider dtype.
    heads = re.findall(r"^%(?:fused|wrapped)\S* \((.*)\) -> (.+) \{$", text, re.MULTILINE)
    made = [result for taken, result in heads if ": u8[" in taken]
    dtypes = {dtype for result in made for dtype in re.findall(r"(\w+)\[", result)}
    assert dtypes == {"f8e4m3fn", "u8"}
    assert temporaries < before
