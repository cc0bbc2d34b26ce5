"""Blocks of arrays in safetensors files, beside NumPy's slicing and the package safetensors."""

from __future__ import annotations

import json
import struct

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from zerojax.safetensors_files import (
    SafetensorsError,
    Tensor,
    read_block,
    read_table,
    write_file,
    write_files,
)

ARRAYS = {
    "cube": np.arange(60, dtype=np.float32).reshape(3, 4, 5),
    "half": np.arange(6, dtype=np.float16).reshape(2, 3),
    "number": np.asarray(7, np.int64),
    "empty": np.zeros((0, 3), np.uint8),
}


@pytest.fixture
def file(tmp_path):
    save_file(ARRAYS, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    return tmp_path / "theirs.safetensors"


def test_the_table_is_the_packages(file):
    table = read_table(file)
    assert {n: (x.shape, x.dtype) for n, x in table.items()} == {
        n: (x.shape, x.dtype) for n, x in ARRAYS.items()
    }
    for name, tensor in table.items():
        whole = [[(0, size)] for size in tensor.shape]
        block, count = read_block(file, tensor, whole)
        np.testing.assert_array_equal(block, ARRAYS[name])
        assert count == tensor.num_bytes


@pytest.mark.parametrize("seed", range(30))
def test_any_block_is_numpys(seed, file):
    """Runs in every dimension, in order; only the block's own bytes are read."""
    random = np.random.default_rng(seed)
    runs = []
    for size in ARRAYS["cube"].shape:
        cuts = sorted(random.choice(size + 1, 2 * random.integers(1, size // 2 + 1), replace=False))
        runs.append(list(zip(cuts[::2], cuts[1::2], strict=True)))
    block, count = read_block(file, read_table(file)["cube"], runs)
    picked = np.ix_(*[np.r_[tuple(slice(*run) for run in dim)] for dim in runs])
    np.testing.assert_array_equal(block, ARRAYS["cube"][picked])
    assert count == block.nbytes


def test_what_is_written_is_read_by_the_package(tmp_path):
    arrays = {**ARRAYS, "brain": np.arange(4).astype(jnp.bfloat16)}
    tensors = [Tensor(name=n, shape=x.shape, dtype=x.dtype) for n, x in arrays.items()]
    asked: list[str] = []

    def values(tensor):
        asked.append(tensor.name)
        return arrays[tensor.name]

    names = write_files(tmp_path, tensors, values, shard_bytes=100, metadata={"format": "pt"})
    assert asked == list(arrays)
    assert len(names) == 2  # the cube is larger than a file may be, and has one of its own
    found = {n: x for name in names for n, x in load_file(tmp_path / name).items()}
    for name, wanted in arrays.items():
        assert (found[name].dtype, found[name].shape) == (wanted.dtype, wanted.shape)
        assert found[name].tobytes() == wanted.tobytes()


def test_a_dtype_that_the_format_lacks_is_refused(tmp_path):
    tensor = Tensor(name="z", shape=(2,), dtype=np.dtype(np.complex64))
    with pytest.raises(SafetensorsError, match="'z' is complex64, which safetensors does not have"):
        write_file(tmp_path / "x", [tensor], lambda _: np.zeros(2, np.complex64), metadata={})


def broken(path, table: object, size: int = 64):
    head = json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + bytes(size))
    return path


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 9]}, "lies at 0 to 9, but has 8 bytes"),
        ({"dtype": "F7", "shape": [2], "data_offsets": [0, 8]}, "unknown dtype 'F7'"),
        ({"dtype": "F32", "shape": [20], "data_offsets": [0, 80]}, "cut short: 'x' should end"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}, "lies at -8 to 0"),
        ({"shape": [2]}, "table is damaged .*dtype"),
        (7, "table is damaged"),
    ],
)
def test_a_damaged_table_is_named(row, words, tmp_path):
    with pytest.raises(SafetensorsError, match=words):
        read_table(broken(tmp_path / "x", {"x": row}))


def test_a_file_that_became_shorter_is_noticed(file):
    tensor = read_table(file)["cube"]
    file.write_bytes(file.read_bytes()[: tensor.start + 10])
    with pytest.raises(SafetensorsError, match="ends within 'cube'"):
        read_block(file, tensor, [[(0, size)] for size in tensor.shape])
