"""Refusals of checkpoints, folders and disks."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from tests.processes.test_launch import is_running, wait_until
from tests.support.refusals import Refusal, check_words, complaint, refused
from zerojax.checkpoint import Checkpointer, folders, metadata, retention
from zerojax.checkpoint.errors import (
    CheckpointError,
    DamagedError,
    DiskFullError,
    FolderInUseError,
    MachineError,
)
from zerojax.checkpoint.export import export
from zerojax.checkpoint.inspection import find_step
from zerojax.checkpoint.store import BucketStore, manifest, sweep
from zerojax.checkpoint.store import store as store_module
from zerojax.checkpoint.store.direct_io import StoreError
from zerojax.cli import main
from zerojax.runtime import folder_lock
from zerojax.runtime.folder_lock import FolderTakenError, hold
from zerojax.runtime.user_files import open_to_everybody

ABOUT: dict[str, Any] = {"data_state": {}, "config": {}, "plan": {}}


def state_of(value: float = 1.0) -> dict[str, Any]:
    return {"params": {"w": jnp.full((4, 4), float(value))}}


def abstract(**leaves: Any) -> dict[str, Any]:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = {"w": ((4, 4), jnp.float32), **leaves}
    return {"params": {n: jax.ShapeDtypeStruct(*x, sharding=sharding) for n, x in shapes.items()}}


def save(path: Path, *steps: int) -> None:
    with Checkpointer(path, keep=9) as checkpointer:
        for step in steps:
            checkpointer.save(step, state_of(step), **ABOUT)


def restored(path: Path, step: int | None = None) -> int:
    with Checkpointer(path) as checkpointer:
        return checkpointer.restore(abstract(), step).step


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    save(path, 1, 2)
    return path


@pytest.fixture
def saved(two_steps: Path, tmp_path: Path) -> Path:
    """The checkpoints of a run, of steps 1 and 2."""
    return Path(shutil.copytree(two_steps, tmp_path / "run"))


def damage(path: Path, *steps: int) -> None:
    """Leaves a step without the file that describes it."""
    for step in steps:
        (path / str(step) / metadata.FILE_NAME).unlink()


@contextlib.contextmanager
def failing(place: Any, name: str, error: OSError) -> Iterator[None]:
    """A function raises an error of the operating system in here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, name, lambda *_, **__: (_ for _ in ()).throw(error))
        yield


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
DENIED = PermissionError(errno.EACCES, "no")


def disk(free: int) -> os.statvfs_result:
    return os.statvfs_result([1, 1, 0, 0, free, 0, 0, 0, 0, 255])


