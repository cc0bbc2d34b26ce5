"""What every test runs on: 8 virtual CPU devices, and no silent rank promotion.

Tests marked `gpu` are for a machine that has one and run when they are asked for: `pytest -m gpu`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import platform
import re
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.support.cpu_times import CpuTimes
from tests.support.journal import Journal
from tests.support.kept_programs import KeptPrograms
from zerojax.runtime.memory import keep_freed_memory

NUM_CPU_DEVICES = 8
KILOBYTES_PER_WORKER = 3 << 19
"""1.5 GiB: a process that has run all quick tests holds about one."""
XLA_FLAGS = (
    "--xla_cpu_parallel_codegen_split_count=1"
    " --xla_cpu_collective_call_terminate_timeout_seconds=600"
)
"""LLVM gets a program in one part, not in up to 32 for as many cores: less work in all. A CPU
device may wait ten minutes for the others of a collective: after 40 seconds, XLA's own limit, it
aborts the process, and eight devices on two busy cores were seen to take longer."""
SLOW_SECONDS = 1800
"""The time limit of a slow test."""
GARBAGE_THRESHOLDS = 50_000, 10, 10
"""Tracing makes many objects that live on. Python's own thresholds (700, 10, 10) would have it look
for cycles among them for 6 % of the processor time."""
X86_FLAGS = "--xla_cpu_max_isa=AVX"
"""AVX has no instruction that multiplies and adds at once: which products it took would depend on
what is fused, and programs that compute the same would differ in their last bits."""
OLDER_FLAGS = "--xla_cpu_use_fusion_emitters=false"
"""For JAX before 0.11, whose XLA knows it. Fusions become LLVM's code directly, not by way of MLIR,
which halves a compilation."""


def _gpu_was_asked_for(config: pytest.Config) -> bool:
    expression = config.getoption("markexpr") or ""
    return re.search(r"(?<!not )\bgpu\b", expression) is not None


def _only_starts_others(config: pytest.Config) -> bool:
    """Whether this is the process of `-n` that runs no test itself."""
    return bool(getattr(config.option, "numprocesses", 0)) and not hasattr(config, "workerinput")


def _keep_kernels(config: pytest.Config) -> None:
    """A kernel for GPUs that this process compiled before is read, not compiled again.

    For a second step of the same model that halves the processor time. Each process of pytest has
    a file of its own, which goes with it: XLA writes it in place, so that another could read half.
    """
    folder = tempfile.TemporaryDirectory(prefix="zerojax-kernels-", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    os.environ["XLA_FLAGS"] += f" --xla_gpu_kernel_cache_file={folder.name}/kernels"


PROGRAMS = pytest.StashKey[KeptPrograms]()


def _programs_folder(config: pytest.Config) -> Path:
    if hasattr(config, "cache"):  # not so with -p no:cacheprovider
        with contextlib.suppress(OSError):
            folder = config.cache.mkdir("programs")
            if os.access(folder, os.W_OK):
                return folder
    temporary = tempfile.TemporaryDirectory(prefix="zerojax-programs-", ignore_cleanup_errors=True)
    config.add_cleanup(temporary.cleanup)
    return Path(temporary.name)


def _keep_programs(config: pytest.Config) -> None:
    """A program that any test compiled before is read, not compiled again.

    The entries lie in pytest's cache (`.pytest_cache`); without one they go with the process.
    """
    programs = KeptPrograms(_programs_folder(config))
    programs.use()
    config.add_cleanup(programs.close)
    config.stash[PROGRAMS] = programs


def _journal(config: pytest.Config) -> Journal:
    path, part = config.getoption("journal"), config.getoption("journal_part")
    from_starter = getattr(config, "workerinput", None)
    if from_starter is None:
        return Journal(path, part, worker=False)
    return Journal(path, part, worker=True, passed=from_starter["passed_tests"])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-times",
        type=int,
        metavar="N",
        help="print the N dearest test files and tests by processor time, which does not depend "
        "on what else the machine does; processes that tests start count when they have ended",
    )
    parser.addoption(
        "--journal",
        type=Path,
        metavar="FILE",
        help="add a line of JSON to FILE for each test that ends; tests that passed by an earlier "
        "line are left out",
    )
    parser.addoption("--journal-part", default="", metavar="NAME", help="of this call, in FILE")


STDERR = pytest.StashKey[int]()
"""A copy of this process's standard error: pytest captures the original while a test runs."""


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Ends this process when a test exceeds its limit, and prints the stacks of all threads.

    In place of pytest-timeout's own methods: those need the interpreter's lock, which a test that
    hangs in compiled code may hold, and print nothing from a worker of pytest-xdist.
    """
    faulthandler.dump_traceback_later(settings.timeout, exit=True, file=item.config.stash[STDERR])
    return True


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_cancel_timer() -> bool:
    faulthandler.cancel_dump_traceback_later()
    return True


def pytest_configure(config: pytest.Config) -> None:
    """Runs before any test module is imported, so before JAX starts its devices."""
    config.stash[STDERR] = os.dup(sys.stderr.fileno())
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts background jobs that way; tests send SIGINT and mean it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not _gpu_was_asked_for(config):
        # Also for the processes that tests start. What a user has kept is no part of a test.
        os.environ["ZEROJAX_CACHE"] = "off"
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
        jax.config.update("jax_platforms", "cpu")
        flags = [os.environ.get("XLA_FLAGS", ""), XLA_FLAGS]
        if platform.machine() == "x86_64":
            flags.append(X86_FLAGS)
        if jax.__version_info__ < (0, 11):
            flags.append(OLDER_FLAGS)
        os.environ["XLA_FLAGS"] = " ".join(flags).strip()
        if "not gpu_programs" not in (config.getoption("markexpr") or ""):
            _keep_kernels(config)
        elif not _only_starts_others(config):
            _keep_programs(config)
    if config.getoption("cpu_times"):
        config.pluginmanager.register(CpuTimes(config.getoption("cpu_times")))
    if config.getoption("journal"):
        config.pluginmanager.register(_journal(config))
    keep_freed_memory()
    jax.config.update("jax_num_cpu_devices", NUM_CPU_DEVICES)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    # One program at a time: two that hold collectives and do not wait for each other can each take
    # some of the threads the other needs, and XLA ends the process after 40 seconds of that.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    # Tests compile many programs and run each for milliseconds. Without most of XLA's and LLVM's
    # optimisations the suite takes about half the processor time; what is computed stays the same.
    jax.config.update("jax_disable_most_optimizations", True)


def _limit(items: list[pytest.Item]) -> None:
    """Gives slow tests a longer time limit than pyproject.toml's."""
    for item in items:
        if item.get_closest_marker("slow") or item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))


