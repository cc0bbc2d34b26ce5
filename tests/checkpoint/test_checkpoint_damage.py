"""Whatever happens to a saved step is noticed, named, and the step before it used."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.checkpoint import Checkpointer, CheckpointError, DamagedError, metadata
from zerojax.checkpoint import files as checkpoint_files
from zerojax.checkpoint.fingerprint_math import as_text, of_array

ABOUT = {
    "data_state": {"position": 7},
    "config": {"optimizer": {"learning_rate": 0.001}, "seed": 3},
    "plan": {"zero": 3},
}
LARGE = 1 << 20  # elements: files above the size that is always summed up


def make_mesh(size: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:size]), ("data",), axis_types=(AxisType.Auto,))


def host_state(step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step)
    return {
        "a/kernel": random.normal(size=(8, LARGE // 8)).astype(np.float32),
        "b/bias": random.normal(size=(40,)).astype(jnp.bfloat16),
        "step": np.int32(step),
    }


def abstract_on(devices: int) -> dict[str, jax.ShapeDtypeStruct]:
    mesh = make_mesh(devices)
    return {
        name: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, P("data") if x.ndim else P())
        )
        for name, x in host_state(0).items()
    }


def state_of(step: int, devices: int = 8) -> dict[str, jax.Array]:
    abstract = abstract_on(devices)
    return {n: jax.device_put(x, abstract[n].sharding) for n, x in host_state(step).items()}


def assert_is_step(restored, step: int) -> None:
    assert restored.step == step
    for name, expected in host_state(step).items():
        np.testing.assert_array_equal(np.asarray(restored.state[name]), expected)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1, 2 and 3."""
    path = tmp_path_factory.mktemp("saved") / "run"
    with Checkpointer(path) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state_of(step), **ABOUT)
    return path


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def flip(path: Path, place: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


def largest(folder: Path) -> Path:
    return max(files_of(folder), key=lambda path: path.stat().st_size)


def restore_with_warning(path: Path, text: str, devices: int = 8):
    with Checkpointer(path) as checkpointer, pytest.warns(RuntimeWarning, match=text):
        return checkpointer.restore(abstract_on(devices))


@pytest.mark.thorough
def test_fingerprints_and_checksums_are_stored(saved: Path) -> None:
    about = Checkpointer(saved).metadata(2)
    expected = {name: as_text(of_array(x)) for name, x in host_state(2).items()}
    assert about.fingerprints == expected
    assert about.checksums.keys() == about.files.keys()
    for name, value in about.checksums.items():
        assert value == checkpoint_files.checksum(saved / "2" / name)
    assert set(about.files) == {
        str(path.relative_to(saved / "2"))
        for path in (saved / "2").rglob("*")
        if path.is_file() and path.name != "metadata.json"
    }


@pytest.mark.thorough
def test_fingerprints_do_not_depend_on_the_mesh(saved: Path, tmp_path: Path) -> None:
    expected = Checkpointer(saved).metadata(3).fingerprints
    for devices in (1, 2, 4):
        with Checkpointer(tmp_path / str(devices)) as checkpointer:
            checkpointer.save(3, state_of(3, devices), **ABOUT)
        assert checkpointer.metadata().fingerprints == expected


def test_a_flipped_bit_in_any_file_is_noticed_and_the_file_named(run: Path) -> None:
    chance = random.Random(0)
    for number, path in enumerate(files_of(run / "3")):
        name = str(path.relative_to(run / "3"))
        place, bit = chance.randrange(path.stat().st_size), chance.randrange(8)
        flip(path, place, bit)
        devices = (8, 2, 1)[number % 3]
        assert_is_step(restore_with_warning(run, re.escape(f"{name} "), devices), 2)
        found = Checkpointer(run).verify(3)
        assert [damage.file for damage in found.damages if damage.file] == [name]
        flip(path, place, bit)
    with Checkpointer(run) as checkpointer:
        assert_is_step(checkpointer.restore(abstract_on(2)), 3)
        assert checkpointer.verify().is_good
        assert checkpointer.verify().num_leaves == 3


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [8, 2, 1])
def test_a_flipped_bit_of_an_array_names_leaf_and_file_on_any_mesh(run: Path, devices: int) -> None:
    path = largest(run / "3")
    content = path.read_bytes()
    place = content.index(host_state(3)["a/kernel"][5, 100:104].tobytes())
    flip(path, place + 3, 7)
    name = re.escape(str(path.relative_to(run / "3")))
    text = (
        r"^checkpoint \S+/3 is damaged: 'a/kernel' differs from what was saved; "
        rf"{name} does not match"
        r" its checksum; step 2 is used in its place; the next save renames its folder 3\.damaged$"
    )
    assert_is_step(restore_with_warning(run, text, devices), 2)
    damages = Checkpointer(run).verify(3).damages
    assert [(damage.leaf, damage.file is None) for damage in damages] == [
        (None, False),
        ("a/kernel", True),
    ]


