"""Weights of Hugging Face: the same logits as transformers', in every plan, read slice by slice."""

from __future__ import annotations

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import zerojax
from tests.support.hugging_face_folders import CASES, tensors_of, write_folder
from tests.support.refusals import refused
from tests.support.trajectories import advance
from zerojax.checkpoint import CheckpointError
from zerojax.config import MeshConfig, OptimizerConfig
from zerojax.placement.device_mesh import make_mesh
from zerojax.plan.inputs import plan_options
from zerojax.plan.make import make_plan
from zerojax.step.initialization import fill_on_devices, init_state
from zerojax.step.reshard import to_portable_state
from zerojax.step.trained_model import model_of
from zerojax.training.checkpointing import end_state
from zerojax.training.loading import load_run
from zerojax.zoo.hugging_face import UnsupportedError, config_from_hugging_face, from_hugging_face


@functools.cache
def example(length: int = 8):
    tokens = jax.ShapeDtypeStruct((8, length), jnp.int32)
    return {"tokens": tokens, "targets": tokens}


def plan_for(network, *, devices: int = 1, precision="fp32", optimizer=None, **mesh):
    settings = MeshConfig(**{"persistence_threshold": 0, **mesh})
    return make_plan(
        network,
        make_mesh(settings, devices=jax.devices()[:devices]),
        example_batch=example(),
        optimizer=optimizer or OptimizerConfig(),
        precision=precision,
        zero=settings.zero,
        **plan_options(settings),
    )


def trained_model(pretrained):
    plan = plan_for(pretrained, zero=0)
    return model_of(plan, init_state(plan))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {case: write_folder(tmp_path_factory.mktemp(case), case) for case in CASES}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, folders):
    """float32 on both sides, sums in another order: relative 1e-5 class; seen up to 4e-6."""
    # A text longer than the model was trained on is what dynamic scaling is for.
    longer = {"max_seq_len": 24} if case == "llama_rope_dynamic" else {}
    model = trained_model(from_hugging_face(folders[case], **longer))
    tokens = np.asarray(CASES[case]["tokens"], np.int32)
    logits = jax.jit(lambda tokens: model(tokens))(tokens)
    wanted = np.asarray(CASES[case]["last_logits"])
    error = np.abs(np.asarray(logits)[:, -3:] - wanted).max() / np.abs(wanted).max()
    assert error < 2e-5
    if case in ("llama_head_dim", "llama_rope_llama3"):
        hidden, _ = model.extend(tokens, model.init_cache(2, tokens.shape[1]), jnp.int32(0))
        np.testing.assert_allclose(model.head(hidden), logits, atol=2e-5 * np.abs(wanted).max())


SLICES = {"min_elements": 1, "slice_elements": 64}
PLANS = {
    "zero 0": {"devices": 2, "zero": 0},
    "zero 1": {"devices": 2, "zero": 1},
    "zero 2": {"devices": 4, "zero": 2},
    "zero 3": {"devices": 8, "zero": 3},
    "zero 3, a copy per pair": {"devices": 4, "zero": 3, "replica": 2},
    "tensor parallel": {"devices": 4, "zero": 3, "model": 2},
    "pipeline of unequal stages": {"devices": 4, "zero": 3, "stage": 2, "partition": (2, 1)},
    "bfloat16 masters": {"devices": 2, "zero": 3, "precision": "bf16"},
    "state on the host": {"devices": 2, "zero": 1, "offload": {"opt_state": "host", **SLICES}},
    "half of it in files": {
        "devices": 2,
        "zero": 2,
        "offload": {"opt_state": {"device": 0.5, "nvme": 0.5}, **SLICES},
        "precision": "bf16",
    },
    "weights on the host": {
        "devices": 2,
        "zero": 3,
        "offload": {"opt_state": "host", "params": "host", **SLICES},
        "precision": "bf16",
    },
}


def wanted_params(case: str) -> dict[str, np.ndarray]:
    """Our arrays, put together by hand from whole tensors."""
    tensors, heads = tensors_of(case), 4
    layers = CASES[case]["config"]["num_hidden_layers"]

    def stack(name: str, change=lambda x: x.T) -> np.ndarray:
        return np.stack([change(tensors[f"model.layers.{i}.{name}.weight"]) for i in range(layers)])

    def split(count: int):
        return lambda x: x.reshape(count, -1, 16).transpose(2, 0, 1)

    return {
        "token_embedding/embedding": tensors["model.embed_tokens.weight"],
        "blocks/attention_norm/scale": stack("input_layernorm"),
        "blocks/attention/query/kernel": stack("self_attn.q_proj", split(heads)),
        "blocks/attention/key/kernel": stack("self_attn.k_proj", split(2)),
        "blocks/attention/value/kernel": stack("self_attn.v_proj", split(2)),
        "blocks/attention/output/kernel": stack(
            "self_attn.o_proj", lambda x: x.T.reshape(heads, -1, 16)
        ),
        "blocks/mlp_norm/scale": stack("post_attention_layernorm"),
        "blocks/mlp/gate/kernel": stack("mlp.gate_proj"),
        "blocks/mlp/up/kernel": stack("mlp.up_proj"),
        "blocks/mlp/down/kernel": stack("mlp.down_proj"),
        "final_norm/scale": tensors["model.norm.weight"],
        "lm_head/kernel": tensors["lm_head.weight"].T,
    }


