"""What becomes of a store when a disk is full or at fault, or its process is killed."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint.test_store import fail_transfers, flip, make, run
from tests.support.store_process import BUCKET_BYTES, NUM_BUCKETS, advance, wrong_buckets
from zerojax.checkpoint.store import BucketStore, StoreError
from zerojax.checkpoint.store.direct_io import BLOCK, aligned_buffer, pad_to_block
from zerojax.checkpoint.store.sweep import TransferPool, checksum_piece

PADDED = pad_to_block(BUCKET_BYTES)


@pytest.mark.parametrize("place", [0, BUCKET_BYTES - 1, PADDED - 1], ids=["first", "last", "pad"])
def test_a_flipped_bucket_is_named(tmp_path, place):
    with make(tmp_path) as store:
        advance(store)
    flip(tmp_path / "buckets0.bin", 3 * PADDED + place)
    with BucketStore.open(tmp_path) as store:
        seen = []
        with pytest.raises(StoreError, match="bucket 3 .* generation 1 wrote"):
            seen.extend(bucket.index for bucket in store.sweep())
        assert seen == [0, 1, 2]
        assert [bucket.index for bucket in store.sweep(order=[0, 1, 2, 4, 5])] == [0, 1, 2, 4, 5]


def test_a_stale_bucket_is_named(tmp_path):
    """One that the disk never wrote: whole, but of the generation before."""
    with make(tmp_path) as store:
        advance(store)
        old = (tmp_path / "buckets0.bin").read_bytes()[2 * PADDED : 3 * PADDED]
        advance(store)
    with (tmp_path / "buckets0.bin").open("r+b") as file:
        file.seek(2 * PADDED)
        file.write(old)
    with (
        BucketStore.open(tmp_path) as store,
        pytest.raises(StoreError, match="bucket 2 .* generation 2 wrote"),
    ):
        wrong_buckets(store)


@pytest.mark.parametrize("size", [512, BLOCK, PADDED // 2])
def test_a_torn_bucket_is_named(tmp_path, size):
    """The last bytes of bucket 4 never reached the disk: a sector, a block, half of it."""
    with make(tmp_path) as store:
        advance(store)
        old = (tmp_path / "buckets0.bin").read_bytes()
        advance(store)
    end = 4 * PADDED + BUCKET_BYTES // 512 * 512
    with (tmp_path / "buckets0.bin").open("r+b") as file:
        file.seek(end - size)
        file.write(old[end - size : end])
    with (
        BucketStore.open(tmp_path) as store,
        pytest.raises(StoreError, match="bucket 4 .* incomplete"),
    ):
        wrong_buckets(store)


def test_blocks_that_changed_places_are_found():
    words = np.arange(4 * BLOCK // 8, dtype=np.uint64)
    swapped = words.reshape(4, -1)[[0, 2, 1, 3]].copy()
    assert checksum_piece(words.view(np.uint8).data) != checksum_piece(swapped.view(np.uint8).data)


def test_a_torn_bucket_of_the_slot_that_does_not_count_is_no_matter(tmp_path):
    with make(tmp_path, durable=True) as store:
        advance(store)
        advance(store)
    flip(tmp_path / "buckets1.bin", 7)  # generation 1; generation 2 is in slot 0
    with BucketStore.open(tmp_path) as store:
        assert wrong_buckets(store) == []
        advance(store)
        assert wrong_buckets(store) == []


@pytest.mark.parametrize(("name", "done"), [("preadv", "read"), ("pwritev", "written")])
def test_errors_of_threads_are_raised_in_the_caller(tmp_path, monkeypatch, name, done):
    with make(tmp_path, durable=True, num_threads=1) as store:  # in order
        advance(store)
        with monkeypatch.context() as faulty:
            fail_transfers(faulty, name, errno.EIO, after=2)
            with pytest.raises(OSError, match=f"bucket 2 could not be {done}: Input/output") as e:
                advance(store)
        assert e.value.errno == errno.EIO
        assert wrong_buckets(store) == []  # the generation before
        advance(store)
        assert wrong_buckets(store) == []


def test_a_failed_transfer_is_over_before_its_error_is_raised(monkeypatch):
    """The first piece fails at once, the second is still being read into the buffer."""
    ended = []

    def read(descriptor, buffers, offset):
        if offset == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        time.sleep(0.2)
        ended.append(offset)
        return len(buffers[0])

    monkeypatch.setattr(os, "preadv", read)
    pool = TransferPool(num_threads=2, piece_bytes=BLOCK)
    with pytest.raises(OSError, match="Input/output"):
        pool.read(-1, aligned_buffer(2 * BLOCK), 0).wait()
    assert ended == [BLOCK]
    pool.close()


def test_data_is_on_disk_before_the_manifest_that_tells_of_it(tmp_path, monkeypatch):
    """A killed process cannot show this, a power cut would: the order of the system calls."""
    calls = []
    for name in ("pwritev", "fdatasync", "write", "fsync", "rename"):
        real = getattr(os, name)

        def call(*args, real=real, name=name):
            result = real(*args)
            calls.append(name)
            return result

        monkeypatch.setattr(os, name, call)
    with make(tmp_path, durable=True) as store:
        calls.clear()
        advance(store)
    expected_calls = ["pwritev"] * NUM_BUCKETS + ["fdatasync", "write", "fsync", "rename", "fsync"]
    assert calls == expected_calls


def test_a_full_disk_leaves_a_durable_store_as_it_was(tmp_path, monkeypatch):
    with make(tmp_path, durable=True, num_threads=1) as store:  # in order
        advance(store)
        with monkeypatch.context() as full:
            fail_transfers(full, "pwritev", errno.ENOSPC, after=3)
            with pytest.raises(
                OSError, match="bucket 3 .* No space left.*free some space.*generation 1 is intact"
            ) as caught:
                advance(store)
        assert caught.value.errno == errno.ENOSPC
    with BucketStore.open(tmp_path) as store:
        assert store.generation == 1
        assert wrong_buckets(store) == []


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("name", ["write", "fsync", "rename"])
def test_a_manifest_that_cannot_be_written(tmp_path, monkeypatch, name, durable):
    """Of a scratch store it is the mark that a sweep begins, before any bucket is written over."""
    with make(tmp_path, durable=durable) as store:
        advance(store)
        with monkeypatch.context() as full:
            fail_transfers(full, name, errno.ENOSPC, after=0)
            with pytest.raises(OSError, match=r"manifest.json could not be replaced: No space"):
                advance(store)
        with pytest.raises(StoreError, match="close the store, fix"):
            advance(store)
    with BucketStore.open(tmp_path) as store:
        assert store.generation == 1
        assert wrong_buckets(store) == []


def test_a_folder_that_cannot_be_synced_may_have_either_manifest(tmp_path, monkeypatch):
    """After the rename it is unknown what lasts, so this process must write no slot any more."""
    with make(tmp_path, durable=True) as store:
        advance(store)
        with monkeypatch.context() as faulty:
            fail_transfers(faulty, "fsync", errno.EIO, after=1)
            with pytest.raises(OSError, match="could not be replaced"):
                advance(store)
        with pytest.raises(StoreError, match="generation 2 could not be written"):
            advance(store)
    with BucketStore.open(tmp_path) as store:
        assert store.generation == 2
        assert wrong_buckets(store) == []


@pytest.mark.parametrize("how", ["break", "exception"])
def test_a_loop_that_is_left_keeps_the_durable_generation(tmp_path, how):
    with make(tmp_path, durable=True) as store:
        advance(store)

        def leave():
            for bucket in store.sweep():
                bucket.array[:] = 9
                bucket.write()
                if bucket.index == 3 and how == "exception":
                    raise ArithmeticError("of the caller")
                if bucket.index == 3:
                    break

        if how == "exception":
            with pytest.raises(ArithmeticError, match="of the caller"):
                leave()
        else:
            leave()
        assert store.generation == 1
        assert wrong_buckets(store) == []
        advance(store)
        assert wrong_buckets(store) == []


def test_a_loop_that_is_left_makes_a_scratch_store_mixed(tmp_path):
    with make(tmp_path) as store:
        advance(store)
        for bucket in store.sweep():
            if bucket.index == 2:
                break  # nothing was written
        assert wrong_buckets(store) == []
        for bucket in store.sweep():
            bucket.array[:] = 9
            bucket.write()
            break
        with pytest.raises(StoreError, match="generation 2 was interrupted"):
            advance(store)
    with pytest.raises(StoreError, match="generation 2 was interrupted"):
        BucketStore.open(tmp_path)


@pytest.mark.thorough
def test_a_scratch_store_that_was_killed_in_a_sweep_is_refused(tmp_path):
    with make(tmp_path) as store:
        advance(store)
    assert run("stop_inside", tmp_path).returncode == -signal.SIGKILL
    with pytest.raises(
        StoreError, match=r"generation 2 .* generation 1; .*replace=True.*durable=True"
    ):
        BucketStore.open(tmp_path)
    with make(tmp_path, replace=True) as store:
        assert wrong_buckets(store) == []


def kills(folder: Path, number: int) -> dict:
    result = run("kill_often", folder, number, 1)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["kills"] == number
    assert report["lost"] == []  # [trial, generation known to have ended, found, wrong buckets]
    return report


@pytest.mark.thorough
def test_five_kills_lose_nothing(tmp_path):
    assert kills(tmp_path, 5)["inside_manifest"] == 2


@pytest.mark.thorough
def test_sixty_kills_at_any_moment_lose_nothing(tmp_path):
    report = kills(tmp_path, 60)
    assert report["inside_manifest"] == 20
    # They fell into different moments: most within the life of some generation, some between the
    # rename and the caller's knowing of it.
    assert len(set(report["generations"])) > 20
    assert report["begun"] > 0


@pytest.mark.thorough
def test_the_kills_would_show_a_store_that_writes_over_what_counts(tmp_path):
    result = run("kill_often", tmp_path, 6, 1, "in_place")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["lost"]
