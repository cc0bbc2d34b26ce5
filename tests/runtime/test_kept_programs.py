"""The folder of compiled programs that runs keep by themselves."""

import os
import shutil
import zlib
from pathlib import Path

import jax
import pytest

from tests.support.refusals import check_words
from zerojax.runtime import kept_programs
from zerojax.runtime.kept_programs import keep_programs

NAMES = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture(autouse=True)
def jax_without_cache(monkeypatch, tmp_path):
    """JAX's settings as a user's process has them, for one test."""
    before = {name: getattr(jax.config, name) for name in NAMES}
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(kept_programs, "_SAFE_ON_CPU", (0, 0))
    monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path / "cache"))
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    kept_programs.compilation_cache.reset_cache()


def test_programs_are_kept_in_the_users_cache(tmp_path):
    said = keep_programs()
    assert said is not None
    assert jax.config.jax_compilation_cache_dir in said
    assert jax.config.jax_compilation_cache_dir.startswith(str(tmp_path / "cache"))
    assert keep_programs() is None, "the second call finds the folder set"


@pytest.mark.parametrize("what", ["off", "the user's folder", "JAX's switch", "an unsafe version"])
def test_whoever_says_otherwise_is_followed(what, monkeypatch, tmp_path):
    if what == "off":
        monkeypatch.setenv("ZEROJAX_CACHE", "off")
    elif what == "the user's folder":
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    elif what == "JAX's switch":
        jax.config.update("jax_enable_compilation_cache", False)
    else:
        monkeypatch.setattr(kept_programs, "_SAFE_ON_CPU", (99,))
    before = jax.config.jax_compilation_cache_dir
    assert keep_programs() is None
    assert jax.config.jax_compilation_cache_dir == before
    assert not (tmp_path / "cache").exists()


def test_several_processes_on_cpus_keep_none(monkeypatch, tmp_path):
    """Not even in the folder of JAX's own settings; tests/processes/test_hang_map.py says why."""
    monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    before = jax.config.jax_enable_compilation_cache
    try:
        jax.config.update("jax_enable_compilation_cache", True)
        assert "not cached" in (keep_programs() or "")
        assert not jax.config.jax_enable_compilation_cache
        assert keep_programs() is None
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_said(monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("a file")
    said = keep_programs()
    assert said is not None
    assert "not cached" in said
    assert jax.config.jax_compilation_cache_dir is None


# Entries


def add(number: float) -> float:
    """Compiles, or reads, the program that adds `number`; returns what it computes for 1.0."""
    jax.clear_caches()
    return float(jax.jit(lambda x: x + number)(1.0))


@pytest.fixture
def programs(monkeypatch) -> Path:
    """The folder of the programs that add 1, 2 and 3, as a run leaves it."""
    monkeypatch.setattr(kept_programs, "MIN_SECONDS", 0.0)
    folder = start()[0]
    for number in (1, 2, 3):
        add(number)
    return folder


def start() -> tuple[Path, str]:
    """Does what the start of a run does; returns the folder, and what is logged."""
    jax.config.update("jax_compilation_cache_dir", None)
    said = keep_programs() or ""
    return Path(jax.config.jax_compilation_cache_dir or os.devnull), said


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("jit_*-cache"), key=lambda path: path.stat().st_mtime_ns)


def hits(numbers: tuple[float, ...] = (1, 2, 3)) -> list[bool]:
    """Whether each program came from the cache; its result is correct in either case."""
    found: list[str] = []
    note = lambda event, *_, **__: found.append(event)  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(note)
    read = []
    for number in numbers:
        found.clear()
        assert add(number) == 1 + number
        read.append("/jax/compilation_cache/cache_retrieval_time_sec" in found)
    return read


def test_programs_come_back_and_only_this_user_can_write_them(programs):
    assert len(entries(programs)) >= 3
    for path in (programs, *programs.iterdir()):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    assert "not used" not in start()[1]
    assert hits() == [True] * 3


def swap(first: Path, second: Path) -> None:
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def swap_with_seals(first: Path, second: Path) -> None:
    for end in ("", ".seal"):
        swap(first.with_name(first.name + end), second.with_name(second.name + end))


def link(first: Path, second: Path) -> None:
    first.unlink()
    os.link(second, first)


def keep_times(first: Path, second: Path) -> None:
    """As `cp --preserve` does; both contents have the same length."""
    times = first.stat()
    first.write_bytes(second.read_bytes())
    os.utime(first, ns=(times.st_atime_ns, times.st_mtime_ns))


def in_place(content: bytes):
    return lambda first, _: first.write_bytes(content)


def other_kind(make):
    def change(first: Path, second: Path) -> None:
        first.unlink()
        make(first, second)

    return change


