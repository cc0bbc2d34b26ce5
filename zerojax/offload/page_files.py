"""Reads and writes pages, the data of one layer each, in the files of a store.

A page holds arrays, each at an aligned offset. This module does not know the meaning of the arrays.
"""

from __future__ import annotations

import collections
import functools
import math
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax
import numpy as np

from zerojax.checkpoint.store import BucketStore
from zerojax.checkpoint.store.sweep import Bucket
from zerojax.config.tree_types import Tree
from zerojax.offload.disk_errors import DiskErrors, in_one_sentence
from zerojax.offload.disk_places import ALIGNMENT


class PageFiles:
    """Files with pages of one kind (weights, gradients or inputs), one page per layer; scratch
    space.

    Attributes:
      store: store with one bucket per page.
    """

    def __init__(
        self, folder: Path, arrays: Mapping[str, tuple[tuple[int, ...], Any]], number: int
    ) -> None:
        """Creates the files; replaces existing ones.

        Args:
          folder: folder of the files.
          arrays: {name: (shape, dtype)} of the arrays of a page, in order.
          number: number of pages.

        Raises:
          StoreError, OSError: `BucketStore.create` fails.
        """
        self._folder, self._number = folder, number
        self._arrays = {name: (shape, np.dtype(dtype)) for name, (shape, dtype) in arrays.items()}
        self.store = self._create()

    def _create(self) -> BucketStore:
        store = BucketStore.create(
            self._folder, num_buckets=self._number, bucket_bytes=self.page_bytes, replace=True
        )
        weakref.finalize(self, store.close)  # if the owner does not close it
        return store

    @property
    def page_bytes(self) -> int:
        """Bytes of one page (the data of one layer), without padding to blocks of the disk."""
        return sum(_aligned(_bytes(*array)) for array in self._arrays.values())

    def views(self, page: np.ndarray) -> dict[str, np.ndarray]:
        """Returns {name: array} of a page (the data of one layer): views of its bytes, without a
        copy.
        """
        start, found = 0, {}
        for name, (shape, dtype) in self._arrays.items():
            size = _bytes(shape, dtype)
            found[name] = page[start : start + size].view(dtype).reshape(shape)
            start += _aligned(size)
        return found

    def renew(self) -> None:
        """Replaces the store by an empty one, after an error interrupted a pass over the pages."""
        self.store.close()
        with in_one_sentence():
            self.store = self._create()

    @functools.cached_property
    def spare(self) -> SparePage:
        """A page of zeros without a place in the files, for use after an error."""
        return SparePage(np.zeros(self.page_bytes, np.uint8))


class SparePage(NamedTuple):
    """Memory in place of a page that could not be read or will not be written.

    Attributes:
      array: uint8 [bytes of a page], of undefined values.
    """

    array: np.ndarray


class PageSweep:
    """Reads or writes pages (the data of one layer each) in a given order, with prefetch.

    Devices may still read a page while the caller requests the next one. Use the object in a `with`
    statement. Errors of the disk become `StoreFailedError`. If errors are kept, the sweep continues
    with spare pages after an error, and neither reads nor writes.
    """

    def __init__(
        self,
        pages: PageFiles,
        order: Sequence[int],
        *,
        read: bool = True,
        held: int = 1,
        errors: DiskErrors | None = None,
    ) -> None:
        """Begins a sweep.

        Args:
          pages: the pages.
          order: their numbers.
          read: whether pages are read before they are returned.
          held: number of pages that may be written, the current one included.
          errors: keeps errors of the disk; None: they are raised at once.
        """
        self._pages = pages
        self._errors = DiskErrors(several=False) if errors is None else errors
        self._sweep = pages.store.sweep(order=list(order), read=read, held=held)
        self._using: collections.deque[Any] = collections.deque()

    def __enter__(self) -> PageSweep:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Closing frees memory that devices may still read.
        self._wait()
        self._sweep.close()

    def _wait(self, most: int = 0) -> None:
        """Waits until at most `most` pages are still in use by devices."""
        while len(self._using) > most:
            jax.block_until_ready(self._using.popleft())

    def next(self) -> Bucket | SparePage:
        """Returns the next page (the data of one layer) in order, once it has been read.

        First it waits for the arrays computed from the oldest page, whose memory is filled again.
        """
        self._wait(self._pages.store.num_buffers - 2)
        # `use` replaces this entry.
        self._using.append(())
        if self._errors.first is None:
            with self._errors.kept(), in_one_sentence():
                return next(self._sweep)
        return self._pages.spare

    def use(self, arrays: Tree) -> None:
        """Registers arrays computed from the last returned page; its memory is reused when they are
        ready.
        """
        self._using[-1] = arrays

    def write(self, page: Bucket | SparePage) -> None:
        """Starts to write a page, the data of one layer, to its file."""
        if self._errors.first is None:
            assert isinstance(page, Bucket)
            with self._errors.kept(), in_one_sentence():
                page.write()

    def end(self) -> None:
        """Ends the pass over the pages (one per layer), and commits all written pages together."""
        self._wait()
        if self._errors.first is None:
            with self._errors.kept(), in_one_sentence():
                # Asking for one more ends the sweep, which commits it.
                for _ in self._sweep:
                    raise AssertionError("the pass over the pages ended before its last page")


def _bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
