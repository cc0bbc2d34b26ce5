"""Checkpoints are complete or invisible, exact on any mesh, and every failure says what to do."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support import equal_trees
from zerojax.checkpoint import Checkpointer, CheckpointError, Retention, agreement, metadata
from zerojax.checkpoint.errors import DiskFullError, is_disk_full, reason
from zerojax.checkpoint.metadata import check_same_arrays

ABOUT = {"data_state": {"position": 7}, "config": {"a": [1, None]}, "plan": {"zero": 3}}


# When a read or write fails, Orbax leaves coroutines behind that nobody awaits.
ORBAX_LITTER = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def make_mesh(**axes: int) -> Mesh:
    size = int(np.prod(list(axes.values())))
    kinds = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=kinds, devices=jax.devices()[:size]
    )


def host_state(seed: int = 0) -> dict:
    """A training state with every kind of leaf, as numpy arrays in the tree of the real one."""
    random = np.random.default_rng(seed)
    params = {
        "embed/kernel": random.normal(size=(16, 8)).astype(np.float32),
        "odd/bias": random.normal(size=(7,)).astype(np.float32),
        "half/kernel": random.normal(size=(8, 2)).astype(jnp.bfloat16),
    }
    opt_state = optax.adamw(1e-3).init(jax.tree.map(jnp.asarray, params))
    return {
        "step": np.int32(5),
        "rng": np.array([3, 4], np.uint32),
        "params": params,
        "frozen": {},
        "opt_state": jax.tree.map(lambda x: np.asarray(x) + np.ones((), x.dtype), opt_state),
        "extras": {"flag": np.array(True)},
    }


def abstract_of(host: dict, mesh: Mesh, axis: str | None) -> dict:
    """Leaves whose first dimension `axis` divides are split over it, the others replicated."""

    def leaf(x: np.ndarray) -> jax.ShapeDtypeStruct:
        split = axis is not None and x.ndim and x.shape[0] % mesh.shape[axis] == 0
        sharding = NamedSharding(mesh, P(axis) if split else P())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(leaf, host)


def on_devices(host: dict, mesh: Mesh, axis: str | None) -> dict:
    abstract = abstract_of(host, mesh, axis)
    return jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), host, abstract)


def small_state(value: float = 1.0) -> dict:
    return {"params": {"w": jnp.full((4, 4), float(value)), "b": jnp.zeros(4)}}


def small_abstract(**changes: jax.ShapeDtypeStruct | None) -> dict:
    """The abstract `small_state`, with leaves replaced, added, or (None) removed."""
    leaves = {"w": ((4, 4), "float32"), "b": ((4,), "float32")} | changes
    sharding = NamedSharding(make_mesh(data=1), P())
    return {
        "params": {
            name: jax.ShapeDtypeStruct(*leaf, sharding=sharding)
            for name, leaf in leaves.items()
            if leaf is not None
        }
    }


def assert_same(restored: dict, host: dict, abstract: dict) -> None:
    equal_trees.assert_same(restored, host)
    shardings = [jax.tree.map(lambda x: x.sharding, tree) for tree in (restored, abstract)]
    assert shardings[0] == shardings[1]


class Gate:
    """Holds or breaks the writing of array files, which happens in Orbax's background thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()
        self.error: Exception | None = None
        real_open = tensorstore.open

        def gated_open(*args: object, **options: object) -> object:
            self.entered.set()
            assert self.opened.wait(120)
            if self.error is not None:
                raise self.error
            return real_open(*args, **options)

        monkeypatch.setattr(tensorstore, "open", gated_open)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