CHANGES = {
    "swapped": swap,
    "swapped with their seals": swap_with_seals,
    "the other with times kept": keep_times,
    "a hard link to another": link,
    "renamed": lambda first, second: os.replace(second, first),
    "random": in_place(os.urandom(300)),
    "empty": in_place(b""),
    "cut": lambda first, _: os.truncate(first, first.stat().st_size // 2),
    "writable by all": lambda first, _: first.chmod(0o666),
    "writable by the group": lambda first, _: first.chmod(0o660),
    "without a seal": lambda first, _: kept_programs._seal_path(first).unlink(),
    "seal of random bytes": lambda first, _: (
        kept_programs._seal_path(first).write_bytes(os.urandom(300)),
        os.utime(first),
    ),
    "seal of another type": lambda first, _: kept_programs._seal_path(first).write_text("[7]"),
    "huge seal": lambda first, _: os.truncate(kept_programs._seal_path(first), 1 << 40),
    "a pipe": other_kind(lambda first, _: os.mkfifo(first)),
    "a pipe as seal": lambda first, _: (
        kept_programs._seal_path(first).unlink(),
        os.mkfifo(kept_programs._seal_path(first)),
    ),
    "a link to another": other_kind(lambda first, second: first.symlink_to(second)),
    "a link to a device": other_kind(lambda first, _: first.symlink_to("/dev/zero")),
    "a folder": other_kind(lambda first, _: first.mkdir()),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_entry_that_is_not_what_was_written_is_compiled_again(change, programs):
    first, second, *_ = [path for path in entries(programs) if "lambda" in path.name]
    change(first, second)
    said = start()[1]
    assert "not used" in said
    assert "\n" not in said
    again = hits()
    assert again.count(False) in (1, 2)
    assert start()[1].count("not used") == 0, "it is written anew"
    assert hits() == [True] * 3


@pytest.mark.parametrize("which", [".", "..", "../.."])
@pytest.mark.parametrize("how", ["of another user", "writable by all"])
def test_a_folder_that_others_can_write_is_refused(which, how, programs, monkeypatch):
    folder = Path(os.path.normpath(programs / which))
    if how == "writable by all":
        folder.chmod(0o777)
    elif os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    else:
        os.chown(folder, 1234, -1)
    said = start()[1]
    check_words(said, [str(folder)], ["ZEROJAX_CACHE", "remove" if how[0] == "o" else "chmod go-w"])
    assert jax.config.jax_compilation_cache_dir is None
    folder.chmod(0o700)
    os.chown(folder, os.geteuid(), -1)
    assert start()[0] == programs
    assert hits() == [True] * 3


def test_a_shared_folder_like_tmp_may_hold_the_cache(programs):
    """Others cannot replace this user's folder there."""
    programs.parent.parent.chmod(0o1777)
    assert start()[0] == programs


def test_a_program_of_another_processor_is_not_used(programs, monkeypatch):
    monkeypatch.setattr(kept_programs, "_processor", lambda: "cpu-other")
    shutil.copytree(programs, programs.with_name("cpu-other"))
    assert "not used" in start()[1]
    assert hits() == [False] * 3


def test_an_entry_that_was_written_in_part_is_not_sealed(programs):
    """Not even by another process that compiles something at this moment."""
    name = f"jit_x-{'0' * 64}-cache"
    (programs / name).write_bytes(zlib.compress(os.urandom(10_000))[:5000])
    add(4)
    assert not kept_programs._seal_path(programs / name).exists()
    assert f"{name}' has no seal" in start()[1]
    assert not (programs / name).exists()


def test_the_oldest_programs_go_first_and_nothing_else(programs, monkeypatch, tmp_path):
    """Also a user's own files, in the cache and behind links, whatever their names are."""
    mine = [programs / "thesis", programs / "x-cache", programs.parent / "thesis" / "whole"]
    mine[-1].parent.mkdir()
    mine += [programs.parent / "thesis" / f"jit_x-{'0' * 64}-cache", tmp_path / "mine" / "x"]
    mine[-1].parent.mkdir()
    for number, path in enumerate(mine):
        path.write_bytes(kept_programs._HEADERS[0] * 10_000_000)
        os.utime(path, (number, number))
    (programs.parent / "linked").symlink_to(mine[-1].parent)
    os.mkfifo(programs / "pipe")
    for age, path in enumerate(entries(programs)):
        os.utime(path, (1e9 - age, 1e9 - age))
    kept = entries(programs)[-2:]
    monkeypatch.setattr(kept_programs, "MAX_BYTES", sum(path.stat().st_size for path in kept))
    assert "not used" not in start()[1]
    assert entries(programs) == kept
    assert all(path.stat().st_size == 20_000_000 for path in mine)
    assert len(list(programs.glob("*.seal"))) == 2


def test_something_of_a_user_under_the_name_of_a_program_is_renamed(programs):
    name = entries(programs)[-1].name
    (programs / name).unlink()
    (programs / f"{name}.seal").unlink()
    (programs / name).write_text("mine")
    said = start()[1]
    (aside,) = programs.glob("*.aside-*")
    assert aside.read_text() == "mine"
    assert aside.name[:40] in said
