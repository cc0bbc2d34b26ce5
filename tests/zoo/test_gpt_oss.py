"""gpt-oss beside what tests/zoo/test_families.py shows: codes of MXFP4, axes, decay, refusals."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support.expert_folder_process import batch
from tests.support.hugging_face_folders import tensors_of, write_folder
from tests.support.hugging_face_weights import weights
from tests.support.trajectories import TOLERANCE, train_for
from tests.zoo.test_hugging_face import plan_for
from tests.zoo.test_hugging_face_export import assert_same_bits, read_all, trainer_of
from zerojax.config import MoEConfig
from zerojax.models.adapt import as_model
from zerojax.optim import decay_mask
from zerojax.tracing.trees import path_name
from zerojax.training.hugging_face_export import to_hugging_face
from zerojax.zoo import Decoder, DecoderConfig, MoE
from zerojax.zoo.hugging_face import (
    ARCHITECTURES,
    UnsupportedError,
    config_from_hugging_face,
    from_hugging_face,
)
from zerojax.zoo.hugging_face.mxfp4 import decode
from zerojax.zoo.hugging_face.writing import Description, describe_model, outgoing

DATA = Path(__file__).parents[1] / "data"
SEEN = json.loads((DATA / "moe_families.json").read_text())["mxfp4"]
"""Codes and what transformers decodes them to: tests/oracles/moe_families.py."""
PUBLISHED = json.loads((DATA / "published_configs.json").read_text())["gpt_oss"]
WIDTH = 64
OF_MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("gpt_oss") / "case", "gpt_oss")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(a folder whose experts are codes, the folder of what they mean, its tensors)."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 96, "head_dim": 16}
    root = tmp_path_factory.mktemp("mxfp4")
    seen = write_folder(root / "config", "gpt_oss", **sizes)
    config, row = config_from_hugging_face(seen), ARCHITECTURES["gpt_oss"]
    shapes = nnx.to_flat_state(nnx.state(nnx.eval_shape(lambda: row.build(config, nnx.Rngs(0)))))
    arrays = {path_name(path): x.get_raw_value() for path, x in shapes}
    description = Description(row=row, config=config)
    plain, coded = {}, {}
    random = np.random.default_rng(0)
    for each in outgoing(description, arrays):
        name, shape = each.tensor.name, each.tensor.shape
        if not name.endswith("_proj"):
            plain[name] = coded[name] = weights(name, shape).astype(jnp.bfloat16)
            continue
        experts, inputs, outputs = shape
        codes = random.integers(0, 256, (experts, outputs, inputs // 32, 16)).astype(np.uint8)
        scales = random.integers(122, 126, codes.shape[:-1]).astype(np.uint8)
        coded |= {f"{name}_blocks": codes, f"{name}_scales": scales}
        plain[name] = np.ascontiguousarray(decode(codes, scales).transpose(0, 2, 1))
    written = functools.partial(write_folder, case="gpt_oss", **sizes)
    with_codes = written(root / "codes", tensors=coded, quantization_config=OF_MXFP4)
    return with_codes, written(root / "plain", tensors=plain), plain


# --- codes ----------------------------------------------------------------------------------------


def test_codes_mean_what_transformers_decodes():
    """All 256 pairs of codes, with scales from 2^-127 to 2^125."""
    blocks, scales = (np.asarray(SEEN[name], np.uint8) for name in ("blocks", "scales"))
    assert set(blocks.ravel()) == set(range(256))
    found = decode(blocks, scales).transpose(0, 2, 1)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.astype(np.float64), np.asarray(SEEN["values"]))


def test_a_scale_of_255_is_nan():
    found = decode(np.full((1, 1, 16), 0x21, np.uint8), np.full((1, 1), 255, np.uint8))
    assert np.isnan(found.astype(np.float32)).all()


def test_a_folder_of_codes_is_the_folder_that_they_mean(folders):
    with_codes, plain, _ = folders
    found, wanted = from_hugging_face(with_codes), from_hugging_face(plain)
    assert found.config == wanted.config
    assert found.stored.keys() == wanted.stored.keys()
    for name, array in wanted.stored.items():
        whole = [(0, size) for size in array.shape]
        assert found.stored[name].dtype == array.dtype == jnp.bfloat16
        assert found.stored[name].read(whole).tobytes() == array.read(whole).tobytes(), name


def test_of_codes_only_those_of_a_box_are_read(folders):
    """Of experts 1 and 2; inputs in whole groups of 32; gate's outputs with those of up between."""
    pretrained = from_hugging_face(folders[0])
    boxes = {
        "gate": ([(1, 2), (1, 3), (40, 64), (8, 24)], 2 * (2 * 16) * 1 * 17),
        "down": ([(0, 1), (1, 3), (0, 33), (0, 64)], 2 * 64 * 2 * 17),
    }
    for name, (box, count) in boxes.items():
        array = pretrained.stored[f"blocks/mlp/experts/{name}"]
        whole = array.read([(0, size) for size in array.shape])
        before = pretrained.folder.bytes_read
        part = array.read(box)
        assert pretrained.folder.bytes_read - before == count
        np.testing.assert_array_equal(part, whole[tuple(slice(*bounds) for bounds in box)])


