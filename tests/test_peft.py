"""Adapters in the files of PEFT, equal to what peft saves and computes (tests/oracles/lora.py)."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import zerojax
from tests.hugging_face_weights import weights
from tests.peft_weights import ALPHA, CASES, RANK, adapter_tensor, part_of
from zerojax.config import LoraConfig
from zerojax.hugging_face import UnsupportedError
from zerojax.hugging_face.peft import ADAPTER_CONFIG, ADAPTER_FILE, write_adapter
from zerojax.models import merge_lora
from zerojax.models.lora import adapted_kernels

ORACLE = json.loads((Path(__file__).parent / "data" / "lora.json").read_text())["cases"]
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


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    return {case: write_base(folder / case, case) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_the_files_are_those_that_peft_saves(case, base, tmp_path):
    pretrained, arrays, _ = loaded(case, base[case])
    write_adapter(tmp_path, pretrained.config, arrays, lora=lora_of(case), base="a/base")
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


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_peft(case, base):
    pretrained, arrays, extras = loaded(case, base[case])
    module = pretrained.to_source({n: jnp.asarray(x) for n, x in arrays.items()}, extras)
    tokens, theirs = jnp.asarray(ORACLE[case]["tokens"]), np.array(ORACLE[case]["last_logits"])
    # float32 rounding of logits up to 4.5 in two programs; measured: 4e-6.
    for model in (module, merge_lora(module)):
        np.testing.assert_allclose(model(tokens)[:, -3:], theirs, rtol=0, atol=2e-5)


def test_what_peft_could_not_read_is_refused(base, tmp_path):
    pretrained, arrays, _ = loaded("llama", base["llama"])
    lora = lora_of("llama")
    with pytest.raises(UnsupportedError, match=r"no adapters, so there is nothing for PEFT"):
        write_adapter(tmp_path, pretrained.config, {}, lora=lora)
    other = {f"blocks/extra/{x}": arrays[f"blocks/mlp/up/{x}"] for x in ("lora/a", "lora/b")}
    with pytest.raises(UnsupportedError, match=r"no tensor for blocks/extra/kernel"):
        write_adapter(tmp_path, pretrained.config, other, lora=lora)
    (tmp_path / ADAPTER_CONFIG).write_text("{}")
    with pytest.raises(FileExistsError, match=r"adapter_config.json is there already"):
        write_adapter(tmp_path, pretrained.config, arrays, lora=lora)
