"""What tests of the bucket store do in processes of their own: be measured, hold a lock, be killed.

Imports no JAX, so that a process starts at once; `python tests/support/store_process.py TASK
FOLDER ...`.
"""

import contextlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

import zerojax.checkpoint.store.direct_io
from zerojax.checkpoint.store import BucketStore, StoreError

NUM_BUCKETS = 6
BUCKET_BYTES = (1 << 18) + 8  # not a multiple of the block


def expected(index: int, generation: int) -> np.ndarray:
    """Contents of a bucket after as many sweeps; each sweep makes them from those before."""
    first = np.arange(BUCKET_BYTES // 8, dtype=np.uint64) * np.uint64(index + 1)
    return first * np.uint64(generation > 0) + np.uint64(max(generation - 1, 0) * (index + 7))


def advance(store: BucketStore) -> None:
    """One sweep that takes every bucket from its generation to the next."""
    if store.generation == 0:
        for bucket in store.sweep(dtype=np.uint64, read=False):
            bucket.array[:] = expected(bucket.index, 1)
            bucket.write()
        return
    for bucket in store.sweep(dtype=np.uint64):
        bucket.array += np.uint64(bucket.index + 7)
        bucket.write()


def wrong_buckets(store: BucketStore) -> list[int]:
    """Buckets that are not, bit for bit, those of the store's generation."""
    return [
        bucket.index
        for bucket in store.sweep(dtype=np.uint64)
        if not np.array_equal(bucket.array, expected(bucket.index, store.generation))
    ]


def peak_bytes() -> int:
    """The largest this process has been. `ru_maxrss` would count its parent before exec, too."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


def measure(folder: Path) -> None:
    """Prints the peak after sweeps of a small store, and after sweeps of one 8 times as large."""
    peaks = []
    for num_buckets in (8, 64):
        with BucketStore.create(
            folder / str(num_buckets), num_buckets=num_buckets, bucket_bytes=1 << 20
        ) as store:
            for _ in range(2):
                for bucket in store.sweep():
                    bucket.array[:] = bucket.index
                    bucket.write()
        peaks.append(peak_bytes())
    print(json.dumps(peaks))


def hold(folder: Path) -> None:
    """Keeps the store open until the process is killed."""
    with BucketStore.open(folder):
        print("open", flush=True)
        time.sleep(600)


def stop_inside(folder: Path) -> None:
    """Dies in the middle of a sweep, after bucket 2 was written."""
    store = BucketStore.open(folder)
    for bucket in store.sweep():
        bucket.array[:] = 1
        bucket.write()
        if bucket.index == 4:
            os.kill(os.getpid(), signal.SIGKILL)


def kill_often(folder: Path, trials: str, seed: str, mistake: str = "") -> None:
    """Forks `trials` processes that sweep a durable store until they are killed; prints a report.

    Every third kills itself at a chosen call inside the replacement of the manifest, the others
    are killed at a random time. After each, the store is opened and compared; the first loss ends
    it.
    """
    chance = random.Random(int(seed))
    if mistake == "in_place":  # the store writes over what counts, and should be found out
        BucketStore._next_slot = lambda store, index: store._manifest.slots[index]
    BucketStore.create(
        folder, num_buckets=NUM_BUCKETS, bucket_bytes=BUCKET_BYTES, durable=True
    ).close()
    report = {"kills": 0, "inside_manifest": 0, "lost": [], "generations": [], "begun": 0}
    for trial in range(int(trials)):
        ended_out, ended_in = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(ended_out)
            _sweep_until_killed(folder, ended_in, _fatal_call(trial, chance))
        os.close(ended_in)
        if not _dies_by_itself(trial):
            os.read(ended_out, 8)  # it has opened the store
            time.sleep(chance.uniform(0, 0.06))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"the child failed by itself: {status}"
        with open(ended_out, "rb") as pipe:
            ended = pipe.read()
        last = int.from_bytes(ended[-8:], "little") if ended else 0
        report["kills"] += 1
        report["inside_manifest"] += _dies_by_itself(trial)
        with BucketStore.open(folder) as store:
            try:
                wrong = wrong_buckets(store)
            except StoreError as error:  # a bucket is torn
                wrong = [str(error)]
            report["begun"] += store.generation > last > 0
            report["generations"].append(store.generation)
            if wrong or store.generation < last:
                report["lost"].append([trial, last, store.generation, wrong])
                break
    print(json.dumps(report))


def _dies_by_itself(trial: int) -> bool:
    return trial % 3 == 0


def _fatal_call(trial: int, chance: random.Random) -> tuple[str, int, bool] | None:
    """Name of the system call, which time, and whether it is still carried out."""
    draw = (
        chance.choice(["fsync", "rename", "write", "fdatasync"]),
        chance.randint(1, 4),
        chance.random() < 0.5,
    )
    return draw if _dies_by_itself(trial) else None


def _sweep_until_killed(folder: Path, ended: int, fatal: tuple[str, int, bool] | None) -> None:
    """In the child: sends the number of each generation once it has ended. Never returns."""
    with contextlib.suppress(BaseException):
        store = BucketStore.open(folder)
        os.write(ended, store.generation.to_bytes(8, "little"))
        if fatal:
            name, countdown, carried_out = fatal
            real = getattr(os, name)
            calls = iter(range(1, countdown + 1))

            def call(*args):
                last = next(calls) == countdown
                if last and not carried_out:
                    os.kill(os.getpid(), signal.SIGKILL)
                result = real(*args)
                if last:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            # Everything that the store asks of the system goes through this name.
            zerojax.checkpoint.store.direct_io.os = _Replaced(name, call)
            zerojax.checkpoint.store.store.os = _Replaced(name, call)
        send = os.write
        while True:
            advance(store)
            send(ended, store.generation.to_bytes(8, "little"))
    os._exit(1)


class _Replaced:
    """The module `os` with one function replaced."""

    def __init__(self, name, function):
        setattr(self, name, function)

    def __getattr__(self, name):
        return getattr(os, name)


TASKS = {task.__name__: task for task in (measure, hold, stop_inside, kill_often)}

if __name__ == "__main__":
    TASKS[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
