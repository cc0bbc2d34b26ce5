"""Folders with 8-bit codes: what transformers computes from them, decoded here by other means.

`python -m tests.zoo.test_quantized_export FOLDER` writes the folders of tests/oracles/quantized.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from tests.support.hugging_face_folders import tensors_of, write_folder
from tests.support.hugging_face_weights import weights
from tests.support.refusals import Refusal
from tests.zoo.test_hugging_face import plan_for, trained_model
from zerojax.training.hugging_face_export import to_hugging_face
from zerojax.training.trainer import Trainer
from zerojax.zoo.hugging_face import UnsupportedError, from_hugging_face

SEEN = Path(__file__).parents[1] / "data" / "quantized.json"
CASES = ("llama", "phi3", "gemma3", "smollm3")
LARGEST_CODE = {"int8": 127, "int4": 7}
WIDE = "llama of whole groups"
PAIRS = [*((case, kind) for case in CASES for kind in ("int8", "fp8")), (WIDE, "int4")]


def original_of(case: str) -> dict[str, np.ndarray]:
    """{name: values} of a model. For int4 each kernel has a multiple of 32 inputs."""
    if case != WIDE:
        return tensors_of(case)
    wider = {16: 32, 24: 64, 8: 16}
    shapes = {
        n: [wider.get(size, size) for size in x.shape] for n, x in tensors_of("llama").items()
    }
    return {name: weights(name, shape) for name, shape in shapes.items()}


def write_plain(folder: Path, case: str, tensors: Mapping[str, np.ndarray] | None = None) -> Path:
    tensors = original_of(case) if tensors is None else tensors
    if case != WIDE:
        return write_folder(folder, case, tensors=tensors)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
    return write_folder(folder, "llama", tensors=tensors, **sizes)


def export(folder: Path, case: str, kind: str, **options) -> Path:
    """Writes a model without training, sharded over two devices, in codes."""
    pretrained = from_hugging_face(write_plain(folder / "plain", case))
    trainer = Trainer(plan_for(pretrained, devices=2, zero=3))
    to_hugging_face(trainer, folder / kind, quantize=kind, **options)
    return folder / kind


def read_file(path: Path) -> dict[str, np.ndarray]:
    """Reads a safetensors file; the package cannot make NumPy arrays of float8."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    table = json.loads(content[8:start])
    table.pop("__metadata__")
    dtypes = {"F8_E4M3": jnp.float8_e4m3fn, "BF16": jnp.bfloat16}
    dtypes |= {"F32": np.float32, "I32": np.int32, "I64": np.int64}
    result = {}
    for name, entry in table.items():
        first, last = (start + offset for offset in entry["data_offsets"])
        values = np.frombuffer(content[first:last], dtypes[entry["dtype"]])
        result[name] = values.reshape(entry["shape"])
    return result


