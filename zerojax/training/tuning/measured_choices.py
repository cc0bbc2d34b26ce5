"""Decides between two implementations of a computation by checking and timing both.

Processes agree on the decision, and it is cached. This module does not know kernels: a `Question`
has the functions to run. In doubt, the reference is chosen, with a reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import statistics
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from zerojax.config.late_dataclasses import dataclass
from zerojax.training.tuning.kept_choices import Kept, KeptChoices

MARGIN = 0.97
"""The other implementation is chosen if its time is at most this fraction of the reference's time.
"""
NOISE = 0.25
"""Maximum interquartile range of times, relative to the median, at which a decision is made."""
DOUBT = 2.6
"""The gain must exceed this factor times the interquartile range over the square root of the number
of times: twice the standard error of the difference of two medians of normally distributed times.
"""
LEAST_ROUNDS = 3
REFERENCE = "xla"
Exchange = Callable[[np.ndarray], np.ndarray]
"""Function that gathers numbers from all processes: [n] -> [processes, n]; all must call it."""
During = Callable[[str], contextlib.AbstractContextManager[None]]
"""Function from a description ("trying ...") to a context manager that a watchdog supervises."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Limits on the time spent on measuring.

    Attributes:
      rounds: maximum number of rounds per question, after the first, which is discarded.
      seconds: seconds per question after which no round starts, except the first `LEAST_ROUNDS`.
      total: seconds for all questions together after which nothing starts.
    """

    rounds: int
    seconds: float
    total: float


AT_START = Effort(rounds=41, seconds=2.0, total=10.0)
BY_ITSELF = Effort(rounds=101, seconds=10.0, total=math.inf)
"""Limits of `zerojax tune`, which may take longer than the start of a run."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """An implementation of a computation, to be checked and timed.

    Attributes:
      name: name of the implementation, as in `pallas_kernels.choice.Choice.implementation`.
      run: function that computes once, always from the same inputs, and returns the results.
      repeat: function that computes once in place, as a step does, and blocks until done; None:
        time `run` instead.
      obstacle: reason, known without a trial, why it cannot run here; None if it can.
    """

    name: str
    run: Callable[[], Any]
    repeat: Callable[[], Any] | None = None
    obstacle: str | None = None


@dataclass(frozen=True, kw_only=True)
class Question:
    """A choice between two implementations of one computation.

    Attributes:
      title: noun phrase for the computation, such as "update by adamw".
      key: cache key: device, versions, source code, dtypes, sizes.
      reference: implementation that is chosen in doubt; its results count as correct.
      other: implementation that may be faster.
      difference: function (results of `other`, results of `reference`) -> description of how they
        differ, or None.
    """

    title: str
    key: Mapping[str, Any]
    reference: Way
    other: Way
    difference: Callable[[Any, Any], str | None]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to a `Question`, with its reason.

    Attributes:
      choice: name of the chosen implementation, equal on every process.
      reason: one line for the log.
    """

    choice: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class _Here:
    """The environment in which `decide` works: cache, time limits, clock, and communication between
    processes.
    """

    kept: KeptChoices
    planned: Answer | None
    again: bool
    effort: Effort
    deadline: float
    clock: Callable[[], float]
    exchange: Exchange
    during: During

    def anywhere(self, flag: bool) -> bool:
        """Returns True if `flag` is True in any process; every process must call it."""
        return bool(self.exchange(np.array([float(flag)])).any())

    def why_over(self) -> str | None:
        """Returns a reason if any process has used up the total time, else None."""
        if not self.anywhere(self.clock() >= self.deadline):
            return None
        return f"the {self.effort.total:g} s for measurements are used up; run zerojax tune"

    def same(self, found: Kept | None) -> bool:
        """Returns True if every process found the same cached decision; caches may differ between
        machines.
        """
        told = found and (found.choice, found.seconds, found.other_seconds)
        numbers = self.exchange(np.array([float(zlib.crc32(repr(told).encode()))]))
        return bool((numbers == numbers[0]).all())


