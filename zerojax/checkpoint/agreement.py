"""How several processes fail together, so that none waits for ever for another that has given up.

Knows texts and small integers; never touches checkpoint files. With one process nothing is sent.
All functions here are collective: every process calls them, from its main thread or while its main
thread waits, so that collectives are enqueued in the same order everywhere.
"""

from __future__ import annotations

import zlib

import jax
import numpy as np
from jax.experimental import multihost_utils

from zerojax.checkpoint.errors import (
    CheckpointError,
    DamagedError,
    DiskFullError,
    DivergedError,
    MachineError,
)

_TEXT_BYTES = 1024
_KINDS = (CheckpointError, DiskFullError, DamagedError, DivergedError, MachineError)


def raise_together(error: BaseException | None) -> None:
    """Raises on every process when any of them has an error.

    Raises:
      CheckpointError: on all processes, of the kind and with the text of the first process that
        failed. With one process, `error` itself.
    """
    if jax.process_count() == 1:
        if error is not None:
            raise error
        return
    buffer = np.zeros(_TEXT_BYTES, np.uint8)
    if error is not None:
        kind = _KINDS.index(type(error)) if type(error) in _KINDS else 0
        text = bytes([1 + kind]) + (str(error) or type(error).__name__).encode()
        buffer[: len(text)] = np.frombuffer(text, np.uint8)[:_TEXT_BYTES]
    gathered = np.asarray(multihost_utils.process_allgather(buffer)).reshape(-1, _TEXT_BYTES)
    for process, row in enumerate(gathered):
        if row[0]:
            text = row[1:].tobytes().rstrip(b"\0").decode(errors="replace")
            # An error that was shared once already names its process.
            where = "" if text.startswith("process ") else f"process {process}: "
            raise _KINDS[row[0] - 1](where + text) from error


def same_everywhere(value: str, *, what: str) -> None:
    """Refuses a value that differs between processes.

    Raises:
      CheckpointError: on all processes.
    """
    if jax.process_count() == 1:
        return
    checksum = np.asarray([zlib.crc32(value.encode())], np.uint32)
    checksums = np.asarray(multihost_utils.process_allgather(checksum)).ravel()
    if (checksums != checksums[0]).any():
        process = int(np.argmax(checksums != checksums[0]))
        raise CheckpointError(
            f"{what} differs between process 0 and process {process}; a checkpoint stores one for"
            " all processes, so each must pass the same"
        )


def from_process_0(number: int) -> int:
    """Process 0's value of a number, on every process."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def gather(values: np.ndarray) -> np.ndarray:
    """The arrays of all processes, of the same shape everywhere, stacked in their order."""
    if jax.process_count() == 1:
        return values[None]
    gathered = np.asarray(multihost_utils.process_allgather(values))
    return gathered.reshape(jax.process_count(), *values.shape)
