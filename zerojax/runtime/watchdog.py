"""Watchdog: ends a process that makes no progress, and writes the stacks of its threads."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from zerojax.config.sections import WatchConfig
from zerojax.runtime.hang_map import describe_hang
from zerojax.runtime.shutdown import HUNG
from zerojax.runtime.standstill import NOTE_SECONDS, StandstillNotes, read_notes
from zerojax.runtime.user_files import open_appending

POLL_SECONDS = 1.0
STOPPED_SECONDS = 5.0
"""Delay of a poll in seconds that shows that the process was stopped (Ctrl-Z, SIGSTOP, a closed
laptop). No progress was possible then, so this does not count as a hang."""
TELL_SECONDS = 10.0
"""Maximum seconds for writing the stacks: the disk or the reader of standard error may hang."""
PEERS_SECONDS = 3.0
"""Seconds that the watchdogs of other processes get to report their state before this process ends.
Processes that wait for this one fail then, and the watchdogs differ by a poll or two."""
FIRST_PROCESS_SECONDS = 2.0
"""Additional seconds that process 0 waits, because JAX aborts the other processes when it ends."""
NET_SECONDS = 15.0
"""Seconds after which `faulthandler` ends the process if the watchdog's thread has not."""


class _Phase(NamedTuple):
    """Current activity of the process.

    Attributes:
      what: description such as "waiting for data".
      is_long: True if the limit is `long_timeout` instead of `step_timeout`.
      limit: limit in seconds that replaces the limit of the settings; None: the settings apply.
    """

    what: str
    is_long: bool
    limit: float | None = None


_STARTING = _Phase("starting", True)


