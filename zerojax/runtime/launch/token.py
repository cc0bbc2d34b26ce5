"""Shared secret of the launchers of one run.

No message and no log contains it.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path

from zerojax.runtime.user_cache import VARIABLE as CACHE_VARIABLE
from zerojax.runtime.user_cache import user_cache

TOKEN = "ZEROJAX_LAUNCH_TOKEN"
LEAST_CHARACTERS = 16
_FILE = "launch-token"
_MAX_BYTES = 4096


class Token:
    """The token of this user's launchers, read anew whenever it is asked for.

    In order: the variable ZEROJAX_LAUNCH_TOKEN, which a scheduler hands to every host; a file that
    all hosts see, such as a mounted secret; a file in this user's cache, in a home folder that the
    hosts share. A file that is not there is made by the launcher of host 0.

    Args:
      environment: variables of the launcher.
      file: given by --token-file, or None.

    Raises:
      ValueError: there is no place for a token, or it is too short to keep anybody out.
    """

    def __init__(self, environment: Mapping[str, str], file: str | None = None) -> None:
        cache = user_cache()
        default = None if cache is None else cache / _FILE
        self._path = Path(file).expanduser() if file else default
        self._text = environment.get(TOKEN, "").strip() if not file else ""
        if self._text:
            self._check(self._text, TOKEN)
        elif self._path is None:
            raise ValueError(
                f"several hosts need a token that keeps strangers out, and {CACHE_VARIABLE}=off "
                f"leaves no place for one; {REMEDY}"
            )

    def __repr__(self) -> str:
        return f"<token of {TOKEN if self._text else self._path}>"

    @property
    def place(self) -> str:
        """Where it is from, for messages."""
        return TOKEN if self._text else str(self._path)

    def make(self) -> None:
        """Makes the file, where there is none: readable by this user only.

        Raises:
          OSError: it cannot be written.
        """
        if self._text or self.read() is not None:
            return
        assert self._path is not None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, partial = tempfile.mkstemp(dir=self._path.parent, prefix=".")  # mode 0600
            try:
                with os.fdopen(handle, "w", encoding="ascii") as stream:
                    stream.write(secrets.token_hex(32) + "\n")
                try:
                    os.link(partial, self._path)  # appears whole
                except FileExistsError:  # another launcher was faster
                    pass
                except OSError:  # a disk without links
                    os.replace(partial, self._path)
            finally:
                Path(partial).unlink(missing_ok=True)
        except OSError as error:
            raise OSError(
                f"the token of the launchers cannot be written to {self._path} "
                f"({error.strerror}); {REMEDY}"
            ) from None

    def read(self) -> bytes | None:
        """The token; None as long as there is no file.

        Raises:
          ValueError: the file holds no token. OSError: it cannot be read.
        """
        if self._text:
            return self._text.encode()
        assert self._path is not None
        try:
            with self._path.open("rb") as file:
                found = file.read(_MAX_BYTES).strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        self._check(found, str(self._path))
        return found

    @staticmethod
    def _check(token: str | bytes, place: str) -> None:
        if len(token) < LEAST_CHARACTERS:
            raise ValueError(
                f"the token of {place} has {len(token)} characters; give at least "
                f"{LEAST_CHARACTERS} that nobody guesses, such as those of `openssl rand -hex 32`"
            )


REMEDY = (
    f"set {TOKEN} to the same secret on every host, or give each launcher --token-file PATH, a "
    "file that all hosts see"
)
