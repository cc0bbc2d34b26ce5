"""`zerojax.zoo.MoE` and decoders of it: arithmetic, balance, equality with one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zerojax
from tests.support.small_models import VOCAB
from tests.support.trajectories import ROWS, TOLERANCE, plan_for, text_batch, train_for
from zerojax.cli import main
from zerojax.config import ConfigError, ModelConfig, MoEConfig
from zerojax.models.losses import split_result
from zerojax.plan.counts import model_flops
from zerojax.zoo import MoE, Routing, balance_losses
from zerojax.zoo import moe as moe_module
from zerojax.zoo.decoder_config import DecoderConfig
from zerojax.zoo.llama import Llama, LlamaConfig

EXPERTS = MoEConfig(num_experts=8, balance_weight=0.1, z_weight=0.01)
SIZES = {"num_layers": 2, "num_heads": 4, "embed_dim": 32, "max_seq_len": 16, "mlp_dim": 24}


def llama(moe=EXPERTS, **changes):
    config = LlamaConfig(vocab_size=VOCAB, num_kv_heads=2, moe=moe, **{**SIZES, **changes})
    return lambda rngs: Llama(config, rngs=rngs)


# --- arithmetic -----------------------------------------------------------------------------------


def silu(x):
    return x / (1 + np.exp(-x))


def mlp(x, gate, up, down):
    return (silu(x @ gate) * (x @ up)) @ down


def by_hand(module, x):
    """One token after the other, in float64."""
    state = {"/".join(map(str, k)): np.asarray(v[...], np.float64) for k, v in params_of(module)}
    config, out = module.config, np.zeros_like(x)
    for token, row in enumerate(x):
        logits = row @ state["router/kernel"]
        if config.scores == "softmax":
            scores = np.exp(logits) / np.exp(logits).sum()
        else:
            scores = 1 / (1 + np.exp(-logits))
        biased = scores + (0 if module.router.bias is None else np.asarray(module.router.bias[...]))
        groups = biased.reshape(config.num_groups, -1)
        best = np.argsort(-np.sort(groups, -1)[:, -2:].sum(-1))[: config.groups_per_token]
        there = [i for i in np.argsort(-biased) if i // groups.shape[1] in best]
        chosen = np.array(there[: config.experts_per_token])
        total = scores[chosen].sum() if config.renormalize else 1.0
        for expert in chosen:
            kernels = (state[f"experts/{name}"][expert] for name in ("gate", "up", "down"))
            out[token] += config.scale * scores[expert] / total * mlp(row, *kernels)
        if config.shared_dim:
            kernels = (state[f"shared/{name}/kernel"] for name in ("gate", "up", "down"))
            out[token] += mlp(row, *kernels)
    return out


def params_of(module):
    return nnx.to_flat_state(nnx.state(module, nnx.Param))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"renormalize": False, "experts_per_token": 1},
        {"scores": "sigmoid", "scale": 2.5, "experts_per_token": 3},
        {"scores": "sigmoid", "renormalize": False, "shared_dim": 6},
        {"shared_dim": 10, "experts_per_token": 5},
        {"num_experts": 12, "num_groups": 4, "groups_per_token": 2, "experts_per_token": 3},
        {"num_experts": 6, "num_groups": 6, "groups_per_token": 3, "scores": "sigmoid"},
    ],
)
def test_each_token_goes_through_its_experts(changes):
    """Against a loop over tokens in float64; rounding of float32 alone is left."""
    config = MoEConfig(**{"num_experts": 5, "expert_dim": 7, **changes})
    module = MoE(12, config, rngs=nnx.Rngs(3), stddev=0.5, output_stddev=0.5)
    x = np.random.default_rng(0).normal(size=(2, 9, 12))
    y, routing = module(jnp.asarray(x, jnp.float32))
    wanted = by_hand(module, x.reshape(18, 12)).reshape(x.shape)
    np.testing.assert_allclose(y, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())
    assert routing.tokens == 18
    assert routing.chosen.sum() == 18 * config.experts_per_token
    np.testing.assert_allclose(routing.scores.sum(), 18, rtol=1e-6)


@pytest.mark.thorough
def test_the_router_is_float32_whatever_the_compute_dtype():
    """Of bfloat16 tokens and weights the choice is that of float64, where bfloat16's differs."""
    config = MoEConfig(num_experts=64, experts_per_token=2, expert_dim=4)
    module = MoE(32, config, rngs=nnx.Rngs(0), stddev=0.02)
    graphdef, state = nnx.split(module)
    narrow = nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(jnp.bfloat16), state))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(500, 32)), jnp.bfloat16)
    gates, ids, _ = narrow.router(x)
    kernel = narrow.router.kernel[...]
    exact = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    wanted = np.argsort(-exact, -1)[:, :2]
    assert gates.dtype == jnp.float32
    assert narrow(x)[0].dtype == jnp.bfloat16
    np.testing.assert_array_equal(ids, wanted)
    in_bfloat16 = jax.lax.top_k(jax.nn.softmax(x @ kernel), 2)[1]
    assert (np.asarray(in_bfloat16) != wanted).mean() > 0.01


