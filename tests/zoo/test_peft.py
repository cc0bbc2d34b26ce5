"""Adapters in the files of PEFT, equal to what peft saves and computes (tests/oracles/lora.py)."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import zerojax
from tests.support.hugging_face_weights import weights
from tests.support.peft_weights import ALPHA, CASES, RANK, adapter_tensor, part_of
from zerojax.checkpoint.inspection import saved_steps
from zerojax.cli import main
from zerojax.config import LogConfig, LoraConfig
from zerojax.zoo import merge_lora
from zerojax.zoo.hugging_face import UnsupportedError
from zerojax.zoo.hugging_face.peft import ADAPTER_CONFIG, ADAPTER_FILE, write_adapter
from zerojax.zoo.lora import adapted_kernels

ORACLE = json.loads((Path(__file__).parents[1] / "data" / "lora.json").read_text())["cases"]
TARGETS = {"gpt2": ("attention/(query|value|output)", "mlp/"), "llama": ("attention/", "mlp/")}


def lora_of(case):
    return LoraConfig(rank=RANK, alpha=ALPHA, targets=TARGETS[case])


def write_base(folder, case):
    """The base model as transformers saves it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(ORACLE[case]["config"]))
    tensors = {name: weights(name, shape) for name, shape in ORACLE[case]["base_tensors"].items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def whole(array):
    """All of an array in files; any other as it is."""
    return array.read([(0, size) for size in array.shape]) if hasattr(array, "read") else array


def adapters_of(pretrained):
    """{our name: array} by the formula of the names in PEFT's files."""
    shapes, _ = pretrained.initial_arrays()
    names, found = adapted_kernels(shapes), {}
    for leaf in pretrained.row.leaves(pretrained.config):
        for name, part in zip(names.get(leaf.name, ()), ("lora_A", "lora_B"), strict=False):
            shape = shapes[name].shape
            layers = []
            for layer in range(shape[0]):
                module = leaf.tensor_of(layer).removesuffix(".weight")
                key = f"base_model.model.{module}.{part}.weight"
                if part == "lora_A":
                    theirs = part_of(key, (RANK, int(np.prod(shape[1:-1]))), leaf.part)
                else:
                    theirs = part_of(key, (int(np.prod(shape[2:])), RANK), leaf.part)
                layers.append(theirs.T.reshape(shape[1:]))
            found[name] = np.stack(layers)
    return found


@functools.cache
def loaded(case, folder):
    """(pretrained model with adapters, its arrays)."""
    pretrained = zerojax.add_lora(zerojax.from_hugging_face(folder), lora_of(case))
    params, extras = pretrained.initial_arrays()
    arrays = {name: whole(array) for name, array in params.items()} | adapters_of(pretrained)
    return pretrained, arrays, extras


def scales(arrays):
    return dict.fromkeys(adapted_kernels(arrays), ALPHA / RANK)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    return {case: write_base(folder / case, case) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_the_files_are_those_that_peft_saves(case, base, tmp_path):
    pretrained, arrays, _ = loaded(case, base[case])
    write_adapter(tmp_path, pretrained.config, arrays, scales=scales(arrays), base="a/base")
    found, wanted = load_file(tmp_path / ADAPTER_FILE), ORACLE[case]["adapter_tensors"]
    assert {name: list(x.shape) for name, x in found.items()} == wanted
    for name, values in found.items():
        theirs = adapter_tensor(case, name, values.shape)
        np.testing.assert_array_equal(values, theirs, err_msg=name)
    config = json.loads((tmp_path / ADAPTER_CONFIG).read_text())
    saved = ORACLE[case]["adapter_config"]
    assert sorted(saved.pop("target_modules")) == config.pop("target_modules")
    assert config.pop("base_model_name_or_path") == "a/base"
    assert config == {key: saved[key] for key in config}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_peft(case, base):
    pretrained, arrays, extras = loaded(case, base[case])
    module = pretrained.to_source({n: jnp.asarray(x) for n, x in arrays.items()}, extras)
    tokens, theirs = jnp.asarray(ORACLE[case]["tokens"]), np.array(ORACLE[case]["last_logits"])
    # float32 rounding of logits up to 4.5 in two programs; measured: 4e-6.
    for model in (module, merge_lora(module)):
        logits = jax.jit(lambda tokens, model=model: model(tokens))(tokens)
        np.testing.assert_allclose(logits[:, -3:], theirs, rtol=0, atol=2e-5)


def test_what_peft_could_not_read_is_refused(base, tmp_path):
    pretrained, arrays, _ = loaded("llama", base["llama"])
    with pytest.raises(UnsupportedError, match=r"no adapters, .* PEFT"):
        write_adapter(tmp_path, pretrained.config, {}, scales={})
    other = {f"blocks/extra/{x}": arrays[f"blocks/mlp/up/{x}"] for x in ("lora/a", "lora/b")}
    with pytest.raises(UnsupportedError, match=r"no tensor for blocks/extra/kernel"):
        write_adapter(tmp_path, pretrained.config, other, scales={})
    joined, parts, _ = loaded("gpt2", base["gpt2"])
    mixed = {**scales(parts), "blocks/attention/value/kernel": 1.0}
    with pytest.raises(
        UnsupportedError, match=r"adapters of .*c_attn.* 2 .*\(2, 1.0\), \(2, 3.0\)"
    ):
        write_adapter(tmp_path, joined.config, parts, scales=mixed)
    (tmp_path / ADAPTER_CONFIG).write_text("{}")
    taken = r"adapter_config.json already exists; use another folder$"
    with pytest.raises(FileExistsError, match=taken):
        write_adapter(tmp_path, pretrained.config, arrays, scales=scales(arrays))
    write_adapter(tmp_path / "another", pretrained.config, arrays, scales=scales(arrays))
    assert (tmp_path / "another" / ADAPTER_FILE).is_file()


@pytest.mark.slow
def test_a_run_from_files_to_files(base, tmp_path, capsys):
    """Weights from a folder, adapters trained on 8 devices, and both ways out of it."""
    lora, start = lora_of("llama"), base["llama"]
    tokens = np.random.default_rng(0).integers(0, 19, (16, 13), np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    trainer = zerojax.train(
        zerojax.add_lora(zerojax.from_hugging_face(start), lora),
        {"data": 4, "stage": 2, "zero": 3, "persistence_threshold": 0},
        [batch],
        optimizer=zerojax.adamw(3e-2, weight_decay=0.0),
        freeze=lora.freeze,
        steps=4,
        checkpoint=tmp_path / "run",
        log=LogConfig(every=1),
    )
    assert trainer.history[-1]["loss"] < trainer.history[0]["loss"] - 0.1
    model = trainer.to_model()
    trainer.close()
    before, _ = zerojax.from_hugging_face(start).initial_arrays()
    for name, array in trainer.state["frozen"].items():
        np.testing.assert_array_equal(array, whole(before[name]), err_msg=name)

    (saved,) = saved_steps(tmp_path / "run" / "checkpoints")
    kinds = {name.partition("/")[0] for name in saved.metadata.arrays if name.endswith("/kernel")}
    assert kinds == {"frozen"}  # whole, and without moments
    held = [name for name in saved.metadata.arrays if name.startswith("opt_state")]
    assert len([name for name in held if "/lora/" in name]) == 2 * 14

    ways = {
        "trainer": lambda out: zerojax.to_peft(trainer, out),
        "folder": lambda out: zerojax.to_peft(tmp_path / "run", out),
        "command": lambda out: main(
            ["checkpoint", "export", str(tmp_path / "run"), str(out), "--format", "peft"]
        ),
    }
    found = {}
    for way, write in ways.items():
        write(tmp_path / way)
        config = json.loads((tmp_path / way / ADAPTER_CONFIG).read_text())
        assert config["base_model_name_or_path"] == str(start)
        found[way] = load_file(tmp_path / way / ADAPTER_FILE)
    assert "step 4: adapters (" in capsys.readouterr().out
    assert {k: list(x.shape) for k, x in found["trainer"].items()} == (
        ORACLE["llama"]["adapter_tensors"]
    )
    for other in ("folder", "command"):
        for name, values in found["trainer"].items():
            np.testing.assert_array_equal(found[other][name], values)

    zerojax.to_hugging_face(tmp_path / "run", tmp_path / "merged")
    again, extras = zerojax.from_hugging_face(tmp_path / "merged").initial_arrays()
    merged = zerojax.from_hugging_face(tmp_path / "merged").to_source(
        {name: jnp.asarray(whole(array)) for name, array in again.items()}, extras
    )
    probe = jnp.asarray(tokens[:2])
    np.testing.assert_allclose(merged(probe), model(probe), atol=1e-5)
