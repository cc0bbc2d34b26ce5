"""Refusals of saved steps: their descriptions, their arrays, and folders beside them."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.checkpoint.test_remedies_of_files import (
    ABOUT,
    DENIED,
    abstract,
    failing,
    fill,
    read,
    restored,
    save,
    saved,
    state_of,
    store_at,
    two_steps,
)
from tests.support.refusals import Refusal, refused
from zerojax.checkpoint import Checkpointer, deletion, files, folders, metadata, retention
from zerojax.checkpoint.arrays import _NOT_STORED as NOT_STORED
from zerojax.checkpoint.arrays import check_storable
from zerojax.checkpoint.errors import CheckpointError, DamagedError, MachineError
from zerojax.checkpoint.export import export
from zerojax.checkpoint.files import new_folder
from zerojax.checkpoint.inspection import find_step
from zerojax.checkpoint.store import BucketStore, manifest
from zerojax.checkpoint.store.direct_io import StoreError

__all__ = ["saved", "two_steps"]


# --- descriptions of steps ------------------------------------------------------------------------


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Writes a description again, without its checksums, with a change."""

    def harm(folder: Path) -> None:
        path = folder / metadata.FILE_NAME
        body = json.loads(path.read_text())
        for name in ("checksum", metadata.SECTIONS):
            body.pop(name, None)
        changed = change(body)
        path.write_text(json.dumps(body if changed is None else changed))

    return harm


def retyped(folder: Path) -> None:
    """Changes a value, and leaves the checksums."""
    path = folder / metadata.FILE_NAME
    path.write_text(path.read_text().replace('"step": 2', '"step": 3'))


