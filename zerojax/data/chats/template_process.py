"""Renders chat templates in a separate process, because they are untrusted code."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from zerojax.config.late_dataclasses import dataclass
from zerojax.data.chats import chat_template
from zerojax.data.chats.chat_template import Limits

_MISSING = (
    "chats need the package `jinja2`, which is not installed: run `pip install 'zerojax[chat]'`"
)
_WAIT_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """Result of rendering a chat.

    Attributes:
      text: rendered text; "" if there is an error.
      answers: positions [start, end) of the assistant's text, in characters of `text`.
      error: why there is no text, as the end of a sentence about the template; None without error.
      turn: sentence about a turn of the chat that was not found; None if all were found.
      has_ended: whether the process ended at this chat.
    """

    text: str = ""
    answers: tuple[tuple[int, int], ...] = ()
    error: str | None = None
    turn: str | None = None
    has_ended: bool = False


class TemplateProcess:
    """Context manager that renders chats by a template in a separate process.

    If the process ends at a chat, this chat gets an error, and a new process continues after it.

    Attributes:
      has_markers: whether the template itself marks the assistant's text.
    """

    def __init__(
        self,
        source: str,
        *,
        name: str = "the chat template",
        variables: Mapping[str, Any] | None = None,
        now: str | None = None,
        limits: Limits | None = None,
    ):
        """Starts the process.

        Args:
          source: Jinja source of the template.
          name: name of the template, for messages.
          variables: JSON-compatible variables, such as `bos_token`.
          now: time for `strftime_now`, in ISO format; None uses the current time.
          limits: limits of rendering one chat.

        Raises:
          ValueError: the template is invalid.
          ImportError: the package jinja2 is not installed.
        """
        self._limits, self._name = limits or Limits(), name
        self._about = {
            "source": source,
            "variables": dict(variables or {}),
            "now": now,
            "limits": dataclasses.asdict(self._limits),
        }
        self._waiting: collections.deque[Mapping[str, Any]] = collections.deque()
        self._process, self.has_markers = self._start()

    def __enter__(self) -> TemplateProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del kind, error, trace
        self.close()

    def close(self) -> None:
        """Ends the process; may be called twice."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # buffered requests have no reader any more
                pipe.close()
        self._process.kill()
        self._process.wait()

    def send(self, chats: Sequence[Mapping[str, Any]]) -> None:
        """Sends chats to the process, which renders them in the background.

        Args:
          chats: JSON-compatible chats, each with "messages", and optionally "tools" and "turns";
            see `ChatTemplate.answers`.
        """
        assert not self._waiting, "receive the renderings of the last chats first"
        self._waiting.extend(chats)
        self._write(chats)

    def receive(self) -> Iterator[Rendering]:
        """Yields the renderings of the sent chats in order, each as soon as it is there.

        Read it to its end before the next `send`, or close the process.
        """
        while self._waiting:
            answer = self._read()
            self._waiting.popleft()
            if answer is not None:
                yield _rendering(answer)
                continue
            yield Rendering(error=self._why_it_ended(), has_ended=True)
            self.close()
            self._process, _ = self._start()
            # The process that ended had received these, too.
            if self._waiting:
                self._write([*self._waiting])

    def _start(self) -> tuple[subprocess.Popen[str], bool]:
        # -P: the process cannot import files next to the program, and shares no imports with this
        # one.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(chat_template.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="ascii",
        )
        self._write(self._about)
        answer = self._read()
        if answer is None:
            answer = {"error": self._why_it_ended()}
        if "missing" in answer:
            self.close()
            raise ImportError(_MISSING)
        if "error" in answer:
            self.close()
            raise ValueError(
                f"{self._name} is not a valid chat template ({answer['error']}); pass another with "
                "--template FILE"
            )
        return self._process, bool(answer["markers"])

    def _write(self, value: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended; `_read` detects it
            self._process.stdin.write(f"{json.dumps(value)}\n")
            self._process.stdin.flush()

    def _read(self) -> dict[str, Any] | None:
        """Reads and parses the process's next line of output; returns None if the process has
        ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        # A line without an end was cut off by the end of the process.
        return json.loads(line) if line.endswith("\n") else None

    def _why_it_ended(self) -> str:
        try:
            code = self._process.wait(_WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            return "the rendering process closed its output"
        if code == -signal.SIGPROF:
            return f"rendering needs more than {self._limits.seconds:g} s of processor time"
        how = f"signal {-code}" if code < 0 else f"status {code}"
        return f"the rendering process ended ({how})"


def _rendering(answer: Mapping[str, Any]) -> Rendering:
    return Rendering(
        text=answer.get("text", ""),
        answers=tuple((start, end) for start, end in answer.get("answers", ())),
        error=answer.get("error"),
        turn=answer.get("turn"),
    )
