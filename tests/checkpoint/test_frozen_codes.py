"""Frozen kernels in codes: the bits of decoded weights, bytes kept and sent, refusals, exports."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import zerojax
from tests.checkpoint.test_frozen_dtype import ABOUT, GIB, ON_HOST, large_plan, same_bits
from tests.support.gpu_plans import compile_step, text_plan
from tests.support.marks import slow, thorough
from tests.support.recipe import RECIPE
from tests.support.refusals import Refusal
from tests.support.small_models import (
    VOCAB,
    LinenText,
    apply_functions,
    init_functions,
    linen_loss,
    reference_model,
    regression_loss,
)
from tests.support.trajectories import advance, plan_for, regression_batch, text_batch
from tests.zoo.test_hugging_face_export import assert_same_bits, read_all
from zerojax.checkpoint import BaseWeightsError, Checkpointer, CheckpointError
from zerojax.checkpoint.export import export
from zerojax.checkpoint.inspection import find_step
from zerojax.checkpoint.verification import verify_step
from zerojax.config import ConfigError, LoraConfig, ModelConfig, RunConfig, load
from zerojax.data import TokenSource, tokens_of_array
from zerojax.forecasting import hlo
from zerojax.optim.precision import Precision, as_precision
from zerojax.optim.weight_codes import BLOCK, bytes_per_parameter
from zerojax.placement.frozen_codes import decoded
from zerojax.placement.leaf_placement import Access
from zerojax.plan.counts import role_bytes
from zerojax.plan.plan_page import plan_dict
from zerojax.plan.wire import leaf_transfers
from zerojax.step.build import build_evaluation, build_step
from zerojax.step.initialization import init_state
from zerojax.step.reshard import (
    from_portable_state,
    model_parts,
    reshard_state,
    to_portable_state,
)
from zerojax.step.trained_model import model_of
from zerojax.tracing import trees
from zerojax.training.checkpointing import restore_state, save_state
from zerojax.training.run_file import plan_from_config
from zerojax.training.run_record import RunNotes, record_of
from zerojax.zoo import add_lora, build_model

LORA = LoraConfig(rank=3, alpha=12.0)
BF16 = as_precision("bf16")
WIDE = as_precision("bf16", freeze_dtype="fp32")
NF4 = as_precision("bf16", freeze_dtype="nf4")
INT8 = as_precision("bf16", freeze_dtype="int8")
UP = "blocks/mlp/up/kernel"
SHAKESPEARE = Path(zerojax.__file__).parent / "data" / "shakespeare.txt"
SIZES = {"embed_dim": 64, "num_heads": 2, "num_layers": 2}
"""Blocks lie along the 64; ZeRO cuts another dimension, and pads that of the head."""


@functools.cache
def model(name: str = "llama") -> Any:
    sizes = SIZES if name == "gpt2" else {**SIZES, "num_kv_heads": 2}
    return add_lora(reference_model(name, **sizes)(nnx.Rngs(0)), LORA)


def lora_plan(precision: Any = NF4, given: Any = None, **options: Any) -> Any:
    options = {"freeze": LORA.freeze, "persistence_threshold": 0, **options}
    return plan_for(model() if given is None else given, precision=precision, **options)


def with_decoded_weights(given: Any, plan: Any) -> Any:
    """The model with the numbers that the codes of a new state mean, in float32."""
    parts = jax.device_get(model_parts(plan, init_state(plan, 0)))
    values = decoded(plan.users_placement.leaves, parts["frozen"])
    copy = nnx.clone(given)
    for path, leaf in nnx.to_flat_state(nnx.state(copy, nnx.Param)):
        name = trees.path_name(path)
        if name in values and plan.users_placement.leaves[name].codes is not None:
            leaf[...] = jnp.asarray(values[name])
    return copy


WAYS = {
    "one device": slow({"devices": 1, "compute": "fp32"}),
    "0": slow({"zero": 0, "num_microbatches": 2, "compute": "fp32"}),
    "1": slow({"zero": 1, "compute": "fp32"}),
    "2": slow({"zero": 2, "num_microbatches": 2}),
    "3": thorough({"zero": 3}),
    "3 where some are gathered once": slow({"zero": 3, "persistence_threshold": 10_000}),
    "3, one gather each": slow({"zero": 3, "allgather_bucket_size": 1}),
    "3 tensor": slow({"zero": 3, "mesh": {"model": 2, "data": 4}, "name": "gpt2"}),
    "0 tensor": slow(
        {"zero": 0, "mesh": {"model": 2, "data": 4}, "name": "gpt2", "compute": "fp32"}
    ),
    "2, moments on the host": slow(
        {
            "zero": 2,
            "devices": 2,
            "optimizer": zerojax.adamw(1e-3, **RECIPE),
            "offload": ON_HOST,
            "compute": "fp32",
        }
    ),
}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_losses_and_updates_are_bitwise_those_of_the_decoded_weights(options):
    """Masters and both moments are compared, so gradients are, too.

    At stages 0 and 1, and with moments on the host, in float32: in bfloat16 XLA leaves out other
    roundings in each of the two programs.
    """
    options = dict(options)
    compute, given = options.pop("compute", "bf16"), model(options.pop("name", "llama"))
    plan = lora_plan(as_precision(compute, freeze_dtype="nf4"), given, **options)
    wide = lora_plan(as_precision(compute), with_decoded_weights(given, plan), **options)
    runs = [advance(one, init_state(one, 0), range(3)) for one in (plan, wide)]
    coded, plain = runs
    assert coded.state["frozen"][UP].dtype == np.uint8
    assert plain.state["frozen"][UP].dtype == plan.precision.compute_dtype
    np.testing.assert_array_equal(coded.losses, plain.losses)
    np.testing.assert_array_equal(coded.norms, plain.norms)
    for part in ("params", "opt_state"):
        same_bits(coded.state[part], plain.state[part])
    same_bits(coded.state.get("masters", {}), plain.state.get("masters", {}))
    assert coded.losses[0] != coded.losses[-1]


class Lists(nnx.Module):
    """Layers in a Python list, which a plan rolls into a loop."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(12, BLOCK, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(BLOCK, BLOCK, rngs=rngs) for _ in range(4)])
        self.out = nnx.Linear(BLOCK, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return self.out(x)


LISTS = {"given": Lists, "freeze": ("layers/",), "loss": regression_loss, "batch": regression_batch}
LINEN = {"given": LinenText(width=64), "freeze": ("LinenBlock", "Dense"), "loss": linen_loss}
LLAMA = {**SIZES, "num_kv_heads": 2}
OTHERS = {
    "linen": {**LINEN, "zero": 1},
    "linen, 3": {**LINEN, "zero": 3},
    "rolled": {**LISTS, "zero": 0},
    "rolled, 3": {**LISTS, "zero": 3},
    "rolled, 3, 2 microbatches": {**LISTS, "zero": 3, "num_microbatches": 2},
    "a list as it is": {**LISTS, "zero": 3, "roll": "off"},
    "sequences split": {"zero": 3, "mesh": {"data": 4, "context": 2}},
    "replicas": {"zero": 3, "mesh": {"data": 4, "replica": 2}},
    "activations on host": {"zero": 3, "offload": {"activations": "host"}},
    "remat": {"zero": 3, "given": add_lora(reference_model("llama", **LLAMA, remat="full"), LORA)},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_whatever_else_a_run_does_it_computes_with_decoded_weights(options):
    coded, plain = (
        lora_plan(as_precision("fp32", freeze_dtype=dtype), **options) for dtype in ("nf4", None)
    )
    state = init_state(coded, 0)
    portable = to_portable_state(plain, init_state(plain, 0))
    leaves = coded.users_placement.leaves
    assert any(leaf.codes is not None for leaf in leaves.values())
    values = decoded(leaves, jax.device_get(to_portable_state(coded, state)["frozen"]))
    frozen = portable["frozen"]
    portable["frozen"] = {n: jax.device_put(values[n], x.sharding) for n, x in frozen.items()}
    batch = options.get("batch", text_batch)
    runs = [
        advance(plan, one, range(3), batch=batch)
        for plan, one in ((coded, state), (plain, from_portable_state(plain, portable)))
    ]
    np.testing.assert_array_equal(runs[0].losses, runs[1].losses)
    same_bits(runs[0].state["params"], runs[1].state["params"])
    assert runs[0].losses[0] != runs[0].losses[-1]


# --- what is stored -------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_new_codes_are_those_of_float32_weights_on_any_mesh(kind):
    """Of a factory's, computed on the devices, and of an instance's, from the host."""
    precision = as_precision("bf16", freeze_dtype=kind)
    factory = add_lora(reference_model("llama", **{**SIZES, "num_kv_heads": 2}), LORA)
    for given in (factory, model()):
        wide = to_portable_state(plan := lora_plan(WIDE, given, devices=1), init_state(plan, 0))
        for options in ({"devices": 1}, {"zero": 3}, {"zero": 1, "devices": 4}):
            plan = lora_plan(precision, given, **options)
            found = to_portable_state(plan, init_state(plan, 0))["frozen"]
            for name, leaf in plan.users_placement.leaves.items():
                if leaf.codes is not None:
                    wanted = leaf.codes.encode(np.asarray(wide["frozen"][name]))
                    np.testing.assert_array_equal(np.asarray(found[name]), wanted)
            assert found["blocks/mlp/up/kernel"].dtype == np.uint8


def test_kernels_are_coded_and_nothing_else():
    leaves = lora_plan(devices=1).placement.leaves
    coded = {name for name, leaf in leaves.items() if leaf.codes is not None}
    assert coded == {n for n, leaf in leaves.items() if leaf.frozen and n.endswith("/kernel")}
    assert {n for n, leaf in leaves.items() if leaf.frozen} - coded == {
        "blocks/attention_norm/scale",
        "blocks/mlp_norm/scale",
        "final_norm/scale",
        "token_embedding/embedding",
    }
    assert not any("lora" in name for name in coded)
    assert all(leaves[name].shape[leaves[name].codes.dim] == BLOCK for name in coded)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", [NF4, INT8], ids=["nf4", "int8"])
def test_the_plan_counts_codes(precision, zero):
    coded, plain = (lora_plan(one, zero=zero, devices=2) for one in (precision, BF16))
    per_weight = bytes_per_parameter(precision.freeze_codes)
    changed = 0
    for name, leaf in coded.placement.leaves.items():
        if leaf.codes is not None:
            size = trees.num_elements(leaf.shape)
            changed += size
            stored = coded.abstract_state["frozen"][name]
            assert stored.dtype == np.uint8
            assert stored.size == size * per_weight
    shards = 1 if zero == 0 else 2
    saved = role_bytes(plain)["frozen"] - role_bytes(coded)["frozen"]
    assert saved == changed * (2 - per_weight) / shards
    assert coded.as_dict()["precision"]["freeze_dtype"] == precision.freeze_codes
    assert coded.fingerprint != plain.fingerprint


@pytest.mark.parametrize("zero", [1, 3])
def test_stage_3_sends_0_27_of_what_bfloat16_does(zero):
    sent = []
    for precision in (NF4, INT8, BF16):
        plan = lora_plan(precision, zero=zero)
        leaf = plan.placement.leaves[UP]
        assert leaf.access is (Access.GATHER_ON_USE if zero == 3 else Access.GATHER_ONCE)
        transfers = leaf_transfers(plan, leaf)
        assert len(transfers) == (2 if zero == 3 else 1)
        sent.append([one.num_bytes for one in transfers])
    nf4, int8, wide = map(np.asarray, sent)
    np.testing.assert_allclose(nf4 / wide, 0.53125 / 2)
    np.testing.assert_allclose(int8 / wide, 1.03125 / 2)
    assert (nf4 / wide <= 0.30).all()


def test_the_plan_says_that_weights_are_rounded_and_which_are_not():
    plan = lora_plan(devices=1)
    (said,) = (line for line in plan.reasons if line.startswith("freeze_dtype=nf4: "))
    assert "8 frozen kernels" in said
    assert "are rounded to nf4 in blocks of 64" in said
    assert "exports hold the rounded weights" in said
    (rest,) = (line for line in plan.reasons if "in nf4: 4 other frozen" in line)
    assert "no norms, biases or tables" in rest
    assert "decoded from nf4" in plan.explain(UP)
    assert re.search(rf"{UP} .*frozen, nf4, whole", plan.table())


class Two(nnx.Module):
    """A frozen kernel whose only dimension of whole blocks is its largest one, and one without."""

    def __init__(self, rngs: nnx.Rngs):
        self.wide = nnx.Linear(12, 8 * BLOCK, rngs=rngs)
        self.narrow = nnx.Linear(8 * BLOCK, 5, rngs=rngs)
        self.small = nnx.Linear(5, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.small(self.narrow(jax.nn.gelu(self.wide(x))))


def linear_plan(precision: Any = NF4, given: Any = Two, **options: Any) -> Any:
    return plan_for(
        given,
        precision=precision,
        loss=regression_loss,
        batch=regression_batch,
        freeze=("wide/", "small/"),
        **options,
    )


def test_shards_are_cut_between_blocks_or_along_another_dimension():
    whole = linear_plan(zero=3).placement.leaves["wide/kernel"]
    assert whole.codes.dim == whole.zero_dim == -1
    assert whole.stored_shape == (12, 8 * 34)
    cut = lora_plan(zero=3).placement.leaves[UP]
    assert (cut.codes.dim, cut.zero_dim) == (-2, -1)
    reasons = linear_plan(zero=3).placement.leaves["small/kernel"].reasons
    assert reasons[0] == "no dimension is a multiple of 64: not stored in nf4"


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [1, 3])
def test_blocks_along_the_dimension_of_zero_give_the_same_bits(zero):
    options = {"zero": zero, "persistence_threshold": 0}
    given = Two(nnx.Rngs(0))
    plan = linear_plan(as_precision("fp32", freeze_dtype="nf4"), given, **options)
    wide = linear_plan("fp32", with_decoded_weights(given, plan), **options)
    coded, plain = (
        advance(one, init_state(one, 0), range(3), batch=regression_batch) for one in (plan, wide)
    )
    np.testing.assert_array_equal(coded.losses, plain.losses)
    same_bits(coded.state["params"], plain.state["params"])


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": {"stage": 2, "data": 4}}, r"stage=2: the stages.*use stage=1.*or a freeze_dtype"),
        (
            {"zero": 3, "offload": {**ON_HOST, "params": "host"}, "optimizer": zerojax.adamw(1e-3)},
            r"offload.params=host.*leave offload.params out",
        ),
        (
            {"deterministic": "mesh", "optimizer": zerojax.adamw(1e-3)},
            r"deterministic='mesh': .*leave deterministic out",
        ),
        ({"freeze": ("norm",)}, r"freeze_dtype=nf4 needs a frozen parameter"),
        ({"mesh": {"model": 2, "data": 4}}, r"lm_head/kernel: dim 1 of size 64.*model=2 would cut"),
    ],
)
def test_what_cannot_be_coded_is_refused_with_a_remedy(options, message):
    with pytest.raises(ValueError, match=message):
        lora_plan(**options)