# --- balance --------------------------------------------------------------------------------------


def routing_of(logits, ids, counts):
    """By definition: [layers, tokens, E] logits and [layers, tokens, k] choices, in float64."""
    scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    hot = np.eye(logits.shape[-1])[ids].sum(2)
    weights = counts[None, :, None]
    squares = (np.log(np.exp(logits).sum(-1)) ** 2 * counts[None]).sum(1)
    arrays = (hot * weights).sum(1), (scores * weights).sum(1), squares, counts.sum(), np.ones(3)
    return Routing(*(jnp.asarray(x, jnp.float32) for x in arrays))


@pytest.mark.thorough
def test_balance_is_as_it_is_defined():
    """Switch's form for each layer, transformers' over all layers; z as a mean over tokens."""
    random = np.random.default_rng(0)
    logits = random.normal(size=(3, 20, 6)) * 2
    ids = np.argsort(-logits, -1)[..., :2]
    counts = (random.random(20) < 0.7).astype(float)
    routing = routing_of(logits, ids, counts)
    scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    kept = counts > 0
    f = np.stack([np.bincount(x[kept].ravel(), minlength=6) / (2 * kept.sum()) for x in ids])
    p = scores[:, kept].mean(1)
    layers = 6 * (f * p).sum()
    z = (np.log(np.exp(logits).sum(-1)) ** 2)[:, kept].mean(1).sum()
    config = MoEConfig(num_experts=6, balance_weight=0.5, z_weight=0.25)
    added, seen = balance_losses(routing, config)
    np.testing.assert_allclose(added, 0.5 * layers + 0.25 * z, rtol=1e-6)
    np.testing.assert_allclose(seen["moe_balance"], layers / 3, rtol=1e-6)
    np.testing.assert_allclose(seen["moe_fullest"], f.max() * 6, rtol=1e-6)
    assert seen["moe_dropped"] == 0  # reported without a capacity, too
    theirs = MoEConfig(num_experts=6, balance_weight=0.5, balance="hugging_face")
    added, seen = balance_losses(routing, theirs)
    np.testing.assert_allclose(added, 0.5 * 6 * 2 * (f.mean(0) * p.mean(0)).sum(), rtol=1e-6)


def test_equally_busy_experts_have_the_least_balance():
    even = jnp.full((2, 4), 5.0)
    routing = Routing(even * 2, even, jnp.zeros(2), jnp.float32(20), jnp.ones(2))
    for balance, least in (("layers", 1.0), ("hugging_face", 2.0)):
        config = MoEConfig(num_experts=4, balance=balance)
        seen = balance_losses(routing, config)[1]
        np.testing.assert_allclose([seen["moe_balance"], seen["moe_fullest"]], [least, 1.0])


