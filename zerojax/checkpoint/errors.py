"""Errors of reading and writing checkpoints; each message is one sentence with the cause."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator

from zerojax.config.display import printable
from zerojax.config.late_dataclasses import dataclass

_MAX_REASON = 240
_NO_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory", "bad_alloc")
_OF_THE_MACHINE = {
    *(errno.EACCES, errno.EPERM, errno.ENOMEM, errno.EMFILE, errno.ENFILE),
    *(errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN),
}
# Format of operating system errors in TensorStore 0.1 messages.
_OS_ERROR_IN_TEXT = re.compile(r"os_error_code='(\d+)'")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message names the value, limit and remedy.

    Attributes:
      is_bad_input: True if the user's input is the cause, False if the state of the machine is.
    """

    is_bad_input = True


class DiskFullError(CheckpointError):
    """The disk has too little space for a checkpoint; existing checkpoints are intact."""

    is_bad_input = False


class FolderInUseError(CheckpointError):
    """Another process writes into the checkpoint folder, so this process changed nothing in it."""


class MachineError(CheckpointError):
    """A disk, a file server or this machine prevented a checkpoint from being written or read.

    Tools that restart runs should retry: the same command may succeed later or on another machine.
    """

    is_bad_input = False


class BaseWeightsError(CheckpointError):
    """Frozen weights that a checkpoint does not store are missing or changed in their folder.

    The files of the checkpoint may be intact, so no other step is tried.
    """


class GivenUpError(MachineError):
    """This process stopped because another process failed; the other process reports the reason."""


class DamagedError(CheckpointError):
    """Files of a checkpoint are missing, or differ from the saved files."""

    is_bad_input = False


class DivergedError(CheckpointError):
    """Replicas of an array differ between devices, so there is no single state to save."""

    is_bad_input = False


@dataclass(frozen=True, kw_only=True)
class Damage:
    """One problem found in the files of a saved step.

    >>> str(Damage(file="arrays/d/1", what="is missing"))
    'arrays/d/1 is missing'

    Attributes:
      what: predicate of the sentence whose subject is the file or the leaf.
      file: path of the file relative to the folder of the step; None if several files are meant.
      leaf: name of the array whose values are wrong; None if the file holds several arrays or none.
    """

    what: str
    file: str | None = None
    leaf: str | None = None

    def __str__(self) -> str:
        of = "" if self.leaf is None else f" ({self.leaf!r})"
        text = f"{self.leaf!r} {self.what}" if self.file is None else f"{self.file} {self.what}{of}"
        return printable(text)  # names come from the files


def reason(error: BaseException) -> str:
    """Returns why an operation failed, in one line.

    Orbax wraps the original error several times ("incompatible handler", exception groups), and
    TensorStore reports errors of the operating system only as text. So the whole chain of causes is
    searched, first for an error of the operating system, then for the innermost exception.

    Returns:
      For example `"no space left on device"` or `"ValueError: shape (3,) ..."`, at most 240
        characters, or the whole message of a `CheckpointError`, which ends with its remedy.
    """
    chain = list(_chain(error))
    for link in chain:
        code = _os_error_code(link)
        if code is not None:
            name = getattr(link, "filename", None)
            return os.strerror(code).lower() + (f": {name}" if name else "")
    innermost = chain[-1]
    text = " ".join(str(innermost).split())
    if isinstance(innermost, CheckpointError):  # ends with its remedy
        return text
    if len(text) > _MAX_REASON:
        text = text[:_MAX_REASON] + " ..."
    return f"{type(innermost).__name__}: {text}" if text else type(innermost).__name__


def os_error_code(error: BaseException) -> int | None:
    """Returns the operating system's error number of the outermost exception in the chain of causes
    that has one, or None."""
    codes = (_os_error_code(link) for link in _chain(error))
    return next((code for code in codes if code is not None), None)


def is_disk_full(error: BaseException) -> bool:
    """Returns True if the operating system reported too little disk space or an exceeded quota."""
    codes = {_os_error_code(link) for link in _chain(error)}
    return bool(codes & {errno.ENOSPC, errno.EDQUOT})


def is_damage(error: BaseException) -> bool:
    """Returns True if a failed read means damaged files and not a problem of this machine.

    Missing permissions, too little memory or an unreachable file server are not damage.
    """
    text = " ".join(str(link) for link in _chain(error))
    if isinstance(error, MemoryError) or any(words in text for words in _NO_MEMORY):
        return False
    codes = {_os_error_code(link) for link in _chain(error)}
    return not codes & _OF_THE_MACHINE


def _os_error_code(error: BaseException) -> int | None:
    if isinstance(error, OSError) and error.errno:
        return error.errno
    found = _OS_ERROR_IN_TEXT.search(str(error))
    return int(found.group(1)) if found else None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yields the error and then its causes, outermost first; of a group only its first member."""
    seen: set[int] = set()
    link: BaseException | None = error
    # Exceptions may name each other as their cause, in a circle.
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        if isinstance(link, BaseExceptionGroup):
            link = link.exceptions[0]
        else:
            link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
