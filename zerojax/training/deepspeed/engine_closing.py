"""Closing of open engines before the interpreter shuts down.

Python clears the globals of modules while the generators of an open engine still wait to be closed,
which then fail in a way that nobody can read; and a log that is never closed lacks its last steps.
"""

from __future__ import annotations

import atexit
import functools
import sys
import weakref
from typing import Protocol


class Closable(Protocol):
    """What is closed."""

    @property
    def is_open(self) -> bool:
        """Whether there is something to close."""
        ...

    def close(self) -> None:
        """Reports what is left, and ends threads and files."""


_known: weakref.WeakSet[Closable] = weakref.WeakSet()


def close_at_exit(engine: Closable) -> None:
    """From now on the engine is closed when the script is over, if it is still there and open.

    A process of a group that fails leaves without this, see `zerojax.runtime.shutdown`.
    """
    _register()
    _known.add(engine)


@functools.cache
def _register() -> None:
    # JAX, imported before, has registered its own ending: that one runs after this.
    atexit.register(_close_all)


def _close_all() -> None:
    for engine in list(_known):
        if engine.is_open:
            try:
                engine.close()
            except Exception as error:  # there is nobody left to catch it
                print(f"zerojax: {error}", file=sys.stderr, flush=True)
