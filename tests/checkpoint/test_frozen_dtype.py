"""Frozen parameters in the compute dtype: the same losses, half the bytes, refusals, exports."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zerojax
from tests.support.hugging_face_folders import tensors_of, write_folder
from tests.support.marks import slow, thorough
from tests.support.recipe import RECIPE
from tests.support.small_models import reference_model
from tests.support.trajectories import advance, plan_for
from tests.zoo.test_hugging_face_export import assert_same_bits, read_all
from zerojax.checkpoint import Checkpointer, CheckpointError
from zerojax.config import LoraConfig, ModelConfig, RunConfig, load
from zerojax.operators.marks import inner_programs
from zerojax.optim.precision import Precision, as_precision
from zerojax.placement.device_mesh import make_abstract_mesh
from zerojax.plan.counts import GATHERED, role_bytes
from zerojax.step.build import build_step
from zerojax.step.initialization import init_state
from zerojax.step.reshard import model_parts, reshard_state
from zerojax.step.trained_model import model_of
from zerojax.tracing import trees
from zerojax.training.checkpointing import restore_state, save_state
from zerojax.training.run_file import plan_from_config
from zerojax.training.run_record import RunNotes, record_of
from zerojax.zoo import add_lora, build_model

LORA = LoraConfig(rank=3, alpha=12.0)
BF16 = as_precision("bf16")
WIDE = as_precision("bf16", freeze_dtype="fp32")
STEPS = 3
ABOUT: dict[str, Any] = {"data_state": {}, "config": {}, "plan": {}}


@functools.cache
def rounded_model() -> Any:
    """A Llama with adapters whose other weights are numbers of bfloat16, in float32."""
    model = add_lora(reference_model("llama")(nnx.Rngs(0)), LORA)
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if "lora" not in trees.path_name(path):
            leaf[...] = leaf[...].astype(jnp.bfloat16).astype(jnp.float32)
    return model


def lora_plan(precision: Any = BF16, model: Any = None, **options: Any) -> Any:
    given = rounded_model() if model is None else model
    options = {"freeze": LORA.freeze, "persistence_threshold": 0, **options}
    return plan_for(given, precision=precision, **options)


def same_bits(one: Any, other: Any) -> None:
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


ON_HOST = {"opt_state": "host", "min_elements": 1}
WAYS = {
    "one device": slow({"devices": 1}),
    "0": slow({"zero": 0}),
    "1": slow({"zero": 1, "num_microbatches": 2}),
    "2": slow({"zero": 2}),
    "3": thorough({"zero": 3}),
    "3 in float32 sums": slow({"zero": 3, "reduce_dtype": "fp32"}),
    "3 tensor": slow({"zero": 3, "mesh": {"model": 2, "data": 4}}),
    "3 pipeline": slow({"zero": 3, "mesh": {"stage": 2, "data": 4}, "num_microbatches": 4}),
    "2, moments on the host": slow(
        {"zero": 2, "devices": 2, "optimizer": zerojax.adamw(1e-3, **RECIPE), "offload": ON_HOST}
    ),
    "3, layers from the host": slow(
        {
            "zero": 3,
            "devices": 2,
            "optimizer": zerojax.adamw(1e-3, **RECIPE),
            "offload": {**ON_HOST, "params": "host"},
            "freeze": ("mlp/", "embed"),
        }
    ),
}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_losses_and_updates_are_bitwise_those_of_weights_kept_in_float32(options):
    """Masters and both moments are compared, so gradients are, too."""
    runs = []
    for precision in (BF16, WIDE):
        plan = lora_plan(precision, **options)
        runs.append(advance(plan, init_state(plan, 0), range(STEPS)))
    narrow, wide = runs
    assert {x.dtype.name for x in narrow.state["frozen"].values()} == {"bfloat16"}
    assert {x.dtype.name for x in wide.state["frozen"].values()} == {"float32"}
    np.testing.assert_array_equal(narrow.losses, wide.losses)
    np.testing.assert_array_equal(narrow.norms, wide.norms)
    same_bits(narrow.state["params"], wide.state["params"])
    same_bits(narrow.state["opt_state"], wide.state["opt_state"])
    same_bits(narrow.state.get("masters", {}), wide.state.get("masters", {}))
    assert narrow.losses[0] != narrow.losses[-1]


@pytest.mark.thorough
def test_new_weights_are_those_of_float32_rounded_once():
    model = add_lora(reference_model("gpt2"), LORA)
    narrow, wide = (
        init_state(lora_plan(precision, model, zero=3, devices=2), 0) for precision in (BF16, WIDE)
    )
    same_bits(narrow["params"], wide["params"])
    for name, value in wide["frozen"].items():
        expected = np.asarray(value).astype(jnp.bfloat16)
        np.testing.assert_array_equal(np.asarray(narrow["frozen"][name]), expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("compute", "options", "expected"),
    [
        ("bf16", {}, "bfloat16"),
        ("fp32", {}, "float32"),
        ("fp16", {}, "float16"),
        ("bf16", {"freeze_dtype": "fp32"}, "float32"),
        ("fp32", {"freeze_dtype": "bf16"}, "bfloat16"),
        ("fp32", {"param_dtype": "bf16"}, "bfloat16"),
        ("fp16", {"param_dtype": "bf16"}, "bfloat16"),
    ],
)
def test_the_dtype_of_what_is_frozen(compute, options, expected):
    precision = as_precision(compute, **options)
    assert precision.frozen_dtype == jnp.dtype(expected)
    model = add_lora(reference_model("gpt2"), LORA)
    plan = lora_plan(precision, model, optimizer=zerojax.adamw(1e-3))
    assert {x.dtype.name for x in plan.abstract_state["frozen"].values()} == {expected}
    assert {x.dtype.name for x in plan.abstract_state["params"].values()} == {
        options.get("param_dtype", "fp32").replace("fp32", "float32").replace("bf16", "bfloat16")
    }
    assert plan.as_dict()["precision"]["freeze_dtype"] == expected


def test_a_narrow_range_is_refused():
    with pytest.raises(ValueError, match=r"freeze_dtype=float16 loses large and small.*None"):
        Precision(compute_dtype=jnp.bfloat16, freeze_dtype=jnp.float16)


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_plan_counts_half_and_no_second_copy(zero):
    model = add_lora(reference_model("gpt2"), LORA)
    narrow, wide = (lora_plan(precision, model, zero=zero, devices=4) for precision in (BF16, WIDE))
    sizes = [role_bytes(plan) for plan in (narrow, wide)]
    assert sizes[0]["frozen"] * 2 == sizes[1]["frozen"]
    frozen = sizes[0]["frozen"]
    gathered = sizes[1][GATHERED] - sizes[0][GATHERED]
    # At stages 1 and 2 weights are gathered from either.
    assert gathered == (0 if zero in (1, 2) else frozen)
    same = {**sizes[0], "frozen": 0, GATHERED: 0} == {**sizes[1], "frozen": 0, GATHERED: 0}
    assert same
    assert any("frozen parameters are stored in bfloat16" in line for line in narrow.reasons)
    assert not any("frozen parameters are stored" in line for line in wide.reasons)
    (said,) = (x for x in lora_plan(as_precision("fp16")).reasons if "are stored in float16" in x)
    assert said.endswith(
        "values beyond 65,504 become infinite; freeze_dtype=fp32 preserves all values"
    )


@pytest.mark.thorough
def test_a_compiled_step_takes_half_the_bytes_of_what_is_frozen():
    found = []
    for precision in (BF16, WIDE):
        plan = lora_plan(precision, add_lora(reference_model("gpt2"), LORA), zero=3)
        memory = build_step(plan).lower(plan.abstract_state, plan.abstract_batch).compile()
        analysis = memory.memory_analysis()
        found.append((analysis.argument_size_in_bytes, role_bytes(plan)["frozen"]))
    (narrow, frozen), (wide, _) = found
    assert wide - narrow == pytest.approx(frozen, rel=0.02)


@pytest.mark.slow
def test_a_checkpoint_moves_to_another_mesh_bit_for_bit(tmp_path):
    first = lora_plan(zero=3)
    run = advance(first, init_state(first, 0), range(2))
    second = lora_plan(zero=1, devices=2)
    with Checkpointer(tmp_path) as checkpointer:
        save_state(checkpointer, first, run.state, step=2, about=ABOUT)
    with Checkpointer(tmp_path) as checkpointer:
        _, restored = restore_state(checkpointer, second)
    moved = reshard_state(first, second, run.state)
    assert {x.dtype.name for x in restored["frozen"].values()} == {"bfloat16"}
    same_bits(restored, moved)
    following = [advance(second, state, [2]).losses for state in (restored, moved)]
    np.testing.assert_array_equal(*following)


@pytest.mark.thorough
def test_a_checkpoint_of_other_frozen_weights_is_refused_with_the_option(tmp_path):
    plan = lora_plan(WIDE, devices=1)
    with Checkpointer(tmp_path) as checkpointer:
        save_state(checkpointer, plan, init_state(plan, 0), step=2, about=ABOUT)
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointError, match=r"in float32: set freeze_dtype=fp32"):
            restore_state(checkpointer, lora_plan(BF16, devices=1))
        with pytest.raises(CheckpointError, match=r"frozen .* trained .*freeze"):
            restore_state(checkpointer, lora_plan(WIDE, devices=1, freeze=()))
        restored, _ = restore_state(checkpointer, plan)
    assert restored.step == 2
    with pytest.raises(ValueError, match="stored dtypes and freeze="):
        reshard_state(plan, lora_plan(BF16, devices=1), init_state(plan, 0))


@pytest.mark.thorough
def test_the_model_that_is_handed_over_is_as_wide_as_what_is_trained():
    plan = lora_plan(devices=1)
    state = init_state(plan, 0)
    model = model_of(plan, state)
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        assert leaf[...].dtype == jnp.float32, path
    kernel = model.blocks.mlp.up.kernel[...]
    stored = state["frozen"]["blocks/mlp/up/kernel"]
    np.testing.assert_array_equal(np.asarray(kernel), np.asarray(stored).astype(np.float32))


TOKENS = np.random.default_rng(0).integers(0, 20, (8, 8), np.int32)


@pytest.mark.thorough
def test_files_of_bfloat16_are_kept_bit_for_bit_and_merged_in_float32(tmp_path):
    """From a folder to a run to both ways out: the run's own arrays, and its checkpoint."""
    tensors = {n: x.astype(jnp.bfloat16) for n, x in tensors_of("llama").items()}
    theirs = write_folder(tmp_path / "theirs", "llama", tensors=tensors)
    model = zerojax.from_hugging_face(theirs).with_lora(LoraConfig(rank=2))
    trainer = zerojax.train(
        model,
        {"data": 8, "zero": 3, "persistence_threshold": 0},
        [{"tokens": TOKENS, "targets": np.roll(TOKENS, -1, 1)}] * 2,
        optimizer=zerojax.adamw(0.1),
        precision="bf16",
        steps=2,
        checkpoint=tmp_path / "run",
        freeze=LoraConfig(rank=2).freeze,
    )
    trainer.close()
    parts = model_parts(trainer.plan, trainer.state)
    frozen, trained = parts["frozen"], parts["params"]
    assert {x.dtype.name for x in frozen.values()} == {"bfloat16"}
    zerojax.to_hugging_face(trainer, tmp_path / "live")
    zerojax.to_hugging_face(tmp_path / "run", tmp_path / "saved")
    live, saved = (read_all(tmp_path / name) for name in ("live", "saved"))
    assert_same_bits(live, saved)
    assert {x.dtype.name for x in live.values()} == {"float32"}
    same = tensors["lm_head.weight"].astype(np.float32)
    np.testing.assert_array_equal(live["lm_head.weight"], same)
    # The adapter is added to what the step multiplied with, and the sum is not rounded again.
    name = "model.layers.1.self_attn.q_proj.weight"
    a, b = (np.asarray(trained[f"blocks/attention/query/lora/{x}"])[1] for x in "ab")
    base = tensors[name].astype(np.float32)
    wanted = base + 8.0 * (a @ b.reshape(2, 16)).T
    np.testing.assert_allclose(live[name], wanted, rtol=1e-6, atol=1e-7)
    assert np.any(live[name] != live[name].astype(jnp.bfloat16).astype(np.float32))
    loaded = zerojax.load_run(tmp_path / "run")
    same_bits(model_parts(loaded.plan, loaded.state)["frozen"], frozen)
    assert loaded.plan.precision.frozen_dtype == jnp.bfloat16