def _sample(items: list[pytest.Item]) -> None:
    """Marks as thorough what `sampled(n)` leaves of a test's cases."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_one_test in cases.values():
        (wanted,) = of_one_test[0].get_closest_marker("sampled").args
        count = len(of_one_test)
        quick = {(2 * i + 1) * count // (2 * wanted) for i in range(min(wanted, count))}
        for number, item in enumerate(of_one_test):
            if number not in quick:
                item.add_marker(pytest.mark.thorough)


def _skip_programs(items: list[pytest.Item]) -> None:
    """Skips tests of programs for GPUs where their compiler is not installed."""
    from zerojax.hardware.compile_client import missing  # as late as the tests import it

    programs = [item for item in items if item.get_closest_marker("gpu_programs")]
    if programs and (why := missing()) is not None:
        for item in programs:
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Samples cases; a `gpu` test outside `-m gpu` (as with -m "") is skipped by name."""
    _sample(items)
    _limit(items)
    _skip_programs(items)
    if _gpu_was_asked_for(config):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU: run pytest -m gpu"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """`-n auto`: a worker for each core, and no more than memory is there for.

    On Linux; elsewhere pytest-xdist decides.
    """
    memory = Path("/proc/meminfo")
    if not memory.exists():
        return None
    available = re.search(r"MemAvailable:\s+(\d+) kB", memory.read_text(encoding="utf-8"))
    room = int(available[1]) // KILOBYTES_PER_WORKER if available else 1
    return max(1, min(len(os.sched_getaffinity(0)), room))


def pytest_collection(session: pytest.Session) -> None:
    """Nearly nothing that modules make when they are imported is garbage: a fifth of the time."""
    if not _only_starts_others(session.config):
        gc.disable()


def pytest_collection_finish() -> None:
    """What exists now lives as long as the process: Python need not look through it for garbage."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """What this process compiled is there for the others, and what they compiled for this one."""
    programs = item.config.stash.get(PROGRAMS, None)
    if programs is not None:
        programs.exchange_now_and_then()
