"""Whatever a step's tables say: no hang, no raw error, no wrong value.

A step whose metadata somebody wrote on purpose, with the right checksums, is no accident: its
fields are checked for kind and range, its names stay inside its folder, and only regular files are
opened.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import shutil
import signal
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.checkpoint import Checkpointer, CheckpointError, metadata, packs
from zerojax.checkpoint.errors import DamagedError
from zerojax.checkpoint.files import checksum
from zerojax.checkpoint.inspection import saved_steps
from zerojax.checkpoint.metadata import is_array, read_metadata
from zerojax.cli import main

ABOUT = {"data_state": {"position": 7}, "config": {"a": [1, None, {"b": 0.5}]}, "plan": {"z": 3}}
SECONDS = 60


def state_of(step: int) -> dict[str, jax.Array]:
    return {
        "w": jnp.arange(12.0).reshape(3, 4) + step,
        "b": jnp.full((5,), step, jnp.int32),
        "c": jnp.full((2, 2), step, jnp.int32),
    }


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    with Checkpointer(folder) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(step), **ABOUT)
    return folder


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "run"))


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"it took longer than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def body_of(step: Path) -> dict[str, Any]:
    body = json.loads((step / metadata.FILE_NAME).read_text())
    return {name: x for name, x in body.items() if name not in ("sections", "checksum")}


def reseal(step: Path, body: dict[str, Any]) -> None:
    (step / metadata.FILE_NAME).write_text(metadata.seal(body))


def looked_at(run: Path) -> int:
    """The step that a run would go on from, after all that only looks has looked."""
    with in_time(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        steps = {one.step: one.error for one in saved_steps(run)}
        assert steps.keys() == {1, 2}
        with Checkpointer(run) as checkpointer:
            if "reads formats up to" in str(steps[2]):
                with pytest.raises(CheckpointError, match="update zerojax"):
                    checkpointer.usable_step()
                return -1
            usable = checkpointer.usable_step()
    assert steps[1] is None
    assert usable in (1, 2)
    assert usable == 1 or steps[2] is None
    return usable


def read(run: Path) -> None:
    """Verifies step 2 and restores what a run would: the values of one of the two steps."""
    with in_time(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Checkpointer(run) as checkpointer:
            with contextlib.suppress(CheckpointError):
                checkpointer.verify(2)
            abstract = {
                name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
                for name, x in state_of(0).items()
            }
            try:
                restored = checkpointer.restore(abstract)
            except CheckpointError:
                return
    for name, leaf in state_of(restored.step).items():
        np.testing.assert_array_equal(np.asarray(restored.state[name]), np.asarray(leaf))


def first_key(table: dict[str, Any]) -> str:
    return next(iter(table))


def in_table(table: str, key: Any, value: Any = None) -> Any:
    """A change of one entry's value, or with `key` of its name."""

    def change(body: dict[str, Any]) -> None:
        entries = body[table]
        name = first_key(entries)
        if key is None:
            entries[name] = value
        else:
            entries[key] = entries.pop(name)

    return change


def field(name: str, value: Any) -> Any:
    return lambda body: body.update({name: value})


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (field("format", -1), "'format' is -1 instead of a number of 1 or more"),
        (field("format", True), "has no format number"),
        (field("format", "2"), "has no format number"),
        (field("step", "3"), "'step' is '3' instead of a whole number of 0 or more"),
        (field("step", -2), "'step' is -2 instead"),
        (field("step", True), "'step' is True instead"),
        (field("step", 10**30), "'step' is 1000.* instead"),
        (field("files", [1]), r"'files' is \[1\] instead of an object"),
        (field("arrays", None), "'arrays' is None instead of an object"),
        (field("versions", 3), "'versions' is 3 instead of an object"),
        (field("data_state", [1]), r"'data_state' is \[1\] instead of an object"),
        (field("saved", 1), "'saved' is 1 instead of a time"),
        (field("num_devices", 0), "'num_devices' is 0 instead of"),
        (
            in_table("files", "/dev/zero"),
            "'files' has '/dev/zero', which is not the name of a file",
        ),
        (in_table("files", "../1/metadata.json"), "'files' has '../1/metadata.json', which"),
        (in_table("files", "a/../../x"), "'files' has 'a/../../x', which is not the name"),
        (in_table("files", "x\x1b[2J"), r"which 'files' has not|is missing"),
        (in_table("files", None, -1), "'files' has -1 for .* instead of its bytes"),
        (in_table("files", None, 1.0), "'files' has 1.0 for .* instead of its bytes"),
        (
            in_table("checksums", "elsewhere"),
            "'checksums' has 'elsewhere', which 'files' does not have",
        ),
        (in_table("checksums", None, 5), "'checksums' has 5 for .* instead of its checksum"),
        (in_table("arrays", None, "object[2]"), "'arrays' has 'object.2.' for .* instead of a dt"),
        (in_table("arrays", None, "float32[-2]"), "instead of a dtype and a shape"),
        (in_table("arrays", None, f"int8[{2**60}]"), "instead of a dtype and a shape"),
        (in_table("fingerprints", None, "zz"), "'fingerprints' has 'zz' for .* instead of a f"),
        (
            in_table("fingerprints", "other"),
            "'fingerprints' has 'other', which 'arrays' does not have",
        ),
    ],
)
def test_fields_of_another_kind_are_passed_over_with_a_sentence(
    run: Path, change: Any, words: str
) -> None:
    body = body_of(run / "2")
    change(body)
    reseal(run / "2", body)
    if words.endswith("is missing"):
        body["checksums"] = {n: x for n, x in body["checksums"].items() if n in body["files"]}
        reseal(run / "2", body)
        words = "is missing"
        with pytest.raises(CheckpointError, match=words):
            Checkpointer(run).check_step(2)
    else:
        with pytest.raises(DamagedError, match=words) as refused:
            read_metadata(run / "2")
        assert "\x1b" not in str(refused.value)
    assert looked_at(run) == 1