def test_functions_have_no_place_to_decode_in():
    with pytest.raises(ValueError, match=r"pair of functions.*nnx or linen"):
        plan_for(
            (init_functions, apply_functions),
            precision=NF4,
            loss=regression_loss,
            batch=regression_batch,
            freeze=("dense",),
        )


def test_an_unknown_code_is_refused():
    with pytest.raises(ValueError, match=r"freeze_codes='fp4' is not one of nf4, int8"):
        Precision(freeze_codes="fp4")
    with pytest.raises(ValueError, match=r"freeze_dtype='fp4' is not one of .*nf4, int8"):
        as_precision("bf16", freeze_dtype="fp4")
    with pytest.raises(ValueError, match=r"param_dtype='nf4' is not one of fp32, bf16, fp16$"):
        as_precision("bf16", param_dtype="nf4")
    assert as_precision("bf16", freeze_dtype="nf4").describe().endswith("frozen kernels in nf4")


@pytest.mark.thorough
def test_an_evaluation_that_takes_stored_weights_is_refused():
    def summed(model: Any, batch: Any) -> Any:
        stored = jax.tree.leaves(nnx.state(model, nnx.Param))
        return model.loss(batch)[0] + sum(jnp.sum(x) for x in stored)

    def evaluate(given: tuple[Precision, Any]) -> None:
        precision, loss = given
        plan = lora_plan(precision, devices=1)
        build_evaluation(plan, loss).trace(plan.abstract_state, plan.abstract_batch)

    good = [(NF4, lambda model, batch: model.loss(batch)), (BF16, summed)]
    Refusal((NF4, summed), "nf4 evaluation", "training freeze_dtype bf16", good).check(evaluate)


