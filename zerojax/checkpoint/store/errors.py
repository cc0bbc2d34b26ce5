"""Errors of a store on disk."""

from __future__ import annotations


class StoreError(RuntimeError):
    """A store that cannot be used as it was asked; the text says why and what to do.

    What the operating system refuses (a full disk, a broken one) is an `OSError` with its number.
    """