GIB = 2**30
CARD = {"7B": 24e9, "70B": 80e9}
"""Bytes of one device."""


def large_plan(size: str, precision: Precision) -> Any:
    """LoRA of rank 16 on all projections of Llama 2 7B (1 device) or 3 70B (8 devices, ZeRO-3)."""
    sizes = {
        "7B": {"num_layers": 32, "num_heads": 32, "embed_dim": 4096, "mlp_dim": 11008},
        "70B": {
            "num_layers": 80,
            "num_heads": 64,
            "embed_dim": 8192,
            "mlp_dim": 28672,
            "num_kv_heads": 8,
        },
    }[size]
    devices, vocab, zero = {"7B": (1, 32_000, 0), "70B": (8, 128_256, 3)}[size]
    config = ModelConfig(name="llama", max_seq_len=2048, remat="full", **sizes)
    lora = LoraConfig(rank=16, alpha=32.0)
    tokens = jax.ShapeDtypeStruct((devices, 2048), jnp.int32)
    return zerojax.make_plan(
        add_lora(build_model(config, vocab), lora),
        make_abstract_mesh(None, devices),
        example_batch={"tokens": tokens, "targets": tokens},
        optimizer=zerojax.adamw(1e-4),
        precision=precision,
        zero=zero,
        freeze=lora.freeze,
    )


