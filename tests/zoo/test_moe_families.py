"""Mixtral, OLMoE, Qwen3-MoE: transformers' logits and gradients, the same files, strict keys."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zerojax
from tests.support.hugging_face_weights import probes, text_of
from tests.support.moe_folders import MIXTURES, tensors_of, write_mixture, written_config
from tests.zoo.test_families import in_their_names, minimal
from tests.zoo.test_hugging_face import plan_for
from tests.zoo.test_hugging_face_export import assert_same_bits, read_all, trainer_of
from zerojax.config.expert_settings import MoEConfig
from zerojax.models.losses import split_result
from zerojax.tracing import trees
from zerojax.training.hugging_face_export import to_hugging_face
from zerojax.zoo.hugging_face import ARCHITECTURES, UnsupportedError, from_hugging_face
from zerojax.zoo.hugging_face.writing import Description, describe_model
from zerojax.zoo.llama import Llama, LlamaConfig


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    root = tmp_path_factory.mktemp("mixtures")
    return functools.cache(lambda case: write_mixture(root / case, case))


def tokens_of(case):
    seen = MIXTURES[case]
    return jnp.asarray(text_of(seen["length"], seen["config"]["vocab_size"]), jnp.int32)


@functools.partial(jax.jit, static_argnums=0)
def run(graphdef, state, tokens):
    """(logits, loss as it is trained, its own numbers, gradients)."""

    def loss(state):
        model = nnx.merge(graphdef, state)
        counts = jnp.ones(tokens.shape).at[:, -1].set(0)
        batch = {"tokens": tokens, "targets": jnp.roll(tokens, -1, 1), "weights": counts}
        total, weight, metrics = model.loss(batch)
        return total / weight, (model(tokens), metrics)

    (value, (logits, metrics)), gradients = jax.value_and_grad(loss, has_aux=True)(state)
    return logits, value, metrics, gradients


@pytest.mark.thorough
@pytest.mark.parametrize("case", MIXTURES)
def test_logits_and_gradients_are_those_of_transformers(case, folder_of):
    """Both sides compute in float32, with sums in other orders; see tests/zoo/test_families.py.

    Where config.json asks for router logits, the balance of experts is in the loss and in the
    gradients.
    """
    seen = MIXTURES[case]
    pretrained = from_hugging_face(folder_of(case))
    logits, loss, metrics, gradients = run(*nnx.split(pretrained.to_model()), tokens_of(case))
    wanted = np.asarray(seen["last_logits"])
    size = max(1.0, np.abs(wanted).max())
    assert np.abs(np.asarray(logits)[:, -3:] - wanted).max() <= 1e-5 * size
    assert abs(float(loss) - seen["loss"]) <= 1e-5 * seen["loss"]
    assert abs(float(metrics["moe_balance"]) - seen["balance"]) <= 1e-5 * seen["balance"]
    flat = {trees.path_name(path): x for path, x in nnx.to_flat_state(gradients)}
    arrays = {name: np.asarray(x.get_raw_value()) for name, x in flat.items()}
    found = in_their_names(pretrained, arrays)
    assert found.keys() == seen["gradients"].keys()
    largest = max(values[0] for values in seen["gradients"].values())
    for name, values in seen["gradients"].items():
        _, *products = np.subtract(probes(name, found[name]), values)
        error = np.sqrt(np.mean(np.square(products)))
        assert error <= 1e-5 * max(values[0], largest / 1000), name


@pytest.mark.thorough
@pytest.mark.parametrize("case", [case for case in MIXTURES if "balance" in case])
def test_evaluation_has_the_cross_entropy_alone(case, folder_of):
    seen, tokens = MIXTURES[case], tokens_of(case)
    model = from_hugging_face(folder_of(case)).to_model()
    counts = jnp.ones(tokens.shape).at[:, -1].set(0)
    batch = {"tokens": tokens, "targets": jnp.roll(tokens, -1, 1), "weights": counts}
    model.eval()
    parts = split_result(model.loss(batch))
    assert not parts.metrics
    assert abs(float(parts.loss / parts.weight) - seen["cross_entropy"]) <= 1e-5 * seen["loss"]


@pytest.mark.thorough
@pytest.mark.parametrize("case", MIXTURES)
def test_cached_tokens_go_through_the_same_experts(case, folder_of):
    model, tokens = from_hugging_face(folder_of(case)).to_model(), tokens_of(case)
    whole = model(tokens)
    cache, found = model.init_cache(tokens.shape[0], tokens.shape[1]), []
    for first, last in ((0, 9), (9, 10), (10, tokens.shape[1])):
        x, cache = model.extend(tokens[:, first:last], cache, jnp.int32(first))
        found.append(model.head(x))
    np.testing.assert_allclose(jnp.concatenate(found, 1), whole, rtol=0, atol=2e-5)


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", MIXTURES)
def test_round_trip_byte_for_byte(case, folder_of, tmp_path):
    """From shards at stage 3, expert by expert, and what is written is read as the same model."""
    pretrained = from_hugging_face(folder_of(case))
    trainer = trainer_of(plan_for(pretrained, devices=2, zero=3))
    to_hugging_face(trainer, tmp_path / "ours")
    assert_same_bits(read_all(tmp_path / "ours"), tensors_of(case))
    assert from_hugging_face(tmp_path / "ours").config == pretrained.config


@pytest.mark.parametrize("case", MIXTURES)
def test_transformers_computes_the_same_from_what_is_written(case):
    """The oracle has made a model of this config.json, and its logits were the same."""
    assert written_config(case) == MIXTURES[case]["written"]


@pytest.mark.parametrize("case", MIXTURES)
def test_settings_come_back(case):
    config = MIXTURES[case]["config"]
    row = ARCHITECTURES[config["model_type"]]
    ours = row.config_class(**row.read_config(config))
    described = Description(row=row, config=ours, kept=config)
    assert row.config_class(**row.read_config(described.config_json())) == ours
    assert Description.from_dict(json.loads(json.dumps(described.to_dict()))).config == ours


def test_of_an_array_of_experts_only_the_bytes_of_a_box_are_read(folder_of):
    """One expert of one layer, half of its width; and a box over layers and experts."""
    pretrained = from_hugging_face(folder_of("olmoe"))
    array = pretrained.stored["blocks/mlp/experts/gate"]
    assert array.shape == (2, 6, 16, 24)
    whole = array.read([(0, size) for size in array.shape])
    theirs = tensors_of("olmoe")["model.layers.1.mlp.experts.4.gate_proj.weight"]
    np.testing.assert_array_equal(whole[1, 4], theirs.T)
    before = pretrained.folder.bytes_read
    part = array.read([(1, 2), (4, 5), (0, 16), (12, 24)])
    assert pretrained.folder.bytes_read - before == 16 * 12 * 4
    np.testing.assert_array_equal(part, whole[1:2, 4:5, :, 12:])
    np.testing.assert_array_equal(array.read([(0, 2), (1, 3), (3, 5), (0, 24)]), whole[:, 1:3, 3:5])
    assert array.tensors[7] == "model.layers.1.mlp.experts.1.gate_proj.weight"


@pytest.mark.parametrize("zero", [0, 3])
def test_a_new_run_reads_each_byte_of_its_shards_once(zero, folder_of):
    pretrained = from_hugging_face(folder_of("mixtral"))
    trainer_of(plan_for(pretrained, devices=2, zero=zero))
    assert pretrained.folder.bytes_read == sum(x.nbytes for x in tensors_of("mixtral").values())


# --- keys -----------------------------------------------------------------------------------------

PUBLISHED = {
    "mixtral": {
        "hidden_act": "silu",
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
    },
    "olmoe": {
        "attention_bias": False,
        "clip_qkv": None,
        "norm_topk_prob": False,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "output_router_logits": False,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01,
    },
    "qwen3_moe": {
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "output_router_logits": False,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "use_sliding_window": False,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_keys_of_published_models_are_known(name):
    row = ARCHITECTURES[name]
    sizes = row.config_class(**row.read_config({**minimal(name), **PUBLISHED[name]}))
    assert sizes.moe.renormalize == (name != "olmoe")
    assert sizes.moe.num_experts == {"mixtral": 8, "olmoe": 64, "qwen3_moe": 128}[name]
    assert sizes.moe.balance_weight == 0


REFUSED = {
    "noise": ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
    "layers without experts": ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
    "each second layer": ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
    "two numbers": (
        "qwen3_moe",
        {"num_experts": 8, "num_local_experts": 4},
        "two names of the same number",
    ),
    "heads apart": ("olmoe", {"head_dim": 4}, "head_dim=4"),
    "shared experts": ("qwen3_moe", {"shared_expert_intermediate_size": 8}, "shared_expert_inter"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_values_that_would_make_another_model_are_refused(what):
    name, changes, words = REFUSED[what]
    with pytest.raises(UnsupportedError, match=words):
        ARCHITECTURES[name].read_config({**minimal(name), **changes})


def test_a_llama_with_experts_is_written_as_a_mixtral():
    sizes = {"vocab_size": 20, "max_seq_len": 8, "num_layers": 2, "num_heads": 2, "embed_dim": 16}
    moe = MoEConfig(num_experts=4, expert_dim=12, z_weight=0.1)
    config = LlamaConfig(**sizes, moe=moe)
    described = describe_model(zerojax.models.as_model(lambda rngs: Llama(config, rngs=rngs)))
    assert described.config_json()["architectures"] == ["MixtralForCausalLM"]
    row = ARCHITECTURES["mixtral"]
    again = row.config_class(**row.read_config(described.config_json()))
    assert dataclasses.replace(again.moe, **TRAINED) == dataclasses.replace(moe, **TRAINED)


TRAINED = {"balance": "layers", "balance_weight": 0.0, "z_weight": 0.0}


@pytest.mark.parametrize(
    "change",
    [
        {"renormalize": False},
        {"scores": "sigmoid"},
        {"scale": 2.0},
        {"shared_dim": 8},
        {"num_groups": 2},
    ],
)
def test_switches_that_mixtral_lacks_are_not_written(change):
    sizes = {"vocab_size": 20, "max_seq_len": 8, "num_layers": 2, "num_heads": 2, "embed_dim": 16}
    config = LlamaConfig(**sizes, moe=MoEConfig(num_experts=4, expert_dim=12, **change))
    with pytest.raises(UnsupportedError, match=f"moe=.*{next(iter(change))}"):
        describe_model(zerojax.models.as_model(lambda rngs: Llama(config, rngs=rngs)))


def test_biases_that_choose_experts_are_not_written():
    sizes = {"vocab_size": 20, "max_seq_len": 8, "num_layers": 2, "num_heads": 2, "embed_dim": 16}
    moe = MoEConfig(num_experts=4, expert_dim=12, bias_rate=0.0)
    config = LlamaConfig(**sizes, moe=moe)
    with pytest.raises(UnsupportedError, match=r"moe.bias_rate=0.0 .*MixtralForCausalLM has no"):
        describe_model(zerojax.models.as_model(lambda rngs: Llama(config, rngs=rngs)))


@pytest.mark.thorough
def test_a_folder_is_trained_with_biases_that_it_has_not(folder_of, tmp_path):
    """They begin at 0 and are not trained; without them the model would choose other experts."""
    moe = dataclasses.replace(from_hugging_face(folder_of("mixtral")).config.moe, bias_rate=0.01)
    pretrained = from_hugging_face(folder_of("mixtral"), moe=moe)
    tokens = np.tile(np.asarray(tokens_of("mixtral")), (4, 1))
    batches = [{"tokens": tokens, "targets": np.roll(tokens, -1, 1)}] * 3
    options = {"optimizer": zerojax.adamw(1e-3), "run_dir": None}
    with zerojax.train(pretrained, {"zero": 3}, batches, steps=3, **options) as trainer:
        bias = np.asarray(trainer.state["extras"]["blocks/mlp/router/bias"])
        assert 0 < np.abs(bias).max() <= 0.0301
        with pytest.raises(UnsupportedError, match="moe.bias_rate=0.01"):
            to_hugging_face(trainer, tmp_path / "exported")


@pytest.mark.thorough
def test_adapters_on_attention_leave_experts_as_they_are(folder_of, tmp_path):
    """Trained and merged: attention's tensors change, and no byte of an expert or a router."""
    lora = zerojax.LoraConfig(rank=2, targets=("attention/",))
    pretrained = zerojax.add_lora(from_hugging_face(folder_of("mixtral")), lora)
    tokens = np.tile(np.asarray(tokens_of("mixtral")), (4, 1))
    batches = [{"tokens": tokens, "targets": np.roll(tokens, -1, 1)}] * 2
    options = {"optimizer": zerojax.adamw(0.1), "freeze": lora.freeze, "run_dir": None}
    with zerojax.train(pretrained, {"zero": 3}, batches, steps=2, **options) as trainer:
        to_hugging_face(trainer, tmp_path / "merged")
    before, after = tensors_of("mixtral"), read_all(tmp_path / "merged")
    changed = {name for name, x in before.items() if not np.array_equal(x, after[name])}
    assert changed
    assert all("self_attn" in name for name in changed)


def test_adapters_on_experts_are_refused(folder_of):
    lora = zerojax.LoraConfig(rank=2)
    with pytest.raises(ValueError, match=r"matches blocks/mlp.*targets=\('attention/',\)"):
        zerojax.add_lora(from_hugging_face(folder_of("mixtral")), lora)
