"""How the launchers of several hosts talk: lines of JSON over TCP between host 0 and the others.

Knows sockets and messages; decides nothing about the run. Whoever reaches the address of host 0
can end the run, as with JAX's own coordinator: it is for a network that is trusted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import socket
import threading
import time
from typing import Any, Self

from zerojax.process_group import split_address

_HELLO_SECONDS = 10.0
_LONGEST_LINE = 65536


@dataclasses.dataclass(frozen=True)
class Message:
    """What the launcher of another host has said; None: its connection is lost."""

    host: int
    content: dict[str, Any] | None


class Link:
    """A connection to the launcher of `host`; what comes goes into `events`."""

    def __init__(self, connection: socket.socket, host: int, events: queue.SimpleQueue):
        self._connection, self._host, self._events = connection, host, events
        connection.settimeout(None)
        # A host that vanishes without a word is noticed within half a minute.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, name):  # Linux
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._connection.makefile("rb") as lines:
            for line in iter(lambda: lines.readline(_LONGEST_LINE), b""):
                content = json.loads(line)
                if isinstance(content, dict):
                    self._events.put(Message(self._host, content))
        self._events.put(Message(self._host, None))

    def send(self, **content: Any) -> None:
        """Sends one message; a lost connection is told by `Message`, not here."""
        with contextlib.suppress(OSError):
            self._connection.sendall(_line(content))

    def close(self) -> None:
        """Ends the connection."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class Followers:
    """The launchers of all other hosts, as host 0 sees them; none on a single host."""

    def __init__(self, links: dict[int, Link]):
        self._links = links

    @classmethod
    def gather(
        cls,
        address: str | None,
        *,
        num_hosts: int,
        num_processes: int,
        events: queue.SimpleQueue,
        seconds: float,
    ) -> Self:
        """Waits until the launchers of hosts 1 to `num_hosts` - 1 have come to `address`.

        Raises:
          OSError: the address cannot be listened on.
          TimeoutError: not all have come within `seconds`.
          ValueError: one was told other numbers.
        """
        links: dict[int, Link] = {}
        if address is None or num_hosts == 1:
            return cls(links)
        deadline = time.monotonic() + seconds
        with listen(address) as listener:
            while len(links) < num_hosts - 1:
                listener.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    missing = sorted(set(range(1, num_hosts)) - set(links))
                    raise TimeoutError(
                        f"no launcher has come from host {', '.join(map(str, missing))} to "
                        f"{address} within {seconds:g} seconds; start it there with --node-rank "
                        f"{missing[0]}, or set ZEROJAX_JOIN_SECONDS to wait longer"
                    ) from None
                hello = _read_hello(connection)
                if hello is None:  # somebody else
                    connection.close()
                    continue
                host, refusal = _check_hello(hello, num_hosts, num_processes, set(links))
                if refusal is not None:
                    connection.sendall(_line({"refused": refusal}))
                    connection.close()
                    raise ValueError(refusal)
                links[host] = Link(connection, host, events)
        return cls(links)

    def send(self, **content: Any) -> None:
        """Says the same to all."""
        for link in self._links.values():
            link.send(**content)

    def close(self) -> None:
        """Ends all connections."""
        for link in self._links.values():
            link.close()


def listen(address: str) -> socket.socket:
    """A socket that listens on this address only.

    Raises:
      OSError: it is in use, or not an address of this host.
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
    """A port that is free now on the host of `address`, for JAX's coordinator."""
    host = "127.0.0.1" if address is None else split_address(address)[0]
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reach_leader(
    address: str, *, hello: dict[str, int], events: queue.SimpleQueue, seconds: float
) -> Link:
    """The connection to the launcher of host 0, waited for.

    Raises:
      TimeoutError: it was not there within `seconds`.
    """
    host, port = split_address(address)
    deadline = time.monotonic() + seconds
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=5)
            connection.sendall(_line({"zerojax_launch": hello}))
            return Link(connection, 0, events)
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"the launcher of host 0 was not reached at {address} within {seconds:g} seconds "
                f"({reason}); start it there with --node-rank 0, or set ZEROJAX_JOIN_SECONDS to "
                "wait longer"
            )
        time.sleep(0.2)


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode() + b"\n"


def _read_hello(connection: socket.socket) -> dict[str, int] | None:
    """What a launcher says first; None where it is not one."""
    connection.settimeout(_HELLO_SECONDS)
    text = b""
    try:
        while not text.endswith(b"\n") and len(text) < 1024:
            got = connection.recv(1)
            if not got:
                return None
            text += got
        hello = json.loads(text)["zerojax_launch"]
        return {name: int(hello[name]) for name in ("host", "num_hosts", "num_processes")}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _check_hello(
    hello: dict[str, int], num_hosts: int, num_processes: int, known: set[int]
) -> tuple[int, str | None]:
    host = hello["host"]
    for option, name, mine in (
        ("--nnodes", "num_hosts", num_hosts),
        ("--nprocs", "num_processes", num_processes),
    ):
        if hello[name] != mine:
            return host, (
                f"host {host} was launched with {option} {hello[name]}, host 0 with {option} "
                f"{mine}; give the same to all"
            )
    if not 0 < host < num_hosts or host in known:
        return host, f"two launchers have --node-rank {host}; give each host its own"
    return host, None