@pytest.mark.thorough
def test_restores_bit_for_bit_onto_other_meshes_and_device_counts(tmp_path: Path) -> None:
    host = host_state()
    with Checkpointer(tmp_path / "new" / "folder") as checkpointer:
        checkpointer.save(5, on_devices(host, make_mesh(data=8), "data"), **ABOUT)
        targets = [
            (make_mesh(data=8), "data"),
            (make_mesh(data=4, model=2), "model"),
            (make_mesh(data=2), "data"),
            (make_mesh(data=1), None),
        ]
        for mesh, axis in targets:
            abstract = abstract_of(host, mesh, axis)
            restored = checkpointer.restore(abstract)
            assert_same(restored.state, host, abstract)
    assert type(restored.state["opt_state"][0]) is optax.ScaleByAdamState
    assert restored.step == 5
    assert {name: getattr(restored, name) for name in ABOUT} == ABOUT


def test_metadata_is_readable_json_beside_the_arrays(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        checkpointer.save(5, small_state(), **ABOUT)
        metadata = checkpointer.metadata()
    assert sorted(os.listdir(tmp_path / "5")) == ["arrays", "metadata.json", "packs.json"]
    body = json.loads((tmp_path / "5" / "metadata.json").read_text())
    assert body["format"] == 2
    assert body["arrays"] == {"params/b": "float32[4]", "params/w": "float32[4,4]"}
    assert body["versions"]["jax"] == jax.__version__
    assert metadata.config == ABOUT["config"]
    assert metadata.num_devices == 8


@pytest.mark.thorough
def test_only_part_of_a_state_is_read(tmp_path: Path) -> None:
    host = host_state()
    mesh = make_mesh(data=2)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, on_devices(host, mesh, None), **ABOUT)
        wanted = {"params": abstract_of(host["params"], mesh, "data")}
        restored = checkpointer.restore(wanted, subset=True)
        assert_same(restored.state, {"params": host["params"]}, wanted)
        with pytest.raises(CheckpointError, match=r"holds 'extras/flag' \(bool\[\]\)"):
            checkpointer.restore(wanted)


def test_saved_arrays_may_be_donated_while_the_write_has_not_begun(
    tmp_path: Path, gate: Gate
) -> None:
    host = {"w": np.arange(8 * 4096, dtype=np.float32).reshape(8, 4096), "step": np.int32(3)}
    mesh = make_mesh(data=8)
    state = on_devices(host, mesh, "data")
    update = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, state, **ABOUT)
        for _ in range(3):
            state = jax.block_until_ready(update(state))
        assert gate.entered.wait(120)
        assert checkpointer.steps() == ()
        partial, lock = sorted(os.listdir(tmp_path))
        assert re.fullmatch(r"3\.partial-\d+", partial)
        assert lock == "writer.lock"
        gate.opened.set()
        checkpointer.wait()
        assert checkpointer.steps() == (3,)
        abstract = abstract_of(host, mesh, "data")
        assert_same(checkpointer.restore(abstract).state, host, abstract)
    assert int(state["step"]) == -1


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (2, (30, 45)),
        (Retention(last=1, every=20), (20, 45)),
        (Retention(last=None), (10, 20, 30, 45)),
    ],
)
def test_retention(tmp_path: Path, keep: int | Retention, kept: tuple[int, ...]) -> None:
    with Checkpointer(tmp_path, keep=keep) as checkpointer:
        for step in (10, 20, 30, 45):
            checkpointer.save(step, small_state(step), **ABOUT)
    assert checkpointer.steps() == kept
    assert sorted(map(int, os.listdir(tmp_path))) == list(kept)
    assert Checkpointer(tmp_path).restore(small_abstract()).state["params"]["w"][0, 0] == 45


@ORBAX_LITTER
def test_a_failed_write_is_told_once_and_harms_nothing(tmp_path: Path, gate: Gate) -> None:
    gate.opened.set()
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, small_state(1), **ABOUT)
        checkpointer.wait()
        gate.opened.clear()
        gate.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        checkpointer.save(2, small_state(2), **ABOUT)
        gate.opened.set()
        with pytest.raises(CheckpointError, match="step 2 was not saved") as failure:
            checkpointer.save(3, small_state(3), **ABOUT)
        text = str(failure.value)
        assert "no space left on device" in text
        assert "needs 80 B" in text
        assert "earlier checkpoints are intact: 1;" in text
        assert "\n" not in text
        assert checkpointer.steps() == (1,)
        gate.error = None
        assert checkpointer.restore(small_abstract()).state["params"]["w"][0, 0] == 1
        checkpointer.save(4, small_state(4), **ABOUT)
    assert os.listdir(tmp_path) == ["4"]
    gc.collect()