def test_a_newer_format_is_refused_whatever_else_it_says(run: Path) -> None:
    body = {**body_of(run / "2"), "format": 99, "versions": [1]}
    reseal(run / "2", body)
    with pytest.raises(CheckpointError, match="format 99, written by zerojax unknown.*update"):
        read_metadata(run / "2")
    assert looked_at(run) == -1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "nested deeper than 64 levels"),
        ('{"a":' * 100_000, "nested deeper than 64 levels"),
        ('{"format": ' + "1" * 5000 + "}", "a number of 5000 characters"),
        ('{"format": NaN}', "has NaN, which is not valid JSON"),
        ('{"format": 2, "format": 1}', "the key 'format' twice"),
    ],
    ids=["lists", "objects", "digits", "nan", "twice"],
)
def test_json_bombs_are_passed_over(run: Path, text: str, words: str) -> None:
    (run / "2" / metadata.FILE_NAME).write_text(text)
    with pytest.raises(DamagedError, match=words):
        read_metadata(run / "2")
    assert looked_at(run) == 1


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        os.chdir(path.parent)  # the name of a socket has 108 characters at most
        listening.bind(path.name)


def make_large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", [metadata.FILE_NAME, packs.FILE_NAME, "arrays/stray"])
@pytest.mark.parametrize(
    "make",
    [os.mkfifo, make_socket, make_large, lambda path: path.symlink_to("/dev/zero"), Path.mkdir],
    ids=["pipe", "socket", "large", "link", "folder"],
)
def test_what_is_no_regular_file_is_never_opened(
    run: Path, name: str, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run)
    path = run / "2" / name
    path.unlink(missing_ok=True)
    make(path)
    harmless = name == "arrays/stray" and (path.is_dir() or path.is_file())
    assert looked_at(run) == (2 if harmless else 1)
    with in_time():
        assert Checkpointer(run).verify(2).is_good == harmless
        assert main(["checkpoint", "list", str(run)]) == 0
    if not harmless:
        read(run)


def test_a_step_reached_through_a_link_is_read_and_links_inside_it_are_not(
    run: Path, tmp_path: Path
) -> None:
    (run / "2").rename(tmp_path / "elsewhere")
    (run / "2").symlink_to(tmp_path / "elsewhere")
    assert looked_at(run) == 2
    (tmp_path / "elsewhere" / "arrays").rename(tmp_path / "arrays")
    (tmp_path / "elsewhere" / "arrays").symlink_to(tmp_path / "arrays")
    with pytest.raises(CheckpointError, match="arrays is a symbolic link, not a regular file"):
        Checkpointer(run).check_step(2)
    assert looked_at(run) == 1


def test_descriptions_of_arrays_are_those_of_arrays() -> None:
    for dtype in ("float32", "bfloat16", "bool", "uint8", "float8_e4m3fn", "int4"):
        assert is_array(metadata.describe(jax.ShapeDtypeStruct((3, 0, 7), dtype)))
        assert is_array(metadata.describe(jax.ShapeDtypeStruct((), dtype)))
    for text in ("", "float32", "float32[]x", "float32[1,]", "float32[ 1]", "str[1]", "V8[1]", 3):
        assert not is_array(text)
    assert not is_array(f"float32[{','.join(['1'] * 33)}]")


