"""Out again: the files' own bits from any plan, and what training made of them."""

from __future__ import annotations

import dataclasses
import inspect
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file

import zerojax
from tests.support.hugging_face_folders import CASES, tensors_of, write_folder
from tests.zoo.test_hugging_face import PLANS, plan_for
from zerojax.cli import main
from zerojax.cli.check_targets import read_target
from zerojax.config import ConfigError, LoraConfig, RunConfig
from zerojax.models.adapt import as_model
from zerojax.placement.device_mesh import make_mesh
from zerojax.step.initialization import init_state
from zerojax.step.reshard import model_parts
from zerojax.step.trained_model import model_of
from zerojax.training.checkpointing import end_state
from zerojax.training.entry import spec_of
from zerojax.training.hugging_face_export import to_hugging_face
from zerojax.training.loading import load_run
from zerojax.training.run_file import (
    plan_from_config,
    run_from_config,
    tokenizer_spec,
    vocab_size_of,
)
from zerojax.training.run_folder import DESCRIPTION_FILE
from zerojax.training.train_arguments import Arguments
from zerojax.training.trainer import Trainer
from zerojax.zoo.hugging_face import UnsupportedError, describe_model, from_hugging_face
from zerojax.zoo.hugging_face.writing import merging, outgoing
from zerojax.zoo.lora import merged_kernel

TOKENS = np.random.default_rng(0).integers(0, 20, (8, 8), np.int32)
BATCH = {"tokens": TOKENS, "targets": np.roll(TOKENS, -1, 1)}


def trainer_of(plan) -> Trainer:
    return Trainer(plan)


def read_all(folder) -> dict[str, np.ndarray]:
    return {n: x for file in folder.glob("*.safetensors") for n, x in load_file(file).items()}


