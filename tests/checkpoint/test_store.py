"""Buckets on disk: contents, padding, memory, the fallback, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import zerojax.checkpoint.store.direct_io
from tests.support.store_process import BUCKET_BYTES, NUM_BUCKETS, advance, expected, wrong_buckets
from zerojax.checkpoint.store import BucketStore, StoreError
from zerojax.checkpoint.store.direct_io import BLOCK, aligned_buffer, pad_to_block
from zerojax.checkpoint.store.sweep import TransferPool

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=[False, True], ids=["scratch", "durable"])
def durable(request) -> bool:
    return request.param


def make(folder: Path, **options) -> BucketStore:
    return BucketStore.create(
        folder, **{"num_buckets": NUM_BUCKETS, "bucket_bytes": BUCKET_BYTES, **options}
    )


def run(task: str, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.support.store_process", task, *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # no threads of numpy's where it forks
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def fail_transfers(monkeypatch, name: str, number: int, *, after: int) -> None:
    """The call `os.<name>` of the store fails with `number` once it was made `after` times."""
    real, calls, lock = getattr(os, name), [], threading.Lock()

    def call(*args):
        with lock:
            calls.append(1)
            if len(calls) > after:
                raise OSError(number, os.strerror(number))
        return real(*args)

    monkeypatch.setattr(os, name, call)


def test_contents_after_many_sweeps_and_openings(tmp_path, durable):
    with make(tmp_path, durable=durable) as store:
        assert store.generation == 0
        assert wrong_buckets(store) == []  # zeros
        for _ in range(7):
            advance(store)
        assert wrong_buckets(store) == []
    for buffers in (3, 4, 7):
        with BucketStore.open(tmp_path, num_buffers=buffers, num_threads=buffers) as store:
            advance(store)
            assert wrong_buckets(store) == []
    with BucketStore.open(tmp_path) as store:
        assert (store.generation, store.is_durable) == (10, durable)
        assert (store.num_buckets, store.bucket_bytes) == (NUM_BUCKETS, BUCKET_BYTES)
        assert wrong_buckets(store) == []


def test_buckets_that_a_sweep_passes_over_stay_as_they_were(tmp_path, durable):
    with make(tmp_path, durable=durable) as store:
        advance(store)
        for round_number in range(3):
            visited = []
            for bucket in store.sweep(order=[5, 0, 2]):
                visited.append(bucket.index)
                if bucket.index != 0:
                    bucket.array[:] = 10 * round_number + bucket.index
                    bucket.write()
            assert visited == [5, 0, 2]
    with BucketStore.open(tmp_path) as store:
        assert store.generation == 4
        for bucket in store.sweep():
            if bucket.index in (5, 2):
                assert (bucket.array == 20 + bucket.index).all()
            else:
                assert np.array_equal(bucket.array.view(np.uint64), expected(bucket.index, 1))


def test_an_order_may_go_there_and_back(tmp_path, durable):
    """As the layers of a forward and a backward pass; such buckets are only read."""
    with make(tmp_path, durable=durable) as store:
        advance(store)
        order = [0, 1, 2, 3, 2, 1, 0]
        for bucket, index in zip(store.sweep(order=order), order, strict=True):
            assert np.array_equal(bucket.array.view(np.uint64), expected(index, 1))
        sweep = store.sweep(order=order)
        assert next(sweep).index == 0
        with pytest.raises(StoreError, match="bucket 1 occurs more than once"):
            next(sweep).write()
        sweep.close()
        assert wrong_buckets(store) == []
        sweep = store.sweep(order=[1, 3, 1])
        next(sweep)
        bucket = next(sweep)  # the one that comes once
        bucket.array[:] = 7
        bucket.write()
        assert len(list(sweep)) == 1
        assert [int(b.array[0]) for b in store.sweep(order=[3])] == [7]


def test_a_durable_store_goes_back_by_one_generation(tmp_path):
    with make(tmp_path, durable=True) as store:
        for _ in range(3):
            advance(store)
    with pytest.raises(StoreError, match="generation 1 .*delete"):
        BucketStore.open(tmp_path, generation=1)
    for _ in range(2):
        with BucketStore.open(tmp_path, generation=2) as store:
            assert (store.generation, wrong_buckets(store)) == (2, [])
        with BucketStore.open(tmp_path) as store:
            assert store.generation == 2
            advance(store)
            assert (store.generation, wrong_buckets(store)) == (3, [])
    with make(tmp_path / "scratch") as store:
        advance(store)
    with pytest.raises(StoreError, match="generation 0"):
        BucketStore.open(tmp_path / "scratch", generation=0)


def test_buckets_that_were_never_written_are_zeros(tmp_path, durable):
    """Also where another bucket was in the same memory before."""
    with make(tmp_path, durable=durable) as store:
        for bucket in store.sweep(order=[0, 1, 2], read=False):
            bucket.array[:] = 255
            bucket.write()
        assert [int(bucket.array.max()) for bucket in store.sweep()] == [255] * 3 + [0] * 3


def test_a_sweep_that_writes_nothing_makes_no_generation(tmp_path, durable):
    with make(tmp_path, durable=durable) as store:
        before = (tmp_path / "manifest.json").read_bytes()
        assert wrong_buckets(store) == []
        assert store.generation == 0
        assert (tmp_path / "manifest.json").read_bytes() == before


@pytest.mark.parametrize(
    "num_bytes", [1, BLOCK - 1, BLOCK, BLOCK + 1, (4 << 20) + 17, (8 << 20) + BLOCK]
)
def test_padding(tmp_path, num_bytes):
    """Below, at and above a block, and above one and two pieces of a transfer."""
    content = np.random.default_rng(num_bytes).integers(0, 256, (3, num_bytes), np.uint8)
    with make(tmp_path, num_buckets=3, bucket_bytes=num_bytes) as store:
        for bucket in store.sweep(read=False):
            assert bucket.array.shape == (num_bytes,)
            assert bucket.array.ctypes.data % BLOCK == 0
            bucket.array[:] = content[bucket.index]
            bucket.write()
        for bucket in store.sweep():
            assert np.array_equal(bucket.array, content[bucket.index])
        assert store.disk_bytes == 3 * pad_to_block(num_bytes)
    size = (tmp_path / "buckets0.bin").stat()
    assert size.st_size == 3 * pad_to_block(num_bytes)
    assert size.st_blocks * 512 >= size.st_size  # every block is reserved
    assert not (tmp_path / "buckets1.bin").exists()


def test_transfers_go_past_the_page_cache_here(tmp_path):
    with make(tmp_path) as store:
        if not store.is_direct:
            pytest.skip("the file system of the temporary folder O_DIRECT")
        flags = Path(f"/proc/self/fdinfo/{store._descriptors[0]}").read_text()
    assert int(flags.partition("flags:")[2].split()[0], 8) & os.O_DIRECT


def test_short_transfers_are_continued_at_a_block(tmp_path, monkeypatch):
    """A system call may move less than it was asked for, also to the middle of a block."""
    reads, writes = os.preadv, os.pwritev
    offsets = []

    def short(call, descriptor, buffers, offset):
        offsets.append(offset)
        return call(descriptor, [buffers[0][: BLOCK * 5]], offset) - (len(buffers[0]) > BLOCK * 5)

    monkeypatch.setattr(os, "preadv", lambda *args: short(reads, *args))
    monkeypatch.setattr(os, "pwritev", lambda *args: short(writes, *args))
    with make(tmp_path) as store:
        for _ in range(3):
            advance(store)
        assert wrong_buckets(store) == []
    assert len(offsets) > 3 * 2 * NUM_BUCKETS * (BUCKET_BYTES // (BLOCK * 5))
    assert not any(offset % BLOCK for offset in offsets)


def test_memory_is_a_fixed_ring(tmp_path, monkeypatch):
    made = []

    def count(num_bytes):
        made.append(num_bytes)
        return aligned_buffer(num_bytes)

    with make(tmp_path / "small", num_buckets=2) as small:
        small_bytes = small.buffer_bytes
    monkeypatch.setattr(zerojax.checkpoint.store.direct_io, "aligned_buffer", count)
    with make(tmp_path / "large", num_buckets=40) as store:
        assert store.buffer_bytes == small_bytes == 3 * pad_to_block(BUCKET_BYTES)
        opened = list(made)
        places = set()
        for _ in range(3):
            for bucket in store.sweep():
                places.add(bucket.array.ctypes.data)
                bucket.write()
    assert made == opened
    assert len(places) == 3
    assert [size for size in made if size > BLOCK] == [pad_to_block(BUCKET_BYTES)] * 3


def test_peak_memory_is_flat_in_the_size_of_the_store(tmp_path):
    """8 and 64 buckets of 1 MiB: 56 MiB more on disk. 2 MiB are for the allocator's moods."""
    result = run("measure", tmp_path)
    assert result.returncode == 0, result.stderr
    small, large = json.loads(result.stdout)
    assert large - small < 2 << 20