class Watchdog:
    """Context manager that ends the process when it shows no progress for longer than a limit.

    Signs of progress are a finished step, and the begin and the end of each block of `during`. All
    times come from the monotonic clock, so changing the system time has no effect. The context
    manager may be entered several times; nested entries have no further effect.

    With several processes there is a second timer, `faulthandler`, whose C code needs no
    interpreter. It ends the process (with code 1) if the thread of this class itself cannot run. A
    single process does not use it, because it could not distinguish a hang from Ctrl-Z.

    Args:
      config: settings with the limits; None: nothing is watched.
      folder: folder of the run, into which stacks are written; None: write to standard error only.
      process: index of this process.
      processes: number of processes.
      resume_hint: sentence part that says how to continue the run.
      line: as in `StandstillNotes`.
      sign: function called at every poll. Its value changes with every sign of progress that the
        methods do not report; None means that nothing is being waited for.
      clock: function that returns a monotonic time in seconds.
      end: function that ends the process with an exit code, without any cleanup.

    Attributes:
      notes: writes a note into the folder while there is no progress; other processes read it.
    """

    def __init__(
        self,
        config: WatchConfig | None = None,
        *,
        folder: Path | None = None,
        process: int = 0,
        processes: int = 1,
        resume_hint: str = "run the same command again to resume",
        line: Callable[[bool], str | None] = lambda _: None,
        sign: Callable[[], int | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        config = config or WatchConfig(step_timeout=0)
        self._is_interactive = hasattr(sys, "ps1")
        is_watched_by_somebody = config.step_timeout is None and self._is_interactive
        self._config, self._is_off = config, config.is_off or is_watched_by_somebody
        self._folder, self._resume_hint = folder, resume_hint
        self._process, self._processes = process, processes
        self._sign, self._clock, self._end = sign, clock, end
        self.notes = StandstillNotes(folder, process, processes, line=line)
        # Used by the thread: last sign, its time, and the time since which nothing is waited for.
        self._last_sign: int | None = None
        self._sign_at = -math.inf
        self._quiet_since: float | None = None
        self._phase, self._since = _STARTING, clock()
        """Current activity, and the time in seconds of the last sign of progress."""
        self._said: float | None = None
        self._step: int | None = None
        self._longest: float | None = None
        self._step_ended: float | None = None
        self._has_finished = False
        self._entered = 0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._entered += 1
        if self._entered == 1 and not self._is_off:
            self._phase, self._since = _STARTING, self._clock()
            self._step_ended = None
            self.notes.remove()  # one that an earlier start has left
            # A new event, because `stop` may have set that of the last entry.
            self._stopping = threading.Event()
            self._thread = threading.Thread(
                target=self._watch, args=(self._stopping,), name="zerojax-watchdog", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._entered -= 1
        if self._entered == 0 and self._thread is not None:
            self._stopping.set()
            self._thread.join()
            self._thread = None
            # After the end of the thread, which could write it once more.
            self.notes.remove()

    def stop(self) -> None:
        """Ends supervision without waiting for the watchdog's thread. Any thread may call it."""
        self._stopping.set()

    # --- signs of progress ------------------------------------------------------------------------

    def during(
        self,
        what: str,
        *,
        is_long: bool = False,
        is_apart: bool = False,
        limit: float | None = None,
    ) -> _During:
        """Names the activity of a `with` block for messages ("it is ..."), and measures its time.

        Args:
          what: description such as "waiting for data".
          is_long: True: the limit is `long_timeout`; False: `step_timeout`.
          is_apart: True: the activity is not part of a step, such as an evaluation. Long activities
            never are part of a step.
          limit: limit in seconds that replaces the limit of the settings; None: the settings apply.
        """
        return _During(self, _Phase(what, is_long, limit), is_long or is_apart)

    def turn_to(self, phase: _Phase, *, is_apart: bool = False) -> _Phase:
        """Changes the current activity; returns the one until now.

        Args:
          phase: the activity from now on.
          is_apart: True: the activity until now was not part of a step.
        """
        before, self._since, self._phase = self._phase, self._clock(), phase
        if is_apart:  # otherwise it would count as time of the next step
            self._step_ended = None
        return before

    def alive(self) -> None:
        """Reports progress inside a long activity, for example after each of many batches."""
        self._since = self._clock()

    def finished(self, step: int) -> None:
        """Reports that the results of a step, and of every step before it, are available."""
        now, ended = self._clock(), self._step_ended
        if ended is not None and self._step is not None and step > self._step:
            seconds = (now - ended) / (step - self._step)
            self._longest = max(self._longest or 0.0, seconds)
        self._step, self._step_ended, self._has_finished = step, now, True
        self.alive()

    def plan_changed(self) -> None:
        """Reports that the next step compiles; the measured duration of steps is discarded.

        With several processes the limit is `long_timeout` until this step has finished, because
        another process may still compile it while this one has found it in its cache.
        """
        self._longest = self._step_ended = None
        self._has_finished = False

    def stop_limit(self) -> float | None:
        """Returns the seconds that a step may still take after a signal (`WatchConfig`)."""
        if self._config.stop_timeout is None and self._is_interactive:
            return None
        return self._config.stop_limit(self._longest)

    def doing(self) -> str:
        """Returns the current activity, such as "compiling, or in step 1"."""
        return self._phase.what

    # --- the watch --------------------------------------------------------------------------------

    def _watch(self, stopping: threading.Event) -> None:
        shortest = min(self._config.step_timeout or POLL_SECONDS, self._config.long_timeout)
        poll = min(POLL_SECONDS, shortest / 10)
        before = time.monotonic()
        try:
            while not stopping.wait(poll):
                late = time.monotonic() - before - poll
                before += poll + late
                if late > STOPPED_SECONDS:
                    self._since += late
                    self._step_ended = None
                if not self._is_quiet():
                    self._look(self._phase)
        finally:
            if self._processes > 1:
                faulthandler.cancel_dump_traceback_later()

    def _note_limit(self) -> float:
        """Returns the seconds without progress after which the note is written."""
        config = self._config
        return min(NOTE_SECONDS, (config.step_timeout or math.inf) / 4, config.long_timeout / 4)

    def _is_quiet(self) -> bool:
        """Returns True if the process waits for nothing; also reads `sign` to detect progress."""
        if self._sign is None:
            return False
        sign, now = self._sign(), self._clock()
        if sign is None or sign != self._last_sign:
            self._last_sign, self._sign_at = sign, now
        if sign is not None:
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = now
            # `_look`, which postpones this timer, is not called while nothing is waited for.
            if self._processes > 1:
                faulthandler.cancel_dump_traceback_later()
        elif now - self._quiet_since > STOPPED_SECONDS:
            self._step_ended = None  # otherwise it would count as time of the next step
        return sign is None

    def _look(self, phase: _Phase) -> None:
        since = max(self._since, self._sign_at)
        waited, limit = self._clock() - since, self._limit(phase)
        if self._processes > 1:
            later = max(limit - waited, 0.0) + NET_SECONDS
            faulthandler.dump_traceback_later(later, exit=True, file=sys.__stderr__ or 2)
        if waited > self._note_limit():
            self.notes.note((phase, since), phase.what, waited)
        else:
            self.notes.forget()
        if waited > limit:
            self._bark(phase, waited, limit)
        elif waited > limit / 2 and since != self._said:
            self._said = since
            self._say(f"{self._standstill(phase, waited)}; the watchdog ends it after {limit:g} s")

    def _limit(self, phase: _Phase) -> float:
        if phase.limit is not None:
            return phase.limit
        if self._is_long(phase):
            return self._config.long_timeout
        return self._config.step_limit(self._longest)

    def _is_long(self, phase: _Phase) -> bool:
        return phase.is_long or (self._processes > 1 and not self._has_finished)

    def _bark(self, phase: _Phase, waited: float, limit: float) -> None:
        tell = threading.Thread(target=self._tell, args=(phase, waited, limit), daemon=True)
        tell.start()
        tell.join(TELL_SECONDS)
        if self._processes > 1:
            time.sleep(PEERS_SECONDS + (FIRST_PROCESS_SECONDS if self._process == 0 else 0.0))
        self._end(HUNG)
        self.alive()  # reached only if `end` has not ended the process

    def _tell(self, phase: _Phase, waited: float, limit: float) -> None:
        option = f"watch.{'long_timeout' if self._is_long(phase) else 'step_timeout'}"
        own = phase.limit is not None
        source = "the limit of this activity" if own else option
        # First to the screen, which always exists; the folder may be what hangs.
        _dump_stacks(sys.__stderr__)
        longer = "" if own else f", or raise {option} if this activity needs more time"
        remedy = f"{self._resume_hint}{longer}"
        folder = self._folder
        file = None if folder is None else folder / f"stacks-process-{self._process}.txt"
        where = "" if file is None else f" and in {file}"
        self._say(
            f"{self._standstill(phase, waited)}; the limit is {limit:g} s ({source}); the "
            f"watchdog ends it with code {HUNG}; the stacks of all threads are above{where}; "
            f"{remedy}"
        )
        for line in self._map():
            self._say(line)
        if file is not None:
            with contextlib.suppress(OSError, ValueError):
                file.parent.mkdir(parents=True, exist_ok=True)
                with io.TextIOWrapper(open_appending(file), encoding="utf-8") as opened:
                    opened.write(f"{self._standstill(phase, waited)}\n")
                    opened.flush()
                    _dump_stacks(opened)

    def _map(self) -> list[str]:
        """Returns lines that say which processes wait where, and which are missing."""
        if self._folder is None or self._processes == 1:
            return []
        self.notes.wait(NOTE_SECONDS / 2)
        with contextlib.suppress(OSError, ValueError):
            notes = read_notes(self._folder)
            return describe_hang(notes, time.time()) if notes else []
        return []

    def _standstill(self, phase: _Phase, waited: float) -> str:
        several = f"process {self._process} of {self._processes}"
        who = "this run" if self._processes == 1 else several
        after = "" if self._step is None else f" after step {self._step}"
        return f"{who} has made no progress for {waited:.0f} s{after}: it is {phase.what}"

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(f"zerojax: {text}", file=sys.stderr, flush=True)


class _During:
    """The `with` block of `Watchdog.during`."""

    def __init__(self, watchdog: Watchdog, phase: _Phase, is_apart: bool) -> None:
        self._watchdog, self._phase, self._is_apart = watchdog, phase, is_apart

    def __enter__(self) -> None:
        self._outer = self._watchdog.turn_to(self._phase)

    def __exit__(self, *_: object) -> None:
        self._watchdog.turn_to(self._outer, is_apart=self._is_apart)


def _dump_stacks(file: object) -> None:
    # `sys.__stderr__` is None without a terminal, and some streams have no descriptor.
    with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
        faulthandler.dump_traceback(file=file, all_threads=True)  # type: ignore[arg-type]
