"""Choice between implementations of one computation: checked, timed in turns, agreed, kept.

Knows no kernel: a `Question` brings what runs. Any doubt leaves the reference, with its reason.
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

from zerojax.training.tuning.kept_choices import Kept, KeptChoices

MARGIN = 0.97
"""Another than the reference is taken where it takes at most this share of its time."""
NOISE = 0.25
"""Where the quartiles of a way's times are further apart, relative to the median, nothing is
decided."""
DOUBT = 2.6
"""What is gained has to be more than so many quartile distances over the root of the number of
times: twice the standard error of the difference of two medians of normally distributed times."""
LEAST_ROUNDS = 3
REFERENCE = "xla"
Exchange = Callable[[np.ndarray], np.ndarray]
"""Numbers of this process [n] -> those of all processes [processes, n]; collective."""
During = Callable[[str], contextlib.AbstractContextManager[None]]
"""What is being done ("trying ...") -> a block in which it is, ended by whoever watches."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
    """How long measuring may take.

    Attributes:
      rounds: of each question, at most, after the first, which is thrown away.
      seconds: no round of a question begins later, but for the first `LEAST_ROUNDS`.
      total: of all questions together; nothing is begun later.
    """

    rounds: int
    seconds: float
    total: float


AT_START = Effort(rounds=41, seconds=2.0, total=10.0)
BY_ITSELF = Effort(rounds=101, seconds=10.0, total=math.inf)
"""Of `zerojax tune`, for which nobody waits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """One implementation.

    Attributes:
      name: as `pallas_kernels.choice.Choice.implementation`.
      run: computes once from the same inputs each time and returns the results.
      repeat: computes once as a step would, in place, and waits until it is done; None takes `run`.
      obstacle: why it cannot run here, known without trying.
    """

    name: str
    run: Callable[[], Any]
    repeat: Callable[[], Any] | None = None
    obstacle: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be decided.

    Attributes:
      title: a noun phrase, such as "update by adamw".
      key: what a kept answer has to agree with: device, versions, source, dtypes, sizes.
      reference: what is taken in doubt, and whose results are right.
      other: what may be faster.
      difference: (results of the other, of the reference) -> why they differ, or None.
    """

    title: str
    key: Mapping[str, Any]
    reference: Way
    other: Way
    difference: Callable[[Any, Any], str | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """Attributes:
    choice: name of the way, the same on every process.
    reason: one line for people.
    """

    choice: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Here:
    """With what a question is decided; see `decide`."""

    kept: KeptChoices
    planned: Answer | None
    again: bool
    effort: Effort
    deadline: float
    clock: Callable[[], float]
    exchange: Exchange
    during: During

    def anywhere(self, flag: bool) -> bool:
        """Whether something is so on any process."""
        return bool(self.exchange(np.array([float(flag)])).any())

    def why_over(self) -> str | None:
        """Why nothing new is begun, if the time of all questions is used up on any process."""
        if not self.anywhere(self.clock() >= self.deadline):
            return None
        return f"the {self.effort.total:g} s of a start were used up; zerojax tune measures it"

    def same(self, found: Kept | None) -> bool:
        """Whether every process has the same answer; some of them may have another cache."""
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
    """The faster of two implementations that compute the same, on all processes together.

    The other one is checked against the reference at every start, whatever is kept: drivers and
    cards change under a cache.

    Args:
      ask: makes the question, which is equal on all processes; one that fails leaves the reference.
      kept: earlier answers of this machine, and what failed or ended a start.
      planned: the other way, where it is what a run takes unless it is wrong: it is checked
        whatever time is left, and not timed.
      again: measures although an answer is kept, and tries what an earlier start ended with.
      effort: how often it is timed.
      deadline: of the clock; nothing is begun later.
      clock: seconds.
      exchange: collective; None exchanges between JAX's processes.
      during: for what may hang, and waits for no other process; None: nobody watches.

    Raises:
      RuntimeError: the device is lost after the other one was tried.
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
    except Exception as error:  # a question that cannot be asked must not end a run
        question, why = None, _line(error)
    if here.anywhere(why is not None) or question is None:
        why = why or "elsewhere"
        if planned is not None:
            return dataclasses.replace(planned, reason=f"{planned.reason}; not checked: {why}")
        return Answer(choice=REFERENCE, reason=f"nothing was measured: {why}")
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


def _tried(question: Question, here: _Here, leave_mark: Callable[[], None]) -> Answer:
    with here.during(f"trying {question.other.name} for {question.title}"):
        why = _check(question)
    if refused := _refused(question, here, why, leave_mark):
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
    question: Question, here: _Here, why: str | None, leave_mark: Callable[[], None]
) -> Answer | None:
    """The reference, where the other way failed on any process; None where it did on none.

    Args:
      why: it failed here.
    """
    if why is not None:
        leave_mark()
        if not _still_works(question):
            # Before anything is exchanged: that would need the device.
            raise RuntimeError(
                f"{question.title}: {question.other.name} was tried, {why}, and this process can "
                "use its device no more; start again: what failed is left out then"
            )
    if here.anywhere(why is not None):
        return _reference(question, why or "it failed on another process")
    return None


def _check(question: Question) -> str | None:
    """Why the other way is not to be trusted, if it is not."""
    try:
        # What fails on a device says so only when it is waited for.
        wanted = jax.block_until_ready(question.reference.run())
        first = jax.block_until_ready(question.other.run())
        second = jax.block_until_ready(question.other.run())
        why = question.difference(first, wanted)
    except Exception as error:  # whatever a kernel does
        return f"it failed: {_line(error)}"
    if why is not None:
        return f"its results are wrong: {why}"
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    if not all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs):
        return "it computed other bits the second time"
    return None


def _still_works(question: Question) -> bool:
    """Whether the device computes after something failed: an invalid access ends its context."""
    try:
        jax.block_until_ready(question.reference.run())
    except Exception:  # whatever a device does that is lost
        return False
    return True


def _measured(question: Question, here: _Here, leave_mark: Callable[[], None]) -> Answer:
    try:
        with here.during(f"timing {question.other.name} for {question.title}"):
            taken = _times((question.reference, question.other), here)
        why, mine = None, np.array([number for times in taken for number in _summary(times)])
    except Exception as error:  # whatever a kernel does
        why, mine = f"it failed: {_line(error)}", np.full(6, math.inf)
    if refused := _refused(question, here, why, leave_mark):
        return refused
    slowest = here.exchange(mine).max(axis=0)  # a step waits for the slowest process
    (base, *base_noise), (time_, *noise) = slowest.reshape(2, 3).tolist()
    spread, doubt = map(max, base_noise, noise)
    if spread > NOISE:
        return _reference(question, f"times were too noisy to tell (quartiles {spread:.0%} apart)")
    is_faster = time_ <= MARGIN * base
    if is_faster and 1 - time_ / base <= DOUBT * doubt:
        gain = f"{1 - time_ / base:.1%} less, give or take {DOUBT * doubt:.1%}"
        return _reference(question, f"times were too noisy to tell ({gain})")
    found = Kept(
        choice=(question.reference, question.other)[is_faster].name,
        seconds=base,
        other_seconds=time_,
        date=datetime.datetime.now().strftime("%Y-%m-%d"),
    )
    _keep(question, found, here)
    return Answer(choice=found.choice, reason=_told(question, found))


def _keep(question: Question, found: Kept, here: _Here) -> None:
    """In the cache of every machine: where one has no answer, all would measure again."""
    if here.kept.is_first:
        here.kept.keep(question.key, found)
    here.anywhere(False)  # waits: processes of one machine have one cache, and one of them writes
    if not here.kept.is_first:
        here.kept.keep(question.key, found)


def _times(ways: Sequence[Way], here: _Here) -> list[list[float]]:
    """Seconds of each way, in turns; the first round is thrown away."""
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
    """(median, distance of the quartiles, that over the root of the number of times).

    The second and third are relative to the median.
    """
    median = statistics.median(times)
    low, _, high = statistics.quantiles(times, n=4)
    return median, (high - low) / median, (high - low) / median / math.sqrt(len(times))


def _reference(question: Question, why: str) -> Answer:
    return Answer(
        choice=question.reference.name, reason=f"{question.other.name} was not taken: {why}"
    )


def _told(question: Question, found: Kept) -> str:
    ratio = found.seconds / found.other_seconds
    return f"{question.other.name} is {ratio:.2f} times as fast here, measured {found.date}"


def _line(error: Exception) -> str:
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= 160 else f"{words[:160]} ..."


def exchange_between_processes(values: np.ndarray) -> np.ndarray:
    """Numbers of this process -> those of all, a row each."""
    if jax.process_count() == 1:
        return values[None]
    # Sent as bytes: JAX would round float64 to float32.
    rows = multihost_utils.process_allgather(np.frombuffer(values.tobytes(), np.uint8))
    return np.asarray(rows).reshape(jax.process_count(), -1).copy().view(np.float64)