def test_truncated_missing_and_edited_files_are_named(run: Path) -> None:
    data, about = largest(run / "3"), run / "3" / "metadata.json"
    name = re.escape(str(data.relative_to(run / "3")))
    whole, text = data.read_bytes(), about.read_text()
    data.write_bytes(whole[:-1])
    restore_with_warning(run, rf"{name} has \d+ bytes instead of \d+; step 2")
    data.unlink()
    restore_with_warning(run, rf"{name} is missing; step 2")
    data.write_bytes(whole)
    about.write_text(text.replace("0.001", "0.002"))
    restore_with_warning(
        run, r"metadata\.json was changed after .* config\.optimizer\.learning_rate; step 2"
    )
    about.write_text(text[: len(text) // 2])
    restore_with_warning(run, r"metadata\.json is not valid JSON at line .*; step 2")
    about.unlink()
    restore_with_warning(run, r"metadata\.json is missing; step 2")
    assert Checkpointer(run).verify(3).damages[0].file == "metadata.json"


def test_every_single_bit_of_metadata_is_noticed(saved: Path) -> None:
    content = (saved / "3" / "metadata.json").read_bytes()
    assert metadata.is_unbroken(content)
    chance = random.Random(1)
    for _ in range(2000):
        changed = bytearray(content)
        changed[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        try:
            json.loads(bytes(changed))
        except ValueError:
            continue  # told as unreadable
        assert metadata.is_sealed(bytes(changed))
        assert not metadata.is_unbroken(bytes(changed))


@pytest.mark.thorough
def test_several_damaged_steps_are_passed_over(run: Path) -> None:
    largest(run / "3").unlink()
    flip(largest(run / "2"), 1000, 0)
    with Checkpointer(run) as checkpointer:
        with pytest.warns(RuntimeWarning) as told:
            assert_is_step(checkpointer.restore(abstract_on(4)), 1)
        assert [re.search(r"/(\d) is damaged", str(one.message))[1] for one in told] == ["3", "2"]
        assert len(checkpointer.take_notes()) == 2
        assert checkpointer.take_notes() == []
        assert checkpointer.steps() == (1, 2, 3), "a reader changes nothing"
        checkpointer.save(2, state_of(2), **ABOUT)
        checkpointer.wait()
        assert checkpointer.steps() == (1, 2)
        assert sorted(run.glob("*.damaged*")) == [run / "2.damaged", run / "3.damaged"]
        assert_is_step(checkpointer.restore(abstract_on(1)), 2)
        flip(largest(run / "2"), 1000, 0)
        with pytest.warns(RuntimeWarning, match="/2 is damaged"):
            checkpointer.restore(abstract_on(1))
        checkpointer.save(2, state_of(2), **ABOUT)
    assert [path.name for path in sorted(run.glob("*.damaged*"))] == [
        "2.damaged",
        "2.damaged-2",
        "3.damaged",
    ]


def test_a_folder_under_another_steps_name_is_not_that_step(run: Path) -> None:
    (run / "3").rename(run / "4")
    assert_is_step(restore_with_warning(run, r"/4 is damaged: metadata.json belongs to step 3"), 2)


def test_no_step_is_whole(run: Path) -> None:
    for step in (1, 2, 3):
        flip(largest(run / str(step)), 5000, 3)
    before = sorted(os.listdir(run))
    with Checkpointer(run) as checkpointer:
        text = r"/3 is damaged: .*; so are the earlier steps \(1, 2\); nothing was changed; restore"
        with pytest.raises(DamagedError, match=text):
            checkpointer.restore(abstract_on(2))
        checkpointer.check_step()  # what is wrong is not in the small files
        for step in (1, 2, 3):
            largest(run / str(step)).unlink()
        with pytest.raises(DamagedError, match="so are the earlier steps"):
            checkpointer.usable_step()
    assert sorted(os.listdir(run)) == before


def test_a_step_that_is_asked_for_is_not_replaced(run: Path) -> None:
    flip(largest(run / "3"), 5000, 3)
    largest(run / "2").unlink()
    with Checkpointer(run) as checkpointer:
        with pytest.raises(DamagedError, match="'a/kernel' .*; restore step 1$") as failure:
            checkpointer.restore(abstract_on(2), 3)
        assert not failure.value.is_bad_input
        with pytest.raises(DamagedError, match="is missing; restore step 1$"):
            checkpointer.check_step(2)
        assert_is_step(checkpointer.restore(abstract_on(2), 1), 1)


def test_what_looks_damaged_at_a_glance_is_passed_over_before_a_restore(run: Path) -> None:
    (run / "3" / "metadata.json").unlink()
    with Checkpointer(run) as checkpointer:
        with pytest.warns(RuntimeWarning, match="/3 is damaged: metadata.json is missing; step 2"):
            assert checkpointer.usable_step() == 2
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert checkpointer.usable_step() == 2
            assert_is_step(checkpointer.restore(abstract_on(2)), 2)


def test_another_model_or_a_locked_file_is_no_damage(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    abstract = abstract_on(2)
    other = abstract | {"c": abstract["step"]}
    with Checkpointer(run) as checkpointer:
        with pytest.raises(CheckpointError, match="another model") as failure:
            checkpointer.restore(other)
        assert not isinstance(failure.value, DamagedError)

        def refuse(path: Path) -> str:
            raise PermissionError(13, "no", str(path))

        monkeypatch.setattr(checkpoint_files, "checksum", refuse)
        with pytest.raises(CheckpointError, match="cannot be read now: permission") as failure:
            checkpointer.restore(abstract)
        assert not isinstance(failure.value, DamagedError)


def test_a_checkpoint_of_the_first_format_restores_unchecked(run: Path) -> None:
    path = run / "3" / "metadata.json"
    body = json.loads(path.read_text())
    for name in ("fingerprints", "checksums", "sections", "checksum"):
        del body[name]
    path.write_text(json.dumps({**body, "format": 1}))
    restored = restore_with_warning(run, "/3 has no fingerprints, so its values are not checked$")
    assert_is_step(restored, 3)
    found = Checkpointer(run).verify(3)
    assert found.is_good
    assert not found.has_fingerprints
    largest(run / "3").unlink()
    assert_is_step(restore_with_warning(run, "is missing; step 2"), 2)


def test_only_files_that_were_compared_are_counted(run: Path) -> None:
    whole = Checkpointer(run).verify(3)
    short = largest(run / "3")
    size = short.stat().st_size
    os.truncate(short, size - 1)
    found = Checkpointer(run).verify(3)
    assert (found.num_files, found.num_bytes) == (whole.num_files - 1, whole.num_bytes - size)


def test_fingerprints_can_be_switched_off(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, fingerprints=False) as checkpointer:
        checkpointer.save(1, state_of(1), **ABOUT)
        assert_is_step(checkpointer.restore(abstract_on(2)), 1)
        assert checkpointer.metadata().fingerprints == {}
        found = checkpointer.verify()
    assert found.is_good
    assert not found.has_fingerprints
    assert found.num_leaves == 0
    assert found.num_files > 0


def test_wrong_values_in_good_files_are_no_secret(run: Path) -> None:
    """As if they had been wrong before they were written."""
    path = run / "3" / "metadata.json"
    about = metadata.read_metadata(run / "3")
    about.fingerprints["b/bias"] = "0" * 16
    metadata.write_metadata(run / "3", about)
    assert path.exists()
    text = "'b/bias' differs from what was saved; all files match their checksums; step 2"
    assert_is_step(restore_with_warning(run, text), 2)


def test_only_what_is_read_is_compared(run: Path) -> None:
    path = largest(run / "3")
    flip(path, path.read_bytes().index(host_state(3)["a/kernel"][5, 100:104].tobytes()), 0)
    with Checkpointer(run) as checkpointer:
        restored = checkpointer.restore({"step": abstract_on(2)["step"]}, subset=True)
        assert restored.step == 3
        # What is left for later cannot be compared now, so all files are read.
        with pytest.warns(RuntimeWarning, match=r"3 is damaged: \S+ does not match its checksum"):
            assert checkpointer.restore(abstract_on(2), unread=["a/kernel"]).step == 2


@pytest.mark.parametrize(
    ("name", "cause"),
    [("x", "one device has computed a wrong value"), ("extras/seen", "the model writes")],
)
def test_copies_that_differ_are_not_saved(tmp_path: Path, name: str, cause: str) -> None:
    """A model's own state may differ without a fault of a device."""
    sharding = NamedSharding(make_mesh(2), P())
    parts = [jax.device_put(np.float32([1, i]), d) for i, d in enumerate(jax.devices()[:2])]
    x = jax.make_array_from_single_device_arrays((2,), sharding, parts)
    checkpointer = Checkpointer(tmp_path)
    good = jax.device_put(np.float32([1, 0]), sharding)
    for step, value in ((1, good), (2, x)):
        tree = {"extras": {"seen": value}} if name.startswith("extras") else {name: value}
        checkpointer.save(step, tree, **ABOUT)
    text = f"2 was not saved .* 0 and 1 hold different copies of '{name}', so {cause}.* intact: 1$"
    with pytest.raises(CheckpointError, match=text):
        checkpointer.wait()
    checkpointer.close()
    assert os.listdir(tmp_path) == ["1"]


def test_a_clock_that_jumps_changes_no_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        for step, year in ((1, 2040), (2, 1971), (3, 2026)):
            checkpointer.save(step, state_of(step), **ABOUT)
            checkpointer.wait()
            for path in (tmp_path / str(step), *files_of(tmp_path / str(step))):
                os.utime(path, (year * 31e6 - 1970 * 31e6,) * 2)
        assert checkpointer.steps() == (2, 3)
        assert_is_step(checkpointer.restore(abstract_on(1)), 3)
