"""What a signal does to a training loop: it asks for a stop between two steps.

Knows signals; nothing of training.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Self


class Interrupted(KeyboardInterrupt):
    """Training was stopped by a signal after a step was finished and, where asked for, saved.

    Attributes:
      signal_name: "SIGINT" (Ctrl-C) or "SIGTERM".
    """

    def __init__(self, message: str, signal_name: str):
        super().__init__(message)
        self.signal_name = signal_name


class StopRequest:
    """While entered, the first Ctrl-C or SIGTERM is noted instead of raised; a second acts at once.

    Outside the main thread, where Python allows no signal handlers, it notes nothing.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name
        self._restore()