def test_every_byte_is_on_disk_before_the_checkpoint_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk: list[int] = []
    named: list[int] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        real_fsync(descriptor)
        on_disk.append(os.fstat(descriptor).st_ino)

    def rename(old: Path, new: Path) -> None:
        if Path(new) == tmp_path / "1":
            named.append(len(on_disk))
        real_rename(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, small_state(), **ABOUT)
    before = set(on_disk[: named[0]])
    assert {path.stat().st_ino for path in (tmp_path / "1").rglob("*")} <= before
    assert tmp_path.stat().st_ino in on_disk[named[0] :], "the name itself"


def test_a_save_that_fails_at_its_end_frees_its_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.EDQUOT, "quota")

    checkpointer = Checkpointer(tmp_path, asynchronous=False)
    checkpointer.save(1, small_state(), **ABOUT)
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(
        CheckpointError, match="step 2 was not saved .* quota exceeded .* intact: 1"
    ):
        checkpointer.save(2, small_state(), **ABOUT)
    assert sorted(os.listdir(tmp_path)) == ["1", "writer.lock"]
    checkpointer.close()


@ORBAX_LITTER
def test_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root; the test above fakes one")
    try:
        with Checkpointer(disk / "run") as checkpointer:
            checkpointer.save(1, small_state(), **ABOUT)
            big = {"w": jnp.arange(2**19, dtype=jnp.float32)}
            with pytest.raises(CheckpointError, match=r"2\.0 MiB.* free; free"):
                checkpointer.check_writable(2**21)
            with pytest.raises(DiskFullError, match="no space left on device") as failure:
                checkpointer.save(2, big, **ABOUT)
            assert is_disk_full(failure.value.__cause__)
            assert checkpointer.steps() == (1,)
            checkpointer.restore(small_abstract())
            checkpointer.save(3, small_state(), **ABOUT)
        assert checkpointer.steps() == (1, 3)
        gc.collect()
        assert caplog.messages == [], "Orbax's own traceback is not for users"
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_an_unwritable_folder_is_refused_before_and_at_save(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    checkpointer = Checkpointer(tmp_path / "file" / "run")
    with pytest.raises(CheckpointError, match=r"cannot be written: .*file.*; use a folder"):
        checkpointer.check_writable()
    with pytest.raises(CheckpointError, match=r"step 1 was not saved .*: not a directory"):
        checkpointer.save(1, small_state(), **ABOUT)
    assert checkpointer.latest_step() is None
    checkpointer.close()
    with Checkpointer(tmp_path / "made") as checkpointer:
        checkpointer.check_writable(1)
        assert os.listdir(tmp_path / "made") == ["writer.lock"]
    assert os.listdir(tmp_path / "made") == []


def test_another_models_checkpoint_names_the_first_differing_leaf(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, small_state(), **ABOUT)
        cases = {
            r"shape of 'params/w': the checkpoint has float32\[4,4\], this .* float32\[4,8\];": {
                "w": ((4, 8), "float32")
            },
            r"dtype of 'params/w': the checkpoint has float32\[4,4\], .* bfloat16\[4,4\];": {
                "w": ((4, 4), "bfloat16")
            },
            r"'params/a' \(int32\[\]\) is not in the checkpoint \(1 more leaves differ\);": {
                "a": ((), "int32"),
                "w": ((4, 8), "float32"),
            },
            r"the checkpoint holds 'params/b' \(float32\[4\]\), which this run does not have;": {
                "b": None
            },
        }
        for text, change in cases.items():
            with pytest.raises(CheckpointError, match=text) as failure:
                checkpointer.restore(small_abstract(**change))
            assert "use another checkpoint folder" in str(failure.value)


def test_the_first_differing_leaf_is_the_first_by_name() -> None:
    names = [f"params/{letter}" for letter in "zyxwvutsrqponmlkjihgfedcba"]
    wanted = {name: np.zeros(2, np.float32) for name in names}
    with pytest.raises(CheckpointError, match=r"'params/a' .* not in .* \(25 more leaves differ\)"):
        check_same_arrays({}, wanted, where="here", subset=False)


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("masks/blocks/mlp/up/kernel", "pruning"),
        ("extras/blocks/mlp/up/num_updates", "model.bit_schedule"),
    ],
)
def test_a_setting_with_arrays_of_its_own_is_named(name: str, setting: str) -> None:
    arrays = {name: "int32[2]"}
    both = ({}, {name: np.zeros(2, np.int32)}), (arrays, {})
    for saved, wanted in both:
        with pytest.raises(CheckpointError, match=setting):
            check_same_arrays(saved, wanted, where="here", subset=False)
    with pytest.raises(CheckpointError, match="another model"):
        check_same_arrays({**arrays, "params/x": "int32[2]"}, {}, where="here", subset=False)


