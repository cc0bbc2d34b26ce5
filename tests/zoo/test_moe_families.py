"""Mixtral, OLMoE, Qwen3-MoE beside what tests/zoo/test_families.py shows of every family."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from tests.support.hugging_face_folders import MIXTURES, tensors_of, write_folder
from tests.zoo.test_families import tokens_of
from tests.zoo.test_hugging_face import plan_for
from tests.zoo.test_hugging_face_export import read_all, trainer_of
from zerojax.config.expert_settings import MoEConfig
from zerojax.models.losses import split_result
from zerojax.training.hugging_face_export import to_hugging_face
from zerojax.zoo.hugging_face import ARCHITECTURES, UnsupportedError, from_hugging_face
from zerojax.zoo.hugging_face.writing import describe_model
from zerojax.zoo.llama import Llama, LlamaConfig


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    root = tmp_path_factory.mktemp("mixtures")
    return functools.cache(lambda case: write_folder(root / case, case))


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