@pytest.mark.parametrize(
    ("size", "frozen", "total", "total_wide"),
    [("7B", 12.55, 13.15, 38.25), ("70B", 16.43, 18.77, 51.62)],
)
def test_a_7b_fits_one_card_of_24_gb_and_a_70b_eight_of_80(size, frozen, total, total_wide):
    """GiB per device without activations. The 7B does not fit with float32 weights."""
    narrow, wide = (large_plan(size, precision) for precision in (BF16, WIDE))
    devices = {"7B": 1, "70B": 8}[size]
    sizes = role_bytes(narrow)
    parameters = narrow.placement.num_parameters(frozen=True)
    assert parameters == pytest.approx({"7B": 6.738e9, "70B": 70.55e9}[size], rel=1e-3)
    assert sizes["frozen"] == pytest.approx(2 * parameters / devices, rel=1e-3)
    assert sizes["frozen"] / GIB == pytest.approx(frozen, abs=0.01)
    assert sum(sizes.values()) / GIB == pytest.approx(total, abs=0.01)
    assert sum(role_bytes(wide).values()) / GIB == pytest.approx(total_wide, abs=0.01)
    # What is left is for activations.
    assert CARD[size] - sum(sizes.values()) > 0.4 * CARD[size]
    assert (CARD[size] < sum(role_bytes(wide).values())) == (size == "7B")