def test_one_bucket_is_read_ahead_and_one_written_behind(tmp_path, monkeypatch):
    """While the caller holds bucket i, i + 1 is asked for and i - 1 need not have been written."""
    with make(tmp_path, num_buckets=5) as store:
        for bucket in store.sweep(read=False):
            bucket.write()
        started = []

        def start(kind):
            real = getattr(TransferPool, kind)

            def call(pool, descriptor, buffer, offset):
                started.append((kind, offset // pad_to_block(BUCKET_BYTES)))
                return real(pool, descriptor, buffer, offset)

            return call

        monkeypatch.setattr(TransferPool, "read", start("read"))
        monkeypatch.setattr(TransferPool, "write", start("write"))
        for bucket in store.sweep():
            started.append(("computed", bucket.index))
            bucket.write()
    between = [("read", 0)]
    for index in range(5):
        between += [("read", index + 1)] * (index < 4)
        between += [("computed", index), ("write", index)]
    assert started == between


@pytest.mark.parametrize("moment", ["open", "first transfer"])
def test_without_direct_transfers_one_warning_and_the_same_contents(tmp_path, monkeypatch, moment):
    direct = set()
    real_open, real_read = os.open, os.preadv

    def refuse_open(path, flags, *mode):
        if flags & os.O_DIRECT and moment == "open":
            raise OSError(errno.EINVAL, "Invalid argument")
        descriptor = real_open(path, flags, *mode)
        (direct.add if flags & os.O_DIRECT else direct.discard)(descriptor)
        return descriptor

    def refuse_read(descriptor, buffers, offset):
        if descriptor in direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "open", refuse_open)
    monkeypatch.setattr(os, "preadv", refuse_read)
    with pytest.warns(UserWarning, match="O_DIRECT") as warned:
        store = make(tmp_path, durable=True)
    assert len(warned) == 1
    assert warned[0].filename == __file__
    with store:
        assert not store.is_direct
        for _ in range(3):
            advance(store)
        assert wrong_buckets(store) == []


def test_an_array_is_read_only_once_it_is_written_or_gone(tmp_path):
    with make(tmp_path) as store:
        kept = []
        for bucket in store.sweep():
            kept.append(bucket)
            bucket.array[0] = 1
            if bucket.index == 2:
                bucket.write()
                with pytest.raises(ValueError, match="read-only"):
                    bucket.array[0] = 2
                with pytest.raises(StoreError, match="bucket 2 was already written"):
                    bucket.write()
        with pytest.raises(ValueError, match="read-only"):
            kept[0].array[0] = 2
        with pytest.raises(StoreError, match="bucket 0 .* no longer in memory"):
            kept[0].write()


def test_several_buckets_may_be_held(tmp_path, durable):
    """They are written later, in any order; one that is held no more is not."""
    with make(tmp_path, durable=durable, num_buffers=6) as store:
        advance(store)
        kept = []
        for bucket in store.sweep(ahead=3, held=3):
            assert np.array_equal(bucket.array.view(np.uint64), expected(bucket.index, 1))
            kept.append(bucket)
            if len(kept) >= 3 and bucket.index % 2 == 0:
                for late in (kept[-2], kept[-3]):
                    late.array[:] = late.index
                    late.write()
        with pytest.raises(StoreError, match="bucket 0 .* no longer in memory"):
            kept[0].write()
        written = [bucket.index for bucket in kept[: NUM_BUCKETS - (NUM_BUCKETS % 2 == 0) - 1]]
        for bucket in store.sweep():
            if bucket.index in written:
                assert (bucket.array == bucket.index).all()
            else:
                assert np.array_equal(bucket.array.view(np.uint64), expected(bucket.index, 1))
        with pytest.raises(ValueError, match="num_buffers=7"):
            store.sweep(ahead=4, held=3)


def test_a_store_that_is_there_is_not_written_over(tmp_path, durable):
    with make(tmp_path, durable=True) as store:
        advance(store)
    with pytest.raises(StoreError, match="exists already; open it, pass replace=True"):
        make(tmp_path)
    with BucketStore.open(tmp_path) as store:
        assert wrong_buckets(store) == []
    with make(tmp_path, durable=durable, replace=True) as store:
        assert store.generation == 0
        assert wrong_buckets(store) == []
        assert (tmp_path / "buckets1.bin").exists() == durable


@pytest.mark.parametrize("there", [False, True])
def test_nothing_to_open(tmp_path, there):
    folder = tmp_path / "none"
    if there:
        make(folder).close()
        (folder / "manifest.json").unlink()  # as when creation is stopped before its end
    with pytest.raises(StoreError, match="(has no manifest.json|does not exist).*create the store"):
        BucketStore.open(folder)
    with make(folder) as store:
        assert wrong_buckets(store) == []


def test_another_process_that_has_it_open_is_named(tmp_path):
    make(tmp_path).close()
    holder = subprocess.Popen(
        [sys.executable, "-m", "tests.support.store_process", "hold", str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        for attempt in (BucketStore.open, lambda folder: make(folder, replace=True)):
            with pytest.raises(StoreError, match=f"written by process {holder.pid} on .*, since"):
                attempt(tmp_path)
    finally:
        holder.kill()
        holder.communicate()
    with BucketStore.open(tmp_path), pytest.raises(StoreError, match="open .* in this process"):
        BucketStore.open(tmp_path)


def test_too_little_disk_is_refused_before_files_are_made(tmp_path, monkeypatch):
    class Disk:
        f_bavail, f_frsize = 256, 4096  # 1 MiB

    monkeypatch.setattr(os, "statvfs", lambda folder: Disk)
    with pytest.raises(OSError, match=r"3\.1 MiB .* 1\.0 MiB are free; free 2\.1 MiB.*dura"):
        make(tmp_path, durable=True)
    with pytest.raises(OSError, match=r"1\.6 MiB .* or keep less on it") as caught:
        make(tmp_path)
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []
    make(tmp_path, num_buckets=3).close()


def test_blocks_that_cannot_be_reserved_leave_nothing_behind(tmp_path, monkeypatch):
    calls = []

    def full(descriptor, offset, length):
        calls.append(length)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="could not be reserved: No space left.*durable=False") as e:
        make(tmp_path, durable=True)
    assert e.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []
