"""What an error about checkpoints, folders and disks tells to do is done, and helps.

Each remedy is read from the sentence where it can be, so that another sentence is another deed.
"""

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
from tests.remedies import complained, told
from tests.test_launch import is_running, wait_until
from zerojax.checkpoint import Checkpointer, folders, metadata, retention
from zerojax.checkpoint.export import export
from zerojax.checkpoint.inspection import find_step
from zerojax.checkpoint.store import BucketStore, manifest, sweep
from zerojax.checkpoint.store import store as store_module
from zerojax.cli import main
from zerojax.runtime import folder_lock
from zerojax.runtime.folder_lock import hold
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

        def trial(step: int, leaf: Any) -> None:
            checkpointer.save(step, {"w": leaf}, **ABOUT)

        (convert,) = told(lambda: trial(1, 1.0), r"use (jnp\.asarray)$")
        trial(1, eval(convert)(1.0))
        key = jax.random.key(0)
        (data,) = told(lambda: trial(2, key), r"store (.*)$")
        trial(2, eval(data))
        donated = jnp.ones(3)
        returned = jax.jit(lambda x: x + 1, donate_argnums=0)(donated)
        told(lambda: trial(3, donated), r"save the state it returned$")
        trial(3, returned)


@pytest.mark.parametrize(
    ("value", "pattern", "then"),
    [
        ({3: 1}, r"use '(.*)'$", lambda key: [{key: 1}]),
        ({"x": float("nan")}, r"use (None) or a string$", lambda _: [{"x": None}, {"x": "nan"}]),
        ({"x": 10**200}, r"store it as a (string)$", lambda _: [{"x": str(10**200)}]),
        (
            {"x": np.int64(3)},
            r"stores (None), (bool), (int), (float), (str), (lists) and (dicts) of these",
            lambda *names: [
                {"x": {"None": None, "lists": [1, "a"], "dicts": {"a": [1]}}.get(name, 1)}
                for name in names
            ],
        ),
        ([], r"stores a (dict)$", lambda _: [{}]),
    ],
    ids=["key", "nan", "digits", "type", "list"],
)
def test_what_the_position_of_the_data_may_hold(value, pattern, then):
    def trial(value: Any) -> object:
        return metadata.make_metadata(1, {}, data_state=value, config={}, plan={})

    for each in then(*told(lambda: trial(value), pattern)):
        trial(each)


def test_metadata_that_nobody_would_read(tmp_path, monkeypatch):
    monkeypatch.setattr(metadata, "MAX_BYTES", 4096)
    large = {**ABOUT, "data_state": {"x": "x" * 5000}}
    with Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        told(
            lambda: checkpointer.save(1, state_of(), **large),
            r"keep less in data_state, config and plan",
        )
        checkpointer.save(1, state_of(), **ABOUT)
    assert restored(tmp_path) == 1


def test_a_step_that_is_there_already(saved, tmp_path):
    again, other = told(
        lambda: save(saved, 1),
        r"remove the folders of steps (\d+) and above there, or (use another)",
    )
    save(tmp_path / other, 1)
    for step in (1, 2):
        if step >= int(again):
            shutil.rmtree(saved / str(step))
    save(saved, 1)
    (least,) = told(lambda: save(tmp_path / "below", -1), r"steps are (\d) or more")
    save(tmp_path / "below", int(least))


def test_a_closed_checkpointer(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.close()
    told(lambda: checkpointer.save(1, state_of(), **ABOUT), r"is closed; make a new one$")
    save(tmp_path, 1)


def test_a_url_for_a_checkpointer(tmp_path):
    (kind,) = told(lambda: Checkpointer("gs://bucket/run"), r"; mount the (bucket)")
    (tmp_path / kind).mkdir()  # stands for the place where it is mounted
    save(tmp_path / kind / "run", 1)


@pytest.mark.parametrize("word", ["last", "every"])
@pytest.mark.parametrize("value", [0, 1.5])
def test_how_many_steps_are_kept(word, value):
    least, none = told(
        lambda: retention.Retention(**{word: value}),
        r"use (1)(?:, 2, \.\.\.)?(?: or more,)? or (None)",
    )
    for each in (int(least), eval(none)):
        retention.Retention(**{word: each})


def test_a_full_disk_and_a_folder_that_is_a_file(tmp_path, monkeypatch):
    pattern = r"; (free some space), (fix the folder), or (use another one)$"
    with monkeypatch.context() as full:
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        full.setattr(folders, "check_free", lambda *_: (_ for _ in ()).throw(error))
        told(lambda: save(tmp_path / "full", 1), pattern)
    save(tmp_path / "full", 1)
    (tmp_path / "file").touch()
    told(lambda: save(tmp_path / "file", 1), pattern)
    save(tmp_path / "another", 1)
    (tmp_path / "file").unlink()
    save(tmp_path / "file", 1)


def test_a_folder_that_cannot_be_written_is_told_before_a_run(tmp_path, monkeypatch):
    (tmp_path / "file").touch()

    def trial(name: str, num_bytes: int = 0) -> None:
        with Checkpointer(tmp_path / name) as checkpointer:
            checkpointer.check_writable(num_bytes)

    told(lambda: trial("file/run"), r"use a folder that you may write$")
    trial("run")
    free = shutil.disk_usage(tmp_path).free
    told(lambda: trial("run", 2 * free), r"; (free some space) or (use another folder)$")
    usage = shutil.disk_usage(tmp_path)._replace(free=4 * free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)  # as after making room
    trial("run", 2 * free)


def test_an_expired_step_that_stays(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path, keep=1)
    checkpointer.save(1, state_of(), **ABOUT)
    checkpointer.wait()
    with monkeypatch.context() as locked:
        error = PermissionError(errno.EACCES, "no")
        locked.setattr(folders, "remove", lambda *_: (_ for _ in ()).throw(error))
        checkpointer.save(2, state_of(), **ABOUT)
        with pytest.warns(RuntimeWarning, match="delete it by hand") as caught:
            checkpointer.wait()
    found = re.search(r"expired step (\d+) in (\S+) cannot", str(caught[0].message))
    shutil.rmtree(Path(found[2]) / found[1])
    checkpointer.save(3, state_of(), **ABOUT)
    checkpointer.close()
    assert checkpointer.steps() == (3,)


# --- what is read back ----------------------------------------------------------------------------


def test_no_checkpoints_there(saved, tmp_path):
    told(lambda: restored(tmp_path / "rnu"), r"; (check the path), or (train first)$")
    assert restored(saved) == 2
    save(tmp_path / "rnu", 1)
    assert restored(tmp_path / "rnu") == 1


def test_a_step_that_was_not_saved(saved):
    for step in told(lambda: restored(saved, 7), r"the saved steps are: (\d+), (\d+)$"):
        assert restored(saved, int(step)) == int(step)


@pytest.mark.parametrize("damaged", [1, 2])
def test_a_damaged_step_names_one_that_will_do(saved, damaged):
    damage(saved, damaged)
    (other,) = told(lambda: restored(saved, damaged), r"; restore step (\d+)$")
    assert restored(saved, int(other)) == 3 - damaged


def test_no_step_that_is_whole(two_steps, saved, tmp_path):
    damage(saved, 1, 2)
    told(
        lambda: restored(saved),
        r"; restore a step from a (copy), or start again in another, (empty folder)$",
    )
    save(tmp_path / "empty folder", 1)
    shutil.rmtree(saved / "1")
    shutil.copytree(two_steps / "1", saved / "1")
    with pytest.warns(RuntimeWarning, match="step 1 is used in its place"):
        assert restored(saved) == 1


def test_a_damaged_step_that_cannot_be_renamed(saved, monkeypatch):
    damage(saved, 2)
    with Checkpointer(saved) as checkpointer:
        with pytest.warns(RuntimeWarning, match="the next save renames its folder"):
            checkpointer.restore(abstract())
        error = PermissionError(errno.EACCES, "no")
        monkeypatch.setattr(folders, "set_aside", lambda *_: (_ for _ in ()).throw(error))
        told(lambda: checkpointer.save(2, state_of(), **ABOUT), r"; rename or remove its folder$")
        (saved / "2").rename(saved / "looked at later")
        checkpointer.save(2, state_of(), **ABOUT)
    assert restored(saved) == 2


def test_a_checkpoint_of_another_model(saved, tmp_path):
    def trial(path: Path, leaves: dict[str, Any]) -> int:
        with Checkpointer(path) as checkpointer:
            if checkpointer.latest_step() is None:
                return 0  # a run that begins
            return checkpointer.restore(abstract(**leaves)).step

    wider = {"w": ((4, 8), jnp.float32)}
    file, other = told(
        lambda: trial(saved, wider),
        r"saved with \(its (\S+) lists their arrays\), or (use another)",
    )
    assert trial(tmp_path / other, wider) == 0
    arrays = json.loads((saved / "2" / file).read_text())["arrays"]
    kind, shape = re.fullmatch(r"(\w+)(\[.*\])", arrays["params/w"]).groups()
    assert trial(saved, {"w": (tuple(json.loads(shape)), kind)}) == 2


def test_a_state_without_shardings(saved):
    bare = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), abstract())
    with Checkpointer(saved) as checkpointer:
        name, keyword = told(
            lambda: checkpointer.restore(bare),
            r"pass plan\.(\w+), or ShapeDtypeStructs with (\w+)=$",
        )
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        given = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, **{keyword: sharding}), bare
        )
        assert checkpointer.restore(given).step == 2
    leaves = jax.tree.leaves(getattr(line_plan(), name))
    assert all(leaf.sharding is not None for leaf in leaves)


