"""What every test runs on: 8 virtual CPU devices, and no silent rank promotion.

Tests marked `gpu` are for a machine that has one and run when they are asked for: `pytest -m gpu`.
"""

from __future__ import annotations

import os
import platform
import re
import signal

import jax
import pytest

from zerojax.host_memory import keep_freed_memory

NUM_CPU_DEVICES = 8
XLA_FLAGS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_max_isa=AVX"
"""For JAX before 0.11, whose XLA knows the first. Fusions become LLVM's code directly, not by way
of MLIR, which halves a compilation. AVX has no instruction that multiplies and adds at once: which
products it took would depend on what is fused, and programs that compute the same would differ in
their last bits."""


def _gpu_was_asked_for(config: pytest.Config) -> bool:
    expression = config.getoption("markexpr") or ""
    return re.search(r"(?<!not )\bgpu\b", expression) is not None


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
        if jax.__version_info__ < (0, 11) and platform.machine() == "x86_64":
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {XLA_FLAGS}".strip()
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