def test_damage_is_told_in_one_sentence(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, small_state(), **ABOUT)
        checkpointer.wait()
        file = tmp_path / "2" / "metadata.json"
        good = file.read_text()
        newer = json.loads(good) | {"format": 99, "versions": {"zerojax": "7.0"}}
        del newer["checksum"]
        damages = {
            "is not valid JSON at line": good[:100],
            r"format 99, written by zerojax 7\.0; .* up to 3; update": metadata.seal(newer),
            "has no format number": "[]",
            "was changed after it was written: config.a, confit;": good.replace(
                '"config": {', '"confit": {'
            ),
            r"was changed after it was written: config\.a; restore step 1$": good.replace(
                "null", "false"
            ),
            "was changed after it was written: no value, but its text;": good.replace(
                '"step"', '"\\u0073tep"'
            ),
        }
        for text, content in damages.items():
            assert content != good
            file.write_text(content)
            with pytest.raises(CheckpointError, match=text):
                checkpointer.restore(small_abstract(), 2)
        file.unlink()
        with pytest.raises(CheckpointError, match="metadata.json is missing; restore step 1"):
            checkpointer.restore(small_abstract(), 2)
        file.write_text(good)
        data = next((tmp_path / "2" / "arrays" / "state" / "ocdbt.process_0" / "d").iterdir())
        os.truncate(data, 3)
        with pytest.raises(CheckpointError, match=r"/2 is damaged: arrays/.* has 3 bytes instead"):
            checkpointer.restore(small_abstract(), 2)
        data.unlink()
        with pytest.raises(CheckpointError, match=r"d/\w+ is missing; restore step 1$"):
            checkpointer.restore(small_abstract(), 2)
        checkpointer.restore(small_abstract(), 1)
        with pytest.raises(CheckpointError, match="no step 9; the saved steps are: 1, 2"):
            checkpointer.restore(small_abstract(), 9)
    with pytest.raises(CheckpointError, match="has no checkpoints"):
        Checkpointer(tmp_path / "nothing").restore(small_abstract())


@ORBAX_LITTER
def test_damage_that_only_orbax_notices_is_told_in_one_sentence(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, small_state(), **ABOUT)
        checkpointer.wait()
        for manifest in (tmp_path / "1").rglob("manifest.ocdbt"):
            manifest.write_bytes(b"x" * manifest.stat().st_size)
        with pytest.raises(CheckpointError, match=r"/1 is damaged: .*; no earlier step") as failure:
            checkpointer.restore(small_abstract())
        assert len(str(failure.value)) < 600
        assert "\n" not in str(failure.value)
    gc.collect()