def line_plan(**options: Any) -> zerojax.Plan:
    return zerojax.make_plan(
        (lambda key: {"w": jnp.zeros((4, 4))}, lambda params, batch: batch["x"] @ params["w"]),
        options.pop("mesh", {}),
        example_batch={"x": np.zeros((8, 4), np.float32)},
        loss=lambda model, batch: jnp.mean(model(batch) ** 2),
        **options,
    )


@pytest.mark.parametrize("content", ["{", "[1]"])
@pytest.mark.parametrize("way", ["fix", "remove"])
def test_a_list_of_kept_steps_that_cannot_be_read(saved, content, way):
    file = saved / retention.FILE_NAME
    retention.keep_step(saved, "best", 1, {})
    good = file.read_text()
    file.write_text(content)
    pattern = rf"^(\S+) .*\b{way} it" if content == "{" else r"^(\S+) holds no steps; remove it"
    (named,) = told(lambda: retention.kept_steps(saved), pattern)
    if way == "fix":
        Path(named).write_text(good)
        assert retention.kept_steps(saved)["best"]["step"] == 1
    else:
        Path(named).unlink()
        assert retention.kept_steps(saved) == {}


# --- commands about checkpoints -------------------------------------------------------------------


def test_commands_of_other_folders_and_steps(saved, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (example,) = complained(capsys, r"give a run, such as (\S+)$", "checkpoint", "list", "rnu")
    Path(example).parent.mkdir()
    saved.rename(Path(example))
    assert main(["checkpoint", "list", example]) == 0
    Path("nothing").mkdir()
    complained(capsys, r"the folder its checkpoints are in$", "checkpoint", "list", "nothing")
    shutil.copytree(example, "nothing/checkpoints")
    assert main(["checkpoint", "list", "nothing/checkpoints"]) == 0
    assert main(["checkpoint", "list", "nothing"]) == 0
    words = "checkpoint", "export", example
    steps = complained(capsys, r"the saved steps are: (\d+), (\d+)$", *words, "7", "out")
    for step in steps:
        assert main([*words, step, f"out{step}"]) == 0
    complained(capsys, r"; give a number, or train with", *words, "best", "out")
    assert main([*words, "2", "out"]) == 0
    (_,) = complained(capsys, r"; name a folder (that is not)$", *words, "2", "out")
    assert main([*words, "2", "out that is not"]) == 0


def test_exports_that_do_not_fit_or_are_damaged(saved, tmp_path, monkeypatch, capsys):
    free = os.statvfs(tmp_path)
    small = os.statvfs_result([1, 1, 0, 0, 40, 0, 0, 0, 0, 255])  # 40 bytes
    words = ["checkpoint", "export", os.fspath(saved)]
    out = [os.fspath(tmp_path / "out")]
    monkeypatch.setattr(os, "statvfs", lambda _: small)
    pattern = r"free [\d.]+ MiB, choose a folder on another disk, or export .* with (--dtype bf16)"
    (option,) = complained(capsys, pattern, *words, *out)
    assert main([*words, *out, *option.split()]) == 0
    # What is narrow already gets no such remedy.
    monkeypatch.setattr(
        os, "statvfs", lambda _: os.statvfs_result([1, 1, 0, 0, 9, 0, 0, 0, 0, 255])
    )
    pattern = r"free [\d.]+ MiB, or choose a folder on another disk\n"
    complained(capsys, pattern, *words, f"{out[0]}-3", *option.split())
    monkeypatch.setattr(os, "statvfs", lambda _: free)  # as after making room
    assert main([*words, f"{out[0]}-2"]) == 0
    found = find_step(saved, 2)
    sums = dict.fromkeys(found.metadata.fingerprints, "0" * 8)
    found.metadata.fingerprints.update(sums)
    told(lambda: export(found, tmp_path / "damaged"), r"; export (an earlier step)$")
    export(find_step(saved, 1), tmp_path / "damaged")


def test_an_array_that_the_format_does_not_have(tmp_path, capsys):
    with Checkpointer(tmp_path / "run") as checkpointer:
        state = {"params": {"w": jnp.ones((4, 4), jnp.float8_e4m3b11fnuz)}}
        checkpointer.save(1, state, **ABOUT)
    words = ["checkpoint", "export", os.fspath(tmp_path / "run"), os.fspath(tmp_path / "out")]
    option, first, second = complained(capsys, r"; pass (--dtype) (fp32) or (bf16)$", *words)
    for kind in (first, second):
        assert main([*words[:-1], f"{words[-1]}-{kind}", option, kind]) == 0


def test_what_is_pruned(saved, two_steps, capsys):
    words = ["checkpoint", "prune", os.fspath(saved)]
    keep, every, damaged = complained(
        capsys, r"say which to keep \((--keep) N, (--every) K\) or (--damaged)", *words
    )
    assert main([*words, damaged]) == main([*words, every, "1"]) == 0
    assert main([*words, keep, "1"]) == 0
    assert [path.name for path in saved.iterdir() if path.name.isdigit()] == ["2"]
    damage(saved, 2)
    (_,) = complained(
        capsys, r"; (bring back) what keeps .*, or delete the folders by", *words, damaged
    )
    shutil.copytree(two_steps / "1", saved / "1")
    assert main([*words, damaged]) == 0
    assert [path.name for path in saved.iterdir() if path.name.isdigit()] == ["1"]


@pytest.mark.thorough
def test_a_folder_that_another_process_writes(saved, tmp_path, capsys):
    words = ["checkpoint", "prune", os.fspath(saved), "--keep", "1"]
    with another_process_in(saved):
        pattern = r"written by process (\d+) on .*; (end it), or (use another folder)"
        complained(capsys, pattern, *words)
        number, _, other = told(lambda: save(saved, 3), pattern)
        save(tmp_path / other, 3)
        os.kill(int(number), 15)
        assert wait_until(lambda: not is_running(int(number)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(folder_lock, "EXPIRES", 5.0)
            save(saved, 3)
    assert main(words) == 0


def test_what_lies_in_the_place_of_a_lock(tmp_path):
    (tmp_path / folder_lock.NAME).mkdir()
    (path,) = told(lambda: hold(tmp_path), r"^(\S+) is not a regular file, .*; move it$")
    Path(path).rename(tmp_path / "moved")
    hold(tmp_path).release()


def test_a_later_run_of_this_process(tmp_path):
    first, second = hold(tmp_path), hold(tmp_path)
    told(first.keep, r"; close the earlier one, or use another folder$")
    first.release()
    second.keep()
    second.release()
    hold(tmp_path / "another").release()


def test_a_folder_that_everybody_may_write(tmp_path):
    tmp_path.chmod(0o777)
    command = re.search(r"; (chmod .*)$", open_to_everybody(tmp_path))[1]
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
    "cut": cut_manifest,
    "of another format": changed_manifest(format=99),
    "of other values": changed_manifest(slots=[7, 7]),
    "large": lambda folder: os.truncate(folder / manifest.NAME, 65 << 20),
    "short": lambda folder: os.truncate(folder / "buckets0.bin", 4096),
    "torn": torn_bucket,
}


@pytest.mark.parametrize("case", STORES)
def test_a_damaged_store(case, tmp_path):
    folder = tmp_path / "store"
    with store_at(folder) as store:
        fill(store)
    STORES[case](folder)

    def go_on() -> list[int]:
        with BucketStore.open(folder) as store:
            return read(store)

    told(go_on, r"delete the folder and fill the store again")
    shutil.rmtree(folder)
    with store_at(folder) as store:
        fill(store, 2)
    assert go_on() == [2, 2]


def test_no_store_or_one_that_is_there_already(tmp_path):
    folder = tmp_path / "store"
    (made,) = told(lambda: BucketStore.open(folder), r"; (create) it$")
    getattr(BucketStore, made)(folder, num_buckets=2, bucket_bytes=4096).close()
    pattern = (
        r"already; (open) it, pass (replace)=(True) to give up .*, or (choose another) folder$"
    )
    word, option, value, other = told(lambda: store_at(folder), pattern)
    getattr(BucketStore, word)(folder).close()
    store_at(folder, **{option: eval(value)}).close()
    store_at(tmp_path / other).close()
    (folder / manifest.NAME).unlink()
    told(lambda: BucketStore.open(folder), r"\(\S+ is missing, .*; create it$")
    store_at(folder).close()
    BucketStore.open(folder).close()


def test_a_store_that_is_open_or_closed(tmp_path):
    store = store_at(tmp_path / "store")
    _, other = told(
        lambda: BucketStore.open(tmp_path / "store"), r"; (close it) there first, or (use another)"
    )
    store_at(tmp_path / other).close()
    store.close()
    told(lambda: next(store.sweep()), r"is closed; open it again$")
    BucketStore.open(tmp_path / "store").close()


def test_sweeps(tmp_path):
    with store_at(tmp_path) as store:
        sweep = store.sweep()
        next(sweep)
        told(lambda: read(store), r"; end it, or leave its loop, first$")
        assert len(list(sweep)) == 1
        fill(store)
        for bucket in store.sweep():
            bucket.write()
            told(bucket.write, r"call bucket\.write\(\) once, before the next")
        (last,) = told(lambda: store.sweep(order=[2]), r"there are 0 to (\d)$")
        list(store.sweep(order=[int(last)]))
        told(lambda: store.sweep(order=[1, 1]), r"more than once; sweep again instead$")
        for _ in range(2):
            list(store.sweep(order=[1]))


def test_sizes_of_a_store(tmp_path):
    for name in ("num_buckets", "bucket_bytes", "num_threads", "num_buffers"):
        (least,) = told(
            lambda name=name: store_at(tmp_path / name, **{name: 0}), rf"^{name}=0; at least (\d+)"
        )
        store_at(tmp_path / name, **{name: int(least)}).close()
    told(
        lambda: store_at(tmp_path / "sizes", bucket_bytes=[8]),
        r"; give one size for each bucket, or one for all$",
    )
    store_at(tmp_path / "sizes", bucket_bytes=[8, 16]).close()
    with store_at(tmp_path / "odd", bucket_bytes=6) as store:
        count, size = told(
            lambda: store.sweep(dtype=np.float32),
            r"has (\d) bytes, .*bucket_bytes=(\d); make the store with a multiple of it$",
        )
    whole = -(-int(size) // int(count)) * int(count)
    with store_at(tmp_path / "even", bucket_bytes=whole) as store:
        list(store.sweep(dtype=np.float32))


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
    replace, durable = told(
        lambda: BucketStore.open(folder),
        r"anew \((.*?)\) and fill it from .*; (durable=True) would",
    )
    keywords = lambda text: eval(f"dict({text})")  # noqa: E731
    with store_at(folder, **keywords(replace)) as store:
        fill(store)
    store = store_at(folder, replace=True, **keywords(durable))
    fill(store, 3)
    stop_half_way(store)
    with BucketStore.open(folder) as store:
        assert read(store) == [3, 3]


@pytest.mark.parametrize("durable", [False, True])
def test_a_store_on_a_full_disk(tmp_path, durable, monkeypatch):
    large = {"num_buckets": 8, "bucket_bytes": 1 << 20, "durable": durable}
    room = os.statvfs_result([1, 1, 0, 0, 9 << 20 if durable else 0, 0, 0, 0, 0, 255])
    make = lambda name, **changes: store_at(tmp_path / name, **large | changes).close()  # noqa: E731
    other = r"or keep one generation \((durable=False)\)" if durable else r"or (keep less) on it"
    pattern = rf"free ([\d.]+) MiB, choose a folder on another disk, {other}$"
    with monkeypatch.context() as full:
        full.setattr(os, "statvfs", lambda _: room)
        missing, _ = told(lambda: make("store"), pattern)
        if durable:
            make("smaller", durable=False)
        freed = room.f_bavail + int(float(missing) * 2**20) + 2**17
        enough = os.statvfs_result([1, 1, 0, 0, freed, 0, 0, 0, 0, 255])
        full.setattr(os, "statvfs", lambda _: enough)
        make("store")
    make("on another disk")


@pytest.mark.parametrize("durable", [False, True])
def test_a_disk_that_fills_up_under_a_store(tmp_path, durable, monkeypatch):
    store = store_at(tmp_path, durable=durable)
    fill(store)
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as full:
        full.setattr(sweep, "write_from", lambda *_: (_ for _ in ()).throw(error))
        told(lambda: fill(store, 2), r"; free some space on it" + "; generation 1 is" * durable)
    if durable:
        assert read(store) == [1, 1]
        fill(store, 2)
        assert read(store) == [2, 2]
    store.close()


def test_a_manifest_that_cannot_be_written(tmp_path, monkeypatch):
    store = store_at(tmp_path, durable=True)
    fill(store)
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as full:
        full.setattr(manifest, "replace_file", lambda *_: (_ for _ in ()).throw(error))
        told(lambda: fill(store, 2), r"could not be replaced: .*; free some space on it$")
    told(lambda: read(store), r"; close the store, fix .*, and open it: it has the last whole")
    store.close()
    with BucketStore.open(tmp_path) as store:
        assert read(store) == [1, 1]


def test_a_disk_without_direct_reads(tmp_path, monkeypatch):
    with monkeypatch.context() as other:
        opened = store_module.direct_io.open_direct
        other.setattr(store_module.direct_io, "open_direct", lambda path: (opened(path)[0], False))
        with pytest.warns(UserWarning, match="another disk would do$"):
            store_at(tmp_path / "here").close()
    monkeypatch.setattr(store_module.direct_io, "open_direct", lambda path: (opened(path)[0], True))
    store_at(tmp_path / "there").close()