DESCRIPTIONS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no JSON": (lambda folder: (folder / metadata.FILE_NAME).write_text("{") and None, "JSON"),
    "a list": (edited(lambda body: [1]), "format"),
    "no format": (edited(lambda body: body.pop("format") and None), "format"),
    "changed": (retyped, "changed"),
    "without a value": (edited(lambda body: body.pop("arrays") and None), "'arrays'"),
    "of another kind": (edited(lambda body: {**body, "arrays": 3}), "arrays"),
    "of another step": (edited(lambda body: {**body, "step": 7}), "7 2"),
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_a_damaged_description_names_a_step_that_will_do(name, saved):
    harm, value = DESCRIPTIONS[name]
    harm(saved / "2")
    take = lambda step: restored(saved, step)  # noqa: E731
    row = Refusal(2, [saved / "2", *value.split()], "step 1", [1], DamagedError)
    row.check(take)
    shutil.rmtree(saved / "2")
    assert restored(saved) == 1


def test_a_step_of_another_folder(two_steps, saved, tmp_path):
    (saved / "2").rename(saved / "5")
    refused(lambda: restored(saved, 5), [saved / "5", 2], "rename remove", error=DamagedError)
    (saved / "5").rename(saved / "2")
    assert restored(saved) == 2
    shutil.copytree(saved / "2", saved / "5")
    refused(lambda: restored(saved, 5), [saved / "5", 2], "remove", error=DamagedError)
    shutil.rmtree(saved / "5")
    other = tmp_path / "other"
    save(other, 3)
    save(saved, 4)
    shutil.copytree(other / "3", saved / "3")
    refused(lambda: restored(saved, 3), [saved / "3", 1, 2], "remove own", error=DamagedError)
    (tmp_path / "own").mkdir()
    (saved / "3").rename(tmp_path / "own" / "3")
    assert restored(tmp_path / "own") == 3
    assert restored(saved) == 4


def test_a_newer_format(saved):
    edited(lambda body: {**body, "format": 99})(saved / "2")
    take = lambda step: restored(saved, step)  # noqa: E731
    Refusal(2, [saved / "2", 99], "update", [1], CheckpointError).check(take)


def test_what_cannot_be_read_now(saved):
    busy = OSError(errno.EIO, "Input/output error")
    with failing(metadata, "read_bytes", PermissionError(errno.EACCES, "no")):
        refused(lambda: restored(saved, 2), [saved / "2"], "again", error=MachineError)
    assert restored(saved, 2) == 2
    with Checkpointer(saved) as checkpointer:
        with failing(files, "wrong_checksums", busy):
            refused(lambda: checkpointer.verify(2), [saved / "2"], "again", error=MachineError)
        assert checkpointer.verify(2).is_good
    with failing(deletion, "hold", PermissionError(errno.EACCES, "no")):
        lock = lambda: deletion.alone_in(saved).__enter__()  # noqa: E731
        refused(lock, [saved], "again", error=MachineError)
    with deletion.alone_in(saved):
        pass


def test_damaged_files_of_a_step(saved):
    whole = shutil.copytree(saved / "2", saved.parent / "copy")
    large = max(
        (x for x in (saved / "2").rglob("*") if x.is_file()), key=lambda x: x.stat().st_size
    )
    for harm in (lambda: os.truncate(large, 1), large.unlink):
        harm()
        take = lambda step: restored(saved, step)  # noqa: E731
        Refusal(2, [saved / "2"], "step 1", [1], DamagedError).check(take)
        shutil.rmtree(saved / "2")
        shutil.copytree(whole, saved / "2")
    assert restored(saved) == 2


# --- arrays ---------------------------------------------------------------------------------------


def test_arrays_of_a_state(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        trial = lambda state: checkpointer.save(1, state, **ABOUT)  # noqa: E731
        Refusal({}, "no", "jax.Array", [{"w": jnp.ones(2)}], TypeError).check(trial)
    store = lambda kind: check_storable({"w": jax.ShapeDtypeStruct((2,), kind)})  # noqa: E731
    kinds = [(name, other) for name, other in NOT_STORED.items() if hasattr(jnp, name)]
    assert kinds
    for name, other in kinds:
        Refusal(getattr(jnp, name), f"w {name}", other, [getattr(jnp, other)], TypeError).check(
            store
        )


def test_random_keys_of_another_kind(tmp_path):
    def keys(impl: str) -> Any:
        return jax.random.key_data(jax.random.key(0, impl=impl))

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {**state_of(), "rng": keys("threefry2x32")}, **ABOUT)

    def take(given: tuple[Path, str]) -> int | None:
        folder, impl = given
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shape = jax.ShapeDtypeStruct(keys(impl).shape, jnp.uint32, sharding=sharding)
        with Checkpointer(folder) as checkpointer:
            if checkpointer.latest_step() is not None:
                return checkpointer.restore({**abstract(), "rng": shape}).step
        return None

    good = [(tmp_path, "threefry2x32"), (tmp_path / "another", "rbg")]
    remedy = "jax_default_prng_impl threefry2x32 rbg another"
    Refusal((tmp_path, "rbg"), "[2] [4]", remedy, good, CheckpointError).check(take)


def test_text_that_is_no_unicode():
    make = lambda text: metadata.make_metadata(  # noqa: E731
        1, {}, data_state={"x": text}, config={}, plan={}
    )
    Refusal("a\ud800", "data_state['x']", "remove", ["a"], TypeError).check(make)


def test_steps_that_are_kept(saved):
    with Checkpointer(saved) as checkpointer:
        keep = lambda step: checkpointer.keep_step("best", step)  # noqa: E731
        refused(lambda: keep(3), [saved, 3, "'best'"], "save", error=CheckpointError)
        with failing(retention, "replace_text", DENIED):
            refused(lambda: keep(2), [2, "'best'"], "fix", error=MachineError)
        keep(2)
        checkpointer.save(3, state_of(), **ABOUT)
        checkpointer.wait()
        keep(3)


def test_steps_that_cannot_be_listed(saved):
    with Checkpointer(saved) as checkpointer:
        with failing(folders.os, "scandir", DENIED), failing(folders.os, "listdir", DENIED):
            refused(checkpointer.steps, [], "again", error=MachineError)
        assert checkpointer.steps() == (1, 2)


def test_exports_without_parameters(saved, tmp_path):
    with Checkpointer(tmp_path / "bare") as checkpointer:
        checkpointer.save(1, {"other": jnp.ones(2)}, **ABOUT)
    out = iter(range(9))

    def write(folder: Path) -> None:
        export(find_step(folder, None), tmp_path / f"out{next(out)}")

    Refusal(tmp_path / "bare", "other", "training", [saved], CheckpointError).check(write)


def test_new_folders(tmp_path):
    def make(out: Path) -> None:
        with new_folder(out, 0, remedy=None):
            pass

    Refusal(Path("/"), ["/"], "new", [tmp_path / "new"], FileExistsError).check(make)
    draft = tmp_path / "out.partial"
    draft.mkdir()
    (draft / "mine").touch()
    good = [tmp_path / "another"]
    Refusal(tmp_path / "out", [draft], "remove rename", good, FileExistsError).check(make)
    draft.rename(tmp_path / "mine")
    make(tmp_path / "out")


# --- files of optimizer state ---------------------------------------------------------------------


def test_buffers_of_a_store(tmp_path):
    def sweep(number: int) -> None:
        with store_at(tmp_path / str(number), num_buffers=number) as store:
            fill(store)
            assert len([bucket.index for bucket in store.sweep(ahead=3, held=2)]) == 2

    Refusal(4, "ahead=3 held=2 4", "num_buffers=5", [5]).check(sweep)


def test_a_manifest_of_somebody_else(tmp_path):
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / manifest.NAME).write_text("mine")
    make = lambda folder: store_at(folder, replace=True).close()  # noqa: E731
    Refusal(folder, [folder], "another move", [tmp_path / "another"], StoreError).check(make)
    (folder / manifest.NAME).rename(tmp_path / "moved")
    make(folder)


