"""Connects the launchers of several hosts: JSON lines over TCP.

Launchers prove to each other that they know the run's token. Host 0 drops any other connection and
continues the start. JAX's own coordinator, which the processes use later, has no token, so it must
be used only on a trusted network.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Self

from zerojax.config.display import printable
from zerojax.config.late_dataclasses import dataclass
from zerojax.runtime.bounded_json import JsonError, loads
from zerojax.runtime.launch.handshake import REMEDY, Handshake, Token, UnauthenticatedPeer
from zerojax.runtime.process_group import split_address

_LONGEST_LINE = 65536
_MAX_GREETINGS = 32
"""Maximum number of concurrent handshakes; further connections are dropped."""
_MAX_NAMED = 10
"""Maximum number of dropped connections that are reported, with one line each."""
_POLL_SECONDS = 0.1

Say = Callable[[str], object]


@dataclass(frozen=True)
class Message:
    """A message from the launcher of host `host`; `content` is None if the connection is lost."""

    host: int
    content: dict[str, Any] | None


class Connection:
    """Connection to the launcher of another host; received messages are put into `events`.

    Args:
      connection: a connection whose handshake has finished.
      host: index of the other host.
      events: queue that gets a `Message` for each received message.
      is_known: function that returns True if the peer may send a message. Any other message counts
        as the loss of the connection.
      say: function that prints a sentence about such a message.
    """

    def __init__(
        self,
        connection: socket.socket,
        host: int,
        events: queue.SimpleQueue,
        *,
        is_known: Callable[[dict[str, Any]], bool],
        say: Say,
    ):
        self._connection, self._host, self._events = connection, host, events
        self._is_known, self._say = is_known, say
        connection.settimeout(None)
        # These options detect within half a minute a host that vanished without closing.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, name):  # Linux
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            with self._connection.makefile("rb") as lines:
                for line in iter(lambda: lines.readline(_LONGEST_LINE), b""):
                    content = loads(line)
                    if not (isinstance(content, dict) and self._is_known(content)):
                        raise JsonError("is not allowed for this launcher")
                    self._events.put(Message(self._host, content))
        except JsonError as error:
            self._say(
                f"a message of the launcher of host {self._host} {error}; "
                "this launcher counts as lost"
            )
            self.close()
        except (OSError, ValueError):  # the connection is lost, or this launcher closed it
            pass
        finally:
            self._events.put(Message(self._host, None))

    def send(self, **content: object) -> None:
        """Sends one message. A lost connection raises nothing here; a `Message` reports it."""
        with contextlib.suppress(OSError):
            self._connection.sendall(_line(content))

    def close(self) -> None:
        """Closes the connection to the other launcher."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class Followers:
    """Connections of host 0 to the launchers of all other hosts; empty on a single host."""

    def __init__(self, links: dict[int, Connection]):
        self._links = links

    @classmethod
    def gather(
        cls,
        address: str,
        *,
        num_hosts: int,
        num_processes: int,
        events: queue.SimpleQueue,
        seconds: float,
        token: Token,
        say: Say,
    ) -> Self:
        """Waits until the launchers of hosts 1 to `num_hosts` - 1 have connected to `address`.

        Raises:
          OSError: this host cannot listen on the address.
          TimeoutError: not all launchers have connected within `seconds`.
          ValueError: an authenticated launcher has another number of hosts or processes.
        """
        links: dict[int, Connection] = {}
        deadline = time.monotonic() + seconds
        token.make()
        secret = token.read()
        assert secret is not None
        with listen(address) as listener:
            door = _Door(secret, say)
            # Short, since handshakes that have finished meanwhile are looked for after each wait.
            listener.settimeout(_POLL_SECONDS)
            while len(links) < num_hosts - 1:
                if time.monotonic() > deadline:
                    missing = sorted(set(range(1, num_hosts)) - set(links))
                    raise TimeoutError(
                        f"no launcher of host {', '.join(map(str, missing))} has connected to "
                        f"{address} within {seconds:g} seconds; start it on that host "
                        "with "
                        f"--node-rank {missing[0]}, or set ZEROJAX_JOIN_SECONDS to wait longer"
                    )
                with contextlib.suppress(TimeoutError):
                    door.open(*listener.accept())
                while door.come_in:
                    guest = door.come_in.pop(0)
                    refusal = _check_hello(guest.numbers, num_hosts, num_processes, set(links))
                    try:
                        guest.handshake.accept(guest.numbers, guest.nonce, refusal)
                    except (OSError, UnauthenticatedPeer):  # a lost launcher may connect again
                        guest.handshake.connection.close()
                        continue
                    # Only now, since the refused launcher has been told the reason.
                    if refusal is not None:
                        guest.handshake.connection.close()
                        raise ValueError(refusal)
                    host = guest.numbers["host"]
                    first = host * num_processes
                    links[host] = Connection(
                        guest.handshake.connection,
                        host,
                        events,
                        is_known=_EndsOf(range(first, first + num_processes)),
                        say=say,
                    )
        return cls(links)

    def send(self, **content: object) -> None:
        """Sends the same message to the launchers of all other hosts."""
        for link in self._links.values():
            link.send(**content)

    def close(self) -> None:
        """Closes the connections to all other launchers."""
        for link in self._links.values():
            link.close()


@dataclasses.dataclass
class _Guest:
    """An authenticated launcher of this run and its connection."""

    handshake: Handshake
    numbers: dict[str, int]
    nonce: bytes


