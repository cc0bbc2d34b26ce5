"""Authenticates two launchers: each proves that it knows the run's token (HMAC-SHA256, RFC 2104).

The token is never sent, and no message and no log contains it. Later messages on the connection are
not encrypted. An attacker who can only connect does no harm; an attacker who can modify the traffic
between the hosts can.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerojax.config.loader import user_path
from zerojax.config.regular_files import open_text
from zerojax.runtime.bounded_json import JsonError, loads
from zerojax.runtime.user_files import CACHE_VARIABLE, check_private, make_private, user_cache

TOKEN = "ZEROJAX_LAUNCH_TOKEN"
LEAST_CHARACTERS = 16
_FILE = "launch-token"
_MAX_BYTES = 4096
REMEDY = (
    f"set {TOKEN} to the same secret on every host, or give each launcher --token-file PATH, a "
    "file that all hosts see"
)
SECONDS = 10.0
"""Maximum seconds for a whole handshake, however slowly the bytes arrive."""
_LONGEST = 4096
_NAME = "zerojax_launch"
_NUMBERS = ("host", "num_hosts", "num_processes")


class Token:
    """Shared secret of one user's launchers; a file is read again for each use.

    Three sources are tried in this order: the file of --token-file, which all hosts see, such as a
    mounted secret; the variable ZEROJAX_LAUNCH_TOKEN, which a scheduler passes to every host; a
    file in this user's cache, in a home folder that the hosts share. The launcher of host 0 creates
    a missing file.

    Args:
      environment: environment variables of the launcher.
      file: path given by --token-file, or None.

    Raises:
      ValueError: no variable or file can hold a token, or the token is too short to be secure.
    """

    def __init__(self, environment: Mapping[str, str], file: str | None = None) -> None:
        cache = user_cache()
        default = None if cache is None else cache / _FILE
        self._path = user_path(file) if file else default
        self._is_cached = not file
        self._text = environment.get(TOKEN, "").strip() if not file else ""
        if self._text:
            self._check(self._text, TOKEN)
        elif self._path is None:
            raise ValueError(
                f"several hosts need a token for authentication, but {CACHE_VARIABLE}=off leaves "
                f"no folder for it; {REMEDY}"
            )

    def __repr__(self) -> str:
        return f"<token of {TOKEN if self._text else self._path}>"

    @property
    def place(self) -> str:
        """Source of the token (environment variable or file) for messages."""
        return TOKEN if self._text else str(self._path)

    def make(self) -> None:
        """Creates the file of the token if it is missing. Only this user can read it.

        Raises:
          OSError: the file cannot be written.
        """
        if self._text or self.read() is not None:
            return
        assert self._path is not None
        try:
            if self._is_cached:
                make_private(self._path.parent)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, partial = tempfile.mkstemp(dir=self._path.parent, prefix=".")  # mode 0600
            try:
                with os.fdopen(handle, "w", encoding="ascii") as stream:
                    stream.write(secrets.token_hex(32) + "\n")
                try:
                    os.link(partial, self._path)  # atomic
                except FileExistsError:  # another launcher was faster
                    pass
                except OSError:  # the file system has no links
                    os.replace(partial, self._path)
            finally:
                Path(partial).unlink(missing_ok=True)
        except OSError as error:
            raise OSError(
                f"the token of the launchers cannot be written to {self._path} "
                f"({error.strerror or error}); {REMEDY}"
            ) from None

    def read(self) -> bytes | None:
        """Returns the token; None if its file does not exist yet.

        Raises:
          ValueError: the file is not a regular file, or holds no valid token.
          OSError: the file cannot be read.
        """
        if self._text:
            return self._text.encode()
        assert self._path is not None
        try:
            if self._is_cached:
                check_private(self._path)
            with open_text(self._path) as file:
                found = file.buffer.read(_MAX_BYTES).strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except PermissionError as error:
            raise PermissionError(f"{error}; {REMEDY}") from None
        self._check(found, str(self._path))
        return found

    @staticmethod
    def _check(token: str | bytes, place: str) -> None:
        if len(token) < LEAST_CHARACTERS:
            raise ValueError(
                f"the token of {place} has {len(token)} characters; use at least "
                f"{LEAST_CHARACTERS} that nobody can guess, such as those of `openssl rand -hex 32`"
            )


class UnauthenticatedPeer(Exception):
    """The other end of a connection could not prove that it is a launcher of this run."""


@dataclasses.dataclass
class Handshake:
    """Mutual authentication of two launchers on a new connection, with a time limit.

    Args:
      connection: a new connection between the launchers.
      token: secret of this run's launchers.
      seconds: maximum seconds for the whole exchange.
    """

    connection: socket.socket
    token: bytes
    seconds: float = SECONDS

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self.seconds

    def hear(self) -> tuple[dict[str, int], bytes]:
        """Receives and checks the introduction of a follower (a launcher of another host).

        Returns:
          (numbers that describe the follower's job, nonce to pass to `accept`).

        Raises:
          UnauthenticatedPeer: the follower's message was invalid, too slow, or had no valid proof.
          OSError: the connection failed.
        """
        nonce = secrets.token_hex(16)
        self._send({_NAME: {"nonce": nonce}})
        said = self._read()
        numbers, other, proof = _numbers(said.get("hello")), said.get("nonce"), said.get("proof")
        if numbers is None or not (isinstance(other, str) and isinstance(proof, str)):
            raise UnauthenticatedPeer("the message is not from a launcher")
        if not hmac.compare_digest(
            proof.encode(), self._proof("host", nonce, other, numbers).encode()
        ):
            self._send({"unknown": True})
            raise UnauthenticatedPeer("the token differs from that of this host")
        return numbers, other.encode()

    def accept(self, numbers: dict[str, int], nonce: bytes, refused: str | None = None) -> None:
        """Tells a follower that it is accepted, or the reason why it is refused."""
        proof = self._proof("leader", nonce.decode(), refused or "", numbers)
        self._send({"proof": proof, "refused": refused})

    def introduce(self, numbers: dict[str, int]) -> str | None:
        """Introduces this launcher to the leader (the launcher of host 0).

        Args:
          numbers: numbers that describe this launcher's job.

        Returns:
          The reason if the leader refuses; else None.

        Raises:
          UnauthenticatedPeer: the peer is not a leader, or has another token.
          OSError: the connection failed.
        """
        said = self._read().get(_NAME)
        nonce = said.get("nonce") if isinstance(said, dict) else None
        if not isinstance(nonce, str):
            raise UnauthenticatedPeer(
                "the program at this address is not a launcher of this version"
            )
        mine = secrets.token_hex(16)
        proof = self._proof("host", nonce, mine, numbers)
        self._send({"hello": numbers, "nonce": mine, "proof": proof})
        answer = self._read()
        proof, refused = answer.get("proof"), answer.get("refused")
        # The reason of a refusal is part of the proof, so that nobody else can refuse this
        # launcher.
        wanted = self._proof("leader", mine, refused if isinstance(refused, str) else "", numbers)
        if not isinstance(proof, str) or not hmac.compare_digest(proof.encode(), wanted.encode()):
            raise UnauthenticatedPeer("the token of host 0 differs from that of this host")
        return refused if isinstance(refused, str) else None

    def _proof(self, role: str, nonce: str, more: str, numbers: dict[str, int]) -> str:
        # With the role, so that a proof of one side cannot be sent back as that of the other.
        text = json.dumps([role, nonce, more, {name: numbers[name] for name in _NUMBERS}])
        return hmac.new(self.token, text.encode(), hashlib.sha256).hexdigest()

    def _send(self, content: dict[str, Any]) -> None:
        self.connection.settimeout(self._left())
        self.connection.sendall(json.dumps(content).encode() + b"\n")

    def _read(self) -> dict[str, Any]:
        text = b""
        while not text.endswith(b"\n"):
            if len(text) == _LONGEST:
                raise UnauthenticatedPeer(f"the message is longer than {_LONGEST} bytes")
            self.connection.settimeout(self._left())
            # Bytes after the end of the line belong to the next reader of the connection.
            got = self.connection.recv(1)
            if not got:
                early = "" if text else " before any message"
                raise UnauthenticatedPeer(f"the peer closed the connection{early}")
            text += got
        try:
            said = loads(text)
        except JsonError as error:
            raise UnauthenticatedPeer(f"the message {error}") from None
        if not isinstance(said, dict):
            raise UnauthenticatedPeer("the message is not from a launcher")
        return said

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise UnauthenticatedPeer(f"the handshake took longer than {self.seconds:g} s")
        return left


def _numbers(value: object) -> dict[str, int] | None:
    """Returns the numbers with which a launcher describes its job; None if `value` is invalid."""
    if not isinstance(value, dict) or set(value) != set(_NUMBERS):
        return None
    are_numbers = all(type(number) is int and 0 <= number < 2**31 for number in value.values())
    return value if are_numbers else None
