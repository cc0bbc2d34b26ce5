"""What every test runs on: 8 virtual CPU devices, and no silent rank promotion.

Tests marked `gpu` are for a machine that has one and run when they are asked for: `pytest -m gpu`.
"""

from __future__ import annotations

import gc
import os
import platform
import re
import signal
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from zerojax.host_memory import keep_freed_memory

NUM_CPU_DEVICES = 8
XLA_FLAGS = "--xla_cpu_parallel_codegen_split_count=1"
"""LLVM gets a program in one part, not in up to 32 for as many cores: less work in all."""
OLDER_XLA_FLAGS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_max_isa=AVX"
"""For JAX before 0.11, whose XLA knows the first. Fusions become LLVM's code directly, not by way
of MLIR, which halves a compilation. AVX has no instruction that multiplies and adds at once: which
products it took would depend on what is fused, and programs that compute the same would differ in
their last bits."""


def _gpu_was_asked_for(config: pytest.Config) -> bool:
    expression = config.getoption("markexpr") or ""
    return re.search(r"(?<!not )\bgpu\b", expression) is not None


def _keep_kernels(config: pytest.Config) -> None:
    """A kernel for GPUs that this process compiled before is read, not compiled again.

    For a second step of the same model that halves the processor time. Each process of pytest has
    a file of its own, which goes with it: XLA writes it in place, so that another could read half.
    """
    folder = tempfile.TemporaryDirectory(prefix="zerojax-kernels-", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    os.environ["XLA_FLAGS"] += f" --xla_gpu_kernel_cache_file={folder.name}/kernels"


def pytest_configure(config: pytest.Config) -> None:
    """Runs before any test module is imported, so before JAX starts its devices."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts background jobs that way; tests send SIGINT and mean it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not _gpu_was_asked_for(config):
        # Also for the processes that tests start.
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
        jax.config.update("jax_platforms", "cpu")
        flags = [os.environ.get("XLA_FLAGS", ""), XLA_FLAGS]
        if jax.__version_info__ < (0, 11) and platform.machine() == "x86_64":
            flags.append(OLDER_XLA_FLAGS)
        os.environ["XLA_FLAGS"] = " ".join(flags).strip()
        if "not gpu_programs" not in (config.getoption("markexpr") or ""):
            _keep_kernels(config)
    keep_freed_memory()
    jax.config.update("jax_num_cpu_devices", NUM_CPU_DEVICES)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    # One program at a time: two that hold collectives and do not wait for each other can each take
    # some of the threads the other needs, and XLA ends the process after 40 seconds of that.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    # Tests compile many programs and run each for milliseconds. Without most of XLA's and LLVM's
    # optimisations the suite takes about half the processor time; what is computed stays the same.
    jax.config.update("jax_disable_most_optimizations", True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A `gpu` test outside `-m gpu` (as with -m "") is skipped by name, not failed."""
    if _gpu_was_asked_for(config):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU: run pytest -m gpu"))


def pytest_collection_finish() -> None:
    """What exists now lives as long as the process: Python need not look through it for garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def programs_are_kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A program that the tests of a module compile again is read in a fifth of the time.

    For modules that compile the same programs often: keeping one costs a tenth of compiling it.
    """
    kept = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("programs")),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in kept}
    _set_compilation_cache(kept)
    yield
    _set_compilation_cache(before)


def _set_compilation_cache(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