# --- checkpoints, and ways out --------------------------------------------------------------------


def saved(folder: Any, plan: Any, state: Any) -> None:
    about = {**ABOUT, "plan": plan_dict(plan)}
    with Checkpointer(folder) as checkpointer:
        save_state(checkpointer, plan, state, step=2, about=about)


@pytest.mark.slow
def test_a_checkpoint_moves_to_another_mesh_bit_for_bit(tmp_path):
    first = lora_plan(zero=3)
    run = advance(first, init_state(first, 0), range(2))
    second = lora_plan(zero=1, devices=2)
    saved(tmp_path, first, run.state)
    with Checkpointer(tmp_path) as checkpointer:
        _, restored = restore_state(checkpointer, second)
    moved = reshard_state(first, second, run.state)
    assert restored["frozen"][UP].dtype == np.uint8
    same_bits(restored, moved)
    following = [advance(second, state, [2]).losses for state in (restored, moved)]
    np.testing.assert_array_equal(*following)


@pytest.mark.thorough
def test_a_checkpoint_with_other_codes_is_refused_with_the_option(tmp_path):
    plan = lora_plan(devices=1)
    saved(tmp_path, plan, init_state(plan, 0))
    with Checkpointer(tmp_path) as checkpointer:
        message = r"in codes \(nf4 or int8\): use the freeze_dtype of the run that saved it"
        with pytest.raises(CheckpointError, match=message):
            restore_state(checkpointer, lora_plan(BF16, devices=1))
        with pytest.raises(CheckpointError, match=r"with other codes: use the freeze_dtype"):
            restore_state(checkpointer, lora_plan(INT8, devices=1))
    with pytest.raises(ValueError, match="stored dtypes and freeze="):
        reshard_state(plan, lora_plan(INT8, devices=1), init_state(plan, 0))