@pytest.mark.thorough
def test_padding_is_not_counted():
    """Two rows with a text of 11 tokens each, and padding whose ids differ."""
    model = llama()(nnx.Rngs(0))

    def parts(fill):
        tokens = np.array(text_batch(0)["tokens"][:2])
        tokens[:, 11:] = fill
        segments = np.zeros(tokens.shape, np.int32)
        segments[:, 11:] = -1
        batch = {"tokens": tokens, "targets": np.roll(tokens, -1, 1), "segments": segments}
        return split_result(model.loss(jax.tree.map(jnp.asarray, batch)))

    first, second = parts(3), parts(40)
    assert first.metrics["moe_balance"] == second.metrics["moe_balance"]
    assert first.loss == second.loss


# --- one device and many --------------------------------------------------------------------------


@functools.cache
def on_one_device(moe=EXPERTS):
    return train_for(llama(moe), devices=1)


@functools.cache
def on_eight_devices(zero, model=1):
    return train_for(llama(), zero=zero, mesh={"model": model})


@pytest.mark.thorough
@pytest.mark.parametrize(("zero", "model"), [(0, 1), (1, 1), (2, 1), (3, 1), (2, 2)])
def test_trains_as_on_one_device(zero, model):
    one, many = on_one_device(), on_eight_devices(zero, model)
    assert one.losses[0] - one.losses[-1] > 0.05
    assert np.abs(many.losses - one.losses).max() <= TOLERANCE
    assert np.abs(many.norms - one.norms).max() <= TOLERANCE


@pytest.mark.thorough
def test_in_transformers_form_too():
    moe = MoEConfig(num_experts=8, balance="hugging_face", balance_weight=0.1, shared_dim=16)
    many = train_for(llama(moe), zero=3)
    assert np.abs(many.losses - on_one_device(moe).losses).max() <= TOLERANCE


@pytest.mark.thorough
def test_that_comparison_sees_means_of_each_device(monkeypatch):
    """A model without sums over the batch trains another objective, and the losses show it."""
    one = on_one_device()
    monkeypatch.setattr(moe_module, "batch_sum", lambda x: x)
    many = train_for(llama(), zero=0)
    assert np.abs(many.losses - one.losses).max() > 100 * TOLERANCE


def of_microbatches(shards, num_microbatches):
    """Batches whose rows one device takes in the order in which `shards` devices take them."""
    rows = np.arange(ROWS).reshape(shards, num_microbatches, -1).swapaxes(0, 1).ravel()
    return lambda index: {name: x[rows] for name, x in text_batch(index).items()}


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"zero": 2}, {"zero": 1, "mesh": {"stage": 2}}], ids=str)
def test_microbatches_are_balanced_one_by_one(options):
    """As on one device with the same microbatches; through a pipeline, too."""
    shards = 8 // options.get("mesh", {}).get("stage", 1)
    many = train_for(llama(), num_microbatches=4, **options)
    one = train_for(llama(), devices=1, num_microbatches=4, batch=of_microbatches(shards, 4))
    assert np.abs(many.losses - one.losses).max() <= TOLERANCE


@pytest.mark.thorough
def test_a_step_reports_the_balance():
    """The same numbers on 8 devices as on one."""
    one, many = on_one_device().first, on_eight_devices(2, 1).first
    assert 1 < float(one["moe_fullest"]) < 8
    for name in ("moe_balance", "moe_fullest"):
        np.testing.assert_allclose(float(many[name]), float(one[name]), rtol=1e-6)


# --- sizes and settings ---------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [0, 12])
def test_parameters_are_counted_all_and_active(shared):
    moe = MoEConfig(num_experts=8, experts_per_token=3, expert_dim=20, shared_dim=shared)
    config = LlamaConfig(vocab_size=VOCAB, **SIZES, moe=moe)
    model = Llama(config, rngs=nnx.Rngs(0))
    total = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert config.num_parameters == total
    idle = (8 - 3) * 3 * 32 * 20 * config.num_layers
    assert config.num_active_parameters == total - idle
    plain = LlamaConfig(vocab_size=VOCAB, **SIZES)
    assert plain.num_parameters == plain.num_active_parameters


