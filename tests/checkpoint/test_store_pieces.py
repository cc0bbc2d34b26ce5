"""Arrays that are written in pieces of shards are read in any other parts, bit for bit."""

import ctypes
import errno
import itertools
import math
import os

import ml_dtypes
import numpy as np
import pytest

from zerojax.checkpoint.store import StoreError, direct_io
from zerojax.checkpoint.store.boxes import boxes_of_run
from zerojax.checkpoint.store.direct_io import StreamFile
from zerojax.checkpoint.store.pieces import PieceReader, PieceWriter, ShardBlock


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 5), (2, 1, 3, 2)])
def test_boxes_of_every_run(shape):
    size = math.prod(shape)
    numbers = np.arange(size).reshape(shape)
    for first, end in itertools.combinations(range(size + 1), 2):
        boxes = list(boxes_of_run(shape, first, end - first))
        parts = [
            numbers[tuple(slice(a, a + n) for a, n in zip(at, sizes, strict=True))].ravel()
            for at, sizes in boxes
        ]
        assert np.concatenate(parts).tolist() == list(range(first, end))
        assert len(boxes) <= max(2 * len(shape) - 1, 1)
    assert list(boxes_of_run(shape, 0, 0)) == []


def write_shards(folder, name, array, splits, pieces, *, rows=None, processes=1):
    """Cuts `array` into a grid of shards, each into runs of `pieces` elements."""
    sizes = tuple(n // parts for n, parts in zip(array.shape, splits, strict=True))
    grid = list(itertools.product(*(range(parts) for parts in splits)))
    for process in range(processes):
        with PieceWriter(folder, process) as writer:
            for at in grid[process::processes]:
                start = tuple(i * n for i, n in zip(at, sizes, strict=True))
                index = tuple(slice(a, a + n) for a, n in zip(start, sizes, strict=True))
                flat = np.ascontiguousarray(array[index]).ravel()
                block = ShardBlock(name=name, start=start, shape=sizes, rows=rows)
                for first in range(0, flat.size, pieces):
                    writer.write(block, first, flat[first : first + pieces])


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("splits", [(1, 1, 1), (2, 1, 1), (1, 3, 2), (2, 3, 1)])
@pytest.mark.parametrize("pieces", [5, 6, 48])
def test_any_part_of_any_cut(tmp_path, splits, pieces, dtype):
    array = np.random.default_rng(0).normal(size=(4, 6, 2)).astype(dtype)
    write_shards(tmp_path, "a/kernel", array, splits, pieces, processes=2)
    reader = PieceReader(tmp_path)
    assert reader.names == {"a/kernel"}
    for start, size in [((0, 0, 0), (4, 6, 2)), ((1, 2, 1), (2, 3, 1)), ((3, 5, 0), (1, 1, 2))]:
        index = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
        found = reader.read("a/kernel", (start, size))
        assert found.dtype == array.dtype
        assert np.array_equal(found.view(np.uint8), np.ascontiguousarray(array[index]).view("u1"))


def test_rows_in_another_order_and_padding(tmp_path):
    array = np.arange(5 * 3, dtype=np.float32).reshape(5, 3)
    rows = (1, 3, -1, 0, 4, 2)
    stored = np.stack([array[row] if row >= 0 else np.zeros(3, np.float32) for row in rows])
    stored = np.pad(stored, ((0, 0), (0, 1)))  # a dimension that shards did not divide
    write_shards(tmp_path, "x", stored, (2, 2), 4, rows=rows)
    reader = PieceReader(tmp_path)
    assert np.array_equal(reader.read("x", ((0, 0), (5, 3))), array)
    assert np.array_equal(reader.read("x", ((2, 1), (2, 2))), array[2:4, 1:3])


def test_copies_of_a_shard_count_once(tmp_path):
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    with PieceWriter(tmp_path, 0) as writer:
        for _ in range(2):
            writer.write(ShardBlock(name="x", start=(0, 0), shape=(3, 4)), 0, array.ravel())
    with PieceWriter(tmp_path, 1) as writer:
        writer.write(ShardBlock(name="x", start=(0, 0), shape=(3, 4)), 0, array.ravel())
    assert np.array_equal(PieceReader(tmp_path).read("x", ((0, 0), (3, 4))), array)


def test_what_is_missing_is_told(tmp_path):
    array = np.arange(12, dtype=np.float32)
    with PieceWriter(tmp_path, 0) as writer:
        writer.write(ShardBlock(name="x", start=(0,), shape=(12,)), 0, array[:8])
    with pytest.raises(StoreError, match=r"x: 4 of 12 elements from \(0,\) on were never written"):
        PieceReader(tmp_path).read("x", ((0,), (12,)))
    (tmp_path / "process_0.bin").write_bytes(b"1234")
    with pytest.raises(StoreError, match="4 bytes instead of 32"):
        PieceReader(tmp_path)
    (tmp_path / "process_0.json").unlink()
    with pytest.raises(StoreError, match="process_"):
        PieceReader(tmp_path)


@pytest.mark.parametrize("sizes", [[], [0, 1], [4095, 1, 4096], [2**22 + 5] * 8, [2**25 + 3]])
def test_a_stream_has_every_byte_in_order(tmp_path, sizes):
    """Whole buffers, rests, more than the ring holds."""
    random = np.random.default_rng(1)
    parts = [random.integers(0, 256, size, np.uint8) for size in sizes]
    file = StreamFile(tmp_path / "x")
    for part in parts:
        file.append(part)
    assert file.num_bytes == sum(sizes)
    file.close()
    assert (tmp_path / "x").read_bytes() == b"".join(part.tobytes() for part in parts)
    with pytest.raises(FileExistsError):
        StreamFile(tmp_path / "x")


def test_a_stream_tells_what_the_disk_says(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    file = StreamFile(tmp_path / "x")
    monkeypatch.setattr(os, "pwritev", full)
    file.append(np.ones(5000, np.uint8))
    with pytest.raises(OSError, match="No space left"):
        file.close()
    file.abandon()


def test_where_blocks_cannot_be_reserved_the_file_only_grows(tmp_path, monkeypatch):
    """The C library's own way then touches every block, beside the threads that write them."""

    class Libc:
        @staticmethod
        def fallocate64(*_):
            ctypes.set_errno(errno.EOPNOTSUPP)
            return -1

    def emulated(*_):
        raise AssertionError("this touches blocks that are being written")

    monkeypatch.setattr(direct_io, "_LIBC", Libc)
    monkeypatch.setattr(os, "posix_fallocate", emulated)
    values = np.random.default_rng(2).integers(0, 256, 2**23 + 77, np.uint8)
    file = StreamFile(tmp_path / "x")
    file.append(values)
    file.close()
    assert (tmp_path / "x").read_bytes() == values.tobytes()


@pytest.mark.parametrize("length", [1, 2**20])
def test_reserving_makes_the_file_longer_or_says_what_the_system_says(tmp_path, length):
    with (tmp_path / "x").open("wb") as file:
        direct_io.reserve(file.fileno(), length)
        assert os.fstat(file.fileno()).st_size == length
    with (tmp_path / "x").open("rb") as file, pytest.raises(OSError, match="Bad file descriptor"):
        direct_io.reserve(file.fileno(), 2 * length)