@pytest.mark.thorough
def test_the_model_that_is_handed_over_holds_the_decoded_weights():
    plan = lora_plan(devices=1)
    state = init_state(plan, 0)
    kernel = model_of(plan, state).blocks.mlp.up.kernel[...]
    assert kernel.dtype == jnp.float32
    codes = plan.placement.leaves[UP].codes
    wanted = codes.decode_on_host(np.asarray(state["frozen"][UP]))
    np.testing.assert_array_equal(np.asarray(kernel), wanted)


TOKENS = np.random.default_rng(0).integers(0, VOCAB - 3, (8, 8), np.int32)
BATCHES = [{"tokens": TOKENS, "targets": np.roll(TOKENS, -1, 1)}] * 2


def trained(given: Any, run: Any, mesh: Any, **options: Any) -> Any:
    trainer = zerojax.train(
        given, mesh, BATCHES, optimizer=zerojax.adamw(0.1), steps=2, checkpoint=run, **options
    )
    trainer.close()
    return trainer


@pytest.mark.thorough
def test_adapters_learn_on_a_base_in_codes_as_on_the_base_itself():
    """50 steps on text with exchanged cases; int8 0.04 % and nf4 0.09 % were measured."""
    text = SHAKESPEARE.read_bytes()

    def source(data: bytes) -> TokenSource:
        ids = np.frombuffer(data, np.uint8).astype(np.uint16)
        tokens = tokens_of_array(ids)
        return TokenSource(tokens=tokens, seq_len=64, global_batch_size=16, vocab_size=256)

    sizes = {"num_layers": 2, "num_heads": 4, "embed_dim": 128, "mlp_dim": 256, "max_seq_len": 64}
    given = build_model(ModelConfig(name="llama", **sizes), 256)
    one = zerojax.make_mesh({"data": 1}, devices=jax.devices()[:1])
    settings = {"mesh_config": one, "optimizer": zerojax.adamw(3e-3, weight_decay=0.0)}
    base = zerojax.train(given, batches=source(text), steps=200, **settings).to_model()
    lora, losses = LoraConfig(rank=8, alpha=16.0), {}
    for codes in (None, "int8", "nf4"):
        trainer = zerojax.train(
            add_lora(base, lora),
            batches=source(text.swapcase()),
            steps=50,
            freeze=lora.freeze,
            precision=Precision(freeze_codes=codes),
            **settings,
        )
        losses[codes] = [report["loss"] for report in trainer.history]
    assert losses[None][-1] < losses[None][0] - 0.5
    for codes in ("int8", "nf4"):
        np.testing.assert_allclose(losses[codes], losses[None], rtol=0.01)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_from_a_folder_to_a_run_to_both_ways_out(tmp_path, kind):
    """What lies in files is coded where it is read; adapters are added to decoded float32."""
    base = trained(reference_model("llama", **{**SIZES, "num_kv_heads": 2}), tmp_path / "base", {})
    zerojax.to_hugging_face(base, tmp_path / "theirs")
    theirs = read_all(tmp_path / "theirs")
    given = zerojax.from_hugging_face(tmp_path / "theirs").with_lora(LoraConfig(rank=2))
    trainer = trained(
        given,
        tmp_path / "run",
        {"data": 8, "zero": 3, "persistence_threshold": 0},
        precision=as_precision("bf16", freeze_dtype=kind),
        freeze=LoraConfig(rank=2).freeze,
    )
    parts = model_parts(trainer.plan, trainer.state)
    leaf = trainer.plan.placement.leaves["blocks/attention/query/kernel"]
    query = np.asarray(parts["frozen"][leaf.name])
    kernels = [theirs[f"model.layers.{i}.self_attn.q_proj.weight"] for i in range(2)]
    exact = np.stack([x.T.reshape(64, 2, 32) for x in kernels])
    np.testing.assert_array_equal(query, leaf.codes.encode(exact))
    zerojax.to_hugging_face(trainer, tmp_path / "live")
    zerojax.to_hugging_face(tmp_path / "run", tmp_path / "saved")
    live, again = (read_all(tmp_path / name) for name in ("live", "saved"))
    assert_same_bits(live, again)
    assert {x.dtype.name for x in live.values()} == {"float32"}
    a, b = (np.asarray(parts["params"][f"blocks/attention/query/lora/{x}"])[1] for x in "ab")
    decoded_query = leaf.codes.decode_on_host(query)[1].reshape(64, 64)
    wanted = decoded_query + 8.0 * (a @ b.reshape(2, 64))
    name = "model.layers.1.self_attn.q_proj.weight"
    np.testing.assert_allclose(live[name], wanted.T, rtol=1e-6, atol=1e-7)
    run = zerojax.load_run(tmp_path / "run")
    assert run.plan.precision.freeze_codes == kind
    same_bits(model_parts(run.plan, run.state)["frozen"], parts["frozen"])
    read = run.model.blocks.attention.query.kernel[...]
    assert read.dtype == jnp.bfloat16
    wide = leaf.codes.decode_on_host(query).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(read), wide)
    step = find_step(tmp_path / "run", None)
    export(step, tmp_path / "plain")
    plain = read_all(tmp_path / "plain")["blocks.attention.query.kernel"]
    np.testing.assert_array_equal(plain, leaf.codes.decode_on_host(query))
    zerojax.to_peft(trainer, tmp_path / "peft")
    assert (tmp_path / "peft" / "adapter_model.safetensors").is_file()


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_checkpoints_leave_what_is_coded_in_its_folder(tmp_path, kind):
    """It is coded again where it is read, on any mesh, and compared with what was saved."""
    base = trained(reference_model("llama", **{**SIZES, "num_kv_heads": 2}), tmp_path / "base", {})
    zerojax.to_hugging_face(base, tmp_path / "theirs")
    given = zerojax.from_hugging_face(tmp_path / "theirs").with_lora(LoraConfig(rank=2))
    options = {
        "precision": as_precision("bf16", freeze_dtype=kind),
        "freeze": LoraConfig(rank=2).freeze,
    }
    run = tmp_path / "run"
    trainer = trained(given, run, {"data": 8, "zero": 3, "persistence_threshold": 0}, **options)
    frozen = model_parts(trainer.plan, trainer.state)["frozen"]
    step = find_step(run, None)
    metadata = step.whole_metadata()
    assert {f"frozen/{name}" for name in frozen} == set(metadata.base["arrays"])
    assert metadata.arrays["frozen/blocks/attention/query/kernel"].startswith("uint8[")
    assert verify_step(step.folder, step.step).is_good
    resumed = trained(given, run, {"data": 4, "replica": 2, "zero": 1}, **options)
    same_bits(model_parts(resumed.plan, resumed.state)["frozen"], frozen)
    file = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.q_proj.weight"][3, 5] += 1
    save_file(tensors, file)
    with pytest.raises(BaseWeightsError, match=r"query/kernel' .in model.safetensors. differs"):
        zerojax.load_run(run)


