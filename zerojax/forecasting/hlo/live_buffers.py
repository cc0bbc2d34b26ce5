"""Finds the values that are in device memory at the moment of peak memory, from the compiler's
buffer assignment.

The compiler writes reports about one program with the options `xla_dump_to` and
`xla_dump_hlo_as_text`. Arguments, outputs and one block of temporaries ("preallocated-temp") exist
for the whole step. The content of the block changes from instruction to instruction: each value has
a position in it (`*-buffer-assignment.txt`) and a lifetime (`*-live-range.txt`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from zerojax.config.checks import warn_user
from zerojax.config.late_dataclasses import dataclass
from zerojax.forecasting.hlo.program import Instruction, Program, read_program

_ACCOUNT = "*_gpu_after_optimizations"
_HOST_COLOR = 5  # XLA's memory space of host memory: Layout::kHostMemorySpace


@dataclass(frozen=True, kw_only=True)
class LiveValue:
    """One value in device memory.

    Attributes:
      name, index: name of the instruction that computes the value, and the element of its result;
        () is the whole result.
      bytes: number of bytes of this value alone. Bytes that two values share, as in an update in
        place, count for the later value.
      shape: type as XLA prints it, such as `bf16[8,512]{1,0}`.
      opcode, op_name: opcode of the instruction, and the name of the traced operation. The op_name
        of an argument is its path in the call, such as `state['params']['lm_head/kernel']`.
    """

    name: str
    index: tuple[int, ...]
    bytes: int
    shape: str
    opcode: str
    op_name: str


@dataclass(frozen=True, kw_only=True)
class LiveAtPeak:
    """Memory of one device at the moment when the block of temporaries is fullest, in bytes.

    Attributes:
      moment: position in the schedule. It may differ from the moment of the compiler's peak, which
        counts arguments only until they are last read, although they stay allocated.
      values: values in the block of temporaries at that moment, largest first.
      arguments: arguments of the program, in the order of its parameters. Donated arguments later
        hold outputs.
      outputs: bytes of outputs that do not reuse a donated argument, and of the tables of pointers
        to outputs.
      temporary: size of the block of temporaries in bytes.
      constants: bytes of the program's literals, which have their own memory and are not in `peak`.
      program: the optimized program from the compiler's reports, with the names that the values
        have. `compiled.as_text()` may use other names.
    """

    moment: int
    values: tuple[LiveValue, ...]
    arguments: tuple[LiveValue, ...]
    outputs: int
    temporary: int
    constants: int
    program: Program

    @property
    def fragmentation(self) -> int:
        """Number of bytes in the block of temporaries that no value uses at that moment."""
        return self.temporary - sum(value.bytes for value in self.values)

    @property
    def peak(self) -> int:
        """Peak memory in bytes, equal to arguments + outputs - aliased + temporary of
        `compiled.memory_analysis()`."""
        return sum(value.bytes for value in self.arguments) + self.outputs + self.temporary


def read_live(folder: Path) -> LiveAtPeak | None:
    """Finds which values are in device memory at a program's peak, from the compiler's reports.

    Args:
      folder: folder with the reports of one program.

    Returns:
      The values; None if there are no such reports (XLA's CPU compiler writes others). If the
      format of the reports is unknown, warns with the line and returns None.
    """
    found = [
        sorted(folder.glob(f"{_ACCOUNT}{end}.txt"))
        for end in ("-buffer-assignment", "-live-range", "")
    ]
    if not all(found):
        return None
    try:
        most = max(map(len, found))
        # A folder of several programs would mix their reports; a wrong page is worse than none.
        if most > 1:
            raise _NotUnderstood(f"{folder} has the reports of {most} programs instead of one")
        assignment, ranges, text = (paths[0].read_text() for paths in found)
        return live_at_peak(assignment, ranges, read_program(text))
    except ValueError as problem:  # also of `read_program`
        warn_user(f"memory cannot be reported by role; everything else is unaffected: {problem}")
        return None


class _NotUnderstood(ValueError):
    """Error for a memory report of the compiler in an unknown format."""


@dataclass(frozen=True)
class _Placed:
    name: str
    index: tuple[int, ...]
    allocation: int
    offset: int
    size: int
    shape: str


@dataclass(frozen=True)
class _Allocation:
    number: int
    size: int
    kind: str
    parameter: int | None
    values: list[_Placed]


@dataclass(frozen=True)
class _Span:
    """Lifetime of a value in the block of temporaries: from instruction `start` to instruction
    `end`."""

    value: _Placed
    start: int
    end: int

    @property
    def place(self) -> tuple[int, int, int]:
        """Memory of the value: (allocation, first byte, byte after the last)."""
        first = self.value.offset
        return self.value.allocation, first, first + self.value.size


def live_at_peak(assignment: str, ranges: str, program: Program) -> LiveAtPeak:
    """Finds which values are in device memory at a program's peak, from the texts of the compiler's
    reports.

    Args:
      assignment, ranges: texts of the buffer assignment and of the live ranges.
      program: the program that the reports describe.
    """
    # Allocations of host memory are in the same report, but take no memory of the device.
    allocations = [a for a in _read_allocations(assignment) if a.kind != "host"]
    lives = _read_ranges(ranges)
    blocks = [a for a in allocations if a.kind == "temporary"]
    spans = []
    for value in (value for block in blocks for value in block.values):
        key = value.name, value.index
        if key not in lives:
            raise _NotUnderstood(
                f"XLA's live ranges do not contain {value.name}{set(value.index) or '{}'}"
            )
        spans.append(_Span(value, *lives[key]))
    moment, owned = _fullest(spans)

    def describe(value: _Placed, count: int) -> LiveValue:
        instruction = _find(program, value.name)
        return LiveValue(
            name=value.name,
            index=value.index,
            bytes=count,
            shape=value.shape,
            opcode=instruction.opcode,
            op_name=instruction.op_name,
        )

    values = [describe(span.value, count) for span, count in owned if count]
    parameters = [a for a in allocations if a.kind == "argument"]
    # An argument that is a tuple has several allocations with the same parameter number.
    parameters.sort(key=lambda a: (a.parameter, a.number))
    return LiveAtPeak(
        moment=moment,
        values=tuple(sorted(values, key=lambda value: (-value.bytes, value.name, value.index))),
        arguments=tuple(describe(_argument(a, program), a.size) for a in parameters),
        outputs=_total(allocations, "output"),
        temporary=_total(blocks, "temporary"),
        constants=_total(allocations, "constant"),
        program=program,
    )


def _argument(allocation: _Allocation, program: Program) -> _Placed:
    # Outputs that reuse the memory of a donated argument are listed in its allocation as well.
    for value in allocation.values:
        if _find(program, value.name).opcode == "parameter":
            return value
    raise _NotUnderstood(
        f"allocation {allocation.number} of XLA's buffer assignment contains no parameter"
    )


def _find(program: Program, name: str) -> Instruction:
    try:
        return program.find(name)[1]
    except KeyError as error:
        raise _NotUnderstood(
            f"{name} has memory in XLA's buffer assignment but is not in the program"
        ) from error


def _total(allocations: Iterable[_Allocation], kind: str) -> int:
    return sum(allocation.size for allocation in allocations if allocation.kind == kind)


# --- the two reports ------------------------------------------------------------------------------

_HEADER = re.compile(r"allocation (\d+): size (\d+)(.*):$")
_VALUE = re.compile(
    r" value: <\d+ ([^ {]+)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)"
)
_RANGE = re.compile(r"([^ {]+)\{([\d,]*)\}:(\d+)-(\d+)$")
_KINDS = {
    "preallocated-temp": "temporary",
    "thread-local": "thread-local",
    "constant": "constant",
    "parameter": "argument",
    "maybe-live-out": "output",
}


def _read_allocations(text: str) -> list[_Allocation]:
    allocations: list[_Allocation] = []
    for line in text.splitlines():
        if line.startswith("allocation "):
            allocations.append(_read_header(line))
        elif line.startswith(" value: "):
            match = _VALUE.match(line)
            if match is None or not allocations:
                raise _NotUnderstood(
                    "XLA's buffer assignment has a line in a format that this zerojax does not "
                    f"know, probably of another JAX version: {line[:120]!r}"
                )
            name, index, size, offset, shape = match.groups()
            place = allocations[-1].number, int(offset), int(size)
            allocations[-1].values.append(_Placed(name, _as_index(index), *place, shape))
        elif not line.startswith(" ") and allocations:
            break  # the report that follows the list
    if not any(allocation.kind == "temporary" for allocation in allocations):
        raise _NotUnderstood("XLA's buffer assignment has no preallocated-temp")
    return allocations


def _read_header(line: str) -> _Allocation:
    match = _HEADER.match(line)
    if match is None:
        raise _NotUnderstood(
            "XLA's buffer assignment has a line in a format that this zerojax does not know, "
            f"probably of another JAX version: {line[:120]!r}"
        )
    number, size, rest = match.groups()
    # What stands between bars is a shape, whose commas would be taken for separators.
    rest = re.sub(r"\|.*\|(?: at ShapeIndex \{[\d,]*\})?", "", rest)
    words = [word.split() for word in rest.split(",") if word.strip()]
    named = {word[0]: word[-1] for word in words}
    # A word that is not known may change what the bytes are, so the report is refused as a whole.
    unknown = named.keys() - _KINDS.keys() - {"page", "color", "shape", "output"}
    kinds = [_KINDS[name] for name in _KINDS if name in named]
    if unknown or not kinds:
        raise _NotUnderstood(
            f"allocation {number} of XLA's buffer assignment is of an unknown kind: {line[:120]!r}"
        )
    return _Allocation(
        number=int(number),
        size=int(size),
        # Host memory is marked by its color only; its other words are those of device memory.
        kind="host" if int(named.get("color", 0)) == _HOST_COLOR else kinds[0],
        parameter=int(named["parameter"]) if "parameter" in named else None,
        values=[],
    )


def _read_ranges(text: str) -> dict[tuple[str, tuple[int, ...]], tuple[int, int]]:
    """Parses the live ranges: {(name, index) of a value: (first, last) instruction at which it
    occupies memory}."""
    _, found, rest = text.partition("BufferLiveRange:\n")
    if not found:
        raise _NotUnderstood("XLA's live ranges have no part called BufferLiveRange")
    ranges = {}
    for line in rest.splitlines():
        if not line.startswith("    "):
            break
        match = _RANGE.match(line.strip())
        if match is None:
            raise _NotUnderstood(
                f"XLA's live ranges have a line in an unknown format: {line.strip()[:120]!r}"
            )
        name, index, start, end = match.groups()
        ranges[name, _as_index(index)] = int(start), int(end)
    return ranges


def _as_index(text: str | None) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",")) if text else ()


# --- when the block is fullest --------------------------------------------------------------------


def _fullest(spans: Sequence[_Span]) -> tuple[int, list[tuple[_Span, int]]]:
    """Finds the moment at which the most bytes of the block are in use.

    The sum of sizes is an upper bound of the bytes in use, so only few moments must be examined
    exactly.

    Returns:
      (first instruction of that moment, values live at it with the bytes of each).
    """
    sums: dict[int, int] = defaultdict(int)
    for span in spans:
        sums[span.start] += span.value.size
        # The last instruction belongs to the lifetime, so the bytes are free after it.
        sums[span.end + 1] -= span.value.size
    bounds, running = [], 0
    for moment in sorted(sums):
        running += sums[moment]
        bounds.append((-running, moment))
    most, best, owned = -1, 0, []
    # Moments are in the order of their upper bounds: the first bound below the best ends the
    # search.
    for bound, moment in sorted(bounds):
        if -bound < most:
            break
        here = _own_bytes([span for span in spans if span.start <= moment <= span.end])
        used = sum(count for _, count in here)
        # Of equally full moments the first is taken, so that a page does not depend on the order
        # of a set.
        if used > most or (used == most and moment < best):
            most, best, owned = used, moment, here
    return best, owned


def _own_bytes(spans: Sequence[_Span]) -> list[tuple[_Span, int]]:
    """Returns each of the values live at one moment with the number of its bytes that no value
    which starts later reuses; the numbers add up to the bytes in use."""
    owned, taken = [], []
    # Bytes that two values share belong to the later one, so later starts are placed first.
    for span in sorted(spans, key=lambda span: (-span.start, span.end, span.value.name)):
        block, first, end = span.place
        pieces = [(first, end)]
        for other_block, other_first, other_end in taken:
            if other_block == block and other_first < end and first < other_end:
                pieces = [
                    piece
                    for low, high in pieces
                    for piece in ((low, min(high, other_first)), (max(low, other_end), high))
                    if piece[0] < piece[1]
                ]
        owned.append((span, sum(high - low for low, high in pieces)))
        taken.append(span.place)
    return owned
