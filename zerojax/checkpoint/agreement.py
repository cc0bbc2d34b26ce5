"""Lets all processes agree on a failure, so that no process waits for one that has failed.

A single process sends nothing. All functions are collective: every process calls them in the same
order, from its main thread or while its main thread waits. So all processes enqueue collectives in
the same order.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from zerojax.checkpoint.errors import (
    BaseWeightsError,
    CheckpointError,
    DamagedError,
    DiskFullError,
    DivergedError,
    FolderInUseError,
    GivenUpError,
    MachineError,
)
from zerojax.checkpoint.store import StoreError, StoreFailedError
from zerojax.runtime.bounded_json import loads

_TEXT_BYTES = 1024
_KINDS = (
    *(CheckpointError, DiskFullError, DamagedError, DivergedError, MachineError),
    FolderInUseError,
    BaseWeightsError,
    StoreError,
    StoreFailedError,
    GivenUpError,  # last: reported only if no process has another error
)
# One byte tells the state: this value is above 1 + every index of `_KINDS`.
_UNDER_WAY = 255
_ROUND_SECONDS = 0.5


def raise_together(error: BaseException | None) -> None:
    """Raises an error on every process if any process passes an error.

    Args:
      error: the error of this process; None if it has none.

    Raises:
      CheckpointError, StoreError: on all processes, with the text and, if all processes know it
        (`_KINDS`), the type of the error of the first process that has one; a `GivenUpError` counts
        only if no process has another error. A single process raises `error` itself.
    """
    if jax.process_count() == 1:
        if error is not None:
            raise error
        return
    rows = _exchange(error)
    failed = [process for process, row in enumerate(rows) if row[0]]
    if failed:
        # False sorts before True, so a process that only gave up is named last.
        process = min(failed, key=lambda process: rows[process][0] == len(_KINDS))
        kind, text = _KINDS[rows[process][0] - 1], _text_in(rows[process])
        # An error that was shared once already names its process.
        where = "" if text.startswith("process ") else f"process {process}: "
        raise kind(where + text) from error


@contextlib.contextmanager
def failing_together() -> Iterator[Callable[[], None]]:
    """Context manager that raises on all processes if one of them fails in its block.

    Yields:
      A function `agree()` that raises if another process has failed. Every process calls it
      equally often, before each collective inside the block, so that no process enters a
      collective that a failed process never reaches.

    Raises:
      Exception: the failed process keeps its own error; the others get a CheckpointError or
        StoreError.
    """
    is_told = False

    def agree() -> None:
        nonlocal is_told
        # If the exchange itself raises, all processes know the error already, and the handler below
        # must not send it again.
        is_told = True
        raise_together(None)
        is_told = False

    try:
        yield agree
    except Exception as error:
        # A device error can be raised inside a collective while the other processes still wait in
        # the same collective.
        if not is_told and not isinstance(error, jax.errors.JaxRuntimeError):
            with contextlib.suppress(CheckpointError, StoreError):
                raise_together(error)
        raise
    raise_together(None)


def wait_together(
    task: concurrent.futures.Future[Any], give_up: Callable[[], object]
) -> BaseException | None:
    """Waits until `task` is done, and cancels it if the same task has failed in another process.

    Args:
      task: the task of this process. Every process has one, and the tasks may wait for each other.
      give_up: function that makes `task` end. It is called if another process has failed. The
        failed process may have no other way to report it, for example without its file server.

    Returns:
      The error of this process's task; None if it succeeded.
    """
    if jax.process_count() == 1:
        return task.exception()
    while True:
        concurrent.futures.wait([task], _ROUND_SECONDS)
        rows = _exchange(task.exception() if task.done() else None, is_under_way=not task.done())
        states = [row[0] for row in rows]
        if any(0 < state < _UNDER_WAY for state in states):
            give_up()
            # This waits until the task has ended, which `give_up` brings about.
            return task.exception()
        if not any(states):
            return None


def _exchange(error: BaseException | None, *, is_under_way: bool = False) -> np.ndarray:
    """Gathers the state of each process's task: one row of bytes per process.

    The first byte of a row is 0 (the task is done), `_UNDER_WAY`, or 1 + the index of the error's
    type in `_KINDS`; the text of the error follows. All rows have the same size, so a process can
    repeat a call in which it was interrupted.
    """
    buffer = np.zeros(_TEXT_BYTES, np.uint8)
    if error is not None:
        own = (CheckpointError, StoreError)
        other = next((kind for kind in own if isinstance(error, kind)), MachineError)
        kind = _KINDS.index(type(error) if type(error) in _KINDS else other)
        text = bytes([1 + kind]) + (str(error) or type(error).__name__).encode()
        buffer[: len(text)] = np.frombuffer(text, np.uint8)[:_TEXT_BYTES]
    elif is_under_way:
        buffer[0] = _UNDER_WAY
    return np.asarray(multihost_utils.process_allgather(buffer)).reshape(-1, _TEXT_BYTES)


def _text_in(row: np.ndarray) -> str:
    # The cut at `_TEXT_BYTES` may be inside a character.
    return row[1:].tobytes().rstrip(b"\0").decode(errors="replace")


def same_everywhere(value: str, *, what: str) -> None:
    """Raises if `value` is not the same text on all processes.

    Args:
      value: the text of this process.
      what: name of the value in the error message.

    Raises:
      CheckpointError: the values differ; raised on all processes.
    """
    if jax.process_count() == 1:
        return
    # A checksum and not the text: arrays of all processes need one size to be gathered.
    checksum = np.asarray([zlib.crc32(value.encode())], np.uint32)
    checksums = np.asarray(multihost_utils.process_allgather(checksum)).ravel()
    if (checksums != checksums[0]).any():
        process = int(np.argmax(checksums != checksums[0]))
        raise CheckpointError(
            f"{what} differs between process 0 and process {process}; a checkpoint stores one "
            "value for all processes; pass the same value in each of them"
        )


def from_process_0(number: int) -> int:
    """Returns, on every process, the `number` (of the range of int64) that process 0 passed to this
    function."""
    if jax.process_count() == 1:
        return number
    # As bytes: JAX has 64-bit integers only with `jax_enable_x64`.
    sent = np.frombuffer(np.int64(number).tobytes(), np.uint8)
    received = np.asarray(multihost_utils.broadcast_one_to_all(sent), np.uint8)
    return int(np.frombuffer(received.tobytes(), np.int64)[0])


def computed_by_process_0(compute: Callable[[], Any]) -> Any:
    """Returns, on every process, the result of `compute` on process 0, which alone calls it.

    Args:
      compute: function without collectives; returns a value that JSON can store.

    Raises:
      Exception: `compute` failed: its own error on process 0, on the others a ValueError or a
        RuntimeError with its text.
    """
    if jax.process_count() == 1:
        return compute()
    error: Exception | None = None
    sent: dict[str, Any] = {}
    if jax.process_index() == 0:
        try:
            sent = {"result": compute()}
        except Exception as caught:
            error, sent = caught, {"error": str(caught), "is_value": isinstance(caught, ValueError)}
    own = np.frombuffer(json.dumps(sent).encode(), np.uint8)
    size = from_process_0(own.size)
    # Every process passes an array of the same size; the content is that of process 0.
    own = own if jax.process_index() == 0 else np.zeros(size, np.uint8)
    text = np.asarray(multihost_utils.broadcast_one_to_all(own), np.uint8).tobytes()
    found = loads(text)
    if error is not None:
        raise error
    if "error" in found:
        kind = ValueError if found["is_value"] else RuntimeError
        raise kind(f"process 0: {found['error']}")
    return found["result"]


def first_text(text: str | None) -> str | None:
    """Returns, on every process, the text of the first process that has one; None if none has.

    With several processes the text names its process, and is cut to about 1000 bytes.

    Args:
      text: text of this process, not empty; None if it has none.
    """
    if jax.process_count() == 1:
        return text
    row = np.zeros(_TEXT_BYTES, np.uint8)
    own = (text or "").encode()[:_TEXT_BYTES]
    row[: len(own)] = np.frombuffer(own, np.uint8)
    rows = gather(row)
    having = [process for process, one in enumerate(rows) if one[0]]
    if not having:
        return None
    words = rows[having[0]].tobytes().rstrip(b"\0").decode(errors="replace")
    return f"process {having[0]}: {words}"


def gather(values: np.ndarray) -> np.ndarray:
    """Returns the `values` of all processes, stacked in process order. All have one shape."""
    if jax.process_count() == 1:
        return values[None]
    gathered = np.asarray(multihost_utils.process_allgather(values))
    return gathered.reshape(jax.process_count(), *values.shape)