def test_arithmetic_is_that_of_the_chosen_experts():
    """FLOPs of a plan: k experts with 1.25 times room, not all."""

    def flops(**changes):
        moe = MoEConfig(num_experts=32, expert_dim=24, **changes)
        made = plan_for(llama(moe), devices=1)
        return model_flops(made)

    per_expert = 2 * 3 * 32 * 24 * ROWS * 16 * 2 * 3  # layers, forward and backward
    one, three = (flops(experts_per_token=k) for k in (1, 3))
    assert 2 * per_expert <= three - one <= 1.3 * 2 * per_expert


REFUSED = {
    "more than there are": ({"num_experts": 2, "experts_per_token": 3}, "more than num_experts"),
    "no experts": ({"expert_dim": 8}, "num_experts is 0"),
    "groups that do not fit": ({"num_experts": 6, "num_groups": 4}, "does not divide"),
    "too many groups": ({"num_experts": 6, "num_groups": 2, "groups_per_token": 3}, "at most 2"),
    "groups too small": (
        {"num_experts": 6, "num_groups": 3, "experts_per_token": 3},
        "the 2 experts of groups_per_token=1",
    ),
    "no scale": ({"num_experts": 2, "scale": 0.0}, "0.0"),
    "negative weight": ({"num_experts": 2, "balance_weight": -1.0}, "-1.0"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("what", REFUSED)
def test_settings_that_cannot_be_are_refused(what):
    values, words = REFUSED[what]
    with pytest.raises(ConfigError, match=words):
        MoEConfig(**values)


@pytest.mark.parametrize("change", [{"mlp_chunk": 4}, {"matmul_dtype": "fp8"}, {"gated": False}])
def test_what_experts_do_not_have_is_refused(change):
    name = next(iter(change))
    with pytest.raises(ValueError, match=f"{name}=.* with moe.num_experts=8"):
        DecoderConfig(vocab_size=VOCAB, **SIZES, moe=EXPERTS, **change)


def test_a_mixture_needs_a_width():
    with pytest.raises(ValueError, match="width of its experts"):
        MoE(8, MoEConfig(num_experts=2), rngs=nnx.Rngs(0))


@pytest.mark.thorough
def test_adapters_are_for_attention_and_shared_experts():
    """Experts' kernels are one array for all; an adapter beside them is refused with a way out."""
    with pytest.raises(ValueError, match="experts.*targets"):
        zerojax.add_lora(llama(), zerojax.LoraConfig(rank=2))(nnx.Rngs(0))
    lora = zerojax.LoraConfig(rank=2, targets=("attention/",))
    many = train_for(zerojax.add_lora(llama(), lora), zero=3, freeze=lora.freeze, steps=2)
    assert np.isfinite(many.losses).all()


# --- run files ------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_run_file_trains_a_mixture(tmp_path, capsys):
    """By command: trained, evaluated, generated from, and exported as a Mixtral."""
    run, folder = str(tmp_path / "run"), str(tmp_path / "folder")
    sizes = ("num_layers=2", "embed_dim=32", "num_heads=4", "max_seq_len=16")
    moe = ("moe.num_experts=8", "moe.expert_dim=24", "name=llama")
    options = [
        *(f"model.{each}" for each in (*sizes, *moe)),
        *("data.seq_len=16", "global_batch_size=8", "steps=4", "eval_every=4", "eval_batches=1"),
        *("mesh.zero=3", "mesh.data=8", f"run_dir={run}", "log.every=1"),
    ]
    assert main(["train", *options]) == 0
    printed = capsys.readouterr().out
    assert "moe fullest" in printed
    assert "for each token)" in printed
    loaded = zerojax.load_run(run)
    assert loaded.plan.users_model.template.config.moe == MoEConfig(num_experts=8, expert_dim=24)
    assert len(loaded.generate("To be", 5, temperature=0)) > 5
    assert main(["checkpoint", "export", run, folder, "--format", "hugging_face"]) == 0
    exported = zerojax.from_hugging_face(folder)
    assert exported.row.model_type == "mixtral"
    tokens = jnp.asarray(text_batch(0)["tokens"][:2])
    np.testing.assert_allclose(
        exported.to_model()(tokens), loaded.to_model()(tokens), rtol=0, atol=1e-6
    )


def test_a_run_file_has_no_experts_for_gpt2():
    config = ModelConfig(name="gpt2", moe=MoEConfig(num_experts=4))
    with pytest.raises(ValueError, match=r"moe.num_experts=4.*model.name=llama"):
        zerojax.zoo.build_model(config, VOCAB)


# --- capacity -------------------------------------------------------------------------------------

CROWDED = MoEConfig(num_experts=8, balance_weight=0.1, capacity_factor=0.75)


def dropped_by_hand(ids, number, capacity):
    """bool like ids [rows, tokens, k]: token after token, what an expert has no place for."""
    dropped = np.zeros(ids.shape, bool)
    for row in range(ids.shape[0]):
        taken = np.zeros(number, int)
        for token in range(ids.shape[1]):
            chosen = ids[row, token]
            dropped[row, token] = taken[chosen] >= capacity
            taken[chosen] += 1
    return dropped


@pytest.mark.thorough
def test_tokens_go_without_experts_that_are_full():
    """Against the mixture without a capacity, where the gates of what is dropped are 0."""
    config = MoEConfig(num_experts=5, expert_dim=7, capacity_factor=0.8)
    module = MoE(12, config, rngs=nnx.Rngs(3), stddev=0.5, output_stddev=0.5)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 20, 12)), jnp.float32)
    gates, ids, _ = module.router(x)
    dropped = dropped_by_hand(np.asarray(ids), 5, capacity=7)  # ceil(0.8 * 20 * 2 / 5)
    assert 5 < dropped.sum() < 60
    y, routing = module(x)
    assert routing.dropped == dropped.sum()
    assert routing.rounds == 1
    wanted = module.experts(x, jnp.where(dropped, 0, gates), ids)
    np.testing.assert_allclose(y, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())

    def loss(x, gates, keep):
        given = gates if keep is None else jnp.where(keep, gates, 0)
        out = module.experts(x, given if keep is None else gates, ids, keep=keep)
        return jnp.sum(jnp.sin(out))

    keep = jnp.asarray(~dropped)
    found = jax.grad(loss, (0, 1))(x, gates, keep)
    wanted = jax.grad(loss, (0, 1))(x, jnp.where(keep, gates, 0), None)
    np.testing.assert_allclose(found[0], wanted[0], atol=2e-6 * np.abs(wanted[0]).max())
    np.testing.assert_allclose(
        found[1], jnp.where(keep, wanted[1], 0), atol=2e-6 * np.abs(wanted[1]).max()
    )
    module.eval()
    np.testing.assert_allclose(module(x)[0], module.experts(x, gates, ids), rtol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 2, "expert": 4}], ids=str)
def test_what_is_dropped_does_not_depend_on_devices(mesh):
    model, options = llama(CROWDED), {"zero": 2, "persistence_threshold": 1, "steps": 3}
    one = train_for(model, devices=1, **options)
    several = train_for(model, mesh=mesh, **options)
    dropped, of_one = (float(run.first["moe_dropped"]) for run in (several, one))
    assert 0.05 < dropped < 0.9
    np.testing.assert_allclose(dropped, of_one, rtol=1e-6)
    np.testing.assert_allclose(several.losses, one.losses, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(several.norms, one.norms, rtol=TOLERANCE)


def test_a_split_sequence_has_no_capacity():
    with pytest.raises(
        ValueError, match=r"context=2 .* moe.capacity_factor=0.75 needs whole sequences"
    ):
        plan_for(llama(CROWDED), mesh={"data": 4, "context": 2}, zero=1)
    with pytest.raises(ConfigError, match="capacity_factor: 0.0 must be above 0"):
        MoEConfig(num_experts=8, capacity_factor=0)