RARE = ("zero 0", "zero 2", "zero 3, a copy per pair", "state on the host")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow if x in RARE else ()) for x in PLANS]
)
def test_every_plan_holds_the_files_bits(name, folders, tmp_path):
    settings = dict(PLANS[name])
    if "files" in name:
        settings["offload"] = {**settings["offload"], "folder": str(tmp_path)}
    pretrained = from_hugging_face(folders["llama"])
    plan = plan_for(pretrained, **settings)
    state = init_state(plan)
    for leaf, planned in zip(
        jax.tree.leaves(state), jax.tree.leaves(plan.abstract_state), strict=True
    ):
        if isinstance(leaf, jax.Array):
            assert (leaf.shape, leaf.dtype) == (planned.shape, planned.dtype)
            assert leaf.sharding == planned.sharding
    found, wanted = to_portable_state(plan, state)["params"], wanted_params("llama")
    assert found.keys() == wanted.keys()
    for leaf, values in wanted.items():
        np.testing.assert_array_equal(found[leaf], values, err_msg=leaf)
    end_state(state)


@pytest.mark.thorough
def test_moments_begin_at_zero_and_frozen_parameters_come_too(folders):
    plan = make_plan(
        from_hugging_face(folders["llama"]),
        make_mesh(None, devices=jax.devices()[:2]),
        example_batch=example(),
        zero=3,
        persistence_threshold=0,
        freeze=("token_embedding",),
    )
    state = to_portable_state(plan, init_state(plan))
    values = wanted_params("llama")["token_embedding/embedding"]
    np.testing.assert_array_equal(state["frozen"]["token_embedding/embedding"], values)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(state["opt_state"]))


@pytest.mark.slow  # two steps are compiled: 10 s
def test_training_goes_on_from_the_weights(folders):
    """Three steps under stage 3 are those of one device that was given the model whole."""
    tokens = np.random.default_rng(0).integers(0, 20, (8, 8), np.int32)
    batch = {"tokens": tokens, "targets": np.roll(tokens, -1, 1)}
    losses = []
    for model, settings in (
        (from_hugging_face(folders["llama_tied"]), {"devices": 4, "zero": 3}),
        (trained_model(from_hugging_face(folders["llama_tied"])), {"devices": 1, "zero": 0}),
    ):
        plan = plan_for(model, **settings)
        run = advance(plan, init_state(plan), range(3), batch=lambda _: batch)
        losses.append(run.losses)
    assert losses[0][2] < losses[0][0] - 1e-3
    np.testing.assert_allclose(losses[0], losses[1], rtol=4e-6)


def test_a_new_run_reads_each_byte_of_its_shards_once(folders):
    """On 8 devices of one process every tensor is read whole, in eight parts, and not more."""
    for settings in ({"devices": 8, "zero": 3}, {"devices": 8, "zero": 0}):
        pretrained = from_hugging_face(folders["llama"])
        init_state(plan_for(pretrained, **settings))
        assert pretrained.folder.bytes_read == sum(x.nbytes for x in tensors_of("llama").values())


def test_several_files_are_one_model(folders, tmp_path):
    folder = write_folder(tmp_path / "shards", "llama", shards=3)
    state = init_state(plan_for(from_hugging_face(folder), zero=0))
    for name, values in wanted_params("llama").items():
        np.testing.assert_array_equal(state["params"][name], values)
    missing = next(folder.glob("model-00002*"))
    missing.unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks 1 of 3 files .* {missing.name}"):
        from_hugging_face(folder)