def decoded(folder: Path) -> dict[str, np.ndarray]:
    """Reads a folder's tensors by the format's description, codes times scales in float32."""
    found = {n: x for file in folder.glob("*.safetensors") for n, x in read_file(file).items()}
    result = {}
    for name, values in found.items():
        base = name.removesuffix("_packed")
        if name.endswith("_packed"):
            rows, columns = found[f"{base}_shape"]
            scales = found[f"{base}_scale"].astype(np.float32)
            bits = 32 * values.shape[1] // columns
            words = values.astype(np.int64) & 0xFFFFFFFF
            codes = [(words >> shift) % 2**bits for shift in range(0, 32, bits)]
            whole = np.stack(codes, -1).reshape(rows, -1)[:, :columns] - 2 ** (bits - 1)
            result[base] = whole * np.repeat(scales, columns // scales.shape[1], 1)
        elif f"{name}_scale" in found:
            result[name] = values.astype(np.float32) * found[f"{name}_scale"].astype(np.float32)
        elif not name.endswith(("_scale", "_shape")):
            result[name] = values
    return {name: np.asarray(values, np.float32) for name, values in result.items()}


@pytest.mark.thorough
@pytest.mark.parametrize(("case", "kind"), PAIRS)
def test_logits_are_those_of_transformers_on_the_same_folder(case, kind, tmp_path):
    """float32 on both sides, sums in another order; the tolerance of unquantized folders."""
    values = decoded(export(tmp_path, case, kind))
    original = original_of(case)
    assert values.keys() == original.keys()
    changed = {name for name in values if not np.array_equal(values[name], original[name])}
    assert changed
    assert all(name.startswith("model.layers.") for name in changed)
    for name in changed:
        rows = np.abs(original[name]).max(1, keepdims=True)
        step = 2.0**-4 if kind == "fp8" else 0.5 / LARGEST_CODE[kind]
        assert (np.abs(values[name] - original[name]) <= 1.001 * step * rows).all(), name
    write_plain(tmp_path / "decoded", case, values)
    model = trained_model(from_hugging_face(tmp_path / "decoded"))
    seen = json.loads(SEEN.read_text())["cases"][f"{case}, {kind}"]
    logits = jax.jit(lambda tokens: model(tokens))(np.asarray(seen["tokens"], np.int32))
    wanted = np.asarray(seen["last_logits"])
    error = np.abs(np.asarray(logits)[:, -3:] - wanted).max() / np.abs(wanted).max()
    assert error < 2e-5


def test_the_description_and_sizes_are_what_servers_read(tmp_path):
    """Codes are a byte for each weight; the rest is in the dtype of the export."""
    folder = export(tmp_path, "llama", "int8", dtype="bfloat16")
    about = json.loads((folder / "config.json").read_text())
    assert about["torch_dtype"] == "bfloat16"
    quantization = about["quantization_config"]
    assert quantization["quant_method"] == "compressed-tensors"
    assert quantization["format"] == "pack-quantized"
    (group,) = quantization["config_groups"].values()
    assert group["weights"]["num_bits"] == 8
    with safe_open(folder / "model.safetensors", "numpy") as file:
        kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        packed = [name for name in kinds if name.endswith("_packed")]
        assert {kinds[name] for name in packed} == {"I32"}
        assert kinds["lm_head.weight"] == kinds[f"{packed[0][:-7]}_scale"] == "BF16"
        for name in packed:
            rows, columns = tensors_of("llama")[name[:-7]].shape
            assert file.get_slice(name).get_shape() == [rows, columns // 4]
    with pytest.raises(UnsupportedError, match="quantization_config"):
        from_hugging_face(folder)


def test_settings_of_generation_are_copied_without_a_tokenizer_too(tmp_path):
    folder = write_folder(tmp_path / "plain", "llama")
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    trainer = Trainer(plan_for(from_hugging_face(folder), devices=1, zero=0))
    to_hugging_face(trainer, tmp_path / "out", quantize="fp8")
    assert (tmp_path / "out" / "generation_config.json").read_text() == '{"eos_token_id": 7}'


def test_rows_of_zeros_are_exact_and_others_are_refused(tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = tensors_of("llama")
    tensors[name][3] = 0
    write_folder(tmp_path / "zeros", "llama", tensors=tensors)
    trainer = Trainer(plan_for(from_hugging_face(tmp_path / "zeros"), devices=1, zero=0))
    for kind in ("int8", "fp8"):
        to_hugging_face(trainer, tmp_path / kind, quantize=kind)
        assert not decoded(tmp_path / kind)[name][3].any()
    tensors[name][3, 0] = np.nan
    write_folder(tmp_path / "nan", "llama", tensors=tensors)
    trainer = Trainer(plan_for(from_hugging_face(tmp_path / "nan"), devices=1, zero=0))
    with pytest.raises(ValueError, match=f"{name}.*not finite"):
        to_hugging_face(trainer, tmp_path / "out", quantize="int8")
    assert not (tmp_path / "out").exists()
    to_hugging_face(trainer, tmp_path / "out")


@pytest.mark.parametrize(
    ("case", "kind", "value", "remedy", "good"),
    [
        ("gpt2", "int8", "'int8' GPT2LMHeadModel", "without", [None]),
        ("llama", "int2", "'int2'", "int8 int4 fp8", ["int8", "fp8"]),
        ("mixtral", "int8", "'int8' experts", "without", [None]),
    ],
)
def test_what_has_no_codes_is_refused(case, kind, value, remedy, good, tmp_path):
    pretrained = from_hugging_face(write_folder(tmp_path / "plain", case))
    trainer = Trainer(plan_for(pretrained, devices=1, zero=0))
    write = lambda kind: to_hugging_face(trainer, tmp_path / f"{kind}", quantize=kind)  # noqa: E731
    Refusal(kind, value, remedy, good).check(write)
    assert not (tmp_path / kind).exists()


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    for case, kind in PAIRS:
        export(Path(sys.argv[1]) / case, case, kind)