def test_what_would_not_be_read_is_not_written(tmp_path: Path) -> None:
    deep: Any = 0
    for _ in range(70):
        deep = [deep]
    with Checkpointer(tmp_path) as checkpointer:
        for value, words in [
            (deep, "nested deeper than 64 levels"),
            (10**200, "100 digits or more"),
            ("\ud800", "not Unicode text"),
        ]:
            with pytest.raises(TypeError, match=words):
                checkpointer.save(
                    1, {"w": jnp.ones(3)}, data_state={"x": value}, config={}, plan={}
                )
        edge: Any = 10**98
        for _ in range(60):
            edge = {"x": edge}
        about = {"data_state": {"x": edge, "y": -(10**98)}, "config": {}, "plan": {}}
        checkpointer.save(1, {"w": jnp.ones(3)}, **about)
        checkpointer.wait()
        assert checkpointer.metadata().data_state == about["data_state"]


# --- mutations ------------------------------------------------------------------------------------

VALUES = (
    *(None, True, False, -1, 0, 1, 3, 2**31, 2**63, 10**90, 0.5, 1e308, "", "x", "3", [], [1], {}),
    *({"a": 1}, "../../x", "/dev/zero", "float32[3,4]", "int32[5]", "object[1]", "0" * 8, "0" * 16),
    *([[0], [5], 0, 5, 0], [[[0, 0], [3, 4], 0, 12, 0]], "pack/0", "float32", "\x1b[31m", "\0"),
)


def mutate(chooser: random.Random, value: Any) -> Any:
    """The value with one of its parts replaced, removed, renamed or doubled."""
    if isinstance(value, dict) and value and chooser.random() < 0.9:
        name = chooser.choice(sorted(value))
        kind = chooser.random()
        if kind < 0.1:
            del value[name]
        elif kind < 0.25:
            value[chooser.choice(["x", "../y", "/dev/zero", "b", "w", "\0"])] = value.pop(name)
        else:
            value[name] = mutate(chooser, value[name])
        return value
    if isinstance(value, list) and value and chooser.random() < 0.9:
        at, kind = chooser.randrange(len(value)), chooser.random()
        if kind < 0.1:
            del value[at]
        elif kind < 0.2:
            value.append(copy.deepcopy(value[at]))
        else:
            value[at] = mutate(chooser, value[at])
        return value
    if isinstance(value, int) and chooser.random() < 0.5:
        return value + chooser.choice([-1, 1, 7, -value - 1, 2**40])
    return copy.deepcopy(chooser.choice(VALUES))


def flip(chooser: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(chooser.randint(1, 3)):
        at = chooser.randrange(len(changed))
        part = chooser.choice(
            [b"", b"[", b"{", b'"', b"9", b"NaN", bytes([chooser.randrange(256)])]
        )
        changed[at : at + chooser.randint(0, 3)] = part
    return bytes(changed)


def change_a_table(chooser: random.Random, run: Path) -> None:
    """Changes a table of step 2; half of the time so that all checksums are right."""
    step = run / "2"
    about, table = step / metadata.FILE_NAME, step / packs.FILE_NAME
    kind = chooser.random()
    if kind < 0.2:
        path = chooser.choice([about, table])
        path.write_bytes(flip(chooser, path.read_bytes()))
        return
    body = body_of(step)
    if kind < 0.6:
        for _ in range(chooser.randint(1, 2)):
            body = mutate(chooser, body)
    else:
        changed = mutate(chooser, json.loads(table.read_text()))
        table.write_text(json.dumps(changed))
        body["checksums"][packs.FILE_NAME] = checksum(table)
        body["files"][packs.FILE_NAME] = table.stat().st_size
        if chooser.random() < 0.5:
            body["fingerprints"] = {}
    if isinstance(body, dict):
        reseal(step, body)
    else:
        about.write_text(json.dumps(body))


@pytest.mark.thorough
def test_mutated_tables_are_passed_over_or_harmless(original: Path, tmp_path: Path) -> None:
    for seed in range(100):
        run = Path(shutil.copytree(original, tmp_path / "run"))
        change_a_table(random.Random(seed), run)
        try:
            looked_at(run)
        except Exception as error:
            raise AssertionError(f"mutation {seed}") from error
        shutil.rmtree(run)


def test_a_few_mutations_read_to_the_end(original: Path, tmp_path: Path) -> None:
    read_mutations(original, tmp_path, range(12))


@pytest.mark.slow
def test_many_mutations_read_to_the_end(original: Path, tmp_path: Path) -> None:
    read_mutations(original, tmp_path, range(1000, 1600))


def read_mutations(original: Path, tmp_path: Path, seeds: range) -> None:
    for seed in seeds:
        run = Path(shutil.copytree(original, tmp_path / "run"))
        change_a_table(random.Random(seed), run)
        try:
            read(run)
        except Exception as error:
            raise AssertionError(f"mutation {seed}") from error
        shutil.rmtree(run)