@pytest.mark.parametrize("old", ["gone", "there"])
def test_one_file_is_read_beside_an_index_of_earlier_files(old, folders, tmp_path):
    """What transformers leaves when it saves a folder again whole; it reads the one file."""
    shards = {name: 0 * x for name, x in tensors_of("llama").items()}
    folder = write_folder(tmp_path / "again", "llama", tensors=shards, shards=2)
    if old == "gone":
        for file in folder.glob("model-*.safetensors"):
            file.unlink()
    write_folder(folder, "llama")
    pretrained = from_hugging_face(folder)
    assert "index.json is ignored" in pretrained.describe()
    for name, values in wanted_params("llama").items():
        stored = pretrained.stored[name]
        np.testing.assert_array_equal(stored.read([(0, n) for n in stored.shape]), values)
    assert "ignored" not in from_hugging_face(folders["llama"]).describe()


def test_an_index_may_list_a_tensor_that_no_file_has_and_no_parameter_needs(tmp_path):
    """Output weights of a tied model, whose table is saved once; transformers reads it too."""
    folder = write_folder(tmp_path / "shards", "llama_tied", shards=2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    file = max(index["weight_map"].values())
    index["weight_map"]["lm_head.weight"] = file
    path.write_text(json.dumps(index))
    from_hugging_face(folder)
    untied = write_folder(tmp_path / "shards", "llama_tied", shards=2, tie_word_embeddings=False)
    path.write_text(json.dumps(index))
    refused(lambda: from_hugging_face(untied), ["lm_head.weight", file], "fetch")


BAD_INDEXES = {
    "a file outside": (
        "../../x.safetensors",
        "in '../../x.safetensors', which is not the name of a",
    ),
    "an absolute name": (
        "/dev/zero",
        "in '/dev/zero', which is not the name of a file in its folder",
    ),
    "a number": (7, "in 7, which is not the name"),
    "a list": (["x"], r"in \['x'\], which is not the name"),
    "another file": ("model-00003-of-00003.safetensors", "in model-00003-.* does not contain"),
    "a file that is not there": ("gone.safetensors", "lacks 1 of 4 files of its index.*gone"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", BAD_INDEXES)
def test_an_index_that_is_wrong_is_refused(case, tmp_path):
    place, words = BAD_INDEXES[case]
    folder = write_folder(tmp_path / "shards", "llama", shards=3)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first = next(name for name, file in index["weight_map"].items() if "00001" in file)
    index["weight_map"][first] = place
    path.write_text(json.dumps(index))
    with pytest.raises((ValueError, FileNotFoundError), match=words) as caught:
        from_hugging_face(folder)
    assert str(folder) in str(caught.value)


def test_a_tensor_in_two_files_or_twice_in_an_index_is_refused(tmp_path):
    folder = write_folder(tmp_path / "shards", "llama", shards=3)
    path = folder / "model.safetensors.index.json"
    path.write_text(path.read_text().replace('"weight_map": {', '"weight_map": {"a": 1, "a": 2,'))
    with pytest.raises(ValueError, match=r"index\.json has the key 'a' twice"):
        from_hugging_face(folder)
    folder = write_folder(tmp_path / "other", "llama", shards=3)
    name, *_ = load_file(folder / "model-00001-of-00003.safetensors")
    again = folder / "model-00002-of-00003.safetensors"
    save_file({**load_file(again), name: np.ones(3, np.float32)}, again)
    with pytest.raises(ValueError, match=f"'{name}' is in .*model-00001.* and model-00002"):
        from_hugging_face(folder)


def test_a_layer_at_a_time_goes_into_its_place_on_a_device(folders):
    """What accelerators do, on the CPU: padding stays zero, rows land where they belong."""
    values = np.arange(24, dtype=np.float16).reshape(3, 2, 4)
    blocks = ((row, values[row : row + 1]) for row in (0, 2))
    shard = ((1, 4), (0, 2), (4, 9))
    filled = fill_on_devices(blocks, shard, np.float32, jax.devices()[:2])
    wanted = np.zeros((3, 2, 5), np.float32)
    wanted[[0, 2], :, :4] = values[[0, 2]]
    assert [x.devices().pop() for x in filled] == jax.devices()[:2]
    for found in filled:
        np.testing.assert_array_equal(found, wanted)


DROPPED = {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1}


@pytest.mark.parametrize(
    ("rates", "dropout", "words"),
    [
        (DROPPED, 0.0, "embd_pdrop=0.1, resid_pdrop=0.1, attn_pdrop=0.1.* dropout=0.0"),
        (DROPPED, 0.1, "attn_pdrop=0.1.* dropout=0.1"),
        ({**DROPPED, "attn_pdrop": 0.0}, 0.1, None),
        (dict.fromkeys(DROPPED, 0.0), 0.0, None),
    ],
)
def test_dropout_of_a_file_that_a_run_has_not_is_said(tmp_path, rates, dropout, words):
    folder = write_folder(tmp_path / "gpt2", "gpt2", **rates)
    said = [x for x in plan_for(from_hugging_face(folder, dropout=dropout)).reasons if "drop" in x]
    assert len(said) == (words is not None)
    assert all(re.search(words, x) for x in said)


def test_a_change_is_a_setting_of_the_model(folders):
    pretrained = from_hugging_face(folders["llama"], remat="full", loss_chunk=4)
    assert pretrained.config.remat == "full"
    assert pretrained.with_changes(dropout=0.1).config.dropout == 0.1
    assert "12 parameters from 1 file in" in pretrained.describe()
    with pytest.raises(ValueError, match="LlamaConfig has no keyword 'remt'; did you mean 'remat'"):
        from_hugging_face(folders["llama"], remt="full")
    with pytest.raises(UnsupportedError, match=r"gate_proj.*has shape \[24, 16\].*\[32, 16\]"):
        from_hugging_face(folders["llama"], mlp_dim=32)


@pytest.mark.thorough
def test_new_parameters_come_from_the_seed(folders, tmp_path):
    """A head that the files do not have is the model's own initialisation, the rest is theirs."""
    tensors = {n: x for n, x in tensors_of("llama").items() if n != "lm_head.weight"}
    folder = write_folder(tmp_path / "headless", "llama", tensors=tensors)
    with pytest.raises(UnsupportedError, match="'lm_head.weight' is missing"):
        from_hugging_face(folder)
    plan = plan_for(from_hugging_face(folder, new=("lm_head",)), devices=2, zero=3)
    one, two = (to_portable_state(plan, init_state(plan, seed))["params"] for seed in (1, 2))
    assert np.abs(one["lm_head/kernel"] - two["lm_head/kernel"]).max() > 0.01
    assert 0.01 < np.std(one["lm_head/kernel"]) < 0.03
    np.testing.assert_array_equal(one["final_norm/scale"], two["final_norm/scale"])


@pytest.mark.parametrize("name", ["LlamaModel", "LlamaForTokenClassification"])
def test_another_class_of_theirs_is_named(name, tmp_path):
    """Not the tensor alone that a class without this head does not have."""
    tensors = {n: x for n, x in tensors_of("llama").items() if n != "lm_head.weight"}
    words = "has a head that is not supported"
    if name == "LlamaModel":
        words = "reads llama as LlamaForCausalLM"
        tensors = {n.removeprefix("model."): x for n, x in tensors.items()}
    else:
        tensors |= {"score.weight": np.ones((2, 16), "f4"), "score.bias": np.ones(2, "f4")}
    folder = write_folder(tmp_path / name, "llama", tensors=tensors, architectures=[name])
    with pytest.raises(UnsupportedError, match=rf"\['{name}'\].*{words}.*task=.*TaskConfig"):
        from_hugging_face(folder)
    assert "1 new" in from_hugging_face(folder, task=zerojax.zoo.TaskConfig()).describe()
    if name == "LlamaModel":
        assert "1 new" in from_hugging_face(folder, new=("lm_head",)).describe()


def test_names_without_their_prefix_are_the_same_model(folders, tmp_path):
    """As the first GPT-2 was published, causal masks included."""
    tensors = {n.removeprefix("transformer."): x for n, x in tensors_of("gpt2").items()}
    tensors["h.0.attn.bias"] = np.ones((1, 1, 16, 16), np.float32)
    pretrained = from_hugging_face(write_folder(tmp_path / "bare", "gpt2", tensors=tensors))
    state = init_state(plan_for(pretrained, zero=0))
    np.testing.assert_array_equal(state["params"]["final_norm/scale"], tensors["ln_f.weight"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_files_become_float32_masters_without_rounding(dtype, tmp_path):
    tensors = {n: x.astype(jnp.dtype(dtype)) for n, x in tensors_of("llama").items()}
    folder = write_folder(tmp_path / dtype, "llama", tensors=tensors)
    state = init_state(plan_for(from_hugging_face(folder), devices=2, zero=1))
    wanted = tensors["lm_head.weight"].T.astype(np.float32)
    np.testing.assert_array_equal(np.asarray(state["params"]["lm_head/kernel"]), wanted)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_floats_of_8_bits_are_read_as_bfloat16(dtype, tmp_path):
    """The values are exact in it, and activations are not rounded to 8 bits."""
    tensors = {
        n: x.astype(jnp.dtype(dtype) if "proj" in n else np.float32)
        for n, x in tensors_of("llama").items()
    }
    wide = {n: x.astype(np.float32) for n, x in tensors.items()}
    ours = from_hugging_face(write_folder(tmp_path / dtype, "llama", tensors=tensors))
    wanted = from_hugging_face(write_folder(tmp_path / "wide", "llama", tensors=wide))
    for name, array in ours.stored.items():
        whole = [(0, size) for size in array.shape]
        assert array.dtype == (jnp.bfloat16 if "kernel" in name and "head" not in name else "f4")
        np.testing.assert_array_equal(
            array.read(whole).astype(np.float32), wanted.stored[name].read(whole)
        )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "bool", "uint16"])
def test_arrays_that_are_no_floats_are_refused_by_name(dtype, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    known = tensors_of("llama")
    codes = {**known, name: known[name].astype(dtype)}
    folder = write_folder(tmp_path / "codes", "llama", tensors=codes)
    refused(lambda: from_hugging_face(folder), [name, dtype], "unquantized bfloat16")
    mended = {**known, name: known[name].astype(jnp.bfloat16)}
    from_hugging_face(write_folder(folder, "llama", tensors=mended))


def test_float64_is_read_as_float32(tmp_path):
    known = tensors_of("llama")
    wide = {name: x.astype(np.float64) for name, x in known.items()}
    pretrained = from_hugging_face(write_folder(tmp_path, "llama", tensors=wide))
    assert {array.dtype for array in pretrained.stored.values()} == {np.dtype(np.float32)}
    found = pretrained.stored["lm_head/kernel"].read([(0, 16), (0, 20)])
    np.testing.assert_array_equal(found, known["lm_head.weight"].T)


OTHER_FOLDERS = {
    "a run": (["run.json", "config.json"], "run", "export hugging_face zerojax.load_run"),
    "checkpoints": (["writer.lock"], "checkpoints", "export hugging_face"),
    "orbax": (["_CHECKPOINT_METADATA"], "Orbax", "safetensors"),
    "a step of orbax": (["default/_CHECKPOINT_METADATA"], "Orbax", "safetensors"),
    "llama.cpp": (["model-q4.gguf"], "llama.cpp", "gguf_to_hugging_face.py"),
    "a cache of the hub": (["snapshots/abc/config.json"], "config.json", "snapshots/abc"),
    "a folder above": (["model/config.json"], "config.json", "pass"),
}


@pytest.mark.parametrize("kind", OTHER_FOLDERS)
def test_a_folder_of_another_kind_is_told_what_it_is(kind, tmp_path):
    files, what, remedy = OTHER_FOLDERS[kind]
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / file).write_text("{}")
    for read in (from_hugging_face, config_from_hugging_face):
        refused(
            lambda read=read: read(tmp_path), [tmp_path, what], remedy, error=(OSError, ValueError)
        )


def test_a_model_with_adapters_beside_it_is_refused(tmp_path):
    """transformers reads the base model of the adapters, and adds them."""
    folder = write_folder(tmp_path / "both", "llama")
    (folder / "adapter_config.json").write_text("{}")
    refused(lambda: from_hugging_face(folder), [folder, "PEFT"], "move adapter_config.json")
    (folder / "adapter_config.json").rename(tmp_path / "adapter_config.json")
    from_hugging_face(folder)


def test_a_model_is_no_run(folders):
    for read in (load_run, lambda folder: zerojax.to_hugging_face(folder, "out")):
        refused(
            lambda read=read: read(folders["llama"]),
            [folders["llama"], "run"],
            "zerojax.from_hugging_face model.pretrained",
            error=(ValueError, CheckpointError),
        )


def test_what_is_not_understood_is_refused(folders, tmp_path):
    tensors = tensors_of("llama") | {"model.layers.0.self_attn.q_proj.bias": np.ones(16)}
    with pytest.raises(UnsupportedError, match=r"1 tensors .*q_proj\.bias"):
        from_hugging_face(write_folder(tmp_path / "bias", "llama", tensors=tensors))
    codes = write_folder(tmp_path / "c", "llama", quantization_config={"quant_method": "gptq"})
    with pytest.raises(UnsupportedError, match=r"\(gptq\): quantized"):
        from_hugging_face(codes)
    with pytest.raises(FileNotFoundError, match="downloads nothing: .*hf download"):
        from_hugging_face("someone/model")
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle" / "config.json").write_text(json.dumps(CASES["llama"]["config"]))
    (tmp_path / "pickle" / "pytorch_model.bin").touch()
    with pytest.raises(FileNotFoundError, match="pickled .* may run code; convert them"):
        from_hugging_face(tmp_path / "pickle")


@pytest.mark.parametrize("cut", [4, 100, -1])
def test_a_file_that_is_cut_short_is_named(cut, folders, tmp_path):
    folder = write_folder(tmp_path / "cut", "llama")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ValueError, match="model.safetensors is truncated"):
        from_hugging_face(folder)
