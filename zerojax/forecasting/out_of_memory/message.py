"""Parser of allocators' error messages (XLA, NumPy): recognition and sizes."""

from __future__ import annotations

import dataclasses
import re

_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"(?P<size>\d+(?:\.\d+)?)\s?(?P<unit>[KMGT]?)(?:i?B|\b)"

_ASKED = (
    # XLA on CPU: "RESOURCE_EXHAUSTED: Out of memory allocating 3200000000 bytes."
    re.compile(r"[Oo]ut of memory (?:while trying to allocate|allocating) (?P<bytes>\d+) bytes"),
    # XLA's allocators on GPUs: https://github.com/patrick-kidger/equinox/issues/737
    re.compile(r"Failed to allocate request for \S+ \((?P<bytes>\d+)B\) on device ordinal \d+"),
    re.compile(r"[Oo]ut of memory (?:while trying to allocate|allocating) " + _SIZE),
    # The compiler for TPUs: https://github.com/LargeWorldModel/LWM/issues/60
    re.compile(r"Ran out of memory in memory space \w+\. Used " + _SIZE),
    # NumPy: "Unable to allocate 7.45 GiB for an array with shape (1000, 1000000) and ..."
    re.compile(r"Unable to allocate " + _SIZE + r" for an array"),
)
_KINDS = (
    "RESOURCE_EXHAUSTED",
    "Resource exhausted",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "Out of memory while trying to allocate",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What did not fit.

    Attributes:
      size: bytes; None where the message does not say.
      by_compiler: the compiler found before anything ran that the whole program does not fit.
      on_host: memory of the process, not of a device with memory of its own.
      text: the first line of the message.
    """

    size: int | None
    by_compiler: bool
    on_host: bool
    text: str


def what_was_asked(error: BaseException) -> Asked | None:
    """What an error says of memory; None when it is about something else."""
    text = str(error)
    if not isinstance(error, MemoryError) and not any(kind in text for kind in _KINDS):
        return None
    # A quota, a limit of gRPC or of threads is "resource exhausted", too.
    if not isinstance(error, MemoryError) and "memory" not in text.lower() and "alloc" not in text:
        return None
    by_compiler = "Ran out of memory in memory space" in text
    return Asked(
        size=_size(text),
        by_compiler=by_compiler,
        on_host=isinstance(error, MemoryError),
        text=next(iter(text.splitlines()), ""),
    )


def _size(text: str) -> int | None:
    for pattern in _ASKED:
        match = pattern.search(text)
        if match is not None:
            found = match.groupdict()
            if "bytes" in found:
                return int(found["bytes"])
            return round(float(found["size"]) * _UNITS[found["unit"]])
    return None