@pytest.mark.thorough
def test_an_evaluation_has_the_bits_of_decoded_weights():
    plan = lora_plan(as_precision("fp32", freeze_dtype="nf4"), zero=3)
    wide = lora_plan("fp32", with_decoded_weights(model(), plan), zero=3)
    found = []
    for one in (plan, wide):
        batch = jax.device_put(text_batch(0), one.batch_sharding)
        found.append(build_evaluation(one)(init_state(one, 0), batch))
    same_bits(*found)


def test_a_run_file_names_the_codes():
    words = [
        *("model.num_layers=2", "model.num_heads=2", "model.embed_dim=64", "model.max_seq_len=16"),
        *("data.seq_len=16", "global_batch_size=8", "model.lora.rank=2", "precision=bf16"),
    ]
    plan = plan_from_config(load(RunConfig, None, [*words, "freeze_dtype=int8"]), 8)
    dtypes = {x.dtype.name for x in plan.abstract_portable["frozen"].values()}
    assert dtypes == {"uint8", "bfloat16"}
    with pytest.raises(ConfigError, match=r"freeze_dtype.*nf4"):
        load(RunConfig, None, [*words, "freeze_dtype=fp4"])


def test_a_record_names_the_codes():
    record = record_of(lora_plan(devices=1), RunNotes(loss="model"))
    assert record.precision["freeze_codes"] == "nf4"
    assert record.as_precision().freeze_codes == "nf4"
    assert record.as_precision().frozen_dtype == jnp.bfloat16
    plain = record_of(lora_plan(BF16, devices=1), RunNotes(loss="model"))
    assert "freeze_codes" not in plain.precision


