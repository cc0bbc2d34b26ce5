"""Runs an equality check in a child process: reads a request, runs the check, writes the result.

Started as `python -m zerojax.equality.child REQUEST ANSWER`. Starts JAX with CPU devices only.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import jax

from zerojax.equality.check_in_child import check_here
from zerojax.equality.pickling import loads


def main(given: str, answer: str) -> None:
    """Runs the check that file `given` requests, and writes (kind, value) to file `answer`.

    The kind is "result"; "error" (value: the exception to raise); or "unreadable" (value: why this
    process cannot unpickle the request).
    """
    settings, path, data = pickle.loads(Path(given).read_bytes())
    sys.path[:] = path
    for name, value in settings.items():
        jax.config.update(name, value)
    # Two concurrent programs with collectives can deadlock, each waiting for the other's threads.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    Path(answer).write_bytes(_dumped(*_answer(data)))


def _answer(data: bytes) -> tuple[str, Any]:
    try:
        request = loads(data)
    except Exception as error:
        return "unreadable", f"{type(error).__name__}: {error}"
    try:
        return "result", check_here(request)
    except (ValueError, TypeError) as error:
        return "error", type(error)(str(error))


def _dumped(kind: str, value: object) -> bytes:
    try:
        return pickle.dumps((kind, value))
    except Exception:
        return pickle.dumps((kind, RuntimeError(str(value))))


if __name__ == "__main__":
    main(*sys.argv[1:])