def decide(
    ask: Callable[[], Question],
    kept: KeptChoices,
    *,
    planned: Answer | None = None,
    again: bool = False,
    effort: Effort = AT_START,
    deadline: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
    exchange: Exchange | None = None,
    during: During | None = None,
) -> Answer:
    """Returns the faster of two implementations of one computation. Every process must call it.

    The other implementation is checked against the reference at every start, even with a cached
    answer, because drivers and cards may have changed.

    Args:
      ask: function that returns the question, equal on all processes; if it raises, the reference
        is chosen.
      kept: cached answers of this machine, and markers of failed trials.
      planned: answer that selects the other implementation, if the plan already uses it. It is then
        only checked, whatever time is left, and not timed.
      again: True: measure even if an answer is cached, and repeat trials that failed before.
      effort: limits on rounds and time.
      deadline: time on `clock` after which nothing starts.
      clock: function that returns seconds.
      exchange: function that gathers numbers from all processes; None: gather through JAX.
      during: context manager for work that may hang and does not wait for other processes; None: no
        supervision.

    Raises:
      RuntimeError: the device cannot be used any more after a trial of the other implementation.
    """
    here = _Here(
        kept=kept,
        planned=planned,
        again=again,
        effort=effort,
        deadline=deadline,
        clock=clock,
        exchange=exchange or exchange_between_processes,
        during=during or (lambda _: contextlib.nullcontext()),
    )
    if planned is None and (why := here.why_over()):
        return Answer(choice=REFERENCE, reason=f"nothing was measured: {why}")
    try:
        question, why = ask(), None
    except Exception as error:  # a failure to build the question must not end a run
        question, why = None, _line(error)
    if here.anywhere(why is not None) or question is None:
        return _unmeasured(planned, why)
    ended = not again and kept.is_marked(question.key)
    why = question.other.obstacle
    if why is None and ended:
        why = (
            "it failed in an earlier start, or ended it; zerojax.tune(plan, again=True) tries it "
            "again"
        )
    if here.anywhere(why is not None):
        return _reference(question, why or "it cannot run on another process")
    with kept.marked(question.key) as leave_mark:
        return _tried(question, here, leave_mark)


def _unmeasured(planned: Answer | None, why: str | None) -> Answer:
    """Returns the answer if nothing could be compared.

    Args:
      planned: answer that selects the other implementation, if the plan already uses it.
      why: description of the failure on this process; None if another process failed.
    """
    why = why or "it failed on another process"
    if planned is not None:
        return dataclasses.replace(planned, reason=f"{planned.reason}; not checked: {why}")
    return Answer(choice=REFERENCE, reason=f"nothing was measured: {why}")


def _tried(question: Question, here: _Here, leave_mark: Callable[[], None]) -> Answer:
    with here.during(f"trying {question.other.name} for {question.title}"):
        is_reference, why = _check(question)
    if refused := _refused(question, here, why, leave_mark, is_reference=is_reference):
        return refused
    if here.planned is not None:
        return here.planned
    found = None if here.again else here.kept.find(question.key)
    names = (question.reference.name, question.other.name)
    if here.same(found) and found is not None and found.choice in names:
        return Answer(choice=found.choice, reason=_told(question, found))
    if why := here.why_over():
        return _reference(question, why)
    return _measured(question, here, leave_mark)


def _refused(
    question: Question,
    here: _Here,
    why: str | None,
    leave_mark: Callable[[], None],
    *,
    is_reference: bool = False,
) -> Answer | None:
    """Returns the reference as answer if an implementation failed on any process, else None.

    Args:
      question: the question.
      here: environment of `decide`.
      why: description of the failure on this process; None if it did not fail.
      leave_mark: function that makes the trial's marker permanent (`KeptChoices.marked`).
      is_reference: True if the reference failed, which says nothing about the other implementation.
    """
    if why is not None and not is_reference:
        leave_mark()
        if not _still_works(question):
            # Raised before any exchange, because an exchange needs the device.
            raise RuntimeError(
                f"{question.title}: {question.other.name} was tried, {why}, and this process can "
                "no longer use its device; start again: the failed trial is skipped then"
            )
    if not here.anywhere(why is not None):
        return None
    if here.anywhere(is_reference):
        return _unmeasured(here.planned, why)
    return _reference(question, why or "it failed on another process")