# --- compiled programs ----------------------------------------------------------------------------


def gathered_bytes(text: str, devices: int) -> dict[str, float]:
    """{dtype: bytes that one device sends in the all-gathers of a step}."""
    found: dict[str, float] = {}
    for one in hlo.find_collectives(hlo.read_program(text), devices):
        if one.kind == "all-gather":
            found[one.dtype] = found.get(one.dtype, 0) + one.wire_bytes * one.times
    return found


def share_gathered(coded: dict[str, float], wide: dict[str, float]) -> float:
    """Bytes of codes in the all-gathers of a step, of those of the same kernels as numbers."""
    rest = sum(size for dtype, size in coded.items() if dtype != "u8")
    assert "u8" not in wide
    return coded["u8"] / (sum(wide.values()) - rest)


@pytest.mark.thorough
def test_a_compiled_step_gathers_codes():
    """Forward and backward, of two microbatches."""
    found = []
    for precision in (NF4, BF16):
        plan = lora_plan(precision, zero=3, num_microbatches=2)
        lowered = build_step(plan).lower(plan.abstract_state, plan.abstract_batch)
        found.append((plan, gathered_bytes(lowered.compile().as_text(), 8)))
    (plan, coded), (_, wide) = found
    # XLA for CPUs gathers bfloat16 as float32.
    assert wide.keys() == {"f32"}
    assert share_gathered(coded, wide) * 2 == pytest.approx(0.53125 / 2, rel=1e-3)
    formula = sum(
        one.num_bytes
        for leaf in plan.placement.leaves.values()
        if leaf.codes is not None
        for one in leaf_transfers(plan, leaf)
    )
    # Of two gathers of the head, one behind the other, XLA leaves one.
    assert 0.95 * formula < coded["u8"] <= formula