@contextlib.contextmanager
def another_process_in(folder: Path) -> Iterator[int]:
    """The number of a process that writes into a folder."""
    program = (
        "import sys, time; from zerojax.runtime.folder_lock import hold;"
        "held = hold(sys.argv[1]); print(flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program, os.fspath(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            yield process.pid
        finally:
            process.kill()


# --- what is saved --------------------------------------------------------------------------------


def test_what_a_state_may_hold(tmp_path):
    with Checkpointer(tmp_path, keep=9) as checkpointer:

        def trial(given: tuple[int, Any]) -> None:
            checkpointer.save(given[0], {"w": given[1]}, **ABOUT)

        good = [(1, jnp.asarray(1.0))]
        Refusal((1, 1.0), "w float", "jnp.asarray", good, TypeError).check(trial)
        key = jax.random.key(0)
        remedy, good = "jax.random.key_data(key)", [(2, jax.random.key_data(key))]
        Refusal((2, key), "w key", remedy, good, TypeError).check(trial)
        donated = jnp.ones(3)
        good = [(3, jax.jit(lambda x: x + 1, donate_argnums=0)(donated))]
        Refusal((3, donated), "w donated", "returned", good, TypeError).check(trial)


@pytest.mark.parametrize(
    ("bad", "value", "remedy", "good"),
    [
        ({3: 1}, "3 int", "'3'", [{"3": 1}]),
        ({"x": float("nan")}, "data_state['x'] nan", "None string", [{"x": None}, {"x": "nan"}]),
        ({"x": 10**200}, "data_state['x'] 100", "string", [{"x": str(10**200)}]),
        (
            {"x": np.int64(3)},
            "data_state['x'] int64",
            "None bool int float str lists dicts",
            [{"x": [None, True, 1, 1.0, "a", [1], {"a": 1}]}],
        ),
        ([], "data_state list", "dict", [{}]),
    ],
    ids=["key", "nan", "digits", "type", "list"],
)
def test_what_the_position_of_the_data_may_hold(bad, value, remedy, good):
    make = lambda state: metadata.make_metadata(  # noqa: E731
        1, {}, data_state=state, config={}, plan={}
    )
    Refusal(bad, value, remedy, good, TypeError).check(make)


def test_metadata_that_nobody_would_read(tmp_path, monkeypatch):
    monkeypatch.setattr(metadata, "MAX_BYTES", 4096)
    with Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        given = lambda data: checkpointer.save(  # noqa: E731
            1, state_of(), **{**ABOUT, "data_state": data}
        )
        remedy = "data_state config plan"
        Refusal({"x": "x" * 5000}, "1 4096", remedy, [{}], CheckpointError).check(given)
    assert restored(tmp_path) == 1


def test_a_step_that_is_there_already(saved, tmp_path):
    again = lambda: save(saved, 1)  # noqa: E731
    refused(again, ["step 1", saved, "step 2"], "1 another", error=CheckpointError)
    save(tmp_path / "another", 1)
    for step in (1, 2):
        shutil.rmtree(saved / str(step))
    again()
    below = lambda step: save(tmp_path / "below", step)  # noqa: E731
    Refusal(-1, "-1", "0", [0], CheckpointError).check(below)


def test_a_closed_checkpointer(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.close()
    late = lambda: checkpointer.save(1, state_of(), **ABOUT)  # noqa: E731
    refused(late, [tmp_path, "closed"], "new", error=CheckpointError)
    save(tmp_path, 1)


def test_a_url_for_a_checkpointer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(lambda: Checkpointer("gs://bucket/run"), "gs://bucket/run", "mount")
    assert not list(tmp_path.iterdir())
    save(tmp_path / "mounted" / "run", 1)


@pytest.mark.parametrize("word", ["last", "every"])
@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (1.5, TypeError)])
def test_how_many_steps_are_kept(word, value, error):
    kept = lambda given: retention.Retention(**{word: given})  # noqa: E731
    Refusal(value, [f"{word}={value}"], "1 None", [1, None], error).check(kept)


def test_a_full_disk_and_a_folder_that_is_a_file(tmp_path):
    remedy, full, file = "space another", tmp_path / "full", tmp_path / "file"
    with failing(folders, "check_free", FULL):
        refused(lambda: save(full, 1), ["step 1", full, "none"], remedy, error=DiskFullError)
    save(full, 1)
    file.touch()
    refused(lambda: save(file, 1), ["step 1", file], "folder another", error=MachineError)
    save(tmp_path / "another", 1)
    file.unlink()
    save(file, 1)


def test_a_folder_that_cannot_be_written_is_told_before_a_run(tmp_path, monkeypatch):
    (tmp_path / "file").touch()

    def trial(name: str, num_bytes: int = 0) -> None:
        with Checkpointer(tmp_path / name) as checkpointer:
            checkpointer.check_writable(num_bytes)

    value = [tmp_path / "file" / "run"]
    refused(lambda: trial("file/run"), value, "write", error=CheckpointError)
    trial("run")
    large = 2 * shutil.disk_usage(tmp_path).free
    value = [tmp_path / "run", "GiB"]
    refused(lambda: trial("run", large), value, "space another", error=CheckpointError)
    usage = shutil.disk_usage(tmp_path)._replace(free=2 * large)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)  # as after making room
    trial("run", large)


def test_an_expired_step_that_stays(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=1)
    checkpointer.save(1, state_of(), **ABOUT)
    checkpointer.wait()
    with failing(folders, "remove", DENIED):
        checkpointer.save(2, state_of(), **ABOUT)
        with pytest.warns(RuntimeWarning, match="step 1") as caught:
            checkpointer.wait()
    check_words(str(caught[0].message), [tmp_path], "delete")
    shutil.rmtree(tmp_path / "1")
    checkpointer.save(3, state_of(), **ABOUT)
    checkpointer.close()
    assert checkpointer.steps() == (3,)


# --- what is read back ----------------------------------------------------------------------------


def test_no_checkpoints_there(saved, tmp_path):
    none = tmp_path / "rnu"
    Refusal(none, [none], "path train", [saved], CheckpointError).check(restored)
    save(none, 1)
    assert restored(none) == 1


def test_a_step_that_was_not_saved(saved):
    step = lambda step: restored(saved, step)  # noqa: E731
    Refusal(7, [saved, "7"], "1 2", [1, 2], CheckpointError).check(step)