def assert_same_bits(found, wanted):
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert (found[name].dtype, found[name].shape) == (values.dtype, values.shape), name
        assert found[name].tobytes() == values.tobytes(), name


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "case",
    [
        "gpt2",
        "llama",
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in ("gpt2_untied", "llama_tied", "llama_head_dim")
        ),
    ],
)
def test_round_trip_of_every_architecture(case, tmp_path):
    """Bit for bit; and what is written is read as the same model again."""
    pretrained = from_hugging_face(write_folder(tmp_path / "theirs", case))
    trainer = trainer_of(plan_for(pretrained, devices=2, zero=1))
    to_hugging_face(trainer, tmp_path / "ours")
    assert_same_bits(read_all(tmp_path / "ours"), tensors_of(case))
    again = from_hugging_face(tmp_path / "ours")
    assert again.config == pretrained.config
    about = json.loads((tmp_path / "ours" / "config.json").read_text())
    for key, value in CASES[case]["config"].items():
        known = key in about and "pdrop" not in key and key != "n_inner"
        assert not known or about[key] == value, key


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        "half of it in files",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("tensor parallel", "pipeline of unequal stages", "weights on the host")
        ),
    ],
)
def test_round_trip_under_every_kind_of_plan(name, tmp_path):
    settings = dict(PLANS[name])
    if "files" in name:
        settings["offload"] = {**settings["offload"], "folder": str(tmp_path / "store")}
    trainer = trainer_of(
        plan_for(from_hugging_face(write_folder(tmp_path / "a", "llama")), **settings)
    )
    done = to_hugging_face(trainer, tmp_path / "b", shard_bytes=8000)
    end_state(trainer.state)
    assert len(done.files) > 2
    assert_same_bits(read_all(tmp_path / "b"), tensors_of("llama"))
    index = json.loads((tmp_path / "b" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors_of("llama"))


def test_bfloat16_files_come_back_as_they_were(tmp_path):
    tensors = {n: x.astype(jnp.bfloat16) for n, x in tensors_of("llama").items()}
    folder = write_folder(tmp_path / "theirs", "llama", tensors=tensors)
    trainer = trainer_of(plan_for(from_hugging_face(folder), devices=2, zero=3))
    to_hugging_face(trainer, tmp_path / "ours", dtype="bfloat16")
    assert_same_bits(read_all(tmp_path / "ours"), tensors)
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of one step from pretrained weights with adapters."""
    folder = tmp_path_factory.mktemp("run")
    theirs = write_folder(folder / "theirs", "llama", bos_token_id=7)
    (theirs / "tokenizer.json").write_text('{"version": "1.0"}')
    model = from_hugging_face(theirs).with_lora(LoraConfig(rank=2))
    trainer = zerojax.train(
        model,
        make_mesh(None, devices=jax.devices()[:1]),
        [BATCH],
        optimizer=zerojax.adamw(0.1),
        steps=1,
        checkpoint=folder / "mine",
        freeze=LoraConfig(rank=2).freeze,
    )
    return folder / "mine", trainer


@pytest.mark.thorough
def test_a_run_is_exported_by_command_with_adapters_merged(run, tmp_path, capsys):
    folder, trainer = run
    assert (folder / DESCRIPTION_FILE).is_file()
    out = tmp_path / "out"
    words = ["checkpoint", "export", str(folder), str(out), "--format", "hugging_face"]
    assert main(words) == 0
    assert "step 1: 30 tensors" in capsys.readouterr().out
    found, theirs = read_all(out), tensors_of("llama")
    name = "model.layers.1.self_attn.q_proj.weight"
    parts = model_parts(trainer.plan, trainer.state)
    a, b = (np.asarray(parts["params"][f"blocks/attention/query/lora/{x}"])[1] for x in "ab")
    wanted = theirs[name] + 8.0 * (a @ b.reshape(2, 16)).T
    np.testing.assert_allclose(found[name], wanted, rtol=1e-5, atol=1e-6)
    assert np.abs(found[name] - theirs[name]).max() > 1e-2
    np.testing.assert_array_equal(found["lm_head.weight"], theirs["lm_head.weight"])
    about = json.loads((out / "config.json").read_text())
    assert about["bos_token_id"] == 7
    assert about["architectures"] == ["LlamaForCausalLM"]
    assert (out / "tokenizer.json").read_text() == '{"version": "1.0"}'
    to_hugging_face(trainer, tmp_path / "live")
    assert_same_bits(read_all(tmp_path / "live"), found)
    words[3] = str(tmp_path / "codes")
    assert main([*words, "--quantize", "int8"]) == 0
    to_hugging_face(trainer, tmp_path / "live codes", quantize="int8")
    assert_same_bits(read_all(tmp_path / "live codes"), read_all(tmp_path / "codes"))
    assert main([*words[:4], "--quantize", "int8"]) == 2


@pytest.mark.thorough
def test_every_layer_is_asked_for_alone(tmp_path):
    """One tensor at a time: what is read for a tensor is a layer of what it is made of."""
    lora = LoraConfig(rank=2)
    pretrained = from_hugging_face(write_folder(tmp_path / "theirs", "llama")).with_lora(lora)
    plan = plan_for(pretrained)
    description = describe_model(plan.model)
    parts = model_parts(plan, init_state(plan))
    params = {**parts["params"], **parts["frozen"]}
    asked: list[tuple[str, int | None]] = []

    def read(name, layer):
        asked.append((name, layer))
        return np.asarray(params[name] if layer is None else params[name][layer])

    found = outgoing(description, params)
    for tensor in found:
        del asked[:]
        tensor.values(merging(description, params, read))
        assert len({layer for _, layer in asked}) == 1
        assert (asked[0][1] is None) == (".layers." not in tensor.tensor.name)
    assert len(found) == len(tensors_of("llama"))


def test_merging_is_what_the_layer_computes():
    random = np.random.default_rng(0)
    kernel, a, b = (random.normal(size=s).astype("f4") for s in ((4, 2, 3), (4, 2), (2, 2, 3)))
    x = random.normal(size=(5, 4)).astype("f4")
    merged = merged_kernel(kernel, a, b, 0.5)
    plain = np.einsum("be,ehd->bhd", x, kernel) + 0.5 * np.einsum("br,rhd->bhd", x @ a, b)
    np.testing.assert_allclose(np.einsum("be,ehd->bhd", x, merged), plain, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
def test_a_folder_that_is_there_and_a_step_that_is_not_are_refused(run, tmp_path):
    folder, trainer = run
    with pytest.raises(FileExistsError, match="already exists"):
        to_hugging_face(trainer, folder)
    with pytest.raises(ValueError, match="step=1 .*pass the run's folder"):
        to_hugging_face(trainer, tmp_path / "x", step=1)
    to_hugging_face(folder, tmp_path / "first", step=1)
    with pytest.raises(
        zerojax.errors.CheckpointError, match="has no step 9; the saved steps are: 1"
    ):
        to_hugging_face(folder, tmp_path / "x", step=9)


def test_what_has_no_form_there_is_refused(tmp_path):
    model = as_model(from_hugging_face(write_folder(tmp_path / "theirs", "llama")))
    shapes = plan_for(model).abstract_state["params"]
    with pytest.raises(UnsupportedError, match="parameter own/scale has no tensor"):
        outgoing(describe_model(model), {**shapes, "own/scale": 1})
    with pytest.raises(UnsupportedError, match="config is a NoneType has no Hugging Face format"):
        describe_model(as_model((lambda key: {"w": jnp.ones(3)}, lambda params, x: x)))


@pytest.mark.thorough
def test_a_run_file_begins_with_a_folder(tmp_path):
    """Its sizes and tokenizer are the folder's; other sizes and foreign tokens are refused."""
    theirs = write_folder(tmp_path / "theirs", "llama")
    config = RunConfig(
        model={"pretrained": str(theirs), "remat": "full"},
        data={"path": str(tmp_path), "seq_len": 300},
        global_batch_size=8,
    )
    assert vocab_size_of(config) == 20
    assert tokenizer_spec(config) == "bytes"
    plan = plan_from_config(dataclasses.replace(config, data={"seq_len": 8}), 8)
    assert plan.model.config.remat == "full"
    assert plan.model.config.max_seq_len == 32
    with pytest.raises(ValueError, match="tokens have length 300"):
        plan_from_config(config, 8)
    (theirs / "tokenizer.json").write_text("{}")
    assert tokenizer_spec(config) == str(theirs)
    with pytest.raises(ConfigError, match="num_heads: 2 is set by the folder of model.pretrained"):
        RunConfig(model={"pretrained": str(theirs), "embed_dim": 8, "num_heads": 2})
    bytes_of_text = dataclasses.replace(
        config, model={"pretrained": str(theirs), "vocab_size": 256}
    )
    with pytest.raises(ValueError, match="256 different tokens, but .* has rows for 20"):
        plan_from_config(dataclasses.replace(bytes_of_text, data={"seq_len": 8}), 8)


def test_text_in_python_is_encoded_by_the_tokenizer_of_the_folder(tmp_path, monkeypatch):
    theirs = write_folder(tmp_path / "theirs", "llama")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 3, "b": 7}, unk_token="a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(theirs / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("b " * 2999)
    given = {"model": from_hugging_face(theirs), "data": tmp_path / "text.txt", "run_dir": None}
    defaults = {x.name: x.default for x in inspect.signature(zerojax.train).parameters.values()}
    spec = spec_of(Arguments.of_call(defaults | given | {"seq_len": 8, "global_batch_size": 8}))
    assert spec.inputs.example_batch["tokens"].shape == (8, 8)
    assert np.unique(next(spec.feed)["tokens"]).tolist() == [7]
    assert spec.notes.tokenizer.decode([7]) == "b"
    assert f"HuggingFaceTokenizer(vocab_size=8) from {theirs}" in spec.reasons[0]
    call = f"zerojax.train(zerojax.from_hugging_face({str(theirs)!r}), data='text.txt', seq_len=8)"
    (tmp_path / "script.py").write_text(f"import zerojax\n{call}\n")
    monkeypatch.chdir(tmp_path)
    parts = read_target("script.py", "", overrides=[], steps=1)
    assert np.unique(parts["batch"](0)["tokens"]).tolist() == [7]