LAYERS = 5


@pytest.mark.thorough
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_no_decoded_copy_of_a_stack_is_in_a_compiled_step(zero, remat):
    sizes = {**SIZES, "num_kv_heads": 2, "num_layers": LAYERS, "remat": remat}
    given = add_lora(reference_model("llama", **sizes), LORA)
    found = []
    for precision in (NF4, BF16):
        plan = lora_plan(precision, given, zero=zero, num_microbatches=2, devices=2)
        lowered = build_step(plan).lower(plan.abstract_state, plan.abstract_batch)
        text = lowered.compile().as_text()
        stacks = {leaf.shape for leaf in plan.placement.leaves.values() if is_stack(leaf)}
        shapes = {",".join(map(str, shape)) for shape in stacks}
        arrays = re.findall(r"(?:bf16|f32)\[([0-9,]+)\]", text)
        found.append(shapes.intersection(arrays))
    assert not found[0]
    assert found[1] or zero == 3


def is_stack(leaf: Any) -> bool:
    return leaf.name.startswith("blocks/") and leaf.name.endswith("/kernel")


# --- large models, and GPUs -----------------------------------------------------------------------


@pytest.mark.parametrize(("size", "frozen"), [("7B", 3.51), ("70B", 4.54)])
def test_a_frozen_base_takes_less_than_0_57_bytes_a_parameter(size, frozen):
    """GiB per device: Llama 2 7B on one, Llama 3 70B on 8 with ZeRO-3; tables in bfloat16."""
    plan = large_plan(size, NF4)
    found = role_bytes(plan)["frozen"]
    devices = {"7B": 1, "70B": 8}[size]
    assert found * devices / plan.placement.num_parameters(frozen=True) < 0.57
    assert found / GIB == pytest.approx(frozen, abs=0.01)
    wide = role_bytes(large_plan(size, BF16))
    assert sum(role_bytes(plan).values()) < 0.4 * sum(wide.values())


