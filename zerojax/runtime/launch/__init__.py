"""Launches one command in several processes, on one or several hosts, with restarts after failures.

The launcher of host 0 decides; the launchers of other hosts follow. No JAX is imported.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import time
from collections.abc import Iterator
from types import FrameType

from zerojax.config.late_dataclasses import dataclass
from zerojax.runtime.launch.children import Children, Printer
from zerojax.runtime.launch.handshake import Token
from zerojax.runtime.launch.hosts import Connection, Followers, Message, free_address, reach_leader
from zerojax.runtime.launch.job import End, describe, exit_code, first_failure, may_restart
from zerojax.runtime.launch.job import Job as Job
from zerojax.runtime.launch.job import check_gpus as check_gpus
from zerojax.runtime.process_group import optional_number_of
from zerojax.runtime.shutdown import FAILED, OK, SAVED_AND_STOPPED

_DEFAULT_JOIN_SECONDS = 300
_MAX_FORWARDED = 2
"""Largest number of stop signals that are forwarded to the processes: the first requests a save,
the second stops at once. A third signal kills the processes."""


@dataclass(frozen=True)
class Signalled:
    """Event: the launcher received the signal `number`."""

    number: int


def launch(job: Job) -> int:
    """Runs the processes of `job` on this host to their end.

    Returns:
      0 after success; 75 if a signal stopped the run and everything is saved; otherwise the exit
      code of the first process that failed (128 + n for signal n).

    Raises:
      ValueError: the launchers of the hosts have different settings.
      TimeoutError, OSError: the launchers do not reach each other.
    """
    events: queue.SimpleQueue = queue.SimpleQueue()
    printer = Printer(job.total, show_all=job.show_all)
    children = Children(job, events, printer)
    seconds = optional_number_of(os.environ, "ZEROJAX_JOIN_SECONDS") or _DEFAULT_JOIN_SECONDS
    # No process runs while launchers connect, so a signal simply ends this launcher.
    launcher: _Leader | _Follower
    if job.host:
        assert job.coordinator is not None
        numbers = {
            "host": job.host,
            "num_hosts": job.num_hosts,
            "num_processes": job.num_processes,
        }
        link = reach_leader(
            job.coordinator,
            hello=numbers,
            events=events,
            seconds=seconds,
            token=Token(os.environ, job.token_file),
            say=printer.say,
        )
        launcher = _Follower(children, events, printer, link, job.num_processes)
    elif job.num_hosts > 1:
        assert job.coordinator is not None
        followers = Followers.gather(
            job.coordinator,
            num_hosts=job.num_hosts,
            num_processes=job.num_processes,
            events=events,
            seconds=seconds,
            token=Token(os.environ, job.token_file),
            say=printer.say,
        )
        launcher = _Leader(job, children, events, printer, followers)
    else:
        followers = Followers({})
        launcher = _Leader(job, children, events, printer, followers)
    with _signals_into(events):
        try:
            return launcher.run()
        finally:
            children.kill()


class _Launcher:
    """Base class of launchers: forwards signals to the processes of its host."""

    def __init__(self, children: Children, events: queue.SimpleQueue, printer: Printer):
        self.children, self.events, self.printer = children, events, printer
        self.num_signals = 0

    def forward(self, number: int) -> None:
        self.num_signals += 1
        name = signal.Signals(number).name
        if self.num_signals > _MAX_FORWARDED:
            self.printer.say(f"{name} received again; the processes are killed")
            self.children.kill()
            return
        self.printer.say(f"{name} received: forwarded to the processes, which save and stop")
        self.children.forward(number)


class _Leader(_Launcher):
    """Launcher of host 0, which decides about starts, restarts and the end on all hosts."""

    def __init__(
        self,
        job: Job,
        children: Children,
        events: queue.SimpleQueue,
        printer: Printer,
        followers: Followers,
    ):
        super().__init__(children, events, printer)
        self.job, self.followers = job, followers
        self.lost: set[int] = set()

    def run(self) -> int:
        code = FAILED
        try:
            code = self._run()
        finally:
            self.followers.send(finish=code)
            self.followers.close()
        return code

    def _run(self) -> int:
        restart = 0
        while True:
            coordinator = free_address(self.job.coordinator)
            self.followers.send(start=restart, coordinator=coordinator)
            self.children.start(coordinator, restart)
            ends = self._until_all_have_ended()
            code, sentence = self._outcome(ends)
            if sentence is None:
                return code
            left = self.job.max_restarts - restart
            if left <= 0 or self.lost or self.num_signals or not may_restart(code):
                self.printer.say(sentence + self._why_no_restart(code))
                return code
            restart += 1
            self.printer.say(
                f"{sentence} Restart {restart} of {self.job.max_restarts}, from the last good "
                "checkpoint."
            )

    def _until_all_have_ended(self) -> list[End]:
        ends: list[End] = []
        waited_for = set(range(self.job.total))
        while waited_for:
            event = self.children.next_event(self.events)
            if isinstance(event, Signalled):
                self.forward(event.number)
                continue
            if isinstance(event, Message):
                if event.content is None:
                    self.lost.add(event.host)
                    self._end_the_others(time.monotonic())
                    waited_for -= {i for i in waited_for if self.job.host_of(i) == event.host}
                    continue
                event = _end_of(event.content)
            assert isinstance(event, End)
            ends.append(event)
            waited_for.discard(event.process_id)
            if event.failed:
                self._end_the_others(event.when)
        return ends

    def _end_the_others(self, since: float) -> None:
        self.followers.send(end=True)
        self.children.end_soon(since)

    def _outcome(self, ends: list[End]) -> tuple[int, str | None]:
        """Returns the exit code of the run, computed from how its processes ended; also a sentence
        if the run failed, else None.
        """
        failure = first_failure(ends)
        if failure is None and not self.lost:
            codes = {end.code for end in ends if not end.was_killed}
            if any(end.was_killed for end in ends):
                return exit_code(-signal.SIGKILL), "the processes were killed before they saved."
            return (SAVED_AND_STOPPED if SAVED_AND_STOPPED in codes else OK), None
        if failure is None:
            return (
                FAILED,
                f"the launcher of host {min(self.lost)} was lost first; all processes ended.",
            )
        where = f" on host {self.job.host_of(failure.process_id)}" if self.job.num_hosts > 1 else ""
        others = self.job.total - 1
        ended = {0: "", 1: " The other process was ended."}.get(
            others, f" The other {others} processes were ended."
        )
        first = f"rank {failure.process_id}{where} failed first, with {describe(failure.code)}."
        return exit_code(failure.code), first + ended

    def _why_no_restart(self, code: int) -> str:
        if not self.job.max_restarts:
            return ""
        if self.num_signals:
            return " No restart: a signal requested the end of the run."
        if self.lost:
            return " No restart: that host is needed."
        if not may_restart(code):
            return " No restart: the run would fail in the same way."
        return f" All {self.job.max_restarts} restarts are used up."


class _Follower(_Launcher):
    """Launcher of a host other than 0, which carries out orders of the launcher of host 0."""

    def __init__(
        self,
        children: Children,
        events: queue.SimpleQueue,
        printer: Printer,
        leader: Connection,
        num_processes: int,
    ):
        super().__init__(children, events, printer)
        self.leader, self.num_processes = leader, num_processes

    def run(self) -> int:
        running = 0
        while True:
            event = self.children.next_event(self.events)
            if isinstance(event, Signalled):
                self.forward(event.number)
                if not running:
                    return exit_code(-event.number)
            elif isinstance(event, End):
                running -= 1
                self.leader.send(
                    ended=event.process_id,
                    code=event.code,
                    was_killed=event.was_killed,
                    # An age, because the monotonic clocks of two hosts have nothing in common.
                    ago=time.monotonic() - event.when,
                )
            else:
                assert isinstance(event, Message)
                content = event.content
                if content is None:
                    self.printer.say("the launcher of host 0 is lost; the processes here are ended")
                    return FAILED
                if "finish" in content:
                    return int(content["finish"])
                if "start" in content:
                    self.children.start(content["coordinator"], content["start"])
                    running = self.num_processes
                if "end" in content:
                    self.children.end_soon()


def _end_of(content: dict) -> End:
    """Converts a message that a process on another host has ended to an `End`, whose time is that
    of this host's clock.
    """
    when = time.monotonic() - float(content["ago"])
    return End(int(content["ended"]), int(content["code"]), when, bool(content["was_killed"]))


@contextlib.contextmanager
def _signals_into(events: queue.SimpleQueue) -> Iterator[None]:
    """Puts a `Signalled` into `events` for each SIGINT, SIGTERM or SIGHUP. SIGHUP (the terminal was
    lost) counts as SIGTERM."""

    def note(number: int, frame: FrameType | None) -> None:
        events.put(Signalled(signal.SIGTERM if number == signal.SIGHUP else number))

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        numbers.append(signal.SIGHUP)
    previous = {number: signal.signal(number, note) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
