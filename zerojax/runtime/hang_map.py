"""Says which processes of a run wait, for which collective of which step, and who is missing.

It reads the notes that processes without progress leave (`standstill`). Devices wait for each other
in the collectives of a step, so the step in which some devices wait stands still until every
process has begun it. A host cannot look into a compiled program. But a process that has not begun a
step is missing in all of its collectives, so the others have come no further than the first
collective that needs it.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence

from zerojax.runtime.standstill import Note

_MAX_SPANS = 100


def describe_hang(notes: Sequence[Note], now: float) -> list[str]:
    """Returns one line for each group of processes that wait for the same, the missing ones last.

    Args:
      notes: notes of at least one process; processes without a note count as missing. A note from
        before a step that others have finished does not count, because every process took part in
        this step: its process was stopped before it could remove the note.
      now: time in seconds since 1970.
    """
    count = notes[0].num_processes
    notes = [note for note in notes if note.process < count]  # an earlier start may have had more
    ended = max(note.finished for note in notes)
    notes = [note for note in notes if note.entered >= ended]
    absent = sorted(set(range(count)) - {note.process for note in notes})
    waiting = [note for note in notes if note.entered > note.finished]
    if waiting:
        lines = list(_in_a_step(notes, waiting, absent, now))
    else:
        lines = [_activity(group, now) for group in _by(notes, lambda note: note.doing)]
        if len(lines) > 1:
            lines.append(
                "the processes do different things, and no device computes a step: one of them "
                "waits on its host, or a condition in the script differs between processes"
            )
    if absent:
        lines.append(
            f"{_named(absent)} left no note: {_they(absent, 'it is', 'they are')} stopped or "
            f"unreachable, {_they(absent, 'has', 'have')} ended, or still "
            f"{_they(absent, 'makes', 'make')} progress"
        )
    return lines


def _in_a_step(
    notes: Sequence[Note], waiting: Sequence[Note], absent: Sequence[int], now: float
) -> Iterator[str]:
    step = min(note.finished for note in waiting) + 1
    inside = [note for note in waiting if note.finished < step <= note.entered]
    numbers = {note.process for note in inside}
    outside = [note for note in notes if note.process not in numbers]
    missing = {*absent, *(note.process for note in outside)}
    for group in _by(inside, lambda note: (note.program, _first_meeting(note, missing))):
        program, found = group[0].program, _first_meeting(group[0], missing)
        verb = _they(group, "waits", "wait")
        line = f"{_named(_numbers(group))} {verb} in step {step} ({program})"
        if found is not None:
            what, others = found
            line += f" at or before {what}, which needs {_named(others)}"
        yield line
    programs = {note.program for note in inside}
    if len(programs) > 1:
        yield (
            f"the programs of step {step} differ between processes, so their collectives do not "
            "match: the processes took different branches, or their batches have different shapes"
        )
    elif not missing:
        yield (
            f"every process has begun step {step}: a device or the network does not answer, or "
            "the step takes longer than the limit"
        )
    for group in _by(outside, lambda note: (note.doing, note.line, note.finished >= step)):
        begun = "has ended" if group[0].finished >= step else "has not begun"
        verb = begun if len(group) == 1 else begun.replace("has", "have")
        yield f"{_activity(group, now)}; {_they(group, 'it', 'they')} {verb} step {step}"


def _first_meeting(note: Note, missing: set[int]) -> tuple[str, tuple[int, ...]] | None:
    """Returns (collective, the missing processes that it needs), the first one that needs any."""
    for meeting in note.meetings:
        needed = tuple(sorted(missing & set(meeting.processes)))
        if needed:
            return meeting.what, needed
    return None


def _activity(group: Sequence[Note], now: float) -> str:
    first = group[0]
    seconds = max(now - max(note.since for note in group), 0.0)
    verb = _they(group, "is", "are")
    place = f", at {first.line}" if first.line else ""
    host = f" on {first.host}, pid {first.pid}," if len(group) == 1 else ""
    after = f" after step {first.finished}" if first.finished else ""
    return (
        f"{_named(_numbers(group))}{host} {verb} {first.doing}, without progress for "
        f"{seconds:.0f} s{after}{place}"
    )


def _by(notes: Iterable[Note], key: Callable[[Note], object]) -> list[list[Note]]:
    groups = collections.defaultdict(list)
    for note in notes:
        groups[key(note)].append(note)
    return list(groups.values())


def _numbers(notes: Iterable[Note]) -> list[int]:
    return sorted(note.process for note in notes)


def _they(group: Sequence[object], one: str, several: str) -> str:
    return one if len(group) == 1 else several


def _named(numbers: Sequence[int]) -> str:
    """Returns "process 3", or "processes 0, 2-5" for several."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in spans[:_MAX_SPANS]]
    if len(spans) > _MAX_SPANS:
        texts.append(f"and others up to {numbers[-1]}")
    return f"process{'es' * (len(numbers) > 1)} {', '.join(texts)}"
