"""Raises an error of one process's disk in all processes of a run, as one sentence.

Layers from files are computed by collectives, in which no process may be missing. So a process
whose disk fails computes on with undefined values until all processes can raise the error together;
what they computed is dropped. With one process an error is raised at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import jax

from zerojax.checkpoint.agreement import raise_together
from zerojax.checkpoint.store import StoreError, StoreFailedError


class in_one_sentence:
    """Turns an error of the operating system into `StoreFailedError`, whose text is one sentence.

    Use it in a `with` statement.
    """

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, OSError):
            raise _sentence(error) from error


def _sentence(error: OSError | StoreError) -> StoreError:
    if isinstance(error, StoreError):
        return error
    return StoreFailedError(error.strerror or str(error))


class DiskErrors:
    """Keeps the first error of this process's disk until all processes raise it together.

    Attributes:
      first: the error; None if there is none.
    """

    def __init__(self, *, several: bool | None = None) -> None:
        """Begins without an error.

        Args:
          several: whether errors are kept; False: raised at once; None: kept if the run has several
            processes.
        """
        self.first: StoreError | None = None
        self._several = jax.process_count() > 1 if several is None else several

    def kept(self) -> _Kept:
        """Returns a context manager that keeps an error of its block, and then goes on behind it.

        Check `first` before: after an error nothing more is read or written.
        """
        return _Kept(self)

    def add(self, error: OSError | StoreError) -> bool:
        """Keeps the first error if errors are kept (see `several`); returns whether they are."""
        if self._several and self.first is None:
            self.first = _sentence(error)
        return self._several

    def raise_together(self, computed: Any = None) -> None:
        """Raises in all processes if one of them has an error.

        Collective.

        Args:
          computed: arrays to wait for before, so that collectives run in one order.

        Raises:
          StoreError: of the first process that has one.
        """
        if self._several:
            jax.block_until_ready(computed)
            raise_together(self.first)


class _Kept:
    def __init__(self, errors: DiskErrors) -> None:
        self._errors = errors

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(error, (OSError, StoreError)):
            return False
        return self._errors.add(error)


@contextlib.contextmanager
def failing_together() -> Iterator[None]:
    """Raises in all processes if the disk of one of them fails in the block.

    Collective. The block itself runs no collectives.

    Raises:
      StoreError: with several processes. With one, the error itself.
    """
    errors = DiskErrors()
    with errors.kept():
        yield
    errors.raise_together()