def _check(question: Question) -> tuple[bool, str | None]:
    """Runs both implementations once and compares their results.

    Returns:
      (True if the reference failed, description of the failure or of a difference; None if there is
      neither).
    """
    is_reference = True
    try:
        # Errors on a device are raised only when the result is waited for.
        wanted = jax.block_until_ready(question.reference.run())
        is_reference = False
        first = jax.block_until_ready(question.other.run())
        second = jax.block_until_ready(question.other.run())
        why = question.difference(first, wanted)
    except Exception as error:  # a kernel may raise anything
        name = f"{question.reference.name}: " if is_reference else ""
        return is_reference, f"{name}it failed: {_line(error)}"
    if why is not None:
        return False, f"its results are wrong: {why}"
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    if not all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs):
        return False, "it is not deterministic: a second run computed other bits"
    return False, None


def _still_works(question: Question) -> bool:
    """Returns True if the device still works; an invalid memory access ends its context."""
    try:
        jax.block_until_ready(question.reference.run())
    except Exception:  # a lost device may raise anything
        return False
    return True


def _measured(question: Question, here: _Here, leave_mark: Callable[[], None]) -> Answer:
    try:
        with here.during(f"timing {question.other.name} for {question.title}"):
            taken = _times((question.reference, question.other), here)
        why, mine = None, np.array([number for times in taken for number in _summary(times)])
    except Exception as error:  # a kernel may raise anything
        why, mine = f"it failed: {_line(error)}", np.full(6, math.inf)
    if refused := _refused(question, here, why, leave_mark):
        return refused
    slowest = here.exchange(mine).max(axis=0)  # a training step waits for the slowest process
    (base, *base_noise), (time_, *noise) = slowest.reshape(2, 3).tolist()
    spread, doubt = map(max, base_noise, noise)
    if spread > NOISE:
        return _reference(question, f"times vary too much to decide (quartiles {spread:.0%} apart)")
    is_faster = time_ <= MARGIN * base
    if is_faster and 1 - time_ / base <= DOUBT * doubt:
        gain = f"{1 - time_ / base:.1%} less, +- {DOUBT * doubt:.1%}"
        return _reference(question, f"times vary too much to decide ({gain})")
    found = Kept(
        choice=(question.reference, question.other)[is_faster].name,
        seconds=base,
        other_seconds=time_,
        date=datetime.datetime.now().strftime("%Y-%m-%d"),
    )
    _keep(question, found, here)
    return Answer(choice=found.choice, reason=_told(question, found))


def _keep(question: Question, found: Kept, here: _Here) -> None:
    """Caches the decision on every machine.

    If one machine lacked it, all processes would measure again.
    """
    if here.kept.is_first:
        here.kept.keep(question.key, found)
    here.anywhere(False)  # a barrier: processes of one machine share a cache; one writes first
    if not here.kept.is_first:
        here.kept.keep(question.key, found)


def _times(ways: Sequence[Way], here: _Here) -> list[list[float]]:
    """Returns the seconds of each implementation, timed in turn; discards the first round."""
    taken: list[list[float]] = [[] for _ in ways]
    end = min(here.clock() + here.effort.seconds, here.deadline)
    for number in range(1 + here.effort.rounds):
        if number > LEAST_ROUNDS and here.clock() > end:
            break
        for way, times in zip(ways, taken, strict=True):
            before = here.clock()
            jax.block_until_ready((way.repeat or way.run)())
            times.append(here.clock() - before)
    return [times[1:] for times in taken]


def _summary(times: Sequence[float]) -> tuple[float, float, float]:
    """Returns (median, interquartile range, that range over the square root of the count).

    The second and the third value are relative to the median.
    """
    median = statistics.median(times)
    low, _, high = statistics.quantiles(times, n=4)
    return median, (high - low) / median, (high - low) / median / math.sqrt(len(times))


def _reference(question: Question, why: str) -> Answer:
    return Answer(
        choice=question.reference.name, reason=f"{question.other.name} was not chosen: {why}"
    )


def _told(question: Question, found: Kept) -> str:
    ratio = found.seconds / found.other_seconds
    return f"{question.other.name} is {ratio:.2f} times as fast here, measured {found.date}"


def _line(error: Exception) -> str:
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= 160 else f"{words[:160]} ..."


def exchange_between_processes(values: np.ndarray) -> np.ndarray:
    """Gathers numbers from all processes, one row per process; every process must call it."""
    if jax.process_count() == 1:
        return values[None]
    # Sent as bytes, because JAX would round float64 to float32.
    rows = multihost_utils.process_allgather(np.frombuffer(values.tobytes(), np.uint8))
    return np.asarray(rows).reshape(jax.process_count(), -1).copy().view(np.float64)
