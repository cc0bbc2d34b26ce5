"""Choice between implementations of one computation: checked, timed in turns, agreed, kept.

Knows no kernel: a `Question` brings what runs. Any doubt leaves the reference, with its reason.
"""

from __future__ import annotations

import dataclasses
import datetime
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
ROUNDS = 7
SECONDS = 2.0
"""No round of a question begins later, but for the first three."""
REFERENCE = "xla"
Exchange = Callable[[np.ndarray], np.ndarray]
"""Numbers of this process [n] -> those of all processes [processes, n]; collective."""


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


def decide(
    ask: Callable[[], Question],
    kept: KeptChoices,
    *,
    again: bool = False,
    clock: Callable[[], float] = time.perf_counter,
    exchange: Exchange | None = None,
) -> Answer:
    """The faster of two implementations that compute the same, on all processes together.

    The other one is checked against the reference at every start, whatever is kept: drivers and
    cards change under a cache.

    Args:
      ask: makes the question, which is equal on all processes; one that fails leaves the reference.
      kept: earlier answers of this machine.
      again: measures although an answer is kept, and tries what an earlier start ended with.
      clock: seconds.
      exchange: collective; None exchanges between JAX's processes.
    """
    exchange = exchange or _exchange
    try:
        question, why = ask(), None
    except Exception as error:  # a question that cannot be asked must not end a run
        question, why = None, _line(error)
    if _anywhere(why is not None, exchange) or question is None:
        return Answer(choice=REFERENCE, reason=f"nothing was measured: {why or 'elsewhere'}")
    ended = not again and kept.is_marked(question.key)
    why = question.other.obstacle
    if why is None and ended:
        why = (
            "an earlier start ended while trying it; zerojax.tune(plan, again=True) tries it again"
        )
    if _anywhere(why is not None, exchange):
        return _reference(question, why or "it cannot run on another process")
    with kept.marked(question.key):
        return _tried(question, kept, again, clock, exchange)


def _tried(
    question: Question,
    kept: KeptChoices,
    again: bool,
    clock: Callable[[], float],
    exchange: Exchange,
) -> Answer:
    why = _check(question)
    if _anywhere(why is not None, exchange):
        return _reference(question, why or "it failed on another process")
    found = None if again else kept.find(question.key)
    if not _same_everywhere(found, exchange):
        found = None
    names = (question.reference.name, question.other.name)
    if found is None or found.choice not in names:
        return _measured(question, kept, clock, exchange)
    return Answer(choice=found.choice, reason=_told(question, found))


def _check(question: Question) -> str | None:
    """Why the other way is not to be trusted, if it is not."""
    try:
        wanted = question.reference.run()
        first, second = question.other.run(), question.other.run()
    except Exception as error:  # whatever a kernel does
        return f"it failed: {_line(error)}"
    why = question.difference(first, wanted)
    if why is not None:
        return f"its results are wrong: {why}"
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    if not all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs):
        return "it computed other bits the second time"
    return None


def _measured(
    question: Question, kept: KeptChoices, clock: Callable[[], float], exchange: Exchange
) -> Answer:
    ways = (question.reference, question.other)
    try:
        taken = _times(ways, clock)
        why = None
    except Exception as error:
        taken, why = [[float("inf")]] * 2, f"it failed: {_line(error)}"
    if _anywhere(why is not None, exchange):
        return _reference(question, why or "it failed on another process")
    mine = np.array([number for times in taken for number in (_median(times), _spread(times))])
    slowest = exchange(mine).max(axis=0)  # a step waits for the slowest process
    (base, base_spread), (time_, spread) = slowest.reshape(2, 2).tolist()
    if max(base_spread, spread) > NOISE:
        far = max(base_spread, spread)
        return _reference(question, f"times were too noisy to tell (quartiles {far:.0%} apart)")
    is_faster = time_ <= MARGIN * base
    found = Kept(
        choice=ways[is_faster].name,
        seconds=base,
        other_seconds=time_,
        date=datetime.datetime.now().strftime("%Y-%m-%d"),
    )
    kept.keep(question.key, found)
    return Answer(choice=found.choice, reason=_told(question, found))


def _times(ways: Sequence[Way], clock: Callable[[], float]) -> list[list[float]]:
    """Seconds of each way, in turns; the first round is thrown away."""
    taken: list[list[float]] = [[] for _ in ways]
    start = clock()
    for number in range(1 + ROUNDS):
        if number > 3 and clock() - start > SECONDS:
            break
        for way, times in zip(ways, taken, strict=True):
            before = clock()
            jax.block_until_ready((way.repeat or way.run)())
            times.append(clock() - before)
    return [times[1:] for times in taken]


def _median(times: Sequence[float]) -> float:
    return statistics.median(times)


def _spread(times: Sequence[float]) -> float:
    """Distance of the quartiles, relative to the median."""
    if len(times) < 2:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4)
    return (high - low) / statistics.median(times)


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


def _anywhere(flag: bool, exchange: Exchange) -> bool:
    """Whether something is so on any process."""
    return bool(exchange(np.array([float(flag)])).any())


def _same_everywhere(found: Kept | None, exchange: Exchange) -> bool:
    """Whether every process has the same answer; some of them may have another cache."""
    text = "" if found is None else repr(found)
    numbers = exchange(np.array([float(zlib.crc32(text.encode()))]))
    return bool((numbers == numbers[0]).all())


def _exchange(values: np.ndarray) -> np.ndarray:
    if jax.process_count() == 1:
        return values[None]
    # Sent as bytes: JAX would round float64 to float32.
    rows = multihost_utils.process_allgather(np.frombuffer(values.tobytes(), np.uint8))
    return np.asarray(rows).reshape(jax.process_count(), -1).copy().view(np.float64)
