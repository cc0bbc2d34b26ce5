"""What a failed read or write says: one sentence with the true reason, dug out of its causes.

Knows exception chains and errno texts; never touches checkpoint files or arrays.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator

_MAX_REASON = 240
# How TensorStore 0.1 ends the text of an operating system error.
_OS_ERROR_IN_TEXT = re.compile(r"os_error_code='(\d+)'")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the text names the value, limit and remedy.

    Attributes:
      is_bad_input: whether what the user gave is at fault, and not what has become of the machine.
    """

    is_bad_input = True


class DiskFullError(CheckpointError):
    """There is too little space for a checkpoint; those that are there are intact."""

    is_bad_input = False


def reason(error: BaseException) -> str:
    """Why an operation failed, in one line.

    Orbax wraps the true reason several times ("incompatible handler", exception groups) and
    TensorStore reports operating system errors only as text, so the whole chain is searched: first
    for an operating system error, then for the innermost exception.

    Returns:
      For example `"no space left on device"` or `"ValueError: shape (3,) ..."`, at most 240
      characters.
    """
    chain = list(_chain(error))
    for link in chain:
        code = _os_error_code(link)
        if code is not None:
            name = getattr(link, "filename", None)
            return os.strerror(code).lower() + (f": {name}" if name else "")
    innermost = chain[-1]
    text = " ".join(str(innermost).split())
    if len(text) > _MAX_REASON:
        text = text[:_MAX_REASON] + " ..."
    return f"{type(innermost).__name__}: {text}" if text else type(innermost).__name__


def is_disk_full(error: BaseException) -> bool:
    """Whether the operating system refused for lack of space or quota."""
    codes = {_os_error_code(link) for link in _chain(error)}
    return bool(codes & {errno.ENOSPC, errno.EDQUOT})


def _os_error_code(error: BaseException) -> int | None:
    if isinstance(error, OSError) and error.errno:
        return error.errno
    found = _OS_ERROR_IN_TEXT.search(str(error))
    return int(found.group(1)) if found else None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, then its causes, outermost first; the first member stands for a group."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        if isinstance(link, BaseExceptionGroup):
            link = link.exceptions[0]
        else:
            link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
