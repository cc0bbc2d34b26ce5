"""Compiled programs are handed from one process of pytest to the next whole, or not at all.

Also the other things that make the suite bearable: the time after which no test begins, and which
tests take the most processor time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zlib
from types import SimpleNamespace

import conftest
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import kept_programs
from tests.cpu_times import CpuTimes, cpu_seconds
from tests.kept_programs import SETTINGS, KeptPrograms, use_settings

WHOLE = zlib.compress(os.urandom(5000))
FREE_NUMBERS = 1 << 28, (1 << 28) + 1
"""Of processes that do not exist: above the largest number that Linux gives."""


def names(folder):
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def programs(tmp_path):
    return KeptPrograms(tmp_path / "programs", process=os.getpid())


def test_an_entry_reaches_another_process(programs, tmp_path, monkeypatch):
    monkeypatch.setattr(kept_programs, "_lives", lambda process: True)
    other = KeptPrograms(tmp_path / "programs", process=FREE_NUMBERS[0])
    (programs.own / "step-cache").write_bytes(WHOLE)
    programs.exchange()
    other.exchange()
    assert (other.own / "step-cache").read_bytes() == WHOLE
    later = KeptPrograms(tmp_path / "programs", process=FREE_NUMBERS[1])
    assert names(later.own) == {"step-cache"}


def test_half_an_entry_is_not_shared_until_it_is_whole(programs):
    (programs.own / "step-cache").write_bytes(WHOLE[:-100])
    programs.exchange()
    assert not names(programs.shared)
    (programs.own / "step-cache").write_bytes(WHOLE)
    programs.exchange()
    assert names(programs.shared) == {"step-cache"}


def test_the_last_entries_are_added_at_the_end(programs):
    (programs.own / "step-cache").write_bytes(WHOLE)
    programs.close()
    assert not programs.own.exists()
    assert names(programs.shared) == {"step-cache"}


def test_folders_of_processes_that_are_gone_go(programs):
    left = programs.own.with_name(f"process-{FREE_NUMBERS[0]}")
    left.mkdir()
    KeptPrograms(programs.own.parent)
    assert not left.exists()
    assert programs.own.exists()


def test_the_shared_folder_is_bounded_and_the_oldest_go(programs, monkeypatch):
    for age in range(6):
        path = programs.shared / f"{age}-cache"
        path.write_bytes(WHOLE)
        os.utime(path, (time.time() - age, time.time() - age))
    monkeypatch.setattr(kept_programs, "MAX_BYTES", 4 * len(WHOLE))
    KeptPrograms(programs.own.parent)
    assert names(programs.shared) == {"0-cache", "1-cache"}


@pytest.fixture
def all_are_kept(programs):
    """Also programs that are compiled at once."""
    before = {name: getattr(jax.config, name) for name in programs.settings()}
    programs.use()
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield
    use_settings(before)


@pytest.mark.thorough
def test_entries_are_read_again_and_compute_the_same(programs, all_are_kept):
    """Programs that differ in the names of their operations alone are two entries."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.P("data"))

    def compiled(scope):
        def program(x):
            with jax.named_scope(scope):
                return x - jnp.sum(jnp.sin(x))

        program.__name__ = "kept"
        return jax.jit(program, donate_argnums=0).lower(x).compile()

    x = jax.device_put(np.arange(16.0, dtype=np.float32), split)
    results = []
    for _ in range(2):  # compiled, then read
        first, second = compiled("first"), compiled("second")
        assert "first/sin" in first.as_text()
        assert "second/sin" in second.as_text()
        given = jnp.copy(x)
        found = first(given)
        assert given.is_deleted()
        results.append(np.asarray(found))
        jax.clear_caches()
    values = np.asarray(x)
    np.testing.assert_allclose(results[0], values - np.sin(values).sum(), atol=1e-5)
    assert results[1].tobytes() == results[0].tobytes()
    assert sum(name.startswith("jit_kept") for name in names(programs.own)) == 2


@pytest.mark.thorough  # it clears the caches of its process, and other tests trace again
@pytest.mark.usefixtures("all_are_kept")
def test_a_program_that_calls_python_calls_its_own_function():
    """In the program's text the function is a number, which another program's may be as well."""
    shape = jax.ShapeDtypeStruct((), jnp.float32)

    def called(add):
        def program(x):
            return jax.pure_callback(lambda value: np.float32(value + add), shape, x)

        return float(jax.jit(program)(jnp.float32(10)))

    assert [called(1), called(2)] == [11.0, 12.0]
    jax.clear_caches()
    assert called(3) == 13.0


def test_this_process_keeps_what_it_compiles(pytestconfig):
    """Unless programs for GPUs were asked for, which are kept in another way."""
    if pytestconfig.stash.get(conftest.PROGRAMS, None) is None:
        pytest.skip("programs for GPUs were asked for")
    assert jax.config.jax_compilation_cache_dir is not None
    assert {name: getattr(jax.config, name) for name in SETTINGS} == SETTINGS


@pytest.mark.thorough
def test_processor_time_is_that_of_the_test_and_of_its_children():
    times = CpuTimes(1)
    before = cpu_seconds()
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
    report = SimpleNamespace(nodeid="tests/test_a.py::test_b", cpu_seconds=cpu_seconds() - before)
    assert report.cpu_seconds > 0.03
    times.pytest_runtest_logreport(report)
    times.pytest_runtest_logreport(report)
    times.pytest_runtest_logreport(SimpleNamespace(nodeid="tests/test_c.py::test_d"))
    assert times.of_files()["tests/test_a.py"] == 2 * report.cpu_seconds
    assert times.of_files()["tests/test_c.py"] == 0
