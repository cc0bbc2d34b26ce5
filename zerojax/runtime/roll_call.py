"""Calls the roll of a process group before JAX starts, then exchanges small JSON values with
process 0.

Needs neither JAX's runtime nor devices. So a process that does not come has a name, and what the
processes found is known even if the network between their devices does not work. The connections
use the coordinator's address, which JAX uses afterwards. As JAX's coordinator, they check no token.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from zerojax.config.display import printable
from zerojax.runtime.bounded_json import JsonError, loads
from zerojax.runtime.distributed import BIND_ADDRESS, _check_free
from zerojax.runtime.process_group import ProcessGroup, split_address
from zerojax.runtime.schedulers import expand_hosts
from zerojax.runtime.shutdown import FAILED

MAX_MESSAGE_BYTES = 4 << 20
"""Maximum size of one exchanged value."""
_HELLO_BYTES = 1024
_REASON_CHARACTERS = 2000
_HELLO_SECONDS = 10.0
"""A connection that has not said within this time which process it is, is dropped."""
_ANSWER_SECONDS = 15.0
"""Further time that a process leaves process 0 for its answer, after the limit of both."""
_POLL_SECONDS = 0.2
_MARK = "zerojax_roll_call"
_MAX_NAMED = 20


class AbsentError(ConnectionError):
    """A process of the group has not come, has ended, or does not answer in time."""


@dataclasses.dataclass
class _Peer:
    """The other end of a connection.

    Attributes:
      link: the connection.
      host: host name of the process at its other end.
      buffer: bytes received after the last whole line.
    """

    link: socket.socket
    host: str = ""
    buffer: bytes = b""

    def send(self, content: dict[str, Any], deadline: float) -> None:
        """Sends one line; raises OSError if the connection is lost or the time is over."""
        self.link.settimeout(max(0.1, deadline - time.monotonic()))
        self.link.sendall(json.dumps(content).encode() + b"\n")

    def receive(self, deadline: float) -> dict[str, Any]:
        """Returns the next line.

        Raises:
          TimeoutError: there is none before `deadline`, a value of `time.monotonic`.
          ConnectionError: the connection is lost, or what came is not a message.
        """
        while b"\n" not in self.buffer:
            if len(self.buffer) > MAX_MESSAGE_BYTES:
                raise ConnectionError(f"a message has more than {MAX_MESSAGE_BYTES} bytes")
            self.link.settimeout(max(0.01, deadline - time.monotonic()))
            piece = self.link.recv(65536)
            if not piece:
                raise ConnectionError("the connection was closed")
            self.buffer += piece
        line, _, self.buffer = self.buffer.partition(b"\n")
        try:
            content = loads(line, max_bytes=MAX_MESSAGE_BYTES)
        except JsonError as error:
            raise ConnectionError(f"a message {error}") from None
        if not isinstance(content, dict):
            raise ConnectionError("a message is not an object")
        return content


class RollCall:
    """All processes of a group, each connected to process 0. A context manager.

    If a process leaves the block with an error, process 0 passes it on, and the other processes
    raise it at their next exchange.

    Args:
      group: the process group; None: this process is alone.
      seconds: how long the processes wait for each other, here and in each exchange.

    Attributes:
      hosts: on process 0, the host name of each process; empty on the others.

    Raises:
      AbsentError: a process did not come; raised on all that came.
      ValueError: two processes have the same index, or another number of processes.
      OSError: process 0 cannot listen on the coordinator's address.
    """

    def __init__(self, group: ProcessGroup | None, seconds: float) -> None:
        self.process = 0 if group is None else group.process_id
        self.num_processes = 1 if group is None else group.num_processes
        self.hosts: list[str] = []
        self._seconds = seconds
        self._peers: dict[int, _Peer] = {}
        if group is None or group.num_processes == 1:
            self.hosts = [socket.gethostname()]
        elif group.process_id == 0:
            self._peers = _hear_all(group, seconds)
            self.hosts = [
                socket.gethostname(),
                *(self._peers[index].host for index in range(1, group.num_processes)),
            ]
            # The others wait for this in `_answer`: it tells them that all have come.
            self.share(None)
        else:
            self._peers = {0: _answer(group, seconds)}

    def gather(self, value: object, what: str) -> list[Any] | None:
        """Returns on process 0 the values of all processes in their order; None on the others.

        Args:
          value: of this process; JSON can store it.
          what: name of the value for the message about a process that does not send it.

        Raises:
          AbsentError: a process has ended, or did not send its value in time.
        """
        deadline = time.monotonic() + self._seconds
        if self.process:
            self._send_to_0({"value": value}, deadline)
            return None
        return [value, *(self._value_of(index, what, deadline) for index in sorted(self._peers))]

    def share(self, value: object) -> Any:
        """Returns on every process the value that process 0 passes; the others pass anything.

        Raises:
          AbsentError: a process has ended, or process 0 reports that.
          ValueError: process 0 reports invalid input.
        """
        deadline = time.monotonic() + self._seconds
        if self.process:
            return _value_in_answer(self._peers[0], deadline + self._seconds + _ANSWER_SECONDS)
        for index, peer in sorted(self._peers.items()):
            try:
                peer.send({"value": value}, deadline)
            except OSError:
                raise AbsentError(f"{self._named(index)} has ended") from None
        return value

    def _value_of(self, index: int, what: str, deadline: float) -> Any:
        try:
            content = self._peers[index].receive(deadline)
        except TimeoutError:
            raise AbsentError(
                f"{self._named(index)} came, but did not report {what} within {self._seconds:g} s; "
                "look at its output, or raise --timeout"
            ) from None
        except OSError:
            raise AbsentError(
                f"{self._named(index)} has ended before it reported {what}; its output has the "
                "reason"
            ) from None
        if "failed" in content:
            kind = ValueError if content.get("is_input") is True else AbsentError
            raise kind(f"{self._named(index)}: {printable(content['failed'])}")
        return content.get("value")

    def _named(self, index: int) -> str:
        return f"process {index} (on {printable(self._peers[index].host)})"

    def _send_to_0(self, content: dict[str, Any], deadline: float) -> None:
        try:
            self._peers[0].send(content, deadline)
        except OSError:
            raise AbsentError("process 0 has ended; its output has the reason") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):
            is_ours = isinstance(error, ValueError | OSError | RuntimeError) and str(error)
            text = str(error) if is_ours else f"{type(error).__name__}: {error}"
            told = {"failed": text[:_REASON_CHARACTERS], "is_input": isinstance(error, ValueError)}
            for peer in self._peers.values():
                with contextlib.suppress(OSError):
                    peer.send(told, time.monotonic() + 1.0)
        for peer in self._peers.values():
            peer.link.close()


@contextlib.contextmanager
def within(seconds: float, sentence: str) -> Iterator[None]:
    """Ends this process with code 1 and a sentence if the block takes longer than `seconds`, even
    while it waits in compiled code."""

    def give_up() -> None:
        print(f"zerojax: error: {sentence}", file=sys.stderr, flush=True)
        os._exit(FAILED)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# --- process 0 ------------------------------------------------------------------------------------


class _Register:
    """Connections to process 0 until all processes have said which they are."""

    def __init__(self, group: ProcessGroup, seconds: float) -> None:
        self._group, self._seconds = group, seconds
        self._waiting = selectors.DefaultSelector()
        self._since: dict[socket.socket, float] = {}
        self.present: dict[int, _Peer] = {}
        self.refused: list[_Peer] = []
        self._gone: dict[int, str] = {}

    def hear(self, listeners: Sequence[socket.socket]) -> None:
        """Waits until all have come; raises AbsentError or ValueError."""
        for listener in listeners:
            self._waiting.register(listener, selectors.EVENT_READ)
        deadline = time.monotonic() + self._seconds
        while len(self.present) < self._group.num_processes - 1:
            if time.monotonic() > deadline:
                raise AbsentError(self._missing())
            for key, _ in self._waiting.select(_POLL_SECONDS):
                if key.data is None:
                    self._open(key.fileobj)
                else:
                    self._read(key.data)
            for link, since in list(self._since.items()):
                if time.monotonic() - since > _HELLO_SECONDS:
                    self._drop(link)

    def close(self) -> None:
        """Closes the connections of those that have not said who they are."""
        for link in list(self._since):
            self._drop(link)
        self._waiting.close()

    def _open(self, listener: Any) -> None:
        with contextlib.suppress(OSError):  # it was closed meanwhile
            link, _ = listener.accept()
            link.setblocking(False)
            self._since[link] = time.monotonic()
            self._waiting.register(link, selectors.EVENT_READ, _Peer(link))

    def _drop(self, link: socket.socket) -> None:
        self._since.pop(link, None)
        self._waiting.unregister(link)
        link.close()

    def _read(self, peer: _Peer) -> None:
        try:
            piece = peer.link.recv(_HELLO_BYTES)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if peer.link not in self._since:  # it has said who it is, and waits for the others
            for index, other in list(self.present.items()):
                if other is peer:
                    self._gone[index] = peer.host
                    del self.present[index]
            self._drop(peer.link)
            return
        peer.buffer += piece
        line, end, rest = peer.buffer.partition(b"\n")
        if end and not rest:
            self._enter(peer, line)
        elif not piece or end or len(peer.buffer) > _HELLO_BYTES:
            self._drop(peer.link)

    def _enter(self, peer: _Peer, line: bytes) -> None:
        """Adds the process that a hello names, or drops what is not a hello."""
        index, number = -1, -1
        with contextlib.suppress(JsonError, KeyError, TypeError):
            hello = loads(line, max_bytes=_HELLO_BYTES)
            index, number, peer.host = hello["process"], hello["num_processes"], hello["host"]
            index = index if hello[_MARK] == 1 else -1
        if type(index) is not int or type(number) is not int or not isinstance(peer.host, str):
            index = -1
        if index < 0:
            self._drop(peer.link)
            return
        of, host = self._group.num_processes, printable(peer.host)
        # If a check below fails, this process is told the reason too.
        self.refused = [peer]
        if number != of:
            raise ValueError(
                f"process {index} (on {host}) was started as one of {number} processes, but "
                f"process 0 as one of {of}; give all the same number"
            )
        if index in self.present or not 0 < index < of:
            other = self.present[index].host if index in self.present else socket.gethostname()
            raise ValueError(
                f"two processes have the index {index}, on {printable(other)} and on {host}; give "
                f"each its own, from 0 to {of - 1}"
            )
        peer.buffer, self.refused = b"", []
        del self._since[peer.link]
        self._gone.pop(index, None)
        self.present[index] = peer

    def _missing(self) -> str:
        of = self._group.num_processes
        absent = [index for index in range(1, of) if index not in self.present]
        names = [
            f"process {index}"
            + (
                f" (came on {printable(self._gone[index])}, but ended)"
                if index in self._gone
                else ""
            )
            for index in absent[:_MAX_NAMED]
        ]
        more = f" and {len(absent) - _MAX_NAMED} more" if len(absent) > _MAX_NAMED else ""
        came = {0: socket.gethostname(), **{i: peer.host for i, peer in self.present.items()}}
        hosts = sorted({printable(host) for host in came.values()})
        silent = hosts_without(came.values(), os.environ)
        return (
            f"{len(absent)} of {of} processes did not come to {self._group.coordinator} within "
            f"{self._seconds:g} s: {', '.join(names)}{more}; those that came are on "
            f"{', '.join(hosts[:_MAX_NAMED])}"
            + (f"; nobody came from {', '.join(silent[:_MAX_NAMED])}" if silent else "")
            + "; check whether they were started and reach this address, or raise --timeout"
        )


def hosts_without(present: Iterable[str], environment: Mapping[str, str]) -> list[str]:
    """Returns the hosts of this Slurm step from which no process came; [] outside of Slurm.

    Args:
      present: host names of the processes that came, with or without a domain.
      environment: environment variables.
    """
    text = environment.get("SLURM_STEP_NODELIST", "")
    short = {name.partition(".")[0] for name in present}
    try:
        return [host for host in expand_hosts(text) if host.partition(".")[0] not in short]
    except ValueError:
        return []


def _hear_all(group: ProcessGroup, seconds: float) -> dict[int, _Peer]:
    bind = os.environ.get(BIND_ADDRESS) or group.coordinator
    _check_free(bind, group, seconds)
    register = _Register(group, seconds)
    listeners = _listen(bind)
    try:
        register.hear(listeners)
        return register.present
    except (AbsentError, ValueError) as error:
        told = {"failed": str(error), "is_input": isinstance(error, ValueError)}
        for peer in (*register.present.values(), *register.refused):
            with contextlib.suppress(OSError):
                peer.send(told, time.monotonic() + 1.0)
        for peer in register.present.values():
            peer.link.close()
        raise
    finally:
        register.close()
        for listener in listeners:  # before an answer: the others then look for JAX's coordinator
            listener.close()


def _listen(address: str) -> list[socket.socket]:
    """Listens on all addresses of a host name, of which "localhost" may have two."""
    host, port = split_address(address)
    listeners: list[socket.socket] = []
    failure: OSError | None = None
    for family, _, _, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(place)
            listener.listen(4096)
            listener.setblocking(False)
            listeners.append(listener)
        except OSError as error:
            listener.close()
            failure = error
    if not listeners:
        raise failure or OSError(f"process 0 cannot listen on {address}")
    return listeners


# --- the other processes --------------------------------------------------------------------------


def _answer(group: ProcessGroup, seconds: float) -> _Peer:
    """Reaches process 0 and waits until it has seen all processes."""
    host, port = split_address(group.coordinator)
    deadline, pause, reason = time.monotonic() + seconds, 0.05, "nobody answers"
    hello = {
        _MARK: 1,
        "process": group.process_id,
        "num_processes": group.num_processes,
        "host": socket.gethostname()[:255],
    }
    while True:
        try:
            peer = _Peer(socket.create_connection((host, port), timeout=5), host=host)
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            try:
                peer.send(hello, deadline)
                _value_in_answer(peer, time.monotonic() + seconds + _ANSWER_SECONDS)
                return peer
            except BaseException as error:
                peer.link.close()
                # A `_NoAnswerError` is tried again: another program may have had the address.
                if not isinstance(error, OSError) or type(error) is AbsentError:
                    raise
                reason = error.strerror or str(error)
        if time.monotonic() + pause > deadline:
            raise AbsentError(
                f"process {group.process_id} of {group.num_processes} (on {socket.gethostname()}) "
                f"did not reach process 0 at {group.coordinator} within {seconds:g} s ({reason}); "
                "check that process 0 runs on that host and that no firewall blocks the port, or "
                "raise --timeout"
            )
        time.sleep(pause)
        pause = min(2 * pause, 1.0)


class _NoAnswerError(AbsentError):
    """The connection to process 0 was lost, or another program answers there."""


def _value_in_answer(peer: _Peer, deadline: float) -> Any:
    try:
        content = peer.receive(deadline)
    except TimeoutError:
        raise AbsentError("process 0 does not answer; its output has the reason") from None
    except OSError:
        raise _NoAnswerError(
            "process 0 has ended, or another program has its address; its output has the reason"
        ) from None
    if "failed" in content:
        kind = ValueError if content.get("is_input") is True else AbsentError
        raise kind(f"process 0: {printable(content['failed'])}")
    return content.get("value")