@pytest.mark.gpu_programs
@pytest.mark.parametrize(("zero", "devices"), [(0, 1), (3, 8)])
def test_a_program_for_h100_decodes_layer_by_layer(zero, devices):
    config = ModelConfig(
        name="llama", num_layers=16, num_heads=8, embed_dim=1024, mlp_dim=2816, max_seq_len=256
    )
    found = []
    for precision in (NF4, BF16):
        plan = text_plan(
            add_lora(build_model(config, 1024), LORA),
            devices,
            256,
            devices=devices,
            optimizer=zerojax.adamw(1e-4),
            precision=precision,
            zero=zero,
            freeze=LORA.freeze,
        )
        found.append((plan, compile_step(plan)))
    (plan, coded), (wide_plan, wide) = found
    stacks = {leaf.shape for leaf in plan.placement.leaves.values() if is_stack(leaf)}
    shapes = {",".join(map(str, shape)) for shape in stacks}
    for built, is_there in ((coded, False), (wide, zero == 0)):
        arrays = re.findall(r"(?:bf16|f32)\[([0-9,]+)\]", built.text)
        assert bool(shapes.intersection(arrays)) == is_there
    if zero == 3:
        # Adapters are among it; XLA gathers them together with codes.
        sent = [sum(gathered_bytes(one.text, 8).values()) for one in (coded, wide)]
        assert sent[0] / sent[1] <= 0.28
    layer = max(np.prod(shape[1:]) for shape in stacks) * 2
    # Beside what is stored, a few decoded kernels at most.
    assert coded.memory.temporary < wide.memory.temporary + 8 * layer
    saved = role_bytes(wide_plan)["frozen"] - role_bytes(plan)["frozen"]
    assert wide.memory.arguments - coded.memory.arguments == pytest.approx(saved, rel=0.01)
