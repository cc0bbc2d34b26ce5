"""Errors of reads and writes: one sentence with the original cause."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
from collections.abc import Iterator

_MAX_REASON = 240
_NO_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory", "bad_alloc")
_OF_THE_MACHINE = {
    *(errno.EACCES, errno.EPERM, errno.ENOMEM, errno.EMFILE, errno.ENFILE),
    *(errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN),
}
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


class FolderInUseError(CheckpointError):
    """Another process writes into the folder; nothing was changed there."""


class MachineError(CheckpointError):
    """A disk, a file server or this machine kept a checkpoint from being written or read.

    The same command may well do later, here or elsewhere, so whoever restarts runs should try.
    """

    is_bad_input = False


class BaseWeightsError(CheckpointError):
    """Frozen weights that a checkpoint leaves in their folder are not there as they were.

    What lies in the checkpoint may be whole, so that it is no damage of it: no other step is taken
    in its place.
    """


class GivenUpError(MachineError):
    """This process has stopped because another one has failed, which says why."""


class DamagedError(CheckpointError):
    """What lies in a checkpoint's folder is not what was saved there."""

    is_bad_input = False


class DivergedError(CheckpointError):
    """Devices that should hold the same values do not, so there is no one state to be saved."""

    is_bad_input = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Damage:
    """One thing that is wrong with a saved step.

    >>> str(Damage(file="arrays/d/1", what="is missing"))
    'arrays/d/1 is missing'

    Attributes:
      what: the rest of a sentence whose subject is the file or the leaf.
      file: relative to the folder of the step; None: no single file is at fault.
      leaf: name of the array whose values are wrong; None: the file may hold several, or none.
    """

    what: str
    file: str | None = None
    leaf: str | None = None

    def __str__(self) -> str:
        if self.file is None:
            return f"{self.leaf!r} {self.what}"
        return f"{self.file} {self.what}" + ("" if self.leaf is None else f" ({self.leaf!r})")


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
    if isinstance(innermost, CheckpointError):
        return text
    return f"{type(innermost).__name__}: {text}" if text else type(innermost).__name__


def os_error_code(error: BaseException) -> int | None:
    """The number with which the operating system refused, if it did: the outermost in the chain."""
    codes = (_os_error_code(link) for link in _chain(error))
    return next((code for code in codes if code is not None), None)


def is_disk_full(error: BaseException) -> bool:
    """Whether the operating system refused for lack of space or quota."""
    codes = {_os_error_code(link) for link in _chain(error)}
    return bool(codes & {errno.ENOSPC, errno.EDQUOT})


def is_damage(error: BaseException) -> bool:
    """Whether a failed read says something about the files, and not about this machine now.

    Missing rights, too little memory or a file server that does not answer leave a checkpoint what
    it was.
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