def conversions(program: Any) -> set[tuple[tuple[int, ...], str, str]]:
    """{(shape, from, to)} of every cast of a traced program, loop bodies once."""
    found = set()
    for equation in program.eqns:
        if equation.primitive.name == "convert_element_type":
            given, made = equation.invars[0].aval, equation.outvars[0].aval
            found.add((given.shape, given.dtype.name, made.dtype.name))
        for inner in inner_programs(equation.params):
            found |= conversions(inner)
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("precision", [BF16, WIDE], ids=["bf16", "fp32"])
def test_no_copy_of_a_frozen_stack_is_made_to_compute_with(zero, precision):
    """Also where gradients travel in float32. Weights in float32 are copied, which is seen."""
    model = add_lora(reference_model("gpt2"), LORA)
    plan = lora_plan(precision, model, zero=zero, reduce_dtype="fp32")
    traced = build_step(plan).trace(plan.abstract_state, plan.abstract_batch)
    frozen = plan.abstract_state["frozen"]
    kernels = {x.sharding.shard_shape(x.shape) for n, x in frozen.items() if "/kernel" in n}
    cast = {(a, b) for shape, a, b in conversions(traced.jaxpr.jaxpr) if shape in kernels}
    assert cast == (set() if precision is BF16 else {("float32", "bfloat16")})


RUN = [
    *("model.num_layers=2", "model.num_heads=2", "model.embed_dim=16", "model.max_seq_len=16"),
    *("data.seq_len=16", "global_batch_size=8", "model.lora.rank=2", "precision=bf16"),
]


@pytest.mark.parametrize(
    ("words", "expected"), [((), "bfloat16"), (("freeze_dtype=fp32",), "float32")]
)
def test_a_run_file_names_the_dtype(words, expected):
    plan = plan_from_config(load(RunConfig, None, [*RUN, *words]), 8)
    assert {x.dtype.name for x in plan.abstract_portable["frozen"].values()} == {expected}


def test_a_record_from_before_keeps_what_is_frozen_as_all_parameters():
    plan = lora_plan(devices=1)
    record = record_of(plan, RunNotes(loss="model"))
    assert record.precision["freeze_dtype"] == "bfloat16"
    assert record.as_precision().frozen_dtype == jnp.bfloat16
    before = {n: x for n, x in record.precision.items() if n != "freeze_dtype"}
    old = dataclasses.replace(record, precision=before)
    assert old.as_precision().frozen_dtype == jnp.float32


@pytest.mark.gpu_programs
def test_a_program_for_a_gpu_holds_no_second_copy():
    """Compiled for an H100; a layer's own copy is all that may stand beside what is stored."""
    config = ModelConfig(
        name="llama",
        num_layers=16,
        num_heads=8,
        embed_dim=1024,
        mlp_dim=2816,
        max_seq_len=256,
        remat="full",
    )
    tokens = jax.ShapeDtypeStruct((1, 256), jnp.int32)
    peaks, frozen = [], 0
    for precision in (WIDE, BF16):
        plan = zerojax.make_plan(
            add_lora(build_model(config, 1024), LORA),
            make_abstract_mesh(None, 1),
            example_batch={"tokens": tokens, "targets": tokens},
            optimizer=zerojax.adamw(1e-4),
            precision=precision,
            zero=0,
            freeze=LORA.freeze,
        )
        frozen = role_bytes(plan)["frozen"]
        peaks.append(zerojax.forecast(plan, gpu="h100").memory.peak)
    # Half of what is stored, and the whole copy to compute with; two layers of 16 may be copied.
    assert peaks[0] - peaks[1] > 2 * frozen * (1 - 2 / 16)
    assert peaks[1] < frozen * 1.5
