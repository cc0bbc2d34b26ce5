"""Malloc settings: freed memory is kept for the next step."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
_NEVER = -1


def keep_freed_memory() -> bool:
    """Lets glibc keep what is freed, for programs that compute on the CPU.

    XLA on the CPU allocates the temporary memory of a program each time it runs. glibc returns
    pieces of that size to the kernel, which clears every page again at the next step: 60,000 page
    faults and a quarter of the processor time per step of a GPT of 3.5 million parameters, whole
    batch of 8 x 256 (`benchmarks/README.md`). The price is that the process stays at its largest
    size. Call it before threads start: an arena that a thread has already is not given up.

    A process on 8 CPU devices grows during its first steps, with or without this: 3 million
    parameters under `jax.jit` alone took 608 MiB after the first step and 848 after the sixth,
    under `zerojax.train` 708 after the sixth and 745 after the twenty-first. Arrays that were alive
    had 27 MiB throughout (`jax.live_arrays`), so the rest is what XLA's threads work in.

    Returns:
      Whether it was done; False where the C library is not glibc.
    """
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018 - the attribute tells glibc from others
        mallopt = libc.mallopt
    except (OSError, AttributeError, TypeError):
        return False
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER))
    return all(mallopt(name, value) == 1 for name, value in settings)