def test_a_store_that_is_deleted_while_it_is_used(tmp_path):
    store = store_at(tmp_path / "store", durable=True)
    fill(store)
    shutil.rmtree(tmp_path / "store")
    refused(lambda: fill(store, 2), [tmp_path / "store"], "again checkpoint", error=StoreError)
    store.close()
    with store_at(tmp_path / "store") as again:
        fill(again, 3)
        assert read(again) == [3, 3]


def test_a_generation_that_is_gone(tmp_path):
    folder = tmp_path / "store"
    store = store_at(folder, durable=True)
    for value in (1, 2, 3):
        fill(store, value)
    store.close()
    back = lambda generation: BucketStore.open(folder, generation=generation).close()  # noqa: E731
    refused(lambda: back(1), [folder, 1, 3], "delete checkpoint", error=StoreError)
    back(2)
    shutil.rmtree(folder)
    with store_at(folder, durable=True) as store:
        fill(store, 4)
        assert read(store) == [4, 4]


# --- arrays of another run ------------------------------------------------------------------------

FROZEN = {"frozen/w": "float32[2]"}
MASKS, UPDATES = "masks/w", "extras/w/num_updates"
OTHERS = {
    # what is saved, what is wanted, what is said
    "trained there": ({"params/w": "float32[2]"}, FROZEN, "frozen/w trained", "freeze"),
    "frozen there": (FROZEN, {"params/w": "float32[2]"}, "frozen/w frozen", "freeze"),
    "in another dtype": ({"frozen/w": "bfloat16[2]"}, FROZEN, "bfloat16[2]", "freeze_dtype=bf16"),
    "in codes": ({"frozen/w": "uint8[2]"}, FROZEN, "uint8[2]", "freeze_dtype"),
    "pruned": ({MASKS: "int32[2]"}, {}, MASKS, "pruning"),
    "not pruned": ({}, {MASKS: "int32[2]"}, MASKS, "pruning"),
    "with fewer bits": ({UPDATES: "int32[2]"}, {}, UPDATES, "model.bit_schedule"),
}


@pytest.mark.parametrize("row", OTHERS)
def test_arrays_of_another_run(row):
    """The remedy makes the arrays those of the run that was saved."""
    saved_arrays, wanted, value, remedy = OTHERS[row]

    def check(wanted: dict[str, str]) -> None:
        shapes = {
            name: jax.ShapeDtypeStruct((2,), kind.split("[")[0]) for name, kind in wanted.items()
        }
        metadata.check_same_arrays(saved_arrays, shapes, where="here", subset=False)

    Refusal(wanted, value, remedy, [saved_arrays], CheckpointError).check(check)
