"""Shows the progress of long commands on stderr."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TextIO

from zerojax.config.display import printable, show

INTERVAL = 0.5
WIDTH = 100


class Progress:
    """Progress line on stderr: updated twice a second on a terminal; elsewhere only its first text
    is printed.

    Use it as a context manager and call it with a few words about the current work.
    """

    def __init__(self, *, quiet: bool, stream: TextIO | None = None):
        """Sets `quiet` (True prints nothing) and the output `stream` (None is stderr)."""
        self._stream = sys.stderr if stream is None else stream
        self._quiet = quiet
        self._live = not quiet and self._stream.isatty()
        self._text = ""
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __call__(self, text: str) -> None:
        first, self._text = not self._text, text
        if self._live:
            self._draw()
        elif first and not self._quiet:
            show(f"{text} ...", file=self._stream, flush=True)

    def line(self, text: str) -> None:
        """Prints a line that stays, in place of the present progress line."""
        if not self._quiet:
            show(("\r\x1b[K" if self._live else "") + text, file=self._stream, flush=True)

    def __enter__(self) -> Progress:
        if self._live:
            self._thread = threading.Thread(target=self._keep_drawing, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _keep_drawing(self) -> None:
        while not self._ended.wait(INTERVAL):
            self._draw()

    def _draw(self) -> None:
        if self._text:
            line = f"{time.monotonic() - self._began:4.0f} s  {self._text}"
            self._stream.write(f"\r\x1b[K{printable(line[:WIDTH])}")
            self._stream.flush()
