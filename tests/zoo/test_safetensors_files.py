"""Blocks of arrays in safetensors files, beside NumPy's slicing and the package safetensors."""

from __future__ import annotations

import json
import os
import random
import struct

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import SafetensorError as TheirError
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tests.support.refusals import refused
from zerojax.zoo.hugging_face import safetensors
from zerojax.zoo.hugging_face.safetensors import (
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


@pytest.mark.sampled(6)
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
    with pytest.raises(
        SafetensorsError, match="'z' is complex64, which safetensors does not support"
    ):
        write_file(tmp_path / "x", [tensor], lambda _: np.zeros(2, np.complex64), metadata={})


def broken(path, table: object, size: int = 64):
    head = table if isinstance(table, bytes) else json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + bytes(size))
    return path


def row(start: int = 0, stop: int = 8, shape: object = (2,), dtype: object = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


DAMAGED = {
    "the size of another shape": ({"x": row(0, 9)}, "'x' is at 0 to 9, but has 8 bytes"),
    "an unknown dtype": ({"x": row(dtype="F7")}, "'x' has the unknown dtype 'F7'"),
    "a dtype of scales": ({"x": row(dtype="F8_E8M0")}, "'x' has dtype F8_E8M0, .* BF16"),
    "a list as dtype": ({"x": row(dtype=["F32"])}, r"'x' has the unknown dtype \['F32'\]"),
    "an array behind the end": ({"x": row(0, 80, [20])}, "truncated: 'x' should end"),
    "an array in the table": ({"x": row(-8, 0)}, r"'x' has the data_offsets \[-8, 0\]"),
    "offsets that are no integers": ({"x": row(0.0, 8.0)}, r"data_offsets \[0.0, 8.0\]"),
    "one offset": ({"x": {**row(), "data_offsets": [0]}}, r"data_offsets \[0\], which are not two"),
    "no dtype": ({"x": {"shape": [2]}}, "'x' is .*, without a dtype"),
    "a number in place of an array": ({"x": 7}, "'x' is 7, without"),
    "a negative shape": ({"x": row(0, 24, [-2, -3])}, r"'x' has the shape \[-2, -3\]"),
    "a shape of floats": ({"x": row(shape=[2.0])}, r"'x' has the shape \[2.0\]"),
    "a shape of bools": ({"x": row(0, 4, [True])}, r"'x' has the shape \[True\]"),
    "a text as shape": ({"x": row(shape="2")}, "'x' has the shape '2'"),
    "200 dimensions": ({"x": row(0, 4, [1] * 200)}, "'x' has 200 dimensions; .* 64"),
    "empty, of 2^100 rows": ({"x": row(0, 0, [2**100, 0])}, "'x' has the shape .* too large"),
    "the same bytes twice": ({"x": row(), "y": row()}, "'y' begins at 0, .* array .* at 8"),
    "some of them twice": ({"x": row(), "y": row(4, 12)}, "'y' begins at 4, .* ends at 8"),
    "bytes of nobody": ({"x": row(), "y": row(12, 20)}, "'y' begins at 12, 4 bytes after"),
    "bytes before the first": ({"x": row(8, 16)}, "'x' begins at 8, 8 bytes after"),
    "bytes behind the last": ({"x": row()}, "56 bytes more than its arrays"),
    "a name twice": (b'{"x": {"dtype": "F32"}, "x": 1}', "the key 'x' twice"),
    "5,000 digits": (b'{"x": ' + b"9" * 5000 + b"}", "a number of 5000 characters"),
    "deep nesting": (b'{"x": ' + b"[" * 100_000, "nested deeper than 64 levels"),
    "a list": (b"[1, 2]", r"it is \[1, 2\], not an object"),
    "no text": (b'{"\xff": 1}', "is not UTF-8"),
    "notes that are not texts": ({"__metadata__": {"a": 1}}, "not texts by name"),
    "control characters": ({"\x1b[2J": 7}, r"'\\x1b\[2J' is 7"),
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_table_is_named(case, tmp_path):
    table, words = DAMAGED[case]
    with pytest.raises(SafetensorsError, match=words) as caught:
        read_table(broken(tmp_path / "file", table))
    assert str(tmp_path / "file") in str(caught.value)
    assert len(str(caught.value)) < 500


def test_more_arrays_than_a_model_has_are_refused_before_they_are_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors, "MAX_ARRAYS", 3)
    tables = [{f"x{n}": row(8 * n, 8 * n + 8) for n in range(count)} for count in (3, 4)]
    assert len(read_table(broken(tmp_path / "few", tables[0], 24))) == 3
    many = broken(tmp_path / "many", json.dumps(tables[1])[:-1].encode(), 32)  # no JSON
    refused(lambda: read_table(many), [many, 3], "fewer")
    monkeypatch.setattr(safetensors, "MAX_VALUES", 20)
    refused(lambda: read_table(broken(many, {"x": row(shape=[1] * 30)})), [many, 3], "fewer")


@pytest.mark.parametrize("length", [0, 2**40, 2**63, 2**64 - 1])
def test_a_length_that_cannot_be_is_refused(length, tmp_path):
    path = broken(tmp_path / "x", {})
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    with pytest.raises(SafetensorsError):
        read_table(path)


def test_a_pipe_and_a_device_are_refused_before_they_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name, kind in (("pipe", "a named pipe"), ("zero", "a device")):
        with pytest.raises(SafetensorsError, match=f"is {kind}, not a regular file"):
            read_table(tmp_path / name)


def test_changed_bytes_are_refused_or_mean_what_they_mean_to_the_package(file, tmp_path):
    """Ours accepts nothing that theirs does not, and then the same shapes, dtypes and bytes."""
    good, draw, path = file.read_bytes(), random.Random(3), tmp_path / "x"
    head = 8 + struct.unpack("<Q", good[:8])[0]
    kept = 0
    for _ in range(1500):
        changed = bytearray(good)
        for _ in range(draw.randint(1, 2)):
            at = draw.randrange(min(head, len(changed) - 1))
            way = draw.random()
            if way < 0.7:
                changed[at] = draw.choice(b'0123456789[]{},:-.e"Fx \xff')
            elif way < 0.85:
                del changed[at]
            else:
                changed = changed[: draw.randrange(2, len(changed))]
        path.write_bytes(changed)
        try:
            table = read_table(path)
        except SafetensorsError:
            continue
        kept += 1
        try:
            with safe_open(path, "np") as theirs:
                for name in theirs.keys():  # noqa: SIM118  (it is no mapping)
                    wanted = theirs.get_tensor(name)
                    tensor = table.pop(name)
                    block, _ = read_block(path, tensor, [[(0, size)] for size in tensor.shape])
                    assert (block.shape, block.dtype) == (wanted.shape, wanted.dtype)
                    assert block.tobytes() == wanted.tobytes()
        except TheirError as error:
            pytest.fail(f"the package refuses what was read here: {error}")
        assert not table
    assert kept > 20


def test_a_file_that_became_shorter_is_noticed(file):
    tensor = read_table(file)["cube"]
    file.write_bytes(file.read_bytes()[: tensor.start + 10])
    with pytest.raises(SafetensorsError, match="ends within 'cube'"):
        read_block(file, tensor, [[(0, size)] for size in tensor.shape])