def test_what_an_interrupted_save_leaves_is_invisible_and_removed_by_the_next(
    tmp_path: Path,
) -> None:
    for name in ("7.partial-1/arrays", "5.expired/arrays", "notes", "8.partial.txt"):
        (tmp_path / name).mkdir(parents=True)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest_step() is None
        assert (tmp_path / "7.partial-1").exists(), "a reader must not touch a save in progress"
        checkpointer.save(6, small_state(), **ABOUT)
        checkpointer.wait()
        assert sorted(os.listdir(tmp_path)) == ["6", "8.partial.txt", "notes", "writer.lock"]
        (tmp_path / "6.partial-1" / "arrays").mkdir(parents=True)  # by a thread of a failed save
    assert sorted(os.listdir(tmp_path)) == ["6", "8.partial.txt", "notes"]


def test_an_expired_step_that_cannot_be_deleted_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = Checkpointer(tmp_path, keep=1)
    checkpointer.save(1, small_state(), **ABOUT)
    checkpointer.wait()

    def refuse(path: object, **_: object) -> None:
        raise PermissionError(errno.EACCES, "no", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    checkpointer.save(2, small_state(), **ABOUT)
    with pytest.warns(RuntimeWarning, match=r"step 2 is saved, but .* step 1 .*permission denied"):
        checkpointer.wait()
    assert checkpointer.steps() == (2,)
    checkpointer.close()


def interrupt_when(event: threading.Event, then: threading.Event) -> None:
    """Sends Ctrl-C to the main thread once `event` is set, and later sets `then`."""

    def run() -> None:
        assert event.wait(120)
        time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.05)
        then.set()

    threading.Thread(target=run).start()


@pytest.mark.thorough
def test_a_save_survives_ctrl_c_during_close(tmp_path: Path, gate: Gate) -> None:
    def train() -> None:
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1, small_state(), **ABOUT)
            interrupt_when(gate.entered, gate.opened)

    with pytest.raises(KeyboardInterrupt):
        train()
    assert Checkpointer(tmp_path).steps() == (1,)


@pytest.mark.thorough
def test_a_save_survives_ctrl_c_inside_save(tmp_path: Path, gate: Gate) -> None:
    checkpointer = Checkpointer(tmp_path, asynchronous=False)
    interrupt_when(gate.entered, threading.Event())
    with pytest.raises(KeyboardInterrupt):
        checkpointer.save(1, small_state(), **ABOUT)
    assert checkpointer.steps() == ()
    gate.opened.set()
    checkpointer.close()
    assert checkpointer.steps() == (1,)


@ORBAX_LITTER
def test_an_error_of_the_loop_is_not_hidden_by_a_failed_save(tmp_path: Path, gate: Gate) -> None:
    gate.error = OSError(errno.EIO, "broken")
    gate.opened.set()

    def train() -> None:
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1, small_state(), **ABOUT)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as failure:
        train()
    assert "step 1 was not saved" in failure.value.__notes__[0]
    assert "input/output error" in failure.value.__notes__[0]
    gc.collect()


def test_reason_finds_the_true_cause() -> None:
    inner = ValueError("NOT_FOUND: bad permission denied [os_error_code='13']")
    outer = RuntimeError("incompatible handler")
    outer.__cause__ = ExceptionGroup("several", [inner])
    assert reason(outer) == "permission denied"
    assert reason(KeyError()) == "KeyError"
    assert len(reason(ValueError("x" * 9999))) < 300
    assert reason(CheckpointError("x " * 500 + "use y")).endswith("use y")
    assert not is_disk_full(outer)


@pytest.mark.parametrize("number", [-1, 7, 2**31, 2**48])
def test_processes_agree_on_large_numbers_of_steps(number, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    sent = lambda x: np.asarray(jnp.asarray(x))  # noqa: E731  (as a collective, in JAX's dtypes)
    monkeypatch.setattr(agreement.multihost_utils, "broadcast_one_to_all", sent)
    assert agreement.from_process_0(number) == number