@pytest.mark.parametrize("damaged", [1, 2])
def test_a_damaged_step_names_one_that_will_do(saved, damaged):
    damage(saved, damaged)
    step, other = lambda step: restored(saved, step), 3 - damaged
    value = [saved / str(damaged), metadata.FILE_NAME]
    Refusal(damaged, value, [f"step {other}"], [other], DamagedError).check(step)


def test_no_step_that_is_whole(two_steps, saved, tmp_path):
    damage(saved, 1, 2)
    before = sorted(saved.rglob("*"))
    value = [saved / "2", metadata.FILE_NAME, "1"]
    refused(lambda: restored(saved), value, "copy empty", error=DamagedError)
    assert sorted(saved.rglob("*")) == before
    save(tmp_path / "empty", 1)
    shutil.rmtree(saved / "1")
    shutil.copytree(two_steps / "1", saved / "1")
    with pytest.warns(RuntimeWarning, match="step 1"):
        assert restored(saved) == 1


def test_a_damaged_step_that_cannot_be_renamed(saved):
    damage(saved, 2)
    with Checkpointer(saved) as checkpointer:
        with pytest.warns(RuntimeWarning, match="rename"):
            checkpointer.restore(abstract())
        again = lambda: checkpointer.save(2, state_of(), **ABOUT)  # noqa: E731
        with failing(folders, "set_aside", DENIED):
            refused(again, ["step 2", saved], "rename remove", error=MachineError)
        (saved / "2").rename(saved / "looked at later")
        again()
    assert restored(saved) == 2


def test_a_checkpoint_of_another_model(saved, tmp_path):
    def trial(path: Path, leaves: dict[str, Any]) -> int:
        with Checkpointer(path) as checkpointer:
            if checkpointer.latest_step() is None:
                return 0  # a run that begins
            return checkpointer.restore(abstract(**leaves)).step

    wider = {"w": ((4, 8), jnp.float32)}
    value = [saved / "2", "params/w", "float32[4,4]", "float32[4,8]"]
    remedy = [metadata.FILE_NAME, "another"]
    refused(lambda: trial(saved, wider), value, remedy, error=CheckpointError)
    assert trial(tmp_path / "another", wider) == 0
    arrays = json.loads((saved / "2" / metadata.FILE_NAME).read_text())["arrays"]
    kind, shape = re.fullmatch(r"(\w+)(\[.*\])", arrays["params/w"]).groups()
    assert trial(saved, {"w": (tuple(json.loads(shape)), kind)}) == 2


def test_a_state_without_shardings(saved):
    struct = lambda x, **more: jax.ShapeDtypeStruct(x.shape, x.dtype, **more)  # noqa: E731
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    bare, good = (
        jax.tree.map(lambda x, more=more: struct(x, **more), abstract())
        for more in ({}, {"sharding": sharding})
    )
    with Checkpointer(saved) as checkpointer:
        remedy = "plan.abstract_portable sharding="
        Refusal(bare, "params/w sharding", remedy, [good], TypeError).check(checkpointer.restore)
    leaves = jax.tree.leaves(line_plan().abstract_portable)
    assert all(leaf.sharding is not None for leaf in leaves)


def line_plan() -> zerojax.Plan:
    return zerojax.make_plan(
        (lambda key: {"w": jnp.zeros((4, 4))}, lambda params, batch: batch["x"] @ params["w"]),
        {},
        example_batch={"x": np.zeros((8, 4), np.float32)},
        loss=lambda model, batch: jnp.mean(model(batch) ** 2),
    )


@pytest.mark.parametrize(("content", "value"), [("{", "JSON"), ("[1]", "steps")])
@pytest.mark.parametrize("way", ["fix", "remove"])
def test_a_list_of_kept_steps_that_cannot_be_read(saved, content, value, way):
    file = saved / retention.FILE_NAME
    retention.keep_step(saved, "best", 1, {})
    good = file.read_text()
    file.write_text(content)
    kept = lambda: retention.kept_steps(saved)  # noqa: E731
    refused(kept, [file, value], "remove", error=MachineError)
    if way == "fix":
        file.write_text(good)
        assert kept()["best"]["step"] == 1
    else:
        file.unlink()
        assert kept() == {}


# --- commands about checkpoints -------------------------------------------------------------------