@pytest.mark.thorough
def test_what_was_codes_is_written_as_weights(folders, tmp_path):
    """No config.json says of them that they are codes."""
    with_codes, _, wanted = folders
    trainer = trainer_of(plan_for(from_hugging_face(with_codes), devices=2, zero=3))
    to_hugging_face(trainer, tmp_path / "ours", dtype="bfloat16")
    assert_same_bits(read_all(tmp_path / "ours"), wanted)
    about = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert "quantization_config" not in about
    assert about["torch_dtype"] == "bfloat16"


def test_damaged_codes_are_refused(folders, tmp_path):
    name = "model.layers.0.mlp.experts.down_proj"
    tensors = {**tensors_of("gpt_oss"), f"{name}_blocks": np.zeros((4, 24, 2, 16), np.uint8)}
    made = write_folder(tmp_path / "x", "gpt_oss", tensors=tensors, quantization_config=OF_MXFP4)
    with pytest.raises(UnsupportedError, match=f"{name}_blocks.* with scales None.* again"):
        from_hugging_face(made)


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "twice"), [("gate", 2), ("down", 1), ("down_bias", 1)])
def test_of_experts_in_one_tensor_only_the_bytes_of_a_box_are_read(name, twice, folder):
    """Elements of gate and up alternate, so that both are read for one of them."""
    pretrained = from_hugging_face(folder)
    array = pretrained.stored[f"blocks/mlp/experts/{name}"]
    whole = array.read([(0, size) for size in array.shape])
    box = [(1, 2), (2, 4), *[(0, size) for size in array.shape[2:]]]
    before = pretrained.folder.bytes_read
    part = array.read(box)
    assert pretrained.folder.bytes_read - before == twice * part.nbytes
    np.testing.assert_array_equal(part, whole[1:2, 2:4])
    theirs = tensors_of("gpt_oss")["model.layers.1.mlp.experts.gate_up_proj"]
    gate = pretrained.stored["blocks/mlp/experts/gate"].read([(1, 2), (0, 4), (0, 16), (3, 9)])
    np.testing.assert_array_equal(gate[0], theirs[:, :, 6:18:2])