class _Door:
    """Accepts connections of launchers. Each handshake runs in its own thread, so that none delays
    another.

    Attributes:
      come_in: authenticated launchers, in the order of their handshakes.
    """

    def __init__(self, token: bytes, say: Say) -> None:
        self._token, self._say = token, say
        self._free = threading.Semaphore(_MAX_GREETINGS)
        self._dropped = 0
        self.come_in: list[_Guest] = []

    def open(self, connection: socket.socket, address: tuple[Any, ...]) -> None:
        """Starts the handshake on a new connection; returns at once."""
        where = str(address[0])
        if not self._free.acquire(blocking=False):
            self._drop(
                connection,
                where,
                f"{_MAX_GREETINGS} connections have not finished their handshakes",
            )
            return
        threading.Thread(target=self._greet, args=(connection, where), daemon=True).start()

    def _greet(self, connection: socket.socket, where: str) -> None:
        try:
            handshake = Handshake(connection, self._token)
            self.come_in.append(_Guest(handshake, *handshake.hear()))
        except (UnauthenticatedPeer, OSError) as error:
            self._drop(connection, where, getattr(error, "strerror", None) or str(error))
        finally:
            self._free.release()

    def _drop(self, connection: socket.socket, where: str, reason: str) -> None:
        self._dropped += 1
        if self._dropped <= _MAX_NAMED:
            last = "; further dropped connections are not reported" * (self._dropped == _MAX_NAMED)
            self._say(f"a connection from {where} was dropped: {printable(reason)}{last}")
        connection.close()


def listen(address: str) -> socket.socket:
    """Returns a socket that listens only on `address`.

    Raises:
      OSError: the address is in use, or is not an address of this host.
    """
    host, port = split_address(address)
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise OSError(
            f"host 0 cannot listen on --coordinator {address} ({error.strerror}); give an address "
            "and a free port of this host"
        ) from None
    return listener


def free_address(address: str | None) -> str:
    """Returns the host of `address` with a currently unused port, for JAX's coordinator."""
    host = "127.0.0.1" if address is None else split_address(address)[0]
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reach_leader(
    address: str,
    *,
    hello: dict[str, int],
    events: queue.SimpleQueue,
    seconds: float,
    token: Token,
    say: Say,
) -> Connection:
    """Connects to the launcher of host 0; waits until it listens.

    Raises:
      TimeoutError: host 0 was not reached within `seconds`, or has another token.
      ValueError: host 0 has another number of hosts or processes.
    """
    host, port = split_address(address)
    deadline = time.monotonic() + seconds
    said: set[str] = set()
    while True:
        try:
            secret = token.read()
            if secret is None:
                raise UnauthenticatedPeer(f"the token file {token.place} does not exist yet")
            connection = socket.create_connection((host, port), timeout=5)
            try:
                refusal = Handshake(connection, secret).introduce(hello)
            except BaseException:
                connection.close()
                raise
            if refusal is not None:
                connection.close()
                raise ValueError(refusal)
            return Connection(connection, 0, events, is_known=_is_order, say=say)
        except UnauthenticatedPeer as error:
            reason = f"{error}; {REMEDY}" if "token" in str(error) else str(error)
            if reason not in said:
                said.add(reason)
                say(f"not connected to host 0 yet: {printable(reason)}")
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"the launcher of host 0 was not reached at {address} within {seconds:g} seconds "
                f"({reason}); start it on host 0 with --node-rank 0, or set ZEROJAX_JOIN_SECONDS "
                "to wait longer"
            )
        time.sleep(0.2)


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode() + b"\n"


@dataclass(frozen=True)
class _EndsOf:
    """Predicate that is True for messages of a follower that report the end of its processes."""

    process_ids: range

    def __call__(self, content: dict[str, Any]) -> bool:
        ago = content.get("ago")
        return (
            set(content) == {"ended", "code", "was_killed", "ago"}
            and type(content["ended"]) is int
            and content["ended"] in self.process_ids
            and type(content["code"]) is int
            and abs(content["code"]) < 2**31
            and type(content["was_killed"]) is bool
            and isinstance(ago, int | float)
            and math.isfinite(ago)
            and ago >= 0
        )


def _is_order(content: dict[str, Any]) -> bool:
    """Returns True if a message is an order of host 0: start, end or finish."""
    kinds = {"start": int, "coordinator": str, "end": bool, "finish": int}
    return (
        set(content) in ({"start", "coordinator"}, {"end"}, {"finish"})
        and all(type(value) is kinds[name] for name, value in content.items())
        and all(abs(value) < 2**31 for value in content.values() if not isinstance(value, str))
    )


def _check_hello(
    hello: dict[str, int], num_hosts: int, num_processes: int, known: set[int]
) -> str | None:
    """Checks the numbers of an authenticated launcher; returns why it is refused, or None."""
    host = hello["host"]
    for option, name, mine in (
        ("--nnodes", "num_hosts", num_hosts),
        ("--nprocs", "num_processes", num_processes),
    ):
        if hello[name] != mine:
            return (
                f"host {host} was launched with {option} {hello[name]}, but host 0 with {option} "
                f"{mine}; use the same value on all hosts"
            )
    if not 0 < host < num_hosts or host in known:
        return f"two launchers have --node-rank {host}; give each host its own number"
    return None
