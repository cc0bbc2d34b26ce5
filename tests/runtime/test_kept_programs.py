"""The folder of compiled programs that runs keep by themselves."""

import os
import zlib
from pathlib import Path

import jax
import pytest

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


def test_an_entry_that_was_written_in_part_is_removed(tmp_path):
    assert keep_programs() is not None
    folder = Path(jax.config.jax_compilation_cache_dir)
    data = zlib.compress(os.urandom(10_000))
    contents = {"whole": data, "torn": data[:5000], "empty": b"", "other": b"\x28\xb5\x2f\xfd"}
    for name, content in contents.items():
        (folder / f"{name}-cache").write_bytes(content)
    jax.config.update("jax_compilation_cache_dir", None)
    assert keep_programs() is not None
    assert sorted(x.name for x in folder.glob("*-cache")) == ["other-cache", "whole-cache"]


def test_the_oldest_programs_go_first(monkeypatch, tmp_path):
    monkeypatch.setattr(kept_programs, "MAX_BYTES", 250)
    folder = tmp_path / "cache" / "programs" / "another"
    folder.mkdir(parents=True)
    for age in range(4):
        (folder / str(age)).write_bytes(b"x" * 100)
        os.utime(folder / str(age), (1e9 - age, 1e9 - age))
    keep_programs()
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1"]