def test_the_published_model_has_its_published_sizes():
    """config.json of openai/gpt-oss-20b: 20.9 billion parameters, of which a token uses 3.6."""
    sizes = {"hidden_size": 2880, "intermediate_size": 2880, "vocab_size": 201088}
    sizes |= {"num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8}
    published = {"model_type": "gpt_oss", **sizes, "max_position_embeddings": 131072, **PUBLISHED}
    row = ARCHITECTURES["gpt_oss"]
    config = row.config_class(**row.read_config(published))
    assert config.num_parameters == 20_914_757_184
    table = config.vocab_size * config.embed_dim  # not in the 3.61 billion that are published
    assert round((config.num_active_parameters - table) / 1e9, 2) == 3.61
    without = {key: x for key, x in published.items() if "rope" not in key}
    assert row.config_class(**row.read_config(without)) == config  # transformers' defaults
    with pytest.raises(UnsupportedError, match="swiglu_alpha=1.5"):
        row.read_config({**published, "swiglu_alpha": 1.5})


# --- training -------------------------------------------------------------------------------------

PLANS = {
    "expert and model": {"zero": 3, "mesh": {"data": 2, "expert": 2, "model": 2}},
    "expert": {"zero": 1, "mesh": {"data": 2, "expert": 4}},
    "stages and model": {"zero": 1, "mesh": {"data": 2, "model": 2, "stage": 2}},
}
OPTIONS = {"batch": batch, "steps": 4, "persistence_threshold": 1, "num_microbatches": 1}


@pytest.fixture(scope="module")
def expected(folder):
    return train_for(from_hugging_face(folder), devices=1, **OPTIONS)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("expert and model", marks=pytest.mark.thorough),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("expert", "stages and model")),
    ],
)
def test_it_trains_as_on_one_device(name, folder, expected):
    """From biases that are not 0."""
    found = train_for(from_hugging_face(folder), **{**OPTIONS, **PLANS[name]})
    assert np.abs(found.losses - expected.losses).max() <= TOLERANCE
    assert expected.losses[0] - expected.losses[-1] > 0.02
    if "expert" in name:
        leaf = found.plan.placement.leaves["blocks/mlp/experts/down_bias"]
        assert "expert" in str(leaf.stored_spec)


SIZES = {"vocab_size": 20, "max_seq_len": 8, "num_layers": 2, "num_heads": 2, "embed_dim": 16}
EXPERTS = MoEConfig(num_experts=4, expert_dim=12)


def decoder(**changes):
    config = DecoderConfig(**SIZES, moe=EXPERTS, mlp_bias=True, attention_sinks=True, **changes)
    return lambda rngs: Decoder(config, rngs=rngs)


def test_biases_and_sinks_do_not_decay():
    """Those of stacked layers have two or three dimensions, as matrices have."""
    state = nnx.state(nnx.eval_shape(lambda: decoder()(nnx.Rngs(0))), nnx.Param)
    params = {path_name(path): x.get_raw_value() for path, x in nnx.to_flat_state(state)}
    mask = decay_mask(params)
    left = {name.rpartition("/")[2] for name, decays in mask.items() if not decays}
    assert left == {"scale", "sinks", "logit_bias", "gate_bias", "up_bias", "down_bias"}
    assert DecoderConfig(
        **SIZES, moe=EXPERTS, mlp_bias=True, attention_sinks=True
    ).num_parameters == sum(x.size for x in params.values())


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="moe.products='loop'.*products='batched'"):
        DecoderConfig(**SIZES, mlp_bias=True, moe=MoEConfig(num_experts=4, products="loop"))
    moe = MoEConfig(num_experts=4, expert_dim=8, products="loop")
    with pytest.raises(ValueError, match="moe.products='loop'.*products='batched'"):
        MoE(8, moe, use_bias=True, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="expert_limit=7.0 .*num_experts=0"):
        DecoderConfig(**SIZES, expert_limit=7.0)
    with pytest.raises(ValueError, match="expert_limit=-1.0 must be above 0"):
        DecoderConfig(**SIZES, moe=EXPERTS, expert_limit=-1.0)


@pytest.mark.parametrize("change", [{"expert_limit": 2.0}, {"activation": "quick_gelu"}, {}])
def test_other_families_have_no_such_experts(change):
    """Limits and biases have no key in a Mixtral's config.json; its activation has."""
    make = decoder(family="mixtral", mlp_dim=12, **change)
    with pytest.raises(UnsupportedError, match="MixtralForCausalLM would compute with"):
        describe_model(as_model(make))
