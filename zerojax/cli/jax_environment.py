"""Sets JAX's start environment: platform, virtual CPU devices and pinned host memory."""

from __future__ import annotations

import os
import sys

from zerojax.config import OffloadConfig, RunConfig
from zerojax.config.checks import MAX_CPU_DEVICES
from zerojax.config.display import quoted
from zerojax.runtime.memory import PINNED_LIMIT, keep_freed_memory, least_room, pinned_limit_for


def use_cpu_devices(number: int | None) -> None:
    """Makes JAX start with `number` virtual CPU devices, and the process keep freed memory, which
    works best before JAX starts; None leaves both unchanged.

    Raises:
      ValueError: `number` is too large, or JAX_PLATFORMS names another kind of device.
      RuntimeError: JAX has already started with another number of devices.
    """
    if number is None:
        return
    if number > MAX_CPU_DEVICES:
        raise ValueError(
            f"cpu_devices={quoted(number)} is above {MAX_CPU_DEVICES}, as each virtual device "
            "takes threads and memory of this machine; use fewer, or `zerojax plan` to plan for a "
            "mesh of absent devices"
        )
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms not in ("", "cpu"):
        raise ValueError(
            f"cpu_devices={number} makes virtual CPU devices, but JAX_PLATFORMS is {platforms!r}; "
            "set cpu_devices=null to use what JAX_PLATFORMS names, or unset JAX_PLATFORMS"
        )
    keep_freed_memory()
    # JAX reads the environment only while it is imported.
    if "jax" in sys.modules:
        jax = sys.modules["jax"]
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", number)
    else:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_NUM_CPU_DEVICES"] = str(number)


def prepare_devices(config: RunConfig) -> None:
    """Makes the CPU devices of a run file, if it names a number, and allows pinned host memory.

    Call this function before JAX starts its devices.
    """
    if config.cpu_devices is not None:
        use_cpu_devices(config.cpu_devices)
    allow_pinned_memory(config.mesh.offload)
    if config.cpu_devices is not None:
        run_one_program_at_a_time()


def use_the_cpu_alone() -> None:
    """Makes JAX start on the CPU only, for commands that need no accelerator."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # hides XLA's memory warnings
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_platforms", "cpu")


def allow_pinned_memory(offload: OffloadConfig) -> None:
    """Raises XLA's limit of pinned host memory to all host memory, for a run with offload.

    XLA reads its limit, 64 GiB by default, when JAX starts its devices. A limit that the user has
    set is not changed; `zerojax.step.host_budget` refuses a run for which it is too small.
    """
    limit = None if offload.is_off else pinned_limit_for(least_room())
    if limit is not None:
        os.environ.setdefault(PINNED_LIMIT, str(limit))


def run_one_program_at_a_time() -> None:
    """Makes virtual CPU devices run one compiled program at a time.

    Call this function after JAX is imported and before JAX starts its devices. Virtual devices
    share threads. Two concurrent programs with collectives can each take threads that the other
    needs, and XLA ends a process after 40 seconds of such waiting. JAX has no environment variable
    for this option.
    """
    import jax  # here, because commands without JAX import this module

    jax.config.update("jax_cpu_enable_async_dispatch", False)
