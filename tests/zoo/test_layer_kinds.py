"""Decoders whose layers are of several kinds: one loop, one program, in every kind of plan."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zerojax
from tests.offload.test_offload_params import assert_equal, both
from tests.support.hugging_face_folders import FAMILIES, write_folder
from tests.support.small_models import VOCAB
from tests.support.trajectories import plan_for, text_batch, train_for
from tests.zoo.test_context_training import packed_batch
from zerojax.config import LoraConfig
from zerojax.forecasting.hlo import find_in_branches, read_program
from zerojax.operators import chunked_attention
from zerojax.placement.device_mesh import make_mesh
from zerojax.placement.leaf_placement import Access
from zerojax.step.build import build_step
from zerojax.training.loading import load_run
from zerojax.zoo import (
    Decoder,
    DecoderConfig,
    LayerKind,
    NormConfig,
    Rope,
    RopeScaling,
    add_lora,
    config_values,
)
from zerojax.zoo.hugging_face import from_hugging_face
from zerojax.zoo.layers import Norm
from zerojax.zoo.self_attention import rotate_positions

TOLERANCE = 5e-6
"""|difference of losses| of float32 runs, of the same steps on other numbers of devices."""
STEPS = 6
WINDOW = LayerKind(window=3, rope=Rope(theta=100.0))
FULL = LayerKind(rope=Rope(theta=1000.0, scaling=RopeScaling(kind="linear", factor=2.0)))
NOPE = LayerKind(rope=None)
SWITCHES = {
    "norm": NormConfig(scale_offset=1.0),
    "norm_places": "pre_post",
    "query_key_norm": "head",
    "attention_softcap": 3.0,
    "embed_scale": 2.0,
    "logit_softcap": 4.0,
    "activation": "gelu_tanh",
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(chunked_attention, "BLOCK", 2)


def config_of(**changes):
    sizes = {"vocab_size": VOCAB, "max_seq_len": 16, "num_layers": 4, "num_heads": 4}
    sizes |= {"embed_dim": 32, "num_kv_heads": 2, "mlp_dim": 48, "attention": "chunked"}
    pattern = {"kinds": (WINDOW, FULL, NOPE), "pattern": (0, 1, 0, 2)}
    return DecoderConfig(**{**sizes, **SWITCHES, **pattern, **changes})


def decoder(**changes):
    config = config_of(**changes)
    return lambda rngs: Decoder(config, rngs=rngs)


@functools.cache
def expected(case="rows", **changes):
    batch = BATCHES[case]
    return train_for(decoder(**changes), devices=1, batch=batch, steps=STEPS).losses


BATCHES = {"rows": text_batch, "packed": packed_batch}
PIPELINE = {"zero": 3, "mesh": {"data": 2, "model": 2, "stage": 2}, "num_microbatches": 2}
PLANS = {
    "zero 3": {"zero": 3},
    "three axes": PIPELINE,
    "unequal stages": {"zero": 1, "mesh": {"stage": 2}, "partition": (3, 1)},
    "ulysses": {"zero": 3, "mesh": {"data": 4, "context": 2}, "context_parallel": "ulysses"},
    "allgather": {"zero": 3, "mesh": {"context": 4}, "context_parallel": "allgather"},
    "activations on the host": {"zero": 3, "offload": {"activations": "host"}},
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", BATCHES)
@pytest.mark.parametrize("name", PLANS)
def test_it_trains_as_on_one_device(name, case):
    """Windows, rotary bases and layers without positions, packed texts too."""
    options = {"persistence_threshold": 0, **PLANS[name]}
    found = train_for(decoder(), batch=BATCHES[case], steps=STEPS, **options)
    np.testing.assert_allclose(found.losses, expected(case), rtol=0, atol=TOLERANCE)
    assert expected(case)[0] - expected(case)[-1] > 0.02


@pytest.mark.thorough
@pytest.mark.parametrize("case", BATCHES)
def test_layers_stream_from_the_host(case):
    options = {"devices": 2, "zero": 3, "batch": BATCHES[case], "steps": 12}
    run, plain = both(decoder(remat="full"), {}, **options)
    assert_equal(run, plain, TOLERANCE)


@pytest.mark.thorough
@pytest.mark.parametrize("changes", [{"remat": "full"}, {"remat": "attention"}, {"loss_chunk": 24}])
def test_so_it_does_with_other_settings(changes):
    found = train_for(decoder(**changes), zero=3, steps=STEPS, persistence_threshold=0)
    np.testing.assert_allclose(found.losses, expected(), rtol=0, atol=TOLERANCE)


@pytest.mark.thorough
def test_norms_of_all_heads_are_summed_over_the_model_axis():
    switches = {"query_key_norm": "all", "norm": NormConfig(), "norm_places": "post"}
    switches |= {"attention_softcap": None, "clip_qkv": 2.0, "residual_scale": 0.5}
    found = train_for(decoder(**switches), steps=STEPS, persistence_threshold=0, **PIPELINE)
    np.testing.assert_allclose(found.losses, expected(**switches), rtol=0, atol=TOLERANCE)
    leaf = found.plan.placement.leaves["blocks/attention/query_heads_norm/scale"]
    assert "model" in str(leaf.stored_spec)


@pytest.mark.thorough
def test_sinks_are_split_with_the_heads():
    switches = {"attention_sinks": True, "attention_softcap": None}
    found = train_for(decoder(**switches), steps=STEPS, persistence_threshold=0, **PIPELINE)
    np.testing.assert_allclose(found.losses, expected(**switches), rtol=0, atol=TOLERANCE)
    assert "model" in str(found.plan.placement.leaves["blocks/attention/sinks"].stored_spec)


@pytest.mark.slow  # adapters and 8-bit products: two more programs each
@pytest.mark.parametrize("what", ["lora", "fp8"])
def test_adapters_and_8_bit_products_work_with_it(what):
    """In 8 bits a sum in another order may round to the next number, an eighth away, and the losses
    part from there on: seen after two updates, by 4.4e-4."""
    make = decoder(matmul_dtype="fp8") if what == "fp8" else decoder()
    options = {"steps": STEPS, "persistence_threshold": 0}
    if what == "lora":
        make = add_lora(make, LoraConfig(rank=2))
        options["freeze"] = LoraConfig(rank=2).freeze
    one = train_for(make, devices=1, **options)
    found = train_for(make, zero=3, **options)
    np.testing.assert_allclose(found.losses[:2], one.losses[:2], rtol=0, atol=TOLERANCE)
    tolerance = 1e-3 if what == "fp8" else TOLERANCE
    np.testing.assert_allclose(found.losses, one.losses, rtol=0, atol=tolerance)
    assert one.losses[-1] < one.losses[0]


SLOW_FAMILIES = ("qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "olmo2", "smollm3")


def ids_of_families(index):
    batch = text_batch(index)
    return {name: values % 20 for name, values in batch.items()}


@pytest.mark.slow  # three programs of each family: 40 s
@pytest.mark.parametrize("case", [*SLOW_FAMILIES, "phi3_longrope_long", "olmo3", "cohere2"])
def test_every_family_trains_alike_in_all_plans(case, tmp_path):
    model = from_hugging_face(write_folder(tmp_path / case, case), attention="chunked")
    run = functools.partial(train_for, model, batch=ids_of_families, steps=STEPS)
    one = run(zero=0)
    for options in ({"zero": 3}, {**PIPELINE, "partition": "flops"}):
        found = run(persistence_threshold=0, **options)
        np.testing.assert_allclose(found.losses, one.losses, rtol=0, atol=TOLERANCE)
    assert one.losses[-1] < one.losses[0] - 0.02


# --- the program ----------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["three axes", "ulysses"])
def test_no_collective_waits_in_a_branch(name):
    plan = plan_for(decoder(), persistence_threshold=0, **PLANS[name])
    lowered = build_step(plan).lower(plan.abstract_state, plan.abstract_batch)
    program = read_program(lowered.compile().as_text())
    assert any(
        instruction.opcode == "conditional"
        for computation in program.computations.values()
        for instruction in computation.instructions
    )
    assert find_in_branches(program, plan.mesh.size) == []


def test_parameters_are_gathered_layer_by_layer():
    plan = plan_for(decoder(), zero=3, persistence_threshold=0)
    leaves = plan.placement.leaves.values()
    stacked = [leaf for leaf in leaves if leaf.name.startswith("blocks/")]
    assert stacked
    for leaf in stacked:
        assert (leaf.access, leaf.num_slices) == (Access.GATHER_ON_USE, 4), leaf.name


def test_the_plan_says_which_kinds_there_are():
    said = plan_for(decoder()).reasons
    kinds = [reason for reason in said if " of 4 layers" in reason]
    assert [reason for reason in kinds if "rotary" in reason] == [
        "2 of 4 layers: a window of 3, rotary base 100",
        "1 of 4 layers: all tokens before, rotary base 1000, linear",
        "1 of 4 layers: all tokens before, no rotary positions",
    ]
    calls = [reason for reason in kinds if reason.startswith("attention chunked")]
    assert [reason.rpartition("; ")[2] for reason in calls] == [
        "2 of 4 layers, a window of 3",
        "2 of 4 layers, all tokens",
    ]
    one = plan_for(decoder(kinds=(WINDOW,), pattern=None)).reasons
    assert not [reason for reason in one if "layers" in reason and "window" in reason]


def test_a_ring_is_refused_before_anything_compiles():
    mesh = {"data": 2, "context": 4}
    with pytest.raises(ValueError, match="'ring' supports only one window .*use .*'allgather'"):
        plan_for(decoder(), mesh=mesh, context_parallel="ring")
    with pytest.raises(ValueError, match="attention sinks is not supported"):
        plan_for(decoder(attention_sinks=True), mesh=mesh)


# --- a cache --------------------------------------------------------------------------------------


def extended(model, tokens, cuts, length):
    """Logits of tokens that are given in pieces, and then one by one."""
    extend = nnx.jit(type(model).extend)
    cache, found, start = model.init_cache(tokens.shape[0], length), [], 0
    for end in cuts:
        hidden, cache = extend(model, tokens[:, start:end], cache, jnp.int32(start))
        found.append(model.head(hidden))
        start = end
    return jnp.concatenate(found, axis=1)


@pytest.mark.thorough
@pytest.mark.parametrize("changes", [{}, {"attention_sinks": True, "attention": "xla"}])
def test_tokens_after_a_cache_see_what_they_see_in_a_whole_pass(changes):
    model = decoder(**changes)(nnx.Rngs(0))
    tokens = jnp.asarray(text_batch(0)["tokens"][:2])
    whole = jax.jit(lambda tokens: model(tokens))(tokens)
    found = extended(model, tokens, [5, *range(6, 17)], 16)
    np.testing.assert_allclose(found, whole, rtol=0, atol=2e-6)


@pytest.mark.slow  # compiles two passes of each model: 3 s
@pytest.mark.parametrize("case", FAMILIES)
def test_so_they_do_in_every_family(case, tmp_path):
    model = from_hugging_face(write_folder(tmp_path / case, case)).to_model()
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 20, (2, 24)), jnp.int32)
    whole = jax.jit(lambda tokens: model(tokens))(tokens)
    found = extended(model, tokens, [9, *range(10, 25)], 24)
    size = np.abs(whole).max()
    np.testing.assert_allclose(found, whole, rtol=0, atol=3e-6 * size)


# --- packed texts ---------------------------------------------------------------------------------


@pytest.mark.thorough
def test_texts_of_a_row_are_computed_as_if_alone():
    model = decoder()(nnx.Rngs(0))
    tokens = jnp.asarray(text_batch(0)["tokens"][:1])
    segments = jnp.asarray([[0] * 7 + [1] * 9])
    run = jax.jit(lambda tokens, segments: model.hidden(tokens, segments))
    together = run(tokens, segments)
    alone = jax.jit(lambda tokens: model.hidden(tokens))
    parts = [alone(tokens[:, :7]), alone(tokens[:, 7:])]
    np.testing.assert_allclose(together, jnp.concatenate(parts, axis=1), rtol=0, atol=2e-6)


# --- parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_part_of_the_features_turns_in_pairs(interleaved):
    """As complex numbers, each pair by its own angle; what a layer without positions gets stays."""
    rope = Rope(theta=50.0, fraction=0.75, interleaved=interleaved)
    x = np.random.default_rng(0).normal(size=(1, 5, 2, 8)).astype(np.float32)
    turning = x[..., :6]
    pairs = (
        turning.reshape(1, 5, 2, 3, 2)
        if interleaved
        else np.stack([turning[..., :3], turning[..., 3:]], axis=-1)
    )
    angles = np.arange(5)[:, None] * 50.0 ** (-np.arange(3) / 3)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)[None, :, None]
    parts = np.stack([turned.real, turned.imag], axis=-1)
    wanted = (
        parts.reshape(turning.shape)
        if interleaved
        else np.concatenate([parts[..., 0], parts[..., 1]], axis=-1)
    )
    for kind, expected in ((0, np.concatenate([wanted, x[..., 6:]], -1)), (1, x)):
        found = rotate_positions(jnp.asarray(x), jnp.arange(5), (rope, None), kind=jnp.int32(kind))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(found, x)  # cosine 1 and sine 0 change no bit


@pytest.mark.parametrize(
    "norm",
    [
        NormConfig(eps=0.1, scale_offset=1.0),
        NormConfig(kind="layer", eps=0.1, has_bias=True),
        NormConfig(kind="layer", eps=0.1, has_scale=False),
    ],
)
def test_norms_are_those_of_the_formula(norm):
    random = np.random.default_rng(1)
    module = Norm((2, 6), norm)
    x, scale, bias = (random.normal(size=s) for s in ((3, 2, 6), (2, 6), (2, 6)))
    wide = x - x.mean((1, 2), keepdims=True) if norm.kind == "layer" else x
    wide = wide / np.sqrt((wide**2).mean((1, 2), keepdims=True) + 0.1)
    if norm.has_scale:
        module.scale[...] = jnp.asarray(scale, jnp.float32)
        wide = wide * (scale + norm.scale_offset)
    if norm.has_bias:
        module.bias[...] = jnp.asarray(bias, jnp.float32)
        wide = wide + bias
    found = module(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(found, wide, rtol=0, atol=2e-6)


def test_a_scale_is_rounded_after_the_features_where_a_family_has_it_so():
    x = jnp.asarray(np.random.default_rng(2).normal(size=(4, 64)), jnp.bfloat16)
    after, before = (Norm((64,), NormConfig(rounds_first=first)) for first in (False, True))
    scale = jnp.linspace(0.5, 1.5, 64)
    after.scale[...], before.scale[...] = scale, scale
    plain = Norm((64,), NormConfig(has_scale=False))(x).astype(jnp.float32)
    np.testing.assert_array_equal(before(x), (plain * scale[None]).astype(jnp.bfloat16))
    assert (before(x) != after(x)).any()


@pytest.mark.thorough
def test_a_loss_in_chunks_has_the_scale_and_the_cap_of_the_logits():
    batch = {name: jnp.asarray(x[:2]) for name, x in text_batch(0).items()}
    switches = {"logit_scale": 0.3, "logit_softcap": 1.5, "tie_embeddings": True}
    switches |= {"num_layers": 3, "pattern": (0, 1, 2)}
    losses = [
        jax.jit(decoder(loss_chunk=chunk, **switches)(nnx.Rngs(0)).loss)(batch)[0]
        for chunk in (None, 5)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-6)


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_settings_come_back_from_a_record(tmp_path):
    made = config_of()
    assert (
        config_values.config_of(DecoderConfig, json.loads(json.dumps(dataclasses.asdict(made))))
        == made
    )
    mesh = make_mesh(None, devices=jax.devices()[:1])
    trainer = zerojax.train(decoder(), mesh, [text_batch(0)], steps=1, checkpoint=tmp_path / "run")
    loaded = load_run(tmp_path / "run")
    assert loaded.model.config == made
    tokens = text_batch(1)["tokens"][:2]
    params = trainer.state["params"]
    assert set(params) == {
        "/".join(map(str, path))
        for path, _ in nnx.to_flat_state(nnx.state(loaded.model, nnx.Param))
    }
    assert np.isfinite(loaded.model(jnp.asarray(tokens))).all()


def test_the_number_of_parameters_is_that_of_the_arrays():
    for changes in (
        {},
        {"norm_places": "parallel", "query_key_norm": "none", "gated": False, "mlp_bias": True},
        {"norm_places": "post", "query_key_norm": "all", "qkv_bias": True, "output_bias": True},
        {"norm": NormConfig(kind="layer", has_bias=True), "attention_sinks": True},
        {"norm": NormConfig(kind="layer", has_scale=False), "learned_positions": True},
        {"tie_embeddings": True, "head_dim": 6},
    ):
        state = jax.eval_shape(lambda changes=changes: nnx.state(decoder(**changes)(nnx.Rngs(0))))
        counted = sum(x.size for x in jax.tree.leaves(state))
        assert config_of(**changes).num_parameters == counted, changes


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pattern": (0, 1)}, "pattern has 2 entries, .* num_layers=4"),
        ({"pattern": (0, 1, 0, 1)}, r"pattern .* \[0, 1\], but kinds has 3"),
        ({"pattern": None}, "kinds has 3 entries .* set pattern"),
        ({"kinds": (), "pattern": None}, "at least one kind"),
        ({"norm_places": "around"}, "norm_places='around' is unknown; use one of pre"),
        ({"query_key_norm": "one"}, "query_key_norm='one' is unknown"),
        ({"activation": "swish"}, "activation='swish' is unknown; use one of silu"),
        ({"logit_softcap": 0.0}, "logit_softcap=0.0 must be above 0"),
        ({"kinds": (LayerKind(window=0),), "pattern": None}, "window=0 must be a whole number"),
        ({"head_dim": 5}, "head_dim=5 .* rotates 5 features"),
        (
            {"kinds": (WINDOW, LayerKind(rope=Rope(fraction=0.5)), NOPE)},
            "fraction and interleaved .* same values",
        ),
    ],
)
def test_switches_that_cannot_be_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        config_of(**changes)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: NormConfig(kind="batch"), "norm kind='batch' is unknown"),
        (lambda: NormConfig(eps=0.0), "norm eps=0.0 must be above 0"),
        (lambda: Rope(fraction=0.0), "fraction=0.0 must be above 0"),
        (lambda: Rope(theta=1.0), "rope_theta=1.0 must be above 1"),
    ],
)
def test_parts_of_switches_are_checked(make, words):
    with pytest.raises(ValueError, match=words):
        make()