@pytest.mark.slow  # trains through the command's own path and reads the run back: 12 s
def test_a_run_file_trains_and_is_read_back(tmp_path):
    tensors = tensors_of("llama")
    random = np.random.default_rng(0)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = random.normal(size=(300, 16)).astype(np.float32) * 0.1
    theirs = write_folder(tmp_path / "theirs", "llama", tensors=tensors, vocab_size=300)
    (tmp_path / "text.txt").write_text("to be, or not to be, that is the question. " * 200)
    config = RunConfig(
        model={"pretrained": str(theirs), "loss_chunk": None},
        data={"path": str(tmp_path / "text.txt"), "seq_len": 16},
        optimizer={"learning_rate": 1e-2, "warmup_steps": 0},
        mesh={"zero": 3},
        global_batch_size=8,
        steps=20,
        eval_every=None,
        precision="fp32",
        run_dir=str(tmp_path / "run"),
    )
    trainer = run_from_config(config)
    assert trainer.history[-1]["loss"] < trainer.history[0]["loss"] - 0.5
    shutil.rmtree(theirs)
    loaded = load_run(tmp_path / "run")
    tokens = TOKENS[:, :4]
    done = to_hugging_face(tmp_path / "run", tmp_path / "out")
    plan = plan_for(from_hugging_face(done.folder), zero=0)
    again = model_of(plan, init_state(plan))
    np.testing.assert_allclose(loaded.model(tokens), again(tokens), rtol=1e-5, atol=1e-5)