def test_commands_of_other_folders_and_steps(saved, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    example = "runs/tiny_shakespeare"
    complaint(capsys, ["checkpoint", "list", "rnu"], "rnu", example)
    Path(example).parent.mkdir()
    saved.rename(Path(example))
    assert main(["checkpoint", "list", example]) == 0
    capsys.readouterr()
    Path("nothing").mkdir()
    complaint(capsys, ["checkpoint", "list", "nothing"], "nothing", "run checkpoints")
    shutil.copytree(example, "nothing/checkpoints")
    assert main(["checkpoint", "list", "nothing/checkpoints"]) == 0
    assert main(["checkpoint", "list", "nothing"]) == 0
    capsys.readouterr()
    words = "checkpoint", "export", example
    complaint(capsys, [*words, "7", "out"], [example, "7"], "1 2")
    assert not Path("out").exists()
    complaint(capsys, [*words, "best", "out"], "best", "number zerojax.KeepBest()")
    for step in ("1", "2"):
        assert main([*words, step, f"out{step}"]) == 0
    capsys.readouterr()
    complaint(capsys, [*words, "2", "out2"], ["out2"], "not")


def test_exports_that_do_not_fit_or_are_damaged(saved, tmp_path, monkeypatch, capsys):
    words, out = ["checkpoint", "export", os.fspath(saved)], os.fspath(tmp_path / "out")
    with monkeypatch.context() as small:
        small.setattr(os, "statvfs", lambda _: disk(40))
        complaint(capsys, [*words, out], [tmp_path, "MiB"], '"--dtype bf16" another', 1)
        assert main([*words, out, "--dtype", "bf16"]) == 0
        capsys.readouterr()
        # What is narrow already gets no such remedy.
        small.setattr(os, "statvfs", lambda _: disk(9))
        narrow = [*words, f"{out}-3", "--dtype", "bf16"]
        assert "--dtype" not in complaint(capsys, narrow, [tmp_path, "MiB"], "another", 1)
    assert main([*words, f"{out}-2"]) == 0
    found = find_step(saved, 2)
    found.metadata.fingerprints.update(dict.fromkeys(found.metadata.fingerprints, "0" * 8))
    damaged = lambda: export(found, tmp_path / "damaged")  # noqa: E731
    refused(damaged, [saved / "2", "params/w"], "earlier", error=DamagedError)
    export(find_step(saved, 1), tmp_path / "damaged")


def test_an_array_that_the_format_does_not_have(tmp_path, capsys):
    with Checkpointer(tmp_path / "run") as checkpointer:
        state = {"params": {"w": jnp.ones((4, 4), jnp.float8_e4m3b11fnuz)}}
        checkpointer.save(1, state, **ABOUT)
    words = ["checkpoint", "export", os.fspath(tmp_path / "run"), os.fspath(tmp_path / "out")]
    complaint(capsys, words, "w float8_e4m3b11fnuz", "--dtype fp32 bf16")
    for kind in ("fp32", "bf16"):
        assert main([*words[:-1], f"{words[-1]}-{kind}", "--dtype", kind]) == 0


def test_what_is_pruned(saved, two_steps, capsys):
    words = ["checkpoint", "prune", os.fspath(saved)]
    steps = lambda: sorted(path.name for path in saved.iterdir() if path.name.isdigit())  # noqa: E731
    complaint(capsys, words, "keep", '"--keep N" "--every K" --damaged')
    assert steps() == ["1", "2"]
    assert main([*words, "--damaged"]) == main([*words, "--every", "1"]) == 0
    assert main([*words, "--keep", "1"]) == 0
    assert steps() == ["2"]
    damage(saved, 2)
    capsys.readouterr()
    complaint(capsys, [*words, "--damaged"], [saved, "2"], "delete")
    assert steps() == ["2"]
    shutil.copytree(two_steps / "1", saved / "1")
    assert main([*words, "--damaged"]) == 0
    assert steps() == ["1"]


@pytest.mark.thorough
def test_a_folder_that_another_process_writes(saved, tmp_path, capsys):
    words = ["checkpoint", "prune", os.fspath(saved), "--keep", "1"]
    with another_process_in(saved) as number:
        value = [saved, f"process {number}"]
        complaint(capsys, words, value, "another")
        refused(lambda: save(saved, 3), value, "another", error=FolderInUseError)
        save(tmp_path / "another", 3)
        os.kill(number, 15)
        assert wait_until(lambda: not is_running(number))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(folder_lock, "EXPIRES", 5.0)
            save(saved, 3)
    assert main(words) == 0


def test_what_lies_in_the_place_of_a_lock(tmp_path):
    lock = tmp_path / folder_lock.NAME
    lock.mkdir()
    refused(lambda: hold(tmp_path), [lock, "file"], "move", error=FolderTakenError)
    lock.rename(tmp_path / "moved")
    hold(tmp_path).release()


def test_a_later_run_of_this_process(tmp_path):
    first, second = hold(tmp_path), hold(tmp_path)
    refused(first.keep, [tmp_path], "close another", error=FolderTakenError)
    first.release()
    second.keep()
    second.release()
    hold(tmp_path / "another").release()


def test_a_folder_that_everybody_may_write(tmp_path):
    tmp_path.chmod(0o777)
    command = re.search(r"chmod \S+ \S+", open_to_everybody(tmp_path))[0]
    subprocess.run(shlex.split(command), check=True)
    assert open_to_everybody(tmp_path) is None


# --- files of optimizer state ---------------------------------------------------------------------


def store_at(folder: Path, **options: Any) -> BucketStore:
    return BucketStore.create(folder, **{"num_buckets": 2, "bucket_bytes": 4096, **options})


def fill(store: BucketStore, value: int = 1) -> None:
    for bucket in store.sweep(read=False):
        bucket.array[:] = value
        bucket.write()


def read(store: BucketStore) -> list[int]:
    return [int(bucket.array[0]) for bucket in store.sweep()]


def cut_manifest(folder: Path) -> None:
    (folder / manifest.NAME).write_text((folder / manifest.NAME).read_text()[:-4])


def changed_manifest(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / manifest.NAME
        values = json.loads(path.read_text().splitlines()[0]) | changes
        text = json.dumps(values)
        path.write_text(f"{text}\ncrc32 {zlib.crc32(text.encode()):08x}\n")

    return change


def torn_bucket(folder: Path) -> None:
    with (folder / "buckets0.bin").open("r+b") as file:
        file.write(b"torn")


STORES = {
    "cut": (cut_manifest, "manifest.json checksum"),
    "of another format": (changed_manifest(format=99), "manifest.json 99"),
    "of other values": (changed_manifest(slots=[7, 7]), "manifest.json values"),
    "large": (
        lambda folder: os.truncate(folder / manifest.NAME, 65 << 20),
        "manifest.json 67108864",
    ),
    "short": (lambda folder: os.truncate(folder / "buckets0.bin", 4096), "buckets0.bin 4096 8192"),
    "torn": (torn_bucket, '"bucket 0" "generation 1"'),
}


@pytest.mark.parametrize("case", STORES)
def test_a_damaged_store(case, tmp_path):
    folder, (harm, value) = tmp_path / "store", STORES[case]
    with store_at(folder) as store:
        fill(store)
    harm(folder)

    def go_on() -> list[int]:
        with BucketStore.open(folder) as store:
            return read(store)

    message = refused(go_on, value, "delete", error=StoreError)
    assert str(folder) in message
    shutil.rmtree(folder)
    with store_at(folder) as store:
        fill(store, 2)
    assert go_on() == [2, 2]


def refused_store(call: Callable[[], object], folder: Path, remedy: str) -> None:
    refused(call, [folder], remedy, error=StoreError)


def test_no_store_or_one_that_is_there_already(tmp_path):
    folder = tmp_path / "store"
    refused_store(lambda: BucketStore.open(folder), folder, "create")
    store_at(folder).close()
    refused_store(lambda: store_at(folder), folder, "open replace=True another")
    BucketStore.open(folder).close()
    store_at(folder, replace=True).close()
    store_at(tmp_path / "another").close()
    (folder / manifest.NAME).unlink()
    refused_store(lambda: BucketStore.open(folder), folder, "create manifest.json")
    store_at(folder).close()
    BucketStore.open(folder).close()


def test_a_store_that_is_open_or_closed(tmp_path):
    folder = tmp_path / "store"
    store = store_at(folder)
    refused_store(lambda: BucketStore.open(folder), folder, "close another")
    store_at(tmp_path / "another").close()
    store.close()
    refused_store(lambda: next(store.sweep()), folder, "open")
    BucketStore.open(folder).close()


def test_sweeps(tmp_path):
    with store_at(tmp_path) as store:
        sweep = store.sweep()
        next(sweep)
        refused_store(lambda: read(store), tmp_path, "finish")
        assert len(list(sweep)) == 1
        fill(store)
        for bucket in store.sweep():
            bucket.write()
            value = [f"bucket {bucket.index}"]
            refused(bucket.write, value, "bucket.write() once", error=StoreError)
        ordered = lambda order: list(store.sweep(order=order))  # noqa: E731
        Refusal([2], "2", "0 1", [[1]]).check(ordered)
        twice = store.sweep(order=[1, 1])
        refused(next(twice).write, ["bucket 1"], "whose order has it once", error=StoreError)
        twice.close()


def test_sizes_of_a_store(tmp_path):
    def make(sizes: dict[str, Any]) -> None:
        store_at(tmp_path / "sizes", replace=True, **sizes).close()

    least = {"num_buckets": 1, "bucket_bytes": 1, "num_threads": 1, "num_buffers": 3}
    for name, number in least.items():
        Refusal({name: 0}, [f"{name}=0"], [number], [{name: number}]).check(make)
    bad, good = {"bucket_bytes": [8]}, [{"bucket_bytes": [8, 16]}, {"bucket_bytes": 8}]
    Refusal(bad, "bucket_bytes 1 num_buckets=2", "one", good).check(make)

    def sweep_over(num_bytes: int) -> None:
        with store_at(tmp_path / "even", bucket_bytes=num_bytes, replace=True) as store:
            list(store.sweep(dtype=np.float32))

    Refusal(6, "float32 4 bucket_bytes=6", "multiple", [8]).check(sweep_over)


def test_a_store_of_two_generations(tmp_path):
    folder = tmp_path / "store"

    def stop_half_way(store: BucketStore) -> None:
        with store:
            for bucket in store.sweep():
                bucket.write()
                break

    store = store_at(folder)
    fill(store)
    stop_half_way(store)
    remedy = "replace=True checkpoint durable=True"
    refused_store(lambda: BucketStore.open(folder), folder, remedy)
    with store_at(folder, replace=True) as store:
        fill(store)
    store = store_at(folder, replace=True, durable=True)
    fill(store, 3)
    stop_half_way(store)
    with BucketStore.open(folder) as store:
        assert read(store) == [3, 3]


@pytest.mark.parametrize(
    ("durable", "value", "remedy"),
    [(False, "8.1 0.0", "another less"), (True, "16.1 9.0 7.1", "another durable=False")],
)
def test_a_store_on_a_full_disk(tmp_path, durable, value, remedy, monkeypatch):
    large = {"num_buckets": 8, "bucket_bytes": 1 << 20, "durable": durable}
    free = 9 << 20 if durable else 0
    make = lambda name, **changes: store_at(tmp_path / name, **large | changes).close()  # noqa: E731
    with monkeypatch.context() as full:
        full.setattr(os, "statvfs", lambda _: disk(free))
        value = [tmp_path / "store", *value.split()]
        refused(lambda: make("store"), value, remedy, error=OSError)
        if durable:
            make("smaller", durable=False)
        freed = free + int(float(value[-1]) * 2**20 if durable else 8.1 * 2**20) + 2**17
        full.setattr(os, "statvfs", lambda _: disk(freed))
        make("store")
    make("on another disk")


@pytest.mark.parametrize("durable", [False, True])
def test_a_disk_that_fills_up_under_a_store(tmp_path, durable):
    store = store_at(tmp_path, durable=durable)
    fill(store)
    with failing(sweep, "write_from", FULL):
        value = [tmp_path, "bucket 0", *(["generation 1"] if durable else [])]
        refused(lambda: fill(store, 2), value, "space", error=OSError)
    if durable:
        assert read(store) == [1, 1]
        fill(store, 2)
        assert read(store) == [2, 2]
    store.close()


def test_a_manifest_that_cannot_be_written(tmp_path):
    store = store_at(tmp_path, durable=True)
    fill(store)
    with failing(manifest, "replace_file", FULL):
        refused(lambda: fill(store, 2), [tmp_path, manifest.NAME], "space", error=OSError)
    refused_store(lambda: read(store), tmp_path, '"generation 2" close open')
    store.close()
    with BucketStore.open(tmp_path) as store:
        assert read(store) == [1, 1]


def test_a_disk_without_direct_reads(tmp_path, monkeypatch):
    opened = store_module.direct_io.open_direct
    with monkeypatch.context() as other:
        other.setattr(store_module.direct_io, "open_direct", lambda path: (opened(path)[0], False))
        with pytest.warns(UserWarning, match="another disk"):
            store_at(tmp_path / "here").close()
    monkeypatch.setattr(store_module.direct_io, "open_direct", lambda path: (opened(path)[0], True))
    store_at(tmp_path / "there").close()
